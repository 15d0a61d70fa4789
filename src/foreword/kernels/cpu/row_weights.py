"""What attention does row by row with a chunk, compiled by numba: scores become weights, results are kept.

Knows the row table; knows nothing of how scores and mixtures are multiplied.
"""

from __future__ import annotations

from typing import Any

from foreword.kernels.cpu.layout import (
    FLOAT_OPTIONS,
    FLOATS,
    FOLD_MIXED,
    FOLD_STATS,
    KEY_DIM,
    MODE,
    NEXT_KEY_ROWS,
    NEXT_LENGTH,
    NEXT_VALUE_ROWS,
    PAIRS,
    PARTIAL_MIXED,
    PARTIAL_STATS,
    ROW_FACTORS,
    SCORE_BYTES,
    VALUE_DIM,
    ZEROS,
    inlined,
    part,
)
from foreword.kernels.llvm.simd import LOG2_E, LOWEST, copy_bytes, load_float, load_int, prefetch, store_float
from foreword.kernels.llvm.softmax import add_mixture, find_peak, merge_stats, soft_cap, weigh, weigh_pairs
from foreword.kernels.step_plan import CHUNK, FOLD


@inlined
def ask_ahead(a: Any, scratch: int, first: int, last: int) -> None:
    """Ask for the keys and values of some tokens of the next chunk, while this one is computed."""
    ask_for_keys(a, scratch, first, last)
    ask_for_values(a, scratch, first, last)


@inlined
def ask_for_keys(a: Any, scratch: int, first: int, last: int) -> None:
    """The keys alone."""
    for token in range(first, min(last, load_int(scratch + NEXT_LENGTH))):
        prefetch(load_int(scratch + NEXT_KEY_ROWS + 8 * token), a[KEY_DIM] * (4 if a[MODE] == FLOATS else 2))


@inlined
def ask_for_values(a: Any, scratch: int, first: int, last: int) -> None:
    """The values alone."""
    for token in range(first, min(last, load_int(scratch + NEXT_LENGTH))):
        prefetch(load_int(scratch + NEXT_VALUE_ROWS + 8 * token), a[VALUE_DIM] * (4 if a[MODE] == FLOATS else 2))


@inlined
def find_bounds(table: int, num_rows: int) -> tuple[int, int, int, int]:
    """From where to where some row of the table sees tokens, and from where to where all rows do."""
    low, high, all_low, all_high = CHUNK, 0, 0, CHUNK
    for row in range(num_rows):
        row_low, row_high = load_int(table + 24 * row), load_int(table + 24 * row + 8)
        if row_low < row_high:
            low, high = min(low, row_low), max(high, row_high)
        all_low, all_high = max(all_low, row_low), min(all_high, row_high)
    return low, high, all_low, all_high


@inlined
def cap_scores(a: Any, num_rows: int, scores: int, score_bytes: int, panels: tuple[int, int]) -> None:
    """Apply the soft-cap, if any, to scores of some tokens, with `score_bytes` bytes between rows."""
    scale, cap = load_float(a[FLOAT_OPTIONS]), load_float(a[FLOAT_OPTIONS] + 4)
    if cap > 0.0:
        for row in range(num_rows):
            soft_cap(scores + row * score_bytes, panels[0], panels[1], scale / cap, cap)


@inlined
def find_peaks(a: Any, table: int, num_rows: int, scores: int, stats: int, panels: tuple[int, int]) -> None:
    """Peaks of the rows of a table, from their scores [rows, CHUNK]."""
    for row in range(num_rows):
        low, high = load_int(table + 24 * row), load_int(table + 24 * row + 8)
        if low < high:
            find_peak(scores + row * SCORE_BYTES, stats + 8 * row, panels[0], panels[1], low, high, factor(a))
        else:
            store_float(stats + 8 * row, LOWEST)
            store_float(stats + 8 * row + 4, 0.0)


@inlined
def weigh_row(a: Any, scratch: int, entry: int, scores: int, stats: int, panels: tuple[int, int]) -> None:
    """Weights of one row's scores, in their place, and their sum; `entry`: the row's place in the table."""
    if load_int(entry) >= load_int(entry + 8):
        copy_bytes(scores, part(scratch, ZEROS), SCORE_BYTES)
    elif a[MODE] == PAIRS:
        weigh_pairs(scores, stats, panels[0], panels[1], factor(a))
    else:
        weigh(scores, stats, panels[0], panels[1], factor(a))


@inlined
def factor(a: Any) -> Any:
    """Of scores, which have been capped and scaled if there is a cap."""
    return LOG2_E if load_float(a[FLOAT_OPTIONS] + 4) > 0.0 else load_float(a[FLOAT_OPTIONS]) * LOG2_E


@inlined
def keep_rows(a: Any, scratch: int, table: int, num_rows: int, stats: int, mixed: int, kind: int) -> None:
    """Merge rows' results into a fold's, or leave them as partial results."""
    width, factors = (a[VALUE_DIM] + 31) // 32 * 32, part(scratch, ROW_FACTORS)
    if kind == FOLD:  # whose rows' targets follow each other
        merge_stats(part(scratch, FOLD_STATS) + 8 * load_int(table + 16), stats, factors, num_rows)
    for row in range(num_rows):
        if load_int(table + 24 * row) >= load_int(table + 24 * row + 8):
            continue
        own_mixed, target = mixed + row * 4 * width, load_int(table + 24 * row + 16)
        if kind == FOLD:
            add_mixture(part(scratch, FOLD_MIXED) + target * 4 * width, own_mixed, factors + 8 * row, width)
        else:
            copy_bytes(a[PARTIAL_STATS] + 8 * target, stats + 8 * row, 8)
            copy_bytes(a[PARTIAL_MIXED] + 4 * width * target, own_mixed, 4 * width)
