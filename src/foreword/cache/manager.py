"""KVCacheManager: the scheduler's only door to the cache.

Knows sequences of token ids and the blocks that hold their KV; knows nothing of text, tensors,
priorities or clocks. One request's life, as in vLLM v1:

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

import enum
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from foreword.cache.account.ledger import CacheLedger, EvictionCause
from foreword.cache.account.stats import CachingMetrics, PrefixCacheStats
from foreword.cache.block_ids import NULL_BLOCK, BlockIds, Int64Array, as_block_ids
from foreword.cache.eviction.choose import make_policy
from foreword.cache.eviction.pins import PinnedPolicy
from foreword.cache.eviction.policy import EvictionPolicy
from foreword.cache.explain import LookupExplanation, explain_lookup
from foreword.cache.groups.choose import get_kv_cache_coordinator, is_one_full_group
from foreword.cache.groups.coordinator import PrefixHit
from foreword.cache.groups.group_specs import FullAttentionSpec, GroupSpec
from foreword.cache.groups.managers import MambaManager, Position
from foreword.cache.index.prefix_index import PrefixIndex
from foreword.cache.index.tree_view import PrefixNode
from foreword.cache.keys.sequence import TokenSequence
from foreword.errors import AllocationError, CacheBusyError, ConfigError, InvalidRequestError

DEFAULT_BLOCK_SIZE = 16


class BlockState(enum.IntEnum):
    """What a block is to the pool."""

    FREE = 0
    """It holds nothing that can be found."""
    CACHED = 1
    """It can be found, and no request holds it."""
    IN_USE = 2
    """A request holds it, findable or not."""
    PINNED = 3
    """It has a pin, held or not."""


class KVCacheManager:
    """Gives blocks to requests and finds the blocks that earlier requests left behind.

    Without `groups` all layers attend to everything: one table per request, blocks of `block_size`
    tokens (default 16), any `index` (default HashIndex). With `groups` a request has one table per
    group; `block_size` is then that of the sequences, and divides every group's (default: the greatest
    that does). An `eviction_policy` that is a PinnedPolicy lets prefixes be pinned. With a `ledger` every
    lookup can explain itself; it costs one key per block, which the radix index does without. `deduplicate`
    keeps one copy of equal blocks (one full group only): tables are then not append-only, and change in
    `begin_step`. Raises ConfigError for what does not fit together.
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
        ledger: CacheLedger | None = None,
        deduplicate: bool = False,
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
        self.ledger = ledger if enable_prefix_caching else None
        self.recent = CachingMetrics()
        policy = make_policy(eviction_policy, num_blocks) if isinstance(eviction_policy, str) else eviction_policy
        self._pins = policy if isinstance(policy, PinnedPolicy) else None
        self._coordinator = get_kv_cache_coordinator(
            self.groups,
            num_blocks,
            policy,
            block_size,
            enable_prefix_caching=enable_prefix_caching,
            index=index,
            ledger=self.ledger,
            deduplicate=deduplicate,
        )
        self._pool = self._coordinator.pool
        self._not_looked_up = replace(self._coordinator.nothing, skipped=True)
        self._coordinator.reserve()
        self._row_of: dict[str, int] = {}
        self._explanations: dict[str, LookupExplanation] = {}
        self._sequences: dict[int, TokenSequence] = {}
        self._num_slots: Int64Array = np.zeros(16, np.int64)
        """Row -> tokens that it has room for."""
        self._quiet_until: Int64Array = np.zeros(16, np.int64)
        """Row -> tokens up to which it grows without taking, giving up or filling a block."""
        self._uncomputed_from: dict[int, int] = {}
        """Row -> tokens that are computed, where that is fewer than it has room for because a step failed."""
        self._copied: dict[int, tuple[int, int]] = {}
        """Row that began with a copy -> tokens in shared blocks, and tokens with those that were to be copied."""
        self._copies: list[tuple[int, int]] = []

    @property
    def stats(self) -> PrefixCacheStats:
        """What was looked up, found and evicted since the last `reset_prefix_cache`."""
        return self._coordinator.stats

    @property
    def has_one_full_group(self) -> bool:
        """Whether every layer needs every block, so that hits are prefixes."""
        return is_one_full_group(self.groups)

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
        self, sequence: TokenSequence, *, skip_reading: bool = False, resumed: bool = False, forked: bool = False
    ) -> PrefixHit:
        """The longest cached prefix of `sequence`. Changes nothing, counts nothing.

        `resumed` and `forked` say how its lookup is counted if the hit is taken (stats.py).
        """
        if skip_reading:
            hit = self._not_looked_up
        else:
            hit = self._coordinator.find_longest_cache_hit(sequence)
        return replace(hit, resumed=resumed, forked=forked) if resumed or forked else hit

    def is_cached(self, sequence: TokenSequence, block: int) -> bool:
        """Whether the full block number `block` is cached, given that those before it are."""
        return self._coordinator.holds(sequence, block)

    def explain(self, sequence: TokenSequence, hit: PrefixHit | None = None) -> LookupExplanation:
        """Why the rest of `sequence` was not found, given its hit (None: the next step's). Changes nothing.

        Call it before the sequence is admitted: later it would find its own blocks. Raises ConfigError
        without a ledger.
        """
        if self.ledger is None:
            raise ConfigError(
                "this cache keeps no ledger and cannot say why it missed; give ledger=CacheLedger(num_blocks), and "
                "leave prefix caching on"
            )
        hit = hit if hit is not None else self._coordinator.find_hit_of_next_step(sequence)
        return explain_lookup(sequence, hit, self._coordinator, self._sequences.values())

    def explanation_of(self, request_id: str) -> LookupExplanation | None:
        """How the lookup that admitted a held request went; None without a ledger."""
        return self._explanations.get(request_id)

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

        The first call for a request admits it and takes its `hit` (None: nothing was looked up) and what
        `save_states_at` would be told. Later calls
        take what earlier ones made room for as computed, and give up blocks that are no longer needed.
        Returns the newly taken blocks, group by group. Blocks that these tokens fill are indexed at once.
        Raises AllocationError, and changes nothing, for fewer tokens than there is room for already.
        """
        row = self._row_of.get(sequence.request_id)
        if row is None:
            return self._admit(sequence, num_tokens, hit, save_states_at)
        assert hit is None, "a hit is taken when the request is admitted, not later"
        if num_tokens < self._num_slots[row]:
            self._refuse_to_shrink(np.array([row]), np.array([num_tokens]))
        new_ids = self._coordinator.grow(row, int(self._num_slots[row]), num_tokens)
        if new_ids is not None:
            self._num_slots[row] = num_tokens
            self._uncomputed_from.pop(row, None)
            self._quiet_until[row] = self._end_of_quiet(num_tokens)
            self._coordinator.cache_blocks(row, sequence, num_tokens)
        return new_ids

    def _admit(
        self, sequence: TokenSequence, num_tokens: int, hit: PrefixHit | None, save_states_at: Sequence[int]
    ) -> BlockIds | None:
        hit = hit if hit is not None else self._not_looked_up
        if num_tokens < max(1, hit.num_tokens):
            raise AllocationError(
                f"num_tokens={num_tokens} is less than the {max(1, hit.num_tokens)} tokens that request "
                f"{sequence.request_id!r} needs room for; count its hit, and at least one token"
            )
        explanation = self.explain(sequence, hit) if self.ledger is not None else None  # sees what admission evicts
        num_tail_tokens = self._num_tail_tokens(hit)
        admitted = self._coordinator.admit(hit, num_tokens)
        if admitted is None:
            return None
        row, new_ids = admitted
        if hit.partial is not None:
            self._copy_on_write(hit.partial.block_id, int(new_ids[0]))
            self._copied[row] = hit.num_shared_tokens, hit.num_tokens
        self._row_of[sequence.request_id] = row
        if explanation is not None:
            self._explanations[sequence.request_id] = explanation
        self._sequences[row] = sequence
        if row >= len(self._num_slots):
            self._num_slots = np.concatenate((self._num_slots, np.zeros_like(self._num_slots)))
            self._quiet_until = np.concatenate((self._quiet_until, np.zeros_like(self._quiet_until)))
        self._num_slots[row] = num_tokens
        if save_states_at:
            self.save_states_at(sequence.request_id, save_states_at)
        self._quiet_until[row] = self._end_of_quiet(num_tokens)
        self._count(len(sequence), hit, explanation, num_tail_tokens)
        self._coordinator.cache_blocks(row, sequence, num_tokens)
        return new_ids

    def handles(self, request_ids: Iterable[str]) -> Int64Array:
        """Numbers that stand for held requests, each valid until it is freed; small, as they are given again."""
        return np.fromiter(map(self._row_of.__getitem__, request_ids), np.int64)

    def allocate_running_slots(self, handles: Int64Array, num_tokens: Int64Array) -> int:
        """`allocate_slots` for many distinct held requests, in their order, up to the first that is short.

        Request `handles[i]` gets room for `num_tokens[i]` tokens: no fewer than it has room for, and at most one more
        than its sequence has, for a token that is expected. Returns how many were served, all of them from the front;
        for the others nothing has changed. Blocks, counts and index are the same as after as many single calls, but
        one comparison tells the requests that begin or fill a block; the others cost nothing more. Raises
        AllocationError, and changes nothing, if a request is to get fewer tokens than it has room for.
        """
        served = len(handles)
        if (num_tokens < self._num_slots[handles]).any():
            self._refuse_to_shrink(handles, num_tokens)
        busy = (num_tokens > self._quiet_until[handles]).nonzero()[0]
        if len(busy):
            num_done = self._allocate_busy(handles[busy], num_tokens[busy])
            if num_done < len(busy):
                served = int(busy[num_done])
                handles, num_tokens = handles[:served], num_tokens[:served]
        self._num_slots[handles] = num_tokens
        if self._uncomputed_from:
            for row in handles.tolist():
                self._uncomputed_from.pop(row, None)
        return served

    def _refuse_to_shrink(self, rows: Int64Array, num_tokens: Int64Array) -> NoReturn:
        at = int((num_tokens < self._num_slots[rows]).argmax())
        row = int(rows[at])
        raise AllocationError(
            f"num_tokens={num_tokens[at]} is less than the {self._num_slots[row]} tokens that request "
            f"{self._sequences[row].request_id!r} has room for; tables only grow, so free it and admit it again"
        )

    def num_quiet_tokens(self, handles: Int64Array) -> int:
        """By how many tokens all these requests can grow without taking, giving up or filling a block."""
        return max(0, int((self._quiet_until[handles] - self._num_slots[handles]).min()))

    def _allocate_busy(self, rows: Int64Array, ends: Int64Array) -> int:
        """Take, give up and index blocks for the first rows for which there are enough; returns their number."""
        starts = self._num_slots[rows]
        served = self._coordinator.grow_each(rows, starts, ends)
        if served < len(rows):
            rows, starts, ends = rows[:served], starts[:served], ends[:served]
        self._quiet_until[rows] = self._end_of_quiet(ends)
        if self.enable_prefix_caching:
            filled = (ends // self.block_size > starts // self.block_size).nonzero()[0]
            if len(filled):
                self._cache_filled(rows[filled], ends[filled])
        return served

    def _cache_filled(self, rows: Int64Array, ends: Int64Array) -> None:
        """Index what these rows fill, but not a block whose last token is not known yet."""
        known = [len(self._sequences[row]) >= end for row, end in zip(rows.tolist(), ends.tolist(), strict=True)]
        if not any(known):
            return
        if not all(known):
            rows, ends = rows[known], ends[known]
        self._coordinator.cache_blocks_each(rows, self._sequences.__getitem__, ends)

    def has_blocks_for(self, handles: Int64Array, num_tokens: Int64Array) -> bool:
        """Whether `allocate_running_slots` would surely serve all, whatever blocks they give up."""
        starts = self._num_slots[handles]
        sizes = (group.block_size for group in self.groups)
        needed = sum(int((-(-num_tokens // size) - -(-starts // size)).sum()) for size in sizes)
        return needed <= self.get_num_free_blocks()

    def _end_of_quiet(self, num_tokens: Position) -> Position:
        """Up to how many tokens a request grows from `num_tokens` without any change in its blocks.

        block size 4, a block is filled and indexed at f, taken at t:   tokens  5  6  7  8  9
                                                                                t        f  t
        """
        if not self._coordinator.has_quiet_steps:
            return 0 * num_tokens
        end: Position = -(-num_tokens // self.block_size) * self.block_size
        return end - (end != num_tokens)  # type: ignore[no-any-return]  # int or array, as it came

    def allocate_decode_slots(self, handles: Int64Array) -> int:
        """`allocate_running_slots` for requests that all have grown by one token since their last call."""
        return self.allocate_running_slots(handles, self._num_slots[handles] + 1)

    def _copy_on_write(self, source: int, target: int) -> None:
        """Have a block copied before the step writes anything.

        The source need not be held: even if this step gives it to someone else, it is copied first. If
        nobody holds it, it counts as used just now.
        """
        self._copies.append((source, target))
        self._pool.refresh(source)

    def _num_tail_tokens(self, hit: PrefixHit) -> int:
        """Tokens of the hit that are in a tail."""
        if hit.partial is None or not self._pool.is_tail(np.array([hit.partial.block_id], np.int32))[0]:
            return 0
        return hit.num_tokens - hit.num_shared_tokens

    def _count(
        self, num_tokens: int, hit: PrefixHit, explanation: LookupExplanation | None, num_tail_tokens: int
    ) -> None:
        stats = self.stats
        if hit.resumed:
            stats.preempted_requests += 1
            stats.preempted_queries += num_tokens
            stats.preempted_hits += hit.num_tokens
            return
        if hit.forked:
            stats.forked_requests += 1
            stats.forked_queries += num_tokens
            stats.forked_hits += hit.num_tokens
            return
        stats.requests += 1
        stats.queries += num_tokens
        stats.hits += hit.num_tokens
        stats.tail_hits += num_tail_tokens
        self.recent.observe(num_tokens, hit.num_tokens)
        if explanation is not None and explanation.reason is not None:
            stats.misses[explanation.reason] += 1
            stats.missed_tokens[explanation.reason] += explanation.num_missed_tokens
            stats.ghost_hits += explanation.num_ghost_tokens

    def cache_known_blocks(self, handles: Int64Array) -> None:
        """Index the blocks of these requests whose slots were allocated when their last token was expected."""
        self._coordinator.cache_blocks_each(handles, self._sequences.__getitem__, self._num_slots[handles])

    def save_states_at(self, request_id: str, positions: Iterable[int]) -> None:
        """Have recurrent states after these numbers of tokens saved too, beyond the groups' intervals.

        Takes effect for steps that end exactly there; numbers that are no multiples of every group's
        block size are ignored, as no hit could end there.
        """
        row = self._row_of[request_id]
        positions = list(positions)
        for manager in self._coordinator.managers:
            if isinstance(manager, MambaManager):
                manager.ask_for_states(row, positions)

    def forget_uncomputed(self, request_id: str, num_computed_tokens: int) -> None:
        """Take back the early indexing of blocks whose step failed: only computed blocks stay."""
        row = self._row_of[request_id]
        num_shared, num_copied = self._copied.get(row, (0, 0))
        if num_computed_tokens <= num_copied:  # its first step failed, so maybe nothing was copied
            num_computed_tokens = min(num_computed_tokens, num_shared)
        self._uncomputed_from[row] = num_computed_tokens
        self._coordinator.forget_from(row, num_computed_tokens)

    def cache_blocks(self, sequence: TokenSequence, num_tokens: int) -> None:
        """Index what the first `num_tokens` tokens of a held request fill, as far as it has room for them.

        `allocate_slots` does so by itself; call this where tokens become known only after their slots were allocated.
        """
        row = self._row_of[sequence.request_id]
        self._coordinator.cache_blocks(row, sequence, min(num_tokens, int(self._num_slots[row])))

    def free(self, request: str | TokenSequence) -> None:
        """Release a request's blocks, last block first, so that tails are evicted before heads.

        What is computed of its last block stays findable too, if the index keeps tails: known tokens that have slots.
        A sequence that generated what is no token leaves no tail.
        """
        request_id = request if isinstance(request, str) else request.request_id
        row = self._row_of.pop(request_id)
        self._explanations.pop(request_id, None)
        self._copied.pop(row, None)
        sequence = self._sequences.pop(row)
        num_computed = min(int(self._num_slots[row]), len(sequence))
        num_computed = min(num_computed, self._uncomputed_from.pop(row, num_computed))
        with suppress(InvalidRequestError):  # freeing never fails
            self._coordinator.keep_tail(row, sequence, num_computed)
        self._coordinator.close(row)

    # ---------------------------------------------------------------- eviction

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Forget what these blocks hold. Requests that hold them keep them. NULL_BLOCK is passed over."""
        self._coordinator.forget(as_block_ids(block_ids, self.num_blocks), EvictionCause.REQUESTED)

    def pin_prefix(self, sequence: TokenSequence, until: float, now: float) -> int:
        """Evict the cached blocks of `sequence` last until that time; returns how many tokens they hold.

        Fewer than are cached where the budget ends: the head of the prefix is pinned first. A tail is pinned too, and
        from then on kept as a full block is. Pins are soft: when nothing else is free, they break. Raises ConfigError
        if the manager was made without pins.
        """
        block_ids, ends = self._found(sequence)
        pins, is_tail = self._checked_pins(), self._pool.is_tail(block_ids)
        pinned = pins.pin(block_ids[~is_tail], until, now)
        if is_tail.any() and until > now and pins.num_pinned < pins.max_pinned:
            tail = block_ids[is_tail]
            self._pool.keep_as_block(int(tail[0]), int(ends[is_tail][0]) // self.block_size)
            pinned = np.concatenate((pinned, pins.pin(tail, until, now)))
        missing = ends[~np.isin(block_ids, pinned)]
        hit_end = int(ends.max(initial=0))
        return hit_end if not len(missing) else int(ends[ends < missing.min()].max(initial=0))

    def unpin_prefix(self, sequence: TokenSequence) -> None:
        """Let the cached blocks of `sequence` be ordinary again. Raises ConfigError as `pin_prefix` does."""
        self._checked_pins().unpin(self._found(sequence)[0])

    def expire_pins(self, now: float) -> None:
        """End the pins whose time has come; to be called once a step."""
        if self._pins is not None:
            self._pins.expire(now)

    def _found(self, sequence: TokenSequence) -> tuple[BlockIds, Int64Array]:
        """Cached blocks of a sequence in all groups, and where its tokens in them end; in that order."""
        tables = self._coordinator.find_longest_cache_hit(sequence).tables
        sizes = self._coordinator.block_sizes
        ends = [np.arange(1, len(table) + 1) * size for table, size in zip(tables, sizes, strict=True)]
        all_ids, all_ends = np.concatenate(tables), np.concatenate(ends)
        order = np.argsort(all_ends, kind="stable")
        order = order[all_ids[order] != NULL_BLOCK]
        block_ids, ends_of_blocks = all_ids[order], all_ends[order]
        partial = self._coordinator.partial_block(sequence)
        if partial is not None:
            block_ids = np.append(block_ids, np.int32(partial.block_id))
            ends_of_blocks = np.append(ends_of_blocks, len(tables[0]) * self.block_size + partial.num_tokens)
        return block_ids, ends_of_blocks

    def _checked_pins(self) -> PinnedPolicy:
        if self._pins is None:
            raise ConfigError("this cache has no pins; choose a max_pinned_share above 0 (a PinnedPolicy)")
        return self._pins

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes and start the statistics anew. Raises CacheBusyError while in use."""
        if self._row_of:
            raise CacheBusyError(
                f"the prefix cache cannot be reset while {len(self._row_of)} requests hold its blocks "
                f"(first: {next(iter(self._row_of))!r}); wait for them or abort them"
            )
        self._coordinator.clear()
        self.recent.reset()

    # -------------------------------------------------------------------- view

    def block_ids(self, request_id: str, group_id: int = 0) -> BlockIds:
        """Block table of one request in one group (a copy)."""
        return self._coordinator.tables.groups[group_id].row(self._row_of[request_id]).copy()

    def block_tables(self, request_ids: Sequence[str], group_id: int = 0) -> tuple[BlockIds, npt.NDArray[np.int32]]:
        """One group's tables of several requests, [requests, longest], and their lengths in blocks (copies).

        An entry is NULL_BLOCK where the group needs nothing any more.
        """
        return self._coordinator.tables.groups[group_id].gather(self.handles(request_ids))

    def group_block_tables(self, handles: Int64Array) -> list[tuple[BlockIds, npt.NDArray[np.int32]]]:
        """`block_tables` of every group."""
        return [tables.gather(handles) for tables in self._coordinator.tables.groups]

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
        return list(self._row_of)

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
        """Full blocks that hold an indexed prefix, held by requests or not."""
        return self._coordinator.num_indexed

    def get_num_tails(self) -> int:
        """Partly filled blocks that hold the end of an indexed prefix; nobody holds them."""
        return self._coordinator.num_tails

    def num_cached_tokens(self) -> int:
        """Tokens whose KV is cached in full blocks, in the group that has most of them; duplicates count."""
        counts = self._coordinator.num_indexed_by_group()
        return max(count * group.block_size for count, group in zip(counts, self.groups, strict=True))

    def get_usage(self) -> float:
        """Share of the blocks held by requests, 0.0 to 1.0."""
        return self._pool.get_usage()

    def block_states(self) -> npt.NDArray[np.uint8]:
        """What each block is to the pool just now, as `BlockState` numbers, [num_blocks] (a copy)."""
        states = np.full(self.num_blocks, BlockState.FREE, np.uint8)
        states[self._coordinator.indexed_block_ids()] = BlockState.CACHED
        states[self._coordinator.tail_block_ids()] = BlockState.CACHED
        states[self._pool.ref_counts() > 0] = BlockState.IN_USE
        if self._pins is not None:
            states[self._pins.pinned_block_ids()] = BlockState.PINNED
        return states

    def top_prefixes(self, limit: int, under_salt: str = "") -> list[PrefixNode] | None:
        """The cached prefixes that were reused most, a parent before its children; None without a radix index.

        With `under_salt`, only those that are found under salts that begin so.
        """
        return self._coordinator.top_prefixes(limit, under_salt)

    def free_block_ids(self) -> BlockIds:
        """Free blocks in the order in which they will be given away (a copy)."""
        return self._pool.free_block_ids()

    def check_integrity(self) -> None:
        """Raise AssertionError if counts, queue, tables and index contradict each other."""
        rows = list(self._row_of.values())
        assert self._row_of == {s.request_id: row for row, s in self._sequences.items()}, "rows and requests differ"
        self._coordinator.check_integrity(rows, self._sequences.__getitem__)
        for manager in self._coordinator.managers:
            for row in rows:
                num_slots = int(self._num_slots[row])
                assert manager.tables.length(row) == -(-num_slots // manager.block_size), (
                    f"{self._sequences[row].request_id!r} has slots for {num_slots} tokens, but not the blocks for them"
                )
