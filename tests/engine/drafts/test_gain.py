"""How many tokens are drafted: what is likely to be right against what longer steps were measured to cost."""

from __future__ import annotations

import json

import numpy as np
import pytest

from foreword.engine.drafts.gain import (
    ASSUMED_CHANCE,
    FORGOTTEN_AFTER,
    Acceptance,
    Allowance,
    Record,
    StepTimes,
    best_lengths,
)


def timed(seconds_of: dict[int, float]) -> StepTimes:
    times = StepTimes()
    for num_rows, seconds in seconds_of.items():
        for _ in range(7):
            times.note(num_rows, seconds)
    return times


def test_rows_that_cost_nothing_are_filled_and_no_more() -> None:
    times = timed({1: 0.02, 2: 0.02, 4: 0.02, 8: 0.02, 10: 0.5, 12: 0.5, 16: 0.5, 32: 0.5})
    assert best_lengths([(0.9, 0.9)], [31], 1, 1, times, 100) == [7]
    assert best_lengths([(0.9, 0.9)], [4], 1, 1, times, 100) == [4]
    assert best_lengths([(0.9, 0.9)], [31], 1, 1, times, 3) == [3]
    assert best_lengths([(0.9, 0.9)], [31], 1, 1, times, 0) == [0]


def test_the_likeliest_tokens_of_all_requests_share_the_free_rows() -> None:
    times = timed({1: 0.02, 2: 0.02, 4: 0.02, 8: 0.02, 10: 0.5, 12: 0.5, 16: 0.5, 32: 0.5})
    assert best_lengths([(0.8, 0.8), (0.5, 0.5)], [31, 31], 2, 2, times, 100) == [5, 1]
    assert best_lengths([(0.7, 0.7), (0.7, 0.7), (0.7, 0.7)], [31, 0, 31], 3, 3, times, 100) == [3, 0, 2]


def test_nothing_is_drafted_where_it_does_not_pay() -> None:
    per_row = timed({size: 0.01 * size for size in (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 32, 48)})
    assert best_lengths([(0.9, 0.9)], [31], 1, 1, per_row, 100) == [0]
    assert best_lengths([(0.95, 0.95)] * 16, [31] * 16, 16, 16, per_row, 100) == [0] * 16
    assert best_lengths([], [], 0, 0, per_row, 100) == []
    nearly = timed({size: 0.01 * size**0.99 for size in (16, 20, 24, 32, 48)})
    assert best_lengths([(0.995, 0.995)] * 16, [31] * 16, 16, 16, nearly, 16) == [0] * 16, "within the error"


def test_longer_drafts_pay_where_they_are_surely_right() -> None:
    times = StepTimes()  # as assumed: 8 rows cost what one does
    [sure], [unsure] = (best_lengths([(chance, chance)], [31], 1, 1, times, 100) for chance in (0.995, 0.6))
    assert sure == 31
    assert unsure == 7


def test_drafts_ride_along_with_steps_that_are_too_long_to_be_timed() -> None:
    """A prompt's rows cost so much that a few more are nothing; without prompts, steps of this length never pay."""
    times = timed({1: 0.02, 8: 0.02, 16: 0.03, 256: 0.3})
    assert best_lengths([(0.995, 0.995)], [31], 513, 1, times, 511) == [31]
    assert best_lengths([(0.995, 0.995)], [31], 250, 1, times, 511) == [31]
    assert best_lengths([(0.995, 0.995)] * 300, [31] * 300, 300, 300, times, 4096) == [0] * 300


def test_what_a_process_learnt_is_where_the_next_one_begins() -> None:
    times = timed({1: 0.02, 8: 0.02, 10: 0.5, 32: 0.5})
    times.note(4, 0.01)  # once: not sure
    learnt = json.loads(json.dumps(times.learnt()))
    assert learnt == {"1": 0.02, "8": 0.02, "10": 0.5, "32": 0.5}
    later = StepTimes()
    later.begin_with(learnt)
    sizes = np.array([1, 8, 10, 32])
    assert later.seconds(sizes).tolist() == timed({1: 0.02, 8: 0.02, 10: 0.5, 32: 0.5}).seconds(sizes).tolist()
    assert best_lengths([(0.9, 0.9)], [31], 1, 1, later, 100) == [7]
    for _ in range(FORGOTTEN_AFTER + 2):
        later.note(1, 0.03)
    assert "10" not in later.learnt()


@pytest.mark.parametrize("harm", [None, [], {"1": "x", "8": -1.0, "10": float("inf"), "x": 1.0, "12": 3}])
def test_what_is_no_time_is_not_learnt(harm: object) -> None:
    times = StepTimes()
    times.begin_with(harm)
    assert not times.learnt()


def test_times_that_other_work_disturbed_do_not_count_and_none_falls_with_more_rows() -> None:
    times = timed({1: 0.02, 4: 0.019, 8: 0.03})
    for num_rows in (1, 8, 8, 8):
        times.note(num_rows, 5.0)
    curve = times.seconds(np.array([1, 2, 4, 8, 9, 64]))
    assert curve[0] == pytest.approx(0.02)
    assert (np.diff(curve) >= 0).all()
    assert curve[3] == pytest.approx(0.03)
    assert curve[5] > 0.06


def test_a_time_that_is_not_measured_again_is_forgotten() -> None:
    times = timed({1: 0.02, 8: 2.0})
    assert best_lengths([(0.9, 0.9)], [7], 1, 1, times, 100) == [0]
    for _ in range(FORGOTTEN_AFTER + 1):
        times.note(1, 0.02)
    assert best_lengths([(0.9, 0.9)], [7], 1, 1, times, 100) == [7]


def test_a_time_is_forgotten_while_steps_have_a_number_of_rows_that_is_not_timed() -> None:
    times = timed({8: 0.02, 10: 2.0, 12: 2.0})
    assert best_lengths([(0.99, 0.99)] * 9, [3] * 9, 9, 9, times, 100) == [0] * 9
    for _ in range(FORGOTTEN_AFTER + 1):
        times.seconds(np.array([9]))
        times.note(9, 0.021)
    of_nine, of_twelve = times.seconds(np.array([9, 12]))
    assert of_twelve < 1.5 * of_nine
    assert sum(best_lengths([(0.99, 0.99)] * 9, [3] * 9, 9, 9, times, 100)) > 0


def test_seconds_are_seconds_though_no_step_had_a_timed_number_of_rows() -> None:
    """What guesses may take is a share of them."""
    times = StepTimes()
    for num_rows in (9, 11, 400):
        times.note(num_rows, 0.04)
        assert times.seconds(np.array([num_rows]))[0] == pytest.approx(0.04)
    times.note(8, 0.02)
    assert times.seconds(np.array([8]))[0] == pytest.approx(0.02)


def test_a_guess_that_begins_rightly_is_drafted_to_its_end() -> None:
    times = timed({1: 0.02, 2: 0.021, 4: 0.022, 8: 0.026, 10: 0.5})
    assert best_lengths([(0.3, 0.3)], [31], 1, 1, times, 100) == [3]
    assert best_lengths([(0.3, 0.98)], [31], 1, 1, times, 100) == [7]


def test_a_size_that_was_slow_once_is_tried_again() -> None:
    times = timed({1: 0.02})
    times.note(8, 0.2)
    assert best_lengths([(0.9, 0.9)], [7], 1, 1, times, 100) == [7]
    for _ in range(6):
        times.note(8, 0.25)
    assert best_lengths([(0.9, 0.9)], [7], 1, 1, times, 100) < [4]


def test_acceptance_is_learnt_by_source_and_length_of_match_and_by_request() -> None:
    acceptance = Acceptance()
    for _ in range(50):
        acceptance.note("own", 2, 0, one_was_wrong=True, record=Record())
        acceptance.note("own", 4, 6, one_was_wrong=True, record=Record())
        acceptance.note("own", 20, 6, one_was_wrong=False, record=Record())
    assert acceptance.chances("own", 2, Record())[0] < 0.1
    assert acceptance.chances("own", 2, Record())[1] == pytest.approx(ASSUMED_CHANCE)
    assert acceptance.chances("own", 5, Record())[0] > 0.95
    assert acceptance.chances("own", 5, Record())[1] == pytest.approx(5 / 6, abs=0.02)
    assert min(acceptance.chances("own", 30, Record())) > 0.9
    assert acceptance.chances("cache", 2, Record()) == pytest.approx((ASSUMED_CHANCE, ASSUMED_CHANCE))
    unlucky = Record()
    for _ in range(10):
        acceptance.note("own", 20, 0, one_was_wrong=True, record=unlucky)
    assert acceptance.chances("own", 30, unlucky)[0] < 0.5 * acceptance.chances("own", 30, Record())[0]


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
