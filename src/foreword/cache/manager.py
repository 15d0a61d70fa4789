"""KVCacheManager: the only interface between the scheduler and the cache.

One request's life, as in vLLM v1:

    begin_step()
    hit = get_computed_blocks(sequence)            the cached prefix; changes nothing
    row = admit(sequence, num_tokens, hit)         hit blocks held, new blocks taken
    grow(row, num_tokens) ...                      each step: room for the tokens of this step
    allocate_running_slots(rows, num_tokens)       the same for all running requests at once
    take_copies()                                  blocks that the runner copies first
    free(request_id)                               blocks leave the request, but stay cached
    close_session(session)                         blocks that only this session's requests used are evicted first

`allocate_slots` is `admit` and `grow` by request id, for callers that do not keep the numbers of rows. Pins are in
entries.py. Blocks can also be copied into the pool, or out of the pool, while no request holds them:

    tables = find_hit_with(sequence, keys)         the hit as if the pool also had blocks with these keys (ELSEWHERE)
    hold_blocks(...), take_blocks(count)           hold the blocks that the pool has; take blocks for the others
    ... somebody fills the taken blocks ...
    adopt(group, sequence, first, block_ids)       now lookups find the filled blocks
    release_blocks(...)                            the blocks are cached like any others

A taken block is not indexed, so no lookup finds it before `adopt`. A taken block that nobody fills is released without
`adopt`.

The blocks that a step will fill are indexed when their slots are allocated, before the step runs. So later requests of
the same batch already hit them. This is safe: every layer writes the KV of the whole batch before it reads any KV.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Hashable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from foreword.cache.account.ledger import CacheLedger, EvictionCause
from foreword.cache.account.sessions import SessionBlocks
from foreword.cache.account.stats import CachingMetrics, PrefixCacheStats
from foreword.cache.block_ids import BlockIds, Int64Array, as_block_ids, without_null
from foreword.cache.blocks.block_pool import KVCacheBlock, KVCacheBlocks
from foreword.cache.entries import EntryKeeper
from foreword.cache.eviction.policies import make_policy
from foreword.cache.eviction.policy import EvictionPolicy, LearningPolicy
from foreword.cache.explain import Below, LookupExplanation, explain_lookup
from foreword.cache.groups.choose import get_kv_cache_coordinator, is_one_full_group
from foreword.cache.groups.coordinator import Keys
from foreword.cache.groups.managers import FullAttentionSpec, GroupSpec, MambaManager, Position
from foreword.cache.index.prefix_index import PrefixHit, PrefixIndex, PrefixNode
from foreword.cache.keys.hashing import BlockHash, TokenArray
from foreword.cache.keys.sequence import TokenSequence
from foreword.errors import AllocationError, CacheBusyError, ConfigError, InvalidRequestError

DEFAULT_BLOCK_SIZE = 16


class BlockState(enum.IntEnum):
    """The state of a block in the pool."""

    FREE = 0
    """Lookups cannot find the block, and no request holds it."""
    CACHED = 1
    """Lookups can find the block, and no request holds it."""
    IN_USE = 2
    """A request holds the block, whether lookups can find it or not."""
    PINNED = 3
    """The block has a pin, whether a request holds it or not."""


class KVCacheManager(EntryKeeper):
    """Gives blocks to requests and finds the blocks that earlier requests left behind.

    Without `groups`, all layers attend to all positions. A request then has one table, a block has `block_size` tokens
    (default 16), and any `index` is possible (default HashIndex). With `groups`, a request has one table per group.
    Then `block_size` is the block size of the sequences, which divides every group's block size (default: the greatest
    common divisor of the groups' block sizes).

    Prefixes can be pinned if `eviction_policy` is a PinnedPolicy. With a `ledger`, `explain` says why a lookup missed;
    the ledger needs block keys, even with a radix index. With `deduplicate` (only for one full-attention group),
    `begin_step` removes copies of equal blocks from tables. Raises ConfigError for options that do not fit together.
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
        self.enable_prefix_caching = enable_prefix_caching
        self.ledger = ledger if enable_prefix_caching else None
        self.recent = CachingMetrics()
        policy = make_policy(eviction_policy, num_blocks) if isinstance(eviction_policy, str) else eviction_policy
        coordinator = get_kv_cache_coordinator(
            tuple(groups) if groups else (FullAttentionSpec(block_size),),
            num_blocks,
            policy,
            block_size,
            enable_prefix_caching=enable_prefix_caching,
            index=index,
            ledger=self.ledger,
            deduplicate=deduplicate,
        )
        super().__init__(coordinator, policy, block_size)
        self.groups, self.num_blocks = coordinator.specs, num_blocks
        self._row_of: dict[str, int] = {}
        """Request id -> row in the tables of all groups, for each request that holds blocks."""
        self._not_looked_up = replace(coordinator.nothing, skipped=True)
        self.below: Below | None = None
        """Says, for explanations, why the tiers below the pool lack a block; None: there are no tiers."""
        self._explanations: dict[int, LookupExplanation] = {}
        """Row -> the explanation of the lookup with which the row was admitted; empty without a ledger."""
        self._sequences: dict[int, TokenSequence] = {}
        self._num_slots: Int64Array = np.zeros(16, np.int64)
        """Row -> number of tokens that the row has room for."""
        self._quiet_until: Int64Array = np.zeros(16, np.int64)
        """Row -> number of tokens up to which the row can grow without taking, releasing or filling a block."""
        self._uncomputed_from: dict[int, int] = {}
        """Row -> number of computed tokens, if a step failed and left fewer than the row has room for."""
        self._copied: dict[int, tuple[int, int]] = {}
        """Row that began with a copy -> number of tokens in shared blocks, and number in shared and copied blocks."""
        self._copies: list[tuple[int, int]] = []
        self._held_apart: BlockIds = np.zeros(num_blocks, np.int32)
        """Block -> number of its holders that are not requests."""
        self._session_blocks: SessionBlocks | None = None
        """Which sessions used which blocks; None until a request of a session is admitted."""

    # -------------------------------------------------------------------- step

    def begin_step(self) -> None:
        """Begin a new batch. From now on, all blocks that were allocated earlier count as computed."""
        self._coordinator.begin_step()

    def take_copies(self) -> BlockIds:
        """Return the copies to make before the step writes anything, [copies, (source, target)], and forget them."""
        copies = np.array(self._copies, np.int32).reshape(-1, 2)
        self._copies.clear()
        return copies

    # ------------------------------------------------------------------ lookup

    def get_computed_blocks(
        self, sequence: TokenSequence, *, skip_reading: bool = False, resumed: bool = False, forked: bool = False
    ) -> PrefixHit:
        """The longest cached prefix of `sequence`. Changes nothing, counts nothing.

        `resumed` and `forked` decide how the lookup is counted if the request is admitted (`PrefixCacheStats`). Raises
        AllocationError for blocks of another size.
        """
        sequence.check_block_size(self.block_size)
        hit = self._not_looked_up if skip_reading else self._coordinator.find_longest_cache_hit(sequence)
        return replace(hit, resumed=resumed, forked=forked) if resumed or forked else hit

    def explain(self, sequence: TokenSequence, hit: PrefixHit | None = None) -> LookupExplanation:
        """Say why the tokens of `sequence` after `hit` were not found; None: the hit that the next step would find.

        Changes nothing. Call this before the sequence is admitted; afterwards a lookup finds the sequence's own blocks.
        Raises ConfigError without a ledger.
        """
        if self.ledger is None:
            raise ConfigError(
                "this cache keeps no ledger and cannot say why it missed; give ledger=CacheLedger(num_blocks), and "
                "leave prefix caching on"
            )
        hit = hit if hit is not None else self._coordinator.find_hit_of_next_step(sequence)
        return explain_lookup(sequence, hit, self._coordinator, self._sequences.values(), self.below)

    def explanation_of(self, request_id: str) -> LookupExplanation | None:
        """The explanation of the lookup that admitted a held request; None without a ledger."""
        return self._explanations.get(self._row_of.get(request_id, -1))

    # -------------------------------------------------------------- allocation

    def allocate_slots(self, sequence: TokenSequence, num_tokens: int, hit: PrefixHit | None = None) -> BlockIds | None:
        """`admit` a request the first time, `grow` its row later. Returns the new blocks; None if too few are free."""
        row = self._row_of.get(sequence.request_id)
        if row is None:
            admitted = self._admit(sequence, num_tokens, hit, ())
            return None if admitted is None else admitted[1]
        assert hit is None, "a hit is taken when the request is admitted, not later"
        return self.grow(row, num_tokens)

    def admit(
        self,
        sequence: TokenSequence,
        num_tokens: int,
        hit: PrefixHit | None = None,
        *,
        save_states_at: Sequence[int] = (),
    ) -> int | None:
        """Give a request the blocks of its `hit` (None: nothing was looked up), and room for `num_tokens` tokens.

        Returns the request's row in the tables, valid until the request is freed. Returns None, and changes nothing, if
        too few blocks are free. Blocks that these tokens fill are indexed at once. For `save_states_at`, see the method
        of that name. Raises AllocationError, and changes nothing, for fewer tokens than the hit has, for blocks of
        another size, or if the request holds blocks already.
        """
        if sequence.request_id in self._row_of:
            raise AllocationError(
                f"request {sequence.request_id!r} holds blocks already, in row {self._row_of[sequence.request_id]}; "
                "let that row grow, or give each request an id of its own"
            )
        admitted = self._admit(sequence, num_tokens, hit, save_states_at)
        return None if admitted is None else admitted[0]

    def grow(self, row: int, num_tokens: int) -> BlockIds | None:
        """Make room for the first `num_tokens` tokens of a held request; returns the new blocks, group by group.

        Returns None, and changes nothing, if too few blocks are free. The tokens that earlier calls made room for count
        as computed. Blocks that are no longer needed are released. Blocks that these tokens fill are indexed at once.
        Raises AllocationError, and changes nothing, for fewer tokens than the row has room for already.
        """
        if num_tokens < self._num_slots[row]:
            self._refuse_to_shrink(np.array([row]), np.array([num_tokens]))
        new_ids = self._coordinator.grow(row, int(self._num_slots[row]), num_tokens)
        if new_ids is not None:
            self._num_slots[row] = num_tokens
            self._uncomputed_from.pop(row, None)
            self._quiet_until[row] = self._end_of_quiet(num_tokens)
            self._coordinator.cache_blocks(row, self._sequences[row], num_tokens)
        return new_ids

    def _admit(
        self, sequence: TokenSequence, num_tokens: int, hit: PrefixHit | None, save_states_at: Sequence[int]
    ) -> tuple[int, BlockIds] | None:
        """Admit a request that holds nothing. Returns its row and the new blocks; None if too few blocks are free."""
        sequence.check_block_size(self.block_size)
        hit = hit if hit is not None else self._not_looked_up
        if num_tokens < max(1, hit.num_tokens):
            raise AllocationError(
                f"num_tokens={num_tokens} is less than the {max(1, hit.num_tokens)} tokens that request "
                f"{sequence.request_id!r} needs room for; count its hit, and at least one token"
            )
        explanation = self.explain(sequence, hit) if self.ledger is not None else None  # before blocks are evicted
        num_tail_tokens = self._num_tail_tokens(hit)
        sessions = self._sessions() if sequence.session is not None else None  # before blocks are taken
        admitted = self._coordinator.admit(hit, num_tokens)
        if admitted is None:
            return None
        row, new_ids = admitted
        if hit.partial is not None:
            # The source is not held: if this step gives it to another request, the runner copies it first.
            self._copies.append((hit.partial.block_id, int(new_ids[0])))
            self._pool.refresh(hit.partial.block_id)
            self._copied[row] = hit.num_shared_tokens, hit.num_tokens
        self._row_of[sequence.request_id] = row
        if explanation is not None:
            self._explanations[row] = explanation
        self._sequences[row] = sequence
        if sessions is not None:
            num_public = sequence.extra_keys.salt_offset // min(self._coordinator.block_sizes)
            sessions.begin(sequence.session, sequence.request_id, row, num_public)
        if row >= len(self._num_slots):
            self._num_slots, self._quiet_until = np.tile(self._num_slots, 2), np.tile(self._quiet_until, 2)
        self._num_slots[row] = num_tokens
        if save_states_at:
            self.save_states_at(sequence.request_id, save_states_at)
        self._quiet_until[row] = self._end_of_quiet(num_tokens)
        self._count(sequence, hit, explanation, num_tail_tokens)
        self._coordinator.cache_blocks(row, sequence, num_tokens)
        return admitted

    def allocate_running_slots(self, rows: Int64Array, num_tokens: Int64Array) -> int:
        """`grow` for many distinct rows, in their order, up to the first row for which too few blocks are free.

        Row `rows[i]` gets room for `num_tokens[i]` tokens: at most one more than its sequence has, for a token that is
        not known yet. Returns n if the first n rows were served; the other rows are unchanged. The result is the same
        as after single calls. It is faster, because one comparison finds the rows that take, release or fill a block;
        the other rows cost nothing more. Raises AllocationError, and changes nothing, if a row is to get fewer tokens
        than it has room for.
        """
        served = len(rows)
        if (num_tokens < self._num_slots[rows]).any():
            self._refuse_to_shrink(rows, num_tokens)
        busy = (num_tokens > self._quiet_until[rows]).nonzero()[0]
        if len(busy):
            num_done = self._allocate_busy(rows[busy], num_tokens[busy])
            if num_done < len(busy):
                served = int(busy[num_done])
                rows, num_tokens = rows[:served], num_tokens[:served]
        self._num_slots[rows] = num_tokens
        if self._uncomputed_from:
            for row in rows.tolist():
                self._uncomputed_from.pop(row, None)
        return served

    def _refuse_to_shrink(self, rows: Int64Array, num_tokens: Int64Array) -> NoReturn:
        at = int((num_tokens < self._num_slots[rows]).argmax())
        row = int(rows[at])
        raise AllocationError(
            f"num_tokens={num_tokens[at]} is less than the {self._num_slots[row]} tokens that request "
            f"{self._sequences[row].request_id!r} has room for; tables only grow, so free it and admit it again"
        )

    def retract(self, row: int, num_tokens: int) -> None:
        """Treat a row's slots after the first `num_tokens` as not computed: they hold the KV of rejected draft tokens.

        These slots are not indexed, because only blocks of known tokens are. The row keeps its blocks for new tokens.
        """
        assert num_tokens <= self._num_slots[row]
        self._num_slots[row] = num_tokens
        self._quiet_until[row] = self._end_of_quiet(num_tokens)

    def num_quiet_tokens(self, rows: Int64Array) -> int:
        """The number of tokens by which all these requests can grow without taking, releasing or filling a block."""
        return max(0, int((self._quiet_until[rows] - self._num_slots[rows]).min()))

    def _allocate_busy(self, rows: Int64Array, ends: Int64Array) -> int:
        """Take, release and index rows' blocks, in order, while enough are free. Returns the number of rows served."""
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
        """Index the blocks that these rows fill, except blocks whose last token is not known yet."""
        is_filled = [len(self._sequences[row]) >= end for row, end in zip(rows.tolist(), ends.tolist(), strict=True)]
        if any(is_filled):
            self._coordinator.cache_blocks_each(rows[is_filled], self._sequences.__getitem__, ends[is_filled])

    def has_blocks_for(self, rows: Int64Array, num_tokens: Int64Array) -> bool:
        """Whether `allocate_running_slots` would serve all these rows even if they released no blocks."""
        starts = self._num_slots[rows]
        sizes = (group.block_size for group in self.groups)
        needed = sum(int((-(-num_tokens // size) - -(-starts // size)).sum()) for size in sizes)
        return needed <= self.get_num_free_blocks()

    def _end_of_quiet(self, num_tokens: Position) -> Position:
        """The number of tokens up to which a request can grow from `num_tokens` without any change in its blocks.

        block size 4, a block is filled and indexed at f, taken at t:   tokens  5  6  7  8  9
                                                                                t        f  t
        """
        if not self._coordinator.has_quiet_steps:
            return 0 * num_tokens
        end: Position = -(-num_tokens // self.block_size) * self.block_size
        return end - (end != num_tokens)  # type: ignore[no-any-return]  # int or array, as `num_tokens`

    def allocate_decode_slots(self, rows: Int64Array) -> int:
        """Make room for one more token in each row, as `allocate_running_slots` does."""
        return self.allocate_running_slots(rows, self._num_slots[rows] + 1)

    def _num_tail_tokens(self, hit: PrefixHit) -> int:
        """The number of the hit's tokens that come from a tail."""
        if hit.partial is None or not self._pool.is_tail(np.array([hit.partial.block_id], np.int32))[0]:
            return 0
        return hit.num_tokens - hit.num_shared_tokens

    def _count(
        self, sequence: TokenSequence, hit: PrefixHit, explanation: LookupExplanation | None, num_tail_tokens: int
    ) -> None:
        stats, num_tokens = self.stats, len(sequence)
        kind = "preempted_" if hit.resumed else "forked_" if hit.forked else ""
        if sequence.linked_from is not None:  # only its exact beginning counts: linked tokens are no hits
            stats.count_lookup(kind, sequence.linked_from, min(hit.num_tokens, sequence.linked_from))
            return
        stats.count_lookup(kind, num_tokens, hit.num_tokens)
        if kind:
            return
        stats.tail_hits += num_tail_tokens
        self.recent.observe(num_tokens, hit.num_tokens)
        if explanation is not None and explanation.reason is not None:
            stats.misses[explanation.reason] += 1
            stats.missed_tokens[explanation.reason] += explanation.num_missed_tokens
            stats.ghost_hits += explanation.num_ghost_tokens

    def cache_known_blocks(self, rows: Int64Array) -> None:
        """Index these rows' blocks whose last token was not known when its slot was allocated, but is known now."""
        self._coordinator.cache_blocks_each(rows, self._sequences.__getitem__, self._num_slots[rows])

    def save_states_at(self, request_id: str, positions: Iterable[int]) -> None:
        """Save recurrent states after these numbers of tokens too, not only at the groups' intervals.

        A state is saved only if a step ends exactly there. A number that is not a multiple of every group's block size
        is ignored, because no hit can end there.
        """
        row = self._row_of[request_id]
        positions = list(positions)
        for manager in self._coordinator.managers:
            if isinstance(manager, MambaManager):
                manager.ask_for_states(row, positions)

    def forget_uncomputed(self, request_id: str, num_computed_tokens: int) -> None:
        """After a failed step, forget the request's indexed blocks after its first `num_computed_tokens` tokens."""
        row = self._row_of[request_id]
        num_shared, num_copied = self._copied.get(row, (0, 0))
        if num_computed_tokens <= num_copied:  # its first step failed, so maybe nothing was copied
            num_computed_tokens = min(num_computed_tokens, num_shared)
        self._uncomputed_from[row] = num_computed_tokens
        self._coordinator.forget_from(row, num_computed_tokens)

    def cache_blocks(self, sequence: TokenSequence, num_tokens: int) -> None:
        """Index the blocks that the first `num_tokens` tokens of a held request fill. Tokens without slots are ignored.

        `allocate_slots` does this too. Call this method if tokens become known only after their slots were allocated.
        """
        row = self._row_of[sequence.request_id]
        self._coordinator.cache_blocks(row, sequence, min(num_tokens, int(self._num_slots[row])))

    def free(self, request: str | TokenSequence, *, ended: bool = True) -> None:
        """Release a request's blocks, last block first, so that tails are evicted before heads.

        If the index keeps tails, lookups still find the part of the last block that was computed: tokens that have
        slots. A sequence with an invalid generated token leaves no tail. If `ended` is False, call `end` later.
        """
        request_id = request if isinstance(request, str) else request.request_id
        row = self._row_of.pop(request_id)
        self._explanations.pop(row, None)
        self._copied.pop(row, None)
        sequence = self._sequences.pop(row)
        num_computed = min(int(self._num_slots[row]), len(sequence))
        num_computed = min(num_computed, self._uncomputed_from.pop(row, num_computed))
        with suppress(InvalidRequestError):  # freeing never fails
            self._coordinator.keep_tail(row, sequence, num_computed)
        if self._session_blocks is not None:
            for tables in self._coordinator.tables.groups:
                self._session_blocks.note_use(row, without_null(tables.row(row)))
            self._session_blocks.close_row(row)
        self._coordinator.close(row)
        if ended:
            self.end(request_id)

    # ---------------------------------------------------------------- sessions

    def end(self, request_id: str) -> None:
        """Record that a request, which holds no blocks now, will not be admitted again."""
        number = None if self._session_blocks is None else self._session_blocks.end(request_id)
        if number is not None:
            self._give_up(number)

    def close_session(self, session: Hashable) -> int | None:
        """Let blocks that only this session's requests used be evicted before all others, until they are hit again.

        `session` is the value of `TokenSequence.session`. Running requests go on, and their blocks are evicted early
        once all these requests have ended. Pinned blocks, and blocks that other sessions used, keep their order.
        Returns the number of blocks that are evicted early from now on; None if this manager does not know the session.
        """
        number = None if self._session_blocks is None else self._session_blocks.close(session)
        return None if number is None else self._give_up(number)

    def _give_up(self, number: int) -> int:
        assert self._session_blocks is not None
        block_ids = self._session_blocks.take(number)
        has_no_request = self._pool.ref_counts()[block_ids] == self._held_apart[block_ids]
        block_ids = block_ids[has_no_request]
        if self._pins is not None:
            block_ids = block_ids[~np.isin(block_ids, self._pins.pinned_block_ids())]
        return self._pool.give_up(block_ids)

    def _sessions(self) -> SessionBlocks | None:
        if self._session_blocks is None and self.enable_prefix_caching:
            self._session_blocks = SessionBlocks(self.num_blocks)
            self._pool.users = self._session_blocks
        return self._session_blocks

    # ---------------------------------------------------------------- eviction

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Forget the contents of these blocks; requests that hold them keep them. Ignores NULL_BLOCK."""
        self._coordinator.forget(as_block_ids(block_ids, self.num_blocks), EvictionCause.REQUESTED)

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes and reset the statistics. Raises CacheBusyError while requests hold blocks."""
        if self._row_of:
            raise CacheBusyError(
                f"the prefix cache cannot be reset while {len(self._row_of)} requests hold its blocks "
                f"(first: {next(iter(self._row_of))!r}); wait for them or abort them"
            )
        self._coordinator.clear()
        self._drop_empty_entries()
        self.recent.reset()

    # -------------------------------------------------------- blocks from elsewhere

    def keys_by_group(self, sequence: TokenSequence) -> list[Keys]:
        """For each group, the keys of the sequence's full blocks that other sequences may find."""
        return self._coordinator.keys_by_group(sequence)

    def find_hit_with(self, sequence: TokenSequence, elsewhere: Sequence[Set[BlockHash]]) -> tuple[BlockIds, ...]:
        """Return the tables of the longest hit, as if the pool also had the blocks with the keys in `elsewhere`.

        `elsewhere` has one set of keys per group. The entry of a block that only `elsewhere` has is ELSEWHERE. An entry
        is NULL_BLOCK where the group needs no block. Changes and counts nothing.
        """
        return self._coordinator.find_hit_with(sequence, elsewhere)

    def cached_blocks(self, sequence: TokenSequence) -> list[BlockIds]:
        """For each group, the blocks with the keys of `keys_by_group`; NULL_BLOCK where the pool lacks the block.

        Includes the blocks that the present step fills, so copy the blocks only after the step's commit.
        """
        return self._coordinator.cached_blocks(sequence)

    def chance_of_return(self, num_blocks: int) -> float:
        """The expected share of a request's `num_blocks` blocks that is used again; 1.0 without a LearningPolicy."""
        policy = self._policy
        return policy.chance_of_return(num_blocks) if isinstance(policy, LearningPolicy) else 1.0

    def take_blocks(self, count: int) -> BlockIds | None:
        """Take `count` free blocks for the caller to fill. No lookup finds them before `adopt`.

        If fewer are free, takes none and returns None. A block that the next step copies does not count as free.
        """
        copied = np.array([*{source for source, _ in self._copies}], np.int32)
        self._pool.hold(copied)
        block_ids = self._pool.get_new_blocks(count) if count <= self.get_num_free_blocks() else None
        self._pool.free_blocks(copied)
        self._held_apart[[] if block_ids is None else block_ids] += 1
        return block_ids

    def next_empty(self, num_blocks: int) -> BlockIds:
        """The free blocks that hold nothing and are taken next, at most `num_blocks`. Changes nothing."""
        return self._pool.next_empty(num_blocks)

    def hold_blocks(self, block_ids: BlockIds) -> None:
        """Hold these (distinct) blocks, which a lookup found: the pool keeps them. This does not count as a use."""
        self._pool.hold(block_ids)
        self._held_apart[block_ids] += 1

    def hold_source(self, sequence: TokenSequence, num_blocks: int) -> BlockIds | None:
        """Hold the first blocks of a sequence, so that the next step can copy them, and count a use of them.

        Returns None, holding nothing, if a block is not cached or this step fills it. Needs one full-attention group.
        """
        [table] = self._coordinator.find_longest_cache_hit(sequence).tables
        if len(table) < num_blocks or self._coordinator.fills(table[:num_blocks].tolist()):
            return None
        block_ids: BlockIds = table[:num_blocks].copy()
        self.hold_blocks(block_ids)
        self._pool.note_use(block_ids)
        return block_ids

    def release_blocks(self, block_ids: BlockIds) -> None:
        """Release blocks that were taken or held. Indexed blocks stay cached; the last blocks are evicted first."""
        self._held_apart[block_ids] -= 1
        self._pool.free_blocks(block_ids[::-1].copy())

    def adopt(self, group_id: int, sequence: TokenSequence, first: int, block_ids: BlockIds) -> bool:
        """Index taken blocks, which are filled now, as the group's blocks of `sequence` from number `first` on.

        Call this before `begin_step`; the step that begins then may read the blocks. Returns False, and changes
        nothing, if the blocks before `first` are gone or were replaced: no lookup could find the new blocks then.
        """
        return self._coordinator.adopt(group_id, sequence, first, block_ids)

    # ----------------------------------------------------------------- reading

    @property
    def stats(self) -> PrefixCacheStats:
        """Counters of lookups, hits and evictions since the last `reset_prefix_cache`."""
        return self._coordinator.stats

    @property
    def has_one_full_group(self) -> bool:
        """Whether every layer needs every block, so that hits are prefixes."""
        return is_one_full_group(self.groups)

    def is_cached(self, sequence: TokenSequence, block: int) -> bool:
        """Whether the full block number `block` is cached, given that all blocks before it are cached."""
        return self._coordinator.holds(sequence, block)

    def handles(self, request_ids: Iterable[str]) -> Int64Array:
        """The rows of held requests, as `admit` gave them: small numbers, each valid until its request is freed."""
        return np.fromiter(map(self._row_of.__getitem__, request_ids), np.int64)

    def block_ids(self, request_id: str, group_id: int = 0) -> BlockIds:
        """A copy of one request's block table in one group."""
        return self._coordinator.tables.groups[group_id].row(self._row_of[request_id]).copy()

    def get_blocks(self, request_id: str) -> KVCacheBlocks:
        """The blocks of one request in all groups, as objects."""
        rows = (tables.row(self._row_of[request_id]) for tables in self._coordinator.tables.groups)
        return KVCacheBlocks(tuple([KVCacheBlock(self._pool, block_id) for block_id in row.tolist()] for row in rows))

    def block_tables(self, request_ids: Sequence[str], group_id: int = 0) -> tuple[BlockIds, npt.NDArray[np.int32]]:
        """Copies of several requests' tables in one group, [requests, longest], and the tables' lengths in blocks.

        An entry is NULL_BLOCK where the group no longer needs a block.
        """
        return self._coordinator.tables.groups[group_id].gather(self.handles(request_ids))

    def group_block_tables(self, rows: Int64Array) -> list[tuple[BlockIds, npt.NDArray[np.int32]]]:
        """`block_tables` of every group."""
        return [tables.gather(rows) for tables in self._coordinator.tables.groups]

    def sink_block_ids(self) -> BlockIds:
        """The blocks of the groups' attention sinks, in the order of the groups. No request's table has them."""
        return self._coordinator.held_forever()

    def num_required_blocks(self, num_tokens: int, hit: PrefixHit) -> int:
        """The number of free blocks needed to admit a request with this hit and room for `num_tokens` tokens."""
        return self._coordinator.num_required_blocks(hit, num_tokens)

    def can_ever_hold(self, num_tokens: int, max_step_tokens: int) -> bool:
        """Whether a request of `num_tokens` tokens fits into the empty pool, in steps of at most `max_step_tokens`."""
        usable = self.num_blocks - len(self.sink_block_ids())
        return self.max_num_blocks(num_tokens, max_step_tokens) <= usable

    def max_num_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """The most blocks that a request of `num_tokens` tokens holds at once, in steps of up to `max_step_tokens`."""
        return self._coordinator.max_num_blocks(num_tokens, max_step_tokens)

    def held_request_ids(self) -> list[str]:
        return list(self._row_of)

    def get_num_common_prefix_blocks(self, request_ids: Sequence[str], group_id: int = 0) -> int:
        """The number of leading entries that are the same blocks in all these requests' tables of one group."""
        if not request_ids:
            return 0
        tables, lengths = self.block_tables(request_ids, group_id)
        shared = (tables == tables[0]).all(axis=0)[: int(lengths.min())]
        return int(shared.argmin()) if not shared.all() else len(shared)

    def get_num_free_blocks(self) -> int:
        return self._pool.get_num_free_blocks()

    def get_num_cached_blocks(self) -> int:
        """The number of indexed full blocks, including duplicates, whether requests hold them or not."""
        return len(self._coordinator.index)

    def get_num_tails(self) -> int:
        """The number of indexed tails: partly filled blocks, each with the end of a prefix. No request holds a tail."""
        return self._coordinator.index.num_tails

    def num_cached_tokens(self) -> int:
        """The number of tokens in cached full blocks, for the group that has the most. Duplicates count too."""
        counts = self._coordinator.num_indexed_by_group()
        return max(count * group.block_size for count, group in zip(counts, self.groups, strict=True))

    def get_usage(self) -> float:
        """Share of the blocks held by requests, 0.0 to 1.0."""
        return self._pool.get_usage()

    def block_states(self) -> npt.NDArray[np.uint8]:
        """A new array of the present state of each block, as `BlockState` numbers, [num_blocks]."""
        states = np.full(self.num_blocks, BlockState.FREE, np.uint8)
        states[self._coordinator.index.block_ids()] = BlockState.CACHED
        states[self._coordinator.index.tail_block_ids()] = BlockState.CACHED
        states[self._pool.ref_counts() > 0] = BlockState.IN_USE
        if self._pins is not None:
            states[self._pins.pinned_block_ids()] = BlockState.PINNED
        return states

    def top_prefixes(self, limit: int, under_salt: str = "") -> list[PrefixNode] | None:
        """The cached prefixes that were reused most, a parent before its children; None without a radix index.

        `under_salt` selects the prefixes under salts that begin with this text.
        """
        reuses = None if self.ledger is None else self.ledger.num_reuses()
        return self._coordinator.index.top(limit, reuses, under_salt)

    def following(self, sequence: TokenSequence, num_tokens: int) -> TokenArray:
        """The tokens after a sequence in a longer cached sequence with equal extra keys; at most `num_tokens` tokens.

        Of several continuations, it returns the one that was cached last. The result is empty if no continuation is
        known, or if the index keeps no tokens.
        """
        return self._coordinator.index.following(sequence, num_tokens)

    def free_block_ids(self) -> BlockIds:
        """A new array of the free blocks, in the order in which they will be taken for new content."""
        return self._pool.free_block_ids()

    def check_integrity(self) -> None:
        """Raise AssertionError if counts, queue, tables and index contradict each other."""
        rows = list(self._row_of.values())
        if self._session_blocks is not None:
            self._session_blocks.check_integrity(self._coordinator.index.block_ids(), rows)
        assert self._row_of == {s.request_id: row for row, s in self._sequences.items()}, "rows and requests differ"
        self._coordinator.check_integrity(rows, self._sequences.__getitem__, self._held_apart)
        for manager in self._coordinator.managers:
            for row in rows:
                num_slots = int(self._num_slots[row])
                assert manager.tables.length(row) >= -(-num_slots // manager.block_size), (
                    f"{self._sequences[row].request_id!r} has slots for {num_slots} tokens, but not the blocks for them"
                )
                assert manager.num_indexed[row] * manager.block_size <= num_slots, "an uncomputed block is indexed"
