"""Keeps a router's mirrors correct, with a subscriber for each replica, on the event loop of the core.

Makes no decisions.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import zmq

from foreword.cluster import RoutingCore
from foreword.cluster.follower import Follower
from foreword.events.subscriber import PAUSE_S, Subscriber

logger = logging.getLogger(__name__)

SILENCE_S = 30.0
"""A replica sends a message each second. After this many seconds without a message it counts as silent."""
MAX_SOCKETS = 8192
"""The most sockets of a router, which has three for each replica."""
TROUBLES = {
    "bad": "an event of replica %s cannot be read",
    "failed": "no snapshot of replica %s",
    "silences": "replica %s has sent no events: its cache is not known",
}
"""Names of a follower's counts, each with the warning to log when the count grows."""


class CoreFeed:
    """Feeds a routing core with the events of replicas that have joined."""

    def __init__(self, core: RoutingCore) -> None:
        self._core = core
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)

    def follow(self, name: str, events: str, snapshots: str) -> None:
        """Follow a replica; `events` and `snapshots` are addresses."""
        self.leave(name)
        self._tasks[name] = asyncio.create_task(self._go_on(name, events, snapshots), name=f"events of {name}")

    def leave(self, name: str) -> None:
        if (task := self._tasks.pop(name, None)) is not None:
            task.cancel()

    async def close(self) -> None:
        """Stop following all replicas, and close the sockets."""
        tasks = list(self._tasks.values())
        for name in list(self._tasks):
            self.leave(name)
        await asyncio.gather(*tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _go_on(self, name: str, events: str, snapshots: str) -> None:
        """Follow a replica. After an unexpected error, its mirror is not used until the replica is followed again."""
        while True:
            try:
                await self._follow(name, events, snapshots)
            except Exception:
                logger.exception("the events of replica %s cannot be followed; next try in %.0f s", name, SILENCE_S)
                self._core.learn(name, Follower.fall_silent, time.monotonic())
                await asyncio.sleep(SILENCE_S)

    async def _follow(self, name: str, events: str, snapshots: str) -> None:
        follower = self._core.mirror(name).follower
        with Subscriber(
            events, snapshot=snapshots, follower=follower, silence_s=SILENCE_S, context=self._context
        ) as subscriber:
            while True:
                before = follower.counts.copy()
                ready: list[bool] = []
                self._core.learn(name, lambda _: ready.append(subscriber.poll(0)), time.monotonic())  # noqa: B023
                for trouble, warning in TROUBLES.items():
                    if follower.counts[trouble] > before[trouble]:
                        logger.warning(warning, name)
                if any(ready):
                    await asyncio.sleep(0)
                else:
                    await _readable(subscriber.sockets, PAUSE_S)


async def _readable(sockets: Sequence[zmq.Socket[bytes]], timeout_s: float) -> None:
    """Wait until a socket may be read, at most `timeout_s` seconds."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    numbers = [int(socket.getsockopt(zmq.FD)) for socket in sockets]
    for number in numbers:
        loop.add_reader(number, ready.set)
    try:
        async with asyncio.timeout(timeout_s):
            await ready.wait()
    except TimeoutError:
        pass
    finally:
        for number in numbers:
            loop.remove_reader(number)
