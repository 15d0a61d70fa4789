"""Paged attention on the CPU, compiled by numba: queries, KV blocks and block tables as memory addresses.

`step_plan.py` finds which requests share chunks. The kernel keeps the three rules of `reference.py` with arithmetic of
its own:

1. KV is cut at absolute positions into chunks of 256 tokens, whatever the block size. A row (one query of one head)
   has one partial result per chunk that it sees, merged in ascending order.
2. An element of a product is one chain of fused multiply-adds. A row's weights are summed in 16 lanes, which are
   then joined as a tree. `simd.py` spells both out, so no number of rows, threads or tokens changes them.
3. Tokens that a row must not see have weight 0. Values that no row of an item sees are read as zeros. Both add nothing.

One thread computes an item of work for one KV head:

    fold      up to 64 queries of one request: goes from chunk to chunk and merges at once
              (prefill; decoding, where the request shares nothing and no thread would wait)
    chunk     one chunk for the few queries of one request, or of many that share it:
              leaves partial results, which a second pass merges row by row                  (decoding)
    leading   the first chunks of requests that share them: merges at once, then leaves partial results

Keys are packed so that 16 tokens fill a vector, values so that 16 dimensions fill a vector; queries and weights are
broadcast. If the processor multiplies pairs of bfloat16, weights are first rounded to bfloat16, and the rounded weights
are summed. In the mode PAIRS, if there are only a few rows, keys and values are not packed: they are multiplied where
they lie in memory (`chunk.py`).
"""

from __future__ import annotations

from typing import Any

from numba import carray

from foreword.kernels.cpu.layout import (
    ATTENTION,
    FLOATS,
    STATS_BYTES,
    WIDENED,
    found_at,
    item_at,
    merge_at,
    request_at,
    row_at,
    scratch_at,
)
from foreword.kernels.cpu.row_weights import see_nothing
from foreword.kernels.cpu.tokens import find_tokens, first_seen, look_ahead, seen_to
from foreword.kernels.llvm.emit import LOG2_E, LOWEST
from foreword.kernels.llvm.simd import call_chunk, clear_bytes, copy_bytes, fetch_add, load_float, load_int, widen
from foreword.kernels.llvm.softmax import finish, merge
from foreword.kernels.runtime.compiled import compiled, worker
from foreword.kernels.step_plan import CHUNK, FOLD, SHARED


@compiled
def member_of(a: Any, number: int) -> Any:
    """The request that is member `number`."""
    return load_int(a.members + 8 * number)


@compiled
def _take_unit(a: Any, s: Any) -> Any:
    """Take the next unit of work, and find the addresses in its first chunk, so that it can be prefetched.

    This is called before the last chunk of the present unit is computed.
    """
    unit = fetch_add(a.counters + 64, 1)
    number, kv_head = unit // a.num_kv_heads, unit % a.num_kv_heads
    s.next_length = 0
    if number >= a.num_items:
        return unit
    item = item_at(a.items, number)
    if item.kind == FOLD:
        position = request_at(a.requests, item.number).first_position + item.first
        look_ahead(a, s, item.number, first_seen(a, position) // CHUNK, kv_head)
    else:
        look_ahead(a, s, member_of(a, item.first), item.number if item.kind == SHARED else 0, kv_head)
    return unit


# ------------------------------------------------------------------------------------------- rows


@compiled
def _take_queries(a: Any, s: Any, place: tuple[int, int, int], queries: tuple[int, int]) -> None:
    """Write some queries of one request as words, padded with zeros.

    `place`: request, KV head, and the number of rows written before.
    """
    request, kv_head, row = place
    mode, dim = a.mode, a.key_dim
    num_bytes, num_words = dim * a.item_bytes, a.key_words
    zeros, staged = s.zeros, s.staged_query
    first_row = request_at(a.requests, request).first_row
    for query in range(queries[0], queries[1]):
        for head in range(kv_head * a.num_groups, (kv_head + 1) * a.num_groups):
            source = a.query + (first_row + query) * a.query_token_bytes + head * a.query_head_bytes
            target = s.row_queries + row * num_words * 4
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
    a: Any, s: Any, place: tuple[int, int, int], queries: tuple[int, int], chunk: int, kind: int
) -> tuple[int, int]:
    """Append the rows of some queries of one request, and return which tokens of the chunk they see.

    `place`: request, KV head, and the number of rows appended before.
    """
    request, kv_head, count = place
    num_groups, num_heads = a.num_groups, a.num_groups * a.num_kv_heads
    entry = request_at(a.requests, request)
    low, high = CHUNK, 0
    for query in range(queries[0], queries[1]):
        position = entry.first_position + query
        row_low = max(0, first_seen(a, position) - chunk * CHUNK)
        row_high = min(CHUNK, seen_to(a, entry, query) - chunk * CHUNK)
        if row_low < row_high:
            low, high = min(low, row_low), max(high, row_high)
        for group in range(num_groups):
            head = kv_head * num_groups + group
            slot = (entry.first_slot + query * entry.num_chunks + chunk) * num_heads + head
            row = row_at(s.row_table, count)
            row.low, row.high, row.target = row_low, row_high, count if kind == FOLD else slot
            count += 1
    return low, high


# ------------------------------------------------------------------------------------------- items of work


@compiled
def _begin_rows(a: Any, s: Any, num_rows: int) -> None:
    """Clear the results of `num_rows` rows, which have attended to no token yet."""
    width = a.value_width
    stats, mixed = s.fold_stats, s.fold_mixed
    for row in range(num_rows):
        see_nothing(stats, row)
    clear_bytes(mixed, 4 * num_rows * width)


@compiled
def _fold(a: Any, s: Any, item: Any, kv_head: int) -> Any:
    """Compute some queries of one request, from the first chunk to the last. Returns the next unit of work."""
    request, first, count = item.number, item.first, item.last
    num_groups = a.num_groups
    num_rows = count * num_groups
    width = a.value_width
    stats, mixed = s.fold_stats, s.fold_mixed
    _begin_rows(a, s, num_rows)
    first_row = request_at(a.requests, request).first_row
    position = request_at(a.requests, request).first_position + first
    _take_queries(a, s, (request, kv_head, 0), (first, first + count))
    last_chunk, following = (seen_to(a, request_at(a.requests, request), first + count - 1) - 1) // CHUNK, 0
    for chunk in range(first_seen(a, position) // CHUNK, last_chunk + 1):
        low, high = _add_rows(a, s, (request, kv_head, 0), (first, first + count), chunk, FOLD)
        find_tokens(a, s, request, chunk, low, high)
        if chunk < last_chunk:
            look_ahead(a, s, request, chunk + 1, kv_head)
        else:
            following = _take_unit(a, s)
        call_chunk(a.attend_chunk, a.arguments, s.address, kv_head, num_rows, low, high, FOLD)
    for row in range(num_rows):
        query, head = first_row + first + row // num_groups, kv_head * num_groups + row % num_groups
        _finish_row(a, s, stats + STATS_BYTES * row, mixed + 4 * width * row, query, head)
    return following


@compiled
def _finish_row(a: Any, s: Any, stats: int, mixed: int, query: int, head: int) -> None:
    """Write one row's result."""
    dim, item_bytes = a.value_dim, a.item_bytes
    sink = load_float(a.sinks + 4 * head) * LOG2_E if a.sinks != 0 else LOWEST
    target = a.output + (query * a.num_kv_heads * a.num_groups + head) * dim * item_bytes
    staged = s.row_mixed
    finish(stats, mixed, sink, staged, a.value_width, 0 if a.mode == FLOATS else 1)
    copy_bytes(target, staged, dim * item_bytes)


@compiled
def _take_members(a: Any, s: Any, members: tuple[int, int], kv_head: int) -> Any:
    """Write all queries of some members; returns their number of rows."""
    count = 0
    for member in range(members[0], members[1]):
        request = member_of(a, member)
        num_queries = request_at(a.requests, request).num_queries
        _take_queries(a, s, (request, kv_head, count), (0, num_queries))
        count += num_queries * a.num_groups
    return count


@compiled
def _add_members(a: Any, s: Any, members: tuple[int, int], kv_head: int, chunk: int, kind: int) -> tuple[int, int]:
    """Append the rows of all queries of some members, and return which tokens of the chunk they see."""
    low, high, count = CHUNK, 0, 0
    for member in range(members[0], members[1]):
        request = member_of(a, member)
        num_queries = request_at(a.requests, request).num_queries
        own_low, own_high = _add_rows(a, s, (request, kv_head, count), (0, num_queries), chunk, kind)
        low, high = min(low, own_low), max(high, own_high)
        count += num_queries * a.num_groups
    return low, high


@compiled
def _attend_shared(a: Any, s: Any, item: Any, kv_head: int) -> Any:
    """Attend to one chunk for all queries of the requests that share the chunk. Returns the next unit of work."""
    chunk, first, end = item.number, item.first, item.last
    low, high = _add_members(a, s, (first, end), kv_head, chunk, SHARED)
    following = _take_unit(a, s)
    if low >= high:
        return following
    count = _take_members(a, s, (first, end), kv_head)
    find_tokens(a, s, member_of(a, first), chunk, low, high)
    call_chunk(a.attend_chunk, a.arguments, s.address, kv_head, count, low, high, SHARED)
    return following


@compiled
def _attend_leading(a: Any, s: Any, item: Any, kv_head: int) -> Any:
    """Attend to the first chunks, which some requests share, for all their queries. Returns the next unit of work.

    The merged result is stored in the slot of chunk 0.
    """
    num_chunks, members = item.number, (item.first, item.last)
    request = member_of(a, members[0])
    count = _take_members(a, s, members, kv_head)
    _begin_rows(a, s, count)
    following = 0
    for chunk in range(num_chunks):
        if chunk + 1 < num_chunks:
            look_ahead(a, s, request, chunk + 1, kv_head)
        else:
            following = _take_unit(a, s)
        low, high = _add_members(a, s, members, kv_head, chunk, FOLD)
        if low < high:
            find_tokens(a, s, request, chunk, low, high)
            call_chunk(a.attend_chunk, a.arguments, s.address, kv_head, count, low, high, FOLD)
    _add_members(a, s, members, kv_head, 0, SHARED)
    width = a.value_width
    for row in range(count):
        slot = row_at(s.row_table, row).target
        copy_bytes(a.partial_stats + STATS_BYTES * slot, s.fold_stats + STATS_BYTES * row, STATS_BYTES)
        copy_bytes(a.partial_mixed + 4 * width * slot, s.fold_mixed + 4 * width * row, 4 * width)
    return following


@compiled
def _merge_query(a: Any, s: Any, item: Any) -> None:
    """Merge the partial results of one query, head by head, in the order of the chunks."""
    request, query, num_leading = item.request, item.query, item.num_leading
    entry = request_at(a.requests, request)
    num_heads = a.num_groups * a.num_kv_heads
    width = a.value_width
    position = entry.first_position + query
    slot = entry.first_slot + query * entry.num_chunks
    first_chunk = max(num_leading, first_seen(a, position) // CHUNK)
    stats, mixed = s.fold_stats, s.fold_mixed
    for head in range(num_heads):
        if num_leading > 0:
            partial = slot * num_heads + head
            copy_bytes(stats, a.partial_stats + STATS_BYTES * partial, STATS_BYTES)
            copy_bytes(mixed, a.partial_mixed + 4 * width * partial, 4 * width)
        else:
            _begin_rows(a, s, 1)
        for chunk in range(first_chunk, (seen_to(a, entry, query) - 1) // CHUNK + 1):
            partial = (slot + chunk) * num_heads + head
            merge(stats, mixed, a.partial_stats + STATS_BYTES * partial, a.partial_mixed + 4 * width * partial, width)
        _finish_row(a, s, stats, mixed, entry.first_row + query, head)


@compiled
def _work(a: Any) -> None:
    """Take units of work until no unit is left; each thread runs this."""
    thread = fetch_add(a.counters, 1)
    s = scratch_at(a.scratch + thread * a.scratch_bytes, 0)
    if a.phase == 1:
        while True:
            unit = fetch_add(a.counters + 128, 1)
            if unit >= a.num_merges:
                return
            _merge_query(a, s, merge_at(a.merges, unit))
    found_at(s.found, 0).request = -1  # the addresses there are another layer's
    unit = _take_unit(a, s)
    while unit // a.num_kv_heads < a.num_items:
        item, kv_head = item_at(a.items, unit // a.num_kv_heads), unit % a.num_kv_heads
        if item.kind == SHARED:
            unit = _attend_shared(a, s, item, kv_head)
        elif item.kind == FOLD:
            unit = _fold(a, s, item, kv_head)
        else:
            unit = _attend_leading(a, s, item, kv_head)


@worker(ATTENTION)
def attend(arguments: Any) -> None:
    """Run in every thread: compute items of work, or merge their results, until none is left."""
    _work(carray(arguments, 1)[0])
