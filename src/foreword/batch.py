"""Batch: what to run this step; BatchResult: what came back.

Knows requests, positions and block tables as numpy arrays; knows neither how they were chosen nor how
they are computed. All requests of a step are laid end to end:

    request      0              1      2
    token_ids    5 6 7 8 9      3      4 4 4 4
    positions    0 1 2 3 4     17      8 9 10 11        (in the request's own sequence)
    query_starts 0              5      6             10

A batch that is planned while the one before it is computed has tokens that only that one will tell; they stand as 0:

    before       samples      3      7      -
    token_ids    0      0     4 4 4 4       expected (0, 0), (1, 1)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foreword.cache import NULL_BLOCK
from foreword.request import Request, TokenLogprobs

IntArray = npt.NDArray[np.int32]
NONE_EXPECTED: IntArray = np.empty((0, 2), np.int32)


class BatchEntry(NamedTuple):
    """One request's share of a step: compute tokens `start` to `end` (exclusive) of its sequence."""

    request: Request
    start: int
    end: int

    @property
    def samples(self) -> bool:
        """Whether this step reaches the end of the sequence, so that a next token follows.

        To be asked before that token is appended or expected.
        """
        return self.end == len(self.request)


@dataclass(frozen=True, slots=True)
class Batch:
    """Arrays of one step over `num_tokens` tokens of `len(entries)` requests."""

    entries: tuple[BatchEntry, ...]
    token_ids: IntArray
    """[num_tokens]"""
    positions: IntArray
    """[num_tokens]"""
    query_starts: IntArray
    """[requests + 1]: request r owns tokens query_starts[r] to query_starts[r + 1]."""
    group_tables: tuple[IntArray, ...]
    """Per group of layers [requests, longest table]; entries past a request's own table are meaningless,
    and NULL_BLOCK stands where the group needs nothing any more."""
    write_from: IntArray
    """[requests]: KV of positions before this is in shared blocks and must not be written."""
    copies: IntArray
    """[copies, 2]: blocks (source, target) to copy before anything is written."""
    expected: IntArray = field(default_factory=lambda: NONE_EXPECTED)
    """[expected, 2]: number of a token, ascending, and of the entry of the batch before whose sample it is."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def block_tables(self) -> IntArray:
        """The first group's tables."""
        return self.group_tables[0]

    def of_group(self, group_id: int, null_block: int) -> Batch:
        """The batch as one group's layers see it, with `null_block` for what the group has given up."""
        tables = self.group_tables[group_id]
        return replace(self, group_tables=(np.where(tables == NULL_BLOCK, np.int32(null_block), tables),))


class Sample(NamedTuple):
    """What a step gave one request."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class BatchResult:
    """Results in the order of the batch's entries."""

    samples: list[Sample | None]
    """None for a request whose prompt is not computed to its end yet."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Entry number -> log probabilities of the prompt tokens that follow the computed positions."""


def build_batch(
    entries: Sequence[BatchEntry],
    group_tables: Sequence[IntArray],
    copies: IntArray,
    sources: Mapping[str, int] | None = None,
) -> Batch:
    """Lay the entries end to end; each group's table [entries, longest] in the same order.

    `sources`: requests whose last token is expected, and the entries of the batch before that sample them.
    """
    starts = np.array([entry.start for entry in entries], np.int32)
    lengths = np.array([entry.end for entry in entries], np.int32) - starts
    query_starts = np.zeros(len(entries) + 1, np.int32)
    np.cumsum(lengths, out=query_starts[1:])
    return Batch(
        entries=tuple(entries),
        token_ids=np.concatenate([e.request.sequence.tokens_between(e.start, e.end) for e in entries]),
        positions=np.arange(query_starts[-1], dtype=np.int32) + np.repeat(starts - query_starts[:-1], lengths),
        query_starts=query_starts,
        group_tables=tuple(group_tables),
        write_from=np.array([entry.request.num_shared_tokens for entry in entries], np.int32),
        copies=copies,
        expected=_expected(entries, query_starts, sources or {}),
    )


def _expected(entries: Sequence[BatchEntry], query_starts: IntArray, sources: Mapping[str, int]) -> IntArray:
    if not sources:
        return NONE_EXPECTED
    source_of = [sources.get(entry.request.request_id) for entry in entries]
    rows = [row for row, source in enumerate(source_of) if source is not None]
    from_entries = [source for source in source_of if source is not None]
    return np.stack((query_starts[1:][rows] - 1, np.array(from_entries, np.int32)), axis=1)
