"""SuffixIndex: where the last tokens of a text stood before.

As in LZ77 coders, a hash table has the last place of each pair of tokens, and links lead from each place to the one
before it with the same pair:

    tokens   7 3 9 1 7 3 9 4 7 3         the text ends with 7 3
    links              1         5       places whose pair is 7 3: 9 (the end), 5, 1
    followed by        9 4 ..            the one with the longest common past wins, then the last one

SuffixDecoding (Oliaro et al., 2024) uses suffix trees, which take some 100 bytes for a token; this takes 16 to 24.
"""

from __future__ import annotations

import numpy as np

from foreword.batch import Int64Array, IntArray

PAIR = 2
"""Tokens that must agree before anything is found."""
LONGEST_MATCH = 32
"""Most tokens of the past that are compared."""
MOST_PLACES = 24
"""Most places that are compared; the last ones."""
_FACTOR = 0x9E3779B1
_MASK = 0xFFFFFFFF


class SuffixIndex:
    """A text that grows at its end, in which the places of any last tokens are found."""

    def __init__(self) -> None:
        self._tokens: IntArray = np.empty(256, np.int32)
        self._links: IntArray = np.empty(256, np.int32)
        """Place -> an earlier place with the same hash; -1 for none. A place is that of a pair's second token."""
        self._heads: IntArray = np.full(256, -1, np.int32)
        """Hash -> the last place."""
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> IntArray:
        """The text, [tokens]; a view that is valid until it grows."""
        return self._tokens[: self._length]

    @property
    def num_bytes(self) -> int:
        return self._tokens.nbytes + self._links.nbytes + self._heads.nbytes

    def extend(self, token_ids: IntArray) -> None:
        """Append tokens."""
        start, end = self._length, self._length + len(token_ids)
        if end > len(self._tokens):
            self._reserve(max(end, 2 * len(self._tokens)))
        self._tokens[start:end] = token_ids
        self._length = end
        if end - start < 16:
            for place in range(max(1, start), end):
                self._link_one(place)
        else:
            self._link(max(1, start), end)

    def find(self, tail: IntArray, before: int) -> tuple[int, int] | None:
        """The place before number `before` whose past agrees longest with `tail`, and the length of that agreement.

        Of equals the last one; None if not even two tokens agree.
        """
        if len(tail) < PAIR:
            return None
        places: list[int] = []
        place = int(self._heads[self._hash(int(tail[-2]), int(tail[-1]))])
        links = self._links
        while place >= 0 and len(places) < MOST_PLACES:
            if place < before:
                places.append(place)
            place = int(links[place])
        if not places:
            return None
        past = np.arange(min(LONGEST_MATCH, len(tail)))
        at = np.array(places)[:, None] - past
        differs = (self._tokens[np.maximum(at, 0)] != tail[len(tail) - 1 - past]) | (at < 0)
        lengths = np.where(differs.any(1), differs.argmax(1), len(past))
        best = int(lengths.argmax())  # the first of equals, which is the last in the text
        return (places[best], int(lengths[best])) if lengths[best] >= PAIR else None

    def following(self, place: int, most: int) -> IntArray:
        """At most `most` tokens after a place."""
        return self._tokens[place + 1 : min(place + 1 + most, self._length)].copy()

    def _reserve(self, least: int) -> None:
        room = 1 << (least - 1).bit_length()
        tokens = np.empty(room, np.int32)
        tokens[: self._length] = self.tokens
        self._tokens, self._links, self._heads = tokens, np.empty(room, np.int32), np.full(room, -1, np.int32)
        if self._length > 1:
            self._link(1, self._length)

    def _hash(self, first: int, second: int) -> int:
        mixed = ((first * _FACTOR & _MASK) ^ second) * _FACTOR & _MASK
        return mixed >> 7 & len(self._heads) - 1

    def _link_one(self, place: int) -> None:
        at = self._hash(int(self._tokens[place - 1]), int(self._tokens[place]))
        self._links[place] = self._heads[at]
        self._heads[at] = place

    def _link(self, start: int, end: int) -> None:
        """`_link_one` for places `start` to `end` (exclusive), in order."""
        firsts = self._tokens[start - 1 : end - 1].astype(np.int64)
        mixed = ((firsts * _FACTOR & _MASK) ^ self._tokens[start:end]) * _FACTOR & _MASK
        hashes: Int64Array = mixed >> 7 & len(self._heads) - 1
        order = hashes.argsort(kind="stable")
        ordered, places = hashes[order], (order + start).astype(np.int32)
        is_first = np.append(True, ordered[1:] != ordered[:-1])
        before = np.append(np.int32(-1), places[:-1])
        self._links[places] = np.where(is_first, self._heads[ordered], before)
        is_last = np.append(is_first[1:], True)
        self._heads[ordered[is_last]] = places[is_last]
