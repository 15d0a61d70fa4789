"""benchmarks/scheduling.py runs from beginning to end, and its last line can be read by a program."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scheduling.py"


@pytest.mark.slow
def test_scheduling_compares_orders_and_ends_with_one_json_line():
    done = subprocess.run([sys.executable, SCRIPT, "--quick"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    batches = [row for row in report["rows"] if not row["load"]]
    assert {row["workload"] for row in batches} == {
        "shared documents",
        "few-shot batches",
        "tree of thoughts",
        "conversations",
    }
    assert all(row["dfs"]["share"] >= 0.99 for row in batches), "sorted prompts miss what the pool could hold"
    assert all(row["prefix"]["share"] >= row["fcfs"]["share"] for row in batches)
    assert report["engine"]["same_answers"] is True
    assert report["engine"]["prefix"]["hit_ratio"] > 2 * report["engine"]["fcfs"]["hit_ratio"]
    assert report["queue"].keys() == {"mean_ms", "p50_ms", "p99_ms"}
