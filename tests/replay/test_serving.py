"""Requests in simulated time: every request is served once, by the rule, with what routers know."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from foreword.cli import main
from foreword.config import SchedulerConfig
from foreword.errors import ConfigError
from foreword.replay.caches import LruCache
from foreword.replay.keys import as_content_ids, chain
from foreword.replay.rules import RULES
from foreword.replay.serving import FleetChange, ServingOptions, ServingSimulation
from foreword.replay.timing import PromptRates, StepCost
from foreword.replay.trace import RecordedRequest, TraceReader
from replay.workloads import agents, chat, noise, templates

MOONCAKE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation_trace.jsonl"
OPTIONS = ServingOptions(150, PromptRates((8000.0,)), num_replicas=4)
STEPS = replace(OPTIONS, cost=StepCost(1e6, 1e9, 100.0, 0.1, 1e5, 10.0))


def recorded(count=400, spacing_s=0.006, seed=0):
    prompts = chat(np.random.default_rng(seed), count)
    return [
        RecordedRequest(1000 * spacing_s * n, chain(as_content_ids(list(map(int, ids)))), 16 * len(ids) - n % 16, 5, 16)
        for n, ids in enumerate(prompts)
        if len(ids) <= 100
    ]


def serve(trace, options=OPTIONS, **changes):
    return ServingSimulation(replace(options, **changes)).serve(trace)


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_serves_every_request_once(rule):
    trace = recorded(150)
    report = serve(trace, routing=rule)
    with_steps = serve(trace, STEPS, routing=rule)
    assert (with_steps.requests, with_steps.degraded) == (len(trace), 0)
    assert (report.requests, report.requests_refused, report.requests_retried) == (len(trace), 0, 0)
    assert 0 < report.hit_ratio < 1
    assert report.ttft_s["p50"] <= report.ttft_s["p99"]
    assert report.degraded == 0
    assert serve(trace, routing=rule) == report, "equal runs differ"


def test_one_replica_is_a_line_in_which_each_prompt_finds_what_the_cache_holds_when_it_begins():
    trace, cache = recorded(), LruCache(150)
    free_at, waits, hits = 0.0, [], 0
    for request in trace:
        arrived = request.timestamp_ms / 1000
        held = cache.admit(request)
        hits += held
        computed = max(1, request.num_prompt_tokens - request.tokens_of(held))
        free_at = max(free_at, arrived) + computed / 8000
        waits.append(free_at - arrived)
    report = serve(trace, num_replicas=1)
    assert report.mean_ttft_s == pytest.approx(np.mean(waits))
    assert report.hit_ratio == hits / sum(len(request.keys) for request in trace)
    assert report.work_max_over_mean == 1


def test_our_rule_waits_less_than_round_robin_and_power_of_two_and_finds_more():
    trace = recorded(spacing_s=0.005)
    ours, *others = (serve(trace, routing=rule) for rule in ("cost", "round_robin", "power_of_two"))
    for other in others:
        assert ours.mean_ttft_s < 0.9 * other.mean_ttft_s
        assert ours.hit_ratio > 1.05 * other.hit_ratio


def timed(kind, count, tokens_per_s, block=64):
    """Requests of one kind that come evenly, this number of prompt tokens a second."""
    at_s, found = 0.0, []
    for ids in kind(np.random.default_rng(1), count):
        tokens = block * len(ids) - 7
        at_s += tokens / tokens_per_s
        found.append(RecordedRequest(1000 * at_s, chain(as_content_ids(list(map(int, ids)))), tokens, 5, block))
    return found


def tool_agents(rng, count):
    """Conversations of a dozen turns that all begin with one system prompt of 24 blocks."""
    live, prompts, block = [], [], 24
    while len(prompts) < count:
        if len(live) < 40:
            live.append([list(range(24)), 2 + rng.poisson(10)])
        one = live[rng.integers(len(live))]
        new = 1 + rng.poisson(5)
        one[0] = one[0] + list(range(block, block + new))
        block += new
        prompts.append(one[0])
        one[1] -= 1
        if not one[1]:
            live.remove(one)
    return prompts


def ratio_to_the_better_rival(trace, **changes):
    options = ServingOptions(20_000, PromptRates((6000.0,)), num_replicas=8)
    ours, *others = (serve(trace, options, routing=rule, **changes) for rule in ("cost", "first_token", "bounded_hash"))
    return ours.mean_ttft_s / min(other.mean_ttft_s for other in others), ours


def test_agents_under_one_system_prompt_are_spread_and_wait_no_longer_than_by_other_rules():
    ratio, ours = ratio_to_the_better_rival(timed(tool_agents, 500, 160_000))
    assert ratio <= 1.05
    assert ours.work_max_over_mean < 1.5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "hits"), [(tool_agents, 0.7), (agents, 0.8), (templates, 0.8), (noise, 0.4), (chat, 0.6)]
)
@pytest.mark.parametrize("load", [0.4, 0.7, 0.9])
def test_our_rule_waits_no_longer_than_the_better_of_the_least_first_token_and_a_bounded_hash(kind, hits, load):
    ratio, _ = ratio_to_the_better_rival(timed(kind, 1500, load * 8 * 6000 / (1 - hits)))
    known = 1.10 if (kind, load) == (agents, 0.9) else 1.05  # 1.093: what decision 0036 says under its table
    assert ratio <= known


def test_the_busiest_replica_is_set_beside_all_replicas_those_without_work_too():
    trace = [RecordedRequest(10_000 * n, chain(as_content_ids([1, 2, 3])), 47, 5, 16) for n in range(8)]
    assert serve(trace, num_replicas=8).work_max_over_mean == 8.0
    assert serve([], num_replicas=8).work_max_over_mean == 0.0


@pytest.mark.slow
def test_late_events_cost_little_and_are_seen_in_the_counts():
    trace = recorded()
    fresh, stale = serve(trace, num_blocks=1000), serve(trace, num_blocks=1000, event_delay_s=1.0)
    assert stale.mean_ttft_s < 1.1 * fresh.mean_ttft_s
    stale = serve(trace, event_delay_s=1.0)
    assert stale.requests == len(trace)
    assert stale.overcredited_tokens > serve(trace).overcredited_tokens


@pytest.mark.slow
def test_routers_that_share_reservations_wait_less_than_routers_that_do_not():
    trace = recorded(spacing_s=0.005)
    alone = serve(trace)
    shared = serve(trace, num_routers=3)
    apart = serve(trace, num_routers=3, update_delay_s=None)
    assert shared.requests == apart.requests == len(trace)
    assert alone.mean_ttft_s <= shared.mean_ttft_s * 1.05
    assert shared.mean_ttft_s < apart.mean_ttft_s
    assert shared.mean_ttft_s < 1.3 * alone.mean_ttft_s


@pytest.mark.slow
def test_routers_that_take_turns_decide_a_burst_almost_as_well_as_one():
    """All requests of two seconds arrive at one moment, as in recordings with coarse times."""
    trace = [one._replace(timestamp_ms=one.timestamp_ms // 2000 * 2000) for one in recorded(spacing_s=0.2)]
    slow = replace(OPTIONS, cost=PromptRates((300.0,)))
    alone = serve(trace, slow)
    in_turn = serve(trace, slow, num_routers=3)
    blind = serve(trace, slow, num_routers=3, turn_s=0.0)
    assert in_turn.requests == blind.requests == len(trace)
    assert in_turn.mean_ttft_s < 1.1 * alone.mean_ttft_s < blind.mean_ttft_s


def test_requests_of_a_replica_that_dies_are_served_elsewhere_and_a_new_one_takes_its_share():
    trace = recorded(spacing_s=0.005)
    changes = (
        FleetChange(1.0, "replica-2", joins=False),
        FleetChange(1.6, "replica-2", joins=True),
        FleetChange(1.7, "replica-4", joins=True),
    )
    for options, routers in ((OPTIONS, 1), (OPTIONS, 3), (STEPS, 3)):
        simulation = ServingSimulation(replace(options, changes=changes, num_routers=routers))
        report = simulation.serve(trace)
        assert report.requests == len(trace)
        assert report.requests_retried > 0
        assert report.requests_resumed > 0
        assert 0 < report.hit_ratio < 1
        assert 0 < report.busy_share <= 1
        tokens = report.generated_tokens_per_s * report.seconds
        assert tokens == pytest.approx(sum(request.num_output_tokens for request in trace))
        assert set(simulation.computed_tokens()) == {f"replica-{n}" for n in range(5)}
        for core in simulation.cores:
            assert core.export_load().updates == ()
            core.check_integrity([])


def test_figures_stay_true_when_replicas_die_again_and_again():
    trace = [request._replace(num_output_tokens=60) for request in recorded(spacing_s=0.005)]
    changes = tuple(FleetChange(0.15 * (n + 1), f"replica-{n // 2 % 4}", joins=n % 2 == 1) for n in range(12))
    for options in (OPTIONS, STEPS):
        report = serve(trace, options, changes=changes)
        assert (report.requests, report.requests_stranded) == (len(trace), 0)
        assert report.requests_resumed > 10
        assert 0 < report.hit_ratio < 1
        assert 0 < report.busy_share <= 1
        assert report.generated_tokens_per_s * report.seconds == pytest.approx(60 * len(trace))


def test_an_answer_goes_on_where_it_was_cut_off():
    """At 50 tokens a second: 100 tokens take 2 s, and the death at 1.1 s has left 50 of them."""
    request = RecordedRequest(0.0, chain(as_content_ids([1, 2, 3])), 48, 100, 16)
    rates = ServingOptions(150, PromptRates((480.0,)), num_replicas=2)
    whole = serve([request], rates)
    assert whole.seconds == pytest.approx(0.1 + 2.0)
    assert whole.busy_share == pytest.approx(0.1 / (2 * 2.1))
    for at_s, computed_s, all_s, resumed in (
        (1.1, 0.1 + 98 / 480, 1.1 + 98 / 480 + 1.0, 1),  # the other replica computes the prompt and 50 tokens
        (0.05, 0.05 + 0.1, 0.05 + 0.1 + 2.0, 0),
    ):
        report = serve([request], rates, changes=(FleetChange(at_s, "replica-0", joins=False),))
        assert report.seconds == pytest.approx(all_s)
        assert report.busy_share == pytest.approx(computed_s / (all_s + at_s))
        assert report.requests_resumed == resumed
        assert report.generated_tokens_per_s * report.seconds == pytest.approx(100)


def test_a_replica_that_joins_when_all_is_done_had_no_time_to_be_idle():
    trace = recorded(50)
    alone = serve(trace, num_replicas=1)
    more = serve(trace, num_replicas=1, changes=(FleetChange(1e6, "last", joins=True),))
    assert more.busy_share == pytest.approx(alone.busy_share)


def test_the_number_at_the_end_of_a_name_gives_the_place():
    (request,) = recorded(1)
    for name, rate in (("replica-2", 300), ("replica3", 400), ("more", 100), ("a-²", 100)):
        options = ServingOptions(150, PromptRates((100.0, 200.0, 300.0, 400.0)))
        fleet = (FleetChange(0.0, "replica-0", joins=False), FleetChange(0.0, name, joins=True))
        assert serve([request], options, changes=fleet).mean_ttft_s == pytest.approx(request.num_prompt_tokens / rate)


def test_all_at_once_goes_forward_in_time_with_routers_and_a_fleet_that_changes():
    changes = (FleetChange(0.1, "replica-1", joins=True), FleetChange(0.3, "replica-0", joins=False))
    trace = recorded(60)
    scheduler = SchedulerConfig(max_num_seqs=2)
    for routers in (1, 2):
        options = replace(STEPS, num_replicas=1, scheduler=scheduler, changes=changes, num_routers=routers)
        report = ServingSimulation(options).serve_depth_first(trace)
        assert report.requests == len(trace)
        assert 0 < report.busy_share <= 1


def test_requests_wait_where_there_is_no_replica_until_one_joins():
    changes = (FleetChange(0.1, "replica-0", joins=False), FleetChange(1.0, "replica-7", joins=True))
    trace = recorded(100)
    report = serve(trace, num_replicas=1, changes=changes)
    assert report.requests == len(trace)
    assert report.ttft_s["p50"] > 0.4
    gone = serve(trace, num_replicas=1, changes=changes[:1])
    assert gone.requests + gone.requests_stranded == len(trace)
    assert gone.requests_stranded > 50
    assert gone.requests_refused == 0
    assert gone.busy_share <= 1


def test_a_faster_replica_computes_more():
    simulation = ServingSimulation(replace(OPTIONS, cost=PromptRates((12000.0, 4000.0))))
    simulation.serve(recorded(spacing_s=0.005))
    computed = simulation.computed_tokens()
    assert computed["replica-0"] + computed["replica-2"] > 1.8 * (computed["replica-1"] + computed["replica-3"])


@pytest.mark.slow
def test_other_policies_run_in_the_replicas_pools():
    trace = recorded()
    assert serve(trace, eviction_policy="value").hit_ratio != serve(trace).hit_ratio


def test_prompts_larger_than_a_pool_are_refused():
    report = serve(recorded(), num_blocks=20)
    assert 0 < report.requests_refused < report.requests + report.requests_refused == len(recorded())


def test_mistakes_are_refused():
    with pytest.raises(ConfigError, match="no arrival times"):
        serve([recorded(1)[0]._replace(timestamp_ms=None)])
    with pytest.raises(ConfigError, match=r"'replica-1' cannot join at .* there is one of this name"):
        serve(recorded(100), changes=(FleetChange(0.5, "replica-1", joins=True),))
    with pytest.raises(ConfigError, match="routing='best' is unknown"):
        serve([], routing="best")
    with pytest.raises(ConfigError, match="num_routers=0"):
        serve([], num_routers=0)
    with pytest.raises(ConfigError, match=r"tokens_per_s=\(0.0,\)"):
        PromptRates((0.0,))
    with pytest.raises(ConfigError, match="replica 'nobody' cannot die"):
        serve(recorded(50), changes=(FleetChange(0.1, "nobody", joins=False),))


@pytest.mark.slow
@pytest.mark.skipif(not MOONCAKE.exists(), reason="the recorded trace is not here")
def test_the_recording_whose_prompts_all_begin_alike_does_not_go_to_one_replica():
    trace = list(TraceReader(MOONCAKE, max_requests=1200))
    ours = serve(trace, num_blocks=3750, cost=PromptRates((6000.0,)), num_replicas=8)
    assert len({int(request.keys[0]) for request in trace}) == 1
    assert ours.work_max_over_mean < 1.3
    least = serve(trace, num_blocks=3750, cost=PromptRates((6000.0,)), num_replicas=8, routing="round_robin")
    assert ours.hit_ratio > 1.5 * least.hit_ratio
    assert ours.mean_ttft_s < 0.6 * least.mean_ttft_s


# ------------------------------------------------------------------ the command


@pytest.fixture
def file(tmp_path):
    lines = [
        {"timestamp": 40 * n, "input_length": 2048, "output_length": 3, "hash_ids": [0, n % 5, 100 + n % 9, 1000 + n]}
        for n in range(80)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


def test_the_command_serves_a_recording_by_the_core(file, capsys):
    command = [
        "replay",
        str(file),
        "--policy",
        "lru,optimum",
        "--capacity",
        "50,90",
        "--prefill-rate",
        "9000,6000",
    ]
    more = [
        "--replicas",
        "3",
        "--routers",
        "2",
        "--event-delay",
        "0.1",
        "--fleet",
        "1:-replica-1,2:+replica-1",
        "--json",
    ]
    assert main([*command, *more]) == 0
    printed = capsys.readouterr()
    assert "Served in time by 3 replicas, cost, 2 routers" in printed.err
    found = json.loads(printed.out)["cluster"]
    assert list(found) == ["lru"]
    for capacity in ("50", "90"):
        assert found["lru"][capacity]["requests"] == 80
    assert main([*command, "--routing", "llm_d"]) == 0
    assert "8 replicas" not in capsys.readouterr().out


def test_a_load_lets_requests_come_faster_and_requests_without_a_replica_are_told_apart(file, capsys):
    command = ["replay", str(file), "--policy", "lru", "--capacity", "50", "--prefill-rate", "9000", "--json"]
    found = []
    for more in ([], ["--load", "1"], ["--load", "4"], ["--fleet", "1:-replica-0"]):
        assert main([*command, *more]) == 0
        printed = capsys.readouterr()
        found.append(json.loads(printed.out)["cluster"]["lru"]["50"])
        assert ("one replica at 4 times the recorded load; seconds" in printed.err) == (more[1:] == ["4"])
        assert ("No replica was left for" in printed.err) == (more[:1] == ["--fleet"])
        assert "Too large" not in printed.err
    usual, same, fast, left = found
    assert usual == same
    assert fast["mean_ttft_s"] > usual["mean_ttft_s"]
    assert left["requests"] + left["requests_stranded"] == 80
    assert left["requests_stranded"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefill-rate", "fast"], "'fast'"),
        (["--prefill-rate", "1e3", "--flops", "1e9"], "two models of time"),
        (["--prefill-rate", "1e3", "--fleet", "3:replica-1"], "not understood at '3:replica-1'"),
        (["--prefill-rate", "1e3", "--fleet", "x:-replica-1"], "'x'"),
        (["--prefill-rate", "1e3", "--fleet", "inf:-replica-1"], "has 'inf' for a time; use seconds of at least 0"),
        (["--prefill-rate", "1e3", "--fleet", "nan:-replica-1"], "has 'nan' for a time"),
        (["--prefill-rate", "1e3", "--fleet", "1:+new,-1:-new"], "has '-1' for a time"),
        (["--prefill-rate", "1e3", "--replicas", "0"], "num_replicas=0"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(file, arguments, message, capsys):
    assert main(["replay", str(file), "--capacity", "90", *arguments]) != 0
    assert message in capsys.readouterr().err
