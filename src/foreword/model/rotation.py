"""How a decoder's keys turn with the position, so that cached keys can be moved.

Rotary embeddings turn a key by angles that are proportional to its position, so a key that was computed at position p
is moved to p + d by one more turn of d:

    R(p + d) k = R(d) R(p) k

Models that nobody has written down are refused: how their keys turn would have to be guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from foreword.errors import UnsupportedModelError
from foreword.model.decoder.rotary import Rotary
from foreword.model.layout import CacheLayout
from foreword.model.spec import DecoderSpec

Table = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Positions [n] -> cosines and sines [n, width], in float32."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One way to turn the first elements of a key."""

    table: Table | None
    """None: keys do not depend on the position."""
    width: int = 0
    """The number of elements that turn."""
    interleaved: bool = False
    """Whether elements 2i and 2i + 1 make a pair, not i and i + width / 2. The table has a pair's angle at both."""

    def cosines(self, shift: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each pair's angle for a shift, [width / 2] float32; scaled tables are divided out."""
        assert self.table is not None
        cosine, sine = (one[0] for one in self.table(torch.tensor([abs(shift)])))
        chosen = slice(0, None, 2) if self.interleaved else slice(0, self.width // 2)
        cosine, sine = cosine[chosen], sine[chosen]
        length = (cosine * cosine + sine * sine).sqrt()
        return cosine / length, (sine if shift >= 0 else -sine) / length

    @property
    def places(self) -> tuple[int, int, int]:
        """Where pairs lie in a key: the first element of the first pair, the distance to the next pair's, and the
        distance between the two elements of a pair.
        """
        return (0, 2, 1) if self.interleaved else (0, 1, self.width // 2)

    def apply(self, keys: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Turn keys [tokens, heads, dim] float32 in place; cosine and sine broadcast to [tokens, heads, width / 2].

        Each product and sum is rounded by itself, so bits depend on nothing but these numbers.
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
    """Layer -> its way."""

    @classmethod
    def of(cls, spec: DecoderSpec, rotaries: Sequence[Rotary]) -> KeyRotation:
        """How the keys of a written decoder turn: as its spec says."""
        turns, still = [Turn(own.table, own.spec.turned, own.spec.interleaved) for own in rotaries], Turn(None)
        return cls(
            {number: still if own.rotary is None else turns[own.rotary] for number, own in enumerate(spec.layers)}
        )


def refuse_links(reason: str) -> NoReturn:
    """Raise UnsupportedModelError: links were allowed, and the model cannot have them."""
    raise UnsupportedModelError(f"allow_links=True, but this model's prompts cannot be linked: {reason}; leave it out")


def check_linkable(layout: CacheLayout) -> None:
    """Raise UnsupportedModelError if tokens cannot be moved between blocks of this layout."""
    for layer, own in layout.attention.items():
        reach = own.sliding_window or own.local_chunk
        if reach is not None and not layout.is_one_full_group:
            kind = "a sliding window" if own.sliding_window else "chunks"
            refuse_links(f"layer {layer} attends to {kind} of {reach} tokens, where a moved token has other neighbours")
    if not layout.is_one_full_group:
        refuse_links("its layers keep tokens in different blocks")
