"""TieredCache: blocks that are filled from elsewhere, or copied to there, while no request holds them.

Knows sequences, keys by group and blocks; knows nothing of requests, bytes or where else blocks lie. A load:

    tables = find_hit_with(sequence, keys)     the hit if blocks with these keys were in the pool; they are ELSEWHERE
    hold_blocks(...), take_blocks(count)       the part that is here stays; blocks for the part that is not
    ... somebody fills the taken blocks ...
    adopt(group, sequence, first, block_ids)   now lookups find them
    release_blocks(...)                        they are cached like any others

A taken block is not indexed, so no lookup finds it before it is filled and adopted. What never arrives is released.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np

from foreword.cache.block_ids import NULL_BLOCK, BlockIds
from foreword.cache.entries import PinnableCache
from foreword.cache.eviction.policy import LearningPolicy
from foreword.cache.groups.coordinator import ELSEWHERE, Keys
from foreword.cache.keys.hashing import BlockHash
from foreword.cache.keys.sequence import TokenSequence


class TieredCache(PinnableCache):
    """A cache whose blocks can also be filled and read by somebody who is no request."""

    def keys_by_group(self, sequence: TokenSequence) -> list[Keys]:
        """For each group, the keys of the sequence's full blocks, as far as other sequences may find them."""
        return self._coordinator.keys_by_group(sequence)

    def find_hit_with(self, sequence: TokenSequence, elsewhere: Sequence[Set[BlockHash]]) -> tuple[BlockIds, ...]:
        """The tables of the longest hit if the blocks with these keys, by group, were in the pool too.

        The entry of such a block is ELSEWHERE; it is NULL_BLOCK where a group needs none. Changes and counts nothing.
        """
        return self._coordinator.find_hit_with(sequence, elsewhere)

    def cached_blocks(self, sequence: TokenSequence) -> list[BlockIds]:
        """For each group, the blocks with the keys of `keys_by_group`; NULL_BLOCK where the pool lacks one.

        Blocks that the present step fills count too, so copy none before its commit.
        """
        return self._coordinator.cached_blocks(sequence)

    def chance_of_return(self, num_blocks: int) -> float:
        """The share of blocks that are used again, of requests that add `num_blocks`; 1.0 if the policy learns none."""
        policy = self._policy
        return policy.chance_of_return(num_blocks) if isinstance(policy, LearningPolicy) else 1.0

    def take_blocks(self, count: int) -> BlockIds | None:
        """Take blocks to be filled, which nothing finds before `adopt`; None, and no change, if fewer are free."""
        return self._coordinator.take_apart(count) if count <= self.get_num_free_blocks() else None

    def next_empty(self, num_blocks: int) -> BlockIds:
        """Of the blocks that hold nothing, those that are given away next, at most `num_blocks`. Changes nothing."""
        return self._pool.next_empty(num_blocks)

    def hold_blocks(self, block_ids: BlockIds) -> None:
        """Keep these (distinct) blocks, which a lookup found, from being given away; no use of them is counted."""
        self._coordinator.hold_apart(block_ids)

    def hold_source(self, sequence: TokenSequence, num_blocks: int) -> BlockIds | None:
        """Hold the first blocks of a sequence, to copy them in the next step, and count a use of them.

        None, and no change, if the pool lacks one of them, or if the present step fills one. Needs one full group.
        """
        [table] = self._coordinator.find_longest_cache_hit(sequence).tables
        if len(table) < num_blocks or self._coordinator.fills(table[:num_blocks].tolist()):
            return None
        block_ids: BlockIds = table[:num_blocks].copy()
        self._coordinator.hold_apart(block_ids)
        self._pool.note_use(block_ids)
        return block_ids

    def release_blocks(self, block_ids: BlockIds) -> None:
        """Release blocks that were taken or held. Those that are indexed stay cached; the last are evicted first."""
        self._coordinator.release_apart(block_ids)

    def adopt(self, group_id: int, sequence: TokenSequence, first: int, block_ids: BlockIds) -> bool:
        """Index taken blocks, now filled, as the group's blocks number `first` and on of `sequence`.

        Call it before `begin_step`: the step after that may read them. False, and no change, if the blocks before them
        are gone or others stand in their place, so that these could not be found.
        """
        return self._coordinator.adopt(group_id, sequence, first, block_ids)


def elsewhere(table: BlockIds) -> BlockIds:
    """The numbers of a table's blocks that are not in the pool, ascending."""
    return np.flatnonzero(table == ELSEWHERE).astype(np.int32)


def in_pool(tables: Sequence[BlockIds]) -> BlockIds:
    """The blocks of all these tables that are in the pool."""
    entries = np.concatenate(tables)
    found: BlockIds = entries[(entries != ELSEWHERE) & (entries != NULL_BLOCK)]
    return found
