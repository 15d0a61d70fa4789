"""The storer: a bounded queue of runs, and the thread that writes them, keeps to the budget and saves the index.

A store is dropped, and counted, when the queue is full, when there is no room and no segment may be evicted, and for a
while after the system has failed to write. No caller waits for a store.

`SegmentWriter` gathers runs in a buffer and appends them to the newest segment. A run is written by one call, header
first. Its blocks can be found before they are synced: if a crash tears the run, they do not verify. A segment is synced
once, when it is sealed.

`SpaceBook` knows the limits of space: a budget in physical bytes, the least free space, and shares of several
processes. All processes together keep to the budget: each measures the files of all, and changes only its own. A
process that is alone may use the whole budget. When others come, it evicts segment by segment until it is at its share.
Until it measures again, each process may write the bytes that were free before. So the processes together may exceed
the budget for a moment.

`Evictor` chooses the segment with the least worth per physical byte. A block is worth the seconds that a hit saves,
times (1 + its loads), halved for every six hours since its last load. So blocks that were loaded often and lately stay,
and a large segment with few blocks left is evicted early. Before a segment is unlinked, its pinned blocks and its
blocks that are worth more than the tier's mean are copied to the newest segment: the best blocks first, at most a
quarter of the segment. A segment stays if more than a quarter of it is pinned.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foreword.config.sizes import format_bytes
from foreword.tiers.cipher import block_name
from foreword.tiers.disk.directory import SNAPSHOT_NAME
from foreword.tiers.disk.files import close_quietly, physical_bytes, write_fully
from foreword.tiers.disk.segment_index import ROW, Rows, worth_of, write_snapshot
from foreword.tiers.disk.segments import (
    PAGE,
    Damage,
    RunBuffer,
    RunHeader,
    Segment,
    read_block,
    run_bytes_of,
    scan_runs,
    split_run,
)
from foreword.tiers.disk.state import DiskState
from foreword.tiers.rare_warning import RareWarning
from foreword.tiers.ticket import JobThread, Outcome, Ticket
from foreword.tiers.tier import PINNED, BlockRun, DoneCallback

logger = logging.getLogger(__name__)
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
"""After a failed write, nothing is stored for `FIRST_PAUSE_S`. Each further failure doubles the pause, up to the
longest."""
SNAPSHOT_SHARE = 20
"""To spare the disk, a snapshot is written only after new blocks of this many times its size were stored."""
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
COPIED_SHARE = 0.25
"""The largest share of an evicted segment that is copied forward."""


class SpaceBook:
    """The space that is used and left. Only the storing thread calls it; `refresh` and `measure` read the disk."""

    def __init__(self, state: DiskState) -> None:
        options = state.options
        assert options.budget_bytes is not None
        assert options.segment_bytes is not None
        assert options.min_free_bytes is not None
        self._state = state
        self.budget_bytes: int = options.budget_bytes
        self.segment_bytes: int = options.segment_bytes
        self.min_free_bytes: int = options.min_free_bytes
        self._other_bytes = 0
        self._num_processes = 1
        self._snapshot_bytes = 0

    @property
    def own_bytes(self) -> int:
        """Physical bytes of this process's segments and snapshot."""
        return self._snapshot_bytes + sum(segment.physical_bytes for segment in self._state.index.own_segments())

    @property
    def used_bytes(self) -> int:
        """Physical bytes of all processes' files; those of other processes as of the last `refresh`."""
        return self.own_bytes + self._other_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that are free in the file system now. Raises OSError."""
        return self._state.files.space(self._state.directory.home).free_bytes

    @property
    def share_bytes(self) -> int:
        """The bytes that each process may keep when other processes need room."""
        return self.budget_bytes // self._num_processes

    def measure(self, segment: Segment) -> None:
        """Measure one of our segments. Raises OSError."""
        segment.physical_bytes = physical_bytes(self._state.files.stat(segment.path))

    def refresh(self) -> None:
        """Measure the files of all processes again. Raises OSError."""
        directory = self._state.directory
        for segment in self._state.index.own_segments():
            try:
                self.measure(segment)
            except FileNotFoundError:
                self._state.index.remove_segment(segment)
        self._snapshot_bytes = self._bytes_of_snapshot()
        others = directory.other_homes()
        self._other_bytes, self._num_processes = directory.physical_bytes(others), 1 + len(others)

    def shortfall(self, num_bytes: int) -> int:
        """Bytes to evict before `num_bytes` can be written; 0 or less: there is room. Raises OSError."""
        return max(self.used_bytes + num_bytes - self.budget_bytes, self.min_free_bytes + num_bytes - self.free_bytes)

    @property
    def may_evict(self) -> bool:
        """Whether this process may evict: it is alone, or it has more than its share."""
        return self._num_processes == 1 or self.own_bytes > self.share_bytes

    @property
    def must_give_way(self) -> bool:
        """Whether other processes need room for a segment while this process has more than its share."""
        crowded = self.used_bytes + self.segment_bytes > self.budget_bytes
        return self._num_processes > 1 and crowded and self.own_bytes > self.share_bytes

    def _bytes_of_snapshot(self) -> int:
        try:
            return physical_bytes(self._state.files.stat(self._state.directory.home / SNAPSHOT_NAME))
        except FileNotFoundError:
            return 0


class SegmentWriter:
    """Appends runs. Only the storing thread calls it."""

    def __init__(self, state: DiskState, space: SpaceBook) -> None:
        self._state = state
        self._space = space
        self._buffer = RunBuffer()
        self._open: Segment | None = None
        self._fd = -1
        self._sequence = 0

    def append(self, run: BlockRun, part: npt.NDArray[np.int64], ticket: Ticket) -> npt.NDArray[np.int64]:
        """Write a part of a run, and index its blocks. Returns the stored blocks' indices in the run.

        Blocks whose source failed or whose ticket ended are left out. Raises OSError; then nothing is indexed.
        """
        state, buffer = self._state, self._buffer
        stored = (run.payload_bytes[part] + state.cipher.overhead_bytes).astype(np.int64)
        buffer.begin(stored)
        for index, stored_bytes in zip(part.tolist(), stored.tolist(), strict=True):
            if self._gather(run, index, ticket, buffer.place(stored_bytes)[:stored_bytes]):
                buffer.add(run, index, stored_bytes)
        indices = buffer.kept
        if not len(indices):
            return indices
        created = state.clock.wall_s()
        expires = 0 if run.ttl_s is None else created + max(1, int(run.ttl_s))
        segment, header = self._write(run.keys.namespace, created, expires)
        state.index.insert(header, segment, expires=state.clock.expiry_of(created, expires), used=state.clock.now_s())
        return indices

    def copy(self, fd: int, source: Segment, header: RunHeader, chosen: npt.NDArray[np.int64]) -> int:
        """Verify blocks of a run in the file `fd`, and copy them unchanged; returns the number copied."""
        files, buffer, copied = self._state.files, self._buffer, 0
        lengths = header.entries["stored_bytes"].astype(np.int64)
        for part in split_run(lengths, chosen):
            buffer.begin(lengths[part])
            for index in part.tolist():
                out = buffer.place(int(lengths[index]))
                if read_block(files, fd, header, index, out, uncached=self._state.leaves_cache):
                    buffer.copy(header, index)
            if len(buffer.kept):
                target, new_header = self._write(header.namespace, header.created_s, header.expires_s)
                copied += self._state.index.move(new_header, source, target)
        return copied

    def seal(self) -> None:
        """Sync and close the open segment, which is only read from now on. It is sealed even after an OSError."""
        if self._open is None:
            return
        segment, fd = self._open, self._fd
        self._open, self._fd = None, -1
        segment.is_open = False
        try:
            self._state.files.sync(fd)
        finally:
            close_quietly(self._state.files, fd)
        try:
            self._space.measure(segment)
        except FileNotFoundError:  # somebody removed it
            self._state.index.remove_segment(segment)

    # ------------------------------------------------------------------------------ within

    def _gather(self, run: BlockRun, index: int, ticket: Ticket, out: memoryview) -> bool:
        cipher = self._state.cipher
        if not cipher.overhead_bytes:
            return ticket.transfer(index, lambda: run.source.take(index, out))
        payload = memoryview(bytearray(int(run.payload_bytes[index])))
        if not ticket.transfer(index, lambda: run.source.take(index, payload)):
            return False
        key, group_id = run.keys.keys[index].tobytes(), int(run.keys.group_ids[index])
        cipher.seal(block_name(run.keys.namespace, group_id, key), payload, out)
        return True

    def _write(self, namespace: bytes, created_s: int, expires_s: int) -> tuple[Segment, RunHeader]:
        state = self._state
        segment = self._segment_for(self._buffer.num_bytes)
        offset = segment.num_bytes
        self._sequence += 1
        cipher_id, moments = state.cipher.cipher_id, {"created_s": created_s, "expires_s": expires_s}
        header, data = self._buffer.finish(self._sequence, namespace, cipher_id, offset, **moments)
        try:
            write_fully(state.files, self._fd, data, offset, uncached=state.leaves_cache)
        except OSError:
            self._abandon(offset)
            raise
        segment.num_bytes = offset + header.run_bytes
        state.count(written_bytes=header.run_bytes)
        try:
            self._space.measure(segment)
        except FileNotFoundError:
            self._drop_open()
            raise
        except OSError:
            segment.physical_bytes = segment.num_bytes
        return segment, header

    def _segment_for(self, num_bytes: int) -> Segment:
        """The open segment if a run of `num_bytes` fits into it, otherwise a new one."""
        if self._open is not None and self._state.index.segment(self._open.id) is None:
            self._drop_open()  # the loader found that its file is gone
        if self._open is not None and self._open.num_bytes + num_bytes > self._space.segment_bytes:
            try:
                self.seal()
            except OSError as error:  # a sync that fails may have lost what was written, which then does not verify
                logger.warning("a segment could not be sealed: %s", error)
        if self._open is None:
            segment = self._state.index.open_segment(self._state.directory.home)
            try:
                self._fd = self._state.files.create(segment.path)
            except OSError:
                self._state.index.remove_segment(segment)
                raise
            self._open = segment
        return self._open

    def _drop_open(self) -> None:
        """Give up the open segment, whose file somebody removed."""
        assert self._open is not None
        self._state.index.remove_segment(self._open)
        close_quietly(self._state.files, self._fd)
        self._open, self._fd = None, -1

    def _abandon(self, offset: int) -> None:
        """Seal the open segment after a failed write, without the torn run; remove the segment if it is empty."""
        assert self._open is not None
        segment = self._open
        try:
            self._state.files.truncate(self._fd, offset)
        except OSError as error:
            logger.warning("a torn run stays at the end of a segment: %s", error)
        try:
            self.seal()
            if offset == 0:  # otherwise the next eviction would take it, and free nothing
                self._state.index.remove_segment(segment)
                self._state.files.unlink(segment.path)
        except OSError as error:
            logger.warning("a segment could not be sealed: %s", error)


class Evictor:
    """Unlinks segments. Only the storing thread calls it."""

    def __init__(self, state: DiskState, writer: SegmentWriter) -> None:
        self._state = state
        self._writer = writer

    def evict_one(self, *, copies: bool) -> bool:
        """Unlink the segment that is worth least; `copies`: copy its best blocks before. False if no segment can be
        evicted. Raises OSError if the file cannot be unlinked. Even then, the index has forgotten the segment.
        """
        victim = self._choose()
        if victim is None:
            return False
        if copies:
            self._copy_best(victim)
        # Forget the segment before its file is unlinked: if that fails, it must not be chosen again and again.
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
        # It is not known yet what the unscanned segments hold, so the oldest of them is evicted.
        return next((segment for segment in candidates if not segment.is_scanned), None)

    def _copy_best(self, victim: Segment) -> None:
        """Copy the best blocks of a segment to the newest segment, as far as that succeeds."""
        files = self._state.files
        try:
            fd = files.open_for_reading(victim.path)
        except OSError:
            return
        try:
            for header, chosen in self._keepers(fd, victim):
                self._state.count(num_copied_forward=self._writer.copy(fd, victim, header, chosen))
        except OSError as error:
            logger.warning("blocks of %s could not be copied forward: %s", victim.path.name, error)
        finally:
            close_quietly(files, fd)

    def _keepers(self, fd: int, victim: Segment) -> list[tuple[RunHeader, npt.NDArray[np.int64]]]:
        """The blocks to copy, in the order of the file: each run's header, and the indices of entries in it."""
        state, now = self._state, self._state.clock.now_s()
        headers = [
            header
            for header in scan_runs(state.files, fd, 0, victim.num_bytes, uncached=state.leaves_cache)
            if not isinstance(header, Damage) and header.cipher_id == state.cipher.cipher_id
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
        page = header.offset // PAGE + header.entries["page"]
        is_here = (rows["name"] != 0) & (rows["segment"] == victim.id) & (rows["page"] == page)
        worth = np.where(header.entries["flags"] & PINNED, np.inf, worth_of(rows, now))
        return np.where(is_here, worth, -1.0)


@dataclass(frozen=True, slots=True)
class Store:
    """A store under way."""

    run: BlockRun
    ticket: Ticket


class Storer:
    """Writes runs of blocks in the order of the calls of `store`, and looks after the directory between two runs."""

    def __init__(self, state: DiskState) -> None:
        self._state = state
        self.space = SpaceBook(state)
        """The space, for statistics."""
        self._writer = SegmentWriter(state, self.space)
        self._evictor = Evictor(state, self._writer)
        self._pause_s = 0.0
        self._paused_until = 0.0
        self._next_upkeep = 0.0
        self._next_snapshot = time.monotonic() + state.options.snapshot_s
        self._saved_at_bytes = 0
        self._full_disk = RareWarning(
            logger, "the cache on disk drops blocks: its disk has %s free, and it leaves %s free; make room on the disk"
        )
        self.thread: JobThread[Store] = JobThread(
            "foreword-tier-store", self._store, state.options.max_queued_store_bytes, self._between, self._end
        )

    def store(self, run: BlockRun, *, on_done: DoneCallback | None = None) -> Ticket:
        """See `Tier.store`. A full queue drops a run at once."""
        ticket = Ticket(len(run.keys), before_done=self._state.count_store, on_done=on_done)
        self.thread.add(Store(run, ticket), int(run.payload_bytes.sum()))
        return ticket

    # ------------------------------------------------------------------------------ the storing thread

    def _between(self) -> float:
        """Look after the directory if it is time; returns the seconds until the next time."""
        if time.monotonic() >= self._next_upkeep:
            self._next_upkeep = time.monotonic() + self._state.options.upkeep_s
            self._attempt(self._look_after, "the cache directory could not be looked after")
        return max(0.0, self._next_upkeep - time.monotonic())

    def _end(self) -> None:
        self._attempt(self._writer.seal, "the last segment could not be sealed")
        self._attempt(self._save, "the index could not be saved")

    def _store(self, store: Store) -> None:
        self._between()
        try:
            if not store.ticket.done:
                self._write_parts(store)
            store.ticket.finish(Outcome.NO_ROOM)
        except OSError as error:
            self._pause(error)
            store.ticket.finish(Outcome.IO_ERROR)

    def _write_parts(self, store: Store) -> None:
        run, ticket = store.run, store.ticket
        present = self._state.index.contains(run.keys, self._state.clock.now_s()) | run.repeats()
        ticket.settle(np.flatnonzero(present), Outcome.PRESENT)
        if time.monotonic() < self._paused_until:
            return
        stored = run.payload_bytes + self._state.cipher.overhead_bytes
        for part in split_run(stored, np.flatnonzero(~present)):
            if ticket.done:
                return
            if not self._make_room(run_bytes_of(stored[part])):
                return
            indices = self._writer.append(run, part, ticket)
            ticket.settle(indices, Outcome.DONE)
            self._state.count(num_written=len(indices))
            ticket.settle(part, Outcome.IO_ERROR)  # the rest: their source failed
        self._pause_s = 0.0

    def _make_room(self, num_bytes: int) -> bool:
        """Evict until `num_bytes` can be written; False if that is impossible."""
        # A quarter of a segment stays free for the blocks that eviction copies forward before it unlinks.
        reserve = self.space.segment_bytes // 4
        if num_bytes + reserve > self.space.budget_bytes:
            return False
        while self.space.shortfall(num_bytes + reserve) > 0:
            if not self.space.may_evict or not self._evict():
                if (free_bytes := self.space.free_bytes) < self.space.min_free_bytes + num_bytes + reserve:
                    self._full_disk.note(format_bytes(free_bytes), format_bytes(self.space.min_free_bytes))
                return False
        return True

    def _evict(self) -> bool:
        """Unlink one segment. If no sealed segment can be unlinked, the open segment is sealed first."""
        try:
            if self._evictor.evict_one(copies=self._pause_s == 0):
                return True
            self._writer.seal()
            return self._evictor.evict_one(copies=False)
        except OSError as error:
            logger.warning("a segment could not be evicted: %s", error)
            return False

    def _pause(self, error: OSError) -> None:
        """Store nothing for a while; if the system lacks room, evict a segment."""
        self._pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))
        self._paused_until = time.monotonic() + self._pause_s
        logger.warning("the cache on disk could not be written: %s; it drops blocks for %.0f s", error, self._pause_s)
        if error.errno in NO_SPACE:
            self._evict()

    # ------------------------------------------------------------------------------ upkeep

    def _attempt(self, work: Callable[[], object], complaint: str) -> None:
        try:
            work()
        except OSError as error:
            logger.warning("%s: %s", complaint, error)
        except Exception:
            logger.exception(complaint)

    def _look_after(self) -> None:
        """Forget expired blocks, measure files, evict if others need room, and save a snapshot if it is time."""
        self._state.index.forget_expired(self._state.clock.now_s())
        self.space.refresh()
        while self.space.used_bytes > self.space.budget_bytes or self.space.must_give_way:
            if not self.space.may_evict or not self._evict():
                break
        written_bytes = self._state.stats.written_bytes - self._saved_at_bytes
        enough = max(1, SNAPSHOT_SHARE * ROW.itemsize * len(self._state.index))
        if time.monotonic() >= self._next_snapshot and written_bytes >= enough:
            self._save()

    def _save(self) -> None:
        self._next_snapshot = time.monotonic() + self._state.options.snapshot_s
        self._saved_at_bytes = self._state.stats.written_bytes
        state = self._state
        scanned = state.index.snapshot([segment for segment in state.index.own_segments() if segment.is_scanned])
        write_snapshot(state.files, state.directory.home / SNAPSHOT_NAME, scanned, state.clock, state.cipher.cipher_id)
