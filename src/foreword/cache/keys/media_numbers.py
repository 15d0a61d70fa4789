"""Numbers that represent, in an index of tokens, media placeholders and the tokens at which salts begin.

Knows what each number represents; knows nothing of trees or blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foreword.cache.keys.hashing import ExtraKeys, TokenArray

UNKNOWN = -1
"""Represents placeholders of unknown items; no index ever contains it."""
LOWEST = int(np.iinfo(np.int32).min)


@dataclass(frozen=True, slots=True)
class Media:
    """A media item, identified by its content and its number of placeholders, at any position."""

    content_hash: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class SaltedToken:
    """The first token that a salt keeps apart, inside a prompt."""

    salt: str
    token_id: int
    media: Media | None
    """The item whose placeholder this is; None for an ordinary token."""
    at: int
    """The index of that placeholder within its item."""

    @property
    def num_tokens(self) -> int:
        return 1


Stretch = Media | SaltedToken
Placed = tuple[int, Stretch]
"""The position of a stretch's first token in a sequence, and the stretch."""


def placed_media(keys: ExtraKeys) -> list[Placed]:
    """The media of a sequence."""
    return [(item.offset, Media(item.content_hash, item.num_tokens)) for item in keys.media]


def placed_stretches(keys: ExtraKeys, token_ids: TokenArray) -> Sequence[Placed]:
    """The stretches of a sequence that numbers replace: its media, and the token at which its salt begins.

    A salt that begins at the first token needs no number. The salted token comes last, because it may replace the
    number of one of an item's placeholders. It names that placeholder, so equal salts at different items differ.
    """
    if not keys.media and (keys.salt is None or not keys.salt_offset):
        return ()
    placed = placed_media(keys)
    if keys.salt is None or not 0 < keys.salt_offset < len(token_ids):
        return placed
    place = keys.salt_offset
    salted = SaltedToken(keys.salt, int(token_ids[place]), None, 0)
    for offset, item in placed:
        if offset <= place < offset + item.num_tokens:
            assert isinstance(item, Media)
            salted = SaltedToken(keys.salt, 0, item, place - offset)
    return [*placed, (place, salted)]


class MediaNumbers:
    """Gives each token of a stretch a number below UNKNOWN, from the top down.

        cat, 3 placeholders   -2 -3 -4      dog, 2 placeholders   -5 -6

    Equal tokens of equal stretches get equal numbers; all others differ. Unused stretches stay until
    their owner says which are still in use (`keep`); it must do so when `is_full`.
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
        """Whether `keep` is due before these are added; rare enough to cost amortised O(1) per stretch."""
        num_tokens = sum(stretch.num_tokens for _, stretch in new)
        return len(self._first_of) >= self._limit or self._next - num_tokens < LOWEST

    def add(self, placed: Iterable[Placed]) -> None:
        """Give numbers to the stretches that have none."""
        for _, stretch in placed:
            if stretch not in self._first_of:
                self._give_numbers(stretch)
        assert self._next >= LOWEST, "the index holds more placeholders than there are numbers"

    def _give_numbers(self, stretch: Stretch) -> None:
        self._first_of[stretch] = self._next
        self._stretch_of[self._next] = stretch
        self._next -= stretch.num_tokens

    def replace(self, tokens: TokenArray, placed: Iterable[Placed]) -> TokenArray:
        """Copy a sequence's tokens, with the tokens of the stretches replaced by their numbers, in the order given."""
        tokens = tokens.copy()
        for offset, stretch in placed:
            places = tokens[offset : offset + stretch.num_tokens]
            first = self._first_of.get(stretch)
            places[:] = UNKNOWN if first is None else first - np.arange(len(places))
        return tokens

    def salted_token(self, number: int) -> SaltedToken | None:
        """The token that this number represents, if a salt begins there."""
        stretch = self._stretch_of.get(number) if number < 0 else None
        return stretch if isinstance(stretch, SaltedToken) else None

    def keep(self, used: Iterable[TokenArray]) -> list[TokenArray]:
        """Forget the stretches that have no number in these tokens; returns the tokens, renumbered."""
        used = list(used)
        known = sorted(self._first_of.items(), key=lambda named: -named[1])
        starts = np.array([-first for _, first in known], np.int64)
        owners = [_owners(starts, tokens[tokens < UNKNOWN]) for tokens in used]
        kept = np.unique(np.concatenate([np.empty(0, np.int64), *owners]))
        self._first_of.clear()
        self._stretch_of.clear()
        self._next = UNKNOWN - 1
        shift = np.zeros(len(known), np.int64)
        for at in kept.tolist():
            stretch, first = known[at]
            shift[at] = self._next - first
            self._give_numbers(stretch)
        self._limit = max(self._least_limit, 2 * len(kept))
        for tokens, of_tokens in zip(used, owners, strict=True):
            tokens[tokens < UNKNOWN] += shift[of_tokens].astype(np.int32)
        return used


def _owners(starts: npt.NDArray[np.int64], numbers: TokenArray) -> npt.NDArray[np.int64]:
    """The stretch that each number belongs to; stretch i has the numbers from -starts[i] downwards."""
    return np.searchsorted(starts, -numbers.astype(np.int64), side="right") - 1
