"""Which free block is given away next, losing what it holds.

Knows what a pool tells its policy, and the policies' names; knows neither keys nor tokens, requests or
time. `make_policy` takes the name that a user chose.

A free block that holds nothing cached costs nothing to give away, so every policy gives those first, the last
freed first: its memory is the likeliest to be in a processor's cache. All policies work on many blocks per call.

Whatever the policy, a good order takes the tail of a prefix before its head: a head without its tail is
still a hit, a tail without its head can never be found. Requests free their last block first, so that
ties by the order of freeing do this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from foreword.cache.eviction.free_queue import BlockIds
from foreword.cache.eviction.policies import (
    FifoPolicy,
    LastAccessedPolicy,
    LfuPolicy,
    LruPolicy,
    PriorityPolicy,
    SlruPolicy,
)
from foreword.cache.eviction.safe_value import SafeValuePolicy
from foreword.errors import ConfigError


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


POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = MappingProxyType(
    {
        "lru": LruPolicy,
        "lfu": LfuPolicy,
        "slru": SlruPolicy,
        "fifo": FifoPolicy,
        "last_accessed": LastAccessedPolicy,
        "priority": PriorityPolicy,
        "value": SafeValuePolicy,
    }
)
"""Policies by the name under which a user chooses them."""


def make_policy(name: str, num_blocks: int) -> EvictionPolicy:
    """The eviction policy that a user chose by name, for block ids below `num_blocks`."""
    if name not in POLICIES:
        raise ConfigError(f"eviction_policy={name!r} is unknown; use one of {', '.join(POLICIES)}")
    return POLICIES[name](num_blocks)
