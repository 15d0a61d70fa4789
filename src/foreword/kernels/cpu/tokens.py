"""Finds the addresses of a chunk's keys and values from block tables, token by token. Compiled by numba."""

from __future__ import annotations

from typing import Any

from foreword.kernels.cpu.layout import KV_PANEL, found_at, request_at
from foreword.kernels.kv_format import SCALE_BYTES
from foreword.kernels.llvm.simd import load_int, load_int32, prefetch, store_int
from foreword.kernels.runtime.compiled import compiled
from foreword.kernels.step_plan import CHUNK


@compiled
def first_seen(a: Any, position: int) -> Any:
    """The first position that a query at `position` sees."""
    if a.window > 0:
        return max(0, position - a.window + 1)
    if a.local_chunk > 0:
        return position // a.local_chunk * a.local_chunk
    return 0


@compiled
def seen_to(a: Any, entry: Any, query: int) -> Any:
    """The position after the last position that a request's query sees."""
    if a.seen_to == 0:
        return entry.first_position + query + 1
    return load_int(a.seen_to + 8 * (entry.first_row + query))


@compiled
def find_tokens(a: Any, s: Any, request: int, chunk: int, low: int, high: int) -> None:
    """Write the addresses of a chunk's keys and values, by token. A token that no row sees gets the address of zeros.

    The addresses hold for all heads, so the next unit of work often finds its addresses here already. At the beginning
    of a layer, FOUND must have the request -1, because each layer has its own KV.
    """
    record, zeros = found_at(s.found, 0), s.zeros
    before = record.request, record.chunk, record.low, record.high
    if before == (request, chunk, low, high):
        return
    record.request, record.chunk, record.low, record.high = request, chunk, low, high
    for token in range(low // KV_PANEL * KV_PANEL, low):
        _put(s, token, zeros)
    _locate(a, (s.key_rows, s.value_rows), (request, chunk, 0), low, high)
    if a.stored_bytes == 1:
        _locate_scales(a, s, (request, chunk), low, high)
    for token in range(high, -(-high // KV_PANEL) * KV_PANEL):
        _put(s, token, zeros)


@compiled
def _put(s: Any, token: int, zeros: int) -> None:
    """No row sees this token: let its key, its value and their scales be zeros."""
    store_int(s.key_rows + 8 * token, zeros)
    store_int(s.value_rows + 8 * token, zeros)
    store_int(s.key_scales + 8 * token, zeros)
    store_int(s.value_scales + 8 * token, zeros)


@compiled
def _block_bytes(a: Any, dim: int) -> Any:
    """The bytes of a block's keys or values, with `dim` elements for each token and head."""
    return a.block_size * a.num_kv_heads * (dim * a.stored_bytes + (SCALE_BYTES if a.stored_bytes == 1 else 0))


@compiled
def _locate(a: Any, rows: tuple[int, int], place: tuple[int, int, int], low: int, high: int) -> None:
    """Write the addresses of keys and values to `rows`. `place` is (request, chunk, KV head)."""
    key_bytes, value_bytes = a.key_dim * a.stored_bytes, a.value_row * a.stored_bytes
    key_block, value_block = _block_bytes(a, a.key_dim), _block_bytes(a, a.value_row)
    (request, chunk, kv_head), (key_rows, value_rows) = place, rows
    keys, values = a.keys, a.values
    table = a.tables + 4 * request * a.table_width
    block_size, num_heads = a.block_size, a.num_kv_heads
    token = low
    while token < high:
        position = chunk * CHUNK + token
        block = position // block_size
        inside = position - block * block_size
        number, first = load_int32(table + 4 * block), inside * num_heads + kv_head
        key, value = keys + number * key_block + first * key_bytes, values + number * value_block + first * value_bytes
        for _ in range(min(block_size - inside, high - token)):
            store_int(key_rows + 8 * token, key)
            store_int(value_rows + 8 * token, value)
            token, key, value = token + 1, key + num_heads * key_bytes, value + num_heads * value_bytes


@compiled
def _locate_scales(a: Any, s: Any, place: tuple[int, int], low: int, high: int) -> None:
    """Write, for each token, where the scales of its keys and of its values begin. `place` is (request, chunk)."""
    (request, chunk), token_bytes = place, SCALE_BYTES * a.num_kv_heads
    table, block_size, token = a.tables + 4 * request * a.table_width, a.block_size, low
    key_block, value_block = _block_bytes(a, a.key_dim), _block_bytes(a, a.value_dim)
    while token < high:
        position = chunk * CHUNK + token
        block = position // block_size
        following, to_end = load_int32(table + 4 * block) + 1, block_size - (position - block * block_size)
        key, value = a.keys + following * key_block, a.values + following * value_block
        for distance in range(to_end, to_end - min(to_end, high - token), -1):
            store_int(s.key_scales + 8 * token, key - distance * token_bytes)
            store_int(s.value_scales + 8 * token, value - distance * token_bytes)
            token += 1


@compiled
def _ask_for_scales(a: Any, place: tuple[int, int], num_tokens: int) -> None:
    """Prefetch the scales of a chunk's first `num_tokens` tokens, for all heads. `place` is (request, chunk)."""
    (request, chunk), num_bytes = place, SCALE_BYTES * a.num_kv_heads * a.block_size
    table, first = a.tables + 4 * request * a.table_width, chunk * CHUNK // a.block_size
    key_block, value_block = _block_bytes(a, a.key_dim), _block_bytes(a, a.value_dim)
    for block in range(first, (chunk * CHUNK + num_tokens - 1) // a.block_size + 1):
        following = load_int32(table + 4 * block) + 1
        prefetch(a.keys + following * key_block - num_bytes, num_bytes)
        prefetch(a.values + following * value_block - num_bytes, num_bytes)


@compiled
def look_ahead(a: Any, s: Any, request: int, chunk: int, kv_head: int) -> None:
    """Find the addresses in the next chunk, so that it can be prefetched. This makes decoding 17% faster."""
    entry = request_at(a.requests, request)
    length = entry.first_position + entry.num_queries
    rows = s.next_key_rows, s.next_value_rows
    s.next_length = min(CHUNK, length - chunk * CHUNK)
    _locate(a, rows, (request, chunk, kv_head), 0, min(CHUNK, length - chunk * CHUNK))
    if a.stored_bytes == 1:
        _ask_for_scales(a, (request, chunk), min(CHUNK, length - chunk * CHUNK))
