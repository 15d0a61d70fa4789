"""Products of compact weights in pairs of bfloat16 (`vdpbf16ps`), as LLVM instructions for numba.

Processors that multiply pairs but have no tiles use it. An instruction adds, in each of 16 lanes, two products of
bfloat16: `C[m, n] += A[m, 2k] B[2k, n] + A[m, 2k + 1] B[2k + 1, n]`, for 16 columns n of a row m, whose pair is spread
over the lanes as it is loaded.

One element of a result is one chain of such additions along k, from 0 upwards, starting at 0: its bits depend on
nothing but its own row and column.

    rows      packed, so that one address serves all: [k / 2, rows] pairs
    weights   as for tiles (`weights12.py`): a step has 16 pairs of k x 16 columns, twice
    sums      [rows, 32] float32
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from foreword.kernels.llvm import emit, simd
from foreword.kernels.llvm.tiles import PRODUCT_PANEL, STEP, TILE_BYTES
from foreword.kernels.products import weights12 as compact
from foreword.kernels.products.weights12 import FAR, NEAR, STEP_BYTES, STEP_GROUPS, STEP_WEIGHTS

STEP_PAIRS = STEP // 2
COLUMNS = PRODUCT_PANEL // emit.LANES
"""Vectors of a row's sums."""
EXPANDED_BYTES = COLUMNS * TILE_BYTES
"""Bytes of an expanded step."""
FIRST_ROWS = (1, 2, 3, 4, 6, 8)
"""Numbers of rows that can multiply weights as these are expanded; code for 5 and 7 would not pay."""
MOST_EXPANDED_ROWS = 14
"""Most rows that multiply expanded weights at a time: their sums fill 28 of 32 registers."""


def _multiply(builder: Any, rows: Any, weights: Any, pairs: range, sums: list[Any]) -> None:
    """Add the products of some pairs of a step; `sums` has those of each row in turn."""
    num_rows = len(sums) // COLUMNS
    for pair in pairs:
        right = [emit.load(builder, weights, TILE_BYTES * column + 64 * pair, emit.I32S) for column in range(COLUMNS)]
        for row in range(num_rows):
            left = emit.splat(builder, emit.load(builder, rows, 4 * (num_rows * pair + row), emit.I32))
            for place, weight in enumerate(right, COLUMNS * row):
                sums[place] = simd.multiply_add(builder, sums[place], left, weight, True)
        sums[:] = [_here(builder, total) for total in sums]


def _here(builder: Any, vector: Any) -> Any:
    """The vector, computed at this point: LLVM would otherwise load pairs of many rows first, and spill them."""
    kind = ir.FunctionType(emit.F32S, [emit.F32S])
    return builder.asm(kind, "", "=v,0,~{memory}", [vector], True)


def _load_sums(builder: Any, num_rows: int, sums: Any) -> list[Any]:
    return [emit.load(builder, sums, 64 * number) for number in range(num_rows * COLUMNS)]


def _store_sums(builder: Any, found: Sequence[Any], sums: Any) -> None:
    for number, vector in enumerate(found):
        emit.store(builder, vector, sums, 64 * number)


def _emit_expanding(builder: Any, num_rows: int, arguments: Sequence[Any]) -> None:
    """Expand each step between the products with the step before."""
    rows, source, table, num_steps, entry, place, jump, buffer, mask, sums = arguments
    upper, step_weights = compact.load_table(builder, table), emit.integer(STEP_WEIGHTS)
    for group in range(STEP_GROUPS):
        compact.emit_group(builder, group, upper, source, buffer)
    entry = compact.emit_exceptions(builder, entry, place, builder.add(place, step_weights), buffer)
    pairs = STEP_PAIRS // STEP_GROUPS

    def body(step: Any, *carried: Any) -> list[Any]:
        rows, source, place, entry, ready, *found = carried
        offset = builder.and_(builder.mul(step, emit.integer(EXPANDED_BYTES)), mask)
        target = builder.add(buffer, offset)
        source = builder.add(source, emit.integer(STEP_BYTES))
        far, near = (_ahead(builder, source, distance, step, num_steps, jump) for distance in (FAR, NEAR))
        for group in range(STEP_GROUPS):
            compact.emit_fetch(builder, group, far, near)
            compact.emit_group(builder, group, upper, source, target)
            _multiply(builder, rows, ready, range(group * pairs, (group + 1) * pairs), found)
        place = builder.add(place, step_weights)
        entry = compact.emit_exceptions(builder, entry, place, builder.add(place, step_weights), target)
        return [builder.add(rows, emit.integer(4 * num_rows * STEP_PAIRS)), source, place, entry, target, *found]

    carried = [rows, source, place, entry, buffer, *_load_sums(builder, num_rows, sums)]
    rows, _, _, _, ready, *found = emit.loop(builder, emit.integer(1), num_steps, 1, carried, body)
    _multiply(builder, rows, ready, range(STEP_PAIRS), found)
    _store_sums(builder, found, sums)


def _ahead(builder: Any, source: Any, distance: int, step: Any, num_steps: Any, jump: Any) -> Any:
    """Address of the weights that come `distance` steps later."""
    later = builder.add(source, emit.integer(distance * STEP_BYTES))
    inside = builder.icmp_signed("<", builder.add(step, emit.integer(distance)), num_steps)
    return builder.select(inside, later, builder.add(later, jump))


multiply_expanding = emit.by_rows("aaaiaiiaia", FIRST_ROWS, _emit_expanding)
"""Add the products of packed rows and some steps of a panel to the sums; the steps are expanded as they are multiplied.

Arguments: the number of rows; rows, weights, the table of codes; the number of steps; the panel's first exception; the
place of the first weight in the panel; the bytes from the last step's end to the weights that are needed next; where
expanded steps go; -1 to keep all of them, EXPANDED_BYTES to keep two; the sums.
"""


def _emit_expanded(builder: Any, num_rows: int, arguments: Sequence[Any]) -> None:
    rows, weights, num_steps, sums, ahead = arguments

    def body(step: Any, *found: Any) -> list[Any]:
        own_rows = builder.add(rows, builder.mul(step, emit.integer(4 * num_rows * STEP_PAIRS)))
        own_weights = builder.add(weights, builder.mul(step, emit.integer(EXPANDED_BYTES)))
        own_ahead = builder.add(ahead, builder.mul(step, emit.integer(STEP_BYTES)))

        def pair(index: Any, *found: Any) -> list[Any]:
            following, line = list(found), builder.add(own_ahead, builder.mul(index, emit.integer(128)))
            for offset in (0, 64):
                simd.fetch(builder, builder.add(line, emit.integer(offset)))
            row = builder.add(own_rows, builder.mul(index, emit.integer(4 * num_rows)))
            _multiply(builder, row, builder.add(own_weights, builder.mul(index, emit.integer(64))), range(1), following)
            return following

        return emit.loop(builder, emit.integer(0), emit.integer(STEP_PAIRS), 1, list(found), pair)

    found = emit.loop(builder, emit.integer(0), num_steps, 1, _load_sums(builder, num_rows, sums), body)
    _store_sums(builder, found, sums)


multiply_expanded = emit.by_rows("aaiaa", range(1, MOST_EXPANDED_ROWS + 1), _emit_expanded)
"""Add the products of packed rows and some expanded steps to the sums.

Arguments: the number of rows; rows, weights; the number of steps; the sums; the weights to prefetch: two lines at each
pair, which is a third more than there are.
"""
