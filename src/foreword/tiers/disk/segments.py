"""Segments: files that are rows of runs, the table of those we know, and the scan that finds runs by their headers.

A segment is appended to by one thread of one process, sealed once, then only read, and unlinked whole. Its name is
`000042-9f3a1c07.fwseg`: a number that grows, so that the last one of a live process is the one that it may be writing,
and chance, so that no name is used twice.
"""

from __future__ import annotations

import re
import secrets
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from foreword.tiers.disk.files import FileLayer, read_fully
from foreword.tiers.disk.run_format import (
    MAGIC,
    MAX_HEADER_BYTES,
    PAGE,
    RunHeader,
    block_checksum,
    decode_header,
    header_length,
    padded,
)
from foreword.tiers.tier import BlockKeys, BoolArray

RowArray = npt.NDArray[np.int64]
COLUMNS: dict[str, str] = {
    "high": "<u8",  # bytes 0 to 8 (exclusive) of the key
    "low": "<u8",  # bytes 8 to 16
    "checksum_high": "<u8",
    "checksum_low": "<u8",
    "segment": "<u4",
    "page": "<u4",  # of the payload in the segment
    "stored_bytes": "<u4",
    "expires": "<u4",  # 0: never
    "used": "<u4",  # last load, or when it was stored
    "value": "<f4",
    "name": "<u2",  # number of (namespace, group); 0: the row is dead
    "flags": "u1",
    "hits": "u1",  # loads, at most 255
}
SUFFIX = ".fwseg"
_NAME = re.compile(r"(\d{6,})-[0-9a-f]{8}\.fwseg")
RESYNC_BYTES = 1 << 20
"""Read at once where headers are looked for page by page."""

assert sum(np.dtype(kind).itemsize for kind in COLUMNS.values()) == 60


@dataclass(frozen=True, slots=True)
class Places:
    """Where blocks lie, as of the call. Arrays of [blocks]; where `rows` is -1 the others mean nothing."""

    rows: RowArray
    segments: npt.NDArray[np.uint32]
    pages: npt.NDArray[np.uint32]
    stored_bytes: npt.NDArray[np.uint32]
    checksums: npt.NDArray[np.uint8]
    """[blocks, 16]"""

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, chosen: RowArray | BoolArray) -> Places:
        """The chosen places, in order."""
        return Places(
            self.rows[chosen],
            self.segments[chosen],
            self.pages[chosen],
            self.stored_bytes[chosen],
            self.checksums[chosen],
        )


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """Blocks to insert, whose payloads are written. Arrays of [blocks]."""

    keys: BlockKeys
    segments: npt.NDArray[np.uint32]
    pages: npt.NDArray[np.uint32]
    stored_bytes: npt.NDArray[np.uint32]
    checksums: npt.NDArray[np.uint8]
    """[blocks, 16]"""
    expires: npt.NDArray[np.uint32]
    used: npt.NDArray[np.uint32]
    values: npt.NDArray[np.float32]
    flags: npt.NDArray[np.uint8]
    hits: npt.NDArray[np.uint8]


def heads_of(keys: BlockKeys) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """The first 16 bytes of keys as two numbers each."""
    heads = np.ascontiguousarray(keys.keys[:, :16]).view("<u8")
    return heads[:, 0], heads[:, 1]


@dataclass(slots=True)
class Segment:
    """One segment file."""

    id: int
    """In this process; never used twice."""
    path: Path
    is_own: bool
    """This process may append to it or unlink it."""
    num_bytes: int = 0
    """Bytes of complete runs, or the file's size when it was found."""
    physical_bytes: int = 0
    is_open: bool = False
    """This process appends to it."""
    is_scanned: bool = False
    """All its blocks up to `num_bytes` are in the index."""


class SegmentTable:
    """The segments that this process knows, its own and others'. Any thread may call any method."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_id: dict[int, Segment] = {}
        self._ids: dict[Path, int] = {}
        self._next_id = 0
        self._next_number = 1

    @property
    def num_ids(self) -> int:
        """Every id is below this number."""
        return self._next_id

    def open_new(self, folder: Path) -> Segment:
        """A segment that this process will write, under a new name. It is known before its file is made."""
        with self._lock:
            name = f"{self._next_number:06d}-{secrets.token_hex(4)}{SUFFIX}"
            return self._add(Segment(self._next_id, folder / name, is_own=True, is_open=True, is_scanned=True))

    def add(self, path: Path, *, is_own: bool) -> Segment:
        """The segment of a path, with a new id unless the path is known."""
        with self._lock:
            if path in self._ids:
                return self._by_id[self._ids[path]]
            return self._add(Segment(self._next_id, path, is_own))

    def remove(self, segment: Segment) -> None:
        """Forget a segment; its id stays unused."""
        with self._lock:
            if self._by_id.pop(segment.id, None) is not None:
                del self._ids[segment.path]

    def get(self, segment_id: int) -> Segment | None:
        return self._by_id.get(segment_id)

    def knows(self, path: Path) -> bool:
        return path in self._ids

    def all(self) -> list[Segment]:
        """All segments, oldest id first."""
        with self._lock:
            return list(self._by_id.values())

    def own(self) -> list[Segment]:
        """Those of this process, oldest id first."""
        return [segment for segment in self.all() if segment.is_own]

    def _add(self, segment: Segment) -> Segment:
        self._next_id += 1
        self._by_id[segment.id], self._ids[segment.path] = segment, segment.id
        number = segment_number(segment.path.name)
        if segment.is_own and number is not None:
            self._next_number = max(self._next_number, number + 1)
        return segment


def segment_number(name: str) -> int | None:
    """The number in a segment's name; None if it is not such a name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def new_blocks(
    entries: npt.NDArray[np.void],
    keys: BlockKeys,
    segment_id: int,
    offsets: int | npt.NDArray[np.int64],
    expires: int | npt.NDArray[np.int64],
    used: int | npt.NDArray[np.int64],
) -> NewBlocks:
    """What the index is to know of blocks of one segment.

    The offsets of their runs and the moments at which they expire and were last used are one for all, or [blocks].
    """
    count = len(entries)

    def column(values: int | npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        return np.broadcast_to(np.asarray(values, np.uint32), count)

    return NewBlocks(
        keys,
        column(segment_id),
        (offsets // PAGE + entries["page"].astype(np.int64)).astype(np.uint32),
        entries["stored_bytes"].astype(np.uint32),
        np.ascontiguousarray(entries["checksum"]),
        column(expires),
        column(used),
        entries["value"].astype(np.float32),
        entries["flags"].astype(np.uint8),
        np.zeros(count, np.uint8),
    )


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a segment where a header should begin and none verifies, from `offset` to `end` (exclusive)."""

    offset: int
    end: int


def scan_runs(files: FileLayer, fd: int, begin: int, end: int, *, uncached: bool) -> Iterator[RunHeader | Damage]:
    """The runs between two offsets, in order. Reads headers only; payloads are not looked at.

    After a damaged header it goes on at the next page that holds a sound one. Raises OSError.
    """
    buffer = memoryview(bytearray(MAX_HEADER_BYTES))
    offset = begin
    while offset < end:
        header = _read_header(files, fd, offset, buffer, uncached=uncached)
        if header is None:
            damaged = offset
            offset = _next_header(files, fd, offset + PAGE, end, buffer, uncached=uncached)
            yield Damage(damaged, offset)
            continue
        yield header
        offset += header.run_bytes


def read_block(
    files: FileLayer, fd: int, header: RunHeader, index: int, out: memoryview, *, uncached: bool
) -> bool | None:
    """Read a block as it is stored, with its padding, into `out`, and verify it: None if the file ends before it does.

    `out` has the block's padded length. Raises OSError.
    """
    entry = header.entries[index]
    stored_bytes = int(entry["stored_bytes"])
    assert len(out) == padded(stored_bytes)
    if read_fully(files, fd, out, header.offset + int(entry["page"]) * PAGE, uncached=uncached) < len(out):
        return None
    name = header.namespace, int(entry["group"]), entry["key"].tobytes()
    return block_checksum(*name, stored_bytes, out) == bytes(entry["checksum"])


def _read_header(files: FileLayer, fd: int, offset: int, buffer: memoryview, *, uncached: bool) -> RunHeader | None:
    if read_fully(files, fd, buffer[:PAGE], offset, uncached=uncached) < PAGE:
        return None
    length = header_length(buffer[:PAGE])
    if length is None:
        return None
    rest = buffer[PAGE:length]
    if read_fully(files, fd, rest, offset + PAGE, uncached=uncached) < len(rest):
        return None
    return decode_header(buffer[:length], offset)


def _next_header(files: FileLayer, fd: int, begin: int, end: int, buffer: memoryview, *, uncached: bool) -> int:
    """The next offset with a sound header, or `end`."""
    pages = memoryview(bytearray(RESYNC_BYTES))
    magic = np.frombuffer(MAGIC, np.uint8)
    for offset in range(begin, end, RESYNC_BYTES):
        count = read_fully(files, fd, pages, offset, uncached=uncached) // PAGE
        starts = np.frombuffer(pages, np.uint8).reshape(-1, PAGE)[:count, : len(magic)]
        for page in np.flatnonzero((starts == magic).all(axis=1)).tolist():
            found = offset + page * PAGE
            if found < end and _read_header(files, fd, found, buffer, uncached=uncached) is not None:
                return found
        if count < RESYNC_BYTES // PAGE:
            break
    return end
