"""Decoder layers in a dozen operations instead of some forty.

Knows what a layer with one attention, two norms and one feed-forward network looks like as modules; knows no model by
name. A layer is taken over only if, run on random rows, it gives the exact bits of this formula, hands attention the
same queries and writes the same keys and values:

    x = x + output(attention(turn(project(norm(x)))))
    x = x + network(norm(x))

`turn` is the rotary embedding of halves, after a norm of each head where there is one. Other layers stay as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from foreword.kernels.reference import AttentionOptions
from foreword.model.attention import ForwardContext, GroupStep
from foreword.model.cpu.layer_program import LayerChain, LayerOperations, Workspace
from foreword.model.cpu.rotary import HeadShapes, RotaryKernel
from foreword.model.fusion.modules import FusedGate, FusedNorm, ProductPart
from foreword.model.fusion.neighbours import Neighbours
from foreword.model.fusion.packed import PackedLinear
from foreword.model.layout import LayerLayout

logger = logging.getLogger(__name__)

_NUM_ROWS = 3
"""Rows of random numbers on which a layer and the formula are compared."""
_TURNED_PARTS = (1, 2, 4)
"""What part of a head a rotary embedding may turn: all of it, a half, a quarter."""


def fuse_layers(module: nn.Module, layouts: Mapping[int, LayerLayout]) -> int:
    """Take over what layers of `module` can be; to be called when it is fused and packed. Returns how many."""
    known: dict[tuple[Any, ...], bool] = {}
    fused: dict[int, FusedForward] = {}
    with torch.inference_mode():
        for layer, attention in _candidates(module):
            layout = layouts.get(getattr(attention, "layer_idx", -1))
            parts = None if layout is None else _LayerParts.of(layer, attention)
            if layout is None or parts is None:
                continue
            forward = _fused_forward(layer, parts, layout, known)
            if forward is not None:
                layer.forward = fused[forward.layer] = forward
    for index, forward in fused.items():
        forward.following = fused.get(index + 1)
    logger.debug("%d decoder layers fused", len(fused))
    return len(fused)


def chain_layers(module: nn.Module, run: Callable[[Any], object]) -> list[LayerChain]:
    """Let fused layers that follow each other run as one program; all of these.

    `run` runs the model, with what is to stand in for the context of a step. Where it does not, each layer is one.
    """
    neighbours = Neighbours()
    try:
        with neighbours:
            run(neighbours)
    except Exception:
        logger.debug("what lies between the layers is not known", exc_info=True)
        neighbours = Neighbours()
    return _put_in_chains(module, neighbours.chains())


def unchain_layers(module: nn.Module) -> None:
    """Let each layer run by itself."""
    _put_in_chains(module, [])


def _put_in_chains(module: nn.Module, chains: list[list[LayerOperations]]) -> list[LayerChain]:
    """Make programs of these chains, and of each layer that is in none."""
    forwards = {
        forward.operations: forward
        for layer in module.modules()
        if isinstance(forward := layer.forward, FusedForward) and forward.operations is not None
    }
    workspace, chained = Workspace(), {layer for chain in chains for layer in chain}
    for layer in forwards:
        workspace.widen(*layer.sizes())
    made = []
    for layers in (*chains, *([layer] for layer in forwards if layer not in chained)):
        chain = LayerChain(layers, workspace)
        made.append(chain)
        for layer in layers:
            forwards[layer].chain = chain
        following = forwards[layers[-1]].following
        if following is not None and following.operations is not None:
            layers[-1].hand_to(following.operations)
    return made


class FusedForward:
    """What a layer's `forward` is replaced by.

    Its last sum and the next layer's first norm are one pass over the rows, whose norm is handed to the next layer. A
    layer that is given other rows than these computes its norm itself.
    """

    def __init__(
        self,
        parts: _LayerParts,
        rotary: RotaryKernel,
        options: AttentionOptions,
        plain: Callable[..., Any],
    ) -> None:
        self.layer: int = parts.attention.layer_idx  # type: ignore[assignment]
        self.following: FusedForward | None = None
        """The next layer, if it is fused."""
        self._parts = parts
        self.operations = parts.operations(rotary, options)
        """None where products are another library's."""
        self.chain: LayerChain | None = None
        """In which this layer runs without Python, if it has operations."""
        self._rotary = rotary
        self._options = options
        self._plain = plain
        self._handed: tuple[Tensor, Tensor] | None = None
        """What the layer before has returned, and its norm."""
        # What modules do around `forward` costs as much as small products' hand-over to threads.
        self._project, self._output = parts.project.forward, parts.output.forward
        network = parts.network.forward
        flat = type(parts.network) is FusedGate
        self._network: Callable[[Tensor], Tensor] = network if flat else lambda rows: network(rows[None])[0]
        """[rows, width] to the same."""

    def __call__(
        self,
        hidden_states: Tensor,
        *,
        position_embeddings: tuple[Tensor, Tensor],
        forward_context: ForwardContext,
        **others: Any,
    ) -> Tensor:
        """[1, rows, width] to the same; `others` are what models pass and a served layer has no use for."""
        if isinstance(forward_context, Neighbours):
            return forward_context.observe(self.operations, hidden_states, position_embeddings)
        if self.chain is not None and self.operations is not None:
            result = self.chain.forward(self.operations, hidden_states, position_embeddings, forward_context)
            if result is not None:
                self._handed = None
                return result
        storage = forward_context.storage
        blocks = storage.keys[self.layer], storage.values[self.layer]
        if not (blocks[0].is_contiguous() and blocks[1].is_contiguous()):
            output: Tensor = self._plain(
                hidden_states, position_embeddings=position_embeddings, forward_context=forward_context, **others
            )
            return output
        step = forward_context.steps[storage.group_of[self.layer]]
        first, second = self._parts.norms
        x, (handed, self._handed) = hidden_states[0], (self._handed, None)
        normed = handed[1] if handed is not None and handed[0] is hidden_states else first.forward(x)
        queries = self._rotary(self._project(normed), position_embeddings, step.slots, blocks)
        mixed = step.kernel.attend(queries, *blocks, step.plan, self._options)
        total, normed = second.of_sum(x, self._output(mixed.flatten(1)))
        added = self._network(normed)
        if self.following is None:
            return (total + added)[None]
        total, normed = self.following._parts.norms[0].of_sum(total, added)
        output = total[None]
        self.following._handed = output, normed
        return output


@dataclass(frozen=True, slots=True)
class _LayerParts:
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
    def of(cls, layer: nn.Module, attention: nn.Module) -> _LayerParts | None:
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


def _candidates(module: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Layers and their attention, where its projections are one product."""
    for layer in list(module.modules()):
        for attention in layer.children():
            projections = [getattr(attention, name, None) for name in ("q_proj", "k_proj", "v_proj")]
            products = {id(part.product) for part in projections if isinstance(part, ProductPart)}
            if len(products) == 1 and all(isinstance(part, ProductPart) for part in projections):
                yield layer, attention


# ------------------------------------------------------------------------------------------- finding out


@dataclass(slots=True)
class _Trial:
    """Storage and kernel of a step in which nothing is attended: it notes what a layer hands over."""

    layer: int
    layout: LayerLayout
    mixed: Tensor
    """What attention returns, [rows, heads, value_dim]."""
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
        """With random results of attention, the same in every trial."""
        mixed = _random((_NUM_ROWS, shapes.query_heads, shapes.value_dim), dtype, 1)
        keys = torch.zeros(1, _NUM_ROWS, shapes.kv_heads, shapes.key_dim, dtype=dtype)
        return cls(layer, layout, mixed, (keys, keys.new_zeros(1, _NUM_ROWS, shapes.kv_heads, shapes.value_dim)))

    def _write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        del layer
        for blocks, new in zip(self.blocks, (keys, values), strict=True):
            blocks.flatten(0, 1).index_copy_(0, slots, new)

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, plan: object, options: AttentionOptions) -> Tensor:
        """As a kernel is asked."""
        del keys, values, plan
        self.queries, self.options = query.clone(), options
        return self.mixed

    def saw_the_same(self, other: _Trial) -> bool:
        """Whether queries, keys and values have equal bits."""
        pairs = zip((self.queries, *self.blocks), (other.queries, *other.blocks), strict=True)
        return all(one is not None and two is not None and torch.equal(one, two) for one, two in pairs)


def _fused_forward(
    layer: nn.Module, parts: _LayerParts, layout: LayerLayout, known: dict[tuple[Any, ...], bool]
) -> FusedForward | None:
    """The layer's `forward` as the formula, if that is what it computes.

    Attention is tried on every layer, all the rest on the first of a make.
    """
    if any(module._forward_hooks or module._forward_pre_hooks for module in layer.modules()):
        return None
    dtype = parts.norms[0].weight.dtype
    for part in _TURNED_PARTS:
        shapes = parts.head_shapes(layout, layout.key_dim // part)
        if shapes is None:
            continue
        rotary = parts.rotary(shapes)
        turns = _random((1, _NUM_ROWS, shapes.turned), dtype, 2), _random((1, _NUM_ROWS, shapes.turned), dtype, 3)
        x = _random((1, _NUM_ROWS, len(parts.norms[0].weight)), dtype, 4)
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
            known[make] = torch.equal(found, output)
        else:
            queries = rotary(parts.project(parts.norms[0](x[0])), turns, torch.arange(_NUM_ROWS), ours.blocks)
            ours.attend(queries, *ours.blocks, None, original.options)
            known[make] &= torch.equal(parts.output(ours.mixed.flatten(1))[None], output)
        if known[make] and ours.saw_the_same(original):
            return forward
    return None


def _run(module: nn.Module, x: Tensor, turns: tuple[Tensor, Tensor], trial: _Trial) -> Tensor | None:
    """A layer's output, or an attention's; None if it wants to be called in another way."""
    try:
        output = module.forward(
            x,
            attention_mask=None,
            position_ids=torch.arange(_NUM_ROWS)[None],
            past_key_values=None,
            use_cache=False,
            position_embeddings=turns,
            forward_context=trial.context,
        )
    except Exception:
        return None
    first = output[0] if isinstance(output, tuple) else output
    return first if isinstance(first, Tensor) and first.dim() == 3 else None


def _random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
