"""Products of float32 rows and coded weights, compiled by numba for any x86-64 processor with AVX2.

Panels of codes (`coded.py`) and rows are memory addresses here. Threads take units of work from a counter; a unit is
some panels times some rows. A thread expands up to eight steps of a panel to float32 numbers, which stay in the
first-level cache, and multiplies all rows of the unit by these numbers. A single row is multiplied during the
expansion. An element of the result is computed in one order, which the number of rows does not change:

    for a group     two chains of fused multiply-adds, for the even and the odd inputs; then the sum of both
    for all groups  one chain: result = scale * (that sum) + result, and result = offset * (sum of inputs) + result

A thread's scratch memory:

    expanded    for each step 32 x 16 numbers, then the step's scales and offsets, two times 16 each
    sums        for each row 16 results
    inputs      for each row the sums of groups of inputs, if there are offsets
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from llvmlite import binding as llvm
from llvmlite import ir
from numba import carray

from foreword.kernels.llvm import emit, simd
from foreword.kernels.llvm.emit import F32, F32S, I16S, I32S, LANES
from foreword.kernels.products.coded import FORMATS, PANEL, STEP, SUPER_STEPS, WHOLE, CodeFormat
from foreword.kernels.runtime.compiled import Record, inlined, record, worker

CODED = record(
    "rows",
    "row_bytes",
    "num_rows",
    "panels",
    "panel_bytes",
    "super_bytes",
    "head_steps",
    "num_panels",
    "num_steps",
    "form",  # the number of the format in `forms`
    "kind",  # 1: offsets, 2: groups of 16
    "bias",
    "target",
    "target_bytes",  # from one row of the result to the next
    "width",  # columns of the result
    "group",  # panels of a unit
    "unit_rows",
    "counters",
    "scratch",
    "thread_scratch",
)
"""The arguments of a product: addresses, and counts."""
OFFSETS, GROUPS_OF_16 = 1, 2
_FEATURES = llvm.get_host_cpu_features()
HAS_INSTRUCTIONS = all(_FEATURES.get(name) for name in ("avx2", "fma", "f16c"))
"""Whether this processor has the instructions for these products."""
MOST_ROWS = 8 if _FEATURES.get("avx512f") else 3
"""The most rows that are multiplied at once. Their running sums fill the processor's registers."""
UNIT_ROWS = 96
"""The most rows of a unit. With this number, expanding a panel takes a few hundredths of the time of its products."""
UNIT_PANELS = 8
VALUES_BYTES = 4 * STEP * PANEL
SCALES, OFFSETS_AT = VALUES_BYTES, VALUES_BYTES + 128
EXPANDED_BYTES = VALUES_BYTES + 256
"""The bytes of an expanded step."""
_SUMS = SUPER_STEPS * EXPANDED_BYTES
_INPUTS = _SUMS + UNIT_ROWS * 4 * PANEL
_BYTES = ir.VectorType(ir.IntType(8), PANEL)
_HALVES = ir.VectorType(ir.HalfType(), PANEL)

FORMS = tuple(FORMATS.values())


# --------------------------------------------------------------------------------------------- expanding


def _bytes(value: int) -> ir.Constant:
    return ir.Constant(_BYTES, [value] * PANEL)


def _number(builder: Any, codes: Any) -> Any:
    """Convert signed bytes to float32."""
    return builder.sitofp(builder.sext(codes, I32S), F32S)


def _e4m3(builder: Any, codes: Any) -> Any:
    """Take the bits of e4m3 as bits of float16, which gives 2 ** -8 times the value, and convert them to float32."""

    def shifted(mask: int, places: int) -> Any:
        bits = builder.zext(builder.and_(codes, _bytes(mask)), I16S)
        return builder.shl(bits, ir.Constant(I16S, [places] * PANEL))

    return builder.fpext(builder.bitcast(builder.or_(shifted(0x80, 8), shifted(0x7F, 7)), _HALVES), F32S)


def _head(builder: Any, kind: CodeFormat, source: Any) -> list[Any]:
    """Load the scales of a head, and the head's offsets if the format has offsets."""
    if kind.scale == "none":
        return [emit.constant(1.0)]
    if kind.scale == "exponent":
        # 2 ** (e - 128) as two factors, neither too large nor too small for float32.
        exponents = builder.zext(emit.load(builder, source, 0, _BYTES), I32S)
        half = builder.lshr(exponents, ir.Constant(I32S, [1] * LANES))
        factors = []
        for part in (half, builder.sub(exponents, half)):
            biased = builder.add(part, ir.Constant(I32S, [63] * LANES))
            factors.append(builder.bitcast(builder.shl(biased, ir.Constant(I32S, [23] * LANES)), F32S))
        return [builder.fmul(*factors)]
    if kind.scale == "float":
        return [emit.load(builder, source)]
    if kind.scale == "bfloat16":
        return [emit.widened(builder, emit.load(builder, source, 0, I16S))]
    return [builder.fpext(emit.load(builder, source, 32 * part, _HALVES), F32S) for part in range(kind.parts)]


def _codes(builder: Any, planes: Sequence[Any], kind: CodeFormat, octet: Any) -> list[Any]:
    """The codes of eight inputs; `planes`: the addresses of a step's planes."""
    codes: list[Any] = [None] * 8
    for address, (bits, low) in zip(planes, kind.places, strict=True):
        start = emit.at(builder, address, octet, PANEL * bits)
        for number in range(bits):
            packed = emit.load(builder, start, PANEL * number, _BYTES)
            for part in range(8 // bits):
                code = packed if not part else builder.lshr(packed, _bytes(bits * part))
                if bits * (part + 1) < 8:
                    code = builder.and_(code, _bytes((1 << bits) - 1))
                at = number * (8 // bits) + part
                codes[at] = code if not low else builder.or_(codes[at], builder.shl(code, _bytes(low)))
    return codes


def _values(builder: Any, kind: CodeFormat, planes: Planes, octet: Any) -> list[Any]:
    """The numbers of eight inputs; each is a vector of 16 outputs."""
    if kind.planes == (WHOLE,):
        start = emit.at(builder, planes.addresses[0], octet, 8 * 2 * PANEL)
        if kind.is_bfloat16:
            return [emit.widened(builder, emit.load(builder, start, 32 * number, I16S)) for number in range(8)]
        return [builder.fpext(emit.load(builder, start, 32 * number, _HALVES), F32S) for number in range(8)]
    codes = _codes(builder, planes.addresses, kind, octet)
    if kind.table is not None:
        table = ir.Constant(_BYTES, [number % 256 for number in kind.table])
        codes = [emit.call(builder, "llvm.x86.ssse3.pshuf.b.128", table, code) for code in codes]
    elif kind.is_e4m3:
        return [_e4m3(builder, code) for code in codes]
    elif kind.has_zeros:
        codes = [builder.sub(code, planes.zeros) for code in codes]
    elif kind.zero:
        codes = [builder.sub(code, _bytes(kind.zero)) for code in codes]
    return [_number(builder, code) for code in codes]


Octet = Callable[[Any], list[Any]]
"""Number of a group of eight inputs in a step -> the inputs' numbers, each a vector of 16 outputs."""


class Planes(NamedTuple):
    """The codes of a step."""

    addresses: list[Any]
    zeros: Any
    """A vector of zero points; None if the format has no zero points."""


def for_steps(
    builder: Any, kind: CodeFormat, source: Any, num_steps: Any, carried: list[Any], body: Callable[..., list[Any]]
) -> list[Any]:
    """Run `carried = body(step, scales, planes, *carried)` for each step.

    `scales[part][group]` is a vector of 16 outputs; part 0 has the scales, part 1 the offsets.
    """
    shared = _head(builder, kind, source) if kind.head_steps > 1 else None
    stride = kind.step_bytes if kind.head_steps > 1 else kind.super_bytes
    num_groups = STEP // kind.group

    def of_step(step: Any, *carried: Any) -> list[Any]:
        place = emit.at(builder, source, step, stride)
        head = _head(builder, kind, place) if shared is None else shared
        start = builder.add(place, emit.integer(kind.head_bytes))
        scales = [[scale] * num_groups for scale in head]
        if kind.integer_bytes:
            for number in range(kind.parts * num_groups):
                integer = _number(builder, emit.load(builder, start, PANEL * number, _BYTES))
                part, group = divmod(number, num_groups)
                scales[part][group] = builder.fmul(head[part], integer)
        sizes = [STEP * PANEL * low // 8 for _, low in kind.places]
        planes = [builder.add(start, emit.integer(kind.integer_bytes + size)) for size in sizes]
        zeros = emit.load(builder, place, kind.head_bytes - PANEL, _BYTES) if kind.has_zeros else None
        return body(step, scales, Planes(planes, zeros), *carried)

    return emit.loop(builder, emit.integer(0), num_steps, 1, carried, of_step)


def _expand(builder: Any, kind: CodeFormat, source: Any, num_steps: Any, target: Any) -> None:
    def of_step(step: Any, scales: list[list[Any]], planes: Planes) -> list[Any]:
        start = emit.at(builder, target, step, EXPANDED_BYTES)
        for of_groups, at in zip(scales, (SCALES, OFFSETS_AT), strict=False):
            for group, scale in enumerate(of_groups):
                emit.store(builder, scale, start, at + 64 * group)

        def of_octet(number: Any) -> None:
            begin = emit.at(builder, start, number, 8 * 64)
            for at, value in enumerate(_values(builder, kind, planes, number)):
                emit.store(builder, value, begin, 64 * at)

        return emit.loop(builder, emit.integer(0), emit.integer(STEP // 8), 1, [], of_octet)

    for_steps(builder, kind, source, num_steps, [], of_step)


expand = emit.by_rows(
    "aia", range(len(FORMS)), lambda builder, form, arguments: _expand(builder, FORMS[form], *arguments)
)
"""Expand steps. Arguments: the number of the format; the first step, with its head; the number of steps; the target."""


# ----------------------------------------------------------------------------------------------- products


def _of_group(
    builder: Any, rows: Sequence[Any], first: int, size: int, octet: Octet, scales: Sequence[Any], sums: Sequence[Any]
) -> list[Any]:
    """Add the products of a group of `size` inputs, from input `first` of the step on, to the rows' sums.

    `scales`: the group's scale. If there are offsets, the group's offset follows, and then each row's sum of these
    inputs.
    """

    def of_octet(number: Any, *chains: Any) -> list[Any]:
        updated = list(chains)
        places = [emit.at(builder, row, number, 32) for row in rows]
        for at, value in enumerate(octet(number)):
            for row, place in enumerate(places):
                factor = emit.splat(builder, emit.load(builder, place, 4 * at, F32))
                updated[2 * row + at % 2] = emit.fma(builder, factor, value, updated[2 * row + at % 2])
        return updated

    empty = [emit.constant(0.0)] * (2 * len(rows))
    start, end = emit.integer(first // 8), emit.integer((first + size) // 8)
    chains = emit.loop(builder, start, end, 1, empty, of_octet)
    totals = []
    for row, total in enumerate(sums):
        part = builder.fadd(chains[2 * row], chains[2 * row + 1])
        totals.append(emit.fma(builder, scales[0], part, total))
        if len(scales) > 1:
            totals[row] = emit.fma(builder, scales[1], scales[2 + row], totals[row])
    return totals


def _multiply(builder: Any, variant: int, arguments: Sequence[Any]) -> None:
    rows, row_bytes, expanded, num_steps, sums, inputs, inputs_bytes = arguments
    kind, count = divmod(variant, 16)
    size = 16 if kind & GROUPS_OF_16 else STEP
    own_rows = [emit.at(builder, rows, row_bytes, number) for number in range(count)]
    own_inputs = [emit.at(builder, inputs, inputs_bytes, number) for number in range(count)]

    def of_step(step: Any, *totals: Any) -> list[Any]:
        start = emit.at(builder, expanded, step, EXPANDED_BYTES)
        step_rows = [emit.at(builder, row, step, 4 * STEP) for row in own_rows]
        updated = list(totals)

        def octet(number: Any) -> list[Any]:
            values = emit.at(builder, start, number, 8 * 64)
            return [emit.load(builder, values, 64 * at) for at in range(8)]

        for group in range(STEP // size):
            scales = [emit.load(builder, start, SCALES + 64 * group)]
            if kind & OFFSETS:
                scales.append(emit.load(builder, start, OFFSETS_AT + 64 * group))
                scales += [_input(builder, place, step, STEP // size, group) for place in own_inputs]
            updated = _of_group(builder, step_rows, group * size, size, octet, scales, updated)
        return updated

    before = [emit.load(builder, sums, 64 * number) for number in range(count)]
    for number, total in enumerate(emit.loop(builder, emit.integer(0), num_steps, 1, before, of_step)):
        emit.store(builder, total, sums, 64 * number)


def _input(builder: Any, inputs: Any, step: Any, num_groups: int, group: int) -> Any:
    """The sum of a row's inputs in one group, in all lanes."""
    place = emit.at(builder, inputs, step, 4 * num_groups)
    return emit.splat(builder, emit.load(builder, place, 4 * group, F32))


def _multiply_one(builder: Any, form: int, arguments: Sequence[Any]) -> None:
    source, num_steps, row, inputs, sums = arguments
    kind = FORMS[form]

    def of_step(step: Any, scales: list[list[Any]], planes: Planes, total: Any) -> list[Any]:
        def octet(number: Any) -> list[Any]:
            return _values(builder, kind, planes, number)

        step_rows, updated = [emit.at(builder, row, step, 4 * STEP)], [total]
        for group in range(STEP // kind.group):
            group_scales = [of_groups[group] for of_groups in scales]
            if kind.has_offset:
                group_scales.append(_input(builder, inputs, step, STEP // kind.group, group))
            updated = _of_group(builder, step_rows, group * kind.group, kind.group, octet, group_scales, updated)
        return updated

    [total] = for_steps(builder, kind, source, num_steps, [emit.load(builder, sums)], of_step)
    emit.store(builder, total, sums)


multiply_one = emit.by_rows("aiaaa", range(len(FORMS)), _multiply_one)
"""Do `expand` and `multiply` for one row, without memory in between. Arguments:

    form       the number of the format in `FORMS`
    source     the address of the first step, with its head
    num_steps
    row        the address of the row
    inputs     the address of the row's sums of inputs: for each step, one sum for each group
    sums       the address of the row's 16 results, to which the products are added
"""
multiply = emit.by_rows(
    "aiaiaai", [16 * kind + count for kind in range(4) for count in range(1, MOST_ROWS + 1)], _multiply
)
"""Add products of rows and expanded steps to the rows' results. The first argument is 16 * kind + the number of rows;
`kind` is that of `CODED`. The others:

    rows          the address of the first row
    row_bytes     the bytes from one row to the next
    expanded      the address of the steps that `expand` wrote
    num_steps
    sums          the address of the results, 16 for each row
    inputs        the address of the first row's sums of inputs: for each step, one sum for each group
    inputs_bytes  the bytes from one row's sums of inputs to the next row's
"""


@emit.instructions("aiai")
def add_up(builder: Any, row: Any, num_groups: Any, target: Any, vectors: Any) -> None:
    """Write the sum of each group of a row's inputs. A group has one or two vectors (`vectors`)."""
    is_two = builder.icmp_signed("==", vectors, emit.integer(2))

    def of_group(group: Any) -> None:
        place = emit.at(builder, row, builder.mul(group, vectors), 64)
        first = emit.load(builder, place)
        second = emit.load(builder, builder.select(is_two, builder.add(place, emit.integer(64)), place))
        both = builder.select(is_two, builder.fadd(first, second), first)
        total = emit.first(builder, emit.reduce(builder, both, builder.fadd))
        emit.store(builder, total, emit.at(builder, target, group, 4))

    emit.loop(builder, emit.integer(0), num_groups, 1, [], of_group)


@emit.instructions("aaa")
def _write(builder: Any, sums: Any, bias: Any, target: Any) -> None:
    """Write 16 sums of one row, plus the sums' biases."""
    emit.store(builder, builder.fadd(emit.load(builder, sums), emit.load(builder, bias)), target)


@inlined
def write_rows(a: Any, sums: int, panel: int, first: int, count: int) -> None:
    """Write a panel's results of `count` rows from `first` on, from the rows' sums, which may be overwritten."""
    room = min(PANEL, a.width - panel * PANEL)
    for row in range(count):
        own, target = sums + row * 64, a.target + (first + row) * a.target_bytes + panel * 64
        _write(own, a.bias + panel * 64, target if room == PANEL else own)
        if room < PANEL:
            simd.copy_bytes(target, own, 4 * room)


# ------------------------------------------------------------------------------------------------- threads


def thread_scratch(num_steps: int) -> int:
    """The bytes of scratch memory for each thread, if the weights have `num_steps` steps."""
    return _INPUTS + UNIT_ROWS * 8 * num_steps + 64


def set_units(a: Record, num_threads: int, unit_rows: int = UNIT_ROWS) -> None:
    """Set the sizes of units, of at most `unit_rows` rows, in a record with `num_rows`."""
    num_units = max(1, -(-int(a["num_rows"]) // unit_rows))
    a["unit_rows"] = -(-int(a["num_rows"]) // num_units)
    a["group"] = max(1, min(UNIT_PANELS, int(a["num_panels"]) * num_units // (4 * num_threads)))


@inlined
def _multiply_panel(a: Any, scratch: int, panel: int, first: int, count: int) -> None:
    sums, inputs, kind = scratch + _SUMS, scratch + _INPUTS, 16 * a.kind
    groups = STEP // 16 if a.kind & GROUPS_OF_16 else 1
    simd.clear_bytes(sums, count * 64)
    for step in range(0, a.num_steps, SUPER_STEPS):
        num_steps = min(SUPER_STEPS, a.num_steps - step)
        source = a.panels + panel * a.panel_bytes + step // a.head_steps * a.super_bytes
        if count == 1:
            row_inputs = inputs + step * 4 * groups
            multiply_one(a.form, source, num_steps, a.rows + first * a.row_bytes + step * 4 * STEP, row_inputs, sums)
            continue
        expand(a.form, source, num_steps, scratch)
        for row in range(0, count, MOST_ROWS):
            multiply(
                kind + min(MOST_ROWS, count - row),
                a.rows + (first + row) * a.row_bytes + step * 4 * STEP,
                a.row_bytes,
                scratch,
                num_steps,
                sums + row * 64,
                inputs + (row * a.num_steps + step) * 4 * groups,
                a.num_steps * 4 * groups,
            )
    write_rows(a, sums, panel, first, count)


@worker(CODED)
def multiply_units(arguments: Any) -> None:
    """Run in every thread: compute units until no unit is left."""
    a = carray(arguments, 1)[0]
    scratch = a.scratch + simd.fetch_add(a.counters + 64, 1) * a.thread_scratch
    num_groups = (a.num_panels + a.group - 1) // a.group
    num_units = num_groups * ((a.num_rows + a.unit_rows - 1) // a.unit_rows)
    vectors = 1 if a.kind & GROUPS_OF_16 else 2
    summed, unit = -1, simd.fetch_add(a.counters, 1)
    while unit < num_units:
        first, first_panel = unit // num_groups * a.unit_rows, unit % num_groups * a.group
        count = min(a.unit_rows, a.num_rows - first)
        if a.kind & OFFSETS and summed != first:
            for row in range(count):
                sums = scratch + _INPUTS + row * a.num_steps * 8 // vectors
                add_up(a.rows + (first + row) * a.row_bytes, a.num_steps * 2 // vectors, sums, vectors)
            summed = first
        for panel in range(first_panel, min(first_panel + a.group, a.num_panels)):
            _multiply_panel(a, scratch, panel, first, count)
        unit = simd.fetch_add(a.counters, 1)
