"""The package foreword-cache: the modules of `foreword.cache` under a name of their own, which need numpy alone."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import foreword.cache

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "packages" / "foreword-cache"
ALONE = """
import sys

before = set(sys.modules)
sys.modules["foreword"] = None  # as if it were not installed
import foreword_cache, foreword_cache.testing

print(*foreword_cache.__all__)
needed = {name.partition(".")[0] for name in sys.modules.keys() - before - {"foreword"}}
print(*sorted(needed - sys.stdlib_module_names))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package, as the wheel has it."""
    pytest.importorskip("setuptools")
    found = importlib.util.spec_from_file_location("cache_setup", PACKAGE / "setup.py")
    assert found is not None
    assert found.loader is not None
    setup: ModuleType = importlib.util.module_from_spec(found)
    found.loader.exec_module(setup)
    folder = tmp_path_factory.mktemp("package")
    setup.generate(folder / "foreword_cache")
    return folder


def run(folder: Path, *arguments: str) -> list[str]:
    """The lines that a Python with the package prints."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=300
    ).stdout.splitlines()


def test_the_package_has_the_names_of_foreword_cache_and_needs_numpy_alone(folder: Path) -> None:
    names, needed = run(folder, "-c", ALONE)
    assert names.split() == foreword.cache.__all__
    assert needed.split() == ["foreword_cache", "numpy"]


def test_the_kit_checks_the_package(folder: Path) -> None:
    lines = run(folder, "-m", "foreword_cache.testing")
    assert len(lines) == 8
    assert sum(int(re.search(r"(\d+) tokens hit", line)[1]) for line in lines) > 1000


def test_no_module_of_the_package_names_foreword_itself(folder: Path) -> None:
    for module in (folder / "foreword_cache").glob("**/*.py"):
        assert not re.search(r"^\s*(from|import) foreword\b(?!_)", module.read_text(), re.MULTILINE), module


def test_the_guides_code_runs_with_the_package_and_prints_what_it_says(folder: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "guides" / "cache-core.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    script = tmp_path / "guide.py"
    script.write_text("".join(blocks))
    assert run(folder, str(script)) == re.findall(r"^ *print\(.*\) +# (.*)$", "".join(blocks), re.MULTILINE)


def test_both_packages_have_one_version_and_ask_for_the_same_numpy() -> None:
    whole = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    alone = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    assert alone["version"] == whole["version"]
    assert set(alone["dependencies"]) < set(whole["dependencies"])
    assert alone["optional-dependencies"]["xxhash"][0] in whole["dependencies"]
    assert alone["requires-python"] == whole["requires-python"]
