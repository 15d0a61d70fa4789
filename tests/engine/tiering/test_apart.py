"""Payloads that are no blocks of the pool: what is found where, how long a step waits, and what a day may write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from foreword.cache import KVCacheManager
from foreword.engine import TierDirector
from foreword.engine.tiering import apart as module
from foreword.engine.tiering.apart import PayloadsApart
from foreword.engine.tiering.block_memory import UnknownMemory
from foreword.tiers.admission import Admission
from foreword.tiers.ticket import Outcome
from foreword.tiers.tier import Tier
from late_tier import LateTier
from tiers.block_world import opened, segment_files

LONG_S = 60.0
"""To compute something that is surely loaded sooner."""


def above(*tiers: Tier, most: int | None = None, rule: str = "all") -> tuple[TierDirector, PayloadsApart]:
    director = TierDirector(
        tiers,
        UnknownMemory(),
        KVCacheManager(4, block_size=4),
        b"an own namespace",
        admission=Admission(rule, 4),  # type: ignore[arg-type]
        max_bytes_per_day=most,
    )
    apart = director.apart(bytes(32))
    assert apart is not None
    return director, apart


def payloads(names: Sequence[str], size: int = 10_000) -> list[memoryview]:
    return [np.random.default_rng(list(name.encode())).integers(0, 256, size, np.uint8).data for name in names]


def loaded(apart: PayloadsApart, names: Sequence[str], compute_s: float | None = LONG_S, size: int = 10_000) -> str:
    """The names of those that were loaded, as one string; their bytes are right."""
    rooms = [memoryview(bytearray(size)) for _ in names]
    found = apart.load(names, rooms, compute_s)
    for room, expected, is_there in zip(rooms, payloads(names, size), found, strict=True):
        assert not is_there or room == expected, "a wrong payload was served"
    return "".join(name for name, is_there in zip(names, found, strict=True) if is_there)


def stored(director: TierDirector, apart: PayloadsApart, names: Sequence[str], size: int = 10_000) -> None:
    apart.store(names, payloads(names, size))
    while director.go_on(is_busy=False):
        pass


def test_each_tier_gives_what_those_before_it_lack_and_no_damaged_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_WAIT_S", LONG_S)  # of a busy machine
    monkeypatch.setattr(module, "PIECE_BYTES", 4096)
    with opened(tmp_path / "near") as near, opened(tmp_path / "far") as far:
        stored(*above(near), ["a", "b"])
        stored(*above(far), ["c"])
        [path] = segment_files(tmp_path / "near")
        content, [damaged] = path.read_bytes(), payloads("b")
        last = bytes(damaged[-1000:])  # of three pieces
        assert content.count(last) == 1
        path.write_bytes(content.replace(last, last[::-1]))
        director, both = above(near, far)
        assert loaded(both, ["a", "b", "c", "d"]) == "ac"
        stored(director, both, ["b"])
        assert loaded(above(near)[1], ["a", "b", "c"]) == "ab"
        assert loaded(both, ["a", "b", "c"]) == "abc"
        assert loaded(above(near)[1], ["a", "b"], size=9_999) == "", "of another size"


def test_a_step_does_not_wait_for_what_is_computed_sooner_and_gives_up_a_tier_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tier = LateTier()
    tier.is_eager = True
    stored(*above(tier), ["a"])
    content, tier.lies = dict(tier.content), True
    _, apart = above(tier)
    tier.load_s = 1.0
    assert loaded(apart, ["a"], compute_s=1.1) == loaded(apart, ["a"], compute_s=None) == ""
    assert tier.num_loads == 0
    tier.load_s = 0.0
    assert loaded(apart, ["a"], compute_s=0.05) == ""
    assert (tier.num_loads, tier.content) == (1, content), "it is asked, and what it has is not forgotten"
    monkeypatch.setattr(module, "MOST_WAIT_S", LONG_S)  # the test would not end in time
    assert loaded(apart, ["a"]) == ""
    assert tier.num_loads == 1, "nobody waits for it again"


def test_a_day_counts_what_was_written_in_each_tier_and_what_is_under_way() -> None:
    one, other = LateTier(), LateTier()
    director, apart = above(one, other, most=5_000)
    apart.store(["a"], payloads("a", 2_000))
    apart.store(["b"], payloads("b", 1_000))  # 4,000 bytes are under way
    report = director.report()
    assert (report.bytes_today, report.stores.num_dropped_offers) == (0, 1)
    one.finish()
    for _, ticket, _, _ in other.jobs:
        ticket.finish(Outcome.NO_ROOM)
    assert not director.go_on(is_busy=False)
    report = director.report()
    assert report.bytes_today == report.stores.num_bytes == 2_000
    assert report.stores.blocks_by_outcome == {"done": 1, "no_room": 1}
    apart.store(["b"], payloads("b", 1_500))
    assert director.report().stores.num_dropped_offers == 1


def test_admission_holds_for_them() -> None:
    tier = LateTier()
    tier.is_eager = True
    director, apart = above(tier, rule="twice")
    for number in range(2):
        assert len(tier.content) == 0
        stored(director, apart, ["a"] if number else ["a", "b"])
    assert len(tier.content) == 1
    assert director.report().stores.num_not_admitted == 2
