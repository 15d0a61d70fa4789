"""Cache directories to look at, made by the tier itself, and damage in them."""

from __future__ import annotations

import os
import time
from dataclasses import replace

from foreword.tiers.clock import Clock
from foreword.tiers.disk.files import RealFiles
from foreword.tiers.disk.segments import RunHeader, scan_runs
from tiers.block_world import (
    NAMESPACE,
    OPTIONS,
    keys_of,
    opened,
    store,
)

FILES = RealFiles()
DAY_S = 86400
SMALL = replace(OPTIONS, segment_bytes=20_000)
"""Segments that hold one run of two blocks."""
FACTS = {
    "model_name": "Qwen/Qwen2-0.5B",
    "block_size": 16,
    "exact": True,
    "foreword_version": "0.1",
    "arithmetic": {
        "path": {"device": "cpu", "attention": ["CpuAttention", "pairs"]},
        "libraries": {"torch": "2.12.0"},
        "processor": {"kind": "znver3"},
    },
}


def fill(path, number=0, *, namespace=NAMESPACE, age_s=0, count=1):
    """Write segments of two blocks each, `age_s` ago."""
    with opened(path, SMALL, clock=Clock(wall=lambda: time.time() - age_s)) as tier:
        tier.describe(namespace, FACTS if namespace == NAMESPACE else {**FACTS, "model_name": "other"})
        for first in range(2 * number, 2 * (number + count), 2):
            assert store(tier, keys_of([first, first + 1], namespace=namespace)).num_done == 2


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 0x20
    path.write_bytes(content)


def runs_of(path) -> list[RunHeader]:
    fd = FILES.open_for_reading(path)
    try:
        return list(scan_runs(FILES, fd, 0, path.stat().st_size, uncached=False))
    finally:
        os.close(fd)
