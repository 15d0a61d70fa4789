"""Replays one recording for several policies and capacities at once, and for the best possible policy.

One pass over the trace (`OnePass`) gives the hits of LRU at every capacity, the hits with unlimited memory, and the
times between uses of a block. The block keys of many requests are first concatenated, because a long array costs less
time per block.

The best policy knows the future: Belady's rule on prefixes, after "A study of replacement algorithms for a
virtual-storage computer" (1966). After each request, the cache keeps the blocks that are needed soonest, among the held
blocks and the request's new ones. It never keeps a block that is not needed again (bypass). A prefix's head is needed
no later than its tail. So the tail is evicted first, and every kept block can be found.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from foreword.cache.account.ledger import MissReason
from foreword.cache.block_ids import Int64Array
from foreword.errors import ConfigError
from foreword.replay.caches import HitCount, LruCache, ManagerCache
from foreword.replay.capacity import Capacity
from foreword.replay.curve import FloatArray, LruCurve, Uses
from foreword.replay.keys import PrefixKeys
from foreword.replay.policies import POLICIES
from foreword.replay.trace import RecordedRequest

BATCH_BLOCKS = 2**15
T = TypeVar("T")
OPTIMUM = "optimum"
NUM_CURVE_POINTS = 96
MAX_TABLE_BLOCKS = 50_000_000
"""The largest simulated cache, in blocks: the engine's tables take 34 bytes per block even when empty."""


class Optimum:
    """All requests of a recording, to replay under the best policy at any capacity. Keeps 16 bytes for each block."""

    def __init__(self, requests: Sequence[PrefixKeys]) -> None:
        lengths = np.array([len(keys) for keys in requests], np.int64)
        self._starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
        keys = np.concatenate(requests) if requests else np.empty(0, np.uint64)
        unique, ids = np.unique(keys, return_inverse=True)
        self._num_blocks = len(unique)
        self._ids: Int64Array = ids.astype(np.int64)
        self._next_use = _next_uses(self._ids, np.repeat(np.arange(len(requests)), lengths), len(requests))

    def hits(self, capacity: int) -> Int64Array:
        """For each request, the number of its leading blocks that the cache held when the request came, [requests]."""
        num_requests = len(self._starts) - 1
        needed_at = [-1] * self._num_blocks  # the request that needs the block next; -1: not held
        latest: list[tuple[int, int, int]] = []  # heap of (-needed at, -depth, id); stale if `needed_at` differs
        num_held = 0
        hits = np.zeros(num_requests, np.int64)
        for request in range(num_requests):
            start, end = self._starts[request : request + 2]
            ids = self._ids[start:end].tolist()
            num_hits = next((n for n, block in enumerate(ids) if needed_at[block] < 0), len(ids))
            hits[request] = num_hits
            for depth, (block, needed) in enumerate(zip(ids, self._next_use[start:end].tolist(), strict=True)):
                num_held -= needed_at[block] >= 0
                needed_at[block] = -1
                if needed < num_requests:
                    needed_at[block] = needed
                    num_held += 1
                    heapq.heappush(latest, (-needed, -depth, block))
            while num_held > capacity:
                needed, _, block = heapq.heappop(latest)
                if needed_at[block] == -needed:
                    needed_at[block] = -1
                    num_held -= 1
        return hits


def _next_uses(ids: Int64Array, request_of: Int64Array, never: int) -> Int64Array:
    """For each access, the request in which its block is used next, or `never`."""
    order = np.lexsort((request_of, ids))
    again = np.full(len(ids), never, np.int64)
    same = ids[order[1:]] == ids[order[:-1]]
    again[order[:-1][same]] = request_of[order[1:][same]]
    return again


@dataclass(slots=True)
class ReuseIntervals:
    """A histogram of the times between two successive uses of a block. Each bin is twice as wide as the one before."""

    unit: str = "requests"
    """Unit of the intervals: "requests", or "s" if the recording has times."""
    counts: dict[int, int] = field(default_factory=dict)
    """Number of reuses by interval: key k is for intervals from 2**k up to 2**(k + 1) units, key -1 for less than 1."""

    def note(self, intervals: FloatArray) -> None:
        doublings = np.where(intervals >= 1, np.frexp(intervals)[1] - 1, -1)
        for doubling, count in zip(*np.unique(doublings, return_counts=True), strict=True):
            self.counts[int(doubling)] = self.counts.get(int(doubling), 0) + int(count)


class _Batch:
    """The blocks of several requests, concatenated."""

    def __init__(self, requests: Sequence[RecordedRequest]) -> None:
        self.requests = requests
        self.keys = np.concatenate([request.keys for request in requests])
        self.lengths = [len(request.keys) for request in requests]
        self.longest = max(self.lengths)
        self._ends = np.cumsum([0, *self.lengths])
        self._block_tokens = np.array([request.block_tokens for request in requests], np.int64)
        self._prompt_tokens = np.array([request.num_prompt_tokens for request in requests], np.int64)

    def note(self, count: HitCount, is_hit: npt.NDArray[np.bool_]) -> None:
        """Count hits. `is_hit`, [blocks]: whether a block is a hit; the hits of a request are its leading blocks."""
        before = np.concatenate((np.zeros(1, np.int64), np.cumsum(is_hit)))
        held = np.diff(before[self._ends])
        count.blocks += int(held.sum())
        count.tokens += int(np.minimum(held * self._block_tokens, self._prompt_tokens).sum())


@dataclass(slots=True)
class _LruAtCapacity:
    """Counts LRU's hits at one capacity, from the distances of `LruStack`.

    A cache refuses a request with more blocks than its capacity, which distances do not show. From the batch with the
    first such request on, `cache` counts the hits.
    """

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
    """Counts the hits of LRU and of unlimited memory, and the reuse intervals; complete after `flush`.

    With a sampling rate below 1, only `curve` is computed.
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
        """Count the blocks that LRU finds with `capacity` blocks. Call this method before the first request."""
        followed = _LruAtCapacity(HitCount(), capacity)
        self._capacities.append(followed)
        return followed.count

    def admit(self, request: RecordedRequest) -> None:
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


@dataclass(slots=True)
class ReplayResult:
    """The hits of simulated caches on a recording. Ratios are shares of all prompts' blocks, or tokens."""

    num_requests: int
    num_blocks: int
    num_tokens: int
    num_different_blocks: int
    block_tokens: int
    unlimited: HitCount
    hits: dict[str, dict[str, HitCount]]
    """Hits by policy, then by the capacity's name."""
    capacities: list[Capacity]
    curve_capacities: list[int]
    """Capacities of the LRU curve, in blocks."""
    curve_ratios: list[float]
    curve_errors: list[float]
    """Standard errors of the curve; zeros if the sample has all blocks."""
    reuse_intervals: ReuseIntervals
    sampling_rate: float

    def block_ratio(self, count: HitCount) -> float:
        return count.blocks / max(1, self.num_blocks)

    def token_ratio(self, count: HitCount) -> float:
        return count.tokens / self.num_tokens

    def served(self) -> list[tuple[str, Capacity]]:
        """Each pair of a policy that does not know the future and a capacity."""
        return [(policy, size) for policy in self.hits if policy != OPTIMUM for size in self.capacities]

    def churn(self) -> dict[str, dict[str, float]]:
        """Evicted blocks per 1,000 requests: the stored blocks minus the blocks that are held at the end."""
        stored = self.of_each(lambda count: self.num_blocks - count.refused_blocks - count.blocks + count.empty_blocks)
        return {
            policy: {
                size.name: max(0, stored[policy][size.name] - size.num_blocks) * 1000 / self.num_requests
                for size in self.capacities
            }
            for policy in self.hits
            if policy != OPTIMUM
        }

    def memory_saved(self) -> dict[str, dict[str, float]]:
        """The share of LRU's memory that a policy saves with the same number of hits; below 0 if it needs more."""
        ratios, first = np.unique(self.curve_ratios, return_index=True)
        sizes = np.array(self.curve_capacities, np.float64)

        def saved(count: HitCount, num_blocks: int) -> float:
            ratio = self.block_ratio(count)
            if abs(ratio - float(np.interp(num_blocks, sizes, self.curve_ratios))) < 1e-9:
                return 0.0
            return 1 - num_blocks / float(np.interp(ratio, ratios, sizes[first]))

        return {
            policy: {size.name: saved(hits[size.name], size.num_blocks) for size in self.capacities}
            for policy, hits in self.hits.items()
            if policy != "lru"
        }

    def hit_ratios(self) -> dict[str, dict[str, float]]:
        """Found blocks as a share of all blocks, by policy, then by the capacity's name."""
        return self.of_each(lambda count: round(self.block_ratio(count), 6))

    def of_each(self, figure: Callable[[HitCount], T]) -> dict[str, dict[str, T]]:
        """A figure of each cache, by policy, then by the capacity's name."""
        return {policy: {name: figure(count) for name, count in hits.items()} for policy, hits in self.hits.items()}

    def misses(self, count: HitCount) -> dict[str, int]:
        """Missed blocks by reason. Unlimited memory misses the `never_seen` blocks too."""
        never_seen = self.num_blocks - self.unlimited.blocks
        return {
            MissReason.NEVER_SEEN.value: never_seen,
            MissReason.EVICTED.value: self.num_blocks - never_seen - count.blocks,
        }


class Simulation:
    """Simulates a cache for each pair of a policy and a capacity. All caches take the same requests, one by one.

    Memory grows with the number of different blocks. `optimum` also keeps 16 bytes for every block of every prompt.
    With `sampling_rate` below 1, only the LRU curve is computed, from that share of the blocks.
    """

    def __init__(
        self, policies: Sequence[str], capacities: Sequence[Capacity] = (), *, sampling_rate: float = 1.0
    ) -> None:
        for policy in policies:
            if policy != OPTIMUM and policy not in POLICIES:
                raise ConfigError(f"policy {policy!r} is unknown; use some of {', '.join((*POLICIES, OPTIMUM))}")
        self._pass = OnePass(sampling_rate)
        self._samples = sampling_rate < 1.0
        if self._samples and any(policy != "lru" for policy in policies):
            raise ConfigError(f"a sample of {sampling_rate} works for lru only; leave out the other policies")
        self._policies = list(policies)
        self._capacities: list[Capacity] = []
        self._caches: list[tuple[HitCount, int, ManagerCache]] = []
        self._hits: dict[str, dict[str, HitCount]] = {policy: {} for policy in policies}
        self._prompts: list[PrefixKeys] = []
        self._prompt_lengths: list[int] = []
        self.num_requests = self._num_blocks = self._num_tokens = 0
        self._block_tokens = 1
        self.add_caches(capacities)

    def add_caches(self, capacities: Sequence[Capacity]) -> None:
        """Add a cache of every policy for each of these capacities. Call it before the first request."""
        assert not self.num_requests, "a cache would miss what was admitted"
        self._capacities += capacities
        for policy in self._policies:
            for capacity in capacities:
                if policy == "lru" and not self._samples:
                    self._hits[policy][capacity.name] = self._pass.follow(capacity.num_blocks)
                    continue
                count = self._hits[policy][capacity.name] = HitCount()
                if policy != OPTIMUM and not self._samples:
                    self._caches.append((count, capacity.num_blocks, _make_cache(policy, capacity.num_blocks)))

    def admit(self, request: RecordedRequest) -> None:
        self._block_tokens = request.block_tokens
        self.num_requests += 1
        self._num_blocks += len(request.keys)
        self._num_tokens += request.num_prompt_tokens
        self._pass.admit(request)
        for count, capacity, cache in self._caches:
            count.note(request, cache.admit(request), capacity)
        if OPTIMUM in self._policies:
            self._prompts.append(request.keys)
            self._prompt_lengths.append(request.num_prompt_tokens)

    def result(self) -> ReplayResult:
        if OPTIMUM in self._policies:
            self._find_optimum()
        for count, _, cache in self._caches:
            count.empty_blocks = cache.policy.num_empty
        self._pass.flush()
        curve, unlimited = self._pass.curve, self._pass.unlimited
        largest = max(2, curve.num_blocks)
        capacities = [capacity.num_blocks for capacity in self._capacities if capacity.num_blocks < largest]
        spread = np.rint(np.geomspace(1, largest, NUM_CURVE_POINTS)).astype(np.int64)
        points = np.unique([*spread.tolist(), *capacities])  # so that the dots of LRU lie on its curve
        ratios = curve.hit_ratios(points)
        if self._samples:
            unlimited = HitCount(round(float(ratios[-1]) * self._num_blocks))
            for capacity in self._capacities:
                ratio = float(curve.hit_ratios([capacity.num_blocks])[0])
                for by_capacity in self._hits.values():
                    by_capacity[capacity.name] = HitCount(
                        round(ratio * self._num_blocks), round(ratio * self._num_tokens)
                    )
        return ReplayResult(
            self.num_requests,
            self._num_blocks,
            self._num_tokens,
            curve.num_blocks,
            self._block_tokens,
            unlimited,
            self._hits,
            self._capacities,
            points.tolist(),
            ratios.tolist(),
            curve.standard_errors(points).tolist(),
            self._pass.intervals,
            curve.sampling_rate,
        )

    def _find_optimum(self) -> None:
        optimum = Optimum(self._prompts)
        for capacity in self._capacities:
            held = optimum.hits(capacity.num_blocks)
            tokens = np.minimum(held * self._block_tokens, self._prompt_lengths)
            self._hits[OPTIMUM][capacity.name] = HitCount(int(held.sum()), int(tokens.sum()))


def _make_cache(policy: str, capacity: int) -> ManagerCache:
    if capacity > MAX_TABLE_BLOCKS:
        raise ConfigError(
            f"capacity={capacity} blocks is too large to try {policy}, whose tables take memory for each of them; use "
            f"at most {MAX_TABLE_BLOCKS:,}, or lru and optimum alone"
        )
    return ManagerCache(capacity, policy)
