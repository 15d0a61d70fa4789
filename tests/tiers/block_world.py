"""Blocks with names and payloads that anybody can compute again, and what tests do with a tier."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from foreword.tiers.disk.disk_tier import DiskTier
from foreword.tiers.disk.state import DiskOptions
from foreword.tiers.ticket import Outcome, Report
from foreword.tiers.tier import BlockKeys, BlockRun, Buffers, Tier

NAMESPACE = b"model and maths."
OTHER_NAMESPACE = b"another model..."
BLOCK_BYTES = 6000
"""No whole number of pages, so padding is tested too."""
OPTIONS = DiskOptions(
    budget_bytes=64 << 20, min_free_bytes=0, segment_bytes=256 << 10, staging_bytes=64 << 10, rescan_s=60.0
)
WAIT_S = 30.0
"""Longer than anything here takes on a busy machine; only a hang reaches it."""


def key_of(number: int) -> bytes:
    return hashlib.sha256(b"block %d" % number).digest()


def keys_of(numbers: Iterable[int], *, group_id: int = 0, namespace: bytes = NAMESPACE) -> BlockKeys:
    return BlockKeys.of_group(namespace, group_id, [key_of(number) for number in numbers])


def payloads_of(keys: BlockKeys, num_bytes: int = BLOCK_BYTES) -> npt.NDArray[np.uint8]:
    """[blocks, bytes]; what every block with such a name holds, in every process."""
    rows = []
    for group_id, key in zip(keys.group_ids.tolist(), keys.keys, strict=True):
        seed = hashlib.sha256(keys.namespace + bytes([group_id & 255]) + key.tobytes()).digest()
        rows.append(np.random.default_rng(np.frombuffer(seed, np.uint32)).integers(0, 256, num_bytes, np.uint8))
    return np.array(rows, np.uint8).reshape(len(keys), num_bytes)


def run_of(keys: BlockKeys, num_bytes: int = BLOCK_BYTES, *, flags: int = 1, ttl_s: float | None = None) -> BlockRun:
    buffers = Buffers([row.data for row in payloads_of(keys, num_bytes)])
    return BlockRun.chain(keys, num_bytes, buffers, flags=flags, ttl_s=ttl_s)


def store(tier: Tier, keys: BlockKeys, num_bytes: int = BLOCK_BYTES) -> Report:
    """Store blocks and wait until they are stored or dropped."""
    ticket = tier.store(run_of(keys, num_bytes))
    assert ticket.wait(WAIT_S), "a store hangs"
    return ticket.report


def probe(tier: Tier, keys: BlockKeys) -> Report:
    """Wait for what the tier has."""
    ticket = tier.probe(keys, deadline_s=WAIT_S)
    assert ticket.wait(WAIT_S), "a probe hangs"
    return ticket.report


def load(tier: Tier, keys: BlockKeys, num_bytes: int = BLOCK_BYTES, *, num_moves: int = 0) -> Report:
    """Load blocks, and check that every block that is DONE is what was stored, and no other memory has changed.

    `num_moves`: how often eviction may copy a block forward while its old place is read. Only a block that was copied
    so may be found after it failed.
    """
    out = np.full((len(keys), num_bytes), 0xA5, np.uint8)
    sink = Buffers([row.data for row in out])
    ticket = tier.load(keys, np.full(len(keys), num_bytes), sink, deadline_s=WAIT_S)
    assert ticket.wait(WAIT_S), "a load hangs"
    done = ticket.report.outcomes == Outcome.DONE
    assert np.array_equal(out[done], payloads_of(keys, num_bytes)[done]), "a wrong block was served"
    assert (out[~done] == 0xA5).all(), "a block that failed was written to the caller's memory"
    failed = np.isin(ticket.report.outcomes, [Outcome.MISSING, Outcome.CORRUPT, Outcome.IO_ERROR, Outcome.TIMEOUT])
    found = tier.lookup(keys.select(failed))
    if num_moves and found.any():
        load(tier, keys.select(failed).select(found), num_bytes, num_moves=num_moves - 1)
    else:
        assert not found.any(), "a block that failed is still found"
    return ticket.report


def opened(path: Path, options: DiskOptions = OPTIONS, **parts: object) -> DiskTier:
    """A tier that has seen everything in its directory."""
    tier = DiskTier(path, options, **parts)  # type: ignore[arg-type]
    assert tier.wait_scanned(WAIT_S), "a scan hangs"
    return tier


def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; fail if it never does."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "what the test waits for does not come"
        time.sleep(0.005)


def open_files() -> set[tuple[str, str]]:
    """The descriptors of this process, each with its target. Garbage of earlier tests may close some at any time."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, as the one that lists them
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found


def segment_files(path: Path) -> list[Path]:
    return sorted(path.glob("v1/*/*.fwseg"))
