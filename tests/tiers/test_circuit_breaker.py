"""When a server is left alone, and for how long."""

from __future__ import annotations

import pytest

from foreword.tiers.store.state import CircuitBreaker


class Time:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def breaker(time) -> CircuitBreaker:
    return CircuitBreaker(3, monotonic=time)


def test_it_opens_after_failures_in_a_row_only(breaker):
    assert [breaker.failed(), breaker.failed(), breaker.succeeded()] == [False] * 3
    assert [breaker.failed(), breaker.failed(), breaker.failed()] == [False, False, True]
    assert (breaker.state, breaker.is_closed, breaker.num_trips) == ("open", False, 1)
    assert not breaker.failed()
    assert breaker.num_trips == 1


def test_one_caller_tries_after_each_pause_and_a_success_closes_it(breaker, time):
    breaker.trip()
    assert not breaker.may_try()
    assert breaker.seconds_to_try == 1.0
    time.now += 1.0
    assert [breaker.may_try(), breaker.may_try()] == [True, False]
    assert breaker.state == "half-open"
    assert breaker.succeeded()
    assert [breaker.may_try(), breaker.may_try()] == [True, True]
    assert breaker.num_trips == 1


def test_the_pause_doubles_up_to_the_longest_and_begins_anew_after_a_success(breaker, time):
    breaker.trip()
    pauses = []
    for _ in range(7):
        pauses.append(breaker.seconds_to_try)
        time.now += breaker.seconds_to_try
        assert breaker.may_try()
        assert not breaker.failed()
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    breaker.succeeded()
    breaker.trip()
    assert breaker.seconds_to_try == 1.0
    assert breaker.num_trips == 2


def test_a_try_whose_end_nobody_reports_is_followed_by_another(breaker, time):
    breaker.trip()
    time.now += 1.0
    assert breaker.may_try()
    time.now += 1.0
    assert breaker.may_try()
