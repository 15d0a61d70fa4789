"""Attention's work on single rows of a chunk, compiled by numba: scores become weights, and results are kept."""

from __future__ import annotations

from typing import Any

from foreword.kernels.cpu.layout import PAIRS, SCORE_BYTES, STATS_BYTES, row_at, stats_at
from foreword.kernels.llvm.emit import LOG2_E, LOWEST
from foreword.kernels.llvm.simd import copy_bytes, load_int, prefetch
from foreword.kernels.llvm.softmax import add_mixture, find_peak, merge_stats, soft_cap, weigh, weigh_pairs
from foreword.kernels.runtime.compiled import inlined
from foreword.kernels.step_plan import CHUNK, FOLD


@inlined
def ask_ahead(a: Any, s: Any, first: int, last: int) -> None:
    """Prefetch the keys and values of some tokens of the next chunk."""
    ask_for_keys(a, s, first, last)
    ask_for_values(a, s, first, last)


@inlined
def ask_for_keys(a: Any, s: Any, first: int, last: int) -> None:
    """Prefetch keys alone."""
    for token in range(first, min(last, s.next_length)):
        prefetch(load_int(s.next_key_rows + 8 * token), a.key_dim * a.stored_bytes)


@inlined
def ask_for_values(a: Any, s: Any, first: int, last: int) -> None:
    """Prefetch values alone, unless they are parts of keys."""
    if a.value_row != a.value_dim:
        return
    for token in range(first, min(last, s.next_length)):
        prefetch(load_int(s.next_value_rows + 8 * token), a.value_dim * a.stored_bytes)


@inlined
def find_bounds(table: int, num_rows: int) -> tuple[int, int, int, int]:
    """The first and last + 1 of the tokens that some row of the table sees, and then of those that all rows see."""
    low, high, all_low, all_high = CHUNK, 0, 0, CHUNK
    for row in range(num_rows):
        row_low, row_high = row_at(table, row).low, row_at(table, row).high
        if row_low < row_high:
            low, high = min(low, row_low), max(high, row_high)
        all_low, all_high = max(all_low, row_low), min(all_high, row_high)
    return low, high, all_low, all_high


@inlined
def cap_scores(a: Any, num_rows: int, scores: int, score_bytes: int, panels: tuple[int, int]) -> None:
    """Apply the soft-cap, if there is one, to scores of some tokens, with `score_bytes` bytes between rows."""
    scale, cap = a.scale, a.softcap
    if cap > 0.0:
        for row in range(num_rows):
            soft_cap(scores + row * score_bytes, panels[0], panels[1], scale / cap, cap)


@inlined
def see_nothing(stats: int, row: int) -> None:
    """Write the stats of a row that sees no token: the least peak, and no weight."""
    own = stats_at(stats, row)
    own.peak, own.total = LOWEST, 0.0


@inlined
def find_peaks(a: Any, table: int, num_rows: int, scores: int, stats: int, panels: tuple[int, int]) -> None:
    """Find the peaks of a table's rows in their scores [rows, CHUNK]."""
    for row in range(num_rows):
        low, high = row_at(table, row).low, row_at(table, row).high
        if low < high:
            find_peak(scores + row * SCORE_BYTES, stats + STATS_BYTES * row, panels[0], panels[1], low, high, factor(a))
        else:
            see_nothing(stats, row)


@inlined
def weigh_row(a: Any, s: Any, row: Any, scores: int, stats: int, panels: tuple[int, int]) -> None:
    """Replace one row's scores by weights, and sum these; `row`: its record in the table."""
    if row.low >= row.high:
        copy_bytes(scores, s.zeros, SCORE_BYTES)
    elif a.mode == PAIRS:
        weigh_pairs(scores, stats, panels[0], panels[1], factor(a))
    else:
        weigh(scores, stats, panels[0], panels[1], factor(a))


@inlined
def factor(a: Any) -> Any:
    """The factor from scores to powers of two; capped scores are scaled already."""
    return LOG2_E if a.softcap > 0.0 else a.scale * LOG2_E


@inlined
def keep_rows(a: Any, s: Any, table: int, num_rows: int, stats: int, mixed: int, kind: int) -> None:
    """Merge rows' results into those of a fold, or leave them as partial results."""
    width, factors = a.value_width, s.row_factors
    if kind == FOLD:  # the targets of its rows are consecutive
        merge_stats(s.fold_stats + STATS_BYTES * row_at(table, 0).target, stats, factors, num_rows)
    for row in range(num_rows):
        if row_at(table, row).low >= row_at(table, row).high:
            continue
        own_mixed, target = mixed + row * 4 * width, row_at(table, row).target
        if kind == FOLD:
            add_mixture(s.fold_mixed + target * 4 * width, own_mixed, factors + 8 * row, width)
        else:
            copy_bytes(a.partial_stats + STATS_BYTES * target, stats + STATS_BYTES * row, STATS_BYTES)
            copy_bytes(a.partial_mixed + 4 * width * target, own_mixed, 4 * width)
