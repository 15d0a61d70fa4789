"""Weights of scores for AMX tiles, in 16-bit arithmetic: two vectors of scores become one vector of weights.

A weight is 2 ** (factor * score - peak) as bfloat16. A bfloat16 keeps 8 bits, so earlier steps need not keep more:

    score, score'    float32    x = 512 * (factor * score - peak + 76), rounded to an integer
    x                16 bits    both scores' x in one vector, from 0 to 65535: 7 bits before the point, 9 after it
    fraction f       float16    512 * (2 ** f - 1 - f) by a polynomial, also an integer
    x + f            16 bits    7 bits of exponent, 9 of mantissa; rounded, without the last two bits: a bfloat16

A polynomial that yields 1024 + n in float16 has n in its last bits. In the same way, 2 ** 23 + n in float32 has n in
its last bits. The other bits only add to the exponent; this is the reason for the 76 above.

The peak is MARGIN above the largest score that a row has when its first weights are computed. Weights between 2 ** -76
and 1 are right. Smaller weights become 2 ** -76, larger weights nearly 2. Weights thousands of powers below the peak
also become nearly 2, because integers wrap around there. A row whose weights add up to MOST_SUM or more must be weighed
again.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types

from foreword.kernels.llvm import emit
from foreword.kernels.llvm.emit import F32, I16, I32, I32S, LANES

HAS_FLOAT16 = bool(llvm.get_host_cpu_features().get("avx512fp16"))
"""Whether this processor computes with vectors of float16. If not, these functions are never called."""
PANEL_TOKENS = 64
MARGIN = 44.0
LEAST_SUM, MOST_SUM = 2.0**-46, 1.0
"""If the sum of a row's weights is outside these bounds, the row is weighed again. Its estimated peak was then too far
from its scores."""
_HALVES, _FLOAT16S = ir.VectorType(I16, 2 * LANES), ir.VectorType(ir.HalfType(), 2 * LANES)
_FRACTION, _ONE, _BFLOAT16_ONE = 511, 0x3C00, 0x3F80
_LEAST_POWER = 76.0
_TERMS = 1985.0, -259.75, -511.75, 324.0
"""Terms in u = 1 + f / 2 of 512 * (2 ** f - 1 - f) + 1538. 1538 is 1024 + 512 + 2: the 2 rounds the result, and the 512
adds 1 to its exponent."""
_MAGIC = 8388608.0
_MAGIC_BITS = 0x4B000000


def _halves(value: int) -> ir.Constant:
    return ir.Constant(_HALVES, [value] * (2 * LANES))


class _Constants:
    """Vectors that stay in registers; LLVM would load and broadcast them again in each turn of a loop."""

    def __init__(self, builder: Any, factor: Any) -> None:
        words = [_FRACTION, _ONE, _BFLOAT16_ONE, *(int(np.float16(term).view(np.uint16)) for term in _TERMS)]
        fraction, one, bfloat16_one, *terms = (_kept(builder, _halves(word)) for word in words)
        self.fraction, self.one, self.ones = fraction, one, builder.bitcast(bfloat16_one, emit.BF16_PAIRS)
        self.terms = [builder.bitcast(term, _FLOAT16S) for term in terms]
        self.magic_bits = _kept(builder, ir.Constant(I32S, [_MAGIC_BITS] * LANES))
        self.scale = builder.fmul(emit.splat(builder, factor), emit.constant(512.0))


def _kept(builder: Any, vector: Any) -> Any:
    kind = ir.FunctionType(vector.type, [vector.type])
    return builder.call(ir.InlineAsm(kind, "", "=v,0"), [vector])


def _emit_weights(builder: Any, scores: tuple[Any, Any], offset: Any, constants: _Constants) -> Any:
    """The weights of two vectors of scores, as the bits of 32 bfloat16: four of one vector, four of the other, ..."""
    both = []
    for score in scores:
        bits = builder.bitcast(emit.fma(builder, score, constants.scale, offset), I32S)
        both.append(builder.sub(bits, constants.magic_bits))
    x = _joined(builder, *both)
    unit = builder.bitcast(builder.or_(builder.and_(x, constants.fraction), constants.one), _FLOAT16S)
    result = constants.terms[-1]
    for term in reversed(constants.terms[:-1]):
        result = emit.call(builder, "llvm.fma.v32f16", result, unit, term)
    result = emit.call(builder, "llvm.uadd.sat.v32i16", x, builder.bitcast(result, _HALVES))
    return builder.lshr(result, _halves(2))


def _joined(builder: Any, low: Any, high: Any) -> Any:
    """Two vectors of 16 integers as one of 32 integers from 0 to 65535: four of one, four of the other, ..."""
    return emit.call(builder, "llvm.x86.avx512.packusdw.512", low, high, returns=_HALVES)


def _offset(builder: Any, stats: Any) -> Any:
    """The addend of a row's scaled scores; NaN if the row's peak is NaN."""
    above = builder.fsub(ir.Constant(F32, _LEAST_POWER), emit.load(builder, stats, 0, F32))
    offset = emit.call(builder, "llvm.fma.f32", above, ir.Constant(F32, 512.0), ir.Constant(F32, _MAGIC))
    return emit.splat(builder, offset)


def _add(builder: Any, total: Any, weights: Any, constants: _Constants) -> Any:
    pairs = builder.bitcast(weights, emit.BF16_PAIRS)
    return emit.call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", total, pairs, constants.ones)


def _seen(builder: Any, begin: int, low: Any, high: Any) -> Any:
    """A mask of the 16 tokens from `begin` on that are in low <= token < high."""
    place = ir.Constant(I32S, list(range(begin, begin + LANES)))
    bounds = (emit.splat(builder, builder.trunc(bound, I32)) for bound in (low, high))
    after, before = (builder.icmp_signed(*how) for how in zip((">=", "<"), (place, place), bounds, strict=True))
    return builder.and_(after, before)


@emit.instructions("aiaiiif")
def estimate_peaks(builder: Any, *arguments: Any) -> None:
    """Write the peaks of rows, from the first panel that they see: MARGIN above the largest score, rounded up.

    The rows see the panel's tokens from `low` to before `high`, at least one token. Arguments: scores [rows, 64] and
    bytes between rows, stats [rows, 2], the number of rows, low, high, factor.
    """
    scores, score_bytes, stats, num_rows, low, high, factor = arguments
    seen = [_seen(builder, begin, low, high) for begin in range(0, PANEL_TOKENS, LANES)]

    def body(row: Any) -> None:
        source = builder.add(scores, builder.mul(row, score_bytes))
        vectors = [
            builder.select(mask, emit.load(builder, source, 4 * LANES * number), emit.constant(emit.LOWEST))
            for number, mask in enumerate(seen)
        ]
        while len(vectors) > 1:
            vectors = [emit.larger(builder, *pair) for pair in zip(vectors[::2], vectors[1::2], strict=True)]
        largest = emit.reduce(builder, vectors[0], lambda left, right: emit.larger(builder, left, right))
        peak = builder.fmul(emit.first(builder, largest), factor)
        peak = builder.fadd(emit.call(builder, "llvm.ceil.f32", peak), ir.Constant(F32, MARGIN))
        emit.store(builder, peak, emit.at(builder, stats, row, 8))

    emit.loop(builder, emit.integer(0), num_rows, 1, [], body)


def _weigh(builder: Any, arguments: tuple[Any, ...], bounds: tuple[Any, Any] | None) -> None:
    scores, score_bytes, weights, weight_bytes, stats, totals, num_rows, factor = arguments
    constants, masks = _Constants(builder, factor), []
    if bounds is not None:
        all_bits, none = (ir.Constant(I32S, [bits] * LANES) for bits in (65535, 0))
        for begin in range(0, PANEL_TOKENS, 2 * LANES):
            both = (_seen(builder, first, *bounds) for first in (begin, begin + LANES))
            masks.append(_joined(builder, *(builder.select(mask, all_bits, none) for mask in both)))

    def body(row: Any) -> None:
        source, target = (
            builder.add(address, builder.mul(row, size))
            for address, size in ((scores, score_bytes), (weights, weight_bytes))
        )
        total_at = emit.at(builder, totals, row, 4 * LANES)
        offset, total = _offset(builder, emit.at(builder, stats, row, 8)), emit.load(builder, total_at)
        for number, first in enumerate(range(0, PANEL_TOKENS, 2 * LANES)):
            pair = emit.load(builder, source, 4 * first), emit.load(builder, source, 4 * (first + LANES))
            packed = _emit_weights(builder, pair, offset, constants)
            if masks:
                packed = builder.and_(packed, masks[number])
            emit.store(builder, packed, target, 2 * first)
            total = _add(builder, total, packed, constants)
        emit.store(builder, total, total_at)

    emit.loop(builder, emit.integer(0), num_rows, 1, [], body)


@emit.instructions("aiaiaaif")
def weigh_panel(builder: Any, *arguments: Any) -> None:
    """Compute the weights of rows that see all 64 tokens of a panel. Add them to each row's total, which has 16 lanes.

    Arguments: scores [rows, 64] float32 and bytes between rows, weights [rows, 64] and bytes between rows, stats
    [rows, 2] with the rows' peaks, totals [rows, 16], the number of rows, factor.
    """
    if HAS_FLOAT16:
        _weigh(builder, arguments, None)


@emit.instructions("aiaiaaiiif")
def weigh_seen(builder: Any, *arguments: Any) -> None:
    """`weigh_panel` for rows that see only the tokens from `low` to before `high`; other tokens' weights are 0.

    `low` and `high` are arguments between the number of rows and the factor.
    """
    if HAS_FLOAT16:
        *others, low, high, factor = arguments
        _weigh(builder, (*others, factor), (low, high))


@emit.instructions("aa")
def sum_lanes(builder: Any, total: Any, stats: Any) -> None:
    """Join the 16 lanes of `total` as a tree; write the result, the sum of a row's weights, to the row's stats."""
    joined = emit.reduce(builder, emit.load(builder, total), builder.fadd)
    emit.store(builder, emit.first(builder, joined), stats, 4)


@emit.instructions("aaiif")
def lower(builder: Any, scores: Any, stats: Any, start: Any, stop: Any, factor: Any) -> None:
    """Replace each of scores[start:stop] (multiples of 16) by factor * score - peak, or by -120 if that is larger."""
    minus_peak = builder.fneg(emit.splat(builder, emit.load(builder, stats, 0, F32)))
    factor = emit.splat(builder, factor)

    def body(index: Any) -> None:
        at = emit.at(builder, scores, index, 4)
        power = emit.fma(builder, emit.load(builder, at), factor, minus_peak)
        emit.store(builder, emit.larger(builder, emit.constant(-120.0), power), at)

    emit.loop(builder, start, stop, LANES, [], body)


def _all_less(builder: Any, scores: Any, bounds: tuple[Any, Any], *, by_size: bool) -> Any:
    """1 if scores[bounds] (their absolute values if `by_size`) are all below infinity, and none is NaN."""
    infinity = ir.Constant(emit.F32S, [float("inf")] * LANES)

    def body(index: Any, so_far: Any) -> list[Any]:
        score = emit.load(builder, emit.at(builder, scores, index, 4))
        score = emit.call(builder, "llvm.fabs.v16f32", score) if by_size else score
        return [builder.and_(so_far, builder.bitcast(builder.fcmp_ordered("<", score, infinity), I16))]

    [lanes] = emit.loop(builder, *bounds, LANES, [ir.Constant(I16, -1)], body)
    return builder.zext(builder.icmp_signed("==", lanes, ir.Constant(I16, -1)), emit.I64)


@emit.instructions("a", types.intp)
def are_finite(builder: Any, scores: Any) -> Any:
    """1 if all 64 scores are finite numbers."""
    return _all_less(builder, scores, (emit.integer(0), emit.integer(PANEL_TOKENS)), by_size=True)


@emit.instructions("aii", types.intp)
def are_below_infinity(builder: Any, scores: Any, start: Any, stop: Any) -> Any:
    """1 if scores[start:stop] (multiples of 16) are numbers, and no score is infinitely large."""
    return _all_less(builder, scores, (start, stop), by_size=False)
