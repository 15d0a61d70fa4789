"""One chunk of KV with any number of rows, compiled by numba: pack, unless rows are few; multiply, weigh, multiply."""

from __future__ import annotations

import functools
from typing import Any

from numba import carray

from foreword.kernels.cpu.few_rows import are_few, multiply_keys_directly, multiply_values_directly
from foreword.kernels.cpu.layout import (
    ATTENTION,
    IN_PAIRS,
    KV_PANEL,
    MOST_TILED_ROWS,
    PAIRS,
    ROW_BYTES,
    SCORE_BYTES,
    STATS_BYTES,
    TILES,
    WEIGHT_BYTES,
    row_at,
    scratch_at,
)
from foreword.kernels.cpu.packing import pack_keys, pack_values
from foreword.kernels.cpu.row_weights import ask_ahead, cap_scores, find_bounds, find_peaks, keep_rows, weigh_row
from foreword.kernels.cpu.tile_weights import weigh_in_tiles
from foreword.kernels.llvm.emit import LANES
from foreword.kernels.llvm.simd import ROWS, pair_product_32, pair_product_64, product_32, product_64
from foreword.kernels.llvm.tiles import lay_out, release, tile_product_32, tile_product_64
from foreword.kernels.runtime.compiled import Worker, inlined, worker
from foreword.kernels.step_plan import CHUNK

# ----------------------------------------------------------------------------------------------- one chunk


@inlined
def _attend_rows(a: Any, s: Any, kv_head: int, rows: tuple[int, int], kind: int, packed: Any, ask: int) -> None:
    """Compute partial results of some rows of the row table, at most MOST_TILED_ROWS, with a chunk, `packed` or not.

    `ask`: the number of the next chunk's tokens to prefetch with each row, times 2 ** 16.
    """
    num_rows = rows[1] - rows[0]
    table, scores, stats = s.row_table + ROW_BYTES * rows[0], s.row_scores, s.row_stats
    bounds = find_bounds(table, num_rows)
    if bounds[0] >= bounds[1]:
        return
    start, stop = bounds[0] // KV_PANEL * KV_PANEL, -(-bounds[1] // KV_PANEL) * KV_PANEL
    if a.mode == TILES:
        weigh_in_tiles(a, s, rows, bounds, ask)
    else:
        if packed:
            _multiply_keys(a, s, rows, start, stop)
        else:
            multiply_keys_directly(a, s, kv_head, rows, (start, bounds[1]), ask)
        cap_scores(a, num_rows, scores, SCORE_BYTES, (start, stop))
        find_peaks(a, table, num_rows, scores, stats, (start, stop))
        for row in range(num_rows):
            own_scores, own_stats = scores + row * SCORE_BYTES, stats + STATS_BYTES * row
            weigh_row(a, s, row_at(table, row), own_scores, own_stats, (start, stop))
    if packed:
        _multiply_values(a, s, num_rows, start, bounds[1])
    else:
        multiply_values_directly(a, s, kv_head, rows, (start, bounds[1]), ask)
    keep_rows(a, s, table, num_rows, stats, s.row_mixed, kind)


@inlined
def _multiply_keys(a: Any, s: Any, rows: tuple[int, int], start: int, stop: int) -> None:
    """Compute the scores of the rows' queries."""
    num_rows = rows[1] - rows[0]
    num_words = a.key_words
    queries = s.row_queries + rows[0] * num_words * 4
    for token in range(start, stop, KV_PANEL):
        panel = s.packed_keys + token * num_words * 4
        scores = s.row_scores + 4 * token
        if a.mode == PAIRS:
            pair_product_64(num_rows, queries, num_words * 4, panel, num_words, scores, SCORE_BYTES)
        else:
            product_64(num_rows, queries, num_words * 4, panel, num_words, scores, SCORE_BYTES)


@inlined
def _multiply_values(a: Any, s: Any, num_rows: int, start: int, high: int) -> None:
    """Mix values by the rows' weights."""
    width = a.value_width
    together = 2 if a.mode in IN_PAIRS else 1
    length = (high - start + together - 1) // together
    steps = (length + LANES - 1) // LANES  # of tiles; tokens from `high` on have weight 0, and values of 0
    weights = s.row_scores + start * 4 // together
    tile_weights = s.row_weights + 2 * start
    for dim in range(0, width, KV_PANEL):
        lanes = min(KV_PANEL, width - dim)
        panel = s.packed_values + dim * 4 * (CHUNK // together) + start // together * lanes * 4
        target = s.row_mixed + 4 * dim
        if a.mode == TILES and lanes == KV_PANEL:
            tile_product_64(num_rows, tile_weights, WEIGHT_BYTES, panel, steps, target, 4 * width)
        elif a.mode == TILES:
            tile_product_32(num_rows, tile_weights, WEIGHT_BYTES, panel, steps, target, 4 * width)
        elif a.mode == PAIRS and lanes == KV_PANEL:
            pair_product_64(num_rows, weights, SCORE_BYTES, panel, length, target, 4 * width)
        elif a.mode == PAIRS:
            pair_product_32(num_rows, weights, SCORE_BYTES, panel, length, target, 4 * width)
        elif lanes == KV_PANEL:
            product_64(num_rows, weights, SCORE_BYTES, panel, length, target, 4 * width)
        else:
            product_32(num_rows, weights, SCORE_BYTES, panel, length, target, 4 * width)


@inlined
def _attend(a: Any, s: Any, kv_head: int, num_rows: int, bounds: tuple[int, int], kind: int) -> None:
    """Attend with all rows of the table to one chunk, after `find_tokens`; `bounds`: the tokens that some row sees."""
    num_parts, ask, packed = -(-num_rows // (MOST_TILED_ROWS if a.mode == TILES else ROWS)), 0, not are_few(a, num_rows)
    if packed:
        start, stop = bounds[0] // KV_PANEL * KV_PANEL, -(-bounds[1] // KV_PANEL) * KV_PANEL
        pack_keys(a, s, kv_head, start, stop)
        pack_values(a, s, kv_head, start, stop)
    if not packed or (a.mode == TILES and num_parts > 1):
        ask = (s.next_length << 16) // num_rows + 1
    else:
        ask_ahead(a, s, 0, CHUNK)
    laid_out = 0
    for number in range(num_parts):  # parts of nearly equal size
        first, end = number * num_rows // num_parts, (number + 1) * num_rows // num_parts
        if a.mode == TILES and end - first != laid_out:
            laid_out = end - first
            lay_out(s.tile_config, laid_out)
        _attend_rows(a, s, kv_head, (first, end), kind, packed, ask)
    if laid_out:
        release()


@functools.cache
def compile_chunk() -> Worker:
    """Compile the function that `worker.py` calls by its address."""

    @worker(ATTENTION, 6)
    def attend_chunk(arguments: Any, scratch: int, kv_head: int, num_rows: int, low: int, high: int, kind: int) -> None:
        _attend(carray(arguments, 1)[0], scratch_at(scratch, 0), kv_head, num_rows, (low, high), kind)

    return attend_chunk
