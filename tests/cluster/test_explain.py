"""Explanations of routing decisions, and the log that sets what replicas had beside what was predicted."""

import json

import pytest

from foreword.cache import BlockStored
from foreword.cluster import (
    DecisionLog,
    EventBatch,
    Reason,
    ReplicaSpec,
    RoutingCore,
    RoutingOptions,
    RoutingRequest,
    Standing,
)
from foreword.errors import ConfigError

BLOCK = 4


def make_core(names=("r0", "r1", "r2"), synced=True, log=None):
    core = RoutingCore(RoutingOptions(BLOCK), log=log)
    for name in names:
        core.join(name, ReplicaSpec(50, 100.0, decode_s=0.5))
        if synced:
            core.install_snapshot(name, EventBatch(b"life", -1), 0.0)
    return core


def prompt(name, family, num_blocks):
    keys = [(family, at) for at in range(num_blocks)]
    return RoutingRequest(name, keys, BLOCK * num_blocks + 1)


def store(core, replica, keys, number=0):
    core.observe(replica, EventBatch(b"life", number, (BlockStored(tuple(keys), None, (), BLOCK),)), 0.0)


def explained(core, request, **more):
    return core.choose(request, 0.0, **more)


def test_a_hit_is_explained_by_each_replica_s_parts_of_the_cost():
    core = make_core()
    store(core, "r1", [("a", 0), ("a", 1)])
    first = explained(core, prompt("q", "a", 3))
    assert first.reason is Reason.HIT
    assert (first.hit_tokens, first.fleet.request.num_tokens, first.delivered_tokens) == (8, 13, None)
    assert (first.replica, first.candidates()[0].hit_tokens, first.candidates()[0].uncached_tokens) == ("r1", 8, 5)
    for each in first.candidates():
        assert each.hit_tokens + each.uncached_tokens == 13
        parts = (each.backlog_s, each.prefill_s, each.reuse_s, each.price_s, each.decode_s)
        assert each.cost_s == pytest.approx(sum(parts))
        assert each.standing is Standing.KNOWN
    assert [each.replica for each in first.candidates()] == ["r1", "r0", "r2"]


def occupy(core: RoutingCore, replica: str, num_tokens: int) -> None:
    """Give a replica a prompt of this length to compute."""
    others = [each for each in core.replicas if each != replica]
    core.choose(RoutingRequest(f"occupies {replica}", [], num_tokens), 0.0, others)


def test_a_hit_that_costs_more_than_it_saves_is_explained_by_load():
    core = make_core()
    store(core, "r1", [("a", 0)])
    occupy(core, "r1", 10_000)
    away = explained(core, prompt("q", "a", 3))
    assert away.reason is Reason.LOAD
    assert away.replica != "r1"
    assert (away.candidates()[-1].replica, away.candidates()[-1].hit_tokens, away.candidates()[-1].backlog_s) == (
        "r1",
        4,
        100.0,
    )
    assert explained(core, prompt("q2", "new", 3)).reason is Reason.NO_HIT


def test_without_knowledge_the_hash_ring_is_named():
    core = make_core(synced=False)
    hashed = explained(core, prompt("q", "a", 3))
    assert hashed.reason is Reason.HASHED
    assert hashed.as_dict()["degraded"] is True
    assert {each.standing for each in hashed.candidates()} == {Standing.UNKNOWN}
    core.install_snapshot("r2", EventBatch(b"life", -1), 0.0)
    mixed = explained(core, prompt("q2", "b", 3))
    assert mixed.reason is Reason.NO_HIT
    assert {each.replica: each.standing.value for each in mixed.candidates()} == {
        "r0": "unknown",
        "r1": "unknown",
        "r2": "known",
    }


def test_replicas_that_could_not_be_chosen_say_why_and_have_no_cost():
    core = make_core()
    store(core, "r0", [("a", 0), ("a", 1), ("a", 2)])
    first = explained(core, prompt("q", "a", 3))
    assert first.reservation.replica == "r0"
    core.retire("r1")
    again = explained(core, prompt("q", "a", 3), exclude=["r0"])
    assert again.reservation.attempt == 2
    assert again.reason is Reason.NO_HIT, "what cannot be chosen gives no hit"
    shown = {each["replica"]: (each["standing"], each["cost_s"] is None) for each in again.as_dict()["candidates"]}
    assert shown == {"r0": ("excluded", True), "r1": ("retired", True), "r2": ("known", False)}
    assert "next=" not in again.text()


def test_an_explanation_is_json_and_one_line_of_ascii():
    core = make_core(("Straße 1\n", "b/c:1"))
    found = explained(core, prompt("q", "a", 3))
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False)) == found.as_dict()
    text = found.text()
    assert text.isascii()
    assert text.isprintable()
    named = dict(part.split("=", 1) for part in text.split(" "))
    assert named["replica"] == "Stra%C3%9Fe%201%0A"
    assert (named["reason"], named["hit"], named["next"], named["attempt"]) == ("no_hit", "0/13", "b/c:1", "1")


def test_the_log_sets_delivered_beside_predicted_and_adds_up_by_reason():
    log = DecisionLog()
    core = make_core(log=log)
    store(core, "r1", [("a", 0), ("a", 1)])
    decision = core.choose(prompt("q", "a", 3), 0.0)
    (waiting,) = log.of_request("q")
    assert waiting.delivered_tokens is None
    for _ in range(2):  # a repeated message counts once
        core.note_first_token(decision.reservation, 0.1, 4)
    (done,) = log.of_request("q")
    assert (done.delivered_tokens, done.text().split("delivered=")[1].split()[0]) == (4, "4")
    counts = core.counts[Reason.HIT]
    assert (counts.decisions, counts.delivered, counts.prompt_tokens) == (1, 1, 13)
    assert (counts.predicted_tokens, counts.delivered_tokens, counts.overcredited_tokens) == (8, 4, 4)


def test_the_log_keeps_what_was_true_at_the_decision():
    log = DecisionLog()
    core = make_core(log=log)
    before = core.choose(prompt("q", "a", 3), 0.0).as_dict()
    core.leave("r2", 0.0)
    core.join("r9", ReplicaSpec(50, 100.0))
    for number in range(9):
        core.choose(prompt(f"more {number}", number, 30), 0.0)
    assert [each.as_dict() for each in log.of_request("q")] == [before]


def test_attempts_of_a_request_stay_apart():
    log = DecisionLog()
    core = make_core(log=log)
    request = prompt("q", "a", 3)
    first = core.choose(request, 0.0)
    second = core.choose(request, 0.0, {first.replica})
    core.note_first_token(first.reservation, 0.1, 12)  # the echo of the attempt that was given up
    core.note_first_token(second.reservation, 0.1, 0)
    core.release(second.reservation, 0.2)
    third = core.choose(request, 0.3)  # after a release, attempts begin with 1 again
    assert third.reservation.attempt == 1
    core.note_first_token(third.reservation, 0.4, 8)
    assert [each.delivered_tokens for each in log.of_request("q")] == [None, 0, 8]


def test_the_log_is_bounded_and_the_counts_are_not():
    log = DecisionLog(3)
    core = make_core(log=log)
    decisions = [core.choose(prompt(f"q{number % 4}", number, 3), 0.0) for number in range(9)]
    assert len(log) == 3
    assert [each.reservation for each in log] == [each.reservation for each in reversed(decisions[-3:])]
    assert [len(log.of_request(f"q{number}")) for number in range(4)] == [1, 0, 1, 1]
    late = core.choose(prompt("late", "late", 3), 0.0)
    for number in range(3):
        core.choose(prompt(f"p{number}", number, 3), 0.0)
    core.note_first_token(late.reservation, 0.1, 0)
    assert (core.total_counts().decisions, core.total_counts().delivered) == (13, 1)
    with pytest.raises(ConfigError, match="a log of 0 decisions"):
        DecisionLog(0)
