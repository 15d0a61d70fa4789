"""KVCacheManager: the scheduler's only door to the cache.

Knows sequences of token ids and the blocks that hold their KV; knows nothing of text, tensors,
priorities or time. One request's life, as in vLLM v1:

    begin_step()
    hit = get_computed_blocks(sequence)            what is there already; changes nothing
    allocate_slots(sequence, num_tokens, hit)      admitted: hit blocks held, new blocks taken
    allocate_slots(sequence, num_tokens) ...       each step: room for the tokens of this step
    allocate_running_slots(handles, num_tokens)    the same for all running requests at once
    take_copies()                                  what the runner copies first
    free(request_id)                               blocks leave the request, but stay cached

The blocks that a step will fill are indexed when their slots are allocated, before the step runs, so
that later members of the same batch already hit them: every layer writes the KV of the whole batch
before it reads any.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from foreword.cache.block_pool import BlockIds, BlockPool
from foreword.cache.coordinator import (
    KVCacheCoordinatorNoPrefixCache,
    PrefixHit,
    UnitaryKVCacheCoordinator,
)
from foreword.cache.eviction import EvictionPolicy, make_policy
from foreword.cache.group_specs import FullAttentionSpec, GroupSpec, SinkFullSpec
from foreword.cache.groups import IntArray, MambaManager
from foreword.cache.hybrid import HybridKVCacheCoordinator
from foreword.cache.index import HashIndex, PrefixIndex
from foreword.cache.sequence import TokenSequence
from foreword.cache.stats import CachingMetrics, PrefixCacheStats
from foreword.errors import CacheBusyError, ConfigError

DEFAULT_BLOCK_SIZE = 16


@dataclass(slots=True)
class _Holding:
    """What one request holds."""

    sequence: TokenSequence
    row: int


class KVCacheManager:
    """Gives blocks to requests and finds the blocks that earlier requests left behind.

    Without `groups` all layers attend to everything: one table per request, blocks of `block_size`
    tokens (default 16), any `index` (default HashIndex). With `groups` a request has one table per
    group; `block_size` is then that of the sequences, and divides every group's (default: the greatest
    that does). Raises ConfigError for sizes that do not fit together.
    """

    def __init__(
        self,
        num_blocks: int,
        *,
        block_size: int | None = None,
        enable_prefix_caching: bool = True,
        index: PrefixIndex | None = None,
        groups: Sequence[GroupSpec] | None = None,
        eviction_policy: str | EvictionPolicy = "lru",
    ) -> None:
        if block_size is None:
            block_size = math.gcd(*(group.block_size for group in groups)) if groups else DEFAULT_BLOCK_SIZE
        if num_blocks < 1 or block_size < 1:
            raise ConfigError(
                f"num_blocks={num_blocks} and block_size={block_size} must both be at least 1; give the cache "
                "more memory or smaller blocks"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        """Tokens per block of the sequences that this manager serves."""
        self.groups = tuple(groups) if groups else (FullAttentionSpec(block_size),)
        self.enable_prefix_caching = enable_prefix_caching
        self.stats = PrefixCacheStats()
        self.recent = CachingMetrics()
        policy = make_policy(eviction_policy, num_blocks) if isinstance(eviction_policy, str) else eviction_policy
        self._pool = BlockPool(num_blocks, on_reuse=self._forget_reused, policy=policy)
        self._coordinator = self._make_coordinator(index)
        self._coordinator.reserve()
        self._held: dict[str, _Holding] = {}
        self._sequences: dict[int, TokenSequence] = {}
        self._num_slots: IntArray = np.zeros(16, np.int64)
        self._copies: list[tuple[int, int]] = []

    def _make_coordinator(self, index: PrefixIndex | None) -> KVCacheCoordinatorNoPrefixCache:
        for group in self.groups:
            if group.block_size % self.block_size:
                raise ConfigError(
                    f"block_size={self.block_size} does not divide the block_size of {group}; leave it out, or "
                    "choose a common divisor of all groups' sizes"
                )
        if not self.enable_prefix_caching:
            return KVCacheCoordinatorNoPrefixCache(self.groups, self._pool)
        first = self.groups[0]
        if self.has_one_full_group and first.block_size == self.block_size:
            index = index if index is not None else HashIndex(self.num_blocks)
            return UnitaryKVCacheCoordinator(first, self._pool, index)
        if index is not None:
            raise ConfigError(
                f"index={type(index).__name__} finds whole prefixes only, but these groups look up single blocks; "
                "leave it out"
            )
        return HybridKVCacheCoordinator(self.groups, self._pool, self.block_size)

    @property
    def has_one_full_group(self) -> bool:
        """Whether every layer needs every block, so that hits are prefixes."""
        return len(self.groups) == 1 and isinstance(self.groups[0], (FullAttentionSpec, SinkFullSpec))

    # -------------------------------------------------------------------- step

    def begin_step(self) -> None:
        """A new batch is being put together; what was allocated before has been computed."""
        self._coordinator.begin_step()

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
        if skip_reading:
            hit = self._coordinator.nothing
        else:
            hit = self._coordinator.find_longest_cache_hit(sequence)
        return replace(hit, resumed=True) if resumed else hit

    def is_cached(self, sequence: TokenSequence, block: int) -> bool:
        """Whether the full block number `block` is cached, given that those before it are."""
        return self._coordinator.holds(sequence, block)

    # -------------------------------------------------------------- allocation

    def allocate_slots(
        self,
        sequence: TokenSequence,
        num_tokens: int,
        hit: PrefixHit | None = None,
        *,
        save_states_at: Sequence[int] = (),
    ) -> BlockIds | None:
        """Make room for the KV of the first `num_tokens` tokens; None, and no change, if blocks are short.

        The first call for a request admits it and takes its `hit` (None: nothing was hit) and what
        `save_states_at` would be told. Later calls
        take what earlier ones made room for as computed, and give up blocks that are no longer needed.
        Returns the newly taken blocks, group by group. Blocks that these tokens fill are indexed at once.
        """
        holding = self._held.get(sequence.request_id)
        if holding is None:
            return self._admit(sequence, num_tokens, hit, save_states_at)
        assert hit is None, "a hit is taken when the request is admitted, not later"
        row = holding.row
        new_ids = self._coordinator.grow(row, int(self._num_slots[row]), num_tokens)
        if new_ids is not None:
            self._num_slots[row] = num_tokens
            self._coordinator.cache_blocks(row, sequence, num_tokens)
        return new_ids

    def _admit(
        self, sequence: TokenSequence, num_tokens: int, hit: PrefixHit | None, save_states_at: Sequence[int]
    ) -> BlockIds | None:
        admitted = self._coordinator.admit(hit, num_tokens)
        if admitted is None:
            return None
        row, new_ids = admitted
        if hit is not None and hit.partial is not None:
            self._copy_on_write(hit.partial.block_id, int(new_ids[0]))
        self._held[sequence.request_id] = _Holding(sequence, row)
        self._sequences[row] = sequence
        if row >= len(self._num_slots):
            self._num_slots = np.concatenate((self._num_slots, np.zeros_like(self._num_slots)))
        self._num_slots[row] = num_tokens
        if save_states_at:
            self.save_states_at(sequence.request_id, save_states_at)
        self._count(len(sequence), hit)
        self._coordinator.cache_blocks(row, sequence, num_tokens)
        return new_ids

    def handles(self, request_ids: Iterable[str]) -> IntArray:
        """Numbers that stand for held requests in `allocate_running_slots`, each valid until it is freed."""
        return np.array([self._held[request_id].row for request_id in request_ids], np.int64)

    def allocate_running_slots(self, handles: IntArray, num_tokens: IntArray) -> int:
        """`allocate_slots` for many distinct held requests, in their order, up to the first that is short.

        Request `handles[i]` gets room for `num_tokens[i]` tokens. Returns how many were served, all of
        them from the front; for the others nothing has changed. Blocks, counts and index are the same
        as after as many single calls, but only requests that begin or fill a block cost Python work.
        """
        starts = self._num_slots[handles]
        served = self._coordinator.grow_each(handles, starts, num_tokens)
        if served < len(handles):
            handles, starts, num_tokens = handles[:served], starts[:served], num_tokens[:served]
        self._num_slots[handles] = num_tokens
        if not self.enable_prefix_caching:
            return served
        filled = np.flatnonzero(num_tokens // self.block_size > starts // self.block_size)
        for row, end in zip(handles[filled].tolist(), num_tokens[filled].tolist(), strict=True):
            self._coordinator.cache_blocks(row, self._sequences[row], end)
        return served

    def allocate_decode_slots(self, handles: IntArray) -> int:
        """`allocate_running_slots` for requests that all have grown by one token since their last call."""
        return self.allocate_running_slots(handles, self._num_slots[handles] + 1)

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

    def _count(self, num_tokens: int, hit: PrefixHit | None) -> None:
        num_hit_tokens = hit.num_tokens if hit is not None else 0
        stats = self.stats
        if hit is not None and hit.resumed:
            stats.preempted_requests += 1
            stats.preempted_queries += num_tokens
            stats.preempted_hits += num_hit_tokens
        else:
            stats.requests += 1
            stats.queries += num_tokens
            stats.hits += num_hit_tokens
            self.recent.observe(num_tokens, num_hit_tokens)

    def cache_blocks(self, sequence: TokenSequence, num_tokens: int) -> None:
        """Index the blocks that the first `num_tokens` tokens fill and that are not indexed yet."""
        self._coordinator.cache_blocks(self._held[sequence.request_id].row, sequence, num_tokens)

    def save_states_at(self, request_id: str, positions: Iterable[int]) -> None:
        """Have recurrent states behind these numbers of tokens saved too, beyond the groups' intervals.

        Takes effect for steps that end exactly there; numbers that are no multiples of every group's
        block size are ignored, as no hit could end there.
        """
        row = self._held[request_id].row
        positions = list(positions)
        for manager in self._coordinator.managers:
            if isinstance(manager, MambaManager):
                manager.ask_for_states(row, positions)

    def forget_state(self, sequence: TokenSequence, num_tokens: int) -> None:
        """Let the recurrent states behind the first `num_tokens` tokens go if nobody holds them."""
        self._coordinator.forget_state(sequence, num_tokens)

    def forget_uncomputed(self, request_id: str, num_computed_tokens: int) -> None:
        """Take back the early indexing of blocks whose step failed: only computed blocks stay."""
        self._coordinator.forget_from(self._held[request_id].row, num_computed_tokens)

    def free(self, request_id: str) -> None:
        """Release a request's blocks, last block first, so that tails are evicted before heads."""
        row = self._held.pop(request_id).row
        del self._sequences[row]
        self._coordinator.close(row)

    # ---------------------------------------------------------------- eviction

    def evict_blocks(self, block_ids: BlockIds) -> None:
        """Forget what these blocks hold. Requests that hold them keep them."""
        self._coordinator.forget(block_ids)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes and start the statistics anew. Raises CacheBusyError while in use."""
        if self._held:
            raise CacheBusyError(
                f"the prefix cache cannot be reset while {len(self._held)} requests hold its blocks "
                f"(first: {next(iter(self._held))!r}); wait for them or abort them"
            )
        self._coordinator.clear()
        self.stats = PrefixCacheStats()
        self.recent.reset()

    def _forget_reused(self, block_ids: BlockIds) -> None:
        self.stats.evictions += self._coordinator.forget(block_ids)

    # -------------------------------------------------------------------- view

    def block_ids(self, request_id: str, group_id: int = 0) -> BlockIds:
        """Block table of one request in one group (a copy)."""
        return self._coordinator.tables.groups[group_id].row(self._held[request_id].row).copy()

    def block_tables(self, request_ids: Sequence[str], group_id: int = 0) -> tuple[BlockIds, npt.NDArray[np.int32]]:
        """One group's tables of several requests, [requests, longest], and their lengths in blocks (copies).

        An entry is NULL_BLOCK where the group needs nothing any more.
        """
        return self._coordinator.tables.groups[group_id].gather(self.handles(request_ids))

    def group_block_tables(self, request_ids: Sequence[str]) -> list[tuple[BlockIds, npt.NDArray[np.int32]]]:
        """`block_tables` of every group."""
        rows = self.handles(request_ids)
        return [tables.gather(rows) for tables in self._coordinator.tables.groups]

    def sink_block_ids(self) -> BlockIds:
        """Blocks that hold the groups' sinks, in the order of the groups; in no request's table (a copy)."""
        return self._coordinator.held_for_ever()

    def num_required_blocks(self, num_tokens: int, hit: PrefixHit) -> int:
        """Free blocks that admitting a request with this hit takes, for its first `num_tokens` tokens."""
        return self._coordinator.num_required_blocks(hit, num_tokens)

    def can_ever_hold(self, num_tokens: int, max_step_tokens: int) -> bool:
        """Whether a request of `num_tokens` fits into the empty pool, in steps of `max_step_tokens` at most."""
        usable = self.num_blocks - len(self.sink_block_ids())
        return self.max_num_blocks(num_tokens, max_step_tokens) <= usable

    def max_num_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """Most blocks that a request of `num_tokens` holds at a time, in steps of `max_step_tokens` at most."""
        return self._coordinator.max_num_blocks(num_tokens, max_step_tokens)

    def held_request_ids(self) -> list[str]:
        """Requests that hold blocks."""
        return list(self._held)

    def get_num_common_prefix_blocks(self, request_ids: Sequence[str], group_id: int = 0) -> int:
        """Number of leading table entries of one group that all these requests share physically."""
        if not request_ids:
            return 0
        tables, lengths = self.block_tables(request_ids, group_id)
        shared = (tables == tables[0]).all(axis=0)[: int(lengths.min())]
        return int(shared.argmin()) if not shared.all() else len(shared)

    def get_num_free_blocks(self) -> int:
        return self._pool.get_num_free_blocks()

    def get_num_cached_blocks(self) -> int:
        """Blocks that hold an indexed prefix, held by requests or not."""
        return self._coordinator.num_indexed

    def num_cached_tokens(self) -> int:
        """Tokens whose KV is cached, in the group that has most of them; duplicates count."""
        counts = self._coordinator.num_indexed_by_group()
        return max(count * group.block_size for count, group in zip(counts, self.groups, strict=True))

    def get_usage(self) -> float:
        """Share of the blocks held by requests, 0.0 to 1.0."""
        return self._pool.get_usage()

    def free_block_ids(self) -> BlockIds:
        """Free blocks in the order in which they will be given away (a copy)."""
        return self._pool.free_block_ids()

    def check_integrity(self) -> None:
        """Raise AssertionError if counts, queue, tables and index contradict each other."""
        rows = [holding.row for holding in self._held.values()]
        assert self._sequences == {h.row: h.sequence for h in self._held.values()}, "rows and requests differ"
        self._coordinator.check_integrity(rows, self._sequences.__getitem__)
