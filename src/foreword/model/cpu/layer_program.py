"""Decoder layers as one program: threads run the operations of all layers without a return to Python in between.

Norms, products, heads and attention are operations here. Between operations, rows are kept in one memory. Weights may
have any format whose products are operations (`RowProduct`): 12 bits for rows in bfloat16, the codes of a file for rows
in float32. `model/spec.py` has the formula of such layers.

In a step of few rows an operation takes 10 to 500 us. Running each operation from Python cost a quarter of such a step,
because weights had pushed Python's code and data out of the caches, and because threads had to be woken.

    memory    written by                                  read by
    rows      a layer's last sum                          the next layer's sum after attention
    wide      project, heads, attention; later gate, up   heads, attention, output; later down
    normed    norms                                       project, gate
    added     output; later down; norms after them        the sums after them
    total     the sum after attention                     the layer's last sum
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

from foreword.kernels.cpu import attention as cpu_attention
from foreword.kernels.cpu.attention import AttentionOperations, CpuAttention
from foreword.kernels.cpu.layout import padded
from foreword.kernels.reference import AttentionOptions
from foreword.kernels.runtime.threads import Operation, Program, Wires
from foreword.kernels.select import AttentionKernel
from foreword.model.adapters import weights as adapters
from foreword.model.adapters.weights import PRODUCTS, AdaptedRows, LowRankOperation
from foreword.model.cpu import rotary
from foreword.model.cpu.rotary import RotaryKernel
from foreword.model.cpu.row_functions import Gate, Norm, RowOperation
from foreword.model.step import Step
from foreword.model.storage import KVStorage

_LINE = 64
Turns = tuple[Tensor, Tensor]
"""Cosines and sines [1, rows, turned]."""
_NUMBERS = len(rotary.STEP_ARGUMENTS) + len(cpu_attention.STEP_ARGUMENTS)
"""The number of step arguments for layers of one kind."""


class ProductPart(Protocol):
    """An operation that computes some columns of a product."""

    def bind(self, rows: int, num_rows: int, target: int, scratch: int) -> None:
        """Set the addresses of rows, of the result's first column, and of scratch memory for all threads."""


class RowProduct(Protocol):
    """A product of rows and weights that a program can run."""

    dtype: torch.dtype
    """The type of the rows and of the result."""
    row_scratch: int
    """Bytes of scratch memory for each row. This memory comes before the scratch memory of threads."""

    @property
    def width(self) -> int:
        """The number of elements of a row of the result."""

    @property
    def thread_scratch(self) -> int:
        """Bytes of scratch memory that each thread needs."""

    def operations(self) -> Sequence[Operation]:
        """The product as new operations, each a `ProductPart`."""

    def __call__(self, rows: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The parts of a layer."""

    before_attention: Norm
    after_attention: Norm | None
    before_network: Norm
    after_network: Norm | None
    project: RowProduct
    """The product that makes queries, keys and values from rows."""
    output: RowProduct
    gate_up: RowProduct
    down: RowProduct
    gate: Gate | None
    """The function that joins gate and up; None if `gate_up` joins them itself."""
    residual_scale: float
    """The results of attention and of the network are multiplied by this factor before they are added to rows."""
    heads: RotaryKernel
    rotary: int
    """The number of the layer's rotary embedding."""


@dataclass(frozen=True, slots=True)
class Places:
    """Addresses of the memory between operations, for `num_rows` rows."""

    num_rows: int
    rows: int
    wide: int
    normed: int
    added: int
    total: int
    scratch: int
    """Scratch memory of products, for all rows and threads."""


class Workspace:
    """Memory between operations, shared by all layers of a model. One thread at a time may use it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._wide = self._narrow = self._thread_scratch = self._row_scratch = 0
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._places: Places | None = None

    def widen(self, wide: int, narrow: int, products: Sequence[RowProduct]) -> None:
        """Make room for a layer with `wide` elements per row in `Places.wide`, `narrow` in other areas, and its
        scratch.
        """
        self._wide, self._narrow = max(self._wide, wide), max(self._narrow, narrow)
        self.widen_scratch(*(product.thread_scratch for product in products))
        self._row_scratch = max(self._row_scratch, *(product.row_scratch for product in products))

    def widen_scratch(self, *thread_scratch: int) -> None:
        """Let each thread have as much scratch memory as the largest of these numbers of bytes, or more."""
        self._thread_scratch = max(self._thread_scratch, *thread_scratch)

    def places(self, num_rows: int) -> Places:
        """Return addresses for `num_rows` rows: the same object until the number changes or memory moves."""
        wide, narrow = (_in_lines(num_rows * width * self.dtype.itemsize) for width in (self._wide, self._narrow))
        num_bytes = wide + 4 * narrow + num_rows * self._row_scratch
        num_bytes += torch.get_num_threads() * self._thread_scratch
        if self._places is None or num_rows != self._places.num_rows or self._memory.numel() < num_bytes:
            if self._memory.numel() < num_bytes:
                self._memory = torch.empty(num_bytes, dtype=torch.uint8)
            first = self._memory.data_ptr()
            narrows = (first + wide + number * narrow for number in range(4))
            rows, normed, added, total = narrows
            self._places = Places(num_rows, rows, first, normed, added, total, first + wide + 4 * narrow)
        return self._places

    def normed_rows(self, width: int) -> Tensor:
        """The rows in `normed`, [rows, width]: a view, valid until the next run."""
        assert self._places is not None
        start, num_rows = self._places.normed - self._memory.data_ptr(), self._places.num_rows
        rows = self._memory[start : start + num_rows * width * self.dtype.itemsize]
        return rows.view(self.dtype).view(num_rows, width)


class LayerOperations:
    """The operations of one layer."""

    def __init__(self, layer: int, parts: LayerParts, options: AttentionOptions) -> None:
        self.layer, self.rotary, self.first_norm = layer, parts.rotary, parts.before_attention
        self._products = parts.project, parts.output, parts.gate_up, parts.down
        self._project, self._output, self._gate_up, self._down = (product.operations() for product in self._products)
        self._widths = parts.project.width, parts.output.width, parts.gate_up.width
        self._dtype, self._item_bytes = parts.project.dtype, parts.project.dtype.itemsize
        self._shapes, self._rotary = parts.heads.shapes, parts.heads.operation()
        self._options = options
        self._norm = RowOperation(parts.before_attention)
        self._norm_of_sum = RowOperation(parts.before_network, parts.residual_scale)
        self._next_norm = RowOperation(scale=parts.residual_scale)
        self._after_attention = None if parts.after_attention is None else RowOperation(parts.after_attention)
        self._after_network = None if parts.after_network is None else RowOperation(parts.after_network)
        self._gate: RowOperation | None = None
        if parts.gate is not None:
            self._gate = RowOperation()
            self._gate.set_gate(parts.gate, self._widths[2] // 2, parts.gate_up.dtype)
        self.attention = AttentionOperations()
        shapes = self._shapes
        self._query_bytes = shapes.query_heads * shapes.key_dim * self._item_bytes
        self._mixed_bytes = shapes.query_heads * shapes.value_dim * self._item_bytes
        self._changes: Sequence[LowRankOperation] = ()
        self._bound: tuple[Places, int, bool, tuple[int, int] | None] | None = None
        self._queries = self._mixed = 0
        self.operations: dict[str, Sequence[Operation]] = {  # in the order in which they run
            "norm": [self._norm],
            "project": self._project,
            "project: adapters": [],
            "heads": [self._rotary],
            "attention": [self.attention.items],
            "merge": [self.attention.merges],
            "output": self._output,
            "output: adapters": [],
            "norm after attention": _if_any(self._after_attention),
            "sum, norm": [self._norm_of_sum],
            "gate, up": self._gate_up,
            "gate, up: adapters": [],
            "gate": _if_any(self._gate),
            "down": self._down,
            "down: adapters": [],
            "norm after network": _if_any(self._after_network),
            "sum, next norm": [self._next_norm],
        }

    def take_adapters(self) -> Sequence[LowRankOperation]:
        """Add operations that add the terms of adapters to the four products, and return these operations."""
        self._changes, self._bound = [LowRankOperation() for _ in range(PRODUCTS)], None
        names = [name for name in self.operations if name.endswith(": adapters")]
        self.operations.update({name: [change] for name, change in zip(names, self._changes, strict=True)})
        return self._changes

    @property
    def num_after_keys(self) -> int:
        """The number of operations after the one that writes keys and values."""
        names = list(self.operations)
        return sum(len(self.operations[name]) for name in names[names.index("heads") + 1 :])

    def sizes(self) -> tuple[int, int, Sequence[RowProduct]]:
        """Return the elements of a row in the area `Places.wide`, the elements of a row in the other areas, and the
        products.
        """
        project, width, gate_up = self._widths
        heads = project + (self._query_bytes + self._mixed_bytes) // self._item_bytes
        network = gate_up if self._gate is None else gate_up + gate_up // 2
        return max(heads, network) + _LINE, width, self._products

    def end_with(self, norm: Norm) -> None:
        """Normalise the layer's last sum by `norm`, which is the next layer's first norm or the model's last."""
        self._next_norm.set_norm(norm)

    def set_storage(self, storage: KVStorage, kernel: CpuAttention) -> None:
        """Use the keys and values of `storage` from now on. Its blocks must have no gaps."""
        blocks = storage.blocks[self.layer]
        self._rotary.bind_blocks(blocks, self._dtype)
        self.attention.set_layer(blocks, self._shapes.query_heads, self._options, self._dtype, kernel.bfloat16)

    def wires(self, first: int) -> Iterator[tuple[Operation, str, int]]:
        """Yield (operation, argument, index of its number) for the arguments of a step. Indices begin at `first`."""
        arguments = enumerate(rotary.STEP_ARGUMENTS, first)
        yield from ((self._rotary, argument, number) for number, argument in arguments)
        for number, argument in enumerate(cpu_attention.STEP_ARGUMENTS, first + len(rotary.STEP_ARGUMENTS)):
            yield self.attention.items, argument, number
            yield self.attention.merges, argument, number

    def bind_rows(self, places: Places, rows: int, *, is_normed: bool, span: tuple[int, int] | None = None) -> None:
        """Set the address of the layer's rows; `is_normed`: whether `places.normed` already has the norm of these rows.

        `span`: the first row that is computed after attention, and the number of such rows; None: all rows.
        """
        if self._bound == (places, rows, is_normed, span):
            return
        self._bound = None
        num_rows, wide, normed, scratch = places.num_rows, places.wide, places.normed, places.scratch
        self._queries = wide + _in_lines(num_rows * self._widths[0] * self._item_bytes)
        self._mixed = self._queries + num_rows * self._query_bytes
        self._rotary.bind_rows(wide, num_rows, self._queries)
        query = self._queries, self._query_bytes, self._shapes.key_dim * self._item_bytes
        self.attention.bind_rows(query, self._mixed)
        self._norm.bind(rows, 0, 0, normed, 0 if is_normed else num_rows)
        _bind(self._project, normed, num_rows, wide, scratch)
        first, count = (0, num_rows) if span is None else span
        skipped = first * self._widths[1] * self._item_bytes
        _bind(self._output, self._mixed + first * self._mixed_bytes, count, places.added, scratch)
        if self._after_attention is not None:
            self._after_attention.bind(places.added, 0, 0, places.added, count)
        self._norm_of_sum.bind(rows + skipped, places.added, places.total, normed, count)
        _bind(self._gate_up, normed, count, wide, scratch)
        gated = wide
        if self._gate is not None:
            gated += _in_lines(count * self._widths[2] * self._item_bytes)
            self._gate.bind(wide, wide + self._widths[2] // 2 * self._item_bytes, 0, gated, count)
        _bind(self._down, gated, count, places.added, scratch)
        if self._after_network is not None:
            self._after_network.bind(places.added, 0, 0, places.added, count)
        self._next_norm.bind(places.total, places.added, places.rows + skipped, normed + skipped, count)
        if self._changes:
            project, width, gate_up = self._widths
            mixed, inner = self._mixed_bytes // self._item_bytes, gate_up // 2
            self._changes[0].bind(normed, width, wide, project)
            self._changes[1].bind(self._mixed + first * self._mixed_bytes, mixed, places.added, width)
            self._changes[2].bind(normed, width, wide, gate_up)
            self._changes[3].bind(gated, inner, places.added, width)
        self._bound = places, rows, is_normed, span


def _if_any(operation: Operation | None) -> list[Operation]:
    return [] if operation is None else [operation]


def _bind(parts: Sequence[Operation], rows: int, num_rows: int, target: int, scratch: int) -> None:
    for part in parts:
        cast(ProductPart, part).bind(rows, num_rows, target, scratch)


class LayerChain:
    """All layers of a model, its last norm and its head."""

    def __init__(self, layers: Sequence[LayerOperations], norm: Norm, head: RowProduct) -> None:
        self.layers, self._space = layers, Workspace(head.dtype)
        for layer in layers:
            self._space.widen(*layer.sizes())
        self._space.widen(0, 0, [head])
        for layer, following in zip(layers, (*(later.first_norm for later in layers[1:]), norm), strict=True):
            layer.end_with(following)
        self._head, self._head_operations = head, head.operations()
        self._adapter_wires: Wires | None = None
        """The step arguments of adapters' operations; None until adapters come: until then, the program has no such
        operations."""
        self._is_adapted = False
        """Whether adapters' operations may still have rows to change."""
        self._make_program()
        self._storage: Callable[[], KVStorage | None] = lambda: None
        """A weak reference to the storage: a model outlives engines, and a closed engine's blocks must be freed."""
        self._kernel: AttentionKernel | None = None
        self._is_for_storage = False
        self._kinds: list[tuple[int, int, LayerOperations]] = []
        """An entry for all layers of equal group, shape and rotary embedding: the group, the bytes of a token in all
        these layers, and one of the layers."""
        self._wires = Wires([])
        self._turns: object = None
        """Keeps alive the tensors whose addresses are numbers of the step, because the caller may drop them."""

    def _make_program(self) -> None:
        self._is_made = False  # after an interrupt, the old program does not fit `_of_layers`
        self._of_layers = [part for layer in self.layers for parts in layer.operations.values() for part in parts]
        self.program = Program([*self._of_layers, *self._head_operations])
        self._is_made = True

    def logits(self, rows: Tensor, turns: Sequence[Turns], step: Step) -> Tensor | None:
        """Return logits [num_kept, vocab] from the first layer's rows [rows, width]; None if the program cannot run the
        step.

        `turns`: cosines and sines [1, rows, turned] of each rotary embedding. The last layer computes only attention
        for the rows before the first kept row and after the last kept row.
        """
        if not self._can_run(rows, step):
            return None
        width, keep = rows.shape[1], step.keep[: step.num_kept]
        x = rows.contiguous()  # kept until the program has run
        if not len(keep):
            self._bind(x, turns, step)
            self.program.run(len(self._of_layers) - self.layers[-1].num_after_keys)
            return rows.new_empty(0, self._head.width)
        first, last = int(keep[0]), int(keep[-1])
        if last - first + 1 != len(keep):
            self.run_layers(x, turns, step)
            return self._head(self._space.normed_rows(width)[keep])
        places = self._bind(x, turns, step, span=(first, last - first + 1))
        logits = rows.new_empty(len(keep), self._head.width)
        start = places.normed + first * width * rows.element_size()
        _bind(self._head_operations, start, len(keep), logits.data_ptr(), places.scratch)
        self.program.run()
        return logits

    def run_layers(self, rows: Tensor, turns: Sequence[Turns], step: Step) -> bool:
        """Compute layers and last norm for the kept rows, without logits. Return False if a program cannot run the
        step.
        """
        if not self._can_run(rows, step):
            return False
        keep, x = step.keep[: step.num_kept], rows.contiguous()
        first, last = int(keep[0]), int(keep[-1])
        self._bind(x, turns, step, span=(first, last - first + 1))
        self.program.run(len(self._of_layers))
        return True

    def normed_rows(self, keep: Tensor, width: int) -> Tensor:
        """A copy of the normed rows `keep` of the last run."""
        return self._space.normed_rows(width)[keep]

    def _can_run(self, rows: Tensor, step: Step) -> bool:
        """Whether the program can run these rows with the blocks and the kernel of this step."""
        storage = step.storage
        kernel = step.group(self.layers[0].layer).kernel
        if storage is not self._storage() or kernel is not self._kernel:
            self._storage = lambda: None  # an interrupt must not leave layers bound to unknown blocks
            kernels = [step.group(layer.layer).kernel for layer in self.layers]
            blocks = [storage.blocks[layer.layer] for layer in self.layers]
            self._is_for_storage = all(RotaryKernel.can_write(of_layer, self._space.dtype) for of_layer in blocks)
            self._is_for_storage &= all(type(kernel) is CpuAttention for kernel in kernels)
            if self._is_for_storage:
                for layer, kernel in zip(self.layers, kernels, strict=True):
                    layer.set_storage(storage, cast(CpuAttention, kernel))
                self._lay_wires(storage)
            self._storage, self._kernel = weakref.ref(storage), kernel
        takes_adapters = step.adapted is None or self._space.dtype == torch.float32
        return self._is_for_storage and rows.dtype == self._space.dtype and takes_adapters

    def _bind(self, x: Tensor, turns: Sequence[Turns], step: Step, *, span: tuple[int, int] | None = None) -> Places:
        """Bind all layers to this step's memory. The last layer stores only the results of the rows of `span`."""
        if step.adapted is not None:
            self._take_adapters(step.adapted)
        if not self._is_made:
            self._make_program()
        places = self._space.places(len(x))
        first, last = self.layers[0], self.layers[-1]
        for layer in self.layers:
            layer.bind_rows(
                places,
                x.data_ptr() if layer is first else places.rows,
                is_normed=layer is not first,
                span=span if layer is last else None,
            )
        if step.adapted is not None or self._is_adapted:
            self._bind_adapters(step.adapted, len(x), span, places.scratch)
        self._bind_step([(cosines.contiguous(), sines.contiguous()) for cosines, sines in turns], step)
        return places

    def _take_adapters(self, adapted: AdaptedRows) -> None:
        """Make scratch memory for adapters. If these are the first adapters, add their operations to the program."""
        self._space.widen_scratch(adapted.thread_scratch)
        if self._adapter_wires is None:
            self._is_made = False
            changes = [change for layer in self.layers for change in layer.take_adapters()]
            places = enumerate((change, argument) for change in changes for argument in adapters.STEP_ARGUMENTS)
            self._adapter_wires = Wires([(change, argument, number) for number, (change, argument) in places])

    def _bind_adapters(
        self, adapted: AdaptedRows | None, num_rows: int, span: tuple[int, int] | None, scratch: int
    ) -> None:
        """Set the rows that adapters change; None: no rows. After attention, the last layer has only the rows of
        `span`.
        """
        assert self._adapter_wires is not None
        products = np.arange(PRODUCTS * len(self.layers))
        numbers = np.zeros((len(products), len(adapters.STEP_ARGUMENTS)), np.int64)
        if adapted is not None:
            firsts, counts = np.zeros_like(products), np.full_like(products, num_rows)
            if span is not None:
                firsts[1 - PRODUCTS :], counts[1 - PRODUCTS :] = span
            changed = adapted.is_changed[products]
            numbers[changed] = adapted.step_numbers(products, firsts, counts, scratch)[changed]
        self._is_adapted = True  # until every operation is known to have no rows
        self._adapter_wires.carry(numbers)
        self._is_adapted = adapted is not None

    def _lay_wires(self, storage: KVStorage) -> None:
        """Connect the layers' arguments with the places of a step's numbers. Layers with the same group, head shapes
        and rotary embedding take the same numbers.
        """
        kinds: dict[tuple[object, ...], list[LayerOperations]] = {}
        for layer in self.layers:
            kind = storage.group_of[layer.layer], layer.attention.shape, layer.rotary
            kinds.setdefault(kind, []).append(layer)
        self._kinds, wires = [], list[tuple[Operation, str, int]]()
        for layers in kinds.values():
            wires += [wire for layer in layers for wire in layer.wires(len(self._kinds) * _NUMBERS)]
            token_bytes = sum(layer.attention.token_bytes for layer in layers)
            self._kinds.append((storage.group_of[layers[0].layer], token_bytes, layers[0]))
        self._wires = Wires(wires)

    def _bind_step(self, turns: Sequence[Turns], step: Step) -> None:
        """Set the arguments that change in every step.

        Rows of padding attend to nothing: their results are stale memory, which no other row sees.
        """
        numbers = np.empty((len(self._kinds), _NUMBERS), np.int64)
        for row, (group, token_bytes, layer) in zip(numbers, self._kinds, strict=True):
            planned = step.groups[group]
            row[: len(rotary.STEP_ARGUMENTS)] = rotary.step_numbers(turns[layer.rotary], planned.slots)
            kernel = cast(CpuAttention, planned.kernel)
            row[len(rotary.STEP_ARGUMENTS) :] = kernel.step_numbers(layer.attention.shape, token_bytes, planned.plan)
        self._wires.carry(numbers)
        self._turns = turns


def _in_lines(num_bytes: int) -> int:
    """`num_bytes`, rounded up to whole lines of a cache."""
    return padded(num_bytes, _LINE)
