"""One pass over a trace: LRU at every capacity asked for, unlimited memory, and when blocks come again.

Knows requests and stack distances. Requests are collected first: long arrays (ten thousand blocks) cost less per block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from foreword.replay.caches import HitCount, LruCache
from foreword.replay.distances import LruCurve
from foreword.replay.tables import FloatArray, Uses
from foreword.replay.trace import RecordedRequest

BATCH_BLOCKS = 2**15


@dataclass(slots=True)
class ReuseIntervals:
    """Time from a block's last use to its next use, in intervals that double."""

    unit: str = "requests"
    """"requests", or "s" if the recording has times."""
    counts: dict[int, int] = field(default_factory=dict)
    """Reuses by interval: key k counts those from 2**k up to 2**(k + 1) units; below 1 unit: key -1."""

    def note(self, intervals: FloatArray) -> None:
        """Count some reuses."""
        doublings = np.where(intervals >= 1, np.frexp(intervals)[1] - 1, -1)
        for doubling, count in zip(*np.unique(doublings, return_counts=True), strict=True):
            self.counts[int(doubling)] = self.counts.get(int(doubling), 0) + int(count)


class _Batch:
    """Several requests laid end to end."""

    def __init__(self, requests: Sequence[RecordedRequest]) -> None:
        self.requests = requests
        self.keys = np.concatenate([request.keys for request in requests])
        self.lengths = [len(request.keys) for request in requests]
        self.longest = max(self.lengths)
        self._ends = np.cumsum([0, *self.lengths])
        self._block_tokens = np.array([request.block_tokens for request in requests], np.int64)
        self._prompt_tokens = np.array([request.num_prompt_tokens for request in requests], np.int64)

    def note(self, count: HitCount, found: npt.NDArray[np.bool_]) -> None:
        """Count the blocks `found` [blocks]; of each request they are the first."""
        before = np.concatenate((np.zeros(1, np.int64), np.cumsum(found)))
        held = np.diff(before[self._ends])
        count.blocks += int(held.sum())
        count.tokens += int(np.minimum(held * self._block_tokens, self._prompt_tokens).sum())


@dataclass(slots=True)
class _LruAtCapacity:
    """Counts from the stack's distances until a request does not fit into the cache, which must not move a block."""

    count: HitCount
    capacity: int
    cache: LruCache | None = None

    def take(self, batch: _Batch, uses: Uses) -> None:
        if self.cache is not None:
            for request in batch.requests:
                self.count.note(request, self.cache.admit(request), self.capacity)
        else:
            batch.note(self.count, (uses.distances > 0) & (uses.distances <= self.capacity))


class OnePass:
    """LRU, unlimited memory and reuse intervals of the admitted requests; complete after `flush`.

    With a sampling rate below 1 only the curve is followed.
    """

    def __init__(self, sampling_rate: float = 1.0) -> None:
        self.curve = LruCurve(sampling_rate)
        self.unlimited = HitCount()
        self.intervals = ReuseIntervals()
        self._capacities: list[_LruAtCapacity] = []
        self._waiting: list[RecordedRequest] = []
        self._times: list[float] = []
        self._num_waiting_blocks = self._num_requests = 0

    def follow(self, capacity: int) -> HitCount:
        """Count the blocks that LRU finds with `capacity` blocks; call it before the first request."""
        followed = _LruAtCapacity(HitCount(), capacity)
        self._capacities.append(followed)
        return followed.count

    def admit(self, request: RecordedRequest) -> None:
        """Take the next request."""
        time: float = self._num_requests
        if request.timestamp_ms is not None:
            self.intervals.unit, time = "s", request.timestamp_ms / 1000
        self._num_requests += 1
        self._waiting.append(request)
        self._times.append(time)
        self._num_waiting_blocks += len(request.keys)
        if self._num_waiting_blocks >= BATCH_BLOCKS:
            self.flush()

    def flush(self) -> None:
        """Count the collected requests."""
        if not self._waiting:
            return
        batch = _Batch(self._waiting)
        for followed in self._capacities:
            if followed.cache is None and batch.longest > followed.capacity:
                followed.cache = LruCache(followed.capacity, self.curve.latest(followed.capacity))
        uses = self.curve.admit_each(batch.keys, batch.lengths, self._times)
        if self.curve.sampling_rate == 1.0:
            seen = uses.distances > 0
            batch.note(self.unlimited, seen)
            self.intervals.note(uses.idle[seen])
            for followed in self._capacities:
                followed.take(batch, uses)
        self._waiting, self._times, self._num_waiting_blocks = [], [], 0
