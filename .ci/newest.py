"""Do the newest torch and transformers that pyproject.toml allows keep the promises?

If constraints.txt pins the newest version of a package, there is nothing to do, because all tests run with that
version. Otherwise the newest version is installed into a folder of its own, and tests that depend on the package run
with it. Without a package index, nothing is checked.
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
FOLDER = ROOT / "build" / "newest"
TESTS = {
    "torch": ("tests/model/test_exactness.py", "tests/model/test_hybrid.py", "tests/kernels/test_contract.py"),
    "transformers": (
        "tests/model/test_quiet_transformers.py",
        "tests/model/test_oracle.py",
        "tests/model/test_hybrid.py",
    ),
}
PIP = (sys.executable, "-m", "pip")


def newest(offered: Iterable[str], requirement: Requirement) -> Version | None:
    """The highest of the versions that a requirement allows, without the name of its build ('+cpu')."""
    allowed = [Version(Version(version).public) for version in offered if version in requirement.specifier]
    return max(allowed, default=None)


def offered_versions(package: str) -> list[str]:
    """The versions of a package on the indexes that pip asks; empty if no index answers."""
    asked = subprocess.run([*PIP, "index", "versions", package], capture_output=True, text=True)
    found = re.search(r"^Available versions: (.*)$", asked.stdout, re.MULTILINE)
    return found[1].split(", ") if found else []


def check(package: str) -> int:
    """Runs a package's tests on its newest version. Returns their exit status."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirement = next(r for r in map(Requirement, project["dependencies"]) if r.name == package)
    pinned = re.search(rf"^{package}==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned, f"constraints.txt pins {package}"
    assert pinned[1] in requirement.specifier, "what is pinned is allowed"
    version = newest(offered_versions(package), requirement)
    print(
        f"pinned: {package} {pinned[1]}; newest of {requirement}: {version or 'unknown, no index answers'}", flush=True
    )
    if version is None or version <= Version(pinned[1]):
        return 0
    folder = FOLDER / package
    index = ("--extra-index-url", os.environ.get("TORCH_INDEX", "https://download.pytorch.org/whl/cpu"))
    # The folder hides the installed version; all other packages are the installed ones.
    install = [*PIP, "install", "--upgrade", "--no-deps", "--target", str(folder)]
    if subprocess.run([*install, *(index if package == "torch" else ()), f"{package}=={version}"]).returncode:
        print(f"{package} {version} could not be installed; it was not checked")
        return 0
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "logical", "--maxprocesses", "4", *TESTS[package]]
    return subprocess.run(command, env=environment, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(max([check(package) for package in TESTS]))
