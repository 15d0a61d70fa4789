"""The attention function that Hugging Face models call, and what it needs to know of the step.

Knows the calling convention of `transformers.AttentionInterface`; knows no model by name. Importing
this module registers the function as attn_implementation="foreword". No mask function is registered
under that name, so models build no mask: which positions a query sees follows from its own position.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from foreword.model.kernels.reference import AttentionOptions, Tile, paged_attention
from foreword.model.storage import KVStorage, LayerLayout

ATTENTION_NAME = "foreword"


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One step, as attention sees it; travels as a keyword argument of `model(...)`."""

    storage: KVStorage
    slots: Tensor
    """[tokens]: where each token's KV goes; tokens beyond it in the forward pass are padding."""
    tiles: list[Tile]


@dataclass(slots=True)
class LayoutProbe:
    """Stands in for the context once, at load, to see which layers call attention and with what shapes."""

    layers: dict[int, LayerLayout] = field(default_factory=dict)
    module_names: dict[int, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def observe(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> None:
        name = type(module).__name__
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            self.problems.append(f"{name} has no layer_idx")
            return
        if layer in self.layers:
            self.problems.append(f"layer {layer} calls attention more than once")
        if not getattr(module, "is_causal", True):
            self.problems.append(f"layer {layer} ({name}) is not causal")
        if key.shape[2] != query.shape[2]:
            self.problems.append(f"layer {layer} ({name}) attends to other tokens than its own")
        if query.shape[1] % key.shape[1]:
            self.problems.append(f"layer {layer} ({name}) has {query.shape[1]} query and {key.shape[1]} KV heads")
        self.layers[layer] = LayerLayout(key.shape[1], key.shape[3], value.shape[3])
        self.module_names[layer] = name


def foreword_attention(  # noqa: PLR0913 - the interface is transformers'
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    forward_context: ForwardContext | LayoutProbe,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Write this step's KV into its slots, then attend over everything in the block tables.

    query [1, heads, tokens, dim], key and value [1, kv_heads, tokens, dim]; returns
    [1, tokens, heads, value_dim] as the interface asks.
    """
    if isinstance(forward_context, LayoutProbe):
        forward_context.observe(module, query, key, value)
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    storage, slots = forward_context.storage, forward_context.slots
    layer: int = module.layer_idx  # type: ignore[assignment]
    num_tokens = len(slots)
    storage.write(layer, slots, key[0].transpose(0, 1)[:num_tokens], value[0].transpose(0, 1)[:num_tokens])
    options = AttentionOptions(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    output = paged_attention(
        query[0].transpose(0, 1), storage.keys[layer], storage.values[layer], forward_context.tiles, options
    )
    return output[None], None


def register() -> None:
    """Make the function known to transformers; calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, foreword_attention)


register()
__all__ = ["ATTENTION_NAME", "ForwardContext", "LayoutProbe", "foreword_attention"]
