"""The guide to a server in production, run as the script that it says it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from free_ports import free_port

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "serve.md"


@pytest.mark.slow
def test_the_guides_commands_work_one_after_the_other(tmp_path):
    blocks = re.findall(r"^```sh\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 6
    # A server that outlives a failed command would hold the output open, and the test with it.
    script = "set -eum\ntrap 'kill $(jobs -p) 2> /dev/null || true' EXIT\n" + "".join(blocks).replace(
        "8000", str(free_port())
    ).replace("serve path/to/model", "serve")
    command = tmp_path / "bin" / "foreword"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m foreword.cli "$@"\n')
    command.chmod(0o755)
    ran = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{command.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    for shown in (
        '"cached_tokens"',
        '"hit_tokens"',
        "foreword-demo",
        "foreword_prefix_cache_hits_total",
        '"more_memory"',
    ):
        assert shown in ran.stdout, ran.stdout
    assert ran.stdout.count('"status":"ok"') == 2
