"""benchmarks/cluster.py runs from beginning to end, and its last line can be read by a program."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "cluster.py"


@pytest.mark.slow
def test_cluster_compares_rules_and_ends_with_one_json_line():
    command = [sys.executable, SCRIPT, "--quick", "--more", "--rules", "cost,first_token,bounded_hash,round_robin"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert (report["benchmark"], report["traffic"], report["requests"]) == ("cluster", "agents", 300)
    assert len(report["rates"]) == 3
    for rules in report["rates"].values():
        assert set(rules) == {"cost", "first_token", "bounded_hash", "round_robin"}
        assert rules["cost"]["mean_ttft_s"] < rules["round_robin"]["mean_ttft_s"]
    assert report["worst_ratio"] <= 1.05
    assert all(report[f"select_us_{number}"] > 0 for number in (8, 64, 1000))
    assert report.keys() >= {"routers3_ratio", "routers3_blind_ratio", "stale30_ratio"}
