"""One recording against several policies and capacities at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from foreword.cache.account.ledger import MissReason
from foreword.errors import ConfigError
from foreword.replay.caches import HitCount, ManagerCache
from foreword.replay.capacity import Capacity
from foreword.replay.keys import PrefixKeys
from foreword.replay.one_pass import OnePass, ReuseIntervals
from foreword.replay.optimum import Optimum
from foreword.replay.policies import POLICIES
from foreword.replay.trace import RecordedRequest

T = TypeVar("T")

OPTIMUM = "optimum"
NUM_CURVE_POINTS = 96
MAX_TABLE_BLOCKS = 50_000_000
"""The largest simulated cache: the engine's tables take 34 bytes per block even when empty."""


@dataclass(slots=True)
class ReplayResult:
    """The hits of simulated caches on a recording. Ratios are shares of all blocks (tokens) of all prompts."""

    num_requests: int
    num_blocks: int
    num_tokens: int
    num_different_blocks: int
    block_tokens: int
    unlimited: HitCount
    hits: dict[str, dict[str, HitCount]]
    """Hits by policy, then by capacity's name."""
    capacities: list[Capacity]
    curve_capacities: list[int]
    """Capacities of the LRU curve, in blocks."""
    curve_ratios: list[float]
    curve_errors: list[float]
    """Standard errors of the curve; zeros if nothing was sampled."""
    reuse_intervals: ReuseIntervals
    sampling_rate: float

    def block_ratio(self, count: HitCount) -> float:
        return count.blocks / max(1, self.num_blocks)

    def token_ratio(self, count: HitCount) -> float:
        return count.tokens / self.num_tokens

    def churn(self) -> dict[str, dict[str, float]]:
        """Evicted blocks per 1,000 requests: those that were stored, without those that are left."""
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
        """The share of memory that a policy saves where LRU finds as much; below 0 where it needs more."""
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
        """The share of the blocks found, by policy, then by capacity's name."""
        return self.of_each(lambda count: round(self.block_ratio(count), 6))

    def of_each(self, figure: Callable[[HitCount], T]) -> dict[str, dict[str, T]]:
        """A figure of each cache, by policy, then by capacity's name."""
        return {policy: {name: figure(count) for name, count in hits.items()} for policy, hits in self.hits.items()}

    def misses(self, count: HitCount) -> dict[str, int]:
        """Missed blocks by reason. `never_seen` ones are missed with unlimited memory, too."""
        never_seen = self.num_blocks - self.unlimited.blocks
        return {
            MissReason.NEVER_SEEN.value: never_seen,
            MissReason.EVICTED.value: self.num_blocks - never_seen - count.blocks,
        }


class Simulation:
    """Caches of every policy and capacity, which take one request after the other.

    Memory grows with the number of different blocks; `optimum` keeps 16 bytes for every block of every
    prompt. With `sampling_rate` below 1 only the LRU curve is followed, on that share of the blocks.
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
        self._kept: list[PrefixKeys] = []
        self._kept_lengths: list[int] = []
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
        """Replay the next request of the recording."""
        self._block_tokens = request.block_tokens
        self.num_requests += 1
        self._num_blocks += len(request.keys)
        self._num_tokens += request.num_prompt_tokens
        self._pass.admit(request)
        for count, capacity, cache in self._caches:
            count.note(request, cache.admit(request), capacity)
        if OPTIMUM in self._policies:
            self._kept.append(request.keys)
            self._kept_lengths.append(request.num_prompt_tokens)

    def result(self) -> ReplayResult:
        """The results so far."""
        if OPTIMUM in self._policies:
            self._find_optimum()
        for count, _, cache in self._caches:
            count.empty_blocks = cache.policy.num_empty
        self._pass.flush()
        curve, unlimited = self._pass.curve, self._pass.unlimited
        most = max(2, curve.num_blocks)
        asked = [capacity.num_blocks for capacity in self._capacities if capacity.num_blocks < most]
        spread = np.rint(np.geomspace(1, most, NUM_CURVE_POINTS)).astype(np.int64)
        points = np.unique([*spread.tolist(), *asked])  # so that the dots of LRU lie on its curve
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
        optimum = Optimum(self._kept)
        for capacity in self._capacities:
            held = optimum.hits(capacity.num_blocks)
            tokens = np.minimum(held * self._block_tokens, self._kept_lengths)
            self._hits[OPTIMUM][capacity.name] = HitCount(int(held.sum()), int(tokens.sum()))


def _make_cache(policy: str, capacity: int) -> ManagerCache:
    if capacity > MAX_TABLE_BLOCKS:
        raise ConfigError(
            f"capacity={capacity} blocks is too large to try {policy}, whose tables take memory for each of them; use "
            f"at most {MAX_TABLE_BLOCKS:,}, or lru and optimum alone"
        )
    return ManagerCache(capacity, policy)
