"""The rows of one step that adapters change, and what is added to them.

What is added to a row is computed in float32 in an order that no other row changes, and rows without an adapter are not
touched (`kernels/products/low_rank.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from foreword.batch import Int64Array
from foreword.kernels.llvm.emit import LANES
from foreword.kernels.products import low_rank
from foreword.kernels.products.low_rank import MOST_ROWS
from foreword.kernels.runtime.threads import OfThread, Operation
from foreword.model.adapters.weights import PRODUCTS, AdapterWeights
from foreword.model.cpu.product import thread_memory

ALONE_OPERATIONS = 1 << 18
"""The calling thread computes fewer multiplications alone: waking the others takes longer."""
NONE = -1
STEP_ARGUMENTS = "num_rows", "numbers", "tables", "unit_rows", "scratch", "thread_scratch"
"""What changes in every step for an operation whose rows have their place."""


class AdaptedRows:
    """For each row of a step the adapter that changes it, if any."""

    def __init__(self, adapters: Sequence[AdapterWeights], numbers: Int64Array) -> None:
        """`numbers` [rows]: of each row the place of its adapter in `adapters`, or NONE."""
        self._adapters, self._numbers = adapters, np.ascontiguousarray(numbers)
        self._tables = np.stack([adapter.tables for adapter in adapters], axis=1)
        self.is_changed = (self._tables != 0).any(axis=1)
        """Of each product whether an adapter changes it."""
        most_rank = max(adapter.most_rank for adapter in adapters) + low_rank.RANKS
        self._most_rank, self.thread_scratch = most_rank, low_rank.thread_scratch(most_rank)
        self._addresses = self._numbers.ctypes.data, self._tables.ctypes.data

    def layer(self, layer: int) -> LayerDeltas:
        """What is added to the results of a layer's products."""
        first = PRODUCTS * layer
        return LayerDeltas(
            *(Deltas(self, at) if self.is_changed[at] else None for at in range(first, first + PRODUCTS))
        )

    def of(self, rows: Tensor) -> AdaptedRows:
        """The same for some of the rows."""
        return AdaptedRows(self._adapters, self._numbers[rows.numpy()])

    def changed(self) -> Tensor:
        """The rows that have an adapter."""
        return torch.from_numpy(np.flatnonzero(self._numbers != NONE))

    def step_numbers(self, products: Int64Array, firsts: Any, counts: Any, scratch: int) -> Int64Array:
        """STEP_ARGUMENTS of products whose rows are `counts` of the step's rows, from the rows `firsts` on.

        `scratch`: the address of memory for all threads.
        """
        rows, tables = self._addresses
        found = np.empty((len(products), len(STEP_ARGUMENTS)), np.int64)
        found[:, 0], found[:, 1] = counts, rows + firsts * self._numbers.itemsize
        found[:, 2] = tables + products * self._tables.strides[0]
        found[:, 3] = MOST_ROWS * np.maximum(1, counts // (4 * MOST_ROWS * torch.get_num_threads()))
        found[:, 4:] = scratch, self.thread_scratch
        return found

    def add(self, product: int, rows: Tensor, result: Tensor) -> Tensor:
        """See `Deltas.add`."""
        inputs, target = rows.float(), result.float().contiguous()
        missing = low_rank.padded_inputs(inputs.shape[-1]) - inputs.shape[-1]
        inputs = torch.nn.functional.pad(inputs, (0, missing)) if missing else inputs.contiguous()
        assert len(inputs) == len(target) == len(self._numbers)
        operation = _operations().operation
        operation.bind(inputs.data_ptr(), inputs.shape[1], target.data_ptr(), target.shape[1])
        scratch = thread_memory(self.thread_scratch * torch.get_num_threads())
        operation.set_step(self.step_numbers(np.array([product]), 0, len(inputs), scratch)[0])
        work = len(inputs) * self._most_rank * (inputs.shape[-1] + target.shape[-1])
        operation.run(alone=work < ALONE_OPERATIONS)
        return target if result.dtype == torch.float32 else target.to(result.dtype)


@dataclass(frozen=True, slots=True)
class Deltas:
    """What adapters add to the results of one product."""

    rows: AdaptedRows
    product: int

    def add(self, rows: Tensor, result: Tensor) -> Tensor:
        """The result [rows, out], which is used up, of `rows` [rows, in], with what adapters add to it."""
        return self.rows.add(self.product, rows, result)

    def changed(self) -> Tensor:
        """The rows that have an adapter, perhaps one that leaves this product as it is."""
        return self.rows.changed()

    def of(self, rows: Tensor) -> Deltas:
        """The same for some of the rows."""
        return Deltas(self.rows.of(rows), self.product)


class LayerDeltas(NamedTuple):
    """What adapters add to each product of a layer; None: nothing, to no row."""

    project: Deltas | None = None
    output: Deltas | None = None
    gate: Deltas | None = None
    down: Deltas | None = None


NO_DELTAS = LayerDeltas()


class LowRankOperation(Operation):
    """What adapters add to the results of one product, in float32."""

    def __init__(self) -> None:
        super().__init__(low_rank.compile_worker())

    def bind(self, rows: int, inputs: int, target: int, outputs: int) -> None:
        """Set the addresses of rows [rows, inputs], whose number is padded, and of what they are added to."""
        a = self.arguments
        a["rows"], a["row_bytes"], a["num_steps"] = rows, 4 * inputs, inputs // LANES
        a["target"], a["target_bytes"] = target, 4 * outputs

    def set_step(self, numbers: Int64Array) -> None:
        """Set STEP_ARGUMENTS."""
        for argument, number in zip(STEP_ARGUMENTS, numbers, strict=True):
            self.arguments[argument] = number


@functools.cache
def _operations() -> OfThread[LowRankOperation]:
    """An operation of each thread's own; the first one compiles."""
    return OfThread(LowRankOperation)
