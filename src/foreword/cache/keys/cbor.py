"""Canonical CBOR for block keys, which consist of a few types.

The form is RFC 8949's core deterministic encoding: shortest heads, definite lengths. There is no decoder, because
nothing needs one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

BYTES, TEXT, ARRAY = 2, 3, 4
NULL = b"\xf6"


def encode_head(major_type: int, value: int) -> bytes:
    """The head of an item: its major type and its length or, for an integer, its value."""
    if value < 24:
        return bytes([major_type << 5 | value])
    width = 1 if value < 1 << 8 else 2 if value < 1 << 16 else 4 if value < 1 << 32 else 8
    return bytes([major_type << 5 | 23 + width.bit_length()]) + value.to_bytes(width, "big")


def encode(value: object) -> bytes:
    """Encode a value that consists of None, integers, byte strings, text and tuples."""
    match value:
        case None:
            return NULL
        case int():
            return encode_head(0, value) if value >= 0 else encode_head(1, -1 - value)
        case bytes():
            return encode_head(BYTES, len(value)) + value
        case str():
            return encode_head(TEXT, len(value.encode())) + value.encode()
        case tuple():
            return encode_head(ARRAY, len(value)) + b"".join(map(encode, value))
    raise TypeError(f"a {type(value).__name__} is no part of a key")


def encode_integers(values: npt.NDArray[np.int32]) -> tuple[bytes, npt.NDArray[np.int64]]:
    """Encode integers one after the other; also returns where each integer ends in the bytes, [len(values)].

    An integer takes 1, 2, 3 or 5 bytes. Integers of the same width are written together, byte by byte.
    """
    magnitudes = (values ^ (values >> 31)).astype(np.uint32)  # CBOR stores a negative n as -1 - n
    widths = (magnitudes > 23).astype(np.int64)
    widths += magnitudes > 0xFF
    widths += 2 * (magnitudes > 0xFFFF)
    ends = np.cumsum(widths + 1)
    starts = ends - widths - 1
    encoded = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
    info = np.array([0, 24, 25, 0, 26], np.uint8)[widths]
    heads = np.where(widths == 0, magnitudes.astype(np.uint8), info)
    encoded[starts] = heads | np.where(values < 0, np.uint8(1 << 5), np.uint8(0))
    for width in (1, 2, 4):
        chosen = np.flatnonzero(widths == width)
        at, wide = starts[chosen] + 1, magnitudes[chosen]
        for rank in range(width):
            encoded[at + rank] = (wide >> 8 * (width - 1 - rank)).astype(np.uint8)
    return encoded.tobytes(), ends
