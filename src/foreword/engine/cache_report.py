"""CacheReport: the prefix cache's results for users of `LLM`."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.cache import PrefixCacheStats
from foreword.engine.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The prefix cache's results so far."""

    hit_rate: float
    """Share of the queried tokens that were found, 0.0 to 1.0."""
    total_cached_tokens: int
    """Tokens whose KV is in the cache now."""
    cache_utilization: float
    """Share of the blocks that hold cached KV, 0.0 to 1.0."""
    requests: int
    """Prompts that were looked up; several answers to one (`n`) count once."""
    queried_tokens: int
    hit_tokens: int
    recent_hit_rate: float
    """The same as `hit_rate`, over the last 1,000 requests."""
    hit_granularity: int
    """Hits end at multiples of this many tokens; 1: anywhere."""
    state_interval: int | None
    """Tokens between saved recurrent states (also saved: ends of prompts and messages); None: no such layers."""
    preemptions: int
    evictions: int
    """Cached blocks whose memory was given to other content."""
    hit_rate_with_twice_the_blocks: float
    """`hit_rate` if the cache had twice the memory, estimated from the last evictions.

    The same as `hit_rate` without `explain_misses`.
    """
    misses: dict[str, int]
    """Requests that missed something, by reason; empty without `explain_misses`."""
    missed_tokens: dict[str, int]
    """Their tokens that were not found, by reason."""
    preempted_requests: int
    """Lookups of requests that resumed after preemption; they are in none of the counts above."""
    preempted_queried_tokens: int
    preempted_hit_tokens: int
    tail_hit_tokens: int
    """Of `hit_tokens`, those that were found in tails, the partly filled last blocks of earlier requests."""
    tails: int
    """Blocks that hold tails now; `total_cached_tokens` and `cache_utilization` count full blocks only."""
    tail_evictions: int
    """Tails whose memory was given to other content; not among `evictions`."""
    counters: PrefixCacheStats
    """All counters by the names that /metrics uses; the fields above repeat the most important ones."""

    @classmethod
    def of(cls, now: Snapshot, *, hit_granularity: int, state_interval: int | None) -> CacheReport:
        """The report of a snapshot."""
        stats = now.stats
        return cls(
            hit_rate=stats.hit_rate,
            total_cached_tokens=now.num_cached_tokens,
            cache_utilization=now.num_cached_blocks / now.num_blocks,
            requests=stats.requests,
            queried_tokens=stats.queries,
            hit_tokens=stats.hits,
            recent_hit_rate=now.recent_hit_rate,
            hit_granularity=hit_granularity,
            state_interval=state_interval,
            preemptions=now.num_preemptions,
            evictions=stats.evictions,
            hit_rate_with_twice_the_blocks=stats.hit_rate_with_twice_the_blocks,
            misses={str(reason): count for reason, count in stats.misses.items()},
            missed_tokens={str(reason): count for reason, count in stats.missed_tokens.items()},
            preempted_requests=stats.preempted_requests,
            preempted_queried_tokens=stats.preempted_queries,
            preempted_hit_tokens=stats.preempted_hits,
            tail_hit_tokens=stats.tail_hits,
            tails=now.num_tails,
            tail_evictions=stats.tail_evictions,
            counters=stats,
        )

    @property
    def prefix_cache_hit_rate(self) -> float:
        """`hit_rate`, by the name that vLLM's users know."""
        return self.hit_rate
