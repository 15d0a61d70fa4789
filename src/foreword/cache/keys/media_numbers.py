"""Numbers that stand for placeholders of media, and for tokens at which a salt begins, in an index of tokens.

Knows what they stand for; knows nothing of trees or blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foreword.cache.keys.hashing import ExtraKeys, TokenArray

UNKNOWN = -1
"""Stands for the placeholders of items that are in no index; it is never put into one."""
LOWEST = int(np.iinfo(np.int32).min)


@dataclass(frozen=True, slots=True)
class Media:
    """An item by its content, wherever it stands. The same content in another number of placeholders is another."""

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
    """Which of the item's placeholders."""

    @property
    def num_tokens(self) -> int:
        return 1


Stretch = Media | SaltedToken
Placed = tuple[int, Stretch]
"""Position of its first token in a sequence, and what stands there."""


def placed_media(keys: ExtraKeys) -> list[Placed]:
    """The media of a sequence."""
    return [(item.offset, Media(item.content_hash, item.num_tokens)) for item in keys.media]


def placed_stretches(keys: ExtraKeys, token_ids: TokenArray) -> Sequence[Placed]:
    """What numbers stand for in a sequence: its media, and the token at which its salt begins unless that is the first.

    The salted token comes last, as it may be one of an item's placeholders, whose number it then replaces. It names
    that placeholder, so that equal salts at different items still differ.
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
    """Gives each stretch as many numbers below UNKNOWN, from the top down, as it has tokens.

        cat, 3 placeholders   -2 -3 -4      dog, 2 placeholders   -5 -6

    Equal tokens of equal stretches are equal numbers, all others differ. Stretches that nothing needs any more
    stay until their owner says what is still in use (`keep`), which is due when `is_full`.
    """

    def __init__(self, num_items: int) -> None:
        self._least_limit = self._limit = num_items
        self._first_of: dict[Stretch, int] = {}
        self._stretch_of: dict[int, Stretch] = {}
        """By its first number."""
        self._next = UNKNOWN - 1

    def __len__(self) -> int:
        return len(self._first_of)

    def is_full(self, new: Iterable[Placed]) -> bool:
        """Whether `keep` is due before these are added; so seldom that it costs O(1) a stretch."""
        num_tokens = sum(stretch.num_tokens for _, stretch in new)
        return len(self._first_of) >= self._limit or self._next - num_tokens < LOWEST

    def add(self, placed: Iterable[Placed]) -> None:
        """From now on these are known."""
        for _, stretch in placed:
            if stretch not in self._first_of:
                self._give_numbers(stretch)
        assert self._next >= LOWEST, "the index holds more placeholders than there are numbers"

    def _give_numbers(self, stretch: Stretch) -> None:
        self._first_of[stretch] = self._next
        self._stretch_of[self._next] = stretch
        self._next -= stretch.num_tokens

    def replace(self, tokens: TokenArray, placed: Iterable[Placed]) -> TokenArray:
        """A copy of a sequence's tokens, those of the stretches replaced by their numbers, in the order given."""
        tokens = tokens.copy()
        for offset, stretch in placed:
            places = tokens[offset : offset + stretch.num_tokens]
            first = self._first_of.get(stretch)
            places[:] = UNKNOWN if first is None else first - np.arange(len(places))
        return tokens

    def salted_token(self, number: int) -> SaltedToken | None:
        """The token that this number stands for, if a salt begins there."""
        stretch = self._stretch_of.get(number) if number < 0 else None
        return stretch if isinstance(stretch, SaltedToken) else None

    def keep(self, used: Iterable[TokenArray]) -> list[TokenArray]:
        """Forget the stretches of which no number is in these tokens; returns them with the numbers that hold now."""
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
    """Which stretch each number belongs to; stretch i has the numbers from -starts[i] down."""
    return np.searchsorted(starts, -numbers.astype(np.int64), side="right") - 1
