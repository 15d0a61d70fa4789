"""Linear layers in AMX tiles, compiled by numba: multiplies rows by panels of weights, and writes results.

For each unit of work, a thread expands the unit's weights. With few rows, it expands one step while tiles multiply the
rows by the step before; such a product waits for hardly anything but memory. With more rows, it expands some panels at
a time. The expanded panels then stay in the core's second cache for all rows of the unit. Long rows (along k) are cut
into *parts*, and sums are kept in memory from part to part. Sums are float32 in memory as in tiles, so cutting changes
no bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import carray

from foreword.kernels.llvm import emit, simd, tiles
from foreword.kernels.llvm.tiles import TILE_BYTES, TILE_ROWS
from foreword.kernels.products import weights12 as compact
from foreword.kernels.products.units import (
    PRODUCT,
    SUMS_BYTES,
    ProductWorker,
    emit_end,
    emit_gate,
    end_rows,
    exceptions_of,
    is_whole,
    rows_of,
    set_group,
    target_of,
    weights_of,
)
from foreword.kernels.products.weights12 import FAR, NEAR, STEP_BYTES, STEP_WEIGHTS
from foreword.kernels.runtime.compiled import Record, inlined, worker

BLOCK_ROWS = 2 * TILE_ROWS
MOST_STREAMED_ROWS = 64
"""The most rows for which each block of rows expands the weights again. Keeping expanded weights would cost more than
it saves."""
MOST_UNIT_ROWS, MOST_PANELS, MOST_STREAMED_PANELS = 576, 8, 2
"""The most rows and panels of a unit, and the most panels of a unit with few rows. With few rows, units are smaller,
because threads wait less for each other if the last unit is small."""
MOST_STEPS, PART = 40, 14
"""The most steps of a panel that is not cut into parts, and the most steps of a part: 32 rows of a part stay in the
first cache for all panels of a unit."""
_BLOCK_SUMS_BYTES = SUMS_BYTES * BLOCK_ROWS
_WEIGHTS_BYTES = 2 * TILE_BYTES
_FETCHED_ROWS = BLOCK_ROWS // MOST_PANELS
_CONFIG, _STAGED, _SUMS = 0, 64, 256
_EXPANDED = _SUMS + MOST_UNIT_ROWS // BLOCK_ROWS * MOST_PANELS * _BLOCK_SUMS_BYTES
_SCRATCH_BYTES = _EXPANDED + MOST_PANELS * MOST_STEPS * _WEIGHTS_BYTES

_begin_16, _, _multiply_16, _end_16 = tiles.product_16
_begin_32, _go_on_32, _multiply_32, _end_32 = tiles.product_32


def _set_units(a: Record, num_threads: int) -> None:
    num_rows = int(a["num_rows"])
    max_panels = MOST_STREAMED_PANELS if num_rows <= MOST_STREAMED_ROWS else MOST_PANELS
    set_group(a, min(max_panels, max(1, int(a["num_panels"]) // (4 * num_threads))))
    unit = -(-num_rows // -(-num_rows // MOST_UNIT_ROWS))
    a["unit_rows"] = -(-unit // BLOCK_ROWS) * BLOCK_ROWS
    num_steps = int(a["num_steps"])
    a["part_steps"] = num_steps if num_steps <= MOST_STEPS else -(-num_steps // -(-num_steps // PART))


def _beside(finish: Callable[..., None]) -> Any:
    """Make the function for all steps of a product. Each step also writes one row's result of the previous product.

    Further arguments:

        num_rows       the number of rows of the previous product to write
        sums, bias     the addresses of their sums and of the panel's bias
        target         the address of the first row's result
        target_bytes   the bytes from one row's result to the next
        next_target    the bytes from `target` to the target of the present product
        row_bytes      the bytes between rows that will be read soon
        next_rows      the address of the first of these rows
    """

    def end_row(builder: Any, step: Any, *others: Any) -> None:
        num_rows, sums, bias, target, target_bytes, next_target, row_bytes, next_rows = others
        own_target = builder.add(target, builder.mul(step, target_bytes))
        simd.fetch(builder, builder.add(own_target, next_target), near=True, writing=True)
        for row in range(_FETCHED_ROWS):
            place = emit.at(builder, builder.mul(row_bytes, emit.integer(row)), step, 64)
            simd.fetch(builder, builder.add(next_rows, place))
        with builder.if_then(builder.icmp_signed("<", step, num_rows)):
            finish(builder, emit.at(builder, sums, step, SUMS_BYTES), bias, own_target)

    return tiles.multiply_beside("iaaaiiia", end_row)


_multiply_beside_ends, _multiply_beside_gates = _beside(emit_end), _beside(emit_gate)


@inlined
def _lay_out(scratch: int, num_rows: int, laid_out: int) -> int:
    """Lay out tiles for `num_rows` rows, unless they are laid out for this number (`laid_out`). Returns `num_rows`."""
    if num_rows != laid_out:
        tiles.lay_out(scratch + _CONFIG, num_rows)
    return num_rows


@inlined
def _stream(a: Any, scratch: int, row: int, panel: int, following: int) -> None:
    """Multiply up to 32 rows by a panel: a step is expanded while the tiles multiply the step before.

    Near the end of the panel, prefetch the first weights of the panel `following`.
    """
    num_rows, num_steps = min(BLOCK_ROWS, a.num_rows - row), a.num_steps
    sums, ready, rows = scratch + _SUMS, scratch + _EXPANDED, rows_of(a, panel)
    source, entry = weights_of(a, panel, 0), exceptions_of(a, panel)
    beyond = weights_of(a, following - 1, 0)
    if num_rows > TILE_ROWS:
        _begin_32()
    else:
        _begin_16()
    for step in range(num_steps + 1):
        if step < num_steps:
            target, place = ready + (step & 1) * _WEIGHTS_BYTES, step * STEP_WEIGHTS
            far = (source if step + FAR < num_steps else beyond) + FAR * STEP_BYTES
            near = (source if step + NEAR < num_steps else beyond) + NEAR * STEP_BYTES
            compact.expand_step(source, a.table, target, far, near)
            entry = compact.write_exceptions(entry, place, place + STEP_WEIGHTS, target)
            source += STEP_BYTES
            beyond += STEP_BYTES
        if step > 0:
            x, weights = rows + row * a.row_bytes + (step - 1) * 64, ready + (~step & 1) * _WEIGHTS_BYTES
            if num_rows > TILE_ROWS:
                _multiply_32(x, a.row_bytes, weights)
            else:
                _multiply_16(x, a.row_bytes, weights)
    if num_rows > TILE_ROWS:
        _end_32(sums)
    else:
        _end_16(sums)
    end_rows(a, scratch + _STAGED, sums, row, (0, num_rows), panel)


@inlined
def _expand(a: Any, scratch: int, panels: tuple[int, int], part: tuple[int, int]) -> None:
    """Expand the steps `part` of each of `panels` from 12 to 16 bits a weight, one panel after the other."""
    target = scratch + _EXPANDED
    for panel in range(panels[0], panels[1]):
        source, start = weights_of(a, panel, part[0]), target
        for _ in range(part[0], part[1]):
            far, near = source + FAR * STEP_BYTES, source + NEAR * STEP_BYTES
            compact.expand_step(source, a.table, target, far, near)
            source += STEP_BYTES
            target += _WEIGHTS_BYTES
        entry = exceptions_of(a, panel)
        compact.write_exceptions(entry, part[0] * STEP_WEIGHTS, part[1] * STEP_WEIGHTS, start)


@inlined
def _sums_of(a: Any, scratch: int, block: int, number: int) -> Any:
    """The address of the sums of a block of rows and panel `number` of a unit.

    If rows have only one part, no sums are kept from part to part, and there are only two places for sums.
    """
    place = number % 2 if a.part_steps == a.num_steps else block * MOST_PANELS + number
    return scratch + _SUMS + place * _BLOCK_SUMS_BYTES


@inlined
def _multiply_block(a: Any, scratch: int, row: int, block: int, panels: tuple[int, int], part: tuple[int, int]) -> None:
    """Multiply 32 rows by expanded panels. The results of one panel are written during the product with the next.

    During the product with the first panel, no results have to be written, so memory of the panel before it is neither
    read nor written. The lines that follow are only prefetched, which is safe at any address.
    """
    stride, num_steps, waiting = a.row_bytes, part[1] - part[0], 0
    x = rows_of(a, panels[0]) + row * stride + part[0] * 64
    for panel in range(panels[0], panels[1]):
        number = panel - panels[0]
        weights = scratch + _EXPANDED + number * num_steps * _WEIGHTS_BYTES
        sums, last_sums = _sums_of(a, scratch, block, number), _sums_of(a, scratch, block, number - 1)
        if part[0] == 0:
            _begin_32()
        else:
            _go_on_32(sums)
        bias, target = a.bias + (panel - 1) * SUMS_BYTES, target_of(a, row, panel - 1)
        next_target, next_rows = target_of(a, row, panel) - target, x + (BLOCK_ROWS + number * _FETCHED_ROWS) * stride
        others = waiting, last_sums, bias, target, 2 * a.width, next_target, stride, next_rows
        if a.gated:
            _multiply_beside_gates(x, stride, weights, num_steps, *others)
        else:
            _multiply_beside_ends(x, stride, weights, num_steps, *others)
        _end_32(sums)
        end_rows(a, scratch + _STAGED, last_sums, row, (num_steps, waiting), panel - 1)
        waiting = 0
        if part[1] == a.num_steps:
            if panel + 1 < panels[1] and is_whole(a, panel):
                waiting = BLOCK_ROWS
            else:
                end_rows(a, scratch + _STAGED, sums, row, (0, BLOCK_ROWS), panel)


@inlined
def _stream_units(a: Any, scratch: int) -> None:
    """Compute units of some panels and all rows, for at most MOST_STREAMED_ROWS rows."""
    laid_out, following = 0, simd.fetch_add(a.counters, 1) * a.group
    while following < a.num_panels:
        first, following = following, simd.fetch_add(a.counters, 1) * a.group
        end = min(first + a.group, a.num_panels)
        for row in range(0, a.num_rows, BLOCK_ROWS):
            laid_out = _lay_out(scratch, min(BLOCK_ROWS, a.num_rows - row), laid_out)
            for panel in range(first, end):
                _stream(a, scratch, row, panel, panel + 1 if panel + 1 < end else following)


@inlined
def _expand_units(a: Any, scratch: int) -> None:
    """Compute units of some panels and some rows, for more than MOST_STREAMED_ROWS rows."""
    num_groups = (a.num_panels + a.group - 1) // a.group
    num_units = num_groups * ((a.num_rows + a.unit_rows - 1) // a.unit_rows)
    tiles.lay_out(scratch + _CONFIG, BLOCK_ROWS)
    while True:
        unit = simd.fetch_add(a.counters, 1)
        if unit >= num_units:
            break
        first_panel, first_row = unit % num_groups * a.group, unit // num_groups * a.unit_rows
        panels = first_panel, min(first_panel + a.group, a.num_panels)
        rows = first_row, min(first_row + a.unit_rows, a.num_rows)
        for first_step in range(0, a.num_steps, a.part_steps):
            part = first_step, min(first_step + a.part_steps, a.num_steps)
            _expand(a, scratch, panels, part)
            for block, row in enumerate(range(rows[0], rows[1], BLOCK_ROWS)):
                # The last block repeats rows of the block before, with the same bits.
                _multiply_block(a, scratch, min(row, a.num_rows - BLOCK_ROWS), block, panels, part)


@worker(PRODUCT)
def multiply(arguments: Any) -> None:
    """Run in every thread: compute units until no unit is left."""
    a = carray(arguments, 1)[0]
    scratch = a.scratch + simd.fetch_add(a.counters + 64, 1) * a.thread_scratch
    if a.num_rows <= MOST_STREAMED_ROWS:
        _stream_units(a, scratch)
    else:
        _expand_units(a, scratch)
    tiles.release()


TILE_WORKER = ProductWorker(multiply, lambda num_steps: _SCRATCH_BYTES, _set_units)
