"""Pins: cached blocks that are kept for a time, within a budget.

Knows block ids and the times that its caller gives; has no clock, and knows neither the contents of blocks nor the
order of the other blocks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import BlockIds
from foreword.cache.eviction.free_queue import FreeKVCacheBlockQueue
from foreword.cache.eviction.policy import EvictionPolicy, KeyedPolicy
from foreword.cache.keys.hashing import BlockHash
from foreword.errors import ConfigError

NOT_PINNED = -np.inf


class PinnedPolicy:
    """Free blocks in the order of another policy, then pinned blocks, the least recently freed first.

    A pin is soft: if all other blocks are taken, the pool gives away pinned blocks too, and `num_broken` counts them.
    A pin ends at its time, at `unpin`, or when the block's content is forgotten. At most `max_share` of the pool can be
    pinned, because a fully pinned pool would have no eviction policy.

    The inner policy counts pinned free blocks as held. Costs O(1) a block beyond the inner policy, and O(log pins) for
    each pin that starts or ends.
    """

    def __init__(self, inner: EvictionPolicy, num_blocks: int, *, max_share: float = 0.5) -> None:
        if not 0.0 <= max_share <= 1.0:
            raise ConfigError(f"max_pinned_share={max_share} is not a share of the pool; use 0.0 to 1.0")
        self.inner = inner
        self.max_pinned = int(max_share * num_blocks)
        self.num_pinned = 0
        """The number of pinned blocks, held or free."""
        self.num_broken = 0
        """The number of pinned blocks that were given away because no other block was free."""
        self._until: npt.NDArray[np.float64] = np.full(num_blocks, NOT_PINNED)
        self._is_cached: npt.NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        self._is_free: npt.NDArray[np.bool_] = np.ones(num_blocks, np.bool_)
        self._queue = FreeKVCacheBlockQueue.empty(num_blocks)
        self._ends: list[tuple[float, int, BlockIds]] = []
        """Heap of (until, number of the entry, blocks); a block whose pin was extended has several entries."""
        self._num_entries = 0
        self._num_ends = 0
        """The number of block ids in the heap."""

    # -------------------------------------------------------------------- pins

    def pin(self, block_ids: BlockIds, until: float, now: float) -> BlockIds:
        """Pin these blocks until a time; returns the blocks that are pinned now.

        Give the head of a prefix first: when the budget is used up, the remaining blocks get no pin. Blocks that hold
        nothing cached get no pin. A block's pin is never shortened. Modifies the order of the free blocks.
        """
        self.expire(now)
        block_ids = block_ids[self._is_cached[block_ids]]
        if until <= now:
            return block_ids[self._until[block_ids] > now]
        fresh = self._until[block_ids] == NOT_PINNED
        allowed = ~fresh | (np.cumsum(fresh) <= self.max_pinned - self.num_pinned)
        block_ids, fresh = block_ids[allowed], fresh[allowed]
        if not len(block_ids):
            return block_ids
        self._until[block_ids] = np.maximum(self._until[block_ids], until)
        self._end_later(block_ids, until)
        self.num_pinned += int(np.count_nonzero(fresh))
        freed = block_ids[fresh & self._is_free[block_ids]]
        self.inner.remove(freed)
        self._queue.append(freed)
        return block_ids

    def unpin(self, block_ids: BlockIds) -> None:
        """End the pins of these blocks. The free ones count as freed now."""
        block_ids = block_ids[self._until[block_ids] != NOT_PINNED]
        self._until[block_ids] = NOT_PINNED
        self.num_pinned -= len(block_ids)
        freed = block_ids[self._queue.holds(block_ids)]
        self._queue.remove(freed)
        self.inner.append(freed)

    def expire(self, now: float) -> None:
        """End the pins whose time has come, as `unpin` does. Call it once a step, or before pinning."""
        while self._ends and self._ends[0][0] <= now:
            _, _, block_ids = heapq.heappop(self._ends)
            self._num_ends -= len(block_ids)
            self.unpin(block_ids[self._until[block_ids] <= now])

    def pinned_block_ids(self) -> BlockIds:
        """Blocks with a pin, held or free, in the order of their ids (a copy)."""
        return np.flatnonzero(self._until != NOT_PINNED).astype(np.int32)

    def _end_later(self, block_ids: BlockIds, until: float) -> None:
        """Examine these blocks again at that time."""
        if self._num_ends + len(block_ids) > 2 * len(self._until):
            # Most entries are of pins that were extended since: rebuild the heap, with one entry for each time.
            self._ends, self._num_ends = [], 0
            pinned = self.pinned_block_ids()
            for end in np.unique(self._until[pinned]).tolist():
                self._push(pinned[self._until[pinned] == end], end)
        else:
            self._push(block_ids, until)

    def _push(self, block_ids: BlockIds, until: float) -> None:
        heapq.heappush(self._ends, (until, self._num_entries, block_ids))
        self._num_entries += 1
        self._num_ends += len(block_ids)

    # ---------------------------------------------------- an eviction policy

    def __len__(self) -> int:
        return len(self.inner) + len(self._queue)

    @property
    def num_empty(self) -> int:
        return self.inner.num_empty

    def __contains__(self, block_id: int) -> bool:
        return bool(self._is_free[block_id])

    def append(self, block_ids: BlockIds) -> None:
        self._is_free[block_ids] = True
        if not self.num_pinned:
            self.inner.append(block_ids)
            return
        pinned = self._until[block_ids] != NOT_PINNED
        self.inner.append(block_ids[~pinned])
        self._queue.append(block_ids[pinned])

    def remove(self, block_ids: BlockIds) -> None:
        self._is_free[block_ids] = False
        if not self.num_pinned:
            self.inner.remove(block_ids)
            return
        pinned = self._until[block_ids] != NOT_PINNED
        self.inner.remove(block_ids[~pinned])
        self._queue.remove(block_ids[pinned])

    def popleft(self, count: int) -> BlockIds:
        block_ids = self.inner.popleft(min(count, len(self.inner)))
        missing = count - len(block_ids)
        if missing:
            broken = self._queue.popleft(missing)
            self._until[broken] = NOT_PINNED
            self.num_pinned -= missing
            self.num_broken += missing
            self.inner.note_forgotten(broken)
            block_ids = np.concatenate((block_ids, broken))
        self._is_free[block_ids] = self._is_cached[block_ids] = False
        return block_ids

    def in_order(self) -> BlockIds:
        return np.concatenate((self.inner.in_order(), self._queue.in_order()))

    def note_cached(self, block_ids: BlockIds, depths: BlockIds) -> None:
        self._is_cached[block_ids] = True
        self.inner.note_cached(block_ids, depths)

    @property
    def wants_keys(self) -> bool:
        return isinstance(self.inner, KeyedPolicy) and self.inner.wants_keys

    def note_keys(self, block_ids: BlockIds, keys: Sequence[BlockHash]) -> None:
        assert isinstance(self.inner, KeyedPolicy)
        self.inner.note_keys(block_ids, keys)

    def note_hit(self, block_ids: BlockIds) -> None:
        self.inner.note_hit(block_ids)

    def note_forgotten(self, block_ids: BlockIds) -> None:
        self._is_cached[block_ids] = False
        if self.num_pinned:
            self.unpin(block_ids)
        self.inner.note_forgotten(block_ids)

    def check_integrity(self) -> None:
        self.inner.check_integrity()
        self._queue.check_integrity()
        pinned = self.pinned_block_ids()
        free = np.sort(self.in_order())
        assert np.array_equal(free, np.flatnonzero(self._is_free)), (
            "the ordinary and the pinned are not the free blocks"
        )
        assert len(pinned) == self.num_pinned, "the pins are miscounted"
        assert self.num_pinned <= self.max_pinned, "there are more pins than the budget allows"
        assert self._is_cached[pinned].all(), "a block that holds nothing has a pin"
        assert (self._until[self._queue.in_order()] != NOT_PINNED).all(), "a block without a pin is kept as pinned"
        assert self._num_ends == sum(len(block_ids) for _, _, block_ids in self._ends), "the ends are miscounted"
        ended = {(block_id, until) for until, _, block_ids in self._ends for block_id in block_ids.tolist()}
        assert all((block_id, self._until[block_id]) in ended for block_id in pinned.tolist()), "a pin never ends"
        assert not (self._until[self.inner.in_order()] != NOT_PINNED).any(), "a pinned block goes with the others"
