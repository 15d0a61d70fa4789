"""Weights of a few bits: codes with scales, as checkpoints give them and as panels for products.

A weight is `scale * number + offset`, where its code stands for the number. Sixteen or 32 inputs of an output, a
*group*, share scale and offset. Scale and offset are numbers of 16 or 32 bits. In some formats, they are an integer
times such a number, which 256 inputs share.

    panel     16 outputs, side by side in heads and steps: a vector loads one byte of each output
    head      scales (and offsets) that 256 inputs share, or 32 if there are no integers
    step      32 inputs: their integers, then their codes in planes, of which each has some bits of every code;
              a byte of a plane of 4 bits has the codes of two units, the first in the low bits

A unit has the codes of all 16 outputs for one input (16 bytes), or for a *quad* of four inputs (64 bytes). In a quad,
the four codes of an output lie side by side, as products in integers read them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

PANEL, STEP = 16, 32
WHOLE = 16
"""The bits of a plane that has whole floats."""
SUPER_STEPS = 8
"""The number of steps that share a head, if scales are integers."""
QUAD = 4
"""The number of inputs that lie side by side for products in integers."""


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """A format of codes: how codes become weights."""

    name: str
    planes: tuple[int, ...]
    """The number of a code's bits in each plane, the lowest bits first; 16: the weight itself, a float."""
    group: Literal[16, 32] = 32
    """The number of inputs that share a scale."""
    zero: int = 0
    """The code of the number 0, for codes that are numbers; modulo 256."""
    table: tuple[int, ...] | None = None
    """The number of each code of four bits; None: codes are numbers."""
    scale: Literal["half", "bfloat16", "float", "exponent", "integers", "none"] = "half"
    """The form of scales. half: float16. float: float32. exponent: bits e stand for 2^(e - 128). integers: int8, times
    a float16 that 256 inputs share. none: there are no scales."""
    has_offset: bool = False
    has_zeros: bool = False
    """Whether each group has its own zero point, a byte, in addition to a scale of 16 bits."""

    @property
    def is_bfloat16(self) -> bool:
        """Whether whole floats are bfloat16; else they are float16."""
        return self.name == "BF16"

    @property
    def is_e4m3(self) -> bool:
        """Whether codes are floats of eight bits (e4m3).

        Products read such a code as a number that is smaller than its value by the factor E4M3_SCALE. Scales are larger
        by the same factor.
        """
        return self.name == "E4M3"

    @property
    def is_whole(self) -> bool:
        """Whether numbers are integers of at most eight bits."""
        return self.scale != "none" and not self.is_e4m3

    @property
    def places(self) -> list[tuple[int, int]]:
        """For each plane, the number of a code's bits in it, and the lowest of these bits."""
        return [(bits, sum(self.planes[:number])) for number, bits in enumerate(self.planes)]

    @property
    def parts(self) -> int:
        """The number of parts: 2 for scale and offset, 1 for the scale alone."""
        return 1 + self.has_offset

    @property
    def head_steps(self) -> int:
        return SUPER_STEPS if self.scale == "integers" else 1

    @property
    def head_bytes(self) -> int:
        scales = {"none": 0, "exponent": PANEL, "float": 4 * PANEL}.get(self.scale, 2 * PANEL * self.parts)
        return scales + PANEL * self.has_zeros

    @property
    def integer_bytes(self) -> int:
        return STEP // self.group * PANEL * self.parts if self.scale == "integers" else 0

    @property
    def step_bytes(self) -> int:
        return self.integer_bytes + STEP * PANEL * sum(self.planes) // 8

    @property
    def super_bytes(self) -> int:
        """The bytes of a head and its steps."""
        return self.head_bytes + self.head_steps * self.step_bytes


E4M3_NAN = 0x7F
"""The bits of NaN in e4m3, without the sign."""
E4M3_SCALE = 256.0
"""The bits of e4m3, put into a float16, give a number that is smaller by this factor. Scales include the factor."""
_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the values of four-bit floats."""
_SCALES: tuple[Literal["half", "bfloat16"], ...] = ("half", "bfloat16")
FORMATS = {
    kind.name: kind
    for kind in (
        CodeFormat("BF16", (WHOLE,), scale="none"),
        CodeFormat("F16", (WHOLE,), scale="none"),
        CodeFormat("Q4_0", (4,), zero=8),
        CodeFormat("Q4_1", (4,), has_offset=True),
        CodeFormat("Q5_0", (4, 1), zero=16),
        CodeFormat("Q5_1", (4, 1), has_offset=True),
        CodeFormat("Q8_0", (8,)),
        CodeFormat("Q2_K", (2,), 16, scale="integers", has_offset=True),
        CodeFormat("Q3_K", (2, 1), 16, zero=4, scale="integers"),
        CodeFormat("Q4_K", (4,), scale="integers", has_offset=True),
        CodeFormat("Q5_K", (4, 1), scale="integers", has_offset=True),
        CodeFormat("Q6_K", (4, 2), 16, zero=32, scale="integers"),
        CodeFormat("IQ4_NL", (4,), table=_NONLINEAR),
        CodeFormat("IQ4_XS", (4,), table=_NONLINEAR, scale="integers"),
        CodeFormat("MXFP4", (4,), table=_FP4, scale="exponent"),
        CodeFormat("E4M3", (8,), scale="float"),
        CodeFormat("int4", (4,), zero=8, scale="bfloat16"),
        CodeFormat("int8", (8,), scale="bfloat16"),
        *(
            CodeFormat(f"uint{bits} {scale}", (bits,), scale=scale, has_zeros=True)
            for bits in (4, 8)
            for scale in _SCALES
        ),
    )
}
"""Name -> format, for ggml's formats and formats of other checkpoints. Products do not look at the names."""


@dataclass(frozen=True, slots=True)
class Codes:
    """The weights of some outputs, as codes, scales and offsets."""

    codes: npt.NDArray[Any]
    """[outputs, inputs]; without scales, these are the bits of floats."""
    heads: npt.NDArray[Any] | None
    """[outputs, heads, parts], the heads of each output; part 0: the scale, part 1, if the format has it: the offset.
    Both have the form `CodeFormat.scale`. None: whole floats, which have no scales."""
    integers: npt.NDArray[np.int8] | None = None
    """[outputs, groups, parts]"""
    zeros: Bytes | None = None
    """[outputs, groups]"""

    def values(self, kind: CodeFormat) -> Floats:
        """The weights [outputs, inputs], in float32."""
        if kind.scale == "none":
            if kind.is_bfloat16:
                bits = self.codes.astype(np.uint32) << 16
                whole: Floats = bits.view(np.float32)
                return whole
            return self.codes.view(np.float16).astype(np.float32)
        assert self.heads is not None
        if kind.table is not None:
            numbers = np.array(kind.table, np.float32)[self.codes]
        elif kind.is_e4m3:
            codes = self.codes.astype(np.uint16)
            numbers = ((codes & 0x80) << 8 | (codes & 0x7F) << 7).view(np.float16).astype(np.float32)
        else:
            zeros = np.uint8(kind.zero) if self.zeros is None else np.repeat(self.zeros, kind.group, axis=1)
            numbers = (self.codes - zeros).view(np.int8).astype(np.float32)
        if kind.scale == "exponent":
            scales: Floats = np.ldexp(np.float32(1), self.heads.astype(np.int32) - 128)
        elif kind.scale == "float":
            scales = self.heads.view(np.float32)
        elif kind.scale == "bfloat16":
            scales = (self.heads.astype(np.uint32) << 16).view(np.float32)
        else:
            scales = self.heads.view(np.float16).astype(np.float32)
        if self.integers is not None:
            shared = np.repeat(scales, self.integers.shape[1] // scales.shape[1], axis=1)
            scales = shared * self.integers.astype(np.float32)
        parts: Floats = numbers.reshape(*scales.shape[:2], -1)
        parts *= scales[:, :, :1]
        if kind.has_offset:
            parts += scales[:, :, 1:]
        return parts.reshape(self.codes.shape)


class Panels:
    """Weights as products read them: `memory` [panels, heads, super_bytes]."""

    def __init__(self, kind: CodeFormat, shape: tuple[int, int], memory: Bytes, unit: int = 1) -> None:
        """`shape`: outputs, inputs. `fill` writes `memory` [num_bytes]. `unit`: the inputs of a unit, 1 or QUAD."""
        self.kind, self.shape, self._unit = kind, shape, unit
        self.memory = memory.reshape(-1, shape[1] // (STEP * kind.head_steps), kind.super_bytes)

    @staticmethod
    def num_bytes(kind: CodeFormat, shape: tuple[int, int]) -> int:
        """The bytes of memory that weights of this shape take."""
        return -(-shape[0] // PANEL) * (shape[1] // (STEP * kind.head_steps)) * kind.super_bytes

    def fill(self, first: int, codes: Codes) -> None:
        """Pack outputs from number `first` on, a multiple of 16.

        If the last panel is not full, its missing outputs become 0.
        """
        kind, missing = self.kind, -len(codes.codes) % PANEL
        num_panels, num_steps = (len(codes.codes) + missing) // PANEL, self.shape[1] // STEP

        def side_by_side(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
            """[outputs, ...] -> [panels, ..., 16]"""
            whole = np.pad(array, [(0, missing), *[(0, 0)] * (array.ndim - 1)]) if missing else array
            return np.moveaxis(whole.reshape(num_panels, PANEL, *array.shape[1:]), 1, -1)

        target = self.memory[first // PANEL : first // PANEL + num_panels]
        if codes.heads is not None:
            heads = np.ascontiguousarray(side_by_side(codes.heads)).view(np.uint8)
            end = kind.head_bytes - PANEL * kind.has_zeros
            target[:, :, :end] = heads.reshape(num_panels, -1, end)
        if codes.zeros is not None:
            target[:, :, kind.head_bytes - PANEL : kind.head_bytes] = side_by_side(codes.zeros)
        parts = []
        if codes.integers is not None:
            integers = side_by_side(codes.integers.view(np.uint8))
            integers = integers.reshape(num_panels, num_steps, -1, kind.parts, PANEL).swapaxes(2, 3)
            parts.append(integers.reshape(num_panels, num_steps, -1))
        quads = codes.codes.view(np.uint32) if self._unit == QUAD else codes.codes  # bytes alone are moved slowly
        units = np.ascontiguousarray(side_by_side(quads)).view(codes.codes.dtype)
        units = units.reshape(num_panels, num_steps, -1, PANEL * self._unit)
        parts += [_to_plane(units, bits, low) for bits, low in kind.places]
        steps = np.concatenate(parts, axis=2)
        target[:, :, kind.head_bytes :] = steps.reshape(num_panels, -1, kind.head_steps * kind.step_bytes)

    def rows(self, outputs: npt.NDArray[np.int64]) -> Floats:
        """The weights [len(outputs), inputs] of some outputs, in float32."""
        count, kind = len(outputs), self.kind
        panels = self.memory[outputs // PANEL]
        index, lanes = np.arange(count), outputs % PANEL
        heads = integers = zeros = None
        if kind.has_zeros:
            zeros = panels[:, :, kind.head_bytes - PANEL : kind.head_bytes][index, :, lanes]
        if kind.head_bytes:
            heads = np.ascontiguousarray(panels[:, :, : kind.head_bytes - PANEL * kind.has_zeros])
            heads = heads.view({"exponent": np.uint8, "float": np.uint32}.get(kind.scale, np.uint16))
            heads = heads.reshape(count, -1, kind.parts, PANEL)[index, :, :, lanes]
        steps = panels[:, :, kind.head_bytes :].reshape(count, -1, kind.step_bytes)
        if kind.integer_bytes:
            stored = steps[:, :, : kind.integer_bytes].reshape(count, -1, kind.parts, STEP // kind.group, PANEL)
            stored = stored[index, :, :, :, lanes].swapaxes(2, 3).reshape(count, -1, kind.parts)
            integers = np.ascontiguousarray(stored).view(np.int8)
        codes, start = np.zeros((count, self.shape[1]), np.uint16 if kind.scale == "none" else np.uint8), 0
        for bits, low in kind.places:
            size = STEP * PANEL * bits // 8
            plane = steps[:, :, kind.integer_bytes + start : kind.integer_bytes + start + size]
            units = _from_plane(plane, bits, PANEL * self._unit).reshape(count, -1, PANEL, self._unit)
            codes |= units[index, :, lanes].reshape(count, -1) << low
            start += size
        return Codes(codes, heads, integers, zeros).values(kind)


def _to_plane(units: npt.NDArray[Any], bits: int, low: int) -> Bytes:
    """Pack `bits` bits of units [panels, steps, units, bytes], from bit `low` on, into [panels, steps, bytes]."""
    if bits == WHOLE:
        return np.ascontiguousarray(units).view(np.uint8).reshape(*units.shape[:2], -1)
    parts = (units >> low & (1 << bits) - 1).reshape(*units.shape[:2], -1, 8 // bits, units.shape[-1])
    packed = parts[:, :, :, 0].astype(np.uint8)
    for place in range(1, 8 // bits):
        packed |= parts[:, :, :, place].astype(np.uint8, copy=False) << place * bits
    return packed.reshape(*units.shape[:2], -1)


def _from_plane(plane: Bytes, bits: int, size: int) -> npt.NDArray[Any]:
    """Unpack a plane [outputs, steps, bytes]: returns the bits of its units, [outputs, units, size]."""
    if bits == WHOLE:
        return np.ascontiguousarray(plane).view(np.uint16).reshape(len(plane), -1, size)
    packed = plane.reshape(*plane.shape[:2], -1, 1, size)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (packed >> shifts & (1 << bits) - 1).reshape(len(plane), -1, size)
