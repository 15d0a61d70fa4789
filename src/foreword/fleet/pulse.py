"""Pulse: finds replicas that stand still. Asks each replica with waiting requests whether its engine still works.

A replica's event loop answers even during a long step of its engine. So a replica that does not answer has a process
or a machine that no longer runs. If its engine's thread makes no step for too long, the replica says so itself
(`Replica.complaint`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from foreword.fleet.link import Link, ReplicaLostError

logger = logging.getLogger(__name__)

LOOK_S = 3.0
"""Seconds between two questions to a replica with waiting requests."""
ANSWER_S = 12.0
"""Seconds that a replica may take for an answer."""
LATE_S = 1.0
"""If a question ends this many seconds after its time limit, this process stood still, and the question is repeated."""


class Pulse:
    """Watches replicas. Belongs to the event loop."""

    def __init__(self, link: Link, on_still: Callable[[str], None], on_again: Callable[[str], None]) -> None:
        """`on_still` is called with the name of a replica that stands still, before its requests are ended; `on_again`
        with the name of a replica that works again.
        """
        self.still: dict[str, str] = {}
        """The replicas that stand still, each with its complaint."""
        self._link, self._on_still, self._on_again = link, on_still, on_again
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._waiting: dict[str, set[asyncio.Timeout]] = {}
        """For each replica, the time limits of the requests that wait for it."""

    def follow(self, name: str) -> None:
        self._tasks[name] = asyncio.create_task(self._follow(name))

    def leave(self, name: str) -> None:
        """Stop watching a replica that is gone. The requests at this replica fail by themselves."""
        self._tasks.pop(name).cancel()
        self.still.pop(name, None)

    def stop(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    @asynccontextmanager
    async def wait_for(self, name: str) -> AsyncGenerator[None]:
        """Run the body while a request waits for a replica. Raises ReplicaLostError once the replica stands still."""
        waiting = self._waiting.setdefault(name, set())
        limit = asyncio.timeout(None)
        waiting.add(limit)
        try:
            async with limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise ReplicaLostError(f"replica {name} stands still", died=False, comes_back=True) from error
        finally:
            waiting.discard(limit)
            if not waiting and self._waiting.get(name) is waiting:
                del self._waiting[name]

    async def _follow(self, name: str) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            if name not in self._waiting and name not in self.still:
                continue
            try:
                complaint = await self._complaint(name)
            except ReplicaLostError:
                continue  # the replica leaves
            if complaint is None:
                if self.still.pop(name, None) is not None:
                    logger.info("replica %s goes on", name)
                    self._on_again(name)
            elif name not in self.still:
                logger.warning("replica %s stands still: %s", name, complaint)
                self.still[name] = complaint
                self._on_still(name)
                for limit in self._waiting.get(name, ()):
                    if not limit.expired():
                        limit.reschedule(0)

    async def _complaint(self, name: str) -> str | None:
        loop = asyncio.get_running_loop()
        while True:
            limit = loop.time() + ANSWER_S
            try:
                async with asyncio.timeout_at(limit):
                    return await self._link.complaint(name)
            except TimeoutError:
                if loop.time() < limit + LATE_S:
                    return f"its process has not answered for {ANSWER_S:g} s"
