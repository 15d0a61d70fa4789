"""The softmax of one chunk's scores, and the merging of results, as vector instructions for numba.

A row's *stats* are two float32: its peak, which is its largest score as an exponent of 2, and the sum of its weights.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from foreword.kernels.llvm import emit
from foreword.kernels.llvm.emit import BF16_PAIRS, F32, HAS_BF16_DOT, I16, I32, I32S, LANES, LOG2_E, LOWEST

_HALVES = ir.VectorType(I16, 2 * LANES)


@emit.instructions("aiiff")
def soft_cap(builder: Any, scores: Any, start: Any, stop: Any, factor: Any, cap: Any) -> None:
    """scores[start:stop] = cap * tanh(scores * factor), with tanh |x| = (1 - e) / (1 + e), e = exp(-2 |x|)."""
    factor, cap = emit.splat(builder, factor), emit.splat(builder, cap)

    def body(index: Any) -> None:
        at = emit.at(builder, scores, index, 4)
        score = builder.fmul(emit.load(builder, at), factor)
        size = emit.call(builder, "llvm.fabs.v16f32", score)
        decay = emit.exp2(builder, builder.fmul(size, emit.constant(-2.0 * LOG2_E)))
        tanh = builder.fdiv(builder.fsub(emit.constant(1.0), decay), builder.fadd(emit.constant(1.0), decay))
        emit.store(builder, builder.fmul(emit.call(builder, "llvm.copysign.v16f32", tanh, score), cap), at)

    emit.loop(builder, start, stop, LANES, [], body)


@emit.instructions("aaiiiif")
def find_peak(builder: Any, *arguments: Any) -> None:
    """Write the largest of a row's scores in one chunk, times `factor` > 0, to `stats`.

    This is the first half of the softmax. The row sees scores[low:high] of scores[start:stop] (multiples of 64); other
    scores become the least number.
    """
    scores, stats, start, stop, low, high, factor = arguments
    lane = ir.Constant(I32S, list(range(LANES)))
    bounds = [emit.splat(builder, builder.trunc(bound, I32)) for bound in (low, high)]

    def look(index: Any, peak: Any, masked: bool) -> list[Any]:
        at = emit.at(builder, scores, index, 4)
        score = emit.load(builder, at)
        if masked:
            position = builder.add(emit.splat(builder, builder.trunc(index, I32)), lane)
            after, before = (
                builder.icmp_signed(sign, position, bound) for sign, bound in zip((">=", "<"), bounds, strict=True)
            )
            score = builder.select(builder.and_(after, before), score, emit.constant(LOWEST))
            emit.store(builder, score, at)
        return [emit.larger(builder, peak, score)]

    # start .. first .. last .. stop: between first and last, the row sees all lanes of each vector: no mask is needed
    first = builder.and_(builder.add(low, emit.integer(LANES - 1)), emit.integer(-LANES))
    last = builder.and_(high, emit.integer(-LANES))
    last = builder.select(builder.icmp_signed(">", first, last), first, last)
    peak = emit.constant(LOWEST)
    for begin, end, masked in ((start, first, True), (first, last, False), (last, stop, True)):
        [peak] = emit.loop(builder, begin, end, LANES, [peak], functools.partial(look, masked=masked))
    peak = builder.fmul(
        emit.reduce(builder, peak, lambda left, right: emit.larger(builder, left, right)), emit.splat(builder, factor)
    )
    emit.store(builder, emit.first(builder, peak), stats)


def _weigh(store: Callable[[Any, list[Any], Any, Any, Any], Any]) -> Any:
    """Make the function for the second half of the softmax: a row's unnormalised weights in one chunk, from its peak.

    The function replaces scores[start:stop] by 2 ** (factor * score - peak), and writes the sum of the weights to
    `stats`. The two halves are separate functions: a row's weights need the row's peak, but once the peaks of several
    rows are known, the processor can compute these rows' weights at the same time.

    `store(builder, powers, scores, index, total)` writes two vectors from `index` on, and returns the new total.
    """

    @emit.instructions("aaiif")
    def weigh(builder: Any, scores: Any, stats: Any, start: Any, stop: Any, factor: Any) -> None:
        factor = emit.splat(builder, factor)
        minus_peak = builder.fneg(emit.splat(builder, emit.load(builder, stats, 0, F32)))

        def body(index: Any, total: Any) -> list[Any]:
            for first in (builder.add(index, emit.integer(LANES * number)) for number in (0, 2)):  # panels of 64 tokens
                place = emit.at(builder, scores, first, 4)
                vectors = (emit.load(builder, place, 4 * LANES * half) for half in (0, 1))
                powers = [emit.fma(builder, score, factor, minus_peak) for score in vectors]
                total = store(builder, powers, scores, first, total)
            return [total]

        [total] = emit.loop(builder, start, stop, 4 * LANES, [emit.constant(0.0)], body)
        total = emit.reduce(builder, total, builder.fadd)
        emit.store(builder, emit.first(builder, total), stats, 4)

    return weigh


def _store_floats(builder: Any, powers: list[Any], scores: Any, index: Any, total: Any) -> Any:
    for half, weight in enumerate(emit.exp2(builder, power) for power in powers):
        emit.store(builder, weight, emit.at(builder, scores, index, 4), 4 * LANES * half)
        total = builder.fadd(total, weight)
    return total


def _store_pairs(builder: Any, powers: list[Any], scores: Any, index: Any, total: Any) -> Any:
    """Write two vectors of weights as bfloat16, at the address scores + 2 * index. Returns the new total."""
    low, high = (_coarse_exp2(builder, power) for power in powers)
    pairs = emit.rounded_pairs(builder, low, high)
    emit.store(builder, builder.bitcast(pairs, _HALVES), emit.at(builder, scores, index, 2))
    ones = builder.bitcast(ir.Constant(_HALVES, [0x3F80] * (2 * LANES)), BF16_PAIRS)
    return emit.call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", total, pairs, ones)


def _coarse_exp2(builder: Any, power: Any) -> Any:
    """2 ** power for power <= 0, to 2 ** -13.5, exactly 1 at 0, exactly 0 from -126 down, on processors with AVX512.

    This precision suffices for results of 8 bits. 2 ** (power - floor(power)) is a polynomial (the best of degree 3
    that is 1 at 0). One instruction subtracts the floor, and another adds the floor to the exponent. The second
    instruction skips lanes that would underflow, because an underflow takes the processor a hundred times as long.
    """
    everywhere = ir.Constant(I16, -1)
    # 0b1001: power - floor(power), without floating-point exceptions
    fraction = _masked(builder, "reduce", everywhere, power, ir.Constant(I32, 0b1001))
    result = emit.polynomial(builder, (1.0, 0.6951168245278162, 0.2276448219148015, 0.0770671974337386), fraction)
    counts = builder.bitcast(builder.fcmp_unordered(">", power, emit.constant(-126.0)), I16)  # or not a number
    return _masked(builder, "scalef", counts, result, power)


def _masked(builder: Any, name: str, mask: Any, *arguments: Any) -> Any:
    """Emit an instruction of AVX512 with the default rounding. Lanes whose bit of `mask` is 0 become 0."""
    return emit.call(
        builder, f"llvm.x86.avx512.mask.{name}.ps.512", *arguments, emit.constant(0.0), mask, ir.Constant(I32, 4)
    )


weigh, weigh_pairs = _weigh(_store_floats), _weigh(_store_pairs if HAS_BF16_DOT else _store_floats)
"""The functions for weights in float32, and in pairs of bfloat16; `weigh_pairs` is called only where HAS_BF16_DOT."""


@emit.instructions("aaaai")
def merge(builder: Any, stats: Any, mixed: Any, chunk_stats: Any, chunk_mixed: Any, width: Any) -> None:
    """Merge a chunk's peak, sum and mixture of values into the row's results so far (ChunkAttention's attn_reduce)."""
    peak, total = (emit.splat(builder, emit.load(builder, stats, offset, F32)) for offset in (0, 4))
    chunk_peak, chunk_total = (emit.splat(builder, emit.load(builder, chunk_stats, offset, F32)) for offset in (0, 4))
    new_peak = emit.larger(builder, peak, chunk_peak)
    decay = emit.exp2(builder, builder.fsub(peak, new_peak))
    gain = emit.exp2(builder, builder.fsub(chunk_peak, new_peak))
    total = emit.fma(builder, chunk_total, gain, builder.fmul(total, decay))
    emit.store(builder, emit.first(builder, new_peak), stats)
    emit.store(builder, emit.first(builder, total), stats, 4)
    _emit_add(builder, (mixed, chunk_mixed), (decay, gain), width)


@emit.instructions("aaai")
def merge_stats(builder: Any, stats: Any, chunk_stats: Any, factors: Any, num_rows: Any) -> None:
    """Merge the peaks and sums of consecutive rows as `merge` does, eight rows at a time.

    Writes to `factors` [rows, 2] the factors by which `add_mixture` multiplies each row's mixtures. A row that sees
    nothing of the chunk has LOWEST and 0 in `chunk_stats`, and does not change. Up to seven rows after `num_rows` are
    read, and written back unchanged.
    """
    peaks = ir.Constant(I32S, [lane & -2 for lane in range(LANES)])
    is_peak = ir.Constant(ir.VectorType(ir.IntType(1), LANES), [1 - lane % 2 for lane in range(LANES)])

    def body(index: Any) -> None:
        offset = builder.mul(index, emit.integer(8))
        old, new = (emit.load(builder, builder.add(address, offset)) for address in (stats, chunk_stats))
        peak, chunk_peak = (builder.shuffle_vector(both, both, peaks) for both in (old, new))
        highest = emit.larger(builder, peak, chunk_peak)
        decay, gain = (emit.exp2(builder, builder.fsub(value, highest)) for value in (peak, chunk_peak))
        total = emit.fma(builder, new, gain, builder.fmul(old, decay))
        limit = emit.splat(builder, builder.trunc(builder.mul(builder.sub(num_rows, index), emit.integer(2)), I32))
        inside = builder.icmp_signed("<", ir.Constant(I32S, list(range(LANES))), limit)
        merged = builder.select(inside, builder.select(is_peak, highest, total), old)
        emit.store(builder, merged, builder.add(stats, offset))
        emit.store(builder, builder.select(is_peak, decay, gain), builder.add(factors, offset))

    emit.loop(builder, emit.integer(0), num_rows, LANES // 2, [], body)


@emit.instructions("aaai")
def add_mixture(builder: Any, mixed: Any, chunk_mixed: Any, factors: Any, width: Any) -> None:
    """Add a chunk's weighted sum of values to a row's sum so far: factors[0] * mixed + factors[1] * chunk_mixed."""
    decay, gain = (emit.splat(builder, emit.load(builder, factors, offset, F32)) for offset in (0, 4))
    _emit_add(builder, (mixed, chunk_mixed), (decay, gain), width)


def _emit_add(builder: Any, mixtures: tuple[Any, Any], factors: tuple[Any, Any], width: Any) -> None:
    """mixtures[0] = factors[0] * mixtures[0] + factors[1] * mixtures[1]"""

    def body(index: Any) -> None:
        at, other = (emit.at(builder, mixed, index, 4) for mixed in mixtures)
        scaled = builder.fmul(emit.load(builder, at), factors[0])
        emit.store(builder, emit.fma(builder, emit.load(builder, other), factors[1], scaled), at)

    emit.loop(builder, emit.integer(0), width, LANES, [], body)


@emit.instructions("aafaii")
def finish(builder: Any, stats: Any, mixed: Any, sink: Any, target: Any, width: Any, to_bf16: Any) -> None:
    """Write a row's result, mixture / sum, in whole vectors. The sum includes the weight of `sink` (LOWEST: none)."""
    peak, total = (emit.splat(builder, emit.load(builder, stats, offset, F32)) for offset in (0, 4))
    sink = emit.splat(builder, sink)
    new_peak = emit.larger(builder, peak, sink)
    decay = emit.exp2(builder, builder.fsub(peak, new_peak))
    total = emit.fma(builder, total, decay, emit.exp2(builder, builder.fsub(sink, new_peak)))

    def body(index: Any) -> None:
        offset = builder.mul(index, emit.integer(4))
        value = builder.fdiv(builder.fmul(emit.load(builder, builder.add(mixed, offset)), decay), total)
        with builder.if_else(builder.icmp_signed("!=", to_bf16, emit.integer(0))) as (then, otherwise):
            with then:
                emit.store(builder, emit.rounded(builder, value), emit.at(builder, target, index, 2))
            with otherwise:
                emit.store(builder, value, builder.add(target, offset))

    emit.loop(builder, emit.integer(0), width, LANES, [], body)
