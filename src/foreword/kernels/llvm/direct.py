"""Products of few rows with keys and values where they lie, as LLVM instructions for numba.

Knows memory addresses and lanes, as `simd.py` does. Processors that multiply pairs of bfloat16 use it. It transposes
keys and interleaves values in registers, as `simd.py` packs them in memory, so an element's sum is the same chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foreword.kernels.llvm import emit, simd
from foreword.kernels.llvm.emit import LANES
from foreword.kernels.llvm.simd import ROWS

DIMS = 2 * LANES
"""Number of value dimensions that are mixed at a time; keys are whole vectors of this size."""
_COUNTS = range(1, ROWS + 1)


def _emit_keys(builder: Any, num_rows: int, arguments: Sequence[Any]) -> None:
    queries, query_bytes, keys, offset, num_words, scores, score_bytes = arguments
    addresses = [builder.add(emit.load(builder, keys, 8 * token, emit.I64), offset) for token in range(LANES)]

    def body(word: Any, *sums: Any) -> list[Any]:
        skipped, following = builder.mul(word, emit.integer(4)), list(sums)
        words = [emit.load(builder, builder.add(address, skipped), 0, emit.I32S) for address in addresses]
        for number, right in enumerate(simd.transposed(builder, words)):
            query = builder.add(queries, skipped)
            for row in range(num_rows):
                left = emit.splat(builder, emit.load(builder, query, 4 * number, emit.I32))
                following[row] = simd.multiply_add(builder, following[row], left, right, emit.HAS_BF16_DOT)
                query = builder.add(query, query_bytes)
        return following

    for total in emit.loop(builder, emit.integer(0), num_words, LANES, [emit.constant(0.0)] * num_rows, body):
        emit.store(builder, total, scores)
        scores = builder.add(scores, score_bytes)


score_keys = emit.by_rows("aiaiiai", _COUNTS, _emit_keys)
"""Scores of some rows and 16 tokens.

Arguments: the number of rows; their queries, bytes between these; the address of 16 tokens' addresses, the key's offset
from these; words of a key; the scores, bytes between rows.
"""


def _emit_values(builder: Any, num_rows: int, arguments: Sequence[Any]) -> None:
    weights, weight_bytes, values, offset, num_pairs, mixed, mixed_bytes = arguments
    rows, targets = [weights], [mixed]
    for _ in range(1, num_rows):
        rows.append(builder.add(rows[-1], weight_bytes))
        targets.append(builder.add(targets[-1], mixed_bytes))

    def body(pair: Any, *sums: Any) -> list[Any]:
        place, following = builder.add(values, builder.mul(pair, emit.integer(16))), []
        tokens = [builder.add(emit.load(builder, place, 8 * token, emit.I64), offset) for token in (0, 1)]
        vectors = simd.interleaved(builder, *tokens)
        for row, address in enumerate(rows):
            left = emit.splat(
                builder, emit.load(builder, builder.add(address, builder.mul(pair, emit.integer(4))), 0, emit.I32)
            )
            for total, right in zip(sums[2 * row : 2 * row + 2], vectors, strict=True):
                following.append(simd.multiply_add(builder, total, left, right, emit.HAS_BF16_DOT))
        return following

    sums = [emit.load(builder, target, 64 * half) for target in targets for half in (0, 1)]
    for number, total in enumerate(emit.loop(builder, emit.integer(0), num_pairs, 1, sums, body)):
        emit.store(builder, total, targets[number // 2], 64 * (number % 2))


add_values = emit.by_rows("aiaiiai", _COUNTS, _emit_values)
"""Add the values of some pairs of tokens to 32 dimensions of some rows' mixtures.

Arguments: the number of rows; their weights, bytes between rows; the address of the tokens' addresses, the dimensions'
offset from these; the number of pairs; the mixtures, bytes between rows.
"""
