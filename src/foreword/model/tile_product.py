"""Linear layers in bfloat16 whose weights are packed for AMX tiles.

Knows weights and rows; knows nothing of modules. oneDNN uses tiles too, but cuts the inner dimension as the number of
rows suggests, so a row's bits depend on its company (docs/decisions/0017-tiles.md). Here they do not. For a gated
feed-forward network gate and up lie side by side in a panel, and the gate is computed before anything is written.

    weights   panels of 32 columns; a panel: for 32 of k at a time two tiles; a tile: 16 pairs of k x 16 columns
    a unit    some rows x some panels, as many as stay in a core's cache; threads take units from a counter
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from foreword.model.kernels import tiles
from foreword.model.kernels.team import Team
from foreword.model.kernels.tile_worker import (
    BIAS,
    COUNTERS,
    GATED,
    GROUP,
    NUM_ARGUMENTS,
    NUM_PANELS,
    NUM_ROWS,
    NUM_STEPS,
    ROW_BYTES,
    ROWS,
    SCRATCH,
    SCRATCH_BYTES,
    TARGET,
    WEIGHT,
    WIDTH,
    compile_worker,
)
from foreword.model.kernels.tiles import PANEL, STEP

UNIT_BYTES = 1 << 19
"""Of weights: half of what the cache of a core holds, or less."""
ALONE_OPERATIONS = 1 << 22
"""A product of fewer multiplications is done by the calling thread: waking the others takes longer."""


class TileProduct:
    """One weight, packed: rows [..., in_features] to [..., out_features], or [..., out_features / 2] if it is gated."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, gated: bool = False) -> None:
        """`weight` [out_features, in_features] bfloat16; `gated`: its first half is the gate, its second up."""
        assert tiles.has_tiles()  # which also asks the system to let this process use them
        self._team = Team(compile_worker())
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
        if self._scratch.numel() < num_threads * SCRATCH_BYTES:
            self._scratch = torch.empty(num_threads * SCRATCH_BYTES, dtype=torch.uint8)
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
