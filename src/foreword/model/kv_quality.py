"""The cost of another format of KV: one model runs with two pools, and the distributions of next tokens are compared.

The two runs differ only in the keys and values that they store.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from foreword.batch import Batch
from foreword.errors import ConfigError
from foreword.kernels.kv_format import KVFormat
from foreword.model.layout import LayoutOptions
from foreword.model.loader import LoadedModel
from foreword.model.runner import ModelRunner
from foreword.model.storage import KVStorage

BLOCK_SIZE = 16
ROWS = 64
"""Positions whose distributions are compared at a time."""


@dataclass(frozen=True, slots=True)
class Quality:
    """How far the distributions of next tokens with KV in int8 are from those with KV in the model's own type."""

    num_texts: int
    num_tokens: int
    mean_divergence: float
    """KL(own type || int8) in nats, over all positions of all texts."""
    largest_divergence: float
    """The mean divergence, in nats, of the text whose mean is the largest."""
    same_likeliest_token: float
    """Share of positions at which the likeliest token is the same."""


class FormatPool:
    """A model with one format of KV, and its own pool."""

    def __init__(self, model: LoadedModel, num_tokens: int) -> None:
        """`num_tokens`: the number of tokens of all requests together."""
        self._layout = model.plan_layout(LayoutOptions(BLOCK_SIZE, keep_all=True))
        self.storage = KVStorage(self._layout, self._layout.blocks_of(num_tokens + BLOCK_SIZE), model.device)
        self._runner = ModelRunner(model, self.storage)

    def batch(self, starts: Sequence[int], token_ids: Sequence[Sequence[int]]) -> Batch:
        """Make a batch of some tokens of each request, after its first `starts` tokens; requests share no block."""
        ends = [start + len(ids) for start, ids in zip(starts, token_ids, strict=True)]
        tables, first = [], 0
        for group in self._layout.groups:
            counts = [-(-end // group.spec.block_size) for end in ends]
            table = np.zeros((len(ends), max(counts)), np.int32)
            for row, count in zip(table, counts, strict=True):
                row[:count] = np.arange(first, first + count)
                first += count
            tables.append(table)
        return Batch.of_spans([np.array(ids, np.int32) for ids in token_ids], starts, tuple(tables))

    def logits(self, batch: Batch, rows: Sequence[int]) -> Tensor:
        """Write a batch's KV; return the logits [rows, vocab] of some of its rows."""
        return self._runner.forward(batch, np.array(rows, np.int64))


def _formats(model: LoadedModel) -> dict[str, KVFormat]:
    if model.kv_format.latent:
        raise ConfigError("this model's KV is latent, which cannot be stored as int8: there is nothing to compare")
    return {"own": KVFormat(model.dtype), "int8": KVFormat(torch.int8)}


def both_formats(model: LoadedModel, num_tokens: int) -> dict[str, FormatPool]:
    """The model with KV in its own type ("own"), and in eight bits ("int8")."""
    return {
        name: FormatPool(replace(model, kv_format=kv_format), num_tokens) for name, kv_format in _formats(model).items()
    }


def tokens_a_gigabyte(model: LoadedModel) -> dict[str, int]:
    """Tokens whose KV takes a gigabyte in either format, as if all layers attended to all positions.

    Raises ConfigError for a model without attention.
    """
    if not model.layers:
        raise ConfigError("the model has no layers with attention, so kv_cache_dtype changes nothing; leave it out")
    return {
        name: 10**9 // sum(sum(layer.token_bytes(kv_format)) for layer in model.layers.values())
        for name, kv_format in _formats(model).items()
    }


def quality(model: LoadedModel, texts: Sequence[Sequence[int]]) -> Quality:
    """Compare next tokens' distributions at every position of texts, given as token ids."""
    divergences: list[float] = []
    means: list[float] = []
    num_equal = 0
    for text in texts:
        pools = both_formats(model, len(text))
        rows, of_text = range(len(text)), list[float]()
        both = [torch.split(pool.logits(pool.batch([0], [text]), rows), ROWS) for pool in pools.values()]
        for parts in zip(*both, strict=True):
            plain, coded = (part.double().log_softmax(-1) for part in parts)
            of_text += (plain.exp() * (plain - coded)).sum(-1).tolist()
            num_equal += int((plain.argmax(-1) == coded.argmax(-1)).sum())
        divergences += of_text
        means.append(statistics.fmean(of_text))
    num_tokens = len(divergences)
    return Quality(len(texts), num_tokens, statistics.fmean(divergences), max(means), num_equal / num_tokens)
