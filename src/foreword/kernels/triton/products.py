"""Products of rows with weights on a GPU, whose bits for a row do not depend on the number of rows.

Libraries choose by the number of rows how to cut a product, so a row would have other bits alone than among others.
Here the inner length is cut into chunks that follow from the weight alone. A chunk is summed by one tensor core
instruction after the other, and the chunks are added in ascending order, by whichever kernel computes them:

    many rows    a program sums all chunks of its tile: total = chunk 0 + chunk 1 + ...
    few rows     each chunk of a tile has a program, so that all processors read weights; `add_chunks` sums the results
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.triton.launch import on_device
from foreword.kernels.triton.tile import LAUNCH, product, rounded

CHUNK_INNER = 768
"""About the inner length of a chunk: it fills the pipeline, and a weight of few outputs has work for all processors."""
INNER = 64
"""Inner elements that a program multiplies at a time; chunks are multiples of it."""


@dataclass(frozen=True, slots=True)
class ProductSizes:
    """A tile, and how it is launched. Tensor cores take 64 rows at a time, so a tile has no fewer."""

    rows: int
    outputs: int
    num_warps: int
    num_stages: int


FEW_ROWS = (ProductSizes(64, 64, 4, 5), ProductSizes(128, 64, 8, 4))
MANY_ROWS = ProductSizes(128, 128, 8, 4)


def sizes_for(num_rows: int) -> ProductSizes:
    """The tile for a number of rows. It changes the time, and no bit."""
    if num_rows > 256:
        return MANY_ROWS
    return FEW_ROWS[num_rows > FEW_ROWS[0].rows]


def chunk_length(inner: int) -> int:
    """The inner length of a weight's chunks; the last one may be shorter."""
    num_chunks = max(1, round(inner / CHUNK_INNER))
    return -(-inner // (num_chunks * INNER)) * INNER


@triton.jit(do_not_specialize=["num_rows"])
def multiply(
    output,  # [rows, OUT]; SPLIT: float32 [chunks, rows, OUT]
    rows,  # [rows, IN]
    weight,  # [OUT, IN]
    bias,  # [OUT]
    num_rows,
    row_stride,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDEN: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INNER: tl.constexpr,
):
    """Program: a tile of outputs for a tile of rows, all chunks of it or, SPLIT, one. Neighbours share a weight."""
    row_tiles = tl.cdiv(num_rows, ROWS)
    row = tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)
    out = tl.program_id(0) // row_tiles * OUTPUTS + tl.arange(0, OUTPUTS)
    first = tl.program_id(1) * CHUNK
    last = tl.minimum(first + CHUNK, IN) if SPLIT else IN
    has_row, has_out = row < num_rows, out < OUT
    left = rows + row.to(tl.int64)[:, None] * row_stride
    right = weight + out.to(tl.int64)[None, :] * IN
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in tl.range(first, last, CHUNK):
        chunk = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for inner in tl.range(start, tl.minimum(start + CHUNK, IN), INNER):
            at = inner + tl.arange(0, INNER)
            own = tl.load(left + at[None, :], mask=has_row[:, None] & (at < IN)[None, :], other=0.0)
            other = tl.load(right + at[:, None], mask=has_out[None, :] & (at < IN)[:, None], other=0.0)
            chunk = product(own, other, chunk, WIDEN)
        total = total + chunk
    place = row.to(tl.int64)[:, None] * OUT + out[None, :]
    mask = has_row[:, None] & has_out[None, :]
    if SPLIT:
        tl.store(output + tl.program_id(1).to(tl.int64) * num_rows * OUT + place, total, mask=mask)
    else:
        if HAS_BIAS:
            total = total + tl.load(bias + out, mask=has_out, other=0.0).to(tl.float32)[None, :]
        tl.store(output + place, rounded(total, output.dtype.element_ty, WIDEN), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def add_chunks(
    output,  # [rows, OUT]
    partials,  # float32 [chunks, rows, OUT]
    bias,  # [OUT]
    num_rows,
    OUT: tl.constexpr,
    CHUNKS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDEN: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Program: some outputs of a row, from the results of all chunks in ascending order."""
    out = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    place = tl.program_id(0).to(tl.int64) * OUT + out
    total = tl.zeros([OUTPUTS], tl.float32)
    for number in tl.static_range(CHUNKS):
        part = partials + tl.cast(num_rows, tl.int64) * OUT * number
        total = total + tl.load(part + place, mask=out < OUT, other=0.0)
    if HAS_BIAS:
        total = total + tl.load(bias + out, mask=out < OUT, other=0.0).to(tl.float32)
    tl.store(output + place, rounded(total, output.dtype.element_ty, WIDEN), mask=out < OUT)


def multiply_rows(rows: Tensor, weight: Tensor, bias: Tensor | None, *, processors: int) -> Tensor:
    """rows [n, IN] times weight [OUT, IN], transposed, plus bias [OUT]: [n, OUT], all of one 16-bit type.

    Rows may have gaps between them. `processors`: of the device; with another number the time differs, and no bit.
    """
    num_rows, inner = rows.shape
    output = rows.new_empty(num_rows, len(weight))
    if not num_rows:
        return output
    sizes, chunk = sizes_for(num_rows), chunk_length(inner)
    num_chunks = triton.cdiv(inner, chunk)
    num_tiles = triton.cdiv(num_rows, sizes.rows) * triton.cdiv(len(weight), sizes.outputs)
    is_split = num_chunks > 1 and num_tiles < 2 * processors
    target = rows.new_empty(num_chunks, *output.shape, dtype=torch.float32) if is_split else output
    shared = {"HAS_BIAS": bias is not None, "WIDEN": bool(triton.knobs.runtime.interpret), **LAUNCH}
    any_bias = weight if bias is None else bias
    with on_device(rows.device):
        multiply[(num_tiles, num_chunks if is_split else 1)](
            target,
            rows,
            weight,
            any_bias,
            num_rows,
            rows.stride(0),
            OUT=len(weight),
            IN=inner,
            CHUNK=chunk,
            SPLIT=is_split,
            ROWS=sizes.rows,
            OUTPUTS=sizes.outputs,
            INNER=INNER,
            num_warps=sizes.num_warps,
            num_stages=sizes.num_stages,
            **shared,
        )
        if is_split:
            width = min(1024, triton.next_power_of_2(len(weight)))
            grid = num_rows, triton.cdiv(len(weight), width)
            add_chunks[grid](
                output, target, any_bias, num_rows, OUT=len(weight), CHUNKS=num_chunks, OUTPUTS=width, **shared
            )
    return output
