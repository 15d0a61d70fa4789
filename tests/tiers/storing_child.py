"""A process that stores blocks until somebody kills it. Prints the number of runs that are stored, after each."""

from __future__ import annotations

import sys
from pathlib import Path

from foreword.tiers.disk.state import DiskOptions
from tiers.block_world import keys_of, load, opened, store

if __name__ == "__main__":
    path, first, encrypts = Path(sys.argv[1]), int(sys.argv[2]), len(sys.argv) > 3
    options = DiskOptions(
        budget_bytes=2 << 20,
        min_free_bytes=0,
        segment_bytes=128 << 10,
        staging_bytes=64 << 10,
        upkeep_s=0.02,
        rescan_s=0.05,
        snapshot_s=0.05,
        key_file=Path(sys.argv[3]) if encrypts else None,
    )
    tier = opened(path, options)
    print("ready", flush=True)
    number = first
    while True:
        store(tier, keys_of(range(4 * number, 4 * number + 4)))
        if number % 5 == 4:
            load(tier, keys_of(range(max(0, 4 * number - 40), 4 * number)))
        number += 1
        print(number, flush=True)
