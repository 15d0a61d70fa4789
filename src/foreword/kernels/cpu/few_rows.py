"""Few rows times one chunk of KV, compiled by numba: keys and values are multiplied where they lie.

Packing a chunk and reading it again takes longer than multiplying it by the rows of one decoding request. Arithmetic
and its order are those of packed chunks.

Every 16 tokens prefetch an equal part of the next chunk, so that requests to memory do not queue.

On a Zen 4 processor, attention of decoding requests takes 0.6 to 0.8 of the time that it takes with packed chunks, and
steps of 16 requests are 6 to 10% faster (docs/decisions/0008-cpu-attention.md).
"""

from __future__ import annotations

from typing import Any

from foreword.kernels.cpu.layout import PAIRS, SCORE_BYTES
from foreword.kernels.cpu.row_weights import ask_for_keys, ask_for_values
from foreword.kernels.llvm.direct import DIMS, add_values, score_keys
from foreword.kernels.llvm.emit import LANES
from foreword.kernels.llvm.simd import ROWS, clear_bytes
from foreword.kernels.runtime.compiled import inlined


@inlined
def are_few(a: Any, num_rows: int) -> Any:
    """Whether to skip packing: reading a chunk twice costs as much as packing. Heads must be whole vectors of pairs.

    Codes are decoded as they are packed.
    """
    return (
        a.mode == PAIRS
        and a.stored_bytes == 2
        and num_rows <= 2 * ROWS
        and a.key_dim % DIMS == 0
        and a.value_dim % DIMS == 0
    )


@inlined
def multiply_keys_directly(
    a: Any, s: Any, kv_head: int, rows: tuple[int, int], seen: tuple[int, int], ask: int
) -> None:
    """Compute scores of some rows' queries with whole vectors of tokens.

    `seen`: the tokens that rows may see, from a panel's first, as weights and packed memory begin there.
    `ask`: the number of the next chunk's tokens to prefetch with each row, times 2 ** 16.
    """
    num_steps, key_bytes = -(-(seen[1] - seen[0]) // LANES), 2 * a.key_dim
    queries, offset = s.row_queries + rows[0] * key_bytes, kv_head * key_bytes
    for step in range(num_steps):
        first, last = _to_ask_for(ask, rows, step, num_steps)
        ask_for_keys(a, s, first, last)
        token = seen[0] + step * LANES
        keys, scores = s.key_rows + 8 * token, s.row_scores + 4 * token
        score_keys(rows[1] - rows[0], queries, key_bytes, keys, offset, key_bytes // 4, scores, SCORE_BYTES)


@inlined
def multiply_values_directly(
    a: Any, s: Any, kv_head: int, rows: tuple[int, int], seen: tuple[int, int], ask: int
) -> None:
    """Mix values by the rows' weights."""
    num_steps, value_bytes, mixed = -(-(seen[1] - seen[0]) // LANES), 2 * a.value_dim, s.row_mixed
    clear_bytes(mixed, (rows[1] - rows[0]) * 2 * value_bytes)
    for step in range(num_steps):
        first, last = _to_ask_for(ask, rows, step, num_steps)
        ask_for_values(a, s, first, last)
        token = seen[0] + step * LANES
        num_pairs = (min(LANES, seen[1] - token) + 1) // 2
        weights, values = s.row_scores + 2 * token, s.value_rows + 8 * token
        for dim in range(0, a.value_dim, DIMS):
            offset, target = kv_head * value_bytes + 2 * dim, mixed + 4 * dim
            add_values(rows[1] - rows[0], weights, SCORE_BYTES, values, offset, num_pairs, target, 2 * value_bytes)


@inlined
def _to_ask_for(ask: int, rows: tuple[int, int], step: int, num_steps: int) -> tuple[int, int]:
    """The first and last + 1 of the next chunk's tokens that step `step` of `num_steps` over these rows prefetches."""
    begin, total = ask * rows[0], ask * (rows[1] - rows[0])
    return (begin + total * step // num_steps) >> 16, (begin + total * (step + 1) // num_steps) >> 16
