"""A snapshot of the engine: the one place from which statistics are read."""

from __future__ import annotations

import pytest

from foreword.cache import BlockState, PrefixCacheStats
from foreword.errors import CacheBusyError
from foreword.request import SamplingParams
from hash_runner import HashEngine

PARAMS = SamplingParams(max_tokens=3, seed=0)


def engine_of(**options: int) -> HashEngine:
    return HashEngine.build(**{"num_blocks": 8, "vocab_size": 1000, **options})


def test_a_snapshot_does_not_change_with_later_steps():
    parts = engine_of()
    parts.add("a", list(range(9)), PARAMS)
    parts.add("b", list(range(100, 109)), PARAMS)
    before = parts.engine.snapshot()
    assert (before.num_waiting, before.num_running, before.stats.requests) == (2, 0, 0)
    parts.step()
    during = parts.engine.snapshot()
    assert (during.num_waiting, during.num_running, during.stats.requests) == (0, 2, 2)
    assert during.usage == during.num_in_state(BlockState.IN_USE) / during.num_blocks > 0
    parts.drain()
    after = parts.engine.snapshot()
    assert (after.num_running, after.usage) == (0, 0.0)
    assert after.num_computed_tokens == 2 * (9 + 3 - 1)
    assert (before.num_waiting, during.num_running) == (2, 2)
    assert before.num_in_state(BlockState.FREE) == before.num_blocks


def test_totals_go_on_after_a_reset_and_the_rest_begins_anew():
    parts = engine_of()
    for name in "ab":
        parts.add(name, list(range(9)), PARAMS)
        parts.drain()
    first = parts.engine.snapshot()
    assert first.stats == first.totals
    assert first.stats.hits > 0
    parts.engine.reset_prefix_cache()
    empty = parts.engine.snapshot()
    assert (empty.stats, empty.totals) == (PrefixCacheStats(), first.totals)
    assert (empty.num_cached_blocks, empty.recent_hit_rate) == (0, 0.0)
    parts.add("c", list(range(9)), PARAMS)
    parts.drain()
    last = parts.engine.snapshot()
    assert last.totals - first.totals == last.stats
    assert last.stats.requests == 1


def test_a_refused_reset_counts_nothing_twice():
    parts = engine_of()
    parts.add("a", list(range(9)), PARAMS)
    parts.step()
    with pytest.raises(CacheBusyError):
        parts.engine.reset_prefix_cache()
    assert parts.engine.snapshot().totals.requests == 1
