"""The scanner: finds blocks that are on disk when a process starts, and those that other processes seal or leave later.

The scanner has its own thread, and inserts blocks as it finds them. So serving starts at once: a block that is not
found yet is a miss.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from foreword.tiers.disk.directory import SNAPSHOT_NAME, segments_in
from foreword.tiers.disk.files import opened, physical_bytes
from foreword.tiers.disk.segment_index import read_snapshot
from foreword.tiers.disk.segments import PAGE, Damage, RunHeader, Segment, scan_runs
from foreword.tiers.disk.state import DiskState

logger = logging.getLogger(__name__)


class Scanner:
    """Fills the index. `start` begins its thread, `close` ends it."""

    def __init__(self, state: DiskState) -> None:
        self._state = state
        self.finished = threading.Event()
        """Set once all blocks that were here when the tier was opened are in the index."""
        self._told: dict[int, str] = {}
        """Segment -> why it could not be scanned, as the log says."""
        self._thread = threading.Thread(target=self._run, name="foreword-tier-scan", daemon=True)

    def start(self) -> None:
        """Add our segments to the index, so that no segment number is used again, and begin to scan. Raises OSError."""
        for path in segments_in(self._state.files, self._state.directory.home):
            self._state.index.add_segment(path, is_own=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        self._guard(self._read_snapshot)
        while True:
            self._guard(self._look)
            self.finished.set()
            if self._state.closing.wait(self._state.options.rescan_s):
                return

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except OSError as error:
            logger.warning("the cache directory could not be scanned: %s", error)
        except Exception:
            logger.exception("the cache directory could not be scanned")

    def _read_snapshot(self) -> None:
        """Insert the snapshot's blocks whose segments are ours and still there."""
        state, home = self._state, self._state.directory.home
        snapshot = read_snapshot(state.files, home / SNAPSHOT_NAME, state.clock, state.cipher.cipher_id)
        if snapshot is None:
            return
        segments: list[Segment | None] = []
        for name, num_bytes in snapshot.segments:
            segment = None
            if "/" not in name and state.index.knows(home / name):
                segment = state.index.add_segment(home / name, is_own=True)
                size = self._measure(segment)
                if size is None or size < num_bytes:
                    segment = None
            segments.append(segment)
        state.index.insert_snapshot(snapshot, segments)
        for segment, (_, num_bytes) in zip(segments, snapshot.segments, strict=True):
            if segment is not None:
                segment.num_bytes = num_bytes

    def _look(self) -> None:
        """Take over segments of dead processes, scan new segments, and drop segments that are gone."""
        state, directory, index = self._state, self._state.directory, self._state.index
        directory.adopt()
        for path in segments_in(state.files, directory.home):
            index.add_segment(path, is_own=True)
        # The last segment of another process may still be written. So may an earlier segment, if the process has taken
        # over segments of a dead process with higher numbers: a segment that has grown is scanned again.
        others = {path for home in directory.other_homes() for path in segments_in(state.files, home)[:-1]}
        for segment in index.segments():
            # Do this before scanning: a block that is known keeps its old place, even if that place is gone.
            if not segment.is_own and segment.path not in others:
                index.remove_segment(segment)
        for path in sorted(others):
            index.add_segment(path, is_own=False)
        for segment in index.segments():
            if not segment.is_own and segment.is_scanned:
                size = self._measure(segment)
                segment.is_scanned = size is None or size // PAGE * PAGE <= segment.num_bytes
        for segment in sorted(index.segments(), key=lambda segment: not segment.is_own):
            if not segment.is_scanned and not state.closing.is_set():
                self._scan(segment)

    def _measure(self, segment: Segment) -> int | None:
        """The size of a segment's file. If the file is gone, forget the segment and return None."""
        try:
            status = self._state.files.stat(segment.path)
        except FileNotFoundError:
            self._state.index.remove_segment(segment)
            return None
        segment.physical_bytes = physical_bytes(status)
        return status.st_size

    def _scan(self, segment: Segment) -> None:
        """Index the rest of a segment. Errors are logged; blocks that were not indexed are misses."""
        state = self._state
        try:
            size = self._measure(segment)
            if size is None:
                return
            with opened(state.files, segment.path) as fd:
                for part in scan_runs(state.files, fd, segment.num_bytes, size, uncached=state.leaves_cache):
                    if state.closing.is_set():
                        return
                    if isinstance(part, Damage):
                        state.count(num_damaged_headers=1)
                        name = segment.path.name
                        logger.warning("%s has no sound header from byte %d to %d", name, part.offset, part.end)
                    elif part.cipher_id == state.cipher.cipher_id:
                        self._insert(part, segment, size)
            segment.num_bytes = size // PAGE * PAGE
            segment.is_scanned = True
            self._measure(segment)  # it may have been evicted meanwhile
        except OSError as error:
            # It is tried again at each look; another reason is news.
            if self._told.get(segment.id) != (reason := str(error)):
                self._told[segment.id] = reason
                logger.warning("%s could not be scanned: %s", segment.path, error)

    def _insert(self, run: RunHeader, segment: Segment, size: int) -> None:
        """Index the blocks of a run that lie within the file."""
        clock = self._state.clock
        self._state.index.insert(
            run.within(size),
            segment,
            expires=clock.expiry_of(run.created_s, run.expires_s),
            used=clock.moment_before(clock.wall_s() - run.created_s),
            was_found=True,
        )
