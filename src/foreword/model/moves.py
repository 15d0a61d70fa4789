"""Moving KV from slots to slots: values are copied, keys are copied and turned to their new positions.

A key is turned once, in float32, from the canonical key at its source, and rounded once. So a moved key's bits depend
on the source's key and on the shift alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foreword.batch import Int64Array, Move
from foreword.kernels.cpu import moves as kernels
from foreword.kernels.kv_format import KVFormat
from foreword.model.rotation import KeyRotation, Turn
from foreword.model.storage import KVStorage

Tables = tuple[Tensor, Tensor]
"""Cosines and sines [owners, pairs] float32."""
_BITS: dict[KVFormat, tuple[torch.dtype, Any, Callable[..., None]]] = {
    KVFormat(torch.bfloat16): (torch.int16, np.uint16, kernels.turn_rows_bf16),
    KVFormat(torch.float32): (torch.float32, np.float32, kernels.turn_rows_f32),
}
"""Formats that a kernel turns: how torch and numpy see their bits, and the kernel."""


class KeyMover:
    """Moves KV within one storage, for one thread at a time."""

    def __init__(self, storage: KVStorage, rotation: KeyRotation, *, compiled: bool | None = None) -> None:
        """`compiled`: whether to move with compiled kernels; None: if they take this storage. Bits are the same."""
        self._storage, self._rotation = storage, rotation
        self._turns_of = functools.lru_cache(maxsize=1024)(Turn.cosines)
        layers = storage.blocks.values()
        takes = all(own.is_contiguous and own.format in _BITS and own.keys.device.type == "cpu" for own in layers)
        self._is_compiled = takes if compiled is None else compiled
        if self._is_compiled:
            nothing = np.empty(0, np.int64)
            self._move(nothing, nothing, [Move(nothing, nothing, 1)])  # so that no request waits for the compiler

    def move(self, moves: Sequence[Move]) -> None:
        """Move tokens in all layers. No source may be a target."""
        moving = [one for one in moves if len(one.sources)]
        if not moving:
            return
        sources, targets = (np.concatenate([one[at] for one in moving]) for at in (0, 1))
        self._move(sources, targets, [one for one in moving if one.shift])

    def _move(self, sources: Int64Array, targets: Int64Array, shifted: Sequence[Move]) -> None:
        """Copy all tokens, and turn those of the moves `shifted`."""
        lengths = [len(one.targets) for one in shifted]
        owners = np.repeat(np.arange(len(shifted)), lengths)
        turning = np.concatenate([one.targets for one in shifted]) if shifted else np.empty(0, np.int64)
        known: dict[Turn, Tables] = {}
        for layer, turn in self._rotation.turns.items():
            self._copy(layer, sources, targets)
            if turn.table is not None and shifted:
                if turn not in known:
                    pairs = [self._turns_of(turn, one.shift) for one in shifted]
                    known[turn] = torch.stack([own[0] for own in pairs]), torch.stack([own[1] for own in pairs])
                self._turn(layer, turn, turning, owners, known[turn])

    def _copy(self, layer: int, sources: Int64Array, targets: Int64Array) -> None:
        if not self._is_compiled:
            rows = self._storage.blocks[layer].read(torch.from_numpy(sources))
            self._storage.write(layer, torch.from_numpy(targets), *rows)
            return
        blocks = self._storage.blocks[layer]
        for own in (blocks.keys, blocks.values):
            kernels.copy_rows(_bits(blocks.format, own).reshape(-1, own.shape[2] * own.shape[3]), sources, targets)

    def _turn(self, layer: int, turn: Turn, targets: Int64Array, owners: Int64Array, tables: Tables) -> None:
        """Turn keys where they are, each by its owner's angles."""
        blocks = self._storage.blocks[layer]
        if self._is_compiled:
            cosines, sines = (own.numpy() for own in tables)
            rows = _bits(blocks.format, blocks.keys).reshape(-1, *blocks.keys.shape[2:])
            _BITS[blocks.format][2](rows, targets, owners, cosines, sines, turn.places)
            return
        slots, chosen = torch.from_numpy(targets), torch.from_numpy(owners)
        keys, values = blocks.read(slots)
        cosines_of, sines_of = (own[chosen][:, None] for own in tables)
        self._storage.write(layer, slots, turn.apply(keys.float(), cosines_of, sines_of), values)


def _bits(kv_format: KVFormat, elements: Tensor) -> Any:
    """Elements as an array that kernels take; they share memory."""
    torch_type, numpy_type, _ = _BITS[kv_format]
    return elements.view(torch_type).numpy().view(numpy_type)
