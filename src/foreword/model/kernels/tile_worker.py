"""What threads do for a linear layer in AMX tiles, compiled by numba: rows times panels, and how rows end.

Knows packed weights and rows as memory addresses; knows nothing of modules. A unit of work is some rows x some panels;
threads take units from a counter.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import carray

from foreword.model.kernels import simd, tiles
from foreword.model.kernels.cpu_layout import inlined, source_digest
from foreword.model.kernels.rows import silu
from foreword.model.kernels.simd import BF16S, I16S
from foreword.model.kernels.team import native_worker
from foreword.model.kernels.tiles import PANEL, TILE_ROWS

UNIT_ROWS = 256
(ROWS, ROW_BYTES, WEIGHT, BIAS, TARGET, NUM_ROWS, WIDTH, NUM_STEPS, NUM_PANELS, GROUP, GATED, COUNTERS, SCRATCH) = (
    range(13)
)
NUM_ARGUMENTS = 13
"""int64 each: addresses, and counts. WIDTH: columns of the result; GROUP: panels of a unit."""
_SUMS_BYTES = 4 * PANEL * 2 * TILE_ROWS
_CONFIG, _SUMS, _STAGED = 0, 64, 64 + 2 * _SUMS_BYTES
SCRATCH_BYTES = _STAGED + 2 * PANEL


def _bfloat16(builder: Any, vector: Any) -> Any:
    return builder.bitcast(builder.fptrunc(vector, BF16S), I16S)


def _half(builder: Any, sums: Any, bias: Any, half: int) -> Any:
    return builder.fadd(simd._load(builder, sums, 64 * half), simd._load(builder, bias, 64 * half))


@simd._instructions("aaa")
def _finish(builder: Any, sums: Any, bias: Any, target: Any) -> None:
    """32 sums of one row, with their bias, as bfloat16."""
    for half in (0, 1):
        simd._store(builder, _bfloat16(builder, _half(builder, sums, bias, half)), target, 32 * half)


def _emit_gate(builder: Any, sums: Any, bias: Any, target: Any) -> None:
    """silu(g) * u of 16 g and 16 u of one row, each rounded as if it were written to memory."""
    gate, up = (simd._widened(builder, _bfloat16(builder, _half(builder, sums, bias, half))) for half in (0, 1))
    rounded = simd._widened(builder, _bfloat16(builder, silu(builder, gate)))
    simd._store(builder, _bfloat16(builder, builder.fmul(rounded, up)), target)


_finish_gate = simd._instructions("aaa")(_emit_gate)
_product_beside_gates = tiles.product_beside(_emit_gate)


@inlined
def _target(a: Any, row: int, panel: int) -> Any:
    """Address of a row's first element of a panel."""
    return a[TARGET] + 2 * (row * a[WIDTH] + panel * (PANEL // 2 if a[GATED] else PANEL))


@inlined
def _is_whole(a: Any, panel: int) -> Any:
    """Whether the result has all columns of a panel."""
    return (panel + 1) * (PANEL // 2 if a[GATED] else PANEL) <= a[WIDTH]


@inlined
def _end_rows(a: Any, scratch: int, row: int, numbers: tuple[int, int], panel: int) -> None:
    """Write some of the rows from `row` on, whose sums lie in scratch memory."""
    whole, staged = _is_whole(a, panel), scratch + _STAGED
    for number in range(numbers[0], numbers[1]):
        sums = _sums(scratch, panel) + number * 4 * PANEL
        target = _target(a, row + number, panel)
        if a[GATED]:
            _finish_gate(sums, a[BIAS] + panel * 4 * PANEL, target if whole else staged)
        else:
            _finish(sums, a[BIAS] + panel * 4 * PANEL, target if whole else staged)
        if not whole:
            row_end = _target(a, row + number, 0) + 2 * a[WIDTH]
            simd.copy_bytes(target, staged, row_end - target)


@inlined
def _sums(scratch: int, panel: int) -> Any:
    """Where a panel's sums are; its neighbour's are elsewhere."""
    return scratch + _SUMS + panel % 2 * _SUMS_BYTES


@inlined
def _multiply(a: Any, scratch: int, row: int, num_rows: int, panels: tuple[int, int]) -> None:
    """Up to 32 rows by some panels. The gates of one panel are computed beside the product with the next."""
    x, waits = a[ROWS] + row * a[ROW_BYTES], False
    for panel in range(panels[0], panels[1]):
        weight, sums = a[WEIGHT] + panel * a[NUM_STEPS] * 64 * PANEL, _sums(scratch, panel)
        if waits:
            last = panel - 1
            ends = _sums(scratch, last), a[BIAS] + last * 4 * PANEL, _target(a, row, last)
            _product_beside_gates(x, a[ROW_BYTES], weight, a[NUM_STEPS], sums, num_rows, *ends, 2 * a[WIDTH])
            _end_rows(a, scratch, row, (a[NUM_STEPS], num_rows), last)
        elif num_rows > TILE_ROWS:
            tiles.product_32(x, a[ROW_BYTES], weight, a[NUM_STEPS], sums)
        else:
            tiles.product_16(x, a[ROW_BYTES], weight, a[NUM_STEPS], sums)
        waits = a[GATED] != 0 and num_rows > TILE_ROWS and panel + 1 < panels[1] and _is_whole(a, panel)
        if not waits:
            _end_rows(a, scratch, row, (0, num_rows), panel)


@functools.cache
def compile_worker() -> Any:
    """What each thread of a team runs: units until none are left. Compiled once per machine and kept."""
    digest = source_digest()

    @native_worker
    def worker(arguments: Any) -> None:
        a = carray(arguments, NUM_ARGUMENTS)
        if digest == 0:
            return
        scratch = a[SCRATCH] + simd.fetch_add(a[COUNTERS] + 64, 1) * SCRATCH_BYTES
        num_groups = (a[NUM_PANELS] + a[GROUP] - 1) // a[GROUP]
        num_units = num_groups * ((a[NUM_ROWS] + UNIT_ROWS - 1) // UNIT_ROWS)
        laid_out = 0
        while True:
            unit = simd.fetch_add(a[COUNTERS], 1)
            if unit >= num_units:
                break
            first_panel = unit % num_groups * a[GROUP]
            panels = first_panel, min(first_panel + a[GROUP], a[NUM_PANELS])
            first_row = unit // num_groups * UNIT_ROWS
            for row in range(first_row, min(first_row + UNIT_ROWS, a[NUM_ROWS]), 2 * TILE_ROWS):
                num_rows = min(2 * TILE_ROWS, a[NUM_ROWS] - row)
                if num_rows != laid_out:
                    tiles.lay_out(scratch + _CONFIG, num_rows)
                    laid_out = num_rows
                _multiply(a, scratch, row, num_rows, panels)
        tiles.release()

    return worker
