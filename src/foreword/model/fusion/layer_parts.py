"""A decoder layer's modules by their tasks: one attention, two norms, one feed-forward network.

Knows the fused and packed modules of such a layer; knows no model by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from foreword.kernels.reference import AttentionOptions
from foreword.model.cpu.layer_program import LayerOperations
from foreword.model.cpu.rotary import HeadShapes, RotaryKernel
from foreword.model.fusion.modules import PROJECTIONS, FusedGate, FusedNorm, ProductPart
from foreword.model.fusion.packed import PackedLinear
from foreword.model.layout import LayerLayout


def layers_with_attention(module: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield layers and their attention if its projections are one product."""
    for layer in list(module.modules()):
        for attention in layer.children():
            projections = [getattr(attention, name, None) for name in PROJECTIONS]
            products = {id(part.product) for part in projections if isinstance(part, ProductPart)}
            if len(products) == 1 and all(isinstance(part, ProductPart) for part in projections):
                yield layer, attention


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The modules of a layer by their tasks."""

    attention: nn.Module
    norms: tuple[FusedNorm, FusedNorm]
    """The norms before attention and before the feed-forward network."""
    project: PackedLinear
    output: nn.Module
    network: nn.Module
    head_norms: tuple[FusedNorm | None, FusedNorm | None]
    """The norms of queries and of keys."""
    widths: tuple[int, ...]
    """Widths of queries, keys and values, each of all heads."""

    @classmethod
    def of(cls, layer: nn.Module, attention: nn.Module) -> LayerParts | None:
        """Find the parts of a layer; None if it has others."""
        own, inner = dict(layer.named_children()), dict(attention.named_children())
        norms = tuple(child for child in own.values() if type(child) is FusedNorm)
        networks = [child for child in own.values() if child not in norms and child is not attention]
        query, output = inner.pop("q_proj"), inner.pop("o_proj", None)
        if len(norms) != 2 or len(networks) != 1 or output is None:
            return None
        del inner["k_proj"], inner["v_proj"]
        head_norms = inner.pop("q_norm", None), inner.pop("k_norm", None)
        if inner or not all(norm is None or type(norm) is FusedNorm for norm in head_norms):
            return None
        assert isinstance(query, ProductPart)
        return cls(
            attention,
            (norms[0], norms[1]),
            query.product.packed,
            output,
            networks[0],
            head_norms,  # type: ignore[arg-type]
            tuple(query.product.sizes),
        )

    def head_shapes(self, layout: LayerLayout, turned: int) -> HeadShapes | None:
        """The shapes of heads that follow each other in a row; None if norms or heads have other sizes."""
        norms = [norm for norm in self.head_norms if norm is not None]
        if any(len(norm.weight) != layout.key_dim for norm in norms):
            return None
        heads = self.widths[0] // layout.key_dim
        shapes = HeadShapes(heads, layout.num_kv_heads, layout.key_dim, layout.value_dim, turned)
        expected = (
            heads * layout.key_dim,
            layout.num_kv_heads * layout.key_dim,
            layout.num_kv_heads * layout.value_dim,
        )
        return shapes if self.widths == expected and shapes.can_take() else None

    def operations(self, rotary: RotaryKernel, options: AttentionOptions) -> LayerOperations | None:
        """Make the layer's operations; None if a part has none."""
        if type(self.network) is not FusedGate or self.norms[0].weight.dtype != torch.bfloat16:
            return None
        output = self.output.compact if type(self.output) is PackedLinear else None
        products = self.project.compact, output, self.network.compact, self.network.down.compact
        if any(product is None for product in products):
            return None
        first, second = (norm.norm for norm in self.norms)
        layer: int = self.attention.layer_idx  # type: ignore[assignment]
        return LayerOperations(layer, (first, second), products, rotary, options)  # type: ignore[arg-type]

    def make(self) -> tuple[Any, ...]:
        """A key that is equal for layers for which one full trial is enough."""
        modules = (*self.norms, self.network, self.attention, *self.head_norms)
        return (
            *(type(module) for module in modules),
            *(getattr(getattr(module, "norm", None), "form", None) for module in modules),
            self.widths,
            self.norms[0].weight.shape,
            self.norms[0].weight.dtype,
        )
