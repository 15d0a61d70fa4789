"""Who may name the cache's manager and the scheduler: the engine's own rooms; the others ask the engine."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "foreword"
INSIDE = ("cache", "engine", "replay", "assembly.py", "model/self_check.py")
"""Rooms and files that have a manager of their own, or make one. The self-check of a model is an engine, too."""
INNER = {"KVCacheManager", "Scheduler", "RunningRows"}


def reaches(source: str) -> list[int]:
    """Lines that name what belongs to an engine, or reach through an engine for it."""
    if not any(name in source for name in (*INNER, ".manager", ".scheduler")):
        return []  # most files; to parse them all takes seconds
    lines = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Name(id=name) | ast.alias(name=name) if name in INNER:
                lines.append(node.lineno)
            case ast.Attribute(
                value=ast.Name(id="engine" | "_engine") | ast.Attribute(attr="engine" | "_engine"),
                attr="manager" | "scheduler",
            ):
                lines.append(node.lineno)
    return lines


def test_only_the_engines_own_rooms_reach_its_manager_and_its_scheduler() -> None:
    outside = [path for path in ROOT.rglob("*.py") if not path.relative_to(ROOT).as_posix().startswith(INSIDE)]
    assert len(outside) > 100
    found = {str(path.relative_to(ROOT)): reaches(path.read_text(encoding="utf-8")) for path in outside}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    [
        "from foreword.cache import KVCacheManager",
        "usage = llm.engine.manager.get_usage()",
        "waiting = engine.scheduler.num_waiting",
        "self._engine.scheduler.abort(ids)",
    ],
)
def test_a_reach_is_found(line: str) -> None:
    assert reaches(f"import json\n{line}\nconfig.scheduler.max_num_seqs") == [2]
