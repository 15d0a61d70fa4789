"""Queues of free blocks; any block may leave from the middle.

A linked list removes from its middle in O(1) but handles blocks one by one. In these queues a removed block leaves a
stale entry: an entry is alive only while its block's record names it. So taking, adding or removing k blocks of
`FreeKVCacheBlockQueue` is a few numpy calls (`take` and `compress`, which are several times as fast as indexing with
brackets).
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import BlockIds

NOT_QUEUED = -1
WINDOW = 64
"""The least number of entries to examine together: a numpy call costs as much for 64 as for one."""


class FreeKVCacheBlockQueue:
    """Free blocks, with the next one to give away at the head. At first all blocks are in the queue.

        buffer   . . . 7 8 9 4 3 2 . . .        place[8] == head + 1
                       ^head       ^tail        place[5] == NOT_QUEUED

    The buffer has three entries for each block. When the queue reaches one of its ends, it is compacted
    into the middle, with room for every block on both sides: amortised O(1) a block.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._buffer: BlockIds = np.empty(3 * num_blocks, np.int32)
        self._buffer[num_blocks : 2 * num_blocks] = np.arange(num_blocks, dtype=np.int32)
        self._place: npt.NDArray[np.int32] = np.arange(num_blocks, 2 * num_blocks, dtype=np.int32)
        self._head = num_blocks
        self._tail = 2 * num_blocks
        self._num_free = num_blocks

    @classmethod
    def empty(cls, num_blocks: int) -> FreeKVCacheBlockQueue:
        """An empty queue for block ids below `num_blocks`."""
        queue = cls(0)
        queue._buffer, queue._place = np.empty(3 * num_blocks, np.int32), np.full(num_blocks, NOT_QUEUED, np.int32)
        queue._num_blocks = queue._head = queue._tail = num_blocks
        return queue

    def __len__(self) -> int:
        return self._num_free

    def __contains__(self, block_id: int) -> bool:
        return bool(self._place[block_id] != NOT_QUEUED)

    def holds(self, block_ids: BlockIds) -> npt.NDArray[np.bool_]:
        queued: npt.NDArray[np.bool_] = self._place[block_ids] != NOT_QUEUED
        return queued

    def append(self, block_ids: BlockIds) -> None:
        """Put blocks that are not in the queue at its tail, in the order given."""
        count = len(block_ids)
        if self._tail + count > len(self._buffer):
            self._compact()
        self._buffer[self._tail : self._tail + count] = block_ids
        self._place[block_ids] = np.arange(self._tail, self._tail + count, dtype=np.int32)
        self._tail += count
        self._num_free += count

    def appendleft(self, block_ids: BlockIds) -> None:
        """Put blocks that are not in the queue at its head. They are given away next, in the order given."""
        count = len(block_ids)
        if count > self._head:
            self._compact()
        self._head -= count
        self._buffer[self._head : self._head + count] = block_ids
        self._place[block_ids] = np.arange(self._head, self._head + count, dtype=np.int32)
        self._num_free += count

    def remove(self, block_ids: BlockIds) -> None:
        """Remove blocks from any place in the queue."""
        self._place[block_ids] = NOT_QUEUED
        self._num_free -= len(block_ids)

    def popleft(self, count: int) -> BlockIds:
        """Take `count` blocks from the head; the caller has checked `count <= len(self)`."""
        assert count <= self._num_free
        if not count or self._num_free == self._tail - self._head:  # no stale entry
            block_ids = self._buffer[self._head : self._head + count].copy()
            self._head += count
        else:
            block_ids = self._take_alive(count)
        self._place[block_ids] = NOT_QUEUED
        self._num_free -= count
        return block_ids

    def _take_alive(self, count: int) -> BlockIds:
        """Take the next `count` alive blocks, and move the head past the last of them."""
        parts: list[BlockIds] = []
        missing = count
        while missing:
            end = min(self._tail, self._head + max(2 * missing, WINDOW))
            window = self._buffer[self._head : end]
            alive = np.flatnonzero(self._place.take(window) == np.arange(self._head, end, dtype=np.int32))[:missing]
            parts.append(window.take(alive))
            missing -= len(alive)
            self._head = end if missing else self._head + int(alive[-1]) + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def in_order(self) -> BlockIds:
        """All free blocks from head to tail (a copy)."""
        window = self._buffer[self._head : self._tail]
        return window.compress(self._place.take(window) == np.arange(self._head, self._tail, dtype=np.int32))

    def check_integrity(self) -> None:
        queued = self.in_order()
        assert len(queued) == self._num_free, "the free queue miscounts itself"
        assert np.array_equal(np.sort(queued), np.flatnonzero(self._place != NOT_QUEUED)), (
            "a block's place in the free queue is not where the block is"
        )

    def _compact(self) -> None:
        alive = self.in_order()
        self._head, self._tail = self._num_blocks, self._num_blocks + len(alive)
        self._buffer[self._head : self._tail] = alive
        self._place[alive] = np.arange(self._head, self._tail, dtype=np.int32)


class KeyedBlockQueue:
    """Free blocks by key, the lowest first; among equal keys in order of arrival. Empty at first.

    A heap of (key, number, block); arrivals have consecutive numbers, and an entry is stale unless its block's record
    has its number. Amortised O(log n) a block: when stale entries outnumber the blocks, the heap is made anew.
    """

    def __init__(self, num_blocks: int) -> None:
        self._number: npt.NDArray[np.int64] = np.full(num_blocks, NOT_QUEUED, np.int64)
        self._heap: list[tuple[int, int, int]] = []
        self._next_number = 0
        self._num_queued = 0

    def __len__(self) -> int:
        return self._num_queued

    def append(self, block_ids: BlockIds, keys: npt.NDArray[np.int64]) -> None:
        """Put blocks that are not in the queue after the blocks with the same key, in the order given."""
        if len(self._heap) + len(block_ids) > 2 * len(self._number):
            self._heap = self._alive()
            heapq.heapify(self._heap)
        numbers = np.arange(self._next_number, self._next_number + len(block_ids))
        self._number[block_ids] = numbers
        self._next_number += len(block_ids)
        self._num_queued += len(block_ids)
        for entry in zip(keys.tolist(), numbers.tolist(), block_ids.tolist(), strict=True):
            heapq.heappush(self._heap, entry)

    def remove(self, block_ids: BlockIds) -> None:
        self._number[block_ids] = NOT_QUEUED
        self._num_queued -= len(block_ids)

    def popleft(self, count: int) -> BlockIds:
        """Take the first `count` blocks; the caller has checked `count <= len(self)`."""
        assert count <= self._num_queued
        taken: list[int] = []
        while len(taken) < count:
            _, number, block_id = heapq.heappop(self._heap)
            if self._number[block_id] == number:
                taken.append(block_id)
        block_ids = np.array(taken, np.int32)
        self.remove(block_ids)
        return block_ids

    def in_order(self) -> BlockIds:
        return np.array([block_id for _, _, block_id in sorted(self._alive())], np.int32)

    def check_integrity(self) -> None:
        queued = self.in_order()
        assert len(queued) == self._num_queued, "the keyed queue miscounts itself"
        assert np.array_equal(np.sort(queued), np.flatnonzero(self._number != NOT_QUEUED)), (
            "a block's entry in the keyed queue is not where the block is"
        )
        assert len(self._heap) <= 2 * len(self._number), "stale entries are not dropped"

    def _alive(self) -> list[tuple[int, int, int]]:
        return [entry for entry in self._heap if self._number[entry[2]] == entry[1]]
