"""A ticket: one load or store under way, and its report.

The thread that works for a ticket touches the caller's memory only inside `transfer`, which holds the ticket's lock.
So after the ticket has ended, because it was cancelled or its deadline has passed, no thread touches that memory again.
A disk that hangs cannot hold a caller's blocks.
"""

from __future__ import annotations

import enum
import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)
IndexArray = npt.NDArray[np.int64]
COPY_S = 1.0
"""Seconds to wait for a copy between a tier and the caller's memory when the tier is closed."""


class Outcome(enum.IntEnum):
    """The result for one block of a job."""

    DONE = 0
    """The block is loaded, or stored."""
    PRESENT = 1
    """A probe found the block, or a store left it out because it is here already."""
    MISSING = 2
    """The block is not here, or its file is gone or too short."""
    CORRUPT = 3
    """The stored bytes are not those that were written, or belong to another key."""
    IO_ERROR = 4
    """The system reported an error, or the block could not be copied from or to the caller's memory."""
    TIMEOUT = 5
    """The deadline passed first."""
    CANCELLED = 6
    QUEUE_FULL = 7
    NO_ROOM = 8
    """Storing the block would exceed the budget, the floor of free space or the disk."""
    PENDING = 255


FORGOTTEN = (Outcome.MISSING, Outcome.CORRUPT, Outcome.IO_ERROR, Outcome.TIMEOUT)
"""Outcomes of a load after which the block is not found again."""


@dataclass(frozen=True, slots=True)
class Report:
    """The results of all blocks of a job."""

    outcomes: npt.NDArray[np.uint8]
    """[blocks], values of `Outcome`."""
    seconds: float
    """Seconds from the call until the job ended."""

    @property
    def num_done(self) -> int:
        """The number of blocks that are loaded or stored, wherever they are in the job."""
        return int(np.count_nonzero(self.outcomes == Outcome.DONE))

    @property
    def num_leading(self) -> int:
        """The number of blocks before the first that failed."""
        failed = np.flatnonzero(self.outcomes > Outcome.PRESENT)
        return int(failed[0]) if len(failed) else len(self.outcomes)

    def by_reason(self) -> dict[str, int]:
        """The number of blocks by outcome, in lower case."""
        return {Outcome(value).name.lower(): count for value, count in Counter(self.outcomes.tolist()).items()}


class Ticket:
    """One load or store under way. All methods may be called by any thread."""

    def __init__(
        self,
        num_blocks: int,
        *,
        deadline_s: float | None = None,
        before_done: Callable[[npt.NDArray[np.uint8]], None] | None = None,
        on_done: Callable[[Ticket], None] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self._started = time.monotonic()
        self._deadline = None if deadline_s is None else self._started + deadline_s
        self._before_done = before_done
        self._on_done = on_done
        self._outcomes = np.full(num_blocks, Outcome.PENDING, np.uint8)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._report: Report | None = None
        self._is_ending = False
        """Whether a thread waits for the lock in order to end the job. If so, no further transfer begins."""

    # ------------------------------------------------------------------------------ the caller's side

    @property
    def done(self) -> bool:
        """Whether the job has ended and `report` is there. A deadline that has passed ends the job now."""
        if self._report is None and self._deadline is not None and time.monotonic() >= self._deadline:
            self._end(Outcome.TIMEOUT)
        return self._report is not None

    @property
    def report(self) -> Report:
        """The results of the blocks. Ask for them only when `done` is True."""
        assert self._report is not None, "the job has not ended; ask `done` first"
        return self._report

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the job has ended, for at most `timeout_s` seconds; True if it has."""
        if self._deadline is not None:
            timeout_s = min(math.inf if timeout_s is None else timeout_s, self._deadline - time.monotonic())
        self._ended.wait(None if timeout_s is None else max(0.0, timeout_s))
        return self.done

    def cancel(self, patience_s: float = -1.0) -> None:
        """End the job now: unsettled blocks are CANCELLED, and nobody touches the caller's memory again.

        A block that is being copied is waited for, at most `patience_s` seconds if that is not negative. If the copy
        takes longer, the job ends later, and no further block is copied.
        """
        self._end(Outcome.CANCELLED, patience_s)

    # ------------------------------------------------------------------------------ the tier's side

    def transfer(self, index: int, move: Callable[[], None]) -> bool:
        """Call `move`, which touches the caller's memory, unless the job has ended. False if it was not called.

        An exception of `move` is logged and makes the block an IO_ERROR.
        """
        if self._is_ending or self.done:
            return False
        with self._lock:
            if self._report is not None:
                return False
            try:
                move()
            except Exception:
                logger.exception("a block could not be copied between a tier and the pool; it is not used")
                self._outcomes[index] = Outcome.IO_ERROR
                return False
            return True

    def settle(self, indices: IndexArray | list[int] | int, outcome: Outcome) -> None:
        """Record the outcome of blocks. Blocks that are settled already keep their outcome."""
        with self._lock:
            if self._report is None:
                chosen = np.atleast_1d(np.asarray(indices, np.int64))
                self._outcomes[chosen[self._outcomes[chosen] == Outcome.PENDING]] = outcome

    def outcomes_so_far(self) -> npt.NDArray[np.uint8]:
        """A copy of the outcomes of the blocks until now, [blocks], values of `Outcome`."""
        with self._lock:
            return self._outcomes.copy()

    def finish(self, outcome: Outcome) -> None:
        """End the job; blocks that are not settled get the outcome `outcome`."""
        self._end(outcome)

    def _end(self, outcome: Outcome, patience_s: float = -1.0) -> None:
        self._is_ending = True
        if not self._lock.acquire(timeout=patience_s):
            return
        try:
            if self._report is not None:
                return
            self._outcomes[self._outcomes == Outcome.PENDING] = outcome
            if self._before_done is not None:
                self._before_done(self._outcomes)
            self._outcomes.flags.writeable = False
            self._report = Report(self._outcomes, time.monotonic() - self._started)
            self._ended.set()
        finally:
            self._lock.release()
        if self._on_done is not None:
            try:
                self._on_done(self)
            except Exception:
                logger.exception("the listener of a tier's job failed; the job itself has ended as reported")


class _HasTicket(Protocol):
    @property
    def ticket(self) -> Ticket: ...


Job = TypeVar("Job", bound=_HasTicket)


class JobThread(Generic[Job]):
    """Works on jobs in the order in which they were added. `start` begins its thread, `join` ends it."""

    def __init__(
        self,
        name: str,
        work: Callable[[Job], None],
        max_amount: int,
        idle: Callable[[], float | None] = lambda: None,
        at_end: Callable[[], None] = lambda: None,
    ) -> None:
        """`work` ends its job's ticket. `idle` is called after each job. It returns the seconds until its next call
        without a job; None: it is called only after the next job, or after `wake`. The thread calls `at_end` last.
        """
        self._work, self._idle, self._at_end = work, idle, at_end
        self._max_amount = max_amount
        self._queue: deque[tuple[Job, int]] = deque()
        self._current: Job | None = None
        """The job that is worked on."""
        self._wake = threading.Condition()
        self.amount = 0
        """The sum of the amounts of all jobs that are queued or being worked on."""
        self._is_woken = False
        self._closes_at: float | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Let the thread call `idle` soon."""
        with self._wake:
            self._is_woken = True
            self._wake.notify()

    def add(self, job: Job, amount: int) -> None:
        """Queue a job. If it is refused, its ticket ends at once."""
        with self._wake:
            if self._closes_at is not None:
                refusal = Outcome.CANCELLED
            elif self.amount and self.amount + amount > self._max_amount:
                refusal = Outcome.QUEUE_FULL
            else:
                self._queue.append((job, amount))
                self.amount += amount
                self._wake.notify()
                return
        job.ticket.finish(refusal)

    def stop_after(self, flush_s: float) -> None:
        """Refuse new jobs, and work on the queued jobs for at most `flush_s` seconds."""
        with self._wake:
            self._closes_at = time.monotonic() + flush_s
            self._wake.notify()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread, after `stop_after`, for at most `timeout_s` seconds.

        Then cancel the jobs that wait, and the job on which the thread still works.
        """
        self._thread.join(timeout_s)
        self._cancel_queued()
        if (job := self._current) is not None:
            job.ticket.cancel(COPY_S)

    def _cancel_queued(self) -> None:
        with self._wake:
            queued = list(self._queue)
            self._queue.clear()
            self.amount -= sum(amount for _, amount in queued)
        for job, _ in queued:
            job.ticket.cancel()

    def _run(self) -> None:
        pause_s: float | None = 0.0
        while True:
            with self._wake:
                if not self._queue and self._closes_at is None and not self._is_woken:
                    self._wake.wait(pause_s)
                self._is_woken = False
                if self._closes_at is not None and (not self._queue or time.monotonic() >= self._closes_at):
                    break
                job, amount = self._queue.popleft() if self._queue else (None, 0)
                self._current = job
            try:
                if job is not None:
                    self._work(job)
                pause_s = self._idle()
            except Exception:
                logger.exception("%s: a job failed unexpectedly; its blocks are computed instead", self._thread.name)
                if job is not None:
                    job.ticket.finish(Outcome.IO_ERROR)
            finally:
                self._current = None
                with self._wake:
                    self.amount -= amount
        self._cancel_queued()
        self._at_end()
