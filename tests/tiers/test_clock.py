"""The tier's clock: expiry and ages when the wall clock jumps."""

from __future__ import annotations

import pytest

from foreword.tiers.clock import EPOCH, LATEST, Clock

YEAR_S = 365 * 24 * 3600


def clock_at(wall_s: float, running_s: float = 0.0) -> Clock:
    times = iter([0.0])
    return Clock(wall=lambda: wall_s, monotonic=lambda: next(times, running_s))


def test_moments_count_on_the_monotonic_clock_alone():
    assert clock_at(-5.0, 12.9).now_s() == EPOCH + 12
    assert clock_at(-5.0).wall_s() == 0
    assert clock_at(0, 1e12).now_s() == LATEST


@pytest.mark.parametrize(
    ("wall_s", "left_s"),
    [(1000, 100), (1099, 1), (1000 - 10 * YEAR_S, 100), (1100, 0), (1000 + 10 * YEAR_S, 0)],
)
def test_nothing_lives_longer_than_its_time_to_live(wall_s, left_s):
    clock = clock_at(wall_s)
    expiry = clock.expiry_of(created_s=1000, expires_s=1100)
    assert expiry == (clock.now_s() + left_s if left_s else 1)
    assert clock.expiry_of(created_s=1000, expires_s=0) == 0


def test_ages_are_never_negative():
    clock = clock_at(0)
    assert clock.moment_before(-100) == EPOCH
    assert clock.moment_before(100) == EPOCH - 100
    assert clock.moment_before(1 << 40) == 1
