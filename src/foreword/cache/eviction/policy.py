"""The protocol of eviction policies: a pool calls a policy, and the policy orders the pool's free blocks.

Giving away a free block that holds nothing costs nothing, so every policy gives those away first. The last freed one
goes first, because its memory is most likely still in a processor's cache. All policies take many blocks per call.

A good order takes the tail of a prefix before its head: a head without its tail is still a hit, but a tail without its
head can never be found. Requests free their last block first, so the order of freeing, which breaks ties, does this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from foreword.cache.block_ids import BlockIds
from foreword.cache.keys.hashing import BlockHash


class EvictionPolicy(Protocol):
    """The free blocks of a pool, in the order in which they are given away.

    The pool reports changes of a block's content through the three `note_` calls. At first all blocks are free and hold
    nothing. The ids in one call are distinct.
    """

    def __len__(self) -> int:
        """The number of free blocks."""

    @property
    def num_empty(self) -> int:
        """The number of free blocks that hold nothing; they are given away first."""

    def __contains__(self, block_id: int) -> bool:
        """Whether the block is free."""

    def append(self, block_ids: BlockIds) -> None:
        """Add held blocks that became free, in the order given.

        Those that hold nothing cached will go first, in the order given.
        """

    def remove(self, block_ids: BlockIds) -> None:
        """Remove free blocks that are held from now on; they keep their contents."""

    def popleft(self, count: int) -> BlockIds:
        """Give away the first `count` blocks, at most `len(self)`; after that they are held and hold nothing."""

    def in_order(self) -> BlockIds:
        """All free blocks in the order in which they would be given away (a copy). Changes nothing."""

    def note_cached(self, block_ids: BlockIds, depths: BlockIds) -> None:
        """Note that these held blocks, which held nothing, were cached, as blocks number `depths` of their prefixes.

        Sets the facts about their contents; the order of the free blocks stays.
        """

    def note_hit(self, block_ids: BlockIds) -> None:
        """Note that a lookup found these blocks and that a request holds them now.

        Changes their places when they are freed; the order of the free blocks stays.
        """

    def note_forgotten(self, block_ids: BlockIds) -> None:
        """Note that the contents of these blocks, free or held, can no longer be found. A second call changes nothing.

        Resets the facts about their contents, and moves the free ones to the blocks that hold nothing.
        """

    def check_integrity(self) -> None:
        """Raise AssertionError if the policy contradicts itself."""


@runtime_checkable
class KeyedPolicy(Protocol):
    """A policy that recognises blocks after they were evicted, by their keys."""

    @property
    def wants_keys(self) -> bool:
        """Whether to call `note_keys`; a key costs a hash per block."""

    def note_keys(self, block_ids: BlockIds, keys: Sequence[BlockHash]) -> None:
        """The keys of the blocks of the last `note_cached`, in the same order."""


@runtime_checkable
class LearningPolicy(Protocol):
    """A policy that learns from the traffic which blocks return."""

    def chance_of_return(self, num_blocks: int) -> float:
        """The share of blocks that are used again within the policy's memory, of requests that add `num_blocks`."""
