"""benchmarks/replay.py runs from beginning to end, and its last line can be read by a program."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "replay.py"


@pytest.mark.slow
def test_replay_tells_the_speed_of_its_parts_and_ends_with_one_json_line():
    done = subprocess.run([sys.executable, SCRIPT, "--quick"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["benchmark"] == "replay"
    assert set(report["lru"]["seconds"]) == {"json.loads", "reading", "lru", "command", "command_wall"}
    assert all(seconds > 0 for seconds in report["lru"]["seconds"].values())
    assert 0 < report["lru"]["different_blocks"] < report["lru"]["blocks"]
    assert (report["hour"]["requests"], report["hour"]["replicas"]) == (300, 8)
