"""Linear layers in bfloat16 with weights of 12 bits, multiplied by AMX tiles, or in pairs by vectors.

oneDNN uses tiles too, but splits the inner dimension by the number of rows, so a row's bits depend on the other rows
(docs/decisions/0017-tiles.md). Here a row's bits do not. Without tiles, vectors multiply pairs of bfloat16 from the
same packed weights (docs/decisions/0023-products-in-pairs.md). For a gated feed-forward network, gate and up lie side
by side in a panel, and the gate is computed before anything is written.

    weights   panels of 32 columns; a panel: for 32 of k at a time two tiles; a tile: 16 pairs of k x 16 columns;
              12 bits each (`kernels/products/weights12.py`)
    a unit    some rows x some panels, as many as stay in a core's cache; threads take units from a counter
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.kernels.llvm import tiles
from foreword.kernels.llvm.emit import HAS_BF16_DOT
from foreword.kernels.llvm.tiles import PRODUCT_PANEL, STEP
from foreword.kernels.products import weights12 as compact
from foreword.kernels.products.pair_worker import PAIR_WORKER
from foreword.kernels.products.tile_worker import TILE_WORKER
from foreword.kernels.products.units import PRODUCT, ProductWorker
from foreword.kernels.runtime.compiled import Record
from foreword.kernels.runtime.threads import OfThread, Operation

logger = logging.getLogger(__name__)

Ids = npt.NDArray[np.int64]

MANY_EXCEPTIONS = 1 / 32
"""If more than this share of a layer's weights are exceptions (`num_exceptions`), a warning is logged. With twice this
share, 12-bit weights take as much memory as bfloat16.
"""
ALONE_OPERATIONS = 1 << 19
"""The calling thread alone computes a product of fewer multiplications, because waking other threads takes longer."""


class CompactProduct:
    """A product with packed weights: rows [..., in_features] to [..., out_features], or out_features / 2 if gated."""

    format = "12 bits"
    dtype = torch.bfloat16
    row_scratch = 0

    def __init__(
        self, weights: Sequence[Tensor], bias: Tensor | None, *, gated: bool = False, num_heads: int = 1
    ) -> None:
        """`weights` [any, in_features] bfloat16 with consecutive outputs, and the bias of all outputs.

        `gated`: the first half of the outputs is the gate, the second up. `num_heads`: each head has an equal part of
        the outputs, in whole panels, and rows of its own (`of_heads`).
        """
        self._worker = fastest_worker()
        self._gated = gated
        self.out_features, self.in_features = sum(map(len, weights)), weights[0].shape[1]
        self.width = self.out_features // 2 if gated else self.out_features
        """Width of the result's rows."""
        self._num_panels = -(-self.out_features // PRODUCT_PANEL)
        place = self._columns()
        order = torch.full((self._num_panels * PRODUCT_PANEL,), -1)
        order[place] = torch.arange(self.out_features)
        bits = [weight.detach().contiguous().view(torch.uint16).numpy() for weight in weights]
        self._panels = compact.compact(bits, order.numpy(), torch.get_num_threads())
        num_weights = self.out_features * self.in_features
        if self.num_exceptions > MANY_EXCEPTIONS * num_weights:
            logger.warning(
                "%d of %d weights of a layer have unusual exponents: it takes more memory and time than others",
                self.num_exceptions,
                num_weights,
            )
        self._bias = torch.zeros(self._num_panels * PRODUCT_PANEL)
        if bias is not None:
            self._bias[place] = bias.float()
        num_steps = self.in_features // STEP
        a = self._constants = np.zeros((), PRODUCT)
        a["weight"], a["table"] = self._panels.steps.ctypes.data, self._panels.table.ctypes.data
        a["exceptions"], a["starts"] = self._panels.exceptions.ctypes.data, self._panels.starts.ctypes.data
        a["row_bytes"], a["bias"], a["width"] = 2 * self.in_features, self._bias.data_ptr(), self.width
        a["num_steps"], a["num_panels"], a["gated"] = num_steps, self._num_panels, gated
        a["head_panels"] = self._num_panels // num_heads
        a["thread_scratch"] = self._worker.thread_scratch(num_steps)
        self._operation = functools.partial(ProductOperation, self._worker, a, (self._panels, self._bias))
        self._of_thread = OfThread(self._operation)

    @staticmethod
    def can_take(weight: Tensor) -> bool:
        """Whether this processor can multiply by 12-bit weights, and this weight can be packed to 12 bits."""
        suits = weight.dtype == torch.bfloat16 and weight.device.type == "cpu" and weight.shape[1] % STEP == 0
        return suits and can_multiply()

    def _columns(self) -> Tensor:
        """The place of each output's column in the panels."""
        outputs = torch.arange(self.out_features)
        if not self._gated:
            return outputs
        half, width = PRODUCT_PANEL // 2, self.out_features // 2
        place = outputs % width
        return place // half * PRODUCT_PANEL + outputs // width * half + place % half

    @property
    def thread_scratch(self) -> int:
        return int(self._constants["thread_scratch"])

    def operations(self) -> list[ProductOperation]:
        return [self._operation()]

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the weight takes."""
        return self._panels.steps.nbytes + self._panels.exceptions.nbytes + self._panels.starts.nbytes

    @property
    def num_exceptions(self) -> int:
        """The number of weights whose exponent is not among the most frequent."""
        return self._panels.num_exceptions

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features]: a new plain copy on every access."""
        bits = compact.expanded(self._panels).view(np.int16)
        pairs = bits.reshape(self._num_panels, -1, 2, PRODUCT_PANEL // 2, PRODUCT_PANEL // 2, 2).transpose(
            0, 2, 4, 1, 3, 5
        )
        flat = torch.from_numpy(pairs.reshape(-1, self.in_features)).view(torch.bfloat16)
        return flat[self._columns()]

    def some(self, rows: Tensor, outputs: Ids) -> Tensor:
        """Columns `outputs` of the product of bfloat16 rows, [..., len(outputs)]. Only panels with these columns are
        computed, unless they are more than half of all panels.

        The bits are those of the whole product, because the whole product also computes each panel separately.
        """
        panels, place = np.unique(outputs // PRODUCT_PANEL, return_inverse=True)
        if 2 * len(panels) > self._num_panels:
            return self(rows)[..., torch.from_numpy(outputs)]
        parts = [self._run(self._panel(int(panel)), rows, PRODUCT_PANEL) for panel in panels]
        columns = torch.from_numpy(place * PRODUCT_PANEL + outputs % PRODUCT_PANEL)
        return torch.cat(parts, -1)[..., columns]

    def _panel(self, panel: int) -> ProductOperation:
        """The product of one panel, as a new operation."""
        assert not self._gated, "a gated panel has half as many outputs"
        constants = self._constants.copy()
        constants["weight"] = self._panels.steps[panel].ctypes.data
        constants["starts"] = self._panels.starts[panel:].ctypes.data
        constants["bias"] = self._bias[panel * PRODUCT_PANEL :].data_ptr()
        constants["num_panels"], constants["head_panels"], constants["width"] = 1, 1, PRODUCT_PANEL
        return ProductOperation(self._worker, constants, (self._panels, self._bias))

    def before_gate(self, rows: Tensor) -> Tensor:
        """The product of bfloat16 rows before the gate: [..., out_features], all of the gate and then all of up."""
        constants, width = self._constants.copy(), self._num_panels * PRODUCT_PANEL
        constants["gated"], constants["width"] = 0, width
        operation = ProductOperation(self._worker, constants, (self._panels, self._bias))
        return self._run(operation, rows, width)[..., self._columns()]

    def __call__(self, rows: Tensor) -> Tensor:
        """The product of bfloat16 rows, with the bias. Raises RuntimeError, as torch, for another type or width."""
        return self._run(self._of_thread.operation, rows, self.width)

    def of_heads(self, rows: Tensor, target: Tensor) -> None:
        """Multiply rows [rows, heads, in] to `target` [rows, heads, out_features / heads]; both may have gaps."""
        rows = rows if rows.stride(2) == 1 else rows.contiguous()
        operation = self._of_thread.operation
        scratch = thread_memory(self.thread_scratch * torch.get_num_threads())
        a = operation.arguments
        a["row_bytes"], a["head_bytes"] = 2 * rows.stride(0), 2 * rows.stride(1)
        a["width"], a["head_gap"] = target.stride(0), target.stride(1) - target.shape[2]
        operation.bind(rows.data_ptr(), len(rows), target.data_ptr(), scratch)
        operation.run(alone=len(rows) * self.in_features * self.out_features < ALONE_OPERATIONS)

    def _run(self, operation: ProductOperation, rows: Tensor, width: int) -> Tensor:
        if rows.dtype != torch.bfloat16 or rows.shape[-1] != self.in_features:
            raise RuntimeError(
                f"rows are {rows.dtype} of {rows.shape[-1]}, but the weight is torch.bfloat16 for {self.in_features}"
            )
        rows = rows.contiguous()
        output = rows.new_empty(*rows.shape[:-1], width)
        num_rows = rows.numel() // self.in_features
        if num_rows:
            scratch = thread_memory(self.thread_scratch * torch.get_num_threads())
            operation.bind(rows.data_ptr(), num_rows, output.data_ptr(), scratch)
            operation.run(alone=num_rows * self.in_features * self.out_features < ALONE_OPERATIONS)
        return output


class ProductOperation(Operation):
    """A product of the rows that `bind` set last."""

    def __init__(self, worker: ProductWorker, constants: Record, memory: object) -> None:
        """`constants`: arguments that `bind` does not set; `memory`: owns the memory to which `constants` point."""
        super().__init__(worker.worker)
        self._memory, self._set_units = memory, worker.set_units
        for name in PRODUCT.names or ():
            if name != "counters":
                self.arguments[name] = constants[name]

    def bind(self, rows: int, num_rows: int, target: int, scratch: int) -> None:
        """Set the addresses of rows [num_rows, in_features], the result, and `thread_scratch` bytes for each thread."""
        a = self.arguments
        a["rows"], a["target"], a["num_rows"], a["scratch"] = rows, target, num_rows, scratch
        self._set_units(a, torch.get_num_threads())


def can_multiply() -> bool:
    """Whether this processor has the instructions that products of bfloat16 rows and 12-bit weights need."""
    return compact.HAS_BYTE_LOOK_UP and (tiles.has_tiles() or HAS_BF16_DOT)


def fastest_worker() -> ProductWorker:
    """The worker for tiles, if the processor has them and the system permits them; else the worker for pairs."""
    assert can_multiply()
    return TILE_WORKER if tiles.has_tiles() else PAIR_WORKER


_OF_THREAD = threading.local()


def thread_memory(num_bytes: int) -> int:
    """The address of memory for one product. The thread's next product uses the same memory."""
    memory: Tensor | None = getattr(_OF_THREAD, "memory", None)
    if memory is None or memory.numel() < num_bytes:
        memory = _OF_THREAD.memory = torch.empty(num_bytes, dtype=torch.uint8)
    return memory.data_ptr()
