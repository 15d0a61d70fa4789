"""Composition: the tokens of one prompt, their rotary positions, and the sources that they may be linked from.

An engine needs no other module of this package, because it gets only token ids, positions and names.

    source of module b, computed alone     b0 b1 b2 b3            positions 0..3
                                              |  |  |             a span: tokens 1..3 of the source
    prompt                          a0 a1 a2  b1 b2 b3  x0 x1     index     0 1 2   3  4  5    6  7
                                                                  position  0 1 2  11 12 13   14 15

The index of a token is its place among the prompt's tokens. The index decides causal order, slots and blocks. The
rotary position decides the angle by which the token's keys are rotated. Positions ascend with the index. They may leave
gaps: a schema reserves positions for modules that a prompt leaves out.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

TokenIds = tuple[int, ...]
PartKind = Literal["module", "argument", "text"]


@dataclass(frozen=True, slots=True)
class Source:
    """Tokens that are computed by themselves, as an ordinary request, at positions from 0 and with ordinary keys.

    Equal tokens are one source, even if they come from different schemas or documents. `name` is for people, and
    comparisons ignore it.
    """

    token_ids: TokenIds
    """Tokens of the scaffold, if there is one, then tokens of the module. Parameters hold placeholders."""
    begin: int = 0
    """The number of scaffold tokens at the beginning of `token_ids`. No `Span` of this source includes them."""
    name: str = ""
    """A module's path, such as "plan/rome", or a document's number; "" for a schema's own text."""

    def __post_init__(self) -> None:
        assert 0 <= self.begin <= len(self.token_ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Source):
            return NotImplemented
        return self.begin == other.begin and self.token_ids == other.token_ids

    def __hash__(self) -> int:
        return hash((self.begin, self.token_ids))


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `begin..end` of a source, the end excluded; both count from the source's first token."""

    source: Source
    begin: int
    end: int

    def __post_init__(self) -> None:
        assert self.source.begin <= self.begin < self.end <= len(self.source.token_ids)


@dataclass(frozen=True, slots=True)
class Part:
    """Tokens of a prompt that follow each other, at consecutive rotary positions from `position`."""

    token_ids: TokenIds
    position: int
    """Rotary position of the first token."""
    kind: PartKind
    name: str = ""
    """Path of the part's module; "module:parameter" for an argument; "" for text of the schema or the prompt."""
    span: Span | None = None
    """The tokens of a source from which the part can be linked; None: the prompt has to compute the part."""
    num_after_argument: int = 0
    """The number of the span's first tokens that stand after an argument. In the source, their KV was computed after
    placeholders instead of the argument. By default, every method recomputes these tokens."""
    first_k: int | None = None
    """The number of the module's first tokens to recompute. None: the number `k` that the method of linking has."""

    def __post_init__(self) -> None:
        span = self.span
        assert self.token_ids
        assert self.position >= 0
        assert 0 <= self.num_after_argument <= (0 if span is None else len(self.token_ids))
        assert span is None or span.source.token_ids[span.begin : span.end] == self.token_ids

    @property
    def end(self) -> int:
        """The rotary position after the part's last token."""
        return self.position + len(self.token_ids)


@dataclass(frozen=True)
class Composition:
    """One prompt: its parts in ascending order of position, without overlaps."""

    parts: tuple[Part, ...]

    def __post_init__(self) -> None:
        assert all(before.end <= after.position for before, after in zip(self.parts, self.parts[1:], strict=False))

    @functools.cached_property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """Ids of all tokens, by index; read-only. The plain prompt has the same ids, at positions without gaps."""
        token_ids = np.array([token_id for part in self.parts for token_id in part.token_ids], dtype=np.int32)
        token_ids.flags.writeable = False
        return token_ids

    @functools.cached_property
    def positions(self) -> npt.NDArray[np.int32]:
        """The rotary position of each token, by index; read-only."""
        pieces = [np.arange(part.position, part.end, dtype=np.int32) for part in self.parts]
        positions = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int32)
        positions.flags.writeable = False
        return positions

    @functools.cached_property
    def begins(self) -> tuple[int, ...]:
        """The index of each part's first token, and at the end the number of all tokens."""
        sizes = [0, *(len(part.token_ids) for part in self.parts)]
        return tuple(np.cumsum(sizes).tolist())

    @property
    def num_tokens(self) -> int:
        return self.begins[-1]

    def part_at(self, index: int) -> Part:
        """The part that has the token of this index."""
        assert 0 <= index < self.num_tokens
        return self.parts[bisect_right(self.begins, index) - 1]

    @property
    def next_position(self) -> int:
        """The rotary position of the first token that is generated."""
        return self.parts[-1].end if self.parts else 0

    @property
    def has_gaps(self) -> bool:
        """Whether any position before `next_position` is empty, so that positions are not indices."""
        return self.next_position != self.num_tokens

    @functools.cached_property
    def sources(self) -> tuple[Source, ...]:
        """The sources of all spans, each once, in the order of their first use."""
        return tuple(dict.fromkeys(part.span.source for part in self.parts if part.span is not None))

    @functools.cached_property
    def num_exact_tokens(self) -> int:
        """The number of first tokens whose linked KV equals the KV of the plain prompt, bit for bit.

        The position of each of these tokens is its index, and each source begins with the same tokens as the prompt. So
        no KV has to be moved, and nothing is approximate: these are ordinary blocks with ordinary keys.
        """
        begins = self.begins
        for part, index in zip(self.parts, begins, strict=False):
            if part.position != index:
                return index
            if part.span is not None and not self._begins_like(part.span, index):
                return index
        return self.num_tokens

    def _begins_like(self, span: Span, index: int) -> bool:
        return span.begin == index and bool(np.array_equal(self.token_ids[:index], span.source.token_ids[:index]))


def concatenated(pieces: Sequence[Source | TokenIds]) -> Composition:
    """Make a prompt of pieces without gaps between them. Sources are linked as a whole; other pieces are computed.

    For prompts without a schema, such as documents and a question. Pieces without tokens are left out.
    """
    parts: list[Part] = []
    position = 0
    for piece in pieces:
        token_ids = piece.token_ids[piece.begin :] if isinstance(piece, Source) else piece
        if not token_ids:
            continue
        if isinstance(piece, Source):
            span = Span(piece, piece.begin, len(piece.token_ids))
            parts.append(Part(token_ids, position, "module", piece.name, span))
        else:
            parts.append(Part(token_ids, position, "text"))
        position += len(token_ids)
    return Composition(tuple(parts))
