"""Compiled code is kept on disk, compiled again when a file that it inlines changes, and needs no place to be kept."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import foreword
from foreword.kernels.runtime.compiled import cached, record, source_digest

PACKAGE = Path(foreword.__file__).parent
COUNT_UPPER_BYTES = """
import numpy as np
from foreword.kernels.products import weights12
counts = weights12._count_upper(np.full((3, 4), 0x3F80, np.uint16), 1)
print(counts[0x3F], sum(weights12._count_upper.stats.cache_hits.values()))
"""
RUN_A_WORKER = """
import torch
from foreword.model.cpu.row_functions import Norm, RowKernels
print(RowKernels().rms_norm(torch.ones(2, 64), Norm(torch.ones(64), 0.0, 0)).sum().item())
"""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the package that may be edited: the folder that it lies in."""
    ignored = shutil.ignore_patterns("__pycache__", "weights", "server", "replay", "demo")
    shutil.copytree(PACKAGE, tmp_path / "src" / "foreword", ignore=ignored)
    return tmp_path / "src"


def run(source: str, copy: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """What a process of its own prints, which imports the copy; without NUMBA_CACHE_DIR unless it is given."""
    names = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA", "XDG", "PYTHON"))}
    names |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    return subprocess.run([sys.executable, "-c", source], env=names, capture_output=True, text=True, check=True)


@pytest.mark.slow
def test_what_the_12_bit_format_inlines_is_part_of_the_key_of_its_code(copy: Path, tmp_path: Path) -> None:
    """Else an edit of an emitter would leave weights packed by the code from before it. Triton's files are apart."""
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    assert run(COUNT_UPPER_BYTES, copy, **cache).stdout.split() == ["12", "0"]
    for edited, num_hits in (("triton/tile.py", "1"), ("llvm/simd.py", "0")):
        with (copy / "foreword" / "kernels" / edited).open("a") as file:
            file.write("# an edit\n")
        assert run(COUNT_UPPER_BYTES, copy, **cache).stdout.split() == ["12", num_hits]


@pytest.mark.slow
def test_a_function_that_inlines_an_edited_one_computes_what_the_edit_says(copy: Path, tmp_path: Path) -> None:
    kernels = copy / "foreword" / "kernels"
    (kernels / "cpu" / "part.py").write_text(
        "from foreword.kernels.runtime.compiled import inlined\n\n@inlined\ndef part(n):\n    return n + 1\n"
    )
    (kernels / "cpu" / "whole.py").write_text(
        "from foreword.kernels.cpu.part import part\nfrom foreword.kernels.runtime.compiled import cached\n\n"
        "@cached()\ndef whole(n):\n    return 10 * part(n)\n"
    )
    source = "from foreword.kernels.cpu.whole import whole\nprint(whole(1))"
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    assert run(source, copy, **cache).stdout == "20\n"
    (kernels / "cpu" / "part.py").write_text((kernels / "cpu" / "part.py").read_text().replace("n + 1", "n + 2"))
    assert run(source, copy, **cache).stdout == "30\n"


def test_kept_code_that_is_damaged_is_compiled_again(copy: Path, tmp_path: Path) -> None:
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    run(COUNT_UPPER_BYTES, copy, **cache)
    kept = list((tmp_path / "cache").rglob("*_count_upper*.nb[ci]"))
    assert len(kept) == 2
    for file in kept:
        file.write_bytes(file.read_bytes()[:-100])
    assert run(COUNT_UPPER_BYTES, copy, **cache).stdout.split() == ["12", "0"]


@pytest.mark.slow  # kernels are compiled from nothing
def test_where_neither_package_nor_home_can_be_written_code_is_compiled_and_not_kept(copy: Path) -> None:
    """As in a container whose root is read-only. A file stands where numba makes a folder, which stops root, too."""
    for folder in [copy, *copy.rglob("*")]:
        if folder.is_dir():
            (folder / "__pycache__").touch()
            folder.chmod(0o555)
    done = run(COUNT_UPPER_BYTES + RUN_A_WORKER, copy, HOME=os.devnull)
    for folder in [copy, *copy.rglob("*")]:
        folder.chmod(0o755)
    assert done.stdout.split() == ["12", "0", "128.0"]
    assert done.stderr.count("NUMBA_CACHE_DIR") == 1


def test_the_package_has_one_owner_of_numbas_decorators() -> None:
    """Of emitters, `emit.py` makes functions; everything else is decorated in `compiled.py`."""
    decorators = re.compile(r"@(njit|cfunc|jit)\b|import .*\b(njit|cfunc|jit)\b")
    users = [path for path in PACKAGE.rglob("*.py") if decorators.search(path.read_text())]
    assert users == [PACKAGE / "kernels" / "runtime" / "compiled.py"]


def test_a_record_has_named_integers_and_then_other_types() -> None:
    kind = record("address", "count", scale=np.float32)
    assert kind.names == ("address", "count", "scale")
    assert [kind[name] for name in kind.names] == [np.int64, np.int64, np.float32]
    assert kind.itemsize == 24


def test_the_digest_is_the_same_in_every_call() -> None:
    assert source_digest() == source_digest() != ""


def test_a_function_that_no_file_has_is_compiled_and_not_kept() -> None:
    scope: dict[str, Any] = {}
    exec("def double(number): return 2 * number", scope)
    assert cached()(scope["double"])(21) == 42
