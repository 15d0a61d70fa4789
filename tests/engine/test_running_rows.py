"""Rows of running requests: who stands where, what is expected, and who has left when a step is read."""

from __future__ import annotations

import numpy as np

from foreword.batch import Entries
from foreword.cache import TokenSequence
from foreword.engine.running_rows import RunningRows
from foreword.request import NO_ROW, Request, SamplingParams


def request(name: str, num_tokens: int, arrival: int, max_tokens: int = 5) -> Request:
    sequence = TokenSequence(name, list(range(1, num_tokens + 1)), block_size=4)
    made = Request(sequence, SamplingParams(), max_tokens=max_tokens, stop_token_ids=frozenset({99}))
    made.service_key = (0, arrival)
    return made


def whole(rows: RunningRows) -> Entries:
    """A step that computes everything known of everybody."""
    progress = rows.progress[rows.order]
    return rows.entries(rows.order, progress["num_computed"], progress["num_tokens"])


def test_rows_are_listed_in_service_order_and_grow_with_their_number() -> None:
    rows = RunningRows()
    requests = [request(str(row), row + 1, arrival=-row) for row in range(40)]
    for row, own in enumerate(requests):
        rows.add(row, own, 0, 0)
    assert [own.row for own in requests] == list(range(40))
    assert [own.request_id for own in rows] == [str(row) for row in reversed(range(40))]
    assert rows.last().request_id == "0"
    assert rows.progress["num_tokens"][:40].tolist() == list(range(1, 41))
    rows.remove(requests[39])
    assert rows.order.tolist() == list(reversed(range(39)))
    assert requests[39].row == NO_ROW
    rows.clear()
    assert {own.row for own in requests} == {NO_ROW}


def test_an_expected_token_counts_and_can_be_taken_back() -> None:
    rows = RunningRows()
    rows.add(0, request("goes on", 6, arrival=0), 2, 0)
    rows.add(1, request("ends", 3, arrival=1, max_tokens=1), 0, 0)
    before = whole(rows)
    rows.expect(before)
    assert rows.progress["num_computed"][:2].tolist() == [6, 3]
    assert rows.progress["num_tokens"][:2].tolist() == [7, 3], "who ends with its token for its length expects none"
    assert rows.progress["source"][:2].tolist() == [0, -1]
    rows.stop_expecting(before)
    assert rows.progress["num_computed"][:2].tolist() == [2, 0]
    assert rows.progress["num_tokens"][:2].tolist() == [6, 3]
    assert (rows.progress["source"] == -1)[:2].all()


def test_who_has_left_is_known_though_another_has_its_row() -> None:
    rows = RunningRows()
    first, second = request("first", 4, arrival=0), request("second", 4, arrival=1)
    rows.add(3, first, 0, 0)
    rows.add(5, second, 0, 0)
    step = whole(rows)
    rows.remove(first)
    rows.add(3, request("third", 4, arrival=2), 0, 0)
    assert rows.still_run(step).tolist() == [False, True]
    rows.remove(second)
    rows.add(5, second, 0, 0)
    assert rows.still_run(step).tolist() == [False, False], "a second stay is another one"


def test_tokens_are_recorded_where_they_belong_and_those_to_stop_at_are_told() -> None:
    rows = RunningRows()
    first, second = request("first", 4, arrival=0), request("second", 7, arrival=1)
    rows.add(1, first, 0, 0)
    rows.add(0, second, 0, 0)
    assert rows.record(np.array([1, 0]), np.array([5, 8]), np.array([99, 7])).tolist() == [True, False]
    assert (first.output_token_ids, second.output_token_ids) == ([99], [7])
    assert second.sequence.token_ids.tolist() == [*range(1, 8), 7]
    assert rows.progress["num_tokens"][:2].tolist() == [len(second), len(first)]
    assert whole(rows).progress["last_token"].tolist() == [99, 7]


def test_a_token_ends_only_whom_it_ends() -> None:
    rows = RunningRows()
    first, second = request("first", 4, arrival=0), request("second", 4, arrival=1)
    second.stop_token_ids = frozenset({7})
    for row, own in enumerate((first, second)):
        rows.add(row, own, 0, 0)
    both, lengths = np.array([0, 1]), np.array([5, 5])
    assert rows.record(both, lengths, np.array([7, 99])).tolist() == [False, False], "each got the other's"
    assert rows.record(both, lengths + 1, np.array([99, 7])).tolist() == [True, True]
    rows.remove(second)
    assert rows.record(both[:1], lengths[:1] + 2, np.array([7])).tolist() == [False]


def test_a_request_that_comes_back_stands_at_its_old_place() -> None:
    rows = RunningRows()
    requests = [request(str(arrival), 4, arrival) for arrival in range(5)]
    for row, own in enumerate(requests):
        rows.add(row, own, 0, 0)
    rows.remove(requests[1])
    rows.add(7, requests[1], 0, 0)
    assert rows.order.tolist() == [0, 7, 2, 3, 4]
    assert list(rows) == requests
