"""FullPasses: makes the garbage collector's passes over all objects while no call runs.

A full pass blocks the interpreter until it has visited every living object. While an answer of 160,000 log
probabilities or a schema of 4,000 modules is in memory, this takes 50 ms or more, and no call is served meanwhile.
Python makes a full pass after 70,000 new objects, and so in the middle of such a call. Passes over young objects stay
as they are.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import time
from collections.abc import Callable
from pathlib import Path

OBJECTS = 70_000
"""The number of new objects that cause a pass if no call runs."""
MOST_OBJECTS = 1_000_000
"""The number of new objects that cause a pass even if calls run, because only a pass frees garbage in cycles."""
MOST_S = 300.0
"""This many seconds after the last pass, `OBJECTS` new objects cause a pass even if calls run."""
MOST_BYTES = 64 << 20
"""Growth of the process in bytes from which `OBJECTS` new objects cause a pass even if calls run."""
NEVER = 2**30
LOOK_S = 1.0


class FullPasses:
    """Runs full passes of Python's garbage collector on the event loop, for all servers of the process."""

    def __init__(self, num_running: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        """`num_running` returns the number of running calls, `clock` the time in seconds."""
        self._num_running, self._clock = num_running, clock
        self._task: asyncio.Task[None] | None = None
        self._froze = False
        self._thresholds = newest, passes, _ = gc.get_threshold()
        self._objects_of_a_pass = newest * max(1, passes)
        """The number of new objects between two passes over young objects: 7,000 in Python 3.11, 20,000 in 3.13."""
        self._seen, self._since, self._bytes = 0, clock(), 0

    def start(self) -> None:
        """Take over the full passes from Python, and freeze all living objects, so that passes no longer visit these
        objects.

        If the process has frozen objects itself, as `foreword serve` does after loading, no further objects are frozen.
        """
        gc.collect()  # otherwise garbage would be frozen too
        self._froze = not gc.get_freeze_count()
        if self._froze:
            gc.freeze()
        gc.set_threshold(*self._thresholds[:2], NEVER)
        self._note_pass()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Give the full passes back to Python. May be called twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            if self._thresholds[2] != NEVER:  # otherwise another server of this process makes the passes
                gc.set_threshold(*self._thresholds)
            if self._froze:
                gc.unfreeze()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> bool:
        """Make a full pass if it is time. Returns whether a pass was made."""
        num_new = (_young_passes() - self._seen) * self._objects_of_a_pass
        may_wait = self._num_running() and self._clock() - self._since < MOST_S
        may_wait = may_wait and _resident_bytes() - self._bytes < MOST_BYTES
        if num_new < (MOST_OBJECTS if may_wait else OBJECTS):
            return False
        gc.collect()
        self._note_pass()
        return True

    def _note_pass(self) -> None:
        self._seen, self._since, self._bytes = _young_passes(), self._clock(), _resident_bytes()


def _resident_bytes() -> int:
    """Return the memory of the process in bytes; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return 0


def _young_passes() -> int:
    number: int = gc.get_stats()[1]["collections"]
    return number
