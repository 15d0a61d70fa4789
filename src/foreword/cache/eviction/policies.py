"""Eviction policies that order blocks by last use, access time or priority, and the names of all policies.

Each class implements `EvictionPolicy`. The policy that learns is in `value.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import BlockIds
from foreword.cache.eviction.free_queue import FreeKVCacheBlockQueue, KeyedBlockQueue
from foreword.cache.eviction.policy import EmptyFirstPolicy, EvictionPolicy
from foreword.cache.eviction.value import ValuePolicy
from foreword.errors import ConfigError


class LruPolicy(FreeKVCacheBlockQueue):
    """First come blocks that hold nothing, the last freed first; then cached blocks, the least recently freed first.

    The order is exactly vLLM's. A hit removes its blocks from the queue. When the request ends, these blocks join the
    queue's tail, the last block first. So blocks are evicted in the order of their last use, and within a request the
    tail before the head.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._is_cached: npt.NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        self.num_empty = num_blocks
        """The number of free blocks that hold nothing; they are at the queue's head."""

    def append(self, block_ids: BlockIds) -> None:
        cached = self._is_cached.take(block_ids)
        if cached.all():
            super().append(block_ids)
        else:
            empty = block_ids.compress(~cached)
            self.num_empty += len(empty)
            self.appendleft(empty)
            super().append(block_ids.compress(cached))

    def remove(self, block_ids: BlockIds) -> None:
        self.num_empty -= len(block_ids) - int(np.count_nonzero(self._is_cached.take(block_ids)))
        super().remove(block_ids)

    def popleft(self, count: int) -> BlockIds:
        block_ids = super().popleft(count)
        self.num_empty = max(0, self.num_empty - count)
        self._is_cached[block_ids] = False
        return block_ids

    def note_cached(self, block_ids: BlockIds, depths: BlockIds) -> None:
        self._is_cached[block_ids] = True

    def note_hit(self, block_ids: BlockIds) -> None:
        pass

    def note_forgotten(self, block_ids: BlockIds) -> None:
        forgotten = block_ids.compress(self._is_cached.take(block_ids))
        self._is_cached[forgotten] = False
        freed = forgotten.compress(self.holds(forgotten))
        super().remove(freed)
        self.appendleft(freed)
        self.num_empty += len(freed)

    def check_integrity(self) -> None:
        super().check_integrity()
        cached = self._is_cached[self.in_order()]
        assert (np.diff(cached.astype(np.int8)) >= 0).all(), "a cached block goes before one that holds nothing"
        assert self.num_empty == np.count_nonzero(~cached), "the blocks that hold nothing are miscounted"


class RankedPolicy(EmptyFirstPolicy):
    """Evicts the lowest rank first; among equal ranks, the least recently freed block. New content has rank 0."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._queue = KeyedBlockQueue(num_blocks)
        self._rank: npt.NDArray[np.int64] = np.zeros(num_blocks, np.int64)

    def _learn(self, block_ids: BlockIds, depths: BlockIds) -> None:
        self._rank[block_ids] = 0

    def _set_ranks(self, block_ids: BlockIds, ranks: npt.NDArray[np.int64] | int) -> None:
        """Give these cached blocks ranks. Free blocks count as freed just now."""
        self._rank[block_ids] = ranks
        freed = block_ids[self._is_free[block_ids]]
        self._queue.remove(freed)
        self._add(freed)

    def _add(self, block_ids: BlockIds) -> None:
        self._queue.append(block_ids, self._rank[block_ids])

    def _discard(self, block_ids: BlockIds) -> None:
        self._queue.remove(block_ids)

    def _take(self, count: int) -> BlockIds:
        return self._queue.popleft(count)

    def _kept(self) -> BlockIds:
        return self._queue.in_order()

    def _check_kept(self) -> None:
        self._queue.check_integrity()
        assert (np.diff(self._rank[self._kept()]) >= 0).all(), "a block of higher rank goes before one of lower rank"


class AccessTimePolicy(RankedPolicy):
    """Evicts the least recently accessed block first, by the caller's clock; at equal times, the longer prefix first.

    The order is that of vLLM v0's evictor, for blocks that are freed one by one (`block_allocator.py`). The cost is
    O(log k) a block among k free blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._times: npt.NDArray[np.float64] = np.zeros(num_blocks)
        self._depths: npt.NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self._number: npt.NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        """For each block, the number of its last access time. Different times have ascending numbers."""
        self._now, self._num_times = -np.inf, 0

    def note_accessed(self, block_ids: BlockIds, now: float) -> None:
        """Record that these blocks were used at time `now`, which must not decrease from call to call."""
        self._num_times += now > self._now
        self._now = now
        self._times[block_ids], self._number[block_ids] = now, self._num_times
        block_ids = block_ids[self._is_cached[block_ids]]
        self._set_ranks(block_ids, self._ranks(block_ids))

    def last_accessed(self, block_id: int) -> float:
        """The time at which a block was last used; 0.0 before its first use."""
        return float(self._times[block_id])

    def _learn(self, block_ids: BlockIds, depths: BlockIds) -> None:
        self._depths[block_ids] = depths
        self._rank[block_ids] = self._ranks(block_ids)

    def _ranks(self, block_ids: BlockIds) -> npt.NDArray[np.int64]:
        ranks: npt.NDArray[np.int64] = (self._number[block_ids] << 32) - self._depths[block_ids]
        return ranks


class PriorityPolicy(RankedPolicy):
    """Evicts the lowest priority number first; among equal numbers, the least recently freed block.

    `set_priority` gives numbers to blocks. A number lasts as long as the block's content; the default is 0. Choose this
    policy if the caller knows which content is most likely to be used again: for example, a system prompt is more
    likely than a user's document, and the document is more likely than an answer. The cost is O(1) a block, and
    O(log priorities) for each different number in a call.
    """

    def set_priority(self, block_ids: BlockIds, priority: int) -> None:
        """Give these blocks a priority. Free blocks count as freed just now; blocks that hold nothing are ignored."""
        self._set_ranks(block_ids[self._is_cached[block_ids]], priority)


POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = MappingProxyType(
    {
        "lru": LruPolicy,
        "value": ValuePolicy,
        "priority": PriorityPolicy,
    }
)
"""Policies by name."""


def make_policy(name: str, num_blocks: int) -> EvictionPolicy:
    """The eviction policy with this name, for block ids below `num_blocks`. Raises ConfigError for other names."""
    if name not in POLICIES:
        raise ConfigError(f"eviction_policy={name!r} is unknown; use one of {', '.join(POLICIES)}")
    return POLICIES[name](num_blocks)
