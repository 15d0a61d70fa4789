"""Rotary embeddings from their facts: angles, tables of cosines and sines, and the rotation of heads.

Frequencies are those of the papers, in float32 and in the order of operations that transformers uses, so that tables
have the bits of transformers' tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from foreword.model.spec import RotarySpec

Turns = tuple[Tensor, Tensor]
"""Cosines and sines [1, rows, turned]."""


class Rotary:
    """The tables of one kind of rotary embeddings."""

    def __init__(self, spec: RotarySpec, device: torch.device) -> None:
        self.spec = spec
        frequencies, self.scale = frequencies_of(spec)
        self._frequencies = frequencies.to(device)
        self._axes = None if spec.axes is None else torch.tensor(spec.axes, device=device)

    def turns(self, positions: Tensor, dtype: torch.dtype) -> Turns:
        """The tables of positions [rows] or [3, rows], in the type in which heads are rotated."""
        positions = positions[:, None] if positions.dim() == 1 else positions[self._axes].T
        angles = positions[None].float() * self._frequencies
        doubled = torch.repeat_interleave(angles, 2, -1) if self.spec.interleaved else torch.cat((angles, angles), -1)
        first = dtype if self.spec.rounded_tables or not self.spec.in_float32 else torch.float32
        last = torch.float32 if self.spec.in_float32 else dtype
        return (doubled.cos() * self.scale).to(first).to(last), (doubled.sin() * self.scale).to(first).to(last)

    def table(self, positions: Tensor) -> Turns:
        """Cosines and sines [positions, turned] in float32, to move keys."""
        cosines, sines = self.turns(positions, torch.float32)
        return cosines[0], sines[0]

    def turn(self, heads: Tensor, turns: Turns) -> Tensor:
        """Turn heads [rows, heads, dim]."""
        cosine, sine = turns[0][0, :, None], turns[1][0, :, None]
        size = self.spec.turned
        rows = heads[..., :size].to(cosine.dtype)
        if self.spec.interleaved:
            other = torch.stack((-rows[..., 1::2], rows[..., ::2]), -1).flatten(-2)
        else:
            other = torch.cat((-rows[..., size // 2 :], rows[..., : size // 2]), -1)
        turned = (rows * cosine + other * sine).to(heads.dtype)
        return turned if size == heads.shape[-1] else torch.cat((turned, heads[..., size:]), -1)


def frequencies_of(spec: RotarySpec) -> tuple[Tensor, float]:
    """The angle that each pair turns per position, [turned / 2] float32, and the factor of cosines and sines."""
    exponents = torch.arange(0, spec.turned, 2, dtype=torch.int64).float() / spec.turned
    powers = spec.theta**exponents
    return _KINDS[spec.kind](spec, powers, spec.parameters)


def _default(spec: RotarySpec, powers: Tensor, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    """arXiv 2104.09864."""
    return 1.0 / powers, 1.0


def _linear(spec: RotarySpec, powers: Tensor, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    """arXiv 2306.15595: positions are divided by a factor."""
    return 1.0 / powers / rope["factor"], 1.0


def _llama3(spec: RotarySpec, powers: Tensor, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    """arXiv 2407.21783: slow angles are divided, fast angles are kept, and angles in between are mixed."""
    original, low, high = (
        rope[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    plain = 1.0 / powers
    lengths = 2 * math.pi / plain
    divided = torch.where(lengths > original / low, plain / rope["factor"], plain)
    share = (original / lengths - low) / (high - low)
    mixed = (1 - share) * divided / rope["factor"] + share * divided
    is_between = ~(lengths < original / high) & ~(lengths > original / low)
    return torch.where(is_between, mixed, divided), 1.0


def _yarn(spec: RotarySpec, powers: Tensor, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    """arXiv 2309.00071: angles that turn often in the original context are kept, slow ones divided, others mixed."""
    original = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or spec.max_positions / original

    def pair_of(num_turns: float) -> float:
        """The pair that rotates this number of full turns over the original context."""
        return spec.turned * math.log(original / (num_turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    first, last = pair_of(rope.get("beta_fast") or 32), pair_of(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, spec.turned - 1)
    if first == last:
        last += 0.001
    share = 1 - ((torch.arange(spec.turned // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    frequencies = 1.0 / (factor * powers) * (1 - share) + 1.0 / powers * share

    def scale_of(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    scale = rope.get("attention_factor")
    if scale is None and rope.get("mscale") and rope.get("mscale_all_dim"):
        scale = scale_of(rope["mscale"]) / scale_of(rope["mscale_all_dim"])
    return frequencies, scale_of(1.0) if scale is None else float(scale)


def _longrope(spec: RotarySpec, powers: Tensor, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    """arXiv 2402.13753, up to the original context: a longer context has other angles, which would change a prefix."""
    original = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or spec.max_positions / original
    scale = rope.get("attention_factor")
    if scale is None:
        scale = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    return 1.0 / (torch.tensor(rope["short_factor"], dtype=torch.float32) * powers), scale


_KINDS: Mapping[str, Callable[[RotarySpec, Tensor, Mapping[str, Any]], tuple[Tensor, float]]] = {
    "default": _default,
    "dynamic": _default,  # up to the original context; in a longer one, a prefix would change
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
