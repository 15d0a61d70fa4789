"""Attention's work on rows and one chunk, compiled by numba: scores become weights, and results are merged or stored.

With a packed chunk in AMX tiles, weights are computed 64 tokens at a time. Tiles write scores to memory, and vector
instructions read them there. The first cache has room for the scores of 32 rows and 64 tokens, and for the rows'
weights in the chunk; scores of a whole chunk do not fit. So a row's peak is estimated from the first 64 tokens among
which the row sees any, and is rounded up. Then every 64 scores become weights at once. If later scores are very much
larger, this is not exact enough (`tile_softmax.py`), and the rows are weighed again, with all their scores.

A key that is infinite or NaN makes the scores of all rows infinite or NaN, so the first row's scores show it. Rows that
see such a key, and rows with infinitely large scores, get NaN as their sum.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foreword.kernels.cpu.layout import (
    KV_PANEL,
    PAIRS,
    PANEL_SCORE_BYTES,
    ROW_BYTES,
    SCORE_BYTES,
    STATS_BYTES,
    WEIGHT_BYTES,
    row_at,
    stats_at,
)
from foreword.kernels.llvm.emit import LANES, LOG2_E, LOWEST
from foreword.kernels.llvm.simd import clear_bytes, copy_bytes, load_int, load_int32, prefetch, store_int
from foreword.kernels.llvm.softmax import add_mixture, find_peak, merge_stats, soft_cap, weigh, weigh_pairs
from foreword.kernels.llvm.tile_softmax import (
    LEAST_SUM,
    MARGIN,
    MOST_SUM,
    are_below_infinity,
    are_finite,
    estimate_peaks,
    lower,
    sum_lanes,
    weigh_panel,
    weigh_seen,
)
from foreword.kernels.llvm.tiles import TILE_ROWS, tile_product_64
from foreword.kernels.runtime.compiled import inlined
from foreword.kernels.step_plan import CHUNK, FOLD


@inlined
def ask_ahead(a: Any, s: Any, first: int, last: int) -> None:
    """Prefetch the keys and values of some tokens of the next chunk."""
    ask_for_keys(a, s, first, last)
    ask_for_values(a, s, first, last)


@inlined
def ask_for_keys(a: Any, s: Any, first: int, last: int) -> None:
    """Prefetch the keys, and not the values, of tokens `first` to `last` (exclusive) of the next chunk."""
    for token in range(first, min(last, s.next_length)):
        prefetch(load_int(s.next_key_rows + 8 * token), a.key_dim * a.stored_bytes)


@inlined
def ask_for_values(a: Any, s: Any, first: int, last: int) -> None:
    """Prefetch the values, and not the keys, of these tokens. Do nothing if values are parts of keys in memory."""
    if a.value_row != a.value_dim:
        return
    for token in range(first, min(last, s.next_length)):
        prefetch(load_int(s.next_value_rows + 8 * token), a.value_dim * a.stored_bytes)


@inlined
def find_bounds(table: int, num_rows: int) -> tuple[int, int, int, int]:
    """The tokens that at least one row of the table sees (first, last + 1), and the tokens that all rows see."""
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
    record = stats_at(stats, row)
    record.peak, record.total = LOWEST, 0.0


@inlined
def find_peaks(a: Any, table: int, num_rows: int, scores: int, stats: int, panels: tuple[int, int]) -> None:
    """Find the peak of each row of a row table among the row's scores, [rows, CHUNK]."""
    for row in range(num_rows):
        low, high = row_at(table, row).low, row_at(table, row).high
        if low < high:
            find_peak(scores + row * SCORE_BYTES, stats + STATS_BYTES * row, panels[0], panels[1], low, high, factor(a))
        else:
            see_nothing(stats, row)


@inlined
def weigh_row(a: Any, s: Any, row: Any, scores: int, stats: int, panels: tuple[int, int]) -> None:
    """Replace one row's scores by weights, and sum the weights; `row`: the row's record in the table."""
    if row.low >= row.high:
        copy_bytes(scores, s.zeros, SCORE_BYTES)
    elif a.mode == PAIRS:
        weigh_pairs(scores, stats, panels[0], panels[1], factor(a))
    else:
        weigh(scores, stats, panels[0], panels[1], factor(a))


@inlined
def factor(a: Any) -> Any:
    """The factor by which a score becomes an exponent of 2; capped scores are scaled already."""
    return LOG2_E if a.softcap > 0.0 else a.scale * LOG2_E


@inlined
def keep_rows(a: Any, s: Any, table: int, num_rows: int, stats: int, mixed: int, kind: int) -> None:
    """For a FOLD item, merge the rows' results into its results so far; otherwise store them as partial results."""
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


_GROUP = 8
"""The number of rows whose weights are computed between two prefetches."""


@inlined
def weigh_in_tiles(a: Any, s: Any, rows: tuple[int, int], bounds: tuple[int, int, int, int], ask: int) -> None:
    """Compute the weights and stats of the rows from rows[0] to rows[1] - 1 of the row table.

    `bounds` is the result of `find_bounds`. `ask` is 2 ** 16 times the number of the next chunk's tokens to prefetch
    with each row.
    """
    num_rows, totals = rows[1] - rows[0], s.row_totals
    table, stats, scores = s.row_table + ROW_BYTES * rows[0], s.row_stats, s.row_scores
    start, stop = bounds[0] // KV_PANEL * KV_PANEL, -(-bounds[1] // KV_PANEL) * KV_PANEL
    clear_bytes(totals, num_rows * 4 * LANES)
    num_panels, sound, finite = (stop - start) // KV_PANEL, 1, 1
    turn, ask = num_panels * rows[0], ask // num_panels + 1
    few = num_rows <= TILE_ROWS  # scores of a chunk fit the cache, so vectors need not wait for each panel's scores
    if few:
        _multiply_keys(a, s, rows, (start, stop), scores, SCORE_BYTES)
    score_bytes = SCORE_BYTES if few else PANEL_SCORE_BYTES
    for panel in range(start, stop, KV_PANEL):
        if few:
            scores = s.row_scores + 4 * panel
        else:
            _multiply_keys(a, s, rows, (panel, panel + KV_PANEL), scores - 4 * panel, PANEL_SCORE_BYTES)
        finite &= are_finite(scores)
        # do all rows see the same tokens of this panel?
        seen_by_all = bounds[2] < panel + (panel == start) and panel + KV_PANEL <= bounds[3]
        alike = seen_by_all or (bounds[0] == bounds[2] and bounds[1] == bounds[3])
        row = 0
        while row < num_rows:
            end = min(num_rows, row + _GROUP)
            if not alike:
                end = _end_of_alike(table, row, end)
            own_scores = scores + row * score_bytes
            _weigh_group(a, s, (rows[0] + row, row, end - row), panel, (own_scores, score_bytes), seen_by_all)
            ask_ahead(a, s, ask * turn >> 16, ask * (turn + end - row) >> 16)
            turn += end - row
            row = end
    for row in range(num_rows):
        if row_at(table, row).low < row_at(table, row).high:
            sum_lanes(totals + 4 * LANES * row, stats + STATS_BYTES * row)
            sound &= LEAST_SUM <= stats_at(stats, row).total < MOST_SUM
    if sound == 0 or finite == 0:
        _weigh_again(a, s, rows, (start, stop), finite)


@inlined
def _multiply_keys(
    a: Any, s: Any, rows: tuple[int, int], panels: tuple[int, int], scores: int, score_bytes: int
) -> None:
    """Compute the scores of panels' tokens. `scores`: the address of the chunk's first score; rows are `score_bytes`
    apart.
    """
    num_rows, words = rows[1] - rows[0], a.key_words
    queries = s.row_queries + rows[0] * words * 4
    for panel in range(panels[0], panels[1], KV_PANEL):
        keys = s.packed_keys + panel * words * 4
        tile_product_64(num_rows, queries, words * 4, keys, words // LANES, scores + 4 * panel, score_bytes)
    cap_scores(a, num_rows, scores, score_bytes, panels)


@inlined
def _end_of_alike(table: int, row: int, end: int) -> Any:
    """The end of the rows that see the same tokens as `row`."""
    following = row + 1
    while (
        following < end
        and row_at(table, following).low == row_at(table, row).low
        and row_at(table, following).high == row_at(table, row).high
    ):
        following += 1
    return following


@inlined
def _weigh_group(
    a: Any, s: Any, group: tuple[int, int, int], panel: int, scores: tuple[int, int], seen_by_all: bool
) -> None:
    """Compute the weights of rows that see the same tokens, in one panel of 64 tokens.

    If the first token that the rows see is in the panel, also estimate the rows' peaks.

    `group`: the first row's index in the row table, its index among the rows that are computed now, and the number of
    rows. `scores`: the address of the first row's scores, and the bytes between rows.
    """
    entry, (_, row, count) = row_at(s.row_table, group[0]), group
    low, high, stats = entry.low - panel, entry.high - panel, s.row_stats + STATS_BYTES * row
    weights, totals = s.row_weights + row * WEIGHT_BYTES + 2 * panel, s.row_totals + 64 * row
    if seen_by_all or (low < min(high, KV_PANEL) and high > 0):
        if low >= 0:
            estimate_peaks(scores[0], scores[1], stats, count, low, high, factor(a))
        if seen_by_all or (low <= 0 and high >= KV_PANEL):
            weigh_panel(scores[0], scores[1], weights, WEIGHT_BYTES, stats, totals, count, factor(a))
        else:
            weigh_seen(scores[0], scores[1], weights, WEIGHT_BYTES, stats, totals, count, low, high, factor(a))
        return
    for number in range(count):
        clear_bytes(weights + number * WEIGHT_BYTES, 2 * KV_PANEL)
        if low >= high:
            see_nothing(stats, number)


@inlined
def _weigh_again(a: Any, s: Any, rows: tuple[int, int], panels: tuple[int, int], finite: int) -> None:
    """Compute weights again, if keys may not be `finite`, or if a row's scores are far from those in its first panel.

    A row's result depends only on the keys that it sees and on its own scores, not on other rows.
    """
    num_rows, scores = rows[1] - rows[0], s.row_scores
    _multiply_keys(a, s, rows, panels, scores, SCORE_BYTES)
    if finite == 0:
        _count_infinite_keys(a, s, panels)
    for row in range(num_rows):
        entry, stats = row_at(s.row_table, rows[0] + row), s.row_stats + STATS_BYTES * row
        low, high, at, result = entry.low, entry.high, scores + row * SCORE_BYTES, stats_at(stats, 0)
        if low >= high:
            continue
        counts = s.staged_rows - 8
        if finite == 0 and load_int(counts + 8 * high) > (load_int(counts + 8 * low) if low > panels[0] else 0):
            result.total = np.nan
        elif not LEAST_SUM <= result.total < MOST_SUM:
            seen = low // KV_PANEL * KV_PANEL, -(-high // KV_PANEL) * KV_PANEL
            find_peak(at, stats, seen[0], seen[1], low, high, factor(a))  # it also hides unseen tokens
            peak, total = result.peak, s.row_totals + 4 * LANES * row
            is_number = are_below_infinity(at, seen[0], seen[1]) == 1 and peak > LOWEST * factor(a)
            lower(at, stats, seen[0], seen[1], factor(a))
            clear_bytes(total, 4 * LANES)
            result.peak = MARGIN
            for panel in range(seen[0], seen[1], KV_PANEL):
                weights = s.row_weights + row * WEIGHT_BYTES + 2 * panel
                weigh_seen(at + 4 * panel, 0, weights, 0, stats, total, 1, low - panel, high - panel, np.float32(1.0))
            sum_lanes(total, stats)
            result.peak = peak + MARGIN
            if not is_number:
                result.total = np.nan


@inlined
def _count_infinite_keys(a: Any, s: Any, panels: tuple[int, int]) -> None:
    """For each token, write the number of keys with infinite or NaN elements up to this token, to staged rows."""
    words, count = a.key_words, 0
    for token in range(panels[0], panels[1]):
        key = s.packed_keys + (token // KV_PANEL * KV_PANEL * words + token % KV_PANEL) * 4
        is_finite = True
        for word in range(words):
            pair = load_int32(key + word * 4 * KV_PANEL)
            is_finite &= pair & 0x7F80 != 0x7F80 and pair & 0x7F800000 != 0x7F800000
        count += 0 if is_finite else 1
        store_int(s.staged_rows + 8 * token, count)
