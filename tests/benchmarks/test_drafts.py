"""benchmarks/drafts.py runs; that no draft changes an answer, it asserts itself."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_benchmark_of_drafts_ends_with_one_json_line() -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/drafts.py"), "--quick", "--repeats", "1", "--json"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    figures = json.loads(run.stdout.splitlines()[-1])
    assert set(figures) == {
        name + many for name in ("edit", "quote", "agent", "retry", "random") for many in ("", "_16")
    }
    for own in figures.values():
        assert set(own) == {"tok_s_plain", "tok_s_drafts", "gain", "gain_cpu", "accepted_per_step"}
        assert own["accepted_per_step"] >= 0  # how many depends on times here
