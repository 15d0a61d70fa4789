"""Finds blocks by the keys of their contents, for one group that needs whole prefixes or for groups that share a pool.

A hybrid model looks up single blocks: it needs a window's blocks even if the blocks before them are
gone. A key of the hash chain identifies its whole prefix, so a block is found without its
predecessors. A radix tree cannot do this: it finds a block only through all blocks before it, and forgets a
suffix with its prefix.

Each group has its own map from keys to blocks. Outside of these maps, a key is a `BlockHashWithGroupId`. A group's
block has the chain's key at the position where the block ends, so one chain serves groups of different block sizes:

    chain, 4 tokens a key      k0   k1   k2   k3   k4   k5
    group 0, block size 4      k0   k1   k2   k3   k4   k5
    group 1, block size 8           k1        k3        k5
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NewType, TypeVar

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import NO_BLOCKS, BlockIds
from foreword.cache.index.prefix_index import NO_MATCH, Divergence, PrefixMatch, PrefixNode
from foreword.cache.keys.hashing import BlockHash, TokenArray
from foreword.cache.keys.sequence import TokenSequence
from foreword.cache.keys.verified import VerifiedPrefix, VerifiedPrefixes

Key = TypeVar("Key", bound=Hashable)
BlockHashWithGroupId = NewType("BlockHashWithGroupId", bytes)
"""A block's key and the number of its group (4 bytes, big endian, at the end), as in vLLM v1."""


def make_block_hash_with_group_id(key: BlockHash, group_id: int) -> BlockHashWithGroupId:
    """The key of a block in one group: equal keys in two groups identify different blocks."""
    return BlockHashWithGroupId(key + group_id.to_bytes(4, "big"))


def get_block_hash(key: BlockHashWithGroupId) -> BlockHash:
    """The key without the group."""
    return BlockHash(key[:-4])


def get_group_id(key: BlockHashWithGroupId) -> int:
    """The number of the group."""
    return int.from_bytes(key[-4:], "big")


class BlockHashToBlockMap(Generic[Key]):
    """Blocks of one group by key. Lookups find the first block with a key; later blocks with this key are
    duplicates.
    """

    def __init__(self) -> None:
        self.block_of: dict[Key, int] = {}
        self.duplicates: dict[Key, list[int]] = {}

    def insert(self, key: Key, block_id: int) -> None:
        if self.block_of.setdefault(key, block_id) != block_id:
            self.duplicates.setdefault(key, []).append(block_id)

    def remove(self, key: Key, block_id: int) -> None:
        waiting = self.duplicates.get(key)
        if waiting is None:
            del self.block_of[key]
            return
        if self.block_of[key] == block_id:
            self.block_of[key] = waiting.pop(0)
        else:
            waiting.remove(block_id)
        if not waiting:
            del self.duplicates[key]


class _KeysAlone:
    """Methods about tokens, for an index that has only keys: there are no tails, and there is no tree."""

    keeps_tails = False
    num_tails = 0

    def tail_block_ids(self) -> BlockIds:
        return NO_BLOCKS

    def diverges(self, sequence: TokenSequence, num_tokens: int) -> Divergence | None:
        return None

    def following(self, sequence: TokenSequence, num_tokens: int) -> TokenArray:
        return NO_BLOCKS

    def top(
        self, limit: int, num_reuses: npt.NDArray[np.int64] | None, under_salt: str = ""
    ) -> list[PrefixNode] | None:
        return None


class GroupedHashIndex(_KeysAlone, Generic[Key]):
    """Blocks of several groups that share one pool."""

    def __init__(self, num_blocks: int, num_groups: int) -> None:
        self._num_blocks = num_blocks
        self._num_groups = num_groups
        self.clear()

    def clear(self) -> None:
        self._maps = [BlockHashToBlockMap[Key]() for _ in range(self._num_groups)]
        self._key_of: list[Key | None] = [None] * self._num_blocks
        self._group_of = bytearray(self._num_blocks)
        self._num_indexed = 0

    def __len__(self) -> int:
        return self._num_indexed

    def num_indexed(self, group_id: int) -> int:
        """The number of blocks of one group, including duplicates."""
        blocks = self._maps[group_id]
        return len(blocks.block_of) + sum(len(waiting) for waiting in blocks.duplicates.values())

    def finder(self, group_id: int) -> Callable[[Key], int | None]:
        """A function from a key to its block in that group, or None. Valid until `clear`."""
        return self._maps[group_id].block_of.get

    def insert(self, group_id: int, keys: Sequence[Key], block_ids: BlockIds) -> None:
        """Record that these blocks hold the prefixes of these keys."""
        blocks = self._maps[group_id]
        for key, block_id in zip(keys, block_ids.tolist(), strict=True):
            assert self._key_of[block_id] is None, f"block {block_id} is indexed already"
            self._key_of[block_id] = key
            self._group_of[block_id] = group_id
            blocks.insert(key, block_id)
        self._num_indexed += len(keys)

    def remove(self, block_ids: BlockIds) -> BlockIds:
        """Forget these blocks, ignoring unknown blocks. Returns the forgotten blocks."""
        forgotten: list[int] = []
        if not self._num_indexed:
            return NO_BLOCKS
        for block_id in block_ids.tolist():
            key = self._key_of[block_id]
            if key is not None:
                self._maps[self._group_of[block_id]].remove(key, block_id)
                self._key_of[block_id] = None
                forgotten.append(block_id)
        self._num_indexed -= len(forgotten)
        return np.array(forgotten, np.int32)

    def block_ids(self) -> BlockIds:
        """A new array of all indexed blocks, in the order of their ids."""
        return np.array([block_id for block_id, key in enumerate(self._key_of) if key is not None], np.int32)

    def group_of(self, block_id: int) -> int | None:
        """The group under which a block is indexed, or None."""
        return None if self._key_of[block_id] is None else self._group_of[block_id]

    def key_of(self, block_id: int) -> Key | None:
        """The key under which a block is indexed, or None."""
        return self._key_of[block_id]

    def check_integrity(self) -> None:
        listed: dict[int, tuple[int, Key]] = {}
        for group_id, blocks in enumerate(self._maps):
            for key, waiting in blocks.duplicates.items():
                assert waiting, "an empty list of duplicates was left behind"
                assert key in blocks.block_of, "a duplicate waits for no block"
                listed.update(dict.fromkeys(waiting, (group_id, key)))
            for key, block_id in blocks.block_of.items():
                assert block_id not in listed, "a block is listed twice"
                listed[block_id] = (group_id, key)
        keyed = {
            block_id: (self._group_of[block_id], key) for block_id, key in enumerate(self._key_of) if key is not None
        }
        assert keyed == listed, "the maps from keys to blocks and their inverse differ"
        assert self._num_indexed == len(keyed), "the index miscounts itself"


class HashIndex(_KeysAlone):
    """Blocks by their chained hash, as in vLLM v1.

    Lookups find the first block with a key. Later blocks with the same key are duplicates. When the first block is
    removed, a duplicate takes its place, so a request's block table never has to change.

    With `verify_tokens`, a lookup compares the tokens and extra keys of the whole prefix. So a lookup never returns
    another prompt's block, even if the hash function gives both prompts the same key. The index then stores all indexed
    tokens, and each insertion walks its whole prefix.

    Only full blocks have keys, so there are no tails.
    """

    def __init__(self, num_blocks: int, *, verify_tokens: bool = False) -> None:
        self._blocks = GroupedHashIndex[BlockHash | VerifiedPrefix](num_blocks, 1)
        self._prefixes = VerifiedPrefixes() if verify_tokens else None

    def match(self, sequence: TokenSequence) -> PrefixMatch:
        keys, find = self._known_keys(sequence), self._blocks.finder(0)
        if not keys or find(keys[0]) is None:
            return NO_MATCH
        block_ids = list(map(find, keys))
        if None in block_ids:
            del block_ids[block_ids.index(None) :]
        return PrefixMatch(np.fromiter(block_ids, np.int32, len(block_ids)))

    def holds(self, sequence: TokenSequence, block: int) -> bool:
        keys = self._known_keys(sequence)
        return block < len(keys) and self._blocks.finder(0)(keys[block]) is not None

    def original_of(self, block_id: int) -> int | None:
        key = self._blocks.key_of(block_id)
        original = None if key is None else self._blocks.finder(0)(key)
        return None if original == block_id else original

    def insert(self, sequence: TokenSequence, first: int, block_ids: BlockIds) -> bool:
        keys: Sequence[BlockHash | VerifiedPrefix] = sequence.block_hashes()[first : first + len(block_ids)]
        assert len(keys) == len(block_ids), "only full blocks can be indexed"
        if self._prefixes is not None:
            keys = self._prefixes.extend(sequence, first, len(block_ids))
        self._blocks.insert(0, keys, block_ids)
        return True

    def insert_each(
        self, sequences: Sequence[TokenSequence], numbers: Sequence[int], block_ids: BlockIds
    ) -> list[bool]:
        numbered = zip(sequences, numbers, strict=True)
        if self._prefixes is not None:
            return [self.insert(*item, block_ids[at : at + 1]) for at, item in enumerate(numbered)]
        self._blocks.insert(0, [sequence.block_hashes()[number] for sequence, number in numbered], block_ids)
        return [True] * len(numbers)

    def insert_tail(self, sequence: TokenSequence, num_tokens: int, block_id: int) -> bool:
        return False

    def superseded_tails(self) -> BlockIds:
        return NO_BLOCKS

    def remove(self, block_ids: BlockIds) -> BlockIds:
        keys = {} if self._prefixes is None else {block: self._blocks.key_of(block) for block in block_ids.tolist()}
        forgotten = self._blocks.remove(block_ids)
        if self._prefixes is not None:
            for key in map(keys.get, forgotten.tolist()):
                assert isinstance(key, VerifiedPrefix)
                self._prefixes.release(key)
        return block_ids

    def _known_keys(self, sequence: TokenSequence) -> Sequence[BlockHash | VerifiedPrefix]:
        """The keys of the sequence's full blocks, up to the first block that is certainly not indexed."""
        return sequence.block_hashes() if self._prefixes is None else self._prefixes.find(sequence)

    def clear(self) -> None:
        self._blocks.clear()
        if self._prefixes is not None:
            self._prefixes = VerifiedPrefixes()

    def __len__(self) -> int:
        return len(self._blocks)

    def block_ids(self) -> BlockIds:
        return self._blocks.block_ids()

    def key_of(self, block_id: int) -> BlockHash | None:
        key = self._blocks.key_of(block_id)
        return key.key if isinstance(key, VerifiedPrefix) else key

    def check_table(self, sequence: TokenSequence, block_ids: BlockIds) -> None:
        keys = self._known_keys(sequence)
        for number, block_id in enumerate(block_ids.tolist()):
            key = self._blocks.key_of(block_id)
            assert key is None or key in keys[number : number + 1], (
                f"block {block_id} is indexed as something else than its holder's block number {number}"
            )

    def check_integrity(self) -> None:
        self._blocks.check_integrity()
        if self._prefixes is not None:
            keys = map(self._blocks.key_of, self.block_ids().tolist())
            self._prefixes.check_integrity([key for key in keys if isinstance(key, VerifiedPrefix)])
