"""KVCacheManager: the scheduler's only door to the cache.

Knows sequences of token ids and the blocks that hold their KV; knows nothing of text, tensors,
priorities or time. One request's life, as in vLLM v1:

    begin_step()
    hit = get_computed_blocks(sequence)            what is there already; changes nothing
    allocate_slots(sequence, num_tokens, hit)      admitted: hit blocks held, new blocks taken
    allocate_slots(sequence, num_tokens) ...       each step: room for the tokens of this step
    take_copies()                                  what the runner copies first
    free(request_id)                               blocks leave the request, but stay cached

The blocks that a step will fill are indexed when their slots are allocated, before the step runs, so
that later members of the same batch already hit them: every layer writes the KV of the whole batch
before it reads any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foreword.cache.block_pool import BlockIds, BlockPool
from foreword.cache.block_table import BlockTables
from foreword.cache.eviction import EvictionPolicy, make_policy
from foreword.cache.index import HashIndex, PartialBlock, PrefixIndex
from foreword.cache.sequence import TokenSequence
from foreword.cache.stats import CachingMetrics, PrefixCacheStats
from foreword.errors import CacheBusyError, ConfigError

NO_BLOCKS: BlockIds = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached beginning of a sequence. Valid until the next call that changes the cache."""

    block_ids: BlockIds
    """Blocks of the leading full blocks that were found."""
    partial: PartialBlock | None
    """A block that holds some of the tokens after those; it is copied if the hit is taken."""
    num_tokens: int
    """Leading tokens that need not be computed.

    One less than the blocks hold when they hold the whole sequence: its last token is computed all the
    same, for its logits, but its KV stays as it is.
    """
    resumed: bool = False
    """The request was preempted before; its lookup is counted apart."""


@dataclass(slots=True)
class _Holding:
    """What one request holds."""

    sequence: TokenSequence
    row: int
    num_indexed: int
    """Leading blocks that are in the index, by hit or by insertion."""


class KVCacheManager:
    """Gives blocks to requests and finds the blocks that earlier requests left behind."""

    def __init__(
        self,
        num_blocks: int,
        *,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        index: PrefixIndex | None = None,
        eviction_policy: str | EvictionPolicy = "lru",
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"num_blocks={num_blocks} and block_size={block_size} must both be at least 1; give the cache "
                "more memory or smaller blocks"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.stats = PrefixCacheStats()
        self.recent = CachingMetrics()
        self._index = index if index is not None else HashIndex(num_blocks)
        policy = make_policy(eviction_policy, num_blocks) if isinstance(eviction_policy, str) else eviction_policy
        self._pool = BlockPool(num_blocks, on_reuse=self._forget_reused, policy=policy)
        self._tables = BlockTables()
        self._held: dict[str, _Holding] = {}
        self._copies: list[tuple[int, int]] = []
        self._step = 0
        self._indexed_in: npt.NDArray[np.int64] = np.full(num_blocks, -1, np.int64)

    # -------------------------------------------------------------------- step

    def begin_step(self) -> None:
        """A new batch is being put together; what was allocated before has been computed."""
        self._step += 1

    def take_copies(self) -> BlockIds:
        """Blocks to copy before the step writes anything, [copies, (source, target)]; handed out once."""
        copies = np.array(self._copies, np.int32).reshape(-1, 2)
        self._copies.clear()
        return copies

    # ------------------------------------------------------------------ lookup

    def get_computed_blocks(
        self, sequence: TokenSequence, *, skip_reading: bool = False, resumed: bool = False
    ) -> PrefixHit:
        """The longest cached prefix of `sequence`. Changes nothing, counts nothing."""
        if skip_reading or not self.enable_prefix_caching:
            return PrefixHit(NO_BLOCKS, None, 0, resumed)
        match = self._index.match(sequence)
        whole = len(match.block_ids) * self.block_size
        computed_last = len(sequence) - 1
        partial = match.partial
        if partial is None or whole >= computed_last or self._indexed_in[partial.block_id] == self._step:
            # A block that this very step fills is filled too late to be copied.
            return PrefixHit(match.block_ids, None, min(whole, computed_last), resumed)
        return PrefixHit(match.block_ids, partial, min(whole + partial.num_tokens, computed_last), resumed)

    def is_cached(self, sequence: TokenSequence, block: int) -> bool:
        """Whether the full block number `block` is cached, given that those before it are."""
        return self._index.holds(sequence, block)

    # -------------------------------------------------------------- allocation

    def allocate_slots(self, sequence: TokenSequence, num_tokens: int, hit: PrefixHit | None = None) -> BlockIds | None:
        """Make room for the KV of the first `num_tokens` tokens; None, and no change, if blocks are short.

        The first call for a request admits it and takes its `hit` (None: nothing was hit). Returns the
        newly taken blocks. Blocks that these tokens fill are indexed at once.
        """
        holding = self._held.get(sequence.request_id)
        assert holding is None or hit is None, "a hit is taken when the request is admitted, not later"
        hit_ids = hit.block_ids if hit is not None else NO_BLOCKS
        num_held = self._tables.length(holding.row) if holding else len(hit_ids)
        num_new = max(0, -(-num_tokens // self.block_size) - num_held)
        if num_new + self._pool.count_free(hit_ids) > self._pool.get_num_free_blocks():
            return None

        if holding is None:
            holding = self._admit(sequence, hit_ids, hit)
        new_ids = self._pool.get_new_blocks(num_new)
        if hit is not None and hit.partial is not None:
            self._copy_on_write(hit.partial.block_id, int(new_ids[0]))
        self._tables.append(holding.row, new_ids)
        self.cache_blocks(sequence, num_tokens)
        return new_ids

    def _copy_on_write(self, source: int, target: int) -> None:
        """Have a block copied before the step writes anything.

        The source need not be held: even if this step gives it to someone else, it is copied first. If
        nobody holds it, it counts as used just now.
        """
        self._copies.append((source, target))
        block_ids = np.array([source], np.int32)
        if self._pool.count_free(block_ids):
            self._pool.touch(block_ids)
            self._pool.free_blocks(block_ids)

    def _admit(self, sequence: TokenSequence, hit_ids: BlockIds, hit: PrefixHit | None) -> _Holding:
        holding = _Holding(sequence, self._tables.open_row(), len(hit_ids))
        self._held[sequence.request_id] = holding
        self._pool.touch(hit_ids)
        self._tables.append(holding.row, hit_ids)
        num_hit_tokens = hit.num_tokens if hit is not None else 0
        if hit is not None and hit.resumed:
            self.stats.preempted_requests += 1
            self.stats.preempted_queries += len(sequence)
            self.stats.preempted_hits += num_hit_tokens
        else:
            self.stats.requests += 1
            self.stats.queries += len(sequence)
            self.stats.hits += num_hit_tokens
            self.recent.observe(len(sequence), num_hit_tokens)
        return holding

    def cache_blocks(self, sequence: TokenSequence, num_tokens: int) -> None:
        """Index the blocks that the first `num_tokens` tokens fill and that are not indexed yet."""
        if not self.enable_prefix_caching:
            return
        holding = self._held[sequence.request_id]
        num_full = min(num_tokens, len(sequence)) // self.block_size
        if num_full > holding.num_indexed:
            block_ids = self._tables.row(holding.row)[holding.num_indexed : num_full]
            self._index.insert(sequence, holding.num_indexed, block_ids)
            self._pool.note_cached(block_ids, np.arange(holding.num_indexed, num_full, dtype=np.int32))
            self._indexed_in[block_ids] = self._step
            holding.num_indexed = num_full

    def forget_uncomputed(self, request_id: str, num_computed_tokens: int) -> None:
        """Take back the early indexing of blocks whose step failed: only computed blocks stay."""
        holding = self._held[request_id]
        num_full = num_computed_tokens // self.block_size
        if num_full < holding.num_indexed:
            self.evict_blocks(self._tables.row(holding.row)[num_full : holding.num_indexed])
            holding.num_indexed = num_full

    def free(self, request_id: str) -> None:
        """Release a request's blocks, last block first, so that tails are evicted before heads."""
        holding = self._held.pop(request_id)
        self._pool.free_blocks(self._tables.row(holding.row)[::-1].copy())
        self._tables.close_row(holding.row)

    # ---------------------------------------------------------------- eviction

    def evict_blocks(self, block_ids: BlockIds) -> None:
        """Forget what these blocks hold. Requests that hold them keep them."""
        self._pool.note_forgotten(self._index.remove(block_ids))

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes and start the statistics anew. Raises CacheBusyError while in use."""
        if self._held:
            raise CacheBusyError(
                f"the prefix cache cannot be reset while {len(self._held)} requests hold its blocks "
                f"(first: {next(iter(self._held))!r}); wait for them or abort them"
            )
        self._index.clear()
        self._pool.note_forgotten(np.arange(self.num_blocks, dtype=np.int32))
        self.stats = PrefixCacheStats()
        self.recent.reset()

    def _forget_reused(self, block_ids: BlockIds) -> None:
        before = len(self._index)
        self.evict_blocks(block_ids)
        self.stats.evictions += before - len(self._index)

    # -------------------------------------------------------------------- view

    def block_ids(self, request_id: str) -> BlockIds:
        """Block table of one request (a copy)."""
        return self._tables.row(self._held[request_id].row).copy()

    def block_tables(self, request_ids: Sequence[str]) -> tuple[BlockIds, npt.NDArray[np.int32]]:
        """Block tables of several requests, [requests, longest], and their lengths in blocks (copies)."""
        rows = np.array([self._held[request_id].row for request_id in request_ids], np.int64)
        return self._tables.gather(rows)

    def held_request_ids(self) -> list[str]:
        """Requests that hold blocks."""
        return list(self._held)

    def get_num_common_prefix_blocks(self, request_ids: Sequence[str]) -> int:
        """Number of leading blocks that all these requests share physically."""
        if not request_ids:
            return 0
        tables, lengths = self.block_tables(request_ids)
        shared = (tables == tables[0]).all(axis=0)[: int(lengths.min())]
        return int(shared.argmin()) if not shared.all() else len(shared)

    def get_num_free_blocks(self) -> int:
        return self._pool.get_num_free_blocks()

    def get_num_cached_blocks(self) -> int:
        """Blocks that hold an indexed prefix, held by requests or not."""
        return len(self._index)

    def get_usage(self) -> float:
        """Share of the blocks held by requests, 0.0 to 1.0."""
        return self._pool.get_usage()

    def free_block_ids(self) -> BlockIds:
        """Free blocks in the order in which they will be given away (a copy)."""
        return self._pool.free_block_ids()

    def check_integrity(self) -> None:
        """Raise AssertionError if counts, queue, tables and index contradict each other."""
        tables = [self._tables.row(holding.row) for holding in self._held.values()]
        held = np.concatenate([*tables, NO_BLOCKS])
        self._pool.check_integrity(np.bincount(held, minlength=self.num_blocks).astype(np.int32))
        self._index.check_integrity()
        for table, holding in zip(tables, self._held.values(), strict=True):
            assert len(np.unique(table)) == len(table), "a block stands twice in one table"
            assert holding.num_indexed <= holding.sequence.num_full_blocks, "a block was indexed too early"
