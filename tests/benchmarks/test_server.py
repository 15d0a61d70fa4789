"""The server's benchmark runs, and its figures belong together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "server.py"


@pytest.mark.slow
def test_the_quick_benchmark_compares_equal_work():
    done = subprocess.run([sys.executable, SCRIPT, "--quick", "--clients", "2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    rows = result["rows"]
    assert set(result["dialects"]["cpu_ratio_to_chat"]) == {"chat completions", "responses", "anthropic", "gemini"}
    assert [(row["workload"], row["cache"]) for row in rows] == [
        ("shared prefix", "cold"),
        ("shared prefix", "warm"),
        ("multi turn", "cold"),
        ("multi turn", "warm"),
    ]
    for row in rows:
        assert row["server"]["requests"] == row["engine"]["requests"]
        if row["cache"] == "warm":
            assert min(row["server"]["hit_rate"], row["engine"]["hit_rate"]) > 0.9
