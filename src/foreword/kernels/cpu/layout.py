"""What the CPU kernel's compiled parts agree on: their arguments, and a thread's scratch memory.

Knows offsets and sizes; knows nothing of how they are used.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from numba import njit

from foreword.kernels.llvm.simd import load_int
from foreword.kernels.llvm.tiles import CONFIG_BYTES, TILE_ROWS, has_tiles
from foreword.kernels.step_plan import CHUNK

PANEL = 64
"""Tokens, or dimensions of values, that lie side by side in packed memory."""
TILES, PAIRS, WIDENED, FLOATS = range(4)
"""Modes: bfloat16 multiplied in AMX tiles, in pairs of a vector, widened to float32; float32."""
IN_PAIRS = TILES, PAIRS
"""Modes whose words are pairs of bfloat16: memory lies alike, only the products differ."""
SCORE_BYTES = 4 * CHUNK + 64
"""Between rows of scores: a line more than they take, so that a column of them is spread over the first cache."""
PANEL_BYTES, WEIGHT_BYTES = 4 * PANEL + 64, 2 * CHUNK + 64
"""The same of scores of one panel, and of weights of a chunk, which only tiles need."""
MOST_ROWS = 2 * TILE_ROWS
"""Rows that are multiplied at a time, at most: two tiles'; ROWS where there are no tiles."""

# The arguments: int64 each. Strides and sizes ending in _BYTES; the others are counts or addresses.
(
    QUERY,
    QUERY_TOKEN_BYTES,
    QUERY_HEAD_BYTES,
    OUTPUT,
    KEYS,
    VALUES,
    MODE,
    NUM_GROUPS,
    NUM_KV_HEADS,
    KEY_DIM,
    VALUE_DIM,
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
    MERGES,  # [queries of members, 3]: request, query, leading chunks that are merged already
    NUM_MERGES,
    PARTIAL_STATS,  # float32 [slots, heads, 2]: peak and sum
    PARTIAL_MIXED,  # float32 [slots, heads, padded value dim]
    SCRATCH,
    SCRATCH_BYTES,  # per thread
    COUNTERS,  # threads, units of work, merges: shared by the threads, 0 at the start
    FLOAT_OPTIONS,  # float32: scale, soft-cap (0: none)
    PHASE,  # 0: items; 1: merge partial results
    SELF,  # address of the arguments
    ATTEND_CHUNK,  # address of `cpu_chunk.py`'s function
    NUM_ARGUMENTS,
) = range(33)

# Offsets in a thread's scratch memory, filled in by `scratch_layout`: the first six are constant.
KEY_ROWS = 0
VALUE_ROWS = KEY_ROWS + 8 * CHUNK
STAGED_ROWS = VALUE_ROWS + 8 * CHUNK
NEXT_KEY_ROWS = STAGED_ROWS + 8 * CHUNK  # of the next chunk, to be prefetched
NEXT_VALUE_ROWS = NEXT_KEY_ROWS + 8 * CHUNK
NEXT_LENGTH = NEXT_VALUE_ROWS + 8 * CHUNK  # how many tokens those are
LAYOUT = NEXT_LENGTH + 8
(ZEROS, STAGE, PACKED_KEYS, PACKED_VALUES, ROW_QUERIES, STAGED_QUERY, ROW_SCORES, ROW_STATS, ROW_MIXED) = range(9)
(ROW_TABLE, FOLD_STATS, FOLD_MIXED, FOUND, TILE_CONFIG, ROW_FACTORS) = range(9, 15)
(ROW_WEIGHTS, ROW_TOTALS, LAYOUT_SIZE) = range(15, 18)
VARIABLE = LAYOUT + 8 * LAYOUT_SIZE + 8  # kept a multiple of 64 below

compiled = njit(error_model="numpy")
inlined = njit(error_model="numpy", inline="always")
"""Heavy functions with one caller: numba would otherwise optimise them again for every function that calls them."""


def padded(size: int, multiple: int) -> int:
    """`size` rounded up."""
    return -(-size // multiple) * multiple


def key_words(mode: int, key_dim: int) -> int:
    """Words of a packed key."""
    return padded(key_dim, 32) // 2 if mode in IN_PAIRS else padded(key_dim, 16)


def scratch_layout(mode: int, key_dim: int, value_dim: int, token_bytes: int, most_rows: int) -> list[int]:
    """Offsets of the variable parts of a thread's scratch memory, and their end.

    `token_bytes`: the larger of a token's keys and values over all heads; `most_rows`: of an item.
    """
    words, values = key_words(mode, key_dim), padded(value_dim, 32)
    sizes = [
        max(token_bytes, SCORE_BYTES) + 256,  # ZEROS: a token that nobody sees
        CHUNK * 4 * (padded(max(key_dim, value_dim), 32) + 32),  # STAGE
        CHUNK * 4 * words,
        CHUNK * 4 * values,
        most_rows * 4 * words,
        4 * (words + 32),  # STAGED_QUERY
        MOST_ROWS * SCORE_BYTES,
        MOST_ROWS * 8,
        MOST_ROWS * 4 * values,
        most_rows * 24,  # ROW_TABLE: low, high, target
        most_rows * 8 + 64,  # eight rows at a time
        most_rows * 4 * values,
        32,  # FOUND: request, chunk, from and to which token lie at KEY_ROWS
        CONFIG_BYTES,
        MOST_ROWS * 8,
        MOST_ROWS * WEIGHT_BYTES,
        MOST_ROWS * 64,  # ROW_TOTALS: 16 lanes of each
    ]
    offsets, end = [], padded(VARIABLE, 64)
    for size in sizes:
        offsets.append(end)
        end += padded(size, 64)
    return [*offsets, end]


@compiled
def part(scratch: int, number: int) -> Any:
    """Address of a variable part of a thread's scratch memory."""
    return scratch + load_int(scratch + LAYOUT + 8 * number)


def source_digest() -> int:
    """A number that changes with the source of any kernel, and with whether it may use tiles.

    numba keeps compiled code beside a file and looks at that file's date only. A compiled function that mentions
    this number is compiled anew when another file that takes part in it has changed.
    """
    digest = hashlib.sha256()
    kernels = Path(__file__).parents[1]
    for path in sorted(kernels.rglob("*.py")):
        if "triton" not in path.relative_to(kernels).parts:
            digest.update(path.read_bytes())
    digest.update(bytes([has_tiles()]))
    return int.from_bytes(digest.digest()[:6], "big")
