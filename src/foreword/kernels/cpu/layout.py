"""What the CPU kernel's compiled parts agree on: their arguments, and a thread's scratch memory.

Knows offsets and sizes; knows nothing of how they are used.
"""

from __future__ import annotations

import numpy as np

from foreword.kernels.llvm.emit import LANES
from foreword.kernels.llvm.tiles import CONFIG_BYTES, TILE_ROWS
from foreword.kernels.runtime.compiled import record, view
from foreword.kernels.step_plan import CHUNK

PANEL = 64
"""Tokens, or dimensions of values, that lie side by side in packed memory."""
TILES, PAIRS, WIDENED, FLOATS = range(4)
"""Modes: bfloat16 multiplied in AMX tiles, in pairs of a vector, widened to float32; float32."""
MODE_NAMES = "tiles", "pairs", "widened", "floats"
IN_PAIRS = TILES, PAIRS
"""Modes whose words are pairs of bfloat16: memory lies alike, only the products differ."""
SCORE_BYTES = 4 * CHUNK + 64
"""Between rows of scores: a line more than they take, so that a column of them is spread over the first cache."""
PANEL_BYTES, WEIGHT_BYTES = 4 * PANEL + 64, 2 * CHUNK + 64
"""The same of scores of one panel, and of weights of a chunk, which only tiles need."""
MOST_ROWS = 2 * TILE_ROWS
"""Rows that are multiplied at a time, at most: two tiles'; ROWS where there are no tiles."""

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
    "item_bytes",  # of an element of queries, keys and values
    "key_words",  # of a packed key
    "value_width",  # of a row's mixture of values: its dimensions, padded
    "sinks",  # float32 per head; 0: none
    "window",  # 0: none
    "local_chunk",  # 0: none
    "tables",  # int32 [requests, table_width]
    "table_width",
    "block_size",
    "requests",  # address of an array of REQUEST
    "items",  # of ITEM
    "num_items",
    "members",  # int64: requests in the order that SHARED items speak of
    "merges",  # of MERGE
    "num_merges",
    "partial_stats",  # float32 [slots, heads, 2]: peak and sum
    "partial_mixed",  # float32 [slots, heads, padded value dim]
    "scratch",
    "scratch_bytes",  # per thread
    "counters",  # threads, units of work, merges: shared by the threads, 0 at the start
    "phase",  # 0: items; 1: merge partial results
    "arguments",  # address of this record
    "attend_chunk",  # address of `chunk.py`'s function
    scale=np.float32,
    softcap=np.float32,  # 0: none
)
"""The arguments: addresses, counts, and strides and sizes in bytes whose names end in `_bytes`."""

REQUEST = record("first_row", "num_queries", "first_position", "num_chunks", "first_slot")
"""What `StepPlan.requests` has of each request."""
ITEM = record("kind", "number", "first", "last")
"""An item of work. FOLD: request, first query, number of queries. SHARED: chunk, first member, last member + 1.
LEADING: number of chunks, first member, last member + 1."""
MERGE = record("request", "query", "num_leading")
"""A query whose partial results are merged, and how many leading chunks are merged already."""
ROW = record("low", "high", "target")
"""A row of the row table: it sees the chunk's tokens from `low` to before `high`; `target` is its result's place."""
STATS = record(peak=np.float32, total=np.float32)
"""Of one row: the peak of its scores, in powers of two, and the sum of its weights."""
FOUND = record("request", "chunk", "low", "high")
"""Whose tokens lie at `key_rows` and `value_rows`."""
ROW_BYTES, STATS_BYTES = ROW.itemsize, STATS.itemsize

SCRATCH = record(
    "address",  # of this record, which a thread's memory begins with
    "next_length",  # number of tokens at `next_key_rows`
    "key_rows",  # addresses of the keys of a chunk's tokens, and so on
    "value_rows",
    "staged_rows",
    "next_key_rows",  # of the next chunk, to be prefetched
    "next_value_rows",
    "zeros",  # a token that nobody sees
    "stage",
    "packed_keys",
    "packed_values",
    "row_queries",
    "staged_query",
    "row_scores",
    "row_stats",
    "row_mixed",
    "row_table",  # ROW
    "fold_stats",
    "fold_mixed",
    "found",  # FOUND
    "tile_config",
    "row_factors",
    "row_weights",
    "row_totals",
)
"""A thread's scratch memory: the addresses of its parts."""

request_at, item_at, merge_at, row_at, stats_at, found_at, scratch_at = map(
    view, (REQUEST, ITEM, MERGE, ROW, STATS, FOUND, SCRATCH)
)


def padded(size: int, multiple: int) -> int:
    """`size` rounded up."""
    return -(-size // multiple) * multiple


def key_words(mode: int, key_dim: int) -> int:
    """Words of a packed key."""
    return padded(key_dim, 32) // 2 if mode in IN_PAIRS else padded(key_dim, 16)


def scratch_offsets(mode: int, key_dim: int, value_dim: int, token_bytes: int, most_rows: int) -> dict[str, int]:
    """Where the parts of a thread's scratch memory lie in it, by their names in SCRATCH, and its `end`; in bytes.

    `token_bytes`: the larger of a token's keys and values over all heads; `most_rows`: of an item.
    """
    words, values = key_words(mode, key_dim), padded(value_dim, 32)
    sizes = {
        "address": SCRATCH.itemsize,
        "key_rows": 8 * CHUNK,
        "value_rows": 8 * CHUNK,
        "staged_rows": 8 * CHUNK,
        "next_key_rows": 8 * CHUNK,
        "next_value_rows": 8 * CHUNK,
        "zeros": max(token_bytes, SCORE_BYTES) + 256,
        "stage": CHUNK * 4 * (padded(max(key_dim, value_dim), 32) + 32),
        "packed_keys": CHUNK * 4 * words,
        "packed_values": CHUNK * 4 * values,
        "row_queries": most_rows * 4 * words,
        "staged_query": 4 * (words + 32),
        "row_scores": MOST_ROWS * SCORE_BYTES,
        "row_stats": MOST_ROWS * STATS_BYTES,
        "row_mixed": MOST_ROWS * 4 * values,
        "row_table": most_rows * ROW_BYTES,
        "fold_stats": most_rows * STATS_BYTES + 64,  # eight rows at a time
        "fold_mixed": most_rows * 4 * values,
        "found": FOUND.itemsize,
        "tile_config": CONFIG_BYTES,
        "row_factors": MOST_ROWS * 8,
        "row_weights": MOST_ROWS * WEIGHT_BYTES,
        "row_totals": MOST_ROWS * 4 * LANES,
    }
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += padded(size, 64)
    return {**offsets, "end": end}
