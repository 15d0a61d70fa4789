"""Linear layers in pairs of bfloat16 for processors without tiles, compiled by numba.

A unit's first rows are multiplied while the weights are expanded, because the processor can do some of this work at the
same time. The other rows, in blocks of nearly equal size, are multiplied by the expanded weights, which lie in the
core's second cache. Long rows (along k) are cut into *parts*, and sums are kept in memory from part to part. Sums are
float32 in memory as in registers, so cutting changes no bit.

    up to 8 rows     all are first rows, packed once for all steps; only two steps of expanded weights are kept
    up to 16         there is one block of other rows; each thread packs all rows once, for all steps
    more             each thread packs a block of rows for some panels and one part at a time

A thread's scratch memory:

    staged       the end of a row, where the result lacks columns of the last panel
    addresses    addresses of the rows that are being packed
    sums         for each panel of a unit the sums of all its rows
    expanded     for each panel of a unit the weights of a part
    packed       the first rows, and after them the other rows if there are few

An instruction (`vdpbf16ps`) adds, in each of 16 lanes, two products of bfloat16: `C[m, n] += A[m, 2k] B[2k, n] +
A[m, 2k + 1] B[2k + 1, n]`, for 16 columns n of a row m. The load of the row's pair copies the pair to all lanes.

One element of a result is one chain of such additions along k, from 0 upwards, starting at 0. So the element's bits
depend only on its row and column.

    rows      packed, so that one address serves all: [k / 2, rows] pairs
    weights   as for tiles (`weights12.py`): a step has 16 pairs of k x 16 columns, twice
    sums      [rows, 32] float32
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import carray

from foreword.kernels.llvm import emit, simd
from foreword.kernels.llvm.emit import LANES
from foreword.kernels.llvm.tiles import PRODUCT_PANEL, STEP, TILE_BYTES
from foreword.kernels.products import weights12 as compact
from foreword.kernels.products.units import (
    PRODUCT,
    SUMS_BYTES,
    ProductWorker,
    end_rows,
    exceptions_of,
    rows_of,
    set_group,
    weights_of,
)
from foreword.kernels.products.weights12 import FAR, NEAR, STEP_BYTES, STEP_GROUPS, STEP_WEIGHTS
from foreword.kernels.runtime.compiled import Record, inlined, worker

STEP_PAIRS = STEP // 2
COLUMNS = PRODUCT_PANEL // emit.LANES
"""The number of vectors that hold one row's sums."""
EXPANDED_BYTES = COLUMNS * TILE_BYTES
FIRST_ROWS = (1, 2, 3, 4, 6, 8)
"""The numbers of rows for which there is code that expands weights and multiplies them at once. Code for 5 or 7 rows
would bring little."""
MOST_EXPANDED_ROWS = 14
"""The most rows that multiply expanded weights at a time: their sums fill 28 of 32 registers."""
MOST_PANELS = 8
"""The most panels of a unit. With few rows, a unit has one panel, because threads wait for the last unit."""
MOST_FIRST_ROWS = FIRST_ROWS[-1]
MOST_PACKED_ROWS = 2 * MOST_FIRST_ROWS
"""With at most this number of rows, a thread packs all rows only once, for all its units."""
MOST_BLOCKS = 20
"""The most blocks of rows in a unit, in addition to the unit's first rows."""
PART = 28
"""The most steps of a part, if a row has several parts. With this number, a block's rows fit into the first cache."""
_STAGED, _ADDRESSES, _SUMS = 0, 64, 256
_UNIT_ROWS = MOST_FIRST_ROWS + MOST_BLOCKS * MOST_EXPANDED_ROWS
_PANEL_SUMS_BYTES = _UNIT_ROWS * SUMS_BYTES
"""Bytes of a panel's sums for all rows of a unit."""
_EXPANDED = _SUMS + MOST_PANELS * _PANEL_SUMS_BYTES
_PACKED = _EXPANDED + MOST_PANELS * PART * EXPANDED_BYTES


def _multiply(builder: Any, rows: Any, weights: Any, pairs: range, sums: list[Any]) -> None:
    """Add the products of some pairs of a step to `sums`, which lists the vectors of sums row by row."""
    num_rows = len(sums) // COLUMNS
    for pair in pairs:
        right = [emit.load(builder, weights, TILE_BYTES * column + 64 * pair, emit.I32S) for column in range(COLUMNS)]
        for row in range(num_rows):
            left = emit.splat(builder, emit.load(builder, rows, 4 * (num_rows * pair + row), emit.I32))
            for place, weight in enumerate(right, COLUMNS * row):
                sums[place] = simd.multiply_add(builder, sums[place], left, weight, True)
        sums[:] = [_here(builder, total) for total in sums]


def _here(builder: Any, vector: Any) -> Any:
    """Make LLVM compute the vector at this place. Otherwise it would load pairs of many rows first, and spill them."""
    kind = ir.FunctionType(emit.F32S, [emit.F32S])
    return builder.asm(kind, "", "=v,0,~{memory}", [vector], True)


def _load_sums(builder: Any, num_rows: int, sums: Any) -> list[Any]:
    return [emit.load(builder, sums, 64 * number) for number in range(num_rows * COLUMNS)]


def _store_sums(builder: Any, vectors: Sequence[Any], sums: Any) -> None:
    for number, vector in enumerate(vectors):
        emit.store(builder, vector, sums, 64 * number)


def _emit_expanding(builder: Any, num_rows: int, arguments: Sequence[Any]) -> None:
    """Expand each step while rows are multiplied by the step before it."""
    rows, source, table, num_steps, entry, place, jump, buffer, mask, sums = arguments
    upper, step_weights = compact.load_table(builder, table), emit.integer(STEP_WEIGHTS)
    for group in range(STEP_GROUPS):
        compact.emit_group(builder, group, upper, source, buffer)
    entry = compact.emit_exceptions(builder, entry, place, builder.add(place, step_weights), buffer)
    pairs = STEP_PAIRS // STEP_GROUPS

    def body(step: Any, *carried: Any) -> list[Any]:
        rows, source, place, entry, ready, *totals = carried
        offset = builder.and_(builder.mul(step, emit.integer(EXPANDED_BYTES)), mask)
        target = builder.add(buffer, offset)
        source = builder.add(source, emit.integer(STEP_BYTES))
        far, near = (_ahead(builder, source, distance, step, num_steps, jump) for distance in (FAR, NEAR))
        for group in range(STEP_GROUPS):
            compact.emit_fetch(builder, group, far, near)
            compact.emit_group(builder, group, upper, source, target)
            _multiply(builder, rows, ready, range(group * pairs, (group + 1) * pairs), totals)
        place = builder.add(place, step_weights)
        entry = compact.emit_exceptions(builder, entry, place, builder.add(place, step_weights), target)
        return [builder.add(rows, emit.integer(4 * num_rows * STEP_PAIRS)), source, place, entry, target, *totals]

    carried = [rows, source, place, entry, buffer, *_load_sums(builder, num_rows, sums)]
    rows, _, _, _, ready, *totals = emit.loop(builder, emit.integer(1), num_steps, 1, carried, body)
    _multiply(builder, rows, ready, range(STEP_PAIRS), totals)
    _store_sums(builder, totals, sums)


def _ahead(builder: Any, source: Any, distance: int, step: Any, num_steps: Any, jump: Any) -> Any:
    """The address of the weights that are needed `distance` steps later."""
    later = builder.add(source, emit.integer(distance * STEP_BYTES))
    inside = builder.icmp_signed("<", builder.add(step, emit.integer(distance)), num_steps)
    return builder.select(inside, later, builder.add(later, jump))


multiply_expanding = emit.by_rows("aaaiaiiaia", FIRST_ROWS, _emit_expanding)
"""Add the products of packed rows and some steps of a panel to the sums; the steps are expanded as they are multiplied.

Arguments:

    num_rows
    rows        the address of the packed rows
    source      the address of the first step
    table       the address of the table of codes
    num_steps
    entry       the address of the panel's first exception
    place       the number of the first step's first weight in the panel
    jump        the bytes from the last step's end to the weights that are needed next
    buffer      the address for expanded steps
    mask        -1 keeps all expanded steps, EXPANDED_BYTES keeps two
    sums        the address of the sums
"""


def _emit_expanded(builder: Any, num_rows: int, arguments: Sequence[Any]) -> None:
    rows, weights, num_steps, sums, ahead = arguments

    def body(step: Any, *totals: Any) -> list[Any]:
        own_rows = emit.at(builder, rows, step, 4 * num_rows * STEP_PAIRS)
        own_weights = emit.at(builder, weights, step, EXPANDED_BYTES)
        own_ahead = emit.at(builder, ahead, step, STEP_BYTES)

        def pair(index: Any, *totals: Any) -> list[Any]:
            following, line = list(totals), emit.at(builder, own_ahead, index, 128)
            for offset in (0, 64):
                simd.fetch(builder, builder.add(line, emit.integer(offset)))
            row = emit.at(builder, own_rows, index, 4 * num_rows)
            _multiply(builder, row, emit.at(builder, own_weights, index, 64), range(1), following)
            return following

        return emit.loop(builder, emit.integer(0), emit.integer(STEP_PAIRS), 1, list(totals), pair)

    totals = emit.loop(builder, emit.integer(0), num_steps, 1, _load_sums(builder, num_rows, sums), body)
    _store_sums(builder, totals, sums)


multiply_expanded = emit.by_rows("aaiaa", range(1, MOST_EXPANDED_ROWS + 1), _emit_expanded)
"""Add the products of packed rows and some expanded steps to the sums.

Arguments: the number of rows; the addresses of the packed rows and of the weights; the number of steps; the addresses
of the sums and of the weights to prefetch. Two cache lines are prefetched for each pair of inputs, which is a third
more lines than the weights have.
"""


# With few rows, the rows after the first ones must fit into one block, and the block into the memory for packed rows.
assert MOST_PACKED_ROWS - MOST_FIRST_ROWS <= MOST_EXPANDED_ROWS <= min(MOST_PACKED_ROWS, LANES)


def _set_units(a: Record, num_threads: int) -> None:
    num_rows, num_steps = int(a["num_rows"]), int(a["num_steps"])
    max_panels, row_units = 1 if num_rows <= MOST_PACKED_ROWS else MOST_PANELS, -(-num_rows // _UNIT_ROWS)
    set_group(a, min(max_panels, max(1, int(a["num_panels"]) * row_units // (4 * num_threads))))
    if num_rows <= MOST_FIRST_ROWS:
        a["first"] = next(count for count in FIRST_ROWS if count >= num_rows)
        a["unit_rows"], a["part_steps"] = a["first"], num_steps
        return
    a["first"], a["unit_rows"] = MOST_FIRST_ROWS, -(-num_rows // row_units)
    a["part_steps"] = -(-num_steps // -(-num_steps // PART))


def _thread_scratch(num_steps: int) -> int:
    return _PACKED + num_steps * 4 * STEP_PAIRS * MOST_PACKED_ROWS + 64  # for writes beyond the last packed word


@inlined
def _packed_bytes(num_rows: int) -> int:
    """The bytes of one step of `num_rows` packed rows."""
    return 4 * STEP_PAIRS * num_rows


@inlined
def _pack(
    a: Any, scratch: int, base: int, rows: tuple[int, int], count: int, steps: tuple[int, int], target: int
) -> None:
    """Pack `count` of the rows at `base`, for some steps. If there are fewer rows, the last row is packed repeatedly.

    Words after the packed rows are written too; the next pair's words overwrite them.
    """
    addresses = scratch + _ADDRESSES
    for number in range(LANES):
        simd.store_int(addresses + 8 * number, base + min(rows[0] + number, rows[1] - 1) * a.row_bytes)
    for step in range(steps[0], steps[1]):
        simd.transpose_words(addresses, 64 * step, target, 4 * count)
        target += _packed_bytes(count)


@inlined
def _pack_few(a: Any, scratch: int, base: int) -> None:
    """Pack the few rows at `base` for all steps: the first rows, unless there is only one, then the other rows."""
    target, everything, num_rows = scratch + _PACKED, (0, a.num_steps), a.num_rows
    if a.first > 1:
        _pack(a, scratch, base, (0, num_rows), a.first, everything, target)
    if num_rows > a.first:
        target += a.num_steps * _packed_bytes(a.first)
        _pack(a, scratch, base, (a.first, num_rows), num_rows - a.first, everything, target)


@inlined
def _begin_sums(a: Any, scratch: int, number: int, row: int, count: int, first_step: int) -> Any:
    """Return the address of the sums of panel `number` of the unit, for `count` rows from row `row` of the unit on.

    At the first part, sums are set to zero. From one part to the next, they are kept at this address. If there is only
    one part, all rows use the same address.
    """
    sums = scratch + _SUMS + number * _PANEL_SUMS_BYTES
    if a.part_steps < a.num_steps:
        sums += row * SUMS_BYTES
    if first_step == 0:
        simd.clear_bytes(sums, count * SUMS_BYTES)
    return sums


@inlined
def _multiply_first(
    a: Any, scratch: int, panels: tuple[int, int], rows: tuple[int, int], part: tuple[int, int], ahead: int
) -> None:
    """Multiply the unit's first rows by some panels, and expand the panels; the weights at `ahead` are needed next."""
    num_steps, target, packed = part[1] - part[0], scratch + _EXPANDED, scratch + _PACKED
    if a.first == 1:
        packed = rows_of(a, panels[0])
    elif a.num_rows <= MOST_PACKED_ROWS:
        packed += part[0] * _packed_bytes(a.first)
    else:
        _pack(a, scratch, rows_of(a, panels[0]), rows, a.first, part, packed)
    for panel in range(panels[0], panels[1]):
        source, end = weights_of(a, panel, part[0]), weights_of(a, panel, part[1])
        following = weights_of(a, panel + 1, part[0]) if panel + 1 < panels[1] else ahead
        entry, place, mask = exceptions_of(a, panel), part[0] * STEP_WEIGHTS, EXPANDED_BYTES
        if a.num_rows > MOST_FIRST_ROWS:
            mask = -1
        sums = _begin_sums(a, scratch, panel - panels[0], 0, a.first, part[0])
        multiply_expanding(
            a.first, packed, source, a.table, num_steps, entry, place, following - end, target, mask, sums
        )
        if a.num_rows > MOST_FIRST_ROWS:
            target += num_steps * EXPANDED_BYTES
        if part[1] == a.num_steps:
            end_rows(a, scratch + _STAGED, sums, rows[0], (0, min(a.first, rows[1] - rows[0])), panel)


@inlined
def _multiply_others(
    a: Any, scratch: int, panels: tuple[int, int], rows: tuple[int, int], part: tuple[int, int], ahead: int
) -> None:
    """Multiply the unit's other rows by some expanded panels; prefetch the weights at `ahead`."""
    num_steps, others = part[1] - part[0], rows[1] - rows[0] - a.first
    num_blocks = (others + MOST_EXPANDED_ROWS - 1) // MOST_EXPANDED_ROWS
    for block in range(num_blocks):
        row, end = a.first + others * block // num_blocks, a.first + others * (block + 1) // num_blocks
        packed, count = scratch + _PACKED, end - row
        if a.num_rows <= MOST_PACKED_ROWS:
            packed += a.num_steps * _packed_bytes(a.first) + part[0] * _packed_bytes(count)
        else:
            _pack(a, scratch, rows_of(a, panels[0]), (rows[0] + row, rows[0] + end), count, part, packed)
        for panel in range(panels[0], panels[1]):
            number = panel - panels[0]
            weights = scratch + _EXPANDED + number * num_steps * EXPANDED_BYTES
            sums = _begin_sums(a, scratch, number, row, count, part[0])
            following = ahead + number * a.num_steps * STEP_BYTES
            multiply_expanded(count, packed, weights, num_steps, sums, following)
            if part[1] == a.num_steps:
                end_rows(a, scratch + _STAGED, sums, rows[0] + row, (0, count), panel)


@inlined
def _multiply_unit(a: Any, scratch: int, panels: tuple[int, int], rows: tuple[int, int], following: int) -> None:
    """Multiply some rows by some panels. The panel `following` is the first panel of the next unit."""
    for first_step in range(0, a.num_steps, a.part_steps):
        part = first_step, min(first_step + a.part_steps, a.num_steps)
        ahead = weights_of(a, panels[0], part[1]) if part[1] < a.num_steps else weights_of(a, following, 0)
        _multiply_first(a, scratch, panels, rows, part, ahead)
        _multiply_others(a, scratch, panels, rows, part, ahead)


@worker(PRODUCT)
def multiply(arguments: Any) -> None:
    """Run in every thread: compute units until no unit is left."""
    a = carray(arguments, 1)[0]
    scratch = a.scratch + simd.fetch_add(a.counters + 64, 1) * a.thread_scratch
    num_groups = (a.num_panels + a.group - 1) // a.group
    num_units = num_groups * ((a.num_rows + a.unit_rows - 1) // a.unit_rows)
    unit, few = simd.fetch_add(a.counters, 1), a.num_rows <= MOST_PACKED_ROWS
    head = -1
    while unit < num_units:
        following = simd.fetch_add(a.counters, 1) if few else unit + 1  # `unit + 1` is a guess
        first_panel, first_row = unit % num_groups * a.group, unit // num_groups * a.unit_rows
        if few and head != first_panel // a.head_panels:
            head = first_panel // a.head_panels
            _pack_few(a, scratch, rows_of(a, first_panel))
        panels = first_panel, min(first_panel + a.group, a.num_panels)
        rows = first_row, min(first_row + a.unit_rows, a.num_rows)
        _multiply_unit(a, scratch, panels, rows, following % num_groups * a.group)
        unit = following if few else simd.fetch_add(a.counters, 1)


PAIR_WORKER = ProductWorker(multiply, _thread_scratch, _set_units)
