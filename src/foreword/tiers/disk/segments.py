"""Segments: files of consecutive runs, in format fwseg, version 1, and the scan that finds runs by their headers.

One thread of one process appends to a segment and seals it. Then the segment is only read, and at last it is unlinked
as a whole. Its name is, for example, `000042-9f3a1c07.fwseg`. The number grows, so a live process is usually writing
the segment with its highest number. The random digits ensure that no name is used twice. A run is a header of whole
pages, followed by the payloads, each padded with zeros to whole pages:

    | header: page 0 ... | block 0 ......... pad | block 1 ......... pad | ...
    ^ run offset         ^ page of block 0       ^ page of block 1       pages of 4,096 bytes, from the run's start

The header holds all that is needed to find the blocks again without an index (as in restic's and borg's packs):

    0   magic "FWRUN", version 1       56  created, seconds since 1970      88  offset of the run in its segment
    8   bytes of the header            64  expires, seconds; 0: never       96  entries of 72 bytes, one a block
    12  number of blocks               72  writer's version                 ..  zeros
    16  sequence number                76  0                                -16 xxh3-128 of the header before it
    24  namespace, 16 bytes            80  bytes of the run
    40  cipher's id, 16 bytes

    entry: key 32, xxh3-128 of the padded payload 16, parent (index in the run or -1) int32, group uint16, flags uint16,
           stored bytes uint32, page uint32, value float32, 0 uint32                          all numbers little endian

The checksum of a block is seeded with its name and length. So the sound bytes of another block do not verify.

A `RunBuffer` makes a run in one buffer, with the header before the blocks:

    begin(lengths)    | room for the header |
    place, add        |                     | block 0 ... pad | block 1 ... pad |
    finish            |      | header       | block 0 ... pad | block 1 ... pad |   no gap
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from foreword.tiers.disk.files import RealFiles, read_fully
from foreword.tiers.tier import KEY_BYTES, NAMESPACE_BYTES, BlockKeys, BlockRun

PAGE = 4096
MAGIC = b"FWRUN\0\0\1"
WRITER_VERSION = 1
CHECKSUM_BYTES = 16
MAX_RUN_BYTES = 8 << 20
"""The most bytes of a run that we write, unless a single block is longer."""
MAX_HEADER_BYTES = 1 << 20
MAX_STORED_BYTES = 1 << 30
"""The most stored bytes of a block; a header with a longer block is damaged."""
SUFFIX = ".fwseg"
_NAME = re.compile(r"(\d{6,})-[0-9a-f]{8}\.fwseg")
RESYNC_BYTES = 1 << 20
"""The number of bytes to read at once when the next header is looked for page by page."""
_HEAD = struct.Struct("<8sIIQ16s16sQQIIQQ")
ENTRY = np.dtype(
    [
        ("key", "u1", (KEY_BYTES,)),
        ("checksum", "u1", (CHECKSUM_BYTES,)),
        ("parent", "<i4"),
        ("group", "<u2"),
        ("flags", "<u2"),
        ("stored_bytes", "<u4"),
        ("page", "<u4"),
        ("value", "<f4"),
        ("reserved", "<u4"),
    ]
)
IndexArray = npt.NDArray[np.int64]

assert _HEAD.size == 96
assert ENTRY.itemsize == 72


@dataclass(frozen=True, slots=True)
class RunHeader:
    """The header of a run. `entries` has dtype `ENTRY`, [blocks]."""

    header_bytes: int
    run_bytes: int
    sequence: int
    namespace: bytes
    cipher_id: bytes
    created_s: int
    expires_s: int
    offset: int
    entries: npt.NDArray[np.void]

    def keys(self) -> BlockKeys:
        return BlockKeys(self.namespace, self.entries["group"], self.entries["key"])

    def within(self, num_bytes: int) -> RunHeader:
        """This header without the blocks that end (padding included) beyond the file's first `num_bytes` bytes."""
        pages = self.entries["page"] + -(-self.entries["stored_bytes"].astype(np.int64) // PAGE)
        ends = self.offset + pages * PAGE
        return self if ends.max() <= num_bytes else replace(self, entries=self.entries[ends <= num_bytes])


def padded(num_bytes: int) -> int:
    """`num_bytes`, rounded up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE


def header_bytes_of(num_blocks: int) -> int:
    """The length of the header of a run with that number of blocks."""
    return padded(_HEAD.size + num_blocks * ENTRY.itemsize + CHECKSUM_BYTES)


def block_checksum(namespace: bytes, group_id: int, key: bytes, stored_bytes: int, payload: memoryview) -> bytes:
    """xxh3-128 of a stored payload with its padding, seeded with the block's name and length; 16 bytes."""
    name = struct.pack("<16sHI", namespace, group_id, stored_bytes) + key
    return xxhash.xxh3_128_digest(payload, seed=xxhash.xxh3_64_intdigest(name))


def encode_header(header: RunHeader) -> bytes:
    """The pages of a run's header."""
    entries = np.ascontiguousarray(header.entries, ENTRY)
    assert header.header_bytes == header_bytes_of(len(entries))
    head = _HEAD.pack(
        MAGIC,
        header.header_bytes,
        len(entries),
        header.sequence,
        header.namespace,
        header.cipher_id,
        header.created_s,
        header.expires_s,
        WRITER_VERSION,
        0,
        header.run_bytes,
        header.offset,
    )
    body = (head + entries.tobytes()).ljust(header.header_bytes - CHECKSUM_BYTES, b"\0")
    return body + xxhash.xxh3_128_digest(body)


def header_length(first_bytes: memoryview | bytes) -> int | None:
    """The length of the header that begins with these bytes (at least 16); None if they begin no header."""
    if len(first_bytes) < 16 or bytes(first_bytes[:8]) != MAGIC:
        return None
    header_bytes, count = struct.unpack_from("<II", first_bytes, 8)
    if count < 1 or header_bytes > MAX_HEADER_BYTES or header_bytes != header_bytes_of(count):
        return None
    return int(header_bytes)


def decode_header(pages: memoryview | bytes, offset: int) -> RunHeader | None:
    """The header that fills `pages`, found at `offset` in its segment; None if any part of the header is damaged."""
    if header_length(pages) != len(pages):
        return None
    body = bytes(pages[:-CHECKSUM_BYTES])
    if xxhash.xxh3_128_digest(body) != bytes(pages[-CHECKSUM_BYTES:]):
        return None
    _, header_bytes, count, sequence, namespace, cipher_id, created, expires, version, _, run_bytes, own_offset = (
        _HEAD.unpack_from(body)
    )
    entries = np.frombuffer(body, ENTRY, count, _HEAD.size)
    starts = entries["page"].astype(np.int64) * PAGE
    lengths = entries["stored_bytes"].astype(np.int64)
    plausible = (
        version == WRITER_VERSION
        and own_offset == offset
        and len(namespace) == NAMESPACE_BYTES
        and header_bytes < run_bytes <= 1 << 40
        and run_bytes % PAGE == 0
        and bool(np.all((lengths > 0) & (lengths <= MAX_STORED_BYTES)))
        and bool(np.all((starts >= header_bytes) & (starts + lengths <= run_bytes)))
        and bool(np.all((entries["parent"] >= -1) & (entries["parent"] < np.arange(count))))
        and bool(np.all(np.isfinite(entries["value"])))
    )
    if not plausible:
        return None
    return RunHeader(header_bytes, run_bytes, sequence, namespace, cipher_id, created, expires, own_offset, entries)


def split_run(stored_bytes: IndexArray, chosen: IndexArray) -> list[IndexArray]:
    """Split the chosen blocks into runs of at most `MAX_RUN_BYTES` each; returns the blocks' indices for each run."""
    parts: list[list[int]] = [[]]
    total = 0
    for index in chosen.tolist():
        size = padded(int(stored_bytes[index]))
        part = parts[-1]
        if part and header_bytes_of(len(part) + 1) + total + size > MAX_RUN_BYTES:
            parts.append([])
            total = 0
        parts[-1].append(index)
        total += size
    return [np.array(part, np.int64) for part in parts if part]


def run_bytes_of(stored_bytes: IndexArray) -> int:
    """The size in bytes of a run of blocks with these stored lengths."""
    return header_bytes_of(len(stored_bytes)) + sum(padded(size) for size in stored_bytes.tolist())


@dataclass(slots=True)
class Segment:
    """One segment file."""

    id: int
    """The segment's number in this process, which never uses a number twice."""
    path: Path
    is_own: bool
    """Whether this process may append to the segment or unlink it."""
    num_bytes: int = 0
    """If this process wrote the segment: the bytes of its complete runs; otherwise the file's size at the last scan."""
    physical_bytes: int = 0
    is_open: bool = False
    """Whether this process appends to the segment."""
    is_scanned: bool = False
    """Whether all blocks in the segment's first `num_bytes` bytes are in the index."""


def segment_number(name: str) -> int | None:
    """The number in a segment's name; None if it is not the name of a segment."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes `offset` to `end` (exclusive) of a segment, where a header should begin but none verifies."""

    offset: int
    end: int


def scan_runs(files: RealFiles, fd: int, begin: int, end: int, *, uncached: bool) -> Iterator[RunHeader | Damage]:
    """Yield the runs between two offsets, in order. Reads headers only, not payloads.

    After a damaged header, the scan goes on at the next page with a sound header. Raises OSError.
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
    """Read a block as it is stored, with its padding, into `out`, and return whether it verifies.

    None if the file ends before the block does. `out` has the block's padded length. Raises OSError.
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
    remainder = buffer[PAGE:length]
    if read_fully(files, fd, remainder, offset + PAGE, uncached=uncached) < len(remainder):
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
            candidate = offset + page * PAGE
            if candidate < end and _read_header(files, fd, candidate, buffer, uncached=uncached) is not None:
                return candidate
        if count < RESYNC_BYTES // PAGE:
            break
    return end


class RunBuffer:
    """Gathers one run after the other. Memory from `place` and `finish` is valid until the next `begin`."""

    def __init__(self) -> None:
        self._data = np.zeros(MAX_RUN_BYTES, np.uint8)
        self._entries = np.zeros(0, ENTRY)
        self._first = self._end = 0
        self._index_of: dict[int, int] = {}
        """Maps the index that `add` or `copy` got for a block to the block's index in the new run."""

    def begin(self, stored_bytes: IndexArray) -> None:
        """Begin a run of blocks with these stored lengths; some of the blocks may be left out."""
        num_bytes = run_bytes_of(stored_bytes)
        if len(self._data) < num_bytes:  # one block is longer than a run usually is
            self._data = np.zeros(num_bytes, np.uint8)
        self._entries = np.zeros(len(stored_bytes), ENTRY)
        self._first = self._end = header_bytes_of(len(stored_bytes))
        self._index_of = {}

    def place(self, stored_bytes: int) -> memoryview:
        """The memory for the next block as it is stored, and for its padding, which is zeros already."""
        end = self._end + padded(stored_bytes)
        self._data[self._end + stored_bytes : end] = 0
        return self._data[self._end : end].data

    def add(self, run: BlockRun, index: int, stored_bytes: int) -> None:
        """Keep the bytes that the caller wrote to the memory from `place` as the `index`-th block of `run`."""
        key, group_id = run.keys.keys[index], int(run.keys.group_ids[index])
        payload = self._data[self._end : self._end + padded(stored_bytes)].data
        entry = self._entries[len(self._index_of)]
        entry["key"], entry["group"] = key, group_id
        checksum = block_checksum(run.keys.namespace, group_id, key.tobytes(), stored_bytes, payload)
        entry["checksum"] = np.frombuffer(checksum, np.uint8)
        entry["parent"] = self._index_of.get(int(run.parents[index]), -1)
        entry["flags"], entry["value"] = run.flags[index], run.values[index]
        entry["stored_bytes"] = stored_bytes
        self._keep(index, stored_bytes)

    def copy(self, header: RunHeader, index: int) -> None:
        """Keep the bytes in `place` as a copy of the `index`-th block of another run. The copy has no parent."""
        self._entries[len(self._index_of)] = header.entries[index]
        self._entries["parent"][len(self._index_of)] = -1
        self._keep(index, int(header.entries[index]["stored_bytes"]))

    def _keep(self, index: int, stored_bytes: int) -> None:
        self._entries["page"][len(self._index_of)] = self._end // PAGE
        self._index_of[index] = len(self._index_of)
        self._end += padded(stored_bytes)

    @property
    def kept(self) -> IndexArray:
        """The indices of the blocks that were kept, in the order of the run."""
        return np.array(list(self._index_of), np.int64)

    @property
    def num_bytes(self) -> int:
        return self._end - self._first + header_bytes_of(len(self._index_of))

    def finish(
        self, sequence: int, namespace: bytes, cipher_id: bytes, offset: int, *, created_s: int, expires_s: int
    ) -> tuple[RunHeader, memoryview]:
        """Complete a run of at least one block at `offset` in its file; returns its header, and all its bytes."""
        # If blocks were left out, the header is shorter than its room, and the run begins later in the buffer.
        length, entries = header_bytes_of(len(self._index_of)), self._entries[: len(self._index_of)]
        begin = self._first - length
        entries["page"] -= begin // PAGE
        numbers = length, self._end - begin, sequence
        header = RunHeader(*numbers, namespace, cipher_id, created_s, expires_s, offset, entries)
        self._data[begin : self._first] = np.frombuffer(encode_header(header), np.uint8)
        return header, self._data[begin : self._end].data
