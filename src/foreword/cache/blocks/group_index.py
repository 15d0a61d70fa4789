"""GroupedHashIndex: finds the block of each group that holds a prefix.

A hybrid model looks up single blocks: it needs a window's blocks even if the blocks before them are
gone. A key of the hash chain identifies its whole prefix, so a block is found without its
predecessors. A radix tree cannot do this: it finds a block only through all blocks before it, and forgets a
suffix with its prefix.

A group's block has the chain's key at the position where the block ends, so one chain serves
groups of different block sizes. Each group has its own map; `BlockHashWithGroupId` is for places where keys of all
groups meet:

    chain, 4 tokens a key      k0   k1   k2   k3   k4   k5
    group 0, block size 4      k0   k1   k2   k3   k4   k5
    group 1, block size 8           k1        k3        k5
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NewType

import numpy as np

from foreword.cache.block_ids import NO_BLOCKS, BlockIds
from foreword.cache.keys.hashing import BlockHash

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


class BlockHashToBlockMap:
    """Blocks of one group by key. The first block of a key represents it; duplicates wait after it."""

    def __init__(self) -> None:
        self.block_of: dict[BlockHash, int] = {}
        self.duplicates: dict[BlockHash, list[int]] = {}

    def insert(self, key: BlockHash, block_id: int) -> None:
        if self.block_of.setdefault(key, block_id) != block_id:
            self.duplicates.setdefault(key, []).append(block_id)

    def remove(self, key: BlockHash, block_id: int) -> None:
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


class GroupedHashIndex:
    """Blocks of several groups that share one pool."""

    def __init__(self, num_blocks: int, num_groups: int) -> None:
        self._num_blocks = num_blocks
        self._num_groups = num_groups
        self.clear()

    def clear(self) -> None:
        """Forget all blocks."""
        self._maps = [BlockHashToBlockMap() for _ in range(self._num_groups)]
        self._key_of: list[BlockHash | None] = [None] * self._num_blocks
        self._group_of = bytearray(self._num_blocks)
        self._num_indexed = 0

    def __len__(self) -> int:
        return self._num_indexed

    def num_indexed(self, group_id: int) -> int:
        """The number of blocks of one group, including duplicates."""
        blocks = self._maps[group_id]
        return len(blocks.block_of) + sum(len(waiting) for waiting in blocks.duplicates.values())

    def finder(self, group_id: int) -> Callable[[BlockHash], int | None]:
        """A function from a key to its block in that group, or None. Valid until `clear`."""
        return self._maps[group_id].block_of.get

    def insert(self, group_id: int, keys: Sequence[BlockHash], block_ids: BlockIds) -> None:
        """Record that these blocks hold the prefixes of these keys."""
        blocks = self._maps[group_id]
        for key, block_id in zip(keys, block_ids.tolist(), strict=True):
            assert self._key_of[block_id] is None, f"block {block_id} is indexed already"
            self._key_of[block_id] = key
            self._group_of[block_id] = group_id
            blocks.insert(key, block_id)
        self._num_indexed += len(keys)

    def remove(self, block_ids: BlockIds) -> BlockIds:
        """Forget these blocks, ignoring unknown ones. Returns those it forgot."""
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
        """All indexed blocks, in the order of their ids (a copy)."""
        return np.array([block_id for block_id, key in enumerate(self._key_of) if key is not None], np.int32)

    def group_of(self, block_id: int) -> int | None:
        """The group under which a block is indexed, or None."""
        return None if self._key_of[block_id] is None else self._group_of[block_id]

    def key_of(self, block_id: int) -> BlockHash | None:
        """The key under which a block is indexed, or None."""
        return self._key_of[block_id]

    def check_integrity(self) -> None:
        """Raise AssertionError if maps and blocks contradict each other."""
        listed: dict[int, tuple[int, BlockHash]] = {}
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
