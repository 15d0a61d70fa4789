"""KVCacheCoordinator: the block tables of all groups, and the hits on which all groups agree.

A coordinator belongs to one KVCacheManager. The base class gives blocks to rows of the tables; each request has a row.
Three subclasses, named as in vLLM v1, decide which blocks are found:

    KVCacheCoordinatorNoPrefixCache   any groups, nothing is found
    UnitaryKVCacheCoordinator         one group that needs all its blocks; any PrefixIndex (unitary.py)
    HybridKVCacheCoordinator          any groups; hash keys only (hybrid.py)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence, Set

import numpy as np

from foreword.cache.account.ledger import CacheLedger, Eviction, EvictionCause, MissReason
from foreword.cache.account.stats import PrefixCacheStats
from foreword.cache.block_ids import NO_BLOCKS, BlockIds, Int64Array, are_distinct, without_null
from foreword.cache.blocks.block_pool import BlockPool
from foreword.cache.blocks.block_table import MultiGroupBlockTable
from foreword.cache.eviction.policy import EvictionPolicy
from foreword.cache.groups.managers import GroupSpec, make_group_manager
from foreword.cache.index.hash_index import GroupedHashIndex
from foreword.cache.index.prefix_index import PartialBlock, PrefixHit, PrefixIndex
from foreword.cache.keys.hashing import BlockHash
from foreword.cache.keys.sequence import TokenSequence

SequenceOfRow = Callable[[int], TokenSequence]
Keys = Sequence[BlockHash]


class KVCacheCoordinator(ABC):
    """The block tables of all groups, which share one pool. Subclasses index blocks by content and look them up."""

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        num_blocks: int,
        policy: EvictionPolicy,
        index: PrefixIndex | GroupedHashIndex[BlockHash],
        ledger: CacheLedger | None = None,
    ) -> None:
        self.specs = tuple(groups)
        self.block_sizes = tuple(spec.block_size for spec in groups)
        self.alignment = math.lcm(*self.block_sizes)
        """Hits are multiples of this number of tokens, unless the index finds parts of blocks."""
        self.pool = BlockPool(num_blocks, on_reuse=self._forget_reused, policy=policy)
        self.stats = PrefixCacheStats()
        """Counts since the last `clear`. Evictions are counted here, lookups by the manager."""
        self.index = index
        """The blocks that can be found."""
        self._ledger = ledger
        self._filling: set[int] = set()
        """The blocks that this step fills."""
        self.tables = MultiGroupBlockTable(len(groups))
        self.managers = tuple(
            make_group_manager(spec, tables, self.alignment)
            for spec, tables in zip(groups, self.tables.groups, strict=True)
        )
        self._only_appends = all(manager.only_appends for manager in self.managers)
        self._releases = any(manager.releases_blocks for manager in self.managers)
        self.has_quiet_steps = self._only_appends and not self._releases
        """Whether tables and index stay the same while a row grows within a block."""
        self.nothing = PrefixHit((NO_BLOCKS,) * len(groups), None, 0, 0)
        for manager in self.managers:
            manager.reserve(self.pool)

    # ------------------------------------------------------------------ lookup

    def num_indexed_by_group(self) -> list[int]:
        """For each group, the number of its blocks that can be found, including duplicates."""
        return [len(self.index)] * len(self.managers)

    @abstractmethod
    def find_longest_cache_hit(self, sequence: TokenSequence) -> PrefixHit:
        """The longest beginning of `sequence` that every group holds. Changes nothing."""

    def find_hit_of_next_step(self, sequence: TokenSequence) -> PrefixHit:
        """`find_longest_cache_hit`, as if the blocks that this step fills had been computed."""
        return self.find_longest_cache_hit(sequence)

    def holds(self, sequence: TokenSequence, block: int) -> bool:
        """Whether the sequence's full block number `block` is cached, given that all blocks before it are cached."""
        return False

    # --------------------- blocks that come from elsewhere, or go there; see the methods of KVCacheManager

    def keys_by_group(self, sequence: TokenSequence) -> list[Keys]:
        return [[] for _ in self.managers]

    def find_hit_with(self, sequence: TokenSequence, elsewhere: Sequence[Set[BlockHash]]) -> tuple[BlockIds, ...]:
        return self.nothing.tables

    def cached_blocks(self, sequence: TokenSequence) -> list[BlockIds]:
        return list(self.nothing.tables)

    def adopt(self, group_id: int, sequence: TokenSequence, first: int, block_ids: BlockIds) -> bool:
        return False

    # ------------------------------------------------------------------- rows' blocks in the index

    @abstractmethod
    def cache_blocks(self, row: int, sequence: TokenSequence, num_tokens: int) -> None:
        """Index the blocks that the first `num_tokens` tokens fill and that are not indexed yet."""

    def cache_blocks_each(self, rows: Int64Array, sequence_of: SequenceOfRow, ends: Int64Array) -> None:
        """`cache_blocks` for many rows, in their order."""
        for row, end in zip(rows.tolist(), ends.tolist(), strict=True):
            self.cache_blocks(row, sequence_of(row), end)

    def forget_from(self, row: int, num_tokens: int) -> None:
        """Forget the row's indexed blocks that hold positions from `num_tokens` on."""
        for manager in self.managers:
            num_full = num_tokens // manager.block_size
            if num_full < manager.num_indexed[row]:
                block_ids = manager.tables.row(row)[num_full : manager.num_indexed[row]]
                self.forget(without_null(block_ids), EvictionCause.FAILED)
                manager.num_indexed[row] = num_full

    def forget(self, block_ids: BlockIds, cause: EvictionCause) -> None:
        """Forget the contents of these blocks. Rows that hold the blocks keep them."""
        forgotten = self.index.remove(block_ids)
        self.pool.note_forgotten(forgotten)
        if self._ledger is not None:
            self._ledger.removed(forgotten, cause, self.pool.get_usage())

    def _forget_reused(self, block_ids: BlockIds) -> BlockIds:
        """Forget blocks that the pool reuses. Returns these blocks, and all others that lookups can no longer find."""
        num_indexed, num_tails = len(self.index), self.index.num_tails
        forgotten = self.index.remove(block_ids)
        self.stats.evictions += num_indexed - len(self.index)
        self.stats.tail_evictions += num_tails - self.index.num_tails
        if self._ledger is not None:
            self._ledger.removed(forgotten, EvictionCause.REUSED, self.pool.get_usage())
        return forgotten

    def clear(self) -> None:
        """Forget everything, and restart the counters."""
        self.index.clear()
        self.stats = PrefixCacheStats()
        self.pool.note_forgotten(np.arange(self.pool.num_blocks, dtype=np.int32))
        if self._ledger is not None:
            self._ledger.cleared()

    # ------------------------------------------------- tails: only some indexes of one full group have them

    def partial_block(self, sequence: TokenSequence) -> PartialBlock | None:
        """The cached part of the block after the last cached full block, even if this step still fills that block."""
        return None

    def keep_tail(self, row: int, sequence: TokenSequence, num_tokens: int) -> None:  # noqa: B027 - most have none
        """Of the row's first `num_tokens` tokens, index those after the last full block as a tail.

        After this call, the caller closes the row.
        """

    # ------------------------------------------------- reasons of misses; they need a ledger

    def longest_hit(self, limit: int) -> int:
        """The largest length up to `limit`, in tokens, at which a hit can end."""
        return limit // self.alignment * self.alignment

    def why_missed(self, sequence: TokenSequence, hit: PrefixHit) -> tuple[MissReason, Eviction | None]:
        """Why the first full block after the hit was not found."""
        return MissReason.NEVER_SEEN, None

    def num_ghost_tokens(self, sequence: TokenSequence, hit: PrefixHit) -> int:
        """The number of tokens in full blocks after the hit that a pool of twice the size would hold."""
        return 0

    # -------------------------------------------------------------------- step

    def begin_step(self) -> None:
        """Begin a new batch. From now on, the blocks that were indexed earlier count as computed."""
        self._filling.clear()
        if self._ledger is not None:
            self._ledger.begin_step()

    def _note_indexed(self, block_ids: BlockIds, first: int) -> None:
        """Record that this step fills these blocks: a prefix's blocks from number `first` on."""
        self._note_indexed_each(block_ids, np.arange(first, first + len(block_ids), dtype=np.int32))

    def _note_adopted(self, block_ids: BlockIds, first: int) -> None:
        """Record that a prefix's blocks from number `first` on were copied into the pool, so no step fills them."""
        self.pool.note_cached(block_ids, np.arange(first, first + len(block_ids), dtype=np.int32))

    def _note_indexed_each(self, block_ids: BlockIds, depths: BlockIds) -> None:
        """Record that this step fills these blocks; block i is number `depths[i]` of its prefix."""
        self.pool.note_cached(block_ids, depths)
        self._filling.update(block_ids.tolist())

    def fills(self, block_ids: Iterable[int]) -> bool:
        """Whether this step fills any of these blocks: they may be indexed, but must not be copied or read yet."""
        return not self._filling.isdisjoint(block_ids)

    # -------------------------------------------------------------- allocation

    def num_required_blocks(self, hit: PrefixHit, num_tokens: int) -> int:
        """The number of free blocks that admission takes: new blocks, and the hit's blocks that nobody holds."""
        return self._num_admission_blocks(hit, num_tokens) + self.pool.count_free(self._needed(hit.tables))

    def max_num_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        return sum(manager.max_num_blocks(num_tokens, max_step_tokens) for manager in self.managers)

    def held_forever(self) -> BlockIds:
        return np.concatenate([manager.held_forever() for manager in self.managers])

    def _needed(self, tables: tuple[BlockIds, ...]) -> BlockIds:
        """The blocks in these tables, without NULL_BLOCK."""
        if not self._releases and len(tables) == 1:
            return tables[0]
        return without_null(np.concatenate(tables))

    def _num_admission_blocks(self, hit: PrefixHit, num_tokens: int) -> int:
        count = 0
        for manager, table in zip(self.managers, hit.tables, strict=True):
            count += manager.num_admission_blocks(len(table), num_tokens)
        return count

    def admit(self, hit: PrefixHit, num_tokens: int) -> tuple[int, BlockIds] | None:
        """Open a row with the hit's blocks and room for `num_tokens` tokens; returns the row and the new blocks.

        Returns None, and changes nothing, if too few blocks are free.
        """
        hit_ids = self._needed(hit.tables)
        num_new = self._num_admission_blocks(hit, num_tokens)
        num_taken = num_new + self.pool.count_free(hit_ids) if len(hit_ids) else num_new
        if num_taken > self.pool.get_num_free_blocks():
            return None
        row = self.tables.open_row()
        if len(hit_ids):
            self.pool.touch(hit_ids)
            if self._ledger is not None:
                self._ledger.note_hit(hit_ids)
        for manager, table in zip(self.managers, hit.tables, strict=True):
            manager.open(row, table)
        return row, self._extend(row, hit.num_tokens, num_tokens, num_new)

    def grow(self, row: int, start: int, end: int) -> BlockIds | None:
        """Make room for positions `start` to `end` (exclusive); the positions before `start` are computed.

        First releases the blocks that are no longer needed. Returns the new blocks. Returns None, and changes nothing,
        if too few blocks are free.
        """
        num_new = 0
        for manager in self.managers:
            num_new += manager.num_new_blocks(row, start, end)
        if self._releases:
            leaving = np.concatenate([manager.releasable(row, start) for manager in self.managers])
            if num_new > self.pool.get_num_free_blocks() + self.pool.count_held_once(leaving):
                return None
            if len(leaving):
                if self.pool.users is not None:
                    self.pool.users.note_use(row, leaving)
                self.pool.free_blocks(leaving)
            for manager in self.managers:
                manager.release(row, start)
        elif num_new > self.pool.get_num_free_blocks():
            return None
        return self._extend(row, start, end, num_new)

    def _extend(self, row: int, start: int, end: int, num_new: int) -> BlockIds:
        new_ids = self.pool.get_new_blocks(num_new) if num_new else NO_BLOCKS
        if len(self.managers) == 1:
            self.managers[0].extend(row, start, end, new_ids)
            return new_ids
        at = 0
        for manager in self.managers:
            count = manager.num_new_blocks(row, start, end)
            manager.extend(row, start, end, new_ids[at : at + count])
            at += count
        return new_ids

    def grow_each(self, rows: Int64Array, starts: Int64Array, ends: Int64Array) -> int:
        """`grow` for many rows, in order, until too few blocks are free. Returns the number of rows that grew."""
        if not self._only_appends:
            return self._grow_one_by_one(rows, starts, ends)
        counts = np.empty((len(rows), len(self.managers)), np.int64)
        for group_id, manager in enumerate(self.managers):
            counts[:, group_id] = -(-ends // manager.block_size) - manager.tables.lengths(rows)
        np.maximum(counts, 0, out=counts)
        num_new = int(counts.sum())
        if num_new > self.pool.get_num_free_blocks():
            return self._grow_one_by_one(rows, starts, ends)
        # The rows get the same blocks as with one call for each row: they take blocks that were free before this call
        # from the head of the queue, and the blocks that they release join its tail.
        if self._releases:
            self._release_each(rows, starts)
        if num_new:
            self._append_each(rows, counts, self.pool.get_new_blocks(num_new))
        return len(rows)

    def _grow_one_by_one(self, rows: Int64Array, starts: Int64Array, ends: Int64Array) -> int:
        changes = np.zeros(len(rows), np.bool_)
        for manager in self.managers:
            changes |= manager.changes(rows, starts, ends)
        for at in np.flatnonzero(changes).tolist():
            if self.grow(int(rows[at]), int(starts[at]), int(ends[at])) is None:
                return int(at)
        return len(rows)

    def _release_each(self, rows: Int64Array, starts: Int64Array) -> None:
        parts = [manager.release_each(rows, starts) for manager in self.managers if manager.releases_blocks]
        places = np.concatenate([place for place, _ in parts])
        if not len(places):
            return
        order = np.argsort(places, kind="stable")
        places, block_ids = places[order], np.concatenate([ids for _, ids in parts])[order]
        begins = np.flatnonzero(np.diff(places)) + 1
        if self.pool.users is not None:
            for row, row_ids in zip(rows[places[np.append(0, begins)]], np.split(block_ids, begins), strict=True):
                self.pool.users.note_use(int(row), row_ids)
        if are_distinct(block_ids):
            self.pool.free_blocks(block_ids)
        else:  # two requests release a block that they share
            for row_ids in np.split(block_ids, begins):
                self.pool.free_blocks(row_ids)

    def _append_each(self, rows: Int64Array, counts: Int64Array, new_ids: BlockIds) -> None:
        """Append new blocks to rows, row by row and within a row group by group; `counts` [rows, groups]."""
        groups = self.tables.groups
        owners = np.repeat(np.tile(np.arange(len(groups)), len(rows)), counts.ravel()) if len(groups) > 1 else None
        for group_id, tables in enumerate(groups):
            growing = counts[:, group_id].nonzero()[0]
            block_ids = new_ids if owners is None else new_ids[owners == group_id]
            tables.append_each(rows[growing], counts[growing, group_id], block_ids)

    def close(self, row: int) -> None:
        """Close a row and free its blocks, the last block first, so that tails are evicted before heads."""
        self.pool.free_blocks(self.tables.held(row, self.block_sizes))
        self.tables.close_row(row)

    # --------------------------------------------------------------- integrity

    def check_integrity(self, rows: Sequence[int], sequence_of: SequenceOfRow, held_apart: BlockIds) -> None:
        """Raise AssertionError if counts, queue, tables and index contradict each other.

        `held_apart`: block -> number of its holders other than rows.
        """
        counts = held_apart.copy()
        counts[self.held_forever()] += 1
        owner = np.full(self.pool.num_blocks, -1)
        for group_id, manager in enumerate(self.managers):
            for row in rows:
                manager.check_row(row)
                held = without_null(manager.tables.row(row))
                assert are_distinct(held), "a block stands twice in one table"
                assert ((owner[held] == -1) | (owner[held] == group_id)).all(), "a block is in two groups' tables"
                owner[held] = group_id
                counts[held] += 1
                full = len(sequence_of(row)) // manager.block_size
                assert manager.num_indexed[row] <= full, "a block was indexed too early"
        self.pool.check_integrity(counts)
        self.index.check_integrity()


class KVCacheCoordinatorNoPrefixCache(KVCacheCoordinator):
    """Serves any groups. It remembers nothing, so lookups find nothing."""

    def __init__(self, groups: Sequence[GroupSpec], num_blocks: int, policy: EvictionPolicy) -> None:
        super().__init__(groups, num_blocks, policy, GroupedHashIndex[BlockHash](num_blocks, len(groups)))

    def find_longest_cache_hit(self, sequence: TokenSequence) -> PrefixHit:
        return self.nothing

    def cache_blocks(self, row: int, sequence: TokenSequence, num_tokens: int) -> None:
        pass
