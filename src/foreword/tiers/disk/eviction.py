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
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foreword.tiers.disk.files import close_quietly
from foreword.tiers.disk.run_format import RunHeader
from foreword.tiers.disk.segments import Damage, Places, Segment, scan_runs
from foreword.tiers.disk.state import DiskState
from foreword.tiers.tier import PINNED

logger = logging.getLogger(__name__)

COPIED_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Keepers:
    """Blocks of one run that are to be copied forward."""

    header: RunHeader
    chosen: npt.NDArray[np.int64]
    """Indices of its entries."""
    places: Places
    """Of the chosen blocks."""


Copy = Callable[[int, Keepers], int]
"""Copies blocks from an open segment to the newest one; returns their number. Raises OSError."""


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
        removed = self._state.index.forget_segment(victim.id)
        self._state.count(num_evicted=removed)
        # First of all the table: a file that cannot be removed must not be chosen forever.
        self._state.table.remove(victim)
        with contextlib.suppress(FileNotFoundError):
            self._state.files.unlink(victim.path)
        logger.debug("evicted %s with %d blocks", victim.path.name, removed)
        return True

    def _choose(self) -> Segment | None:
        candidates = [segment for segment in self._state.table.own() if not segment.is_open]
        if not candidates:
            return None
        worth, pinned = self._state.index.segment_worth(self._state.clock.now_s(), self._state.table.num_ids)
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
            for keepers in self._keepers(fd, victim):
                self._state.count(num_copied_forward=self._copy(fd, keepers))
        except OSError as error:
            logger.warning("blocks of %s could not be copied forward: %s", victim.path.name, error)
        finally:
            close_quietly(files, fd)

    def _keepers(self, fd: int, victim: Segment) -> list[Keepers]:
        """The blocks to copy, run by run, in the order in which they lie."""
        state, now = self._state, self._state.clock.now_s()
        headers = [
            found
            for found in scan_runs(state.files, fd, 0, victim.num_bytes, uncached=state.leaves_cache)
            if not isinstance(found, Damage) and found.cipher_id == state.cipher.cipher_id
        ]
        located = [self._still_there(header, victim, now) for header in headers]
        worth = [np.where(places.rows >= 0, state.index.worth_of(places.rows, now), -1.0) for places in located]
        pins = [(header.entries["flags"] & PINNED) != 0 for header in headers]
        if not headers:
            return []
        limit = state.index.mean_worth(now)
        merit = np.concatenate(
            [np.where(pin & (value >= 0), np.inf, value) for pin, value in zip(pins, worth, strict=True)]
        )
        sizes = np.concatenate([header.entries["stored_bytes"].astype(np.int64) for header in headers])
        best = np.argsort(-merit, kind="stable")
        best = best[merit[best] > limit]
        best = best[np.cumsum(sizes[best]) <= COPIED_SHARE * victim.physical_bytes]
        chosen = np.zeros(len(merit), bool)
        chosen[best] = True
        keepers, begin = [], 0
        for header, places in zip(headers, located, strict=True):
            mine = np.flatnonzero(chosen[begin : begin + len(places)])
            begin += len(places)
            if len(mine):
                keepers.append(Keepers(header, mine, places.select(mine)))
        return keepers

    def _still_there(self, header: RunHeader, victim: Segment, now: int) -> Places:
        """Where a run's blocks lie now; rows are -1 for those that are gone or lie elsewhere."""
        places = self._state.index.locate(header.keys(), now)
        own = header.offset // 4096 + header.entries["page"].astype(np.int64)
        here = (places.rows >= 0) & (places.segments == victim.id) & (places.pages == own)
        places.rows[~here] = -1
        return places
