"""Paged attention on the CPU, compiled by numba: queries, KV blocks and block tables as memory addresses.

Knows the layout of its arguments and the order of all sums; knows nothing of models, torch or who shares what
(`step_plan.py` does). Keeps the three rules of `reference.py` with arithmetic of its own:

1. KV is cut at absolute positions into chunks of 256 tokens, whatever the block size. A row (one query of one head)
   has one partial result per chunk that it sees, merged in ascending order.
2. An element of a product is one chain of fused multiply-adds, and a row's weights are summed in 16 lanes that are
   then joined as a tree. Both are spelt out in `simd.py`, so no number of rows, threads or tokens changes them.
3. What a row must not see has weight 0, and values that no row of an item sees are read as zeros: both add nothing.

An item of work is done by one thread for one KV head:

    fold      up to 64 queries of one request; walks the chunks and merges as it goes
              (prefill; decoding, where the request shares nothing and no thread would wait)
    chunk     one chunk for the few queries of one request, or of many that share it;
              leaves partial results, which a second pass merges row by row                  (decoding)
    leading   the first chunks of requests that share them, merged as it goes; then as a chunk

Keys are packed so that 16 tokens fill a vector, values so that 16 dimensions do; queries and weights are broadcast.
Where the processor multiplies pairs of bfloat16, weights are rounded to bfloat16 first (and summed rounded). In vectors
of pairs few rows multiply keys and values where they lie (`cpu_direct.py`).
"""

from __future__ import annotations

import functools
from typing import Any

from numba import carray

from foreword.kernels.cpu.layout import (
    ATTEND_CHUNK,
    COUNTERS,
    FLOATS,
    FOLD_MIXED,
    FOLD_STATS,
    FOUND,
    IN_PAIRS,
    ITEMS,
    KEY_DIM,
    MEMBERS,
    MERGES,
    MODE,
    NEXT_LENGTH,
    NUM_ARGUMENTS,
    NUM_GROUPS,
    NUM_ITEMS,
    NUM_KV_HEADS,
    NUM_MERGES,
    OUTPUT,
    PARTIAL_MIXED,
    PARTIAL_STATS,
    PHASE,
    QUERY,
    QUERY_HEAD_BYTES,
    QUERY_TOKEN_BYTES,
    REQUESTS,
    ROW_MIXED,
    ROW_QUERIES,
    ROW_TABLE,
    SCRATCH,
    SCRATCH_BYTES,
    SELF,
    SINKS,
    STAGED_QUERY,
    VALUE_DIM,
    WIDENED,
    ZEROS,
    compiled,
    part,
    source_digest,
)
from foreword.kernels.cpu.tokens import find_tokens, first_seen, look_ahead
from foreword.kernels.llvm.simd import (
    LOG2_E,
    LOWEST,
    call_chunk,
    clear_bytes,
    copy_bytes,
    fetch_add,
    load_float,
    load_int,
    store_float,
    store_int,
    widen,
)
from foreword.kernels.llvm.softmax import finish, merge
from foreword.kernels.runtime.threads import native_worker
from foreword.kernels.step_plan import CHUNK, FOLD, SHARED


@compiled
def _take_unit(a: Any, scratch: int) -> Any:
    """The next unit of work, whose first chunk is the next one; to be taken before the last chunk of another."""
    unit = fetch_add(a[COUNTERS] + 64, 1)
    number, kv_head = unit // a[NUM_KV_HEADS], unit % a[NUM_KV_HEADS]
    store_int(scratch + NEXT_LENGTH, 0)
    if number >= a[NUM_ITEMS]:
        return unit
    item = a[ITEMS] + 32 * number
    kind = load_int(item)
    if kind == FOLD:
        request = load_int(item + 8)
        position = load_int(a[REQUESTS] + 40 * request + 16) + load_int(item + 16)
        look_ahead(a, scratch, request, first_seen(a, position) // CHUNK, kv_head)
    else:
        request = load_int(a[MEMBERS] + 8 * load_int(item + 16))
        look_ahead(a, scratch, request, load_int(item + 8) if kind == SHARED else 0, kv_head)
    return unit


# ------------------------------------------------------------------------------------------- rows


@compiled
def _take_queries(a: Any, scratch: int, place: tuple[int, int, int], queries: tuple[int, int]) -> None:
    """Some queries of one request as words, padded with zeros; `place`: request, KV head, rows so far."""
    request, kv_head, row = place
    mode, dim = a[MODE], a[KEY_DIM]
    num_bytes = dim * (4 if mode == FLOATS else 2)
    num_words = (dim + 31) // 32 * 16 if mode in IN_PAIRS else (dim + 15) // 16 * 16
    zeros, staged = part(scratch, ZEROS), part(scratch, STAGED_QUERY)
    first_row = load_int(a[REQUESTS] + 40 * request)
    for query in range(queries[0], queries[1]):
        for head in range(kv_head * a[NUM_GROUPS], (kv_head + 1) * a[NUM_GROUPS]):
            source = a[QUERY] + (first_row + query) * a[QUERY_TOKEN_BYTES] + head * a[QUERY_HEAD_BYTES]
            target = part(scratch, ROW_QUERIES) + row * num_words * 4
            row += 1
            if mode == WIDENED:
                copy_bytes(staged, source, num_bytes)
                copy_bytes(staged + num_bytes, zeros, num_words * 2 - num_bytes)
                widen(target, staged, num_words)
            else:
                copy_bytes(target, source, num_bytes)
                copy_bytes(target + num_bytes, zeros, num_words * 4 - num_bytes)


@compiled
def _add_rows(
    a: Any, scratch: int, place: tuple[int, int, int], queries: tuple[int, int], chunk: int, kind: int
) -> tuple[int, int]:
    """Append the rows of some queries of one request; `place`: request, KV head, rows so far. What they see."""
    request, kv_head, count = place
    num_groups, num_heads = a[NUM_GROUPS], a[NUM_GROUPS] * a[NUM_KV_HEADS]
    about = a[REQUESTS] + 40 * request
    first_position = load_int(about + 16)
    num_chunks, first_slot = load_int(about + 24), load_int(about + 32)
    table = part(scratch, ROW_TABLE)
    low, high = CHUNK, 0
    for query in range(queries[0], queries[1]):
        position = first_position + query
        row_low = max(0, first_seen(a, position) - chunk * CHUNK)
        row_high = min(CHUNK, position + 1 - chunk * CHUNK)
        if row_low < row_high:
            low, high = min(low, row_low), max(high, row_high)
        for group in range(num_groups):
            head = kv_head * num_groups + group
            row = table + 24 * count
            store_int(row, row_low)
            store_int(row + 8, row_high)
            slot = (first_slot + query * num_chunks + chunk) * num_heads + head
            store_int(row + 16, count if kind == FOLD else slot)
            count += 1
    return low, high


# ------------------------------------------------------------------------------------------- items of work


@compiled
def _begin_rows(a: Any, scratch: int, num_rows: int) -> None:
    """Rows that have seen nothing yet."""
    width = (a[VALUE_DIM] + 31) // 32 * 32
    stats, mixed = part(scratch, FOLD_STATS), part(scratch, FOLD_MIXED)
    for row in range(num_rows):
        store_float(stats + 8 * row, LOWEST)
        store_float(stats + 8 * row + 4, 0.0)
    clear_bytes(mixed, 4 * num_rows * width)


@compiled
def _fold(a: Any, scratch: int, item: int, kv_head: int) -> Any:
    """Some queries of one request from their first chunk to their last, and their results; returns the next unit."""
    request, first, count = load_int(item + 8), load_int(item + 16), load_int(item + 24)
    num_groups = a[NUM_GROUPS]
    num_rows = count * num_groups
    width = (a[VALUE_DIM] + 31) // 32 * 32
    stats, mixed = part(scratch, FOLD_STATS), part(scratch, FOLD_MIXED)
    _begin_rows(a, scratch, num_rows)
    first_row = load_int(a[REQUESTS] + 40 * request)
    position = load_int(a[REQUESTS] + 40 * request + 16) + first
    _take_queries(a, scratch, (request, kv_head, 0), (first, first + count))
    last_chunk, following = (position + count - 1) // CHUNK, 0
    for chunk in range(first_seen(a, position) // CHUNK, last_chunk + 1):
        low, high = _add_rows(a, scratch, (request, kv_head, 0), (first, first + count), chunk, FOLD)
        find_tokens(a, scratch, request, chunk, low, high)
        if chunk < last_chunk:
            look_ahead(a, scratch, request, chunk + 1, kv_head)
        else:
            following = _take_unit(a, scratch)
        call_chunk(a[ATTEND_CHUNK], a[SELF], scratch, kv_head, num_rows, low, high, FOLD)
    for row in range(num_rows):
        query, head = first_row + first + row // num_groups, kv_head * num_groups + row % num_groups
        _finish_row(a, scratch, stats + 8 * row, mixed + 4 * width * row, query, head)
    return following


@compiled
def _finish_row(a: Any, scratch: int, stats: int, mixed: int, query: int, head: int) -> None:
    """Write one row's result."""
    dim, item_bytes = a[VALUE_DIM], 4 if a[MODE] == FLOATS else 2
    sink = load_float(a[SINKS] + 4 * head) * LOG2_E if a[SINKS] != 0 else LOWEST
    target = a[OUTPUT] + (query * a[NUM_KV_HEADS] * a[NUM_GROUPS] + head) * dim * item_bytes
    staged = part(scratch, ROW_MIXED)
    finish(stats, mixed, sink, staged, (dim + 31) // 32 * 32, 0 if a[MODE] == FLOATS else 1)
    copy_bytes(target, staged, dim * item_bytes)


@compiled
def _take_members(a: Any, scratch: int, members: tuple[int, int], kv_head: int) -> Any:
    """All queries of some members; how many rows they are."""
    count = 0
    for member in range(members[0], members[1]):
        request = load_int(a[MEMBERS] + 8 * member)
        num_queries = load_int(a[REQUESTS] + 40 * request + 8)
        _take_queries(a, scratch, (request, kv_head, count), (0, num_queries))
        count += num_queries * a[NUM_GROUPS]
    return count


@compiled
def _add_members(
    a: Any, scratch: int, members: tuple[int, int], kv_head: int, chunk: int, kind: int
) -> tuple[int, int]:
    """The rows of all queries of some members; what they see."""
    low, high, count = CHUNK, 0, 0
    for member in range(members[0], members[1]):
        request = load_int(a[MEMBERS] + 8 * member)
        num_queries = load_int(a[REQUESTS] + 40 * request + 8)
        own_low, own_high = _add_rows(a, scratch, (request, kv_head, count), (0, num_queries), chunk, kind)
        low, high = min(low, own_low), max(high, own_high)
        count += num_queries * a[NUM_GROUPS]
    return low, high


@compiled
def _attend_shared(a: Any, scratch: int, item: int, kv_head: int) -> Any:
    """One chunk for all queries of the requests that have it; returns the next unit."""
    chunk, first, end = load_int(item + 8), load_int(item + 16), load_int(item + 24)
    low, high = _add_members(a, scratch, (first, end), kv_head, chunk, SHARED)
    following = _take_unit(a, scratch)
    if low >= high:
        return following
    count = _take_members(a, scratch, (first, end), kv_head)
    find_tokens(a, scratch, load_int(a[MEMBERS] + 8 * first), chunk, low, high)
    call_chunk(a[ATTEND_CHUNK], a[SELF], scratch, kv_head, count, low, high, SHARED)
    return following


@compiled
def _attend_leading(a: Any, scratch: int, item: int, kv_head: int) -> Any:
    """The first chunks for all queries of the requests that have them; the partial result is that of chunk 0.

    Returns the next unit.
    """
    num_chunks, members = load_int(item + 8), (load_int(item + 16), load_int(item + 24))
    request = load_int(a[MEMBERS] + 8 * members[0])
    count = _take_members(a, scratch, members, kv_head)
    _begin_rows(a, scratch, count)
    following = 0
    for chunk in range(num_chunks):
        if chunk + 1 < num_chunks:
            look_ahead(a, scratch, request, chunk + 1, kv_head)
        else:
            following = _take_unit(a, scratch)
        low, high = _add_members(a, scratch, members, kv_head, chunk, FOLD)
        if low < high:
            find_tokens(a, scratch, request, chunk, low, high)
            call_chunk(a[ATTEND_CHUNK], a[SELF], scratch, kv_head, count, low, high, FOLD)
    _add_members(a, scratch, members, kv_head, 0, SHARED)
    width = (a[VALUE_DIM] + 31) // 32 * 32
    for row in range(count):
        slot = load_int(part(scratch, ROW_TABLE) + 24 * row + 16)
        copy_bytes(a[PARTIAL_STATS] + 8 * slot, part(scratch, FOLD_STATS) + 8 * row, 8)
        copy_bytes(a[PARTIAL_MIXED] + 4 * width * slot, part(scratch, FOLD_MIXED) + 4 * width * row, 4 * width)
    return following


@compiled
def _merge_query(a: Any, scratch: int, merge_item: int) -> None:
    """Merge the partial results of one query, head by head, in the order of the chunks."""
    request, query, num_leading = load_int(merge_item), load_int(merge_item + 8), load_int(merge_item + 16)
    about = a[REQUESTS] + 40 * request
    num_heads = a[NUM_GROUPS] * a[NUM_KV_HEADS]
    width = (a[VALUE_DIM] + 31) // 32 * 32
    position = load_int(about + 16) + query
    slot = load_int(about + 32) + query * load_int(about + 24)
    first_chunk = max(num_leading, first_seen(a, position) // CHUNK)
    stats, mixed = part(scratch, FOLD_STATS), part(scratch, FOLD_MIXED)
    for head in range(num_heads):
        if num_leading > 0:
            partial = slot * num_heads + head
            copy_bytes(stats, a[PARTIAL_STATS] + 8 * partial, 8)
            copy_bytes(mixed, a[PARTIAL_MIXED] + 4 * width * partial, 4 * width)
        else:
            _begin_rows(a, scratch, 1)
        for chunk in range(first_chunk, position // CHUNK + 1):
            partial = (slot + chunk) * num_heads + head
            merge(stats, mixed, a[PARTIAL_STATS] + 8 * partial, a[PARTIAL_MIXED] + 4 * width * partial, width)
        _finish_row(a, scratch, stats, mixed, load_int(about) + query, head)


@compiled
def _work(a: Any) -> None:
    """What one thread does: take the next unit of work until there is none."""
    thread = fetch_add(a[COUNTERS], 1)
    scratch = a[SCRATCH] + thread * a[SCRATCH_BYTES]
    if a[PHASE] == 1:
        while True:
            unit = fetch_add(a[COUNTERS] + 128, 1)
            if unit >= a[NUM_MERGES]:
                return
            _merge_query(a, scratch, a[MERGES] + 24 * unit)
    store_int(part(scratch, FOUND), -1)  # what lies there is another layer's
    unit = _take_unit(a, scratch)
    while unit // a[NUM_KV_HEADS] < a[NUM_ITEMS]:
        item, kv_head = a[ITEMS] + 32 * (unit // a[NUM_KV_HEADS]), unit % a[NUM_KV_HEADS]
        kind = load_int(item)
        if kind == SHARED:
            unit = _attend_shared(a, scratch, item, kv_head)
        elif kind == FOLD:
            unit = _fold(a, scratch, item, kv_head)
        else:
            unit = _attend_leading(a, scratch, item, kv_head)


@functools.cache
def compile_worker() -> Any:
    """The function that every thread of a team runs, with the address of its arguments; compiled once per machine.

    numba keeps compiled code beside this file and looks at this file's date only; the digest of the other file that
    takes part is in the function so that it is compiled anew when that one changes.
    """
    digest = source_digest()

    @native_worker
    def worker(arguments: Any) -> None:
        if digest != 0:
            _work(carray(arguments, NUM_ARGUMENTS))

    return worker
