"""Where drafts come from: the request's own text, the caller's prediction, paths of tokens in the cache, and recent
answers in the request's cache namespace.

In a text, a negative number marks the end of an answer. No token is negative, so no match and no draft crosses such an
end.

`SuffixIndex` finds where the last tokens of a text occurred before. As in LZ77 coders, a hash table has the last place
of each pair of tokens, and links lead from each place to the previous place of the same pair:

    tokens   7 3 9 1 7 3 9 4 7 3         the text ends with 7 3
    links              1         5       places whose pair is 7 3: 9 (the end), 5, 1
    followed by        9 4 ..            the place with the longest match wins; of equal places, the last

SuffixDecoding (Oliaro et al., 2024) uses suffix trees, which take some 100 bytes per token; this index takes 16 to 24.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np

from foreword.batch import Int64Array, IntArray
from foreword.cache import KVCacheManager
from foreword.request import Request

PAIR = 2
"""The least number of tokens that must agree for a match."""
LONGEST_MATCH = 32
"""The most tokens that a match compares, backwards from the last token."""
MOST_PLACES = 24
"""The most places that `find` compares: places where the last two tokens occurred before. If there are more, `find`
compares those nearest to the text's end."""
_FACTOR = 0x9E3779B1
_MASK = 0xFFFFFFFF
END_OF_ANSWER = -1


@dataclass(frozen=True, slots=True)
class Proposal:
    """How an answer may go on."""

    token_ids: IntArray
    """[tokens], at least one."""
    source: str
    """The drafter's name."""
    num_matched: int
    """The number of the text's last tokens that agree with the source. With more, the draft is more likely right."""


class Drafter(Protocol):
    """Guesses the next tokens of answers. A wrong guess costs time, but never changes an answer.

    A drafter uses only the request itself, and tokens that were computed in the request's own cache namespace.
    """

    name: str
    """The name of the source in statistics."""

    def propose(self, request: Request, max_tokens: int) -> Proposal | None:
        """Guess at most `max_tokens` tokens that follow the request's known tokens; None: no guess."""

    def leave(self, request: Request) -> None:
        """Record that a request has ended; `request.finish_reason` says how."""

    def forget(self) -> None:
        """Forget the texts of requests that have ended."""


class SuffixIndex:
    """A text that grows at its end, and an index that finds the places in the text at which given tokens end."""

    def __init__(self) -> None:
        self._tokens: IntArray = np.empty(256, np.int32)
        self._links: IntArray = np.empty(256, np.int32)
        """Place -> the previous place with the same hash; -1: none. A pair's place is the index of its second token."""
        self._heads: IntArray = np.full(256, -1, np.int32)
        """Hash -> the last place with this hash; -1: none."""
        self._length = 0

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> IntArray:
        """The text, [tokens]; a view that is valid until the text grows."""
        return self._tokens[: self._length]

    @property
    def num_bytes(self) -> int:
        return self._tokens.nbytes + self._links.nbytes + self._heads.nbytes

    def extend(self, token_ids: IntArray) -> None:
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
        """Find the place below `before` with the longest match of `tail`'s end; returns the place and the length.

        Returns the last of equally good places; None if fewer than two tokens agree.
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
        best = int(lengths.argmax())  # the first of equally good places, which is the last in the text
        return (places[best], int(lengths[best])) if lengths[best] >= PAIR else None

    def following(self, place: int, max_tokens: int) -> IntArray:
        return self._tokens[place + 1 : min(place + 1 + max_tokens, self._length)].copy()

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
        """Do the same as `_link_one` for places `start` to `end` (exclusive), in order."""
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


class _OfRequests:
    """A drafter that knows only running requests: it keeps a text for each request."""

    def __init__(self) -> None:
        self._texts: WeakKeyDictionary[Request, SuffixIndex] = WeakKeyDictionary()

    def leave(self, request: Request) -> None:
        self._texts.pop(request, None)

    def forget(self) -> None:
        pass


class OwnText(_OfRequests):
    """Guesses that the last tokens continue as they did earlier in the request's own text, as in edits and quotes.

    This is "prompt lookup", with the longest match, at any distance. An index takes at most 24 bytes for each token of
    a running request, and is dropped when the request ends.
    """

    name = "own"

    def propose(self, request: Request, max_tokens: int) -> Proposal | None:
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = SuffixIndex()
        text.extend(request.sequence.token_ids[len(text) :])
        last = len(text) - 1
        match = text.find(text.tokens[-LONGEST_MATCH:], last)
        if match is None:
            return None
        place, num_matched = match
        token_ids = text.following(place, max_tokens)
        if len(token_ids) < max_tokens:  # the text repeats itself up to its end, so it may go on repeating itself
            token_ids = np.resize(token_ids, max_tokens)
        return Proposal(token_ids, self.name, num_matched)


class Predicted(_OfRequests):
    """Guesses from the caller's prediction: at first its beginning, later the tokens that follow in it after the
    answer's last tokens.
    """

    name = "prediction"

    def propose(self, request: Request, max_tokens: int) -> Proposal | None:
        predicted = request.params.prediction_token_ids
        if not predicted:
            return None
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = SuffixIndex()
            text.extend(np.array(predicted, np.int32))
        answer = request.sequence.generated_from(0) if request.num_output_tokens < 2 else []
        if answer == list(predicted[: len(answer)]) and request.num_output_tokens < 2:
            place, num_matched = len(answer) - 1, LONGEST_MATCH  # the answer begins as predicted
        else:
            match = text.find(request.sequence.token_ids[request.num_prompt_tokens :][-LONGEST_MATCH:], len(text))
            if match is None:
                return None
            place, num_matched = match
        token_ids = text.following(place, max_tokens)
        return Proposal(token_ids, self.name, num_matched) if len(token_ids) else None


class CachedPaths:
    """Guesses what follows the request's whole text in the cache, as in repeated requests and regenerated answers.

    A cached path is read ahead. Another is looked up only when the answer leaves the path or reaches its end.
    """

    name = "cache"
    READ_AHEAD = 128
    """The number of tokens to read at a time from a path."""
    PAUSE = 32
    """The number of new tokens after which a request without a cached path is looked up again."""

    def __init__(self, cache: KVCacheManager) -> None:
        self._cache = cache
        self._read: WeakKeyDictionary[Request, tuple[int, IntArray, int]] = WeakKeyDictionary()
        """Request -> its length when the path was read, the path, and the number of tokens before that length that
        agreed with a path."""

    def propose(self, request: Request, max_tokens: int) -> Proposal | None:
        length = len(request.sequence)
        start, path, before = self._read.get(request, (0, _NOTHING, 0))
        num_new = length - start
        if len(path):
            if num_new >= len(path) or not np.array_equal(request.sequence.token_ids[start:], path[:num_new]):
                before = before + num_new if num_new >= len(path) else 0
                start, path = length, self._cache.following(request.sequence, self.READ_AHEAD)
                self._read[request] = (start, path, before)
        elif request not in self._read or num_new >= self.PAUSE:
            start, path, before = length, self._cache.following(request.sequence, self.READ_AHEAD), 0
            self._read[request] = (start, path, before)
        token_ids = path[length - start :][:max_tokens]
        return Proposal(token_ids, self.name, before + length - start) if len(token_ids) else None

    def leave(self, request: Request) -> None:
        self._read.pop(request, None)

    def forget(self) -> None:
        self._read.clear()


class RecentAnswers:
    """Guesses the tokens that followed the same last tokens in recent answers of the request's own namespace.

    Namespaces are those of the cache: salt and adapter. So a request drafts only from answers to prompts whose blocks
    it may also hit, and tenants stay separate.
    """

    name = "answers"
    MOST_TOKENS = 16_384
    """The most tokens to keep for each namespace. If an answer does not fit, the oldest half is dropped."""
    MOST_BYTES = 64 * 2**20
    """The most bytes of all namespaces. The namespace whose last answer is the oldest is dropped first."""

    def __init__(self) -> None:
        self._texts: OrderedDict[tuple[str | None, str | None], SuffixIndex] = OrderedDict()
        self.num_bytes = 0

    def propose(self, request: Request, max_tokens: int) -> Proposal | None:
        text = self._texts.get(_namespace(request))
        if text is None:
            return None
        match = text.find(request.sequence.token_ids[-LONGEST_MATCH:], len(text))
        if match is None:
            return None
        token_ids = text.following(match[0], max_tokens)
        ends = np.flatnonzero(token_ids == END_OF_ANSWER)
        token_ids = token_ids[: ends[0]] if len(ends) else token_ids
        return Proposal(token_ids, self.name, match[1]) if len(token_ids) else None

    def leave(self, request: Request) -> None:
        answer = request.sequence.token_ids[request.num_prompt_tokens :]
        if request.finish_reason not in ("stop", "length") or len(answer) < 4:
            return
        key = _namespace(request)
        text = self._texts.pop(key, None)
        self.num_bytes -= 0 if text is None else text.num_bytes
        text = SuffixIndex() if text is None else text
        added = np.append(answer[-self.MOST_TOKENS // 2 :], np.int32(END_OF_ANSWER))
        if len(text) + len(added) > self.MOST_TOKENS:
            newest, text = text.tokens[-self.MOST_TOKENS // 2 :], SuffixIndex()
            text.extend(newest)
        text.extend(added)
        self._texts[key] = text
        self.num_bytes += text.num_bytes
        while self.num_bytes > self.MOST_BYTES:
            self.num_bytes -= self._texts.popitem(last=False)[1].num_bytes

    def forget(self) -> None:
        self._texts.clear()
        self.num_bytes = 0


_NOTHING: IntArray = np.empty(0, np.int32)


def _namespace(request: Request) -> tuple[str | None, str | None]:
    keys = request.sequence.extra_keys
    return keys.salt, keys.adapter
