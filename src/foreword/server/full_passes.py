"""FullPasses: the garbage collector's passes over all objects, made while no call runs.

Knows the collector and a count of calls. A full pass holds the interpreter until it has visited every object that
lives: 50 ms and more beside an answer of 160,000 log probabilities or a schema of 4,000 modules, in which nobody else
is served. Python makes one after 70,000 new objects, and so in the middle of such a call. Young objects are collected
as always; what lives is visited between calls.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

PASSES = 10
"""Passes over young objects (7,000 new ones each, Python's default) after which all objects are visited, if no call
runs."""
MOST_PASSES = 150
"""After this many passes all objects are visited although calls run: a million new objects in cycles may wait."""
NEVER = 2**30
LOOK_S = 1.0


class FullPasses:
    """Belongs to the event loop; the collector is the process's."""

    def __init__(self, num_running: Callable[[], int]) -> None:
        """`num_running`: the number of calls that are being answered."""
        self._num_running = num_running
        self._task: asyncio.Task[None] | None = None
        self._thresholds = gc.get_threshold()
        self._seen = 0

    def start(self) -> None:
        """Take the full passes over. What lives by now stays for good, and is not visited again."""
        gc.freeze()
        gc.set_threshold(*self._thresholds[:2], NEVER)
        self._seen = _young_passes()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Give them back. May be called twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
            if self._thresholds[2] != NEVER:  # another server of this process has them otherwise
                gc.set_threshold(*self._thresholds)
            gc.unfreeze()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> bool:
        """Visit all objects if it is time; whether it was."""
        num_passes = _young_passes() - self._seen
        if num_passes < (MOST_PASSES if self._num_running() else PASSES):
            return False
        gc.collect()
        self._seen = _young_passes()
        return True


def _young_passes() -> int:
    number: int = gc.get_stats()[1]["collections"]
    return number
