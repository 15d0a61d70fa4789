"""The examples run, and say what they promise."""

import os
import re
import subprocess
import sys
from pathlib import Path

import foreword

SOURCE = Path(foreword.__file__).parent.parent


def output_of(script, *arguments):
    """Standard output of a script of this repository, run in a process of its own."""
    return subprocess.run(
        [sys.executable, script, *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout


def test_the_standalone_cache_computes_each_prefix_once_and_keeps_tenants_apart(request):
    lines = output_of(request.config.rootpath / "examples/standalone_cache.py").splitlines()
    computed = [int(re.search(r"(\d+) computed", line).group(1)) for line in lines[:7]]
    # 100 + 3 + 19 at first; then the prompt's last token, which gives the logits, and the 19 generated ones.
    assert computed == [122, 20, 20, 20, 20, 20, 122]
    assert "came from the cache" in lines[-1]


def test_the_standalone_cache_needs_neither_torch_nor_the_engine(request):
    code = (
        "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__');"
        "loaded = {name.partition('.')[0] for name in sys.modules};"
        "assert not loaded & {'torch', 'transformers', 'xxhash'}, loaded"
    )
    output_of("-c", code, str(request.config.rootpath / "examples/standalone_cache.py"))
