"""The blocks of the KV memory: who holds them, and which are free.

A policy decides which free block is taken next for new content. An observer knows the contents of blocks, and the pool
calls the observer before a block is overwritten. The observer is a coordinator with an index or, in a pool that is used
alone, the pool's own index of keys.

All state is in numpy arrays indexed by block id, and every operation takes many blocks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foreword.cache.account.sessions import SessionBlocks
from foreword.cache.block_ids import NO_BLOCKS, BlockIds, are_distinct, as_block_ids
from foreword.cache.eviction.free_queue import FreeKVCacheBlockQueue
from foreword.cache.eviction.policies import LruPolicy
from foreword.cache.eviction.policy import EvictionPolicy, KeyedPolicy
from foreword.cache.index.hash_index import BlockHashWithGroupId, GroupedHashIndex, make_block_hash_with_group_id
from foreword.cache.keys.hashing import BlockHash
from foreword.cache.keys.sequence import TokenSequence
from foreword.errors import AllocationError, CacheBusyError, ConfigError


class BlockPool:
    """A fixed number of blocks with a reference count each.

    A block is free exactly when its count is 0. A free block keeps its content, and `touch` can take the block back,
    until `get_new_blocks` gives it to someone else. Just before that, the pool calls `on_reuse` with the ids of the
    blocks. `on_reuse` may return these ids, and the ids of blocks that cannot be found without these blocks; the pool
    reports all returned ids to its policy.

    The policy decides which free block is taken first (default: `lru`), except for tails. Here, blocks of linked text
    are called tails too. Tails are taken after blocks that hold nothing and before all other cached blocks, the least
    recently used tail first. The policy does not know tails: it counts them as held blocks.

    Blocks that were given up (`give_up`) are taken before the tails, until somebody uses them again. The policy counts
    these blocks as held, too.

    Without `on_reuse` the pool has an index of its own, which `cache_full_blocks` fills.
    """

    def __init__(
        self,
        num_blocks: int,
        on_reuse: Callable[[BlockIds], BlockIds | None] | None = None,
        policy: EvictionPolicy | None = None,
        *,
        num_groups: int = 1,
    ) -> None:
        self.num_blocks = num_blocks
        self._index: GroupedHashIndex[BlockHash] | None = None
        if on_reuse is None:
            self._index = GroupedHashIndex[BlockHash](num_blocks, num_groups)
            on_reuse = self._index.remove
        self._on_reuse = on_reuse
        self._ref_counts: npt.NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self._free: EvictionPolicy = policy if policy is not None else LruPolicy(num_blocks)
        self._tails, self._given_up = _EarlyBlocks(num_blocks), _EarlyBlocks(num_blocks)
        """The blocks that were given up; they are taken before the tails."""
        self.users: SessionBlocks | None = None
        """Records which session used each block; None: there is no such record."""
        self._keyed: KeyedPolicy | None = (
            self._free if isinstance(self._free, KeyedPolicy) and self._free.wants_keys else None
        )

    def get_num_free_blocks(self) -> int:
        return len(self._free) + len(self._tails.free) + len(self._given_up.free)

    def get_usage(self) -> float:
        """Share of the blocks held by requests, 0.0 to 1.0."""
        return 1.0 - self.get_num_free_blocks() / self.num_blocks

    @property
    def num_empty(self) -> int:
        """The number of free blocks that hold nothing; `get_new_blocks` gives them first."""
        return self._free.num_empty

    def count_free(self, block_ids: BlockIds) -> int:
        return int(np.count_nonzero(self._ref_counts.take(block_ids) == 0))

    def count_held_once(self, block_ids: BlockIds) -> int:
        """The number of these blocks that have exactly one holder, and so are free after one `free_blocks`."""
        return int(np.count_nonzero(self._ref_counts[block_ids] == 1))

    def get_new_blocks(self, count: int) -> BlockIds:
        """Take `count` blocks, at most `get_num_free_blocks()`, in the policy's order.

        Raises AllocationError, and changes nothing, if fewer blocks are free.
        """
        if count > self.get_num_free_blocks():
            raise AllocationError(
                f"{count} new blocks are more than the {self.get_num_free_blocks()} free ones; free some, or ask "
                "get_num_free_blocks() first"
            )
        goes_early = len(self._tails.free) or len(self._given_up.free)
        block_ids = self._take_early(count) if goes_early else self._free.popleft(count)
        if count:
            forgotten = self._on_reuse(block_ids)
            if forgotten is not None and len(forgotten) > count:  # the policy knows the blocks that it gave away itself
                self.note_forgotten(forgotten)
            self._ref_counts[block_ids] = 1
            if self.users is not None:
                self.users.note_forgotten(block_ids)
        return block_ids

    def next_empty(self, count: int) -> BlockIds:
        """The first blocks that `get_new_blocks` will give, but only blocks that hold nothing; at most `count`."""
        count = min(count, self.num_empty)
        return self.free_block_ids()[:count] if count else NO_BLOCKS

    def _take_early(self, count: int) -> BlockIds:
        """Take `count` blocks while tails or given-up blocks are free; these are taken before other cached blocks."""
        parts = [self._free.popleft(min(count, self._free.num_empty))]
        count -= len(parts[0])
        parts.append(self._given_up.free.popleft(min(count, len(self._given_up.free))))
        self._free.note_forgotten(parts[-1])
        count -= len(parts[-1])
        parts.append(self._tails.free.popleft(min(count, len(self._tails.free))))
        return np.concatenate((*parts, self._free.popleft(count - len(parts[-1]))))

    def give_up(self, block_ids: BlockIds) -> int:
        """Let these (distinct) cached blocks, once they are free, be taken before tails, in this order.

        Blocks that were given up earlier are taken first. Tails stay tails. Returns the number of blocks that this call
        gave up, without tails and blocks that were given up already.
        """
        tails, given_up = self._tails, self._given_up
        block_ids = block_ids.compress(~(tails.free.holds(block_ids) | given_up.free.holds(block_ids)))
        goes_early = tails.held | given_up.held
        block_ids = block_ids.compress([block_id not in goes_early for block_id in block_ids.tolist()])
        is_free = self._ref_counts.take(block_ids) == 0
        self._free.remove(block_ids[is_free])
        given_up.free.append(block_ids[is_free])
        given_up.held.update(block_ids[~is_free].tolist())
        return len(block_ids)

    def take_back(self, block_ids: BlockIds) -> None:
        """Undo `give_up` for these blocks. The policy gets the free ones back, as if they were freed just now."""
        self._free.append(self._given_up.forget(block_ids))

    def touch(self, block_ids: BlockIds) -> None:
        """Add a holder to these (distinct) blocks, which a lookup found. Free blocks leave the free queue."""
        self.hold(block_ids)
        self.note_use(block_ids)

    def note_use(self, block_ids: BlockIds) -> None:
        """Count a use of these held blocks."""
        if self._given_up.held:
            self._given_up.held.difference_update(block_ids.tolist())
        if self._tails.held:
            block_ids = block_ids.compress([block_id not in self._tails.held for block_id in block_ids.tolist()])
        self._free.note_hit(block_ids)

    def hold(self, block_ids: BlockIds) -> None:
        """Add a holder to these (distinct) blocks; the policy does not count this as a use."""
        counts = self._ref_counts.take(block_ids)
        self._free.remove(self._given_up.hold(self._tails.hold(block_ids.compress(counts == 0))))
        self._ref_counts[block_ids] = counts + 1

    def free_blocks(self, block_ids: BlockIds) -> None:
        """Remove one holder of each of these (distinct) blocks. Blocks left without one become free, in the order
        given.
        """
        counts = self._ref_counts.take(block_ids) - 1
        self._ref_counts[block_ids] = counts
        if np.count_nonzero(counts):  # usually the blocks have no other holder
            assert counts.min() >= 0, "a block was freed more often than it was held"
            block_ids = block_ids.compress(counts == 0)
        self._free.append(self._given_up.release(self._tails.release(block_ids)))

    def refresh(self, block_id: int) -> None:
        """If the block is free, count it as used now. A held block does not change."""
        block_ids = np.array([block_id], np.int32)
        if block_id in self._tails.free:
            self._tails.free.remove(block_ids)
            self._tails.free.append(block_ids)
        elif self.count_free(block_ids):
            self.touch(block_ids)
            self.free_blocks(block_ids)

    def note_tail(self, block_id: int) -> None:
        """Record that this held block, once it is free, is taken before other cached blocks.

        The block is indexed as a tail, or holds linked text, which another copy can rebuild.
        """
        self._tails.held.add(block_id)

    def is_tail(self, block_ids: BlockIds) -> npt.NDArray[np.bool_]:
        """Whether each of these blocks is a free tail."""
        return self._tails.free.holds(block_ids)

    def tail_block_ids(self) -> set[int]:
        """All tails, held or free. Free tails are taken before other cached blocks."""
        return self._tails.held.union(self._tails.free.in_order().tolist())

    def keep_as_block(self, block_id: int, depth: int) -> None:
        """Let the policy order this free tail from now on, as block number `depth` of its prefix."""
        block_ids = np.array([block_id], np.int32)
        self._tails.free.remove(block_ids)
        self._free.note_cached(block_ids, np.array([depth], np.int32))
        self._free.append(block_ids)

    def note_cached(self, block_ids: BlockIds, depths: BlockIds) -> None:
        """Record that these held blocks were indexed; block i is number `depths[i]` of its prefix."""
        self._free.note_cached(block_ids, depths)
        if self.users is not None:
            self.users.note_cached(block_ids, depths)

    @property
    def wants_keys(self) -> bool:
        """Whether to call `note_keys`. A key costs a hash per block, and not every policy needs keys."""
        return self._keyed is not None

    def note_keys(self, block_ids: BlockIds, keys: Sequence[BlockHash]) -> None:
        """Give the policy the keys of these blocks, which are the blocks of the last `note_cached`, in that order."""
        if self._keyed is not None:
            self._keyed.note_keys(block_ids, keys)

    def note_forgotten(self, block_ids: BlockIds) -> None:
        """Record that the contents of these (distinct) blocks can no longer be found. Holders keep the blocks."""
        self._free.note_forgotten(block_ids)
        if self.users is not None:
            self.users.note_forgotten(block_ids)
        for early in (self._tails, self._given_up):
            self._free.append(early.forget(block_ids))  # they hold nothing now, so they go first

    # ------------------------------------------------------------- found by key

    def block(self, block_id: int) -> KVCacheBlock:
        return KVCacheBlock(self, block_id)

    def ref_count(self, block_id: int) -> int:
        return int(self._ref_counts[block_id])

    def get_cached_block(self, key: BlockHash, group_ids: Iterable[int] = (0,)) -> list[KVCacheBlock] | None:
        """For each of these groups, the block with this key. None if a group has no such block. Changes nothing."""
        finders = [self._checked_index().finder(group_id) for group_id in group_ids]
        block_ids = [block_id for finder in finders if (block_id := finder(key)) is not None]
        return [self.block(block_id) for block_id in block_ids] if len(block_ids) == len(finders) else None

    def cache_full_blocks(
        self,
        sequence: TokenSequence,
        block_ids: Iterable[int],
        num_cached_blocks: int,
        num_full_blocks: int,
        group_id: int = 0,
    ) -> None:
        """Index a sequence's blocks number `num_cached_blocks` to `num_full_blocks` (exclusive) by their keys.

        `block_ids` is the sequence's whole table. The blocks to index are held, and no block is indexed yet. Their size
        is the sequence's block size. Entries below 0 stand for no block and are skipped.
        """
        keys = sequence.block_hashes()[num_cached_blocks:num_full_blocks]
        entries = list(block_ids)[num_cached_blocks : num_cached_blocks + len(keys)]
        new = [(key, entry, at) for at, (key, entry) in enumerate(zip(keys, entries, strict=True)) if entry >= 0]
        depths = np.array([num_cached_blocks + at for _, _, at in new], np.int32)
        self._cache(group_id, [key for key, _, _ in new], np.array([entry for _, entry, _ in new], np.int32), depths)

    def cache_key(self, block_id: int, key: BlockHash, number: int, group_id: int = 0) -> None:
        """Index a held block by this key, as block number `number` of its prefix."""
        self._cache(group_id, [key], np.array([block_id], np.int32), np.array([number], np.int32))

    def _cache(self, group_id: int, keys: Sequence[BlockHash], block_ids: BlockIds, depths: BlockIds) -> None:
        self._checked_index().insert(group_id, keys, block_ids)
        self.note_cached(block_ids, depths)
        if self.wants_keys:
            self.note_keys(block_ids, [BlockHash(make_block_hash_with_group_id(key, group_id)) for key in keys])

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Forget the contents of these blocks. Holders keep the blocks. Entries below 0 stand for no block."""
        self.note_forgotten(self._checked_index().remove(as_block_ids(block_ids, self.num_blocks)))

    def reset_prefix_cache(self) -> bool:
        """Forget everything, and return True. Raises CacheBusyError while blocks are held."""
        index, num_held = self._checked_index(), self.num_blocks - self.get_num_free_blocks()
        if num_held:
            raise CacheBusyError(f"the prefix cache cannot be reset while {num_held} blocks are held; free them first")
        self.note_forgotten(index.block_ids())
        index.clear()
        return True

    def block_hash(self, block_id: int) -> BlockHashWithGroupId | None:
        """The key and group under which a block is indexed, or None."""
        index = self._checked_index()
        key, group_id = index.key_of(block_id), index.group_of(block_id)
        return None if key is None or group_id is None else make_block_hash_with_group_id(key, group_id)

    def _checked_index(self) -> GroupedHashIndex[BlockHash]:
        if self._index is None:
            raise ConfigError(
                "this pool has no index, because on_reuse was given; leave on_reuse out, or ask its owner's index"
            )
        return self._index

    def ref_counts(self) -> npt.NDArray[np.int32]:
        """A copy of the reference counts of all blocks, [num_blocks]."""
        return self._ref_counts.copy()

    def free_block_ids(self) -> BlockIds:
        """A new array of the free blocks, in the order in which they would be taken for new content."""
        others = self._free.in_order()
        if not len(self._tails.free) and not len(self._given_up.free):
            return others
        num_empty = self._free.num_empty
        return np.concatenate((others[:num_empty], self._early(), others[num_empty:]))

    def _early(self) -> BlockIds:
        """The free cached blocks that are taken before the policy's cached blocks."""
        return np.concatenate((self._given_up.free.in_order(), self._tails.free.in_order()))

    def check_integrity(self, expected_ref_counts: npt.NDArray[np.int32]) -> None:
        """Raise AssertionError unless counts equal `expected_ref_counts` and only blocks with count 0 are free."""
        wrong = np.flatnonzero(self._ref_counts != expected_ref_counts)
        assert wrong.size == 0, (
            f"block {wrong[:5]}: counted {self._ref_counts[wrong[:5]]}, held {expected_ref_counts[wrong[:5]]}"
        )
        self._free.check_integrity()
        for early in (self._tails, self._given_up):
            early.free.check_integrity()
            assert all(self._ref_counts[block_id] for block_id in early.held), "a free block counts as held"
        queued = np.concatenate((self._free.in_order(), self._early()))
        assert len(queued) == self.get_num_free_blocks(), "the free queue miscounts itself"
        assert are_distinct(queued), "a block is queued twice"
        assert np.array_equal(np.sort(queued), np.flatnonzero(self._ref_counts == 0)), (
            "the free queue is not the set of blocks without holder"
        )


class _EarlyBlocks:
    """Blocks of one kind, free and held. The free ones are taken before the policy's cached blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.free = FreeKVCacheBlockQueue.empty(num_blocks)
        self.held: set[int] = set()

    def hold(self, block_ids: BlockIds) -> BlockIds:
        """Record that these free blocks are held now. Returns the blocks that are not of this kind."""
        if not len(self.free):
            return block_ids
        ours = self.free.holds(block_ids)
        self.free.remove(block_ids[ours])
        self.held.update(block_ids[ours].tolist())
        return block_ids[~ours]

    def release(self, block_ids: BlockIds) -> BlockIds:
        """Record that these held blocks are free now, in this order. Returns the blocks that are not of this kind."""
        if not self.held:
            return block_ids
        ours = np.array([block_id in self.held for block_id in block_ids.tolist()], np.bool_)
        self.held.difference_update(block_ids[ours].tolist())
        self.free.append(block_ids[ours])
        return block_ids[~ours]

    def forget(self, block_ids: BlockIds) -> BlockIds:
        """Remove these blocks from this kind; returns the removed blocks that are free."""
        if self.held:
            self.held.difference_update(block_ids.tolist())
        if not len(self.free):
            return NO_BLOCKS
        freed = block_ids.compress(self.free.holds(block_ids))
        self.free.remove(freed)
        return freed


@dataclass(frozen=True, slots=True)
class KVCacheBlock:
    """One block as an object, for engines that use such objects. Two objects of one block are equal.

    The object has no state of its own: its properties read the pool.
    """

    pool: BlockPool
    block_id: int

    @property
    def ref_cnt(self) -> int:
        """The number of holders; a block with 0 holders is free, and can still be found."""
        return 0 if self.is_null else self.pool.ref_count(self.block_id)

    @property
    def block_hash(self) -> BlockHashWithGroupId | None:
        """The key under which the block is indexed; None if it is not indexed."""
        return None if self.is_null else self.pool.block_hash(self.block_id)

    @property
    def is_null(self) -> bool:
        """Whether the object stands for no block: a table entry that the group does not need."""
        return self.block_id < 0


@dataclass(frozen=True, slots=True)
class KVCacheBlocks:
    """A request's blocks by group of layers, as objects with vLLM's interface (`KVCacheManager.get_blocks`)."""

    blocks: tuple[Sequence[KVCacheBlock], ...]

    def __add__(self, other: KVCacheBlocks) -> KVCacheBlocks:
        return KVCacheBlocks(tuple([*ours, *more] for ours, more in zip(self.blocks, other.blocks, strict=True)))

    def get_block_ids(self) -> tuple[list[int], ...]:
        """The blocks' ids, by group; -1 (NULL_BLOCK) where the group needs no block."""
        return tuple([block.block_id for block in group] for group in self.blocks)
