"""The attention function that Hugging Face models call, and what it needs to know of the step.

Knows the calling convention of `transformers.AttentionInterface`; knows no model by name. Importing
this module registers the function as attn_implementation="foreword". No mask function is registered
under that name, so models build no mask: which positions a query sees follows from its own position.
Whether that is all a model wants to hide is found out once, at load, under a second name that has masks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from foreword.kernels.reference import AttentionOptions
from foreword.kernels.select import AttentionKernel
from foreword.model.layout import LayerLayout
from foreword.model.storage import KVStorage

ATTENTION_NAME = "foreword"
PROBE_NAME = "foreword_probe"


@dataclass(frozen=True, slots=True)
class GroupStep:
    """One step, as the attention layers of one group see it."""

    slots: Tensor
    """[tokens]: where each token's KV goes; tokens beyond it in the forward pass are padding."""
    kernel: AttentionKernel
    plan: Any
    """The kernel's plan of this step."""


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One step, as attention sees it; travels as a keyword argument of `model(...)`."""

    storage: KVStorage
    steps: dict[int, GroupStep]
    """Attention group -> its step."""


_KNOWN_TENSORS = ("s_aux", "alibi_slopes", "position_ids")
"""What a layer may hand to attention besides query, key and value; positions are known anyway."""

_SEEN = "foreword_seen"
"""Attribute of the tensor that a probed model gets in place of a mask: what it leaves to a query, as
(sliding_window, local_chunk). A tensor computed from it does not have it."""


@dataclass(slots=True)
class LayoutProbe:
    """Stands in for the context once, at load, to see which layers call attention and with what shapes."""

    layers: dict[int, LayerLayout] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def observe(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Note one layer's shapes, and what about it cannot be served."""
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

    def observe_mask(self, module: nn.Module, mask: Tensor | None, sliding_window: int | None) -> None:
        """Note what a layer's mask hides, and if that is not what it tells attention, which sees no mask."""
        layer = getattr(module, "layer_idx", None)
        if layer not in self.layers:
            return
        at = f"layer {layer} ({type(module).__name__})"
        window, chunk = (sliding_window, None) if mask is None else getattr(mask, _SEEN, (-1, -1))
        if window == -1:
            self.problems.append(f"{at} makes a mask of its own")
        elif sliding_window != (window if chunk is None else None):
            self.problems.append(
                f"{at} asks attention for a window of {sliding_window}, and its mask for one of {chunk or window}"
            )
        else:
            self.layers[layer] = replace(self.layers[layer], sliding_window=window, local_chunk=chunk)


def _probing_mask(
    *,
    q_length: int,
    kv_length: int,
    local_size: int | None = None,
    mask_function: Callable[..., Any] | None = None,
    **_: Any,
) -> Tensor:
    """Called by transformers' mask functions in place of what builds a mask."""
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool)
    seen = _what_is_seen(local_size, mask_function)
    if seen is not None:
        setattr(mask, _SEEN, seen)
    return mask


def _what_is_seen(reach: int | None, mask_function: Callable[..., Any] | None) -> tuple[int | None, int | None] | None:
    """The window and chunk that a mask function means, None if it is neither these nor causal."""
    if mask_function is None:
        return None
    zero = torch.tensor(0)
    edges = [0, 1, 2] if reach is None else [0, 1, reach - 1, reach, reach + 1, 2 * reach - 1, 2 * reach, 2 * reach + 1]
    pairs = [(query, kv) for query in edges for kv in sorted({*edges, query - 1, query, query + 1}) if kv >= 0]

    def agrees(first_seen: Callable[[int], int]) -> bool:
        return all(
            bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(kv))) == (first_seen(query) <= kv <= query)
            for query, kv in pairs
        )

    if reach is None:
        return (None, None) if agrees(lambda query: 0) else None
    if agrees(lambda query: query - reach + 1):
        return reach, None
    return (None, reach) if agrees(lambda query: query // reach * reach) else None


def probing_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    forward_context: LayoutProbe | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute nothing, but tell the probe what was asked; the interface is that of `foreword_attention`."""
    if forward_context is None:
        raise TypeError(f"{type(module).__name__} is not handed the keyword arguments that the model was called with")
    forward_context.observe(module, query, key, value)
    forward_context.observe_mask(module, attention_mask, sliding_window)
    unknown = [name for name, value in options.items() if isinstance(value, Tensor) and name not in _KNOWN_TENSORS]
    if unknown:
        forward_context.problems.append(f"{type(module).__name__} passes {', '.join(unknown)} to attention")
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def foreword_attention(  # noqa: PLR0913 - the interface is transformers'
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    forward_context: ForwardContext,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Write this step's KV into its slots, then attend over everything in the block tables.

    query [1, heads, tokens, dim], key and value [1, kv_heads, tokens, dim]; returns
    [1, tokens, heads, value_dim] as the interface asks.
    """
    layer: int = module.layer_idx  # type: ignore[assignment]
    storage = forward_context.storage
    step = forward_context.steps[storage.group_of[layer]]
    slots = step.slots
    num_tokens = len(slots)
    storage.write(layer, slots, key[0].transpose(0, 1)[:num_tokens], value[0].transpose(0, 1)[:num_tokens])
    options = AttentionOptions(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        local_chunk=storage.layout.attention[layer].local_chunk,
        slopes=alibi_slopes,
    )
    output = step.kernel.attend(
        query[0].transpose(0, 1), storage.keys[layer], storage.values[layer], step.plan, options
    )
    return output[None], None


def register() -> None:
    """Make the functions known to transformers; calling it again changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, foreword_attention)
    AttentionInterface.register(PROBE_NAME, probing_attention)
    AttentionMaskInterface.register(PROBE_NAME, _probing_mask)


register()
__all__ = ["ATTENTION_NAME", "PROBE_NAME", "ForwardContext", "GroupStep", "LayoutProbe", "foreword_attention"]
