"""The disk tier: restarts, expiry, budget, floor, what eviction keeps, and what is refused at the start."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from doors import state_of
from foreword.errors import ConfigError
from foreword.tiers.clock import Clock
from foreword.tiers.disk.disk_tier import DiskTier
from foreword.tiers.disk.files import RealFiles, Space
from foreword.tiers.disk.state import DiskOptions
from foreword.tiers.tier import EXACT, PINNED, BlockRun, Buffers
from tiers.block_world import (
    BLOCK_BYTES,
    OPTIONS,
    OTHER_NAMESPACE,
    WAIT_S,
    keys_of,
    load,
    open_files,
    opened,
    run_of,
    segment_files,
    store,
    until,
)
from tiers.faulty_files import StuckSource

SMALL = replace(OPTIONS, budget_bytes=1 << 20, segment_bytes=64 << 10, upkeep_s=600.0)
"""Room for 25 runs of four blocks, one run a segment."""
YEAR_S = 365 * 24 * 3600


def physical(path: Path) -> int:
    """Bytes of the files below a cache directory. A file that a tier removes meanwhile does not count."""
    num_bytes = 0
    for found in path.glob("v1/*/*"):
        with contextlib.suppress(FileNotFoundError):
            status = found.lstat()
            num_bytes += status.st_blocks * 512 if stat.S_ISREG(status.st_mode) else 0
    return num_bytes


class Reads(RealFiles):
    """Counts the bytes that are read."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def read(self, fd: int, out: memoryview, offset: int, *, uncached: bool) -> int:
        count = super().read(fd, out, offset, uncached=uncached)
        self.num_bytes += count
        return count


def test_a_restart_finds_everything_from_the_snapshot_without_reading_a_segment(tmp_path):
    with opened(tmp_path) as tier:
        store(tier, keys_of(range(200)))
    files = Reads()
    with opened(tmp_path, files=files) as tier:
        assert tier.lookup(keys_of(range(200))).all()
        (index,) = tmp_path.glob("v1/*/index")
        assert files.num_bytes <= index.stat().st_size + 4096  # and the probe
        assert load(tier, keys_of(range(200))).num_done == 200


@pytest.mark.parametrize("snapshot", ["gone", "old", "garbage", "of nothing"])
def test_a_restart_finds_everything_whatever_became_of_the_snapshot(tmp_path, snapshot):
    with opened(tmp_path) as tier:
        store(tier, keys_of(range(100)))
    (index,) = tmp_path.glob("v1/*/index")
    old = index.read_bytes()
    with opened(tmp_path) as tier:
        store(tier, keys_of(range(100, 200)))
    if snapshot == "gone":
        index.unlink()
    else:
        index.write_bytes({"old": old, "garbage": os.urandom(5000), "of nothing": b""}[snapshot])
    with opened(tmp_path) as tier:
        assert load(tier, keys_of(range(200))).num_done == 200
        assert store(tier, keys_of(range(200))).by_reason() == {"present": 200}


def test_what_a_snapshot_says_of_segments_that_are_gone_or_shorter_is_not_believed(tmp_path):
    with opened(tmp_path, SMALL) as tier:
        for number in range(5):
            store(tier, keys_of(range(4 * number, 4 * number + 4)))
    paths = segment_files(tmp_path)
    paths[0].unlink()
    os.truncate(paths[1], 4096 + 8192)
    with opened(tmp_path, SMALL) as tier:
        assert tier.lookup(keys_of(range(20))).tolist() == [False] * 4 + [True] + [False] * 3 + [True] * 12
        assert load(tier, keys_of(range(20))).num_done == 13


def test_serving_begins_before_the_scan_has_ended(tmp_path):
    with opened(tmp_path) as tier:
        store(tier, keys_of(range(10)))
    (index,) = tmp_path.glob("v1/*/index")
    index.unlink()
    go_on = threading.Event()

    class SlowScan(RealFiles):
        def open_for_reading(self, path: Path) -> int:
            if threading.current_thread().name == "foreword-tier-scan":
                assert go_on.wait(WAIT_S)
            return super().open_for_reading(path)

    with DiskTier(tmp_path, OPTIONS, files=SlowScan()) as tier:
        assert not tier.stats().is_scanned
        assert not tier.lookup(keys_of(range(10))).any()
        assert store(tier, keys_of(range(20, 25))).num_done == 5
        assert load(tier, keys_of(range(20, 25))).num_done == 5
        go_on.set()
        assert tier.wait_scanned(WAIT_S)
        assert load(tier, keys_of([*range(10), *range(20, 25)])).num_done == 15
        tier.check_integrity()


def test_blocks_of_a_prefix_lie_together_and_come_in_one_read(tmp_path):
    class Calls(RealFiles):
        num_reads = 0

        def read(self, fd: int, out: memoryview, offset: int, *, uncached: bool) -> int:
            self.num_reads += 1
            return super().read(fd, out, offset, uncached=uncached)

    with opened(tmp_path, replace(OPTIONS, staging_bytes=4 << 20, segment_bytes=1 << 20)) as tier:
        store(tier, keys_of(range(30)))
        store(tier, keys_of(range(30, 60)))
    files = Calls()
    with opened(tmp_path, replace(OPTIONS, staging_bytes=4 << 20), files=files) as tier:
        before = files.num_reads
        assert load(tier, keys_of(range(60))).num_done == 60
        assert files.num_reads == before + 1


def test_blocks_longer_than_the_staging_buffers_and_than_a_run_are_stored_and_loaded(tmp_path):
    options = replace(OPTIONS, segment_bytes=12 << 20)
    with opened(tmp_path, options) as tier:
        assert store(tier, keys_of(range(3)), 9_000_001).num_done == 3
        assert load(tier, keys_of(range(3)), 9_000_001).num_done == 3
        assert store(tier, keys_of(range(10, 15)), 3_000_001).num_done == 5
        assert load(tier, keys_of([14, 10, 11, 12, 13]), 3_000_001).num_done == 5


def test_blocks_expire_in_the_process_and_after_a_restart(tmp_path):
    times = {"wall": 1e9, "monotonic": 0.0}
    with opened(tmp_path, clock=Clock(lambda: times["wall"], lambda: times["monotonic"])) as tier:
        assert tier.store(run_of(keys_of(range(3)), ttl_s=100)).wait(WAIT_S)
        store(tier, keys_of(range(3, 6)))
        for jump_s in (-10 * YEAR_S, 0, 10 * YEAR_S):  # a clock that jumps changes nothing while the process lives
            times["wall"] = 1e9 + jump_s
            assert load(tier, keys_of(range(6))).num_done == 6
        times["monotonic"] = 99.0
        assert tier.lookup(keys_of(range(6))).all()
        times["monotonic"] = 100.0
        assert tier.lookup(keys_of(range(6))).tolist() == [False] * 3 + [True] * 3
        assert load(tier, keys_of(range(6))).by_reason() == {"missing": 3, "done": 3}
        assert store(tier, keys_of(range(3))).num_done == 3  # they may be stored again


@pytest.mark.parametrize("has_snapshot", [True, False])
@pytest.mark.parametrize(("jump_s", "is_found"), [(-10 * YEAR_S, True), (50, True), (101, False), (10 * YEAR_S, False)])
def test_after_a_restart_a_clock_that_has_jumped_ends_lives_early_or_not_at_all(
    tmp_path, jump_s, is_found, has_snapshot
):
    with opened(tmp_path, clock=Clock(wall=lambda: 1e9)) as tier:
        assert tier.store(run_of(keys_of(range(3)), ttl_s=100)).wait(WAIT_S)
        store(tier, keys_of(range(3, 6)))
    if not has_snapshot:
        for index in tmp_path.glob("v1/*/index"):
            index.unlink()
    times = {"monotonic": 0.0}
    with opened(tmp_path, clock=Clock(lambda: 1e9 + jump_s, lambda: times["monotonic"])) as tier:
        assert tier.lookup(keys_of(range(6))).tolist() == [is_found] * 3 + [True] * 3
        assert load(tier, keys_of(range(3, 6))).num_done == 3
        times["monotonic"] = 101.0
        assert not tier.lookup(keys_of(range(3))).any()


def test_the_budget_counts_physical_bytes_and_is_never_exceeded(tmp_path):
    with opened(tmp_path, SMALL) as tier:
        for number in range(80):
            assert store(tier, keys_of(range(4 * number, 4 * number + 4))).num_done == 4
            assert physical(tmp_path) <= 1 << 20
        stats = tier.stats()
        assert stats.num_evicted > 150
        assert stats.stored_bytes == physical(tmp_path)
        assert stats.num_blocks == 320 - stats.num_evicted >= 60
        assert load(tier, keys_of(range(316, 320))).num_done == 4
        tier.check_integrity()


def test_a_run_that_would_not_fit_into_the_budget_is_dropped(tmp_path):
    with opened(tmp_path, SMALL) as tier:
        assert store(tier, keys_of(range(2)), 1 << 20).by_reason() == {"no_room": 2}
        assert tier.stats().not_stored == {"no_room": 2}


class Nearly(RealFiles):
    """A file system with a given number of free bytes, less what is stored."""

    def __init__(self, path: Path, free_bytes: int) -> None:
        self.path, self.free_bytes = path, free_bytes

    def space(self, path: Path) -> Space:
        return Space(1 << 40, self.free_bytes - physical(self.path), False)


def test_a_floor_of_free_space_stays_free(tmp_path, caplog):
    options = replace(SMALL, min_free_bytes=1 << 20)
    with opened(tmp_path, options, files=Nearly(tmp_path, (1 << 20) + 400_000)) as tier:
        for number in range(30):
            store(tier, keys_of(range(4 * number, 4 * number + 4)))
            assert physical(tmp_path) <= 400_000
        assert tier.stats().num_evicted > 40
        assert load(tier, keys_of(range(116, 120))).num_done == 4
    with opened(tmp_path / "full", options, files=Nearly(tmp_path / "full", 1000)) as tier:
        assert "drops blocks" not in caplog.text
        assert store(tier, keys_of(range(4))).by_reason() == {"no_room": 4}
    assert "its disk has 1000 bytes free, and it leaves 1 MiB free; make room on the disk" in caplog.text


def test_the_default_budget_is_a_quarter_of_what_is_free_and_at_most_50_gb():
    gb = 10**9
    done = DiskOptions().completed(1000 * gb, 100 * gb, 0)
    assert (done.budget_bytes, done.min_free_bytes, done.segment_bytes) == (25 * gb, 10 * gb, 256 << 20)
    assert DiskOptions().completed(1000 * gb, 80 * gb, 20 * gb).budget_bytes == 25 * gb  # our own use is no loss
    assert DiskOptions().completed(9000 * gb, 900 * gb, 0).budget_bytes == 50 * gb
    assert DiskOptions().completed(40 * gb, 4 * gb, 0).min_free_bytes == 4 * gb


def test_what_is_loaded_again_and_again_outlives_what_is_not(tmp_path):
    with opened(tmp_path, SMALL) as tier:
        for number in range(80):
            store(tier, keys_of(range(4 * number, 4 * number + 4)))
            load(tier, keys_of(range(4)))  # one hot prefix
        assert tier.lookup(keys_of(range(4))).all()
        assert not tier.lookup(keys_of(range(8, 40))).any()


BETTER = replace(SMALL, segment_bytes=256 << 10, budget_bytes=2 << 20)
"""Seven segments of seven runs of four blocks each."""


def store_with_hot_heads(tier: DiskTier, numbers: range) -> None:
    """Store runs; the head of every seventh run, so one in a segment, is loaded three times."""
    for number in numbers:
        store(tier, keys_of(range(4 * number, 4 * number + 4)))
        for _ in range(3 if number % 7 == 0 else 0):
            load(tier, keys_of([4 * number]))


def test_the_best_blocks_of_an_evicted_segment_are_copied_forward(tmp_path):
    with opened(tmp_path, BETTER) as tier:
        store_with_hot_heads(tier, range(84))
        assert tier.stats().num_copied_forward >= 4
        found = tier.lookup(keys_of(range(336)))
        heads = np.arange(336) % 28 == 0
        assert found[heads].all()
        assert found[~heads].sum() < 220
        assert load(tier, keys_of(np.flatnonzero(heads).tolist())).num_done == 12
        tier.check_integrity()
    for index in tmp_path.glob("v1/*/index"):
        index.unlink()
    with opened(tmp_path, BETTER) as tier:  # the copies have headers of their own
        assert load(tier, keys_of(np.flatnonzero(heads).tolist())).num_done == 12


def test_a_damaged_block_is_not_copied_forward(tmp_path):
    with opened(tmp_path, BETTER) as tier:
        store_with_hot_heads(tier, range(14))
        path = segment_files(tmp_path)[0]
        content = bytearray(path.read_bytes())
        content[5000] ^= 1  # block 0
        path.write_bytes(content)
        store_with_hot_heads(tier, range(14, 140))
        assert not path.exists()
        assert tier.lookup(keys_of([0, 28])).tolist() == [False, True]
        assert load(tier, keys_of([28])).num_done == 1


def test_pinned_blocks_stay_while_anything_else_can_go(tmp_path):
    with opened(tmp_path, SMALL) as tier:
        assert tier.store(run_of(keys_of(range(4)), flags=EXACT | PINNED)).wait(WAIT_S)
        for number in range(1, 80):
            store(tier, keys_of(range(4 * number, 4 * number + 4)))
        assert load(tier, keys_of(range(4))).num_done == 4


def test_a_tier_full_of_pins_drops_what_comes(tmp_path):
    with opened(tmp_path, SMALL) as tier:
        outcomes = []
        for number in range(40):
            ticket = tier.store(run_of(keys_of(range(4 * number, 4 * number + 4)), flags=PINNED))
            assert ticket.wait(WAIT_S)
            outcomes.append(ticket.report.by_reason())
        assert outcomes[0] == {"done": 4}
        assert outcomes[-1] == {"no_room": 4}
        assert load(tier, keys_of(range(4))).num_done == 4


def test_a_load_that_has_begun_ends_well_though_its_segment_is_evicted(tmp_path):
    class EvictsBetween(RealFiles):
        def open_for_reading(self, path: Path) -> int:
            fd = super().open_for_reading(path)
            if threading.current_thread().name == "foreword-tier-load":
                path.unlink()
            return fd

    with opened(tmp_path, files=EvictsBetween()) as tier:
        store(tier, keys_of(range(5)))
        assert load(tier, keys_of(range(5))).num_done == 5
        assert load(tier, keys_of(range(5))).by_reason() == {"missing": 5}


def test_a_load_that_comes_after_eviction_leaves_the_blocks_that_were_copied_forward(tmp_path):
    class Waits(RealFiles):
        reached, go_on = threading.Event(), threading.Event()

        def open_for_reading(self, path: Path) -> int:
            if threading.current_thread().name == "foreword-tier-load":
                self.reached.set()
                assert self.go_on.wait(WAIT_S)
            return super().open_for_reading(path)

    files, keys = Waits(), keys_of(range(4))
    with opened(tmp_path, BETTER, files=files) as tier:
        assert tier.store(run_of(keys, flags=EXACT | PINNED)).wait(WAIT_S)
        [path] = segment_files(tmp_path)
        ticket = tier.load(keys, np.full(4, BLOCK_BYTES), Buffers([bytearray(BLOCK_BYTES)] * 4), deadline_s=WAIT_S)
        assert files.reached.wait(WAIT_S)
        for number in range(1, 100):
            store(tier, keys_of(range(4 * number, 4 * number + 4)))
        assert not path.exists()
        files.go_on.set()
        assert ticket.wait(WAIT_S)
        assert ticket.report.by_reason() == {"missing": 4}
        assert load(tier, keys).num_done == 4
        tier.check_integrity()


def test_a_segment_that_is_evicted_while_it_is_scanned_leaves_no_blocks(tmp_path):
    class EvictsBetween(RealFiles):
        def open_for_reading(self, path: Path) -> int:
            fd = super().open_for_reading(path)
            if path.suffix == ".fwseg":
                path.unlink()
            return fd

    with opened(tmp_path) as tier:
        store(tier, keys_of(range(5)))
    for index in tmp_path.glob("v1/*/index"):
        index.unlink()
    with opened(tmp_path, files=EvictsBetween()) as tier:
        assert not tier.lookup(keys_of(range(5))).any()
        tier.check_integrity()


def test_a_process_that_is_alone_gives_way_to_one_that_comes(tmp_path):
    options = replace(SMALL, upkeep_s=0.01, rescan_s=0.05)
    with opened(tmp_path, options) as first:
        for number in range(40):
            store(first, keys_of(range(4 * number, 4 * number + 4)))
        alone = first.stats().stored_bytes
        assert alone > 800_000
        with opened(tmp_path, options) as second:
            stored = 0

            def second_stores() -> bool:
                nonlocal stored
                number = 100 + stored
                stored += store(second, keys_of(range(4 * number, 4 * number + 4))).num_done // 4
                return stored >= 10

            until(second_stores)
            assert first.stats().stored_bytes < alone
            assert physical(tmp_path) <= (1 << 20) + 2 * (64 << 10)


def test_a_close_stores_what_is_queued(tmp_path):
    with opened(tmp_path) as tier:
        tickets = [tier.store(run_of(keys_of(range(4 * n, 4 * n + 4)))) for n in range(50)]
    assert all(ticket.done and ticket.report.num_done == 4 for ticket in tickets)
    with opened(tmp_path) as tier:
        assert tier.lookup(keys_of(range(200))).all()


def test_a_close_without_time_cancels_what_is_queued(tmp_path):
    tier, source = opened(tmp_path), StuckSource()
    first = tier.store(BlockRun.chain(keys_of([0]), BLOCK_BYTES, source))
    assert source.reached.wait(WAIT_S)
    tickets = [tier.store(run_of(keys_of([n]))) for n in range(1, 9)]
    closing = threading.Thread(target=tier.close, args=(0.0,))
    closing.start()
    until(state_of(tier).closing.is_set)
    source.go_on.set()
    closing.join(WAIT_S)
    assert first.report.num_done == 1
    assert all(ticket.report.by_reason() == {"cancelled": 1} for ticket in tickets)


def test_names_of_files_hold_no_keys(tmp_path):
    with opened(tmp_path) as tier:
        store(tier, keys_of(range(5)))
    names = " ".join(str(path) for path in tmp_path.rglob("*"))
    for key in keys_of(range(5)).keys:
        assert key.tobytes()[:4].hex() not in names
    assert OTHER_NAMESPACE.hex() not in names


def test_a_kernel_without_dontcache_is_served_too(tmp_path):
    class OldKernel(RealFiles):
        def read(self, fd: int, out: memoryview, offset: int, *, uncached: bool) -> int:
            if uncached:
                raise OSError(95, os.strerror(95))
            return super().read(fd, out, offset, uncached=False)

    with opened(tmp_path, files=OldKernel()) as tier:
        store(tier, keys_of(range(5)))
        assert load(tier, keys_of(range(5))).num_done == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget_bytes": 0}, "budget_bytes=0 is not positive"),
        ({"budget_bytes": 1000}, "budget_bytes=1000 is too small.*at least 1048576"),
        ({"segment_bytes": -1}, "segment_bytes=-1 is not positive"),
        ({"budget_bytes": 1 << 20, "segment_bytes": 1 << 20}, "more than half of budget_bytes.*smaller segments"),
        ({"min_free_bytes": -1}, "min_free_bytes=-1 is negative; give 0 or more"),
    ],
)
def test_options_out_of_range_are_refused_with_the_remedy(tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        DiskTier(tmp_path / "cache", DiskOptions(**options))
    assert not (tmp_path / "cache").exists()


def test_threads_end_with_the_tier(tmp_path):
    before = {*threading.enumerate()}  # some of which, of earlier tests, may end meanwhile
    with opened(tmp_path):
        own = {*threading.enumerate()} - before
        assert len(own) == 4
    assert not any(thread.is_alive() for thread in own)


def test_a_tier_leaves_no_descriptor_open(tmp_path):
    before = open_files()
    with opened(tmp_path, SMALL) as tier:
        for number in range(40):
            store(tier, keys_of(range(4 * number, 4 * number + 4)))
            load(tier, keys_of(range(0, 4 * number, 2)))
    assert open_files() <= before


def test_a_load_into_the_memory_of_the_caller_comes_in_order(tmp_path):
    seen: list[int] = []

    class Order:
        def put(self, index: int, payload: memoryview) -> None:
            seen.append(index)

    with opened(tmp_path) as tier:
        store(tier, keys_of(range(50)))
        ticket = tier.load(keys_of(range(50)), np.full(50, BLOCK_BYTES), Order(), deadline_s=WAIT_S)
        assert ticket.wait(WAIT_S)
    assert seen == list(range(50))


def test_a_segment_that_cannot_be_scanned_is_in_the_log_once(tmp_path, caplog):
    class Unreadable(RealFiles):
        num_tries = 0

        def stat(self, path: Path) -> os.stat_result:
            if threading.current_thread().name == "foreword-tier-scan" and path.suffix == ".fwseg":
                self.num_tries += 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().stat(path)

    options = replace(OPTIONS, rescan_s=0.01)
    with DiskTier(tmp_path / "cache", options) as tier:
        store(tier, keys_of(range(3)))
    files = Unreadable()
    with DiskTier(tmp_path / "cache", options, files=files) as tier:
        until(lambda: files.num_tries >= 3)
    assert sum(".fwseg could not be scanned" in record.message for record in caplog.records) == 1


def test_a_segment_that_grows_though_it_is_not_the_last_is_scanned_again(tmp_path):
    """A live process may have taken over segments of a dead one whose numbers are higher than that of its open one."""
    options = replace(OPTIONS, rescan_s=0.02)
    with DiskTier(tmp_path / "cache", options) as writer:
        assert writer.wait_scanned(WAIT_S)
        store(writer, keys_of(range(3)))
        home = state_of(writer).directory.home
        [segment] = home.glob("*.fwseg")
        (home / "000099-00000001.fwseg").write_bytes(b"")
        (home / "000099-00000001.fwseg").chmod(0o600)
        with DiskTier(tmp_path / "cache", options) as reader:
            assert reader.wait_scanned(WAIT_S)
            assert reader.lookup(keys_of(range(3))).all()
            store(writer, keys_of(range(3, 6)))
            assert [path for path in home.glob("*.fwseg") if path.stat().st_size] == [segment]
            deadline = time.monotonic() + WAIT_S
            while not reader.lookup(keys_of(range(3, 6))).all():
                assert time.monotonic() < deadline, "what was written later is never found"
                time.sleep(0.01)
            assert load(reader, keys_of(range(6))).num_done == 6
