"""HybridKVCacheCoordinator: hits on which groups of different attention types and block sizes agree."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set

import numpy as np

from foreword.cache.account.ledger import CacheLedger, Eviction, MissReason
from foreword.cache.block_ids import ELSEWHERE, NULL_BLOCK, BlockIds
from foreword.cache.eviction.policy import EvictionPolicy
from foreword.cache.groups.coordinator import Keys, KVCacheCoordinator, SequenceOfRow
from foreword.cache.groups.managers import BlockFinder, GroupSpec, MambaSpec
from foreword.cache.index.hash_index import GroupedHashIndex, make_block_hash_with_group_id
from foreword.cache.index.prefix_index import PrefixHit
from foreword.cache.keys.hashing import BlockHash
from foreword.cache.keys.sequence import TokenSequence, keys_of_group


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """Serves any groups, each with its own block size. They share one pool and an index of hash keys.

    Other indexes cannot serve these groups (see `hash_index`). A sequence's block size divides every group's block
    size.

    A hit leaves at least one token to compute. The logits of the last token need the blocks of its own window, chunk or
    state, and these blocks may differ from the blocks that the next position needs.

    A recurrent module computes a prompt in cells, and another division into cells changes the last bits of its results
    (docs/decisions/0007). So if a group is recurrent, a request indexes and finds only whole cells of its prompt:

        cells of 4, a prompt of 6 tokens, 3 generated      |0123|45|6|7|8|
        a longer prompt that begins alike                  |0123|4567|89ab|
        the tokens that each may find of the other          ----
    """

    index: GroupedHashIndex[BlockHash]

    def __init__(
        self,
        groups: Sequence[GroupSpec],
        num_blocks: int,
        policy: EvictionPolicy,
        key_block_size: int,
        *,
        ledger: CacheLedger | None = None,
    ) -> None:
        super().__init__(groups, num_blocks, policy, GroupedHashIndex[BlockHash](num_blocks, len(groups)), ledger)
        assert all(size % key_block_size == 0 for size in self.block_sizes), "a group's blocks end between keys"
        cells = [spec.block_size for spec in groups if isinstance(spec, MambaSpec)]
        self._cell_tokens = math.lcm(*cells) if cells else None
        self._keys_per_block = tuple(size // key_block_size for size in self.block_sizes)
        self._accounts = [ledger.open_group(width) for width in self._keys_per_block] if ledger is not None else []
        # Groups in which each beginning of a hit is a hit come first: they are looked up once and then only cut.
        self._order = sorted(range(len(self.managers)), key=lambda g: not self.managers[g].hits_every_prefix)

    def num_indexed_by_group(self) -> list[int]:
        return [self.index.num_indexed(group_id) for group_id in range(len(self.managers))]

    def find_longest_cache_hit(self, sequence: TokenSequence) -> PrefixHit:
        """Lower a bound of the hit's length to each group's longest hit, until a round of all groups changes nothing.

        Each group returns its longest hit within the bound. So the bound never falls below the longest common hit, and
        a bound that all groups accept is a common hit.
        """
        tables, length = self._agree(sequence, [self._finder(group_id) for group_id in range(len(self.managers))])
        return PrefixHit(tables, None, length, length) if length else self.nothing

    def _agree(self, sequence: TokenSequence, finders: Sequence[BlockFinder]) -> tuple[tuple[BlockIds, ...], int]:
        """The tables of the longest hit that all groups accept, and its length in tokens; `finders`: by group."""
        length = min(sequence.num_hittable_tokens, self._num_findable(sequence)) // self.alignment * self.alignment
        tables: dict[int, BlockIds] = {}
        agreed = False
        while length > 0 and not agreed:
            agreed = True
            for group_id in self._order:
                table, end = self._cut_or_find(group_id, tables.get(group_id), length, sequence, finders[group_id])
                tables[group_id] = table
                if end < length:
                    length, agreed = end, False
        if length <= 0:
            return self.nothing.tables, 0
        return tuple(tables[g] for g in range(len(self.managers))), length

    def _num_findable(self, sequence: TokenSequence) -> int:
        """The number of leading tokens whose KV and states have the same bits in all sequences that begin with them."""
        if self._cell_tokens is None:
            return len(sequence)
        return sequence.num_prompt_tokens // self._cell_tokens * self._cell_tokens

    def _cut_or_find(
        self, group_id: int, table: BlockIds | None, length: int, sequence: TokenSequence, find: BlockFinder
    ) -> tuple[BlockIds, int]:
        """A group's longest hit within `length` tokens, and its number of tokens. `table`: an earlier hit, or None."""
        manager = self.managers[group_id]
        size = manager.block_size
        if table is not None and (manager.hits_every_prefix or len(table) * size == length):
            return table[: length // size], min(length, len(table) * size)
        keys = self._keys(group_id, sequence, 0, length // size)
        table = manager.find_longest_cache_hit(keys, find, length, self.alignment)
        return table, len(table) * size

    def _keys(self, group_id: int, sequence: TokenSequence, first: int, last: int) -> list[BlockHash]:
        """Keys of the group's blocks number `first` to `last` (exclusive)."""
        return keys_of_group(sequence.block_hashes(), self._keys_per_block[group_id], first, last)

    def _finder(self, group_id: int) -> BlockFinder:
        find = self.index.finder(group_id)
        if self.managers[group_id].readable_in_same_step:
            return find

        def find_computed(key: BlockHash) -> int | None:
            block_id = find(key)
            return None if block_id is None or self.fills((block_id,)) else block_id

        return find_computed

    def holds(self, sequence: TokenSequence, block: int) -> bool:
        """Whether every group holds the block, so that a request that waits for it would now hit it."""
        end = (block + 1) * sequence.block_size
        return self.find_longest_cache_hit(sequence).num_shared_tokens >= end

    def keys_by_group(self, sequence: TokenSequence) -> list[Keys]:
        num_tokens = min(len(sequence), self._num_findable(sequence))
        return [self._keys(group_id, sequence, 0, num_tokens // size) for group_id, size in enumerate(self.block_sizes)]

    def find_hit_with(self, sequence: TokenSequence, elsewhere: Sequence[Set[BlockHash]]) -> tuple[BlockIds, ...]:
        def finder(group_id: int) -> BlockFinder:
            find, others = self._finder(group_id), elsewhere[group_id]

            def find_anywhere(key: BlockHash) -> int | None:
                block_id = find(key)
                return ELSEWHERE if block_id is None and key in others else block_id

            return find_anywhere

        return self._agree(sequence, [finder(group_id) for group_id in range(len(self.managers))])[0]

    def cached_blocks(self, sequence: TokenSequence) -> list[BlockIds]:
        tables = []
        for group_id, keys in enumerate(self.keys_by_group(sequence)):
            find = self._finder(group_id)
            block_ids = [find(key) for key in keys]
            tables.append(np.array([NULL_BLOCK if block_id is None else block_id for block_id in block_ids], np.int32))
        return tables

    def adopt(self, group_id: int, sequence: TokenSequence, first: int, block_ids: BlockIds) -> bool:
        self._insert(group_id, sequence, range(first, first + len(block_ids)), block_ids, self._note_adopted)
        return True

    def cache_blocks(self, row: int, sequence: TokenSequence, num_tokens: int) -> None:
        num_tokens, num_findable = min(num_tokens, len(sequence)), self._num_findable(sequence)
        for group_id, manager in enumerate(self.managers):
            numbers = manager.blocks_to_index(row, num_tokens, num_findable)
            if not numbers:
                continue
            block_ids = manager.tables.row(row)[numbers.start : numbers.stop].copy()
            self._insert(group_id, sequence, numbers, block_ids, self._note_indexed)
            manager.set_indexed(row, numbers.stop)

    def _insert(
        self,
        group_id: int,
        sequence: TokenSequence,
        numbers: range,
        block_ids: BlockIds,
        note: Callable[[BlockIds, int], None],
    ) -> None:
        """Index blocks as the group's blocks with these numbers, and report them."""
        keys = self._keys(group_id, sequence, numbers.start, numbers.stop)
        self.index.insert(group_id, keys, block_ids)
        note(block_ids, numbers.start)
        if self.pool.wants_keys:
            group_keys = [BlockHash(make_block_hash_with_group_id(key, group_id)) for key in keys]
            self.pool.note_keys(block_ids, group_keys)
        if self._accounts:
            self._accounts[group_id].stored(sequence, numbers, block_ids)

    def why_missed(self, sequence: TokenSequence, hit: PrefixHit) -> tuple[MissReason, Eviction | None]:
        """If a group evicted its first block after the hit, that group's reason; else the reason of the group that
        keeps the most blocks.
        """
        if self._cell_tokens is not None and hit.num_tokens + self.alignment > self._num_findable(sequence):
            return MissReason.PARTIAL_BLOCK, None  # a cell that the prompt does not fill, or generated tokens
        reasons = [self._reason_of(group_id, sequence, hit) for group_id in self._order]
        for reason in reasons:
            if reason is not None and reason[1] is not None:
                return reason
        if reasons[0] is not None:
            return reasons[0]
        for group_id, reason in zip(self._order, reasons, strict=True):
            is_state = not self.managers[group_id].readable_in_same_step
            if is_state and reason is not None and reason[0] is MissReason.NEVER_SEEN:
                return MissReason.STATE_NOT_SAVED, None
        return MissReason.PARTIAL_BLOCK, None  # the rest is shorter than a block of all groups

    def _reason_of(
        self, group_id: int, sequence: TokenSequence, hit: PrefixHit
    ) -> tuple[MissReason, Eviction | None] | None:
        """Why a group lacks the first block that the next longer hit needs; None if it lacks no block of that hit."""
        manager, end = self.managers[group_id], hit.num_tokens + self.alignment
        first = max(len(hit.tables[group_id]), manager.first_needed_block(end))
        reasons = (self._accounts[group_id].reason(sequence, at) for at in range(first, end // manager.block_size))
        return next((reason for reason in reasons if reason is not None), None)

    def num_ghost_tokens(self, sequence: TokenSequence, hit: PrefixHit) -> int:
        """The number of tokens for the group that keeps the most blocks; it is an upper bound for the other groups."""
        group_id = self._order[0]
        reason = self._reason_of(group_id, sequence, hit)
        if reason is None or reason[0] is not MissReason.EVICTED:
            return 0
        return self._accounts[group_id].num_ghost_hits(sequence, len(hit.tables[group_id])) * self.block_sizes[group_id]

    def check_integrity(self, rows: Sequence[int], sequence_of: SequenceOfRow, held_apart: BlockIds) -> None:
        super().check_integrity(rows, sequence_of, held_apart)
        for group_id, manager in enumerate(self.managers):
            for row in rows:
                sequence = sequence_of(row)
                keys = self._keys(group_id, sequence, 0, len(sequence) // manager.block_size)
                for number, block_id in enumerate(manager.tables.row(row).tolist()):
                    if block_id == NULL_BLOCK or self.index.key_of(block_id) is None:
                        continue
                    assert self.index.group_of(block_id) == group_id, (
                        "a block is held in one group and indexed in another"
                    )
                    assert self.index.key_of(block_id) in keys[number : number + 1], (
                        f"block {block_id} is indexed as something else than its holder's block number {number}"
                    )
