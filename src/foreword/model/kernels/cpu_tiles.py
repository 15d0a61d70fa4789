"""Many rows with a packed chunk in AMX tiles, compiled by numba: tiles multiply while vectors weigh.

Knows packed memory and rows; knows nothing of block tables. Rows are taken in parts of 32. While the weights of a
part are computed, which keeps the processor's vectors busy, its tiles mix values by the weights of the part before,
and multiply keys for the part after:

    part 0    keys    weights    values
    part 1            keys       weights    values
    part 2                       keys       weights    values

Every element of a product is the chain of additions that it would be alone, so no bit depends on any of this.
"""

from __future__ import annotations

from typing import Any

from foreword.model.kernels.cpu_layout import (
    KEY_DIM,
    MOST_ROWS,
    PACKED_KEYS,
    PACKED_VALUES,
    PANEL,
    ROW_MIXED,
    ROW_QUERIES,
    ROW_SCORES,
    ROW_STATS,
    ROW_TABLE,
    SCORE_BYTES,
    TILE_CONFIG,
    VALUE_DIM,
    inlined,
    part,
)
from foreword.model.kernels.cpu_rows import ask_ahead, find_bounds, find_peaks, keep_rows, weigh_row
from foreword.model.kernels.simd import LANES
from foreword.model.kernels.step_plan import CHUNK
from foreword.model.kernels.tiles import end_wide, lay_out, multiply_wide, product_32, release

_COLUMNS = 2 * LANES
"""Tokens, or dimensions of values, of a product."""
_SCORES_BYTES, _STATS_BYTES = MOST_ROWS * SCORE_BYTES, MOST_ROWS * 8
_begin = product_32.begin


@inlined
def _multiply_keys(a: Any, scratch: int, number: int, start: int, at: int) -> None:
    """One step of a part's scores: `at` counts steps of products, and products of 32 tokens."""
    words = (a[KEY_DIM] + 31) // 32 * 16
    steps = words // LANES
    token, step = start + at // steps * _COLUMNS, at % steps
    queries = part(scratch, ROW_QUERIES) + (number * MOST_ROWS * words + step * LANES) * 4
    keys = part(scratch, PACKED_KEYS) + (token // PANEL * PANEL * words + step * LANES * PANEL + token % PANEL) * 4
    if step == 0:
        _begin()
    multiply_wide(queries, 4 * words, keys, 4 * PANEL)
    if step == steps - 1:
        end_wide(part(scratch, ROW_SCORES) + number % 2 * _SCORES_BYTES + 4 * token, SCORE_BYTES)


@inlined
def _mix_values(a: Any, scratch: int, number: int, start: int, steps: int, at: int) -> None:
    """One step of a part's mixtures: `at` counts steps of products, and products of 32 dimensions."""
    width = (a[VALUE_DIM] + 31) // 32 * 32
    dim, step = at // steps * _COLUMNS, at % steps
    first = dim // PANEL * PANEL
    lanes = min(PANEL, width - first)
    weights = part(scratch, ROW_SCORES) + number % 2 * _SCORES_BYTES + start * 2 + step * 4 * LANES
    panel = part(scratch, PACKED_VALUES) + first * 4 * (CHUNK // 2) + start // 2 * lanes * 4
    if step == 0:
        _begin()
    multiply_wide(weights, SCORE_BYTES, panel + (step * LANES * lanes + dim - first) * 4, 4 * lanes)
    if step == steps - 1:
        end_wide(part(scratch, ROW_MIXED) + 4 * dim, 4 * width)


@inlined
def attend_in_tiles(a: Any, scratch: int, num_rows: int, kind: int) -> None:
    """Partial results of all rows of the row table with the chunk that is packed."""
    num_parts, table = (num_rows + MOST_ROWS - 1) // MOST_ROWS, part(scratch, ROW_TABLE)
    key_steps, num_products = (a[KEY_DIM] + 31) // 32, (a[VALUE_DIM] + 31) // 32
    lay_out(part(scratch, TILE_CONFIG), MOST_ROWS)
    last_start = last_steps = 0
    start, stop, high = find_bounds(table, min(MOST_ROWS, num_rows))
    for at in range((stop - start) // _COLUMNS * key_steps):
        _multiply_keys(a, scratch, 0, start, at)
    for number in range(num_parts + 1):
        first = number * MOST_ROWS
        rows, following = max(0, min(MOST_ROWS, num_rows - first)), max(0, min(MOST_ROWS, num_rows - first - MOST_ROWS))
        next_start, next_stop, next_high = find_bounds(table + 24 * (first + MOST_ROWS), following)
        mixing = last_steps * num_products
        total = mixing + (next_stop - next_start) // _COLUMNS * key_steps
        scores = part(scratch, ROW_SCORES) + number % 2 * _SCORES_BYTES
        stats = part(scratch, ROW_STATS) + number % 2 * _STATS_BYTES
        find_peaks(a, table + 24 * first, rows, scores, stats, (start, stop))
        at = 0
        for row in range(max(1, rows)):
            if row < rows:
                entry = table + 24 * (first + row)
                weigh_row(a, scratch, entry, scores + row * SCORE_BYTES, stats + 8 * row, (start, stop))
                ask_ahead(a, scratch, first + row, num_rows)
            end = total * (row + 1) // max(1, rows)
            while at < end:
                if at < mixing:
                    _mix_values(a, scratch, number - 1, last_start, last_steps, at)
                else:
                    _multiply_keys(a, scratch, number + 1, next_start, at - mixing)
                at += 1
        if number > 0:
            other_stats = part(scratch, ROW_STATS) + (number - 1) % 2 * _STATS_BYTES
            last_table = table + 24 * (first - MOST_ROWS)
            last_rows = min(MOST_ROWS, num_rows - first + MOST_ROWS)
            keep_rows(a, scratch, last_table, last_rows, other_stats, part(scratch, ROW_MIXED), kind)
        last_start, last_steps = start, ((high - start + 1) // 2 + LANES - 1) // LANES
        start, stop, high = next_start, next_stop, next_high
    release()
