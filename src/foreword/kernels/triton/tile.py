"""The arithmetic of the Triton kernels on a tile of rows; a row is one query of one head.

Prefill and decoding call the same functions, with tiles whose warps hold 16 rows each in the same layout, so a row's
bits do not depend on which of the two computed it:

1. KV is cut at absolute positions into chunks of 256 tokens, and chunks into steps of TOKENS tokens. A row has one
   partial result per chunk that it sees (peak, total, mixed: ChunkAttention's formulas, base 2). Partial results are
   merged in ascending order of chunks.
2. Sums over tokens and dimensions are matrix products and row sums of one shape each. Multiply-adds are spelt out, and
   kernels are launched with `LAUNCH`, so that no other multiplication and addition are fused.
3. A step that a row does not see multiplies its results by exactly 1 and adds exactly 0. Values that no row of a tile
   sees are read as zeros, because 0 * NaN is not 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foreword.kernels.step_plan import CHUNK as CHUNK_TOKENS

LOG2_E = 1.4426950408889634
CHUNK = tl.constexpr(CHUNK_TOKENS)
LOWEST = tl.constexpr(-3.0e38)
"""The peak of a row that sees nothing. It is finite, so that the difference of two such peaks is 0."""
LAUNCH = {"enable_fp_fusion": False}
"""The options of all launches, in addition to warps and stages."""


@triton.jit
def first_seen(position, WINDOW: tl.constexpr, LOCAL_CHUNK: tl.constexpr):
    """The first position that a query at `position` sees."""
    if WINDOW > 0:
        return tl.maximum(position - WINDOW + 1, 0)
    elif LOCAL_CHUNK > 0:
        return tl.maximum(position, 0) // LOCAL_CHUNK * LOCAL_CHUNK
    else:
        return position * 0


@triton.jit
def product(left, right, total, WIDEN: tl.constexpr):
    """total + left x right, float32. WIDEN: the interpreter keeps bfloat16 as integers and cannot multiply them."""
    if WIDEN:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="ieee")
    else:
        return tl.dot(left, right, total, input_precision="ieee")


@triton.jit
def rounded(numbers, dtype: tl.constexpr, WIDEN: tl.constexpr):
    """float32 to `dtype`, to nearest even. The interpreter cuts bfloat16 off, so there the rounding is done before."""
    if WIDEN and dtype == tl.bfloat16:
        bits = numbers.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        numbers = bits.to(tl.float32, bitcast=True)
    return numbers.to(dtype)


@triton.jit
def capped(scores, cap):
    """cap * tanh(scores), with tanh |x| = (1 - e) / (1 + e), e = exp(-2 |x|)."""
    decay = tl.exp2(tl.abs(scores) * (-2.0 * 1.4426950408889634))
    size = cap * ((1.0 - decay) / (1.0 + decay))
    return tl.where(scores < 0, -size, size)


@triton.jit
def modified(products, factor, cap, slope, distance, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr):
    """Scores [ROWS, TOKENS], as exponents of 2. Cap and bias are those of `AttentionOptions.modify`.

    `slope` [ROWS]; `distance` [ROWS, TOKENS]: positions of keys minus positions of queries.
    """
    scores = products * factor
    if HAS_CAP:
        scores = capped(scores, cap)
    if HAS_SLOPES:
        scores = tl.fma(tl.broadcast_to(slope[:, None], scores.shape), distance.to(tl.float32), scores)
    return scores


@triton.jit
def attend_step(
    query,  # [ROWS, KEY_WIDTH]
    peak,  # [ROWS]
    total,  # [ROWS]
    mixed,  # [ROWS, VALUE_WIDTH]
    keys,  # pointers [KEY_WIDTH]: dimensions of a KV head in slot 0
    values,  # pointers [VALUE_WIDTH]
    key_dims,  # [KEY_WIDTH]: whether the head has this dimension
    value_dims,  # [VALUE_WIDTH]
    key_strides,  # from block to block, from token to token
    value_strides,
    table,  # pointer to the request's block ids
    start,  # position of the first token
    seen,  # (first, last + 1) of the positions that some row sees
    row_low,  # [ROWS]: the first position that a row sees
    row_high,  # [ROWS]: the row's position + 1, or 0
    factor,
    cap,
    slope,  # [ROWS]
    TOKENS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_LOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Attend to TOKENS tokens of KV; return the tile's peak, total and mixed with these tokens."""
    token = start + tl.arange(0, TOKENS)
    read = (token >= seen[0]) & (token < seen[1])
    block = tl.load(table + token // BLOCK_SIZE, mask=read, other=0).to(tl.int64)
    inside = token % BLOCK_SIZE
    key = tl.load(
        keys[None, :] + (block * key_strides[0] + inside * key_strides[1])[:, None],
        mask=read[:, None] & key_dims[None, :],
        other=0.0,
    )
    value = tl.load(
        values[None, :] + (block * value_strides[0] + inside * value_strides[1])[:, None],
        mask=read[:, None] & value_dims[None, :],
        other=0.0,
    )
    nothing = tl.zeros([query.shape[0], TOKENS], tl.float32)
    products = product(query, tl.trans(key), nothing, WIDEN)
    distance = token[None, :] - (row_high - 1)[:, None]
    scores = modified(products, factor, cap, slope, distance, HAS_CAP, HAS_SLOPES)
    visible = token[None, :] < row_high[:, None]
    if HAS_LOW:
        visible = visible & (token[None, :] >= row_low[:, None])
    scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    decay = tl.exp2(peak - new_peak)
    weights = rounded(tl.exp2(scores - new_peak[:, None]), value.dtype, WIDEN)
    total = tl.fma(total, decay, tl.sum(weights.to(tl.float32), 1))
    mixed = product(weights, value, mixed * decay[:, None], WIDEN)
    return new_peak, total, mixed


@triton.jit
def merge(peak, total, mixed, chunk_peak, chunk_total, chunk_mixed):
    """Merge a chunk's partial results into the results so far (ChunkAttention's attn_reduce)."""
    new_peak = tl.maximum(peak, chunk_peak)
    decay, gain = tl.exp2(peak - new_peak), tl.exp2(chunk_peak - new_peak)
    total = tl.fma(chunk_total, gain, total * decay)
    mixed = tl.fma(chunk_mixed, tl.broadcast_to(gain[:, None], chunk_mixed.shape), mixed * decay[:, None])
    return new_peak, total, mixed


@triton.jit
def finish(peak, total, mixed, sinks, HAS_SINKS: tl.constexpr):
    """The rows' results: mixed / total, where total includes a sink's weight. A row that sees no token gets 0.

    Adding 0 makes a negative zero positive. The merge of an unseen chunk does the same, so without this addition such a
    merge would change a result.
    """
    if HAS_SINKS:
        new_peak = tl.maximum(peak, sinks)
        decay = tl.exp2(peak - new_peak)
        total = tl.fma(total, decay, tl.exp2(sinks - new_peak))
        mixed = mixed * decay[:, None]
    empty = total == 0.0
    result = mixed / tl.where(empty, 1.0, total)[:, None]
    return tl.where(empty[:, None], 0.0, result) + 0.0
