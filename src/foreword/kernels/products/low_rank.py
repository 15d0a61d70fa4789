"""Products of float32 rows and pairs of low-rank matrices, compiled by numba: result += up(down(row)), row by row.

A row names one table, which has the matrices of one adapter, or no table. A table has up to three parts, and each part
changes consecutive columns of the result. An element is computed in one order, which no other row changes:

    low       16 lanes, each one chain of fused multiply-adds along every 16th input; then a tree over the lanes
    result    one chain of fused multiply-adds along the ranks, which starts at 0; then result + that sum

Rows without a table are not touched. Threads take units of rows from a counter. Up to three consecutive rows with the
same table are multiplied together: each weight is read once for all of them, and no element's sum changes its order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import carray

from foreword.kernels.llvm import emit, simd
from foreword.kernels.llvm.emit import F32, LANES
from foreword.kernels.runtime.compiled import compiled, record, view, worker

PARTS = 3
"""The number of parts of a table."""
RANKS = 2
"""The number of ranks for which a row's sums are computed together. Ranks are padded to a multiple of this number."""
MOST_ROWS = 3
PART = record(
    "down",  # [rank, inputs] float32
    "up",  # panels of 16 columns; a panel: [rank, 16] float32
    "rank",  # 0: there is no such part
    "first",  # the first column that the part changes
    "width",  # the number of columns
)
LOW_RANK = record(
    "rows",
    "row_bytes",
    "num_rows",
    "num_steps",  # 16 inputs each
    "target",
    "target_bytes",
    "numbers",  # for each row, the number of its table, or -1
    "tables",  # the tables' addresses; 0 for a table that changes nothing
    "unit_rows",
    "counters",
    "scratch",
    "thread_scratch",
)
"""The arguments of a product: addresses, and counts."""
_STAGED = MOST_ROWS * 4 * LANES
_part_at = view(PART)

Floats = npt.NDArray[np.float32]


def thread_scratch(most_rank: int) -> int:
    """Bytes of scratch memory for each thread."""
    return _STAGED + MOST_ROWS * 4 * most_rank


def padded_inputs(count: int) -> int:
    """The number of inputs that rows must have for matrices with `count` inputs."""
    return -(-count // LANES) * LANES


def pack_down(matrix: Floats) -> Floats:
    """Pad a matrix [rank, inputs] with zeros at the end of both axes."""
    rank, inputs = matrix.shape
    packed = np.zeros((-(-rank // RANKS) * RANKS, padded_inputs(inputs)), np.float32)
    packed[:rank, :inputs] = matrix
    return packed


def pack_up(matrix: Floats) -> Floats:
    """Pack a matrix [columns, rank] into panels [panels, rank, 16], with zeros for missing columns and ranks."""
    columns, rank = matrix.shape
    padded = np.zeros((-(-columns // LANES) * LANES, -(-rank // RANKS) * RANKS), np.float32)
    padded[:columns, :rank] = matrix
    return np.ascontiguousarray(padded.reshape(-1, LANES, padded.shape[1]).transpose(0, 2, 1))


def _emit_down(builder: Any, count: int, arguments: Sequence[Any]) -> None:
    rows, row_bytes, down, rank, num_steps, low = arguments
    addresses = [emit.at(builder, rows, row_bytes, number) for number in range(count)]
    rank_bytes = builder.mul(num_steps, emit.integer(4 * LANES))

    def of_ranks(first: Any) -> None:
        weights = [
            builder.add(down, builder.mul(builder.add(first, emit.integer(number)), rank_bytes))
            for number in range(RANKS)
        ]

        def of_step(step: Any, *chains: Any) -> list[Any]:
            at = builder.mul(step, emit.integer(4 * LANES))
            inputs = [emit.load(builder, builder.add(row, at)) for row in addresses]
            loaded = [emit.load(builder, builder.add(weight, at)) for weight in weights]
            pairs = [(value, weight) for value in inputs for weight in loaded]
            return [emit.fma(builder, *pair, chain) for pair, chain in zip(pairs, chains, strict=True)]

        empty = [emit.constant(0.0)] * (count * RANKS)
        chains = emit.loop(builder, emit.integer(0), num_steps, 1, empty, of_step)
        for number, chain in enumerate(chains):
            total = emit.first(builder, emit.reduce(builder, chain, builder.fadd))
            row, at = divmod(number, RANKS)
            place = builder.add(first, builder.add(builder.mul(rank, emit.integer(row)), emit.integer(at)))
            emit.store(builder, total, emit.at(builder, low, place, 4))

    emit.loop(builder, emit.integer(0), rank, RANKS, [], of_ranks)


def _emit_up(builder: Any, count: int, arguments: Sequence[Any]) -> None:
    low, rank, up, num_panels, target, target_bytes = arguments

    def of_panel(panel: Any) -> None:
        weights = emit.at(builder, up, builder.mul(panel, rank), 4 * LANES)

        def of_rank(number: Any, *chains: Any) -> list[Any]:
            weight = emit.load(builder, emit.at(builder, weights, number, 4 * LANES))
            updated = []
            for row, chain in enumerate(chains):
                place = builder.add(number, builder.mul(rank, emit.integer(row)))
                factor = emit.load(builder, emit.at(builder, low, place, 4), 0, F32)
                updated.append(emit.fma(builder, emit.splat(builder, factor), weight, chain))
            return updated

        chains = emit.loop(builder, emit.integer(0), rank, 1, [emit.constant(0.0)] * count, of_rank)
        start = emit.at(builder, target, panel, 4 * LANES)
        for row, chain in enumerate(chains):
            place = emit.at(builder, start, target_bytes, row)
            emit.store(builder, builder.fadd(emit.load(builder, place), chain), place)

    emit.loop(builder, emit.integer(0), num_panels, 1, [], of_panel)


_down = emit.by_rows("aiaiia", range(1, MOST_ROWS + 1), _emit_down)
_up = emit.by_rows("aiaiai", range(1, MOST_ROWS + 1), _emit_up)


@compiled
def _add_part(part: Any, a: Any, row: int, count: int, scratch: int) -> None:
    low = scratch + _STAGED
    _down(count, a.rows + row * a.row_bytes, a.row_bytes, part.down, part.rank, a.num_steps, low)
    target = a.target + row * a.target_bytes + 4 * part.first
    whole = part.width // 16
    _up(count, low, part.rank, part.up, whole, target, a.target_bytes)
    tail = part.width - 16 * whole
    if tail:
        for number in range(count):
            simd.copy_bytes(scratch + 64 * number, target + 64 * whole + number * a.target_bytes, 4 * tail)
        _up(count, low, part.rank, part.up + whole * part.rank * 64, 1, scratch, 64)
        for number in range(count):
            simd.copy_bytes(target + 64 * whole + number * a.target_bytes, scratch + 64 * number, 4 * tail)


@worker(LOW_RANK)
def add_products(arguments: Any) -> None:
    """Run in every thread: compute units of rows until no unit is left."""
    a = carray(arguments, 1)[0]
    scratch = a.scratch + simd.fetch_add(a.counters + 64, 1) * a.thread_scratch
    while True:
        row = simd.fetch_add(a.counters, a.unit_rows)
        if row >= a.num_rows:
            return
        end = min(row + a.unit_rows, a.num_rows)
        while row < end:
            number, count = simd.load_int(a.numbers + 8 * row), 1
            while count < MOST_ROWS and row + count < end:
                if simd.load_int(a.numbers + 8 * (row + count)) != number:
                    break
                count += 1
            table = simd.load_int(a.tables + 8 * number) if number >= 0 else 0
            if table != 0:
                for place in range(PARTS):
                    part = _part_at(table, place)
                    if part.rank != 0:
                        _add_part(part, a, row, count, scratch)
            row += count
