"""UnitaryKVCacheCoordinator: one group that needs all its blocks, so that each hit is a prefix."""

from __future__ import annotations

from collections.abc import Sequence, Set

import numpy as np

from foreword.cache.account.ledger import CacheLedger, Eviction, EvictionCause, MissReason
from foreword.cache.block_ids import ELSEWHERE, NULL_BLOCK, BlockIds, Int64Array
from foreword.cache.eviction.policy import EvictionPolicy
from foreword.cache.groups.coordinator import Keys, KVCacheCoordinator, SequenceOfRow
from foreword.cache.groups.managers import GroupSpec
from foreword.cache.index.prefix_index import NO_MATCH, PartialBlock, PrefixHit, PrefixIndex
from foreword.cache.keys.hashing import BlockHash
from foreword.cache.keys.sequence import TokenSequence


class UnitaryKVCacheCoordinator(KVCacheCoordinator):
    """One group that needs all its blocks; any index can find its hits.

    With `deduplicate`, as in vLLM v0, a request does not keep a second copy of an indexed block: after the step that
    filled the copy, the indexed block replaces the copy in the table, and the copy is freed.
    """

    index: PrefixIndex

    def __init__(
        self,
        group: GroupSpec,
        num_blocks: int,
        policy: EvictionPolicy,
        index: PrefixIndex,
        *,
        ledger: CacheLedger | None = None,
        deduplicate: bool = False,
    ) -> None:
        super().__init__((group,), num_blocks, policy, index, ledger)
        (self._manager,) = self.managers
        assert self._manager.hits_every_prefix, "groups that skip blocks need HybridKVCacheCoordinator"
        self._size = group.block_size
        self._account = ledger.open_group() if ledger is not None else None
        self._deduplicates = deduplicate
        self._reports = ledger is not None or deduplicate or self.pool.wants_keys
        self._filled: list[tuple[int, int, BlockIds]] = []
        """Blocks that the current step fills, for deduplication: row, number of the first block, block ids."""

    def find_longest_cache_hit(self, sequence: TokenSequence) -> PrefixHit:
        hit = self.find_hit_of_next_step(sequence)
        if hit.partial is None or not self.fills((hit.partial.block_id,)):
            return hit
        # This step fills the block too late for it to be copied.
        return PrefixHit(hit.tables, None, hit.num_shared_tokens, hit.num_shared_tokens)

    def find_hit_of_next_step(self, sequence: TokenSequence) -> PrefixHit:
        match = self.index.match(sequence)
        if match is NO_MATCH:
            return self.nothing
        block_ids, partial = match.block_ids, match.partial
        computed_last = sequence.num_hittable_tokens
        if (limit := sequence.most_hit_tokens) is not None and len(block_ids) * self._size > limit:
            # |--- whole blocks ---|-- rest --:--|   the first `limit` tokens end at the colon
            whole, remainder = divmod(limit, self._size)
            partial = PartialBlock(int(block_ids[whole]), remainder) if remainder else None
            block_ids = block_ids[:whole]
        num_shared = len(block_ids) * self._size
        if partial is None or num_shared >= computed_last:
            return PrefixHit((block_ids,), None, min(num_shared, computed_last), num_shared)
        num_tokens = min(num_shared + partial.num_tokens, computed_last)
        return PrefixHit((block_ids,), partial, num_tokens, num_shared)

    def partial_block(self, sequence: TokenSequence) -> PartialBlock | None:
        return self.index.match(sequence).partial

    def holds(self, sequence: TokenSequence, block: int) -> bool:
        return self.index.holds(sequence, block)

    def keys_by_group(self, sequence: TokenSequence) -> list[Keys]:
        return [sequence.block_hashes()]

    def find_hit_with(self, sequence: TokenSequence, elsewhere: Sequence[Set[BlockHash]]) -> tuple[BlockIds, ...]:
        block_ids, keys = self.index.match(sequence).block_ids, sequence.block_hashes()
        end = len(block_ids)
        while end < len(keys) and sequence.may_hit(end) and keys[end] in elsewhere[0]:
            end += 1
        return (np.concatenate((block_ids, np.full(end - len(block_ids), ELSEWHERE, np.int32))),)

    def cached_blocks(self, sequence: TokenSequence) -> list[BlockIds]:
        block_ids = self.index.match(sequence).block_ids
        missing = np.full(sequence.num_full_blocks - len(block_ids), NULL_BLOCK, np.int32)
        return [np.concatenate((block_ids, missing))]

    def adopt(self, group_id: int, sequence: TokenSequence, first: int, block_ids: BlockIds) -> bool:
        if len(self.index.match(sequence).block_ids) != first or not self.index.insert(sequence, first, block_ids):
            return False
        self._note_adopted(block_ids, first)
        self._report(sequence, first, block_ids)
        return True

    def cache_blocks(self, row: int, sequence: TokenSequence, num_tokens: int) -> None:
        first = self._manager.num_indexed[row]
        num_full = min(num_tokens, len(sequence)) // self._size
        if num_full > first:
            block_ids = self._manager.tables.row(row)[first:num_full].copy()
            self._manager.num_indexed[row] = num_full
            if not self.index.insert(sequence, first, block_ids):
                return
            num_lasting = _num_lasting(sequence, first, len(block_ids))
            self._note_indexed(block_ids[:num_lasting], first)
            for block_id in block_ids[num_lasting:].tolist():  # linked text is evicted early: a copy can rebuild it
                self._filling.add(block_id)
                self.pool.note_tail(block_id)
            self._report(sequence, first, block_ids, row)

    def keep_tail(self, row: int, sequence: TokenSequence, num_tokens: int) -> None:
        """Index a tail. Events do not report it, because a tail has no key."""
        if not self.index.keeps_tails:
            return
        self.cache_blocks(row, sequence, num_tokens)  # the last token of a block may be known only now
        number, num_rest = divmod(num_tokens, self._size)
        if not num_rest:
            return
        block_id = int(self._manager.tables.row(row)[number])
        tail = np.array([block_id], np.int32)
        if not self.pool.count_held_once(tail) or not self.index.insert_tail(sequence, num_tokens, block_id):
            return
        self._filling.add(block_id)  # a step that still runs may fill it, too late for a copy in this step
        self.pool.note_tail(block_id)
        if self._ledger is not None:
            self._ledger.tails.stored(sequence, num_tokens, block_id)

    def cache_blocks_each(self, rows: Int64Array, sequence_of: SequenceOfRow, ends: Int64Array) -> None:
        """`cache_blocks` for many rows. If each row has filled exactly one block, one call indexes all the blocks."""
        num_indexed = self._manager.num_indexed
        last = (ends // self._size - 1).astype(np.int32)
        listed, numbers = rows.tolist(), last.tolist()
        if [num_indexed[row] for row in listed] != numbers:
            super().cache_blocks_each(rows, sequence_of, ends)
            return
        block_ids = self._manager.tables.entries(rows, last)
        sequences = [sequence_of(row) for row in listed]
        if any(sequence.linked_from is not None for sequence in sequences):
            super().cache_blocks_each(rows, sequence_of, ends)
            return
        inserted = self.index.insert_each(sequences, numbers, block_ids)
        if all(inserted):
            self._note_indexed_each(block_ids, last)
        else:
            self._note_indexed_each(block_ids.compress(inserted), last.compress(inserted))
        for at, row in enumerate(listed):
            num_indexed[row] = numbers[at] + 1
            if self._reports and inserted[at]:
                self._report(sequences[at], numbers[at], block_ids[at : at + 1], row)

    def _report(self, sequence: TokenSequence, first: int, block_ids: BlockIds, row: int | None = None) -> None:
        """Report that a sequence's blocks from number `first` on were indexed. `row`: the row that fills them."""
        if self.pool.wants_keys:
            num_lasting = _num_lasting(sequence, first, len(block_ids))
            self.pool.note_keys(block_ids[:num_lasting], sequence.block_hashes()[first : first + num_lasting])
        if self._account is not None:
            self._account.stored(sequence, range(first, first + len(block_ids)), block_ids)
        if self._deduplicates and row is not None:
            self._filled.append((row, first, block_ids))

    def begin_step(self) -> None:
        super().begin_step()
        for row, first, block_ids in self._filled:
            self._deduplicate(row, first, block_ids)
        self._filled.clear()
        superseded = self.index.superseded_tails()
        if len(superseded):  # pinned tails stay
            self.forget(superseded.compress(self.pool.is_tail(superseded)), EvictionCause.DUPLICATE)

    def _deduplicate(self, row: int, first: int, block_ids: BlockIds) -> None:
        """Replace copies in the row's table by the indexed blocks, and free the copies."""
        table = self._manager.tables.row(row)
        for number, block_id in enumerate(block_ids.tolist(), first):
            original = self.index.original_of(block_id)
            if original is None or number >= len(table) or table[number] != block_id:
                continue  # the block is no duplicate, or its request has ended
            self.forget(np.array([block_id], np.int32), EvictionCause.DUPLICATE)
            self.pool.touch(np.array([original], np.int32))
            table[number] = original
            self.pool.free_blocks(np.array([block_id], np.int32))

    def longest_hit(self, limit: int) -> int:
        return limit  # a hit may end inside a cached block

    def why_missed(self, sequence: TokenSequence, hit: PrefixHit) -> tuple[MissReason, Eviction | None]:
        assert self._account is not None
        assert self._ledger is not None
        number = len(hit.block_ids)
        # `reason` is None if another prompt's block has the same key: only an index that verifies tokens notices that.
        reason, eviction = self._account.reason(sequence, number) or (MissReason.NEVER_SEEN, None)
        if self.index.keeps_tails and reason in (MissReason.PARTIAL_BLOCK, MissReason.NEVER_SEEN):
            tail = self._ledger.tails.eviction_after(sequence, number, hit.num_tokens - hit.num_shared_tokens)
            return (MissReason.NEVER_SEEN, None) if tail is None else (MissReason.EVICTED, tail)
        return reason, eviction

    def num_ghost_tokens(self, sequence: TokenSequence, hit: PrefixHit) -> int:
        assert self._account is not None
        return self._account.num_ghost_hits(sequence, len(hit.block_ids)) * self._size

    def check_integrity(self, rows: Sequence[int], sequence_of: SequenceOfRow, held_apart: BlockIds) -> None:
        super().check_integrity(rows, sequence_of, held_apart)
        for row in rows:
            self.index.check_table(sequence_of(row), self._manager.tables.row(row))
        findable = np.concatenate((self.index.tail_block_ids(), self.index.block_ids()))
        assert self.pool.tail_block_ids() <= set(findable.tolist()), "the pool keeps a tail that cannot be found"
        if self._ledger is not None:
            self._ledger.check_integrity(len(self.index))
            assert self._ledger.tails.block_ids() == set(self.index.tail_block_ids().tolist()), (
                "ledger and index know different tails"
            )


def _num_lasting(sequence: TokenSequence, first: int, count: int) -> int:
    """Of the `count` blocks from number `first` on, the number of blocks that end before the first linked token."""
    if sequence.linked_from is None:
        return count
    return min(max(sequence.linked_from // sequence.block_size - first, 0), count)
