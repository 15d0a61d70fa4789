"""The types of ggml's tensors: how many values a block has, and which. Facts are of gguf-py's `quants.py`.

A block lies within one row. `d` and `m` are its scale and offset in float16, `q` are codes; tests compare every type
with gguf-py, value by value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.kernels.products.coded import FORMATS, Bytes, CodeFormat, Codes, Floats

_SIGN = np.uint16(1 << 15)


@dataclass(frozen=True, slots=True)
class Blocks:
    """One type."""

    num_values: int
    """Of a block."""
    num_bytes: int
    """Of a block."""
    kind: CodeFormat
    split: Callable[[Bytes], Codes]
    """Blocks [count, num_bytes] -> their codes, as of `count` outputs."""

    @property
    def name(self) -> str:
        return self.kind.name

    def codes(self, rows: Bytes) -> Codes:
        """The codes of rows [rows, bytes of a row]."""
        own = self.split(rows.reshape(-1, self.num_bytes))
        count = len(rows)
        heads = None if own.heads is None else own.heads.reshape(count, -1, own.heads.shape[-1])
        integers = None if own.integers is None else own.integers.reshape(count, -1, own.integers.shape[-1])
        return Codes(own.codes.reshape(count, -1), heads, integers)

    def expand(self, blocks: Bytes) -> Floats:
        """Blocks [count, num_bytes] -> values [count, num_values]."""
        if self.name == "F32":
            return np.ascontiguousarray(blocks).view(np.float32)
        return self.codes(blocks).values(self.kind)


def _halves(blocks: Bytes, *places: int) -> npt.NDArray[np.uint16]:
    """The bits of the float16 at some bytes of each block, [count, 1, places]."""
    found = [np.ascontiguousarray(blocks[:, at : at + 2]).view(np.uint16) for at in places]
    return np.concatenate(found, axis=1)[:, None]


def _nibbles(packed: Bytes) -> Bytes:
    """[count, n] -> [count, 2 n]: all low halves, then all high ones."""
    return np.concatenate((packed & 15, packed >> 4), axis=1)


def _bits(packed: Bytes) -> Bytes:
    """[count, n] -> [count, 8 n]: the bits, lowest first."""
    return np.unpackbits(packed, axis=1, bitorder="little")


def _whole(b: Bytes) -> Codes:
    """The value itself."""
    return Codes(np.ascontiguousarray(b).view(np.uint16), None)


def _q4_0(b: Bytes) -> Codes:
    """d; 16 bytes: value i low, value i + 16 high. d (q - 8); or q says a number of a table."""
    return Codes(_nibbles(b[:, 2:]), _halves(b, 0))


def _q4_1(b: Bytes) -> Codes:
    """d, m; codes as Q4_0. d q + m."""
    return Codes(_nibbles(b[:, 4:]), _halves(b, 0, 2))


def _q5_0(b: Bytes) -> Codes:
    """d; 32 fifth bits; codes as Q4_0. d (q - 16)."""
    return Codes(_nibbles(b[:, 6:]) | (_bits(b[:, 2:6]) << 4), _halves(b, 0))


def _q5_1(b: Bytes) -> Codes:
    """d, m; 32 fifth bits; codes as Q4_0. d q + m."""
    return Codes(_nibbles(b[:, 8:]) | (_bits(b[:, 4:8]) << 4), _halves(b, 0, 2))


def _q8_0(b: Bytes) -> Codes:
    """d; 32 signed bytes."""
    return Codes(b[:, 2:], _halves(b, 0))


def _quarters(packed: Bytes) -> Bytes:
    """[count, 64] -> [count, 256]: of each 32 bytes the lowest two bits, then the next ones."""
    halves = packed.reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    quarters: Bytes = (halves & 3).astype(np.uint8).reshape(-1, 256)
    return quarters


def _with_minima(
    codes: npt.NDArray[Any], halves: npt.NDArray[np.uint16], scales: npt.NDArray[Any], minima: npt.NDArray[Any]
) -> Codes:
    """d s q - dmin m, as an offset of (-dmin) m."""
    halves[..., 1] ^= _SIGN
    return Codes(codes, halves, np.stack((scales, minima), axis=-1).view(np.int8))


def _q2_k(b: Bytes) -> Codes:
    """16 bytes of scale (low) and offset (high), one per 16 values; codes of two bits; d, dmin."""
    return _with_minima(_quarters(b[:, 16:80]), _halves(b, 80, 82), b[:, :16] & 15, b[:, :16] >> 4)


def _q3_k(b: Bytes) -> Codes:
    """256 third bits; codes of two bits; 16 scales of six bits; d. d (s - 32) (q - 4)."""
    third = (b[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(-1, 256)
    low, high = _nibbles(b[:, 96:104]), b[:, None, 104:108] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    scales = (low | high.reshape(-1, 16) << 4).view(np.int8) - 32
    return Codes(_quarters(b[:, 32:96]) | third << 2, _halves(b, 108), scales[..., None].astype(np.int8))


def _six_bits(packed: Bytes) -> tuple[Bytes, Bytes]:
    """[count, 12] -> eight scales and eight offsets of six bits."""
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate((first & 63, last & 15 | first >> 6 << 4), axis=1)
    return scales, np.concatenate((second & 63, last >> 4 | second >> 6 << 4), axis=1)


def _pairs(packed: Bytes) -> Bytes:
    """[count, 128] -> [count, 256]: of each 32 bytes the low halves, then the high ones."""
    return np.stack((packed.reshape(-1, 4, 32) & 15, packed.reshape(-1, 4, 32) >> 4), axis=2).reshape(-1, 256)


def _q4_k(b: Bytes) -> Codes:
    """d, dmin; eight scales and offsets, one per 32 values; codes of four bits."""
    return _with_minima(_pairs(b[:, 16:]), _halves(b, 0, 2), *_six_bits(b[:, 4:16]))


def _q5_k(b: Bytes) -> Codes:
    """As Q4_K with 256 fifth bits before the codes: bit j of byte l belongs to value l of part j."""
    fifth = (b[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1).reshape(-1, 256)
    return _with_minima(_pairs(b[:, 48:]) | fifth << 4, _halves(b, 0, 2), *_six_bits(b[:, 4:16]))


def _q6_k(b: Bytes) -> Codes:
    """Low four bits, then high two; 16 signed scales, one per 16 values; d. d s (q - 32)."""
    halves = b[:, :128].reshape(-1, 2, 2, 32)
    low = np.stack((halves & 15, halves >> 4), axis=2).reshape(-1, 256)
    high = (b[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3).reshape(-1, 256)
    return Codes(low | high << 4, _halves(b, 208), b[:, 192:208, None].view(np.int8))


def _iq4_xs(b: Bytes) -> Codes:
    """d; eight scales of six bits, whose high two come first; per 32 values 16 bytes, low halves then high ones."""
    high = np.ascontiguousarray(b[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack((b[:, 4:8] & 15, b[:, 4:8] >> 4), axis=2).reshape(-1, 8)
    scales = (low | high.astype(np.uint8) << 4).view(np.int8) - 32
    codes = np.stack((b[:, 8:].reshape(-1, 8, 16) & 15, b[:, 8:].reshape(-1, 8, 16) >> 4), axis=2)
    return Codes(codes.reshape(-1, 256), _halves(b, 0), scales[..., None].astype(np.int8))


def _mxfp4(b: Bytes) -> Codes:
    """An exponent e; codes as Q4_0 of four-bit floats. 2^(e - 128) times twice the float."""
    return Codes(_nibbles(b[:, 1:]), b[:, :1, None])


def _type(name: str, num_values: int, num_bytes: int, split: Callable[[Bytes], Codes]) -> Blocks:
    return Blocks(num_values, num_bytes, FORMATS[name], split)


BLOCKS: Mapping[int, Blocks] = {
    0: Blocks(1, 4, CodeFormat("F32", (), scale="none"), lambda b: Codes(b, None)),
    1: _type("F16", 1, 2, _whole),
    2: _type("Q4_0", 32, 18, _q4_0),
    3: _type("Q4_1", 32, 20, _q4_1),
    6: _type("Q5_0", 32, 22, _q5_0),
    7: _type("Q5_1", 32, 24, _q5_1),
    8: _type("Q8_0", 32, 34, _q8_0),
    10: _type("Q2_K", 256, 84, _q2_k),
    11: _type("Q3_K", 256, 110, _q3_k),
    12: _type("Q4_K", 256, 144, _q4_k),
    13: _type("Q5_K", 256, 176, _q5_k),
    14: _type("Q6_K", 256, 210, _q6_k),
    20: _type("IQ4_NL", 32, 18, _q4_0),
    23: _type("IQ4_XS", 256, 136, _iq4_xs),
    30: _type("BF16", 1, 2, _whole),
    39: _type("MXFP4", 32, 17, _mxfp4),
}
"""Number of a type in files -> the type."""
