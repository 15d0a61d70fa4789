"""Batch: the input of one step; BatchResult: its results.

All requests of a step are laid end to end:

    request      0              1      2
    token_ids    5 6 7 8 9      3      4 4 4 4
    positions    0 1 2 3 4     17      8 9 10 11        (in the request's own sequence)
    query_starts 0              5      6             10

A batch may be planned while the batch before it is still computed. In place of tokens that the earlier batch will
sample, the new batch has 0:

    before       samples      3      7      -
    token_ids    0      0     4 4 4 4       expected (0, 0), (1, 1)

A request may end with drafts: guesses at its next tokens, which the step computes and checks. The request samples a
token after its last known token and after each draft, and the result has a row for each sampled token:

    request      0          1           2
    token_ids    5 6 7      3 d e       4       d, e: drafts of request 1
    result       r0         r1 r2 r3    r4      r2 counts if r1 = d, r3 if r2 = e too
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foreword.cache import NULL_BLOCK
from foreword.cache.block_ids import Int64Array as Int64Array
from foreword.request import FACTS, Adapter, Alone, Embeds, FactRows, Picture, Request, TokenLogprobs, turned_positions
from foreword.request.links import IntArray as IntArray

BoolArray = npt.NDArray[np.bool_]
NONE_EXPECTED: IntArray = np.empty((0, 2), np.int32)
Drafts = Mapping[int, IntArray]
"""Entry number -> the entry's drafts, for entries that have drafts."""
NO_DRAFTS: Drafts = MappingProxyType({})

PROGRESS = np.dtype(
    [
        ("stay", np.int64),  # identifies a request and its admission; 0: the row is free
        ("num_tokens", np.int64),  # of prompt and answer, including an expected token
        ("num_computed", np.int64),  # leading tokens whose KV is in this request's blocks
        ("num_shared", np.int64),  # leading tokens whose KV was in hit blocks at admission; never written
        ("last_token", np.int64),  # the sequence's last token; 0 if it is expected
        ("source", np.int64),  # entry of the previous step that samples the expected token; -1: no token is expected
        ("is_new", np.bool_),  # has no token since it was admitted
    ],
    align=True,
)
"""The progress of a running request."""


class BatchEntry(NamedTuple):
    """One request's share of a step: compute tokens `start` to `end` (exclusive) of its sequence."""

    request: Request
    start: int
    end: int
    samples: bool
    """Whether this step reaches the end of the sequence, so that a token is sampled."""


@dataclass(frozen=True, slots=True)
class Entries:
    """All requests' shares of a step, as columns; iteration gives a BatchEntry for each request."""

    requests: list[Request]
    rows: Int64Array
    """The scheduler's row of each request, [entries]."""
    starts: Int64Array
    ends: Int64Array
    progress: npt.NDArray[np.void]
    """[entries]: each request's progress, a record of type PROGRESS, when the step was planned."""
    facts: FactRows
    """[entries]"""
    drafts: Drafts = field(default_factory=lambda: NO_DRAFTS)
    """The guessed tokens at the end of an entry's tokens. Only entries with one known token have drafts."""
    samples: BoolArray = field(init=False)
    """[entries]: whether the entry reaches the end of its sequence."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "samples", self.ends >= self.progress["num_tokens"])

    @classmethod
    def of_prompts(cls, requests: Sequence[Request]) -> Entries:
        """Make entries that compute whole requests, without a scheduler."""
        lengths = np.array([len(request) for request in requests], np.int64)
        progress = np.zeros(len(requests), PROGRESS)
        progress["num_tokens"] = lengths
        facts = np.array([request.facts for request in requests], FACTS)
        return cls(list(requests), np.arange(len(requests)), np.zeros_like(lengths), lengths, progress, facts)

    def __len__(self) -> int:
        return len(self.requests)

    def __getitem__(self, number: int) -> BatchEntry:
        start, end = int(self.starts[number]), int(self.ends[number])
        return BatchEntry(self.requests[number], start, end, bool(self.samples[number]))

    def __iter__(self) -> Iterator[BatchEntry]:
        columns = (self.starts.tolist(), self.ends.tolist(), self.samples.tolist())
        return map(BatchEntry, self.requests, *columns)

    def num_drafts(self) -> Int64Array:
        """Return the number of drafts of each entry, [entries]."""
        counts = np.zeros(len(self), np.int64)
        for number, token_ids in self.drafts.items():
            counts[number] = len(token_ids)
        return counts

    def known_ends(self) -> Int64Array:
        """Return the end of each entry's known tokens, [entries]."""
        return self.ends - self.num_drafts() if self.drafts else self.ends

    def result_rows(self) -> Int64Array:
        """Return each entry's first row in the result, [entries]; the rows for its drafts follow."""
        rows = np.arange(len(self))
        if self.drafts:
            counts = self.num_drafts()
            rows += counts.cumsum() - counts
        return rows

    def num_generated(self) -> Int64Array:
        """Return how many answer tokens, without drafts, precede the first token that each entry samples, [entries]."""
        counts: Int64Array = self.known_ends() - self.facts["num_prompt_tokens"]
        return counts


NO_ENTRIES = Entries.of_prompts([])


class Move(NamedTuple):
    """A copy of KV from slots to slots, in which the keys are rotated."""

    sources: Int64Array
    """[tokens]"""
    targets: Int64Array
    """[tokens]"""
    shift: int
    """The number of rotary positions by which the keys are rotated."""


class Adapted(NamedTuple):
    """The tokens that adapters change."""

    adapters: list[Adapter]
    numbers: Int64Array
    """[num_tokens]: the index of each token's adapter in `adapters`, or -1."""


class Shown(NamedTuple):
    """Tokens that rows of a picture, or of embeddings, replace."""

    picture: Picture | Embeds
    rows: slice
    """The rows of the picture's encoding, or of the embeddings."""
    tokens: Int64Array
    """[rows]: the number of the token that each row replaces, ascending."""
    salt: str | Alone | None = None
    """The salt under which the rows are kept; requests with another salt do not see them."""

    def within(self, start: int, end: int) -> Shown:
        """Return the part that replaces tokens `start` to `end` (exclusive), with numbers that count from `start`."""
        first, last = np.searchsorted(self.tokens, (start, end)).tolist()
        rows = slice(self.rows.start + first, self.rows.start + last)
        return self._replace(rows=rows, tokens=self.tokens[first:last] - start)


@dataclass(frozen=True, slots=True)
class Batch:
    """Arrays of one step over `num_tokens` tokens of `len(entries)` requests."""

    entries: Entries
    token_ids: IntArray
    """[num_tokens]"""
    positions: IntArray
    """[num_tokens]"""
    query_starts: IntArray
    """[requests + 1]: request r owns tokens query_starts[r] to query_starts[r + 1]."""
    group_tables: tuple[IntArray, ...]
    """For each group of layers, [requests, longest table]. Entries beyond a request's table are meaningless, and
    NULL_BLOCK replaces blocks that the group no longer needs."""
    write_from: IntArray
    """[requests]: the first position to write. KV of earlier positions is in shared blocks and must not be written."""
    copies: IntArray
    """[copies, 2]: blocks (source, target) to copy before anything is written."""
    prompt_ends: IntArray | None = None
    """[requests]: the first position of generated tokens. None: all tokens belong to prompts."""
    moves: tuple[Move, ...] = ()
    """Moves that happen after the copies and before anything is written. No move reads a slot that another move
    writes."""
    rotary: IntArray | None = None
    """[num_tokens] or [3, num_tokens]: positions by which each token's query and key are rotated. None: `positions`."""
    adapted: Adapted | None = None
    """The tokens that adapters change; None: adapters change no token."""
    shown: tuple[Shown, ...] = ()
    """The tokens that rows of pictures or embeddings replace."""
    seen_to: IntArray | None = None
    """[num_tokens]: for each token, the end (exclusive) of the positions that it sees, ascending within a request.
    None: every token sees the positions up to its own."""
    expected: IntArray = field(default_factory=lambda: NONE_EXPECTED)
    """[expected, 2]: a token's number in this batch, ascending, and the entry of the previous batch that samples it."""

    @classmethod
    def bare(
        cls, token_ids: IntArray, positions: IntArray, query_starts: IntArray, group_tables: tuple[IntArray, ...]
    ) -> Batch:
        """Make a batch of tokens without requests: KV is written, and nothing is copied or sampled."""
        write_from = np.zeros(len(query_starts) - 1, np.int32)
        return cls(NO_ENTRIES, token_ids, positions, query_starts, group_tables, write_from, np.empty((0, 2), np.int32))

    @classmethod
    def of_spans(cls, spans: Sequence[IntArray], starts: Sequence[int], group_tables: tuple[IntArray, ...]) -> Batch:
        """Make a `bare` batch of tokens at consecutive positions: span r begins at `starts[r]` of its own sequence."""
        ends = [start + len(span) for start, span in zip(starts, spans, strict=True)]
        positions = [np.arange(*bounds, dtype=np.int32) for bounds in zip(starts, ends, strict=True)]
        query_starts = np.cumsum([0, *map(len, spans)], dtype=np.int32)
        return cls.bare(np.concatenate(spans), np.concatenate(positions), query_starts, group_tables)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def block_tables(self) -> IntArray:
        """The first group's tables."""
        return self.group_tables[0]

    def of_group(self, group_id: int, null_block: int) -> Batch:
        """Return the batch with one group's tables, in which `null_block` replaces blocks that the group released."""
        tables = self.group_tables[group_id]
        given_up = tables == NULL_BLOCK
        if not given_up.any():
            return self if len(self.group_tables) == 1 else replace(self, group_tables=(tables,))
        return replace(self, group_tables=(np.where(given_up, np.int32(null_block), tables),))

    def as_single_tokens(self) -> Batch:
        """Return the same tokens as entries of one token each, without requests. Tokens of one request share the
        request's table.

        Each layer writes the KV of all tokens of a batch before it attends, so a token still sees the tokens before it.
        """
        lengths = np.diff(self.query_starts)
        if (lengths == 1).all():
            return self
        tables = tuple(table.repeat(lengths, axis=0) for table in self.group_tables)
        single = Batch.bare(self.token_ids, self.positions, np.arange(self.num_tokens + 1, dtype=np.int32), tables)
        return replace(single, write_from=self.write_from.repeat(lengths))


@dataclass(slots=True)
class BatchResult:
    """Results in the order of the batch's entries: a row for each entry, and a row for each draft (`result_rows`)."""

    token_ids: Int64Array
    """[entries + drafts]; meaningless for entries that do not sample."""
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """The log probabilities of sampled tokens, by row, if requested."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """The log probabilities of the prompt tokens after the computed positions, by entry number."""
    hidden_states: dict[int, npt.NDArray[np.float32]] = field(default_factory=dict)
    """Hidden states [width] of prompts' last tokens, by entry number, if requested."""


def build_batch(
    entries: Entries, group_tables: Sequence[IntArray], copies: IntArray, moves: tuple[Move, ...] = ()
) -> Batch:
    """Lay the entries end to end. The rows of each group's table, [entries, longest], are in the entries' order."""
    starts = entries.starts.astype(np.int32)
    lengths = entries.ends.astype(np.int32) - starts
    query_starts = np.zeros(len(entries) + 1, np.int32)
    np.cumsum(lengths, out=query_starts[1:])
    positions = np.arange(query_starts[-1], dtype=np.int32) + (starts - query_starts[:-1]).repeat(lengths)
    return Batch(
        entries=entries,
        token_ids=_token_ids(entries, lengths, query_starts),
        positions=positions,
        query_starts=query_starts,
        group_tables=tuple(group_tables),
        write_from=entries.progress["num_shared"].astype(np.int32),
        copies=copies,
        prompt_ends=entries.facts["num_prompt_tokens"].astype(np.int32),
        moves=moves,
        rotary=_rotary(entries, positions, query_starts),
        adapted=_adapted(entries, positions, query_starts),
        shown=_shown(entries, query_starts),
        seen_to=_seen_to(entries, positions, query_starts),
        expected=_expected(entries, query_starts),
    )


def _token_ids(entries: Entries, lengths: IntArray, query_starts: IntArray) -> IntArray:
    token_ids = np.empty(query_starts[-1], np.int32)
    token_ids[query_starts[:-1]] = entries.progress["last_token"]
    for number in (~entries.samples | (lengths > 1)).nonzero()[0].tolist():
        request, start, end, _ = entries[number]
        known_ids = request.sequence.token_ids[start:end]
        drafts = entries.drafts.get(number)
        token_ids[query_starts[number] : query_starts[number + 1]] = (
            known_ids if drafts is None else np.concatenate((known_ids, drafts))
        )
    return token_ids


def _rotary(entries: Entries, positions: IntArray, query_starts: IntArray) -> IntArray | None:
    """Return the rotary positions, [tokens] or [3, tokens]; None if they equal `positions` for all requests."""
    numbers = entries.facts["has_gaps"].nonzero()[0]
    if not len(numbers):
        return None
    rotary = positions.copy()
    for number in numbers.tolist():
        request, start, end, _ = entries[number]
        tokens = slice(query_starts[number], query_starts[number + 1])
        if request.links is not None:
            rotary[..., tokens] = request.links.positions_of(start, end)
            continue
        if rotary.ndim == 1:
            rotary = np.tile(rotary, (3, 1))
        rotary[:, tokens] = turned_positions(request.pictures, start, end)
    return rotary


def _adapted(entries: Entries, positions: IntArray, query_starts: IntArray) -> Adapted | None:
    """Return the tokens that adapters change; None if adapters change no token."""
    asking = entries.facts["is_adapted"].nonzero()[0]
    adapters: list[Adapter] = []
    numbers = np.full(len(positions) if len(asking) else 0, -1, np.int64)
    for entry in asking.tolist():
        request = entries.requests[entry]
        assert request.adapter is not None
        tokens = slice(query_starts[entry], query_starts[entry + 1])
        begun = positions[tokens] >= request.sequence.extra_keys.adapter_offset
        if begun.any():
            if request.adapter not in adapters:
                adapters.append(request.adapter)
            numbers[tokens][begun] = adapters.index(request.adapter)
    return Adapted(adapters, numbers) if adapters else None


def _shown(entries: Entries, query_starts: IntArray) -> tuple[Shown, ...]:
    """Return the rows of pictures and embeddings that fall into the step."""
    parts = []
    asks = entries.facts["has_pictures"] | entries.facts["has_embeds"]
    for number in (asks & (entries.starts < entries.facts["num_prompt_tokens"])).nonzero()[0].tolist():
        request, start, end, _ = entries[number]
        if request.embeds is not None and start < len(request.embeds):
            rows = slice(start, min(end, len(request.embeds)))
            tokens = np.arange(rows.stop - start, dtype=np.int64) + int(query_starts[number])
            parts.append(Shown(request.embeds, rows, tokens))
        for placed in request.pictures:
            rows, places = slice(0, len(placed.places)), placed.places.astype(np.int64)
            part = Shown(placed.picture, rows, places, request.rows_salt).within(start, end)
            parts.append(part._replace(tokens=part.tokens + int(query_starts[number])))
    return tuple(part for part in parts if len(part.tokens))


def _seen_to(entries: Entries, positions: IntArray, query_starts: IntArray) -> IntArray | None:
    """For each token, return the end (exclusive) of the positions that it sees; None if no token sees a later token."""
    numbers = (entries.facts["sees_ahead"] & (entries.starts < entries.facts["num_prompt_tokens"])).nonzero()[0]
    if not len(numbers):
        return None
    seen_to, changes = positions + np.int32(1), False
    for number in numbers.tolist():
        request, start, end, _ = entries[number]
        ends = seen_to[query_starts[number] : query_starts[number + 1]]
        for placed in request.pictures:
            first, after = max(start, placed.offset), placed.offset + placed.num_tokens
            if placed.sees_ahead and first < min(end, after):
                assert after <= end, "a step ends inside a picture"
                ends[first - start : after - start], changes = after, True
    return seen_to if changes else None


def _expected(entries: Entries, query_starts: IntArray) -> IntArray:
    sources = entries.progress["source"]
    expecting = (sources >= 0).nonzero()[0]
    if not len(expecting):
        return NONE_EXPECTED
    expected = np.empty((len(expecting), 2), np.int32)
    expected[:, 0], expected[:, 1] = query_starts[expecting + 1] - 1, sources[expecting]
    return expected
