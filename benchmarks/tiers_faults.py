"""Faults that the disk tier must survive: flipped bits, and processes that are killed while they store."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from foreword.tiers.cipher import NO_CIPHER_ID
from foreword.tiers.clock import Clock
from foreword.tiers.disk.disk_tier import DiskTier
from foreword.tiers.disk.segment_index import read_snapshot
from foreword.tiers.disk.segments import PAGE, Damage, scan_runs
from foreword.tiers.disk.state import DiskOptions
from foreword.tiers.ticket import Outcome
from foreword.tiers.tier import BlockKeys, BlockRun, Buffers
from tiers_blocks import FILES, random_keys


def flips(folder: Path, num_flips: int) -> dict[str, int]:
    """Flips random bits of payloads and loads these, then of headers and snapshots, and scans and reads these."""
    rng, py_rng = np.random.default_rng(2), random.Random(2)
    count, size = 64, 8000
    keys, rows = random_keys(rng, count), rng.integers(0, 256, (count, size), np.uint8)
    buffers = Buffers([row.data for row in rows])
    out = np.zeros_like(rows)
    sink = Buffers([row.data for row in out])
    lengths = np.full(count, size)
    tried = caught = wrong = 0
    with DiskTier(folder, DiskOptions(budget_bytes=256 << 20, min_free_bytes=0)) as tier:
        assert tier.wait_scanned()
        assert tier.store(BlockRun.chain(keys, size, buffers)).wait()
        (path,) = folder.glob("v1/*/*.fwseg")
        content = path.read_bytes()
        places = tier._state.index.locate(keys, tier._state.clock.now_s())
        (segment,) = tier._state.index.own_segments()
        while tried < num_flips * 9 // 10:
            # Flips one bit of every block, then loads all blocks. All must be refused.
            damaged = bytearray(content)
            for page in places["page"].tolist():
                damaged[page * PAGE + py_rng.randrange(2 * PAGE)] ^= 1 << py_rng.randrange(8)
            path.write_bytes(damaged)
            out[:] = 0
            ticket = tier.load(keys, lengths, sink, deadline_s=60)
            assert ticket.wait()
            tried += count
            caught += int((ticket.report.outcomes == Outcome.CORRUPT).sum())
            wrong += int(out.any(axis=1).sum())
            path.write_bytes(content)
            segment.num_bytes = 0
            tier._scanner._scan(segment)
    snapshot = next(folder.glob("v1/*/index"))
    headers, index = content[:PAGE], snapshot.read_bytes()
    scratch, clock = folder / "scratch", Clock()
    while tried < num_flips:
        is_header = tried % 2 == 0
        damaged = bytearray(headers if is_header else index)
        damaged[py_rng.randrange(len(damaged))] ^= 1 << py_rng.randrange(8)
        scratch.write_bytes(damaged)
        if is_header:
            fd = FILES.open_for_reading(scratch)
            (found,) = scan_runs(FILES, fd, 0, PAGE, uncached=False)
            FILES.close(fd)
            caught += isinstance(found, Damage)
        else:
            caught += read_snapshot(FILES, scratch, clock, NO_CIPHER_ID) is None
        tried += 1
    shutil.rmtree(folder)
    return {"flips_tried": tried, "flips_caught": caught, "wrong_after_flips": wrong}


CHILD = """
import sys
sys.path[:0] = sys.argv[3:]
from tiers_faults import store_forever
store_forever(sys.argv[1], int(sys.argv[2]))
"""
KILL_OPTIONS = DiskOptions(budget_bytes=64 << 20, min_free_bytes=0, snapshot_s=0.05, upkeep_s=0.02)
KILL_BYTES = 20_000
RUN_BLOCKS = 8


def numbered(first: int) -> tuple[BlockKeys, np.ndarray]:
    """Names and payloads of a run, drawn from the seed `first`, so that every process gets the same."""
    rng = np.random.default_rng(first)
    return random_keys(rng, RUN_BLOCKS), rng.integers(0, 256, (RUN_BLOCKS, KILL_BYTES), np.uint8)


def store_forever(path: str, first: int) -> None:
    tier = DiskTier(path, KILL_OPTIONS)
    while True:
        keys, rows = numbered(first)
        tier.store(BlockRun.chain(keys, KILL_BYTES, Buffers([row.data for row in rows]))).wait()
        first += 1
        print(first, flush=True)


def kills(folder: Path, num_kills: int) -> dict[str, int]:
    rng, first, wrong, loaded = random.Random(3), 0, 0, 0
    search = [str(Path(__file__).parent), *sys.path]
    for _ in range(num_kills):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(folder), str(first), *search], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        for _ in range(rng.randrange(1, 30)):
            child.stdout.readline()
        time.sleep(rng.random() * 0.02)
        child.send_signal(signal.SIGKILL)
        lines = child.stdout.read().split()
        first = max(first + 30, int(lines[-1]) if lines else 0)
        child.wait()
        child.stdout.close()
        with DiskTier(folder, KILL_OPTIONS) as tier:
            assert tier.wait_scanned()
            for number in range(max(0, first - 90), first + 30):
                keys, rows = numbered(number)
                out = np.zeros_like(rows)
                sink = Buffers([row.data for row in out])
                ticket = tier.load(keys, np.full(RUN_BLOCKS, KILL_BYTES), sink, deadline_s=60)
                assert ticket.wait()
                done = ticket.report.outcomes == Outcome.DONE
                loaded += int(done.sum())
                wrong += int((out[done] != rows[done]).any(axis=1).sum()) + int(out[~done].any(axis=1).sum())
    shutil.rmtree(folder)
    return {"kills": num_kills, "blocks_after_kills": loaded, "wrong_after_kills": wrong}
