"""The scanner: finds the blocks that are on disk when a process starts, and those that others seal or leave later.

It works in a thread of its own and inserts what it finds as it goes, so serving starts at once: what is not yet found
is a miss.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import numpy as np

from foreword.tiers.disk.directory import SNAPSHOT_NAME
from foreword.tiers.disk.files import close_quietly, physical_bytes
from foreword.tiers.disk.run_format import ENTRY, PAGE, RunHeader
from foreword.tiers.disk.segment_index import read_snapshot
from foreword.tiers.disk.segments import Damage, Segment, new_blocks, scan_runs
from foreword.tiers.disk.state import DiskState
from foreword.tiers.tier import BlockKeys

logger = logging.getLogger(__name__)

RUNS_AT_ONCE = 100
"""Runs whose blocks are inserted together."""


class Scanner:
    """Fills table and index. `start` begins its thread, `close` ends it."""

    def __init__(self, state: DiskState) -> None:
        self._state = state
        self.finished = threading.Event()
        """What was here when the tier was opened is in the index."""
        self._thread = threading.Thread(target=self._run, name="foreword-tier-scan", daemon=True)

    def start(self) -> None:
        """Note our segments, whose numbers must not be used again, then scan. Raises OSError."""
        for path in self._state.directory.segments_of(self._state.directory.home):
            self._state.table.add(path, is_own=True)
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
        """Insert what the snapshot says of our segments that are still there."""
        state = self._state
        path = state.directory.home / SNAPSHOT_NAME
        snapshot = read_snapshot(state.files, path, state.clock, state.cipher.cipher_id)
        if snapshot is None:
            return
        ids = np.full(len(snapshot.segments), -1, np.int64)
        covered = {}
        for number, (name, num_bytes) in enumerate(snapshot.segments):
            path = state.directory.home / name
            if "/" in name or not state.table.knows(path):
                continue
            segment = state.table.add(path, is_own=True)
            size = self._measure(segment)
            if size is not None and size >= num_bytes:
                ids[number] = segment.id
                covered[segment.id] = num_bytes
        where = ids[snapshot.columns["segment"].astype(np.int64)]
        columns = {name: values[where >= 0] for name, values in snapshot.columns.items()}
        columns["segment"] = where[where >= 0].astype(np.uint32)
        state.index.insert_rows(columns, snapshot.names)
        for segment_id, num_bytes in covered.items():
            if (known := state.table.get(segment_id)) is not None:
                known.num_bytes = num_bytes

    def _look(self) -> None:
        """Take over what dead processes left, scan new segments, and drop those that are gone."""
        state, directory = self._state, self._state.directory
        directory.adopt()
        for path in directory.segments_of(directory.home):
            if not state.table.knows(path):
                state.table.add(path, is_own=True)
        # The last segment of another process may still be written. So may another one, if the process has taken over
        # segments of a dead one whose numbers are higher: what has grown is scanned again.
        others = {path for home in directory.other_homes() for path in directory.segments_of(home)[:-1]}
        for segment in state.table.all():
            # Before anything is scanned: a block that is known at a place that is gone would hide where it lies now.
            if not segment.is_own and segment.path not in others:
                state.lose_segment(segment)
        for path in sorted(others):
            state.table.add(path, is_own=False)
        for segment in state.table.all():
            if not segment.is_own and segment.is_scanned:
                size = self._measure(segment)
                segment.is_scanned = size is None or size // PAGE * PAGE <= segment.num_bytes
        for segment in sorted(state.table.all(), key=lambda segment: not segment.is_own):
            if not segment.is_scanned and not state.closing.is_set():
                self._scan(segment)

    def _measure(self, segment: Segment) -> int | None:
        """The size of a segment's file; None, and the segment is lost, if it is gone or no file."""
        try:
            status = self._state.files.stat(segment.path)
        except FileNotFoundError:
            self._state.lose_segment(segment)
            return None
        segment.physical_bytes = physical_bytes(status)
        return status.st_size

    def _scan(self, segment: Segment) -> None:
        """Index a segment from where the snapshot ended. Errors are logged, and its blocks are misses."""
        state = self._state
        try:
            size = self._measure(segment)
            if size is None:
                return
            fd = state.files.open_for_reading(segment.path)
        except OSError as error:
            logger.warning("%s could not be scanned: %s", segment.path, error)
            return
        batch: list[RunHeader] = []
        try:
            for found in scan_runs(state.files, fd, segment.num_bytes, size, uncached=state.leaves_cache):
                if state.closing.is_set():
                    return
                if isinstance(found, Damage):
                    state.count(num_damaged_headers=1)
                    logger.warning(
                        "%s has no sound header from byte %d to %d", segment.path.name, found.offset, found.end
                    )
                elif found.cipher_id == state.cipher.cipher_id:
                    batch.append(found)
                if len(batch) >= RUNS_AT_ONCE:
                    self._insert(batch, segment, size)
                    batch = []
            segment.num_bytes = size // PAGE * PAGE
            segment.is_scanned = True
        except OSError as error:
            logger.warning("%s could not be scanned: %s", segment.path, error)
        finally:
            close_quietly(state.files, fd)
            self._insert(batch, segment, size)
            state.drop_if_lost(segment)

    def _insert(self, headers: list[RunHeader], segment: Segment, size: int) -> None:
        """Index the blocks of runs that lie within the file."""
        clock = self._state.clock
        for namespace in {header.namespace for header in headers}:
            some = [header for header in headers if header.namespace == namespace]
            counts = [len(header.entries) for header in some]
            entries = np.frombuffer(b"".join(header.entries.tobytes() for header in some), ENTRY)
            offsets = np.repeat([header.offset for header in some], counts)
            expires = np.repeat([clock.expiry_of(header.created_s, header.expires_s) for header in some], counts)
            ages = [clock.wall_s() - header.created_s for header in some]
            used = np.repeat([clock.moment_before(age) for age in ages], counts)
            ends = offsets + entries["page"].astype(np.int64) * PAGE + entries["stored_bytes"]
            whole = ends <= size
            keys = BlockKeys(namespace, entries["group"][whole], entries["key"][whole])
            blocks = new_blocks(entries[whole], keys, segment.id, offsets[whole], expires[whole], used[whole])
            self._state.index.insert_found(blocks)
