"""How the routers of several fronts tell each other their reservations, over ZeroMQ.

The link knows sockets and `RoutingCore`; it decides nothing. Each front publishes its changes soon, and once a second
all its reservations. So a front that joins late or misses a message is right again after a second. If a front falls
silent, its reservations end (`RoutingOptions.peer_silence_s`). The link belongs to the event loop, as the core does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from foreword.cluster import LoadUpdate, Reservation, RouterLoad, RoutingCore
from foreword.cluster.peers import Change

logger = logging.getLogger(__name__)

FLUSH_S = 0.02
"""Longest time until a change is published, in seconds; `flush` publishes it at once."""
WHOLE_S = 1.0
"""Seconds between two messages with all reservations."""
MEET_S = 30.0
"""Longest time to wait for the addresses of the fronts (HTTP servers with a router), in seconds."""

FindPeers = Callable[[str], Awaitable[list[str]]]
"""Adds a front's address to the list of fronts, and returns the addresses of all fronts."""


class PeerLink:
    """Exchanges the reservations of one core with the cores of other fronts."""

    def __init__(self, core: RoutingCore, host: str, find_peers: FindPeers) -> None:
        """`host`: the address of this machine for other fronts. The link publishes at any free port."""
        self._core, self._find_peers = core, find_peers
        self._context = zmq.asyncio.Context()
        self._out = self._context.socket(zmq.PUB)
        self._out.bind(f"tcp://{host}:0")
        self.address: str = self._out.getsockopt_string(zmq.LAST_ENDPOINT)
        self._in = self._context.socket(zmq.SUB)
        self._in.subscribe(b"")
        self._fronts = {self.address}
        """The addresses of the fronts to which this link listens, and its own address."""
        self._is_due = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.num_bad = 0
        """Messages that could not be read."""

    def start(self) -> None:
        for work in (self._publish(), self._listen(), self._meet()):
            self._tasks.append(asyncio.create_task(work))

    def flush(self) -> None:
        """Publish changes at once, because other routers decide next."""
        self._is_due.set()

    async def close(self) -> None:
        """Stop publishing and listening. Other fronts then end this front's reservations."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _publish(self) -> None:
        next_whole = 0.0
        while True:
            updates = self._core.take_updates()
            if updates:
                await self._out.send(encode(updates))
            if time.monotonic() >= next_whole:
                next_whole = time.monotonic() + WHOLE_S
                await self._out.send(encode(self._core.export_load()))
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await self._is_due.wait()
            self._is_due.clear()

    async def _listen(self) -> None:
        while True:
            data = await self._in.recv()
            try:
                message = decode(data)
            except ValueError as error:
                self.num_bad += 1
                logger.warning("a message of another front cannot be read: %s", error)
                continue
            if isinstance(message, RouterLoad):
                self._core.install_load(message, time.monotonic())
            else:
                self._core.merge(message, time.monotonic())

    def _connect(self, fronts: set[str]) -> None:
        """Listen to exactly these fronts."""
        for address in fronts - self._fronts:
            logger.info("shares reservations with the front at %s", address)
            self._in.connect(address)
            self._fronts.add(address)
        for address in self._fronts - fronts:
            logger.info("the front at %s has ended", address)
            self._in.disconnect(address)
            self._fronts.discard(address)

    async def _meet(self) -> None:
        """Look for new fronts again and again."""
        while True:
            try:
                async with asyncio.timeout(MEET_S):
                    addresses = set(await self._find_peers(self.address))
                self._connect(addresses | {self.address})
            except Exception as error:  # the process that keeps the list may be starting or gone, so ask again
                logger.debug("other fronts cannot be found: %s: %s", type(error).__name__, error)
            await asyncio.sleep(WHOLE_S)


def encode(message: list[LoadUpdate] | RouterLoad) -> bytes:
    """Encode changes, or all reservations of a router."""
    if isinstance(message, RouterLoad):
        head: list[Any] = [message.router, message.life, message.number]
        return bytes(msgpack.packb([head, [_plain(update) for update in message.updates]]))
    return bytes(msgpack.packb([None, [_plain(update) for update in message]]))


def decode(data: bytes) -> list[LoadUpdate] | RouterLoad:
    """Decode a message. Raises ValueError for other bytes, such as a message of another version."""
    try:
        head, rows = msgpack.unpackb(data)
        updates = [_update(*row) for row in rows]
        if head is None:
            return updates
        router, life, number = head
    except (TypeError, msgpack.UnpackException) as error:
        raise ValueError(str(error)) from error
    _check((router, life), (number,))
    return RouterLoad(router, life, number, tuple(updates))


def _update(
    router: str, life: str, number: int, change: str, reservation: list[Any], prompt_tokens: int, computed_tokens: int
) -> LoadUpdate:
    whose, request_id, attempt, replica = reservation
    _check((router, life, whose, request_id, replica), (number, attempt, prompt_tokens, computed_tokens))
    reserved = Reservation(whose, request_id, attempt, replica)
    return LoadUpdate(router, life, number, Change(change), reserved, prompt_tokens, computed_tokens)


def _check(texts: tuple[object, ...], numbers: tuple[object, ...]) -> None:
    if not all(isinstance(text, str) for text in texts) or not all(isinstance(number, int) for number in numbers):
        raise ValueError(f"{texts} are not all texts, or {numbers} not all integers")


def _plain(update: LoadUpdate) -> list[Any]:
    return [*update[:3], update.change.value, list(update.reservation), *update[5:]]
