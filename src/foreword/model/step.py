"""Step: one forward pass, as a model sees it.

Transformers' modules get it as the keyword argument `forward_context`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from foreword.kernels.select import AttentionKernel
from foreword.model.adapters.rows import NO_DELTAS, AdaptedRows, LayerDeltas
from foreword.model.storage import KVStorage


@dataclass(frozen=True, slots=True)
class GroupStep:
    """One step, as the attention layers of one group see it."""

    slots: Tensor
    """[tokens]: where each token's KV goes; later rows of the forward pass are padding."""
    kernel: AttentionKernel
    plan: Any
    """The kernel's plan of this step."""


@dataclass(frozen=True, slots=True)
class GivenRows:
    """Rows that enter the first layer and are no token's embedding."""

    places: Tensor
    """[given] int64: which rows of the step they are."""
    values: Tensor
    """[given, width], in the model's type."""
    added: tuple[Tensor, ...] = ()
    """[given, width]: what is added to these rows after each of the first layers (DeepStack, arXiv 2406.04334)."""


@dataclass(frozen=True, slots=True)
class Step:
    """The rows of one forward pass: tokens, and padding after them."""

    token_ids: Tensor
    """[rows] int64"""
    positions: Tensor
    """[rows] int64: the positions that turn heads; or [3, rows], where they have three numbers."""
    keep: Tensor
    """[padded] int64: rows whose logits are computed, ascending; padding after the first `num_kept`."""
    num_kept: int
    storage: KVStorage
    groups: dict[int, GroupStep]
    """Attention group -> its step."""
    adapted: AdaptedRows | None = None
    """The rows that adapters change; None: none."""
    given: GivenRows | None = None
    """The rows that are no tokens' embeddings; None: all are."""
    columns: Tensor | None = None
    """[n] int64, ascending: the tokens whose logits are computed; None: all."""

    def deltas(self, layer: int) -> LayerDeltas:
        """What adapters add to the results of a layer's products."""
        return NO_DELTAS if self.adapted is None else self.adapted.layer(layer)

    @property
    def num_tokens(self) -> int:
        """The number of rows before padding."""
        return len(next(iter(self.groups.values())).slots)

    def group(self, layer: int) -> GroupStep:
        """The step of an attention layer's group."""
        return self.groups[self.storage.group_of[layer]]
