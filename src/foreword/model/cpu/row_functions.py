"""Small operations on rows, compiled by numba: RMS norms, and the gate of a feed-forward network.

Every operation and its order is spelt out (`kernels/llvm/norms.py`), so a row's bits depend on nothing but the row.
torch needs seven operations for such a norm and two for the gate, each with its own pass over memory and its own
hand-over to the threads, and about 2 ns per element for silu in bfloat16.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numba import carray
from torch import Tensor

from foreword.kernels.llvm import norms as rows
from foreword.kernels.llvm import simd
from foreword.kernels.llvm.emit import LANES
from foreword.kernels.runtime.compiled import Worker, record, worker
from foreword.kernels.runtime.threads import OfThread, Operation

ALONE_ELEMENTS = 1 << 17
"""The calling thread computes up to this many elements alone, because waking other threads takes longer."""
UNIT_ELEMENTS = 1 << 14
"""Most elements that a thread takes at a time."""
ROWS = record(
    "x",
    "y",
    "sum",
    "target",
    "num_rows",
    "unit_rows",
    "weight",
    "width",
    "x_bytes",  # bytes from one row of x, or of y, to the next
    "form",
    "counters",
    epsilon=np.float32,
    scale=np.float32,  # of y in a sum
)
"""The arguments of an operation on rows: addresses, and sizes in elements."""
BFLOAT16 = 4
"""Another bit of `form`: all numbers are bfloat16; without this bit, float32."""
GELU = 8
"""Bit of `form` of a gate: the tanh approximation of gelu; without this bit, silu."""
Gate = Literal["silu", "gelu_tanh"]
"""The activation in activation(gate) * up."""


@functools.cache
def _compile_worker() -> Worker:
    """Compile the function that every thread runs: it computes units of rows until no unit is left."""

    @worker(ROWS)
    def compute_rows(arguments: Any) -> None:
        a = carray(arguments, 1)[0]
        size = 2 if a.form & BFLOAT16 else 4
        while True:
            first = simd.fetch_add(a.counters, a.unit_rows)
            if first >= a.num_rows:
                return
            for row in range(first, min(first + a.unit_rows, a.num_rows)):
                x, target = a.x + row * a.x_bytes, a.target + row * a.width * size
                y, total = a.y + row * a.x_bytes, a.sum + row * a.width * size
                if a.weight == 0:
                    if a.form == GELU | BFLOAT16:
                        rows.gelu_gate_bf16(x, y, target, a.width)
                    elif a.form == GELU:
                        rows.gelu_gate_f32(x, y, target, a.width)
                    elif size == 2:
                        rows.silu_gate_bf16(x, y, target, a.width)
                    else:
                        rows.silu_gate_f32(x, y, target, a.width)
                    continue
                if a.y != 0:
                    if size == 2:
                        rows.add_bf16(x, y, a.scale, total, a.width)
                    else:
                        rows.add_f32(x, y, a.scale, total, a.width)
                    x = total
                if size == 2:
                    rows.norm_bf16(x, a.weight, target, a.width, a.epsilon, a.form)
                else:
                    rows.norm_f32(x, a.weight, target, a.width, a.epsilon, a.form)

    return compute_rows


@dataclass(frozen=True, slots=True)
class Norm:
    """A root-mean-square norm."""

    weight: Tensor
    """[width]"""
    epsilon: float
    form: int
    """The sum of ROUND_NORM and ADD_ONE, as far as they apply."""


class RowOperation(Operation):
    """An operation on rows of one width and type: a norm, a norm of a sum, or a gate."""

    def __init__(self, norm: Norm | None = None, scale: float = 1.0) -> None:
        super().__init__(_compile_worker())
        self.arguments["scale"] = scale
        if norm is not None:
            self.set_norm(norm)

    def set_norm(self, norm: Norm) -> None:
        """Compute norms from now on."""
        self._weight = norm.weight.detach()  # kept even if the parameter is replaced
        width, size, a = len(norm.weight), norm.weight.element_size(), self.arguments
        a["weight"], a["form"] = norm.weight.data_ptr(), norm.form | (BFLOAT16 if size == 2 else 0)
        a["width"], a["x_bytes"], a["epsilon"] = width, width * size, norm.epsilon

    def set_gate(self, gate: Gate, width: int, dtype: torch.dtype) -> None:
        """Compute gates from now on; a row X (gate) and its row Y (up) lie side by side."""
        a, size = self.arguments, dtype.itemsize
        a["weight"], a["form"] = 0, (BFLOAT16 if size == 2 else 0) | (GELU if gate == "gelu_tanh" else 0)
        a["width"], a["x_bytes"] = width, 2 * width * size

    def bind(self, x: int, y: int, total: int, target: int, num_rows: int) -> None:
        """Set the addresses of rows [num_rows, width]: X, Y (0 in a plain norm), their sum (written), the result."""
        a = self.arguments
        unit = max(1, min(UNIT_ELEMENTS // int(a["width"]), -(-num_rows // torch.get_num_threads())))
        a["x"], a["y"], a["sum"], a["target"], a["num_rows"], a["unit_rows"] = x, y, total, target, num_rows, unit


class RowKernels:
    """The operations on tensors."""

    def __init__(self) -> None:
        self._of_thread = OfThread(RowOperation)

    @staticmethod
    def can_take(width: int, dtype: torch.dtype) -> bool:
        """Whether rows of this width fill whole vector registers, and kernels know the type."""
        return width % LANES == 0 and dtype in (torch.bfloat16, torch.float32)

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """The norm of `x` [..., width], of the same shape."""
        x = x.contiguous()
        output = torch.empty_like(x)
        self._of_thread.operation.set_norm(norm)
        self._run(x.data_ptr(), 0, 0, output)
        return output

    def add_norm(self, x: Tensor, y: Tensor, norm: Norm, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return x + scale * y and its norm, shaped as `x`. Product and sum are each rounded to the rows' type."""
        x, y = x.contiguous(), y.contiguous()
        total, output = torch.empty_like(x), torch.empty_like(x)
        self._of_thread.operation.set_norm(norm)
        self._of_thread.operation.arguments["scale"] = scale
        self._run(x.data_ptr(), y.data_ptr(), total.data_ptr(), output)
        return total, output

    def gate(self, gate: Gate, gate_up: Tensor) -> Tensor:
        """activation(g) * u of `gate_up` [..., 2 * width], whose rows are g and u end to end; [..., width]."""
        gate_up = gate_up.contiguous()
        width = gate_up.shape[-1] // 2
        output = gate_up.new_empty(*gate_up.shape[:-1], width)
        self._of_thread.operation.set_gate(gate, width, gate_up.dtype)
        self._run(gate_up.data_ptr(), gate_up.data_ptr() + width * gate_up.element_size(), 0, output)
        return output

    def _run(self, x: int, y: int, total: int, output: Tensor) -> None:
        self._of_thread.operation.bind(x, y, total, output.data_ptr(), output.numel() // output.shape[-1])
        self._of_thread.operation.run(alone=output.numel() <= ALONE_ELEMENTS)
