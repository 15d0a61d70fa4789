"""One moment of an engine: the statistics of its cache, the states of its blocks, the lengths of its queues."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from foreword.cache import BlockState, CacheEntry, EvictionCause, PrefixCacheStats
from foreword.engine.tiering.director import TiersReport
from foreword.request import DraftCounts

if TYPE_CHECKING:
    from foreword.engine.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state of an engine between two steps. `Engine.snapshot()` takes it, and all statistics are read from it.

    It is a copy, which later steps do not change. A new counter needs only a field of `PrefixCacheStats`.
    """

    stats: PrefixCacheStats
    """Counters since the last reset of the cache."""
    totals: PrefixCacheStats
    """Counters since the engine started: a reset does not lower them."""
    recent_hit_rate: float
    """The tokens that were found, as a share of the queried tokens of the last 1,000 requests."""
    evictions: Counter[EvictionCause]
    """Cached blocks that were forgotten since the engine started; empty without a ledger."""
    block_states: npt.NDArray[np.uint8]
    """[blocks]: the `BlockState` of each block."""
    block_size: int
    """Tokens per block."""
    num_cached_blocks: int
    """Full blocks that hold a cached prefix, whether requests hold them or not."""
    num_cached_tokens: int
    """Tokens in those blocks."""
    num_tails: int
    """Cached blocks that are only partly filled."""
    num_sink_blocks: int
    """Blocks that hold attention sinks forever."""
    usage: float
    """The blocks that requests hold, as a share of all blocks, 0.0 to 1.0."""
    has_ledger: bool
    """Whether the cache can say why it missed."""
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_computed_tokens: int
    """Tokens that went through the model since the engine started."""
    picture_rows: Counter[str]
    """Rows of pictures since the engine started, by where they came from; empty if the model takes no pictures."""
    drafts: DraftCounts
    """Accepted and rejected drafts since the engine started, by source."""
    tiers: TiersReport
    """Loads, stores and contents of the tiers below the pool. Without tiers, the report is empty."""
    entries: Sequence[CacheEntry]
    """Prefixes that owners asked to keep."""
    num_broken_pins: int
    """Blocks of entries that were evicted since the engine started, because no other block was free."""
    clock: float
    """The time of the snapshot by the engine's clock, which decides when entries end."""
    taken: float = field(default_factory=time.monotonic)
    """The time of the snapshot by the monotonic clock, in seconds."""

    @classmethod
    def of(
        cls,
        scheduler: Scheduler,
        before: PrefixCacheStats,
        num_computed_tokens: int,
        picture_rows: Counter[str],
        tiers: TiersReport,
        entries: Sequence[CacheEntry],
        clock: float,
    ) -> Snapshot:
        """Take a snapshot of the present moment. `before`: the counters up to the last reset."""
        manager = scheduler.manager
        return cls(
            stats=PrefixCacheStats() + manager.stats,
            totals=before + manager.stats,
            recent_hit_rate=manager.recent.hit_rate,
            evictions=Counter() if manager.ledger is None else manager.ledger.evictions.copy(),
            block_states=manager.block_states(),
            block_size=manager.block_size,
            num_cached_blocks=manager.get_num_cached_blocks(),
            num_cached_tokens=manager.num_cached_tokens(),
            num_tails=manager.get_num_tails(),
            num_sink_blocks=len(manager.sink_block_ids()),
            usage=manager.get_usage(),
            has_ledger=manager.ledger is not None,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_preemptions=scheduler.num_preemptions,
            num_computed_tokens=num_computed_tokens,
            picture_rows=picture_rows,
            drafts=DraftCounts() if scheduler.drafting is None else deepcopy(scheduler.drafting.counts),
            tiers=tiers,
            entries=entries,
            num_broken_pins=manager.num_broken_pins,
            clock=clock,
        )

    @classmethod
    def total(cls, parts: Sequence[Snapshot]) -> Snapshot:
        """Combine several engines: counts are added, the pools' blocks are joined, tiers are the first engine's."""
        if len(parts) == 1:
            return parts[0]
        first = parts[0]
        queried = [max(1, each.stats.queries) for each in parts]
        return replace(
            first,
            stats=sum((each.stats for each in parts), PrefixCacheStats()),
            totals=sum((each.totals for each in parts), PrefixCacheStats()),
            recent_hit_rate=float(np.average([each.recent_hit_rate for each in parts], weights=queried)),
            evictions=sum((each.evictions for each in parts), Counter()),
            picture_rows=sum((each.picture_rows for each in parts), Counter()),
            block_states=np.concatenate([each.block_states for each in parts]),
            usage=float(np.average([each.usage for each in parts], weights=[each.num_blocks for each in parts])),
            has_ledger=all(each.has_ledger for each in parts),
            entries=[
                replace(entry, until=entry.until - each.clock + first.clock) for each in parts for entry in each.entries
            ],
            taken=min(each.taken for each in parts),
            **{name: sum(getattr(each, name) for each in parts) for name in _COUNTS},
        )

    @property
    def num_blocks(self) -> int:
        return len(self.block_states)

    def num_in_state(self, state: BlockState) -> int:
        return int(np.count_nonzero(self.block_states == state))


_COUNTS = (
    "num_cached_blocks",
    "num_cached_tokens",
    "num_tails",
    "num_sink_blocks",
    "num_running",
    "num_waiting",
    "num_preemptions",
    "num_computed_tokens",
    "num_broken_pins",
)


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The prefix cache's results so far."""

    hit_rate: float
    """The tokens that were found, as a share of the queried tokens, 0.0 to 1.0."""
    total_cached_tokens: int
    """Tokens whose KV is in the cache now."""
    cache_utilization: float
    """The blocks that hold cached KV, as a share of all blocks, 0.0 to 1.0."""
    requests: int
    """Prompts that were looked up. Several answers to one prompt (`n`) count once."""
    queried_tokens: int
    hit_tokens: int
    recent_hit_rate: float
    """The same as `hit_rate`, over the last 1,000 requests."""
    hit_granularity: int
    """Hits end at multiples of this many tokens; 1: anywhere."""
    state_interval: int | None
    """Tokens between saved recurrent states; None: no recurrent layers. States at the ends of prompts and messages are
    saved, too."""
    preemptions: int
    evictions: int
    """Cached blocks whose memory was given to other content."""
    hit_rate_with_twice_the_blocks: float
    """`hit_rate` if the cache had twice the memory, estimated from the last evictions.

    Without `explain_misses`, this rate is the same as `hit_rate`.
    """
    misses: dict[str, int]
    """Requests that missed something, by reason; empty without `explain_misses`."""
    missed_tokens: dict[str, int]
    """Tokens that were not found, by reason; empty without `explain_misses`."""
    preempted_requests: int
    """Lookups of requests that resumed after preemption. The counts above do not include these lookups."""
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
