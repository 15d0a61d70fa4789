"""A decoder layer's modules, by what they do: one attention, two norms, one feed-forward network.

Knows what such a layer looks like as modules, after these were fused and packed; knows no model by name.
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
from foreword.model.fusion.modules import FusedGate, FusedNorm, ProductPart
from foreword.model.fusion.packed import PackedLinear
from foreword.model.layout import LayerLayout


def layers_with_attention(module: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Layers and their attention, where its projections are one product."""
    for layer in list(module.modules()):
        for attention in layer.children():
            projections = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj")]
            products = {id(part.product) for part in projections if isinstance(part, ProductPart)}
            if len(products) == 1 and all(isinstance(part, ProductPart) for part in projections):
                yield layer, attention


@dataclass(frozen=True, slots=True)
class LayerParts:
    """The modules of a layer, by what they do."""

    attention: nn.Module
    norms: tuple[FusedNorm, FusedNorm]
    """Before attention, and before the feed-forward network."""
    project: PackedLinear
    output: nn.Module
    network: nn.Module
    head_norms: tuple[FusedNorm | None, FusedNorm | None]
    """Of queries and of keys."""
    widths: tuple[int, ...]
    """Of queries, keys and values together."""

    @classmethod
    def of(cls, layer: nn.Module, attention: nn.Module) -> LayerParts | None:
        """None if the layer has other parts."""
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
        """None if norms or heads are of other sizes than one row after the other."""
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

    def rotary(self, shapes: HeadShapes) -> RotaryKernel:
        """The pass from projections to attention."""
        return RotaryKernel(shapes, *(None if norm is None else norm.norm for norm in self.head_norms))

    def operations(self, rotary: RotaryKernel, options: AttentionOptions) -> LayerOperations | None:
        """None if a part has no operation for it."""
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
        """What layers have in common for which one full trial is enough."""
        modules = (*self.norms, self.network, self.attention, *self.head_norms)
        return (
            *(type(module) for module in modules),
            *(getattr(getattr(module, "norm", None), "form", None) for module in modules),
            self.widths,
            self.norms[0].weight.shape,
            self.norms[0].weight.dtype,
        )
