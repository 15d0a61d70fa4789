"""Coordinators: the groups' tables over one pool, and the hits on which all groups agree.

Know groups, keys and rows of tables; know nothing of request ids, statistics or steps' contents. A
coordinator belongs to one KVCacheManager, which numbers the rows' requests. As in vLLM v1:

    KVCacheCoordinatorNoPrefixCache   any groups, nothing is found
    UnitaryKVCacheCoordinator         one group that needs all its blocks; any PrefixIndex (unitary.py)
    HybridKVCacheCoordinator          any groups; hash keys only (hybrid.py)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from foreword.cache.account.ledger import CacheLedger, Eviction, EvictionCause, MissReason
from foreword.cache.blocks.block_pool import BlockIds, BlockPool
from foreword.cache.blocks.block_table import MultiGroupBlockTable
from foreword.cache.groups.group_specs import GroupSpec
from foreword.cache.groups.groups import (
    NO_BLOCKS,
    IntArray,
    make_group_manager,
    without_null,
)
from foreword.cache.index.index import Divergence, PartialBlock
from foreword.cache.index.tree_view import PrefixNode
from foreword.cache.keys.sequence import TokenSequence

MAX_NOTES = 1024
"""Notes of filled blocks that are kept unread; most steps never read them."""
SequenceOfRow = Callable[[int], TokenSequence]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached beginning of a sequence. Valid until the next call that changes the cache."""

    tables: tuple[BlockIds, ...]
    """Per group, the blocks of the leading full blocks that were found; NULL_BLOCK where none is needed."""
    partial: PartialBlock | None
    """A block that holds some of the tokens after those; it is copied if the hit is taken."""
    num_tokens: int
    """Leading tokens that need not be computed.

    May be one less than `num_shared_tokens`: when the blocks hold the whole sequence, its last token is
    computed all the same, for its logits, but its KV stays as it is.
    """
    num_shared_tokens: int
    """Leading tokens whose KV is in the blocks themselves; it must not be written again."""
    resumed: bool = False
    """The request was preempted before; its lookup is counted apart."""
    forked: bool = False
    """Another answer to a prompt whose lookup was counted; this one is counted apart."""
    skipped: bool = False
    """Nothing was looked up, because nobody asked or the request asked not to."""

    @property
    def block_ids(self) -> BlockIds:
        """The first group's table."""
        return self.tables[0]


class KVCacheCoordinatorNoPrefixCache:
    """Tables of any groups over one pool; remembers nothing. The other coordinators add an index."""

    def __init__(self, groups: Sequence[GroupSpec], pool: BlockPool, ledger: CacheLedger | None = None) -> None:
        self.specs = tuple(groups)
        self.block_sizes = tuple(spec.block_size for spec in groups)
        self.alignment = math.lcm(*self.block_sizes)
        """Hits are multiples of this many tokens, where the index cannot tell more."""
        self._pool = pool
        self._ledger = ledger
        self._indexed_now: set[int] = set()
        self._noted: list[BlockIds] = []
        self.tables = MultiGroupBlockTable(len(groups))
        self.managers = tuple(
            make_group_manager(spec, tables, self.alignment)
            for spec, tables in zip(groups, self.tables.groups, strict=True)
        )
        self._only_appends = all(manager.only_appends for manager in self.managers)
        self._releases = any(manager.releases_blocks for manager in self.managers)
        self.has_quiet_steps = self._only_appends and not self._releases
        """Whether nothing changes while a row grows within a block."""
        self.nothing = PrefixHit((NO_BLOCKS,) * len(groups), None, 0, 0)

    # ------------------------------------------------------------------- index

    @property
    def num_indexed(self) -> int:
        """Blocks that can be found, duplicates included."""
        return 0

    def indexed_block_ids(self) -> BlockIds:
        """Those blocks (a copy)."""
        return NO_BLOCKS

    def top_prefixes(self, limit: int, under_salt: str = "") -> list[PrefixNode] | None:
        """`PrefixIndex.top`, where there is such an index."""
        return None

    def num_indexed_by_group(self) -> list[int]:
        """`num_indexed` of each group."""
        return [self.num_indexed] + [0] * (len(self.managers) - 1)

    def find_longest_cache_hit(self, sequence: TokenSequence) -> PrefixHit:
        """The longest beginning of `sequence` that every group holds. Changes nothing."""
        return self.nothing

    def find_hit_of_next_step(self, sequence: TokenSequence) -> PrefixHit:
        """`find_longest_cache_hit`, when what this step fills has been computed."""
        return self.find_longest_cache_hit(sequence)

    def partial_block(self, sequence: TokenSequence) -> PartialBlock | None:
        """What is cached after the last full block that is, even if this step fills it."""
        return None

    @property
    def num_tails(self) -> int:
        """Partly filled blocks that can be found, which `num_indexed` does not count."""
        return 0

    def tail_block_ids(self) -> BlockIds:
        """Those blocks (a copy)."""
        return NO_BLOCKS

    def keep_tail(self, row: int, sequence: TokenSequence, num_tokens: int) -> None:
        """Index what the row's first tokens hold after their last full block; the row is closed next."""

    def holds(self, sequence: TokenSequence, block: int) -> bool:
        """Whether the sequence's own full block number `block` is cached, given that those before it are."""
        return False

    def cache_blocks(self, row: int, sequence: TokenSequence, num_tokens: int) -> None:
        """Index what the first `num_tokens` tokens fill and is not indexed yet."""

    def cache_blocks_each(self, rows: IntArray, sequence_of: SequenceOfRow, ends: IntArray) -> None:
        """`cache_blocks` for many rows, in their order."""
        for row, end in zip(rows.tolist(), ends.tolist(), strict=True):
            self.cache_blocks(row, sequence_of(row), end)

    def forget_from(self, row: int, num_tokens: int) -> None:
        """Take back the indexing of the row's blocks that hold positions from `num_tokens` on."""

    def forget(self, block_ids: BlockIds, cause: EvictionCause) -> int:
        """Forget what these blocks hold; returns how many were indexed before and are not now."""
        return 0

    def clear(self) -> None:
        """Forget everything."""
        self._pool.note_forgotten(np.arange(self._pool.num_blocks, dtype=np.int32))
        if self._ledger is not None:
            self._ledger.cleared()

    def _note_forgotten(self, block_ids: BlockIds, cause: EvictionCause) -> None:
        """The index has forgotten these blocks."""
        self._pool.note_forgotten(block_ids)
        if self._ledger is not None:
            self._ledger.removed(block_ids, cause, self._pool.get_usage())

    def why_missed(self, sequence: TokenSequence, hit: PrefixHit) -> tuple[MissReason, Eviction | None]:
        """Why the first full block after the hit was not found; needs a ledger."""
        return MissReason.NEVER_SEEN, None

    def num_ghost_tokens(self, sequence: TokenSequence, hit: PrefixHit) -> int:
        """Tokens of the full blocks after the hit that a pool of twice the size would hold; needs a ledger."""
        return 0

    def diverges(self, sequence: TokenSequence, num_tokens: int) -> Divergence | None:
        """`PrefixIndex.diverges`, where there is such an index."""
        return None

    def begin_step(self) -> None:
        """A new batch is being put together; what was indexed before has been computed."""
        self._indexed_now.clear()
        self._noted.clear()
        if self._ledger is not None:
            self._ledger.begin_step()

    def _note_indexed(self, block_ids: BlockIds, first: int) -> None:
        """These blocks (a copy of the caller's), number `first` and on of a prefix, are filled by this step."""
        self._note_indexed_each(block_ids, np.arange(first, first + len(block_ids), dtype=np.int32))

    def _note_indexed_each(self, block_ids: BlockIds, depths: BlockIds) -> None:
        """These blocks (a copy of the caller's), number `depths` of their prefixes, are filled by this step."""
        self._pool.note_cached(block_ids, depths)
        self._noted.append(block_ids)
        if len(self._noted) > MAX_NOTES:
            self._gather_notes()

    def _is_being_filled(self, block_id: int) -> bool:
        """Whether this step fills the block, so that it can be indexed but not be copied or read yet."""
        self._gather_notes()
        return block_id in self._indexed_now

    def _gather_notes(self) -> None:
        for block_ids in self._noted:
            self._indexed_now.update(block_ids.tolist())
        self._noted.clear()

    # -------------------------------------------------------------- allocation

    def num_required_blocks(self, hit: PrefixHit, num_tokens: int) -> int:
        """Free blocks that admitting a request takes: new ones, and those of the hit that nobody holds."""
        return self._num_admission_blocks(hit, num_tokens) + self._pool.count_free(self._needed(hit.tables))

    def max_num_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """Most blocks that one request of `num_tokens` holds, in steps of at most `max_step_tokens`."""
        return sum(manager.max_num_blocks(num_tokens, max_step_tokens) for manager in self.managers)

    def reserve(self) -> None:
        """Take the blocks that no request can get (sinks); called once, before anything else."""
        for manager in self.managers:
            manager.reserve(self._pool)

    def held_for_ever(self) -> BlockIds:
        """What `reserve` took."""
        return np.concatenate([manager.held_for_ever() for manager in self.managers])

    def _needed(self, tables: tuple[BlockIds, ...]) -> BlockIds:
        """The blocks in these tables."""
        if not self._releases and len(tables) == 1:
            return tables[0]
        return without_null(np.concatenate(tables))

    def _num_admission_blocks(self, hit: PrefixHit, num_tokens: int) -> int:
        count = 0
        for manager, table in zip(self.managers, hit.tables, strict=True):
            count += manager.num_admission_blocks(len(table), num_tokens)
        return count

    def admit(self, hit: PrefixHit, num_tokens: int) -> tuple[int, BlockIds] | None:
        """Open a row with the hit's blocks and room for `num_tokens`; returns it and the new blocks.

        None, and no change, if blocks are short.
        """
        hit_ids = self._needed(hit.tables)
        num_new = self._num_admission_blocks(hit, num_tokens)
        num_taken = num_new + self._pool.count_free(hit_ids) if len(hit_ids) else num_new
        if num_taken > self._pool.get_num_free_blocks():
            return None
        row = self.tables.open_row()
        if len(hit_ids):
            self._pool.touch(hit_ids)
            if self._ledger is not None:
                self._ledger.note_hit(hit_ids)
        for manager, table in zip(self.managers, hit.tables, strict=True):
            manager.open(row, table)
        return row, self._extend(row, hit.num_tokens, num_tokens, num_new)

    def grow(self, row: int, start: int, end: int) -> BlockIds | None:
        """Make room for positions `start` to `end`, of which those before `start` are computed.

        Gives up what is no longer needed first. Returns the new blocks; None, and no change, if blocks
        are short.
        """
        num_new = 0
        for manager in self.managers:
            num_new += manager.num_new_blocks(row, start, end)
        if self._releases:
            leaving = np.concatenate([manager.releasable(row, start) for manager in self.managers])
            if num_new > self._pool.get_num_free_blocks() + self._pool.count_held_once(leaving):
                return None
            if len(leaving):
                self._pool.free_blocks(leaving)
            for manager in self.managers:
                manager.release(row, start)
        elif num_new > self._pool.get_num_free_blocks():
            return None
        return self._extend(row, start, end, num_new)

    def _extend(self, row: int, start: int, end: int, num_new: int) -> BlockIds:
        new_ids = self._pool.get_new_blocks(num_new) if num_new else NO_BLOCKS
        if len(self.managers) == 1:
            self.managers[0].extend(row, start, end, new_ids)
            return new_ids
        at = 0
        for manager in self.managers:
            count = manager.num_new_blocks(row, start, end)
            manager.extend(row, start, end, new_ids[at : at + count])
            at += count
        return new_ids

    def grow_each(self, rows: IntArray, starts: IntArray, ends: IntArray) -> int:
        """`grow` for many rows, in their order, up to the first that is short; returns how many were served."""
        if not self._only_appends:
            return self._grow_one_by_one(rows, starts, ends)
        counts = np.empty((len(rows), len(self.managers)), np.int64)
        for group_id, manager in enumerate(self.managers):
            counts[:, group_id] = -(-ends // manager.block_size) - manager.tables.lengths(rows)
        np.maximum(counts, 0, out=counts)
        num_new = int(counts.sum())
        if num_new > self._pool.get_num_free_blocks():
            return self._grow_one_by_one(rows, starts, ends)
        # The same blocks as one by one: rows take from the queue's head, in their order, what was free
        # before this call, and what they give up joins its tail.
        if self._releases:
            self._release_each(rows, starts)
        if num_new:
            self._append_each(rows, counts, self._pool.get_new_blocks(num_new))
        return len(rows)

    def _grow_one_by_one(self, rows: IntArray, starts: IntArray, ends: IntArray) -> int:
        changes = np.zeros(len(rows), np.bool_)
        for manager in self.managers:
            changes |= manager.changes(rows, starts, ends)
        for at in np.flatnonzero(changes).tolist():
            if self.grow(int(rows[at]), int(starts[at]), int(ends[at])) is None:
                return int(at)
        return len(rows)

    def _release_each(self, rows: IntArray, starts: IntArray) -> None:
        """Free what the rows no longer need."""
        parts = [manager.release_each(rows, starts) for manager in self.managers if manager.releases_blocks]
        places = np.concatenate([place for place, _ in parts])
        if not len(places):
            return
        order = np.argsort(places, kind="stable")
        places, block_ids = places[order], np.concatenate([ids for _, ids in parts])[order]
        if len(np.unique(block_ids)) == len(block_ids):
            self._pool.free_blocks(block_ids)
        else:  # two requests give up a block that they share
            for of_row in np.split(block_ids, np.flatnonzero(np.diff(places)) + 1):
                self._pool.free_blocks(of_row)

    def _append_each(self, rows: IntArray, counts: IntArray, new_ids: BlockIds) -> None:
        """Hand out new blocks, row by row and in a row group by group; `counts` [rows, groups]."""
        groups = self.tables.groups
        owners = np.repeat(np.tile(np.arange(len(groups)), len(rows)), counts.ravel()) if len(groups) > 1 else None
        for group_id, tables in enumerate(groups):
            growing = counts[:, group_id].nonzero()[0]
            block_ids = new_ids if owners is None else new_ids[owners == group_id]
            tables.append_each(rows[growing], counts[growing, group_id], block_ids)

    def close(self, row: int) -> None:
        """Free a row's blocks, those that end last first, so that tails are evicted before heads."""
        if len(self.managers) == 1 and not self._releases:
            self._pool.free_blocks(self.tables.groups[0].row(row)[::-1].copy())
        else:
            self._pool.free_blocks(self.tables.held(row, self.block_sizes))
        self.tables.close_row(row)

    # --------------------------------------------------------------- integrity

    def check_integrity(self, rows: Sequence[int], sequence_of: SequenceOfRow) -> None:
        """Raise AssertionError if counts, queue, tables and index contradict each other."""
        counts = np.zeros(self._pool.num_blocks, np.int32)
        counts[self.held_for_ever()] += 1
        owner = np.full(self._pool.num_blocks, -1)
        for group_id, manager in enumerate(self.managers):
            for row in rows:
                manager.check_row(row)
                held = without_null(manager.tables.row(row))
                assert len(np.unique(held)) == len(held), "a block stands twice in one table"
                assert np.isin(owner[held], (-1, group_id)).all(), "a block is in two groups' tables"
                owner[held] = group_id
                counts[held] += 1
                full = len(sequence_of(row)) // manager.block_size
                assert manager.num_indexed[row] <= full, "a block was indexed too early"
        self._pool.check_integrity(counts)
