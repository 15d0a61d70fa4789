"""Makes the package `foreword_cache` of this tree's `src/foreword/cache`, then builds it.

The modules are the same; `foreword.cache` in them becomes `foreword_cache`, so that both packages can be installed.
"""

import re
import shutil
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
TREE = HERE.parents[1]
NAMES = ((r"\bforeword\.errors\b", "foreword_cache.errors"), (r"\bforeword\.cache\b", "foreword_cache"))


def generate(folder: Path) -> None:
    """Write the package's modules into `folder`, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    source = TREE / "src" / "foreword"
    modules = {module: module.relative_to(source / "cache") for module in source.glob("cache/**/*.py")}
    for module, place in {**modules, source / "errors.py": Path("errors.py")}.items():
        text = module.read_text(encoding="utf-8")
        for name, renamed in NAMES:
            text = re.sub(name, renamed, text)
        (folder / place).parent.mkdir(parents=True, exist_ok=True)
        (folder / place).write_text(text, encoding="utf-8")
    shutil.copy(source / "py.typed", folder / "py.typed")


if __name__ == "__main__":
    if (TREE / "src" / "foreword" / "cache").exists():  # otherwise this is a source distribution, which has the modules
        generate(HERE / "src" / "foreword_cache")
        shutil.rmtree(HERE / "build", ignore_errors=True)  # modules that are gone would stay in the wheel
        shutil.copy(TREE / "LICENSE", HERE)
    setup()
