"""Segments: files that are rows of runs, and the scan that finds runs by their headers.

A segment is appended to by one thread of one process, sealed once, then only read, and unlinked whole. Its name is
`000042-9f3a1c07.fwseg`: a number that grows, so that the last one of a live process is the one that it may be writing,
and chance, so that no name is used twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foreword.tiers.disk.files import RealFiles, read_fully
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

SUFFIX = ".fwseg"
_NAME = re.compile(r"(\d{6,})-[0-9a-f]{8}\.fwseg")
RESYNC_BYTES = 1 << 20
"""Read at once where headers are looked for page by page."""


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


def segment_number(name: str) -> int | None:
    """The number in a segment's name; None if it is not such a name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a segment where a header should begin and none verifies, from `offset` to `end` (exclusive)."""

    offset: int
    end: int


def scan_runs(files: RealFiles, fd: int, begin: int, end: int, *, uncached: bool) -> Iterator[RunHeader | Damage]:
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
    files: RealFiles, fd: int, header: RunHeader, index: int, out: memoryview, *, uncached: bool
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


def _read_header(files: RealFiles, fd: int, offset: int, buffer: memoryview, *, uncached: bool) -> RunHeader | None:
    if read_fully(files, fd, buffer[:PAGE], offset, uncached=uncached) < PAGE:
        return None
    length = header_length(buffer[:PAGE])
    if length is None:
        return None
    rest = buffer[PAGE:length]
    if read_fully(files, fd, rest, offset + PAGE, uncached=uncached) < len(rest):
        return None
    return decode_header(buffer[:length], offset)


def _next_header(files: RealFiles, fd: int, begin: int, end: int, buffer: memoryview, *, uncached: bool) -> int:
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
