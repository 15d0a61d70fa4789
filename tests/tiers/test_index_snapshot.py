"""The snapshot: it comes back as it was written, or not at all, and a clock that jumps does no harm."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import xxhash

from foreword.tiers.cipher import NO_CIPHER_ID
from foreword.tiers.clock import EPOCH, Clock
from foreword.tiers.disk.files import RealFiles
from foreword.tiers.disk.segment_index import SegmentIndex, Snapshot, read_snapshot, worth_of, write_snapshot
from tiers.block_world import keys_of
from tiers.test_segment_index import insert, segment_of

YEAR_S = 365 * 24 * 3600
FILES = RealFiles()


def clock_at(wall_s: float) -> Clock:
    return Clock(wall=lambda: wall_s, monotonic=lambda: 0.0)


def save(index: SegmentIndex, path: Path, numbers: list[int], clock: Clock, num_bytes: int = 1 << 20) -> None:
    """Write the snapshot of these segments, which have that size."""
    segments = [segment_of(index, number) for number in numbers]
    for segment in segments:
        segment.num_bytes = num_bytes
    write_snapshot(FILES, path, index.snapshot(segments), clock, NO_CIPHER_ID)


def written(path: Path, *, expires_in_s: int = 0, wall_s: float = 1e9) -> SegmentIndex:
    """A snapshot of 20 blocks in segment 3 and 5 blocks in segment 1; another 2 blocks are not in it."""
    index, clock = SegmentIndex(), clock_at(wall_s)
    expires = EPOCH + expires_in_s if expires_in_s else 0
    insert(index, keys_of(range(20)), segment=3, expires=expires)
    insert(index, keys_of(range(20, 25), group_id=1), segment=1)
    insert(index, keys_of(range(30, 32)), segment=2)
    save(index, path, [3, 1], clock)
    return index


def read(path: Path, wall_s: float = 1e9) -> tuple[Snapshot, SegmentIndex]:
    """A snapshot, and the index of a process that knows another segment and these."""
    snapshot = read_snapshot(FILES, path, clock_at(wall_s), NO_CIPHER_ID)
    assert snapshot is not None
    index = SegmentIndex()
    segment_of(index, 77)
    index.insert_snapshot(snapshot, [index.add_segment(Path(name), is_own=True) for name, _ in snapshot.segments])
    index.check_integrity()
    return snapshot, index


def test_a_snapshot_brings_back_the_blocks_of_its_segments(tmp_path):
    before = written(tmp_path / "index")
    snapshot, index = read(tmp_path / "index")
    assert snapshot.segments == [("000003-00000000.fwseg", 1 << 20), ("000001-00000000.fwseg", 1 << 20)]
    assert len(index) == 25
    for keys, number in [(keys_of(range(20)), 3), (keys_of(range(20, 25), group_id=1), 1)]:
        old, new = before.locate(keys, EPOCH), index.locate(keys, EPOCH)
        assert (new["segment"] == segment_of(index, number).id).all()
        for column in ("page", "checksum", "stored_bytes"):
            assert np.array_equal(new[column], old[column])


def test_blocks_of_segments_that_are_gone_stay_out(tmp_path):
    written(tmp_path / "index")
    snapshot = read_snapshot(FILES, tmp_path / "index", clock_at(1e9), NO_CIPHER_ID)
    assert snapshot is not None
    index = SegmentIndex()
    lost = segment_of(index, 3)
    index.remove_segment(lost)
    index.insert_snapshot(snapshot, [lost, None])
    assert len(index) == 0


def test_an_empty_snapshot_comes_back_empty(tmp_path):
    save(SegmentIndex(), tmp_path / "index", [], clock_at(0))
    snapshot, index = read(tmp_path / "index")
    assert snapshot.segments == []
    assert len(index) == 0


def test_a_snapshot_of_the_first_version_costs_a_scan_and_a_line(tmp_path, caplog):
    caplog.set_level("INFO")
    body = b"FWIDX\0\0\1" + (0).to_bytes(8, "little")
    (tmp_path / "index").write_bytes(body + xxhash.xxh3_128_digest(body))
    assert read_snapshot(FILES, tmp_path / "index", clock_at(0), NO_CIPHER_ID) is None
    assert "another version of foreword" in caplog.text


def test_there_is_no_snapshot_where_there_is_no_file(tmp_path):
    assert read_snapshot(FILES, tmp_path / "index", clock_at(0), NO_CIPHER_ID) is None


def test_a_snapshot_of_another_cipher_is_none(tmp_path):
    written(tmp_path / "index")
    assert read_snapshot(FILES, tmp_path / "index", clock_at(1e9), b"another cipher..") is None


def test_every_flipped_byte_of_a_snapshot_is_caught(tmp_path):
    path = tmp_path / "index"
    written(path)
    content = path.read_bytes()
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1 :])
        assert read_snapshot(FILES, path, clock_at(1e9), NO_CIPHER_ID) is None, f"byte {at}"


def test_a_snapshot_of_every_other_length_is_refused(tmp_path):
    path = tmp_path / "index"
    written(path)
    content = path.read_bytes()
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        assert read_snapshot(FILES, path, clock_at(1e9), NO_CIPHER_ID) is None
    path.write_bytes(content + b"\0")
    assert read_snapshot(FILES, path, clock_at(1e9), NO_CIPHER_ID) is None


def test_what_lies_beyond_its_segment_is_refused(tmp_path):
    index = SegmentIndex()
    insert(index, keys_of(range(20)), segment=3)
    save(index, tmp_path / "index", [3], clock_at(0), num_bytes=19 * 4096)
    assert read_snapshot(FILES, tmp_path / "index", clock_at(0), NO_CIPHER_ID) is None


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
    assert (worth_of(places, EPOCH) >= 0).all()


def test_a_clock_that_jumps_back_makes_no_block_younger_than_new(tmp_path):
    written(tmp_path / "index")
    _, index = read(tmp_path / "index", 1e9 - 10 * YEAR_S)
    places = index.locate(keys_of(range(20)), EPOCH)
    assert (worth_of(places, EPOCH) <= 1).all()


class FullDisk(RealFiles):
    """A disk that takes the first part of a file and no more."""

    def write(self, fd: int, data: memoryview, offset: int, *, uncached: bool) -> int:
        if offset:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(fd, data[:16], offset, uncached=uncached)


def test_a_snapshot_for_which_the_disk_has_no_room_leaves_nothing_but_the_old_one(tmp_path):
    index, segments = SegmentIndex(), []
    write_snapshot(FILES, tmp_path / "index", index.snapshot(segments), clock_at(0), NO_CIPHER_ID)
    before = (tmp_path / "index").read_bytes()
    with pytest.raises(OSError, match="No space left"):
        write_snapshot(FullDisk(), tmp_path / "index", index.snapshot(segments), clock_at(0), NO_CIPHER_ID)
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    assert (tmp_path / "index").read_bytes() == before
