"""Weights in bfloat16, stored in 12 bits each without loss, so that products read only three quarters of the bytes.

The sign and mantissa of a bfloat16 (8 bits) are nearly random, but trained weights have few exponents: sixteen cover
all but one weight in thousands. The lower byte, which is the mantissa and the exponent's last bit, is stored unchanged.
The upper byte, which is the sign and the rest of the exponent, becomes a *code* of 4 bits: one of the eight most
frequent values, with either sign. Weights with other upper bytes are *exceptions*, which are stored separately, and
written over the expanded codes. The idea is from DFloat11 (Zhang et al., 2025), which uses 11 bits and a Huffman code.
Here all codes have one length, so a few vector instructions unpack them.

    a step    1024 weights, two tiles, 32 rows of 32: eight groups of 192 bytes
    a group   64 bytes of codes      rows 0 and 1 in bits 0 to 3, rows 2 and 3 in bits 4 to 7
              64 lower bytes         rows 0 and 1
              64 lower bytes         rows 2 and 3
    64 bytes  two rows: 8 words of the first, the same 8 of the second, the next 8 of the first, ...
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import binding as llvm
from llvmlite import ir
from numba import types

from foreword.kernels.llvm import emit, simd
from foreword.kernels.runtime.compiled import cached
from foreword.kernels.runtime.huge_pages import HugePages

STEP_WEIGHTS, STEP_BYTES = 1024, 1536
STEP_GROUPS, GROUP_BYTES = 8, 192
FAR, NEAR = 8, 2
"""Weights are prefetched into the L2 cache FAR steps before their use, and into the L1 cache NEAR steps before."""
NUM_CODES = 16
COUNTED = 64
"""About this number of outputs of a weight matrix is enough to find the most frequent upper bytes.

The distance between two counted outputs is odd. Otherwise, they could all be the same dimension of different heads.
"""
_NEVER = 2**31 - 1
_WORDS, _BYTES = ir.VectorType(ir.IntType(16), 32), ir.VectorType(ir.IntType(8), 64)
_OF_TWO_ROWS = [row * 32 + 8 * part + word for part in range(4) for row in (0, 1) for word in range(8)]
"""[64]: for each of 64 lower bytes of two rows, the word to which it belongs: 0 to 31 in row 0, 32 to 63 in row 1."""
HAS_BYTE_LOOK_UP = bool(llvm.get_host_cpu_features().get("avx512vbmi"))
"""Whether this processor has the instruction that looks codes up. If not, these functions are never called."""
WEIGHTS = HugePages()
"""Memory for all weights of the process. Weights share its regions."""


@dataclass(frozen=True, slots=True)
class CompactPanels:
    """Panels of weights; arrays are contiguous."""

    steps: npt.NDArray[np.uint16]
    """[panels, steps, 8, 3, 32]"""
    table: npt.NDArray[np.uint8]
    """[64]: each code's upper byte, repeated four times: a look-up uses six bits, four of a code and two of another
    code."""
    exceptions: npt.NDArray[np.int32]
    """[entries, 2]: for each exception, its weight's number in the panel, ascending, and the weight's bits. The last
    entry of each panel has a number beyond all weights."""
    starts: npt.NDArray[np.int64]
    """[panels]: the first entry of each panel in `exceptions`."""

    @property
    def num_exceptions(self) -> int:
        """The number of weights without a code."""
        return len(self.exceptions) - len(self.starts)


def compact(weights: Sequence[npt.NDArray[np.uint16]], order: npt.NDArray[np.int64], num_threads: int) -> CompactPanels:
    """Pack the bits of weight matrices [outputs, inputs] in panels of 32 columns. All matrices have the same inputs.

    `order` [32 * panels]: for each column, the number of its output, counted over all matrices; -1: the column is
    empty. The number of inputs is a multiple of 32.
    """
    num_panels, num_inputs = len(order) // 32, weights[0].shape[1]
    num_steps = num_inputs // 32
    counts = sum(_count_upper(weight, max(1, len(weight) // COUNTED) | 1) for weight in weights)
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
    with ThreadPoolExecutor(num_threads) as pool:  # it waits for its threads, so no address outlives its memory
        others = [pool.submit(run, part) for part in parts[1:]]
        of_parts = [run(parts[0]), *(other.result() for other in others)]
    for (first, last), before in zip(parts, np.cumsum([0, *map(len, of_parts[:-1])]), strict=True):
        starts[first:last] += before
    return CompactPanels(steps, table, np.concatenate(of_parts), starts)


def _codes(counts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint8]]:
    """Make the code of each upper byte (NUM_CODES: no code), and the table of codes, from the counts of upper bytes."""
    commonest = np.argsort(-(counts[:128] + counts[128:]), kind="stable")[: NUM_CODES // 2]
    upper = np.concatenate([commonest, commonest + 128])
    codes = np.full(256, NUM_CODES, np.uint16)
    codes[upper] = np.arange(NUM_CODES)
    return codes, np.tile(upper.astype(np.uint8), 4)


@cached(nogil=True)
def _count_upper(weight: Any, stride: int) -> Any:
    """Estimate the frequency of each upper byte, [256], from every `stride`-th output."""
    counts = np.zeros(256, np.int64)
    for output in range(0, weight.shape[0], stride):
        for bits in weight[output]:
            counts[bits >> 8] += stride
    return counts


@cached(nogil=True)
def _compact_panels(rows: Any, codes: Any, steps: Any, exceptions: Any, starts: Any, first: int, last: int) -> int:
    """Pack the panels from `first` to `last` - 1; `rows`: the addresses of the outputs in all panels.

    Returns the number of entries of `exceptions` that these panels need.

    The returned number includes the entry that ends each panel. If `exceptions` has fewer entries, the rest is left
    out.
    """
    count, tiles = 0, np.empty((2, 16, 32), np.uint16)
    for panel in range(first, last):
        starts[panel] = count
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
                    if codes[bits >> 8] == NUM_CODES:
                        if count < len(exceptions):
                            exceptions[count, 0], exceptions[count, 1] = place + number, bits
                        count += 1
        if count < len(exceptions):
            exceptions[count, 0], exceptions[count, 1] = _NEVER, 0
        count += 1
    return count


@emit.instructions("aaa", types.intp)
def compact_group(builder: Any, source: Any, codes: Any, target: Any) -> Any:
    """Write the 192 bytes of a group of weights [4, 32]. Exceptions get code 0. Returns 0 if there is no exception."""
    tables = [emit.load(builder, codes, 64 * number, _WORDS) for number in range(8)]
    rows = [emit.load(builder, source, 64 * row, _WORDS) for row in range(4)]
    numbers = [_code_of(builder, tables, builder.lshr(bits, _word(8))) for bits in rows]
    unknown = functools.reduce(builder.or_, numbers)
    nibbles = [builder.and_(number, _word(NUM_CODES - 1)) for number in numbers]
    both = [builder.or_(nibbles[row], builder.shl(nibbles[row + 2], _word(4))) for row in (0, 1)]
    for number, two in enumerate((both, rows[:2], rows[2:])):
        order = ir.Constant(ir.VectorType(emit.I32, 64), [2 * word for word in _OF_TWO_ROWS])  # their lower bytes
        lower = builder.shuffle_vector(*(builder.bitcast(row, _BYTES) for row in two), order)
        emit.store(builder, lower, target, 64 * number)
    some = builder.icmp_unsigned("!=", builder.and_(unknown, _word(NUM_CODES)), _word(0))
    return builder.zext(builder.bitcast(some, ir.IntType(32)), ir.IntType(64))


def _code_of(builder: Any, tables: list[Any], upper: Any) -> Any:
    """Look each upper byte up in 256 codes: four look-ups in 64 codes each. Two bits of the byte choose a result."""
    name = "llvm.x86.avx512.vpermi2var.hi.512"
    codes = [emit.call(builder, name, tables[two], upper, tables[two + 1]) for two in (0, 2, 4, 6)]
    for bit in (64, 128):
        above = builder.icmp_unsigned("!=", builder.and_(upper, _word(bit)), _word(0))
        codes = [builder.select(above, high, low) for low, high in zip(codes[::2], codes[1::2], strict=True)]
    return codes[0]


def expanded(panels: CompactPanels) -> npt.NDArray[np.uint16]:
    """Expand all weights, [panels, steps, 32, 32], in the order of tiles."""
    stored = panels.steps.view(np.uint8)
    codes, lower = stored[:, :, :, :1], stored[:, :, :, 1:].astype(np.uint16)
    upper = panels.table[np.concatenate([codes % NUM_CODES, codes // NUM_CODES], axis=3)].astype(np.uint16)
    of_two_rows = (upper << 8 | lower).reshape(*panels.steps.shape[:2], 16, 4, 2, 8)
    weights = np.ascontiguousarray(of_two_rows.swapaxes(3, 4)).reshape(*panels.steps.shape[:2], 32, 32)
    flat = weights.reshape(len(weights), -1)
    ends = np.append(panels.starts[1:], len(panels.exceptions)) - 1
    for panel, (first, last) in enumerate(zip(panels.starts, ends, strict=True)):
        places, bits = panels.exceptions[first:last].T
        flat[panel, places] = bits
    return weights


@emit.instructions("aaaaa")
def expand_step(builder: Any, source: Any, table: Any, target: Any, far: Any, near: Any) -> None:
    """Expand a step to 2048 bytes, without exceptions; prefetch the steps at `far` and `near` line by line.

    If all lines were requested at once, one request to memory would delay the next, and the computation would wait for
    them.
    """
    upper = load_table(builder, table)
    for group in range(STEP_GROUPS):
        emit_fetch(builder, group, far, near)
        emit_group(builder, group, upper, source, target)


def load_table(builder: Any, table: Any) -> Any:
    """Load the table of codes' upper bytes, for `emit_group`."""
    return emit.load(builder, table, 0, _BYTES)


def emit_fetch(builder: Any, group: int, far: Any, near: Any) -> None:
    """Prefetch one group: of the step at `far` into the second cache, of the step at `near` into the first cache."""
    for line in range(0, GROUP_BYTES, 64):
        simd.fetch(builder, builder.add(far, emit.integer(GROUP_BYTES * group + line)))
        simd.fetch(builder, builder.add(near, emit.integer(GROUP_BYTES * group + line)), near=True)


def emit_group(builder: Any, group: int, table: Any, source: Any, target: Any) -> None:
    """Expand a group of the step at `source` to its 256 bytes in the step at `target`."""
    codes = emit.load(builder, source, GROUP_BYTES * group, _WORDS)
    for two in (0, 1):
        upper = _look_up(builder, table, builder.lshr(codes, _word(4)) if two else codes)
        lower = emit.load(builder, source, GROUP_BYTES * group + 64 + 64 * two, _BYTES)
        for row in (0, 1):
            words = [place for place, word in enumerate(_OF_TWO_ROWS) if word // 32 == row]
            order = ir.Constant(ir.VectorType(emit.I32, 64), [half + word for word in words for half in (0, 64)])
            emit.store(builder, builder.shuffle_vector(lower, upper, order), target, 256 * group + 128 * two + 64 * row)


def _word(value: int) -> ir.Constant:
    return ir.Constant(_WORDS, [value] * 32)


def _look_up(builder: Any, table: Any, codes: Any) -> Any:
    """Look up each byte of `codes` in `table` by its lower six bits (AVX512_VBMI)."""
    return emit.call(builder, "llvm.x86.avx512.permvar.qi.512", table, builder.bitcast(codes, _BYTES))


def emit_exceptions(builder: Any, entry: Any, place: Any, end: Any, target: Any) -> Any:
    """Of a panel's weights with the numbers from `place` to `end` - 1, write those that are exceptions.

    Weight number `place` lies at the address `target`; the next weights follow it.

    `entry` is the address of an entry of `exceptions`, at or before the first of these exceptions. Returns the address
    of the entry after the last of these exceptions.
    """
    for limit, is_written in ((place, False), (end, True)):
        before, head = builder.block, builder.append_basic_block("entry")
        inside, after = builder.append_basic_block("exception"), builder.append_basic_block("no_more")
        builder.branch(head)
        builder.position_at_end(head)
        at = builder.phi(emit.I64)
        at.add_incoming(entry, before)
        index = builder.sext(emit.load(builder, at, 0, emit.I32), emit.I64)
        builder.cbranch(builder.icmp_signed("<", index, limit), inside, after)
        builder.position_at_end(inside)
        if is_written:
            offset = builder.mul(builder.sub(index, place), emit.integer(2))
            emit.store(builder, emit.load(builder, at, 4, emit.I16), builder.add(target, offset))
        at.add_incoming(builder.add(at, emit.integer(8)), inside)
        builder.branch(head)
        builder.position_at_end(after)
        entry = at
    return entry


write_exceptions = emit.instructions("aiia", types.intp)(emit_exceptions)
"""`emit_exceptions` as a function."""
