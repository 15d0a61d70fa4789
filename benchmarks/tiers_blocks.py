"""The blocks that the benchmarks of tiers store and load."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from foreword.tiers.disk.files import RealFiles
from foreword.tiers.disk.state import DiskOptions
from foreword.tiers.tier import BlockKeys

NAMESPACE = b"benchmark tiers."
BLOCK_BYTES = 196_608
"""The bytes of a block of 16 tokens of the bench model."""
PREFIX_BLOCKS = 256
"""The blocks of a prefix of 4,096 tokens."""
FILES = RealFiles()


def random_keys(rng: np.random.Generator, count: int) -> BlockKeys:
    return BlockKeys(NAMESPACE, np.zeros(count, np.uint16), rng.integers(0, 256, (count, 32), np.uint8))


def options_for(num_bytes: int) -> DiskOptions:
    """Options of a tier that holds several copies of these bytes. At least two segments have to fit."""
    return DiskOptions(budget_bytes=max(1 << 30, 4 * num_bytes), min_free_bytes=0, segment_bytes=256 << 20)


def payloads(num_mb: int) -> tuple[BlockKeys, np.ndarray]:
    """Keys and random blocks of whole prefixes, about `num_mb` megabytes."""
    rng = np.random.default_rng(0)
    count = max(PREFIX_BLOCKS, num_mb * 10**6 // BLOCK_BYTES // PREFIX_BLOCKS * PREFIX_BLOCKS)
    return random_keys(rng, count), rng.integers(0, 256, (count, BLOCK_BYTES), np.uint8)


def drop_from_page_cache(paths: list[Path]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
