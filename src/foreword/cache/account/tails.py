"""TailAccount: the tails that the cache holds and held, so that a lookup can report that a tail was evicted.

A tail is a partly filled block: it has no key of its own. It is identified by the key of the block before it, its
block's extra keys, and its tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import BlockIds
from foreword.cache.keys.hashing import BlockHash
from foreword.cache.keys.sequence import TokenSequence, common_length

MAX_COMPARED = 64
"""The number of evicted tails, the latest ones, to compare after one prefix."""

Eviction = TypeVar("Eviction")

Place = tuple[BlockHash, tuple[str, ...]]
"""The key of the block before a tail, and the extra keys of the tail's block."""


@dataclass(frozen=True, slots=True)
class Tail:
    """The content of a tail, whichever block holds it."""

    place: Place
    tokens: bytes
    """The tokens as int32."""
    salt: str | None
    """A lookup finds it only under this salt."""


class TailAccount(Generic[Eviction]):
    """The tails of one pool. Remembers up to `max_evicted` evicted ones."""

    def __init__(self, max_evicted: int) -> None:
        self._max_evicted = max_evicted
        self._held: dict[int, Tail] = {}
        self._evicted: OrderedDict[Tail, Eviction] = OrderedDict()
        self._evicted_at: dict[Place, dict[Tail, None]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def block_ids(self) -> set[int]:
        """The blocks that hold tails."""
        return set(self._held)

    def stored(self, sequence: TokenSequence, num_tokens: int, block_id: int) -> None:
        """Record that the block holds those of the sequence's first `num_tokens` that follow its last full block."""
        number, length = divmod(num_tokens, sequence.block_size)
        keys = sequence.extra_keys
        salt = keys.salt if keys.salt_offset < num_tokens else None
        tail = Tail(_place(sequence, number), sequence.token_ids[num_tokens - length : num_tokens].tobytes(), salt)
        self._held[block_id] = tail
        self._forget_eviction(tail)

    def removed(self, block_ids: BlockIds, eviction: Eviction | None) -> None:
        """Record that these blocks no longer hold tails; `eviction` is None if other blocks hold the same."""
        if not self._held:
            return
        for block_id in block_ids.tolist():
            tail = self._held.pop(block_id, None)
            if tail is not None and eviction is not None:
                self._evicted[tail] = eviction
                self._evicted_at.setdefault(tail.place, {})[tail] = None
        while len(self._evicted) > self._max_evicted:
            self._forget_eviction(next(iter(self._evicted)))

    def eviction_after(self, sequence: TokenSequence, number: int, num_known: int) -> Eviction | None:
        """The eviction of the longest tail that held more than `num_known` tokens of the sequence's block `number`."""
        if not self._evicted:
            return None
        there = self._evicted_at.get(_place(sequence, number), {})
        start = number * sequence.block_size
        ours = sequence.token_ids[start : start + sequence.block_size]
        longest, found = num_known, None
        for tail in islice(reversed(there), MAX_COMPARED):
            length = common_length(ours, np.frombuffer(tail.tokens, np.int32))
            if length > longest:
                longest, found = length, self._evicted[tail]
        return found

    def num_under_salt(self, prefix: str) -> int:
        """The number of tails under salts that start with `prefix`."""
        return sum(1 for tail in self._held.values() if tail.salt is not None and tail.salt.startswith(prefix))

    def under_salt(self, prefix: str, block_ids: BlockIds) -> npt.NDArray[np.bool_]:
        """Whether each of these blocks holds a tail under a salt that starts with `prefix`."""
        tails = map(self._held.get, block_ids.tolist())
        salts = [None if tail is None else tail.salt for tail in tails]
        return np.array([salt is not None and salt.startswith(prefix) for salt in salts], np.bool_)

    def cleared(self) -> None:
        """Everything was forgotten on request."""
        self._held.clear()
        self._evicted.clear()
        self._evicted_at.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError if the account contradicts itself."""
        listed: Collection[Tail] = [tail for there in self._evicted_at.values() for tail in there]
        assert set(listed) == set(self._evicted), "an evicted tail is not listed at its place"
        assert all(self._evicted_at.values()), "a place without evicted tails was left behind"
        assert len(self._evicted) <= self._max_evicted, "evicted tails are not dropped"

    def _forget_eviction(self, tail: Tail) -> None:
        if self._evicted.pop(tail, None) is not None:
            there = self._evicted_at[tail.place]
            del there[tail]
            if not there:
                del self._evicted_at[tail.place]


def _place(sequence: TokenSequence, number: int) -> Place:
    """The place of the sequence's block `number`."""
    size = sequence.block_size
    before = sequence.block_hashes()[number - 1] if number else sequence.root
    return before, sequence.extra_keys.of_block(number * size, (number + 1) * size)
