"""The comparison of engines runs from beginning to end without peers, and says what they need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import foreword

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "engine.py"
FIGURES = {
    "ttft_miss_1024_ms",
    "ttft_miss_4096_ms",
    "ttft_hit_1024_ms",
    "ttft_hit_4096_ms",
    "decode_1_tok_s",
    "decode_16_tok_s",
    "shared_decode_tok_s",
    "multi_turn_s",
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(foreword.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=900,
    )


@pytest.mark.slow
def test_every_engine_gets_a_figure_and_the_last_line_is_json() -> None:
    done = run("--quick", "--threads", "1")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    for figure in FIGURES:
        assert set(report[figure]) == {"foreword", "transformers", "transformers.batching"}
        assert min(report[figure].values()) > 0
        assert report["limits"][figure] > 0
    assert report["quick"] is True


@pytest.mark.slow
def test_peers_without_their_interpreters_are_refused_with_the_option_that_is_missing() -> None:
    done = run("--quick", "--peers", "--vllm-python", sys.executable, "--llama-python", "/nowhere/python")
    assert done.returncode == 2
    assert "--llama-python" in done.stderr
    assert "/nowhere/python" in done.stderr


@pytest.mark.slow
def test_only_engines_that_are_asked_for_need_their_interpreters_and_unknown_ones_are_named() -> None:
    done = run("--quick", "--peers", "--engines", "foreword", "llama.cpp", "--llama-python", "/nowhere/python")
    assert done.returncode == 2
    assert "--llama-python" in done.stderr.splitlines()[-1]
    done = run("--quick", "--engines", "vlm")
    assert done.returncode == 2
    assert "'vlm'" in done.stderr


@pytest.mark.slow
def test_contention_ends_with_what_the_engine_keeps() -> None:
    script = SCRIPT.with_name("contention.py")
    small = ("--length", "16", "--tokens", "3", "--repeats", "1")
    done = subprocess.run([sys.executable, str(script), *small], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert {"busy 1", "busy 2", "busy 4"} <= report["kept"]["foreword"].keys()
    for figures in report["figures"]["foreword"].values():
        assert figures.keys() == {"first_token_ms", "hit_ms", "decode_tok_s"}
        assert min(figures.values()) > 0
