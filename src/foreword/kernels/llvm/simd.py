"""Vector instructions for numba: loops over 16 lanes at a time, written down as LLVM instructions.

Knows memory addresses, lanes and loops; knows nothing of attention's blocks, chunks or requests.

Compilers are free to sum in an order of their own, and to round twice or once, as the length of a loop
suggests. Here every operation and its order is spelt out, so an element has the same bits whatever
stands beside it. All functions take addresses (integers), all sizes are in elements unless named otherwise.

Matrices are multiplied as C[rows, lanes] = A[rows, k] B[k, lanes] in 32-bit words. A word is a float32, or a
pair of bfloat16 (two neighbours of the inner dimension) where the processor multiplies those (AVX512_BF16).
An element of C is one chain of fused multiply-adds along k, from 0 upwards, starting at 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
ROWS = 7
"""Most rows of A that one product takes: 7 rows of 4 vectors fill the processor's 32 registers."""
LOWEST = -3.4028234663852886e38
LOG2_E = 1.4426950408889634
HAS_BF16_DOT = bool(llvm.get_host_cpu_features().get("avx512bf16"))
"""Whether this processor multiplies pairs of bfloat16."""


class _BFloat16(ir.types.Type):
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
F32S, I32S, I16S = (ir.VectorType(kind, LANES) for kind in (F32, I32, I16))
BF16S, BF16_PAIRS = ir.VectorType(_BFloat16(), LANES), ir.VectorType(_BFloat16(), 2 * LANES)
_TYPES = {"a": types.intp, "i": types.intp, "f": types.float32}


def _instructions(signature: str, returns: Any = types.void) -> Callable[[Callable[..., Any]], Any]:
    """Make a numba function of `emit(builder, *arguments)`, one letter of `signature` per argument.

    a: address, i: integer (both 64 bits), f: float32.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        numba_signature = returns(*(_TYPES[letter] for letter in signature))

        def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            result = emit(builder, *arguments)
            return context.get_dummy_value() if result is None else result

        names = ", ".join(f"x{number}" for number in range(len(signature)))
        scope = {"numba_signature": numba_signature, "codegen": codegen}
        exec(f"def typer(context, {names}): return numba_signature, codegen", scope)  # numba counts arguments
        return intrinsic(scope["typer"])

    return decorate


# ------------------------------------------------------------------------------------------ building blocks


def _int(value: int) -> ir.Constant:
    return ir.Constant(I64, value)


def _at(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    return builder.inttoptr(builder.add(address, _int(offset)), kind.as_pointer())


def _load(builder: Any, address: Any, offset: int = 0, kind: Any = F32S) -> Any:
    return builder.load(_at(builder, address, offset, kind), align=2)


def _store(builder: Any, value: Any, address: Any, offset: int = 0) -> None:
    builder.store(value, _at(builder, address, offset, value.type), align=2)


def _splat(builder: Any, scalar: Any) -> Any:
    vector = ir.VectorType(scalar.type, LANES)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), ir.Constant(I32S, None))


def _const(value: float) -> ir.Constant:
    return ir.Constant(F32S, [value] * LANES)


def _call(builder: Any, name: str, *arguments: Any) -> Any:
    """Call an LLVM intrinsic whose result has the type of its first argument."""
    kinds = [argument.type for argument in arguments]
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(kinds[0], kinds), name)
    return builder.call(function, arguments)


def _fma(builder: Any, left: Any, right: Any, addend: Any) -> Any:
    return _call(builder, "llvm.fma.v16f32", left, right, addend)


def _larger(builder: Any, left: Any, right: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", right, left), right, left)


def _reduce(builder: Any, vector: Any, join: Callable[[Any, Any], Any]) -> Any:
    """Join the 16 lanes as a tree; the result is in every lane."""
    for distance in (8, 4, 2, 1):
        swapped = ir.Constant(I32S, [lane ^ distance for lane in range(LANES)])
        vector = join(vector, builder.shuffle_vector(vector, vector, swapped))
    return vector


def _loop(
    builder: Any, start: Any, stop: Any, step: int, carried: list[Any], body: Callable[..., list[Any]]
) -> list[Any]:
    """`for i in range(start, stop, step): carried = body(i, *carried)`; returns what is carried at the end."""
    before = builder.block
    head, inside, after = (builder.append_basic_block(name) for name in ("head", "inside", "after"))
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(I64)
    index.add_incoming(start, before)
    values = [builder.phi(value.type) for value in carried]
    for phi, value in zip(values, carried, strict=True):
        phi.add_incoming(value, before)
    builder.cbranch(builder.icmp_signed("<", index, stop), inside, after)
    builder.position_at_end(inside)
    following = body(index, *values)
    last = builder.block
    index.add_incoming(builder.add(index, _int(step)), last)
    for phi, value in zip(values, following, strict=True):
        phi.add_incoming(value, last)
    builder.branch(head)
    builder.position_at_end(after)
    return values


def _exp2(builder: Any, power: Any) -> Any:
    """2 ** power for power <= 0, to about 1 unit in the last place, exactly 1 at 0, exactly 0 from -126 down.

    Adding 3 * 2 ** 22 rounds the power and leaves the whole number in the sum's last bits, from where it is added to
    the exponent.
    """
    shifted = builder.fadd(power, _const(12582912.0))
    rest = builder.fsub(power, builder.fsub(shifted, _const(12582912.0)))
    # Taylor's series of exp(rest * ln 2) to degree 6; |rest| <= 1/2, so the first term left out is below 2 ** -22.9
    terms = [1.0]
    for number in range(1, 7):
        terms.append(terms[-1] * 0.6931471805599453 / number)
    result = _polynomial(builder, terms, rest)
    exponent = builder.shl(builder.bitcast(shifted, I32S), ir.Constant(I32S, [23] * LANES))
    scaled = builder.bitcast(builder.add(builder.bitcast(result, I32S), exponent), F32S)
    return builder.select(builder.fcmp_ordered("<=", power, _const(-126.0)), _const(0.0), scaled)


def _polynomial(builder: Any, terms: Sequence[float], variable: Any) -> Any:
    """terms[0] + terms[1] * variable + ..."""
    result = _const(terms[-1])
    for term in reversed(terms[:-1]):
        result = _fma(builder, result, variable, _const(term))
    return result


def _widened(builder: Any, halves: Any) -> Any:
    """bfloat16 bits as float32."""
    return builder.bitcast(builder.shl(builder.zext(halves, I32S), ir.Constant(I32S, [16] * LANES)), F32S)


# ------------------------------------------------------------------------------------- memory and counters


@_instructions("ai")
def clear_bytes(builder: Any, target: Any, num_bytes: Any) -> None:
    """Fill memory with zeros."""
    cgutils.memset(builder, builder.inttoptr(target, ir.IntType(8).as_pointer()), num_bytes, 0)


@_instructions("aai")
def copy_bytes(builder: Any, target: Any, source: Any, num_bytes: Any) -> None:
    """Copy memory that does not overlap."""
    byte = ir.IntType(8).as_pointer()
    cgutils.raw_memcpy(builder, builder.inttoptr(target, byte), builder.inttoptr(source, byte), num_bytes, 1)


@_instructions("ai", types.intp)
def fetch_add(builder: Any, address: Any, amount: Any) -> Any:
    """Add to a 64-bit integer that threads share; its value before."""
    return builder.atomic_rmw("add", builder.inttoptr(address, I64.as_pointer()), amount, "seq_cst")


def fetch(builder: Any, address: Any, *, near: bool = False, writing: bool = False) -> None:
    """Ask for a line of memory, whatever is there: into the second cache, or the first if it is `near` in time."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    how = (ir.Constant(I32, number) for number in (int(writing), 3 if near else 2, 1))
    builder.call(function, [builder.inttoptr(address, byte), *how])


@_instructions("ai")
def prefetch(builder: Any, address: Any, num_bytes: Any) -> None:
    """Ask for memory that will be read soon."""

    def body(index: Any) -> list[Any]:
        fetch(builder, builder.add(address, index))
        return []

    _loop(builder, _int(0), num_bytes, 64, [], body)


@_instructions("aaaiiiii")
def call_chunk(builder: Any, function: Any, *arguments: Any) -> None:
    """Call a C function at an address with two addresses and five integers."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * len(arguments))
    builder.call(builder.inttoptr(function, kind.as_pointer()), arguments)


@_instructions("a", types.intp)
def load_int(builder: Any, address: Any) -> Any:
    """A 64-bit integer."""
    return _load(builder, address, 0, I64)


@_instructions("ai")
def store_int(builder: Any, address: Any, value: Any) -> None:
    """Write a 64-bit integer."""
    _store(builder, value, address)


@_instructions("a", types.intp)
def load_int32(builder: Any, address: Any) -> Any:
    """A 32-bit integer."""
    return builder.sext(_load(builder, address, 0, I32), I64)


@_instructions("a", types.float32)
def load_float(builder: Any, address: Any) -> Any:
    """A float32."""
    return _load(builder, address, 0, F32)


@_instructions("af")
def store_float(builder: Any, address: Any, value: Any) -> None:
    """Write a float32."""
    _store(builder, value, address)


@_instructions("aai")
def widen(builder: Any, target: Any, source: Any, size: Any) -> None:
    """bfloat16 to float32; whole vectors, so up to 15 elements more than `size`."""

    def body(index: Any) -> list[Any]:
        halves = _load(builder, builder.add(source, builder.mul(index, _int(2))), 0, I16S)
        _store(builder, _widened(builder, halves), builder.add(target, builder.mul(index, _int(4))))
        return []

    _loop(builder, _int(0), size, LANES, [], body)


# ------------------------------------------------------------------------------------------------- packing


def _transposed(builder: Any, words: list[Any]) -> list[Any]:
    """Columns of 16 vectors of 16 words: vector i has word i of all of them."""
    words = list(words)
    for distance in (8, 4, 2, 1):
        low = [lane if not lane & distance else LANES + lane - distance for lane in range(LANES)]
        high = [lane + distance if not lane & distance else LANES + lane for lane in range(LANES)]
        for first in (number for number in range(LANES) if not number & distance):
            one, two = words[first], words[first + distance]
            words[first] = builder.shuffle_vector(one, two, ir.Constant(I32S, low))
            words[first + distance] = builder.shuffle_vector(one, two, ir.Constant(I32S, high))
    return words


def _emit_transpose(builder: Any, words: list[Any], target: Any, stride_bytes: Any) -> None:
    """Write 16 vectors of 16 words as columns: word i of all of them goes to target + i * stride."""
    for word in _transposed(builder, words):
        _store(builder, word, target)
        target = builder.add(target, stride_bytes)


@_instructions("aiai")
def transpose_words(builder: Any, rows: Any, offset_bytes: Any, target: Any, stride_bytes: Any) -> None:
    """Columns of 16 words of 16 rows; `rows` points to the rows' addresses."""
    addresses = [_load(builder, rows, 8 * row, I64) for row in range(LANES)]
    words = [_load(builder, builder.add(address, offset_bytes), 0, I32S) for address in addresses]
    _emit_transpose(builder, words, target, stride_bytes)


@_instructions("aiai")
def transpose_widened(builder: Any, rows: Any, offset_bytes: Any, target: Any, stride_bytes: Any) -> None:
    """Columns of 16 bfloat16 of 16 rows, as float32."""
    addresses = [_load(builder, rows, 8 * row, I64) for row in range(LANES)]
    halves = [_load(builder, builder.add(address, offset_bytes), 0, I16S) for address in addresses]
    words = [builder.bitcast(_widened(builder, half), I32S) for half in halves]
    _emit_transpose(builder, words, target, stride_bytes)


def _interleaved(builder: Any, first: Any, second: Any) -> list[Any]:
    """32 bfloat16 at each of two addresses as two vectors of pairs."""
    kind = ir.VectorType(I16, 2 * LANES)
    one, two = _load(builder, first, 0, kind), _load(builder, second, 0, kind)
    orders = ([side * 2 * LANES + 16 * half + lane for lane in range(LANES) for side in (0, 1)] for half in (0, 1))
    masks = (ir.Constant(ir.VectorType(I32, 2 * LANES), order) for order in orders)
    return [builder.bitcast(builder.shuffle_vector(one, two, mask), I32S) for mask in masks]


@_instructions("aaa")
def interleave(builder: Any, first: Any, second: Any, target: Any) -> None:
    """32 bfloat16 of two rows as 32 pairs."""
    for half, pairs in enumerate(_interleaved(builder, first, second)):
        _store(builder, pairs, target, 64 * half)


# ------------------------------------------------------------------------------------------------ products


def _by_rows(signature: str, counts: Sequence[int], emit: Callable[[Any, int, Sequence[Any]], None]) -> Any:
    """A numba function of a number of rows, one of `counts`, and what `signature` says: code for each of them."""

    @_instructions("i" + signature)
    def function(builder: Any, num_rows: Any, *arguments: Any) -> None:
        done, impossible = builder.append_basic_block("done"), builder.append_basic_block("impossible")
        switch = builder.switch(num_rows, impossible)
        for count in counts:
            block = builder.append_basic_block(f"rows{count}")
            switch.add_case(_int(count), block)
            builder.position_at_end(block)
            emit(builder, count, arguments)
            builder.branch(done)
        builder.position_at_end(impossible)
        builder.branch(done)
        builder.position_at_end(done)

    return function


def _product(num_vectors: int, of_pairs: bool) -> Any:
    """C = A B for `num_rows` of 1 to ROWS rows and a fixed number of vectors of 16 lanes.

    a, lda (bytes between rows); b: [k, lanes] without gaps; k: words; c, ldc (bytes between rows).
    """

    def emit(builder: Any, num_rows: int, arguments: Sequence[Any]) -> None:
        _emit_product(builder, (num_rows, num_vectors, of_pairs), arguments)

    return _by_rows("aiaiai", range(1, ROWS + 1), emit)


def _emit_product(builder: Any, variant: tuple[int, int, bool], arguments: Sequence[Any]) -> None:
    num_rows, num_vectors, of_pairs = variant
    a, lda, b, k, c, ldc = arguments
    rows = [a]
    for _ in range(1, num_rows):
        rows.append(builder.add(rows[-1], lda))

    def body(index: Any, *sums: Any) -> list[Any]:
        column = builder.add(b, builder.mul(index, _int(64 * num_vectors)))
        vectors = [_load(builder, column, 64 * number, I32S) for number in range(num_vectors)]
        following = []
        for row in range(num_rows):
            left = _splat(builder, _load(builder, builder.add(rows[row], builder.mul(index, _int(4))), 0, I32))
            for number, right in enumerate(vectors):
                following.append(_multiply_add(builder, sums[row * num_vectors + number], left, right, of_pairs))
        return following

    sums = _loop(builder, _int(0), k, 1, [_const(0.0)] * (num_rows * num_vectors), body)
    for row in range(num_rows):
        for number in range(num_vectors):
            _store(builder, sums[row * num_vectors + number], c, 64 * number)
        c = builder.add(c, ldc)


def _multiply_add(builder: Any, total: Any, left: Any, right: Any, of_pairs: bool) -> Any:
    """total + left * right, the factors being words."""
    if not of_pairs:
        return _fma(builder, builder.bitcast(left, F32S), builder.bitcast(right, F32S), total)
    pairs = (builder.bitcast(word, BF16_PAIRS) for word in (left, right))
    return _call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", total, *pairs)


product_64, product_32 = _product(4, False), _product(2, False)
pair_product_64, pair_product_32 = _product(4, HAS_BF16_DOT), _product(2, HAS_BF16_DOT)
"""By the number of lanes. Of pairs only where HAS_BF16_DOT; elsewhere nobody calls them."""
