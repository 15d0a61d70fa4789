"""The routing core: its decisions against a plain model, its bound, its accounts, and routers that share load."""

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.cache import BlockStored, ExtraKeys, TokenSequence
from foreword.cluster import EventBatch, Reason, ReplicaSpec, RoutingCore, RoutingOptions, RoutingRequest
from foreword.errors import ConfigError, NoReplicaError

BLOCK = 4


def make_core(num_replicas=3, rates=(100.0,), num_blocks=50, router="router", **options):
    core = RoutingCore(RoutingOptions(BLOCK, **options), router=router)
    for number in range(num_replicas):
        core.join(f"r{number}", ReplicaSpec(num_blocks, rates[number % len(rates)]))
        core.install_snapshot(f"r{number}", EventBatch(b"life", -1), 0.0)
    return core


def prompt(name, family, num_blocks, own=0, tail=1):
    """Blocks 0, 1, ... of a family, then some of its own, then a part of a block."""
    keys = [(family, at) for at in range(num_blocks)] + [(name, at) for at in range(own)]
    return RoutingRequest(name, keys, BLOCK * len(keys) + tail)


def store(core, replica, number, keys):
    core.observe(replica, EventBatch(b"life", number, (BlockStored(tuple(keys), None, (), BLOCK),)), 0.0)


ACTIONS = st.lists(
    st.tuples(
        st.integers(0, 3),  # family
        st.integers(0, 9),  # its blocks
        st.integers(0, 5),  # own blocks
        st.sampled_from(["queue", "queue", "first", "end", "retry", "wait"]),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(ACTIONS, st.booleans(), st.sampled_from([(100.0,), (50.0, 200.0)]))
def test_no_request_queues_longer_than_its_hit_is_worth(actions, priced, rates):
    core = make_core(rates=rates, num_blocks=12, price_weight=float(priced))
    batches, open_ones, now, known = itertools.count(), [], 0.0, set()
    numbers = {name: itertools.count() for name in core.replicas}
    for family, blocks, own, action in actions:
        request = prompt(f"q{next(batches)}", family, blocks, own)
        known.update(request.keys)
        decision = core.choose(request, now)
        fleet, at = decision.fleet, decision.slot
        terms, num_waiting = fleet.price_s + fleet.decode_s, fleet.num_waiting.mean()
        lost_s = BLOCK * (fleet.hit_blocks.max() - fleet.hit_blocks) / core._loads.rates.tokens_per_s
        assert (-lost_s - 1e-9 <= fleet.reuse_s).all()
        assert (fleet.reuse_s <= num_waiting * lost_s + 1e-9).all()
        for other in range(3):
            saved = fleet.prefill_s[other] - fleet.prefill_s[at] + num_waiting * lost_s[other] + lost_s[at]
            queued = fleet.backlog_s[at] - fleet.backlog_s[other]
            assert queued <= saved + terms[other] - terms[at] + 1e-9
            assert 0 <= fleet.price_s[other] <= priced * fleet.prefill_s[other] + BLOCK / min(rates)
        open_ones.append((decision, request))
        match action:
            case "first":
                done, _ = open_ones[0]
                core.note_first_token(done.reservation, now, done.hit_tokens)
                store(core, done.replica, next(numbers[done.replica]), request.keys or ["x"])
                known.add("x")
            case "end":
                core.release(open_ones.pop(0)[0].reservation, now)
            case "retry":
                _, again = open_ones.pop()
                open_ones.append((core.choose(again, now, {decision.replica}), again))
                assert open_ones[-1][0].replica != decision.replica
            case "wait":
                now += 0.7
        core.check_integrity(list(known))
    for decision, _ in open_ones:
        core.release(decision.reservation, now)
    core.check_integrity(list(known))
    assert core.export_load().updates == ()


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(1, 9)), max_size=12),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 6)), min_size=1, max_size=12),
)
def test_the_choice_is_that_of_a_plain_search_over_all_replicas(held, requests):
    core = make_core(rates=(100.0, 60.0, 30.0), price_weight=0.0)
    sets = {name: set() for name in core.replicas}
    numbers = {name: itertools.count() for name in core.replicas}
    for replica, family, blocks in held:
        keys = [(family, at) for at in range(blocks)]
        store(core, f"r{replica}", next(numbers[f"r{replica}"]), keys)
        sets[f"r{replica}"].update(keys)
    backlog = dict.fromkeys(core.replicas, 0)
    rates = {"r0": 100.0, "r1": 60.0, "r2": 30.0}
    conversations, under_way, goes_on = Counter(), Counter(), set()
    for number, (family, blocks, own) in enumerate(requests):
        request = prompt(f"q{number}", family, blocks, own)
        keys = request.keys
        hits = {name: leading(keys, held_keys) for name, held_keys in sets.items()}

        def cost(name, keys=keys, hits=hits, number=number):
            tokens = backlog[name] + BLOCK * (len(keys) - hits[name]) + 1
            for at in range(hits[name], max(hits.values())):
                holders = sum(at < hit for hit in hits.values())
                shared = 1 / (1 + under_way[keys[at]] / holders), 3 / max(1, conversations[keys[at]])
                tokens += BLOCK * ((1 + number / 3) * min(1, *shared) - 1)
            return tokens / rates[name]

        decision = core.choose(request, 0.0)
        assert cost(decision.replica) == pytest.approx(min(map(cost, rates)))
        assert decision.costs.tolist() == pytest.approx([cost(name) for name in rates])
        assert decision.hit_tokens == BLOCK * hits[decision.replica]
        backlog[decision.replica] += request.num_tokens - decision.hit_tokens
        sets[decision.replica].update(keys)
        known = leading(keys, conversations)
        if known == len(keys) or (known and keys[known - 1] in goes_on):
            conversations.update(keys[:known])
        conversations.update(keys[known:])
        goes_on.update(keys[max(0, known - 1) : -1])
        under_way.update(keys)
    core.check_integrity(sorted({key for held_keys in sets.values() for key in held_keys}, key=str))


def leading(keys, among):
    return next((at for at, key in enumerate(keys) if key not in among), len(keys))


def test_a_decision_explains_every_candidate_the_cheapest_first():
    core = make_core()
    store(core, "r1", 0, [("a", 0), ("a", 1)])
    decision = core.choose(prompt("q", "a", 3), 0.0)
    first, *others = decision.candidates()
    assert (first.replica, first.chosen, first.hit_tokens) == ("r1", True, 8)
    assert first.prefill_s == pytest.approx(0.05)
    assert first.cost_s == pytest.approx(0.05)
    assert [each.hit_tokens for each in others] == [0, 0]
    assert not decision.degraded
    assert decision.predicted_ttft_s == pytest.approx(0.05)


def test_equal_costs_go_to_the_replica_with_most_room_and_equal_calls_give_equal_decisions():
    def run():
        core = make_core(4)
        store(core, "r0", 0, [("z", 0)])
        return [core.choose(prompt(f"q{n}", f"f{n}", 5), 0.1 * n).replica for n in range(12)]

    assert run() == run()
    assert run()[0] == "r1"
    assert set(run()[:4]) == {"r0", "r1", "r2", "r3"}


def test_a_flood_under_one_prefix_spreads_and_each_replica_comes_to_hold_it():
    core = make_core(4)
    chosen = [core.choose(prompt(f"q{n}", "system", 8, own=3), 0.0) for n in range(40)]
    counts = [sum(each.replica == name for each in chosen) for name in core.replicas]
    assert max(counts) <= 1.25 * sum(counts) / 4
    assert core.choose(prompt("last", "system", 8), 0.0).fleet.hit_blocks.tolist() == [8] * 4


def test_a_request_under_way_is_a_hit_for_the_next_until_it_is_rejected():
    core = make_core()
    first = core.choose(prompt("q0", "a", 6), 0.0)
    second = core.choose(prompt("q1", "a", 6, own=1), 0.0)
    assert dict(zip(core.replicas, second.fleet.hit_blocks.tolist(), strict=True))[first.replica] == 6
    for each in (first, second):
        assert core.release(each.reservation, 0.0)
        assert not core.release(each.reservation, 0.0)
    assert not core.choose(prompt("q2", "a", 6), 0.0).fleet.hit_blocks.any()


def test_expected_blocks_that_no_event_reports_are_forgotten_in_time():
    core = make_core(expectation_s=10.0)
    for number, at in ((0, 0.0), (1, 20.0)):
        each = core.choose(prompt(f"q{number}", "ab"[number], 6), at)
        core.note_first_token(each.reservation, at, 0)
        assert core.choose(prompt(f"again {number}", "ab"[number], 6), at + 9.9).hit_tokens == 24
    assert core.choose(prompt("q2", "a", 6), 30.0).hit_tokens == 0


def test_the_echo_of_a_rejection_does_not_free_the_retry():
    core = make_core(1)
    request = prompt("q", "a", 3)
    first = core.choose(request, 0.0).reservation
    second = core.choose(request, 0.1).reservation
    assert (first.attempt, second.attempt) == (1, 2)
    assert not core.release(first, 0.2)
    assert len(core.export_load().updates) == 1
    assert core.release(second, 0.3)


def test_predicted_and_delivered_tokens_are_counted():
    core = make_core(1)
    store(core, "r0", 0, [("a", 0), ("a", 1)])
    decision = core.choose(prompt("q", "a", 3), 0.0)
    for _ in range(2):
        core.note_first_token(decision.reservation, 0.1, 4)
    counts = core.total_counts()
    assert (counts.decisions, counts.delivered, counts.prompt_tokens) == (1, 1, 13)
    assert (counts.predicted_tokens, counts.delivered_tokens, counts.overcredited_tokens) == (8, 4, 4)


def test_a_backlog_shrinks_with_time_by_the_prompt_that_is_computed_and_a_replica_that_hangs_keeps_the_rest():
    core = make_core(1)
    first = core.choose(prompt("q0", "a", 24, tail=4), 0.0).reservation  # 100 tokens, 1 s
    core.choose(prompt("q1", "b", 49, tail=4), 0.0)  # 200 tokens, 2 s

    def backlog(now):
        decision = core.choose(prompt("probe", "p", 0), now)
        core.release(decision.reservation, now)
        return decision.fleet.backlog_s[0]

    assert [backlog(now) for now in (0.0, 0.5, 1.0, 9.0)] == pytest.approx([3.0, 2.5, 2.0, 2.0])
    core.note_first_token(first, 9.0, 0)
    assert backlog(9.0) > 2.0, "the replica is known to be slow by now"


def test_rates_are_learnt():
    core = make_core(1)
    for number in range(60):
        decision = core.choose(prompt(f"q{number}", number, 50), float(10 * number))
        core.note_first_token(decision.reservation, 10 * number + 201 / 400, 0)
        core.release(decision.reservation, 10 * number + 5.0)
    assert core.choose(prompt("q", "new", 50), 1000.0).fleet.prefill_s[0] == pytest.approx(201 / 400, rel=0.02)


def test_answers_that_are_generated_weigh_by_the_replica_s_own_figure():
    core = RoutingCore(RoutingOptions(BLOCK))
    for name in ("a", "b"):
        core.join(name, ReplicaSpec(50, 100.0, decode_s=0.5))
        core.install_snapshot(name, EventBatch(b"", -1), 0.0)
    first = core.choose(prompt("q0", "x", 3), 0.0)
    core.note_first_token(first.reservation, 1.0, 0)
    second = core.choose(prompt("q1", "y", 3), 1.0)
    assert second.replica != first.replica
    assert sorted(second.fleet.decode_s.tolist()) == [0.0, 0.5]


def test_without_knowledge_a_bounded_hash_ring_decides_by_the_stable_boundary_and_says_so():
    core = RoutingCore(RoutingOptions(BLOCK))
    for number in range(5):
        core.join(f"r{number}", ReplicaSpec(50, 100.0))
    assert core.unsynced() == core.replicas

    def request(number, family):
        keys = [("common", 0), (family, 1), (f"q{number}", 2)]
        return RoutingRequest(f"q{number}", keys, 13, stable_blocks=2)

    by_family = {}
    for number in range(60):
        decision = core.choose(request(number, number % 12), 0.0)
        core.release(decision.reservation, 0.0)
        by_family.setdefault(number % 12, set()).add(decision.replica)
        assert decision.degraded
    assert all(len(replicas) == 1 for replicas in by_family.values())
    assert len(set().union(*by_family.values())) > 2, "not everything goes to one replica"
    assert core.counts[Reason.HASHED].decisions == core.total_counts().decisions == 60
    flood = [core.choose(request(number, "flood"), 0.0).replica for number in range(100, 200)]
    assert max(map(flood.count, set(flood))) <= 26
    core.install_snapshot("r3", EventBatch(b"", -1), 0.0)
    assert not core.choose(request(300, "flood"), 0.0).degraded


def test_an_unsynced_replica_gets_no_credit_until_its_snapshot_comes():
    core = make_core(2)
    store(core, "r0", 0, [("a", at) for at in range(5)])
    assert not core.observe("r0", EventBatch(b"life", 2), 0.0)
    assert core.unsynced() == ["r0"]
    assert core.choose(prompt("q0", "a", 5), 0.0).fleet.hit_blocks.tolist() == [0, 0]
    state = EventBatch(b"life", 2, (BlockStored(tuple(("a", at) for at in range(5)), None, (), BLOCK),))
    assert core.install_snapshot("r0", state, 0.0)
    assert core.choose(prompt("q1", "a", 5), 0.0).fleet.hit_blocks[0] == 5


def test_a_replica_that_leaves_takes_its_load_and_its_blocks_along():
    core = make_core(2)
    store(core, "r0", 0, [("a", at) for at in range(5)])
    first = core.choose(prompt("q0", "a", 5), 0.0)
    assert first.replica == "r0"
    assert core.leave("r0", 0.0) == [first.reservation]
    assert not core.release(first.reservation, 0.0)
    assert core.choose(prompt("q1", "a", 5), 0.0).replica == "r1"
    core.join("r9", ReplicaSpec(50, 100.0))  # takes the free slot
    core.install_snapshot("r9", EventBatch(b"new", -1), 0.0)
    assert core.choose(prompt("q2", "a", 5), 0.0).fleet.hit_blocks[0] == 0
    core.check_integrity([("a", at) for at in range(5)])
    core.retire("r9")
    assert {core.choose(prompt(f"p{n}", "n", n), 0.0).replica for n in range(9)} == {"r1"}
    core.join("r9", ReplicaSpec(50, 100.0))
    assert core.choose(prompt("q3", "m", 5), 0.0).replica == "r9"


def test_salts_adapters_and_media_never_match_each_other():
    core = make_core(1, num_blocks=1000)
    tokens = list(range(40))
    kinds = [ExtraKeys(), ExtraKeys(salt="one"), ExtraKeys(salt="two"), ExtraKeys(adapter="lora")]
    for number, extra in enumerate(kinds):
        for again in range(2):
            sequence = TokenSequence(f"{number} {again}", tokens, block_size=BLOCK, extra_keys=extra)
            decision = core.choose(RoutingRequest.of_sequence(sequence, stable_tokens=20), 0.0)
            assert decision.hit_tokens == (39 if again else 0)
            assert decision.fleet.request.stable_blocks == 5


def test_mistakes_name_the_value_and_the_remedy():
    core = make_core(1)
    core.retire("r0")
    with pytest.raises(NoReplicaError, match="none of 1 replicas"):
        core.choose(prompt("q", "a", 1), 0.0)
    with pytest.raises(ConfigError, match="'r7' is unknown"):
        core.observe("r7", EventBatch(b"", 0), 0.0)
    with pytest.raises(ConfigError, match="tokens_per_s=0"):
        ReplicaSpec(1, 0.0)
    with pytest.raises(ConfigError, match="price_weight=-1"):
        RoutingOptions(price_weight=-1)
    with pytest.raises(ConfigError, match="block_tokens=0"):
        RoutingOptions(0)


# ------------------------------------------------------------------ several routers


def loads_of(core):
    decision = core.choose(prompt("probe", "probe", 0), 0.0)
    core.release(decision.reservation, 0.0)
    core.take_updates()
    return decision.fleet.backlog_s.tolist()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from(["new", "first", "end", "drop"])), max_size=30))
def test_routers_that_share_updates_agree_on_the_load_and_recover_from_lost_ones(actions):
    cores = [make_core(share_load=True, router=f"router-{n}") for n in range(2)]
    open_ones = ([], [])
    for number, (at, action) in enumerate(actions):
        core = cores[at]
        if action in ("new", "drop") or not open_ones[at]:
            open_ones[at].append(core.choose(prompt(f"{at}.{number}", number, 3), 0.0).reservation)
        elif action == "first":
            core.note_first_token(open_ones[at][0], 0.0, 0)
        else:
            core.release(open_ones[at].pop(0), 0.0)
        updates = core.take_updates()
        for copies in range(0 if action == "drop" else 1 + number % 2):
            if cores[1 - at].merge(updates, 0.0):
                assert not copies
                cores[1 - at].install_load(core.export_load(), 0.0)
    for at in range(2):
        cores[at].beat()
        if cores[1 - at].merge(cores[at].take_updates(), 0.0):
            cores[1 - at].install_load(cores[at].export_load(), 0.0)
        cores[at].check_integrity([])
    assert loads_of(cores[0]) == pytest.approx(loads_of(cores[1]))


def test_a_silent_or_restarted_router_loses_its_reservations():
    one, other = (make_core(1, share_load=True, router=name) for name in ("one", "other"))
    other.choose(prompt("q", "a", 10), 0.0)
    assert one.merge(other.take_updates(), 0.0) == []
    assert loads_of(one) == [0.41]
    again = RoutingCore(RoutingOptions(BLOCK, share_load=True), router="other", life="second")
    again.beat()
    assert one.merge(again.take_updates(), 1.0) == []
    assert loads_of(one) == [0.0]
    other.choose(prompt("q2", "b", 10), 1.0)
    assert one.merge(other.take_updates(), 1.0) == ["other"]
    one.install_load(other.export_load(), 1.0)
    assert loads_of(one)[0] > 0
    one.choose(prompt("late", "c", 0), 7.0)
    assert one.export_load().updates[0].reservation.request_id == "late"
    assert loads_of(one) == pytest.approx([0.01])


def test_a_replica_that_a_router_meets_late_has_what_its_peers_reserved_before() -> None:
    """The whole state, which comes every second, tells it: no update was lost, so nothing else would."""
    one, other = (make_core(1, share_load=True, router=name) for name in ("one", "other"))
    other.join("late", ReplicaSpec(50, 100.0))
    for number in range(2):
        other.choose(prompt(f"q{number}", number, 10), 0.0, exclude=["r0"])
    assert one.merge(other.take_updates(), 0.0) == []
    one.join("late", ReplicaSpec(50, 100.0))
    one.install_load(other.export_load(), 1.0)
    assert one.loads()["late"] == other.loads()["late"]
    one.check_integrity([])


def test_a_rate_that_is_a_guess_gives_way_to_what_others_measured() -> None:
    core = RoutingCore(RoutingOptions())
    for name in ("a", "b"):
        core.join(name, ReplicaSpec(100, 1000.0, is_rate_known=False))
    core.join("known", ReplicaSpec(100, 1000.0))
    core.retire("known")
    decision = core.choose(RoutingRequest("r", [], 1000), 0.0, exclude=["b"])
    core.note_first_token(decision.reservation, 0.5, 0)
    assert {name: load.tokens_per_s for name, load in core.loads().items()} == {"a": 2000, "b": 2000, "known": 1000}
    core.join("c", ReplicaSpec(100, 1000.0, is_rate_known=False))
    assert core.loads()["c"].tokens_per_s == 2000
