"""What the interpreter does not see: every variant compiles to machine code, and rows lie alike in both kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "triton_variants.py"


def compile_variants(*arguments: str) -> list[dict[str, Any]]:
    """In a process of its own, since this one may interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    facts: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])["variants"]
    return facts


def check(facts: list[dict[str, Any]]) -> None:
    kinds = {(one["dtype"], one["head_size"], one["asks"]) for one in facts if one["kernel"] == "decode"}
    assert kinds
    by_kind = {(one["kernel"], one["dtype"], one["head_size"], one["asks"]): one for one in facts}
    for kind in kinds:
        prefill, decode = by_kind["prefill", *kind], by_kind["decode", *kind]
        assert prefill["instruction"] == decode["instruction"] == ("fma" if kind[0] == "fp32" else "wgmma")
        # A row's scores are summed in one order if they lie alike; only how many rows there are may differ.
        [one], [other] = prefill["row_layouts"], decode["row_layouts"]
        warps = [f"warpsPerCTA = [{side['warps']}, 1]" for side in (prefill, decode)]
        if kind[0] == "fp32":
            assert one == other
        else:
            assert one.replace(warps[0], "all rows") == other.replace(warps[1], "all rows")
            assert "all rows" in one.replace(warps[0], "all rows")
    assert not any(one["fused_by_compiler"] for one in facts if one["kernel"] in ("prefill", "decode", "merge"))
    allowed = {"bf16": 16, "fp16": 16, "fp32": 64}  # bytes per thread
    spilled = [one for one in facts if one["head_size"] <= 128 and one["spill_bytes"] > allowed[one["dtype"]]]
    assert not spilled


def test_variants_compile_and_rows_lie_alike_in_prefill_and_decoding() -> None:
    check(compile_variants("--quick"))


@pytest.mark.slow
def test_every_variant_compiles() -> None:
    check(compile_variants())
