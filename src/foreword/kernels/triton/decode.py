"""Decoding on a GPU: one chunk of KV for the queries of all requests that have it, and the merge of results.

The arithmetic is in `tile.py`. A long context is split over programs by its chunks. A chunk that requests share is read
once for all these requests (ChunkAttention's first phase). Any other chunk is read for one request (ChunkAttention's
second phase).
Both phases leave partial results in the same places, and the merge takes a query's chunks in ascending order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foreword.kernels.triton.plan import ITEMS, NUM_ITEMS, QUERIES, TABLE_WIDTH, TABLES, UNUSED_POSITION
from foreword.kernels.triton.tile import CHUNK, LOWEST, attend_step, finish, first_seen, merge, rounded

_NUM_ITEMS, _ITEMS, _QUERIES = tl.constexpr(NUM_ITEMS), tl.constexpr(ITEMS), tl.constexpr(QUERIES)
_TABLES, _TABLE_WIDTH = tl.constexpr(TABLES), tl.constexpr(TABLE_WIDTH)
_UNUSED_POSITION = tl.constexpr(UNUSED_POSITION)


@triton.jit
def attend_items(
    stats,  # float32 [slots, heads, 2]: peak and total
    mixtures,  # float32 [slots, heads, VALUE_DIM]
    query,  # [tokens, heads, KEY_DIM]
    keys,  # [blocks, BLOCK_SIZE, kv_heads, KEY_DIM]
    values,  # [blocks, BLOCK_SIZE, kv_heads, VALUE_DIM]
    slopes,  # float32 [heads], times log2(e)
    metadata,
    query_token_stride,
    query_head_stride,
    key_block_stride,
    key_token_stride,
    key_head_stride,
    value_block_stride,
    value_token_stride,
    value_head_stride,
    factor,
    cap,
    NUM_KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    LOCAL_CHUNK: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    WIDEN: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """Compute partial results. Program p of P, any number, computes the units (item, KV head) p, p + P, p + 2P, ..."""
    key_dim, value_dim = tl.arange(0, KEY_WIDTH), tl.arange(0, VALUE_WIDTH)
    num_units = tl.load(metadata + _NUM_ITEMS) * NUM_KV_HEADS
    for unit in tl.range(tl.program_id(0), num_units, tl.num_programs(0)):
        kv_head = unit % NUM_KV_HEADS
        item = metadata + tl.load(metadata + _ITEMS) + unit // NUM_KV_HEADS * 4
        chunk, num_rows = tl.load(item + 1), tl.load(item + 3) * GROUPS
        entries = metadata + tl.load(metadata + _QUERIES) + tl.load(item + 2) * 4
        table = metadata + tl.load(metadata + _TABLES) + tl.load(item) * tl.load(metadata + _TABLE_WIDTH)
        for first_row in tl.range(0, num_rows, ROWS):
            row = first_row + tl.arange(0, ROWS)
            valid = row < num_rows
            head = kv_head * GROUPS + row % GROUPS
            entry = entries + row // GROUPS * 4
            token = tl.load(entry, mask=valid, other=0).to(tl.int64)
            position = tl.load(entry + 1, mask=valid, other=_UNUSED_POSITION)
            slot = (tl.load(entry + 2, mask=valid, other=0) + chunk).to(tl.int64) * NUM_KV_HEADS * GROUPS + head
            row_low = tl.where(valid, first_seen(position, WINDOW, LOCAL_CHUNK), chunk * CHUNK + CHUNK)
            row_high = position + 1
            slope = tl.load(slopes + head) if HAS_SLOPES else position
            low = tl.maximum(tl.min(row_low, 0), chunk * CHUNK)
            high = tl.minimum(tl.max(row_high, 0), chunk * CHUNK + CHUNK)

            tile = tl.load(
                query + (token * query_token_stride + head * query_head_stride)[:, None] + key_dim[None, :],
                mask=valid[:, None] & (key_dim < KEY_DIM)[None, :],
                other=0.0,
            )
            peak = tl.full([ROWS], LOWEST, tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            mixed = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
            for start in tl.range(low // TOKENS * TOKENS, high, TOKENS):
                peak, total, mixed = attend_step(
                    tile,
                    peak,
                    total,
                    mixed,
                    keys + kv_head * key_head_stride + key_dim,
                    values + kv_head * value_head_stride + value_dim,
                    key_dim < KEY_DIM,
                    value_dim < VALUE_DIM,
                    (key_block_stride, key_token_stride),
                    (value_block_stride, value_token_stride),
                    table,
                    start,
                    (low, high),
                    row_low,
                    row_high,
                    factor,
                    cap,
                    slope,
                    TOKENS,
                    BLOCK_SIZE,
                    WINDOW + LOCAL_CHUNK > 0,
                    HAS_CAP,
                    HAS_SLOPES,
                    WIDEN,
                )
            tl.store(stats + 2 * slot, peak, mask=valid)
            tl.store(stats + 2 * slot + 1, total, mask=valid)
            target = mixtures + (slot * VALUE_DIM)[:, None] + value_dim[None, :]
            tl.store(target, mixed, mask=valid[:, None] & (value_dim < VALUE_DIM)[None, :])


@triton.jit
def merge_chunks(
    output,  # [tokens, heads, VALUE_DIM], contiguous
    stats,  # float32 [slots, heads, 2]
    mixtures,  # float32 [slots, heads, VALUE_DIM]
    sinks,  # float32 [heads], times log2(e)
    metadata,
    NUM_KV_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    LOCAL_CHUNK: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    WIDEN: tl.constexpr,
    HEADS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):
    """A program computes the results of one query and KV head. A row of padding gets zeros."""
    group, value_dim = tl.arange(0, HEADS), tl.arange(0, VALUE_WIDTH)
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    head = kv_head * GROUPS + group
    valid = group < GROUPS
    entry = metadata + tl.load(metadata + _QUERIES) + tl.program_id(0) // NUM_KV_HEADS * 4
    token, position, first_slot = tl.load(entry).to(tl.int64), tl.load(entry + 1), tl.load(entry + 2).to(tl.int64)
    mask = valid[:, None] & (value_dim < VALUE_DIM)[None, :]

    peak = tl.full([HEADS], LOWEST, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    mixed = tl.zeros([HEADS, VALUE_WIDTH], tl.float32)
    first_chunk = first_seen(position, WINDOW, LOCAL_CHUNK) // CHUNK
    for chunk in tl.range(first_chunk, (position + CHUNK) // CHUNK, loop_unroll_factor=4):
        slot = (first_slot + chunk) * NUM_KV_HEADS * GROUPS + head
        chunk_peak = tl.load(stats + 2 * slot, mask=valid, other=LOWEST)
        chunk_total = tl.load(stats + 2 * slot + 1, mask=valid, other=0.0)
        chunk_mixed = tl.load(mixtures + (slot * VALUE_DIM)[:, None] + value_dim[None, :], mask=mask, other=0.0)
        peak, total, mixed = merge(peak, total, mixed, chunk_peak, chunk_total, chunk_mixed)
    sink = tl.load(sinks + head, mask=valid, other=0.0) if HAS_SINKS else peak
    result = finish(peak, total, mixed, sink, HAS_SINKS)
    target = output + ((token * NUM_KV_HEADS * GROUPS + head) * VALUE_DIM)[:, None] + value_dim[None, :]
    tl.store(target, rounded(result, output.dtype.element_ty, WIDEN), mask=mask)
