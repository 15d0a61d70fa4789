"""Small operations on rows on a GPU, each in one pass over memory: norms, the gate of a network, and the turn of heads.

A row is one program, or several that share nothing, so its bits depend on nothing but the row. Intermediate results are
rounded where plain torch rounds them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.triton.launch import on_device
from foreword.kernels.triton.tile import LAUNCH, rounded

ROUND_FIRST, IN_FLOAT32, ONE_MORE = 0, 1, 2
"""What scales a normalised row: the weight, after rounding; the weight in float32; the weight plus one in float32."""
SILU, GELU_TANH = 0, 1
_ROUND_FIRST, _ONE_MORE, _SILU = tl.constexpr(ROUND_FIRST), tl.constexpr(ONE_MORE), tl.constexpr(SILU)
_LOG2_E = tl.constexpr(1.4426950408889634)
_GATE_WIDTH = 1024


@triton.jit
def norm_row(
    output,  # [rows, WIDTH]
    sums,  # [rows, WIDTH]: x + y, rounded
    x,
    y,
    weight,  # [WIDTH]
    x_stride,
    y_stride,
    epsilon,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_Y: tl.constexpr,
    CENTRED: tl.constexpr,
    SCALES: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Program: the norm of a row of x, or of x + y."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = at < WIDTH
    numbers = tl.load(x + row * x_stride + at, mask=there, other=0.0).to(tl.float32)
    dtype: tl.constexpr = output.dtype.element_ty
    if HAS_Y:
        added = tl.load(y + row * y_stride + at, mask=there, other=0.0).to(tl.float32)
        total = rounded(numbers + added, dtype, WIDEN)
        tl.store(sums + row * WIDTH + at, total, mask=there)
        numbers = total.to(tl.float32)
    if CENTRED:
        numbers = tl.where(there, numbers - tl.sum(numbers, 0) / WIDTH, 0.0)
    scale = 1.0 / tl.sqrt(tl.sum(numbers * numbers, 0) / WIDTH + epsilon)
    normed = numbers * scale
    weights = tl.load(weight + at, mask=there, other=0.0).to(tl.float32)
    if SCALES == _ROUND_FIRST:
        normed = rounded(normed, dtype, WIDEN).to(tl.float32)
    elif SCALES == _ONE_MORE:
        weights = weights + 1.0
    tl.store(output + row * WIDTH + at, rounded(weights * normed, dtype, WIDEN), mask=there)


@triton.jit
def gate_row(
    output,  # [rows, WIDTH]
    both,  # [rows, 2 * WIDTH]: gate, then up
    row_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Program: BLOCK elements of activation(gate) * up."""
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there, dtype = at < WIDTH, output.dtype.element_ty
    gate = tl.load(both + row * row_stride + at, mask=there, other=0.0).to(tl.float32)
    up = tl.load(both + row * row_stride + WIDTH + at, mask=there, other=0.0).to(tl.float32)
    if ACTIVATION == _SILU:
        active = gate / (1.0 + tl.exp2(-gate * _LOG2_E))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        decay = tl.exp2(tl.abs(inner) * (-2.0 * _LOG2_E))
        size = (1.0 - decay) / (1.0 + decay)
        active = 0.5 * gate * (1.0 + tl.where(inner < 0, -size, size))
    active = rounded(active, dtype, WIDEN).to(tl.float32)
    tl.store(output + row * WIDTH + at, rounded(active * up, dtype, WIDEN), mask=there)


@triton.jit
def turn_head(
    output,  # [rows, heads, DIM]
    heads,  # [rows, heads, DIM]
    cosines,  # [rows, TURNED]
    sines,
    row_stride,
    head_stride,
    DIM: tl.constexpr,
    TURNED: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Program: one head of a row, element i and i + TURNED / 2 a pair; elements from TURNED on stay as they are."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    half: tl.constexpr = TURNED // 2
    turned = at < TURNED
    source = heads + row * row_stride + head * head_stride
    own = tl.load(source + at, mask=at < DIM, other=0.0).to(tl.float32)
    partner = tl.where(at < half, at + half, at - half)
    other = tl.load(source + partner, mask=turned, other=0.0).to(tl.float32)
    other = tl.where(at < half, -other, other)
    cosine = tl.load(cosines + row * TURNED + at, mask=turned, other=1.0).to(tl.float32)
    sine = tl.load(sines + row * TURNED + at, mask=turned, other=0.0).to(tl.float32)
    dtype: tl.constexpr = cosines.dtype.element_ty
    left = rounded(own * cosine, dtype, WIDEN).to(tl.float32)
    right = rounded(other * sine, dtype, WIDEN).to(tl.float32)
    result = rounded(left + right, dtype, WIDEN).to(tl.float32)
    place = (row * tl.num_programs(1) + head) * DIM + at
    result = tl.where(turned, result, own)
    tl.store(output + place, rounded(result, output.dtype.element_ty, WIDEN), mask=at < DIM)


def norm_rows(
    x: Tensor, y: Tensor | None, weight: Tensor, epsilon: float, *, scales: int, centred: bool
) -> tuple[Tensor, Tensor]:
    """Norms of rows x [n, width], or of x + y, and the sums (x itself without y); rows may have gaps between them."""
    output = x.new_empty(x.shape)
    sums = x if y is None else x.new_empty(x.shape)
    other = x if y is None else y
    width = x.shape[1]
    with on_device(x.device):
        norm_row[(len(x),)](
            output,
            sums,
            x,
            other,
            weight,
            x.stride(0),
            other.stride(0),
            epsilon,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            HAS_Y=y is not None,
            CENTRED=centred,
            SCALES=scales,
            **_launch(),
        )
    return output, sums


def gate_rows(both: Tensor, activation: int) -> Tensor:
    """activation(gate) * up of rows [n, 2 * width]: [n, width]."""
    width = both.shape[1] // 2
    output = both.new_empty(len(both), width)
    with on_device(both.device):
        gate_row[(len(both), triton.cdiv(width, _GATE_WIDTH))](
            output, both, both.stride(0), WIDTH=width, BLOCK=_GATE_WIDTH, ACTIVATION=activation, **_launch()
        )
    return output


def turn_heads(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn the first elements of heads [n, heads, dim] by tables [n, turned]; rows and heads may have gaps between."""
    num_rows, num_heads, dim = heads.shape
    output = heads.new_empty(heads.shape)
    with on_device(heads.device):
        turn_head[(num_rows, num_heads)](
            output,
            heads,
            cosines,
            sines,
            heads.stride(0),
            heads.stride(1),
            DIM=dim,
            TURNED=cosines.shape[1],
            BLOCK=triton.next_power_of_2(dim),
            **_launch(),
        )
    return output


def _launch() -> dict[str, int | bool]:
    return {"WIDEN": bool(triton.knobs.runtime.interpret), "num_warps": 4, **LAUNCH}
