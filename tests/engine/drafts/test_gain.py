"""How many tokens are drafted: what is likely to be right against what longer steps were measured to cost."""

from __future__ import annotations

import json

import numpy as np
import pytest

from foreword.engine.drafts.gain import ASSUMED_CHANCE, FORGOTTEN_AFTER, Acceptance, Record, StepTimes, best_lengths


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
        acceptance.note("own", 2, 0, one_was_wrong=True, own=Record())
        acceptance.note("own", 4, 6, one_was_wrong=True, own=Record())
        acceptance.note("own", 20, 6, one_was_wrong=False, own=Record())
    assert acceptance.chances("own", 2, Record())[0] < 0.1
    assert acceptance.chances("own", 2, Record())[1] == pytest.approx(ASSUMED_CHANCE)
    assert acceptance.chances("own", 5, Record())[0] > 0.95
    assert acceptance.chances("own", 5, Record())[1] == pytest.approx(5 / 6, abs=0.02)
    assert min(acceptance.chances("own", 30, Record())) > 0.9
    assert acceptance.chances("cache", 2, Record()) == pytest.approx((ASSUMED_CHANCE, ASSUMED_CHANCE))
    unlucky = Record()
    for _ in range(10):
        acceptance.note("own", 20, 0, one_was_wrong=True, own=unlucky)
    assert acceptance.chances("own", 30, unlucky)[0] < 0.5 * acceptance.chances("own", 30, Record())[0]
