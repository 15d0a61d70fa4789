"""Checks the small packages: builds each, installs it into an empty environment, and tests, times and weighs it there.

    python .ci/packages.py [NAME ...]       foreword-cache, ops

Prints each package's size and the processor time to import it. Fails if a package needs others than it declares, or if
its check fails. If no package index answers, nothing is checked.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

from newest import offered_versions

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "packages"
NUM_IMPORTS = 5
IMPORT_MS = """
import sys, time
for name in sys.argv[1:]:
    start = time.process_time()
    __import__(name)
    print(1000 * (time.process_time() - start))
"""


@dataclass(frozen=True)
class Package:
    """One way to install part of foreword."""

    source: str
    """The folder that is built, without its dependencies."""
    module: str
    check: tuple[str, ...]
    """Arguments of Python for the check, which passes with exit status 0."""
    beyond: tuple[str, ...] = ()
    """Modules that are imported before the measured import."""
    requirements: str | None = None
    """A file of requirements to install; None: the package's own requirements, which are `only`."""
    only: frozenset[str] = frozenset()
    never: frozenset[str] = frozenset()
    """Packages whose presence in the environment is a failure."""


PACKAGES = {
    "foreword-cache": Package(
        "packages/foreword-cache",
        "foreword_cache",
        ("-m", "foreword_cache.testing"),
        beyond=("numpy",),
        only=frozenset({"foreword-cache", "numpy", "pip", "setuptools"}),
    ),
    "ops": Package(
        ".",
        "foreword.cli",
        ("-m", "foreword", "watch", "--help"),
        requirements="deploy/ops.txt",
        never=frozenset({"ray", "torch", "transformers"}),
    ),
}


def run(*command: object, **options: object) -> str:
    """The output of a command, which must succeed."""
    return subprocess.run(
        [*map(str, command)], cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE, **options
    ).stdout


def num_mib(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 2**20


def check(name: str, package: Package) -> None:
    """Builds, installs and checks a package, and prints its size and import time. Raises an error if one fails."""
    folder = FOLDER / name
    venv.create(folder / "venv", with_pip=True, clear=True)
    python, empty = folder / "venv" / "bin" / "python", num_mib(folder / "venv")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT / package.source)
    wheel = max(folder.glob("*.whl"), key=lambda file: file.stat().st_mtime)
    if package.requirements is not None:
        run(python, "-m", "pip", "install", "--quiet", "-r", package.requirements)
    run(python, "-m", "pip", "install", "--quiet", *(["--no-deps"] if package.requirements else []), wheel)
    installed = {line.partition("==")[0] for line in run(python, "-m", "pip", "list", "--format", "freeze").split()}
    assert not package.only or installed <= package.only, f"{name} brought {sorted(installed - package.only)}"
    assert not installed & package.never, f"{name} brought {sorted(installed & package.never)}"
    print(run(python, *package.check).splitlines()[-1])
    code = (python, "-c", IMPORT_MS, *package.beyond, package.module)
    runs = [[float(ms) for ms in run(*code).split()] for _ in range(NUM_IMPORTS)]
    least = dict(zip((*package.beyond, package.module), map(min, zip(*runs, strict=True)), strict=True))
    times = ", then ".join(f"{module} {ms:.0f} ms" for module, ms in least.items())
    print(
        f"{name}: importing {times} of processor time, the least of {NUM_IMPORTS}; wheel "
        f"{wheel.stat().st_size / 2**10:.0f} KiB; installed {num_mib(folder / 'venv') - empty:.1f} MiB with "
        f"{len(installed - {'pip', 'setuptools'}) - 1} other packages",
        flush=True,
    )


if __name__ == "__main__":
    if not offered_versions("numpy"):
        print("no index of packages answers; the small packages were not checked")
        sys.exit()
    for name in sys.argv[1:] or PACKAGES:
        check(name, PACKAGES[name])
