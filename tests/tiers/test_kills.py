"""Real kills: a child that stores is killed at a random moment, and whoever comes next serves no wrong block."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from foreword.tiers.disk.state import DiskOptions
from tiers.block_world import keys_of, load, opened, store, until

TESTS = Path(__file__).parents[1]
CHILD = TESTS / "tiers" / "storing_child.py"
OPTIONS = DiskOptions(
    budget_bytes=2 << 20,
    min_free_bytes=0,
    segment_bytes=128 << 10,
    staging_bytes=64 << 10,
    rescan_s=0.05,
    upkeep_s=0.02,
)


def start_child(path: Path, first: int = 0) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    child = subprocess.Popen(
        [sys.executable, str(CHILD), str(path), str(first)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def kill(child: subprocess.Popen[str]) -> int:
    """Kill a child; returns the last number that it printed."""
    child.send_signal(signal.SIGKILL)
    assert child.stdout is not None
    lines = child.stdout.read().split()
    child.stdout.close()
    child.wait()
    return int(lines[-1]) if lines else 0


@pytest.mark.parametrize("num_kills", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_after_a_kill_while_storing_no_wrong_block_is_served(tmp_path, num_kills):
    rng = random.Random(num_kills)
    first, loaded = 0, 0
    for _ in range(num_kills):
        child = start_child(tmp_path, first)
        for _ in range(rng.randrange(1, 12)):
            first = int(child.stdout.readline())
        try:
            child.wait(rng.random() * 0.02)  # anywhere between two lines
        except subprocess.TimeoutExpired:
            first = max(first, kill(child))
        with opened(tmp_path, OPTIONS) as tier:
            report = load(tier, keys_of(range(4 * first + 8)))
            loaded += report.num_done
            assert report.by_reason().get("corrupt", 0) <= 4 * tier.stats().num_blocks
            tier.check_integrity()
    assert loaded > 10 * num_kills


def test_a_kill_costs_at_most_the_run_that_was_being_written(tmp_path):
    """The system lives on, so what the child's calls have written is in its page cache."""
    child = start_child(tmp_path)
    for _ in range(5):
        child.stdout.readline()
    stored = max(5, kill(child))
    with opened(tmp_path, OPTIONS) as tier:
        assert load(tier, keys_of(range(4 * stored))).num_done == 4 * stored


def test_two_processes_share_a_directory_and_one_is_killed(tmp_path):
    child = start_child(tmp_path, 1000)
    with opened(tmp_path, OPTIONS) as tier:
        for number in range(12):
            store(tier, keys_of(range(4 * number, 4 * number + 4)))
        while int(child.stdout.readline()) < 1016:
            pass
        child.send_signal(signal.SIGSTOP)  # it keeps its lock, and stores no more
        # What the child has sealed is found while it lives.
        theirs = keys_of(range(4000, 4064))
        until(lambda: tier.lookup(theirs).sum() > 8)
        assert load(tier, theirs.select(tier.lookup(theirs))).num_done > 0
        kill(child)
        # What it had not sealed is found when its segments are adopted.
        until(lambda: tier.lookup(theirs).all())
        assert load(tier, theirs).num_done == 64
        assert load(tier, keys_of(range(48))).num_done == 48
        until(lambda: len(list((tmp_path / "v1").glob("?" * 32))) == 1)  # the folder goes after its last segment
        tier.check_integrity()
    with opened(tmp_path, OPTIONS) as tier:
        assert load(tier, keys_of(range(48))).num_done == 48
        assert load(tier, theirs).num_done == 64


def test_two_processes_keep_to_one_budget(tmp_path):
    children = [start_child(tmp_path, first) for first in (0, 10_000)]
    for _ in range(60):
        for child in children:
            child.stdout.readline()
    for child in children:
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)  # a child that still runs removes files while they are measured
    used = sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*") if path.is_file())
    for child in children:
        kill(child)
    # Each may exceed what it knows by a run, and a segment is on its way out at each.
    assert used <= 2 * 1024 * 1024 + 4 * 128 * 1024
