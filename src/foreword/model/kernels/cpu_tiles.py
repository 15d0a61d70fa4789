"""Many rows with a packed chunk in AMX tiles, compiled by numba: tiles multiply while vectors weigh.

Knows packed memory and rows; knows nothing of block tables. Rows are taken in parts of 32. While the processor's
vectors find the peaks of a part's scores, its tiles mix values by the weights of the part before; while vectors compute
the part's weights, and keep the results of the part before, tiles multiply keys for the part after:

    vectors     peaks 1     weights 1, results 0     peaks 2     weights 2, results 1
    tiles       values 0    keys 2                   values 1    keys 3

Every element of a product is the chain of additions that it would be alone, so no bit depends on any of this.
"""

from __future__ import annotations

from typing import Any

from foreword.model.kernels.cpu_layout import (
    KEY_DIM,
    MOST_ROWS,
    NEXT_LENGTH,
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
from foreword.model.kernels.simd import LANES, load_int
from foreword.model.kernels.step_plan import CHUNK
from foreword.model.kernels.tiles import end_wide, lay_out, multiply_wide, product_32, release

_COLUMNS = 2 * LANES
"""Tokens, or dimensions of values, of a product."""
_KEPT_ROWS = 8
"""So many rows' results are kept at a time."""
_SCORES_BYTES, _STATS_BYTES = MOST_ROWS * SCORE_BYTES, MOST_ROWS * 8
_begin = product_32.begin


@inlined
def _multiply_keys(a: Any, scratch: int, number: int, token: int, step: int) -> None:
    """One step of the product for a part's scores of 32 tokens from `token` on."""
    words = (a[KEY_DIM] + 31) // 32 * 16
    steps = words // LANES
    queries = part(scratch, ROW_QUERIES) + (number * MOST_ROWS * words + step * LANES) * 4
    keys = part(scratch, PACKED_KEYS) + (token // PANEL * PANEL * words + step * LANES * PANEL + token % PANEL) * 4
    if step == 0:
        _begin()
    multiply_wide(queries, 4 * words, keys, 4 * PANEL)
    if step == steps - 1:
        end_wide(part(scratch, ROW_SCORES) + number % 2 * _SCORES_BYTES + 4 * token, SCORE_BYTES)


@inlined
def _mix_values(a: Any, scratch: int, number: int, start: int, steps: int, dim: int, step: int) -> None:
    """One of so many steps of the product for a part's mixtures, 32 dimensions of them from `dim` on."""
    width = (a[VALUE_DIM] + 31) // 32 * 32
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
def _find_peaks(a: Any, scratch: int, number: int, rows: int, panels: tuple[int, int], last: tuple[int, int]) -> None:
    """Peaks of a part's rows; beside, in tiles, mixtures of the part before: `last` has its first token, and steps."""
    table = part(scratch, ROW_TABLE) + number * MOST_ROWS * 24
    scores, stats = _buffers(scratch, number)
    pace = _pace(last[1] * ((a[VALUE_DIM] + 31) // 32), rows)
    done, dim, step = 0, 0, 0
    for row in range(max(1, rows)):
        if row < rows:
            find_peaks(a, table + 24 * row, 1, scores + row * SCORE_BYTES, stats + 8 * row, panels)
        while done < pace * (row + 1) >> 16:
            _mix_values(a, scratch, number - 1, last[0], last[1], dim, step)
            done, step = done + 1, step + 1
            if step == last[1]:
                step, dim = 0, dim + _COLUMNS


@inlined
def _weigh(
    a: Any, scratch: int, number: int, num_rows: int, panels: tuple[int, int], following: tuple[int, int], kind: int
) -> None:
    """Weights of a part's rows, and results of the part before; beside, in tiles, scores of the part after.

    `panels`: the tokens that the part sees, `following`: that the part after does.
    """
    first, key_steps = number * MOST_ROWS, (a[KEY_DIM] + 31) // 32
    rows, last_rows = _size(number, num_rows), _size(number - 1, num_rows)
    table = part(scratch, ROW_TABLE) + 24 * first
    (scores, stats), (_, last_stats) = _buffers(scratch, number), _buffers(scratch, number - 1)
    pace = _pace((following[1] - following[0]) // _COLUMNS * key_steps, rows)
    ask_pace = _pace(load_int(scratch + NEXT_LENGTH), num_rows)
    kept, done, token, step = 0, 0, following[0], 0
    for row in range(max(1, rows)):
        if row < rows:
            weigh_row(a, scratch, table + 24 * row, scores + row * SCORE_BYTES, stats + 8 * row, panels)
            ask_ahead(a, scratch, ask_pace * (first + row) >> 16, ask_pace * (first + row + 1) >> 16)
        while done < pace * (row + 1) >> 16:
            _multiply_keys(a, scratch, number + 1, token, step)
            done, step = done + 1, step + 1
            if step == key_steps:
                step, token = 0, token + _COLUMNS
        end = last_rows if row + 1 >= rows else min(last_rows, (row + 1) // _KEPT_ROWS * _KEPT_ROWS)
        if end > kept:
            mixed = part(scratch, ROW_MIXED) + kept * 4 * ((a[VALUE_DIM] + 31) // 32 * 32)
            last_table = table + 24 * (kept - MOST_ROWS)
            keep_rows(a, scratch, last_table, end - kept, last_stats + 8 * kept, mixed, kind)
            kept = end


@inlined
def attend_in_tiles(a: Any, scratch: int, num_rows: int, kind: int) -> None:
    """Partial results of all rows of the row table with the chunk that is packed."""
    num_parts, table = (num_rows + MOST_ROWS - 1) // MOST_ROWS, part(scratch, ROW_TABLE)
    lay_out(part(scratch, TILE_CONFIG), MOST_ROWS)
    last_start = last_steps = 0
    start, stop, high = find_bounds(table, _size(0, num_rows))
    for token in range(start, stop, _COLUMNS):
        for step in range((a[KEY_DIM] + 31) // 32):
            _multiply_keys(a, scratch, 0, token, step)
    for number in range(num_parts + 1):
        next_table = table + 24 * (number + 1) * MOST_ROWS
        next_start, next_stop, next_high = find_bounds(next_table, _size(number + 1, num_rows))
        _find_peaks(a, scratch, number, _size(number, num_rows), (start, stop), (last_start, last_steps))
        _weigh(a, scratch, number, num_rows, (start, stop), (next_start, next_stop), kind)
        last_start, last_steps = start, ((high - start + 1) // 2 + LANES - 1) // LANES
        start, stop, high = next_start, next_stop, next_high
    release()


@inlined
def _size(number: int, num_rows: int) -> int:
    """How many of the rows are in a part; none in one before the first or behind the last."""
    return max(0, min(MOST_ROWS, num_rows - number * MOST_ROWS)) if number >= 0 else 0


@inlined
def _buffers(scratch: int, number: int) -> tuple[int, int]:
    """Where a part's scores lie, and its stats; of two parts in turn."""
    return part(scratch, ROW_SCORES) + number % 2 * _SCORES_BYTES, part(scratch, ROW_STATS) + number % 2 * _STATS_BYTES


@inlined
def _pace(steps: int, turns: int) -> int:
    """How many of so many steps are done in a turn, times 2 ** 16, rounded so that `turns` turns do all of them."""
    return -(-(steps << 16) // max(1, turns))
