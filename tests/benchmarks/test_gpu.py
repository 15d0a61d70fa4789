"""The GPU's benchmark: says so where there is none, and its parts run from beginning to end on a CPU."""

from __future__ import annotations

import json
import math
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=900)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_cuda_device_it_says_so_in_one_line_and_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT)])
    monkeypatch.syspath_prepend(SCRIPT.parent)
    assert runpy.run_path(str(SCRIPT))["main"]() == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    [line] = printed.err.splitlines()
    assert "sees none: run it where there is an NVIDIA GPU, with a CUDA build of torch" in line


@pytest.mark.slow
def test_every_section_runs_on_a_cpu_and_says_that_its_figures_are_no_gpu_figures() -> None:
    done = run("--device", "cpu", "--quick")
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    assert "NOT ONE FIGURE HERE IS A GPU FIGURE" in table[-1]
    assert not any("MET" in line.upper().split() for line in table), "no target is compared with"
    report = json.loads(last)
    assert (report["benchmark"], report["are_gpu_figures"]) == ("gpu", False)
    figures = report["figures"]
    assert all(math.isfinite(value) and value > 0 for value in figures.values()), figures
    for batch in (1, 4):
        for mode in ("", "_inexact"):
            assert figures[f"decode_{batch}_host_ms{mode}"] < figures[f"decode_{batch}_ms{mode}"]
    assert {"copy_gbytes_per_s", "matrix_tflops", "prefill_share_of_matrix_rate", "ttft_64_ratio"} <= set(figures)
    assert {"two_phase_512_ratio", "two_phase_512_ratio_same_blocks", "transformers_decode_4_ms"} <= set(figures)
