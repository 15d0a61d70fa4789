"""A run in the making: blocks go into one buffer, and their header before them.

begin(lengths)    | room for the header |
place, add        |                     | block 0 ... pad | block 1 ... pad |
finish            |      | header       | block 0 ... pad | block 1 ... pad |   no gap
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foreword.tiers.disk.run_format import (
    ENTRY,
    MAX_RUN_BYTES,
    PAGE,
    RunHeader,
    block_checksum,
    encode_header,
    header_bytes_of,
    padded,
)
from foreword.tiers.tier import BlockRun

IndexArray = npt.NDArray[np.int64]


def split_run(stored_bytes: IndexArray, chosen: IndexArray) -> list[IndexArray]:
    """The chosen blocks as parts that are written at once, each of at most `MAX_RUN_BYTES`."""
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
    """Bytes of a run of blocks with these stored lengths."""
    return header_bytes_of(len(stored_bytes)) + sum(padded(size) for size in stored_bytes.tolist())


class RunBuffer:
    """Gathers one run after the other. What `place` and `finish` return is valid until the next `begin`."""

    def __init__(self) -> None:
        self._data = np.zeros(MAX_RUN_BYTES, np.uint8)
        self._entries = np.zeros(0, ENTRY)
        self._first = self._end = 0
        self._kept: dict[int, int] = {}
        """Index in what was given: index in the run."""

    def begin(self, stored_bytes: IndexArray) -> None:
        """Begin a run of at most as many blocks as these, which have these stored lengths."""
        num_bytes = run_bytes_of(stored_bytes)
        if len(self._data) < num_bytes:  # one block is longer than a run usually is
            self._data = np.zeros(num_bytes, np.uint8)
        self._entries = np.zeros(len(stored_bytes), ENTRY)
        self._first = self._end = header_bytes_of(len(stored_bytes))
        self._kept = {}

    def place(self, stored_bytes: int) -> memoryview:
        """Where the next block goes as it is stored, with its padding, which is zeros already."""
        end = self._end + padded(stored_bytes)
        self._data[self._end + stored_bytes : end] = 0
        return self._data[self._end : end].data

    def add(self, run: BlockRun, index: int, stored_bytes: int) -> None:
        """Keep what was written to `place` as the `index`-th block of `run`."""
        key, group_id = run.keys.keys[index], int(run.keys.group_ids[index])
        payload = self._data[self._end : self._end + padded(stored_bytes)].data
        entry = self._entries[len(self._kept)]
        entry["key"], entry["group"] = key, group_id
        checksum = block_checksum(run.keys.namespace, group_id, key.tobytes(), stored_bytes, payload)
        entry["checksum"] = np.frombuffer(checksum, np.uint8)
        entry["parent"] = self._kept.get(int(run.parents[index]), -1)
        entry["flags"], entry["value"] = run.flags[index], run.values[index]
        entry["stored_bytes"] = stored_bytes
        self._keep(index, stored_bytes)

    def copy(self, header: RunHeader, index: int) -> None:
        """Keep what was written to `place` as the `index`-th block of another run; its parent is not in this one."""
        self._entries[len(self._kept)] = header.entries[index]
        self._entries["parent"][len(self._kept)] = -1
        self._keep(index, int(header.entries[index]["stored_bytes"]))

    def _keep(self, index: int, stored_bytes: int) -> None:
        self._entries["page"][len(self._kept)] = self._end // PAGE
        self._kept[index] = len(self._kept)
        self._end += padded(stored_bytes)

    @property
    def kept(self) -> IndexArray:
        """The indices of the blocks that were kept, in the order of the run."""
        return np.array(list(self._kept), np.int64)

    @property
    def num_bytes(self) -> int:
        """Bytes of the run as it is."""
        return self._end - self._first + header_bytes_of(len(self._kept))

    def finish(
        self, sequence: int, namespace: bytes, cipher_id: bytes, offset: int, *, created_s: int, expires_s: int
    ) -> tuple[RunHeader, memoryview]:
        """The header of the run at `offset` of its file, and all its bytes; there is at least one block."""
        # Blocks that were left out leave a gap in the header's room, which must have the length that its count says.
        length, entries = header_bytes_of(len(self._kept)), self._entries[: len(self._kept)]
        begin = self._first - length
        entries["page"] -= begin // PAGE
        numbers = length, self._end - begin, sequence
        header = RunHeader(*numbers, namespace, cipher_id, created_s, expires_s, offset, entries)
        self._data[begin : self._first] = np.frombuffer(encode_header(header), np.uint8)
        return header, self._data[begin : self._end].data
