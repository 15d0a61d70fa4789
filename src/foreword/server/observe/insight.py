"""Insight: snapshots of the engine, taken between two of its steps.

A look waits for the current step, at most `MAX_WAIT_S`; after that, or when the engine has failed, it returns the last
snapshot.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from foreword.cache import Divergence, PrefixNode
from foreword.engine import Engine, Snapshot
from foreword.replay.curve import CurvePoint
from foreword.server.api_errors import APIError
from foreword.server.engine_door import EngineDoor, all_prefixes, first
from foreword.server.observe.explanations import most_similar
from foreword.server.observe.more_memory import MoreMemory
from foreword.server.records import Listener, Records, RequestRecord

MAX_WAIT_S = 5.0


class Insight:
    """Looks at an engine. Belongs to the event loop."""

    def __init__(self, thread: EngineDoor, records: Records, more_memory: MoreMemory) -> None:
        self._more_memory = more_memory
        self._thread = thread
        self._records = records
        self._last: Snapshot | None = None
        self.curve: Sequence[CurvePoint] = ()
        """Estimated hit rates at the last look, for capacities from the pool's size up; empty without an estimate."""
        self.num_saved_seconds = 0.0
        """Seconds of prefill that hits saved, by the mean time per computed token at that moment."""
        records.on_finished(Listener("saved_seconds", self._count_saved))

    async def look(self, max_age_s: float = 0.0) -> Snapshot:
        """The engine as it is now, or was at most `max_age_s` ago.

        Raises APIError 503 if it has failed and was never looked at.
        """
        if self._last is not None and time.monotonic() - self._last.taken < max_age_s:
            return self._last
        try:
            self._last = await asyncio.wait_for(self._thread.call(Engine.snapshot, Snapshot.total), MAX_WAIT_S)
            self.curve = self._more_memory.points()
        except (TimeoutError, APIError):
            if self._last is None:
                raise APIError(503, "The engine does not answer.", kind="server_error") from None
        return self._last

    async def reset(self) -> None:
        """Forget all cached prefixes. Raises CacheBusyError while requests hold blocks."""
        await self._thread.change(Engine.reset_prefix_cache, first)
        self._more_memory.reset()
        self._last = None

    async def top_prefixes(self, limit: int) -> list[PrefixNode] | None:
        """The most reused cached prefixes; None without a radix index."""
        return await self._thread.call(lambda engine: engine.top_prefixes(limit), all_prefixes)

    def similar(self, record: RequestRecord) -> Divergence | None:
        """Where a prompt differs from an earlier one of its namespace, for indexes that do not know it."""
        earlier = (other for other in self._records.recent(200, record.tenant) if other is not record)
        return most_similar(record.prompt_token_ids, record.namespace, earlier)

    def _count_saved(self, record: RequestRecord) -> None:
        if record.first_scheduled_time is not None:
            self.num_saved_seconds += record.num_cached_tokens * self._thread.prefill.seconds_per_token
