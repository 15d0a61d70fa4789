"""The host's time for a step on a GPU, measured without one: the script runs, and says what it did not measure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_host.py"


@pytest.mark.slow
@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_every_part_of_a_step_is_timed_and_nothing_is_called_a_gpu_figure(temperature: str) -> None:
    pytest.importorskip("triton")
    sizes = ["--batch", "3", "--context", "40", "--steps", "4", "--temperature", temperature]
    done = subprocess.run([sys.executable, str(SCRIPT), *sizes], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "without a GPU" in done.stdout
    report = json.loads(done.stdout.splitlines()[-1])
    assert not report["is_gpu_figure"]
    assert len(report["parts_ms"]) == 13, "a part that is never called has no time"
    assert sum(report["parts_ms"].values()) == pytest.approx(report["host_ms"], rel=0.5)
