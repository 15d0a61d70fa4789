"""Building blocks of emitters: vectors of 16 lanes, loads, stores, loops and sums as LLVM instructions.

docs/concepts/compiled-kernels.md says how an emitter is written and tested.

A compiler may choose the order of a sum, and whether to round once or twice, by the length of a loop. Here every
operation and its order is spelt out, so an element's bits do not depend on its neighbours. Addresses and sizes are
64-bit integers; sizes are in elements unless a name says bytes.
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
LOWEST = -3.4028234663852886e38
LOG2_E = 1.4426950408889634
HAS_BF16_DOT = bool(llvm.get_host_cpu_features().get("avx512bf16"))
"""Whether this processor multiplies pairs of bfloat16."""


class _BFloat16(ir.types.Type):
    """LLVM's bfloat, for which llvmlite has no name."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


I8, I16, I32, I64, F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
F32S, I32S, I16S, I8S = (ir.VectorType(kind, LANES) for kind in (F32, I32, I16, I8))
BF16S, BF16_PAIRS = ir.VectorType(_BFloat16(), LANES), ir.VectorType(_BFloat16(), 2 * LANES)
_TYPES = {"a": types.intp, "i": types.intp, "f": types.float32, "d": types.float64}


def instructions(signature: str, returns: Any = types.void) -> Callable[[Callable[..., Any]], Any]:
    """Make a numba function from `emit(builder, *arguments)`. `signature` has one letter for each argument:

    a: address, i: integer (both 64 bits), f: float32, d: float64.
    """

    def decorate(emit: Callable[..., Any]) -> Any:
        numba_signature = returns(*(_TYPES[letter] for letter in signature))

        def codegen(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            result = emit(builder, *arguments)
            return context.get_dummy_value() if result is None else result

        names = ", ".join(f"x{number}" for number in range(len(signature)))
        scope = {"numba_signature": numba_signature, "codegen": codegen}
        exec(f"def typer(context, {names}): return numba_signature, codegen", scope)  # numba counts a typer's arguments
        return intrinsic(scope["typer"])

    return decorate


# ------------------------------------------------------------------------------------------ building blocks


def integer(value: int) -> ir.Constant:
    """A 64-bit constant."""
    return ir.Constant(I64, value)


def at(builder: Any, address: Any, index: Any, size: int) -> Any:
    """`address + index * size`, the place of an element of `size` bytes."""
    return builder.add(address, builder.mul(index, integer(size)))


def pointer(builder: Any, address: Any, offset: int, kind: Any) -> Any:
    """A pointer to `kind`, `offset` bytes after an address."""
    return builder.inttoptr(builder.add(address, integer(offset)), kind.as_pointer())


def load(builder: Any, address: Any, offset: int = 0, kind: Any = F32S) -> Any:
    """The value `offset` bytes after an address: 16 float32, or a `kind`."""
    return builder.load(pointer(builder, address, offset, kind), align=2)


def store(builder: Any, value: Any, address: Any, offset: int = 0) -> None:
    """Write a value `offset` bytes after an address."""
    builder.store(value, pointer(builder, address, offset, value.type), align=2)


def splat(builder: Any, scalar: Any) -> Any:
    """A scalar in all 16 lanes."""
    vector = ir.VectorType(scalar.type, LANES)
    single = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(single, ir.Constant(vector, ir.Undefined), ir.Constant(I32S, None))


def first(builder: Any, vector: Any) -> Any:
    """The first lane."""
    return builder.extract_element(vector, ir.Constant(I32, 0))


def constant(value: float) -> ir.Constant:
    """A float32 constant in all 16 lanes."""
    return ir.Constant(F32S, [value] * LANES)


def call(builder: Any, name: str, *arguments: Any, returns: Any = None) -> Any:
    """Call an LLVM intrinsic. Its result has the type `returns`; None: the type of its first argument."""
    kinds = [argument.type for argument in arguments]
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(returns or kinds[0], kinds), name)
    return builder.call(function, arguments)


def fma(builder: Any, left: Any, right: Any, addend: Any) -> Any:
    """left * right + addend, rounded once."""
    return call(builder, "llvm.fma.v16f32", left, right, addend)


@instructions("ddd", types.float64)
def fused(builder: Any, left: Any, right: Any, addend: Any) -> Any:
    """left * right + addend of float64, rounded once. LLVM vectorises this function in loops."""
    return call(builder, "llvm.fma.f64", left, right, addend)


def larger(builder: Any, left: Any, right: Any) -> Any:
    """The larger of two numbers, lane by lane; `left` if one of the two is NaN."""
    return builder.select(builder.fcmp_ordered(">", right, left), right, left)


def reduce(builder: Any, vector: Any, join: Callable[[Any, Any], Any]) -> Any:
    """Join the 16 lanes as a binary tree. Every lane of the returned vector has the result."""
    for distance in (8, 4, 2, 1):
        swapped = ir.Constant(I32S, [lane ^ distance for lane in range(LANES)])
        vector = join(vector, builder.shuffle_vector(vector, vector, swapped))
    return vector


def loop(
    builder: Any, start: Any, stop: Any, step: int, carried: list[Any], body: Callable[..., list[Any] | None]
) -> list[Any]:
    """`for i in range(start, stop, step): carried = body(i, *carried)`; returns the last `carried`.

    A body that carries nothing may return None.
    """
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
    following = body(index, *values) or []
    last = builder.block
    index.add_incoming(builder.add(index, integer(step)), last)
    for phi, value in zip(values, following, strict=True):
        phi.add_incoming(value, last)
    builder.branch(head)
    builder.position_at_end(after)
    return values


def exp2(builder: Any, power: Any) -> Any:
    """2 ** power for power <= 0, to about 1 unit in the last place, exactly 1 at 0, exactly 0 from -126 down.

    Adding 3 * 2 ** 22 rounds the power: the sum's last bits are the rounded power, which is then added to the exponent.
    """
    shifted = builder.fadd(power, constant(12582912.0))
    fraction = builder.fsub(power, builder.fsub(shifted, constant(12582912.0)))
    # Taylor's series of exp(fraction * ln 2) to degree 6; |fraction| <= 1/2, so the next term is below 2 ** -22.9
    terms = [1.0]
    for number in range(1, 7):
        terms.append(terms[-1] * 0.6931471805599453 / number)
    result = polynomial(builder, terms, fraction)
    exponent = builder.shl(builder.bitcast(shifted, I32S), ir.Constant(I32S, [23] * LANES))
    scaled = builder.bitcast(builder.add(builder.bitcast(result, I32S), exponent), F32S)
    return builder.select(builder.fcmp_ordered("<=", power, constant(-126.0)), constant(0.0), scaled)


def polynomial(builder: Any, terms: Sequence[float], variable: Any) -> Any:
    """terms[0] + terms[1] * variable + ..."""
    result = constant(terms[-1])
    for term in reversed(terms[:-1]):
        result = fma(builder, result, variable, constant(term))
    return result


def widened(builder: Any, halves: Any) -> Any:
    """bfloat16 bits as float32."""
    return builder.bitcast(builder.shl(builder.zext(halves, I32S), ir.Constant(I32S, [16] * LANES)), F32S)


def rounded(builder: Any, vector: Any) -> Any:
    """float32 as the bits of the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = builder.bitcast(vector, I32S)

    def const(value: int) -> ir.Constant:
        return ir.Constant(I32S, [value] * LANES)

    odd = builder.and_(builder.lshr(bits, const(16)), const(1))
    nearest = builder.lshr(builder.add(bits, builder.add(odd, const(0x7FFF))), const(16))
    nan = builder.fcmp_unordered("uno", vector, vector)
    return builder.trunc(builder.select(nan, const(0x7FC0), nearest), I16S)


def decoded(builder: Any, address: Any, scale: Any, offset: int = 0) -> Any:
    """16 codes, `offset` bytes after an address, as float32, times `scale`, which has the scale in every lane."""
    codes = builder.sext(load(builder, address, offset, I8S), I32S)
    return builder.fmul(builder.sitofp(codes, F32S), scale)


def scale_at(builder: Any, address: Any) -> Any:
    """Load a bfloat16 scale, as float32 in every lane."""
    return widened(builder, splat(builder, load(builder, address, 0, I16)))


def rounded_pairs(builder: Any, low: Any, high: Any) -> Any:
    """Two float32 vectors, one after the other, as 32 bfloat16; called only where HAS_BF16_DOT."""
    return call(builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", high, low, returns=BF16_PAIRS)


def by_rows(signature: str, counts: Sequence[int], emit: Callable[[Any, int, Sequence[Any]], None]) -> Any:
    """Make a numba function of a number of rows and further arguments, which `signature` describes.

    The function has separate code for each number in `counts`.
    """

    @instructions("i" + signature)
    def function(builder: Any, num_rows: Any, *arguments: Any) -> None:
        done, impossible = builder.append_basic_block("done"), builder.append_basic_block("impossible")
        switch = builder.switch(num_rows, impossible)
        for count in counts:
            block = builder.append_basic_block(f"rows{count}")
            switch.add_case(integer(count), block)
            builder.position_at_end(block)
            emit(builder, count, arguments)
            builder.branch(done)
        builder.position_at_end(impossible)
        builder.branch(done)
        builder.position_at_end(done)

    return function
