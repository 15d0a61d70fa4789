"""How fast `foreword replay` is: LRU over a large recording, and an hour of traffic served in simulated time.

    PYTHONPATH=src python benchmarks/replay.py                      made-up traffic, seeded
    ... --trace mooncake_conversation_trace.jsonl                   a recording in Mooncake's format instead
    ... --quick                                                     small, to see that it works

The script writes the recording `--copies` times, each time with other ids, so that memory grows as with a longer
recording. It measures the whole command in a process of its own, reading alone, `json.loads` of each line alone (the
limit of any reader of this format in plain Python), LRU alone on requests in memory, and peak memory per different
block. Then 8 replicas of an 8B model serve the first hour of the recording under `value`.

Figures are seconds of processor time, which other programs disturb less than wall time. They are medians of alternating
rounds. The command uses one processor, so its wall time on an idle machine is the same. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from foreword.replay.serving import ServingOptions, ServingSimulation
from foreword.replay.simulator import OnePass
from foreword.replay.timing import StepCost
from foreword.replay.trace import RecordedRequest, TraceReader

BLOCK_TOKENS = 512
CAPACITY = 10_000
NUM_REPLICAS = 8
HOUR_MS = 3_600_000
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
}


def conversations(num_requests: int, seed: int) -> list[dict[str, Any]]:
    """An hour of a chat service: half of the requests go on with a conversation, the others begin one."""
    rng = np.random.default_rng(seed)
    open_ones: list[list[int]] = []
    records, next_id = [], 1
    for timestamp in np.sort(rng.integers(0, HOUR_MS, num_requests)).tolist():
        goes_on = open_ones and rng.random() < 0.5
        ids = open_ones.pop(rng.integers(max(0, len(open_ones) - 500), len(open_ones))) if goes_on else [0]
        num_new = 1 + int(rng.gamma(1.0, 4.0 if goes_on else 17.0))
        ids = [*ids, *range(next_id, next_id + num_new)]
        next_id += num_new
        if rng.random() < 0.8:
            open_ones.append(ids)
        length = BLOCK_TOKENS * len(ids) - int(rng.integers(BLOCK_TOKENS))
        answer = 1 + int(rng.gamma(1.0, 340.0))
        records.append({"timestamp": timestamp, "input_length": length, "output_length": answer, "hash_ids": ids})
    return records


def write_copies(records: list[dict[str, Any]], file: Path, copies: int) -> int:
    """Write the recording several times, each time an hour later and with other ids. Returns the number of blocks."""
    num_ids = 1 + max(max(record["hash_ids"]) for record in records)
    with file.open("w") as out:
        for copy in range(copies):
            for record in records:
                ids = [block + copy * num_ids for block in record["hash_ids"]]
                timestamp = record["timestamp"] + copy * HOUR_MS
                out.write(json.dumps({**record, "timestamp": timestamp, "hash_ids": ids}) + "\n")
    return copies * sum(len(record["hash_ids"]) for record in records)


def cpu_seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def parse_lines(file: Path) -> None:
    with file.open("rb") as lines:
        for line in lines:
            json.loads(line)


def read(file: Path) -> int:
    return sum(len(request.keys) for request in TraceReader(file))


def lru(requests: list[RecordedRequest]) -> None:
    one_pass = OnePass()
    one_pass.follow(CAPACITY)
    for request in requests:
        one_pass.admit(request)
    one_pass.flush()


def run_command(file: Path, *more: str) -> tuple[dict[str, Any], float, float, float]:
    """Runs the command. Returns its report, processor seconds, wall seconds and peak MiB."""
    command = [sys.executable, "-m", "foreword.cli", "replay", str(file), "--policy", "lru", "--json"]
    began = time.perf_counter()
    with subprocess.Popen(
        [*command, "--capacity", str(CAPACITY), *more], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - began
    assert process.returncode == 0, "foreword replay failed"
    kib = usage.ru_maxrss / (1024 if sys.platform == "darwin" else 1)
    return json.loads(printed.splitlines()[-1]), usage.ru_utime + usage.ru_stime, wall, kib / 1024


def measure_lru(file: Path, num_blocks: int, rounds: int) -> dict[str, Any]:
    """Processor seconds by part, blocks per second, and bytes per block."""
    run_command(file, "--max-requests", "1")  # compiles
    *_, mib_at_rest = run_command(file, "--max-requests", "1")
    report, *_, mib = run_command(file)  # while this process is small: a new one begins with its memory counted
    requests = list(TraceReader(file))
    parts: dict[str, list[float]] = {"json.loads": [], "reading": [], "lru": [], "command": [], "command_wall": []}
    for _ in range(rounds):
        parts["json.loads"].append(cpu_seconds(lambda: parse_lines(file)))
        parts["reading"].append(cpu_seconds(lambda: read(file)))
        parts["lru"].append(cpu_seconds(lambda: lru(requests)))
        report, cpu, wall, _ = run_command(file)
        parts["command"].append(cpu)
        parts["command_wall"].append(wall)
    seconds = {name: median(samples) for name, samples in parts.items()}
    return {
        "blocks": num_blocks,
        "different_blocks": report["different_blocks"],
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "blocks_per_s": {name: round(num_blocks / value) for name, value in seconds.items()},
        "times_json_loads": round(seconds["command"] / seconds["json.loads"], 2),
        "mib": round(mib),
        "mib_at_rest": round(mib_at_rest),
        "bytes_per_different_block": round((mib - mib_at_rest) * 2**20 / report["different_blocks"]),
    }


def first_hour(file: Path) -> Iterator[RecordedRequest]:
    for request in TraceReader(file):
        if request.timestamp_ms is None or request.timestamp_ms >= HOUR_MS:
            return
        yield request


def measure_hour(file: Path) -> dict[str, Any]:
    """Serves the first hour of a recording on 8 replicas in simulated time. Returns what that took."""
    options = ServingOptions(
        CAPACITY,
        StepCost.of_model(LLAMA_8B, flops_per_s=4e14, bytes_per_s=2.5e12),
        NUM_REPLICAS,
        eviction_policy="value",
    )
    began = time.process_time()
    report = ServingSimulation(options).serve(first_hour(file))
    return {
        "seconds": round(time.process_time() - began, 2),
        "requests": report.requests,
        "replicas": NUM_REPLICAS,
        "simulated_s": round(report.seconds, 1),
        "ttft_ms": report.ttft_ms,
        "generated_tokens_per_s": round(report.generated_tokens_per_s),
        "busy_share": round(report.busy_share, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="speed of foreword replay")
    parser.add_argument("--trace", type=Path, help="a recording in Mooncake's format")
    parser.add_argument("--copies", type=int, default=12)
    parser.add_argument("--requests", type=int, default=12_000, help="requests of one hour of generated traffic")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.copies, args.requests, args.rounds = 2, 300, 1
    records = (
        [json.loads(line) for line in args.trace.read_text().splitlines()]
        if args.trace
        else conversations(args.requests, args.seed)
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.jsonl"
        num_blocks = write_copies(records, file, args.copies)
        found = measure_lru(file, num_blocks, args.rounds)
        hour = measure_hour(file)
    print(
        f"{found['blocks']:,} blocks of which {found['different_blocks']:,} are different, LRU at {CAPACITY:,} blocks"
    )
    for name, seconds in found["seconds"].items():
        print(f"  {name:14} {seconds:8.2f} s  {found['blocks_per_s'][name] / 1e6:6.2f} million blocks a second")
    print(f"  the command takes {found['times_json_loads']} times as long as json.loads of its lines")
    print(
        f"  {found['mib']} MiB at most: {found['mib_at_rest']} MiB at rest, then "
        f"{found['bytes_per_different_block']} bytes for each different block"
    )
    print(
        f"{hour['requests']:,} requests, {hour['simulated_s']:,.0f} s on {NUM_REPLICAS} replicas: {hour['seconds']} s"
    )
    print(json.dumps({"benchmark": "replay", "lru": found, "hour": hour}))


if __name__ == "__main__":
    main()
