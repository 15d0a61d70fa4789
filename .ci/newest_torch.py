"""Is the promise of equal bits kept by the newest torch that pyproject.toml allows?

Nothing to do while that is the version that constraints.txt pins, with which all tests run. Otherwise that version is
installed into a folder of its own, and the tests of the promise run on it. Without an index nothing is said.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "newest-torch"
TESTS = ("tests/model/test_exactness.py", "tests/model/test_hybrid.py", "tests/kernels/test_contract.py")
PIP = (sys.executable, "-m", "pip")


def newest(offered: Iterable[str], requirement: Requirement) -> Version | None:
    """The highest of the versions that a requirement allows, without the name of its build ('+cpu')."""
    allowed = [Version(Version(version).public) for version in offered if version in requirement.specifier]
    return max(allowed, default=None)


def offered_versions() -> list[str]:
    """What the indexes that pip asks have of torch; empty if none answers."""
    asked = subprocess.run([*PIP, "index", "versions", "torch"], capture_output=True, text=True)
    found = re.search(r"^Available versions: (.*)$", asked.stdout, re.MULTILINE)
    return found[1].split(", ") if found else []


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirement = next(r for r in map(Requirement, project["dependencies"]) if r.name == "torch")
    pinned = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned, "constraints.txt pins torch"
    assert pinned[1] in requirement.specifier, "what is pinned is allowed"
    version = newest(offered_versions(), requirement)
    print(f"pinned: torch {pinned[1]}; newest of {requirement}: {version or 'unknown, no index answers'}")
    if version is None or version <= Version(pinned[1]):
        return 0
    index = ("--extra-index-url", os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu"))
    # Next to the packages that are installed, whose torch it hides.
    install = [*PIP, "install", "--upgrade", "--no-deps", "--target", str(FOLDER), *index, f"torch=={version}"]
    if subprocess.run(install).returncode:
        print(f"torch {version} could not be installed; it was not checked")
        return 0
    environment = {**os.environ, "PYTHONPATH": str(FOLDER)}
    return subprocess.run([sys.executable, "-m", "pytest", "-q", *TESTS], env=environment, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
