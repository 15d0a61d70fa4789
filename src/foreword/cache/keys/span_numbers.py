"""Numbers that an index stores in place of tokens: for spans, such as pictures, and where a salt or adapter begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foreword.cache.keys.hashing import ExtraKeys, SpanKind, TokenArray

UNKNOWN = -1
"""Represents tokens of unknown spans; no index ever contains it."""
LOWEST = int(np.iinfo(np.int32).min)


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a span, without the span's position."""

    kind: SpanKind
    digest: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The token inside a prompt at which a salt or an adapter begins."""

    salt: str | None
    adapter: str | None
    token_id: int
    content: Content | None
    """The content of the span in which the token lies; None for an ordinary token."""
    at: int
    """The index of the token within that span; 0 for an ordinary token."""

    @property
    def num_tokens(self) -> int:
        return 1


Stretch = Content | FirstToken
Placed = tuple[int, Stretch]
"""The position of a stretch's first token in a sequence, and the stretch."""


def placed_spans(keys: ExtraKeys) -> list[Placed]:
    """The spans of a sequence."""
    return [(span.offset, Content(span.kind, span.digest, span.num_tokens)) for span in keys.spans]


def placed_stretches(keys: ExtraKeys, token_ids: TokenArray) -> Sequence[Placed]:
    """The stretches of a sequence that numbers replace: its spans, and the tokens at which salt and adapter begin.

    A salt or adapter that begins at the sequence's first token needs no number. `FirstToken`s come last, because they
    may replace the number of a span's token. They include that span's content, so equal salts at different spans
    differ.
    """
    salted = keys.salt_offset if keys.salt is not None else 0
    adapted = keys.adapter_offset if keys.adapter is not None else 0
    if not keys.spans and not salted and not adapted:
        return ()
    placed = placed_spans(keys)
    firsts: list[Placed] = []
    for place in sorted({salted, adapted}):
        if 0 < place < len(token_ids):
            owner_keys = keys.salt if place == salted else None, keys.adapter if place == adapted else None
            first = FirstToken(*owner_keys, int(token_ids[place]), None, 0)
            for offset, content in placed:
                if offset <= place < offset + content.num_tokens:
                    assert isinstance(content, Content)
                    first = FirstToken(*owner_keys, 0, content, place - offset)
            firsts.append((place, first))
    return [*placed, *firsts]


class SpanNumbers:
    """Gives each token of a stretch (placeholders of one picture, say) a negative number below UNKNOWN, in descending
    order.

        cat, 3 placeholders   -2 -3 -4      dog, 2 placeholders   -5 -6

    Equal tokens of equal stretches get equal numbers; all others differ. Unused stretches stay until
    the owner says which tokens are still in use (`keep`). The owner must call `keep` when `is_full`.
    """

    def __init__(self, num_items: int) -> None:
        self._least_limit = self._limit = num_items
        self._first_of: dict[Stretch, int] = {}
        self._stretch_of: dict[int, Stretch] = {}
        """Stretches by their first number."""
        self._next = UNKNOWN - 1

    def __len__(self) -> int:
        return len(self._first_of)

    def is_full(self, new: Iterable[Placed]) -> bool:
        """Whether `keep` must be called before these stretches are added. `keep` costs amortised O(1) per stretch."""
        num_tokens = sum(stretch.num_tokens for _, stretch in new)
        return len(self._first_of) >= self._limit or self._next - num_tokens < LOWEST

    def add(self, placed: Iterable[Placed]) -> None:
        for _, stretch in placed:
            if stretch not in self._first_of:
                self._give_numbers(stretch)
        assert self._next >= LOWEST, "the index holds more tokens of spans than there are numbers"

    def _give_numbers(self, stretch: Stretch) -> None:
        self._first_of[stretch] = self._next
        self._stretch_of[self._next] = stretch
        self._next -= stretch.num_tokens

    def replace(self, tokens: TokenArray, placed: Iterable[Placed]) -> TokenArray:
        """A copy of `tokens` in which numbers replace each stretch's tokens. Later stretches overwrite earlier ones."""
        tokens = tokens.copy()
        for offset, stretch in placed:
            places = tokens[offset : offset + stretch.num_tokens]
            first = self._first_of.get(stretch)
            places[:] = UNKNOWN if first is None else first - np.arange(len(places))
        return tokens

    def first_token(self, number: int) -> FirstToken | None:
        """The token that this number represents, if a salt or an adapter begins there."""
        stretch = self._stretch_of.get(number) if number < 0 else None
        return stretch if isinstance(stretch, FirstToken) else None

    def keep(self, used: Iterable[TokenArray]) -> list[TokenArray]:
        """Forget each stretch whose numbers do not occur in `used`. Returns the arrays of `used`, renumbered."""
        used = list(used)
        stretches = sorted(self._first_of.items(), key=lambda item: -item[1])
        starts = np.array([-first for _, first in stretches], np.int64)
        owners = [_owners(starts, tokens[tokens < UNKNOWN]) for tokens in used]
        used_places = np.unique(np.concatenate([np.empty(0, np.int64), *owners]))
        self._first_of.clear()
        self._stretch_of.clear()
        self._next = UNKNOWN - 1
        shift = np.zeros(len(stretches), np.int64)
        for at in used_places.tolist():
            stretch, first = stretches[at]
            shift[at] = self._next - first
            self._give_numbers(stretch)
        self._limit = max(self._least_limit, 2 * len(used_places))
        for tokens, stretch_ids in zip(used, owners, strict=True):
            tokens[tokens < UNKNOWN] += shift[stretch_ids].astype(np.int32)
        return used


def _owners(starts: npt.NDArray[np.int64], numbers: TokenArray) -> npt.NDArray[np.int64]:
    """The stretch that each number belongs to; stretch i has the numbers from -starts[i] downwards."""
    return np.searchsorted(starts, -numbers.astype(np.int64), side="right") - 1
