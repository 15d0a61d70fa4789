"""Simulated time: the engine's decisions, a clock that adds up, replicas and routing."""

import json
from dataclasses import replace

import numpy as np
import pytest

from foreword.cache import CacheLedger, KVCacheManager, RadixIndex
from foreword.cli import main
from foreword.config import SchedulerConfig
from foreword.engine import Engine, ModelLimits, Prompt, SimulatedScheduler
from foreword.errors import ConfigError
from foreword.replay.keys import as_content_ids, chain
from foreword.replay.serving import ServingOptions, ServingSimulation
from foreword.replay.timing import Replica, SimulatedRunner, StepCost, make_request
from foreword.replay.trace import RecordedRequest
from foreword.request import SamplingParams
from replay.workloads import chat

COST = StepCost(1e6, 1e9, 100.0, 0.1, 1e5, 10.0)
SMALL = SchedulerConfig(max_num_batched_tokens=64, long_prefill_token_threshold=24, max_num_seqs=6)


def serve(trace, *options, **more):
    return ServingSimulation(ServingOptions(*options, **more)).serve(trace)


def recorded(prompts, spacing_s=0.02, block_tokens=4, seed=0):
    rng = np.random.default_rng(seed)
    return [
        RecordedRequest(
            1000 * spacing_s * number,
            chain(as_content_ids(list(map(int, ids)))),
            block_tokens * len(ids) - int(rng.integers(block_tokens)),
            int(rng.integers(1, 12)),
            block_tokens,
        )
        for number, ids in enumerate(prompts)
    ]


class RecordingRunner(SimulatedRunner):
    def __init__(self, cost):
        super().__init__(cost)
        self.steps = []

    def run(self, entries):
        self.steps.append([(e.request.request_id.partition("-")[0], e.start, e.end) for e in entries])
        return super().run(entries)

    def execute(self, batch):
        """As the engine calls its runner."""
        return self.run(batch.entries)


@pytest.mark.parametrize(
    ("num_blocks", "policy", "scheduling"), [(60, "lru", "fcfs"), (60, "value", "fcfs"), (2000, "lru", "prefix")]
)
def test_every_step_decides_as_the_engine_does_on_the_same_requests(num_blocks, policy, scheduling, monkeypatch):
    monkeypatch.setattr(SimulatedScheduler, "num_steady_steps", lambda _: 0)
    config = replace(SMALL, scheduling_policy=scheduling)
    trace = recorded(chat(np.random.default_rng(1), 150), spacing_s=0.005)
    trace = [each for each in trace if len(each.keys) < 50]

    replica = Replica(num_blocks, 4, policy, config, COST)
    replica.runner = RecordingRunner(COST)
    ledger = CacheLedger(num_blocks) if scheduling == "prefix" else None
    index = RadixIndex(num_blocks, 4)
    manager = KVCacheManager(num_blocks, block_size=4, index=index, eviction_policy=policy, ledger=ledger)
    runner = RecordingRunner(COST)
    engine = Engine(manager, config, runner, ModelLimits(2**31 - 1, 10_000))
    engine.clock = lambda: runner.now
    for number, each in enumerate(trace):
        at = each.timestamp_ms / 1000
        replica.run_until(at)
        replica.add(make_request(each, number), at)
        while runner.now < at and engine.has_unfinished_requests():
            engine.step()
        if not engine.has_unfinished_requests():
            runner.now = max(runner.now, at)
        tokens = make_request(each, number).sequence.token_ids.copy()
        engine.add_request(
            str(number), Prompt(tokens), SamplingParams(max_tokens=each.num_output_tokens, ignore_eos=True)
        )
    replica.run_until(float("inf"))
    while engine.has_unfinished_requests():
        engine.step()
    assert max(map(len, runner.steps)) == SMALL.max_num_seqs, "the requests hardly met"
    assert (replica.scheduler.num_preemptions > 0) == (num_blocks == 60)
    assert replica.runner.steps == runner.steps
    assert replica.runner.now == pytest.approx(runner.now)
    assert replica.manager.free_block_ids().tolist() == manager.free_block_ids().tolist()
    assert replica.manager.stats.hits == manager.stats.hits > 0


@pytest.mark.parametrize(("num_blocks", "policy"), [(150, "value"), (2000, "lru")])
def test_steps_in_which_nothing_is_decided_can_be_taken_at_once(num_blocks, policy, monkeypatch):
    trace = recorded(chat(np.random.default_rng(4), 100), spacing_s=0.05, block_tokens=16, seed=5)
    options = ServingOptions(num_blocks, COST, num_replicas=2, eviction_policy=policy, scheduler=SMALL)
    skipped = []

    def skip(scheduler, num_steps, skip=SimulatedScheduler.skip):
        skip(scheduler, num_steps)
        scheduler.check_integrity()
        skipped.append(num_steps)

    monkeypatch.setattr(SimulatedScheduler, "skip", skip)
    at_once = ServingSimulation(options).serve(trace)
    assert sum(skipped) > 150
    assert max(skipped) > 5
    monkeypatch.setattr(SimulatedScheduler, "num_steady_steps", lambda _: 0)
    assert ServingSimulation(options).serve(trace) == at_once


def test_a_block_without_a_key_is_like_no_other():
    keys = chain(as_content_ids([1, 2]))
    one, other = (make_request(RecordedRequest(0.0, keys, 11, 1, 4), number).sequence.token_ids for number in (3, 4))
    assert len(one) == len(other) == 11
    assert one[:8].tolist() == other[:8].tolist()
    assert one[8] != other[8]


def test_a_lone_request_takes_its_steps_and_no_more():
    (request,) = recorded([[1, 2, 3]])
    report = serve([request], 100, COST)
    length = request.num_prompt_tokens
    first = (100 * length + 0.1 * length * (length + 1) / 2) / 1e6
    assert report.ttft_ms["p50"] == pytest.approx(1000 * first, abs=0.01)
    assert report.queue_ms["p99"] == 0
    assert (report.requests, report.hit_ratio) == (1, 0)
    assert report.busy_share == pytest.approx(1)


def test_steps_that_read_more_than_they_compute_are_bound_by_memory():
    slow = StepCost(1e15, 1e6, 1.0, 0.0, 1e6, 0.0)
    (request,) = recorded([[1]], seed=3)
    report = serve([request], 100, slow)
    assert report.seconds == pytest.approx(request.num_output_tokens)


def test_a_cache_that_holds_more_answers_sooner():
    trace = recorded(chat(np.random.default_rng(2), 300))
    small, large = (serve(trace, blocks, COST) for blocks in (80, 3000))
    assert large.hit_ratio > small.hit_ratio
    assert large.ttft_ms["p50"] < small.ttft_ms["p50"]


@pytest.mark.slow
def test_replicas_share_the_load_and_routing_by_prefix_finds_more():
    trace = recorded(chat(np.random.default_rng(3), 400), spacing_s=0.005)
    found = {
        routing: serve(trace, 400, COST, num_replicas=4, routing=routing)
        for routing in ("round_robin", "least_loaded", "prefix_aware", "cost")
    }
    alone = serve(trace, 400, COST)
    assert all(report.ttft_ms["p90"] < alone.ttft_ms["p90"] for report in found.values())
    assert min(found[rule].hit_ratio for rule in ("prefix_aware", "cost")) > found["round_robin"].hit_ratio
    assert {report.requests for report in found.values()} == {400}


def test_what_cannot_be_timed_is_refused_or_counted():
    untimed = RecordedRequest(None, chain(as_content_ids([1])), 4, 1, 4)
    with pytest.raises(ConfigError, match="no arrival times"):
        serve([untimed], 10, COST)
    report = serve(recorded([range(50), [1]]), 10, COST)
    assert (report.requests, report.requests_refused) == (1, 1)
    with pytest.raises(ConfigError, match="num_replicas=0"):
        ServingOptions(10, COST, num_replicas=0)
    with pytest.raises(ConfigError, match="routing='best'"):
        ServingOptions(10, COST, routing="best")


def test_the_command_serves_in_time_when_given_a_rate(tmp_path, capsys):
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    trace = tmp_path / "trace.jsonl"
    lines = [{"timestamp": 9 * n, "input_length": 600, "output_length": 3, "hash_ids": [n % 3, n]} for n in range(20)]
    trace.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    command = ["replay", str(trace), "--capacity", "40", "--policy", "lru,value,optimum", "--json", "--flops", "1e9"]
    assert main(command) == 2
    assert "--model" in capsys.readouterr().err
    assert main([*command, "--model", str(tmp_path), "--replicas", "2", "--bandwidth", "10GB"]) == 0
    printed = capsys.readouterr()
    assert "Served in time by 2 replicas" in printed.err
    assert "more replicas" in printed.err
    timing = json.loads(printed.out)["timing"]
    assert list(timing) == ["lru", "value"]
    assert timing["lru"]["40"]["requests"] == 20
    assert timing["lru"]["40"]["ttft_ms"]["p99"] > 0
