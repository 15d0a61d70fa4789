"""What a pool asks of the policy that orders its free blocks.

Knows what a pool tells its policy; knows neither the policies nor keys, tokens, requests or time.

A free block that holds nothing cached costs nothing to give away, so every policy gives those away first, the last
freed first: its memory is the likeliest to be in a processor's cache. All policies work on many blocks per call.

Whatever the policy, a good order takes the tail of a prefix before its head: a head without its tail is
still a hit, a tail without its head can never be found. Requests free their last block first, so that
ties by the order of freeing do this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from foreword.cache.block_ids import BlockIds
from foreword.cache.keys.hashing import BlockHash


class EvictionPolicy(Protocol):
    """The free blocks of a pool, in the order in which they are given away.

    The pool tells what happens to a block's content through the three `note_` calls; only they and
    `popleft` change the policy's state. All blocks are free and hold nothing at first. The ids
    in one call are distinct.
    """

    def __len__(self) -> int:
        """Number of free blocks."""

    @property
    def num_empty(self) -> int:
        """Number of free blocks that hold nothing; they are given away first."""

    def __contains__(self, block_id: int) -> bool:
        """Whether the block is free."""

    def append(self, block_ids: BlockIds) -> None:
        """These blocks, which were held, are free from now on; they were freed in the order given.

        Those that hold nothing cached go first, in the order given.
        """

    def remove(self, block_ids: BlockIds) -> None:
        """These free blocks are held from now on, and keep what they hold."""

    def popleft(self, count: int) -> BlockIds:
        """Give away the first `count` blocks, at most `len(self)`: they are held and hold nothing."""

    def in_order(self) -> BlockIds:
        """All free blocks in the order in which they would be given away (a copy). Changes nothing."""

    def note_cached(self, block_ids: BlockIds, depths: BlockIds) -> None:
        """These held blocks, which held nothing cached, do now: block number `depths` of their prefixes.

        Sets what is known of their content; the order of the free blocks stays.
        """

    def note_hit(self, block_ids: BlockIds) -> None:
        """These blocks, held by now, were found by a lookup and taken by a request.

        Changes where they go when they are freed; the order of the free blocks stays.
        """

    def note_forgotten(self, block_ids: BlockIds) -> None:
        """What these blocks, free or held, contain cannot be found any more; twice is once.

        Resets what is known of their content, and moves the free ones to those that hold nothing.
        """

    def check_integrity(self) -> None:
        """Raise AssertionError if the policy contradicts itself."""


@runtime_checkable
class KeyedPolicy(Protocol):
    """A policy that wants to know blocks again after they were evicted."""

    @property
    def wants_keys(self) -> bool:
        """Whether to call `note_keys`: keys cost a hash per block."""

    def note_keys(self, block_ids: BlockIds, keys: Sequence[BlockHash]) -> None:
        """The keys of the blocks of the last `note_cached`, in the same order."""
