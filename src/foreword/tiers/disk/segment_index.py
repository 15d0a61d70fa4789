"""The segment index: which block lies where, in numpy arrays of at most 80 bytes a block.

Times are those of `Clock.now_s`.

Two parts. *Rows* describe blocks, one array a column. *Slots* are an open-addressing table (double hashing) of row
numbers. A removed block leaves a dead row (name 0); slots that point to one count as passed over, not as empty, until
the table is next rebuilt. When a row is reused, an old slot may point to its new block: that is a second way to it.

A row keeps the first 16 of a key's 32 bytes. That decides where to read; what is read is checked against the whole key.

Two locks. `_lock` guards every look and change, for microseconds. `_growing` lets one thread at a time insert, so that
it can build a larger table while others look and remove in the old one.

A snapshot of the index is a file that makes a restart fast, and only a hint. One that is absent, torn, old or damaged
costs a scan of the segments' headers, and nothing else: every block is checked when it is loaded.

    "FWIDX", version 1 | bytes of the description, uint64 | description, JSON | the index's columns | xxh3-128 of all
"""

from __future__ import annotations

import contextlib
import json
import secrets
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from foreword.tiers.clock import EPOCH, LATEST, Clock
from foreword.tiers.disk.files import FileLayer, read_fully, write_fully
from foreword.tiers.disk.run_format import PAGE, padded
from foreword.tiers.disk.segments import COLUMNS, NewBlocks, Places, RowArray, Segment, heads_of
from foreword.tiers.tier import PINNED, BlockKeys, BoolArray

ROW_GROWTH = 1.125
FULLEST = 0.75
"""Share of slots that are in use before the table is rebuilt."""
AT_ONCE = 1 << 15
"""Rows that a rebuild inserts before it lets other threads run."""
HALF_LIFE_S = 6 * 3600.0
"""Of a block's worth since its last load; ds4's half-life of hits."""
ODD = np.uint64(0x9E3779B97F4A7C15)
MAGIC = b"FWIDX\0\0\1"
_HEAD = struct.Struct("<8sQ")
MAX_BYTES = 1 << 34
ROW_BYTES = sum(np.dtype(kind).itemsize for kind in COLUMNS.values())
Columns = dict[str, npt.NDArray[np.generic]]


class SegmentIndex:
    """Which block lies where. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self._names: dict[tuple[bytes, int], int] = {}
        self._rows = {column: np.zeros(0, kind) for column, kind in COLUMNS.items()}
        self._num_rows = 0
        """Rows ever used; those from here on are free and not in `_free`."""
        self._free: list[int] = []
        self._slots = np.zeros(64, np.uint32)
        """Row number + 1; 0: empty."""
        self._num_filled = 0
        self._secret = np.uint64(secrets.randbits(64))
        """Who chooses prompts must not choose slots."""

    def __len__(self) -> int:
        return self._num_rows - len(self._free)

    @property
    def num_bytes(self) -> int:
        """Memory of rows and slots."""
        return sum(column.nbytes for column in self._rows.values()) + self._slots.nbytes

    # ------------------------------------------------------------------------------ looking

    def contains(self, keys: BlockKeys, now: int) -> BoolArray:
        """Which blocks are here and have not expired, [blocks]."""
        with self._lock:
            rows = self._find(self._numbers(keys), *heads_of(keys))
            if not self._num_rows:
                return rows >= 0
            expires = self._rows["expires"][rows]
            here: BoolArray = (rows >= 0) & ((expires == 0) | (expires > now))
            return here

    def locate(self, keys: BlockKeys, now: int) -> Places:
        """Where blocks lie; rows are -1 for those that are not here or have expired."""
        with self._lock:
            rows = self._find(self._numbers(keys), *heads_of(keys))
            if self._num_rows:
                expires = self._rows["expires"][rows]
                rows[(expires != 0) & (expires <= now)] = -1
            return self._places(rows)

    def segment_worth(self, now: int, num_segments: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """The worth of each segment's blocks and the stored bytes of those that are pinned, [segments] each.

        A block's worth is its value times (1 + loads), halved for every `HALF_LIFE_S` since its last load: seconds that
        it has a chance to save.
        """
        with self._lock:
            alive = self._alive_rows()
            segments = self._rows["segment"][alive].astype(np.int64)
            worth = self._worth(alive, now)
            pinned = np.where(self._rows["flags"][alive] & PINNED, self._rows["stored_bytes"][alive], 0)
        counted = np.bincount(segments, pinned, minlength=num_segments).astype(np.int64)
        total = np.bincount(segments, worth, minlength=num_segments).astype(np.float64)
        return total, counted

    def worth_of(self, rows: RowArray, now: int) -> npt.NDArray[np.float64]:
        """The worth of rows, as in `segment_worth`, [rows]."""
        with self._lock:
            return self._worth(rows, now)

    def mean_worth(self, now: int) -> float:
        """The mean worth of all blocks; 0 if there are none."""
        with self._lock:
            alive = self._alive_rows()
            return float(self._worth(alive, now).mean()) if len(alive) else 0.0

    def ends_by_segment(self) -> dict[int, int]:
        """The byte at which the last block of each segment ends, without its padding."""
        with self._lock:
            alive = self._alive_rows()
            segments = self._rows["segment"][alive]
            ends = self._rows["page"][alive].astype(np.int64) * 4096 + self._rows["stored_bytes"][alive]
        return {int(segment): int(ends[segments == segment].max()) for segment in np.unique(segments)}

    # ------------------------------------------------------------------------------ changing

    def insert(self, blocks: NewBlocks) -> int:
        """Insert blocks, or give those that are here already their new place. Returns the number that is new."""
        return self._insert(blocks, lambda rows, chosen: np.ones(len(rows), bool))

    def insert_found(self, blocks: NewBlocks) -> int:
        """Insert blocks that were found on disk. Returns the number that is new.

        Those that are here already stay as they are, unless the one that was found expires later.
        """

        def lasts_longer(rows: RowArray, chosen: RowArray) -> BoolArray:
            old, new = self._rows["expires"][rows], blocks.expires[chosen]
            longer: BoolArray = (old != 0) & ((new == 0) | (new > old))
            return longer

        return self._insert(blocks, lasts_longer)

    def _insert(self, blocks: NewBlocks, replaces: Callable[[RowArray, RowArray], BoolArray]) -> int:
        if not len(blocks.keys):
            return 0
        with self._growing:
            self._make_room(len(blocks.keys))
            with self._lock:
                numbers = self._numbers(blocks.keys, add=True)
                high, low = heads_of(blocks.keys)
                # Of equal names in one call the last counts.
                names = np.stack([high, low, numbers.astype(np.uint64)], axis=1)[::-1]
                _, last = np.unique(names, axis=0, return_index=True)
                chosen = np.sort(len(high) - 1 - last)
                rows = self._find(numbers[chosen], high[chosen], low[chosen])
                known = rows >= 0
                wanted = ~known
                wanted[known] = replaces(rows[known], chosen[known])
                new = self._take_rows(int(np.count_nonzero(~known)))
                rows[~known] = new
                self._write_rows(rows[wanted], blocks, chosen[wanted], numbers, high, low)
                self._num_filled += self._claim(self._slots, new, replace_dead=True)
                return len(new)

    def touch(self, places: Places, now: int) -> None:
        """Note that blocks were loaded from these places."""
        with self._lock:
            rows = self._unmoved(places)
            self._rows["used"][rows] = now
            self._rows["hits"][rows] += self._rows["hits"][rows] < 255

    def move(self, places: Places, segment: int, pages: npt.NDArray[np.uint32]) -> int:
        """Note that blocks were copied from these places to `segment`; `pages` is [blocks].

        Returns the number of blocks moved. Those that were removed or have moved since then stay as they are.
        """
        with self._lock:
            still = np.isin(places.rows, self._unmoved(places)) & (places.rows >= 0)
            rows = places.rows[still]
            self._rows["segment"][rows] = segment
            self._rows["page"][rows] = pages[still]
            return len(rows)

    def forget(self, keys: BlockKeys) -> int:
        """Remove blocks; returns the number that was here."""
        with self._lock:
            rows = self._find(self._numbers(keys), *heads_of(keys))
            return self._remove(np.unique(rows[rows >= 0]))

    def forget_places(self, places: Places) -> int:
        """Remove blocks if they still lie where they lay then; returns their number."""
        with self._lock:
            return self._remove(np.unique(self._unmoved(places)))

    def forget_segment(self, segment: int) -> int:
        """Remove all blocks of a segment; returns their number."""
        with self._lock:
            return self._remove(self._rows_in(segment))

    def forget_expired(self, now: int) -> int:
        """Remove blocks that have expired; returns their number."""
        with self._lock:
            alive = self._alive_rows()
            expires = self._rows["expires"][alive]
            return self._remove(alive[(expires != 0) & (expires <= now)])

    # ------------------------------------------------------------------------------ for the snapshot

    def copy_rows(
        self, segments: npt.NDArray[np.uint32]
    ) -> tuple[dict[str, npt.NDArray[np.generic]], list[tuple[bytes, int]]]:
        """Columns of all blocks in some segments, and the names that `name` - 1 refers to."""
        with self._lock:
            alive = self._alive_rows()
            alive = alive[np.isin(self._rows["segment"][alive], segments)]
            return {column: values[alive] for column, values in self._rows.items()}, list(self._names)

    def insert_rows(self, columns: dict[str, npt.NDArray[np.generic]], names: list[tuple[bytes, int]]) -> int:
        """Insert blocks from columns as `copy_rows` gives them, but not those that are here already.

        Returns the number inserted. `name` must be at least 1 and at most `len(names)`.
        """
        with self._lock:
            numbers = np.array([0] + [self._number(*name) for name in names], np.uint16)
        inserted = 0
        for begin in range(0, len(columns["name"]), AT_ONCE):
            part = {column: values[begin : begin + AT_ONCE] for column, values in columns.items()}
            part["name"] = numbers[part["name"].astype(np.int64)]
            with self._growing:
                if begin == 0:
                    self._make_room(len(columns["name"]))
                self._make_room(len(part["name"]))
                with self._lock:
                    absent = self._find(part["name"], part["high"], part["low"]) < 0
                    rows = self._take_rows(int(absent.sum()))
                    for column, values in part.items():
                        self._rows[column][rows] = values[absent]
                    self._num_filled += self._claim(self._slots, rows, replace_dead=True)
                    inserted += len(rows)
        return inserted

    # ------------------------------------------------------------------------------ within

    def _number(self, namespace: bytes, group_id: int) -> int:
        number = self._names.setdefault((namespace, group_id), len(self._names) + 1)
        assert number < 1 << 16, "the index knows at most 65,535 pairs of namespace and group"
        return number

    def _numbers(self, keys: BlockKeys, *, add: bool = False) -> npt.NDArray[np.uint16]:
        numbers = np.zeros(len(keys), np.uint16)
        for group_id in np.unique(keys.group_ids).tolist():
            name = (keys.namespace, group_id)
            numbers[keys.group_ids == group_id] = self._number(*name) if add else self._names.get(name, 0)
        return numbers

    def _probe(
        self,
        num_slots: int,
        numbers: npt.NDArray[np.generic],
        high: npt.NDArray[np.generic],
        low: npt.NDArray[np.generic],
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """First slot and step of names. Steps are odd, so they reach every slot."""
        shift = np.uint64(64 - num_slots.bit_length() + 1)
        mixed = (high.astype(np.uint64) ^ self._secret) * ODD + numbers.astype(np.uint64)
        first = (mixed * ODD) >> shift
        step = ((low.astype(np.uint64) ^ self._secret) * ODD) >> shift
        return first, step | np.uint64(1)

    def _find(
        self, numbers: npt.NDArray[np.generic], high: npt.NDArray[np.generic], low: npt.NDArray[np.generic]
    ) -> RowArray:
        """Rows of names, -1 where there is none."""
        found = np.full(len(high), -1, np.int64)
        if not self._num_rows:
            return found
        slots, mask = self._slots, np.uint64(len(self._slots) - 1)
        known, highs, lows = self._rows["name"], self._rows["high"], self._rows["low"]
        waiting = np.flatnonzero(numbers)
        at, step = self._probe(len(slots), numbers[waiting], high[waiting], low[waiting])
        while len(waiting):
            content = slots[at].astype(np.int64)
            rows = np.maximum(content - 1, 0)
            same = (highs[rows] == high[waiting]) & (lows[rows] == low[waiting]) & (known[rows] == numbers[waiting])
            same &= content > 0
            found[waiting[same]] = rows[same]
            on = ~same & (content > 0)
            waiting, step = waiting[on], step[on]
            at = (at[on] + step) & mask
        return found

    def _claim(self, slots: npt.NDArray[np.uint32], rows: RowArray, *, replace_dead: bool) -> int:
        """Give rows, whose names are not in the table, a slot each. Returns the number of slots no longer empty."""
        mask, filled = np.uint64(len(slots) - 1), 0
        known = self._rows["name"]
        at, step = self._probe(len(slots), known[rows], self._rows["high"][rows], self._rows["low"][rows])
        content = (rows + 1).astype(np.uint32)
        while len(content):
            there = slots[at].astype(np.int64)
            free = there == 0
            if replace_dead:
                free |= known[np.maximum(there - 1, 0)] == 0
            slots[at[free]] = content[free]
            settled = free & (slots[at] == content)
            filled += int(np.count_nonzero(settled & (there == 0)))
            content, step = content[~settled], step[~settled]
            at = (at[~settled] + step) & mask
        return filled

    def _make_room(self, num_blocks: int) -> None:
        """Make room for that number of new blocks; the caller holds `_growing` alone."""
        with self._lock:
            short = self._num_rows + num_blocks - len(self._free) - len(self._rows["name"])
            if short > 0:
                capacity = max(1024, len(self._rows["name"]) + short, int(len(self._rows["name"]) * ROW_GROWTH))
                for column in self._rows.values():
                    column.resize(capacity, refcheck=False)
            crowded = self._num_filled + num_blocks > FULLEST * len(self._slots)
            rows = self._alive_rows() if crowded else None
        if rows is None:
            return
        size = 64
        while len(rows) + num_blocks > FULLEST * size:
            size *= 2
        slots, filled = np.zeros(size, np.uint32), 0
        # Only removals happen meanwhile; what they remove is a dead row in the new table, as it would be in the old.
        for begin in range(0, len(rows), AT_ONCE):
            filled += self._claim(slots, rows[begin : begin + AT_ONCE], replace_dead=False)
        with self._lock:
            self._slots, self._num_filled = slots, filled

    def _take_rows(self, count: int) -> RowArray:
        reused = min(count, len(self._free))
        rows = np.empty(count, np.int64)
        rows[:reused] = self._free[len(self._free) - reused :]
        del self._free[len(self._free) - reused :]
        rows[reused:] = np.arange(self._num_rows, self._num_rows + count - reused)
        self._num_rows += count - reused
        return rows

    def _write_rows(
        self,
        rows: RowArray,
        blocks: NewBlocks,
        chosen: RowArray,
        numbers: npt.NDArray[np.uint16],
        high: npt.NDArray[np.uint64],
        low: npt.NDArray[np.uint64],
    ) -> None:
        checksums = np.ascontiguousarray(blocks.checksums).view("<u8")
        columns: dict[str, npt.NDArray[np.generic]] = {
            "high": high,
            "low": low,
            "checksum_high": checksums[:, 0],
            "checksum_low": checksums[:, 1],
            "segment": blocks.segments,
            "page": blocks.pages,
            "stored_bytes": blocks.stored_bytes,
            "expires": blocks.expires,
            "used": blocks.used,
            "value": blocks.values,
            "name": numbers,
            "flags": blocks.flags,
            "hits": blocks.hits,
        }
        for column, values in columns.items():
            self._rows[column][rows] = values[chosen]

    def _remove(self, rows: RowArray) -> int:
        """Remove rows, which are alive and differ from each other."""
        self._rows["name"][rows] = 0
        self._free.extend(rows.tolist())
        return len(rows)

    def _alive_rows(self) -> RowArray:
        return np.flatnonzero(self._rows["name"][: self._num_rows])

    def _rows_in(self, segment: int) -> RowArray:
        rows = np.flatnonzero(self._rows["segment"][: self._num_rows] == segment)
        alive: RowArray = rows[self._rows["name"][rows] != 0]
        return alive

    def _unmoved(self, places: Places) -> RowArray:
        """Of places with a row, the rows that still have the same block in the same place."""
        here = places.rows >= 0
        rows = places.rows[here]
        if not len(rows):
            return rows
        same = self._rows["name"][rows] != 0
        same &= self._rows["segment"][rows] == places.segments[here]
        same &= self._rows["page"][rows] == places.pages[here]
        unmoved: RowArray = rows[same]
        return unmoved

    def _places(self, rows: RowArray) -> Places:
        if not self._num_rows:  # nothing to read from; every row is -1
            empty = np.zeros(len(rows), np.uint32)
            return Places(rows, empty, empty, empty, np.zeros((len(rows), 16), np.uint8))
        read = self._rows
        checksums = np.stack([read["checksum_high"][rows], read["checksum_low"][rows]], axis=1)
        return Places(
            rows,
            read["segment"][rows],
            read["page"][rows],
            read["stored_bytes"][rows],
            checksums.view(np.uint8).reshape(len(rows), 16),
        )

    def _worth(self, rows: RowArray, now: int) -> npt.NDArray[np.float64]:
        age = np.maximum(0.0, float(now) - self._rows["used"][rows])
        value = np.maximum(self._rows["value"][rows].astype(np.float64), 1e-9)
        return value * (1.0 + self._rows["hits"][rows]) * np.exp2(-age / HALF_LIFE_S)

    def check_integrity(self) -> None:
        """Raise AssertionError unless rows, slots and counts agree."""
        with self._growing, self._lock:
            alive = self._alive_rows()
            assert len(alive) == len(self), f"{len(alive)} rows are alive, {len(self)} are counted"
            assert len(set(self._free)) == len(self._free), "a free row is listed twice"
            assert not self._rows["name"][self._free].any(), "a row is free and alive"
            assert self._num_filled == np.count_nonzero(self._slots), "filled slots are miscounted"
            assert self._num_filled <= FULLEST * len(self._slots), "the table is too full"
            columns = [self._rows[column][alive] for column in ("name", "high", "low")]
            assert np.array_equal(self._find(*columns), alive), "a block is not found in its own row"


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
