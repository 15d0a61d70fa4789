"""How a model's keys turn with the position, found by trial at load, so that cached keys can be moved.

Knows tensors and the calling convention of transformers' attention; knows no model by name. Importing this module
registers attn_implementation="foreword_keys", which computes nothing and notes each layer's keys. Rotary embeddings
turn a key by angles that are proportional to its position, so a key that was computed at position p is moved to p + d
by one more turn of d:

    R(p + d) k = R(d) R(p) k

The trial runs the plain model on one token at several positions. Attention returns zeros, so a layer's input is the
same at all positions. Then each layer's keys at two positions must be one turn apart, by the cosines and sines that a
module of the model computes, and its values must be equal. A layer for which no way of turning fits is refused: learned
positions, and tables that change with the longest position, fail by themselves.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from foreword.errors import ConfigError, UnsupportedModelError
from foreword.model.decoder.rotary import Rotary
from foreword.model.foreign.flat_model import FlatModel
from foreword.model.foreign.probe import Remembered
from foreword.model.foreign.trial import attempt
from foreword.model.layout import CacheLayout
from foreword.model.spec import DecoderSpec

KEYS_NAME = "foreword_keys"
NEAR = (0, 1, 2, 3, 5, 11, 29, 64)
"""Positions of the first run; the second has far ones too."""
TOLERANCE = {torch.float32: 2.0**-12, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}
"""The largest error of a moved key, as a share of the layer's largest element, by the model's type: models round tables
and products to it. A wrong way of turning is off by about 1."""
ANGLE_ROUNDING = 2.0**-22
"""The error of an angle in float32, as a share of the position."""
Angles = Literal["halves", "in a row", "once"]
Table = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Positions [n] -> cosines and sines [n, width], in float32."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One way to turn the elements of a key."""

    table: Table | None
    """None: keys do not depend on the position."""
    width: int = 0
    """The number of elements that turn."""
    at_end: bool = False
    """Whether they are a key's last elements, not its first."""
    interleaved: bool = False
    """Whether elements 2i and 2i + 1 make a pair, not i and i + width / 2."""
    angles: Angles = "halves"
    """Whether the table has all angles twice, each angle twice in a row, or each once."""

    def cosines(self, shift: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each pair's angle for a shift, [width / 2] float32; scaled tables are divided out."""
        assert self.table is not None
        cosine, sine = (one[0] for one in self.table(torch.tensor([abs(shift)])))
        chosen = slice(0, None, 2) if self.angles == "in a row" else slice(0, self.width // 2)
        cosine, sine = cosine[chosen], sine[chosen]
        length = (cosine * cosine + sine * sine).sqrt()
        return cosine / length, (sine if shift >= 0 else -sine) / length

    def places(self, dim: int) -> tuple[int, int, int]:
        """Where pairs lie in a key of `dim` elements: the first element of the first pair, the distance to the next
        pair's, and the distance between the two elements of a pair.
        """
        start = dim - self.width if self.at_end else 0
        return (start, 2, 1) if self.interleaved else (start, 1, self.width // 2)

    def apply(self, keys: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Turn keys [tokens, heads, dim] float32 in place; cosine and sine broadcast to [tokens, heads, width / 2].

        Each product and sum is rounded by itself, so bits depend on nothing but these numbers.
        """
        start = keys.shape[-1] - self.width if self.at_end else 0
        turned = keys[..., start : start + self.width]
        pairs = (turned[..., ::2], turned[..., 1::2]) if self.interleaved else turned.chunk(2, dim=-1)
        first, second = pairs[0].clone(), pairs[1].clone()
        pairs[0].copy_(first * cosine - second * sine)
        pairs[1].copy_(second * cosine + first * sine)
        return keys


@dataclass(frozen=True, slots=True)
class KeyRotation:
    """How the keys of all layers turn."""

    turns: dict[int, Turn]
    """Attention layer -> its way."""


def find_rotation(model: FlatModel, found: Remembered, max_positions: int) -> KeyRotation:
    """Find how each layer's keys turn.

    Raises UnsupportedModelError that names the layer whose keys cannot be moved, and ConfigError on a GPU.
    Call it before modules are packed, while layers run the model's own code.
    """
    if model.device.type != "cpu":
        raise ConfigError(f"allow_links=True needs a CPU, and the model is on {model.device}; leave it out")
    if found.states:
        _refuse(f"layer {min(found.states)} is recurrent: its state depends on all tokens before")
    if found.has_slopes:
        _refuse(f"layer {min(found.layers)} biases scores by distance; its keys do not turn with the position")
    attention = model.module.config._attn_implementation
    model.module.set_attn_implementation(KEYS_NAME)
    try:
        tables = _tables(model)
        near = _keys(model, NEAR)
        positions = (*NEAR, *sorted({max_positions // 2, max_positions - 1} - set(NEAR)))
        far = _keys(model, positions)
    finally:
        model.module.set_attn_implementation(attention)
    turns = {}
    for layer, (keys, values) in far.items():
        if not torch.equal(keys[: len(NEAR)], near[layer][0]):
            _refuse(f"layer {layer} turns keys by angles that depend on the longest position of a step")
        if not torch.allclose(values, values[:1], rtol=2.0**-8, atol=1e-6):
            _refuse(f"values of layer {layer} depend on the position")
        allowed = TOLERANCE[model.module.dtype]
        turn = next((one for one in _ways(tables, keys.shape[-1]) if _fits(one, keys, positions, allowed)), None)
        if turn is None:
            _refuse(f"keys of layer {layer} do not move by rotation")
        turns[layer] = turn
    return KeyRotation(turns)


def written_rotation(spec: DecoderSpec, rotaries: Sequence[Rotary]) -> KeyRotation:
    """How the keys of a written decoder turn: as its spec says."""
    turns = [
        Turn(own.table, own.spec.turned, False, own.spec.interleaved, _ANGLES[own.spec.interleaved]) for own in rotaries
    ]
    still = Turn(None)
    return KeyRotation(
        {number: still if own.rotary is None else turns[own.rotary] for number, own in enumerate(spec.layers)}
    )


_ANGLES: dict[bool, Angles] = {True: "in a row", False: "halves"}
"""How `Rotary.table` lists angles, by whether pairs are interleaved."""


def _refuse(reason: str) -> NoReturn:
    raise UnsupportedModelError(f"allow_links=True, but this model's prompts cannot be linked: {reason}; leave it out")


def check_linkable(layout: CacheLayout) -> None:
    """Raise UnsupportedModelError if tokens cannot be moved between blocks of this layout."""
    for layer, own in layout.attention.items():
        reach = own.sliding_window or own.local_chunk
        if reach is not None and not layout.is_one_full_group:
            kind = "a sliding window" if own.sliding_window else "chunks"
            _refuse(f"layer {layer} attends to {kind} of {reach} tokens, where a moved token has other neighbours")
    if not layout.is_one_full_group:
        _refuse("its layers keep tokens in different blocks")


Kept = dict[int, tuple[Tensor, Tensor]]
"""Attention layer -> keys and values [tokens, heads, dim] float32."""


def noting_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    forward_context: Kept,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute nothing, but note keys and values. The interface is that of `foreword_attention`."""
    del attention_mask
    layer: int = module.layer_idx  # type: ignore[assignment]
    forward_context[layer] = key[0].transpose(0, 1).float(), value[0].transpose(0, 1).float()
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(KEYS_NAME, noting_attention)  # without a mask function, so models build no masks


def _keys(model: FlatModel, positions: tuple[int, ...]) -> Kept:
    """Keys and values of one token at these positions, by layer."""
    kept: Kept = {}
    placed = torch.tensor(positions, device=model.device)[None]
    with torch.inference_mode():
        model(torch.ones_like(placed), placed, placed[0, :1], kept, None)
    return kept


def _tables(model: FlatModel) -> list[Table]:
    """The modules that compute a pair of tables from positions."""
    tables: list[Table] = []
    hooks = []

    def note(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        is_pair = isinstance(output, tuple) and len(output) == 2 and all(isinstance(one, Tensor) for one in output)
        if is_pair and output[0].shape == output[1].shape and output[0].shape[-2] == len(NEAR):
            table = _callable(module, arguments, named)
            if table is not None:
                tables.append(table)

    try:
        for module in model.module.modules():
            hooks.append(module.register_forward_hook(note, with_kwargs=True))
        _keys(model, NEAR)
    finally:
        for hook in hooks:
            hook.remove()
    return tables


def _callable(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> Table | None:
    """A module that took hidden states and positions, as a function of positions; None if it took anything else."""
    given = [*arguments, *named.values()]
    if not any(isinstance(one, Tensor) and not one.is_floating_point() for one in given):
        return None

    def replaced(one: Any, positions: Tensor) -> Any:
        if not isinstance(one, Tensor):
            return one
        return one.new_zeros(1, dtype=torch.float32) if one.is_floating_point() else positions[None].to(one.device)

    def table(positions: Tensor) -> tuple[Tensor, Tensor]:
        with torch.inference_mode():
            cosine, sine = module.forward(
                *(replaced(one, positions) for one in arguments),
                **{name: replaced(one, positions) for name, one in named.items()},
            )
        return cosine.flatten(0, -2).float(), sine.flatten(0, -2).float()

    return table


def _ways(tables: list[Table], dim: int) -> Iterator[Turn]:
    """All ways that keys of this dimension may turn, the usual ones first."""
    yield Turn(None)
    for table in tables:
        found = attempt(functools.partial(table, torch.tensor([0])), "a module's tables need other arguments")
        if found is None:
            continue
        for angles, at_end, pairs in itertools.product(get_args(Angles), (False, True), (False, True)):
            width = found[0].shape[-1] * (2 if angles == "once" else 1)
            if width % 2 == 0 and (width < dim if at_end else width <= dim):
                yield Turn(table, width, at_end, pairs, angles)


def _fits(turn: Turn, keys: Tensor, positions: tuple[int, ...], tolerance: float) -> bool:
    """Whether keys [positions, heads, dim] of one token are turns of each other."""
    most = keys.abs().max()
    places = [*itertools.pairwise(range(len(positions))), (0, len(positions) - 1), (len(positions) - 1, 0), (4, 1)]
    for source, target in places:
        shift, moved = positions[target] - positions[source], keys[source : source + 1].clone()
        if turn.table is not None:
            moved = turn.apply(moved, *turn.cosines(shift))
        allowed = max(tolerance, max(positions[source], positions[target]) * ANGLE_ROUNDING)
        if float((moved[0] - keys[target]).abs().max() / most) > allowed:
            return False
    return True
