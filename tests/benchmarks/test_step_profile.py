"""The profile of a step runs, and its parts add up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from foreword.model.cpu.product import can_multiply

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "step_profile.py"


@pytest.mark.slow
def test_the_parts_of_a_step_are_named_and_add_up() -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--json", "--steps", "3", "--batch", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    report = json.loads(done.stdout)
    parts = report["parts_ms"]
    expected = {"attention", "sampling", "scheduling and batch building"}
    assert expected | ({"products"} if can_multiply() else set()) <= parts.keys()
    assert min(parts.values()) >= 0
    assert sum(parts.values()) == pytest.approx(report["parts_sum_ms"], rel=0.5)
    assert report["step_ms"] > 0
