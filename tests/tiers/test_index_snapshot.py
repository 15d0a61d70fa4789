"""The snapshot: it comes back as it was written, or not at all, and a clock that jumps does no harm."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from foreword.tiers.clock import EPOCH, Clock
from foreword.tiers.disk.files import RealFiles
from foreword.tiers.disk.run_format import NO_CIPHER
from foreword.tiers.disk.segment_index import SegmentIndex, Snapshot, read_snapshot, write_snapshot
from foreword.tiers.disk.segments import Segment
from tiers.block_world import keys_of
from tiers.test_segment_index import blocks

YEAR_S = 365 * 24 * 3600
FILES = RealFiles()


def clock_at(wall_s: float) -> Clock:
    return Clock(wall=lambda: wall_s, monotonic=lambda: 0.0)


def segment(segment_id: int, num_bytes: int = 1 << 20) -> Segment:
    return Segment(segment_id, Path(f"{segment_id:06d}-00000000.fwseg"), is_own=True, num_bytes=num_bytes)


def written(path: Path, *, expires_in_s: int = 0, wall_s: float = 1e9) -> SegmentIndex:
    """A snapshot of 20 blocks in segment 3 and 5 blocks in segment 1; another 2 blocks are not in it."""
    index, clock = SegmentIndex(), clock_at(wall_s)
    expires = EPOCH + expires_in_s if expires_in_s else 0
    index.insert(blocks(keys_of(range(20)), segment=3, expires=expires))
    index.insert(blocks(keys_of(range(20, 25), group_id=1), segment=1))
    index.insert(blocks(keys_of(range(30, 32)), segment=2))
    write_snapshot(FILES, path, index, [segment(3), segment(1)], clock, NO_CIPHER)
    return index


def read(path: Path, wall_s: float = 1e9) -> tuple[Snapshot, SegmentIndex]:
    snapshot = read_snapshot(FILES, path, clock_at(wall_s), NO_CIPHER)
    assert snapshot is not None
    index = SegmentIndex()
    index.insert_rows(snapshot.columns, snapshot.names)
    index.check_integrity()
    return snapshot, index


def test_a_snapshot_brings_back_the_blocks_of_its_segments(tmp_path):
    before = written(tmp_path / "index")
    snapshot, index = read(tmp_path / "index")
    assert snapshot.segments == [("000003-00000000.fwseg", 1 << 20), ("000001-00000000.fwseg", 1 << 20)]
    assert len(index) == 25
    for keys, number in [(keys_of(range(20)), 0), (keys_of(range(20, 25), group_id=1), 1)]:
        old, new = before.locate(keys, EPOCH), index.locate(keys, EPOCH)
        assert (new.segments == number).all()
        assert np.array_equal(new.pages, old.pages)
        assert np.array_equal(new.checksums, old.checksums)
        assert np.array_equal(new.stored_bytes, old.stored_bytes)


def test_an_empty_snapshot_comes_back_empty(tmp_path):
    write_snapshot(FILES, tmp_path / "index", SegmentIndex(), [], clock_at(0), NO_CIPHER)
    snapshot, index = read(tmp_path / "index")
    assert snapshot.segments == []
    assert len(index) == 0


def test_there_is_no_snapshot_where_there_is_no_file(tmp_path):
    assert read_snapshot(FILES, tmp_path / "index", clock_at(0), NO_CIPHER) is None


def test_a_snapshot_of_another_cipher_is_none(tmp_path):
    written(tmp_path / "index")
    assert read_snapshot(FILES, tmp_path / "index", clock_at(1e9), b"another cipher..") is None


def test_every_flipped_byte_of_a_snapshot_is_caught(tmp_path):
    path = tmp_path / "index"
    written(path)
    content = path.read_bytes()
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :])
        assert read_snapshot(FILES, path, clock_at(1e9), NO_CIPHER) is None, f"byte {at}"


def test_a_snapshot_of_every_other_length_is_refused(tmp_path):
    path = tmp_path / "index"
    written(path)
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        assert read_snapshot(FILES, path, clock_at(1e9), NO_CIPHER) is None
    path.write_bytes(content + b"\0")
    assert read_snapshot(FILES, path, clock_at(1e9), NO_CIPHER) is None


def test_what_lies_beyond_its_segment_is_refused(tmp_path):
    index = SegmentIndex()
    index.insert(blocks(keys_of(range(20)), segment=3))
    write_snapshot(FILES, tmp_path / "index", index, [segment(3, num_bytes=19 * 4096)], clock_at(0), NO_CIPHER)
    assert read_snapshot(FILES, tmp_path / "index", clock_at(0), NO_CIPHER) is None


@pytest.mark.parametrize("jump_s", [-10 * YEAR_S, -1, 0, 50])
def test_a_block_lives_at_most_its_time_to_live_after_a_restart_wherever_the_clock_has_jumped(tmp_path, jump_s):
    written(tmp_path / "index", expires_in_s=100)
    _, index = read(tmp_path / "index", 1e9 + jump_s)
    left = 100 - max(0, jump_s)
    assert index.contains(keys_of(range(20)), EPOCH + left - 1).all()
    assert not index.contains(keys_of(range(20)), EPOCH + left).any()
    assert index.contains(keys_of(range(20, 25), group_id=1), EPOCH + YEAR_S).all()  # these never expire


def test_a_clock_that_jumps_ten_years_ahead_ends_what_expires_and_nothing_else(tmp_path):
    written(tmp_path / "index", expires_in_s=100)
    _, index = read(tmp_path / "index", 1e9 + 10 * YEAR_S)
    assert not index.contains(keys_of(range(20)), EPOCH).any()
    assert index.contains(keys_of(range(20, 25), group_id=1), EPOCH).all()
    places = index.locate(keys_of(range(20, 25), group_id=1), EPOCH)
    assert (index.worth_of(places.rows, EPOCH) >= 0).all()


def test_a_clock_that_jumps_back_makes_no_block_younger_than_new(tmp_path):
    written(tmp_path / "index")
    _, index = read(tmp_path / "index", 1e9 - 10 * YEAR_S)
    places = index.locate(keys_of(range(20)), EPOCH)
    assert (index.worth_of(places.rows, EPOCH) <= 1).all()
