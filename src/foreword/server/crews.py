"""Crews: threads for work that would block the event loop. Each kind of work has its own crew of a few threads.

Callers of a crew take turns, even if one caller has more work than others. A caller with too much waiting work is
refused.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from foreword.server.api_errors import too_busy

logger = logging.getLogger(__name__)

T = TypeVar("T")

CALLER: ContextVar[str] = ContextVar("foreword_caller", default="")
"""The tenant whose call the running task answers. Tenants take turns."""
MOST_OF_ALL = 16
"""The limit of the waiting work of all callers together, in multiples of one caller's limit."""
MANY_BYTES = 16 * 1024
"""Bytes of a JSON text that takes one or two milliseconds to read or write."""
KEPT = 0.8
"""Weight of the old value in the moving mean of the seconds per job of a crew."""


@dataclass(eq=False, slots=True)
class _Job:
    work: Callable[[], Any]
    done: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


class Crew:
    """Threads for one kind of work. Only the event loop may call its methods. The threads end with the process."""

    def __init__(self, name: str, num_threads: int, most_waiting: int) -> None:
        """`most_waiting`: the limit of one caller's jobs that wait for a thread."""
        self.name = name
        self.num_running = 0
        self.num_refused = 0
        self._num_threads, self._most_waiting = num_threads, most_waiting
        self._waiting: dict[str, deque[_Job]] = {}
        """Waiting jobs by caller, with the callers in the order of their turns."""
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._mean_s = 0.0

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self._waiting.values()))

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, from a thread. Raises its exceptions, and APIError 429 if too much work waits.

        A cancelled caller does not wait for the end, but work that has begun continues.
        """
        caller = CALLER.get()
        waiting = self._waiting.get(caller, ())
        if len(waiting) >= self._most_waiting or self.num_waiting >= MOST_OF_ALL * self._most_waiting:
            self.num_refused += 1
            wait_s = 1 + int(self._mean_s * (1 + len(waiting)) / self._num_threads)
            message = f"Too much work of this caller waits for a thread ({self.name}); try again in {wait_s} s."
            raise too_busy(message, wait_s)
        loop = asyncio.get_running_loop()
        job = _Job(work, loop.create_future(), loop)
        self._waiting.setdefault(caller, deque()).append(job)
        try:
            self._start()
            result: T = await job.done
        except (asyncio.CancelledError, RuntimeError):
            self._forget(caller, job)
            raise
        return result

    def close(self) -> None:
        """Drop waiting work and end the idle threads. Busy threads end after their job or with the process."""
        self._waiting.clear()
        for _ in self._threads:
            self._jobs.put(None)
        self._threads.clear()

    def _forget(self, caller: str, job: _Job) -> None:
        """Drop work of a cancelled caller, unless it has begun."""
        waiting = self._waiting.get(caller, deque())
        if job in waiting:
            waiting.remove(job)
            if not waiting:
                del self._waiting[caller]

    def _start(self) -> None:
        """Give waiting jobs to free threads: callers take turns, one job at a time."""
        while self.num_running < self._num_threads and self._waiting:
            if len(self._threads) <= self.num_running:
                thread = threading.Thread(target=self._work, name=f"foreword-{self.name}", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # the system gives no thread; the other threads continue
                    if not self._threads:
                        raise
                    logger.warning("the crew %s has %d threads: %s", self.name, len(self._threads), error)
                    return
                self._threads.append(thread)
            caller, jobs = next(iter(self._waiting.items()))
            del self._waiting[caller]
            job = jobs.popleft()
            if jobs:
                self._waiting[caller] = jobs  # after all other callers
            self.num_running += 1
            self._jobs.put(job)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            began = time.monotonic()
            result: Any = None
            error: Exception | None = None
            try:
                result = job.work()
            except Exception as raised:
                error = raised
            except BaseException as raised:  # this must end neither the thread nor the event loop
                error = RuntimeError(repr(raised))
            try:
                job.loop.call_soon_threadsafe(self._finish, job, result, error, time.monotonic() - began)
            except RuntimeError:
                logger.debug("the event loop has ended before work of the crew %s", self.name)
            del job, result, error

    def _finish(self, job: _Job, result: Any, error: Exception | None, seconds: float) -> None:
        self.num_running -= 1
        self._mean_s = seconds if not self._mean_s else KEPT * self._mean_s + (1 - KEPT) * seconds
        if not job.done.done():
            if error is None:
                job.done.set_result(result)
            else:
                job.done.set_exception(error)
        self._start()


class Crews:
    """The crews of one server.

    Work that is linear in a body's bytes, such as parsing, ends soon and runs in asyncio's own threads.
    """

    def __init__(self, most_choices: int = 0) -> None:
        """`most_choices`: limit of the engine's running and waiting choices. Crews accept as much work at once."""
        self.text = Crew("text", 2, max(64, most_choices))
        """Renders conversations and tokenizes texts."""
        self.grammars = Crew("grammars", 1, max(32, most_choices))
        self.schemas = Crew("schemas", 1, 4)
        """Lays out schemas of prompt modules."""
        self.modules = Crew("modules", 2, max(16, most_choices))
        """Composes prompts of modules and documents."""
        self.adapters = Crew("adapters", 4, max(64, most_choices))
        """Reads files of adapters, which may be on slow or distant disks."""
        self.pictures = Crew("pictures", 2, max(64, most_choices))
        """Checks and decodes pictures. Each thread has one decoded picture at a time."""
        self.fetches = Crew("fetches", 8, 64)
        """Fetches pictures from other servers."""

    def __iter__(self) -> Iterator[Crew]:
        return iter(vars(self).values())


async def off_loop(num_bytes: int, work: Callable[[], T]) -> T:
    """Return the result of `work` on `num_bytes` bytes. Small work is done at once, large work in a thread."""
    return await asyncio.to_thread(work) if num_bytes > MANY_BYTES else work()
