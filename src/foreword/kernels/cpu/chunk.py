"""Attends to one chunk of KV with any number of rows: packs the chunk, multiplies keys, weighs, and multiplies values.

Compiled by numba. Packed vectors hold 16 tokens of keys, or 16 dimensions of values. If there are only a few rows, keys
and values are multiplied where they lie, because packing a chunk and reading it again takes longer than multiplying it
by the rows of one decoding request. The arithmetic and its order do not change. With every 16 tokens, an equal part of
the next chunk is prefetched, so that requests to memory do not queue. On a Zen 4 processor, attention of decoding
requests then takes 0.6 to 0.8 of the time that it takes with packed chunks, and steps of 16 requests are 6 to 10%
faster (docs/decisions/0008-cpu-attention.md).
"""

from __future__ import annotations

from typing import Any

from numba import carray

from foreword.kernels.cpu import row_weights
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
    WIDENED,
    row_at,
    scratch_at,
)
from foreword.kernels.kv_format import SCALE_BYTES
from foreword.kernels.llvm import simd
from foreword.kernels.llvm.emit import LANES
from foreword.kernels.llvm.tiles import lay_out, release, tile_product_32, tile_product_64
from foreword.kernels.runtime.compiled import inlined, worker
from foreword.kernels.step_plan import CHUNK

# ----------------------------------------------------------------------------------------------- one chunk


@inlined
def _attend_rows(a: Any, s: Any, kv_head: int, rows: tuple[int, int], kind: int, packed: Any, ask: int) -> None:
    """Compute one chunk's partial results of at most MOST_TILED_ROWS rows of the row table.

    `packed`: whether the chunk is packed. `ask` is 2 ** 16 times the number of the next chunk's tokens to prefetch with
    each row.
    """
    num_rows = rows[1] - rows[0]
    table, scores, stats = s.row_table + ROW_BYTES * rows[0], s.row_scores, s.row_stats
    bounds = row_weights.find_bounds(table, num_rows)
    if bounds[0] >= bounds[1]:
        return
    start, stop = bounds[0] // KV_PANEL * KV_PANEL, -(-bounds[1] // KV_PANEL) * KV_PANEL
    if a.mode == TILES:
        row_weights.weigh_in_tiles(a, s, rows, bounds, ask)
    else:
        if packed:
            _multiply_keys(a, s, rows, start, stop)
        else:
            multiply_keys_directly(a, s, kv_head, rows, (start, bounds[1]), ask)
        row_weights.cap_scores(a, num_rows, scores, SCORE_BYTES, (start, stop))
        row_weights.find_peaks(a, table, num_rows, scores, stats, (start, stop))
        for row in range(num_rows):
            own_scores, own_stats = scores + row * SCORE_BYTES, stats + STATS_BYTES * row
            row_weights.weigh_row(a, s, row_at(table, row), own_scores, own_stats, (start, stop))
    if packed:
        _multiply_values(a, s, num_rows, start, bounds[1])
    else:
        multiply_values_directly(a, s, kv_head, rows, (start, bounds[1]), ask)
    row_weights.keep_rows(a, s, table, num_rows, stats, s.row_mixed, kind)


@inlined
def _multiply_keys(a: Any, s: Any, rows: tuple[int, int], start: int, stop: int) -> None:
    """Multiply the rows' queries by packed keys: write the rows' scores."""
    num_rows = rows[1] - rows[0]
    num_words = a.key_words
    queries = s.row_queries + rows[0] * num_words * 4
    for token in range(start, stop, KV_PANEL):
        panel = s.packed_keys + token * num_words * 4
        scores = s.row_scores + 4 * token
        if a.mode == PAIRS:
            simd.pair_product_64(num_rows, queries, num_words * 4, panel, num_words, scores, SCORE_BYTES)
        else:
            simd.product_64(num_rows, queries, num_words * 4, panel, num_words, scores, SCORE_BYTES)


@inlined
def _multiply_values(a: Any, s: Any, num_rows: int, start: int, high: int) -> None:
    """Mix packed values by the rows' weights."""
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
            simd.pair_product_64(num_rows, weights, SCORE_BYTES, panel, length, target, 4 * width)
        elif a.mode == PAIRS:
            simd.pair_product_32(num_rows, weights, SCORE_BYTES, panel, length, target, 4 * width)
        elif lanes == KV_PANEL:
            simd.product_64(num_rows, weights, SCORE_BYTES, panel, length, target, 4 * width)
        else:
            simd.product_32(num_rows, weights, SCORE_BYTES, panel, length, target, 4 * width)


@inlined
def _attend(a: Any, s: Any, kv_head: int, num_rows: int, bounds: tuple[int, int], kind: int) -> None:
    """Attend to one chunk with all rows of the row table, after `find_tokens`; `bounds`: tokens that any row sees."""
    num_parts, ask = -(-num_rows // (MOST_TILED_ROWS if a.mode == TILES else simd.ROWS)), 0
    packed = not are_few(a, num_rows)
    if packed:
        start, stop = bounds[0] // KV_PANEL * KV_PANEL, -(-bounds[1] // KV_PANEL) * KV_PANEL
        pack_keys(a, s, kv_head, start, stop)
        pack_values(a, s, kv_head, start, stop)
    if not packed or (a.mode == TILES and num_parts > 1):
        ask = (s.next_length << 16) // num_rows + 1
    else:
        row_weights.ask_ahead(a, s, 0, CHUNK)
    laid_out = 0
    for number in range(num_parts):  # parts of nearly equal size
        first, end = number * num_rows // num_parts, (number + 1) * num_rows // num_parts
        if a.mode == TILES and end - first != laid_out:
            laid_out = end - first
            lay_out(s.tile_config, laid_out)
        _attend_rows(a, s, kv_head, (first, end), kind, packed, ask)
    if laid_out:
        release()


@worker(ATTENTION, 6)
def attend_chunk(arguments: Any, scratch: int, kv_head: int, num_rows: int, low: int, high: int, kind: int) -> None:
    """Attend to one chunk: `worker.py` calls it by its address."""
    _attend(carray(arguments, 1)[0], scratch_at(scratch, 0), kv_head, num_rows, (low, high), kind)


@inlined
def _stage(s: Any, rows: int, start: int, stop: int, offset: int, num_bytes: int, padded_bytes: int) -> None:
    """Copy one head of some tokens, and pad it with zeros to whole vectors."""
    zeros, stage = s.zeros, s.stage
    for token in range(start, stop):
        target = stage + token * padded_bytes
        simd.copy_bytes(target, simd.load_int(rows + 8 * token) + offset, num_bytes)
        simd.copy_bytes(target + num_bytes, zeros, padded_bytes - num_bytes)
        simd.store_int(s.staged_rows + 8 * token, target)


@inlined
def pack_keys(a: Any, s: Any, kv_head: int, start: int, stop: int) -> None:
    """Pack keys in panels of 64 tokens, [words, 64] each; codes are decoded to the words' type."""
    mode, dim, item_bytes, num_words = a.mode, a.key_dim, a.stored_bytes, a.key_words
    row_bytes = num_words * (2 if mode in IN_PAIRS else 1) * item_bytes
    scales, scale_offset = s.key_scales, SCALE_BYTES * kv_head
    rows, offset = s.key_rows, kv_head * dim * item_bytes
    if dim * item_bytes != row_bytes:
        _stage(s, rows, start, stop, offset, dim * item_bytes, row_bytes)
        rows, offset = s.staged_rows, 0
    packed = s.packed_keys
    for token in range(start, stop, LANES):
        panel = packed + token // KV_PANEL * num_words * 4 * KV_PANEL + token % KV_PANEL * 4
        for word in range(0, num_words, LANES):
            target = panel + word * 4 * KV_PANEL
            if item_bytes == 1 and mode in IN_PAIRS:
                simd.transpose_code_pairs(
                    rows + 8 * token, offset + 2 * word, scales + 8 * token, scale_offset, target, 4 * KV_PANEL
                )
            elif item_bytes == 1:
                simd.transpose_codes(
                    rows + 8 * token, offset + word, scales + 8 * token, scale_offset, target, 4 * KV_PANEL
                )
            elif mode == WIDENED:
                simd.transpose_widened(rows + 8 * token, offset + 2 * word, target, 4 * KV_PANEL)
            else:
                simd.transpose_words(rows + 8 * token, offset + 4 * word, target, 4 * KV_PANEL)


@inlined
def pack_values(a: Any, s: Any, kv_head: int, start: int, stop: int) -> None:
    """Pack values in panels of 64 dimensions (the last may have 32).

    A panel has a row for each token, or for each pair of tokens in the modes IN_PAIRS.
    """
    mode, dim, item_bytes, width = a.mode, a.value_dim, a.stored_bytes, a.value_width
    rows, offset = s.value_rows, kv_head * dim * item_bytes
    if dim != width:
        _stage(s, rows, start, stop, offset, dim * item_bytes, width * item_bytes)
        rows, offset = s.staged_rows, 0
    packed = s.packed_values
    together = 2 if mode in IN_PAIRS else 1
    for first in range(0, width, KV_PANEL):
        lanes = min(KV_PANEL, width - first)
        panel = packed + first * 4 * (CHUNK // together)
        for token in range(start, stop, together):
            source = simd.load_int(rows + 8 * token) + offset + first * item_bytes
            place = token // together
            if mode == TILES:  # the order in which two vectors of weights become one: two pairs of each alternate
                place = place & -16 | place & 1 | (place & 6) << 1 | (place & 8) >> 2
            target = panel + place * lanes * 4
            if item_bytes == 1:
                scale = simd.load_int(s.value_scales + 8 * token) + SCALE_BYTES * kv_head
                if together == 2:
                    other = simd.load_int(rows + 8 * token + 8) + offset + first
                    other_scale = simd.load_int(s.value_scales + 8 * token + 8) + SCALE_BYTES * kv_head
                    simd.interleave_codes(source, other, scale, other_scale, target, lanes)
                else:
                    simd.widen_codes(target, source, scale, lanes)
            elif together == 2:
                other = simd.load_int(rows + 8 * token + 8) + offset + first * 2
                simd.interleave(source, other, target)
                if lanes == KV_PANEL:
                    simd.interleave(source + 64, other + 64, target + 128)
            elif mode == WIDENED:
                simd.widen(target, source, lanes)
            else:
                simd.copy_bytes(target, source, lanes * 4)


@inlined
def are_few(a: Any, num_rows: int) -> Any:
    """Whether there are too few rows for packing to be worth it; packing costs as much as reading a chunk twice.

    A chunk is always packed if the mode is not PAIRS, if a head does not fill whole vectors of pairs, or if elements
    are codes, because packing decodes the codes.
    """
    return (
        a.mode == PAIRS
        and a.stored_bytes == 2
        and num_rows <= 2 * simd.ROWS
        and a.key_dim % simd.DIMS == 0
        and a.value_dim % simd.DIMS == 0
    )


@inlined
def multiply_keys_directly(
    a: Any, s: Any, kv_head: int, rows: tuple[int, int], seen: tuple[int, int], ask: int
) -> None:
    """Compute scores of some rows' queries with whole vectors of tokens.

    `seen`: (first, last + 1) of the tokens that rows see; `first` is rounded down to the beginning of a panel.
    `ask` is 2 ** 16 times the number of the next chunk's tokens to prefetch with each row.
    """
    num_steps, key_bytes = -(-(seen[1] - seen[0]) // LANES), 2 * a.key_dim
    queries, offset = s.row_queries + rows[0] * key_bytes, kv_head * key_bytes
    for step in range(num_steps):
        first, last = _to_ask_for(ask, rows, step, num_steps)
        row_weights.ask_for_keys(a, s, first, last)
        token = seen[0] + step * LANES
        keys, scores = s.key_rows + 8 * token, s.row_scores + 4 * token
        simd.score_keys(rows[1] - rows[0], queries, key_bytes, keys, offset, key_bytes // 4, scores, SCORE_BYTES)


@inlined
def multiply_values_directly(
    a: Any, s: Any, kv_head: int, rows: tuple[int, int], seen: tuple[int, int], ask: int
) -> None:
    """For each row, add up the values times the row's weights. Values are read where they lie, without packing."""
    num_steps, value_bytes, mixed = -(-(seen[1] - seen[0]) // LANES), 2 * a.value_dim, s.row_mixed
    simd.clear_bytes(mixed, (rows[1] - rows[0]) * 2 * value_bytes)
    for step in range(num_steps):
        first, last = _to_ask_for(ask, rows, step, num_steps)
        row_weights.ask_for_values(a, s, first, last)
        token = seen[0] + step * LANES
        num_pairs = (min(LANES, seen[1] - token) + 1) // 2
        weights, values = s.row_scores + 2 * token, s.value_rows + 8 * token
        for dim in range(0, a.value_dim, simd.DIMS):
            offset, target = kv_head * value_bytes + 2 * dim, mixed + 4 * dim
            simd.add_values(rows[1] - rows[0], weights, SCORE_BYTES, values, offset, num_pairs, target, 2 * value_bytes)


@inlined
def _to_ask_for(ask: int, rows: tuple[int, int], step: int, num_steps: int) -> tuple[int, int]:
    """The tokens of the next chunk that are prefetched in one step of the work on these rows: (first, last + 1)."""
    begin, total = ask * rows[0], ask * (rows[1] - rows[0])
    return (begin + total * step // num_steps) >> 16, (begin + total * (step + 1) // num_steps) >> 16
