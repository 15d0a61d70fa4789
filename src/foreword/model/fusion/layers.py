"""Replacing the decoder layers that compute the formula of `fused_layer.py`, found by running each on random rows.

Knows the arguments of a layer's attention; knows no model by name. A layer is replaced only if it gives the formula's
exact bits, passes the same queries to attention, and writes the same keys and values. Other layers stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from foreword.kernels.reference import AttentionOptions
from foreword.model.cpu.rotary import HeadShapes, RotaryKernel
from foreword.model.foreign.attention import GroupStep
from foreword.model.foreign.trial import NUM_ROWS, RandomInputs, attempt, same_bits
from foreword.model.fusion.fused_layer import FusedForward
from foreword.model.fusion.layer_parts import LayerParts, layers_with_attention
from foreword.model.layout import LayerLayout

logger = logging.getLogger(__name__)

_TURNED_PARTS = (1, 2, 4)
"""A rotary embedding may turn all of a head, a half or a quarter: key_dim divided by one of these."""


def fuse_layers(module: nn.Module, layouts: Mapping[int, LayerLayout]) -> int:
    """Replace the layers of a fused and packed `module` that compute the formula; returns their number."""
    known: dict[tuple[Any, ...], bool] = {}
    fused: dict[int, FusedForward] = {}
    with torch.inference_mode():
        for layer, attention in layers_with_attention(module):
            layout = layouts.get(getattr(attention, "layer_idx", -1))
            parts = None if layout is None else LayerParts.of(layer, attention)
            if layout is None or parts is None:
                continue
            forward = _fused_forward(layer, parts, layout, known)
            if forward is not None:
                layer.forward = fused[forward.layer] = forward
    for index, forward in fused.items():
        forward.following = fused.get(index + 1)
    logger.debug("%d decoder layers fused", len(fused))
    return len(fused)


def _fused_forward(
    layer: nn.Module, parts: LayerParts, layout: LayerLayout, known: dict[tuple[Any, ...], bool]
) -> FusedForward | None:
    """The formula as the layer's `forward`, if the layer computes it.

    Attention is tried in every layer, the other parts in the first layer of each make.
    """
    if any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules()):
        return None
    dtype = parts.norms[0].weight.dtype
    for part in _TURNED_PARTS:
        shapes = parts.head_shapes(layout, layout.key_dim // part)
        if shapes is None:
            continue
        rotary = RotaryKernel(shapes, *(None if norm is None else norm.norm for norm in parts.head_norms))
        inputs = RandomInputs(2)
        cosines, sines = (inputs.rows(1, NUM_ROWS, shapes.turned, dtype=dtype) for _ in range(2))
        turns = cosines, sines
        x = inputs.rows(1, NUM_ROWS, len(parts.norms[0].weight), dtype=dtype)
        index: int = parts.attention.layer_idx  # type: ignore[assignment]
        original, ours = (_Trial.on(index, layout, shapes, dtype) for _ in range(2))
        make = (type(layer), part, *parts.make())
        whole = make not in known
        output = _run(layer if whole else parts.attention, x if whole else parts.norms[0](x), turns, original)
        if output is None or original.options is None:
            continue
        forward = FusedForward(parts, rotary, original.options, layer.forward)
        if whole:
            found = forward(x, position_embeddings=turns, forward_context=ours.context)
            known[make] = same_bits(found, output)
        else:
            queries = rotary(parts.project(parts.norms[0](x[0])), turns, torch.arange(NUM_ROWS), ours.blocks)
            ours.attend(queries, *ours.blocks, None, original.options)
            known[make] &= same_bits(parts.output(ours.mixed.flatten(1))[None], output)
        if known[make] and ours.saw_the_same(original):
            return forward
    return None


def _run(module: nn.Module, x: Tensor, turns: tuple[Tensor, Tensor], trial: _Trial) -> Tensor | None:
    """The output of a layer or of its attention; None if it takes other arguments."""
    output = attempt(
        lambda: module.forward(
            x,
            attention_mask=None,
            position_ids=torch.arange(NUM_ROWS)[None],
            use_cache=False,
            position_embeddings=turns,
            forward_context=trial.context,
        ),
        "a layer or its attention takes other arguments",
    )
    first = output[0] if isinstance(output, tuple) else output
    return first if isinstance(first, Tensor) and first.dim() == 3 else None


@dataclass(slots=True)
class _Trial:
    """Stands in for a step's storage and kernel: it attends to nothing and notes what a layer passes to it."""

    layer: int
    layout: LayerLayout
    mixed: Tensor
    """The result that attention returns, [rows, heads, value_dim]."""
    blocks: tuple[Tensor, Tensor]
    queries: Tensor | None = None
    options: AttentionOptions | None = None
    context: Any = field(init=False)

    def __post_init__(self) -> None:
        storage = SimpleNamespace(
            group_of={self.layer: 0},
            layout=SimpleNamespace(attention={self.layer: self.layout}),
            keys={self.layer: self.blocks[0]},
            values={self.layer: self.blocks[1]},
            write=self._write,
        )
        slots = torch.arange(len(self.mixed))
        self.context = SimpleNamespace(storage=storage, steps={0: GroupStep(slots, self, None)})  # type: ignore[arg-type]

    @classmethod
    def on(cls, layer: int, layout: LayerLayout, shapes: HeadShapes, dtype: torch.dtype) -> _Trial:
        """Make a trial with random results of attention, the same in every trial."""
        mixed = RandomInputs(1).rows(NUM_ROWS, shapes.query_heads, shapes.value_dim, dtype=dtype)
        keys = torch.zeros(1, NUM_ROWS, shapes.kv_heads, shapes.key_dim, dtype=dtype)
        return cls(layer, layout, mixed, (keys, keys.new_zeros(1, NUM_ROWS, shapes.kv_heads, shapes.value_dim)))

    def _write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        del layer
        for blocks, new in zip(self.blocks, (keys, values), strict=True):
            blocks.flatten(0, 1).index_copy_(0, slots, new)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, plan: object, options: AttentionOptions) -> Tensor:
        """Note the arguments, as a kernel gets them."""
        del keys, values, plan
        self.queries, self.options = query.clone(), options
        return self.mixed

    def saw_the_same(self, other: _Trial) -> bool:
        """Whether both trials got the same bits as queries, keys and values."""
        return same_bits((self.queries, *self.blocks), (other.queries, *other.blocks))
