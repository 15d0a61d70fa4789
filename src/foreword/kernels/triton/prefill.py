"""Prefill on a GPU: a program computes some rows of one request, chunk after chunk, and merges after each chunk.

The arithmetic is in `tile.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foreword.kernels.triton.plan import FOLDS, STARTS, TABLE_WIDTH, TABLES
from foreword.kernels.triton.tile import CHUNK, LOWEST, attend_step, finish, first_seen, merge, rounded

_FOLDS, _STARTS, _TABLES, _TABLE_WIDTH = (tl.constexpr(place) for place in (FOLDS, STARTS, TABLES, TABLE_WIDTH))


@triton.jit
def attend_folds(
    output,  # [tokens, heads, VALUE_DIM], contiguous
    query,  # [tokens, heads, KEY_DIM]
    keys,  # [blocks, BLOCK_SIZE, kv_heads, KEY_DIM]
    values,  # [blocks, BLOCK_SIZE, kv_heads, VALUE_DIM]
    slopes,  # float32 [heads], times log2(e)
    sinks,  # float32 [heads], times log2(e)
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
    HAS_SINKS: tl.constexpr,
    WIDEN: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_PARTS: tl.constexpr,
    ROW_TILES: tl.constexpr,
):
    """A program computes ROWS rows of a FOLD item, for one KV head and one part of the values' dimensions.

    Rows are sorted by query, and then by head.
    """
    program = tl.program_id(0)
    first_row = program % ROW_TILES * ROWS
    part = program // ROW_TILES % VALUE_PARTS
    kv_head = program // (ROW_TILES * VALUE_PARTS) % NUM_KV_HEADS
    fold = metadata + tl.load(metadata + _FOLDS) + program // (ROW_TILES * VALUE_PARTS * NUM_KV_HEADS) * 4
    request, first_query = tl.load(fold), tl.load(fold + 1)
    num_rows, position = tl.load(fold + 2) * GROUPS, tl.load(fold + 3)
    if first_row >= num_rows:
        return
    table = metadata + tl.load(metadata + _TABLES) + request * tl.load(metadata + _TABLE_WIDTH)
    first_token = tl.load(metadata + tl.load(metadata + _STARTS) + request) + first_query

    row = first_row + tl.arange(0, ROWS)
    valid = row < num_rows
    head = kv_head * GROUPS + row % GROUPS
    token = (first_token + row // GROUPS).to(tl.int64)
    row_position = position + row // GROUPS
    row_low = first_seen(row_position, WINDOW, LOCAL_CHUNK)
    row_high = tl.where(valid, row_position + 1, 0)
    slope = tl.load(slopes + head) if HAS_SLOPES else row_position
    low = first_seen(position + first_row // GROUPS, WINDOW, LOCAL_CHUNK)
    high = position + (tl.minimum(first_row + ROWS, num_rows) - 1) // GROUPS + 1

    key_dim = tl.arange(0, KEY_WIDTH)
    value_dim = part * VALUE_WIDTH + tl.arange(0, VALUE_WIDTH)
    tile = tl.load(
        query + (token * query_token_stride + head * query_head_stride)[:, None] + key_dim[None, :],
        mask=valid[:, None] & (key_dim < KEY_DIM)[None, :],
        other=0.0,
    )
    peak = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    for chunk in tl.range(low // CHUNK, (high - 1) // CHUNK + 1):
        chunk_peak = tl.full([ROWS], LOWEST, tl.float32)
        chunk_total = tl.zeros([ROWS], tl.float32)
        chunk_mixed = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
        begin = tl.maximum(chunk * CHUNK, low // TOKENS * TOKENS)
        for start in tl.range(begin, tl.minimum(chunk * CHUNK + CHUNK, high), TOKENS):
            chunk_peak, chunk_total, chunk_mixed = attend_step(
                tile,
                chunk_peak,
                chunk_total,
                chunk_mixed,
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
        peak, total, mixed = merge(peak, total, mixed, chunk_peak, chunk_total, chunk_mixed)
    sink = tl.load(sinks + head) if HAS_SINKS else peak
    result = finish(peak, total, mixed, sink, HAS_SINKS)
    tl.store(
        output + ((token * NUM_KV_HEADS * GROUPS + head) * VALUE_DIM)[:, None] + value_dim[None, :],
        rounded(result, output.dtype.element_ty, WIDEN),
        mask=valid[:, None] & (value_dim < VALUE_DIM)[None, :],
    )
