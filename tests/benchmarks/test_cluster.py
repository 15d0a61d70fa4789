"""benchmarks/cluster.py runs from beginning to end, and its last line can be read by a program."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cluster.py"


@pytest.mark.slow
def test_cluster_compares_rules_and_ends_with_one_json_line():
    command = [sys.executable, SCRIPT, "--quick", "--rules", "cost,round_robin,llm_d"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["benchmark"], report["requests"]) == ("cluster", 300)
    assert set(report["rivals"]) == {"round_robin", "llm_d"}
    assert report["mean_ttft_s"] < report["rivals"]["round_robin"]["mean_ttft_s"]
    assert report["hit_ratio"] > report["rivals"]["round_robin"]["hit_ratio"]
    assert all(report[f"select_us_{number}"] > 0 for number in (8, 64, 1000))
    assert report.keys() >= {"overload_ttft_s", "routers3_ratio", "routers3_blind_ratio", "stale30_ratio"}
