"""The CPU kernel's records: its arguments, and a thread's scratch memory."""

from __future__ import annotations

import numpy as np

from foreword.kernels.llvm.emit import LANES
from foreword.kernels.llvm.tiles import CONFIG_BYTES, TILE_ROWS
from foreword.kernels.runtime.compiled import record, view
from foreword.kernels.step_plan import CHUNK

KV_PANEL = 64
"""The number of tokens of keys, or of dimensions of values, that lie side by side in packed memory."""
TILES, PAIRS, WIDENED, FLOATS = range(4)
"""Modes: bfloat16 in AMX tiles, bfloat16 in pairs in vectors, bfloat16 widened to float32, and float32."""
MODE_NAMES = "tiles", "pairs", "widened", "floats"
IN_PAIRS = TILES, PAIRS
"""Modes whose words are pairs of bfloat16. Their packed memory is the same; only the products differ."""
SCORE_BYTES = 4 * CHUNK + 64
"""Bytes from one row of scores to the next: a cache line more than a row, to spread a column over the first cache."""
PANEL_SCORE_BYTES, WEIGHT_BYTES = 4 * KV_PANEL + 64, 2 * CHUNK + 64
"""Bytes between rows of one panel's scores, and of a chunk's weights; only tiles use them."""
MOST_TILED_ROWS = 2 * TILE_ROWS
"""The most rows that tiles multiply at a time: two tiles of rows. Without tiles, the limit is `simd.ROWS`."""

ATTENTION = record(
    "query",
    "query_token_bytes",
    "query_head_bytes",
    "output",
    "keys",
    "values",
    "mode",
    "num_groups",
    "num_kv_heads",
    "key_dim",
    "value_dim",
    "value_row",  # elements from the beginning of one value to the next
    "item_bytes",  # bytes of one element of queries and of the output
    "stored_bytes",  # bytes of one element of keys and values; 1: codes, whose scales follow in each block
    "key_words",  # words of a packed key
    "value_width",  # dimensions of a row's mixture of values, padded
    "sinks",  # address of a float32 per head; 0: no sinks
    "window",  # tokens of the sliding window; 0: no window
    "local_chunk",  # tokens of a local chunk; 0: no local chunks
    "tables",  # address of block tables, int32 [requests, table_width]
    "table_width",
    "block_size",
    "requests",  # address of an array of REQUEST
    "seen_to",  # address of int64 [rows]: the position after the last one that a row sees; 0: rows see up to themselves
    "items",  # address of an array of ITEM
    "num_items",
    "members",  # address of request numbers (int64), in the order that SHARED items refer to
    "merges",  # address of an array of MERGE
    "num_merges",
    "partial_stats",  # address of peaks and sums, float32 [slots, heads, 2]
    "partial_mixed",  # address of mixtures of values, float32 [slots, heads, value_width]
    "scratch",
    "scratch_bytes",  # bytes of scratch memory per thread
    "counters",  # address of three counters that threads share, 0 at the start: threads, units of work, merges
    "phase",  # 0: compute items; 1: merge partial results
    "arguments",  # address of this record
    "attend_chunk",  # address of the machine code of `chunk.py`
    scale=np.float32,
    softcap=np.float32,  # 0: no cap
)
"""The arguments of attention: addresses, counts, strides and sizes. Names that end in `_bytes` count bytes."""

REQUEST = record("first_row", "num_queries", "first_position", "num_chunks", "first_slot")
"""One request of `StepPlan.requests`."""
ITEM = record("kind", "number", "first", "last")
"""An item of work. FOLD: request, first query, number of queries. SHARED: chunk, first member, last member + 1.
LEADING: number of chunks, first member, last member + 1."""
MERGE = record("request", "query", "num_leading")
"""A query whose partial results are to be merged, and the number of its leading chunks that are merged already."""
ROW = record("low", "high", "target")
"""A row of the row table. The row sees the chunk's tokens low <= t < high; its result is stored at index `target`."""
STATS = record(peak=np.float32, total=np.float32)
"""The largest of one row's scores, as an exponent of 2, and the sum of the row's weights."""
FOUND = record("request", "chunk", "low", "high")
"""The tokens whose addresses lie at `key_rows` and `value_rows`, and at `key_scales` and `value_scales`."""
ROW_BYTES, STATS_BYTES = ROW.itemsize, STATS.itemsize


def padded(size: int, multiple: int) -> int:
    """`size`, rounded up to a multiple."""
    return -(-size // multiple) * multiple


def key_words(mode: int, key_dim: int) -> int:
    """The number of words of a packed key."""
    return padded(key_dim, 32) // 2 if mode in IN_PAIRS else padded(key_dim, 16)


def _part_bytes(mode: int, key_dim: int, value_dim: int, token_bytes: int, most_rows: int) -> dict[str, int]:
    """Name of a part of a thread's scratch memory -> the part's bytes; see `scratch_offsets`."""
    words, width, addresses = key_words(mode, key_dim), padded(value_dim, 32), 8 * CHUNK
    return {
        "key_rows": addresses,  # the keys of a chunk's tokens
        "value_rows": addresses,  # the values of a chunk's tokens
        "key_scales": addresses,  # the scales of these keys' first heads, if keys and values are codes
        "value_scales": addresses,
        "staged_rows": addresses,  # copies of keys or values in `stage`
        "next_key_rows": addresses,  # the keys of the next chunk's tokens, for prefetching
        "next_value_rows": addresses,
        "zeros": max(token_bytes, SCORE_BYTES) + 256,  # stands in for tokens that no row sees
        "stage": CHUNK * 4 * (padded(max(key_dim, value_dim), 32) + 32),
        "packed_keys": CHUNK * 4 * words,
        "packed_values": CHUNK * 4 * width,
        "row_queries": most_rows * 4 * words,
        "staged_query": 4 * (words + 32),
        "row_scores": MOST_TILED_ROWS * SCORE_BYTES,
        "row_stats": MOST_TILED_ROWS * STATS_BYTES,
        "row_mixed": MOST_TILED_ROWS * 4 * width,
        "row_table": most_rows * ROW_BYTES,  # an array of ROW
        "fold_stats": most_rows * STATS_BYTES + 64,  # results so far, read eight rows at a time
        "fold_mixed": most_rows * 4 * width,
        "found": FOUND.itemsize,
        "tile_config": CONFIG_BYTES,
        "row_factors": MOST_TILED_ROWS * 8,
        "row_weights": MOST_TILED_ROWS * WEIGHT_BYTES,
        "row_totals": MOST_TILED_ROWS * 4 * LANES,
    }


SCRATCH = record("address", "next_length", *_part_bytes(FLOATS, 0, 0, 0, 0))
"""A thread's scratch memory begins with this record: its own address, the number of tokens at `next_key_rows`, and the
addresses of all parts."""

request_at, item_at, merge_at, row_at, stats_at, found_at, scratch_at = map(
    view, (REQUEST, ITEM, MERGE, ROW, STATS, FOUND, SCRATCH)
)


def scratch_offsets(mode: int, key_dim: int, value_dim: int, token_bytes: int, most_rows: int) -> dict[str, int]:
    """The parts of a thread's scratch memory -> the byte at which each part begins, and the `end`.

    `token_bytes`: bytes of a token's keys or values over all heads, whichever are more. `most_rows`: the most rows of
    an item.
    """
    offsets, end = {"address": 0}, padded(SCRATCH.itemsize, 64)
    for name, num_bytes in _part_bytes(mode, key_dim, value_dim, token_bytes, most_rows).items():
        offsets[name] = end
        end += padded(num_bytes, 64)
    return {**offsets, "end": end}
