"""Counters are added up by name, and whoever shows them goes by their names too."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields

import pytest

from foreword.cache import MissReason, PrefixCacheStats


def counted(kind: type[PrefixCacheStats], seed: int) -> PrefixCacheStats:
    """Statistics with another number in every field."""
    stats = kind()
    for at, field in enumerate(fields(kind)):
        number = seed * (at + 1)
        is_by_reason = isinstance(getattr(stats, field.name), Counter)
        setattr(stats, field.name, Counter({MissReason.EVICTED: number}) if is_by_reason else number)
    return stats


@dataclass(slots=True)
class WithOneMore(PrefixCacheStats):
    copied_tokens: int = 0


@pytest.mark.parametrize("kind", [PrefixCacheStats, WithOneMore])
def test_every_counter_is_added_to_its_own_total(kind):
    before, after = counted(kind, 3), counted(kind, 100)
    total = before + after
    for field in fields(kind):
        assert getattr(total, field.name) == getattr(before, field.name) + getattr(after, field.name), field.name
    assert total - before == after
    assert total != before != after


def test_adding_leaves_both_sides_as_they_were():
    before, after = counted(PrefixCacheStats, 3), counted(PrefixCacheStats, 100)
    total = before + after
    total.hits += 1
    total.misses[MissReason.EVICTED] += 1
    assert (before, after) == (counted(PrefixCacheStats, 3), counted(PrefixCacheStats, 100))
