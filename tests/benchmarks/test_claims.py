"""benchmarks/claims.py counts what it says, and ends with one line that a program can read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "claims.py"


@pytest.mark.slow
def test_claims_reach_the_limits_of_their_counts_and_change_no_answer() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick"],
        env={**os.environ, "FOREWORD_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["identical"] is True
    claims = {claim["name"]: claim for claim in report["claims"]}
    assert set(claims) == {"prefill saved", "batch of four", "one document"}
    for claim in claims.values():
        assert claim["saved_limit"] - 0.03 <= claim["saved"] <= claim["saved_limit"] + 0.03
        assert claim["time_ratio"] > 0
    assert 0 < report["upkeep"]["share_of_run_time"] < 1


def test_the_page_has_the_figures_of_the_kept_run() -> None:
    page = (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8")
    kept = json.loads((ROOT / "benchmarks/results/claims.json").read_text(encoding="utf-8"))
    for claim in kept["claims"]:
        counts = f"| {claim['computed_tokens']:,} | {claim['computed_tokens_uncached']:,} | **{claim['saved']:.1%}** |"
        assert counts in page
        assert f"{claim['time_ratio']:.1f}x" in page
    assert f"{kept['upkeep']['share_of_run_time']:.2%}" in page
