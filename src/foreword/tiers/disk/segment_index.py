"""The segment index: which segments there are, and which block lies where. Its snapshot makes a restart fast.

Times are those of `Clock.now_s`.

Each block is a row of a numpy array, which has 60 bytes. A dict from names to rows takes another 140 per block. The row
of a removed block has the name 0 until another block takes it. A row keeps the first 16 of a key's 32 bytes. These
bytes decide where to read. The block that is read is checked against the whole key.

A snapshot of the index is a file, and only a hint. If the file is absent, torn, old or damaged, the segments' headers
are scanned instead. A wrong snapshot causes no wrong answer, because every block is checked when it is loaded.

    "FWIDX", version 2 | bytes of the description, uint64 | description, JSON | rows | xxh3-128 of all
"""

from __future__ import annotations

import json
import logging
import secrets
import struct
import threading
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from foreword.tiers.clock import LATEST, Clock
from foreword.tiers.disk.files import RealFiles, opened, read_fully, replace_file
from foreword.tiers.disk.segments import PAGE, SUFFIX, RunHeader, Segment, segment_number
from foreword.tiers.tier import PINNED, BlockKeys, BoolArray

logger = logging.getLogger(__name__)
RowNumbers = npt.NDArray[np.int64]
Rows = npt.NDArray[np.void]
"""[blocks], of dtype `ROW`."""
ROW = np.dtype(
    [
        ("head", "u1", (16,)),  # of the key
        ("name", "<u2"),  # number of (namespace, group); 0: no block
        ("flags", "u1"),
        ("hits", "u1"),  # loads, at most 255
        ("checksum", "u1", (16,)),
        ("segment", "<u4"),
        ("page", "<u4"),  # of the payload in the segment
        ("stored_bytes", "<u4"),
        ("expires", "<u4"),  # 0: never
        ("used", "<u4"),  # last load, or when it was stored
        ("value", "<f4"),
    ]
)
NAME_BYTES = 18
"""The leading bytes of a row that name its block: `head` and `name`."""
ROW_GROWTH = 1.125
AT_ONCE = 1 << 13
"""The number of a snapshot's rows to insert before other threads may take the lock."""
HALF_LIFE_S = 6 * 3600.0
"""The half-life of a block's worth since its last load, in seconds. ds4 uses the same half-life for hits."""
MAGIC = b"FWIDX\0\0\2"
_HEAD = struct.Struct("<8sQ")
MAX_BYTES = 1 << 34

assert ROW.itemsize == 60


class SegmentIndex:
    """The segments that this process knows, and their blocks. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._segments: dict[int, Segment] = {}
        self._ids: dict[Path, int] = {}
        self._next_id = 0
        self._next_number = 1
        self._numbers: dict[tuple[bytes, int], int] = {}
        """(Namespace, group) -> their number in the column `name`."""
        self._rows = np.zeros(1024, ROW)
        self._num_rows = 0
        """The number of rows ever used. Rows from this number on are free, but not in `_free`."""
        self._free: list[int] = []
        self._row_of: dict[bytes, int] = {}
        """The first `NAME_BYTES` of the row -> its number."""
        self._next_expiry = LATEST
        """The earliest time at which a block may expire."""

    def __len__(self) -> int:
        return len(self._row_of)

    # ------------------------------------------------------------------------------ segments

    def open_segment(self, folder: Path) -> Segment:
        """Add a segment that this process will write, with a new name, before its file is made."""
        with self._lock:
            name = f"{self._next_number:06d}-{secrets.token_hex(4)}{SUFFIX}"
            return self._add(Segment(self._next_id, folder / name, is_own=True, is_open=True, is_scanned=True))

    def add_segment(self, path: Path, *, is_own: bool) -> Segment:
        """The segment of a path. It is added, with a new id, if the path is not known yet."""
        with self._lock:
            if path in self._ids:
                return self._segments[self._ids[path]]
            return self._add(Segment(self._next_id, path, is_own))

    def remove_segment(self, segment: Segment) -> int:
        """Forget a segment and its blocks; returns the number of blocks. Its id is never used again."""
        with self._lock:
            if self._segments.pop(segment.id, None) is None:
                return 0
            del self._ids[segment.path]
            alive = self._alive()
            return self._remove(alive[self._rows["segment"][alive] == segment.id])

    def segment(self, segment_id: int) -> Segment | None:
        return self._segments.get(segment_id)

    def knows(self, path: Path) -> bool:
        return path in self._ids

    def segments(self) -> list[Segment]:
        """All segments, oldest id first."""
        with self._lock:
            return list(self._segments.values())

    def own_segments(self) -> list[Segment]:
        """The segments of this process, oldest id first."""
        return [segment for segment in self.segments() if segment.is_own]

    # ------------------------------------------------------------------------------ looking

    def contains(self, keys: BlockKeys, now: int) -> BoolArray:
        """Which blocks are here and have not expired, [blocks]."""
        with self._lock:
            return self._find(keys, now) >= 0

    def locate(self, keys: BlockKeys, now: int) -> Rows:
        """Copies of the blocks' rows, [blocks]; `name` is 0 for blocks that are not here or have expired."""
        with self._lock:
            numbers = self._find(keys, now)
            rows = self._rows[numbers]
        rows["name"][numbers < 0] = 0
        return rows

    def segment_worth(self, now: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """The worth of each segment's blocks, and the stored bytes of its pinned blocks, by segment id."""
        with self._lock:
            rows = self._rows[self._alive()]
            num_ids = self._next_id
        pinned = np.where(rows["flags"] & PINNED, rows["stored_bytes"], 0)
        total = np.bincount(rows["segment"], worth_of(rows, now), minlength=num_ids).astype(np.float64)
        return total, np.bincount(rows["segment"], pinned, minlength=num_ids).astype(np.int64)

    def mean_worth(self, now: int) -> float:
        """The mean worth of all blocks; 0 if there are no blocks."""
        with self._lock:
            rows = self._rows[self._alive()]
        return float(worth_of(rows, now).mean()) if len(rows) else 0.0

    # ------------------------------------------------------------------------------ changing

    def insert(self, run: RunHeader, segment: Segment, *, expires: int, used: int, was_found: bool = False) -> int:
        """Insert the blocks of a run, unless its segment is gone. Returns the number of new blocks.

        A block that the index has already gets its new place. But if the run `was_found` on disk, the block keeps its
        old place, unless the found copy expires later.
        """
        entries = run.entries
        rows = np.zeros(len(entries), ROW)
        rows["head"] = entries["key"][:, :16]
        rows["segment"], rows["page"] = segment.id, run.offset // PAGE + entries["page"]
        rows["expires"], rows["used"] = expires, used
        for column in ("flags", "checksum", "stored_bytes", "value"):
            rows[column] = entries[column]
        with self._lock:
            for group_id in np.unique(entries["group"]).tolist():
                rows["name"][entries["group"] == group_id] = self._number(run.namespace, group_id)
            return self._insert(rows, replaces=not was_found) if segment.id in self._segments else 0

    def insert_snapshot(self, snapshot: Snapshot, segments: list[Segment | None]) -> None:
        """Insert the blocks of a snapshot. `segments`: its segments in order; None for a segment that is gone."""
        ids = np.array([0 if segment is None else segment.id for segment in segments], np.uint32)
        with self._lock:
            numbers = np.array([0] + [self._number(*name) for name in snapshot.names], np.uint16)
        for begin in range(0, len(snapshot.rows), AT_ONCE):
            rows = snapshot.rows[begin : begin + AT_ONCE]
            with self._lock:
                is_there = np.array([segment is not None and segment.id in self._segments for segment in segments])
                rows = rows[is_there[rows["segment"]]]
                rows["segment"], rows["name"] = ids[rows["segment"]], numbers[rows["name"]]
                self._insert(rows, replaces=False)

    def touch(self, keys: BlockKeys, now: int) -> None:
        """Record that blocks were loaded."""
        with self._lock:
            rows = self._find(keys)
            rows = rows[rows >= 0]
            self._rows["used"][rows] = now
            self._rows["hits"][rows] += self._rows["hits"][rows] < 255

    def move(self, run: RunHeader, source: Segment, target: Segment) -> int:
        """Record that blocks of one segment were copied to a run of another segment. Returns the number moved.

        A block that has meanwhile got a place outside `source` keeps that place.
        """
        with self._lock:
            rows = self._find(run.keys())
            here = (rows >= 0) & (self._rows["segment"][rows] == source.id) & (target.id in self._segments)
            self._rows["segment"][rows[here]] = target.id
            self._rows["page"][rows[here]] = (run.offset // PAGE + run.entries["page"])[here]
            return int(np.count_nonzero(here))

    def forget(self, keys: BlockKeys, places: Rows | None = None) -> int:
        """Remove blocks; returns the number of blocks that were here.

        `places`: the blocks' rows from an earlier `locate`. Blocks that were missing then, or have moved since, stay.
        """
        with self._lock:
            rows = self._find(keys)
            is_here = rows >= 0
            if places is not None:
                now = self._rows[rows]
                is_here &= (
                    (places["name"] != 0) & (now["segment"] == places["segment"]) & (now["page"] == places["page"])
                )
            return self._remove(np.unique(rows[is_here]))

    def forget_expired(self, now: int) -> int:
        """Remove blocks that have expired; returns their number."""
        with self._lock:
            if now < self._next_expiry:
                return 0
            alive = self._alive()
            expires = self._rows["expires"][alive]
            is_over = (expires != 0) & (expires <= now)
            self._next_expiry = int(expires[(expires != 0) & ~is_over].min(initial=LATEST))
            return self._remove(alive[is_over])

    def snapshot(self, segments: list[Segment]) -> Snapshot:
        ids = np.array([segment.id for segment in segments], np.uint32)
        order = np.argsort(ids)
        with self._lock:
            rows = self._rows[self._alive()]
            names = list(self._numbers)
        rows = rows[np.isin(rows["segment"], ids)]
        rows["segment"] = order[np.searchsorted(ids[order], rows["segment"])]
        return Snapshot(rows, names, [(segment.path.name, segment.num_bytes) for segment in segments])

    # ------------------------------------------------------------------------------ within; the lock is held

    def _add(self, segment: Segment) -> Segment:
        self._next_id += 1
        self._segments[segment.id], self._ids[segment.path] = segment, segment.id
        number = segment_number(segment.path.name)
        if segment.is_own and number is not None:
            self._next_number = max(self._next_number, number + 1)
        return segment

    def _number(self, namespace: bytes, group_id: int) -> int:
        number = self._numbers.setdefault((namespace, group_id), len(self._numbers) + 1)
        assert number < 1 << 16, "the index knows at most 65,535 pairs of namespace and group"
        return number

    def _find(self, keys: BlockKeys, now: int | None = None) -> RowNumbers:
        """The rows of blocks; -1 for blocks that are not here or have expired at `now`."""
        names = np.zeros((len(keys), NAME_BYTES), np.uint8)
        names[:, :16] = keys.keys[:, :16]
        for group_id in np.unique(keys.group_ids).tolist():
            number = self._numbers.get((keys.namespace, group_id), 0)
            names[keys.group_ids == group_id, 16:] = np.array([number], "<u2").view(np.uint8)
        rows = self._rows_of(_joined(names))
        if now is not None:
            expires = self._rows["expires"][rows]
            rows[(expires != 0) & (expires <= now)] = -1
        return rows

    def _rows_of(self, names: list[bytes]) -> RowNumbers:
        return np.fromiter(map(self._row_of.get, names, repeat(-1)), np.int64, len(names))

    def _insert(self, rows: Rows, *, replaces: bool) -> int:
        """Insert rows. The row of a known block is replaced only if `replaces`, or if the new row expires later."""
        names = _names(rows)
        last = dict(zip(names, range(len(names)), strict=True))
        if len(last) < len(names):  # of equal names the last counts
            names, rows = list(last), rows[list(last.values())]
        numbers = self._rows_of(names)
        is_known = numbers >= 0
        old, new = self._rows["expires"][numbers], rows["expires"]
        self._next_expiry = min(self._next_expiry, int(new[new != 0].min(initial=LATEST)))
        is_written = ~is_known | replaces | ((old != 0) & ((new == 0) | (new > old)))
        numbers[~is_known] = self._take_rows(int(np.count_nonzero(~is_known)))
        self._rows[numbers[is_written]] = rows[is_written]
        self._row_of.update(zip(names, numbers.tolist(), strict=True))
        return int(np.count_nonzero(~is_known))

    def _take_rows(self, count: int) -> RowNumbers:
        num_reused = min(count, len(self._free))
        reused = self._free[len(self._free) - num_reused :]
        del self._free[len(self._free) - num_reused :]
        begin, self._num_rows = self._num_rows, self._num_rows + count - num_reused
        if self._num_rows > len(self._rows):
            self._rows.resize(max(self._num_rows, int(len(self._rows) * ROW_GROWTH)), refcheck=False)
        return np.concatenate([np.array(reused, np.int64), np.arange(begin, self._num_rows)])

    def _alive(self) -> RowNumbers:
        return np.flatnonzero(self._rows["name"][: self._num_rows])

    def _remove(self, numbers: RowNumbers) -> int:
        """Remove rows, which must be alive and all different."""
        for name in _names(self._rows[numbers]):
            del self._row_of[name]
        self._rows["name"][numbers] = 0
        self._free.extend(numbers.tolist())
        return len(numbers)

    def check_integrity(self) -> None:
        with self._lock:
            alive = self._alive()
            assert len(alive) == len(self), f"{len(alive)} rows are alive, {len(self)} are named"
            assert np.array_equal(self._rows_of(_names(self._rows[alive])), alive), "a block has another one's row"
            assert len(set(self._free)) == len(self._free), "a free row is listed twice"
            assert len(alive) + len(self._free) == self._num_rows, "a row is neither alive nor free"
            assert not self._rows["name"][self._free].any(), "a row is free and alive"
            ends = self._rows["page"][alive].astype(np.int64) * PAGE + self._rows["stored_bytes"][alive]
            for number in np.unique(self._rows["segment"][alive]).tolist():
                segment = self._segments.get(number)
                assert segment is not None, f"the index names segment {number}, which is not known"
                end = ends[self._rows["segment"][alive] == number].max()
                assert not segment.is_scanned or end <= segment.num_bytes, f"a block ends beyond {segment.path.name}"
            assert sum(segment.is_open for segment in self._segments.values()) <= 1, "two segments are open"


def worth_of(rows: Rows, now: int) -> npt.NDArray[np.float64]:
    """The worth of blocks, [blocks]: their value times (1 + loads), halved for every `HALF_LIFE_S` since the last load.

    The worth is in seconds: it estimates the time that the block will save.
    """
    age = np.maximum(0.0, float(now) - rows["used"])
    value = np.maximum(rows["value"].astype(np.float64), 1e-9)
    return value * (1.0 + rows["hits"]) * np.exp2(-age / HALF_LIFE_S)


def _names(rows: Rows) -> list[bytes]:
    return _joined(np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), ROW.itemsize)[:, :NAME_BYTES])


def _joined(names: npt.NDArray[np.uint8]) -> list[bytes]:
    joined: list[bytes] = np.ascontiguousarray(names).view(f"V{NAME_BYTES}").ravel().tolist()
    return joined


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Blocks, and the segments that they lie in."""

    rows: Rows
    """The blocks' rows; `segment` is an index into `segments`, and `name` is 1 + an index into `names`."""
    names: list[tuple[bytes, int]]
    segments: list[tuple[str, int]]
    """Name of the file, and the number of its bytes that the snapshot covers."""


def write_snapshot(files: RealFiles, path: Path, snapshot: Snapshot, clock: Clock, cipher_id: bytes) -> int:
    """Write a snapshot to a file, which replaces the old file in one step. Returns the number of bytes written.

    Raises OSError; then the old file stays.
    """
    rows, now = snapshot.rows.copy(), clock.now_s()
    # Another process can use ages and remaining lifetimes, but not the times of our clock.
    rows["used"] = now - np.minimum(rows["used"].astype(np.int64), now)
    expires = rows["expires"].astype(np.int64)
    rows["expires"] = np.where(expires == 0, 0, np.maximum(1, expires - now))
    description = json.dumps(
        {
            "num_rows": len(rows),
            "saved_s": clock.wall_s(),
            "cipher": cipher_id.hex(),
            "segments": snapshot.segments,
            "names": [(namespace.hex(), group_id) for namespace, group_id in snapshot.names],
        }
    ).encode()
    parts: list[bytes | memoryview] = [_HEAD.pack(MAGIC, len(description)), description, rows.view(np.uint8).data]
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return replace_file(files, path, path.with_name(path.name + ".new"), [*parts, digest.digest()])


def read_snapshot(files: RealFiles, path: Path, clock: Clock, cipher_id: bytes) -> Snapshot | None:
    """Read a snapshot, and convert its times to our clock. Raises OSError.

    Returns None if there is no file, if it is not as it was written, or if its blocks have another cipher or secret.
    """
    try:
        with opened(files, path) as fd:
            size = files.fstat(fd).st_size
            if not _HEAD.size + 16 <= size <= MAX_BYTES:
                return None
            content = memoryview(bytearray(size))
            if read_fully(files, fd, content, 0, uncached=False) < size:
                return None
    except FileNotFoundError:
        return None
    if xxhash.xxh3_128_digest(content[:-16]) != content[-16:]:
        return None
    try:
        return _decode(content[:-16], clock, cipher_id)
    except (ValueError, KeyError, TypeError):
        return None


def _decode(content: memoryview, clock: Clock, cipher_id: bytes) -> Snapshot | None:
    """Decode a snapshot whose checksum is right. Another version of foreword may have written different content."""
    magic, length = _HEAD.unpack_from(content)
    if magic != MAGIC:
        logger.info("the index was saved by another version of foreword, so the cache directory is scanned")
        return None
    begin = _HEAD.size + length
    described: dict[str, Any] = json.loads(bytes(content[_HEAD.size : begin]))
    if described["cipher"] != cipher_id.hex() or begin + int(described["num_rows"]) * ROW.itemsize != len(content):
        return None
    rows = np.frombuffer(content, ROW, offset=begin)
    segments = [(str(name), int(num_bytes)) for name, num_bytes in described["segments"]]
    names = [(bytes.fromhex(namespace), int(group_id)) for namespace, group_id in described["names"]]
    sizes = np.array([num_bytes for _, num_bytes in segments], np.int64)
    if len(rows):
        if rows["segment"].max() >= len(sizes) or not 1 <= rows["name"].min() <= rows["name"].max() <= len(names):
            return None
        ends = rows["page"].astype(np.int64) * PAGE + rows["stored_bytes"]
        if np.any(ends > sizes[rows["segment"]]):
            return None
    elapsed = max(0, clock.wall_s() - int(described["saved_s"]))
    now = clock.now_s()
    ttl_s = rows["expires"].astype(np.int64)
    rows["used"] = np.maximum(1, now - rows["used"].astype(np.int64) - elapsed)
    rows["expires"] = np.where(ttl_s == 0, 0, np.clip(now + ttl_s - elapsed, 1, LATEST))
    return Snapshot(rows, names, segments)
