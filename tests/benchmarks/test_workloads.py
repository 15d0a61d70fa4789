"""The benchmark scripts run from beginning to end, and their last line can be read by a program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "workloads.py"


@pytest.mark.slow
def test_workloads_compares_hit_and_miss_and_ends_with_one_json_line() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick"],
        env={**os.environ, "FOREWORD_NUM_THREADS": "1"},  # a model this small waits longer for threads than for sums
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    assert any("claim" in line for line in table)
    report = json.loads(last)
    assert report["benchmark"] == "workloads"
    assert report["identical"] is True
    assert report["matmul_gflops"] > 0
    assert report["read_gbytes_per_s"] > 0
    shapes = [(w["shared_tokens"], w["generated_tokens"], w["claim_e2e_ratio"]) for w in report["workloads"]]
    assert shapes == [(257, 64, 1.3), (1024, 32, 5.0), (2048, 16, 10.0)]
    for workload in report["workloads"]:
        assert workload["identical"] is True
        assert workload["cached_as_expected"] is True
        assert {"ttft_ratio", "e2e_ratio", "ttft_miss_ms", "ttft_hit_ms", "e2e_miss_ms", "e2e_hit_ms"} <= set(workload)
        assert workload["limit"]["e2e_ratio"] >= 1.0
        assert workload["limit_e2e_ratio_on_claimed_machine"] >= 1.0
