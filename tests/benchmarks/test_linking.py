"""benchmarks/linking.py runs, and its negative controls fail where they should."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


def last_line(*args: str) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks/linking.py"), *args],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_controls_fail_and_methods_make_a_curve() -> None:
    found = last_line(
        "--only",
        "quality",
        "--tasks",
        "parameters,cut-16",
        "--sizes",
        "256x2",
        "--questions",
        "20",
        "--methods",
        "none,first-8,all",
    )
    table = found["quality"]["parameters"]
    assert table["none"]["right"] == table["all"]["right"] == 100
    assert table["not-behind"]["right"] < 60
    assert found["quality"]["cut-16"]["shuffled-values"]["right"] < 20
    assert found["quality"]["cut-16"]["first-8"]["right"] == 100
    shares = [share for _, share, _ in found["curve"]["cut-16"]]
    assert shares == sorted(shares)
    assert {name for name, _, _ in found["curve"]["cut-16"]} == set(found["quality"]["cut-16"])


def test_no_arm_finds_cached_what_it_has_to_compute_or_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two timed prompts that begin with the same two documents share more than a source."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    rounds_of = runpy.run_path(str(ROOT / "benchmarks/linking.py"))["rounds_of"]
    for number in (2, 4, 16):
        documents = [[at] for at in range(4 * number)]
        prompts = [prompt["documents"] for _, prompt, _ in rounds_of(np.random.default_rng(0), documents, number, 9, 7)]
        assert len(prompts) == 48
        assert len({(first, second) for [first], [second], *_ in prompts}) == 48
        assert all(len({at for [at] in chosen}) == number for chosen in prompts)


@pytest.mark.slow
def test_times_have_their_limits_beside_them() -> None:
    found = last_line("--only", "speed", "--quick")
    assert {"ttft_full_ms", "ttft_prefix_ms", "ttft_none_ms", "ttft_first16_ms", "ttft_deviation15_ms"} <= set(found)
    cell = found["speed"]["4x256"]
    arms = {"full", "prefix", "none", "first-16", "deviation-15", "all"}
    assert set(cell["ms"]) == set(cell["limit_ms"]) == arms
    assert (
        cell["limit_ms"]["prefix"] < cell["limit_ms"]["none"] < cell["limit_ms"]["first-16"] < cell["limit_ms"]["full"]
    )
