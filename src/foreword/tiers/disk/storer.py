"""The storer: a bounded queue of runs, and the thread that writes them, keeps to the budget and saves the index.

Knows runs, tickets and time; the segment writer knows bytes, the space book sizes, the evictor worth.

A store is dropped, and counted, when the queue is full, when there is no room and nothing may go, and for a while after
the system has failed to write. Nobody waits for it.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foreword.tiers.disk.directory import SNAPSHOT_NAME
from foreword.tiers.disk.eviction import Evictor
from foreword.tiers.disk.index_snapshot import snapshot_bytes, write_snapshot
from foreword.tiers.disk.run_buffer import run_bytes_of, split_run
from foreword.tiers.disk.segment_writer import SegmentWriter
from foreword.tiers.disk.space import SpaceBook
from foreword.tiers.disk.state import DiskState
from foreword.tiers.ticket import Outcome, Ticket
from foreword.tiers.tier import BlockRun, DoneCallback

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
"""Without stores after a failed write; it doubles from the first to the longest."""
SNAPSHOT_SHARE = 20
"""Bytes stored for each byte of a snapshot, at the least, so that snapshots do not wear the disk."""

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Store:
    """A store under way."""

    run: BlockRun
    ticket: Ticket

    @property
    def num_bytes(self) -> int:
        return int(self.run.payload_bytes.sum())


class Storer:
    """Stores in the order in which they were asked for. `start` begins its thread, `close` ends it."""

    def __init__(self, state: DiskState) -> None:
        self._state = state
        self._space = SpaceBook(state)
        self._writer = SegmentWriter(state, self._space)
        self._evictor = Evictor(state, self._writer.copy)
        self._queue: deque[Store] = deque()
        self._wake = threading.Condition()
        self._queued_bytes = 0
        self._flush_until = 0.0
        self._pause_s = 0.0
        self._paused_until = 0.0
        self._next_upkeep = 0.0
        self._next_snapshot = time.monotonic() + state.options.snapshot_s
        self._saved_at_bytes = 0
        self._thread = threading.Thread(target=self._run, name="foreword-tier-store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    @property
    def space(self) -> SpaceBook:
        """For statistics."""
        return self._space

    def add(self, run: BlockRun, on_done: DoneCallback | None) -> Ticket:
        """Queue a run; a full queue drops it at once."""
        ticket = Ticket(len(run.keys), before_done=self._state.count_store, on_done=on_done)
        store = Store(run, ticket)
        with self._wake:
            if self._state.closing.is_set():
                refusal = Outcome.CANCELLED
            elif self._queued_bytes + store.num_bytes > self._state.options.max_queued_store_bytes:
                refusal = Outcome.QUEUE_FULL
            else:
                self._queue.append(store)
                self._queued_bytes += store.num_bytes
                self._wake.notify()
                return ticket
        ticket.finish(refusal)
        return ticket

    def close(self, flush_s: float, patience_s: float) -> None:
        """Set `closing`, store what is queued for at most `flush_s` seconds, cancel the rest, seal, save the index.

        A thread that hangs in the system is left to itself after another `patience_s` seconds.
        """
        with self._wake:
            self._flush_until = time.monotonic() + flush_s
            self._state.closing.set()
            self._wake.notify_all()
        self._thread.join(flush_s + patience_s)
        for store in self._emptied():
            store.ticket.cancel()

    # ------------------------------------------------------------------------------ the storing thread

    def _run(self) -> None:
        while True:
            if time.monotonic() >= self._next_upkeep:
                self._next_upkeep = time.monotonic() + self._state.options.upkeep_s
                self._attempt(self._look_after, "the cache directory could not be looked after")
            store = self._next()
            if store is not None:
                self._store(store)
            elif self._state.closing.is_set():
                break
        for store in self._emptied():
            store.ticket.cancel()
        self._attempt(self._writer.seal, "the last segment could not be sealed")
        self._attempt(self._save, "the index could not be saved")

    def _next(self) -> Store | None:
        """The next run; None if it is time for something else."""
        with self._wake:
            if not self._queue and not self._state.closing.is_set():
                self._wake.wait(max(0.0, self._next_upkeep - time.monotonic()))
            flushed = self._state.closing.is_set() and time.monotonic() >= self._flush_until
            return self._queue.popleft() if self._queue and not flushed else None

    def _emptied(self) -> list[Store]:
        with self._wake:
            left = list(self._queue)
            self._queue.clear()
            self._queued_bytes = 0
        return left

    def _store(self, store: Store) -> None:
        try:
            if not store.ticket.done:
                self._write_parts(store)
            store.ticket.finish(Outcome.NO_ROOM)
        except OSError as error:
            self._pause(error)
            store.ticket.finish(Outcome.IO_ERROR)
        except Exception:
            logger.exception("a store to disk failed unexpectedly; its blocks are dropped")
            store.ticket.finish(Outcome.IO_ERROR)
        finally:
            with self._wake:
                self._queued_bytes = max(0, self._queued_bytes - store.num_bytes)

    def _write_parts(self, store: Store) -> None:
        run, ticket = store.run, store.ticket
        present = self._state.index.contains(run.keys, self._state.clock.now_s()) | repeated(run)
        ticket.settle(np.flatnonzero(present), Outcome.PRESENT)
        if time.monotonic() < self._paused_until:
            return
        stored = run.payload_bytes + self._state.cipher.overhead_bytes
        for part in split_run(stored, np.flatnonzero(~present)):
            if ticket.done:
                return
            if not self._make_room(run_bytes_of(stored[part])):
                return
            written = self._writer.append(run, part, ticket)
            ticket.settle(written, Outcome.DONE)
            self._state.count(num_written=len(written))
            ticket.settle(part, Outcome.IO_ERROR)  # the rest: their source failed
        self._pause_s = 0.0

    def _make_room(self, num_bytes: int) -> bool:
        """Evict until `num_bytes` can be written; False if that cannot be reached."""
        # A quarter of a segment stays free, for what eviction copies forward before it unlinks.
        reserve = self._space.segment_bytes // 4
        if num_bytes + reserve > self._space.budget_bytes:
            return False
        while self._space.shortfall(num_bytes + reserve) > 0:
            if not self._space.may_evict or not self._evict():
                return False
        return True

    def _evict(self) -> bool:
        """Unlink one segment; the open one is sealed first if it is the only one."""
        try:
            if self._evictor.evict_one(copies=self._pause_s == 0):
                return True
            self._writer.seal()
            return self._evictor.evict_one(copies=False)
        except OSError as error:
            logger.warning("a segment could not be evicted: %s", error)
            return False

    def _pause(self, error: OSError) -> None:
        """Store nothing for a while, and give back a segment: what the system lacks is mostly room."""
        self._pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))
        self._paused_until = time.monotonic() + self._pause_s
        logger.warning("the cache on disk could not be written: %s; it drops blocks for %.0f s", error, self._pause_s)
        if error.errno in NO_SPACE:
            self._evict()

    # ------------------------------------------------------------------------------ upkeep

    def _attempt(self, work: Work, complaint: str) -> None:
        try:
            work()
        except OSError as error:
            logger.warning("%s: %s", complaint, error)
        except Exception:
            logger.exception(complaint)

    def _look_after(self) -> None:
        """Expiry, sizes, other processes' shares, and the snapshot if it is time."""
        self._state.index.forget_expired(self._state.clock.now_s())
        self._space.refresh()
        while self._space.used_bytes > self._space.budget_bytes or self._space.must_give_way:
            if not self._space.may_evict or not self._evict():
                break
        written = self._state.stats.written_bytes - self._saved_at_bytes
        enough = max(1, SNAPSHOT_SHARE * snapshot_bytes(len(self._state.index)))
        if time.monotonic() >= self._next_snapshot and written >= enough:
            self._save()

    def _save(self) -> None:
        """Write the snapshot of our segments."""
        self._next_snapshot = time.monotonic() + self._state.options.snapshot_s
        self._saved_at_bytes = self._state.stats.written_bytes
        scanned = [segment for segment in self._state.table.own() if segment.is_scanned]
        path = self._state.directory.home / SNAPSHOT_NAME
        state = self._state
        write_snapshot(state.files, path, state.index, scanned, state.clock, state.cipher.cipher_id)


def repeated(run: BlockRun) -> npt.NDArray[np.bool_]:
    """Which blocks of a run have the name of an earlier one, [blocks]."""
    names = np.concatenate([run.keys.keys, run.keys.group_ids.astype("<u2")[:, None].view(np.uint8)], axis=1)
    _, first = np.unique(names, axis=0, return_index=True)
    again = np.ones(len(names), bool)
    again[first] = False
    return again
