"""Linked prompts: the replica that has their sources draws them, and is expected to have them afterwards."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.cache import BlockStored
from foreword.cluster import (
    CopiedRun,
    DecisionLog,
    EventBatch,
    Reason,
    ReplicaSpec,
    RoutingCore,
    RoutingOptions,
    RoutingRequest,
)

BLOCK, HEAD, DOCUMENT = 4, 1, 5
"""Tokens of a block; blocks of the instructions and of each document."""


def make_core(num_replicas=3, num_blocks=100, log=None, **options):
    core = RoutingCore(RoutingOptions(BLOCK, **options), log=log)
    for number in range(num_replicas):
        core.join(f"r{number}", ReplicaSpec(num_blocks, 100.0))
        core.install_snapshot(f"r{number}", EventBatch(b"life", -1), 0.0)
    return core


def store(core, replica, keys, number=0, now=0.0):
    core.observe(replica, EventBatch(b"life", number, (BlockStored(tuple(keys), None, (), BLOCK),)), now)


def source(document, num_blocks=DOCUMENT):
    """Instructions, then a document."""
    return [("instructions", at) for at in range(HEAD)] + [(document, at) for at in range(num_blocks)]


def prompt(name, documents, tail=3):
    """Instructions, the first document, which is exact, the others, which are linked, and a question."""
    keys, runs = source(documents[0]), []
    for place, document in enumerate(documents[1:], 1):
        begin = BLOCK * len(keys)
        keys += [(tuple(documents[:place]), document, at) for at in range(DOCUMENT)]
        runs.append(CopiedRun(begin, BLOCK * len(keys), source(document)))
    return RoutingRequest(name, keys, BLOCK * len(keys) + tail, runs=tuple(runs))


def candidate(decision, name):
    [found] = [one for one in decision.candidates() if one.replica == name]
    return found


def test_documents_draw_a_prompt_more_than_its_beginning_where_they_are_more():
    core = make_core()
    store(core, "r1", source("a"))
    for number, document in enumerate("bc"):
        store(core, "r2", source(document), number)
    linked = prompt("q", ["a", "c", "b"])
    decision = core.choose(linked, 0.0)
    assert decision.replica == "r2"
    size, lacks = BLOCK * DOCUMENT, BLOCK * DOCUMENT + 3
    assert decision.fleet.computed_tokens.tolist() == [BLOCK * HEAD + 2 * size + lacks, 2 * size + 3, lacks]
    assert [candidate(decision, f"r{number}").source_tokens for number in range(3)] == [0, 0, 2 * size]
    core.release(decision.reservation, 0.0)
    plain = RoutingRequest("plain", linked.keys, linked.num_tokens)
    assert core.choose(plain, 0.0).replica == "r1", "with its sources left out it would have gone there"


def test_in_another_order_documents_draw_it_too():
    core = make_core()
    first = core.choose(prompt("first", ["a", "b", "c"]), 0.0)
    for number, document in enumerate("abc"):
        store(core, first.replica, source(document), number)
    core.note_first_token(first.reservation, 1.0, 0)
    core.release(first.reservation, 1.0)
    again = core.choose(prompt("again", ["new", "c", "b", "a"]), 1.0)
    assert again.replica == first.replica
    assert candidate(again, first.replica).uncached_tokens == BLOCK * DOCUMENT + 3


DOCUMENTS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=4)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from("abcd"), st.integers(0, DOCUMENT)), max_size=8),
    st.lists(st.tuples(st.integers(0, 2), DOCUMENTS, st.integers(0, 22)), max_size=3),
    DOCUMENTS,
    st.booleans(),
)
def test_what_a_replica_would_compute_is_what_a_plain_search_finds(sources, prompts, documents, skips):
    core, sets, numbers = make_core(), [set(), set(), set()], [0, 0, 0]
    held = [(replica, source(document, length)) for replica, document, length in sources]
    held += [(replica, prompt("", list(others)).keys[:length]) for replica, others, length in prompts]
    for replica, keys in held:
        if keys:
            store(core, f"r{replica}", keys, numbers[replica])
            numbers[replica] += 1
            sets[replica].update(keys)
    request = prompt("q", documents)
    if skips:
        request = RoutingRequest("q", [], request.num_tokens, runs=request.runs)
    decision = core.choose(request, 0.0)
    for slot, has in enumerate(sets):
        hit = next((at for at, key in enumerate(request.keys) if key not in has), len(request.keys))
        rest = [
            at for at in range(BLOCK * hit, request.num_tokens) if not any(r.begin <= at < r.end for r in request.runs)
        ]
        needed = {key for run in request.runs if run.end > BLOCK * hit for key in run.keys} - {*request.keys}
        assert decision.fleet.computed_tokens[slot] == len(rest) + BLOCK * len(needed - has)
        if request.runs:
            assert set(decision.fleet.sources.lacking(slot)) - {*request.keys} == needed - has
    costs = decision.fleet.computed_tokens.tolist()
    assert costs[decision.slot] == min(costs)
    core.check_integrity([key for has in sets for key in has])


def test_sources_are_expected_where_they_will_be_computed_until_the_request_is_rejected():
    core = make_core()
    first = core.choose(prompt("q0", ["a", "b", "c"]), 0.0)
    second = core.choose(prompt("q1", ["d", "c", "b"]), 0.0)
    assert candidate(second, first.replica).source_tokens == 2 * BLOCK * DOCUMENT
    plain = core.choose(RoutingRequest("q2", source("c"), BLOCK * len(source("c")) + 1), 0.0)
    assert candidate(plain, first.replica).hit_tokens == BLOCK * len(source("c")), "a source is anybody's prefix"
    for each in (first, second, plain):
        assert core.release(each.reservation, 0.0)
    core.check_integrity([*source("a"), *source("b"), *source("c")])
    third = core.choose(prompt("q3", ["e", "b", "c"]), 0.0)
    assert candidate(third, third.replica).source_tokens == 0


def test_expected_sources_that_no_event_reports_are_forgotten_in_time():
    core = make_core(expectation_s=10.0)
    first = core.choose(prompt("q0", ["a", "b"]), 0.0)
    store(core, first.replica, source("a"))
    for now, expected in ((1.0, BLOCK * DOCUMENT), (10.9, BLOCK * DOCUMENT), (11.1, 0)):
        other = first if now == 1.0 else core.choose(prompt(f"other at {now}", ["y"]), now)
        core.note_first_token(other.reservation, now, 0)  # whatever ended by now is forgotten
        decision = core.choose(prompt(f"at {now}", ["x", "b"]), now)
        assert candidate(decision, first.replica).source_tokens == expected
        core.release(decision.reservation, now)


def test_the_work_that_is_reserved_is_that_of_sources_too():
    core = make_core(1)
    size = BLOCK * DOCUMENT
    first = core.choose(prompt("q0", ["a", "b", "c"]), 0.0)
    assert core.loads()["r0"].waiting_tokens == BLOCK * HEAD + 3 * size + 3
    core.note_first_token(first.reservation, 1.0, 0)
    core.choose(prompt("q1", ["d", "c", "b"]), 1.0)
    assert core.loads()["r0"].waiting_tokens == size + 3


def test_rates_are_learnt_from_what_was_computed():
    core = make_core(1, num_blocks=10_000)
    for number, document in enumerate("bcdefg"):
        store(core, "r0", source(document), number)
    for number in range(60):
        request = prompt(f"q{number}", [f"{number}", *"bcdefg"], tail=100)
        decision = core.choose(request, float(10 * number))
        work = int(decision.fleet.computed_tokens[0])
        assert work == BLOCK * DOCUMENT + 100
        core.note_first_token(decision.reservation, 10 * number + work / 400, decision.hit_tokens)
        core.release(decision.reservation, 10 * number + 5.0)
    assert core.loads()["r0"].tokens_per_s == pytest.approx(400, rel=0.02)


def test_an_equal_composition_needs_no_sources_and_is_no_predicted_hit():
    core = make_core(2)
    request = prompt("q", ["a", "b", "c"])
    store(core, "r1", request.keys)
    decision = core.choose(request, 0.0)
    assert (decision.replica, decision.fleet.computed_tokens[1]) == ("r1", 3)
    assert decision.hit_tokens == BLOCK * (HEAD + DOCUMENT), "what is linked is no hit"
    assert candidate(decision, "r1").source_tokens == decision.source_tokens == 2 * BLOCK * DOCUMENT
    core.note_first_token(decision.reservation, 1.0, decision.hit_tokens)
    assert core.total_counts().overcredited_tokens == 0


def test_a_source_is_needed_until_its_last_run_is_cached():
    core = make_core(2)
    request = prompt("q", ["a", "b", "b"])
    store(core, "r1", request.keys[: HEAD + 2 * DOCUMENT])
    decision = core.choose(request, 0.0)
    size = BLOCK * DOCUMENT
    assert decision.source_tokens == size, "one source"
    assert decision.fleet.computed_tokens.tolist() == [BLOCK * HEAD + 2 * size + 3, size + 3]


def test_sources_take_room():
    core = make_core(2, num_blocks=30)
    for number, document in enumerate("bc"):
        store(core, "r0", source(document), number)
    store(core, "r1", [("other", at) for at in range(14)])
    core.observe("r1", EventBatch(b"life", 1, (BlockStored((("other", 14),), ("other", 13), (), BLOCK),)), 0.0)  # a use
    fleet = core.choose(prompt("q", ["a", "b", "c"]), 0.0).fleet
    evicted, chance_of_a_use = (HEAD + 3 * DOCUMENT) + 2 * DOCUMENT - 15, 0.5
    assert fleet.price_s.tolist() == [0.0, pytest.approx(evicted * BLOCK / 100 * chance_of_a_use)]


def test_a_use_of_sources_keeps_them_longer():
    core = make_core(1)
    store(core, "r0", source("b"), 0, 0.0)
    store(core, "r0", source("c"), 1, 1.0)
    core.choose(prompt("q", ["a", "b"]), 2.0)
    assert core.mirror("r0").oldest_use(2.0) == 1.0


def test_a_replica_that_has_sources_alone_has_a_hit():
    core = make_core(2)
    run = CopiedRun(8, 16, [("document", 0), ("document", 1)])
    store(core, "r1", run.keys)
    request = RoutingRequest("q", ["a", "b", "c", "d"], 17, runs=(run,))
    found = core.choose(request, 0.0)
    assert (found.replica, found.hit_tokens, found.reason) == ("r1", 0, Reason.HIT)
    core.release(found.reservation, 0.0)
    store(core, "r0", ["a"])
    again = core.choose(replace(request, request_id="again"), 0.0)
    assert (again.replica, again.reason) == ("r1", Reason.HIT), "it has more than the other's beginning"


def occupy(core: RoutingCore, replica: str, num_tokens: int) -> None:
    """Give a replica a prompt of this length to compute."""
    others = [each for each in core.replicas if each != replica]
    core.choose(RoutingRequest(f"occupies {replica}", [], num_tokens), 0.0, others)


def test_a_busy_replica_s_sources_are_no_reason_to_wait_longer_than_they_save():
    core = make_core(2)
    for number, document in enumerate("bc"):
        store(core, "r0", source(document), number)
    occupy(core, "r0", 5 * 2 * BLOCK * DOCUMENT + 30)
    away = core.choose(prompt("q", ["a", "b", "c"]), 0.0)
    assert (away.replica, away.reason) == ("r1", Reason.LOAD)


def test_a_decision_says_what_replicas_have_of_sources_now_and_later():
    log = DecisionLog()
    core = make_core(log=log)
    store(core, "r1", source("b"))
    request = prompt("q", ["a", "b", "c"])
    decision = core.choose(request, 0.0)
    said, size = decision, BLOCK * DOCUMENT
    assert said.reason is Reason.HIT
    hit, total = BLOCK * HEAD, request.num_tokens
    assert f"hit={hit}/{total} sources={size}/{2 * size} " in said.text()
    assert "next_hit=0 next_sources=0 " in said.text()
    assert said.as_dict()["candidates"][0]["source_tokens"] == size
    assert said.as_dict()["source_tokens"] == 2 * size
    [logged] = log.of_request("q")
    assert logged.as_dict() == said.as_dict()
    store(core, "r2", request.keys)
    again = core.choose(prompt("again", ["a", "b", "c"]), 0.0)
    assert [each.as_dict() for each in log.of_request("again")] == [again.as_dict()]
    new = core.choose(prompt("new", ["x", "y"]), 0.0, exclude=["r1", "r2"])
    assert new.reason is Reason.NO_HIT
    plain = core.choose(RoutingRequest("p", source("a"), 30), 0.0)
    assert "sources" not in plain.text()
    assert plain.as_dict()["source_tokens"] == 0
