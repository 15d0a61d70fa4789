"""Queues of free blocks. A block can be removed from the middle, too.

A linked list removes from its middle in O(1) but handles blocks one by one. Each of these queues is a buffer of
entries. A block that is removed leaves a stale entry behind: an entry is alive only while the record of its block
points to it. So taking, adding or removing k blocks is a few numpy calls (`take` and `compress`, which are several
times as fast as indexing with brackets).
"""

from __future__ import annotations

import heapq

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import NO_BLOCKS, BlockIds

NOT_QUEUED = -1
WINDOW = 64
"""The least number of entries to examine together: a numpy call costs as much for 64 as for one."""


class FreeKVCacheBlockQueue:
    """Free blocks; the block that is taken next is at the head. At first all blocks are in the queue.

        buffer   . . . 7 8 9 4 3 2 . . .        place[8] == head + 1
                       ^head       ^tail        place[5] == NOT_QUEUED

    The buffer has three entries for each block. When the queue reaches an end of the buffer, the queue is compacted
    into the middle, with room for every block on both sides. The cost is amortised O(1) a block.
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
        """Put blocks that are not in the queue at its head. They are taken next, in the order given."""
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
        """A new array of all free blocks, from head to tail."""
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


class _Lane:
    """The entries of one key, in order of arrival. Some entries are stale."""

    __slots__ = ("block_ids", "entries", "head", "tail")

    def __init__(self) -> None:
        self.block_ids: BlockIds = np.empty(16, np.int32)
        self.entries: npt.NDArray[np.int64] = np.empty(16, np.int64)
        self.head = self.tail = 0

    def extend(self, block_ids: BlockIds, entries: npt.NDArray[np.int64]) -> None:
        end = self.tail + len(block_ids)
        if end > len(self.block_ids):
            self.replace(
                np.concatenate((self.block_ids[self.head : self.tail], block_ids)),
                np.concatenate((self.entries[self.head : self.tail], entries)),
            )
            return
        self.block_ids[self.tail : end] = block_ids
        self.entries[self.tail : end] = entries
        self.tail = end

    def replace(self, block_ids: BlockIds, entries: npt.NDArray[np.int64]) -> None:
        """Store only these entries, with space for as many new ones."""
        count = len(block_ids)
        self.block_ids, self.entries = np.empty(2 * count, np.int32), np.empty(2 * count, np.int64)
        self.block_ids[:count], self.entries[:count] = block_ids, entries
        self.head, self.tail = 0, count


class KeyedBlockQueue:
    """Free blocks in the order of their keys, the lowest key first. The queue is empty at first.

    Every key has a lane, with the blocks of this key in order of arrival, and a heap finds the lane of the lowest key.
    A block that moves or is removed leaves a stale entry in its lane. Entries are numbered across all lanes. An entry
    is stale if its number is not the block's latest number, in `entry`:

        key 0   ids 7 4 . .   entries 0 3        entry[4] == 3
        key 5   ids 9 4 . .   entries 1 2        so the 4 in the lane of key 5 is stale

    The cost is amortised O(1) a block, and O(log lanes) for each lane that is opened or emptied. When stale entries
    outnumber the blocks, all lanes are compacted.
    """

    def __init__(self, num_blocks: int) -> None:
        self._entry: npt.NDArray[np.int64] = np.full(num_blocks, NOT_QUEUED, np.int64)
        self._lanes: dict[int, _Lane] = {}
        self._keys: list[int] = []
        self._next_entry = 0
        self._num_entries = 0
        self._num_queued = 0

    def __len__(self) -> int:
        return self._num_queued

    def append(self, block_ids: BlockIds, keys: npt.NDArray[np.int64]) -> None:
        """Put blocks that are not in the queue after the blocks with the same key, in the order given."""
        count = len(block_ids)
        if not count:
            return
        if self._num_entries + count > 2 * len(self._entry):
            self._compact()
        entries = np.arange(self._next_entry, self._next_entry + count)
        self._entry[block_ids] = entries
        self._next_entry += count
        self._num_entries += count
        self._num_queued += count
        if count == 1 or (keys == keys[0]).all():
            self._lane(int(keys[0])).extend(block_ids, entries)
            return
        by_key = np.argsort(keys, kind="stable")
        for part in np.split(by_key, np.flatnonzero(np.diff(keys[by_key])) + 1):
            self._lane(int(keys[part[0]])).extend(block_ids[part], entries[part])

    def remove(self, block_ids: BlockIds) -> None:
        self._entry[block_ids] = NOT_QUEUED
        self._num_queued -= len(block_ids)

    def popleft(self, count: int) -> BlockIds:
        """Take the first `count` blocks; the caller has checked `count <= len(self)`."""
        assert count <= self._num_queued
        parts: list[BlockIds] = [NO_BLOCKS]
        missing = count
        while missing:
            lane = self._lanes[self._keys[0]]
            end = min(lane.tail, lane.head + max(2 * missing, WINDOW))
            window = lane.block_ids[lane.head : end]
            alive = np.flatnonzero(self._entry.take(window) == lane.entries[lane.head : end])[:missing]
            parts.append(window.take(alive))
            missing -= len(alive)
            passed = end - lane.head if missing else int(alive[-1]) + 1
            lane.head += passed
            self._num_entries -= passed
            if lane.head == lane.tail:
                del self._lanes[heapq.heappop(self._keys)]
        block_ids = np.concatenate(parts)
        self._entry[block_ids] = NOT_QUEUED
        self._num_queued -= count
        return block_ids

    def in_order(self) -> BlockIds:
        """A new array of all free blocks, in the order in which `popleft` takes them."""
        return np.concatenate([NO_BLOCKS, *(self._alive(self._lanes[key])[0] for key in sorted(self._lanes))])

    def check_integrity(self) -> None:
        queued = self.in_order()
        assert len(queued) == self._num_queued, "the keyed queue miscounts itself"
        assert np.array_equal(np.sort(queued), np.flatnonzero(self._entry != NOT_QUEUED)), (
            "a block's entry in the keyed queue is not where the block is"
        )
        assert sorted(self._keys) == sorted(self._lanes), "a lane is not in the heap of keys"
        assert self._num_entries == sum(lane.tail - lane.head for lane in self._lanes.values()), (
            "the keyed queue miscounts its entries"
        )

    def _lane(self, key: int) -> _Lane:
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = _Lane()
            heapq.heappush(self._keys, key)
        return lane

    def _alive(self, lane: _Lane) -> tuple[BlockIds, npt.NDArray[np.int64]]:
        block_ids, entries = lane.block_ids[lane.head : lane.tail], lane.entries[lane.head : lane.tail]
        alive = self._entry.take(block_ids) == entries
        return block_ids.compress(alive), entries.compress(alive)

    def _compact(self) -> None:
        for key, lane in list(self._lanes.items()):
            block_ids, entries = self._alive(lane)
            if len(block_ids):
                lane.replace(block_ids, entries)
            else:
                del self._lanes[key]
        self._keys = sorted(self._lanes)
        self._num_entries = self._num_queued
