"""Publisher: sends an engine's cache events over ZeroMQ, and answers requests for replays and snapshots.

The two sides share a `Feed`:

    engine's thread                           publisher's thread, the only one that touches sockets
    note(event) ── append, ring the bell ──>  take a batch, number it, publish it, keep it for replays
                ── the cache's blocks ────>   copy them between two events, answer a snapshot piece by piece

The engine never waits: if the publisher is too slow, the feed drops events, and the publisher then leaves out a
sequence number. So every consumer sees the gap.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
import zmq

from foreword.cache import (
    AllBlocksCleared,
    BlockHash,
    BlockStored,
    ChunkedLocalSpec,
    GroupSpec,
    KVCacheEvent,
    MambaSpec,
    SinkFullSpec,
    SlidingWindowSpec,
)
from foreword.cache.account.events import HeldBlocks, apply_event
from foreword.config.engine import EventsConfig
from foreword.errors import ConfigError
from foreword.events.wire import (
    REPLAY_END,
    SNAPSHOT_REQUEST,
    UNAVAILABLE,
    Format,
    GroupKind,
    WireError,
    decode_replay_request,
    encode_replay,
    encode_seq,
)

logger = logging.getLogger(__name__)

MAX_WAITING_BLOCKS = 100_000
"""The most blocks in events that wait to be published. Beyond that, the feed drops events."""
MAX_KEPT_BATCHES = 10_000
"""The most batches that are kept for replays."""
MAX_KEPT_BYTES = 256 * 2**20
"""The most bytes of the batches that are kept for replays."""
MAX_UNSENT = 100_000
"""The most messages that wait for one slow consumer. ZeroMQ drops later messages, and the consumer sees the gap."""
SNAPSHOT_BLOCKS = 1024
"""Blocks in one batch of a snapshot. Other messages are handled between two batches."""
HEARTBEAT_S = 1.0
LINGER_MS = 200
SPARE_READS = 100
"""The most attempts to copy the cache's blocks while events come in."""


class Feed:
    """Events on their way to the publisher's thread, and the blocks that the cache holds after them.

    Only the engine's thread calls `note`. The other methods are for the publisher's thread.
    """

    def __init__(self, max_blocks: int, *, keeps_blocks: bool) -> None:
        """`keeps_blocks`: whether there will be snapshots."""
        self._max_blocks = max_blocks
        self._events: deque[tuple[int, KVCacheEvent]] = deque()
        self._next_number = 0
        """The number of the next event, counting dropped events. The number is raised after the event is appended."""
        self._num_in = self._num_out = 0
        """Numbers of blocks that were put in and taken out. Each number is written by one thread only."""
        self._num_taken = 0
        """The number of events that were taken, or are known to be dropped."""
        self._groups: dict[int, HeldBlocks] | None = {} if keeps_blocks else None
        self._version = 0
        """Odd while the engine's thread changes the events or the blocks."""
        self._has_rung = False
        self.bell, self._rope = socket.socketpair()
        """The bell is a socket that becomes readable after the first event since the last `hush`."""
        self.bell.setblocking(False)
        self._rope.setblocking(False)

    def note(self, event: KVCacheEvent) -> None:
        """Take an event, without ever waiting. Only the engine's thread calls this."""
        self._version += 1
        if self._groups is not None:
            apply_event(self._groups, event)
        size = 1 if isinstance(event, AllBlocksCleared) else len(event.block_hashes)
        if self._num_in - self._num_out + size <= self._max_blocks:
            self._events.append((self._next_number, event))
            self._num_in += size
        self._next_number += 1
        self._version += 1
        self.ring()

    def ring(self) -> None:
        """Wake the publisher's thread; any thread may call this."""
        if not self._has_rung:
            self._has_rung = True
            with suppress(OSError):  # the publisher is closed
                self._rope.send(b"\0")

    def hush(self) -> None:
        """Empty the bell, so that the next event rings it again. Call this before `take`."""
        with suppress(BlockingIOError):
            self.bell.recv(64)
        self._has_rung = False

    def take(self, end: int | None = None) -> Iterator[list[KVCacheEvent] | None]:
        """Yield all waiting events before number `end`, as lists without gaps, and None for each gap."""
        end = self._next_number if end is None else end  # all events before it were appended, or dropped
        run: list[KVCacheEvent] = []
        while self._events and self._events[0][0] < end:
            number, event = self._events.popleft()
            self._num_out += 1 if isinstance(event, AllBlocksCleared) else len(event.block_hashes)
            if number > self._num_taken:
                if run:
                    yield run
                yield None
                run = []
            run.append(event)
            self._num_taken = number + 1
        if run:
            yield run
        if self._num_taken < end:
            self._num_taken = end
            yield None

    def read(self) -> tuple[int, dict[int, HeldBlocks]] | None:
        """Copy the cache's blocks, by group. Returns the number of the first event after the copy, and the copy.

        The engine's thread goes on meanwhile. If the cache changed during a copy, the copy is made again. None: no copy
        succeeded.
        """
        assert self._groups is not None
        for _ in range(SPARE_READS):
            version, number = self._version, self._next_number
            copies = {group: held.copy() for group, held in self._groups.copy().items()}
            if version == self._version and not version % 2:
                return number, copies
            time.sleep(0.001)
        return None

    def close(self) -> None:
        """Close the sockets of the bell. Later events are counted, but do not wake the publisher."""
        self.bell.close()
        self._rope.close()


def chains(held: HeldBlocks, group: int) -> Iterator[BlockStored]:
    """Yield events that store these blocks, parents before children; one event for each run of consecutive blocks.

    All blocks of an event have the same adapter, or no adapter.
    """
    done: set[BlockHash] = set()
    for last in reversed(held):  # the newest first, because its chain is the longest
        run: list[BlockHash] = []
        key: BlockHash | None = last
        while key is not None and key in held and key not in done:
            done.add(key)
            run.append(key)
            key = held[key].parent
        if not run:
            continue
        run.reverse()
        for lora_name, group_of_keys in groupby(run, lambda key: held[key].lora_name):
            keys = tuple(group_of_keys)
            blocks = [held[key] for key in keys]
            yield BlockStored(
                keys,
                blocks[0].parent,
                tuple(np.frombuffer(b"".join(block.tokens for block in blocks), np.int32).tolist()),
                blocks[0].block_size,
                lora_name,
                tuple(block.extra_keys for block in blocks),
                group_idx=group,
            )


def group_kinds(specs: Sequence[GroupSpec]) -> tuple[GroupKind, ...]:
    """The kinds of these groups, as events give them; empty for a single group that attends to everything."""
    kinds = tuple(map(_kind, specs))
    return () if kinds == (GroupKind("full_attention"),) else kinds


def _kind(spec: GroupSpec) -> GroupKind:
    match spec:
        case SlidingWindowSpec(window=window):
            return GroupKind("sliding_window", window)
        case ChunkedLocalSpec():
            return GroupKind("chunked_local_attention")
        case MambaSpec():
            return GroupKind("mamba")
        case SinkFullSpec():
            return GroupKind("sink_full_attention")
    return GroupKind("full_attention")


class _Snapshot(NamedTuple):
    """A snapshot that is being encoded."""

    frames: list[bytes]
    events: Iterator[BlockStored]


class Publisher:
    """Publishes the events that `note` gets, until `close`. `addresses` have the ports that were chosen."""

    def __init__(self, config: EventsConfig) -> None:
        """Raises ConfigError for an address that cannot be used."""
        assert config.kv_events is not None
        self.config = config
        self.publisher_id = os.urandom(16)
        self._format = Format(config.kv_events_encoding, config.kv_events_hashes)
        self._topic = config.kv_events_topic.encode()
        self._has_snapshots = config.kv_events_snapshot is not None
        self._feed = Feed(MAX_WAITING_BLOCKS, keeps_blocks=self._has_snapshots)
        self.note = self._feed.note
        """Gives an event to the publisher. Only the engine's thread may call it. It never waits."""
        self._next_seq = 0
        self._replays: deque[tuple[int, bytes]] = deque()
        """Numbers and payloads of the newest batches."""
        self._replay_bytes = 0
        self._snapshot: _Snapshot | None = None
        self._is_closing = False
        ready: Future[dict[str, str]] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="foreword-kv-events", daemon=True)
        self._thread.start()
        self.addresses = ready.result()
        """For each option that names an address, the address that is used."""
        for name, address in self.addresses.items():
            listens = name != "kv_events" or binds(config.kv_events)
            how = "listening at" if listens else "calling a consumer that listens at"
            logger.info("%s: %s %s", name, how, address)

    def describe(self, groups: Sequence[GroupSpec]) -> None:
        """Set the groups of the model's layers. Call this before the first event."""
        self._format = replace(self._format, groups=group_kinds(groups))

    def close(self) -> None:
        """Publish the waiting events, and end. May be called twice."""
        self._is_closing = True
        self._feed.ring()
        if self._thread.is_alive():
            self._thread.join()

    # ---------------------------------------------------------------- its thread

    def _run(self, ready: Future[dict[str, str]]) -> None:
        with zmq.Context() as context:
            try:
                self._open(context, ready)
                while not self._is_closing:
                    self._turn()
                self._publish_waiting()
            except Exception as error:
                if not ready.done():
                    ready.set_exception(error)
                else:
                    logger.exception("the publisher of cache events has ended; the engine goes on")
            finally:
                context.destroy(linger=LINGER_MS)
                self._feed.close()

    def _open(self, context: zmq.Context[zmq.Socket[bytes]], ready: Future[dict[str, str]]) -> None:
        config, addresses = self.config, {}
        self._poller = zmq.Poller()
        self._poller.register(self._feed.bell, zmq.POLLIN)
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        kinds = {"kv_events": zmq.PUB, "kv_events_replay": zmq.ROUTER, "kv_events_snapshot": zmq.REP}
        for name, kind in kinds.items():
            address = getattr(config, name)
            if address is None:
                continue
            server = self._sockets[name] = context.socket(kind)
            server.ipv6 = "[" in address
            server.sndhwm = 2 * (MAX_KEPT_BATCHES + 1) if kind == zmq.ROUTER else MAX_UNSENT
            try:
                if kind != zmq.PUB or binds(address):
                    server.bind(address)
                else:
                    server.connect(address)
            except zmq.ZMQError as error:
                raise ConfigError(
                    f"{name}={address!r} cannot be used: {error.strerror}; give a free port, or 0 for any"
                ) from error
            addresses[name] = str(server.getsockopt_string(zmq.LAST_ENDPOINT))
            if kind != zmq.PUB:
                self._poller.register(server, zmq.POLLIN)
        self._last_sent = time.monotonic()
        ready.set_result(addresses)

    def _turn(self) -> None:
        """Wait until there is something to do, and do it."""
        ready = dict(self._poller.poll(0 if self._snapshot is not None else round(1000 * HEARTBEAT_S)))
        self._feed.hush()
        self._publish_waiting()
        replay, snapshot = self._sockets.get("kv_events_replay"), self._sockets.get("kv_events_snapshot")
        if replay is not None and replay in ready:
            self._answer_replay(replay)
        if snapshot is not None and self._snapshot is not None:
            self._go_on(snapshot, self._snapshot)
        elif snapshot is not None and snapshot in ready:
            self._begin_snapshot(snapshot)
        if self._has_snapshots and time.monotonic() - self._last_sent >= HEARTBEAT_S:
            self._publish([])

    def _publish_waiting(self, end: int | None = None) -> None:
        for events in self._feed.take(end):
            if events is None:
                self._next_seq += 1  # no batch gets this number, so every consumer notices the gap
            else:
                self._publish(events)

    def _publish(self, events: Sequence[KVCacheEvent]) -> None:
        publisher_id = self.publisher_id if self._has_snapshots else None
        payload = self._format.batch(events, time.time(), publisher_id)
        self._sockets["kv_events"].send_multipart((self._topic, encode_seq(self._next_seq), payload))
        if "kv_events_replay" in self._sockets:
            self._replays.append((self._next_seq, payload))
            self._replay_bytes += len(payload)
            while len(self._replays) > MAX_KEPT_BATCHES or self._replay_bytes > MAX_KEPT_BYTES:
                self._replay_bytes -= len(self._replays.popleft()[1])
        self._next_seq += 1
        self._last_sent = time.monotonic()

    def _answer_replay(self, router: zmq.Socket[bytes]) -> None:
        peer, *frames = router.recv_multipart()
        try:
            start = decode_replay_request(frames)
        except WireError as error:
            logger.warning("a replay request was ignored: %s", error)
            return
        for seq, payload in self._replays:
            if seq >= start:
                router.send_multipart([peer, *encode_replay(self._topic, seq, payload)])
        router.send_multipart([peer, b"", b"", REPLAY_END, b""])

    def _begin_snapshot(self, reply: zmq.Socket[bytes]) -> None:
        copy = self._feed.read() if reply.recv_multipart() == [SNAPSHOT_REQUEST] else None
        if copy is None:
            reply.send_multipart([encode_seq(UNAVAILABLE), self.publisher_id])
            return
        end, groups = copy
        self._publish_waiting(end)
        events = (event for group, held in groups.items() for event in chains(held, group))
        self._snapshot = _Snapshot([encode_seq(self._next_seq - 1), self.publisher_id], events)

    def _go_on(self, reply: zmq.Socket[bytes], snapshot: _Snapshot) -> None:
        """Encode the next batch of a snapshot. After the last batch, send all of them."""
        events: list[KVCacheEvent] = []
        num_blocks = 0
        for event in snapshot.events:
            events.append(event)
            num_blocks += len(event.block_hashes)
            if num_blocks >= SNAPSHOT_BLOCKS:
                break
        if events:
            snapshot.frames.append(self._format.batch(events, time.time(), self.publisher_id))
        else:
            self._snapshot = None
            reply.send_multipart(snapshot.frames)


def is_wildcard(address: str) -> bool:
    """Whether an address names no machine or no port. A socket can listen at such an address but not connect to it."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host in ("*", "0.0.0.0", "[::]", "::") or port in ("0", "*")


def binds(address: str) -> bool:
    """Whether a publisher listens at an address: a file, a wildcard, `localhost`, or this machine's address in digits.

    If it is another name or another machine's address, the publisher connects to a consumer there, as in vLLM.
    """
    if address.startswith("ipc://") or is_wildcard(address):
        return True
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]").partition("%")[0]
    if host == "localhost":
        return True
    try:
        literal = ipaddress.ip_address(host)
    except ValueError:
        return False
    return literal.is_loopback or is_here(str(literal))


def is_loopback(host: str | None) -> bool:
    """Whether a host is a name or address that every machine has for itself."""
    return host is not None and (host in ("localhost", "::1") or host.startswith("127."))


def is_here(host: str) -> bool:
    """Whether a host is this machine: a socket connected to it has the same address at both ends. Sends nothing."""
    with suppress(OSError):  # a name that cannot be resolved
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as trial:
                trial.connect(address)
                target = trial.getpeername()[0]  # for 0.0.0.0, the address that it stands for
                if target == trial.getsockname()[0] or is_loopback(target):
                    return True
    return False
