"""What each layer remembers, and in which shapes: at load, two tokens run through the plain model once.

Importing this module registers attn_implementation="foreword_probe", which computes nothing and records each call of
attention. Unlike `foreword_attention` it has a mask function: models build their masks, and each mask must hide exactly
what the layer's window or chunk hides. The probe refuses a layer that hides or remembers anything else, with the
reason.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig

from foreword.errors import UnsupportedModelError, first_line
from foreword.kernels.reference import AttentionOptions
from foreword.model.checkpoint.facts import SUPPORTED
from foreword.model.foreign.attention import HONOURED, WITHOUT_EFFECT, attention_options
from foreword.model.foreign.flat_model import FlatModel
from foreword.model.foreign.recurrent import StateProbe
from foreword.model.layout import LayerLayout, StateLayout

PROBE_NAME = "foreword_probe"


@dataclass(frozen=True, slots=True)
class Remembered:
    """The things that the layers of a model keep from step to step."""

    layers: dict[int, LayerLayout]
    """Attention layers."""
    states: dict[int, StateLayout]
    """Recurrent layers; some are attention layers too."""
    recurrent: dict[int, nn.Module]
    """Recurrent layer -> the module that keeps its state."""
    options: dict[int, AttentionOptions]
    """Attention layer -> the options with which it calls attention."""


def probe_layers(model: FlatModel, config: PretrainedConfig) -> Remembered:
    """Find out what a plain model's layers remember. Raises UnsupportedModelError if the model cannot be served.

    Call it before modules are packed: a probe copies some modules, and packed weights cannot be copied.
    """
    probe = LayoutProbe()
    kind = getattr(config, "model_type", "?")
    attention = model.module.config._attn_implementation
    model.module.set_attn_implementation(PROBE_NAME)
    states = StateProbe.attach(model.module, model.module.config)
    try:
        model.run_two_tokens(probe, states.cache)
    except Exception as error:
        raise UnsupportedModelError(
            f"architecture {kind!r} does not accept a flattened batch ({type(error).__name__}: {first_line(error)}); "
            f"supported are {SUPPORTED}"
        ) from error
    finally:
        states.detach()
        model.module.set_attn_implementation(attention)
    layouts = states.layouts()
    problems = probe.problems + _problems(config, probe, layouts) + states.problems()
    if problems:
        raise UnsupportedModelError(
            f"architecture {kind!r} cannot be served: {'; '.join(problems[:3])}. Supported are {SUPPORTED}"
        )
    layers = dict(sorted(probe.layers.items()))
    return Remembered(layers, dict(sorted(layouts.items())), states.modules, probe.options)


def _problems(config: PretrainedConfig, probe: LayoutProbe, states: Mapping[int, StateLayout]) -> list[str]:
    """List the differences between what the probes recorded and the config."""
    problems = []
    types = list(getattr(config, "layer_types", None) or [None] * config.num_hidden_layers)
    for layer, layer_type in enumerate(types):
        layout, state = probe.layers.get(layer), states.get(layer)
        kind = f"layer {layer}" + (f" ({layer_type})" if layer_type else "")
        if layer_type in ("moe", "mlp"):
            continue
        if layout is None and state is None:
            problems.append(
                f"{kind} keeps something other than keys and values, or a state in transformers' cache (it never "
                "asked for attention)"
            )
        elif layer_type in ("linear_attention", "conv", "hybrid", "hybrid_sliding") and state is None:
            problems.append(f"{kind} keeps no state in transformers' cache")
        elif layout is not None and layer_type == "chunked_attention" and layout.local_chunk is None:
            problems.append(f"{kind} does not mask its chunks")
        elif layout is not None and layout.local_chunk is not None and layer_type != "chunked_attention":
            problems.append(f"{kind} masks chunks of {layout.local_chunk}, but its type does not say so")
    return problems


_SEEN = "foreword_seen"
"""Attribute of the tensor that a probed model gets in place of a mask: (sliding_window, local_chunk), which say what a
query sees. A tensor computed from it lacks the attribute."""


@dataclass(slots=True)
class LayoutProbe:
    """Stands in for a step's context and records which layers call attention, with which shapes."""

    layers: dict[int, LayerLayout] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    options: dict[int, AttentionOptions] = field(default_factory=dict)

    def observe(
        self, module: nn.Module, heads: tuple[Tensor, Tensor, Tensor], mask: Tensor | None, sliding_window: int | None
    ) -> None:
        """Record the shapes of a layer's queries, keys and values, and its window or chunk, or why it cannot be served.

        foreword's attention gets no mask, so the layer's other arguments must hide what the mask hides.
        """
        (query, key, value), name = heads, type(module).__name__
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            self.problems.append(f"{name} has no layer_idx")
            return
        at = f"layer {layer} ({name})"
        if layer in self.layers:
            self.problems.append(f"layer {layer} calls attention more than once")
        if not getattr(module, "is_causal", True):
            self.problems.append(f"{at} is not causal")
        if key.shape[2] != query.shape[2]:
            self.problems.append(f"{at} attends to other tokens than those of the batch")
        if query.shape[1] % key.shape[1]:
            self.problems.append(f"{at} has {query.shape[1]} query and {key.shape[1]} KV heads")
        window, chunk = (sliding_window, None) if mask is None else getattr(mask, _SEEN, (-1, -1))
        self.layers[layer] = LayerLayout(key.shape[1], key.shape[3], value.shape[3], window, chunk)
        if window == -1:
            self.problems.append(f"{at} makes its own mask")
        elif sliding_window != (window if chunk is None else None):
            self.problems.append(
                f"{at} asks attention for a window of {sliding_window}, but its mask has one of {chunk or window}"
            )


def _probing_mask(
    *,
    q_length: int,
    kv_length: int,
    local_size: int | None = None,
    mask_function: Callable[..., Any] | None = None,
    **_: Any,
) -> Tensor:
    """Stand in for the functions by which transformers builds masks."""
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool)
    bounds = _what_is_seen(local_size, mask_function)
    if bounds is not None:
        setattr(mask, _SEEN, bounds)
    return mask


def _what_is_seen(reach: int | None, mask_function: Callable[..., Any] | None) -> tuple[int | None, int | None] | None:
    """Find the window and chunk of a mask function; None if the function hides anything else."""
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
    """Compute nothing, but report the call to the probe. The interface is that of `foreword_attention`."""
    if forward_context is None:
        raise TypeError(f"{type(module).__name__} does not get the keyword arguments of the model's call")
    forward_context.observe(module, (query, key, value), attention_mask, sliding_window)
    unknown = [name for name, value in options.items() if value is not None and name not in HONOURED | WITHOUT_EFFECT]
    if unknown:
        forward_context.problems.append(
            f"{type(module).__name__} passes {', '.join(unknown)} to attention, which would ignore it"
        )
    layout = forward_context.layers.get(getattr(module, "layer_idx", -1))
    if layout is not None:
        forward_context.options[module.layer_idx] = attention_options(  # type: ignore[index]
            query, layout.local_chunk, sliding_window=sliding_window, **options
        )
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(PROBE_NAME, probing_attention)
AttentionMaskInterface.register(PROBE_NAME, _probing_mask)
