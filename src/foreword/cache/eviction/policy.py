"""Eviction policies: the protocol by which a pool calls a policy, and a base class for policies.

Every policy lets free blocks that hold nothing be taken first, because no cached content is lost. Of these blocks, the
one that was freed last is taken first: its memory is most likely still in a processor's cache. A call takes many blocks
at once.

A good order takes the tail of a prefix before its head: a head without its tail is still a hit, but a tail without its
head can never be found. Policies break ties by the order of freeing, and requests free their last block first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import NO_BLOCKS, BlockIds
from foreword.cache.eviction.free_queue import FreeKVCacheBlockQueue
from foreword.cache.keys.hashing import BlockHash


class EvictionPolicy(Protocol):
    """The free blocks of a pool, in the order in which they are taken for new content.

    The pool reports changes of a block's content through the three `note_` calls. At first all blocks are free and hold
    nothing. The ids in one call are distinct.
    """

    def __len__(self) -> int:
        """The number of free blocks."""

    @property
    def num_empty(self) -> int:
        """The number of free blocks that hold nothing; they are taken first."""

    def append(self, block_ids: BlockIds) -> None:
        """Add held blocks that became free, in the order given.

        Of these blocks, those that hold nothing cached are taken first, in the order given.
        """

    def remove(self, block_ids: BlockIds) -> None:
        """Remove free blocks that are held from now on; they keep their contents."""

    def popleft(self, count: int) -> BlockIds:
        """Take the first `count` blocks, at most `len(self)`; after that they are held and have no content."""

    def in_order(self) -> BlockIds:
        """A new array of all free blocks, in the order in which they would be taken. Changes nothing."""

    def note_cached(self, block_ids: BlockIds, depths: BlockIds) -> None:
        """Record that these held blocks, empty until now, were cached; block i is number `depths[i]` of its prefix.

        The policy may begin to store facts about the blocks' contents. The order of the free blocks does not change.
        """

    def note_hit(self, block_ids: BlockIds) -> None:
        """Record that a lookup found these blocks and that a request holds them now.

        Because of the hit, the policy may evict the blocks later than others, once they are free again. The order of
        the blocks that are free now does not change.
        """

    def note_forgotten(self, block_ids: BlockIds) -> None:
        """Record that the contents of these blocks, free or held, can no longer be found.

        The policy deletes its facts about these contents. The free blocks among these blocks now count as blocks that
        hold nothing. A second call changes nothing.
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
        """Record the keys of these blocks, which are the blocks of the last `note_cached`, in that order."""


@runtime_checkable
class LearningPolicy(Protocol):
    """A policy that learns from the traffic which blocks are used again."""

    def chance_of_return(self, num_blocks: int) -> float:
        """The expected share of a request's blocks that will be used again, if the request adds `num_blocks` blocks."""


class EmptyFirstPolicy(ABC):
    """First come blocks that hold nothing, the last freed first; then cached blocks, in the subclass's order.

    The subclass keeps the free cached blocks (`_add`, `_discard`, `_take`, `_kept`), and may record facts about the
    contents of all cached blocks (`_learn`, `note_hit`, `_unlearn`).
    """

    def __init__(self, num_blocks: int) -> None:
        self._empty = FreeKVCacheBlockQueue(num_blocks)
        self._is_free: npt.NDArray[np.bool_] = np.ones(num_blocks, np.bool_)
        self._is_cached: npt.NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        self._num_free = num_blocks

    @abstractmethod
    def _add(self, block_ids: BlockIds) -> None:
        """Add cached blocks that became free, in the order given."""

    @abstractmethod
    def _discard(self, block_ids: BlockIds) -> None:
        """Remove blocks that are no longer free, or no longer cached."""

    @abstractmethod
    def _take(self, count: int) -> BlockIds:
        """Remove and return the first `count` free cached blocks."""

    @abstractmethod
    def _kept(self) -> BlockIds:
        """The free cached blocks in order."""

    @abstractmethod
    def _check_kept(self) -> None:
        """Raise AssertionError if the subclass's own state contradicts itself."""

    def _learn(self, block_ids: BlockIds, depths: BlockIds) -> None:
        """Record facts about blocks that are cached from now on; block i is number `depths[i]` of its prefix."""
        return

    def _unlearn(self, block_ids: BlockIds) -> None:
        """Forget facts about blocks that are no longer cached. `_discard` or `_take` has removed them already."""
        return

    def __len__(self) -> int:
        return self._num_free

    @property
    def num_empty(self) -> int:
        return len(self._empty)

    def append(self, block_ids: BlockIds) -> None:
        cached, empty = self._divide(block_ids)
        self._empty.appendleft(empty)
        self._add(cached)
        self._is_free[block_ids] = True
        self._num_free += len(block_ids)

    def remove(self, block_ids: BlockIds) -> None:
        cached, empty = self._divide(block_ids)
        self._empty.remove(empty)
        self._discard(cached)
        self._is_free[block_ids] = False
        self._num_free -= len(block_ids)

    def popleft(self, count: int) -> BlockIds:
        assert count <= self._num_free
        block_ids = self._empty.popleft(min(count, len(self._empty)))
        missing = count - len(block_ids)
        if missing:
            evicted = self._take(missing)
            self._is_cached[evicted] = False
            self._unlearn(evicted)
            block_ids = np.concatenate((block_ids, evicted))
        self._is_free[block_ids] = False
        self._num_free -= count
        return block_ids

    def in_order(self) -> BlockIds:
        return np.concatenate((self._empty.in_order(), self._kept()))

    def note_cached(self, block_ids: BlockIds, depths: BlockIds) -> None:
        assert not (self._is_cached[block_ids] | self._is_free[block_ids]).any(), "a block was cached twice, or free"
        self._is_cached[block_ids] = True
        self._learn(block_ids, depths)

    def note_hit(self, block_ids: BlockIds) -> None:
        return

    def note_forgotten(self, block_ids: BlockIds) -> None:
        block_ids = block_ids[self._is_cached[block_ids]]
        freed = block_ids[self._is_free[block_ids]]
        self._discard(freed)
        self._is_cached[block_ids] = False
        self._unlearn(block_ids)
        self._empty.appendleft(freed)

    def check_integrity(self) -> None:
        self._empty.check_integrity()
        self._check_kept()
        empty, cached = self._empty.in_order(), self._kept()
        assert len(empty) + len(cached) == self._num_free, "the eviction policy miscounts its free blocks"
        assert np.array_equal(np.sort(empty), np.flatnonzero(self._is_free & ~self._is_cached)), (
            "the blocks to go first are not the free blocks that hold nothing"
        )
        assert np.array_equal(np.sort(cached), np.flatnonzero(self._is_free & self._is_cached)), (
            "the blocks to go later are not the free blocks that are cached"
        )

    def _divide(self, block_ids: BlockIds) -> tuple[BlockIds, BlockIds]:
        """The blocks that are cached, and the blocks that hold nothing."""
        cached = self._is_cached.take(block_ids)
        if cached.all():
            return block_ids, NO_BLOCKS
        return block_ids.compress(cached), block_ids.compress(~cached)
