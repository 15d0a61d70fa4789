"""Eviction policies for comparison only: no measurement recommends them, so the engine does not have them.

Each class implements `EvictionPolicy`. docs/decisions/0028-safe-value.md has the figures.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from foreword.cache import BlockHash, BlockIds, EvictionPolicy, FreeKVCacheBlockQueue
from foreword.cache.eviction.policies import POLICIES as ENGINE_POLICIES
from foreword.cache.eviction.policies import RankedPolicy
from foreword.cache.eviction.policy import EmptyFirstPolicy
from foreword.errors import ConfigError


class LfuPolicy(RankedPolicy):
    """Evicts the blocks with the fewest hits first, among equals the least recently freed.

    The count of hits starts when the content is cached. A hit on a tail is a hit on its head too, so no block outlives
    the head of its prefix. Content that was once hit often stays long: choose this policy where the popular prefixes
    are the same all day. A call takes O(1) time per block, and O(log hits) per different count.
    """

    def note_hit(self, block_ids: BlockIds) -> None:
        self._rank[block_ids] += 1


class SlruPolicy(EmptyFirstPolicy):
    """Segmented LRU: evicts blocks without a hit first (probation), then the others (protected), in LRU order.

    A flood of prompts that nobody repeats passes through probation and leaves the reused prefixes alone; plain LRU
    would evict these prefixes. At most `PROTECTED_SHARE` of the pool's blocks are free and protected. Beyond that, the
    least recently freed protected blocks go to the end of probation, and need another hit. O(1) a block. After Karedla,
    Love and Wherry, "Caching strategies to improve disk system performance" (1994).
    """

    PROTECTED_SHARE = 0.8

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._probation = FreeKVCacheBlockQueue.empty(num_blocks)
        self._protected = FreeKVCacheBlockQueue.empty(num_blocks)
        self._max_protected = int(self.PROTECTED_SHARE * num_blocks)
        self._is_protected: npt.NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)

    def note_hit(self, block_ids: BlockIds) -> None:
        self._is_protected[block_ids] = self._is_cached[block_ids]

    def _unlearn(self, block_ids: BlockIds) -> None:
        self._is_protected[block_ids] = False

    def _add(self, block_ids: BlockIds) -> None:
        protected = self._is_protected[block_ids]
        self._probation.append(block_ids[~protected])
        self._protected.append(block_ids[protected])
        excess = len(self._protected) - self._max_protected
        if excess > 0:
            demoted = self._protected.popleft(excess)
            self._is_protected[demoted] = False
            self._probation.append(demoted)

    def _discard(self, block_ids: BlockIds) -> None:
        protected = self._is_protected[block_ids]
        self._probation.remove(block_ids[~protected])
        self._protected.remove(block_ids[protected])

    def _take(self, count: int) -> BlockIds:
        unproven = self._probation.popleft(min(count, len(self._probation)))
        return np.concatenate((unproven, self._protected.popleft(count - len(unproven))))

    def _kept(self) -> BlockIds:
        return np.concatenate((self._probation.in_order(), self._protected.in_order()))

    def _check_kept(self) -> None:
        self._probation.check_integrity()
        self._protected.check_integrity()
        assert not self._is_protected[self._probation.in_order()].any(), "a protected block is on probation"
        assert self._is_protected[self._protected.in_order()].all(), "a block is protected without a hit"
        assert len(self._protected) <= self._max_protected, "too many blocks are protected"


class TlruPolicy(RankedPolicy):
    """Evicts the last `SPARE_BLOCKS` blocks of each prompt first, then the others, both in LRU order.

    A conversation's next turn has to compute its new tokens anyway. If it computes a few blocks more, its first token
    still comes in time. So the ends of prompts are evicted, and heads stay. Choose this policy where slow first tokens
    matter more than hits. A request must free its blocks in one call. After "Tail-Optimized Caching for LLM Inference"
    (arXiv 2510.15152); also in SGLang.
    """

    SPARE_BLOCKS = 4

    def _add(self, block_ids: BlockIds) -> None:
        self._rank[block_ids] = 1
        self._rank[block_ids[: self.SPARE_BLOCKS]] = 0
        super()._add(block_ids)


class TinyLfuPolicy(RankedPolicy):
    """Evicts the blocks with the fewest uses first, among equals the least recently freed.

    A key's count outlives the eviction of its block: choose this policy where prompts return after a long time. A count
    is at most 15. All counts are halved after ten uses for each block of the pool, so old uses fade. The counts are
    those of "TinyLFU" (Einziger, Friedman and Manes, 2017) without its sketch, which only saves memory.
    """

    MOST = 15
    wants_keys = True

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._key_of: dict[int, BlockHash] = {}
        self._uses: Counter[BlockHash] = Counter()
        self._num_uses = 0

    def note_keys(self, block_ids: BlockIds, keys: Sequence[BlockHash]) -> None:
        self._key_of.update(zip(block_ids.tolist(), keys, strict=True))
        self._use(block_ids)

    def note_hit(self, block_ids: BlockIds) -> None:
        self._rank[block_ids] += 1  # for a caller that does not report keys
        self._use(block_ids)

    def _use(self, block_ids: BlockIds) -> None:
        for block_id in block_ids.tolist():
            if (key := self._key_of.get(block_id)) is not None:
                self._uses[key] = self._rank[block_id] = min(self._uses[key] + 1, self.MOST)
                self._num_uses += 1
        if self._num_uses >= 10 * len(self._rank):
            self._num_uses = 0
            self._uses = Counter({key: uses // 2 for key, uses in self._uses.items() if uses > 1})
            self._rank //= 2
            queued = self._queue.in_order()
            self._queue.remove(queued)
            self._add(queued)

    def _unlearn(self, block_ids: BlockIds) -> None:
        for block_id in block_ids.tolist():
            self._key_of.pop(block_id, None)


class FifoPolicy(EmptyFirstPolicy):
    """Evicts blocks in the order in which they were cached. Among blocks cached in one call, the deepest goes first.

    This order ignores use: compare other policies with it, or choose it where prefixes are popular for a while and then
    never again. A head is cached no later than its tail, so it may be evicted before its tail.

    Blocks that a request holds are in `_queue` too. If such a block comes to the front of the queue, it is overdue:
    once it is free, it is evicted before all queued blocks. O(1) a block, O(log n) for an overdue block.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._queue = FreeKVCacheBlockQueue.empty(num_blocks)
        self._cached_at: npt.NDArray[np.int64] = np.full(num_blocks, -1, np.int64)
        self._num_cached = 0
        self._overdue: list[tuple[int, int]] = []
        """Heap of (cached at, block id). An entry is valid while the block is free and still holds that content."""
        self._in_heap: npt.NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)

    def _learn(self, block_ids: BlockIds, depths: BlockIds) -> None:
        block_ids = block_ids[np.argsort(-depths, kind="stable")]
        self._cached_at[block_ids] = np.arange(self._num_cached, self._num_cached + len(block_ids))
        self._num_cached += len(block_ids)
        self._queue.append(block_ids)

    def _unlearn(self, block_ids: BlockIds) -> None:
        self._queue.remove(block_ids[self._queue.holds(block_ids)])
        self._cached_at[block_ids] = -1
        self._in_heap[block_ids] = False

    def _add(self, block_ids: BlockIds) -> None:
        for block_id in block_ids[~(self._queue.holds(block_ids) | self._in_heap[block_ids])].tolist():
            heapq.heappush(self._overdue, (int(self._cached_at[block_id]), block_id))
            self._in_heap[block_id] = True
        if len(self._overdue) > 2 * len(self._in_heap):
            self._overdue = [entry for entry in self._overdue if self._cached_at[entry[1]] == entry[0]]
            heapq.heapify(self._overdue)

    def _discard(self, block_ids: BlockIds) -> None:
        pass  # `_is_free` records it, and a block that is freed again has kept its place

    def _take(self, count: int) -> BlockIds:
        overdue: list[int] = []
        while self._overdue and len(overdue) < count:
            cached_at, block_id = heapq.heappop(self._overdue)
            if self._cached_at[block_id] == cached_at:
                self._in_heap[block_id] = False
                if self._is_free[block_id]:
                    overdue.append(block_id)
        block_ids: list[BlockIds] = [np.array(overdue, np.int32)]
        missing = count - len(overdue)
        while missing:
            front = self._queue.popleft(missing)
            block_ids.append(front[self._is_free[front]])
            missing -= len(block_ids[-1])
        return np.concatenate(block_ids)

    def _kept(self) -> BlockIds:
        block_ids = np.flatnonzero(self._is_free & self._is_cached).astype(np.int32)
        return block_ids[np.argsort(self._cached_at[block_ids])]

    def _check_kept(self) -> None:
        self._queue.check_integrity()
        queued = self._queue.in_order()
        assert self._is_cached[queued].all(), "a block that holds nothing is queued as cached"
        assert (np.diff(self._cached_at[queued]) > 0).all(), "a block cached later goes first"
        alive = [block_id for cached_at, block_id in self._overdue if self._cached_at[block_id] == cached_at]
        assert len(set(alive)) == len(alive), "a block is overdue twice"
        assert sorted(alive) == np.flatnonzero(self._in_heap).tolist(), "a block is overdue without an entry"
        listed = self._in_heap | self._queue.holds(np.arange(len(self._in_heap), dtype=np.int32))
        assert listed[self._kept()].all(), "a free cached block would never be given away"


class LastAccessedPolicy(RankedPolicy):
    """Evicts the least recently accessed blocks first, among equals the deepest in their prefixes: vLLM v0's evictor.

    A request frees all its blocks in one call, so their last accesses have one time. So a tail is evicted before its
    head even if a caller frees them in another order. A call with k blocks takes O(log k) time per block.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._depths: BlockIds = np.zeros(num_blocks, np.int32)

    def _learn(self, block_ids: BlockIds, depths: BlockIds) -> None:
        self._depths[block_ids] = depths

    def _add(self, block_ids: BlockIds) -> None:
        super()._add(block_ids[np.argsort(-self._depths[block_ids], kind="stable")])


POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = MappingProxyType(
    {
        **ENGINE_POLICIES,
        "lfu": LfuPolicy,
        "slru": SlruPolicy,
        "fifo": FifoPolicy,
        "tlru": TlruPolicy,
        "tinylfu": TinyLfuPolicy,
        "last_accessed": LastAccessedPolicy,
    }
)


def make_policy(name: str, num_blocks: int) -> EvictionPolicy:
    """The policy with this name, for block ids below `num_blocks`. Raises ConfigError for other names."""
    if name not in POLICIES:
        raise ConfigError(f"policy {name!r} is unknown; use one of {', '.join(POLICIES)}")
    return POLICIES[name](num_blocks)
