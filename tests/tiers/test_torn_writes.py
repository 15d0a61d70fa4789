"""Crashes: what a loss of power or a kill leaves behind at any point is a miss or the right block, never a wrong one.

The crash layer (after SQLite's) records every change. A test then builds the disk as a crash would leave it: everything
up to a sync is there; of what was written later, each sector of 512 bytes is there, or zero, or garbage, or beyond the
end of the file.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from doors import state_of
from foreword.tiers.disk.state import DiskOptions
from foreword.tiers.ticket import Outcome
from lanes import slow
from tiers.block_world import OPTIONS, keys_of, load, opened, store, until
from tiers.faulty_files import Change, RecordingFiles

SECTOR = 512
Tear = Callable[[int, bytes], bytes]
"""What is left of a write that was not synced, from its number and data; shorter: the file ends there."""


def rebuild(changes: Iterable[Change], root: Path, new_root: Path, tear: Tear) -> None:
    """The directory after these changes and a crash, at another place."""
    listed = list(changes)
    synced = {
        (change.path, number)
        for number, change in enumerate(listed)
        if change.kind == "write"
        and any(later.kind == "sync" and later.path == change.path for later in listed[number:])
    }
    for number, change in enumerate(listed):
        path = new_root / change.path.relative_to(root)
        match change.kind:
            case "make_folder":
                path.mkdir(mode=0o700)
            case "create":
                path.touch(mode=0o600)
            case "write":
                data = change.data if (change.path, number) in synced else tear(number, change.data)
                with path.open("r+b") as file:
                    file.seek(change.offset)
                    file.write(data)
            case "truncate":
                with path.open("r+b") as file:
                    file.truncate(change.offset)
            case "rename":
                path.rename(new_root / change.target.relative_to(root))
            case "unlink":
                path.unlink()
            case "remove_folder":
                path.rmdir()


def history(path: Path, options: DiskOptions, num_runs: int) -> list[Change]:
    """The changes of a process that stores runs of four blocks and is then closed."""
    files = RecordingFiles()
    tier = opened(path, options, files=files)
    for number in range(num_runs):
        store(tier, keys_of(range(4 * number, 4 * number + 4)))
    tier.close(60)
    return files.changes


def check_after_crash(path: Path, num_runs: int) -> int:
    """Open what a crash left, load everything, store everything again. Returns the number of blocks that survived."""
    keys = keys_of(range(4 * num_runs))
    with opened(path) as tier:
        survived = load(tier, keys).num_done
        tier.check_integrity()
        assert {Outcome(value) for value in store(tier, keys).outcomes} <= {Outcome.DONE, Outcome.PRESENT}
        assert load(tier, keys).num_done == len(keys)
    return survived


@pytest.mark.parametrize("rest", ["garbage", *slow("nothing", "zeros")])
def test_a_run_torn_at_every_sector_costs_what_is_torn_and_no_more(tmp_path, rest):
    changes = history(tmp_path / "cache", OPTIONS, 3)
    writes = [number for number, change in enumerate(changes) if change.path.suffix == ".fwseg" and change.data]
    last = writes[-1]
    length = len(changes[last].data)
    rng = random.Random(0)
    survivors = []
    for sectors in range(length // SECTOR + 1):
        kept = sectors * SECTOR

        def tear(number: int, data: bytes, kept: int = kept) -> bytes:
            if number != last:
                return data
            filler = {"nothing": b"", "zeros": bytes(length - kept), "garbage": rng.randbytes(length - kept)}[rest]
            return data[:kept] + filler

        torn = tmp_path / f"{rest}{sectors}"
        rebuild(changes[: last + 1], tmp_path / "cache", torn, tear)
        survivors.append(check_after_crash(torn, 3))
    assert survivors[-1] == 12
    assert min(survivors) == 8
    assert survivors == sorted(survivors)
    assert set(survivors) >= {8, 9, 10, 11, 12}  # blocks before the tear are found


@pytest.mark.parametrize("seed", [0, pytest.param(range(1, 12), marks=pytest.mark.slow)])
def test_a_crash_after_every_change_with_any_sectors_lost_serves_no_wrong_block(tmp_path, seed):
    options = DiskOptions(
        budget_bytes=1 << 20, min_free_bytes=0, segment_bytes=40 << 10, staging_bytes=64 << 10, rescan_s=60
    )
    changes = history(tmp_path / "cache", options, 8)
    kinds = {change.kind for change in changes}
    assert kinds >= {"create", "write", "sync", "rename"}
    whole = 0
    for one_seed in [seed] if isinstance(seed, int) else seed:
        rng = random.Random(one_seed)

        def tear(number: int, data: bytes, rng: random.Random = rng) -> bytes:
            fates = rng.choices(["kept", "zero", "garbage"], [6, 1, 1], k=len(data) // SECTOR + 1)
            parts = []
            for at, fate in enumerate(fates):
                sector = data[at * SECTOR : (at + 1) * SECTOR]
                parts.append({"kept": sector, "zero": bytes(len(sector)), "garbage": rng.randbytes(len(sector))}[fate])
            torn = b"".join(parts)
            return torn[: rng.randrange(len(torn) + 1)] if rng.random() < 0.3 else torn

        for count in range(1, len(changes) + 1):
            torn = tmp_path / f"after{one_seed}-{count}"
            rebuild(changes[:count], tmp_path / "cache", torn, tear)
            whole += check_after_crash(torn, 8)
    assert whole > 0


def test_a_crash_in_the_middle_of_eviction_and_adoption_serves_no_wrong_block(tmp_path):
    root = tmp_path / "cache"
    small = DiskOptions(
        budget_bytes=1 << 20, min_free_bytes=0, segment_bytes=128 << 10, staging_bytes=64 << 10, rescan_s=0.05
    )
    files = RecordingFiles()
    dying, living = opened(root, small, files=files), opened(root, small, files=files)
    for number in range(30):
        store(dying, keys_of(range(4 * number, 4 * number + 4)))
    dying.close(60)
    until(lambda: not state_of(living).directory.other_homes())
    for number in range(30, 60):
        store(living, keys_of(range(4 * number, 4 * number + 4)))
    living.close(60)
    kinds = [change.kind for change in files.changes]
    assert kinds.count("unlink") >= 3
    assert "remove_folder" in kinds
    interesting = [n for n, kind in enumerate(kinds) if kind in ("rename", "unlink", "remove_folder", "truncate")]
    for count in interesting[:: max(1, len(interesting) // 40)]:
        torn = tmp_path / f"after{count}"
        rebuild(files.changes[: count + 1], root, torn, lambda number, data: data)
        with opened(torn) as tier:
            load(tier, keys_of(range(240)))
            tier.check_integrity()
