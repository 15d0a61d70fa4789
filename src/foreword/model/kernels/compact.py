"""Weights in bfloat16, held in 12 bits each without losing one: what products read, three quarters as large.

Knows panels of weights and memory addresses; knows nothing of rows or products. Of a bfloat16's 16 bits sign and
mantissa (8) are as good as random, but trained weights have few exponents: sixteen of them are all but one weight in
thousands. So a weight is stored as its sign and mantissa and the number (4 bits) of its exponent among the sixteen
commonest; the others are *exceptions*, kept beside and written over what the sixteen gave. Found in DFloat11 (Zhang et
al., 2025), which spends 11 bits and a Huffman code; numbers of one length unpack in a few vector instructions.

    a step    1024 weights, two tiles, 32 rows of 32: eight groups of 192 bytes
    a group   32 codes of 16 bits, 4 for each of four rows      row 0: bits 0 to 3, row 1: 4 to 7, ...
              32 x 16 bits of rows 0 and 1, 32 of rows 2 and 3  sign and mantissa of the first in bits 15 and 0 to 6,
                                                                of the second in 7 and 8 to 14
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from foreword.model.kernels import simd
from foreword.model.kernels.huge_pages import HugePages

STEP_WEIGHTS, STEP_BYTES = 1024, 1536
STEP_GROUPS, GROUP_BYTES = 8, 192
FAR, NEAR = 8, 2
"""How many steps before their use weights are asked for: from memory into the second cache, and from there into the
first."""
NUM_CODES = 16
COUNTED = 64
"""Exponents are counted in about so many of a weight's outputs: which of them are the commonest is clear from these.

They lie an odd number apart, so that they are not the same dimension of every head.
"""
_SIGN_MANTISSA = 0x807F
_NEVER = 2**31 - 1
_WORDS = ir.VectorType(ir.IntType(16), 32)
WEIGHTS = HugePages()
"""Of all weights of the process: what one leaves of a region is the next one's."""


@dataclass(frozen=True, slots=True)
class CompactPanels:
    """Panels of weights; arrays are contiguous."""

    steps: npt.NDArray[np.uint16]
    """[panels, steps, 8, 3, 32]"""
    table: npt.NDArray[np.uint16]
    """[32]: what a code's exponent is in a bfloat16, twice: a code's fifth bit belongs to its neighbour."""
    exceptions: npt.NDArray[np.int32]
    """[any, 2]: the place of a weight in its panel, ascending, and its bits; a place beyond all ends each panel's."""
    starts: npt.NDArray[np.int64]
    """[panels]: where in `exceptions` a panel's begin."""

    @property
    def num_exceptions(self) -> int:
        """How many weights have none of the sixteen exponents."""
        return len(self.exceptions) - len(self.starts)


def compact(weights: Sequence[npt.NDArray[np.uint16]], order: npt.NDArray[np.int64], num_threads: int) -> CompactPanels:
    """The bits of weights [outputs, inputs] of the same inputs in panels of 32 columns.

    `order` [32 * panels]: which output of all the weights' a column is, -1 for none; inputs are a multiple of 32.
    """
    num_panels, num_inputs = len(order) // 32, weights[0].shape[1]
    num_steps = num_inputs // 32
    counts = sum(_count_exponents(weight, max(1, len(weight) // COUNTED) | 1) for weight in weights)
    codes, table = _codes(counts)
    expected = int(counts[codes == NUM_CODES].sum()) // num_threads
    steps = WEIGHTS.allocate(num_panels * num_steps * STEP_BYTES).view(np.uint16)
    steps = steps.reshape(num_panels, num_steps, 8, 3, 32)
    starts = np.zeros(num_panels, np.int64)
    nothing = np.zeros(num_inputs, np.uint16)
    outputs = [weight.ctypes.data + weight.strides[0] * np.arange(len(weight)) for weight in weights]
    rows = np.where(order < 0, nothing.ctypes.data, np.concatenate(outputs)[order])

    def run(part: tuple[int, int]) -> npt.NDArray[np.int32]:
        room = part[1] - part[0] + 2 * expected + 64
        while True:
            exceptions = np.empty((room, 2), np.int32)
            room = _compact_panels(rows, codes, steps, exceptions, starts, *part)
            if room <= len(exceptions):
                return exceptions[:room]

    parts = [(num_panels * part // num_threads, num_panels * (part + 1) // num_threads) for part in range(num_threads)]
    with ThreadPoolExecutor(num_threads) as pool:  # whose end waits for all, so that no address outlives its memory
        others = [pool.submit(run, part) for part in parts[1:]]
        found = [run(parts[0]), *(other.result() for other in others)]
    for (first, last), before in zip(parts, np.cumsum([0, *map(len, found[:-1])]), strict=True):
        starts[first:last] += before
    return CompactPanels(steps, table, np.concatenate(found), starts)


def _codes(counts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    """The code of each exponent, NUM_CODES if it has none, and the table of codes."""
    commonest = np.argsort(-counts, kind="stable")[:NUM_CODES]
    codes = np.full(256, NUM_CODES, np.uint16)
    codes[commonest] = np.arange(NUM_CODES)
    return codes, np.tile(commonest.astype(np.uint16) << 7, 2)


@njit(cache=True, nogil=True)
def _count_exponents(weight: Any, stride: int) -> Any:
    """About how often each exponent occurs [256], from every `stride`-th output."""
    counts = np.zeros(256, np.int64)
    for output in range(0, weight.shape[0], stride):
        for bits in weight[output]:
            counts[(bits >> 7) & 255] += stride
    return counts


@njit(cache=True, nogil=True)
def _compact_panels(rows: Any, codes: Any, steps: Any, exceptions: Any, starts: Any, first: int, last: int) -> int:
    """Write some panels of outputs at the addresses `rows`; how many entries of `exceptions` they need, ends included.

    What finds no room there is left out: there are then more entries than `exceptions` has.
    """
    found, tiles = 0, np.empty((2, 16, 32), np.uint16)
    for panel in range(first, last):
        starts[panel] = found
        for step in range(steps.shape[1]):
            for half in range(2):
                simd.transpose_words(
                    rows.ctypes.data + 8 * (32 * panel + 16 * half), 64 * step, tiles.ctypes.data + 1024 * half, 64
                )
            for group in range(8):
                source = tiles[group // 4, group % 4 * 4 : group % 4 * 4 + 4]
                target = steps[panel, step, group]
                if compact_group(source.ctypes.data, codes.ctypes.data, target.ctypes.data) == 0:
                    continue
                place = STEP_WEIGHTS * step + 128 * group
                for number, bits in enumerate(source.ravel()):
                    if codes[(bits >> 7) & 255] == NUM_CODES:
                        if found < len(exceptions):
                            exceptions[found, 0], exceptions[found, 1] = place + number, bits
                        found += 1
        if found < len(exceptions):
            exceptions[found, 0], exceptions[found, 1] = _NEVER, 0
        found += 1
    return found


@simd._instructions("aaa", types.intp)
def compact_group(builder: Any, source: Any, codes: Any, target: Any) -> Any:
    """The 192 bytes of a group from its weights [4, 32]; not 0 if some of them are exceptions, whose code is 0."""
    tables = [simd._load(builder, codes, 64 * number, _WORDS) for number in range(8)]
    all_numbers, unknown = _zeros(), _zeros()
    halves = []
    for row in range(4):
        bits = simd._load(builder, source, 64 * row, _WORDS)
        exponents = builder.lshr(bits, _word(7))
        numbers = _code_of(builder, tables, exponents)
        unknown = builder.or_(unknown, numbers)
        own = builder.and_(numbers, _word(NUM_CODES - 1))
        all_numbers = builder.or_(all_numbers, builder.shl(own, _word(4 * row)) if row else own)
        halves.append(builder.and_(bits, _word(_SIGN_MANTISSA)))
    simd._store(builder, all_numbers, target)
    for pair in (0, 1):
        first, second = halves[2 * pair : 2 * pair + 2]
        turned = builder.or_(builder.shl(second, _word(8)), builder.lshr(second, _word(8)))
        simd._store(builder, builder.or_(first, turned), target, 64 + 64 * pair)
    some = builder.icmp_unsigned("!=", builder.and_(unknown, _word(NUM_CODES)), _zeros())
    return builder.zext(builder.bitcast(some, ir.IntType(32)), ir.IntType(64))


def _code_of(builder: Any, tables: list[Any], exponents: Any) -> Any:
    """An element of 256 for each exponent, of which eight bits count: four look-ups among 64."""
    kind = ir.FunctionType(_WORDS, [_WORDS] * 3)
    look_up = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.vpermi2var.hi.512")
    found = [builder.call(look_up, [tables[two], exponents, tables[two + 1]]) for two in (0, 2, 4, 6)]
    for bit in (64, 128):
        above = builder.icmp_unsigned("!=", builder.and_(exponents, _word(bit)), _zeros())
        found = [builder.select(above, high, low) for low, high in zip(found[::2], found[1::2], strict=True)]
    return found[0]


def _zeros() -> ir.Constant:
    return _word(0)


def expanded(panels: CompactPanels) -> npt.NDArray[np.uint16]:
    """All weights [panels, steps, 32, 32], as tiles hold them."""
    codes, mixed = panels.steps[:, :, :, 0], panels.steps[:, :, :, 1:].repeat(2, axis=3)
    mixed[:, :, :, 1::2] = mixed[:, :, :, 1::2] << 8 | mixed[:, :, :, 1::2] >> 8
    numbers = codes[:, :, :, None] >> np.arange(0, 16, 4, dtype=np.uint16)[:, None]
    weights: npt.NDArray[np.uint16] = mixed & np.uint16(_SIGN_MANTISSA) | panels.table[numbers % NUM_CODES]
    flat = weights.reshape(len(weights), -1)
    ends = np.append(panels.starts[1:], len(panels.exceptions)) - 1
    for panel, (first, last) in enumerate(zip(panels.starts, ends, strict=True)):
        places, bits = panels.exceptions[first:last].T
        flat[panel, places] = bits
    return weights.reshape(*weights.shape[:2], 32, 32)


@simd._instructions("aaaaa")
def expand_step(builder: Any, source: Any, table: Any, target: Any, far: Any, near: Any) -> None:
    """The 2048 bytes of a step, apart from exceptions. The steps at `far` and `near` are asked for, line by line.

    Asked for all at once, lines wait for each other, and what is computed waits for them.
    """
    exponents = load_table(builder, table)
    for group in range(STEP_GROUPS):
        emit_fetch(builder, group, far, near)
        emit_group(builder, group, exponents, source, target)


def load_table(builder: Any, table: Any) -> Any:
    """The exponents of codes, as `emit_group` wants them."""
    return simd._load(builder, table, 0, _WORDS)


def emit_fetch(builder: Any, group: int, far: Any, near: Any) -> None:
    """Ask for a group of the steps at `far`, into the second cache, and at `near`, into the first."""
    for line in range(0, GROUP_BYTES, 64):
        simd.fetch(builder, builder.add(far, simd._int(GROUP_BYTES * group + line)))
        simd.fetch(builder, builder.add(near, simd._int(GROUP_BYTES * group + line)), near=True)


def emit_group(builder: Any, group: int, exponents: Any, source: Any, target: Any) -> None:
    """The 256 bytes of a group of the step at `source`, to their place in the step at `target`."""
    codes = simd._load(builder, source, GROUP_BYTES * group, _WORDS)
    for row in range(4):
        if row % 2 == 0:
            mixed = simd._load(builder, source, GROUP_BYTES * group + 64 + 32 * row, _WORDS)
        else:
            mixed = builder.or_(builder.shl(mixed, _word(8)), builder.lshr(mixed, _word(8)))
        numbers = builder.lshr(codes, _word(4 * row)) if row else codes
        weights = builder.or_(builder.and_(mixed, _word(_SIGN_MANTISSA)), _look_up(builder, exponents, numbers))
        simd._store(builder, weights, target, 256 * group + 64 * row)


def _word(value: int) -> ir.Constant:
    return ir.Constant(_WORDS, [value] * 32)


def _look_up(builder: Any, table: Any, numbers: Any) -> Any:
    """An element of `table` for each number, of which five bits count (AVX512BW)."""
    kind = ir.FunctionType(_WORDS, [_WORDS, _WORDS])
    name = "llvm.x86.avx512.permvar.hi.512"
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [table, numbers])


def emit_exceptions(builder: Any, entry: Any, place: Any, end: Any, target: Any) -> Any:
    """Write a panel's weights from `place` to before `end` that are exceptions; `target` is where `place` lies.

    `entry`: the address of an entry of `exceptions`, none before it belonging there. Returns that of the next one.
    """
    for limit, is_written in ((place, False), (end, True)):
        before, head = builder.block, builder.append_basic_block("entry")
        inside, after = builder.append_basic_block("exception"), builder.append_basic_block("no_more")
        builder.branch(head)
        builder.position_at_end(head)
        at = builder.phi(simd.I64)
        at.add_incoming(entry, before)
        own = builder.sext(simd._load(builder, at, 0, simd.I32), simd.I64)
        builder.cbranch(builder.icmp_signed("<", own, limit), inside, after)
        builder.position_at_end(inside)
        if is_written:
            offset = builder.mul(builder.sub(own, place), simd._int(2))
            simd._store(builder, simd._load(builder, at, 4, simd.I16), builder.add(target, offset))
        at.add_incoming(builder.add(at, simd._int(8)), inside)
        builder.branch(head)
        builder.position_at_end(after)
        entry = at
    return entry


write_exceptions = simd._instructions("aiia", types.intp)(emit_exceptions)
"""The same, to be called."""
