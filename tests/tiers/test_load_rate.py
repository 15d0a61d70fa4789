"""What a tier expects of its next load, from those before."""

from __future__ import annotations

import pytest

from foreword.tiers.load_rate import FIRST_GUESS_BYTES_PER_S, REMEMBERED_S, LoadRate

MB = 1_000_000


def test_a_tier_that_was_slow_is_tried_again_later() -> None:
    now = 10.0
    rate = LoadRate(monotonic=lambda: now)
    guess = rate.estimate_s(100 * MB)
    rate.measure(100 * MB, 10.0)
    assert rate.estimate_s(100 * MB) == pytest.approx(10.0, rel=0.01)
    now += REMEMBERED_S + 1
    assert rate.estimate_s(100 * MB) == guess, "whoever is never asked is never measured"
    rate.measure(100 * MB, 10.0)
    assert rate.estimate_s(100 * MB) == pytest.approx(10.0, rel=0.01)


def test_a_fast_tier_stays_fast() -> None:
    now = 10.0
    rate = LoadRate(monotonic=lambda: now)
    rate.measure(100 * MB, 0.02)
    now += REMEMBERED_S + 1
    assert rate.estimate_s(100 * MB) < 100 * MB / FIRST_GUESS_BYTES_PER_S


def test_a_load_that_was_cut_off_counts_however_little_came() -> None:
    rate = LoadRate()
    rate.measure(100 * MB, 0.02)
    rate.measure_late(0, 1.0)
    assert rate.estimate_s(1000) > 100
