"""Operations on one row of numbers, as LLVM instructions for numba: norm, gate, sum, rotation, codes.

Rows are bfloat16 or float32, in whole vectors of 16. Arithmetic is float32. With bfloat16, results are rounded to
bfloat16 wherever a model would write them to memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from foreword.kernels.llvm import emit
from foreword.kernels.llvm.emit import I16S, I32S, LANES, LOG2_E

ROUND_NORM, ADD_ONE = 1, 2
"""Bits of a norm's form. ROUND_NORM: round the normalised row before scaling it. ADD_ONE: add 1 to the scales."""
LARGEST_CODE = 127
"""`kv_format.LARGEST_CODE`, which emitters do not import."""


def load(builder: Any, address: Any, index: Any, to_bf16: bool) -> Any:
    """16 elements from `index` on, as float32."""
    at = emit.at(builder, address, index, 2 if to_bf16 else 4)
    return emit.widened(builder, emit.load(builder, at, 0, I16S)) if to_bf16 else emit.load(builder, at)


def store(builder: Any, value: Any, address: Any, index: Any, to_bf16: bool) -> None:
    """Write 16 float32 as elements from `index` on."""
    at = emit.at(builder, address, index, 2 if to_bf16 else 4)
    emit.store(builder, emit.rounded(builder, value) if to_bf16 else value, at)


def written(builder: Any, value: Any, to_bf16: bool) -> Any:
    """The value as if it were written as an element, and read again."""
    return emit.widened(builder, emit.rounded(builder, value)) if to_bf16 else value


def silu(builder: Any, value: Any) -> Any:
    """x / (1 + exp(-x))."""
    return _share(builder, value, value)


def gelu(builder: Any, value: Any) -> Any:
    """x / (1 + exp(-2 z)), which is x (1 + tanh z) / 2, with z = sqrt(2 / pi) (x + 0.044715 x ** 3)."""
    factor = 2 * math.sqrt(2 / math.pi)
    square = emit.fma(builder, builder.fmul(value, value), emit.constant(0.044715 * factor), emit.constant(factor))
    return _share(builder, value, builder.fmul(value, square))


def _share(builder: Any, value: Any, power: Any) -> Any:
    """value / (1 + exp(-power)). It takes exp(-|power|) for any sign of `power`, so the exponential is at most 1."""
    tail = emit.exp2(builder, builder.fmul(emit.call(builder, "llvm.fabs.v16f32", power), emit.constant(-LOG2_E)))
    share = builder.fdiv(emit.constant(1.0), builder.fadd(emit.constant(1.0), tail))
    negative = builder.fcmp_ordered("<", power, emit.constant(0.0))
    return builder.fmul(value, builder.select(negative, builder.fmul(tail, share), share))


def _norm(bf16: bool) -> Any:
    @emit.instructions("aaaifi")
    def norm(builder: Any, x: Any, weight: Any, target: Any, width: Any, epsilon: Any, form: Any) -> None:
        """Divide one row by the root of its mean square, and scale it by `weight`; `width` is a multiple of 16."""

        def square(index: Any, total: Any) -> list[Any]:
            value = load(builder, x, index, bf16)
            return [emit.fma(builder, value, value, total)]

        (total,) = emit.loop(builder, emit.integer(0), width, LANES, [emit.constant(0.0)], square)
        total = emit.reduce(builder, total, builder.fadd)
        mean = builder.fdiv(total, emit.splat(builder, builder.sitofp(width, emit.F32)))
        root = emit.call(builder, "llvm.sqrt.v16f32", builder.fadd(mean, emit.splat(builder, epsilon)))
        factor = builder.fdiv(emit.constant(1.0), root)
        rounds = builder.icmp_signed("!=", builder.and_(form, emit.integer(ROUND_NORM)), emit.integer(0))
        adds = builder.icmp_signed("!=", builder.and_(form, emit.integer(ADD_ONE)), emit.integer(0))
        offset = builder.select(adds, emit.constant(1.0), emit.constant(0.0))

        def scale(index: Any) -> None:
            value = builder.fmul(load(builder, x, index, bf16), factor)
            if bf16:
                value = builder.select(rounds, written(builder, value, bf16), value)
            scales = builder.fadd(load(builder, weight, index, bf16), offset)
            store(builder, builder.fmul(value, scales), target, index, bf16)

        emit.loop(builder, emit.integer(0), width, LANES, [], scale)

    return norm


def _gate(bf16: bool, activation: Callable[[Any, Any], Any]) -> Any:
    @emit.instructions("aaai")
    def gate(builder: Any, x: Any, y: Any, target: Any, width: Any) -> None:
        """Write activation(x) * y of one row. `width` is a multiple of 16.

        activation(x) is rounded as if it were written to memory.
        """

        def body(index: Any) -> None:
            factor = written(builder, activation(builder, load(builder, x, index, bf16)), bf16)
            store(builder, builder.fmul(factor, load(builder, y, index, bf16)), target, index, bf16)

        emit.loop(builder, emit.integer(0), width, LANES, [], body)

    return gate


def _add(bf16: bool) -> Any:
    @emit.instructions("aafai")
    def add(builder: Any, x: Any, y: Any, scale: Any, target: Any, width: Any) -> None:
        """Write x + scale * y of one row. `width` is a multiple of 16.

        The product is rounded as if it were written to memory.
        """
        factor = emit.splat(builder, scale)

        def body(index: Any) -> None:
            scaled = written(builder, builder.fmul(load(builder, y, index, bf16), factor), bf16)
            store(builder, builder.fadd(load(builder, x, index, bf16), scaled), target, index, bf16)

        emit.loop(builder, emit.integer(0), width, LANES, [], body)

    return add


def _rotate(bf16: bool) -> Any:
    @emit.instructions("aaai")
    def rotate(builder: Any, x: Any, cosine: Any, sine: Any, half: Any) -> None:
        """Rotate the first 2 * half elements of one head in place; element i and element i + half are a pair."""

        def product(left: Any, right: Any) -> Any:
            return written(builder, builder.fmul(left, right), bf16)

        def body(index: Any) -> None:
            upper = builder.add(index, half)
            low, high = load(builder, x, index, bf16), load(builder, x, upper, bf16)
            cosines = [load(builder, cosine, at, bf16) for at in (index, upper)]
            sines = [load(builder, sine, at, bf16) for at in (index, upper)]
            turned = builder.fadd(product(low, cosines[0]), product(builder.fneg(high), sines[0]))
            store(builder, turned, x, index, bf16)
            turned = builder.fadd(product(high, cosines[1]), product(low, sines[1]))
            store(builder, turned, x, upper, bf16)

        emit.loop(builder, emit.integer(0), half, LANES, [], body)

    return rotate


def _code(bf16: bool) -> Any:
    @emit.instructions("aaai")
    def code(builder: Any, x: Any, codes: Any, scale: Any, width: Any) -> None:
        """Write a row of whole vectors as codes and a scale, by the formula of `kv_format.encode`."""

        def largest(left: Any, right: Any) -> Any:
            return builder.select(builder.icmp_signed(">", right, left), right, left)

        def look(index: Any, peak: Any) -> list[Any]:
            size = builder.bitcast(load(builder, x, index, bf16), I32S)
            return [largest(peak, builder.and_(size, integers(0x7FFFFFFF)))]

        def integers(value: int) -> ir.Constant:
            return ir.Constant(I32S, [value] * LANES)

        [peak] = emit.loop(builder, emit.integer(0), width, LANES, [integers(0)], look)
        peak = builder.bitcast(emit.reduce(builder, peak, largest), emit.F32S)
        bits = builder.bitcast(builder.fdiv(peak, emit.constant(float(LARGEST_CODE))), I32S)
        bits = builder.lshr(builder.add(bits, integers(0xFFFF)), integers(16))
        bits = builder.select(builder.icmp_signed("<", bits, integers(0x7FC0)), bits, integers(0x7FC0))
        halves = builder.trunc(bits, I16S)
        emit.store(builder, emit.first(builder, halves), scale)
        divisor = emit.widened(builder, halves)

        def write(index: Any) -> None:
            ratio = builder.fdiv(load(builder, x, index, bf16), divisor)
            size = emit.call(builder, "llvm.fabs.v16f32", ratio)
            is_code = builder.fcmp_ordered("<=", size, emit.constant(LARGEST_CODE + 1.0))
            whole = emit.call(builder, "llvm.rint.v16f32", builder.select(is_code, ratio, emit.constant(0.0)))
            emit.store(builder, builder.trunc(builder.fptosi(whole, I32S), emit.I8S), builder.add(codes, index))

        emit.loop(builder, emit.integer(0), width, LANES, [], write)

    return code


norm_bf16, norm_f32 = _norm(True), _norm(False)
silu_gate_bf16, silu_gate_f32 = _gate(True, silu), _gate(False, silu)
gelu_gate_bf16, gelu_gate_f32 = _gate(True, gelu), _gate(False, gelu)
add_bf16, add_f32 = _add(True), _add(False)
rotate_bf16, rotate_f32 = _rotate(True), _rotate(False)
code_bf16, code_f32 = _code(True), _code(False)
