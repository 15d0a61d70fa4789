"""Compares prefixes by their contents, for hash functions whose keys may collide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from foreword.cache.keys.hashing import BlockHash
from foreword.cache.keys.sequence import TokenSequence


class VerifiedPrefix:
    """One prefix: a block's content after another prefix. Equal prefixes are the same object."""

    __slots__ = ("extra_keys", "key", "num_uses", "parent", "tokens")

    def __init__(
        self, parent: VerifiedPrefix | BlockHash, key: BlockHash, tokens: bytes, extra_keys: Sequence[str]
    ) -> None:
        self.parent = parent
        """The prefix without its last block; the chain's root for a first block."""
        self.key = key
        self.tokens = tokens
        """The tokens of the last block as int32."""
        self.extra_keys = extra_keys
        self.num_uses = 0
        """The number of blocks that hold this prefix, plus the number of prefixes that continue it."""


class VerifiedPrefixes:
    """Every prefix that a block holds, and all beginnings of these prefixes.

    A prefix is remembered while a longer prefix needs it. So if an evicted block is cached again, the blocks after it
    are found again.
    """

    def __init__(self) -> None:
        self._of_key: dict[BlockHash, list[VerifiedPrefix]] = {}

    def find(self, sequence: TokenSequence) -> list[VerifiedPrefix]:
        """The known prefixes of a sequence, the shortest first. Changes nothing."""
        prefixes: list[VerifiedPrefix] = []
        parent: VerifiedPrefix | BlockHash = sequence.root
        for key, tokens, extra_keys in _contents(sequence, sequence.num_full_blocks):
            prefix = self._look_up(parent, key, tokens, extra_keys)
            if prefix is None:
                break
            prefixes.append(prefix)
            parent = prefix
        return prefixes

    def extend(self, sequence: TokenSequence, first: int, count: int) -> list[VerifiedPrefix]:
        """Add one use to each prefix that ends in blocks `first` to `first + count` (exclusive), and return them."""
        prefixes: list[VerifiedPrefix] = []
        parent: VerifiedPrefix | BlockHash = sequence.root
        for key, tokens, extra_keys in _contents(sequence, first + count):
            prefix = self._look_up(parent, key, tokens, extra_keys)
            if prefix is None:
                prefix = VerifiedPrefix(parent, key, tokens, extra_keys)
                self._of_key.setdefault(key, []).append(prefix)
                if isinstance(parent, VerifiedPrefix):
                    parent.num_uses += 1
            prefixes.append(prefix)
            parent = prefix
        for prefix in prefixes[first:]:
            prefix.num_uses += 1
        return prefixes[first:]

    def release(self, prefix: VerifiedPrefix) -> None:
        """Remove one use. An unused prefix is dropped, together with its beginnings that nothing else needs."""
        above: VerifiedPrefix | BlockHash = prefix
        while isinstance(above, VerifiedPrefix):
            above.num_uses -= 1
            if above.num_uses:
                return
            same_key = self._of_key[above.key]
            same_key.remove(above)
            if not same_key:
                del self._of_key[above.key]
            above = above.parent

    def _look_up(
        self, parent: VerifiedPrefix | BlockHash, key: BlockHash, tokens: bytes, extra_keys: Sequence[str]
    ) -> VerifiedPrefix | None:
        for prefix in self._of_key.get(key, ()):
            # Parents that are prefixes compare by identity.
            if prefix.parent == parent and prefix.tokens == tokens and prefix.extra_keys == extra_keys:
                return prefix
        return None

    def check_integrity(self, held: Iterable[VerifiedPrefix]) -> None:
        """Raise AssertionError if uses are miscounted. `held` has one prefix for each block that holds a prefix."""
        prefixes = [prefix for same_key in self._of_key.values() for prefix in same_key]
        uses = dict.fromkeys(prefixes, 0)
        for prefix in (*held, *(prefix.parent for prefix in prefixes)):
            if isinstance(prefix, VerifiedPrefix):
                assert prefix in uses, "a prefix in use is unknown"
                uses[prefix] += 1
        assert all(prefix.num_uses == count > 0 for prefix, count in uses.items()), "a prefix miscounts its uses"


def _contents(sequence: TokenSequence, count: int) -> Iterable[tuple[BlockHash, bytes, Sequence[str]]]:
    """Key, tokens and extra keys of each of the first `count` full blocks."""
    size = sequence.block_size
    tokens = np.frombuffer(sequence.token_ids[: count * size], f"V{4 * size}").tolist()
    return zip(sequence.block_hashes()[:count], tokens, sequence.extra_keys.of_blocks(0, size, count), strict=True)
