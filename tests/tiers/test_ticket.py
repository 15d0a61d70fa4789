"""Tickets: who ends a job, what its report says, and that nobody touches the caller's memory afterwards."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from doors import is_ending
from foreword.tiers.ticket import Outcome, Ticket


def test_blocks_that_are_not_settled_get_the_outcome_of_the_end():
    ticket = Ticket(4)
    ticket.settle([0, 1], Outcome.DONE)
    ticket.settle(1, Outcome.CORRUPT)  # settled already
    ticket.settle(3, Outcome.MISSING)
    assert not ticket.done
    ticket.finish(Outcome.IO_ERROR)
    assert ticket.done
    assert ticket.report.outcomes.tolist() == [Outcome.DONE, Outcome.DONE, Outcome.IO_ERROR, Outcome.MISSING]
    assert ticket.report.num_leading == 2
    assert ticket.report.num_done == 2
    assert ticket.report.by_reason() == {"done": 2, "io_error": 1, "missing": 1}


def test_the_leading_blocks_are_all_blocks_when_none_failed():
    ticket = Ticket(3)
    ticket.settle([0, 2], Outcome.PRESENT)
    ticket.finish(Outcome.DONE)
    assert ticket.report.num_leading == 3


def test_a_report_before_the_end_is_a_mistake_of_ours():
    with pytest.raises(AssertionError, match="has not ended"):
        _ = Ticket(1).report


def test_the_deadline_ends_a_job_that_nobody_works_on():
    ticket = Ticket(2, deadline_s=0.01)
    ticket.settle(0, Outcome.DONE)
    assert ticket.wait()
    assert ticket.report.outcomes.tolist() == [Outcome.DONE, Outcome.TIMEOUT]


def test_a_wait_ends_before_the_job_does():
    assert not Ticket(1).wait(0.01)


def test_nothing_is_moved_after_the_end():
    for end in (Ticket.cancel, lambda ticket: ticket.finish(Outcome.DONE)):
        ticket, moves = Ticket(1), []
        end(ticket)
        assert not ticket.transfer(0, lambda moves=moves: moves.append(1))
        assert moves == []


def test_cancelling_waits_for_the_move_under_way_and_allows_no_other():
    ticket = Ticket(2)
    moving, go_on, moves = threading.Event(), threading.Event(), []

    def move() -> None:
        moving.set()
        assert go_on.wait(60)
        moves.append(time.monotonic())

    worker = threading.Thread(target=lambda: (ticket.transfer(0, move), ticket.transfer(1, move)))
    worker.start()
    assert moving.wait(60)
    canceller = threading.Thread(target=ticket.cancel)
    canceller.start()
    while not is_ending(ticket):
        time.sleep(0.001)
    assert not ticket.done  # the memory is being written
    go_on.set()
    canceller.join(60)
    assert len(moves) == 1
    worker.join(60)
    assert len(moves) == 1
    assert ticket.report.by_reason() == {"cancelled": 2}


def test_a_move_that_fails_makes_its_block_an_error_and_the_others_go_on(caplog):
    ticket = Ticket(2)

    def fail() -> None:
        raise ValueError("no such memory")

    assert not ticket.transfer(0, fail)
    assert ticket.transfer(1, lambda: None)
    ticket.finish(Outcome.DONE)
    assert ticket.report.outcomes.tolist() == [Outcome.IO_ERROR, Outcome.DONE]
    assert "no such memory" in caplog.text


def test_what_must_happen_before_the_end_happens_before_anybody_sees_it():
    seen: list[tuple[str, object]] = []

    def before(outcomes: np.ndarray) -> None:
        seen.append(("before", outcomes.tolist()))
        assert not ticket.done

    ticket = Ticket(1, before_done=before, on_done=lambda ended: seen.append(("after", ended.done)))
    ticket.finish(Outcome.CORRUPT)
    ticket.cancel()
    assert seen == [("before", [Outcome.CORRUPT]), ("after", True)]


def test_a_listener_that_fails_harms_nobody(caplog):
    ticket = Ticket(1, on_done=lambda ended: 1 / 0)
    ticket.finish(Outcome.DONE)
    assert ticket.done
    assert "ZeroDivisionError" in caplog.text
