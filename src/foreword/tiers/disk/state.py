"""The state that the disk tier's threads share: options, files, clock, tables and counts."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

from foreword.errors import ConfigError
from foreword.tiers.cipher import Cipher
from foreword.tiers.clock import Clock
from foreword.tiers.disk.directory import CacheDirectory
from foreword.tiers.disk.files import RealFiles
from foreword.tiers.disk.segment_index import SegmentIndex
from foreword.tiers.tier import TierCounts

logger = logging.getLogger(__name__)

GB = 10**9
LARGEST_DEFAULT_BUDGET = 50 * GB
LARGEST_DEFAULT_FLOOR = 10 * GB
LARGEST_SEGMENT = 256 << 20
SMALLEST_BUDGET = 1 << 20


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """Options of a disk tier. The defaults suit most uses."""

    budget_bytes: int | None = None
    """Physical bytes that all processes together may occupy in the directory; None: the smaller of 50 GB and a quarter
    of the sum of the free space and the space that the cache uses."""
    min_free_bytes: int | None = None
    """Bytes that the tier leaves free in the file system; None: the smaller of 10 GB and a tenth of that system."""
    segment_bytes: int | None = None
    """Size at which a segment is sealed; None: a 32nd of the budget, at most 256 MiB."""
    key_file: Path | None = None
    """File with the secret of AES-256-GCM; None: payloads are not encrypted."""
    max_queued_load_bytes: int = 1 << 30
    max_queued_store_bytes: int = 256 << 20
    """The most payload bytes of waiting jobs: one limit for loads, one for stores. Beyond it, new jobs are dropped."""
    staging_bytes: int = 4 << 20
    """The number of bytes to read at once. There are two buffers of this size."""
    upkeep_s: float = 5.0
    """Seconds between two checks of budget and expiry."""
    rescan_s: float = 30.0
    """Seconds between two scans for segments that other processes have sealed or left behind."""
    snapshot_s: float = 60.0
    """The least seconds between two snapshots of the index."""

    def check(self) -> None:
        queues = ("max_queued_load_bytes", "max_queued_store_bytes")
        for name in ("budget_bytes", "segment_bytes", "staging_bytes", *queues):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{name}={value} is not positive; give a larger number, or leave it out")
        if self.min_free_bytes is not None and self.min_free_bytes < 0:
            raise ConfigError(f"min_free_bytes={self.min_free_bytes} is negative; give 0 or more")
        if self.budget_bytes is not None and self.budget_bytes < SMALLEST_BUDGET:
            raise ConfigError(
                f"budget_bytes={self.budget_bytes} is too small for a cache on disk; give at least {SMALLEST_BUDGET}"
            )
        if self.budget_bytes and self.segment_bytes and 2 * self.segment_bytes > self.budget_bytes:
            raise ConfigError(
                f"segment_bytes={self.segment_bytes} is more than half of budget_bytes={self.budget_bytes}, so nothing "
                "could be kept while a segment is written; give smaller segments"
            )

    def completed(self, total_bytes: int, free_bytes: int, used_bytes: int) -> DiskOptions:
        """These options with defaults instead of None, for a file system of which the cache uses `used_bytes`."""
        budget = self.budget_bytes
        if budget is None:
            budget = max(SMALLEST_BUDGET, min(LARGEST_DEFAULT_BUDGET, (free_bytes + used_bytes) // 4))
        floor = self.min_free_bytes
        if floor is None:
            floor = min(LARGEST_DEFAULT_FLOOR, total_bytes // 10)
        segment = self.segment_bytes or min(LARGEST_SEGMENT, budget // 32)
        return replace(self, budget_bytes=budget, min_free_bytes=floor, segment_bytes=segment)


@dataclass(slots=True)
class DiskState(TierCounts):
    """Parts that loads, stores, scans and eviction of one disk tier share."""

    options: DiskOptions
    """Completed: without None, apart from `key_file`."""
    files: RealFiles
    clock: Clock
    directory: CacheDirectory
    index: SegmentIndex
    cipher: Cipher
    leaves_cache: bool
    """Whether the kernel knows RWF_DONTCACHE, so that reads and writes leave the page cache alone."""
    closing: threading.Event = field(default_factory=threading.Event)
