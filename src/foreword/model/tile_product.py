"""Linear layers in bfloat16 whose weights are packed for AMX tiles.

Knows weights and rows; knows nothing of modules. oneDNN uses tiles too, but cuts the inner dimension as the number of
rows suggests, so a row's bits depend on its company (docs/decisions/0017-tiles.md). Here they do not. For a gated
feed-forward network gate and up lie side by side in a panel, and the gate is computed before anything is written.

    weights   panels of 32 columns; a panel: for 32 of k at a time two tiles; a tile: 16 pairs of k x 16 columns
    a unit    some rows x some panels, as many as stay in a core's cache; threads take units from a counter
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from foreword.model.kernels import simd, tiles
from foreword.model.kernels.cpu_layout import source_digest
from foreword.model.kernels.rows import silu
from foreword.model.kernels.simd import BF16S, I16S
from foreword.model.kernels.team import Team, native_worker
from foreword.model.kernels.tiles import PANEL, STEP, TILE_ROWS

UNIT_ROWS = 256
UNIT_BYTES = 1 << 19
"""Of weights: half of what the cache of a core holds, or less."""
ALONE_OPERATIONS = 1 << 22
"""A product of fewer multiplications is done by the calling thread: waking the others takes longer."""
(ROWS, ROW_BYTES, WEIGHT, BIAS, TARGET, NUM_ROWS, WIDTH, NUM_STEPS, NUM_PANELS, GROUP, GATED, COUNTERS, SCRATCH) = (
    range(13)
)
NUM_ARGUMENTS = 13
"""int64 each: addresses, and counts. WIDTH: columns of the result; GROUP: panels of a unit."""
_CONFIG, _SUMS, _STAGED = 0, 64, 64 + 4 * PANEL * 2 * TILE_ROWS
_SCRATCH_BYTES = _STAGED + 2 * PANEL


def _bfloat16(builder: Any, vector: Any) -> Any:
    return builder.bitcast(builder.fptrunc(vector, BF16S), I16S)


def _half(builder: Any, sums: Any, bias: Any, half: int) -> Any:
    return builder.fadd(simd._load(builder, sums, 64 * half), simd._load(builder, bias, 64 * half))


@simd._instructions("aaa")
def _finish(builder: Any, sums: Any, bias: Any, target: Any) -> None:
    """32 sums of one row, with their bias, as bfloat16."""
    for half in (0, 1):
        simd._store(builder, _bfloat16(builder, _half(builder, sums, bias, half)), target, 32 * half)


@simd._instructions("aaa")
def _finish_gate(builder: Any, sums: Any, bias: Any, target: Any) -> None:
    """silu(g) * u of 16 g and 16 u of one row, each rounded as if it were written to memory."""
    gate, up = (simd._widened(builder, _bfloat16(builder, _half(builder, sums, bias, half))) for half in (0, 1))
    rounded = simd._widened(builder, _bfloat16(builder, silu(builder, gate)))
    simd._store(builder, _bfloat16(builder, builder.fmul(rounded, up)), target)


@functools.cache
def _compile_worker() -> Any:
    """What each thread of a team runs: units until none are left. Compiled once per machine and kept."""
    digest = source_digest()

    @native_worker  # type: ignore[untyped-decorator]
    def worker(arguments: Any) -> None:
        a = carray(arguments, NUM_ARGUMENTS)
        if digest == 0:
            return
        scratch = a[SCRATCH] + simd.fetch_add(a[COUNTERS] + 64, 1) * _SCRATCH_BYTES
        columns = PANEL // 2 if a[GATED] else PANEL
        num_groups = (a[NUM_PANELS] + a[GROUP] - 1) // a[GROUP]
        num_units = num_groups * ((a[NUM_ROWS] + UNIT_ROWS - 1) // UNIT_ROWS)
        laid_out = 0
        while True:
            unit = simd.fetch_add(a[COUNTERS], 1)
            if unit >= num_units:
                break
            first_panel = unit % num_groups * a[GROUP]
            first_row = unit // num_groups * UNIT_ROWS
            for row in range(first_row, min(first_row + UNIT_ROWS, a[NUM_ROWS]), 2 * TILE_ROWS):
                num_rows = min(2 * TILE_ROWS, a[NUM_ROWS] - row)
                if num_rows != laid_out:
                    tiles.lay_out(scratch + _CONFIG, num_rows)
                    laid_out = num_rows
                x = a[ROWS] + row * a[ROW_BYTES]
                for panel in range(first_panel, min(first_panel + a[GROUP], a[NUM_PANELS])):
                    weight = a[WEIGHT] + panel * a[NUM_STEPS] * 64 * PANEL
                    if num_rows > TILE_ROWS:
                        tiles.product_32(x, a[ROW_BYTES], weight, a[NUM_STEPS], scratch + _SUMS)
                    else:
                        tiles.product_16(x, a[ROW_BYTES], weight, a[NUM_STEPS], scratch + _SUMS)
                    bias = a[BIAS] + panel * 4 * PANEL
                    column = panel * columns
                    whole = column + columns <= a[WIDTH]
                    for number in range(num_rows):
                        sums = scratch + _SUMS + number * 4 * PANEL
                        target = a[TARGET] + 2 * ((row + number) * a[WIDTH] + column)
                        staged = target if whole else scratch + _STAGED
                        if a[GATED]:
                            _finish_gate(sums, bias, staged)
                        else:
                            _finish(sums, bias, staged)
                        if not whole:
                            simd.copy_bytes(target, staged, 2 * (a[WIDTH] - column))
        tiles.release()

    return worker


class TileProduct:
    """One weight, packed: rows [..., in_features] to [..., out_features], or [..., out_features / 2] if it is gated."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> None:
        """`weight` [out_features, in_features] bfloat16; `gated`: its first half is the gate, its second up."""
        assert tiles.has_tiles()  # which also asks the system to let this process use them
        self._team = Team(_compile_worker())
        self._gated = gated
        self.out_features, self.in_features = weight.shape
        self._num_panels = -(-self.out_features // PANEL)
        order = self._columns()
        flat = weight.new_zeros(self._num_panels * PANEL, self.in_features)
        flat[order] = weight
        shape = (self._num_panels, 2, PANEL // 2, self.in_features // STEP, STEP // 2, 2)
        self._tiles = flat.view(shape).permute(0, 3, 1, 4, 2, 5).contiguous()
        self._bias = torch.zeros(self._num_panels * PANEL)
        if bias is not None:
            self._bias[order] = bias.float()
        self._group = max(1, min(8, UNIT_BYTES // (64 * self.in_features)))
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._arguments = np.zeros(NUM_ARGUMENTS + 16, np.int64)  # the last 16: two counters, in lines of their own
        a = self._arguments
        a[WEIGHT], a[BIAS] = self._tiles.data_ptr(), self._bias.data_ptr()
        a[WIDTH] = self.out_features // 2 if gated else self.out_features
        a[NUM_STEPS], a[NUM_PANELS], a[GATED] = self.in_features // STEP, self._num_panels, gated

    @staticmethod
    def can_take(weight: Tensor) -> bool:
        """Whether this processor has tiles, and the weight is for them."""
        wanted = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.shape[1] % STEP == 0
        return wanted and tiles.has_tiles()

    def _columns(self) -> Tensor:
        """Where each output's column lies in the panels."""
        outputs = torch.arange(self.out_features)
        if not self._gated:
            return outputs
        half, width = PANEL // 2, self.out_features // 2
        place = outputs % width
        return place // half * PANEL + outputs // width * half + place % half

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features]: a plain copy, made on every access."""
        flat = self._tiles.permute(0, 2, 4, 1, 3, 5).reshape(self._num_panels * PANEL, self.in_features)
        return flat[self._columns()]

    def __call__(self, rows: Tensor) -> Tensor:
        """The product, with the bias, in the type of `rows`. One thread at a time."""
        rows = rows.contiguous()
        a, num_threads = self._arguments, torch.get_num_threads()
        output = rows.new_empty(*rows.shape[:-1], int(a[WIDTH]))
        num_rows = rows.numel() // self.in_features
        if not num_rows:
            return output
        if self._scratch.numel() < num_threads * _SCRATCH_BYTES:
            self._scratch = torch.empty(num_threads * _SCRATCH_BYTES, dtype=torch.uint8)
        a[ROWS], a[ROW_BYTES], a[TARGET], a[NUM_ROWS] = (
            rows.data_ptr(),
            2 * self.in_features,
            output.data_ptr(),
            num_rows,
        )
        a[GROUP] = min(self._group, max(1, self._num_panels // (4 * num_threads)))
        a[COUNTERS], a[SCRATCH] = a.ctypes.data + 8 * NUM_ARGUMENTS, self._scratch.data_ptr()
        a[NUM_ARGUMENTS:] = 0
        if num_rows * self.in_features * self.out_features < ALONE_OPERATIONS:
            self._team.run_alone(a.ctypes.data)
        else:
            self._team.run(a.ctypes.data)
        return output
