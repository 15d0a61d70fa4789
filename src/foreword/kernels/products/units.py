"""The common parts of all workers of linear layers: arguments, panels of compact weights, and the writing of results.

A unit of work is some rows x some panels; threads take units from a counter. Some layers multiply several heads, side
by side: each head has its own panels, one head after the other, and its own rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from foreword.kernels.llvm import emit, simd
from foreword.kernels.llvm.emit import BF16S, I16S
from foreword.kernels.llvm.norms import silu
from foreword.kernels.llvm.tiles import PRODUCT_PANEL
from foreword.kernels.products.weights12 import STEP_BYTES
from foreword.kernels.runtime.compiled import Record, Worker, inlined, record

PRODUCT = record(
    "rows",
    "row_bytes",
    "weight",
    "table",
    "exceptions",
    "starts",
    "bias",
    "target",
    "num_rows",
    "width",  # columns of the result
    "num_steps",
    "part_steps",  # steps of each part, except the last part, which may have fewer
    "num_panels",
    "head_panels",  # panels of one head
    "head_bytes",  # bytes from a row of one head to the next head's row
    "head_gap",  # elements between the results of two heads
    "group",  # panels of a unit, all of one head
    "unit_rows",  # rows of a unit
    "gated",
    "counters",
    "scratch",
    "thread_scratch",  # bytes of scratch memory per thread
    "first",  # number of rows of a unit that multiply weights during the expansion (`pair_worker.py`)
)
"""The arguments of a product: addresses, and counts."""
SUMS_BYTES = 4 * PRODUCT_PANEL
"""The bytes that the sums for one row and one panel take."""


class ProductWorker(NamedTuple):
    """One way to multiply."""

    worker: Worker
    """The function that every thread runs: it computes units until no unit is left."""
    thread_scratch: Callable[[int], int]
    """Bytes of scratch memory for each thread, from the number of steps of the weights."""
    set_units: Callable[[Record, int], None]
    """Sets the sizes of work units in a record whose `num_rows` is set. The second argument: the number of threads."""


def set_group(a: Record, group: int) -> None:
    """Set the number of a unit's panels to `group`.

    If each head has its own panels, set a divisor of `group` instead, so that a unit has panels of one head only.
    """
    a["group"] = group if a["head_panels"] == a["num_panels"] else math.gcd(group, int(a["head_panels"]))


def _bfloat16(builder: Any, vector: Any) -> Any:
    return builder.bitcast(builder.fptrunc(vector, BF16S), I16S)


def _half(builder: Any, sums: Any, bias: Any, half: int) -> Any:
    return builder.fadd(emit.load(builder, sums, 64 * half), emit.load(builder, bias, 64 * half))


def emit_end(builder: Any, sums: Any, bias: Any, target: Any) -> None:
    """Write 32 sums of one row, plus the sums' biases, as bfloat16."""
    for half in (0, 1):
        emit.store(builder, _bfloat16(builder, _half(builder, sums, bias, half)), target, 32 * half)


def emit_gate(builder: Any, sums: Any, bias: Any, target: Any) -> None:
    """Write silu(g) * u for 16 pairs of one row. g, u and silu(g) are rounded, as if they were written to memory."""
    gate, up = (emit.widened(builder, _bfloat16(builder, _half(builder, sums, bias, half))) for half in (0, 1))
    rounded = emit.widened(builder, _bfloat16(builder, silu(builder, gate)))
    emit.store(builder, _bfloat16(builder, builder.fmul(rounded, up)), target)


_write, _write_gate = emit.instructions("aaa")(emit_end), emit.instructions("aaa")(emit_gate)


@inlined
def rows_of(a: Any, panel: int) -> Any:
    """The address of the rows that are multiplied by a panel."""
    return a.rows + panel // a.head_panels * a.head_bytes


@inlined
def target_of(a: Any, row: int, panel: int) -> Any:
    """The address in the result matrix at which a panel's columns begin in this row."""
    place = row * a.width + panel // a.head_panels * a.head_gap
    return a.target + 2 * (place + panel * (PRODUCT_PANEL // 2 if a.gated else PRODUCT_PANEL))


@inlined
def is_whole(a: Any, panel: int) -> Any:
    """Whether the result has all columns of a panel."""
    return (panel + 1) * (PRODUCT_PANEL // 2 if a.gated else PRODUCT_PANEL) <= a.width


@inlined
def end_rows(a: Any, staged: int, sums: int, row: int, numbers: tuple[int, int], panel: int) -> None:
    """Write the results of rows row + numbers[0] to row + numbers[1] (exclusive) of a panel, from the rows' sums.

    `sums`: the sums of row number `row`, and then of the rows after it. `staged`: 64 bytes of scratch memory.
    """
    whole = is_whole(a, panel)
    for number in range(numbers[0], numbers[1]):
        target = target_of(a, row + number, panel)
        if a.gated:
            _write_gate(sums + number * SUMS_BYTES, a.bias + panel * SUMS_BYTES, target if whole else staged)
        else:
            _write(sums + number * SUMS_BYTES, a.bias + panel * SUMS_BYTES, target if whole else staged)
        if not whole:
            simd.copy_bytes(target, staged, target_of(a, row + number, 0) + 2 * a.width - target)


@inlined
def exceptions_of(a: Any, panel: int) -> Any:
    """The address of a panel's first exception."""
    return a.exceptions + 8 * simd.load_int(a.starts + 8 * panel)


@inlined
def weights_of(a: Any, panel: int, step: int) -> Any:
    """The address at which the weights of this step begin, in a panel."""
    return a.weight + (panel * a.num_steps + step) * STEP_BYTES
