"""A thread with a bounded queue of jobs, each of which has a ticket."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from foreword.tiers.ticket import Outcome, Ticket

logger = logging.getLogger(__name__)


class _HasTicket(Protocol):
    @property
    def ticket(self) -> Ticket: ...


Job = TypeVar("Job", bound=_HasTicket)


class JobThread(Generic[Job]):
    """Jobs in the order in which they were asked for. `start` begins its thread, `close` ends it."""

    def __init__(
        self,
        name: str,
        work: Callable[[Job], None],
        max_amount: int,
        idle: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`work` ends its job's ticket. `idle` is called without a job; it says after how long to call it again."""
        self._work, self._idle = work, idle
        self._max_amount = max_amount
        self._queue: deque[tuple[Job, int]] = deque()
        self._wake = threading.Condition()
        self._amount = 0
        self._is_woken = False
        self._closes_at: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def amount(self) -> int:
        """Of the jobs that are queued or worked on."""
        return self._amount

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Let it call `idle` soon."""
        with self._wake:
            self._is_woken = True
            self._wake.notify()

    def add(self, job: Job, amount: int) -> None:
        """Queue a job; if that cannot be, its ticket ends at once."""
        with self._wake:
            if self._closes_at is not None:
                refusal = Outcome.CANCELLED
            elif self._amount and self._amount + amount > self._max_amount:
                refusal = Outcome.QUEUE_FULL
            else:
                self._queue.append((job, amount))
                self._amount += amount
                self._wake.notify()
                return
        job.ticket.finish(refusal)

    def stop_after(self, flush_s: float) -> None:
        """Refuse new jobs, and work on those that are queued for at most `flush_s` seconds."""
        with self._wake:
            self._closes_at = time.monotonic() + flush_s
            self._wake.notify()

    def join(self, timeout_s: float) -> None:
        """After `stop_after`: wait for the thread for at most `timeout_s` seconds, and cancel what is left."""
        self._thread.join(timeout_s)
        with self._wake:
            left = list(self._queue)
            self._queue.clear()
        for job, _ in left:
            job.ticket.cancel()

    def _run(self) -> None:
        pause_s: float | None = 0.0
        while True:
            with self._wake:
                if not self._queue and self._closes_at is None and not self._is_woken:
                    self._wake.wait(pause_s)
                self._is_woken = False
                if self._closes_at is not None and (not self._queue or time.monotonic() >= self._closes_at):
                    return
                job, amount = self._queue.popleft() if self._queue else (None, 0)
            try:
                if job is not None:
                    self._work(job)
                pause_s = self._idle()
            except Exception:
                logger.exception("%s: a job failed unexpectedly; its blocks are computed instead", self._thread.name)
                if job is not None:
                    job.ticket.finish(Outcome.IO_ERROR)
            finally:
                with self._wake:
                    self._amount -= amount
