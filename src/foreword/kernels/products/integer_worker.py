"""Products in integers: coded weights times rows of eight bits, compiled by numba for processors with AVX2.

Panels of quads (`coded.py`) and rows are memory addresses here. Two workers:

    quantise   float32 rows -> for each 32 inputs whole numbers n of -127 to 127 and a scale: x = scale * n, about
    multiply   of each group of inputs the sum of number * n in integers, which is exact in any order; then, in float32
               and in one chain over groups, result = scale of weights * (sum * scale of the row) + result, and
               result = offset * (sum of n * scale of the row) + result

So the bits of a result depend on no other row, on no thread and on no instruction set. For 32 inputs x, scale = max |x|
/ 127, and n is x * (127 / max |x|), rounded to the nearest whole number, halves to even. If max |x| is below TINY, all
are 0.

A quantised step has 64 bytes:

    32 bytes   32 numbers
    4          the scale, float32
    12         three sums, int32: of all numbers, of the first 16, and of the last 16
    12         these sums times the scale, float32

An instruction of AVX2 adds two products of bytes to a sum of 16 bits. This worker adds more products to that sum, up to
the largest number of products that cannot overflow. An instruction of VNNI adds four products to a sum of 32 bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import binding as llvm
from llvmlite import ir
from numba import carray

from foreword.kernels.llvm import emit, simd
from foreword.kernels.llvm.emit import F32, F32S, I16, I32, I32S, LANES
from foreword.kernels.products.coded import PANEL, QUAD, STEP, CodeFormat
from foreword.kernels.products.coded_worker import CODED, FORMS, Planes, for_steps, write_rows
from foreword.kernels.runtime.compiled import inlined, record, worker

QUANTISED = record("rows", "num_rows", "num_steps", "target", "unit_rows", "counters")
"""The arguments of rows that are quantised: addresses, and counts."""
STEP_BYTES = 64
_SCALE, _SUMS, _SCALED_SUMS = STEP, STEP + 4, STEP + 16
TINY = 2.0**-100
MOST, LARGEST = 127, (1 << 15) - 1
"""The largest number of a quantised row, and the largest signed number of 16 bits."""
ROUND = 12582912.0
"""3 * 2 ** 22. If it is added to a float32, the sum's last bits are the nearest whole number."""
ROWS = 4
"""The most rows that are multiplied at once."""
UNIT_ROWS = 32
"""The most rows of a unit. This number of quantised rows fits into a core's cache."""
THREAD_SCRATCH = ROWS * 4 * PANEL
"""Bytes of each thread's scratch memory, which holds sums."""
_I8 = ir.IntType(8)
Dot = Callable[[Any, Any, Any, Any], Any]
"""(builder, 16 sums of int32, 64 codes, 64 signed bytes) -> the sums, each with four products added."""


# ----------------------------------------------------------------------------------------------- quantising


def _words(value: int) -> ir.Constant:
    return ir.Constant(I32S, [value] * LANES)


def _emit_quantised(builder: Any, source: Any, target: Any) -> None:
    """Quantise 32 float32. Absolute values are compared as integers, so a NaN becomes the scale.

    An infinite number makes the scale NaN, because sums times infinity would depend on the instructions.
    """
    halves = [emit.load(builder, source, 64 * half) for half in (0, 1)]
    sizes = [builder.and_(builder.bitcast(half, I32S), _words(0x7FFFFFFF)) for half in halves]

    def larger(left: Any, right: Any) -> Any:
        return builder.select(builder.icmp_signed(">", left, right), left, right)

    largest = builder.bitcast(emit.first(builder, emit.reduce(builder, larger(*sizes), larger)), F32)
    is_tiny, zero = builder.fcmp_ordered("<", largest, ir.Constant(F32, TINY)), ir.Constant(F32, 0.0)
    scale = builder.select(is_tiny, zero, builder.fdiv(largest, ir.Constant(F32, MOST)))
    is_finite = builder.fcmp_ordered("<", largest, ir.Constant(F32, math.inf))
    scale = builder.select(is_finite, scale, ir.Constant(F32, math.nan))
    inverse = emit.splat(builder, builder.select(is_tiny, zero, builder.fdiv(ir.Constant(F32, MOST), largest)))
    sums = []
    for half, values in enumerate(halves):
        shifted = builder.fadd(builder.fmul(values, inverse), emit.constant(ROUND))
        numbers = builder.sub(builder.bitcast(shifted, I32S), builder.bitcast(emit.constant(ROUND), I32S))
        emit.store(builder, builder.trunc(numbers, ir.VectorType(_I8, LANES)), target, LANES * half)
        sums.append(emit.first(builder, emit.reduce(builder, numbers, builder.add)))
    emit.store(builder, scale, target, _SCALE)
    for place, total in enumerate((builder.add(*sums), *sums)):
        emit.store(builder, total, target, _SUMS + 4 * place)
        emit.store(builder, builder.fmul(builder.sitofp(total, F32), scale), target, _SCALED_SUMS + 4 * place)


@emit.instructions("aai")
def _quantise_row(builder: Any, row: Any, target: Any, num_steps: Any) -> None:
    def of_step(step: Any) -> None:
        source = emit.at(builder, row, step, 4 * STEP)
        _emit_quantised(builder, source, emit.at(builder, target, step, STEP_BYTES))

    emit.loop(builder, emit.integer(0), num_steps, 1, [], of_step)


@worker(QUANTISED)
def quantise_rows(arguments: Any) -> None:
    """Run in every thread: quantise units of rows until no unit is left."""
    a = carray(arguments, 1)[0]
    while True:
        first = simd.fetch_add(a.counters, a.unit_rows)
        if first >= a.num_rows:
            return
        for row in range(first, min(first + a.unit_rows, a.num_rows)):
            _quantise_row(a.rows + row * a.num_steps * 4 * STEP, a.target + row * a.num_steps * STEP_BYTES, a.num_steps)


# ------------------------------------------------------------------------------------------------- products


def _is_signed(kind: CodeFormat) -> bool:
    """Whether codes become signed numbers before they are multiplied."""
    return kind.table is not None or kind.has_zeros or sum(kind.planes) == 8


def _numbers(builder: Any, kind: CodeFormat, planes: Planes, quad: int, part: int, size: int) -> Any:
    """Load a quad's part of `size` bytes: signed numbers, or codes from which `zero` is to be subtracted later."""
    bytes_kind = ir.VectorType(_I8, size)

    def constant(value: int) -> ir.Constant:
        return ir.Constant(bytes_kind, [value] * size)

    code: Any = None
    for address, (bits, low) in zip(planes.addresses, kind.places, strict=True):
        vector, slot = divmod(quad, 8 // bits)
        field = emit.load(builder, address, QUAD * PANEL * vector + size * part, bytes_kind)
        if slot:
            field = builder.lshr(field, constant(bits * slot))
        if bits * (slot + 1) < 8:
            field = builder.and_(field, constant((1 << bits) - 1))
        code = field if code is None else builder.or_(code, builder.shl(field, constant(low)))
    if kind.table is not None:
        table = ir.Constant(ir.VectorType(_I8, 32), [number % 256 for number in kind.table] * 2)
        halves = [_piece(builder, code, 32, place) for place in range(size // 32)]
        return _joined(builder, [emit.call(builder, "llvm.x86.avx2.pshuf.b", table, half) for half in halves])
    if kind.has_zeros:
        lanes = [(size * part + place) // QUAD for place in range(size)]
        zeros = planes.zeros
        code = builder.sub(code, builder.shuffle_vector(zeros, zeros, ir.Constant(ir.VectorType(I32, size), lanes)))
    return code


def _piece(builder: Any, vector: Any, size: int, place: int) -> Any:
    """Cut a vector into pieces of `size` elements, and return piece number `place`."""
    order = ir.Constant(ir.VectorType(I32, size), list(range(size * place, size * (place + 1))))
    return builder.shuffle_vector(vector, vector, order)


def _joined(builder: Any, parts: Sequence[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    order = ir.VectorType(I32, 2 * parts[0].type.count)
    return builder.shuffle_vector(*parts, ir.Constant(order, list(range(order.count))))


def _of_row(builder: Any, row: Any, quad: int, size: int) -> Any:
    """Four numbers of a row, repeated for each of `size / 4` outputs."""
    words = ir.VectorType(I32, size // QUAD)
    single = builder.insert_element(
        ir.Constant(words, ir.Undefined), emit.load(builder, row, QUAD * quad, I32), ir.Constant(I32, 0)
    )
    everywhere = builder.shuffle_vector(single, ir.Constant(words, ir.Undefined), ir.Constant(words, None))
    return builder.bitcast(everywhere, ir.VectorType(_I8, size))


def _sums_of_pairs(builder: Any, kind: CodeFormat, planes: Planes, rows: Sequence[Any], quads: range) -> list[Any]:
    """For each row, the sums of the products of some quads, computed with AVX2: 16 int32, one for each output."""
    words, halves, signed = ir.VectorType(I32, 8), ir.VectorType(I16, 16), _is_signed(kind)
    largest = max(map(abs, kind.table)) if kind.table is not None else 128 if signed else (1 << sum(kind.planes)) - 1
    max_pairs = LARGEST // (2 * MOST * largest)  # pairs of products whose sum fits 16 bits
    parts: list[list[Any]] = []
    for part in (0, 1):
        totals, pairs = [ir.Constant(words, None)] * len(rows), [None] * len(rows)
        for count, quad in enumerate(quads, 1):
            numbers = left = _numbers(builder, kind, planes, quad, part, 32)
            if signed:
                left = emit.call(builder, "llvm.abs.v32i8", numbers, ir.Constant(ir.IntType(1), 0))
            for place, row in enumerate(rows):
                right = _of_row(builder, row, quad, 32)
                if signed:
                    right = emit.call(builder, "llvm.x86.avx2.psign.b", right, numbers)
                product = emit.call(builder, "llvm.x86.avx2.pmadd.ub.sw", left, right, returns=halves)
                pairs[place] = product if pairs[place] is None else builder.add(pairs[place], product)
                if count % max_pairs == 0 or count == len(quads):
                    ones = ir.Constant(halves, [1] * 16)
                    wide = emit.call(builder, "llvm.x86.avx2.pmadd.wd", pairs[place], ones, returns=words)
                    totals[place], pairs[place] = builder.add(totals[place], wide), None
        parts.append(totals)
    return [_joined(builder, [low, high]) for low, high in zip(*parts, strict=True)]


def vnni(builder: Any, total: Any, codes: Any, numbers: Any) -> Any:
    """VNNI's instruction for `Dot`."""
    words = [builder.bitcast(operand, I32S) for operand in (codes, numbers)]
    return emit.call(builder, "llvm.x86.avx512.vpdpbusd.512", total, *words)


DOT: Dot | None = vnni if llvm.get_host_cpu_features().get("avx512vnni") else None
"""Emits this processor's instruction that adds products of bytes in 32 bits. None: it adds them in 16 bits only."""


def _sums_of_quads(
    builder: Any, kind: CodeFormat, planes: Planes, rows: Sequence[Any], quads: range, dot: Dot
) -> list[Any]:
    """`_sums_of_pairs` in 32 bits.

    With signed numbers, a sum is too large by 128 times the sum of the row's numbers.
    """
    totals: list[Any] = [_words(0)] * len(rows)
    for quad in quads:
        left = _numbers(builder, kind, planes, quad, 0, 64)
        if _is_signed(kind):
            left = builder.xor(left, ir.Constant(left.type, [128] * 64))
        for place, row in enumerate(rows):
            totals[place] = dot(builder, totals[place], left, _of_row(builder, row, quad, 64))
    return totals


def emit_product(
    builder: Any, kind: CodeFormat, dot: Dot | None, source: Any, num_supers: Any, rows: Sequence[Any]
) -> list[Any]:
    """The products of quantised rows and a panel, 16 float32 per row; `num_supers`: the number of the panel's heads."""
    size, zero = kind.group // QUAD, kind.zero
    if _is_signed(kind):
        zero = 0 if dot is None else 128

    def of_step(step: Any, scales: list[list[Any]], planes: Planes, *totals: Any) -> list[Any]:
        updated = list(totals[: len(rows)])
        step_rows = [emit.at(builder, place, step, STEP_BYTES) for place in totals[len(rows) :]]
        for group in range(STEP // kind.group):
            offset = 4 * (group + 1 if kind.group < STEP else 0)
            quads = range(size * group, size * (group + 1))
            if dot is None:
                sums = _sums_of_pairs(builder, kind, planes, step_rows, quads)
            else:
                sums = _sums_of_quads(builder, kind, planes, step_rows, quads, dot)
            for place, (row, total) in enumerate(zip(step_rows, sums, strict=True)):
                if zero:
                    inputs = emit.splat(builder, emit.load(builder, row, _SUMS + offset, I32))
                    total = builder.sub(total, builder.mul(inputs, _words(zero)))
                scale = emit.splat(builder, emit.load(builder, row, _SCALE, F32))
                part = builder.fmul(builder.sitofp(total, F32S), scale)
                updated[place] = emit.fma(builder, scales[0][group], part, updated[place])
                if kind.has_offset:
                    inputs = emit.splat(builder, emit.load(builder, row, _SCALED_SUMS + offset, F32))
                    updated[place] = emit.fma(builder, scales[1][group], inputs, updated[place])
        return [*updated, *totals[len(rows) :]]

    def of_super(number: Any, *totals: Any) -> list[Any]:
        place = emit.at(builder, source, number, kind.super_bytes)
        skipped = builder.mul(number, emit.integer(kind.head_steps * STEP_BYTES))
        super_rows = [builder.add(row, skipped) for row in rows]
        updated = for_steps(builder, kind, place, emit.integer(kind.head_steps), [*totals, *super_rows], of_step)
        return updated[: len(rows)]

    empty = [emit.constant(0.0)] * len(rows)
    if kind.head_steps == 1:
        return for_steps(builder, kind, source, num_supers, [*empty, *rows], of_step)[: len(rows)]
    return emit.loop(builder, emit.integer(0), num_supers, 1, empty, of_super)


def _emit_multiply(builder: Any, variant: int, arguments: Sequence[Any]) -> None:
    source, num_supers, row, row_bytes, num_rows, sums = arguments
    form, is_many = divmod(variant, 2)
    rows, last = [row], builder.sub(num_rows, emit.integer(1))
    for number in range(1, ROWS if is_many else 1):
        index = builder.select(builder.icmp_signed("<", last, emit.integer(number)), last, emit.integer(number))
        rows.append(builder.add(row, builder.mul(index, row_bytes)))
    for place, total in enumerate(emit_product(builder, FORMS[form], DOT, source, num_supers, rows)):
        emit.store(builder, total, sums, 64 * place)


_multiply = emit.by_rows(
    "aiaiia", [2 * form + many for form, kind in enumerate(FORMS) if kind.is_whole for many in (0, 1)], _emit_multiply
)
"""Write the sums of a panel and up to ROWS rows. Arguments:

    variant      2 * the number of the format, plus 1 if there are several rows
    source       the address of the panel
    num_supers   the number of the panel's heads
    row          the address of the first row
    row_bytes    the bytes from one row to the next
    num_rows
    sums         the address of the sums, with memory for ROWS rows if there are several rows
"""


@inlined
def _multiply_panel(a: Any, sums: int, panel: int, first: int, count: int) -> None:
    source = a.panels + panel * a.panel_bytes
    for begin in range(first, first + count, ROWS):
        number = min(ROWS, first + count - begin)
        row = a.rows + begin * a.row_bytes
        _multiply(2 * a.form + (number > 1), source, a.num_steps // a.head_steps, row, a.row_bytes, number, sums)
        write_rows(a, sums, panel, begin, number)


@worker(CODED)
def multiply_integers(arguments: Any) -> None:
    """Run in every thread: compute units until no unit is left."""
    a = carray(arguments, 1)[0]
    sums = a.scratch + simd.fetch_add(a.counters + 64, 1) * a.thread_scratch
    num_groups = (a.num_panels + a.group - 1) // a.group
    num_units = num_groups * ((a.num_rows + a.unit_rows - 1) // a.unit_rows)
    unit = simd.fetch_add(a.counters, 1)
    while unit < num_units:
        first, first_panel = unit // num_groups * a.unit_rows, unit % num_groups * a.group
        count = min(a.unit_rows, a.num_rows - first)
        for panel in range(first_panel, min(first_panel + a.group, a.num_panels)):
            _multiply_panel(a, sums, panel, first, count)
        unit = simd.fetch_add(a.counters, 1)
