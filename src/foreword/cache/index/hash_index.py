"""HashIndex: prefixes found by the keys of their full blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import BlockIds
from foreword.cache.index.prefix_index import NO_MATCH, Divergence, PrefixMatch
from foreword.cache.index.tree_view import PrefixNode
from foreword.cache.keys.hashing import BlockHash, TokenArray
from foreword.cache.keys.sequence import TokenSequence
from foreword.cache.keys.verified import VerifiedPrefix, VerifiedPrefixes


class HashIndex:
    """Blocks by their chained hash, as in vLLM v1.

    Lookups find the first block with a key. Later blocks with the same key are duplicates: one of them takes its place
    when it is removed, so a request's block table never has to change.

    With `verify_tokens`, a lookup compares the tokens and extra keys of the whole prefix. Then a hash function with
    colliding keys costs time, but a lookup never returns another prompt's block. The index stores all indexed tokens,
    and an insertion walks its whole prefix; without `verify_tokens` it does neither.

    Only full blocks have keys, so there are no tails.
    """

    keeps_tails = False
    num_tails = 0

    def __init__(self, num_blocks: int, *, verify_tokens: bool = False) -> None:
        self._prefixes = VerifiedPrefixes() if verify_tokens else None
        self._block_of: dict[BlockHash | VerifiedPrefix, int] = {}
        self._duplicates: dict[BlockHash | VerifiedPrefix, list[int]] = {}
        self._key_of: list[BlockHash | VerifiedPrefix | None] = [None] * num_blocks
        self._num_indexed = 0

    def match(self, sequence: TokenSequence) -> PrefixMatch:
        keys = self._known_keys(sequence)
        if not keys or keys[0] not in self._block_of:
            return NO_MATCH
        found = list(map(self._block_of.get, keys))
        if None in found:
            del found[found.index(None) :]
        return PrefixMatch(np.fromiter(found, np.int32, len(found)))

    def holds(self, sequence: TokenSequence, block: int) -> bool:
        keys = self._known_keys(sequence)
        return block < len(keys) and keys[block] in self._block_of

    def diverges(self, sequence: TokenSequence, num_tokens: int) -> Divergence | None:
        return None  # keys do not say in which token they differ

    def following(self, sequence: TokenSequence, num_tokens: int) -> TokenArray:
        return np.empty(0, np.int32)  # keys do not say which tokens they stand for

    def original_of(self, block_id: int) -> int | None:
        key = self._key_of[block_id]
        original = None if key is None else self._block_of[key]
        return None if original == block_id else original

    def insert(self, sequence: TokenSequence, first: int, block_ids: BlockIds) -> bool:
        keys: Sequence[BlockHash | VerifiedPrefix] = sequence.block_hashes()[first : first + len(block_ids)]
        assert len(keys) == len(block_ids), "only full blocks can be indexed"
        if self._prefixes is not None:
            keys = self._prefixes.extend(sequence, first, len(block_ids))
        self._insert(keys, block_ids)
        return True

    def insert_tail(self, sequence: TokenSequence, num_tokens: int, block_id: int) -> bool:
        return False

    def superseded_tails(self) -> BlockIds:
        return NO_MATCH.block_ids

    def tail_block_ids(self) -> BlockIds:
        return NO_MATCH.block_ids

    def insert_each(
        self, sequences: Sequence[TokenSequence], numbers: Sequence[int], block_ids: BlockIds
    ) -> list[bool]:
        numbered = zip(sequences, numbers, strict=True)
        if self._prefixes is not None:
            return [self.insert(*of_one, block_ids[at : at + 1]) for at, of_one in enumerate(numbered)]
        self._insert([sequence.block_hashes()[number] for sequence, number in numbered], block_ids)
        return [True] * len(numbers)

    def _insert(self, keys: Sequence[BlockHash | VerifiedPrefix], block_ids: BlockIds) -> None:
        key_of, answer = self._key_of, self._block_of.setdefault
        for key, block_id in zip(keys, block_ids.tolist(), strict=True):
            assert key_of[block_id] is None, f"block {block_id} is indexed already"
            key_of[block_id] = key
            if answer(key, block_id) != block_id:
                self._duplicates.setdefault(key, []).append(block_id)
        self._num_indexed += len(keys)

    def remove(self, block_ids: BlockIds) -> BlockIds:
        key_of, block_of, duplicates = self._key_of, self._block_of, self._duplicates
        removed: list[BlockHash | VerifiedPrefix] = []
        for block_id in block_ids.tolist():
            key = key_of[block_id]
            if key is None:
                continue
            key_of[block_id] = None
            removed.append(key)
            if duplicates and key in duplicates:
                self._remove_duplicate(key, block_id)
            else:
                del block_of[key]
        self._num_indexed -= len(removed)
        if self._prefixes is not None:
            for key in removed:
                assert isinstance(key, VerifiedPrefix)
                self._prefixes.release(key)
        return block_ids

    def _remove_duplicate(self, key: BlockHash | VerifiedPrefix, block_id: int) -> None:
        """Remove one of several blocks with this key."""
        waiting = self._duplicates[key]
        if self._block_of[key] == block_id:
            self._block_of[key] = waiting.pop(0)
        else:
            waiting.remove(block_id)
        if not waiting:
            del self._duplicates[key]

    def _known_keys(self, sequence: TokenSequence) -> Sequence[BlockHash | VerifiedPrefix]:
        """The keys of the sequence's full blocks, up to the first that is certainly not indexed."""
        return sequence.block_hashes() if self._prefixes is None else self._prefixes.find(sequence)

    def clear(self) -> None:
        self._block_of.clear()
        self._duplicates.clear()
        self._key_of = [None] * len(self._key_of)
        self._num_indexed = 0
        if self._prefixes is not None:
            self._prefixes = VerifiedPrefixes()

    def __len__(self) -> int:
        return self._num_indexed

    def top(
        self, limit: int, num_reuses: npt.NDArray[np.int64] | None, under_salt: str = ""
    ) -> list[PrefixNode] | None:
        return None  # keys do not say which tokens they stand for

    def block_ids(self) -> BlockIds:
        return np.array([block_id for block_id, key in enumerate(self._key_of) if key is not None], np.int32)

    def key_of(self, block_id: int) -> BlockHash | None:
        """The key under which a block is indexed, or None."""
        key = self._key_of[block_id]
        return key.key if isinstance(key, VerifiedPrefix) else key

    def check_table(self, sequence: TokenSequence, block_ids: BlockIds) -> None:
        keys = self._known_keys(sequence)
        for number, block_id in enumerate(block_ids.tolist()):
            key = self._key_of[block_id]
            assert key is None or (number < len(keys) and key == keys[number]), (
                f"block {block_id} is indexed as something else than its holder's block number {number}"
            )

    def check_integrity(self) -> None:
        keyed = {block_id: key for block_id, key in enumerate(self._key_of) if key is not None}
        listed = {block_id: key for key, block_id in self._block_of.items()}
        for key, waiting in self._duplicates.items():
            assert waiting, "an empty list of duplicates was left behind"
            assert key in self._block_of, "a duplicate waits for no block"
            listed.update(dict.fromkeys(waiting, key))
        assert keyed == listed, "the map from keys to blocks and its inverse differ"
        assert self._num_indexed == len(keyed), "the index miscounts itself"
        if self._prefixes is not None:
            self._prefixes.check_integrity([key for key in keyed.values() if isinstance(key, VerifiedPrefix)])
