"""A system that reports errors, hangs, is full, or changes files under us: always a miss, never a wrong block."""

from __future__ import annotations

import errno
import os
import random
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from doors import state_of
from foreword.errors import ConfigError
from foreword.tiers.disk.state import DiskOptions
from foreword.tiers.tier import BlockRun, Buffers
from lanes import slow
from tiers.block_world import (
    BLOCK_BYTES,
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
from tiers.faulty_files import FailingFiles, HangingFiles, SmallDisk, StuckSource

SMALL = DiskOptions(
    budget_bytes=1 << 20, min_free_bytes=0, segment_bytes=64 << 10, staging_bytes=64 << 10, rescan_s=60, upkeep_s=0.01
)


def life(path, files) -> None:
    """A process that finds blocks, stores more than fits, loads, and ends; and a healthy one after it."""
    try:
        tier = opened(path, SMALL, files=files)
    except ConfigError:
        assert files.failed
    else:
        for number in range(20):
            store(tier, keys_of(range(8 * number, 8 * number + 8)))
            if number % 7 == 0:
                load(tier, keys_of(range(0, 8 * number, 3)), num_moves=2)
        load(tier, keys_of(range(160)), num_moves=2)
        tier.check_integrity()
        tier.close(WAIT_S)
    with opened(path, replace(SMALL, upkeep_s=600.0)) as healthy:
        # Where an unlink failed, more is there than the budget allows. What eviction does about it ends before a store
        # ends, so no block moves while the load below reads.
        store(healthy, keys_of([0]))
        load(healthy, keys_of(range(160)))
        healthy.check_integrity()


def num_calls(tmp_path) -> int:
    files = FailingFiles(errno.EIO, 1 << 60)
    life(tmp_path / "counted", files)
    return files.num_calls


@pytest.mark.parametrize(
    ("error", "step"),
    [
        (errno.ENOSPC, 59),
        (errno.EIO, 59),
        pytest.param(errno.ENOSPC, 3, marks=pytest.mark.slow),
        pytest.param(errno.EIO, 4, marks=pytest.mark.slow),
    ],
    ids=["ENOSPC-59", "EIO-59", "ENOSPC-3", "EIO-4"],
)
def test_an_error_of_any_call_costs_no_more_than_misses(tmp_path, error, step):
    total, failed = num_calls(tmp_path), set()
    assert total > 150
    for first in range(0, total, step):
        files = FailingFiles(error, first)
        life(tmp_path / str(first), files)
        failed.update(files.failed)
    assert len(failed) >= (10 if step < 59 else 2)


@pytest.mark.parametrize("error", [errno.ENOSPC, *slow(errno.EACCES)], ids=errno.errorcode.get)
@pytest.mark.parametrize(
    "kind", ["create", "read", "write", "sync", "unlink", "rename", "stat", "space", "list_folder"]
)
def test_a_call_that_fails_from_some_moment_on_leaves_a_tier_that_answers(tmp_path, error, kind):
    rng = random.Random(kind)
    for first in (0, rng.randrange(1, 10), rng.randrange(10, 40)):
        life(tmp_path / str(first), FailingFiles(error, first, num_calls=1 << 60, kinds=(kind,)))


def test_a_full_disk_makes_the_tier_drop_blocks_give_back_a_segment_and_go_on_later(tmp_path, monkeypatch):
    monkeypatch.setattr("foreword.tiers.disk.storer.FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr("foreword.tiers.disk.storer.LONGEST_PAUSE_S", 0.0)
    with opened(tmp_path, SMALL, files=SmallDisk(300_000)) as tier:
        outcomes: dict[str, int] = {}
        for number in range(60):
            for reason, count in store(tier, keys_of(range(4 * number, 4 * number + 4))).by_reason().items():
                outcomes[reason] = outcomes.get(reason, 0) + count
        assert outcomes["io_error"] > 0
        assert outcomes["done"] > 100  # it went on
        assert tier.stats().num_evicted > 0
        assert tier.stats().not_stored == {"io_error": outcomes["io_error"]}
        assert load(tier, keys_of(range(240))).num_done > 10
        tier.check_integrity()


def test_after_a_failed_write_nothing_is_stored_for_a_while(tmp_path):
    with opened(tmp_path, SMALL, files=FailingFiles(errno.EIO, 0, kinds=("write",))) as tier:
        assert store(tier, keys_of([0])).by_reason() == {"io_error": 1}
        assert store(tier, keys_of([1])).by_reason() == {"no_room": 1}


def test_a_read_that_fails_costs_its_blocks_alone(tmp_path):
    with opened(tmp_path) as tier:
        for number in range(12):
            store(tier, keys_of(range(10 * number, 10 * number + 10)))
    files = FailingFiles(errno.EIO, 1 << 60, kinds=("read",))
    with opened(tmp_path, files=files) as tier:
        files.first, files.last = files.num_calls + 1, files.num_calls + 2
        report = load(tier, keys_of(range(120)))
        assert set(report.by_reason()) == {"done", "io_error"}
        assert report.num_done > 0
        assert files.failed == ["read"]
        again = load(tier, keys_of(range(120)))
        assert again.by_reason() == {"done": report.num_done, "missing": 120 - report.num_done}


def test_a_disk_that_hangs_holds_up_neither_the_caller_nor_its_memory(tmp_path, monkeypatch):
    files, late_s = HangingFiles(), 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + late_s)
    monkeypatch.setattr("foreword.tiers.ticket.time", clock)
    tier = opened(tmp_path, files=files)
    store(tier, keys_of(range(4)))
    files.hangs = True
    out = np.zeros((4, BLOCK_BYTES), np.uint8)
    sink = Buffers([row.data for row in out])
    ticket = tier.load(keys_of(range(4)), np.full(4, BLOCK_BYTES), sink, deadline_s=WAIT_S)
    assert files.reached.wait(WAIT_S)
    late_s = WAIT_S  # the deadline is over, while the read hangs
    assert ticket.wait(WAIT_S)
    assert ticket.report.by_reason() == {"timeout": 4}
    assert not tier.lookup(keys_of(range(4))).any()
    files.hangs = False
    files.go_on.set()
    store(tier, keys_of(range(5)))
    assert load(tier, keys_of(range(5))).num_done == 5
    assert not out.any()
    tier.close(WAIT_S)


def test_a_store_that_hangs_while_the_tier_is_closed_is_cancelled(tmp_path, monkeypatch):
    monkeypatch.setattr("foreword.tiers.disk.disk_tier.PATIENCE_S", 0.1)
    files, keys = HangingFiles(), keys_of(range(4))
    tier = opened(tmp_path, files=files)
    files.hangs = True
    ticket = tier.store(run_of(keys))
    assert files.reached.wait(WAIT_S)
    tier.close(0.0)
    assert ticket.done
    assert ticket.report.by_reason() == {"cancelled": 4}
    files.go_on.set()


def test_a_copy_that_hangs_does_not_hold_up_the_close(tmp_path, monkeypatch):
    monkeypatch.setattr("foreword.tiers.disk.disk_tier.PATIENCE_S", 0.1)
    monkeypatch.setattr("foreword.tiers.ticket.COPY_S", 0.1)
    tier, source = opened(tmp_path), StuckSource()
    ticket = tier.store(BlockRun.chain(keys_of([0, 1]), BLOCK_BYTES, source))
    assert source.reached.wait(WAIT_S)
    tier.close(0.0)
    assert not ticket.done
    source.go_on.set()
    assert ticket.wait(WAIT_S)
    assert ticket.report.num_done <= 1, "no further block is copied"


def test_a_cancelled_load_keeps_no_segment_open(tmp_path):
    files, keys, num_bytes = HangingFiles(), keys_of(range(9)), 1_000_001
    options = replace(SMALL, budget_bytes=64 << 20, segment_bytes=16 << 20, upkeep_s=600.0)  # which opens folders
    with opened(tmp_path, options, files=files) as tier:
        assert store(tier, keys, num_bytes).num_done == 9
        before = open_files()
        files.hangs = True
        sink = Buffers([bytearray(num_bytes)] * 9)
        ticket = tier.load(keys, np.full(9, num_bytes), sink, deadline_s=WAIT_S)
        assert files.reached.wait(WAIT_S)  # in the first of five reads
        ticket.cancel()
        files.go_on.set()
        assert load(tier, keys_of([99])).by_reason() == {"missing": 1}  # it comes after the cancelled one
        assert open_files() <= before
        assert load(tier, keys, num_bytes).num_done == 9


@pytest.fixture
def filled(tmp_path):
    """A tier with 40 blocks in several segments, the newest one open, that does not look after them by itself."""
    with opened(tmp_path, replace(SMALL, upkeep_s=600.0)) as tier:
        for number in range(10):
            store(tier, keys_of(range(4 * number, 4 * number + 4)))
        yield tier
        tier.check_integrity()


ALL = keys_of(range(40))


def test_a_segment_that_is_deleted_under_us_is_a_miss_and_forgotten_at_once(filled, tmp_path):
    paths = segment_files(tmp_path)
    assert len(paths) > 2
    for path in paths:
        path.unlink()
    assert filled.lookup(ALL).all()
    assert load(filled, ALL).by_reason() == {"missing": 40}
    assert len(state_of(filled).index) == 0
    assert store(filled, ALL).by_reason() == {"done": 40}  # also where the open one was
    assert load(filled, ALL).num_done == 40


def test_the_loss_of_the_open_segment_is_noticed_when_it_is_written(filled, tmp_path):
    for path in segment_files(tmp_path):
        path.unlink()
    num_blocks = filled.stats().num_blocks
    assert store(filled, keys_of([50])).by_reason() == {"io_error": 1}  # it would have fitted into that one
    assert filled.stats().num_blocks == num_blocks - 4


def test_the_loss_of_the_open_segment_is_noticed_when_it_is_sealed(filled, tmp_path):
    segment_files(tmp_path)[-1].unlink()
    assert store(filled, keys_of(range(50, 57))).by_reason() == {"done": 7}
    assert filled.stats().num_blocks == 40 - 4 + 7


def test_a_truncated_segment_gives_what_is_left(filled, tmp_path):
    for path in segment_files(tmp_path):
        os.truncate(path, path.stat().st_size // 2 + 1000)
    report = load(filled, ALL)
    assert set(report.by_reason()) == {"done", "missing"}
    for path in segment_files(tmp_path):
        os.truncate(path, 0)
    assert load(filled, ALL).num_done == 0


def test_a_block_whose_padding_was_cut_off_is_not_found_after_a_restart(tmp_path):
    with opened(tmp_path) as tier:
        store(tier, keys_of(range(4)))
    next(tmp_path.glob("v1/*/index")).unlink()
    (path,) = segment_files(tmp_path)
    os.truncate(path, path.stat().st_size - 1)
    with opened(tmp_path) as tier:
        assert tier.lookup(keys_of(range(4))).tolist() == [True, True, True, False]
        tier.check_integrity()
        assert load(tier, keys_of(range(3))).num_done == 3


def test_swapped_segments_serve_no_wrong_block(filled, tmp_path):
    first, second, *_ = segment_files(tmp_path)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    report = load(filled, ALL)
    assert set(report.by_reason()) <= {"done", "corrupt", "missing"}
    assert report.num_done < 40


@pytest.mark.parametrize("kind", ["link", "folder", "fifo", "device"])
def test_something_else_in_the_place_of_a_segment_is_refused(filled, tmp_path, kind):
    path = segment_files(tmp_path)[0]
    content = path.read_bytes()
    path.unlink()
    if kind == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    report = load(filled, ALL)
    assert 0 < report.num_done < 40
    with opened(tmp_path / "other"):
        pass
    if kind == "folder":
        path.rmdir()


def test_a_store_beyond_the_queue_is_dropped_and_counted(tmp_path):
    source = StuckSource()
    options = DiskOptions(
        budget_bytes=1 << 20, min_free_bytes=0, segment_bytes=64 << 10, max_queued_store_bytes=10 * BLOCK_BYTES
    )
    with opened(tmp_path, options) as tier:
        first = tier.store(BlockRun.chain(keys_of([300]), BLOCK_BYTES, source))
        assert source.reached.wait(WAIT_S)  # or a fast disk would keep up with the runs
        tickets = [tier.store(run_of(keys_of(range(4 * n, 4 * n + 4)))) for n in range(40)]
        source.go_on.set()
        assert all(ticket.wait(WAIT_S) for ticket in [first, *tickets])
        dropped = sum(ticket.report.by_reason().get("queue_full", 0) for ticket in tickets)
        assert dropped == 4 * 38, "one block is being stored, and two runs wait"
        assert tier.stats().not_stored == {"queue_full": dropped}
        until(lambda: tier.stats().queued_store_bytes == 0)
        assert store(tier, keys_of(range(200, 211))).num_done == 11, "a run that waits for nobody was refused"
        until(lambda: tier.stats().queued_store_bytes == 0)
