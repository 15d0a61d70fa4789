"""Which block holds which prefix.

Knows block ids and the sequences whose leading blocks they hold; knows nothing of reference counts or
of free and used blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from foreword.cache.block_pool import BlockIds
from foreword.cache.hashing import BlockHash
from foreword.cache.sequence import TokenSequence


@dataclass(frozen=True, slots=True)
class PartialBlock:
    """A block whose first tokens continue a match; copy it to use them (copy on write)."""

    block_id: int
    num_tokens: int
    """Leading tokens that match, 1 to block_size - 1."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The indexed beginning of a sequence."""

    block_ids: BlockIds
    """Blocks of its leading full blocks."""
    partial: PartialBlock | None = None
    """What matches beyond them, where the index can tell."""


class PrefixIndex(Protocol):
    """Finds the blocks that already hold the beginning of a sequence."""

    def match(self, sequence: TokenSequence) -> PrefixMatch:
        """The longest indexed beginning of `sequence`. Changes nothing."""

    def holds(self, sequence: TokenSequence, block: int) -> bool:
        """Whether the sequence's full block number `block` is indexed, given that those before it are."""

    def insert(self, sequence: TokenSequence, first: int, block_ids: BlockIds) -> None:
        """From now on `block_ids` hold the sequence's full blocks number `first`, `first + 1`, ...

        The blocks before `first` are indexed. A block may be a duplicate of one that is indexed
        already: both stay.
        """

    def remove(self, block_ids: BlockIds) -> BlockIds:
        """Forget these (distinct) blocks, and what can no longer be found without them; returns all of those.

        Blocks that were not indexed are ignored, and returned too.
        """

    def clear(self) -> None:
        """Forget all blocks."""

    def __len__(self) -> int:
        """Number of indexed blocks, duplicates included."""

    def check_integrity(self) -> None:
        """Raise AssertionError if the index contradicts itself."""


class HashIndex:
    """Blocks by their chained hash, as in vLLM v1.

    The first block to get a key answers for it; later duplicates wait behind it and take its place
    when it is removed, so a request's block table never has to change.
    """

    def __init__(self, num_blocks: int) -> None:
        self._block_of: dict[BlockHash, int] = {}
        self._duplicates: dict[BlockHash, list[int]] = {}
        self._key_of: list[BlockHash | None] = [None] * num_blocks
        self._num_indexed = 0

    def match(self, sequence: TokenSequence) -> PrefixMatch:
        found: list[int] = []
        block_of = self._block_of.get
        for key in sequence.block_hashes():
            block_id = block_of(key)
            if block_id is None:
                break
            found.append(block_id)
        return PrefixMatch(np.array(found, np.int32))

    def holds(self, sequence: TokenSequence, block: int) -> bool:
        return sequence.block_hashes()[block] in self._block_of

    def insert(self, sequence: TokenSequence, first: int, block_ids: BlockIds) -> None:
        keys = sequence.block_hashes()[first : first + len(block_ids)]
        assert len(keys) == len(block_ids), "only full blocks can be indexed"
        for key, block_id in zip(keys, block_ids.tolist(), strict=True):
            assert self._key_of[block_id] is None, f"block {block_id} is indexed already"
            self._key_of[block_id] = key
            if self._block_of.setdefault(key, block_id) != block_id:
                self._duplicates.setdefault(key, []).append(block_id)
        self._num_indexed += len(keys)

    def remove(self, block_ids: BlockIds) -> BlockIds:
        for block_id in block_ids.tolist():
            key = self._key_of[block_id]
            if key is None:
                continue
            self._key_of[block_id] = None
            self._num_indexed -= 1
            waiting = self._duplicates.get(key)
            if waiting is None:
                del self._block_of[key]
                continue
            if self._block_of[key] == block_id:
                self._block_of[key] = waiting.pop(0)
            else:
                waiting.remove(block_id)
            if not waiting:
                del self._duplicates[key]
        return block_ids

    def clear(self) -> None:
        self._block_of.clear()
        self._duplicates.clear()
        self._key_of = [None] * len(self._key_of)
        self._num_indexed = 0

    def __len__(self) -> int:
        return self._num_indexed

    def key_of(self, block_id: int) -> BlockHash | None:
        """Key under which a block is indexed, or None."""
        return self._key_of[block_id]

    def check_integrity(self) -> None:
        keyed = {block_id: key for block_id, key in enumerate(self._key_of) if key is not None}
        listed: dict[int, BlockHash] = {block_id: key for key, block_id in self._block_of.items()}
        for key, waiting in self._duplicates.items():
            assert waiting, "an empty list of duplicates was left behind"
            assert key in self._block_of, "a duplicate waits behind nothing"
            listed.update(dict.fromkeys(waiting, key))
        assert keyed == listed, "the map from keys to blocks and its inverse differ"
        assert self._num_indexed == len(keyed), "the index miscounts itself"
