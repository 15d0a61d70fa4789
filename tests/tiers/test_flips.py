"""Flipped bytes: every one in a segment is noticed, and what it hit is a miss."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from doors import scan, state_of
from foreword.tiers.disk.files import RealFiles
from foreword.tiers.disk.segments import PAGE, Damage, RunHeader, block_checksum, padded, scan_runs
from foreword.tiers.tier import Buffers
from tiers.block_world import BLOCK_BYTES, WAIT_S, keys_of, load, opened, segment_files, store

FILES = RealFiles()


def small_segment(path: Path) -> Path:
    """A segment of two runs of two blocks each."""
    with opened(path) as tier:
        store(tier, keys_of([0, 1]))
        store(tier, keys_of([2, 3]))
    (found,) = segment_files(path)
    return found


def test_every_flipped_byte_of_a_segment_is_caught_by_headers_and_checksums(tmp_path):
    """What a scan and a load would take from the file, without their threads: byte by byte that would take too long."""
    path = small_segment(tmp_path)
    content = bytearray(path.read_bytes())
    fd = FILES.open_for_reading(path)
    runs = list(scan_runs(FILES, fd, 0, len(content), uncached=False))
    assert [type(run) for run in runs] == [RunHeader, RunHeader]
    headers = {at for run in runs for at in range(run.offset, run.offset + run.header_bytes)}
    caught = 0
    with path.open("r+b", buffering=0) as file:
        for at in sorted(headers):
            file.seek(at)
            file.write(bytes([content[at] ^ (1 << at % 8)]))
            found = list(scan_runs(FILES, fd, 0, len(content), uncached=False))
            caught += sum(isinstance(run, Damage) for run in found)
            file.seek(at)
            file.write(content[at : at + 1])
    FILES.close(fd)
    assert caught == len(headers) == 2 * PAGE
    for at in sorted(set(range(len(content))) - headers):
        content[at] ^= 1 << at % 8
        bad = [
            entry for run in runs for entry in run.entries if covers(run, entry, at) and not sound(content, run, entry)
        ]
        caught += len(bad)
        content[at] ^= 1 << at % 8
    assert caught == len(content) == 2 * (PAGE + 2 * padded(6000))
    assert all(sound(content, run, entry) for run in runs for entry in run.entries)


def covers(run: RunHeader, entry: np.void, at: int) -> bool:
    begin = run.offset + int(entry["page"]) * PAGE
    return begin <= at < begin + padded(int(entry["stored_bytes"]))


def sound(content: bytes | bytearray, run: RunHeader, entry: np.void) -> bool:
    begin = run.offset + int(entry["page"]) * PAGE
    stored = memoryview(content)[begin : begin + padded(int(entry["stored_bytes"]))]
    name = run.namespace, int(entry["group"]), entry["key"].tobytes(), int(entry["stored_bytes"])
    return block_checksum(*name, stored) == entry["checksum"].tobytes()


def test_every_flip_in_a_file_that_is_in_use_is_caught_by_a_load(tmp_path):
    with opened(tmp_path) as tier:
        store(tier, keys_of([0, 1]))
        (path,) = segment_files(tmp_path)
        content = path.read_bytes()
        keys, corrupt = keys_of([0, 1]), 0
        with path.open("r+b", buffering=0) as file:
            for at in range(PAGE, len(content), 97):
                file.seek(at)
                file.write(bytes([content[at] ^ 0x10]))
                report = load(tier, keys)
                assert report.by_reason() == {"done": 1, "corrupt": 1}, f"byte {at}"
                corrupt += 1
                file.seek(at)
                file.write(content[at : at + 1])
                assert store(tier, keys).by_reason() == {"present": 1, "done": 1}
                # It was stored again at the end; go on with the damaged place by forgetting all and scanning again.
                tier.forget(keys)
                file.truncate(len(content))
                segment = state_of(tier).index.own_segments()[0]
                segment.num_bytes = 0
                scan(tier, segment)
                assert tier.lookup(keys).all()
        assert tier.stats().not_loaded == {"corrupt": corrupt}
        assert corrupt > 150


def test_every_flip_in_a_header_costs_its_run_after_a_restart(tmp_path):
    path = small_segment(tmp_path)
    content = path.read_bytes()
    for index in path.parent.glob("index"):
        index.unlink()
    for at in range(0, PAGE, 97):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with opened(tmp_path) as tier:
            assert tier.lookup(keys_of(range(4))).tolist() == [False, False, True, True]
            assert load(tier, keys_of(range(4))).num_done == 2
            assert tier.stats().num_damaged_headers == 1
        (path.parent / "index").unlink()


def test_a_flipped_snapshot_costs_a_scan_and_no_block(tmp_path):
    path = small_segment(tmp_path)
    index = path.parent / "index"
    content = index.read_bytes()
    for at in range(0, len(content), 11):
        index.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        with opened(tmp_path) as tier:
            assert load(tier, keys_of(range(4))).num_done == 4


def test_sound_bytes_of_another_block_are_not_this_block(tmp_path):
    """Two payloads change places, with all that an attacker or a mad disk could bring along."""
    path = small_segment(tmp_path)
    content = bytearray(path.read_bytes())
    first, second = slice(PAGE, PAGE + 8192), slice(PAGE + 8192, PAGE + 16384)
    content[first], content[second] = content[second], content[first]
    path.write_bytes(content)
    with opened(tmp_path) as tier:
        assert load(tier, keys_of(range(4))).by_reason() == {"corrupt": 2, "done": 2}


def test_an_index_that_points_to_another_block_with_its_own_checksum_does_not_serve_it(tmp_path, monkeypatch):
    """What 128 equal bits of two keys would do: place and checksum are those of another key."""
    with opened(tmp_path) as tier:
        store(tier, keys_of([0, 1]))
        index = state_of(tier).index
        right = index.locate(keys_of([1]), 0)
        monkeypatch.setattr(index, "locate", lambda keys, now: right)
        report = load_without_checks(tier, keys_of([0]))
        assert report.by_reason() == {"corrupt": 1}


def load_without_checks(tier, keys):
    out = np.zeros((len(keys), BLOCK_BYTES), np.uint8)
    sink = Buffers([row.data for row in out])
    ticket = tier.load(keys, np.full(len(keys), BLOCK_BYTES), sink, deadline_s=WAIT_S)
    assert ticket.wait(WAIT_S)
    assert not out.any()
    return ticket.report
