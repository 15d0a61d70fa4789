"""An adapter's matrices, packed for the products of one model, and the name of their content."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foreword.kernels.products.low_rank import PART, PARTS, RANKS, Floats, pack_down, pack_up, padded_inputs
from foreword.model.spec import DecoderSpec

PROJECT, OUTPUT, GATE, DOWN = range(4)
"""A layer's products, in the order in which they run."""
PRODUCTS = 4


@dataclass(frozen=True, slots=True)
class Place:
    """Where a weight of the checkpoint is in the decoder's products."""

    product: int
    """The number of the product among those of all layers."""
    part: int
    first: int
    """The first output of the product that it computes."""
    width: int
    """The number of outputs."""
    inputs: int


def places(spec: DecoderSpec) -> dict[str, Place]:
    """The weights that an adapter may change, by the names of their modules. Experts and routers are none of them."""
    layers = range(len(spec.layers))
    return {f"model.layers.{layer}.{name}": place for layer in layers for name, place in _in(spec, layer)}


def _in(spec: DecoderSpec, layer: int) -> Iterator[tuple[str, Place]]:
    names, hidden, inner = spec.names, spec.hidden_size, spec.intermediate_size
    products: list[tuple[int, Sequence[str], Sequence[int], int]] = [
        (PROJECT, names.project, spec.widths, hidden),
        (OUTPUT, (names.output,), (hidden,), spec.mixed_width),
    ]
    if not spec.layers[layer].has_experts:
        products += [
            (GATE, names.network.gate_up, (inner, inner), hidden),
            (DOWN, (names.network.down,), (hidden,), inner),
        ]
    for product, own, widths, inputs in products:
        widths, first = widths if len(own) > 1 else (sum(widths),), 0
        for part, (name, width) in enumerate(zip(own, widths, strict=True)):
            yield name, Place(PRODUCTS * layer + product, part, first, width, inputs)
            first += width


def most_bytes(spec: DecoderSpec, rank: int) -> int:
    """Bytes of memory that an adapter takes which changes all of them, each by this rank."""
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
    """A digest of both matrices as the file has them."""


class AdapterName:
    """What a process that computes nothing knows of an adapter."""

    def __init__(self, digest: str, invocation: Sequence[int] | None, folder: str) -> None:
        """`invocation`: the tokens with which an aLoRA adapter begins, if it is one."""
        self.digest = digest
        """Names the content: equal for the same matrices, scales and tokens, wherever they come from."""
        self.invocation = None if invocation is None else np.array(invocation, np.int32)
        self.folder = folder
        """Where it was read."""

    def begin_in(self, token_ids: npt.NDArray[np.int32]) -> int | None:
        """The index of the first token of a prompt that it computes; None: none, as if there were no adapter.

        aLoRA (arXiv 2504.12397): the last place at which the invocation begins. Without one: 0.
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
    """One adapter. Whoever runs a request under it keeps it alive."""

    def __init__(
        self, spec: DecoderSpec, changes: Mapping[str, LowRank], invocation: Sequence[int] | None, folder: str = ""
    ) -> None:
        """`changes` by names of modules."""
        super().__init__(_digest(changes, invocation), invocation, folder)
        self.most_rank = max(len(change.down) for change in changes.values())
        found, count = places(spec), PRODUCTS * len(spec.layers)
        self._parts = np.zeros((count, PARTS), PART)
        self._kept: list[Floats] = []
        for name, change in changes.items():
            place, part = found[name], self._parts[found[name].product, found[name].part]
            down, up = pack_down(change.down), pack_up(change.up * np.float32(change.scale))
            self._kept += [down, up]
            part["down"], part["up"], part["rank"] = down.ctypes.data, up.ctypes.data, len(down)
            part["first"], part["width"] = place.first, place.width
        addresses = self._parts.ctypes.data + np.arange(count) * self._parts.strides[0]
        self.tables: npt.NDArray[np.int64] = np.where(self._parts["rank"].any(axis=1), addresses, 0)
        """The address of each product's table of parts; 0 for products that stay as they are."""

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the matrices take."""
        return sum(matrix.nbytes for matrix in self._kept)


def _digest(changes: Mapping[str, LowRank], invocation: Sequence[int] | None) -> str:
    """SHA-256 of all that decides what the adapter computes, in one form and order."""
    digest = hashlib.sha256(repr(None if invocation is None else [int(token) for token in invocation]).encode())
    for name, change in sorted(changes.items()):
        digest.update(f"\n{name} {len(change.down)} {change.scale.hex()} ".encode() + change.content)
    return digest.hexdigest()
