"""The beginning of a model: all that it computes up to the keys and values of its second attention layer.

Knows tensors and the calling convention of transformers' attention; knows no model by name, no blocks and no steps.
Importing this module registers attn_implementation="foreword_beginning".

    embedding | layer 0: norm, attention, network | layer 1: norm, keys and values || a pass ends here

A beginning has modules of its own, in transformers' own code, which share the model's weights. The model's modules are
fused later, and then keep state from call to call and write to the engine's blocks. So a pass needs nothing that a
running step changes, and any thread may run it beside one. Its linear layers are packed at its first pass, its
attention is the reference, and its rows are padded as those of steps are: a row's bits depend on the tokens up to its
own alone. So a long pass runs in chunks, which bound its memory.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from foreword.batch import Batch, IntArray
from foreword.kernels.reference import CHUNK_TOKENS, AttentionOptions
from foreword.kernels.select import ReferenceAttention
from foreword.model.foreign.flat_model import FlatModel
from foreword.model.foreign.packed import pack_linears
from foreword.model.layout import LayerLayout
from foreword.model.row_padding import RowPadding

BEGINNING_NAME = "foreword_beginning"
PASS_TOKENS = 2048
"""Most tokens of one chunk of a pass."""
KeysValues = tuple[Tensor, Tensor]
"""Keys [tokens, kv_heads, key_dim] and values [tokens, kv_heads, value_dim] of one layer, in the model's type."""


class ModelBeginning:
    """Computes keys and values of a model's second attention layer; threads take turns."""

    def __init__(self, model: FlatModel, layers: Mapping[int, LayerLayout]) -> None:
        """`model`: a copy of its own, with attn_implementation="foreword_beginning" and these attention layers."""
        self._model, self._layers, self.last_layer = model, layers, sorted(layers)[1]
        self._attention, self._lock = ReferenceAttention(), threading.Lock()
        self._pad_rows: RowPadding | None = None  # until linear layers are packed

    @classmethod
    def of(cls, model: FlatModel, layers: Mapping[int, LayerLayout]) -> ModelBeginning | None:
        """The beginning of a model with these attention layers; None if it has fewer than two.

        Call it before modules are fused or packed.
        """
        if len(layers) < 2:
            return None
        module = _copy(model.module)
        module.set_attn_implementation(BEGINNING_NAME)
        beginning = cls(FlatModel(module, model.cache_argument, model.device), layers)
        beginning._drop_rest()
        return beginning

    def compute(self, token_ids: IntArray, positions: IntArray) -> KeysValues:
        """The second attention layer's keys and values of a prompt, from its tokens and rotary positions [tokens]."""
        with self._lock, torch.inference_mode():
            if self._pad_rows is None:
                self._pad_rows = self._pack()
            made = _Pass(self._layers, self.last_layer, len(token_ids))
            for start in range(0, len(token_ids), PASS_TOKENS):
                end = min(start + PASS_TOKENS, len(token_ids))
                self._run(made, token_ids[start:end], positions[start:end], start, self._pad_rows(end - start))
            keys, values = (room.flatten(0, 1)[: len(token_ids)].clone() for room in made.rooms[self.last_layer])
            return keys, values

    def _run(self, made: _Pass, token_ids: IntArray, positions: IntArray, start: int, num_rows: int) -> None:
        """Compute the tokens from index `start` on, after those before."""
        num_tokens = len(token_ids)
        table = np.arange(made.num_blocks, dtype=np.int32)[None]
        indices = np.arange(start, start + num_tokens, dtype=np.int32)
        batch = Batch.bare(token_ids, indices, np.array([0, num_tokens], np.int32), (table,))
        made.start, made.num_rows = start, num_tokens
        made.plan = self._attention.plan(batch, 0, CHUNK_TOKENS, self._model.device)
        rows = np.zeros((2, num_rows), np.int64)
        rows[:, :num_tokens] = token_ids, positions
        tokens, placed = torch.from_numpy(rows)[:, None].to(self._model.device).unbind()
        try:
            self._model(tokens, placed, placed[0, :1], made, None)
        except _Ended:
            return
        raise AssertionError(f"layer {self.last_layer} did not attend")

    def _pack(self) -> RowPadding:
        """Pack the linear layers; returns the numbers of rows with which a row's bits depend on no other row."""
        module = self._model.module
        lookups = {id(one.weight) for one in module.modules() if isinstance(one, nn.Embedding)}
        widths = {size for own in module.parameters() if id(own) not in lookups for size in own.shape}
        heads = [room.shape[-1] for pair in self._trial().rooms.values() for room in pair]
        pack_linears(module)
        return RowPadding.for_model(sorted(widths.union(heads)), module.dtype, torch.get_num_threads())

    def _trial(self) -> _Pass:
        """A pass of two tokens."""
        made, two = _Pass(self._layers, self.last_layer, 2), np.arange(2, dtype=np.int32)
        with torch.inference_mode():
            self._run(made, two, two, 0, 2)
        return made

    def _drop_rest(self) -> None:
        """Drop the modules that come after the beginning, which would hold their weights in memory.

        On the way down to the last layer's attention these are the modules that a pass does not enter.
        """
        module, entered = self._model.module, set()
        hooks = [one.register_forward_pre_hook(lambda part, _: entered.add(part)) for one in module.modules()]
        try:
            attention = self._trial().ended_in
        finally:
            for hook in hooks:
                hook.remove()
        [path] = [path for path, one in module.named_modules() if one is attention]
        names = path.split(".")
        for depth in range(len(names)):
            parent = module.get_submodule(".".join(names[:depth]))
            for name, child in list(parent.named_children()):
                if entered.isdisjoint(child.modules()):
                    parent.register_module(name, nn.Identity())


class _Ended(Exception):  # noqa: N818 - it is no error
    """The last layer's keys and values are known."""


@dataclass
class _Pass:
    """A pass in chunks: the keys and values so far, and the present chunk."""

    layers: Mapping[int, LayerLayout]
    last_layer: int
    num_tokens: int
    start: int = 0
    """The index of the chunk's first token."""
    num_rows: int = 0
    """The number of its tokens; later rows are padding."""
    plan: Any = None
    rooms: dict[int, KeysValues] = field(default_factory=dict)
    """Layer -> keys and values [blocks, CHUNK_TOKENS, kv_heads, dim]."""
    ended_in: nn.Module | None = None

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // CHUNK_TOKENS)

    def keep(self, layer: int, keys: Tensor, values: Tensor) -> KeysValues:
        """Keep the chunk's keys and values [rows, kv_heads, dim]; returns all of the layer."""
        if layer not in self.rooms:
            shapes = [(self.num_blocks, CHUNK_TOKENS, *own.shape[1:]) for own in (keys, values)]
            self.rooms[layer] = keys.new_zeros(shapes[0]), values.new_zeros(shapes[1])
        rooms = self.rooms[layer]
        for room, own in zip(rooms, (keys, values), strict=True):
            room.flatten(0, 1)[self.start : self.start + self.num_rows] = own[: self.num_rows]
        return rooms


def beginning_attention(  # noqa: PLR0913 - the interface is transformers'
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    forward_context: _Pass,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Keep keys and values; attend to the tokens before, or end the pass. The interface is `foreword_attention`'s."""
    del attention_mask
    layer: int = module.layer_idx  # type: ignore[assignment]
    rooms = forward_context.keep(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
    if layer == forward_context.last_layer:
        forward_context.ended_in = module
        raise _Ended
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = AttentionOptions(
        scale, sliding_window, softcap, sinks=s_aux, local_chunk=forward_context.layers[layer].local_chunk
    )
    attended = ReferenceAttention().attend(query[0].transpose(0, 1), *rooms, forward_context.plan, options)
    return attended[None], None


AttentionInterface.register(BEGINNING_NAME, beginning_attention)  # without a mask function, so models build no masks


def _copy(module: PreTrainedModel) -> PreTrainedModel:
    """The same modules once more, with the same tensors."""
    tensors = {id(own): own for own in (*module.parameters(), *module.buffers())}
    copied: PreTrainedModel = copy.deepcopy(module, tensors)
    return copied
