"""The space that the cache may occupy: a budget in physical bytes, a floor of free space, shares of several processes.

All processes together keep to the budget, each by looking at everybody's files and changing its own alone. A process
that is alone may use all of it. When others come, it gives way segment by segment until it is at its share.
Between two looks each process may write what was free at its last look, so they may exceed the budget for a moment, by
one run each.
"""

from __future__ import annotations

from foreword.tiers.disk.directory import SNAPSHOT_NAME
from foreword.tiers.disk.files import physical_bytes
from foreword.tiers.disk.segments import Segment
from foreword.tiers.disk.state import DiskState


class SpaceBook:
    """What is used and what is left. The storing thread alone calls it; `refresh` and `measure` read the disk."""

    def __init__(self, state: DiskState) -> None:
        options = state.options
        assert options.budget_bytes is not None
        assert options.segment_bytes is not None
        assert options.min_free_bytes is not None
        self._state = state
        self.budget_bytes: int = options.budget_bytes
        self.segment_bytes: int = options.segment_bytes
        self._min_free_bytes: int = options.min_free_bytes
        self._other_bytes = 0
        self._num_processes = 1
        self._snapshot_bytes = 0

    @property
    def own_bytes(self) -> int:
        """Physical bytes of this process's segments and snapshot."""
        return self._snapshot_bytes + sum(segment.physical_bytes for segment in self._state.index.own_segments())

    @property
    def used_bytes(self) -> int:
        """Physical bytes of everybody's files, as of the last look."""
        return self.own_bytes + self._other_bytes

    @property
    def share_bytes(self) -> int:
        """What each process may keep when others want room."""
        return self.budget_bytes // self._num_processes

    def measure(self, segment: Segment) -> None:
        """Look at the size of one of our segments. Raises OSError."""
        segment.physical_bytes = physical_bytes(self._state.files.stat(segment.path))

    def refresh(self) -> None:
        """Look at all sizes again. Raises OSError."""
        files, directory = self._state.files, self._state.directory
        for segment in self._state.index.own_segments():
            try:
                self.measure(segment)
            except FileNotFoundError:
                self._state.index.remove_segment(segment)
        self._snapshot_bytes = self._bytes_of_snapshot()
        others = directory.other_homes()
        total = 0
        for home in others:
            for path in [*directory.segments_of(home), home / SNAPSHOT_NAME]:
                try:
                    total += physical_bytes(files.stat(path))
                except FileNotFoundError:  # evicted meanwhile
                    continue
        self._other_bytes, self._num_processes = total, 1 + len(others)

    def shortfall(self, num_bytes: int) -> int:
        """Bytes that must go before `num_bytes` can be written; 0 or less: there is room. Raises OSError."""
        free = self._state.files.space(self._state.directory.home).free_bytes
        return max(self.used_bytes + num_bytes - self.budget_bytes, self._min_free_bytes + num_bytes - free)

    @property
    def may_evict(self) -> bool:
        """This process has more than what others must leave it."""
        return self._num_processes == 1 or self.own_bytes > self.share_bytes

    @property
    def must_give_way(self) -> bool:
        """Others need room for a segment, and this process has more than its share."""
        crowded = self.used_bytes + self.segment_bytes > self.budget_bytes
        return self._num_processes > 1 and crowded and self.own_bytes > self.share_bytes

    def _bytes_of_snapshot(self) -> int:
        try:
            return physical_bytes(self._state.files.stat(self._state.directory.home / SNAPSHOT_NAME))
        except FileNotFoundError:
            return 0
