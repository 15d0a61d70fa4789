"""Where blocks lie in segments, and what the index keeps of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

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
