"""The rows of one step that adapters change, and what is added to them.

Knows rows and adapters by number; knows no layer and no request. What is added to a row is computed in float32 in an
order that no other row changes, and rows without an adapter are not touched (`kernels/products/low_rank.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from foreword.batch import Int64Array
from foreword.kernels.products import low_rank
from foreword.kernels.products.low_rank import MOST_ROWS
from foreword.kernels.runtime.threads import OfThread, Operation
from foreword.model.adapters.weights import PRODUCTS, AdapterWeights
from foreword.model.cpu.product import thread_memory

ALONE_OPERATIONS = 1 << 18
"""The calling thread computes fewer multiplications alone: waking the others takes longer."""
NONE = -1


class AdaptedRows:
    """For each row of a step the adapter that changes it, if any."""

    def __init__(self, adapters: Sequence[AdapterWeights], numbers: Int64Array) -> None:
        """`numbers` [rows]: of each row the place of its adapter in `adapters`, or NONE."""
        self._adapters, self._numbers = adapters, np.ascontiguousarray(numbers)
        self._tables = np.stack([adapter.tables for adapter in adapters], axis=1)
        self._is_changed: list[bool] = (self._tables != 0).any(axis=1).tolist()
        self._most_rank = max(adapter.most_rank for adapter in adapters) + low_rank.RANKS

    def layer(self, layer: int) -> LayerDeltas:
        """What is added to the results of a layer's products."""
        first = PRODUCTS * layer
        return LayerDeltas(
            *(Deltas(self, at) if self._is_changed[at] else None for at in range(first, first + PRODUCTS))
        )

    def of(self, rows: Tensor) -> AdaptedRows:
        """The same for some of the rows."""
        return AdaptedRows(self._adapters, self._numbers[rows.numpy()])

    def changed(self) -> Tensor:
        """The rows that have an adapter."""
        return torch.from_numpy(np.flatnonzero(self._numbers != NONE))

    def add(self, product: int, rows: Tensor, result: Tensor) -> Tensor:
        """See `Deltas.add`."""
        inputs, target = rows.float(), result.float().contiguous()
        missing = low_rank.padded_inputs(inputs.shape[-1]) - inputs.shape[-1]
        inputs = torch.nn.functional.pad(inputs, (0, missing)) if missing else inputs.contiguous()
        operation = _operations().operation
        operation.bind(inputs, target, self._numbers, self._tables[product].ctypes.data, self._most_rank)
        work = len(inputs) * self._most_rank * (inputs.shape[-1] + target.shape[-1])
        operation.run(alone=work < ALONE_OPERATIONS)
        return target.to(result.dtype)


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


class _LowRankOperation(Operation):
    """The product of the rows that `bind` set last."""

    def __init__(self) -> None:
        super().__init__(low_rank.compile_worker())

    def bind(self, rows: Tensor, target: Tensor, numbers: Int64Array, tables: int, most_rank: int) -> None:
        """Set the rows [rows, padded inputs], what they are added to, and the table of each row."""
        a, threads = self.arguments, torch.get_num_threads()
        assert len(rows) == len(target) == len(numbers)
        a["rows"], a["row_bytes"], a["num_rows"] = rows.data_ptr(), 4 * rows.shape[1], len(rows)
        a["num_steps"], a["target"], a["target_bytes"] = rows.shape[1] // 16, target.data_ptr(), 4 * target.shape[1]
        a["numbers"], a["tables"] = numbers.ctypes.data, tables
        a["unit_rows"] = MOST_ROWS * max(1, len(rows) // (4 * MOST_ROWS * threads))
        a["thread_scratch"] = low_rank.thread_scratch(most_rank)
        a["scratch"] = thread_memory(int(a["thread_scratch"]) * threads)


@functools.cache
def _operations() -> OfThread[_LowRankOperation]:
    """An operation of each thread's own; the first one compiles."""
    return OfThread(_LowRankOperation)
