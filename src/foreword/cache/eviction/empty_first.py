"""EmptyFirstPolicy: the base of policies that order the cached blocks in their own way."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import NO_BLOCKS, BlockIds
from foreword.cache.eviction.free_queue import FreeKVCacheBlockQueue


class EmptyFirstPolicy(ABC):
    """Blocks that hold nothing, the last freed first; then cached ones, in the subclass's order.

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
        """Remove and return the first `count` blocks."""

    @abstractmethod
    def _kept(self) -> BlockIds:
        """The free cached blocks in order."""

    @abstractmethod
    def _check_kept(self) -> None:
        """Raise AssertionError if the subclass's own state contradicts itself."""

    def _learn(self, block_ids: BlockIds, depths: BlockIds) -> None:
        """Note blocks that are cached from now on."""
        return

    def _unlearn(self, block_ids: BlockIds) -> None:
        """Note blocks that are no longer cached; they have left the free cached blocks."""
        return

    def __len__(self) -> int:
        return self._num_free

    @property
    def num_empty(self) -> int:
        return len(self._empty)

    def __contains__(self, block_id: int) -> bool:
        return bool(self._is_free[block_id])

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
        empty, kept = self._empty.in_order(), self._kept()
        assert len(empty) + len(kept) == self._num_free, "the eviction policy miscounts its free blocks"
        assert np.array_equal(np.sort(empty), np.flatnonzero(self._is_free & ~self._is_cached)), (
            "the blocks to go first are not the free blocks that hold nothing"
        )
        assert np.array_equal(np.sort(kept), np.flatnonzero(self._is_free & self._is_cached)), (
            "the blocks to go later are not the free blocks that are cached"
        )

    def _divide(self, block_ids: BlockIds) -> tuple[BlockIds, BlockIds]:
        """The blocks that are cached, and the blocks that hold nothing."""
        cached = self._is_cached.take(block_ids)
        if cached.all():
            return block_ids, NO_BLOCKS
        return block_ids.compress(cached), block_ids.compress(~cached)
