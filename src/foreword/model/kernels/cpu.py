"""Paged attention on the CPU, compiled by numba: queries, KV blocks and block tables as memory addresses.

Knows the layout of its arguments and the order of all sums; knows nothing of models, torch or who shares what
(`cpu_plan.py` does). Keeps the three rules of `reference.py` with arithmetic of its own:

1. KV is cut at absolute positions into chunks of 256 tokens, whatever the block size. A row (one query of one head)
   has one partial result per chunk that it sees, merged in ascending order.
2. An element of a product is one chain of fused multiply-adds, and a row's weights are summed in 16 lanes that are
   then joined as a tree. Both are spelt out in `simd.py`, so no number of rows, threads or tokens changes them.
3. What a row must not see has weight 0, and values that no row of an item sees are read as zeros: both add nothing.

An item of work is done by one thread for one KV head:

    fold    up to 64 queries of one request; walks the chunks and merges as it goes        (prefill)
    chunk   one chunk for the few queries of one request, or of many that share it;
            leaves partial results, which a second pass merges row by row                  (decoding)

Keys are packed so that 16 tokens fill a vector, values so that 16 dimensions do; queries and weights are broadcast.
Where the processor multiplies pairs of bfloat16, weights are rounded to bfloat16 first (and summed rounded).
"""

from __future__ import annotations

import functools
from typing import Any

from numba import carray, cfunc, njit, types

from foreword.model.kernels import simd
from foreword.model.kernels.simd import (
    LANES,
    LOG2_E,
    LOWEST,
    ROWS,
    copy_bytes,
    fetch_add,
    finish,
    interleave,
    load_float,
    load_int,
    load_int32,
    merge,
    pair_product_32,
    pair_product_64,
    product_32,
    product_64,
    soft_cap,
    softmax,
    softmax_pairs,
    store_float,
    store_int,
    transpose_widened,
    transpose_words,
    widen,
)

CHUNK = 256
PANEL = 64
"""Tokens, or dimensions of values, that lie side by side in packed memory."""
FOLD_QUERIES = 64
PAIRS, WIDENED, FLOATS = range(3)
"""Modes: bfloat16 multiplied in pairs, bfloat16 widened to float32, float32."""
FOLD, SHARED = range(2)
"""Kinds of items: (FOLD, request, first query, queries) and (SHARED, chunk, first member, last member + 1)."""

# The arguments: int64 each. Strides and sizes ending in _BYTES; the others are counts or addresses.
(
    QUERY,
    QUERY_TOKEN_BYTES,
    QUERY_HEAD_BYTES,
    KEYS,
    VALUES,
    NUM_KV_HEADS,
    NUM_GROUPS,
    KEY_DIM,
    VALUE_DIM,
    MODE,
    OUTPUT,
    FLOAT_OPTIONS,  # float32: scale, soft-cap (0: none)
    SINKS,  # float32 per head; 0: none
    WINDOW,  # 0: none
    LOCAL_CHUNK,  # 0: none
    TABLES,  # int32 [requests, TABLE_WIDTH]
    TABLE_WIDTH,
    BLOCK_SIZE,
    REQUESTS,  # [requests, 5]: first row, queries, first position, chunks, first slot of partial results
    ITEMS,  # [items, 4]
    NUM_ITEMS,
    MEMBERS,  # requests in the order that SHARED items speak of
    MERGES,  # [queries of members, 2]: request, query
    NUM_MERGES,
    COUNTERS,  # threads, units of work, merges: shared by the threads, 0 at the start
    PHASE,  # 0: items; 1: merge partial results
    PARTIAL_STATS,  # float32 [slots, heads, 2]: peak and sum
    PARTIAL_MIXED,  # float32 [slots, heads, padded value dim]
    SCRATCH,
    SCRATCH_BYTES,  # per thread
    NUM_ARGUMENTS,
) = range(31)

# Offsets in a thread's scratch memory, filled in by `scratch_layout`: the first five are constant.
KEY_ROWS = 0
VALUE_ROWS = KEY_ROWS + 8 * CHUNK
STAGED_ROWS = VALUE_ROWS + 8 * CHUNK
LAYOUT = STAGED_ROWS + 8 * CHUNK
(ZEROS, STAGE, PACKED_KEYS, PACKED_VALUES, ROW_QUERIES, ROW_SCORES, ROW_WEIGHTS, ROW_STATS, ROW_MIXED) = range(9)
(ROW_TABLE, FOLD_STATS, FOLD_MIXED, CURRENT_ITEM, LAYOUT_SIZE) = range(9, 14)
VARIABLE = LAYOUT + 8 * LAYOUT_SIZE + 8  # kept a multiple of 64 below

_compiled = njit(nogil=True, error_model="numpy")


def padded(size: int, multiple: int) -> int:
    """`size` rounded up."""
    return -(-size // multiple) * multiple


def key_words(mode: int, key_dim: int) -> int:
    """Words of a packed key."""
    return padded(key_dim, 32) // 2 if mode == PAIRS else padded(key_dim, 16)


def scratch_layout(mode: int, key_dim: int, value_dim: int, token_bytes: int, most_rows: tuple[int, int]) -> list[int]:
    """Offsets of the variable parts of a thread's scratch memory, and their end.

    `token_bytes`: the larger of a token's keys and values over all heads; `most_rows`: of an item, of a fold.
    """
    words, values = key_words(mode, key_dim), padded(value_dim, 32)
    sizes = [
        max(token_bytes, 4 * CHUNK) + 256,  # ZEROS: a token that nobody sees
        CHUNK * 4 * (padded(max(key_dim, value_dim), 32) + 32),  # STAGE
        CHUNK * 4 * words,
        CHUNK * 4 * values,
        ROWS * 4 * (words + 32),
        ROWS * 4 * CHUNK,
        ROWS * 4 * CHUNK,
        ROWS * 8,
        ROWS * 4 * values,
        most_rows[0] * 32,  # ROW_TABLE: address of the query, low, high, target
        most_rows[1] * 8,
        most_rows[1] * 4 * values,
        8,
    ]
    offsets, end = [], padded(VARIABLE, 64)
    for size in sizes:
        offsets.append(end)
        end += padded(size, 64)
    return [*offsets, end]


@_compiled
def _first_seen(a: Any, position: int) -> Any:
    """Least position that a query at `position` sees."""
    if a[WINDOW] > 0:
        return max(0, position - a[WINDOW] + 1)
    if a[LOCAL_CHUNK] > 0:
        return position // a[LOCAL_CHUNK] * a[LOCAL_CHUNK]
    return 0


@_compiled
def _part(scratch: int, number: int) -> Any:
    return scratch + load_int(scratch + LAYOUT + 8 * number)


# ------------------------------------------------------------------------------------------------- packing


@_compiled
def _find_tokens(a: Any, scratch: int, request: int, chunk: int, low: int, high: int) -> None:
    """Addresses of a chunk's keys and values, token by token; zeros where nobody sees the token."""
    item_bytes = 4 if a[MODE] == FLOATS else 2
    key_bytes = a[NUM_KV_HEADS] * a[KEY_DIM] * item_bytes
    value_bytes = a[NUM_KV_HEADS] * a[VALUE_DIM] * item_bytes
    zeros = _part(scratch, ZEROS)
    table = a[TABLES] + 4 * request * a[TABLE_WIDTH]
    block_size = a[BLOCK_SIZE]
    for token in range(low // PANEL * PANEL, low):
        store_int(scratch + KEY_ROWS + 8 * token, zeros)
        store_int(scratch + VALUE_ROWS + 8 * token, zeros)
    token = low
    while token < high:
        position = chunk * CHUNK + token
        block = position // block_size
        inside = position - block * block_size
        slot = load_int32(table + 4 * block) * block_size + inside
        for _ in range(min(block_size - inside, high - token)):
            store_int(scratch + KEY_ROWS + 8 * token, a[KEYS] + slot * key_bytes)
            store_int(scratch + VALUE_ROWS + 8 * token, a[VALUES] + slot * value_bytes)
            token += 1
            slot += 1
    for token in range(high, -(-high // PANEL) * PANEL):
        store_int(scratch + KEY_ROWS + 8 * token, zeros)
        store_int(scratch + VALUE_ROWS + 8 * token, zeros)


@_compiled
def _stage(scratch: int, rows: int, start: int, stop: int, offset: int, num_bytes: int, padded_bytes: int) -> None:
    """Copy one head of tokens whose size is no multiple of a vector to where it can be padded with zeros."""
    zeros, stage = _part(scratch, ZEROS), _part(scratch, STAGE)
    for token in range(start, stop):
        target = stage + token * padded_bytes
        copy_bytes(target, load_int(rows + 8 * token) + offset, num_bytes)
        copy_bytes(target + num_bytes, zeros, padded_bytes - num_bytes)
        store_int(scratch + STAGED_ROWS + 8 * token, target)


@_compiled
def _pack_keys(a: Any, scratch: int, kv_head: int, start: int, stop: int) -> None:
    """Panels of 64 tokens, [words, 64] each."""
    mode, dim = a[MODE], a[KEY_DIM]
    item_bytes = 4 if mode == FLOATS else 2
    num_words = (dim + 31) // 32 * 16 if mode == PAIRS else (dim + 15) // 16 * 16
    row_bytes = num_words * (2 if mode == WIDENED else 4)
    rows, offset = scratch + KEY_ROWS, kv_head * dim * item_bytes
    if dim * item_bytes != row_bytes:
        _stage(scratch, rows, start, stop, offset, dim * item_bytes, row_bytes)
        rows, offset = scratch + STAGED_ROWS, 0
    packed = _part(scratch, PACKED_KEYS)
    for token in range(start, stop, LANES):
        panel = packed + token // PANEL * num_words * 4 * PANEL + token % PANEL * 4
        for word in range(0, num_words, LANES):
            target = panel + word * 4 * PANEL
            if mode == WIDENED:
                transpose_widened(rows + 8 * token, offset + 2 * word, target, 4 * PANEL)
            else:
                transpose_words(rows + 8 * token, offset + 4 * word, target, 4 * PANEL)


@_compiled
def _pack_values(a: Any, scratch: int, kv_head: int, start: int, stop: int) -> None:
    """Panels of 64 dimensions (the last may have 32), [tokens or pairs of tokens, 64] each."""
    mode, dim = a[MODE], a[VALUE_DIM]
    item_bytes = 4 if mode == FLOATS else 2
    width = (dim + 31) // 32 * 32
    rows, offset = scratch + VALUE_ROWS, kv_head * dim * item_bytes
    if dim != width:
        _stage(scratch, rows, start, stop, offset, dim * item_bytes, width * item_bytes)
        rows, offset = scratch + STAGED_ROWS, 0
    packed = _part(scratch, PACKED_VALUES)
    together = 2 if mode == PAIRS else 1
    for first in range(0, width, PANEL):
        lanes = min(PANEL, width - first)
        panel = packed + first * 4 * (CHUNK // together)
        for token in range(start, stop, together):
            source = load_int(rows + 8 * token) + offset + first * item_bytes
            target = panel + token // together * lanes * 4
            if mode == PAIRS:
                other = load_int(rows + 8 * token + 8) + offset + first * 2
                interleave(source, other, target)
                if lanes == PANEL:
                    interleave(source + 64, other + 64, target + 128)
            elif mode == WIDENED:
                widen(target, source, lanes)
            else:
                copy_bytes(target, source, lanes * 4)


@_compiled
def _take_query(a: Any, scratch: int, row: int, query: int) -> None:
    """One row's query as words, padded with zeros."""
    mode, dim = a[MODE], a[KEY_DIM]
    item_bytes = 4 if mode == FLOATS else 2
    num_words = (dim + 31) // 32 * 16 if mode == PAIRS else (dim + 15) // 16 * 16
    target, zeros = _part(scratch, ROW_QUERIES) + row * num_words * 4, _part(scratch, ZEROS)
    if mode == WIDENED:
        stage = _part(scratch, ROW_QUERIES) + ROWS * num_words * 4
        copy_bytes(stage, query, dim * 2)
        copy_bytes(stage + dim * 2, zeros, (num_words - dim) * 2)
        widen(target, stage, num_words)
    else:
        copy_bytes(target, query, dim * item_bytes)
        copy_bytes(target + dim * item_bytes, zeros, num_words * 4 - dim * item_bytes)


# ----------------------------------------------------------------------------------------------- one chunk


@_compiled
def _attend_rows(a: Any, scratch: int, first: int, num_rows: int, kind: int) -> None:
    """Partial results of up to ROWS rows of the row table with the chunk that is packed."""
    table = _part(scratch, ROW_TABLE) + 32 * first
    low, high = CHUNK, 0
    for row in range(num_rows):
        row_low, row_high = load_int(table + 32 * row + 8), load_int(table + 32 * row + 16)
        if row_low < row_high:
            low, high = min(low, row_low), max(high, row_high)
    if low >= high:
        return
    start, stop = low // PANEL * PANEL, -(-high // PANEL) * PANEL
    for row in range(num_rows):
        _take_query(a, scratch, row, load_int(table + 32 * row))
    _multiply_keys(a, scratch, num_rows, start, stop)
    for row in range(num_rows):
        _weigh_row(a, scratch, row, table + 32 * row, start, stop)
    _multiply_values(a, scratch, num_rows, start, high)
    width = (a[VALUE_DIM] + 31) // 32 * 32
    for row in range(num_rows):
        if load_int(table + 32 * row + 8) < load_int(table + 32 * row + 16):
            stats = _part(scratch, ROW_STATS) + 8 * row
            mixed = _part(scratch, ROW_MIXED) + row * 4 * width
            target = load_int(table + 32 * row + 24)
            if kind == FOLD:
                fold_mixed = _part(scratch, FOLD_MIXED) + target * 4 * width
                merge(_part(scratch, FOLD_STATS) + 8 * target, fold_mixed, stats, mixed, width)
            else:
                copy_bytes(a[PARTIAL_STATS] + 8 * target, stats, 8)
                copy_bytes(a[PARTIAL_MIXED] + 4 * width * target, mixed, 4 * width)


@_compiled
def _multiply_keys(a: Any, scratch: int, num_rows: int, start: int, stop: int) -> None:
    """Scores of the rows' queries."""
    num_words = (a[KEY_DIM] + 31) // 32 * 16 if a[MODE] == PAIRS else (a[KEY_DIM] + 15) // 16 * 16
    queries = _part(scratch, ROW_QUERIES)
    for token in range(start, stop, PANEL):
        panel = _part(scratch, PACKED_KEYS) + token * num_words * 4
        scores = _part(scratch, ROW_SCORES) + 4 * token
        if a[MODE] == PAIRS:
            pair_product_64(num_rows, queries, num_words * 4, panel, num_words, scores, 4 * CHUNK)
        else:
            product_64(num_rows, queries, num_words * 4, panel, num_words, scores, 4 * CHUNK)


@_compiled
def _weigh_row(a: Any, scratch: int, row: int, entry: int, start: int, stop: int) -> None:
    """Weights of one row's scores; `entry`: its place in the row table."""
    low, high = load_int(entry + 8), load_int(entry + 16)
    scores = _part(scratch, ROW_SCORES) + row * 4 * CHUNK
    weights = _part(scratch, ROW_WEIGHTS) + row * 4 * CHUNK
    stats = _part(scratch, ROW_STATS) + 8 * row
    if low >= high:
        copy_bytes(weights, _part(scratch, ZEROS), 4 * CHUNK)
        return
    scale, cap = load_float(a[FLOAT_OPTIONS]), load_float(a[FLOAT_OPTIONS] + 4)
    factor = scale * LOG2_E
    if cap > 0.0:
        soft_cap(scores, start, stop, scale / cap, cap)
        factor = LOG2_E
    if a[MODE] == PAIRS:
        softmax_pairs(scores, weights, stats, start, stop, low, high, factor)
    else:
        softmax(scores, weights, stats, start, stop, low, high, factor)


@_compiled
def _multiply_values(a: Any, scratch: int, num_rows: int, start: int, high: int) -> None:
    """Mixtures of values by the rows' weights."""
    width = (a[VALUE_DIM] + 31) // 32 * 32
    together = 2 if a[MODE] == PAIRS else 1
    length = (high - start + together - 1) // together
    weights = _part(scratch, ROW_WEIGHTS) + start * 4 // together
    for dim in range(0, width, PANEL):
        lanes = min(PANEL, width - dim)
        panel = _part(scratch, PACKED_VALUES) + dim * 4 * (CHUNK // together) + start // together * lanes * 4
        target = _part(scratch, ROW_MIXED) + 4 * dim
        if a[MODE] == PAIRS and lanes == PANEL:
            pair_product_64(num_rows, weights, 4 * CHUNK, panel, length, target, 4 * width)
        elif a[MODE] == PAIRS:
            pair_product_32(num_rows, weights, 4 * CHUNK, panel, length, target, 4 * width)
        elif lanes == PANEL:
            product_64(num_rows, weights, 4 * CHUNK, panel, length, target, 4 * width)
        else:
            product_32(num_rows, weights, 4 * CHUNK, panel, length, target, 4 * width)


@_compiled
def _attend_chunk(a: Any, scratch: int, kv_head: int, num_rows: int, bounds: tuple[int, int], kind: int) -> None:
    """All rows of the row table with one chunk, whose tokens have been found; `bounds`: what some row sees."""
    start, stop = bounds[0] // PANEL * PANEL, -(-bounds[1] // PANEL) * PANEL
    _pack_keys(a, scratch, kv_head, start, stop)
    _pack_values(a, scratch, kv_head, start, stop)
    num_parts = -(-num_rows // ROWS)
    for part in range(num_parts):  # parts of equal size, as far as possible
        first, end = part * num_rows // num_parts, (part + 1) * num_rows // num_parts
        _attend_rows(a, scratch, first, end - first, kind)


@_compiled
def _add_rows(
    a: Any, scratch: int, place: tuple[int, int, int], queries: tuple[int, int], chunk: int, kind: int
) -> tuple[int, int]:
    """Append the rows of some queries of one request; `place`: request, KV head, rows so far. What they see."""
    request, kv_head, count = place
    num_groups, num_heads = a[NUM_GROUPS], a[NUM_GROUPS] * a[NUM_KV_HEADS]
    about = a[REQUESTS] + 40 * request
    first_row, first_position = load_int(about), load_int(about + 16)
    num_chunks, first_slot = load_int(about + 24), load_int(about + 32)
    table = _part(scratch, ROW_TABLE)
    low, high = CHUNK, 0
    for query in range(queries[0], queries[1]):
        position = first_position + query
        row_low = max(0, _first_seen(a, position) - chunk * CHUNK)
        row_high = min(CHUNK, position + 1 - chunk * CHUNK)
        if row_low < row_high:
            low, high = min(low, row_low), max(high, row_high)
        for group in range(num_groups):
            head = kv_head * num_groups + group
            row = table + 32 * count
            store_int(row, a[QUERY] + (first_row + query) * a[QUERY_TOKEN_BYTES] + head * a[QUERY_HEAD_BYTES])
            store_int(row + 8, row_low)
            store_int(row + 16, row_high)
            slot = (first_slot + query * num_chunks + chunk) * num_heads + head
            store_int(row + 24, count if kind == FOLD else slot)
            count += 1
    return low, high


# ------------------------------------------------------------------------------------------- items of work


@_compiled
def _fold(a: Any, scratch: int, item: int, kv_head: int) -> None:
    """Some queries of one request from their first chunk to their last, and their results."""
    request, first, count = load_int(item + 8), load_int(item + 16), load_int(item + 24)
    num_groups = a[NUM_GROUPS]
    num_rows = count * num_groups
    width = (a[VALUE_DIM] + 31) // 32 * 32
    stats, mixed = _part(scratch, FOLD_STATS), _part(scratch, FOLD_MIXED)
    for row in range(num_rows):
        store_float(stats + 8 * row, LOWEST)
        store_float(stats + 8 * row + 4, 0.0)
        for dim in range(width):
            store_float(mixed + 4 * (row * width + dim), 0.0)
    first_row = load_int(a[REQUESTS] + 40 * request)
    position = load_int(a[REQUESTS] + 40 * request + 16) + first
    for chunk in range(_first_seen(a, position) // CHUNK, (position + count - 1) // CHUNK + 1):
        low, high = _add_rows(a, scratch, (request, kv_head, 0), (first, first + count), chunk, FOLD)
        _find_tokens(a, scratch, request, chunk, low, high)
        _attend_chunk(a, scratch, kv_head, num_rows, (low, high), FOLD)
    for row in range(num_rows):
        query, head = first_row + first + row // num_groups, kv_head * num_groups + row % num_groups
        _finish_row(a, scratch, stats + 8 * row, mixed + 4 * width * row, query, head)


@_compiled
def _finish_row(a: Any, scratch: int, stats: int, mixed: int, query: int, head: int) -> None:
    """Write one row's result."""
    dim, item_bytes = a[VALUE_DIM], 4 if a[MODE] == FLOATS else 2
    sink = load_float(a[SINKS] + 4 * head) * LOG2_E if a[SINKS] != 0 else LOWEST
    target = a[OUTPUT] + (query * a[NUM_KV_HEADS] * a[NUM_GROUPS] + head) * dim * item_bytes
    staged = _part(scratch, ROW_MIXED)
    finish(stats, mixed, sink, staged, (dim + 31) // 32 * 32, 0 if a[MODE] == FLOATS else 1)
    copy_bytes(target, staged, dim * item_bytes)


@_compiled
def _attend_shared(a: Any, scratch: int, item: int, kv_head: int) -> None:
    """One chunk for all queries of the requests that have it."""
    chunk, first, end = load_int(item + 8), load_int(item + 16), load_int(item + 24)
    low, high, count = CHUNK, 0, 0
    for member in range(first, end):
        request = load_int(a[MEMBERS] + 8 * member)
        num_queries = load_int(a[REQUESTS] + 40 * request + 8)
        own_low, own_high = _add_rows(a, scratch, (request, kv_head, count), (0, num_queries), chunk, SHARED)
        low, high = min(low, own_low), max(high, own_high)
        count += num_queries * a[NUM_GROUPS]
    if low >= high:
        return
    if load_int(_part(scratch, CURRENT_ITEM)) != item:  # the tokens are the same for every head
        _find_tokens(a, scratch, load_int(a[MEMBERS] + 8 * first), chunk, low, high)
        store_int(_part(scratch, CURRENT_ITEM), item)
    _attend_chunk(a, scratch, kv_head, count, (low, high), SHARED)


@_compiled
def _merge_query(a: Any, scratch: int, merge_item: int) -> None:
    """Merge the partial results of one query, head by head, in the order of the chunks."""
    request, query = load_int(merge_item), load_int(merge_item + 8)
    about = a[REQUESTS] + 40 * request
    num_heads = a[NUM_GROUPS] * a[NUM_KV_HEADS]
    width = (a[VALUE_DIM] + 31) // 32 * 32
    position = load_int(about + 16) + query
    slot = load_int(about + 32) + query * load_int(about + 24)
    stats, mixed = _part(scratch, FOLD_STATS), _part(scratch, FOLD_MIXED)
    for head in range(num_heads):
        store_float(stats, LOWEST)
        store_float(stats + 4, 0.0)
        for dim in range(width):
            store_float(mixed + 4 * dim, 0.0)
        for chunk in range(_first_seen(a, position) // CHUNK, position // CHUNK + 1):
            partial = (slot + chunk) * num_heads + head
            merge(stats, mixed, a[PARTIAL_STATS] + 8 * partial, a[PARTIAL_MIXED] + 4 * width * partial, width)
        _finish_row(a, scratch, stats, mixed, load_int(about) + query, head)


@_compiled
def _work(a: Any) -> None:
    """What one thread does: take the next unit of work until there is none."""
    thread = fetch_add(a[COUNTERS], 1)
    scratch = a[SCRATCH] + thread * a[SCRATCH_BYTES]
    if a[PHASE] == 1:
        while True:
            unit = fetch_add(a[COUNTERS] + 128, 1)
            if unit >= a[NUM_MERGES]:
                return
            _merge_query(a, scratch, a[MERGES] + 16 * unit)
    store_int(_part(scratch, CURRENT_ITEM), 0)
    while True:
        unit = fetch_add(a[COUNTERS] + 64, 1)
        number, kv_head = unit // a[NUM_KV_HEADS], unit % a[NUM_KV_HEADS]
        if number >= a[NUM_ITEMS]:
            return
        item = a[ITEMS] + 32 * number
        if load_int(item) == FOLD:
            store_int(_part(scratch, CURRENT_ITEM), 0)
            _fold(a, scratch, item, kv_head)
        else:
            _attend_shared(a, scratch, item, kv_head)


@functools.cache
def compile_worker() -> Any:
    """The function that every thread of a team runs, with the address of its arguments; compiled once per machine.

    numba keeps compiled code beside this file and looks at this file's date only; the digest of the other file that
    takes part is in the function so that it is compiled anew when that one changes.
    """
    digest = simd.source_digest()

    @cfunc(types.void(types.CPointer(types.int64)), cache=True, error_model="numpy")
    def worker(arguments: Any) -> None:
        if digest != 0:
            _work(carray(arguments, NUM_ARGUMENTS))

    return worker
