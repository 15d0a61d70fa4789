"""Drafts may lose 2% of any five seconds, whatever was promised, and what they win they may use."""

from __future__ import annotations

import numpy as np
import pytest

from foreword.engine.drafts.gain import Allowance

STEP_S, NUM_REQUESTS, WINDOW_S = 0.012, 16, 5.0


def tokens_over_time(seconds_drafted: float, accepted: int, total_s: float = 60.0) -> tuple[list[float], list[int]]:
    """Ends of steps and tokens until then, where a step drafts whenever it may: it was promised to cost nothing."""
    allowance, clock, tokens = Allowance(), 0.0, 0
    times, counts = [0.0], [0]
    while clock < total_s:
        if allowance.is_open:
            clock, tokens = clock + seconds_drafted, tokens + NUM_REQUESTS + accepted
            allowance.note_drafted(NUM_REQUESTS, NUM_REQUESTS + accepted, seconds_drafted, 0.0)
        else:
            clock, tokens = clock + STEP_S, tokens + NUM_REQUESTS
            allowance.note_plain(NUM_REQUESTS, STEP_S, 0.0)
        times.append(clock)
        counts.append(tokens)
    return times, counts


@pytest.mark.parametrize("slower", [1.05, 1.3, 2.0])
@pytest.mark.parametrize("accepted", [0, 1])
def test_drafts_that_do_not_pay_lose_at_most_a_fiftieth_of_any_five_seconds(slower: float, accepted: int) -> None:
    times, counts = (np.array(each) for each in tokens_over_time(slower * STEP_S, accepted))
    plain_rate = NUM_REQUESTS / STEP_S
    for start in range(0, len(times), 7):
        end = int(times.searchsorted(times[start] + WINDOW_S))
        if end < len(times):
            rate = (counts[end] - counts[start]) / (times[end] - times[start])
            assert rate >= 0.98 * plain_rate - NUM_REQUESTS / WINDOW_S  # and one step, which nobody could foresee


def test_drafts_that_pay_are_never_held_back() -> None:
    times, _ = tokens_over_time(1.3 * STEP_S, 8)
    assert np.allclose(np.diff(times)[1:], 1.3 * STEP_S)


def test_nothing_is_drafted_before_a_step_without_drafts_was_timed_and_guessing_counts() -> None:
    allowance = Allowance()
    assert not allowance.is_open
    allowance.note_plain(NUM_REQUESTS, STEP_S, 0.0)
    assert allowance.is_open
    for _ in range(500):
        allowance.note_plain(NUM_REQUESTS, STEP_S, 0.02 * STEP_S)
    assert not allowance.is_open


def test_a_step_in_which_the_process_was_stopped_ends_drafts_for_seconds_not_minutes() -> None:
    allowance = Allowance()
    for seconds in (1.0, STEP_S):
        allowance.note_plain(NUM_REQUESTS, seconds, 0.0)
    assert allowance.plain_s(NUM_REQUESTS) == STEP_S, "the first step waited for cold pages"
    allowance.note_drafted(NUM_REQUESTS, 2 * NUM_REQUESTS, 10.0, 0.0)
    assert not allowance.is_open
    elapsed = 0.0
    while not allowance.is_open:
        allowance.note_plain(NUM_REQUESTS, STEP_S, 0.0)
        elapsed += STEP_S
    assert elapsed < 10


def test_one_wrong_draft_of_a_slow_model_does_not_end_drafts_that_pay() -> None:
    allowance = Allowance()
    for _ in range(3):
        allowance.note_plain(1, 0.5, 0.0)
        allowance.note_drafted(1, 6, 0.65, 0.0)
    allowance.note_drafted(1, 1, 0.65, 0.0)
    assert allowance.is_open
