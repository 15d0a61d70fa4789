"""The store tier: blocks in a Valkey or Redis server, shared by all machines that have the same model.

Each of the tier's three threads has a connection.

    probe, lookup -> asking thread ── answers ──> view <── what was loaded or stored ── load and store ── storing thread
                        └ EXISTS; a try when the breaker is half open                       └ loading thread

The server expires (`PX`) and evicts blocks, and others write them, so the view's answers count only for some seconds.
Whatever goes wrong, the block is a miss. A bad value is deleted, and a server that does not answer is left alone for 1
to 30 seconds.

A URL is `valkey://[USER[:PASSWORD]@]HOST[:PORT][/DATABASE]`; `redis://` means the same, `unix:///PATH?db=N` a socket.
`valkeys://` and `rediss://` use TLS: certificate and host name are checked, against `?ssl_ca_certs=FILE` if it is
given. `&ssl_certfile=FILE&ssl_keyfile=FILE` is the client's own certificate. Nodes of a cluster cannot be used.

A user needs these rights (ACL): `+exists +getrange +set +del +info ~fw1:*`. Without `+set` the tier only reads;
without `+info` the server's memory is not shown. KV is prompt text in another form: a user who may read it can learn
prompts. If all machines use a `mac_key_file`, a user who may write can only cause misses. Advice for the server:
`maxmemory-policy allkeys-lfu`, `save ""`, `appendonly no`.
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

from foreword.errors import ConfigError
from foreword.tiers.cipher import read_secret
from foreword.tiers.loads import Load, Loads
from foreword.tiers.rare_warning import RareWarning
from foreword.tiers.store.client import Link, Refusal, Reply, ServerGoneError, ServerRefusedError, StoreServer
from foreword.tiers.store.state import CircuitBreaker, StoreOptions, StoreState, StoreView
from foreword.tiers.store.value import HEADER_BYTES, ValueFormat, server_key
from foreword.tiers.ticket import JobThread, Outcome, Ticket
from foreword.tiers.tier import (
    KEY_BYTES,
    NAMESPACE_BYTES,
    BlockKeys,
    BlockRun,
    BoolArray,
    DoneCallback,
    TierStats,
)

logger = logging.getLogger(__name__)
AT_ONCE = 64
"""The number of blocks in one EXISTS command, which returns only a count. Usually all of them are there, or none is."""
NO_BLOCK = bytes(NAMESPACE_BYTES + 2 + KEY_BYTES)
"""A name that no block has. A question about it shows whether the server answers questions."""
PATIENCE_S = 5.0
"""Seconds that `close` waits for a thread that is in the middle of a call."""


@dataclass(frozen=True, slots=True)
class Question:
    """Asks which blocks the server has. The ticket's block `at[i]` is `names[i]`; `at` is empty if nobody waits."""

    names: list[bytes]
    ticket: Ticket
    at: list[int]


class StoreAsker:
    """Asks questions in the order in which they came. The thread that makes the tier calls `greet` first."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self.link = state.server.link()
        self.thread: JobThread[Question] = JobThread(
            "foreword-store-ask", self._ask, state.options.max_asked, self._try_again
        )
        self._pending: set[bytes] = set()
        """Blocks that were asked for without a ticket and have no answer yet."""

    def probe(self, keys: BlockKeys, *, deadline_s: float = 0.05, on_done: DoneCallback | None = None) -> Ticket:
        """See `Tier.probe`. The server is asked for blocks that the view does not know."""
        ticket, names = Ticket(len(keys), deadline_s=deadline_s, on_done=on_done), keys.names()
        if not self._state.closing.is_set() and self._state.breaker.is_closed:
            present, unknown = self._state.view.look(names)
            ticket.settle(np.flatnonzero(present), Outcome.PRESENT)
            ticket.settle(np.flatnonzero(~present & ~unknown), Outcome.MISSING)
            at = np.flatnonzero(unknown).tolist()
            if at:
                self.thread.add(Question([names[index] for index in at], ticket, at), len(at))
                return ticket
        ticket.finish(Outcome.CANCELLED if self._state.closing.is_set() else Outcome.IO_ERROR)
        return ticket

    def ask(self, names: list[bytes]) -> None:
        """Ask for blocks; `StoreView` gets the answers. Does nothing if more than `max_asked` blocks would wait."""
        names = [name for name in names if name not in self._pending]
        if names and self.thread.amount + len(names) <= self._state.options.max_asked:
            self._pending.update(names)
            ticket = Ticket(0, before_done=lambda _: self._pending.difference_update(names))
            self.thread.add(Question(names, ticket, []), len(names))

    def greet(self) -> None:
        """Check at the start whether the server answers. Raises ConfigError if it refuses this user."""
        state = self._state
        url = state.server.shown_url
        try:
            with state.session(self.link) as link:
                exist(link, [NO_BLOCK])
                state.read_memory(link)
        except ServerRefusedError as error:
            raise ConfigError(
                f"the store {url!r} refuses: {error}; check user, password and database, "
                "and give the user the rights `+exists +getrange +set +del +info ~fw1:*`"
            ) from error
        except ServerGoneError as error:
            state.breaker.trip()
            state.is_outage_told = True
            logger.warning("the store %s does not answer: %s; blocks are computed until it does", url, error)

    def _ask(self, question: Question) -> None:
        state, names = self._state, question.names
        try:
            if not state.breaker.is_closed:
                return
            with state.session(self.link) as link:
                here = exist(link, names)
                state.read_memory(link)
            state.view.note_answers(names, here, state.options.present_s, state.options.absent_s)
            at = np.array(question.at, np.int64)
            for outcome, chosen in ((Outcome.PRESENT, here), (Outcome.MISSING, ~here)):
                question.ticket.settle(at[chosen[: len(at)]], outcome)
        except ServerGoneError:
            pass
        finally:
            question.ticket.finish(Outcome.IO_ERROR)

    def _try_again(self) -> float | None:
        """Try the server again after the breaker's pause. Returns the seconds to the next try; None: none is needed."""
        state = self._state
        if state.breaker.is_closed:
            return None
        if state.breaker.may_try():
            try:
                with state.session(self.link) as link:
                    exist(link, [NO_BLOCK])  # a server that refuses questions would answer a PING
            except ServerGoneError as error:
                logger.debug("the store %s still does not answer: %s", state.server.shown_url, error)
        return None if state.breaker.is_closed else state.breaker.seconds_to_try


def exist(link: Link, names: list[bytes]) -> BoolArray:
    """Which blocks the server has, [blocks]. Raises ServerGoneError."""
    here = np.zeros(len(names), bool)
    keys = [server_key(name) for name in names]
    batches = [slice(begin, begin + AT_ONCE) for begin in range(0, len(keys), AT_ONCE)]
    link.send([("EXISTS", *keys[batch]) for batch in batches])
    counts = [link.number() for _ in batches]
    mixed: list[int] = []
    for batch, count in zip(batches, counts, strict=True):
        here[batch] = count == len(keys[batch])
        if 0 < count < len(keys[batch]):
            mixed += range(batch.start, batch.start + len(keys[batch]))
    link.send([("EXISTS", keys[index]) for index in mixed])
    for index in mixed:
        here[index] = link.number() == 1
    return here


class StoreLoader:
    """Reads blocks from the server, in the order of the calls of `load`."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self.link = state.server.link()
        self._bad_values = RareWarning(logger, "the store holds a damaged or foreign value under %s; it is deleted")
        self._undeleted = RareWarning(logger, "bad values could not be deleted from the store: %s")
        self.thread: JobThread[Load] = JobThread("foreword-store-load", self._load, state.options.max_queued_load_bytes)
        self.loads = Loads(self.thread, state, self._forget, lambda: state.breaker.is_closed or state.closing.is_set())

    def _forget(self, load: Load, lost: BoolArray) -> None:
        self._state.view.note_absent(load.keys.select(lost).names(), self._state.options.absent_s)

    def _load(self, load: Load) -> None:
        if load.ticket.done or not self._state.breaker.is_closed:
            load.ticket.finish(Outcome.IO_ERROR)
            return
        outcome, began, bad = Outcome.CANCELLED, time.monotonic(), list[bytes]()
        try:
            with self._state.session(self.link, deadline=load.deadline) as link:
                self._receive(load, link, bad)
        except ServerGoneError as error:
            outcome = Outcome.TIMEOUT if error.is_deadline else Outcome.IO_ERROR
        loaded = self.loads.measure(load, began)
        self._state.view.note_present(load.keys.select(loaded).names(), self._state.options.present_s)
        self._delete(bad)
        self.loads.finish(load, outcome, began)

    def _receive(self, load: Load, link: Link, bad: list[bytes]) -> None:
        """Ask for blocks, at most `window_bytes` ahead, and deliver them in order. `bad` gets names of bad values."""
        names, sizes = load.keys.names(), load.payload_bytes.tolist()
        count, num_asked, in_flight = len(names), 0, 0
        for index in range(count):
            if 2 * in_flight <= self._state.options.window_bytes:
                begin = num_asked
                while num_asked < count and (num_asked == index or in_flight < self._state.options.window_bytes):
                    in_flight += sizes[num_asked]
                    num_asked += 1
                # Ask for one byte more than a right value has. If that byte comes, the value is too long.
                asked = range(begin, num_asked)
                link.send([("GETRANGE", server_key(names[at]), 0, HEADER_BYTES + sizes[at]) for at in asked])
            reply = link.reply(HEADER_BYTES + sizes[index] + 1)
            in_flight -= sizes[index]
            if load.ticket.done or self._state.closing.is_set():
                return
            if self._deliver(load, index, names[index], reply) == Outcome.CORRUPT:
                bad.append(names[index])

    def _deliver(self, load: Load, index: int, name: bytes, reply: Reply) -> Outcome:
        """Verify a block's value and hand its payload over. Returns what was found out about the value."""
        ticket = load.ticket
        if isinstance(reply, memoryview) and len(reply):
            outcome = self._state.format.verify(name, int(load.payload_bytes[index]), reply)
        elif isinstance(reply, Refusal):
            outcome = Outcome.CORRUPT if reply.code == "WRONGTYPE" else Outcome.IO_ERROR
        else:
            ticket.settle(index, Outcome.MISSING)
            return Outcome.MISSING
        if outcome == Outcome.DONE:
            assert isinstance(reply, memoryview)
            payload = reply[HEADER_BYTES:].toreadonly()
            if ticket.transfer(index, lambda: load.sink.put(index, payload)):
                ticket.settle(index, Outcome.DONE)
            return outcome
        if outcome == Outcome.CORRUPT:
            self._bad_values.note(server_key(name))
        if outcome != Outcome.IO_ERROR:
            self._state.view.refuse([name])
        ticket.settle(index, outcome)
        return outcome

    def _delete(self, names: list[bytes]) -> None:
        if names:
            try:
                with self._state.session(self.link) as link:
                    link.send([("DEL", *map(server_key, names))])
                    link.reply()
            except ServerGoneError as error:
                self._undeleted.note(error)


@dataclass(frozen=True, slots=True)
class Store:
    """A store under way."""

    names: list[bytes]
    run: BlockRun
    ticket: Ticket


class StoreWriter:
    """Writes runs of blocks to the server, in the order of the calls of `store`."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self.link = state.server.link()
        self.thread: JobThread[Store] = JobThread(
            "foreword-store-write", self._store, state.options.max_queued_store_bytes
        )

    def store(self, run: BlockRun, *, on_done: DoneCallback | None = None) -> Ticket:
        """See `Tier.store`. NO_ROOM while the breaker is open or the server refuses to write."""
        ticket = Ticket(len(run.keys), before_done=self._state.count_store, on_done=on_done)
        if self._state.breaker.is_closed or self._state.closing.is_set():
            self.thread.add(Store(run.keys.names(), run, ticket), int(run.payload_bytes.sum()))
        else:
            ticket.finish(Outcome.NO_ROOM)
        return ticket

    def _store(self, store: Store) -> None:
        state, outcome = self._state, Outcome.NO_ROOM
        try:
            if not store.ticket.done and state.breaker.is_closed and state.room.may_try():
                with state.session(self.link, longest_s=state.options.store_session_s) as link:
                    self._write(store, self._absent(store, link), link)
        except ServerGoneError:
            outcome = Outcome.CANCELLED if state.closing.is_set() else Outcome.IO_ERROR
        store.ticket.finish(outcome)

    def _absent(self, store: Store, link: Link) -> list[int]:
        """Return the indices of the blocks to write; the other blocks become PRESENT."""
        view, names = self._state.view, store.names
        is_present, _ = view.look(names)
        ask = np.flatnonzero(~is_present & ~view.is_refused(names)).tolist()
        replies = exist(link, [names[index] for index in ask])
        view.note_present(
            [names[index] for index, here in zip(ask, replies, strict=True) if here], self._present_s(store)
        )
        is_present[ask] = replies
        is_present |= store.run.repeats()
        store.ticket.settle(np.flatnonzero(is_present), Outcome.PRESENT)
        return np.flatnonzero(~is_present).tolist()

    def _write(self, store: Store, indices: list[int], link: Link) -> None:
        run, ticket = store.run, store.ticket
        ttl_ms = max(1, math.ceil(1000 * (self._state.options.ttl_s if run.ttl_s is None else run.ttl_s)))
        longest = max((int(run.payload_bytes[index]) for index in indices), default=0)
        staging = memoryview(bytearray(HEADER_BYTES + longest))
        sent: list[int] = []
        for index in indices:
            value = staging[: HEADER_BYTES + int(run.payload_bytes[index])]
            payload = value[HEADER_BYTES:]
            if ticket.transfer(index, lambda index=index, payload=payload: run.source.take(index, payload)):  # type: ignore[misc]
                self._state.format.complete(store.names[index], int(run.flags[index]), value)
                link.send([("SET", server_key(store.names[index]), value, "PX", ttl_ms)])
                sent.append(index)
            if int(run.payload_bytes[sent].sum()) >= self._state.options.window_bytes:
                self._settle_sent(store, sent, link)
            if ticket.done or self._state.room.state == "open":
                break
        self._settle_sent(store, sent, link)

    def _settle_sent(self, store: Store, sent: list[int], link: Link) -> None:
        """Await the replies for blocks that were sent, and empty the list."""
        state, stored = self._state, []
        for index in sent:
            reply = link.reply()
            if reply == "OK":
                stored.append(index)
                continue
            refusal = reply if isinstance(reply, Refusal) else Refusal(f"ERR {reply!r}")
            if state.room.failed():  # no stores for a while
                state.refused.note(state.server.shown_url, refusal)
            store.ticket.settle(index, Outcome.NO_ROOM if refusal.code == "OOM" else Outcome.IO_ERROR)
        if len(stored) == len(sent) and stored:
            state.room.succeeded()
        state.view.note_stored([store.names[index] for index in stored], self._present_s(store))
        num_bytes = int(store.run.payload_bytes[stored].sum()) + HEADER_BYTES * len(stored)
        state.count(num_written=len(stored), written_bytes=num_bytes)
        store.ticket.settle(stored, Outcome.DONE)
        sent.clear()

    def _present_s(self, store: Store) -> float:
        ttl_s = self._state.options.ttl_s if store.run.ttl_s is None else store.run.ttl_s
        return min(self._state.options.present_s, ttl_s)


class ValkeyTier(AbstractContextManager["ValkeyTier"]):
    """Blocks in a Valkey or Redis server; a `Tier`.

    Raises ConfigError for URLs, options and key files that cannot be used, and if the server refuses the user. A server
    that does not answer is no error: the tier finds nothing until the server answers. Close the tier, or use it as a
    context manager.
    """

    name = "store"

    def __init__(self, url: str, options: StoreOptions = StoreOptions()) -> None:  # noqa: B008 - frozen
        options.check()
        server = StoreServer(url, options.io_timeout_s)
        secret = None if options.mac_key_file is None else read_secret(options.mac_key_file)
        pauses = options.first_pause_s, options.longest_pause_s
        breaker, room = CircuitBreaker(options.max_failures, *pauses), CircuitBreaker(1, *pauses)
        state = StoreState(options, server, ValueFormat(secret), StoreView(options.max_known), breaker, room)
        self._state = state
        self._asker, self._loader, self._writer = StoreAsker(state), StoreLoader(state), StoreWriter(state)
        self.probe, self.store = self._asker.probe, self._writer.store
        self.load, self.estimate_load_s = self._loader.loads.load, self._loader.loads.estimate_s
        """See `Tier`."""
        if secret is None and not server.is_local:
            logger.warning(
                "values in the store %s are not signed: whoever else can write there can change answers; give all "
                "machines that use it the same --cache-store-key-file",
                server.shown_url,
            )
        self._asker.greet()
        state.on_trip = self._asker.thread.wake
        self._asker.thread.start()
        self._loader.thread.start()
        self._writer.thread.start()

    def __exit__(self, *exc_info: object) -> None:
        self.close(PATIENCE_S)

    def lookup(self, keys: BlockKeys) -> BoolArray:
        """Which blocks are known to be here, [blocks]; unknown blocks are asked for in the background.

        See `Tier.lookup`. Nothing is found while the breaker is open.
        """
        names = keys.names()
        present, unknown = self._state.view.look(names)
        if self._state.closing.is_set() or not self._state.breaker.is_closed:
            present[:] = False
        else:
            self._asker.ask([names[at] for at in np.flatnonzero(unknown)])
        self._state.count(num_looked_up=len(keys), num_found=int(np.count_nonzero(present)))
        return present

    def forget(self, keys: BlockKeys) -> None:
        """Stop `lookup` from finding these blocks until this process stores them. Other processes still find them."""
        self._state.view.refuse(keys.names())

    def close(self, flush_s: float) -> None:
        """Work on queued stores for at most `flush_s` seconds and cancel the rest; see `Tier.close`."""
        if self._state.closing.is_set():
            return
        self._state.closing.set()
        parts: dict[StoreAsker | StoreLoader | StoreWriter, float]
        parts = {self._asker: 0.0, self._loader: 0.0, self._writer: flush_s}
        for part, seconds in parts.items():
            part.thread.stop_after(seconds)
        for part, seconds in parts.items():
            part.thread.join(seconds + self._state.options.io_timeout_s)
            part.link.close()  # a thread that still waits for the server goes on at once
            part.thread.join(PATIENCE_S)

    def stats(self) -> TierStats:
        """Return the counts so far; see `Tier.stats`.

        `shared_bytes` and `budget_bytes` are the server's memory and its limit as of the last question. `stored_bytes`
        are the bytes written, at most `shared_bytes`: the server does not say which of them are left.
        """
        stats = self._state.copy_of_stats()
        stats.num_blocks = 0 if self._state.closing.is_set() else len(self._state.view)
        stats.shared_bytes = stats.shared_bytes or stats.written_bytes
        stats.budget_bytes = max(stats.budget_bytes, stats.shared_bytes)
        stats.stored_bytes = min(stats.written_bytes, stats.shared_bytes)
        stats.load_bytes_per_s = self._loader.loads.rate.bytes_per_s
        stats.queued_load_bytes, stats.queued_store_bytes = self._loader.thread.amount, self._writer.thread.amount
        stats.breaker, stats.num_breaker_trips = self._state.breaker.state, self._state.breaker.num_trips
        return stats

    def check_integrity(self) -> None:
        assert min(self._asker.thread.amount, self._loader.thread.amount, self._writer.thread.amount) >= 0
        assert len(self._state.view) <= self._state.options.max_known
