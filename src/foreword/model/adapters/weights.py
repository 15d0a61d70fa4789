"""An adapter's matrices, packed for one model's products; the digest of their content; and the terms that they add.

The terms for a row of a step are computed in float32 in an order that no other row changes, and rows without an
adapter are not touched (`kernels/products/low_rank.py`).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.batch import Int64Array
from foreword.kernels.llvm.emit import LANES
from foreword.kernels.products import low_rank
from foreword.kernels.products.low_rank import MOST_ROWS, PART, PARTS, RANKS, Floats, pack_down, pack_up, padded_inputs
from foreword.kernels.runtime.threads import OfThread, Operation
from foreword.model.cpu.product import thread_memory
from foreword.model.spec import DecoderSpec

PROJECT, OUTPUT, GATE, DOWN = range(4)
"""A layer's products, in the order in which they run."""
PRODUCTS = 4


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a checkpoint's weight in the decoder's products."""

    product: int
    """The number of the product among the products of all layers."""
    part: int
    first: int
    """The weight's first output in the product."""
    width: int
    """The number of the weight's outputs."""
    inputs: int


def places(spec: DecoderSpec) -> dict[str, Place]:
    """The weights that an adapter may change, by the names of their modules. Experts and routers are not among them."""
    layers = range(len(spec.layers))
    return {f"model.layers.{layer}.{name}": place for layer in layers for name, place in _in(spec, layer)}


def _in(spec: DecoderSpec, layer: int) -> Iterator[tuple[str, Place]]:
    names, shapes = spec.names, spec.products(spec.layers[layer].has_experts)
    modules_of = names.project, (names.output,), names.network.gate_up, (names.network.down,)
    for product, modules in zip((PROJECT, OUTPUT, GATE, DOWN), modules_of, strict=True):
        first = 0
        for part, name in enumerate(modules):
            if name in shapes:
                width, inputs = shapes[name]
                yield name, Place(PRODUCTS * layer + product, part, first, width, inputs)
                first += width


def most_bytes(spec: DecoderSpec, rank: int) -> int:
    """Bytes of memory of an adapter that changes every weight, with changes of this rank."""
    sides = sum(padded_inputs(side) for place in places(spec).values() for side in (place.inputs, place.width))
    return 4 * sides * -(-rank // RANKS) * RANKS


@dataclass(frozen=True, slots=True)
class LowRank:
    """The change of one weight: scale * up @ down."""

    down: Floats
    """[rank, inputs]"""
    up: Floats
    """[outputs, rank]"""
    scale: float
    content: bytes
    """A digest of the types, shapes and bytes that both matrices have in the file."""


class AdapterName:
    """The name of an adapter, for a process that computes nothing."""

    def __init__(self, digest: str, invocation: Sequence[int] | None, folder: str) -> None:
        """`invocation`: the tokens with which an aLoRA adapter begins; None: it is a plain LoRA adapter."""
        self.digest = digest
        """A digest of matrices, scales and invocation tokens. Adapters with equal content have equal digests."""
        self.invocation = None if invocation is None else np.array(invocation, np.int32)
        self.folder = folder
        """The folder from which the adapter was read."""

    def begin_in(self, token_ids: npt.NDArray[np.int32]) -> int | None:
        """The index of the first prompt token that the adapter changes; None: it changes no token.

        For aLoRA (arXiv 2504.12397), this is the last place at which the invocation begins. Without an invocation, it
        is 0.
        """
        if self.invocation is None:
            return 0
        size = len(self.invocation)
        if len(token_ids) < size:
            return None
        windows = np.lib.stride_tricks.sliding_window_view(token_ids, size)
        begins = np.flatnonzero(token_ids[: len(windows)] == self.invocation[0])
        matches = begins[(windows[begins] == self.invocation).all(axis=1)]
        return int(matches[-1]) if len(matches) else None


class AdapterWeights(AdapterName):
    """One adapter. A request that uses the adapter keeps it in memory. `changes`: name of a module -> its change."""

    def __init__(
        self, spec: DecoderSpec, changes: Mapping[str, LowRank], invocation: Sequence[int] | None, folder: str = ""
    ) -> None:
        super().__init__(_digest(changes, invocation), invocation, folder)
        self.most_rank = max(len(change.down) for change in changes.values())
        changeable, count = places(spec), PRODUCTS * len(spec.layers)
        self._parts = np.zeros((count, PARTS), PART)
        self._packed: list[Floats] = []
        for name, change in changes.items():
            place, part = changeable[name], self._parts[changeable[name].product, changeable[name].part]
            down, up = pack_down(change.down), pack_up(change.up * np.float32(change.scale))
            self._packed += [down, up]
            part["down"], part["up"], part["rank"] = down.ctypes.data, up.ctypes.data, len(down)
            part["first"], part["width"] = place.first, place.width
        addresses = self._parts.ctypes.data + np.arange(count) * self._parts.strides[0]
        self.tables: npt.NDArray[np.int64] = np.where(self._parts["rank"].any(axis=1), addresses, 0)
        """The address of each product's PART records; 0 for products that the adapter does not change."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the matrices take."""
        return sum(matrix.nbytes for matrix in self._packed)


def _digest(changes: Mapping[str, LowRank], invocation: Sequence[int] | None) -> str:
    """SHA-256 of everything that determines the adapter's results, in one form and order."""
    digest = hashlib.sha256(repr(None if invocation is None else [int(token) for token in invocation]).encode())
    for name, change in sorted(changes.items()):
        digest.update(f"\n{name} {len(change.down)} {change.scale.hex()} ".encode() + change.content)
    return digest.hexdigest()


ALONE_OPERATIONS = 1 << 18
"""If there are fewer multiplications, the calling thread works alone, because waking other threads takes longer."""
NONE = -1
STEP_ARGUMENTS = "num_rows", "numbers", "tables", "unit_rows", "scratch", "thread_scratch"
"""Arguments that change in every step of an operation whose rows have fixed addresses."""


class AdaptedRows:
    """Says for each row of a step which adapter changes the row, if any."""

    def __init__(self, adapters: Sequence[AdapterWeights], numbers: Int64Array) -> None:
        """`numbers` [rows]: for each row, the index of its adapter in `adapters`, or NONE."""
        self._adapters, self._numbers = adapters, np.ascontiguousarray(numbers)
        self._tables = np.stack([adapter.tables for adapter in adapters], axis=1)
        self.is_changed = (self._tables != 0).any(axis=1)
        """[products]: whether an adapter changes the product."""
        self.most_rank = max(adapter.most_rank for adapter in adapters) + low_rank.RANKS
        self.thread_scratch = low_rank.thread_scratch(self.most_rank)
        self._addresses = self._numbers.ctypes.data, self._tables.ctypes.data

    def __len__(self) -> int:
        return len(self._numbers)

    def layer(self, layer: int) -> LayerDeltas:
        first = PRODUCTS * layer
        return LayerDeltas(
            *(Deltas(self, at) if self.is_changed[at] else None for at in range(first, first + PRODUCTS))
        )

    def of(self, rows: Tensor) -> AdaptedRows:
        return AdaptedRows(self._adapters, self._numbers[rows.numpy()])

    def changed(self) -> Tensor:
        """The rows that have an adapter, even one that leaves this product as it is."""
        return torch.from_numpy(np.flatnonzero(self._numbers != NONE))

    def step_numbers(self, products: Int64Array, firsts: Any, counts: Any, scratch: int) -> Int64Array:
        """STEP_ARGUMENTS of products; `firsts`, `counts`: for each product, its first row and the number of its rows.

        `scratch`: the address of the scratch memory for all threads.
        """
        rows, tables = self._addresses
        arguments = np.empty((len(products), len(STEP_ARGUMENTS)), np.int64)
        arguments[:, 0], arguments[:, 1] = counts, rows + firsts * self._numbers.itemsize
        arguments[:, 2] = tables + products * self._tables.strides[0]
        arguments[:, 3] = MOST_ROWS * np.maximum(1, counts // (4 * MOST_ROWS * torch.get_num_threads()))
        arguments[:, 4:] = scratch, self.thread_scratch
        return arguments


@dataclass(frozen=True, slots=True)
class Deltas:
    """The terms that adapters add to the results of one product."""

    rows: AdaptedRows
    product: int

    def add(self, rows: Tensor, result: Tensor) -> Tensor:
        """Return `result` [rows, out], a product of `rows` [rows, in], plus adapters' terms. `result` may change."""
        adapted, inputs, target = self.rows, rows.float(), result.float().contiguous()
        missing = low_rank.padded_inputs(inputs.shape[-1]) - inputs.shape[-1]
        inputs = torch.nn.functional.pad(inputs, (0, missing)) if missing else inputs.contiguous()
        assert len(inputs) == len(target) == len(adapted)
        operation = _operations().operation
        operation.bind(inputs.data_ptr(), inputs.shape[1], target.data_ptr(), target.shape[1])
        scratch = thread_memory(adapted.thread_scratch * torch.get_num_threads())
        operation.set_step(adapted.step_numbers(np.array([self.product]), 0, len(inputs), scratch)[0])
        work = len(inputs) * adapted.most_rank * (inputs.shape[-1] + target.shape[-1])
        operation.run(alone=work < ALONE_OPERATIONS)
        return target if result.dtype == torch.float32 else target.to(result.dtype)

    def of(self, rows: Tensor) -> Deltas:
        return Deltas(self.rows.of(rows), self.product)


class LayerDeltas(NamedTuple):
    """The terms that adapters add to each product of a layer; None: no row changes."""

    project: Deltas | None = None
    output: Deltas | None = None
    gate: Deltas | None = None
    down: Deltas | None = None


NO_DELTAS = LayerDeltas()


class LowRankOperation(Operation):
    """Adds adapters' terms to the results of one product, in float32."""

    def __init__(self) -> None:
        super().__init__(low_rank.add_products)

    def bind(self, rows: int, inputs: int, target: int, outputs: int) -> None:
        """Set the addresses of rows [rows, inputs], with padded `inputs`, and of the results that get the terms."""
        a = self.arguments
        a["rows"], a["row_bytes"], a["num_steps"] = rows, 4 * inputs, inputs // LANES
        a["target"], a["target_bytes"] = target, 4 * outputs

    def set_step(self, numbers: Int64Array) -> None:
        for argument, number in zip(STEP_ARGUMENTS, numbers, strict=True):
            self.arguments[argument] = number


@functools.cache
def _operations() -> OfThread[LowRankOperation]:
    """One operation for each thread. The first call compiles the worker."""
    return OfThread(LowRankOperation)
