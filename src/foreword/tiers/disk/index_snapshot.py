"""The snapshot of the index: a file that makes a restart fast, and only a hint.

A snapshot that is absent, torn, old or damaged costs a scan of the segments' headers, and nothing else: every block is
checked when it is loaded.

    "FWIDX", version 1 | bytes of the description, uint64 | description, JSON | the index's columns | xxh3-128 of all
"""

from __future__ import annotations

import contextlib
import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from foreword.tiers.clock import EPOCH, LATEST, Clock
from foreword.tiers.disk.block_places import COLUMNS
from foreword.tiers.disk.files import FileLayer, read_fully, write_fully
from foreword.tiers.disk.run_format import PAGE, padded
from foreword.tiers.disk.segment_index import SegmentIndex
from foreword.tiers.disk.segments import Segment

MAGIC = b"FWIDX\0\0\1"
_HEAD = struct.Struct("<8sQ")
MAX_BYTES = 1 << 34
ROW_BYTES = sum(np.dtype(kind).itemsize for kind in COLUMNS.values())

Columns = dict[str, npt.NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a snapshot says: blocks, and the segments that they lie in."""

    columns: Columns
    """As `SegmentIndex.copy_rows` gives them, but `segment` counts in `segments`."""
    names: list[tuple[bytes, int]]
    segments: list[tuple[str, int]]
    """Name of the file, and the number of its bytes that the snapshot covers."""


def write_snapshot(
    files: FileLayer, path: Path, index: SegmentIndex, segments: list[Segment], clock: Clock, cipher_id: bytes
) -> int:
    """Write the blocks of some segments to a file, which replaces the old one at once. Returns its bytes.

    The caller must be the thread that appends to these segments. Raises OSError; then the old file stays.
    """
    described = [(segment.path.name, segment.num_bytes) for segment in segments]
    ids = np.array([segment.id for segment in segments], np.uint32)
    columns, names = index.copy_rows(ids)
    order = np.argsort(ids)
    columns["segment"] = order[np.searchsorted(ids[order], columns["segment"])].astype(np.uint32)
    now = clock.now_s()
    # Ages and what is left to live mean something in another process; moments of our clock do not.
    columns["used"] = (now - np.minimum(columns["used"].astype(np.int64), now)).astype(np.uint32)
    expires = columns["expires"].astype(np.int64)
    columns["expires"] = np.where(expires == 0, 0, np.maximum(1, expires - now)).astype(np.uint32)
    description = json.dumps(
        {
            "num_rows": len(columns["name"]),
            "saved_s": clock.wall_s(),
            "cipher": cipher_id.hex(),
            "segments": described,
            "names": [(namespace.hex(), group_id) for namespace, group_id in names],
        }
    ).encode()
    description += b" " * (-len(description) % 8)  # columns are read in place, so they must be aligned
    parts = [_HEAD.pack(MAGIC, len(description)), description, *(columns[name].tobytes() for name in COLUMNS)]
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    parts.append(digest.digest())
    unfinished = path.with_name(path.name + ".new")
    with contextlib.suppress(FileNotFoundError):
        files.unlink(unfinished)
    fd = files.create(unfinished)
    try:
        offset = 0
        for part in parts:
            write_fully(files, fd, memoryview(part), offset, uncached=False)
            offset += len(part)
        files.sync(fd)
    finally:
        files.close(fd)
    files.rename(unfinished, path)
    return offset


def read_snapshot(files: FileLayer, path: Path, clock: Clock, cipher_id: bytes) -> Snapshot | None:
    """A snapshot, with moments on our clock. Raises OSError.

    None if there is none, if it is not as it was written, or if its blocks were written with another cipher or secret.
    """
    try:
        fd = files.open_for_reading(path)
    except FileNotFoundError:
        return None
    try:
        size = files.fstat(fd).st_size
        if not _HEAD.size + 16 <= size <= MAX_BYTES:
            return None
        content = np.empty(size, np.uint8)
        if read_fully(files, fd, content.data, 0, uncached=False) < size:
            return None
    finally:
        files.close(fd)
    if xxhash.xxh3_128_digest(content[:-16].data) != content[-16:].tobytes():
        return None
    try:
        return _decode(content, clock, cipher_id)
    except (ValueError, KeyError, TypeError):
        return None


def _decode(content: npt.NDArray[np.uint8], clock: Clock, cipher_id: bytes) -> Snapshot | None:
    """The parts of a snapshot whose checksum is right. Another version may have written something else into it."""
    magic, length = _HEAD.unpack_from(content.data)
    if magic != MAGIC or _HEAD.size + length + 16 > len(content):
        return None
    described: dict[str, Any] = json.loads(content[_HEAD.size : _HEAD.size + length].tobytes())
    if described["cipher"] != cipher_id.hex():
        return None
    count = int(described["num_rows"])
    begin = _HEAD.size + length
    if begin + count * ROW_BYTES + 16 != len(content):
        return None
    columns: Columns = {}
    for name, kind in COLUMNS.items():
        end = begin + count * np.dtype(kind).itemsize
        columns[name] = content[begin:end].view(kind)
        begin = end
    segments = [(str(name), int(num_bytes)) for name, num_bytes in described["segments"]]
    names = [(bytes.fromhex(namespace), int(group_id)) for namespace, group_id in described["names"]]
    sizes = np.array([num_bytes for _, num_bytes in segments], np.int64)
    if count:
        where = columns["segment"].astype(np.int64)
        numbers = columns["name"].astype(np.int64)
        if where.max() >= len(sizes) or not 1 <= numbers.min() <= numbers.max() <= len(names):
            return None
        ends = columns["page"].astype(np.int64) * PAGE + columns["stored_bytes"].astype(np.int64)
        if np.any(ends > sizes[where]):
            return None
    elapsed = max(0, clock.wall_s() - int(described["saved_s"]))
    now = clock.now_s()
    used = np.maximum(1, now - columns["used"].astype(np.int64) - elapsed)
    left = columns["expires"].astype(np.int64)
    expires = np.where(left == 0, 0, np.clip(now + left - elapsed, 1, LATEST))
    assert now >= EPOCH
    columns["used"], columns["expires"] = used.astype(np.uint32), expires.astype(np.uint32)
    return Snapshot(columns, names, segments)


def snapshot_bytes(num_blocks: int) -> int:
    """The size of a snapshot of that number of blocks, without its description, in whole pages."""
    return padded(num_blocks * ROW_BYTES)
