"""Step: one forward pass, as a model sees it.

Transformers' modules get the step as the keyword argument `forward_context`.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from foreword.batch import Batch
from foreword.cache import NULL_BLOCK
from foreword.kernels.select import AttentionKernel
from foreword.model.adapters.weights import NO_DELTAS, AdaptedRows, LayerDeltas
from foreword.model.storage import KVStorage


@dataclass(frozen=True, slots=True)
class GroupStep:
    """One step, as the attention layers of one group see it."""

    slots: Tensor
    """[tokens]: where each token's KV goes; later rows of the forward pass are padding."""
    kernel: AttentionKernel
    plan: Any
    """The kernel's plan of this step."""


@dataclass(frozen=True, slots=True)
class GivenRows:
    """Rows that enter the first layer in place of tokens' embeddings."""

    places: Tensor
    """[given] int64: the row numbers of the given rows in the step."""
    values: Tensor
    """[given, width], in the model's type."""
    added: tuple[Tensor, ...] = ()
    """For each of the first layers: [given, width] terms to add to these rows after it (DeepStack, arXiv 2406.04334)"""


@dataclass(frozen=True, slots=True)
class StateRun:
    """One request's share of a step in one recurrent group."""

    first_row: int
    """The request's first row in the flattened batch."""
    start: int
    end: int
    """The step computes positions `start` to `end` (exclusive)."""
    read_block: int | None
    """The block with the state after `start` tokens; None at the beginning."""
    write_block: int
    """The block for the state after `end` tokens."""
    prompt_end: int
    """The first position of generated tokens."""

    def cells(self, grid: int) -> list[tuple[int, int]]:
        """Cut the positions into cells (start, end): a prompt at multiples of the grid, an answer after every token.

        Grid 4, a prompt of 6 tokens:    |0123|45|6|7|8|
        """
        last = min(self.end, self.prompt_end)
        cuts = [self.start, *range((self.start // grid + 1) * grid, last, grid)]
        cuts += [*range(max(self.start + 1, last), self.end), self.end]
        return list(itertools.pairwise(cuts))


def plan_state_runs(batch: Batch, group_id: int, block_size: int) -> list[StateRun]:
    """Find the blocks of states that each request reads and writes. `MambaManager` lays out the block table."""
    runs = []
    tables = batch.group_tables[group_id]
    for row, (first, last) in enumerate(zip(batch.query_starts[:-1], batch.query_starts[1:], strict=True)):
        start = int(batch.positions[first])
        end = start + int(last - first)
        prompt_end = end if batch.prompt_ends is None else int(batch.prompt_ends[row])
        write = int(tables[row, (end - 1) // block_size])
        read = None
        if start:
            entry = int(tables[row, (start - 1) // block_size])
            read = write if entry == NULL_BLOCK else entry
        runs.append(StateRun(int(first), start, end, read, write, prompt_end))
    return runs


@dataclass(frozen=True, slots=True)
class Step:
    """The rows of one forward pass: tokens, and padding after them."""

    token_ids: Tensor
    """[rows] int64"""
    positions: Tensor
    """[rows] int64: the positions by which heads are rotated; [3, rows] where positions have three numbers."""
    keep: Tensor
    """[padded] int64: rows whose logits are computed, ascending; padding after the first `num_kept`."""
    num_kept: int
    storage: KVStorage
    groups: dict[int, GroupStep]
    """Attention group -> its step."""
    runs: dict[int, list[StateRun]] = field(default_factory=dict)
    """Recurrent group -> its runs."""
    offsets: Tensor | None = None
    """[rows] int64: positions minus row numbers, for models of transformers."""
    adapted: AdaptedRows | None = None
    """The rows that adapters change; None if no adapter changes a row."""
    given: GivenRows | None = None
    """The rows that are not embeddings of tokens; None if every row is an embedding."""
    columns: Tensor | None = None
    """[n] int64, ascending: the tokens whose logits are computed; None: all."""

    def deltas(self, layer: int) -> LayerDeltas:
        """The terms that adapters add to the results of a layer's products."""
        return NO_DELTAS if self.adapted is None else self.adapted.layer(layer)

    @property
    def num_tokens(self) -> int:
        """The number of rows before padding."""
        return len(next(iter(self.groups.values())).slots)

    def group(self, layer: int) -> GroupStep:
        return self.groups[self.storage.group_of[layer]]
