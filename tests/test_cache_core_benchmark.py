"""The cache core's benchmark runs without vLLM, and its last line has the promised keys."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import foreword

KEYS = {
    "hit_50k_array_radix_ms",
    "hit_50k_array_hash_ms",
    "hit_50k_list_radix_ms",
    "miss_50k_ms",
    "life_1k_ms",
    "decode_256_ms",
}


@pytest.mark.slow
def test_the_last_line_is_json_with_every_figure(request):
    printed = subprocess.run(
        [sys.executable, request.config.rootpath / "benchmarks/cache_core.py", "--rounds", "1"],
        env={**os.environ, "PYTHONPATH": str(Path(foreword.__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout
    figures = json.loads(printed.splitlines()[-1])
    assert set(figures) == {"foreword", "vllm"}
    assert set(figures["foreword"]) == KEYS
    assert min(figures["foreword"].values()) > 0
