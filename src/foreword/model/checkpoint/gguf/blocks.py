"""The types of ggml's tensors: how many values a block has, and which. Facts are of gguf-py's `quants.py`.

A block lies within one row. `d` and `m` are its scale and offset in float16, `q` are codes; tests compare every type
with gguf-py, value by value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

_NONLINEAR = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice the values of four-bit floats."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """One type."""

    name: str
    num_values: int
    """Of a block."""
    num_bytes: int
    """Of a block."""
    expand: Callable[[Bytes], Floats]
    """Blocks [count, num_bytes] -> values [count, num_values]."""


def _half(blocks: Bytes, at: int) -> Floats:
    """The float16 at a byte of each block, [count, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16).astype(np.float32)


def _nibbles(packed: Bytes) -> Bytes:
    """[count, n] -> [count, 2 n]: all low halves, then all high ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=1)


def _bits(packed: Bytes) -> Bytes:
    """[count, n] -> [count, 8 n]: the bits, lowest first."""
    return np.unpackbits(packed, axis=1, bitorder="little")


def _f32(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view(np.float32)


def _f16(blocks: Bytes) -> Floats:
    return np.ascontiguousarray(blocks).view(np.float16).astype(np.float32)


def _bf16(blocks: Bytes) -> Floats:
    return (np.ascontiguousarray(blocks).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _q4_0(b: Bytes) -> Floats:
    """d; 16 bytes: value i low, value i + 16 high. d (q - 8)."""
    return _half(b, 0) * (_nibbles(b[:, 2:]).astype(np.float32) - 8)


def _q4_1(b: Bytes) -> Floats:
    """d, m; codes as Q4_0. d q + m."""
    return _half(b, 0) * _nibbles(b[:, 4:]).astype(np.float32) + _half(b, 2)


def _q5_0(b: Bytes) -> Floats:
    """d; 32 fifth bits; codes as Q4_0. d (q - 16)."""
    q = _nibbles(b[:, 6:]) | (_bits(b[:, 2:6]) << 4)
    return _half(b, 0) * (q.astype(np.float32) - 16)


def _q5_1(b: Bytes) -> Floats:
    """d, m; 32 fifth bits; codes as Q4_0. d q + m."""
    q = _nibbles(b[:, 8:]) | (_bits(b[:, 4:8]) << 4)
    return _half(b, 0) * q.astype(np.float32) + _half(b, 2)


def _q8_0(b: Bytes) -> Floats:
    """d; 32 signed bytes."""
    return _half(b, 0) * b[:, 2:].view(np.int8).astype(np.float32)


def _quarters(packed: Bytes) -> Bytes:
    """[count, 64] -> [count, 256]: of each 32 bytes the lowest two bits, then the next ones."""
    halves = packed.reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    quarters: Bytes = (halves & 3).astype(np.uint8).reshape(-1, 256)
    return quarters


def _scaled(scales: Floats, values: Floats) -> Floats:
    """Values [count, 256], each times the scale of its part; scales [count, parts]."""
    count, parts = scales.shape
    return (values.reshape(count, parts, -1) * scales[:, :, None]).reshape(count, 256)


def _q2_k(b: Bytes) -> Floats:
    """16 bytes of scale (low) and offset (high), one per 16 values; codes of two bits; d, dmin."""
    scales, offsets = (b[:, :16] & 15).astype(np.float32), (b[:, :16] >> 4).astype(np.float32)
    product = _scaled(_half(b, 80) * scales, _quarters(b[:, 16:80]).astype(np.float32))
    return product - np.repeat(_half(b, 82) * offsets, 16, axis=1)


def _q3_k(b: Bytes) -> Floats:
    """256 third bits (0 takes 4 off); codes of two bits; 16 scales of six bits; d."""
    third = (b[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(-1, 256)
    codes = _quarters(b[:, 32:96]).astype(np.float32) - 4 * (1 - third.astype(np.float32))
    low, high = _nibbles(b[:, 96:104]), b[:, None, 104:108] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    scales = (low | high.reshape(-1, 16) << 4).astype(np.float32) - 32
    return _scaled(_half(b, 108) * scales, codes)


def _six_bits(packed: Bytes) -> tuple[Floats, Floats]:
    """[count, 12] -> eight scales and eight offsets of six bits."""
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((first & 63, last & 15 | first >> 6 << 4), axis=1)
    offsets = np.concatenate((second & 63, last >> 4 | second >> 6 << 4), axis=1)
    return scales.astype(np.float32), offsets.astype(np.float32)


def _pairs(packed: Bytes) -> Bytes:
    """[count, 128] -> [count, 256]: of each 32 bytes the low halves, then the high ones."""
    return np.stack((packed.reshape(-1, 4, 32) & 15, packed.reshape(-1, 4, 32) >> 4), axis=2).reshape(-1, 256)


def _q4_k(b: Bytes) -> Floats:
    """d, dmin; eight scales and offsets, one per 32 values; codes of four bits."""
    scales, offsets = _six_bits(b[:, 4:16])
    product = _scaled(_half(b, 0) * scales, _pairs(b[:, 16:]).astype(np.float32))
    return product - np.repeat(_half(b, 2) * offsets, 32, axis=1)


def _q5_k(b: Bytes) -> Floats:
    """As Q4_K with 256 fifth bits before the codes: bit j of byte l belongs to value l of part j."""
    scales, offsets = _six_bits(b[:, 4:16])
    fifth = (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(-1, 256)
    product = _scaled(_half(b, 0) * scales, (_pairs(b[:, 48:]) | fifth << 4).astype(np.float32))
    return product - np.repeat(_half(b, 2) * offsets, 32, axis=1)


def _q6_k(b: Bytes) -> Floats:
    """Low four bits, then high two; 16 signed scales, one per 16 values; d. d s (q - 32)."""
    halves = b[:, :128].reshape(-1, 2, 2, 32)
    low = np.stack((halves & 15, halves >> 4), axis=2).reshape(-1, 256)
    high = (b[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(-1, 256)
    scales = _half(b, 208) * b[:, 192:208].view(np.int8).astype(np.float32)
    return _scaled(scales, (low | high << 4).astype(np.float32) - 32)


def _iq4_nl(b: Bytes) -> Floats:
    """d; codes as Q4_0, into a table."""
    return _half(b, 0) * _NONLINEAR[_nibbles(b[:, 2:])]


def _iq4_xs(b: Bytes) -> Floats:
    """d; eight scales of six bits, whose high two come first; per 32 values 16 bytes, low halves then high ones."""
    high = np.ascontiguousarray(b[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack((b[:, 4:8] & 15, b[:, 4:8] >> 4), axis=2).reshape(-1, 8)
    scales = _half(b, 0) * ((low | high.astype(np.uint8) << 4).astype(np.float32) - 32)
    codes = np.stack((b[:, 8:].reshape(-1, 8, 16) & 15, b[:, 8:].reshape(-1, 8, 16) >> 4), axis=2)
    return _scaled(scales, _NONLINEAR[codes.reshape(-1, 256)])


def _mxfp4(b: Bytes) -> Floats:
    """An exponent e; codes as Q4_0 of four-bit floats. 2^(e - 128) times twice the float."""
    return np.ldexp(_FP4[_nibbles(b[:, 1:])], b[:, :1].astype(np.int32) - 128).astype(np.float32)


BLOCKS: Mapping[int, Blocks] = {
    0: Blocks("F32", 1, 4, _f32),
    1: Blocks("F16", 1, 2, _f16),
    2: Blocks("Q4_0", 32, 18, _q4_0),
    3: Blocks("Q4_1", 32, 20, _q4_1),
    6: Blocks("Q5_0", 32, 22, _q5_0),
    7: Blocks("Q5_1", 32, 24, _q5_1),
    8: Blocks("Q8_0", 32, 34, _q8_0),
    10: Blocks("Q2_K", 256, 84, _q2_k),
    11: Blocks("Q3_K", 256, 110, _q3_k),
    12: Blocks("Q4_K", 256, 144, _q4_k),
    13: Blocks("Q5_K", 256, 176, _q5_k),
    14: Blocks("Q6_K", 256, 210, _q6_k),
    20: Blocks("IQ4_NL", 32, 18, _iq4_nl),
    23: Blocks("IQ4_XS", 256, 136, _iq4_xs),
    30: Blocks("BF16", 1, 2, _bf16),
    39: Blocks("MXFP4", 32, 17, _mxfp4),
}
"""Number of a type in files -> the type."""
