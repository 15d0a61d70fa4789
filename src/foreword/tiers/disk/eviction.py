"""Eviction of segments: which one goes, and which of its blocks are copied forward first.

The segment with the least worth a physical byte goes: a block is worth the seconds that a hit saves, times (1 + its
loads), halved for every six hours since its last load. So what was loaded often and lately stays, and a large segment
of which little is left goes early. Blocks that are worth more than the tier's mean, and pinned ones, are copied to the
newest segment first, the best ones first, at most a quarter of the segment. A segment of which more is pinned stays.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from foreword.tiers.disk.files import close_quietly
from foreword.tiers.disk.run_format import PAGE, RunHeader
from foreword.tiers.disk.segment_index import Rows, worth_of
from foreword.tiers.disk.segments import Damage, Segment, scan_runs
from foreword.tiers.disk.state import DiskState
from foreword.tiers.tier import PINNED

logger = logging.getLogger(__name__)

COPIED_SHARE = 0.25


Copy = Callable[[int, Segment, RunHeader, npt.NDArray[np.int64]], int]
"""Copies blocks of a run of a segment, whose file is open, to the newest one: descriptor, segment, run, indices in the
run. Returns their number. Raises OSError."""


class Evictor:
    """Unlinks segments. The storing thread alone calls it."""

    def __init__(self, state: DiskState, copy: Copy) -> None:
        self._state = state
        self._copy = copy

    def evict_one(self, *, copies: bool) -> bool:
        """Unlink the segment that is worth least, and copy its best blocks if `copies`. False if none can go.

        Raises OSError if the file cannot be unlinked; then it is no longer ours to count on and others may go.
        """
        victim = self._choose()
        if victim is None:
            return False
        if copies:
            self._copy_best(victim)
        # Before its file: one that cannot be removed must not be chosen forever.
        removed = self._state.index.remove_segment(victim)
        self._state.count(num_evicted=removed)
        with contextlib.suppress(FileNotFoundError):
            self._state.files.unlink(victim.path)
        logger.debug("evicted %s with %d blocks", victim.path.name, removed)
        return True

    def _choose(self) -> Segment | None:
        candidates = [segment for segment in self._state.index.own_segments() if not segment.is_open]
        if not candidates:
            return None
        worth, pinned = self._state.index.segment_worth(self._state.clock.now_s())
        scanned = [
            segment
            for segment in candidates
            if segment.is_scanned and pinned[segment.id] <= COPIED_SHARE * max(1, segment.physical_bytes)
        ]
        if scanned:
            return min(scanned, key=lambda segment: worth[segment.id] / max(1, segment.physical_bytes))
        # Nobody knows yet what the others hold. The oldest goes.
        return next((segment for segment in candidates if not segment.is_scanned), None)

    def _copy_best(self, victim: Segment) -> None:
        """Copy the best blocks of a segment forward, as far as that succeeds."""
        files = self._state.files
        try:
            fd = files.open_for_reading(victim.path)
        except OSError:
            return
        try:
            for header, chosen in self._keepers(fd, victim):
                self._state.count(num_copied_forward=self._copy(fd, victim, header, chosen))
        except OSError as error:
            logger.warning("blocks of %s could not be copied forward: %s", victim.path.name, error)
        finally:
            close_quietly(files, fd)

    def _keepers(self, fd: int, victim: Segment) -> list[tuple[RunHeader, npt.NDArray[np.int64]]]:
        """The blocks to copy in the order in which they lie: runs, and indices of their entries."""
        state, now = self._state, self._state.clock.now_s()
        headers = [
            found
            for found in scan_runs(state.files, fd, 0, victim.num_bytes, uncached=state.leaves_cache)
            if not isinstance(found, Damage) and found.cipher_id == state.cipher.cipher_id
        ]
        if not headers:
            return []
        merit = np.concatenate([self._merit(header, victim, now) for header in headers])
        sizes = np.concatenate([header.entries["stored_bytes"].astype(np.int64) for header in headers])
        best = np.argsort(-merit, kind="stable")
        best = best[merit[best] > state.index.mean_worth(now)]
        best = best[np.cumsum(sizes[best]) <= COPIED_SHARE * victim.physical_bytes]
        is_best = np.isin(np.arange(len(merit)), best)
        parts = np.split(is_best, np.cumsum([len(header.entries) for header in headers])[:-1])
        return [(header, np.flatnonzero(part)) for header, part in zip(headers, parts, strict=True) if part.any()]

    def _merit(self, header: RunHeader, victim: Segment, now: int) -> npt.NDArray[np.float64]:
        """The worth of a run's blocks, [blocks]; infinite if they are pinned, -1 if they are gone or lie elsewhere."""
        rows: Rows = self._state.index.locate(header.keys(), now)
        own = header.offset // PAGE + header.entries["page"]
        is_here = (rows["name"] != 0) & (rows["segment"] == victim.id) & (rows["page"] == own)
        worth = np.where(header.entries["flags"] & PINNED, np.inf, worth_of(rows, now))
        return np.where(is_here, worth, -1.0)
