"""The host tier: blocks in one piece of this machine's memory, for a pool that lies on a GPU.

The caller gives the buffer: pinned memory, from which a GPU reads at the full rate of its bus. One thread copies.

    buffer   | place 0 | place 1 | place 2 | ...       a block lies at the beginning of its place
    index      name -> place, least recently used first; when no place is free, the first unpinned block is evicted

Memory fails less often than a disk, but a bit may flip in it. So every block has a checksum, which each load verifies.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from foreword.errors import ConfigError
from foreword.tiers.loads import Load, Loads
from foreword.tiers.ticket import JobThread, Outcome, Ticket
from foreword.tiers.tier import PINNED, BlockKeys, BlockRun, BoolArray, DoneCallback, TierCounts, TierStats

MAX_QUEUED_BYTES = 1 << 30
PATIENCE_S = 5.0
Name = bytes
"""Namespace, group and key of a block."""


@dataclass(slots=True)
class _Place:
    """A block in the buffer."""

    number: int
    num_bytes: int
    checksum: bytes
    is_pinned: bool
    expires: float


@dataclass(frozen=True, slots=True)
class _Store:
    """A store under way."""

    run: BlockRun
    ticket: Ticket


class HostTier(AbstractContextManager["HostTier"]):
    """Blocks in memory; a `Tier`. Raises ConfigError for a buffer that holds no block."""

    name = "host"

    def __init__(self, buffer: npt.NDArray[np.uint8], place_bytes: int) -> None:
        """`buffer`: [bytes], which nobody else uses; `place_bytes`: the bytes of the largest block."""
        num_places = len(buffer) // place_bytes
        if not num_places:
            raise ConfigError(f"cache_host_bytes={len(buffer)} holds no block of {place_bytes} bytes; give it more")
        self._places = buffer[: num_places * place_bytes].reshape(num_places, place_bytes)
        self._free = list(range(num_places))[::-1]
        self._index: OrderedDict[Name, _Place] = OrderedDict()
        self._lock = threading.Lock()
        """The lock of index and free places. No thread calls a ticket's methods while it holds this lock. Blocks are
        copied without the lock: only the copying thread reuses places, so no block is overwritten while it is read.
        """
        self._counts = TierCounts()
        self._is_closed = False
        self._thread: JobThread[Load | _Store] = JobThread("foreword-host", self._work, MAX_QUEUED_BYTES)
        self._loads = Loads(self._thread, self._counts, lambda load, lost: self.forget(load.keys.select(lost)))
        self.load, self.estimate_load_s = self._loads.load, self._loads.estimate_s
        """See `Tier`."""
        self._thread.start()

    def __exit__(self, *exc_info: object) -> None:
        self.close(PATIENCE_S)

    def lookup(self, keys: BlockKeys) -> BoolArray:
        is_present = self._contains(keys.names())
        self._counts.count(num_looked_up=len(keys), num_found=int(np.count_nonzero(is_present)))
        return is_present

    def probe(self, keys: BlockKeys, *, deadline_s: float = 0.05, on_done: DoneCallback | None = None) -> Ticket:
        ticket = Ticket(len(keys), deadline_s=deadline_s, on_done=on_done)
        if self._is_closed:
            ticket.cancel()
            return ticket
        is_present = self._contains(keys.names())
        ticket.settle(np.flatnonzero(is_present), Outcome.PRESENT)
        ticket.finish(Outcome.MISSING)
        return ticket

    def store(self, run: BlockRun, *, on_done: DoneCallback | None = None) -> Ticket:
        ticket = Ticket(len(run.keys), before_done=self._counts.count_store, on_done=on_done)
        self._thread.add(_Store(run, ticket), int(run.payload_bytes.sum()))
        return ticket

    def forget(self, keys: BlockKeys) -> None:
        """Forget these blocks, and free their places."""
        self._forget(keys.names())

    def close(self, flush_s: float) -> None:
        """Work on queued stores for at most `flush_s` seconds, and forget everything; see `Tier.close`."""
        self._thread.stop_after(flush_s)
        self._thread.join(flush_s + PATIENCE_S)
        self._is_closed = True
        self._forget(list(self._index))

    def stats(self) -> TierStats:
        stats = self._counts.copy_of_stats()
        stats.num_blocks, place_bytes = len(self._index), self._places.shape[1]
        stats.stored_bytes = stats.shared_bytes = stats.num_blocks * place_bytes
        stats.budget_bytes = self._places.size
        stats.load_bytes_per_s = self._loads.rate.bytes_per_s
        stats.queued_load_bytes = self._thread.amount
        return stats

    def check_integrity(self) -> None:
        """Raise AssertionError if a place is neither free nor used by exactly one block."""
        with self._lock:
            used = [place.number for place in self._index.values()]
            assert sorted(used + self._free) == list(range(len(self._places))), "a place is lost, or used twice"

    # ------------------------------------------------------------------------------ the copying thread

    def _work(self, job: Load | _Store) -> None:
        began, ticket = time.monotonic(), job.ticket
        blocks = job.run if isinstance(job, _Store) else job
        for index, (name, size) in enumerate(zip(blocks.keys.names(), blocks.payload_bytes.tolist(), strict=True)):
            if ticket.done:
                break
            if isinstance(job, _Store):
                self._store(job, index, name, size)
            elif (outcome := self._load(job, index, name, size)) is not None:
                ticket.settle(index, outcome)
        if isinstance(job, Load):
            self._loads.measure(job, began)
        ticket.finish(Outcome.CANCELLED)

    def _load(self, job: Load, index: int, name: Name, size: int) -> Outcome | None:
        """Verify a block and give it to the sink. Returns the outcome that is still to be recorded, or None."""
        with self._lock:
            place = self._find(name)
            if place is None or place.num_bytes != size:
                return Outcome.MISSING
            self._index.move_to_end(name)
        payload = self._places[place.number, :size]
        if xxhash.xxh3_128_digest(payload.data) != place.checksum:
            return Outcome.CORRUPT
        was_given = job.ticket.transfer(index, lambda: job.sink.put(index, payload.data.toreadonly()))
        return Outcome.DONE if was_given else None

    def _store(self, job: _Store, index: int, name: Name, size: int) -> None:
        """Copy a block into a place."""
        ticket, run = job.ticket, job.run
        if size > self._places.shape[1]:
            ticket.settle(index, Outcome.NO_ROOM)
            return
        with self._lock:
            is_here = self._find(name) is not None
            number = -1 if is_here else self._take_place()
        if is_here:
            ticket.settle(index, Outcome.PRESENT)
            return
        out = self._places[number, :size]
        if not ticket.transfer(index, lambda: run.source.take(index, out.data)):
            with self._lock:
                self._free.append(number)
            return
        expires = np.inf if run.ttl_s is None else time.monotonic() + run.ttl_s
        checksum, is_pinned = xxhash.xxh3_128_digest(out.data), bool(run.flags[index] & PINNED)
        with self._lock:
            replaced = self._index.pop(name, None)  # an expired block
            if replaced is not None:
                self._free.append(replaced.number)
            self._index[name] = _Place(number, size, checksum, is_pinned, expires)
        ticket.settle(index, Outcome.DONE)
        self._counts.count(num_written=1, written_bytes=size)

    # ------------------------------------------------------------------------------ places

    def _take_place(self) -> int:
        """Take a free place, or evict the least recently used block, pinned blocks last. The lock is held."""
        if not self._free:
            victim = next((name for name, place in self._index.items() if not place.is_pinned), None)
            if victim is None:
                victim = next(iter(self._index))
            self._free.append(self._index.pop(victim).number)
            self._counts.count(num_evicted=1)
        return self._free.pop()

    def _find(self, name: Name) -> _Place | None:
        """A block that is here and has not expired. The lock is held."""
        place = self._index.get(name)
        return place if place is not None and time.monotonic() < place.expires else None

    def _contains(self, names: list[Name]) -> BoolArray:
        with self._lock:
            return np.array([self._find(name) is not None for name in names], bool)

    def _forget(self, names: list[Name]) -> None:
        with self._lock:
            for name in names:
                place = self._index.pop(name, None)
                if place is not None:
                    self._free.append(place.number)
