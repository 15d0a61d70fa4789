"""One chunk of KV with any number of rows, compiled by numba: pack, unless rows are few; multiply, weigh, multiply.

Knows packed memory and rows; knows nothing of block tables, requests or the order of chunks.
"""

from __future__ import annotations

import functools
from typing import Any

from numba import carray, cfunc, types

from foreword.kernels.cpu.few_rows import are_few, multiply_keys_directly, multiply_values_directly
from foreword.kernels.cpu.layout import (
    FLOATS,
    IN_PAIRS,
    KEY_DIM,
    KEY_ROWS,
    MODE,
    MOST_ROWS,
    NEXT_LENGTH,
    NUM_ARGUMENTS,
    PACKED_KEYS,
    PACKED_VALUES,
    PAIRS,
    PANEL,
    ROW_MIXED,
    ROW_QUERIES,
    ROW_SCORES,
    ROW_STATS,
    ROW_TABLE,
    ROW_WEIGHTS,
    SCORE_BYTES,
    STAGE,
    STAGED_ROWS,
    TILE_CONFIG,
    TILES,
    VALUE_DIM,
    VALUE_ROWS,
    WEIGHT_BYTES,
    WIDENED,
    ZEROS,
    inlined,
    part,
    source_digest,
)
from foreword.kernels.cpu.row_weights import ask_ahead, cap_scores, find_bounds, find_peaks, keep_rows, weigh_row
from foreword.kernels.cpu.tile_weights import weigh_in_tiles
from foreword.kernels.llvm.simd import (
    LANES,
    ROWS,
    copy_bytes,
    interleave,
    load_int,
    pair_product_32,
    pair_product_64,
    product_32,
    product_64,
    store_int,
    transpose_widened,
    transpose_words,
    widen,
)
from foreword.kernels.llvm.tiles import lay_out, release, tile_product_32, tile_product_64
from foreword.kernels.step_plan import CHUNK


@inlined
def _stage(scratch: int, rows: int, start: int, stop: int, offset: int, num_bytes: int, padded_bytes: int) -> None:
    """Copy one head of tokens whose size is no multiple of a vector to where it can be padded with zeros."""
    zeros, stage = part(scratch, ZEROS), part(scratch, STAGE)
    for token in range(start, stop):
        target = stage + token * padded_bytes
        copy_bytes(target, load_int(rows + 8 * token) + offset, num_bytes)
        copy_bytes(target + num_bytes, zeros, padded_bytes - num_bytes)
        store_int(scratch + STAGED_ROWS + 8 * token, target)


@inlined
def _pack_keys(a: Any, scratch: int, kv_head: int, start: int, stop: int) -> None:
    """Panels of 64 tokens, [words, 64] each."""
    mode, dim = a[MODE], a[KEY_DIM]
    item_bytes = 4 if mode == FLOATS else 2
    num_words = (dim + 31) // 32 * 16 if mode in IN_PAIRS else (dim + 15) // 16 * 16
    row_bytes = num_words * (2 if mode == WIDENED else 4)
    rows, offset = scratch + KEY_ROWS, kv_head * dim * item_bytes
    if dim * item_bytes != row_bytes:
        _stage(scratch, rows, start, stop, offset, dim * item_bytes, row_bytes)
        rows, offset = scratch + STAGED_ROWS, 0
    packed = part(scratch, PACKED_KEYS)
    for token in range(start, stop, LANES):
        panel = packed + token // PANEL * num_words * 4 * PANEL + token % PANEL * 4
        for word in range(0, num_words, LANES):
            target = panel + word * 4 * PANEL
            if mode == WIDENED:
                transpose_widened(rows + 8 * token, offset + 2 * word, target, 4 * PANEL)
            else:
                transpose_words(rows + 8 * token, offset + 4 * word, target, 4 * PANEL)


@inlined
def _pack_values(a: Any, scratch: int, kv_head: int, start: int, stop: int) -> None:
    """Panels of 64 dimensions (the last may have 32), [tokens or pairs of tokens, 64] each."""
    mode, dim = a[MODE], a[VALUE_DIM]
    item_bytes = 4 if mode == FLOATS else 2
    width = (dim + 31) // 32 * 32
    rows, offset = scratch + VALUE_ROWS, kv_head * dim * item_bytes
    if dim != width:
        _stage(scratch, rows, start, stop, offset, dim * item_bytes, width * item_bytes)
        rows, offset = scratch + STAGED_ROWS, 0
    packed = part(scratch, PACKED_VALUES)
    together = 2 if mode in IN_PAIRS else 1
    for first in range(0, width, PANEL):
        lanes = min(PANEL, width - first)
        panel = packed + first * 4 * (CHUNK // together)
        for token in range(start, stop, together):
            source = load_int(rows + 8 * token) + offset + first * item_bytes
            place = token // together
            if mode == TILES:  # as two vectors of weights are put into one: two pairs of each in turn
                place = place & -16 | place & 1 | (place & 6) << 1 | (place & 8) >> 2
            target = panel + place * lanes * 4
            if together == 2:
                other = load_int(rows + 8 * token + 8) + offset + first * 2
                interleave(source, other, target)
                if lanes == PANEL:
                    interleave(source + 64, other + 64, target + 128)
            elif mode == WIDENED:
                widen(target, source, lanes)
            else:
                copy_bytes(target, source, lanes * 4)


# ----------------------------------------------------------------------------------------------- one chunk


@inlined
def _attend_rows(a: Any, scratch: int, kv_head: int, rows: tuple[int, int], kind: int, packed: Any, ask: int) -> None:
    """Partial results of some rows of the row table, at most MOST_ROWS, with the chunk, which is `packed` or not.

    `ask`: how many tokens of the next chunk are asked for with each row, times 2 ** 16.
    """
    num_rows = rows[1] - rows[0]
    table, scores, stats = part(scratch, ROW_TABLE) + 24 * rows[0], part(scratch, ROW_SCORES), part(scratch, ROW_STATS)
    bounds = find_bounds(table, num_rows)
    if bounds[0] >= bounds[1]:
        return
    start, stop = bounds[0] // PANEL * PANEL, -(-bounds[1] // PANEL) * PANEL
    if a[MODE] == TILES:
        weigh_in_tiles(a, scratch, rows, bounds, ask)
    else:
        if packed:
            _multiply_keys(a, scratch, rows, start, stop)
        else:
            multiply_keys_directly(a, scratch, kv_head, rows, (start, bounds[1]), ask)
        cap_scores(a, num_rows, scores, SCORE_BYTES, (start, stop))
        find_peaks(a, table, num_rows, scores, stats, (start, stop))
        for row in range(num_rows):
            weigh_row(a, scratch, table + 24 * row, scores + row * SCORE_BYTES, stats + 8 * row, (start, stop))
    if packed:
        _multiply_values(a, scratch, num_rows, start, bounds[1])
    else:
        multiply_values_directly(a, scratch, kv_head, rows, (start, bounds[1]), ask)
    keep_rows(a, scratch, table, num_rows, stats, part(scratch, ROW_MIXED), kind)


@inlined
def _multiply_keys(a: Any, scratch: int, rows: tuple[int, int], start: int, stop: int) -> None:
    """Scores of the rows' queries."""
    num_rows = rows[1] - rows[0]
    num_words = (a[KEY_DIM] + 31) // 32 * 16 if a[MODE] == PAIRS else (a[KEY_DIM] + 15) // 16 * 16
    queries = part(scratch, ROW_QUERIES) + rows[0] * num_words * 4
    for token in range(start, stop, PANEL):
        panel = part(scratch, PACKED_KEYS) + token * num_words * 4
        scores = part(scratch, ROW_SCORES) + 4 * token
        if a[MODE] == PAIRS:
            pair_product_64(num_rows, queries, num_words * 4, panel, num_words, scores, SCORE_BYTES)
        else:
            product_64(num_rows, queries, num_words * 4, panel, num_words, scores, SCORE_BYTES)


@inlined
def _multiply_values(a: Any, scratch: int, num_rows: int, start: int, high: int) -> None:
    """Mixtures of values by the rows' weights."""
    width = (a[VALUE_DIM] + 31) // 32 * 32
    together = 2 if a[MODE] in IN_PAIRS else 1
    length = (high - start + together - 1) // together
    steps = (length + LANES - 1) // LANES  # of tiles: what is beyond `high` has weight 0, and values of 0
    weights = part(scratch, ROW_SCORES) + start * 4 // together
    tile_weights = part(scratch, ROW_WEIGHTS) + 2 * start
    for dim in range(0, width, PANEL):
        lanes = min(PANEL, width - dim)
        panel = part(scratch, PACKED_VALUES) + dim * 4 * (CHUNK // together) + start // together * lanes * 4
        target = part(scratch, ROW_MIXED) + 4 * dim
        if a[MODE] == TILES and lanes == PANEL:
            tile_product_64(num_rows, tile_weights, WEIGHT_BYTES, panel, steps, target, 4 * width)
        elif a[MODE] == TILES:
            tile_product_32(num_rows, tile_weights, WEIGHT_BYTES, panel, steps, target, 4 * width)
        elif a[MODE] == PAIRS and lanes == PANEL:
            pair_product_64(num_rows, weights, SCORE_BYTES, panel, length, target, 4 * width)
        elif a[MODE] == PAIRS:
            pair_product_32(num_rows, weights, SCORE_BYTES, panel, length, target, 4 * width)
        elif lanes == PANEL:
            product_64(num_rows, weights, SCORE_BYTES, panel, length, target, 4 * width)
        else:
            product_32(num_rows, weights, SCORE_BYTES, panel, length, target, 4 * width)


@inlined
def _attend(a: Any, scratch: int, kv_head: int, num_rows: int, bounds: tuple[int, int], kind: int) -> None:
    """All rows of the row table with one chunk, whose tokens have been found; `bounds`: what some row sees."""
    num_parts, ask, packed = -(-num_rows // (MOST_ROWS if a[MODE] == TILES else ROWS)), 0, not are_few(a, num_rows)
    if packed:
        start, stop = bounds[0] // PANEL * PANEL, -(-bounds[1] // PANEL) * PANEL
        _pack_keys(a, scratch, kv_head, start, stop)
        _pack_values(a, scratch, kv_head, start, stop)
    if not packed or (a[MODE] == TILES and num_parts > 1):
        ask = (load_int(scratch + NEXT_LENGTH) << 16) // num_rows + 1
    else:
        ask_ahead(a, scratch, 0, CHUNK)
    laid_out = 0
    for number in range(num_parts):  # parts of equal size, as far as possible
        first, end = number * num_rows // num_parts, (number + 1) * num_rows // num_parts
        if a[MODE] == TILES and end - first != laid_out:
            laid_out = end - first
            lay_out(part(scratch, TILE_CONFIG), laid_out)
        _attend_rows(a, scratch, kv_head, (first, end), kind, packed, ask)
    if laid_out:
        release()


@functools.cache
def compile_chunk() -> Any:
    """The function that `cpu.py` calls by its address; compiled once per machine."""
    digest = source_digest()
    address = types.intp

    @cfunc(types.void(types.CPointer(types.int64), *[address] * 6), cache=True, error_model="numpy")
    def attend_chunk(arguments: Any, scratch: int, kv_head: int, num_rows: int, low: int, high: int, kind: int) -> None:
        if digest != 0:
            _attend(carray(arguments, NUM_ARGUMENTS), scratch, kv_head, num_rows, (low, high), kind)

    return attend_chunk
