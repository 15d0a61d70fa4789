"""TailAccount: which tails the cache holds and has held, so that a lookup can be told that one was evicted.

A tail is a block that is not full: it has no key of its own. It is known by the key of the block before it, by what
enters its own block besides tokens, and by its tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from foreword.cache.blocks.block_pool import BlockIds
from foreword.cache.keys.hashing import BlockHash
from foreword.cache.keys.sequence import TokenSequence

MAX_COMPARED = 64
"""Evicted tails after one prefix that are looked at, the latest ones."""

Eviction = TypeVar("Eviction")

Place = tuple[BlockHash, tuple[str, ...]]
"""What is before a tail, and what enters its block besides tokens."""


@dataclass(frozen=True, slots=True)
class Tail:
    """A tail, wherever it is held."""

    place: Place
    tokens: bytes
    """int32."""
    salt: str | None
    """Under which alone it is found."""


class TailAccount(Generic[Eviction]):
    """The tails of one pool. Evicted ones are remembered, as many as the pool has blocks."""

    def __init__(self, max_evicted: int) -> None:
        self._max_evicted = max_evicted
        self._held: dict[int, Tail] = {}
        self._evicted: OrderedDict[Tail, Eviction] = OrderedDict()
        self._evicted_at: dict[Place, dict[Tail, None]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def block_ids(self) -> set[int]:
        """Blocks that hold tails."""
        return set(self._held)

    def stored(self, sequence: TokenSequence, num_tokens: int, block_id: int) -> None:
        """The block holds what of the sequence's first tokens is after the last full block."""
        number, length = divmod(num_tokens, sequence.block_size)
        keys = sequence.extra_keys
        salt = keys.salt if keys.salt_offset < num_tokens else None
        tail = Tail(_place(sequence, number), sequence.token_ids[num_tokens - length : num_tokens].tobytes(), salt)
        self._held[block_id] = tail
        self._forget_eviction(tail)

    def removed(self, block_ids: BlockIds, eviction: Eviction | None) -> None:
        """Those of these blocks that held tails do not any more; None where other blocks hold the same."""
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
        """How the tail went that held more of the sequence's block `number` than its first `num_known` tokens."""
        if not self._evicted:
            return None
        there = self._evicted_at.get(_place(sequence, number), {})
        start = number * sequence.block_size
        ours = sequence.token_ids[start : start + sequence.block_size]
        longest, found = num_known, None
        for tail in islice(reversed(there), MAX_COMPARED):
            theirs = np.frombuffer(tail.tokens, np.int32)[: len(ours)]
            equal = theirs == ours[: len(theirs)]
            length = len(theirs) if equal.all() else int(equal.argmin())
            if length > longest:
                longest, found = length, self._evicted[tail]
        return found

    def num_under_salt(self, prefix: str) -> int:
        """Tails under salts that begin so."""
        return sum(1 for tail in self._held.values() if tail.salt is not None and tail.salt.startswith(prefix))

    def under_salt(self, prefix: str, block_ids: BlockIds) -> npt.NDArray[np.bool_]:
        """Which of these blocks hold a tail under a salt that begins so."""
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
    """Where the sequence's block with this number stands."""
    size = sequence.block_size
    before = sequence.block_hashes()[number - 1] if number else sequence.root
    return before, sequence.extra_keys.of_block(number * size, (number + 1) * size)
