"""The blocks of the KV memory: who holds them, and which are free.

Knows block ids and counts; knows neither what is stored in a block nor which prefix it belongs to (an
observer is told when a block's content is about to be overwritten), and leaves to a policy which free
block goes next.

All state is in numpy arrays indexed by block id, and every operation takes many blocks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from foreword.cache.eviction import EvictionPolicy, LruPolicy
from foreword.cache.free_queue import BlockIds, FreeKVCacheBlockQueue
from foreword.cache.hashing import BlockHash
from foreword.cache.value import KeyedPolicy

__all__ = ["BlockIds", "BlockPool", "FreeKVCacheBlockQueue"]


class BlockPool:
    """A fixed number of blocks with a reference count each.

    A block is free exactly when its count is 0. Free blocks keep their content, and may be taken back
    with `touch`, until `get_new_blocks` gives them to someone else; `on_reuse` is called with the block
    ids just before that. Which go first is up to the policy (default: `lru`).
    """

    def __init__(
        self, num_blocks: int, on_reuse: Callable[[BlockIds], None], policy: EvictionPolicy | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self._on_reuse = on_reuse
        self._ref_counts: npt.NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self._free: EvictionPolicy = policy if policy is not None else LruPolicy(num_blocks)
        self._keyed: KeyedPolicy | None = (
            self._free if isinstance(self._free, KeyedPolicy) and self._free.wants_keys else None
        )

    def get_num_free_blocks(self) -> int:
        return len(self._free)

    def get_usage(self) -> float:
        """Share of the blocks held by requests, 0.0 to 1.0."""
        return 1.0 - len(self._free) / self.num_blocks

    def count_free(self, block_ids: BlockIds) -> int:
        """How many of these blocks are free (touching them would leave so many fewer)."""
        return int(np.count_nonzero(self._ref_counts.take(block_ids) == 0))

    def count_held_once(self, block_ids: BlockIds) -> int:
        """How many of these blocks would join the free queue if they were freed."""
        return int(np.count_nonzero(self._ref_counts[block_ids] == 1))

    def get_new_blocks(self, count: int) -> BlockIds:
        """Take `count` blocks (at most `get_num_free_blocks()`), those first that the policy gives away first."""
        block_ids = self._free.popleft(count)
        if count:
            self._on_reuse(block_ids)
            self._ref_counts[block_ids] = 1
        return block_ids

    def touch(self, block_ids: BlockIds) -> None:
        """Hold these (distinct) blocks, which a lookup found, once more; free ones are free no longer."""
        counts = self._ref_counts.take(block_ids)
        self._free.remove(block_ids.compress(counts == 0))
        self._ref_counts[block_ids] = counts + 1
        self._free.note_hit(block_ids)

    def free_blocks(self, block_ids: BlockIds) -> None:
        """Hold these (distinct) blocks once less; those at 0 are free, and count as freed in the order given."""
        counts = self._ref_counts.take(block_ids) - 1
        self._ref_counts[block_ids] = counts
        if np.count_nonzero(counts):  # most often nobody else holds any
            assert counts.min() >= 0, "a block was freed more often than it was held"
            block_ids = block_ids.compress(counts == 0)
        self._free.append(block_ids)

    def note_cached(self, block_ids: BlockIds, depths: BlockIds) -> None:
        """These held blocks can be found from now on, as blocks number `depths` of their prefixes."""
        self._free.note_cached(block_ids, depths)

    @property
    def wants_keys(self) -> bool:
        """Whether `note_keys` is of use: keys cost a hash per block."""
        return self._keyed is not None

    def note_keys(self, block_ids: BlockIds, keys: Sequence[BlockHash]) -> None:
        """The keys of the blocks that `note_cached` was told of a moment ago, in the same order."""
        if self._keyed is not None:
            self._keyed.note_keys(block_ids, keys)

    def note_forgotten(self, block_ids: BlockIds) -> None:
        """What these (distinct) blocks hold cannot be found any more; who holds them keeps them."""
        self._free.note_forgotten(block_ids)

    def ref_counts(self) -> npt.NDArray[np.int32]:
        """Reference count of every block, [num_blocks] (a copy)."""
        return self._ref_counts.copy()

    def free_block_ids(self) -> BlockIds:
        """Free blocks in the order in which they would be given away (a copy)."""
        return self._free.in_order()

    def check_integrity(self, expected_ref_counts: npt.NDArray[np.int32]) -> None:
        """Raise AssertionError unless counts equal `expected_ref_counts` and the free blocks are their zeros."""
        wrong = np.flatnonzero(self._ref_counts != expected_ref_counts)
        assert wrong.size == 0, (
            f"block {wrong[:5]}: counted {self._ref_counts[wrong[:5]]}, held {expected_ref_counts[wrong[:5]]}"
        )
        self._free.check_integrity()
        queued = self._free.in_order()
        assert len(queued) == len(self._free), "the free queue miscounts itself"
        assert len(np.unique(queued)) == len(queued), "a block is queued twice"
        assert np.array_equal(np.sort(queued), np.flatnonzero(self._ref_counts == 0)), (
            "the free queue is not the set of blocks without holder"
        )
