"""Numbers that stand for the placeholders of media in an index of tokens.

Knows media items by content hash and length; knows nothing of trees or blocks.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from foreword.cache.hashing import MediaItem, TokenArray

UNKNOWN = -1
"""Stands for the placeholders of items that are in no index; it is never put into one."""
LOWEST = int(np.iinfo(np.int32).min)


class MediaNumbers:
    """Gives each item as many numbers below UNKNOWN, from the top down, as it has placeholders.

        cat, 3 placeholders   -2 -3 -4      dog, 2 placeholders   -5 -6

    Equal placeholders of equal items are equal numbers, all others differ. Items that nothing needs any more
    stay until their owner says what is still in use (`keep`), which is due when `is_full`.
    """

    def __init__(self, num_items: int) -> None:
        self._least_limit = self._limit = num_items
        self._first_of: dict[tuple[str, int], int] = {}
        self._next = UNKNOWN - 1

    def __len__(self) -> int:
        return len(self._first_of)

    def is_full(self, new: Iterable[MediaItem]) -> bool:
        """Whether `keep` is due before these are added; so seldom that it costs O(1) an item."""
        num_tokens = sum(item.num_tokens for item in new)
        return len(self._first_of) >= self._limit or self._next - num_tokens < LOWEST

    def add(self, items: Iterable[MediaItem]) -> None:
        """From now on these are known."""
        for item in items:
            if self._first_of.setdefault((item.content_hash, item.num_tokens), self._next) == self._next:
                self._next -= item.num_tokens
        assert self._next >= LOWEST, "the index holds more placeholders than there are numbers"

    def replace(self, tokens: TokenArray, items: Iterable[MediaItem]) -> TokenArray:
        """A copy of a sequence's tokens, its placeholders replaced by their numbers."""
        tokens = tokens.copy()
        for item in items:
            places = tokens[item.offset : item.offset + item.num_tokens]
            first = self._first_of.get((item.content_hash, item.num_tokens))
            places[:] = UNKNOWN if first is None else first - np.arange(len(places))
        return tokens

    def keep(self, used: Iterable[TokenArray]) -> list[TokenArray]:
        """Forget the items of which no number is in these tokens; returns them with the numbers that hold now."""
        used = list(used)
        items = sorted(self._first_of.items(), key=lambda named: -named[1])
        starts = np.array([-first for _, first in items], np.int64)
        owners = [_owners(starts, tokens[tokens < UNKNOWN]) for tokens in used]
        kept = np.unique(np.concatenate([np.empty(0, np.int64), *owners]))
        self._first_of.clear()
        self._next = UNKNOWN - 1
        shift = np.zeros(len(items), np.int64)
        for at in kept.tolist():
            (content_hash, num_tokens), first = items[at]
            shift[at] = self._next - first
            self._first_of[content_hash, num_tokens] = self._next
            self._next -= num_tokens
        self._limit = max(self._least_limit, 2 * len(kept))
        for tokens, of_tokens in zip(used, owners, strict=True):
            tokens[tokens < UNKNOWN] += shift[of_tokens].astype(np.int32)
        return used


def _owners(starts: npt.NDArray[np.int64], numbers: TokenArray) -> npt.NDArray[np.int64]:
    """Which item each number belongs to; item i has the numbers from -starts[i] down."""
    return np.searchsorted(starts, -numbers.astype(np.int64), side="right") - 1
