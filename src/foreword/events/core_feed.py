"""Keeps a router's mirrors right: reads the cache events of each replica, and asks for a snapshot where it must.

Knows ZeroMQ and `RoutingCore`; decides nothing. It belongs to the event loop, as the core does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import zmq
import zmq.asyncio

from foreword.cache import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from foreword.cluster import EventBatch, RoutingCore
from foreword.events import wire

logger = logging.getLogger(__name__)

ANSWER_S = 5.0
"""Longest time to wait for a snapshot."""
PAUSE_S = 0.2
"""Time between two requests for a snapshot."""
SILENCE_S = 30.0
"""Longest time without a message of a replica, which sends one each second."""


class CoreFeed:
    """Feeds a routing core with the events of replicas that have joined."""

    def __init__(self, core: RoutingCore) -> None:
        self._core = core
        self._context = zmq.asyncio.Context()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.num_snapshots = 0
        self.num_bad = 0
        """Messages that are no cache events."""

    def follow(self, name: str, events: str, snapshots: str) -> None:
        """Follow a replica, by the addresses of its events and of its snapshots."""
        self.leave(name)
        self._tasks[name] = asyncio.create_task(self._follow(name, events, snapshots), name=f"events of {name}")

    def leave(self, name: str) -> None:
        """Follow a replica no longer."""
        if (task := self._tasks.pop(name, None)) is not None:
            task.cancel()

    async def close(self) -> None:
        """Follow none, and close the sockets."""
        tasks = list(self._tasks.values())
        for name in list(self._tasks):
            self.leave(name)
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _follow(self, name: str, events: str, snapshots: str) -> None:
        live = self._context.socket(zmq.SUB)
        live.rcvhwm = 0
        live.connect(events)
        live.subscribe(b"")
        asked: asyncio.Task[None] | None = None
        try:
            while True:
                try:
                    knows = await self._take_next(name, live)
                except wire.WireError as error:
                    self.num_bad += 1
                    logger.warning("an event of replica %s cannot be read: %s", name, error)
                    continue
                if not knows and (asked is None or asked.done()):
                    asked = asyncio.create_task(self._ask(name, snapshots), name=f"snapshot of {name}")
        finally:
            if asked is not None:
                asked.cancel()
            live.close(linger=0)

    async def _take_next(self, name: str, live: zmq.asyncio.Socket) -> bool:
        """Take the next message, or a silence. False: the replica's cache is not known. Raises WireError."""
        try:
            async with asyncio.timeout(SILENCE_S):
                frames = await live.recv_multipart()
        except TimeoutError:
            logger.warning("replica %s has sent no events for %.0f s: its cache is not known", name, SILENCE_S)
            self._core.doubt(name, time.monotonic())
            return False
        number, payload = wire.decode_live(frames)
        batch = wire.decode_batch(payload)
        return self._core.observe(name, _batch(number, batch.publisher_id, batch.events), time.monotonic())

    async def _ask(self, name: str, address: str) -> None:
        """Ask for a snapshot until the mirror is right."""
        while name in self._core.unsynced():
            request = self._context.socket(zmq.REQ)
            try:
                request.connect(address)
                await request.send(wire.SNAPSHOT_REQUEST)
                async with asyncio.timeout(ANSWER_S):
                    number, publisher_id, batches = wire.decode_snapshot(await request.recv_multipart())
                if number != wire.UNAVAILABLE:
                    events = [event for batch in batches for event in batch.events]
                    self._core.install_snapshot(name, _batch(number, publisher_id, events), time.monotonic())
                    self.num_snapshots += 1
            except (TimeoutError, wire.WireError, zmq.ZMQError) as error:
                logger.warning("no snapshot of replica %s: %s", name, error or type(error).__name__)
            finally:
                request.close(linger=0)
            await asyncio.sleep(PAUSE_S)


def _batch(number: int, publisher_id: bytes | None, events: Sequence[wire.Event]) -> EventBatch:
    return EventBatch(publisher_id, number, tuple(found for event in events if (found := _event(event)) is not None))


def _event(event: wire.Event) -> KVCacheEvent | None:
    """The cache's own event. A front knows all of a block by its key, so tokens are left out."""
    match event:
        case wire.Stored():
            return BlockStored(
                event.block_hashes,  # type: ignore[arg-type]  # replicas publish whole keys
                event.parent_block_hash,  # type: ignore[arg-type]
                (),
                event.block_size,
                medium=_medium(event.medium),
                group_idx=event.group_idx or 0,
            )
        case wire.Removed():
            return BlockRemoved(
                event.block_hashes,  # type: ignore[arg-type]
                medium=_medium(event.medium),
                group_idx=event.group_idx or 0,
            )
        case wire.Cleared():
            return AllBlocksCleared()
    return None


def _medium(name: str | None) -> str:
    return "device" if name == wire.MEDIA["device"] else name or "device"
