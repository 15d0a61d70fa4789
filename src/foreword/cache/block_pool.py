"""The blocks of the KV memory: who holds them, which are free, in which order they are given away.

Knows block ids and counts; knows neither what is stored in a block nor which prefix it belongs to (an
observer is told when a block's content is about to be overwritten).

All state is in numpy arrays indexed by block id, and every operation takes many blocks at once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int32]
NOT_QUEUED = -1


class FreeKVCacheBlockQueue:
    """Free blocks, the next one to be given away at the head.

    A linked list removes from its middle in O(1) but takes blocks one by one. This queue is a buffer
    in which a removed block leaves a stale entry behind: an entry is alive only while its block's
    recorded place says so. Taking, adding and removing k blocks are each a few numpy calls.

        buffer   . . . 7 8 9 4 3 2 . . .        place[8] == head + 1
                       ^head       ^tail        place[5] == NOT_QUEUED

    The buffer holds twice as many entries as there are blocks and is compacted when the tail reaches
    its end, which then frees at least half of it: amortised O(1) a block.
    """

    def __init__(self, num_blocks: int) -> None:
        self._buffer: BlockIds = np.empty(2 * num_blocks, np.int32)
        self._buffer[:num_blocks] = np.arange(num_blocks, dtype=np.int32)
        self._place: npt.NDArray[np.int64] = np.arange(num_blocks, dtype=np.int64)
        self._head = 0
        self._tail = num_blocks
        self._num_free = num_blocks

    def __len__(self) -> int:
        return self._num_free

    def __contains__(self, block_id: int) -> bool:
        return bool(self._place[block_id] != NOT_QUEUED)

    def append(self, block_ids: BlockIds) -> None:
        """Put blocks that are not in the queue at its tail, in the order given."""
        count = len(block_ids)
        if self._tail + count > len(self._buffer):
            self._compact()
        self._buffer[self._tail : self._tail + count] = block_ids
        self._place[block_ids] = np.arange(self._tail, self._tail + count)
        self._tail += count
        self._num_free += count

    def remove(self, block_ids: BlockIds) -> None:
        """Take blocks that are in the queue out of it, wherever they are."""
        self._place[block_ids] = NOT_QUEUED
        self._num_free -= len(block_ids)

    def popleft(self, count: int) -> BlockIds:
        """Take `count` blocks from the head; the caller has checked `count <= len(self)`."""
        assert count <= self._num_free
        taken: list[BlockIds] = []
        missing = count
        while missing:
            end = min(self._tail, self._head + max(2 * missing, 64))
            window = self._buffer[self._head : end]
            alive = np.flatnonzero(self._place[window] == np.arange(self._head, end))[:missing]
            taken.append(window[alive])
            missing -= len(alive)
            self._head = end if missing else self._head + int(alive[-1]) + 1
        block_ids = np.concatenate(taken) if taken else np.empty(0, np.int32)
        self._place[block_ids] = NOT_QUEUED
        self._num_free -= count
        return block_ids

    def in_order(self) -> BlockIds:
        """All free blocks from head to tail (a copy)."""
        window = self._buffer[self._head : self._tail]
        alive: BlockIds = window[self._place[window] == np.arange(self._head, self._tail)]
        return alive

    def _compact(self) -> None:
        alive = self.in_order()
        self._head, self._tail = 0, len(alive)
        self._buffer[: self._tail] = alive
        self._place[alive] = np.arange(self._tail)


class BlockPool:
    """A fixed number of blocks with a reference count each.

    A block is in the free queue exactly when its count is 0. Free blocks keep their content, and may
    be taken back with `touch`, until `get_new_blocks` gives them to someone else; `on_reuse` is called
    with the block ids just before that.
    """

    def __init__(self, num_blocks: int, on_reuse: Callable[[BlockIds], None]) -> None:
        self.num_blocks = num_blocks
        self._on_reuse = on_reuse
        self._ref_counts: npt.NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self._free = FreeKVCacheBlockQueue(num_blocks)

    def get_num_free_blocks(self) -> int:
        return len(self._free)

    def get_usage(self) -> float:
        """Share of the blocks held by requests, 0.0 to 1.0."""
        return 1.0 - len(self._free) / self.num_blocks

    def count_free(self, block_ids: BlockIds) -> int:
        """How many of these blocks are in the free queue (touching them would shorten it)."""
        return int(np.count_nonzero(self._ref_counts[block_ids] == 0))

    def count_held_once(self, block_ids: BlockIds) -> int:
        """How many of these blocks would join the free queue if they were freed."""
        return int(np.count_nonzero(self._ref_counts[block_ids] == 1))

    def get_new_blocks(self, count: int) -> BlockIds:
        """Take `count` blocks (at most `get_num_free_blocks()`) from the head of the free queue."""
        block_ids = self._free.popleft(count)
        if count:
            self._on_reuse(block_ids)
            self._ref_counts[block_ids] = 1
        return block_ids

    def touch(self, block_ids: BlockIds) -> None:
        """Hold these (distinct) blocks once more; free ones leave the queue."""
        counts = self._ref_counts[block_ids]
        self._free.remove(block_ids[counts == 0])
        self._ref_counts[block_ids] = counts + 1

    def free_blocks(self, block_ids: BlockIds) -> None:
        """Hold these (distinct) blocks once less; those at 0 join the queue's tail in the order given."""
        counts = self._ref_counts[block_ids] - 1
        assert counts.size == 0 or counts.min() >= 0, "a block was freed more often than it was held"
        self._ref_counts[block_ids] = counts
        self._free.append(block_ids[counts == 0])

    def ref_counts(self) -> npt.NDArray[np.int32]:
        """Reference count of every block, [num_blocks] (a copy)."""
        return self._ref_counts.copy()

    def free_block_ids(self) -> BlockIds:
        """The free queue from head to tail (a copy)."""
        return self._free.in_order()

    def check_integrity(self, expected_ref_counts: npt.NDArray[np.int32]) -> None:
        """Raise AssertionError unless counts equal `expected_ref_counts` and the queue is their zeros."""
        wrong = np.flatnonzero(self._ref_counts != expected_ref_counts)
        assert wrong.size == 0, (
            f"block {wrong[:5]}: counted {self._ref_counts[wrong[:5]]}, held {expected_ref_counts[wrong[:5]]}"
        )
        queued = self._free.in_order()
        assert len(queued) == len(self._free), "the free queue miscounts itself"
        assert len(np.unique(queued)) == len(queued), "a block is queued twice"
        assert np.array_equal(np.sort(queued), np.flatnonzero(self._ref_counts == 0)), (
            "the free queue is not the set of blocks without holder"
        )
