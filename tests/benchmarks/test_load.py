"""The benchmark of the start: what it counts, and that it runs."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "load.py"
LOAD = runpy.run_path(str(SCRIPT))
OURS, TORCH, report, start = (LOAD[name] for name in ("OURS", "TORCH", "report", "start"))


def test_the_clock_stops_at_the_first_byte_and_the_processor_counts_to_the_end() -> None:
    code = "import time; print(flush=True); end = time.process_time() + 1\nwhile time.process_time() < end: pass"
    seconds, used, megabytes = start(["-c", code], None)
    assert megabytes > 1
    assert used > 1
    assert seconds < used


def test_a_process_that_fails_is_no_measurement() -> None:
    with pytest.raises(SystemExit, match="failed"):
        start(["-c", "print(); raise SystemExit(3)"], None)


def test_what_is_beyond_torch_is_taken_round_by_round() -> None:
    torch = [(1.0, 2.0, 9.0), (3.0, 2.0, 9.0), (2.0, 2.0, 9.0)]
    rows = report({TORCH: torch, OURS: [(4.0, 5.0, 11.0), (5.0, 5.0, 12.0), (7.0, 8.0, 12.0)]})
    times = {"wall_s": 2.0, "least_wall_s": 1.0, "cpu_s": 2.0, "least_cpu_s": 2.0}
    assert rows[TORCH] == {**times, "peak_mb": 9.0, "least_peak_mb": 9.0}
    assert rows[OURS]["beyond_torch_peak_mb"] == 3.0
    assert rows[OURS]["beyond_torch_wall_s"] == 3.0
    assert rows[OURS]["least_beyond_torch_wall_s"] == 3.0
    assert rows[OURS]["beyond_torch_cpu_s"] == 3.0


@pytest.mark.slow
@pytest.mark.alone
def test_the_script_ends_with_one_json_line() -> None:
    model = str(files("foreword.demo") / "weights")
    output = subprocess.run(
        [sys.executable, str(SCRIPT), "--rounds", "1", "--model", model], capture_output=True, text=True, check=True
    )
    report = json.loads(output.stdout.splitlines()[-1])
    assert report["foreword"]["wall_s"] > report["torch"]["wall_s"] > 0
