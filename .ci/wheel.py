"""Builds the sdist and the wheel, and tries the wheel in an environment that has only what the wheel requires.  The
wheel is built from the sdist. The new environment gets links to the required packages of this environment, and to no
others, so nothing is downloaded, and a requirement that is not declared is missing. Kernels that this clone has
compiled from the same sources are copied too, because compiling them takes a minute.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "wheel"
BESIDE = {"LICENSE", "PKG-INFO", "README.md", "MANIFEST.in", "pyproject.toml", "setup.cfg"}
"""Files of the sdist outside the package."""
RIGHT = """
from foreword import LLM, ForewordError, RequestOutput, SamplingParams

def ask(llm: LLM, text: str) -> str:
    outputs: list[RequestOutput] = llm.generate(text, SamplingParams(temperature=0, max_tokens=4))
    return outputs[0].outputs[0].text

try:
    with LLM("folder", kv_cache_memory_bytes="64MB") as llm:
        print(ask(llm, "Hello"), llm.get_prefix_cache_stats().hit_rate)
except ForewordError as error:
    print(error)
"""
WRONG = """
from foreword import LLM, SamplingParams

params = SamplingParams(temprature=0)
number: int = LLM("folder").generate("Hello")[0].outputs[0].text
"""


def build() -> tuple[Path, Path]:
    """Builds the sdist and the wheel. Returns their paths."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    made = FOLDER / "dist"
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", made, ROOT]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    [sdist], [wheel] = made.glob("*.tar.gz"), made.glob("*.whl")
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    """Checks that both have all files of the package that git knows, and no others."""
    listed = subprocess.run(["git", "ls-files", "src/foreword"], cwd=ROOT, capture_output=True, text=True, check=True)
    known = {name.removeprefix("src/") for name in listed.stdout.splitlines()}
    with zipfile.ZipFile(wheel) as archive:
        in_wheel = {name for name in archive.namelist() if ".dist-info/" not in name}
    with tarfile.open(sdist) as archive:
        members = [member.name.partition("/")[2] for member in archive if member.isfile()]
    in_sdist = {name.removeprefix("src/") for name in members if name.startswith("src/foreword/")}
    for what, found in (("wheel", in_wheel), ("sdist", in_sdist)):
        assert found == known, f"the {what} lacks {sorted(known - found)} and has {sorted(found - known)} besides"
    beside = {name for name in members if not name.startswith(("src/foreword/", "src/foreword.egg-info/"))}
    assert beside == BESIDE, f"the sdist has {sorted(beside ^ BESIDE)} besides, or lacks them"


def link_requirements(wheel: Path, site: Path) -> list[str]:
    """Links the packages that the wheel requires, directly or not, into a folder of packages."""
    waiting, seen = [("foreword", frozenset[str]())], set[tuple[str, frozenset[str]]]()
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().partition("\n\n")[0].splitlines()
    own = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ")]
    while waiting:
        package, extras = waiting.pop()
        if (package, extras) in seen:
            continue
        seen.add((package, extras))
        try:
            requires = own if package == "foreword" else distribution(package).requires or []
        except PackageNotFoundError:
            continue  # a requirement of another platform's
        for requirement in map(Requirement, requires):
            environments = [{"extra": extra} for extra in (*extras, "")]
            if requirement.marker is None or any(requirement.marker.evaluate(one) for one in environments):
                waiting.append((requirement.name, frozenset(requirement.extras)))
    names = sorted({package for package, _ in seen} - {"foreword"})
    for package in names:
        try:
            files = distribution(package).files or []
        except PackageNotFoundError:
            continue
        for top in {file.parts[0] for file in files if file.parts[0] != ".."}:
            source = Path(str(distribution(package).locate_file(top)))
            if source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    return names


def copy_kernels(site: Path) -> None:
    """Copies compiled kernels. numba reuses them if the source's time is equal; foreword, if its content is."""
    for source in (ROOT / "src" / "foreword" / "kernels").rglob("*.py"):
        there = site / source.relative_to(ROOT / "src")
        os.utime(there, ns=(source.stat().st_atime_ns, source.stat().st_mtime_ns))
        for kept in (source.parent / "__pycache__").glob(f"{source.stem}.*.nb[ci]"):
            (there.parent / "__pycache__").mkdir(exist_ok=True)
            shutil.copy(kept, there.parent / "__pycache__")


def check_types(python: Path) -> None:
    """Checks that a user's mypy knows foreword's types: it passes a right program, and finds a wrong one's errors."""
    program = FOLDER / "program.py"
    for text, errors in ((RIGHT, []), (WRONG, ["call-arg", "assignment"])):
        program.write_text(text)
        command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", python, program]
        said = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True).stdout
        assert re.findall(r" error: .*\[([\w-]+)\]$", said, re.MULTILINE) == errors, said


def main() -> None:
    sdist, wheel = build()
    check_contents(sdist, wheel)
    place = FOLDER / "empty"
    venv.create(place, symlinks=True)
    [site] = place.glob("lib/*/site-packages")
    python = place / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", python]
    subprocess.run([*pip, "install", "--no-deps", "--no-compile", wheel], check=True)
    names = link_requirements(wheel, site)
    copy_kernels(site)
    here = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}

    def run(program: str, *arguments: str) -> str:
        command = [place / "bin" / program, *arguments]
        ran = subprocess.run(command, cwd=place, env=here, stdout=subprocess.PIPE, text=True, check=True)
        return ran.stdout.strip()

    installed = run("python", "-c", "import foreword.demo; print(foreword.demo.__path__[0])")
    assert Path(installed).is_relative_to(site), installed
    version = run("foreword", "--version")
    prompt = "The code of the amber falcon is 4821. What is the code of the amber falcon?"
    answer = run("foreword", "generate", f"{installed}/weights", "--chat", "--prompt", prompt)
    assert answer == "4821", answer
    check_types(python)
    print(f"{wheel.name} beside {len(names)} packages: {version}, first answer {answer}")


if __name__ == "__main__":
    main()
