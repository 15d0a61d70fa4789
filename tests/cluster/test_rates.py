"""Rates that are learnt: noise does not part replicas that are alike, and those that differ are told apart."""

from __future__ import annotations

import random

from foreword.cluster.loads import ALIKE, MAX_RATE_STEP, Rates


def rates(*declared: float | None) -> Rates:
    """One slot each; None: nobody knows its rate."""
    made = Rates()
    for slot, rate in enumerate(declared):
        made.grow()
        made.join(slot, rate or 1000.0, is_known=rate is not None)
    return made


def test_a_declared_rate_moves_a_little_with_each_measurement() -> None:
    one = rates(1000.0, 1000.0)
    one.note(0, 2000.0)
    assert one.tokens_per_s.tolist() == [1100.0, 1000.0]


def test_what_one_replica_measures_is_what_the_others_are_taken_to_have() -> None:
    three = rates(None, None, None)
    three.note(1, 3000.0)
    assert three.tokens_per_s.tolist() == [3000.0] * 3
    three.grow()
    three.join(3, 1000.0, is_known=False)
    assert three.tokens_per_s[3] == 3000.0


def test_a_slow_first_prompt_keeps_no_replica_from_requests() -> None:
    three = rates(None, None, None)
    three.note(0, 500.0)
    for _ in range(30):
        three.note(1, 3000.0)
    assert len(set(three.tokens_per_s.tolist())) == 1, "the first measurement has faded"


def test_noise_does_not_part_equal_replicas() -> None:
    rng = random.Random(1)
    three = rates(None, None, None)
    for _ in range(300):
        three.note(rng.randrange(3), 5000.0 * rng.uniform(0.8, 1.25))
    assert len(set(three.tokens_per_s.tolist())) == 1
    assert abs(three.tokens_per_s[0] / 5000.0 - 1) < ALIKE


def test_replicas_that_differ_are_told_apart() -> None:
    rng = random.Random(2)
    two = rates(None, None)
    for _ in range(200):
        slot = rng.randrange(2)
        two.note(slot, (2000.0, 8000.0)[slot])
    assert two.tokens_per_s[0] < 0.75 * two.tokens_per_s[1]


def test_one_measurement_changes_a_rate_by_a_factor_at_most() -> None:
    one = rates(None)
    one.note(0, 1e12)
    assert one.tokens_per_s[0] == MAX_RATE_STEP * 1000.0


def test_who_has_left_counts_no_more() -> None:
    two = rates(None, None)
    two.note(0, 100.0 * 1000)
    two.leave(0)
    two.note(1, 2000.0)
    assert two.tokens_per_s[1] == 2000.0
