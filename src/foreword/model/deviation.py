"""The deviation of linked tokens' KV from the KV of the plain prompt, at the second attention layer.

At the first attention layer nothing deviates: its keys and values depend on a token and its position alone. At the
second they depend on all that the token has seen. CacheBlend (Yao et al., EuroSys 2025) computes the tokens that
deviate most there:

    |K - R(shift) K'|^2 + |V - V'|^2        K, V in the plain prompt; K', V' in the source

Both pairs come from passes of a model's first layers, not from the cache. So they depend on tokens and positions
alone. A pass has its own KV memory and the reference's attention, so it can run at the same time as the engine's steps.
This is a reference path: for a model of L layers, the pass costs 2 / L of the prompt's prefill.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.batch import Batch, IntArray
from foreword.errors import InvalidRequestError, PromptTooLongError
from foreword.kernels.kv_format import KVFormat
from foreword.kernels.reference import CHUNK_TOKENS
from foreword.kernels.select import ReferenceAttention
from foreword.model.decoder.decoder import Decoder
from foreword.model.layout import LayoutOptions, plan_layout
from foreword.model.passes import RowPadding
from foreword.model.rotation import KeyRotation
from foreword.model.step import GroupStep, Step
from foreword.model.storage import KVStorage
from foreword.request import LinkedRun, Links

KEPT_BYTES = 64 << 20
"""Limit in bytes of sources' keys and values to keep; the last used sources are kept."""
PASS_TOKENS = 2048
"""Most tokens of one chunk of a pass. The limit bounds the memory that a pass takes."""
FloatArray = npt.NDArray[np.float32]
KeysValues = tuple[Tensor, Tensor]
"""Keys [tokens, kv_heads, key_dim] and values [tokens, kv_heads, value_dim] of one layer, in the model's type."""


class Beginning:
    """The part of a decoder up to the keys and values of its second layer."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder, self._attention = decoder, ReferenceAttention()
        layers = {number: decoder.layouts[number] for number in (0, 1)}
        options = LayoutOptions(block_size=CHUNK_TOKENS, keep_all=True)
        self._layout = plan_layout(layers, {}, KVFormat(decoder.dtype), options)
        self._pad_rows = RowPadding.for_model(
            decoder.activation_widths, decoder.dtype, torch.get_num_threads(), packed=decoder.is_packed
        )

    def compute(self, token_ids: IntArray, positions: IntArray) -> KeysValues:
        """The second layer's keys and values of a prompt, from its tokens and rotary positions [tokens]."""
        storage = KVStorage(self._layout, -(-len(token_ids) // CHUNK_TOKENS), self._decoder.device)
        with torch.inference_mode():
            for start in range(0, len(token_ids), PASS_TOKENS):
                end = min(start + PASS_TOKENS, len(token_ids))
                self._decoder.run(self._step(storage, token_ids[start:end], positions[start:end], start), until=2)
            return storage.blocks[1].read(torch.arange(len(token_ids)))

    def _step(self, storage: KVStorage, token_ids: IntArray, positions: IntArray, start: int) -> Step:
        """Make the step of the tokens from index `start` on, after all earlier tokens."""
        num_tokens, device = len(token_ids), self._decoder.device
        table = np.arange(storage.num_blocks, dtype=np.int32)[None]
        batch = Batch.of_spans([token_ids], [start], (table,))
        plan = self._attention.plan(batch, storage.scrap_block, CHUNK_TOKENS, device)
        rows = torch.zeros(2, self._pad_rows(num_tokens), dtype=torch.int64)
        rows[0, :num_tokens], rows[1, :num_tokens] = torch.from_numpy(token_ids), torch.from_numpy(positions)
        group = GroupStep(torch.arange(start, start + num_tokens), self._attention, plan)
        return Step(rows[0], rows[1], torch.empty(0, dtype=torch.int64), 0, storage, {0: group})


class LinkDeviations:
    """Measures how much linked tokens' KV deviates in the prompts of one model. Any thread may call it."""

    def __init__(
        self,
        beginning: Beginning | None,
        rotation: KeyRotation,
        vocab_size: int,
        max_model_len: int,
        sink_token_ids: Sequence[int] = (),
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        """`beginning`: None if the model has one layer; `max_model_len`: tokens of the longest
        prompt and its answer; `sink_token_ids`: tokens that stand before every prompt and source.
        """
        self._beginning, self._rotation = beginning, rotation
        self._vocab_size, self._max_model_len = vocab_size, max_model_len
        self._sinks = np.array(sink_token_ids, np.int32)
        self._sources = _KeptSources(kept_bytes)

    def measure(self, token_ids: IntArray, links: Links, salt: str | None = None) -> FloatArray:
        """The squared deviation of each token of a prompt, [tokens]; 0 for tokens that are not linked.

        `salt`: the tenant's salt. Each salt has its own kept sources, so that response times do not show what others
        link. Raises InvalidRequestError for a prompt that the model cannot compute.
        """
        if self._beginning is None:
            raise InvalidRequestError(
                f"link={links.method!r} needs two attention layers, and this model has one; use 'first-16'"
            )
        self._check(token_ids, links)
        deviations = np.zeros(len(token_ids), np.float32)
        if links.runs:
            end = links.runs[-1].end
            keys, values = self._compute(self._beginning, token_ids[:end], links.positions[:end])
            for run in links.runs:
                plain = keys[run.begin : run.end], values[run.begin : run.end]
                linked = self._linked(self._beginning, run, links.shift(run), salt)
                pairs = zip(plain, linked, strict=True)
                keys_off, values_off = (
                    (exact.float() - copied.float()).square().flatten(1).sum(1) for exact, copied in pairs
                )
                deviations[run.begin : run.end] = (keys_off + values_off).numpy()
        return deviations

    def _check(self, token_ids: IntArray, links: Links) -> None:
        """Raise InvalidRequestError for tokens or lengths that the model cannot take."""
        for ids in (token_ids, *(run.source for run in links.runs)):
            wrong = ids[(ids < 0) | (ids >= self._vocab_size)]
            if len(wrong):
                raise InvalidRequestError(
                    f"prompt token {wrong[0]} is out of range; the model's ids are 0 to {self._vocab_size - 1}"
                )
        reached = max([int(links.positions[-1]) + 1, *(len(run.source) for run in links.runs)])
        if reached >= self._max_model_len:
            raise PromptTooLongError(
                f"a linked prompt or one of its sources reaches {reached} tokens, but "
                f"max_model_len={self._max_model_len} must hold each, and an answer; shorten its parts",
                reached,
                self._max_model_len - 1,
            )

    def _compute(self, beginning: Beginning, token_ids: IntArray, positions: IntArray) -> KeysValues:
        """The keys and values of tokens that stand after the sinks."""
        shift = len(self._sinks)
        placed = np.concatenate((np.arange(shift, dtype=np.int32), positions + np.int32(shift)))
        keys, values = beginning.compute(np.concatenate((self._sinks, token_ids)), placed)
        return keys[shift:], values[shift:]

    def _linked(self, beginning: Beginning, run: LinkedRun, shift: int, salt: str | None) -> KeysValues:
        """The keys and values of a run as a link copies them: keys are rotated, and rounded once."""
        key = salt, run.source.tobytes()
        source = self._sources.get(key)
        if source is None:
            source = self._compute(beginning, run.source, np.arange(len(run.source), dtype=np.int32))
            self._sources.put(key, source)
        keys, values = (part[run.first : run.source_end] for part in source)
        turn = self._rotation.turns[1]
        if turn.table is None or not shift:
            return keys, values
        turned: Tensor = turn.apply(keys.to(torch.float32, copy=True), *turn.cosines(shift))
        return turned.to(keys.dtype), values


class _KeptSources:
    """Keys and values of the sources that were used last, in a bounded number of bytes."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self.num_bytes = max_bytes, 0
        self._of: OrderedDict[tuple[str | None, bytes], KeysValues] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._of)

    def get(self, key: tuple[str | None, bytes]) -> KeysValues | None:
        with self._lock:
            if key in self._of:
                self._of.move_to_end(key)
            return self._of.get(key)

    def put(self, key: tuple[str | None, bytes], source: KeysValues) -> None:
        with self._lock:
            self.num_bytes += _num_bytes(source) - _num_bytes(self._of.pop(key, None))
            self._of[key] = source
            while self.num_bytes > self._max_bytes:
                self.num_bytes -= _num_bytes(self._of.popitem(last=False)[1])


def _num_bytes(source: KeysValues | None) -> int:
    """Bytes of the memory in which tensors lie; a tensor may be a part of a larger one."""
    return 0 if source is None else sum(tensor.untyped_storage().nbytes() for tensor in source)
