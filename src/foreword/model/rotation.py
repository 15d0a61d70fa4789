"""How a decoder's keys rotate with the position, so that cached keys can be moved.

Rotary embeddings rotate a key by angles that are proportional to its position. So a key that was computed at position p
is moved to p + d if it is rotated once more, by the angles of d:

    R(p + d) k = R(d) R(p) k

Models without a spec in foreword (see model/decoder) are refused, because it is not known how their keys rotate.

`KeyMover` moves KV from slots to slots: values are copied, keys are copied and rotated. A key is rotated once, in
float32, from the canonical key at its source, and rounded once. So a moved key's bits depend on the source's key and on
the shift alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from foreword.batch import Int64Array, Move
from foreword.errors import UnsupportedModelError
from foreword.kernels.cpu import moves as kernels
from foreword.kernels.kv_format import KVFormat
from foreword.model.decoder.rotary import Rotary
from foreword.model.layout import CacheLayout
from foreword.model.spec import DecoderSpec
from foreword.model.storage import KVStorage

Table = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Positions [n] -> cosines and sines [n, width], in float32."""
Tables = tuple[Tensor, Tensor]
"""Cosines and sines [owners, pairs] float32."""
_BITS: dict[KVFormat, tuple[torch.dtype, Any, Callable[..., None]]] = {
    KVFormat(torch.bfloat16): (torch.int16, np.uint16, kernels.turn_rows_bf16),
    KVFormat(torch.float32): (torch.float32, np.float32, kernels.turn_rows_f32),
}
"""KV format -> the types of an element's bits in torch and in numpy, and the kernel that rotates such keys."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One way to rotate the first elements of a key."""

    table: Table | None
    """The function that gives cosines and sines; None: keys do not depend on the position."""
    width: int = 0
    """The number of elements that turn."""
    interleaved: bool = False
    """Whether elements 2i and 2i + 1 make a pair, not i and i + width / 2. The table has a pair's angle at both."""

    def cosines(self, shift: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each pair's angle for a shift, [width / 2] float32, without any scale that `table` has."""
        assert self.table is not None
        cosine, sine = (part[0] for part in self.table(torch.tensor([abs(shift)])))
        chosen = slice(0, None, 2) if self.interleaved else slice(0, self.width // 2)
        cosine, sine = cosine[chosen], sine[chosen]
        length = (cosine * cosine + sine * sine).sqrt()
        return cosine / length, (sine if shift >= 0 else -sine) / length

    @property
    def places(self) -> tuple[int, int, int]:
        """Where pairs lie in a key: the first element of the first pair, the distance from a pair's first element to
        the next pair's, and the distance between the two elements of a pair.
        """
        return (0, 2, 1) if self.interleaved else (0, 1, self.width // 2)

    def apply(self, keys: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Rotate keys [tokens, heads, dim] float32 in place; cosine and sine broadcast to [tokens, heads, width / 2].

        Each product and sum is rounded by itself, so the result's bits depend on nothing but the arguments.
        """
        turned = keys[..., : self.width]
        pairs = (turned[..., ::2], turned[..., 1::2]) if self.interleaved else turned.chunk(2, dim=-1)
        first, second = pairs[0].clone(), pairs[1].clone()
        pairs[0].copy_(first * cosine - second * sine)
        pairs[1].copy_(second * cosine + first * sine)
        return keys


@dataclass(frozen=True, slots=True)
class KeyRotation:
    """How the keys of all layers turn."""

    turns: dict[int, Turn]
    """Layer -> how its keys rotate."""

    @classmethod
    def of(cls, spec: DecoderSpec, rotaries: Sequence[Rotary]) -> KeyRotation:
        """Return how the keys of foreword's decoder rotate with the position, as its spec says."""
        turns, still = [Turn(r.table, r.spec.turned, r.spec.interleaved) for r in rotaries], Turn(None)
        return cls(
            {number: still if layer.rotary is None else turns[layer.rotary] for number, layer in enumerate(spec.layers)}
        )


def refuse_links(reason: str) -> NoReturn:
    """Raise UnsupportedModelError: links are enabled, but the model cannot have links."""
    raise UnsupportedModelError(f"allow_links=True, but this model's prompts cannot be linked: {reason}; leave it out")


def check_linkable(layout: CacheLayout) -> None:
    """Raise UnsupportedModelError if tokens cannot be moved between blocks of this layout."""
    if layout.kv_format.latent:
        refuse_links("its KV is latent, and a stored vector turns at its end")
    for layer, shape in layout.attention.items():
        reach = shape.sliding_window or shape.local_chunk
        if reach is not None and not layout.is_one_full_group:
            kind = "a sliding window" if shape.sliding_window else "chunks"
            refuse_links(f"layer {layer} attends to {kind} of {reach} tokens, where a moved token has other neighbours")
    if not layout.is_one_full_group:
        refuse_links("its layers keep tokens in different blocks")


class KeyMover:
    """Moves KV within one storage, for one thread at a time."""

    def __init__(self, storage: KVStorage, rotation: KeyRotation, *, compiled: bool | None = None) -> None:
        """`compiled`: whether to use compiled kernels, whose results have the same bits; None: use them if they support
        this storage.
        """
        self._storage, self._rotation = storage, rotation
        self._turns_of = functools.lru_cache(maxsize=1024)(Turn.cosines)
        layers = storage.blocks.values()
        takes = all(part.is_contiguous and part.format in _BITS and part.keys.device.type == "cpu" for part in layers)
        self._is_compiled = takes if compiled is None else compiled
        if self._is_compiled:
            nothing = np.empty(0, np.int64)
            self._move(nothing, nothing, [Move(nothing, nothing, 1)])  # so that no request waits for the compiler

    def move(self, moves: Sequence[Move]) -> None:
        """Move tokens in all layers. No source may be a target."""
        moving = [move for move in moves if len(move.sources)]
        if not moving:
            return
        sources, targets = (np.concatenate([move[at] for move in moving]) for at in (0, 1))
        self._move(sources, targets, [move for move in moving if move.shift])

    def _move(self, sources: Int64Array, targets: Int64Array, shifted: Sequence[Move]) -> None:
        """Copy the KV of all tokens. Then rotate the copied keys that belong to the moves in `shifted`."""
        lengths = [len(move.targets) for move in shifted]
        owners = np.repeat(np.arange(len(shifted)), lengths)
        turning = np.concatenate([move.targets for move in shifted]) if shifted else np.empty(0, np.int64)
        tables: dict[Turn, Tables] = {}
        for layer, turn in self._rotation.turns.items():
            self._copy(layer, sources, targets)
            if turn.table is not None and shifted:
                if turn not in tables:
                    pairs = [self._turns_of(turn, move.shift) for move in shifted]
                    tables[turn] = torch.stack([pair[0] for pair in pairs]), torch.stack([pair[1] for pair in pairs])
                self._turn(layer, turn, turning, owners, tables[turn])

    def _copy(self, layer: int, sources: Int64Array, targets: Int64Array) -> None:
        if not self._is_compiled:
            rows = self._storage.blocks[layer].read(torch.from_numpy(sources))
            self._storage.write(layer, torch.from_numpy(targets), *rows)
            return
        blocks = self._storage.blocks[layer]
        for part in (blocks.keys, blocks.values):
            kernels.copy_rows(_bits(blocks.format, part).reshape(-1, part.shape[2] * part.shape[3]), sources, targets)

    def _turn(self, layer: int, turn: Turn, targets: Int64Array, owners: Int64Array, tables: Tables) -> None:
        """Rotate the keys in slots `targets` in place; `owners`: for each key, the row of its angles in `tables`."""
        blocks = self._storage.blocks[layer]
        if self._is_compiled:
            cosines, sines = (table.numpy() for table in tables)
            rows = _bits(blocks.format, blocks.keys).reshape(-1, *blocks.keys.shape[2:])
            _BITS[blocks.format][2](rows, targets, owners, cosines, sines, turn.places)
            return
        slots, chosen = torch.from_numpy(targets), torch.from_numpy(owners)
        keys, values = blocks.read(slots)
        cosines_of, sines_of = (table[chosen][:, None] for table in tables)
        self._storage.write(layer, slots, turn.apply(keys.float(), cosines_of, sines_of), values)


def _bits(kv_format: KVFormat, elements: Tensor) -> Any:
    """View elements as an array that kernels take, in the same memory."""
    torch_type, numpy_type, _ = _BITS[kv_format]
    return elements.view(torch_type).numpy().view(numpy_type)
