"""Linear layers whose weights stay quantized, in the codes of their file.

Rows of any type are multiplied in float32, or rounded to eight bits and multiplied in integers: each weight says which
of the two.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.kernels.products import coded_worker, integer_worker
from foreword.kernels.products.coded import PANEL, QUAD, STEP, CodeFormat, Codes, Panels
from foreword.kernels.products.coded_worker import CODED, FORMS, GROUPS_OF_16, OFFSETS
from foreword.kernels.runtime.compiled import Record, Worker
from foreword.kernels.runtime.huge_pages import HugePages
from foreword.kernels.runtime.threads import OfThread, Operation
from foreword.model.cpu.product import thread_memory
from foreword.model.cpu.row_functions import ALONE_ELEMENTS

FILLED = 1 << 18
"""The number of weights that a thread expands or packs at once. The system would clear larger arrays each time."""
ALONE_OPERATIONS = 1 << 18
"""The calling thread alone computes a product of fewer multiplications, because waking other threads takes longer."""
HAS_INSTRUCTIONS = coded_worker.HAS_INSTRUCTIONS
INTEGERS = " int8"
"""The name of a format that is multiplied in integers ends with this text."""
_WEIGHTS = HugePages()


@dataclass(frozen=True, slots=True)
class CodedRows:
    """A quantized weight matrix, kept in the codes of its file."""

    kind: CodeFormat
    shape: tuple[int, int]
    """The numbers of outputs and inputs."""
    codes: Callable[[int, int], Codes]
    """The codes of the outputs first <= i < end. Raises OSError."""
    in_integers: bool = False
    """Whether products round rows to eight bits and add up integers."""
    order: npt.NDArray[np.int64] | None = None
    """The input of each column of the codes; None: columns are in the order of inputs."""

    def __len__(self) -> int:
        return self.shape[0]

    def equals(self, other: CodedRows) -> bool:
        """Whether another weight has the same codes. Raises OSError."""
        if (self.kind, self.shape) != (other.kind, other.shape) or not self.has_order_of(other):
            return False
        step = max(1, FILLED // self.shape[1])
        for first in range(0, len(self), step):
            codes, others = (weight.codes(first, min(first + step, len(self))) for weight in (self, other))
            for name in ("codes", "heads", "integers", "zeros"):
                if not np.array_equal(getattr(codes, name), getattr(others, name)):
                    return False
        return True

    def has_order_of(self, other: CodedRows) -> bool:
        """Whether the columns of both weights' codes belong to the same inputs."""
        if self.order is None or other.order is None:
            return self.order is other.order
        return np.array_equal(self.order, other.order)

    def plain(self, dtype: torch.dtype) -> Tensor:
        """The weight as a tensor [outputs, inputs]."""
        output, step = torch.empty(self.shape, dtype=dtype), max(1, FILLED // self.shape[1])
        for first in range(0, len(self), step):
            end = min(first + step, len(self))
            output[first:end] = torch.from_numpy(self.codes(first, end).values(self.kind))
        return output if self.order is None else output[:, np.argsort(self.order)]


def join(first: CodedRows, second: CodedRows) -> CodedRows:
    """Join two weights of one format with the same inputs, outputs end to end."""
    size = len(first)

    def codes(start: int, end: int) -> Codes:
        parts = [first.codes(start, min(end, size))] if start < size else []
        parts += [second.codes(max(start - size, 0), end - size)] if end > size else []
        heads = [part.heads for part in parts if part.heads is not None]
        integers = [part.integers for part in parts if part.integers is not None]
        zeros = [part.zeros for part in parts if part.zeros is not None]
        return Codes(
            np.concatenate([part.codes for part in parts]),
            np.concatenate(heads) if heads else None,
            np.concatenate(integers) if integers else None,
            np.concatenate(zeros) if zeros else None,
        )

    return replace(first, shape=(size + len(second), first.shape[1]), codes=codes)


Weight = Tensor | CodedRows
"""A weight [outputs, inputs] as it is handed to a product."""


class CodedProduct:
    """A product of rows [..., in_features] with a weight in codes. It computes some of the columns of a result."""

    def __init__(self, weight: CodedRows, bias: Tensor | None, column: int, width: int, row_scratch: int = 0) -> None:
        """Pack a weight, whose number of inputs is a multiple of 32; `bias` [out_features].

        `column`: the product's first column in a result of `width` columns; `row_scratch`: bytes of a quantised row.
        """
        self.out_features, self.in_features = weight.shape
        self._in_integers = weight.in_integers
        memory = _WEIGHTS.allocate(Panels.num_bytes(weight.kind, weight.shape))
        self._panels = Panels(weight.kind, weight.shape, memory, QUAD if weight.in_integers else 1)
        step = max(PANEL, FILLED // self.in_features // PANEL * PANEL)

        def fill(first: int) -> None:
            self._panels.fill(first, weight.codes(first, min(first + step, self.out_features)))

        if step >= self.out_features:
            fill(0)
        else:
            with ThreadPoolExecutor(torch.get_num_threads()) as pool:
                list(pool.map(fill, range(0, self.out_features, step)))
        num_panels, num_supers, super_bytes = self._panels.memory.shape
        self._bias = torch.zeros(num_panels * PANEL)
        if bias is not None:
            self._bias[: self.out_features] = bias.float()
        kind = weight.kind
        a = self._constants = np.zeros((), CODED)
        a["panels"], a["panel_bytes"], a["super_bytes"] = memory.ctypes.data, num_supers * super_bytes, super_bytes
        a["head_steps"], a["num_panels"], a["num_steps"] = kind.head_steps, num_panels, self.in_features // STEP
        a["form"], a["bias"], a["width"] = FORMS.index(kind), self._bias.data_ptr(), self.out_features
        a["kind"] = OFFSETS * kind.has_offset | GROUPS_OF_16 * (kind.group == 16)
        a["target"], a["target_bytes"] = 4 * column, 4 * width
        if weight.in_integers:
            a["row_bytes"], a["thread_scratch"] = row_scratch, integer_worker.THREAD_SCRATCH
        else:
            a["row_bytes"], a["thread_scratch"] = 4 * self.in_features, coded_worker.thread_scratch(int(a["num_steps"]))
        operation_type = IntegerOperation if weight.in_integers else CodedOperation
        self.operation = functools.partial(operation_type, a, (memory, self._bias), row_scratch)  # no cycle with self
        """Makes a new operation that computes the product. Any number of them may exist."""
        self.of_thread = OfThread(self.operation)

    @staticmethod
    def can_take(weight: CodedRows) -> bool:
        return HAS_INSTRUCTIONS and weight.shape[1] % STEP == 0

    @property
    def format(self) -> str:
        return self._panels.kind.name + (INTEGERS if self._in_integers else "")

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the weight takes."""
        return self._panels.memory.nbytes

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features] in float32: a new plain copy on every access."""
        return self.rows(np.arange(self.out_features))

    def rows(self, outputs: npt.NDArray[np.int64]) -> Tensor:
        """The weights [len(outputs), in_features] of some outputs, in float32."""
        weights = np.empty((len(outputs), self.in_features), np.float32)
        step = max(1, FILLED // self.in_features // PANEL)  # a row needs its whole panel
        for first in range(0, len(outputs), step):
            weights[first : first + step] = self._panels.rows(outputs[first : first + step])
        return torch.from_numpy(weights)

    def panel(self, panel: int, number: int, width: int) -> CodedOperation:
        """The product of one panel, the `number`-th in a result of `width` columns, as a new operation."""
        constants = self._constants.copy()
        constants["panels"] = self._panels.memory[panel].ctypes.data
        constants["bias"] = self._bias[panel * PANEL :].data_ptr()
        constants["num_panels"], constants["width"] = 1, PANEL
        constants["target"], constants["target_bytes"] = 4 * PANEL * number, 4 * width
        operation_type = IntegerOperation if self._in_integers else CodedOperation
        return operation_type(
            constants, (self._panels.memory, self._bias), int(constants["row_bytes"]) if self._in_integers else 0
        )

    @property
    def thread_scratch(self) -> int:
        return int(self._constants["thread_scratch"])


class CodedLinear:
    """A product with coded weights that have the same inputs; their outputs follow each other."""

    dtype = torch.float32
    """The type in which rows are multiplied."""

    def __init__(self, weights: Sequence[CodedRows], bias: Tensor | None) -> None:
        """The columns of all `weights` must follow the same order of inputs."""
        order = weights[0].order
        self._order = None if order is None else torch.from_numpy(order)
        joined: list[CodedRows] = []
        for weight in weights:  # one product per format, because each product has to call the threads
            if joined and (joined[-1].kind, joined[-1].in_integers) == (weight.kind, weight.in_integers):
                weight = join(joined.pop(), weight)
            joined.append(weight)
        sizes = [len(weight) for weight in joined]
        biases = [None] * len(sizes) if bias is None else list(torch.split(bias, sizes))
        self.width, self._in_features = sum(sizes), weights[0].shape[1]
        columns = itertools.accumulate(sizes, initial=0)
        in_integers = any(weight.in_integers for weight in joined)
        self.row_scratch = self._in_features // STEP * integer_worker.STEP_BYTES if in_integers else 0
        """Bytes of scratch memory for each row, before the threads' memory. A row is quantised once for all
        products."""
        self._products = [
            CodedProduct(*part, self.width, self.row_scratch) for part in zip(joined, biases, columns, strict=False)
        ]
        quantise = functools.partial(QuantiseOperation, self._in_features)
        self._quantise = OfThread(quantise) if in_integers else None

    @property
    def in_program(self) -> bool:
        """Whether a program can run this product. A program's operations take inputs in their original order."""
        return self._order is None

    @property
    def format(self) -> str:
        return ", ".join(dict.fromkeys(product.format for product in self._products))

    @property
    def thread_scratch(self) -> int:
        return max(product.thread_scratch for product in self._products)

    def operations(self) -> list[Operation]:
        first = [] if self._quantise is None else [QuantiseOperation(self._in_features)]
        return [*first, *(product.operation() for product in self._products)]

    @property
    def weight(self) -> Tensor:
        """[width, in_features] in float32: a new plain copy on every access."""
        weight = torch.cat([product.weight for product in self._products])
        return weight if self._order is None else weight[:, self._order.argsort()]

    def rows(self, outputs: Tensor) -> Tensor:
        """The weights [len(outputs), in_features] of the given outputs, in float32. There must be only one weight."""
        [product] = self._products
        rows = product.rows(outputs.numpy().astype(np.int64))
        return rows if self._order is None else rows[:, self._order.argsort()]

    def some(self, rows: Tensor, outputs: npt.NDArray[np.int64]) -> Tensor:
        """Columns `outputs` of the product, [..., len(outputs)]. Only panels with these columns are computed, unless
        they are more than half of all panels. There must be only one weight.

        The bits are those of the whole product, because the whole product also computes each panel separately.
        """
        [product] = self._products
        panels, place = np.unique(outputs // PANEL, return_inverse=True)
        columns = torch.from_numpy(place * PANEL + outputs % PANEL)
        if 2 * len(panels) * PANEL > self.width:
            return self(rows)[..., torch.from_numpy(outputs)]
        width = len(panels) * PANEL
        parts = [product.panel(int(panel), number, width) for number, panel in enumerate(panels)]
        return self._multiply(rows, width, parts)[..., columns]

    def __call__(self, rows: Tensor) -> Tensor:
        return self._multiply(rows, self.width, [product.of_thread.operation for product in self._products])

    def _multiply(self, rows: Tensor, width: int, parts: Sequence[CodedOperation]) -> Tensor:
        if rows.shape[-1] != self._in_features:
            raise RuntimeError(f"rows of {rows.shape[-1]}, but the weight is for {self._in_features}")
        inputs = rows.float().reshape(-1, rows.shape[-1]).contiguous()
        if self._order is not None:
            inputs = inputs.index_select(1, self._order)
        output = inputs.new_empty(len(inputs), width)
        scratch = thread_memory(len(inputs) * self.row_scratch + self.thread_scratch * torch.get_num_threads())
        if self._quantise is not None:
            self._quantise.operation.bind(inputs.data_ptr(), len(inputs), 0, scratch)
            self._quantise.operation.run(alone=inputs.numel() <= ALONE_ELEMENTS)
        for part in parts:
            part.bind(inputs.data_ptr(), len(inputs), output.data_ptr(), scratch)
            part.run(alone=len(inputs) * self._in_features * int(part.arguments["width"]) < ALONE_OPERATIONS)
        return output.view(*rows.shape[:-1], -1).to(rows.dtype)


class CodedOperation(Operation):
    """A product of the rows that `bind` set last."""

    def __init__(self, constants: Record, memory: object, row_scratch: int, worker: Worker | None = None) -> None:
        """`constants`: arguments that `bind` does not set; `memory`: owns the memory to which `constants` point."""
        super().__init__(worker or coded_worker.multiply_units)
        self._memory, self._first_byte, self._row_scratch = memory, int(constants["target"]), row_scratch
        for name in CODED.names or ():
            if name != "counters":
                self.arguments[name] = constants[name]

    def bind(self, rows: int, num_rows: int, target: int, scratch: int) -> None:
        """Set the addresses of rows, of the whole result, and of scratch memory for rows and threads."""
        a = self.arguments
        a["rows"], a["num_rows"], a["target"] = rows, num_rows, target + self._first_byte
        a["scratch"] = scratch + num_rows * self._row_scratch
        coded_worker.set_units(a, torch.get_num_threads())


class IntegerOperation(CodedOperation):
    """A product in integers of the rows that a `QuantiseOperation` has left in scratch memory."""

    def __init__(self, constants: Record, memory: object, row_scratch: int) -> None:
        super().__init__(constants, memory, row_scratch, integer_worker.multiply_integers)

    def bind(self, rows: int, num_rows: int, target: int, scratch: int) -> None:
        super().bind(scratch, num_rows, target, scratch)
        coded_worker.set_units(self.arguments, torch.get_num_threads(), integer_worker.UNIT_ROWS)


class QuantiseOperation(Operation):
    """Rounds the rows that `bind` set last to eight bits."""

    def __init__(self, in_features: int) -> None:
        super().__init__(integer_worker.quantise_rows)
        self.arguments["num_steps"] = in_features // STEP

    def bind(self, rows: int, num_rows: int, target: int, scratch: int) -> None:
        """Set the addresses of rows and of scratch memory, which takes the quantised rows; `target` is not used."""
        a = self.arguments
        a["rows"], a["num_rows"], a["target"] = rows, num_rows, scratch
        a["unit_rows"] = max(1, min(integer_worker.UNIT_ROWS, -(-num_rows // torch.get_num_threads())))
