"""Insight: what the engine looks like from outside, read between two of its steps.

Knows the engine, its manager and the records; knows nothing of HTTP. A look waits for the step that runs, at most
`MAX_WAIT_S`; then, or when the engine has failed, the last look has to do.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from foreword.cache import BlockState, Divergence, EvictionCause, PrefixCacheStats, PrefixNode
from foreword.engine import Engine
from foreword.replay.live_curve import CurvePoint
from foreword.server.api_errors import APIError
from foreword.server.engine_thread import EngineThread
from foreword.server.listeners import Listener
from foreword.server.observe.explanations import most_similar
from foreword.server.observe.more_memory import MoreMemory
from foreword.server.records import Records, RequestRecord
from foreword.text import Tokenizer

MAX_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Look:
    """The engine between two steps. Totals go on counting when the cache is reset."""

    totals: PrefixCacheStats
    """Since the start of the server."""
    stats: PrefixCacheStats
    """Since the last reset."""
    recent_hit_rate: float
    evictions: Counter[EvictionCause]
    states: npt.NDArray[np.uint8]
    """`BlockState` of every block."""
    num_tails: int
    """Of the cached blocks, those that are only partly filled."""
    block_size: int
    num_running: int
    num_waiting: int
    num_preemptions: int
    num_computed_tokens: int
    usage: float
    """Share of the blocks that requests hold, 0.0 to 1.0."""
    has_ledger: bool
    more_memory: Sequence[CurvePoint]
    """Estimated hit rates at several capacities, ascending from the pool's own; empty if there are none (yet)."""
    taken: float = field(default_factory=time.monotonic)

    @property
    def num_blocks(self) -> int:
        return len(self.states)

    def num_in_state(self, state: BlockState) -> int:
        """Blocks in one state."""
        return int(np.count_nonzero(self.states == state))


class Insight:
    """Looks at an engine. Belongs to the event loop."""

    def __init__(
        self, thread: EngineThread, records: Records, more_memory: MoreMemory, tokenizer: Tokenizer | None
    ) -> None:
        self.tokenizer = tokenizer
        self._more_memory = more_memory
        self._thread = thread
        self._records = records
        self._last: Look | None = None
        self._before = PrefixCacheStats()
        """Totals of what was counted before the last reset. Changed on the engine's thread alone."""
        self.num_saved_seconds = 0.0
        """Seconds of prefill that hits saved, by the mean time of a computed token at that moment."""
        records.on_finished(Listener("saved_seconds", self._count_saved))

    async def look(self, max_age_s: float = 0.0) -> Look:
        """The engine as it is now, or was at most so long ago.

        Raises APIError 503 if it has failed and was never looked at.
        """
        if self._last is not None and time.monotonic() - self._last.taken < max_age_s:
            return self._last
        try:
            self._last = await asyncio.wait_for(self._thread.call(self._take), MAX_WAIT_S)
        except (TimeoutError, APIError):
            if self._last is None:
                raise APIError(503, "The engine does not answer.", kind="server_error") from None
        return self._last

    async def reset(self) -> None:
        """Forget all cached prefixes. Raises CacheBusyError while requests hold blocks."""

        def reset(engine: Engine) -> None:
            counted = engine.manager.stats
            engine.manager.reset_prefix_cache()
            self._before = self._before + counted
            self._more_memory.reset()

        await self._thread.call(reset)
        self._last = None

    async def top_prefixes(self, limit: int) -> list[PrefixNode] | None:
        """The cached prefixes that were reused most; None without a radix index."""
        return await self._thread.call(lambda engine: engine.manager.top_prefixes(limit))

    def similar(self, record: RequestRecord) -> Divergence | None:
        """Where a prompt leaves an earlier one of its namespace, for indexes that cannot tell."""
        earlier = (other for other in self._records.recent(200, record.tenant) if other is not record)
        return most_similar(record.prompt_token_ids, record.salt, earlier)

    def _take(self, engine: Engine) -> Look:
        manager, scheduler = engine.manager, engine.scheduler
        return Look(
            totals=self._before + manager.stats,
            stats=copy.deepcopy(manager.stats),
            recent_hit_rate=manager.recent.hit_rate,
            evictions=Counter() if manager.ledger is None else manager.ledger.evictions.copy(),
            states=manager.block_states(),
            num_tails=manager.get_num_tails(),
            block_size=manager.block_size,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_preemptions=scheduler.num_preemptions,
            num_computed_tokens=engine.num_computed_tokens,
            usage=manager.get_usage(),
            has_ledger=manager.ledger is not None,
            more_memory=self._more_memory.points(),
        )

    def _count_saved(self, record: RequestRecord) -> None:
        if record.first_scheduled_time is not None:
            self.num_saved_seconds += record.num_cached_tokens * self._thread.prefill.seconds_per_token
