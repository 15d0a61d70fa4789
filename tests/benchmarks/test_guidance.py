"""benchmarks/guidance.py runs, and the guide's tables are those of the kept run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_guidance_ends_with_one_json_line_and_equal_seeds_give_equal_figures() -> None:
    first, second = (
        subprocess.run(
            [sys.executable, str(ROOT / "benchmarks/guidance.py"), "--requests", "40", "--json"],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        ).stdout
        for _ in range(2)
    )
    assert first == second
    report = json.loads(first)
    for rates in report["block_sizes"].values():
        assert list(rates.values()) == sorted(rates.values(), reverse=True)  # smaller blocks find at least as much
    for row in report["pollution"]:
        assert row["lru"] <= row["optimum"] <= row["unlimited"]


def test_the_guides_tables_have_the_figures_of_the_kept_run() -> None:
    page = (ROOT / "docs/guides/hit-rate.md").read_text(encoding="utf-8")
    kept = json.loads((ROOT / "benchmarks/results/guidance.json").read_text(encoding="utf-8"))
    rows = [re.findall(r"\d+\.\d%", line) for line in page.splitlines() if line.startswith("|")]
    told = [rates for rates in rows if rates]
    measured = [[row["before"], row["after"]] for row in kept["low_hit_rates"]]
    measured += [list(rates.values()) for rates in kept["block_sizes"].values()]
    measured += [[row[policy] for policy in ("lru", "value", "optimum")] for row in kept["pollution"]]
    assert told == [[f"{rate:.1%}" for rate in rates] for rates in measured]
