"""Loops over vectors of 16 lanes as functions for numba: memory, packing and products of small matrices.

Matrices are multiplied as C[rows, lanes] = A[rows, k] B[k, lanes] in 32-bit words. A word is a float32 or, if the
processor multiplies pairs (AVX512_BF16), a pair of bfloat16: two neighbours along the inner dimension. An element of C
is one chain of fused multiply-adds along k, from 0 upwards, starting at 0.

If there are few rows, keys and values are multiplied where they lie, without packing. Keys are then transposed, and
values interleaved, in registers instead of packed memory. So an element is the same chain of multiply-adds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from foreword.kernels.llvm import emit
from foreword.kernels.llvm.emit import BF16_PAIRS, F32, F32S, HAS_BF16_DOT, I16, I16S, I32, I32S, I64, LANES

ROWS = 7
"""The most rows of A that one product takes: 7 rows of 4 vectors fill the processor's 32 registers."""


# ------------------------------------------------------------------------------------- memory and counters


@emit.instructions("ai")
def clear_bytes(builder: Any, target: Any, num_bytes: Any) -> None:
    """Fill memory with zeros."""
    cgutils.memset(builder, builder.inttoptr(target, ir.IntType(8).as_pointer()), num_bytes, 0)


@emit.instructions("aai")
def copy_bytes(builder: Any, target: Any, source: Any, num_bytes: Any) -> None:
    """Copy memory that does not overlap."""
    byte = ir.IntType(8).as_pointer()
    cgutils.raw_memcpy(builder, builder.inttoptr(target, byte), builder.inttoptr(source, byte), num_bytes, 1)


@emit.instructions("ai", types.intp)
def fetch_add(builder: Any, address: Any, amount: Any) -> Any:
    """Add to a 64-bit integer that threads share. Returns its earlier value."""
    return builder.atomic_rmw("add", builder.inttoptr(address, I64.as_pointer()), amount, "seq_cst")


def fetch(builder: Any, address: Any, *, near: bool = False, writing: bool = False) -> None:
    """Prefetch a line of memory at any address: into the first cache if it is needed soon (`near`), else the second."""
    byte = ir.IntType(8).as_pointer()
    how = (ir.Constant(I32, number) for number in (int(writing), 3 if near else 2, 1))
    emit.call(builder, "llvm.prefetch.p0", builder.inttoptr(address, byte), *how, returns=ir.VoidType())


@emit.instructions("ai")
def prefetch(builder: Any, address: Any, num_bytes: Any) -> None:
    """Prefetch memory that will be read soon."""

    def body(index: Any) -> None:
        fetch(builder, builder.add(address, index))

    emit.loop(builder, emit.integer(0), num_bytes, 64, [], body)


@emit.instructions("aaaiiiii")
def call_chunk(builder: Any, function: Any, *arguments: Any) -> None:
    """Call a C function at an address with two addresses and five integers."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * len(arguments))
    builder.call(builder.inttoptr(function, kind.as_pointer()), arguments)


@emit.instructions("a", types.intp)
def load_int(builder: Any, address: Any) -> Any:
    """Read a 64-bit integer."""
    return emit.load(builder, address, 0, I64)


@emit.instructions("ai")
def store_int(builder: Any, address: Any, value: Any) -> None:
    """Write a 64-bit integer."""
    emit.store(builder, value, address)


@emit.instructions("a", types.intp)
def load_int32(builder: Any, address: Any) -> Any:
    """Read a 32-bit integer."""
    return builder.sext(emit.load(builder, address, 0, I32), I64)


@emit.instructions("a", types.float32)
def load_float(builder: Any, address: Any) -> Any:
    """Read a float32."""
    return emit.load(builder, address, 0, F32)


@emit.instructions("aai")
def widen(builder: Any, target: Any, source: Any, size: Any) -> None:
    """Convert bfloat16 to float32, in whole vectors: up to 15 elements more than `size` are converted."""

    def body(index: Any) -> None:
        halves = emit.load(builder, emit.at(builder, source, index, 2), 0, I16S)
        emit.store(builder, emit.widened(builder, halves), emit.at(builder, target, index, 4))

    emit.loop(builder, emit.integer(0), size, LANES, [], body)


# ------------------------------------------------------------------------------------------------- packing


def transposed(builder: Any, words: list[Any]) -> list[Any]:
    """Return the columns of 16 vectors of 16 words: returned vector i has word i of each given vector."""
    words = list(words)
    for distance in (8, 4, 2, 1):
        low = [lane if not lane & distance else LANES + lane - distance for lane in range(LANES)]
        high = [lane + distance if not lane & distance else LANES + lane for lane in range(LANES)]
        for first in (number for number in range(LANES) if not number & distance):
            left, right = words[first], words[first + distance]
            words[first] = builder.shuffle_vector(left, right, ir.Constant(I32S, low))
            words[first + distance] = builder.shuffle_vector(left, right, ir.Constant(I32S, high))
    return words


def _emit_transpose(builder: Any, words: list[Any], target: Any, stride_bytes: Any) -> None:
    """Write the columns of 16 vectors of 16 words: column i goes to target + i * stride."""
    for word in transposed(builder, words):
        emit.store(builder, word, target)
        target = builder.add(target, stride_bytes)


@emit.instructions("aiai")
def transpose_words(builder: Any, rows: Any, offset_bytes: Any, target: Any, stride_bytes: Any) -> None:
    """Read 16 words of each of 16 rows, and write the columns; `rows` points to the rows' addresses."""
    addresses = [emit.load(builder, rows, 8 * row, I64) for row in range(LANES)]
    words = [emit.load(builder, builder.add(address, offset_bytes), 0, I32S) for address in addresses]
    _emit_transpose(builder, words, target, stride_bytes)


@emit.instructions("aiai")
def transpose_widened(builder: Any, rows: Any, offset_bytes: Any, target: Any, stride_bytes: Any) -> None:
    """Read 16 bfloat16 of each of 16 rows, and write the columns as float32."""
    addresses = [emit.load(builder, rows, 8 * row, I64) for row in range(LANES)]
    halves = [emit.load(builder, builder.add(address, offset_bytes), 0, I16S) for address in addresses]
    words = [builder.bitcast(emit.widened(builder, half), I32S) for half in halves]
    _emit_transpose(builder, words, target, stride_bytes)


def _transpose_codes(of_pairs: bool) -> Any:
    @emit.instructions("aiaiai")
    def transpose(
        builder: Any, rows: Any, offset_bytes: Any, scales: Any, scale_offset: Any, target: Any, stride_bytes: Any
    ) -> None:
        """Decode 16 words of each of 16 rows of codes, and write the columns: column i goes to target + i * stride.

        A word is a float32, or a pair of bfloat16.

        `rows` points to the addresses of the rows, `scales` to the addresses of the rows' scales.
        """
        words = []
        for row in range(LANES):
            address = builder.add(emit.load(builder, rows, 8 * row, I64), offset_bytes)
            scale = emit.scale_at(builder, builder.add(emit.load(builder, scales, 8 * row, I64), scale_offset))
            word = emit.decoded(builder, address, scale)
            if of_pairs:
                word = emit.rounded_pairs(builder, word, emit.decoded(builder, address, scale, LANES))
            words.append(builder.bitcast(word, I32S))
        _emit_transpose(builder, words, target, stride_bytes)

    return transpose


transpose_codes, transpose_code_pairs = _transpose_codes(of_pairs=False), _transpose_codes(of_pairs=HAS_BF16_DOT)
"""The first writes float32, the second writes pairs of bfloat16 and is called only where HAS_BF16_DOT."""


@emit.instructions("aaai")
def widen_codes(builder: Any, target: Any, source: Any, scale: Any, size: Any) -> None:
    """Convert codes to float32, in whole vectors: up to 15 more than `size`. `scale` is the address of the scale."""
    factor = emit.scale_at(builder, scale)

    def body(index: Any) -> None:
        row = emit.decoded(builder, builder.add(source, index), factor)
        emit.store(builder, row, emit.at(builder, target, index, 4))

    emit.loop(builder, emit.integer(0), size, LANES, [], body)


@emit.instructions("aaaaai")
def interleave_codes(
    builder: Any, first: Any, second: Any, first_scale: Any, second_scale: Any, target: Any, size: Any
) -> None:
    """Write `size` codes (a multiple of 32) of each of two rows as pairs of bfloat16; only where HAS_BF16_DOT."""
    halves = ir.VectorType(I16, 2 * LANES)
    order = ir.Constant(
        ir.VectorType(I32, 2 * LANES), [side * LANES + lane for lane in range(LANES) for side in (0, 1)]
    )
    left_scale, right_scale = emit.scale_at(builder, first_scale), emit.scale_at(builder, second_scale)

    def body(index: Any) -> None:
        left = emit.decoded(builder, builder.add(first, index), left_scale)
        right = emit.decoded(builder, builder.add(second, index), right_scale)
        both = builder.bitcast(emit.rounded_pairs(builder, left, right), halves)
        pairs = builder.shuffle_vector(both, both, order)
        emit.store(builder, pairs, emit.at(builder, target, index, 4))

    if HAS_BF16_DOT:
        emit.loop(builder, emit.integer(0), size, LANES, [], body)


def interleaved(builder: Any, first: Any, second: Any) -> list[Any]:
    """Load 32 bfloat16 from each of two addresses as two vectors of pairs."""
    kind = ir.VectorType(I16, 2 * LANES)
    left, right = emit.load(builder, first, 0, kind), emit.load(builder, second, 0, kind)
    orders = ([side * 2 * LANES + 16 * half + lane for lane in range(LANES) for side in (0, 1)] for half in (0, 1))
    masks = (ir.Constant(ir.VectorType(I32, 2 * LANES), order) for order in orders)
    return [builder.bitcast(builder.shuffle_vector(left, right, mask), I32S) for mask in masks]


@emit.instructions("aaa")
def interleave(builder: Any, first: Any, second: Any, target: Any) -> None:
    """Write 32 bfloat16 of each of two rows as 32 pairs."""
    for half, pairs in enumerate(interleaved(builder, first, second)):
        emit.store(builder, pairs, target, 64 * half)


# ------------------------------------------------------------------------------------------------ products


def _product(num_vectors: int, of_pairs: bool) -> Any:
    """Make a function C = A B, for 1 to ROWS rows of A, and columns that fill `num_vectors` vectors of 16 lanes.

    The function's arguments: num_rows; a, lda (bytes between rows); b, [k, lanes] without gaps; k, a number of words;
    c, ldc (bytes between rows).
    """

    def emit_rows(builder: Any, num_rows: int, arguments: Sequence[Any]) -> None:
        _emit_product(builder, (num_rows, num_vectors, of_pairs), arguments)

    return emit.by_rows("aiaiai", range(1, ROWS + 1), emit_rows)


def _emit_product(builder: Any, variant: tuple[int, int, bool], arguments: Sequence[Any]) -> None:
    num_rows, num_vectors, of_pairs = variant
    a, lda, b, k, c, ldc = arguments
    rows = [a]
    for _ in range(1, num_rows):
        rows.append(builder.add(rows[-1], lda))

    def body(index: Any, *sums: Any) -> list[Any]:
        column = emit.at(builder, b, index, 64 * num_vectors)
        vectors = [emit.load(builder, column, 64 * number, I32S) for number in range(num_vectors)]
        following = []
        for row in range(num_rows):
            left = emit.splat(builder, emit.load(builder, emit.at(builder, rows[row], index, 4), 0, I32))
            for number, right in enumerate(vectors):
                following.append(multiply_add(builder, sums[row * num_vectors + number], left, right, of_pairs))
        return following

    sums = emit.loop(builder, emit.integer(0), k, 1, [emit.constant(0.0)] * (num_rows * num_vectors), body)
    for row in range(num_rows):
        for number in range(num_vectors):
            emit.store(builder, sums[row * num_vectors + number], c, 64 * number)
        c = builder.add(c, ldc)


def multiply_add(builder: Any, total: Any, left: Any, right: Any, of_pairs: bool) -> Any:
    """total + left * right, where the factors are words."""
    if not of_pairs:
        return emit.fma(builder, builder.bitcast(left, F32S), builder.bitcast(right, F32S), total)
    pairs = (builder.bitcast(word, BF16_PAIRS) for word in (left, right))
    return emit.call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", total, *pairs)


product_64, product_32 = _product(4, False), _product(2, False)
pair_product_64, pair_product_32 = _product(4, HAS_BF16_DOT), _product(2, HAS_BF16_DOT)
"""The number in each name is the number of columns. Products of pairs are called only if HAS_BF16_DOT is true."""


DIMS = 2 * LANES
"""The number of value dimensions that are mixed at a time. The dimension of keys is a multiple of it, too."""
_COUNTS = range(1, ROWS + 1)


def _emit_keys(builder: Any, num_rows: int, arguments: Sequence[Any]) -> None:
    queries, query_bytes, keys, offset, num_words, scores, score_bytes = arguments
    addresses = [builder.add(emit.load(builder, keys, 8 * token, emit.I64), offset) for token in range(LANES)]

    def body(word: Any, *sums: Any) -> list[Any]:
        skipped, following = builder.mul(word, emit.integer(4)), list(sums)
        words = [emit.load(builder, builder.add(address, skipped), 0, emit.I32S) for address in addresses]
        for number, right in enumerate(transposed(builder, words)):
            query = builder.add(queries, skipped)
            for row in range(num_rows):
                left = emit.splat(builder, emit.load(builder, query, 4 * number, emit.I32))
                following[row] = multiply_add(builder, following[row], left, right, emit.HAS_BF16_DOT)
                query = builder.add(query, query_bytes)
        return following

    for total in emit.loop(builder, emit.integer(0), num_words, LANES, [emit.constant(0.0)] * num_rows, body):
        emit.store(builder, total, scores)
        scores = builder.add(scores, score_bytes)


score_keys = emit.by_rows("aiaiiai", _COUNTS, _emit_keys)
"""Compute the scores of some rows and 16 tokens.

Arguments:

    num_rows
    queries, query_bytes    the address of the first row's query, and the bytes from one row to the next
    keys, offset            the address of 16 tokens' addresses, and the offset of the key from a token's address
    num_words               words of a key
    scores, score_bytes     the address of the first row's scores, and the bytes from one row to the next
"""


def _emit_values(builder: Any, num_rows: int, arguments: Sequence[Any]) -> None:
    weights, weight_bytes, values, offset, num_pairs, mixed, mixed_bytes = arguments
    rows, targets = [weights], [mixed]
    for _ in range(1, num_rows):
        rows.append(builder.add(rows[-1], weight_bytes))
        targets.append(builder.add(targets[-1], mixed_bytes))

    def body(pair: Any, *sums: Any) -> list[Any]:
        place, following = emit.at(builder, values, pair, 16), []
        tokens = [builder.add(emit.load(builder, place, 8 * token, emit.I64), offset) for token in (0, 1)]
        vectors = interleaved(builder, *tokens)
        for row, address in enumerate(rows):
            left = emit.splat(builder, emit.load(builder, emit.at(builder, address, pair, 4), 0, emit.I32))
            for total, right in zip(sums[2 * row : 2 * row + 2], vectors, strict=True):
                following.append(multiply_add(builder, total, left, right, emit.HAS_BF16_DOT))
        return following

    sums = [emit.load(builder, target, 64 * half) for target in targets for half in (0, 1)]
    for number, total in enumerate(emit.loop(builder, emit.integer(0), num_pairs, 1, sums, body)):
        emit.store(builder, total, targets[number // 2], 64 * (number % 2))


add_values = emit.by_rows("aiaiiai", _COUNTS, _emit_values)
"""Add the values of some pairs of tokens to 32 dimensions of some rows' mixtures.

Arguments:

    num_rows
    weights, weight_bytes   the address of the first row's weights, and the bytes from one row to the next
    values, offset          the address of the tokens' addresses, and the dimensions' offset from a token's address
    num_pairs
    mixed, mixed_bytes      the address of the first row's mixture, and the bytes from one row to the next
"""
