"""Subscriber: follows one publisher of cache events over ZeroMQ: foreword's, vLLM's or SGLang's.

A `Follower` knows what messages mean. Use a subscriber from one thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from weakref import WeakSet

import zmq
from zmq.utils.monitor import recv_monitor_message

from foreword.cluster.follower import Follower, Need
from foreword.errors import ConfigError
from foreword.events.mirror import Mirror, take_live, take_replay, take_snapshot
from foreword.events.publisher import is_wildcard
from foreword.events.wire import SNAPSHOT_REQUEST, encode_seq

ANSWER_S = 5.0
"""Longest time between two parts of an answer, in seconds."""
CONTACT_S = 0.5
"""Seconds within which a publisher has to accept the first connection."""
PAUSE_S = 0.1
"""Shortest time between two requests, in seconds."""
SILENCE_S = 10.0
"""A publisher sends a message each second. After this many seconds without a message it counts as silent."""
MOST_AT_ONCE = 1000
"""Messages to read from one socket before other sockets get their turn."""


class Subscriber(AbstractContextManager["Subscriber"]):
    """Receives the events of one publisher and passes them to a `Follower`. `poll` reads what has arrived; `close` ends
    the subscription.
    """

    def __init__(
        self,
        events: str,
        *,
        replay: str | None = None,
        snapshot: str | None = None,
        topic: str = "",
        follower: Follower | None = None,
        silence_s: float = SILENCE_S,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        """Addresses look like tcp://HOST:5557. `follower` None: a new one for `mirror`. `context` None: a new one.

        Raises ConfigError for an address that cannot be used.
        """
        self.mirror = Mirror()
        """The blocks that the engine holds, as its events say; empty if the caller gave a follower."""
        has = {"has_replay": replay is not None, "has_snapshot": snapshot is not None}
        self.follower = follower or Follower(self.mirror, **has)
        self._silence_s = silence_s
        self._events, self._first_poll = events, math.inf
        self._num_contacts = 0
        """The number of publishers that are connected to the stream now."""
        self._unanswered: set[str] = set()
        """Addresses whose last request got no answer."""
        self._addresses = {Need.REPLAY: replay, Need.SNAPSHOT: snapshot}
        self._context, self._owns_context = context or zmq.Context(), context is None
        self._opened: WeakSet[zmq.Socket[bytes]] = WeakSet()
        self._poller = zmq.Poller()
        self._request: zmq.Socket[bytes] | None = None
        self._question = (Need.NOTHING, 0)
        """The need of the last request, and the number of resyncs when it was sent."""
        self._heard = self._deadline = self._not_before = time.monotonic()
        try:
            self._live = self._open(zmq.SUB, events)
            self._live.subscribe(topic)
            self._poller.register(self._live, zmq.POLLIN)
            for address in filter(None, self._addresses.values()):
                self._open(zmq.DEALER, address).close()  # shows whether the address can be used
        except ConfigError:
            self.close()
            raise

    @property
    def is_exact(self) -> bool:
        """Whether the mirror has all blocks; False while messages are missing, also if they cannot be fetched."""
        return self.follower.is_exact

    @property
    def unanswered(self) -> list[str]:
        """The addresses that do not answer, as far as is known."""
        is_early = time.monotonic() - self._first_poll < CONTACT_S
        return [*([] if self._num_contacts > 0 or is_early else [self._events]), *sorted(self._unanswered)]

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """The sockets at which something may arrive."""
        return [self._live, *([] if self._request is None else [self._request])]

    def poll(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds for messages, apply them, and ask for missing messages.

        Returns whether a message came.
        """
        self._first_poll = min(self._first_poll, time.monotonic())
        self._note_contacts()
        self._ask()
        must_ask = self._request is None and self.follower.need is not Need.NOTHING
        ready = dict(self._poller.poll(round(1000 * min(timeout_s, PAUSE_S if must_ask else timeout_s))))
        if self._live in ready and self._read_all(self._live, lambda frames: take_live(self.follower, frames)):
            self._heard = time.monotonic()
        if self._request is not None and self._request in ready:
            self._read_all(self._request, self._take_answer)
        now = time.monotonic()
        if self._request is not None and now > self._deadline:
            self._forget_request()
            self._unanswered.update(filter(None, [self._addresses.get(self._question[0])]))
            self.follower.request_failed()
        if self.follower.publisher_id is not None and now - self._heard > self._silence_s:
            self._heard = now
            self.follower.fall_silent()
        self._ask()
        return bool(ready)

    def close(self) -> None:
        """Close the sockets. May be called twice."""
        for opened in list(self._opened):
            opened.close(linger=0)
        if self._owns_context:
            self._context.destroy(linger=0)

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---------------------------------------------------------------- requests

    def _ask(self) -> None:
        """Send the request that the follower needs, and end a request that it no longer needs."""
        question, now = (self.follower.need, self.follower.counts["resyncs"]), time.monotonic()
        if self._request is not None and question != self._question:
            self._forget_request()
        address = self._addresses.get(question[0])
        if self._request is not None or address is None or now < self._not_before:
            return
        is_snapshot = question[0] is Need.SNAPSHOT
        self._request = self._open(zmq.REQ if is_snapshot else zmq.DEALER, address)
        self._poller.register(self._request, zmq.POLLIN)
        self._question, self._deadline = question, now + ANSWER_S
        self._request.send_multipart(
            [SNAPSHOT_REQUEST] if is_snapshot else [b"", encode_seq(self.follower.next_number)]
        )

    def _note_contacts(self) -> None:
        while self._contacts.poll(0):
            event = recv_monitor_message(self._contacts)["event"]
            self._num_contacts = max(0, self._num_contacts + (1 if event == zmq.EVENT_HANDSHAKE_SUCCEEDED else -1))

    def _take_answer(self, frames: list[bytes]) -> None:
        self._unanswered.discard(self._addresses.get(self._question[0]) or "")
        self._deadline = time.monotonic() + ANSWER_S
        if self._question[0] is Need.SNAPSHOT:
            self._forget_request()
            take_snapshot(self.follower, frames)
        elif take_replay(self.follower, frames):
            self._forget_request()

    def _forget_request(self) -> None:
        assert self._request is not None
        self._poller.unregister(self._request)
        self._request.close(linger=0)
        self._request = None
        self._not_before = time.monotonic() + PAUSE_S

    def _read_all(self, source: zmq.Socket[bytes], take: Callable[[list[bytes]], object]) -> int:
        """Read at most `MOST_AT_ONCE` messages from a socket, until it is empty or closed. Returns the number read."""
        for count in range(MOST_AT_ONCE):
            if source.closed:
                return count
            try:
                frames = source.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return count
            take(frames)
        return MOST_AT_ONCE

    def _open(self, kind: int, address: str) -> zmq.Socket[bytes]:
        client = self._context.socket(kind)
        self._opened.add(client)
        client.ipv6 = "[" in address
        if kind == zmq.SUB:  # before the socket connects, or its first contact would not be seen
            self._contacts = client.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
            self._opened.add(self._contacts)
        client.rcvhwm = 0  # no limit, because a long replay exceeds the default
        try:
            if kind == zmq.SUB and is_wildcard(address):
                client.bind(address)
            else:
                client.connect(address)
        except zmq.ZMQError as error:
            client.close()
            raise ConfigError(
                f"{address!r} is no address that can be followed: {error.strerror}; use one such as tcp://HOST:5557"
            ) from error
        return client
