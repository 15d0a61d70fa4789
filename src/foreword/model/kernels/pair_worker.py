"""What threads do for a linear layer in pairs of bfloat16, compiled by numba, where the processor has no tiles.

Knows compact weights and rows as memory addresses; knows nothing of modules. A unit's first rows are multiplied with
weights while these are expanded, which costs the multiplication next to nothing; the others with what was expanded,
which lies in the core's second cache, in blocks of equal size. What is long (along k) is taken in *parts*, and sums
wait in memory from part to part; they are float32 there as in registers, so cutting changes no bit.

    up to 8 rows     nothing else is multiplied: only two steps of expanded weights are kept
    up to 16         rows are packed once by each thread
    more             a block of rows is packed for some panels at a time
"""

from __future__ import annotations

import functools
from typing import Any

from numba import carray

from foreword.model.kernels import pairs, simd
from foreword.model.kernels.compact import STEP_BYTES, STEP_WEIGHTS
from foreword.model.kernels.cpu_layout import inlined, source_digest
from foreword.model.kernels.pairs import EXPANDED_BYTES, FIRST_ROWS, MOST_ROWS, STEP_PAIRS
from foreword.model.kernels.product_units import (
    BLOCK,
    COUNTERS,
    FIRST,
    GROUP,
    NUM_ARGUMENTS,
    NUM_PANELS,
    NUM_ROWS,
    NUM_STEPS,
    PART_STEPS,
    ROW_BYTES,
    ROWS,
    SCRATCH,
    SUMS_BYTES,
    TABLE,
    THREAD_SCRATCH,
    UNIT_ROWS,
    ProductWorker,
    end_rows,
    exceptions_of,
    weights_of,
)
from foreword.model.kernels.simd import LANES
from foreword.model.kernels.step_plan import Int64Array
from foreword.model.kernels.team import native_worker

FEW_PANELS, MOST_PANELS = 2, 8
"""Of a unit, if there are few rows and if there are more."""
MOST_FIRST = FIRST_ROWS[-1]
FEW_ROWS = 2 * MOST_FIRST
"""Up to so many rows are packed once."""
MOST_BLOCKS = 20
"""Of a unit, beside its first rows."""
PART = 28
"""Most steps of a part, unless there is but one: the rows of a block lie in the first cache then."""
_STAGED, _ADDRESSES, _SUMS = 0, 64, 256
_SUMS_BYTES = (MOST_FIRST + MOST_BLOCKS * MOST_ROWS) * SUMS_BYTES
"""Of a panel."""
_EXPANDED = _SUMS + MOST_PANELS * _SUMS_BYTES
_PACKED = _EXPANDED + MOST_PANELS * PART * EXPANDED_BYTES


def _set_units(a: Int64Array, num_threads: int) -> None:
    num_rows, num_steps = int(a[NUM_ROWS]), int(a[NUM_STEPS])
    most = FEW_PANELS if num_rows <= FEW_ROWS else MOST_PANELS
    a[GROUP] = min(most, max(1, int(a[NUM_PANELS]) // (4 * num_threads)))
    if num_rows <= MOST_FIRST:
        a[FIRST] = next(count for count in FIRST_ROWS if count >= num_rows)
        a[BLOCK], a[UNIT_ROWS], a[PART_STEPS] = 1, a[FIRST], num_steps
        return
    unit_rows = -(-num_rows // -(-num_rows // (MOST_FIRST + MOST_BLOCKS * MOST_ROWS)))
    num_blocks = -(-(unit_rows - MOST_FIRST) // MOST_ROWS)
    a[FIRST], a[BLOCK] = MOST_FIRST, -(-(unit_rows - MOST_FIRST) // num_blocks)
    a[UNIT_ROWS] = a[FIRST] + num_blocks * a[BLOCK]
    a[PART_STEPS] = -(-num_steps // -(-num_steps // PART))


def _thread_scratch(num_steps: int) -> int:
    return _PACKED + num_steps * _packed_bytes(FEW_ROWS) + 64


@inlined
def _packed_bytes(num_rows: int) -> int:
    """Of a step."""
    return 4 * STEP_PAIRS * num_rows


@inlined
def _pack(a: Any, scratch: int, rows: tuple[int, int], count: int, steps: tuple[int, int], target: int) -> None:
    """Pack `count` rows for some steps, or as many as there are: the last stands in for those that are not.

    Words beyond them are written too, and then overwritten by the next pair's.
    """
    addresses = scratch + _ADDRESSES
    for number in range(LANES):
        simd.store_int(addresses + 8 * number, a[ROWS] + min(rows[0] + number, rows[1] - 1) * a[ROW_BYTES])
    for step in range(steps[0], steps[1]):
        simd.transpose_words(addresses, 64 * step, target, 4 * count)
        target += _packed_bytes(count)


@inlined
def _pack_few(a: Any, scratch: int) -> None:
    """Pack all of few rows, for all steps: the first, and then the others."""
    target, everything = scratch + _PACKED, (0, a[NUM_STEPS])
    for row in range(0, a[NUM_ROWS], a[FIRST]):
        count = a[FIRST] if row == 0 else a[BLOCK]
        if count > 1 or row > 0:
            _pack(a, scratch, (row, a[NUM_ROWS]), count, everything, target)
        target += a[NUM_STEPS] * _packed_bytes(a[FIRST])


@inlined
def _multiply_first(
    a: Any, scratch: int, packed: int, panels: tuple[int, int], part: tuple[int, int], ahead: int
) -> None:
    """The unit's first rows by some panels, which are expanded. Those at `ahead` follow."""
    num_steps, target = part[1] - part[0], scratch + _EXPANDED
    for panel in range(panels[0], panels[1]):
        source, end = weights_of(a, panel, part[0]), weights_of(a, panel, part[1])
        following = weights_of(a, panel + 1, part[0]) if panel + 1 < panels[1] else ahead
        entry, place, mask = exceptions_of(a, panel), part[0] * STEP_WEIGHTS, EXPANDED_BYTES
        if a[NUM_ROWS] > MOST_FIRST:
            mask = -1
        sums = scratch + _SUMS + (panel - panels[0]) * _SUMS_BYTES
        pairs.multiply_expanding(
            a[FIRST], packed, source, a[TABLE], num_steps, entry, place, following - end, target, mask, sums
        )
        if a[NUM_ROWS] > MOST_FIRST:
            target += num_steps * EXPANDED_BYTES


@inlined
def _multiply_unit(a: Any, scratch: int, panels: tuple[int, int], rows: tuple[int, int], following: int) -> None:
    """Some rows by some panels; the panel `following` is the next unit's first."""
    few, first_rows = a[NUM_ROWS] <= FEW_ROWS, (rows[0], rows[1])
    num_panels, panel_bytes = panels[1] - panels[0], a[NUM_STEPS] * STEP_BYTES
    for number in range(num_panels):
        simd.clear_bytes(scratch + _SUMS + number * _SUMS_BYTES, a[UNIT_ROWS] * SUMS_BYTES)
    for first_step in range(0, a[NUM_STEPS], a[PART_STEPS]):
        part = first_step, min(first_step + a[PART_STEPS], a[NUM_STEPS])
        num_steps = part[1] - part[0]
        ahead = weights_of(a, panels[0], part[1]) if part[1] < a[NUM_STEPS] else weights_of(a, following, 0)
        packed = scratch + _PACKED
        if few:
            packed = _packed_first(a, scratch) + part[0] * _packed_bytes(a[FIRST])
        else:
            _pack(a, scratch, first_rows, a[FIRST], part, packed)
        _multiply_first(a, scratch, packed, panels, part, ahead)
        for row in range(rows[0] + a[FIRST], rows[1], a[BLOCK]):
            packed = scratch + _PACKED
            if few:
                packed += a[NUM_STEPS] * _packed_bytes(a[FIRST]) + part[0] * _packed_bytes(a[BLOCK])
            else:
                _pack(a, scratch, (row, rows[1]), a[BLOCK], part, packed)
            for number in range(num_panels):
                weights = scratch + _EXPANDED + number * num_steps * EXPANDED_BYTES
                sums = scratch + _SUMS + number * _SUMS_BYTES + (row - rows[0]) * SUMS_BYTES
                pairs.multiply_expanded(a[BLOCK], packed, weights, num_steps, sums, ahead + number * panel_bytes)
    for panel in range(panels[0], panels[1]):
        sums = scratch + _SUMS + (panel - panels[0]) * _SUMS_BYTES
        end_rows(a, scratch + _STAGED, sums, rows[0], (0, rows[1] - rows[0]), panel)


@inlined
def _packed_first(a: Any, scratch: int) -> Any:
    """Where the first of few rows are packed; one row needs no packing."""
    return a[ROWS] if a[FIRST] == 1 else scratch + _PACKED


@functools.cache
def _compile() -> Any:
    """What each thread of a team runs: units until none are left. Compiled once per machine and kept."""
    digest = source_digest()

    @native_worker  # type: ignore[untyped-decorator]
    def worker(arguments: Any) -> None:
        a = carray(arguments, NUM_ARGUMENTS)
        if digest == 0:
            return
        scratch = a[SCRATCH] + simd.fetch_add(a[COUNTERS] + 64, 1) * a[THREAD_SCRATCH]
        num_groups = (a[NUM_PANELS] + a[GROUP] - 1) // a[GROUP]
        num_units = num_groups * ((a[NUM_ROWS] + a[UNIT_ROWS] - 1) // a[UNIT_ROWS])
        following = simd.fetch_add(a[COUNTERS], 1)
        if following < num_units and a[NUM_ROWS] <= FEW_ROWS:
            _pack_few(a, scratch)
        while following < num_units:
            unit, following = following, simd.fetch_add(a[COUNTERS], 1)
            first_panel, first_row = unit % num_groups * a[GROUP], unit // num_groups * a[UNIT_ROWS]
            panels = first_panel, min(first_panel + a[GROUP], a[NUM_PANELS])
            rows = first_row, min(first_row + a[UNIT_ROWS], a[NUM_ROWS])
            _multiply_unit(a, scratch, panels, rows, following % num_groups * a[GROUP])

    return worker


IN_PAIRS = ProductWorker(_compile, _thread_scratch, _set_units)
