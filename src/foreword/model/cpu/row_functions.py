"""Small operations on rows, compiled by numba: RMS norms, and the gate of a feed-forward network.

Knows rows of numbers as memory addresses; knows nothing of modules or models. As in `kernels/llvm/simd.py`, whose
building blocks these use, every operation and its order is spelt out: a row's bits depend on nothing but the row.
torch needs seven operations for such a norm and two for the gate, each with its own pass over memory, its own
hand-over to the threads, and for silu in bfloat16 about 2 ns per element.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from foreword.kernels.cpu.layout import source_digest
from foreword.kernels.llvm import norms as rows
from foreword.kernels.llvm import simd
from foreword.kernels.llvm.simd import LANES
from foreword.kernels.runtime.threads import Operation, native_worker

ALONE_ELEMENTS = 1 << 17
"""Work on fewer elements is done by the calling thread: waking the others takes longer."""
UNIT_ELEMENTS = 1 << 14
"""What a thread takes at a time, at most."""
(X, Y, SUM, TARGET, NUM_ROWS, UNIT_ROWS, WEIGHT, WIDTH, X_BYTES, EPSILON, FORM, COUNTER, NUM_ARGUMENTS) = range(13)
"""int64 each: addresses, and sizes in elements; X_BYTES between rows of X, and of Y."""
BFLOAT16 = 4
"""Bit of FORM, beside those of norms: the type of all numbers; float32 without it."""


@functools.cache
def _compile_worker() -> Any:
    """What each thread of a team runs: units of rows until none are left. Compiled once per machine and kept."""
    digest = source_digest()

    @native_worker  # type: ignore[untyped-decorator]
    def worker(arguments: Any) -> None:
        a = carray(arguments, NUM_ARGUMENTS)
        if digest == 0:
            return
        size = 2 if a[FORM] & BFLOAT16 else 4
        epsilon = simd.load_float(a[EPSILON])
        while True:
            first = simd.fetch_add(a[COUNTER], a[UNIT_ROWS])
            if first >= a[NUM_ROWS]:
                return
            for row in range(first, min(first + a[UNIT_ROWS], a[NUM_ROWS])):
                x, target = a[X] + row * a[X_BYTES], a[TARGET] + row * a[WIDTH] * size
                y, total = a[Y] + row * a[X_BYTES], a[SUM] + row * a[WIDTH] * size
                if a[WEIGHT] == 0:
                    if size == 2:
                        rows.gate_bf16(x, y, target, a[WIDTH])
                    else:
                        rows.gate_f32(x, y, target, a[WIDTH])
                    continue
                if a[Y] != 0:
                    if size == 2:
                        rows.add_bf16(x, y, total, a[WIDTH])
                    else:
                        rows.add_f32(x, y, total, a[WIDTH])
                    x = total
                if size == 2:
                    rows.norm_bf16(x, a[WEIGHT], target, a[WIDTH], epsilon, a[FORM])
                else:
                    rows.norm_f32(x, a[WEIGHT], target, a[WIDTH], epsilon, a[FORM])

    return worker


@dataclass(frozen=True, slots=True)
class Norm:
    """A root-mean-square norm."""

    weight: Tensor
    """[width]"""
    epsilon: float
    form: int
    """ROUND_NORM, ADD_ONE."""


class RowOperation(Operation):
    """A norm, a norm of a sum, or a gate, of rows of one width and type."""

    def __init__(self) -> None:
        super().__init__(_compile_worker(), NUM_ARGUMENTS + 1, COUNTER)  # the last: epsilon
        self._epsilon = self.arguments[-1:].view(np.float32)
        self.arguments[EPSILON] = self.address + 8 * NUM_ARGUMENTS

    def set_norm(self, norm: Norm) -> None:
        """Norms from now on."""
        self._weight = norm.weight.detach()  # which is kept, whatever becomes of the parameter
        width, size, a = len(norm.weight), norm.weight.element_size(), self.arguments
        self._epsilon[0] = norm.epsilon
        a[WEIGHT], a[FORM] = norm.weight.data_ptr(), norm.form | (BFLOAT16 if size == 2 else 0)
        a[WIDTH], a[X_BYTES] = width, width * size

    def set_gate(self, width: int, dtype: torch.dtype) -> None:
        """Gates from now on, of X and Y that lie side by side."""
        a, size = self.arguments, dtype.itemsize
        a[WEIGHT], a[FORM], a[WIDTH], a[X_BYTES] = 0, (BFLOAT16 if size == 2 else 0), width, 2 * width * size

    def bind(self, x: int, y: int, total: int, target: int, num_rows: int) -> None:
        """Addresses of rows [num_rows, width]: X and Y (0 in a plain norm), their sum (written), the result."""
        a = self.arguments
        unit = max(1, min(UNIT_ELEMENTS // int(a[WIDTH]), -(-num_rows // torch.get_num_threads())))
        a[: UNIT_ROWS + 1] = x, y, total, target, num_rows, unit


class RowKernels:
    """The operations on tensors. One thread at a time."""

    def __init__(self) -> None:
        self._operation = RowOperation()

    @staticmethod
    def can_take(width: int, dtype: torch.dtype) -> bool:
        """Whether rows of this width and type are whole vectors of a known type."""
        return width % LANES == 0 and dtype in (torch.bfloat16, torch.float32)

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """Of `x` [..., width]; the same shape."""
        x = x.contiguous()
        output = torch.empty_like(x)
        self._operation.set_norm(norm)
        self._run(x.data_ptr(), 0, 0, output)
        return output

    def add_norm(self, x: Tensor, y: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        """x + y, rounded to its type, and the norm of that; all of `x`'s shape."""
        x, y = x.contiguous(), y.contiguous()
        total, output = torch.empty_like(x), torch.empty_like(x)
        self._operation.set_norm(norm)
        self._run(x.data_ptr(), y.data_ptr(), total.data_ptr(), output)
        return total, output

    def silu_gate(self, gate_up: Tensor) -> Tensor:
        """silu(g) * u of `gate_up` [..., 2 * width], whose rows are g and u end to end; [..., width]."""
        gate_up = gate_up.contiguous()
        width = gate_up.shape[-1] // 2
        output = gate_up.new_empty(*gate_up.shape[:-1], width)
        self._operation.set_gate(width, gate_up.dtype)
        self._run(gate_up.data_ptr(), gate_up.data_ptr() + width * gate_up.element_size(), 0, output)
        return output

    def _run(self, x: int, y: int, total: int, output: Tensor) -> None:
        self._operation.bind(x, y, total, output.data_ptr(), output.numel() // output.shape[-1])
        self._operation.run(alone=output.numel() <= ALONE_ELEMENTS)
