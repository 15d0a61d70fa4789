"""A whole KVCacheManager, the memory that it manages, and everything that an engine does to both.

The memory is a stand-in for KV: what is stored for a position is a number that stands for all tokens up to
it, with their salt, adapter and media. `World` does with it what a runner does (copies first, then writes,
then reads through the block tables), so a hit on a wrong, stale, overwritten or unwritten block is seen at once.
Each operation takes small integers, reduced to what there is: `drive` draws them.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from doors import coordinator_of, index_of, num_given_up, pending_copies, pool_of, recorded_keys
from foreword.cache import (
    NO_EXTRA_KEYS,
    NULL_BLOCK,
    CacheLedger,
    ChunkedLocalSpec,
    EntryWish,
    EventLog,
    EvictionPolicy,
    ExtraKeys,
    FullAttentionSpec,
    GroupSpec,
    HashFunction,
    HashIndex,
    KeyedSpan,
    KVCacheManager,
    MambaSpec,
    PinnedPolicy,
    PrefixHit,
    PrefixMirror,
    PriorityPolicy,
    RadixIndex,
    SinkFullSpec,
    SlidingWindowSpec,
    TokenSequence,
    sha256,
    sha256_cbor,
)
from foreword.errors import CacheBusyError
from foreword.replay.policies import POLICIES, make_policy

Numbers = npt.NDArray[np.int64]
MAX_TOKENS = 40
"""Requests end when they are this long."""
MAX_RUNNING = 6
SESSIONS = (None, "a", "b", "c")
PLACEHOLDER = 2
"""Token of a media item; texts consist of 0 and 1."""

IDENTITIES = (
    NO_EXTRA_KEYS,
    ExtraKeys(salt="x"),
    ExtraKeys(adapter="x"),
    ExtraKeys(embeddings_hash="x"),
    ExtraKeys(salt="x", adapter="x"),
    ExtraKeys(adapter="x", adapter_offset=3),
    ExtraKeys(adapter="x", adapter_offset=5),
    ExtraKeys(adapter="y", adapter_offset=3, spans=(KeyedSpan("link", "x", 1, 3),)),
    ExtraKeys(spans=(KeyedSpan("media", "x", 1, 3),)),
    ExtraKeys(spans=(KeyedSpan("media", "y", 1, 3),)),
    ExtraKeys(spans=(KeyedSpan("media", "x", 1, 2),)),
    ExtraKeys(salt="y", spans=(KeyedSpan("media", "x", 1, 3), KeyedSpan("media", "y", 6, 2))),
    ExtraKeys(salt="x", salt_offset=3),
    ExtraKeys(salt="y", salt_offset=3),
    ExtraKeys(salt="x", salt_offset=2, adapter="x", adapter_offset=3, spans=(KeyedSpan("media", "x", 1, 3),)),
    ExtraKeys(salt="x", salt_offset=50),
)


class _OneByte:
    """A digest of which a busy cache holds every value."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def digest(self) -> bytes:
        return hashlib.sha256(self._data).digest()[:1]


COLLIDING = HashFunction("one byte", _OneByte)

GROUPS: dict[str, tuple[GroupSpec, ...]] = {
    "window": (SlidingWindowSpec(5, 2),),
    "chunks": (ChunkedLocalSpec(6, 4),),
    "recurrent": (MambaSpec(3),),
    "full and window": (FullAttentionSpec(2), SlidingWindowSpec(6, 4)),
    "full and chunks": (FullAttentionSpec(4), ChunkedLocalSpec(7, 2)),
    "full and recurrent": (FullAttentionSpec(2), MambaSpec(4)),
    "sinks and window": (SinkFullSpec(3, 2), SlidingWindowSpec(3, 2)),
    "full and narrow windows": (FullAttentionSpec(2), SlidingWindowSpec(1, 2), SlidingWindowSpec(5, 4)),
    "chunks that end inside blocks": (ChunkedLocalSpec(7, 4), FullAttentionSpec(2)),
    "recurrent with an interval": (MambaSpec(2, interval_tokens=6), FullAttentionSpec(1)),
    "all types": (FullAttentionSpec(2), SlidingWindowSpec(5, 2), ChunkedLocalSpec(6, 2), MambaSpec(2)),
}
KINDS = ("hash", "radix", "verified", "off", *GROUPS)
"""What finds prefixes: an index over one group, nothing, or hash keys over several groups."""


@dataclass
class Running:
    """A request that holds blocks."""

    sequence: TokenSequence
    marks: list[int]
    """What the memory has to hold for each position."""
    num_computed: int
    num_shared: int
    end: int | None = None
    """Up to where the step that is being put together computes it; None if it is not in that batch."""

    @property
    def request_id(self) -> str:
        return self.sequence.request_id


@dataclass
class Happened:
    """How often; for tests to see that what is rare happened at all."""

    steps: int = 0
    executed: int = 0
    failed: int = 0
    hits: int = 0
    whole_hits: int = 0
    partial_hits: int = 0
    tail_hits: int = 0
    tail_evictions: int = 0
    hits_in_same_step: int = 0
    short_admissions: int = 0
    short_growths: int = 0
    evictions: int = 0
    preemptions: int = 0
    resumed_hits: int = 0
    resets: int = 0
    refused_resets: int = 0
    broken_pins: int = 0
    given_up: int = 0

    def add(self, other: Happened) -> None:
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)


@dataclass
class World:
    """One manager and its memory. Operations first check what they can, then the manager checks itself."""

    kind: str = "hash"
    policy_name: str = "lru"
    num_blocks: int = 16
    block_size: int = 2
    with_pins: bool = False
    with_ledger: bool = False
    with_sessions: bool = False
    deduplicate: bool = False
    change: Callable[[KVCacheManager], None] = lambda manager: None
    """Applied to the new manager; breaks it on purpose in some tests."""
    happened: Happened = field(default_factory=Happened)

    def __post_init__(self) -> None:
        policy: EvictionPolicy = make_policy(self.policy_name, self.num_blocks)
        self._inner_policy = policy
        self._pins = (
            PinnedPolicy(policy, self.num_blocks, max_share=0.4, max_owner_share=0.3) if self.with_pins else None
        )
        self._events = EventLog()
        self._mirror = PrefixMirror()
        self._ledger = CacheLedger(self.num_blocks, events=self._events) if self.with_ledger else None
        self.manager = self._make_manager(self._pins or policy)
        self.groups = self.manager.groups
        self.running: list[Running] = []
        self.preempted: list[tuple[TokenSequence, list[int]]] = []
        self._texts: list[list[int]] = []
        self._memory: Numbers = np.zeros((self.num_blocks, 4), np.int64)
        self._planned = self._memory.copy()
        """The memory as it will be after the step that is being put together."""
        self._num_admitted = 0
        self._now = 0.0
        self._expected = [0] * 6
        """The manager's statistics, as counted here."""
        self.change(self.manager)
        self.manager.begin_step()

    def _make_manager(self, policy: EvictionPolicy) -> KVCacheManager:
        if self.kind in GROUPS:
            return KVCacheManager(
                self.num_blocks, groups=GROUPS[self.kind], eviction_policy=policy, ledger=self._ledger
            )
        indexes = {
            "hash": lambda: HashIndex(self.num_blocks),
            "verified": lambda: HashIndex(self.num_blocks, verify_tokens=True),
            "radix": lambda: RadixIndex(self.num_blocks, self.block_size),
            "off": lambda: None,
        }
        return KVCacheManager(
            self.num_blocks,
            block_size=self.block_size,
            enable_prefix_caching=self.kind != "off",
            index=indexes[self.kind](),
            eviction_policy=policy,
            ledger=self._ledger,
            deduplicate=self.deduplicate and self.kind != "off",
        )

    def check(self) -> None:
        """What holds after every operation."""
        manager = self.manager
        manager.check_integrity()
        assert manager.held_request_ids() == [request.request_id for request in self.running]
        if self._ledger is not None:
            self._mirror.apply(self._events.take())
            for group_id, group in enumerate(self._ledger.groups):
                findable = set(recorded_keys(group))
                assert self._mirror.held_keys(group_id) == findable, "the events do not rebuild the index"
        stats = manager.stats
        self.happened.evictions += stats.evictions
        self.happened.steps += 1
        self.happened.tail_evictions += stats.tail_evictions
        self.happened.tail_hits += stats.tail_hits > 0
        stats.evictions = stats.tail_evictions = stats.tail_hits = 0
        assert self._expected == [
            stats.requests,
            stats.queries,
            stats.hits,
            stats.preempted_requests,
            stats.preempted_queries,
            stats.preempted_hits,
        ], "the statistics are not what was admitted"

    # --------------------------------------------------------------- requests

    def admit(self, cut: int, length: int, bits: int, identity: int, chunk: int) -> None:
        """Look a new prompt up and admit it: what earlier ones began with, up to `cut`, then `length` new tokens."""
        if len(self.running) < MAX_RUNNING:
            sequence = self._new_sequence(cut, length, bits, identity)
            self._try_to_admit(sequence, _marks(sequence), chunk, resumed=False)

    def resume(self, which: int, chunk: int) -> None:
        """Admit a preempted request again."""
        if self.preempted and len(self.running) < MAX_RUNNING:
            at = which % len(self.preempted)
            sequence, marks = self.preempted[at]
            if self._try_to_admit(sequence, marks, chunk, resumed=True):
                del self.preempted[at]

    def look_up(self, cut: int, length: int, bits: int, identity: int) -> None:
        """Look a prompt up and leave it at that."""
        sequence = self._new_sequence(cut, length, bits, identity)
        self._find(sequence, _marks(sequence), skip_reading=False, resumed=False)

    def _new_sequence(self, cut: int, length: int, bits: int, identity: int) -> TokenSequence:
        earlier = self._texts[bits % len(self._texts)] if self._texts else []
        fresh = [bits >> number & 1 for number in range(length % 12)] if length % 3 else []
        tokens = ([min(token, 1) for token in earlier[:cut]] + fresh)[: MAX_TOKENS - 4] or [1]
        keys = IDENTITIES[identity % len(IDENTITIES)] if identity % 2 else NO_EXTRA_KEYS
        if any(item.offset + item.num_tokens > len(tokens) for item in keys.spans):
            keys = NO_EXTRA_KEYS
        for item in keys.spans:
            tokens[item.offset : item.offset + item.num_tokens] = [PLACEHOLDER] * item.num_tokens
        self._num_admitted += 1
        hash_fn = {"verified": COLLIDING, "window": sha256_cbor}.get(self.kind, sha256)
        sequence = TokenSequence(
            f"r{self._num_admitted}", tokens, block_size=self.manager.block_size, extra_keys=keys, hash_fn=hash_fn
        )
        sequence.session = SESSIONS[(bits >> 8) % len(SESSIONS)] if self.with_sessions else None
        return sequence

    def close_session(self, which: int) -> None:
        """Close a session: blocks that it left alone go first after those that hold nothing."""
        manager, session = self.manager, SESSIONS[which % len(SESSIONS)]
        before, pinned = self.snapshot(), [] if self._pins is None else self._pins.pinned_block_ids().tolist()
        num_early = pool_of(manager).num_empty + num_given_up(manager)
        given_up = manager.close_session(session)
        if not given_up:
            assert self.snapshot() == before, "closing a session that has nothing changed something"
            return
        free = manager.free_block_ids().tolist()
        chosen = free[num_early : num_early + given_up]
        assert not set(chosen) & set(pinned), "a pinned block was given up"
        assert manager.close_session(session) is None, "a session was closed twice"
        self.happened.given_up += given_up

    def _find(self, sequence: TokenSequence, marks: list[int], *, skip_reading: bool, resumed: bool) -> PrefixHit:
        """A lookup: changes nothing, and finds only what the memory holds or this step will write."""
        before = self.snapshot()
        hit = self.manager.get_computed_blocks(sequence, skip_reading=skip_reading, resumed=resumed)
        assert self.snapshot() == before, "a lookup changed something"
        assert hit.num_tokens < len(sequence), "nothing is left to compute"
        assert not (skip_reading and hit.num_tokens)
        for spec, table in zip(self.groups, hit.tables, strict=True):
            for number, block_id in enumerate(table.tolist()):
                if block_id == NULL_BLOCK:
                    continue
                end = (number + 1) * spec.block_size
                stored = self._planned[block_id, : spec.block_size].tolist()
                if isinstance(spec, MambaSpec):
                    assert self._memory[block_id, 0] == marks[end - 1], "a hit on a wrong state"
                else:
                    assert stored == marks[end - spec.block_size : end], "a hit on a wrong block"
        if self.kind in GROUPS and not skip_reading:
            assert hit.num_tokens == self._longest(sequence, marks), "a longer hit was there, or none so long"
        if hit.partial is not None:
            start = len(hit.block_ids) * self.block_size
            stored = self._memory[hit.partial.block_id, : hit.partial.num_tokens].tolist()
            assert stored == marks[start : start + hit.partial.num_tokens], "a partial hit on a wrong block"
        return hit

    def _longest(self, sequence: TokenSequence, marks: list[int]) -> int:
        """The longest hit by trying every length, given what the indexed blocks hold."""
        coordinator, holds = coordinator_of(self.manager), set()
        for block_id in coordinator.index.block_ids().tolist():
            group = coordinator.index.group_of(block_id)
            size = self.groups[group].block_size
            if not isinstance(self.groups[group], MambaSpec):
                holds.add((group, self._planned[block_id, size - 1]))
            elif not coordinator.fills((block_id,)):
                holds.add((group, self._memory[block_id, 0]))

        def is_cached(group: int, number: int) -> bool:
            return (group, marks[(number + 1) * self.groups[group].block_size - 1]) in holds

        most = min(len(sequence), num_findable(self.groups, sequence) + 1)
        return longest_agreed(self.groups, most, is_cached)

    def _try_to_admit(self, sequence: TokenSequence, marks: list[int], chunk: int, *, resumed: bool) -> bool:
        hit = self._find(sequence, marks, skip_reading=chunk % 8 == 0, resumed=resumed)
        end = self._end(hit.num_tokens, len(sequence), chunk)
        before = self.snapshot()
        required = self.manager.num_required_blocks(end, hit)
        fits = required <= self.manager.get_num_free_blocks()
        new_ids = self.manager.allocate_slots(sequence, end, hit)
        assert (new_ids is not None) == fits
        if new_ids is None:
            assert self.snapshot() == before, "an admission that failed changed something"
            self.happened.short_admissions += 1
            return False
        count = self._expected
        kind = 3 if resumed else 0
        count[kind : kind + 3] = count[kind] + 1, count[kind + 1] + len(sequence), count[kind + 2] + hit.num_tokens
        request = Running(sequence, marks, hit.num_tokens, hit.num_shared_tokens)
        self.running.append(request)
        self.happened.hits += hit.num_tokens > 0
        self.happened.resumed_hits += resumed and hit.num_tokens > 0
        self.happened.whole_hits += hit.num_shared_tokens == len(sequence)
        self.happened.partial_hits += hit.partial is not None
        held = hit.tables[0][hit.tables[0] != NULL_BLOCK]
        self.happened.hits_in_same_step += bool((self._memory[held] != self._planned[held]).any())
        self._plan(request, end)
        if hit.partial is not None:
            self._planned[new_ids[0], : hit.partial.num_tokens] = self._memory[
                hit.partial.block_id, : hit.partial.num_tokens
            ]
        return True

    def grow(self, which: int, chunk: int) -> None:
        """Slots for one running request that is not in the batch yet."""
        request = self._idle(which)
        if request is None:
            return
        end = self._end(request.num_computed, len(request.sequence), chunk)
        before = self.snapshot()
        if chunk % 4 == 0:
            self.manager.save_states_at(request.request_id, [end])
        if self.manager.allocate_slots(request.sequence, end) is None:
            assert self.snapshot() == before, "an allocation that failed changed something"
            self.happened.short_growths += 1
        else:
            self._plan(request, end)

    def grow_all(self, chunk: int) -> None:
        """Slots for all running requests that are not in the batch yet, in one call."""
        idle = [request for request in self.running if request.end is None]
        ends = [self._end(request.num_computed, len(request.sequence), chunk) for request in idle]
        before = [self._tables(request) for request in idle]
        handles = self.manager.handles(request.request_id for request in idle)
        if all(end == request.num_computed + 1 for request, end in zip(idle, ends, strict=True)):
            served = self.manager.allocate_decode_slots(handles)
        else:
            served = self.manager.allocate_running_slots(handles, np.array(ends, np.int64))
        for request, end in zip(idle[:served], ends, strict=False):
            self._plan(request, end)
        for request, tables in list(zip(idle, before, strict=True))[served:]:
            assert self._tables(request) == tables, "a request that was not served changed"
            self.happened.short_growths += 1

    def preempt(self, which: int) -> None:
        """Free a running request that is not in the batch; it will be looked up again."""
        request = self._idle(which)
        if request is not None:
            self._leave(request)
            self.preempted = [*self.preempted[-3:], (request.sequence, request.marks)]
            self.happened.preemptions += 1

    def finish(self, which: int) -> None:
        """Free a running request that is not in the batch."""
        request = self._idle(which)
        if request is not None:
            self._leave(request)

    # ------------------------------------------------------------------- step

    def execute(self, bits: int) -> None:
        """What a runner does with the batch; then each request that was computed to its end gets a token."""
        self._copy()
        batch = [request for request in self.running if request.end is not None]
        for group, spec in enumerate(self.groups):
            if isinstance(spec, MambaSpec):
                self._move_states(batch, group, spec)
            else:
                self._write(self._memory, batch, group, spec)
                self._read(batch, group, spec)
        for number, request in enumerate(batch):
            assert request.end is not None
            request.num_computed, request.end = request.end, None
            if request.num_computed == len(request.sequence):
                if len(request.sequence) >= MAX_TOKENS:
                    self._leave(request)
                    continue
                request.sequence.append(bits >> number & 1)
                request.marks.append(_marks(request.sequence)[-1])
        self._begin_step()
        self.happened.executed += 1

    def fail(self) -> None:
        """The batch broke: its requests end, and nothing that was to be computed may be found."""
        self.manager.take_copies()
        batch = [request for request in self.running if request.end is not None]
        for request in batch:
            self.manager.forget_uncomputed(request.request_id, max(request.num_computed, request.num_shared))
        for request in batch:
            self._leave(request)
        self._begin_step()
        self.happened.failed += bool(batch)

    def _begin_step(self) -> None:
        self._planned = self._memory.copy()
        self.manager.begin_step()

    def _plan(self, request: Running, end: int) -> None:
        request.end = end
        for group, spec in enumerate(self.groups):
            if not isinstance(spec, MambaSpec):
                held = set(np.flatnonzero(self._table(request, group) != NULL_BLOCK).tolist())
                read = range(first_read(spec, request.num_computed), end)
                assert held == {position // spec.block_size for position in read}, "a step holds what it never reads"
                if self.kind in GROUPS:
                    self._check_indexed(request, group, end)
                self._write(self._planned, [request], group, spec)

    def _check_indexed(self, request: Running, group: int, end: int) -> None:
        """The blocks that a step fills are found at once."""
        size, table = self.groups[group].block_size, self._table(request, group)
        most = min(end, num_findable(self.groups, request.sequence))
        filled = table[request.num_computed // size : most // size].tolist()
        keys = map(index_of(self.manager).key_of, filled)
        assert None not in keys, "a block that is filled cannot be found"

    def _copy(self) -> None:
        copies = self.manager.take_copies()
        assert not len(self.manager.take_copies()), "copies were handed out twice"
        together = self._memory.copy()
        together[copies[:, 1]] = self._memory[copies[:, 0]]
        for source, target in copies.tolist():
            self._memory[target] = self._memory[source]
        assert (together == self._memory).all(), "the copies depend on their order"

    def _write(self, memory: Numbers, batch: Sequence[Running], group: int, spec: GroupSpec) -> None:
        for request in batch:
            assert request.end is not None
            positions = np.arange(max(request.num_computed, request.num_shared), request.end)
            block_ids = self._table(request, group)[positions // spec.block_size]
            assert (block_ids != NULL_BLOCK).all(), "a position that is computed has no slot"
            memory[block_ids, positions % spec.block_size] = (
                request.marks[positions[0] : request.end] if len(positions) else 0
            )

    def _read(self, batch: Sequence[Running], group: int, spec: GroupSpec) -> None:
        for request in batch:
            assert request.end is not None
            first = first_read(spec, request.num_computed)
            positions = np.arange(first, request.end)
            block_ids = self._table(request, group)[positions // spec.block_size]
            assert (block_ids != NULL_BLOCK).all(), "a position that is read has no block"
            stored = self._memory[block_ids, positions % spec.block_size]
            assert stored.tolist() == request.marks[first : request.end], "what is read is not what was computed"

    def _move_states(self, batch: Sequence[Running], group: int, spec: MambaSpec) -> None:
        """All states are read before any is written: a state of the same step must not be counted on."""
        size = spec.block_size
        for request in batch:
            assert request.end is not None
            if request.num_computed:
                table = self._table(request, group)
                block_id = int(table[(request.num_computed - 1) // size])
                block_id = block_id if block_id != NULL_BLOCK else int(table[(request.end - 1) // size])
                state = self._memory[block_id, 0]
                assert state == request.marks[request.num_computed - 1], "a step goes on from a wrong state"
        for request in batch:
            assert request.end is not None
            self._memory[self._table(request, group)[(request.end - 1) // size], 0] = request.marks[request.end - 1]

    def evict(self, first: int, count: int) -> None:
        """Have consecutive blocks forgotten, whoever holds them."""
        block_ids = (first + np.arange(count % 4 + 1)) % self.num_blocks
        self.manager.evict_blocks(np.unique(block_ids).astype(np.int32))

    def reset(self) -> None:
        """Refused while blocks are held; else nothing is left."""
        try:
            self.manager.reset_prefix_cache()
        except CacheBusyError:
            assert self.running
            self.happened.refused_resets += 1
        else:
            assert not self.running
            assert self.manager.get_num_cached_blocks() == 0
            self._expected = [0] * 6
            self.happened.resets += 1

    def pin(self, first: int, count: int, duration: int) -> None:
        """Pin some blocks, or unpin them if there is no duration; let time pass."""
        block_ids = np.unique((first + np.arange(count % 4 + 1)) % self.num_blocks).astype(np.int32)
        self._now += 1.0
        if isinstance(self._inner_policy, PriorityPolicy) and not self.with_pins:
            self._inner_policy.set_priority(block_ids, duration % 3)
        elif self._pins is not None and duration % 2 and self.running:
            sequence = self.running[first % len(self.running)].sequence
            wish = EntryWish(self._now + duration, f"owner {count % 2}", refresh_s=duration if count % 3 else None)
            self.manager.keep_prefix(sequence, wish, self._now)
        elif self._pins is not None and duration:
            self._pins.pin(first % 5, block_ids, self._now + duration, self._now, owner=f"owner {first % 2}")
        elif self._pins is not None:
            self._pins.unpin(first % 5)
            for entry in self.manager.entries()[: count % 3]:
                self.manager.drop_entry(entry.name)
            self.manager.expire_pins(self._now)
            self.happened.broken_pins += self._pins.num_broken
            self._pins.num_broken = 0

    def snapshot(self) -> list[object]:
        """All that an operation which fails must leave as it was."""
        manager = self.manager
        stats = manager.stats
        return [
            manager.free_block_ids().tolist(),
            pool_of(manager).ref_counts().tolist(),
            [self._tables(request) for request in self.running],
            manager.held_request_ids(),
            manager.get_num_cached_blocks(),
            pending_copies(manager),
            [getattr(stats, name) for name in stats.__slots__],
            self._pins.pinned_block_ids().tolist() if self._pins else None,
        ]

    def drain(self) -> None:
        """Everything ends; nothing may be left."""
        self.fail()
        for request in list(self.running):
            self._leave(request)
        manager = self.manager
        assert manager.get_num_free_blocks() == self.num_blocks - len(manager.sink_block_ids())
        manager.reset_prefix_cache()
        self._expected = [0] * 6
        self.check()

    def _leave(self, request: Running) -> None:
        self.manager.free(request.request_id)
        self.running.remove(request)
        self._texts = [*self._texts[-3:], request.sequence.token_ids.tolist()]

    def _idle(self, which: int) -> Running | None:
        """One of the running requests that are not in the batch."""
        idle = [request for request in self.running if request.end is None]
        return idle[which % len(idle)] if idle else None

    def _end(self, start: int, length: int, chunk: int) -> int:
        """Up to where to compute: mostly all, else a part."""
        return length if chunk % 3 else min(length, start + 1 + chunk % 7)

    def _table(self, request: Running, group: int) -> npt.NDArray[np.int32]:
        return self.manager.block_ids(request.request_id, group)

    def _tables(self, request: Running) -> list[list[int]]:
        return [self._table(request, group).tolist() for group in range(len(self.groups))]


def first_read(spec: GroupSpec, position: int) -> int:
    """First position that computing `position` reads."""
    match spec:
        case SlidingWindowSpec():
            return max(0, position - spec.window + 1)
        case ChunkedLocalSpec():
            return position - position % spec.chunk
        case _:
            return 0


def needed_blocks(spec: GroupSpec, length: int) -> set[int]:
    """Numbers of the blocks that a hit of `length` tokens needs."""
    if isinstance(spec, MambaSpec):
        return {length // spec.block_size - 1} if length else set()
    return {position // spec.block_size for position in range(first_read(spec, length), length)}


def longest_agreed(specs: Sequence[GroupSpec], num_tokens: int, is_cached: Callable[[int, int], bool]) -> int:
    """The longest hit by trying every length; `is_cached(group, block number)` says what there is."""
    step = math.lcm(*(spec.block_size for spec in specs))
    for length in range(num_tokens - 1, 0, -1):
        if length % step == 0 and all(
            is_cached(group, number) for group, spec in enumerate(specs) for number in needed_blocks(spec, length)
        ):
            return length
    return 0


def num_findable(specs: Sequence[GroupSpec], sequence: TokenSequence) -> int:
    """Leading tokens that others may find: beside a recurrent group, what fills cells of the prompt."""
    cells = [spec.block_size for spec in specs if isinstance(spec, MambaSpec)]
    return sequence.num_prompt_tokens // math.lcm(*cells) * math.lcm(*cells) if cells else len(sequence)


def _mark(before: int, content: object) -> int:
    """A number that stands for a prefix and one more token; texts and numbers hash alike in one process."""
    return hash((before, content))


def _marks(sequence: TokenSequence) -> list[int]:
    """Equal where sequences may share KV: they have the same tokens up to there, placeholders of the same media among
    them (in the same number: another resolution is another item), and adapter and salt begin alike.
    """
    keys = sequence.extra_keys
    contents: list[object] = sequence.token_ids.tolist()
    for item in keys.spans:
        for at in range(item.num_tokens):
            contents[item.offset + at] = (item.kind, item.digest, item.num_tokens, at)
    marks, mark = [], hash(keys.embeddings_hash)
    for at, content in enumerate(contents):
        if at == keys.salt_offset and keys.salt is not None:
            mark = _mark(mark, ("salt", keys.salt))
        if at == keys.adapter_offset and keys.adapter is not None:
            mark = _mark(mark, ("adapter", keys.adapter))
        mark = _mark(mark, content)
        marks.append(mark)
    return marks


# ------------------------------------------------------------------------------------ a random driver


def random_world(
    rng: random.Random,
    change: Callable[[KVCacheManager], None] = lambda manager: None,
    *,
    kind: str | None = None,
    policy_name: str | None = None,
) -> World:
    """A world with everything else chosen at random."""
    return World(
        kind=kind or rng.choice(KINDS),
        policy_name=policy_name or rng.choice(list(POLICIES)),
        num_blocks=rng.choice([14, 24, 40, 80]),
        block_size=rng.choice([1, 2, 3, 4]),
        with_pins=rng.random() < 0.4,
        with_ledger=rng.random() < 0.4,
        with_sessions=rng.random() < 0.4,
        deduplicate=rng.random() < 0.4,
        change=change,
    )


def drive(world: World, rng: random.Random, num_steps: int) -> None:
    """Operations at random, with the checks after each."""
    draw = rng.getrandbits
    operations: list[tuple[int, Callable[[], None]]] = [
        (14, lambda: world.admit(draw(5), draw(5), draw(16), draw(6), draw(6))),
        (6, lambda: world.resume(draw(3), draw(6))),
        (3, lambda: world.look_up(draw(5), draw(5), draw(16), draw(6))),
        (8, lambda: world.grow(draw(3), draw(6))),
        (16, lambda: world.grow_all(draw(6))),
        (5, lambda: world.preempt(draw(3))),
        (9, lambda: world.finish(draw(3))),
        (26, lambda: world.execute(draw(8))),
        (2, lambda: world.fail()),
        (3, lambda: world.evict(draw(6), draw(2))),
        (1, lambda: world.reset()),
        (8, lambda: world.pin(draw(6), draw(2), draw(3))),
        (3, lambda: world.close_session(draw(2))),
    ]
    chosen = rng.choices([operation for _, operation in operations], [weight for weight, _ in operations], k=num_steps)
    world.check()
    for operation in chosen:
        operation()
        world.check()
    world.drain()
