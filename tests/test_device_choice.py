"""A run of the tests on a device that is not there fails before any test could look as if it had passed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_a_run_on_cuda_without_a_device_says_so_and_fails() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "not slow", "tests/test_device_choice.py"],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "FOREWORD_TEST_DEVICE": "cuda"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    assert "sees no CUDA device here: nothing was tested" in done.stdout + done.stderr
