"""Hit ratios: the figures of the recorded traces, fast ways against the engine's, policies against brute force."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from foreword.cache import CacheLedger, EvictionCause
from foreword.errors import ConfigError
from foreword.replay import simulator
from foreword.replay.caches import LruCache, ManagerCache
from foreword.replay.capacity import Capacity
from foreword.replay.curve import LruCurve, LruStack
from foreword.replay.keys import as_content_ids, chain
from foreword.replay.policies import POLICIES
from foreword.replay.simulator import Optimum
from foreword.replay.trace import RecordedRequest, TraceReader
from replay.workloads import KINDS, chat, requests, simulate

TRACES = Path(__file__).parents[3] / "shared" / "traces"
CAPACITIES = (100_000, 50_000, 30_000, 10_000, 1000)
FIGURES = {
    "conversation": (0.3664, (0.3637, 0.3546, 0.3257, 0.2116, 0.0445), (0.3664, 0.3664, 0.3664, 0.3664, 0.1907)),
    "synthetic": (0.6396, (0.6396, 0.6396, 0.6242, 0.4239, 0.0841), (0.6396, 0.6396, 0.6396, 0.6180, 0.2767)),
}
recorded = pytest.mark.skipif(not TRACES.is_dir(), reason="the recorded traces are not beside the repository")


def blocks(*capacities):
    return [Capacity(str(capacity), capacity) for capacity in capacities]


def request(ids, tokens_per_block=1):
    return RecordedRequest(None, chain(as_content_ids(ids)), tokens_per_block * len(ids), 1, tokens_per_block)


def random_requests(rng, count, alphabet=2, longest=5):
    return [request([rng.randrange(alphabet) for _ in range(rng.randint(1, longest))]) for _ in range(count)]


def held_by(cache, trace):
    return [cache.admit(each) for each in trace]


# ------------------------------------------------------------------------------------ recorded traces


@recorded
@pytest.mark.parametrize("name", FIGURES)
def test_the_published_figures_come_out(name):
    unlimited, lru, optimum = FIGURES[name]
    reader = TraceReader(TRACES / f"mooncake_{name}_trace.jsonl", strict=True)
    result = simulate(reader, ["lru", "optimum"], blocks(*CAPACITIES))
    found = result.hit_ratios()
    assert list(found["lru"].values()) == pytest.approx(lru, abs=5e-5 + 1e-9)
    assert list(found["optimum"].values()) == pytest.approx(optimum, abs=5e-5 + 1e-9)
    assert result.block_ratio(result.unlimited) == pytest.approx(unlimited, abs=5e-5)
    curve = LruCurve()
    for each in reader:
        curve.admit(each.keys)
    assert curve.hit_ratios(CAPACITIES) == pytest.approx(lru, abs=5e-5 + 1e-9)


@recorded
@pytest.mark.slow
@pytest.mark.parametrize("name", FIGURES)
def test_value_is_never_below_lru_on_the_recorded_traces_and_closes_part_of_the_gap(name):
    result = simulate(
        TraceReader(TRACES / f"mooncake_{name}_trace.jsonl"),
        ["lru", "value", "optimum"],
        blocks(10_000, 1000, 400),
    )
    found = result.hit_ratios()
    gaps = {}
    for capacity, lru in found["lru"].items():
        assert found["value"][capacity] >= lru - 0.002
        gaps[capacity] = (found["value"][capacity] - lru) / max(1e-9, found["optimum"][capacity] - lru)
    assert (gaps["1000"] + gaps["10000"]) / 2 > {"conversation": 0.18, "synthetic": 0.12}[name]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_value_is_not_below_lru_on_traffic_of_other_kinds(kind):
    found = simulate(requests(kind, 4000), ["lru", "value"], blocks(300, 3000)).hit_ratios()
    for capacity, lru in found["lru"].items():
        assert found["value"][capacity] >= lru - 0.002


# ---------------------------------------------------------------------------------- against the engine


@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 8, 13, 40])
def test_the_fast_lru_and_the_engines_manager_hold_the_same(capacity):
    for seed in range(10):
        trace = random_requests(random.Random(seed), 150)
        assert held_by(LruCache(capacity), trace) == held_by(ManagerCache(capacity, "lru"), trace)


def test_stack_distances_tell_what_lru_holds_at_every_capacity():
    for seed in range(10):
        trace = random_requests(random.Random(seed), 150)
        stack, curve = LruStack(), LruCurve()
        distances = [stack.admit(each.keys) for each in trace]
        for each in trace:
            curve.admit(each.keys)
        total = sum(len(each.keys) for each in trace)
        for capacity in range(5, 40):
            held = held_by(LruCache(capacity), trace)
            assert [int(((d > 0) & (d <= capacity)).sum()) for d in distances] == held
            assert curve.hit_ratios([capacity])[0] == pytest.approx(sum(held) / total)


def test_stamps_are_numbered_anew_without_a_trace_in_the_distances():
    trace = requests(chat, 3000)
    stack = LruStack()
    distances = [stack.admit(each.keys) for each in trace]
    for capacity in (150, 500):
        assert [int(((d > 0) & (d <= capacity)).sum()) for d in distances] == held_by(LruCache(capacity), trace)
    assert stack._next_stamp < sum(len(each.keys) for each in trace), "nothing was renumbered"


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_can_be_replayed_and_finds_no_more_than_the_optimum(policy):
    for seed in range(2):
        trace = random_requests(random.Random(seed), 120, alphabet=3)
        best = Optimum([each.keys for each in trace])
        churn = simulate(trace, [policy], blocks(5, 9, 20)).churn()[policy]
        for capacity in (5, 9, 20):
            ledger = CacheLedger(capacity)
            cache = ManagerCache(capacity, policy, ledger)
            assert sum(held_by(cache, trace)) <= best.hits(capacity).sum()
            cache.manager.check_integrity()
            evicted = ledger.evictions[EvictionCause.REUSED]
            assert churn[str(capacity)] == pytest.approx(1000 * evicted / len(trace))


def test_memory_is_saved_where_lru_needs_more_for_as_many_hits():
    """Two prompts of six blocks take turns with floods: LRU finds them again only in a pool that holds a flood, too."""
    flood = itertools.count(100)
    trace = [request([turn // 2, *range(10, 15)]) for turn in range(4)]
    for turn in range(60):
        trace += [request([turn % 2, *range(10, 15)]), request([next(flood) for _ in range(8)])]
    result = simulate(trace, ["lru", "slru"], blocks(16, 400))
    saved = result.memory_saved()
    lru, slru = (result.block_ratio(result.hits[policy]["16"]) for policy in ("lru", "slru"))
    assert slru > lru
    needed = next(
        size for size, ratio in zip(result.curve_capacities, result.curve_ratios, strict=True) if ratio >= slru
    )
    assert 0 < saved["slru"]["16"] <= 1 - 16 / needed + 1e-9
    assert saved["slru"]["400"] == 0.0, "both find all"


def test_unlimited_memory_holds_all_that_was_seen():
    trace = random_requests(random.Random(1), 200, alphabet=3)
    assert simulate(trace, [], []).unlimited.blocks == sum(held_by(LruCache(10**6), trace))


def test_a_request_larger_than_the_cache_is_refused_and_disturbs_nothing():
    trace = [request([1, 2]), request([7, 8, 9, 10]), request([1, 2])]
    assert held_by(LruCache(3), trace) == held_by(ManagerCache(3, "lru"), trace) == [0, 0, 2]
    result = simulate(trace, ["lru"], blocks(3))
    assert (result.hits["lru"]["3"].blocks, result.hits["lru"]["3"].refused_blocks) == (2, 4)


def test_one_pass_finds_what_a_cache_of_each_capacity_does_whether_requests_fit_or_not(monkeypatch):
    for batch_blocks in (1, 50, 10_000):
        monkeypatch.setattr(simulator, "BATCH_BLOCKS", batch_blocks)
        for seed in range(3):
            rng = random.Random(seed)
            trace = random_requests(rng, 150, longest=3) + random_requests(rng, 150, longest=9)
            result = simulate(trace, ["lru"], blocks(*range(1, 40)))
            for capacity in range(1, 40):
                count = result.hits["lru"][str(capacity)]
                assert count.blocks == count.tokens == sum(held_by(LruCache(capacity), trace))
                assert count.refused_blocks == sum(len(each.keys) for each in trace if len(each.keys) > capacity)


def test_intervals_are_those_between_uses_of_single_blocks():
    trace = requests(chat, 400)
    last, expected = {}, {}
    for now, each in enumerate(trace):
        for key in each.keys.tolist():
            if key in last:
                doubling = (now - last[key]).bit_length() - 1
                expected[doubling] = expected.get(doubling, 0) + 1
            last[key] = now
    assert simulate(trace, [], []).reuse_intervals.counts == expected


def test_a_stack_can_forget_all_but_the_latest_blocks():
    trace = requests(chat, 300)
    stack, recent = LruStack(), {}
    for each in trace:
        stack.admit(each.keys)
        for key in reversed(each.keys.tolist()):
            recent.pop(key, None)
            recent[key] = None
    assert stack.latest(100).tolist() == list(recent)[-100:]
    stack.keep_latest(40)
    assert len(stack) == 40
    kept = np.array(list(recent)[-40:][::-1], np.uint64)
    assert stack.admit(kept).tolist() == list(range(1, 41))


# ---------------------------------------------------------------------------------- against brute force


def best_by_trying_everything(trace, capacity):
    """Most hits over all choices of what to keep after each request."""
    states = {frozenset(): 0}
    for each in trace:
        keys = each.keys.tolist()
        after = {}
        for held, hits in states.items():
            hits += next((n for n, key in enumerate(keys) if key not in held), len(keys))
            everything = held | set(keys)
            for kept in itertools.combinations(sorted(everything), min(capacity, len(everything))):
                state = frozenset(kept)
                after[state] = max(after.get(state, 0), hits)
        states = after
    return max(states.values())


def test_the_optimum_is_the_best_of_all_choices():
    for seed in range(25):
        rng = random.Random(seed)
        trace = random_requests(rng, 7, alphabet=2, longest=3)
        for capacity in (1, 2, 3):
            assert Optimum([r.keys for r in trace]).hits(capacity).sum() == best_by_trying_everything(trace, capacity)


# ------------------------------------------------------------------------------------------- sampling


def test_a_sample_estimates_the_curve_within_a_few_of_its_standard_errors():
    trace = requests(chat, 6000)
    exact, sampled = LruCurve(), LruCurve(0.1)
    for each in trace:
        exact.admit(each.keys)
        sampled.admit(each.keys)
    capacities = [300, 1000, 3000, 10_000]
    errors = sampled.standard_errors(capacities)
    assert (errors > 0).all()
    assert np.abs(sampled.hit_ratios(capacities) - exact.hit_ratios(capacities)).max() < 4 * errors.max()
    assert not exact.standard_errors(capacities).any()
    assert sampled.num_sampled < 0.2 * sampled.num_accesses


# --------------------------------------------------------------------------------------------- results


def test_misses_add_up_and_tokens_count_partial_blocks():
    trace = [
        RecordedRequest(0, chain(as_content_ids([1, 2])), 20, 1, 16),
        RecordedRequest(5000, chain(as_content_ids([1, 2])), 20, 1, 16),
        RecordedRequest(9000, chain(as_content_ids([1, 3])), 32, 1, 16),
    ]
    result = simulate(trace, ["lru", "optimum"], blocks(2, 100))
    for by_capacity in result.hits.values():
        for count in by_capacity.values():
            assert sum(result.misses(count).values()) + count.blocks == result.num_blocks == 6
    assert result.hits["lru"]["100"].tokens == result.hits["optimum"]["100"].tokens == 20 + 16
    assert result.num_tokens == 72
    assert result.reuse_intervals.unit == "s"
    assert result.reuse_intervals.counts == {2: 3}  # 5 s twice, 4 s once


def test_unknown_policies_and_samples_of_others_than_lru_are_refused():
    with pytest.raises(ConfigError, match=r"'lrru'.*optimum"):
        simulate([], ["lrru"], blocks(1))
    with pytest.raises(ConfigError, match="lru only"):
        simulate([], ["value"], blocks(1), sampling_rate=0.5)
    with pytest.raises(ConfigError, match="sampling_rate=2"):
        LruCurve(2)
    with pytest.raises(ConfigError, match="capacity=0"):
        LruCache(0)
