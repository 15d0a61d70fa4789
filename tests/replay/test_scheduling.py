"""Orders of service on recorded requests: hits, first tokens, and the command that compares them."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foreword.cli import main
from foreword.config import SchedulerConfig
from foreword.replay.keys import as_content_ids, chain
from foreword.replay.serving import ServingOptions, at_load, simulate_scheduling, sorted_depth_first
from foreword.replay.timing import StepCost
from foreword.replay.trace import RecordedRequest, TraceReader

COST = StepCost(1e6, 1e9, 100.0, 0.0, 1e5, 10.0)
BLOCK = 4


def questions(num_documents: int, each: int, spacing_ms: float) -> list[RecordedRequest]:
    """Shuffled questions of a block about documents of eight."""
    rng = np.random.default_rng(7)
    asked = [[*range(8 * one, 8 * one + 8), 1000 + n] for n, one in enumerate([*range(num_documents)] * each)]
    rng.shuffle(asked)
    return [
        RecordedRequest(spacing_ms * number, chain(as_content_ids(ids)), BLOCK * len(ids), 2, BLOCK)
        for number, ids in enumerate(asked)
    ]


def options(num_blocks: int, **scheduler: Any) -> ServingOptions:
    return ServingOptions(num_blocks, COST, scheduler=SchedulerConfig(max_num_seqs=2, **scheduler))


def most_hits(requests: Iterable[RecordedRequest], num_documents: int, each: int) -> float:
    """The share of a cache without limits."""
    return num_documents * (each - 1) * 8 / (num_documents * each * 9)


def test_sorted_and_by_prefix_find_all_that_there_is_where_arrival_finds_little() -> None:
    asked = questions(12, 10, spacing_ms=0.0)
    found = {one: simulate_scheduling(asked, one, options(40, max_overtake_s=1e6)) for one in ("fcfs", "prefix", "dfs")}
    best = most_hits(asked, 12, 10)
    assert found["dfs"].hit_ratio == pytest.approx(best)
    assert found["prefix"].hit_ratio >= 0.95 * best
    assert found["fcfs"].hit_ratio < 0.6 * best
    assert found["prefix"].seconds < found["fcfs"].seconds
    assert {report.requests for report in found.values()} == {120}


def test_a_bound_of_zero_is_the_order_of_arrival() -> None:
    asked = questions(6, 10, spacing_ms=1.0)
    assert simulate_scheduling(asked, "prefix", options(40, max_overtake_s=0.0)) == simulate_scheduling(
        asked, "fcfs", options(40)
    )


def test_depth_first_keeps_what_shares_a_prefix_together() -> None:
    asked = questions(5, 4, spacing_ms=0.0)
    heads = [int(asked[number].keys[0]) for number in sorted_depth_first(asked)]
    assert len({*heads}) == 5
    assert sum(one != other for one, other in itertools.pairwise(heads)) == 4


def test_a_load_divides_the_times_between_requests() -> None:
    assert [one.timestamp_ms for one in at_load(questions(2, 2, spacing_ms=10.0), 4.0)] == [0.0, 2.5, 5.0, 7.5]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_on_recorded_traffic_the_slowest_first_tokens_come_within_the_bound(name) -> None:
    folder = os.environ.get("FOREWORD_TRACES")  # with Mooncake's traces
    if folder is None:
        pytest.skip("FOREWORD_TRACES names no folder with recorded traces")
    reader = TraceReader(Path(folder) / f"mooncake_{name}_trace.jsonl", max_requests=300)
    cost = replace(COST, flops_per_s=4e14, bytes_per_s=2.5e12, flops_per_token=1.6e10, weight_bytes=1.6e10)
    served = {
        one: simulate_scheduling(at_load(reader, 0.3), one, ServingOptions(2000, cost)) for one in ("fcfs", "prefix")
    }
    bound_ms = 1000 * SchedulerConfig().max_overtake_s
    assert served["fcfs"].ttft_ms["p99"] > 1000
    assert served["prefix"].ttft_ms["p99"] <= served["fcfs"].ttft_ms["p99"] + bound_ms


def write(folder: Path) -> list[str]:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 64, "vocab_size": 100}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    lines = [{"timestamp": 2 * n, "input_length": 600, "output_length": 3, "hash_ids": [n % 5, n]} for n in range(40)]
    (folder / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return ["replay", str(folder / "trace.jsonl"), "--model", str(folder), "--capacity", "4", "--policy", "lru,optimum"]


def test_the_command_compares_orders_beside_the_optimum(tmp_path, capsys) -> None:
    command = [*write(tmp_path), "--flops", "1e9", "--json", "--scheduling", "fcfs,prefix,dfs", "--load", "2"]
    assert main([*command, "--max-overtake-s", "100"]) == 0
    printed = capsys.readouterr()
    assert "at 2 times the recorded load" in printed.err
    assert "The clairvoyant optimum at 4" in printed.err
    found = {name: by["lru"]["4"] for name, by in json.loads(printed.out)["scheduling"].items()}
    assert list(found) == ["fcfs", "prefix", "dfs"]
    assert found["fcfs"]["hit_ratio"] < found["prefix"]["hit_ratio"] <= found["dfs"]["hit_ratio"]
    assert found["prefix"]["ttft_ms"]["p50"] < found["fcfs"]["ttft_ms"]["p50"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--scheduling", "fcfs"], "--scheduling compares first tokens, which need a time; give --flops and --model"),
        (["--scheduling", "lifo", "--flops", "1e9"], "--scheduling 'lifo' is unknown; use some of fcfs, prefix, dfs"),
        (["--scheduling", ",", "--flops", "1e9"], "--scheduling ',' is unknown"),
        (["--scheduling", "fcfs", "--flops", "1e9", "--replicas", "2"], "on one replica, not on 2"),
        (["--scheduling", "dfs", "--flops", "1e9", "--routers", "2"], "leave out --routers 2"),
        (["--scheduling", "dfs", "--flops", "1e9", "--event-delay", "0.5"], "leave out --event-delay 0.5"),
        (["--scheduling", "dfs", "--flops", "1e9", "--fleet", "1:+new"], "leave out --fleet 1:+new"),
        (["--load", "0"], "--load 0.0 is no factor; use a number above 0"),
        (["--load", "nan"], "--load nan is no factor"),
        (["--max-overtake-s", "-1"], "max_overtake_s=-1.0 is out of range"),
    ],
)
def test_what_cannot_be_compared_is_refused_by_name(more, message, tmp_path, capsys) -> None:
    assert main([*write(tmp_path), *more]) == 2
    assert message in capsys.readouterr().err
