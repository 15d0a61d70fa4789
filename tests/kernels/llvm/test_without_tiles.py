"""The CPU kernels on a processor without AMX, or without the float16 that attention in tiles needs beside it.

What is for tiles compiles to nothing there, and is not called.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from foreword.kernels.products import tile_worker
from foreword.kernels.products.weights12 import HAS_BYTE_LOOK_UP

llvm = pytest.importorskip("llvmlite.binding")

PROGRAM = """
from foreword.kernels.llvm import tile_softmax
from foreword.kernels.llvm import tiles

{lack}  # before anything asks
import numpy as np
import torch
from foreword.kernels.cpu.attention import CpuAttention, fastest_mode
from foreword.kernels.cpu.layout import TILES
from foreword.kernels.reference import AttentionOptions
from paged_case import Case, Shape

assert fastest_mode() != TILES
options = AttentionOptions(0.125)
for dtype, most in ((torch.float32, 1e-4), (torch.bfloat16, 0.02)):
    case = Case(Shape(6, 2, 64, 64, 16, dtype), [(0, 300), (299, 300)], np.random.default_rng(0))
    error = (case.run(CpuAttention(), options).double() - case.expected(options)).abs().max().item()
    assert error < most, (dtype, error)
print("right")
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="another processor has none anyway")
@pytest.mark.parametrize(
    ("lack", "feature"),
    [("tiles.has_tiles = lambda: False", "amx"), ("tile_softmax.HAS_FLOAT16 = False", "avx512fp16")],
    ids=["no tiles", "no float16"],
)
def test_the_kernel_compiles_and_is_right_without_tiles(tmp_path: Path, lack: str, feature: str) -> None:
    features = llvm.get_host_cpu_features()
    without = ",".join(f"{'+' if on and feature not in name else '-'}{name}" for name, on in features.items())
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "NUMBA_CPU_NAME": "x86-64",
        "NUMBA_CPU_FEATURES": without,
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    program = [sys.executable, "-c", PROGRAM.format(lack=lack)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "right\n"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="another processor has none anyway")
def test_products_in_tiles_compile_without_tiles() -> None:
    """So that who changes what products have in common sees more than on an own processor."""
    pytest.importorskip("numba")
    if not HAS_BYTE_LOOK_UP:
        pytest.skip("weights are expanded with AVX512_VBMI")
    assert tile_worker.TILE_WORKER.worker.address != 0
