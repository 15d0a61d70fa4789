"""Loads: prefixes that a tier has and the pool lacks, and the requests that wait for them.

    arrived -> asking -> waiting -> (a tier has more than the pool, and loading is faster) -> loading -> waiting

When a request arrives, the tiers are asked which blocks of its prefix they have. A distant tier may take a while. The
request waits for the answer, but not for long. A waiting request holds up nobody: the requests after it are admitted. A
load fills blocks that no lookup finds. When the load is done, the blocks that arrived are indexed, and the request is
looked up again like any other. Blocks that did not arrive are computed. Requests that lack the same block wait for the
same load.

Fences. A load takes blocks only while no step is planned, because a planned step may still write to blocks that are
free now. A load also holds the part of the prefix that is in the pool; all loads together hold at most half of the
pool. A load has a deadline. When a load has ended, by itself or because it was cancelled, the tier's thread no longer
touches any block (`Ticket`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from weakref import WeakSet

import numpy as np

from foreword.batch import Int64Array
from foreword.cache import (
    NO_BLOCKS,
    BlockHash,
    BlockIds,
    KVCacheManager,
    LoadFailure,
    PrefixHit,
    TokenSequence,
    elsewhere,
    in_pool,
)
from foreword.engine.tiering.block_memory import BlockMemory, BlocksOfParts, Part, names_of, take_blocks
from foreword.request import Request
from foreword.tiers.ticket import Outcome, Report, Ticket
from foreword.tiers.tier import BlockKeys, Tier, joined_keys

PIECE_BYTES = 256 << 20
"""The most bytes of a load if each beginning of a hit is a hit, too. Then a longer prefix is loaded in pieces."""
WORTH = 0.8
"""The largest share of the time to compute a prefix that a load of this prefix may take."""
LEAST_GAIN_S = 0.002
SHORTEST_DEADLINE_S = 1.0
SHORTEST_FIRST_DEADLINE_S = 5.0
"""The least deadline, in seconds, while the time to compute is unknown. It is long because on a busy machine threads
wait for a processor, and computing is slow, too: with ten busy threads on two cores, a load of 0.7 MB took 1.2 s, and
computing its prompt's 40 tokens took 5 s."""
DEADLINE_FACTOR = 3.0
"""The deadline of a load is at least this many times the seconds that the tier estimates."""
FIRST_DEADLINE_BYTES_PER_S = 20e6
"""The rate that sets the deadline while the time to compute is unknown: CPUs compute 5 to 100 MB of KV per second."""
LEAST_PROBE_S, MOST_PROBE_S = 0.05, 0.25
PROBE_SHARE = 0.2
"""The wait for a tier's answer, as a share of the time to compute the prompt; at least LEAST_PROBE_S, at most
MOST_PROBE_S."""

_FAILURES: dict[int, LoadFailure] = {
    Outcome.TIMEOUT: LoadFailure.TIER_SLOW,
    Outcome.CORRUPT: LoadFailure.TIER_CORRUPT,
    Outcome.IO_ERROR: LoadFailure.TIER_ERROR,
}


@dataclass(slots=True)
class LoadCounts:
    """Totals of the loads from one tier so far."""

    num_loads: int = 0
    num_tokens: int = 0
    """The tokens by which hits grew."""
    num_bytes: int = 0
    seconds: float = 0.0
    saved_s: float = 0.0
    """Estimated seconds to compute the loaded blocks, less the seconds that the loads took."""
    num_cancelled: int = 0
    """Loads that were cancelled, because no request waited any more, or because running requests needed blocks."""
    num_declined: int = 0
    """Prefixes that were computed though the tier had them, because loading would not have been faster."""
    num_regretted: int = 0
    """Loads that took longer than computing would have taken."""
    blocks_by_outcome: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False, slots=True)
class Load:
    """One load under way."""

    sequence: TokenSequence
    tier: Tier
    parts: list[Part]
    held: BlockIds
    """The blocks of the prefix that are in the pool."""
    keys: Sequence[BlockHash]
    """The keys of the sequence's blocks that lookups find after the load and not before."""
    start: int
    """The number of tokens that the request's cache hit has. The load brings the tokens after them."""
    num_bytes: int
    compute_s: float | None
    ticket: Ticket
    waiting: list[Request] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        return len(self.held) + sum(len(part.block_ids) for part in self.parts)


@dataclass(frozen=True, slots=True)
class _Plan:
    """A possible load from one tier."""

    tier: Tier
    tables: tuple[BlockIds, ...]
    parts: list[Part]
    """The blocks to load, without block ids: no block of the pool is taken yet."""
    num_tokens: int
    num_bytes: int
    load_s: float
    compute_s: float | None

    @property
    def deadline_s(self) -> float:
        """The seconds after which a load is given up: as many as computing would take.

        So if a load is given up, the load and the computation together take at most twice as long as the computation
        alone. The deadline is at least a second, and at least DEADLINE_FACTOR times the tier's estimate.
        """
        if self.compute_s is None:
            compute_s = max(SHORTEST_FIRST_DEADLINE_S, self.num_bytes / FIRST_DEADLINE_BYTES_PER_S)
        else:
            compute_s = max(SHORTEST_DEADLINE_S, self.compute_s)
        return max(compute_s, DEADLINE_FACTOR * self.load_s)


class Loads:
    """The loads under way. Only the engine's thread calls the methods; a tier's threads only set `arrived`."""

    def __init__(
        self, tiers: Sequence[Tier], memory: BlockMemory, manager: KVCacheManager, namespace: bytes, cost: StepCost
    ) -> None:
        self._tiers, self._memory, self._manager, self._namespace, self._cost = tiers, memory, manager, namespace, cost
        self._loads: list[Load] = []
        self._num_ended = 0
        self._load_of: dict[Request, Load] = {}
        self._probes: dict[Request, list[Ticket]] = {}
        """Requests that wait for tiers to say which blocks they have."""
        self._owner_of: dict[BlockHash, Load] = {}
        self._gave_up: WeakSet[TokenSequence] = WeakSet()
        """The sequences whose requests stopped waiting while their blocks were being loaded."""
        self.arrived = threading.Event()
        """Set by every load that ends by itself."""
        self.wants_pause = False
        """Whether a load is to begin as soon as no step is planned."""
        self.counts = {tier.name: LoadCounts() for tier in tiers}

    def __len__(self) -> int:
        """The number of loads under way, plus the number of requests that wait for a tier's answer."""
        return len(self._loads) + len(self._probes)

    # ---------------------------------------------------------------- requests

    def arrive(self, request: Request) -> None:
        if request.skips_cache:
            return
        last = next(reversed(self._probes), None)
        if request.is_fork and last is not None and last.sequence.block_hashes() == request.sequence.block_hashes():
            self._probes[request] = self._probes[last]  # otherwise it could start before the first continuation
            return
        names = [
            BlockKeys.of_group(self._namespace, group_id, keys)
            for group_id, keys in enumerate(self._manager.keys_by_group(request.sequence))
        ]
        if any(len(group_keys) for group_keys in names):
            keys = joined_keys(names)
            compute_s = self._cost.seconds(0, len(request.sequence))
            wait_s = MOST_PROBE_S if compute_s is None else PROBE_SHARE * compute_s
            wait_s = min(MOST_PROBE_S, max(LEAST_PROBE_S, wait_s))
            tickets = [tier.probe(keys, deadline_s=wait_s, on_done=self._note_arrival) for tier in self._tiers]
            if not all(ticket.done for ticket in tickets):
                self._probes[request] = tickets

    def still_waits(self, request: Request) -> bool:
        tickets = self._probes.get(request)
        if tickets is not None:
            if not all(ticket.done for ticket in tickets):
                return True
            del self._probes[request]
            request.loads.failure = next(filter(None, (_failure(ticket.report) for ticket in tickets)), None)
        return request in self._load_of

    def _note_arrival(self, _: Ticket) -> None:
        self.arrived.set()

    def must_wait(self, request: Request, hit: PrefixHit, *, may_begin: bool) -> bool:
        """Whether the request should wait for a load of blocks that `hit` lacks. Begins the load if `may_begin`."""
        if request.skips_cache or not request.loads.may_ask:
            return False
        keys, number = request.sequence.block_hashes(), hit.num_shared_tokens // self._manager.block_size
        if not request.sequence.may_hit(number):
            return False
        load = self._owner_of.get(keys[number]) if number < len(keys) else None
        if load is None:
            if request.loads.no_room_at == self._num_ended and self._loads:
                return True  # there was no room, and no load has ended since
            plan = self._plan(request.sequence, hit)
            if plan is None:
                request.loads.may_ask = False
                return False
            if not may_begin:
                self.wants_pause = True
                return True
            load = self._begin(request.sequence, hit, plan)
            if load is None:
                request.loads.no_room_at = self._num_ended
                return bool(self._loads)  # other loads hold blocks, and release them at their deadlines at the latest
        load.waiting.append(request)
        self._load_of[request] = load
        return True

    def leave(self, request: Request) -> None:
        """Forget a request that has left; a load that nobody waits for is cancelled."""
        self._probes.pop(request, None)
        load = self._load_of.pop(request, None)
        if load is not None:
            load.waiting.remove(request)
            if not load.waiting:
                self._cancel(load)

    # ------------------------------------------------------------------- loads

    def poll(self) -> None:
        """Index the blocks that have arrived. Call this while no step is planned, before `begin_step`."""
        self.arrived.clear()
        self.wants_pause = False
        for load in self._loads.copy():
            if load.ticket.done:
                self._adopt(load)
                self._end(load)

    @property
    def has_arrived(self) -> bool:
        """Whether a load has ended, so that `poll` may index its blocks."""
        return any(load.ticket.done for load in self._loads)

    def cancel_all(self) -> None:
        """Cancel all loads, release their blocks, and stop waiting for the tiers' answers. The requests compute
        instead.
        """
        self._probes.clear()
        for load in self._loads.copy():
            for request in load.waiting:
                request.loads.may_ask = False
                self._gave_up.add(request.sequence)
            self._cancel(load)

    # ------------------------------------------------------------ explanations

    def is_loading(self, sequence: TokenSequence, key: BlockHash) -> bool:
        """Whether the block with this key is being loaded, or was when the sequence's request stopped waiting."""
        return key in self._owner_of or sequence in self._gave_up

    def can_load(self, sequence: TokenSequence, num_tokens: int) -> bool:
        """Whether a tier has blocks that make the hit longer than `num_tokens`, the longest hit in the pool."""
        manager, first = self._manager, num_tokens // self._manager.block_size
        keys = manager.keys_by_group(sequence)
        if manager.has_one_full_group:
            return any(self._stored(tier, 0, keys[0][first : first + 1]) for tier in self._tiers)
        for tier in self._tiers:
            tables = manager.find_hit_with(sequence, [self._stored(tier, *group) for group in enumerate(keys)])
            if len(tables[0]) * manager.groups[0].block_size > num_tokens:
                return True
        return False

    def _plan(self, sequence: TokenSequence, hit: PrefixHit) -> _Plan | None:
        """Of all loads that are faster than computing, plan the load that makes the hit longest; None if no load is
        faster.
        """
        keys = self._manager.keys_by_group(sequence)
        plans = [self._plan_from(tier, sequence, hit, keys) for tier in self._tiers]
        possible = [plan for plan in plans if plan is not None]
        return max(possible, key=lambda plan: plan.num_tokens, default=None)  # the first tier's, of equal plans

    def _plan_from(
        self, tier: Tier, sequence: TokenSequence, hit: PrefixHit, keys: Sequence[Sequence[BlockHash]]
    ) -> _Plan | None:
        manager, one_group = self._manager, self._manager.has_one_full_group
        first = len(hit.block_ids) if one_group else 0
        stored = [self._stored(tier, group_id, group_keys[first:]) for group_id, group_keys in enumerate(keys)]
        if not any(stored):
            return None
        tables = manager.find_hit_with(sequence, stored)
        parts = [Part(group_id, elsewhere(table), NO_BLOCKS) for group_id, table in enumerate(tables)]
        most_blocks = manager.num_blocks // 2
        num_tokens = len(tables[0]) * manager.groups[0].block_size
        if one_group:
            max_blocks = min(PIECE_BYTES // self._memory.payload_bytes(0), most_blocks - first)
            parts = [Part(0, parts[0].numbers[: max(0, max_blocks)], NO_BLOCKS)]
            num_tokens = (first + len(parts[0].numbers)) * manager.block_size
        num_blocks = sum(len(part.numbers) for part in parts)
        if num_tokens <= hit.num_tokens or not num_blocks or len(in_pool(tables)) + num_blocks > most_blocks:
            return None
        num_bytes = sum(len(part.numbers) * self._memory.payload_bytes(part.group_id) for part in parts)
        load_s = tier.estimate_load_s(num_bytes)
        compute_s = self._cost.seconds(hit.num_tokens, num_tokens)
        if compute_s is not None and (load_s > WORTH * compute_s or compute_s - load_s < LEAST_GAIN_S):
            self.counts[tier.name].num_declined += 1
            return None
        return _Plan(tier, tables, parts, num_tokens, num_bytes, load_s, compute_s)

    def _stored(self, tier: Tier, group_id: int, keys: Sequence[BlockHash]) -> set[BlockHash]:
        """Those keys of a group that the tier has, out of `keys`."""
        if not keys:
            return set()
        present = tier.lookup(BlockKeys.of_group(self._namespace, group_id, keys))
        return {key for key, is_there in zip(keys, present.tolist(), strict=True) if is_there}

    def _begin(self, sequence: TokenSequence, hit: PrefixHit, plan: _Plan) -> Load | None:
        """Take blocks and begin to load; None if too few blocks are free."""
        manager, held = self._manager, in_pool(plan.tables)
        num_blocks = len(held) + sum(len(part.numbers) for part in plan.parts)
        if sum(load.num_blocks for load in self._loads) + num_blocks > manager.num_blocks // 2:
            return None
        parts = take_blocks(manager, plan.parts, held)
        if parts is None:
            return None
        blocks, names = BlocksOfParts(self._memory, parts), names_of(manager, self._namespace, sequence, parts)
        ticket = plan.tier.load(
            names, blocks.payload_bytes, blocks, deadline_s=plan.deadline_s, on_done=self._note_arrival
        )
        size = manager.block_size
        chain = sequence.block_hashes()[hit.num_shared_tokens // size : plan.num_tokens // size]
        load = Load(sequence, plan.tier, parts, held, chain, hit.num_tokens, plan.num_bytes, plan.compute_s, ticket)
        self._loads.append(load)
        for key in chain:
            self._owner_of.setdefault(key, load)
        return load

    def _adopt(self, load: Load) -> None:
        """Index the blocks that arrived, and count the load."""
        report, at, num_adopted = load.ticket.report, 0, 0
        for part in load.parts:
            is_good = report.outcomes[at : at + len(part.numbers)] == Outcome.DONE
            at += len(part.numbers)
            num_adopted += part.adopt(self._manager, load.sequence, np.flatnonzero(is_good))
        end = self._manager.get_computed_blocks(load.sequence).num_shared_tokens if num_adopted else load.start
        counts = self.counts[load.tier.name]
        counts.blocks_by_outcome.update(report.by_reason())
        counts.num_loads += 1
        counts.seconds += report.seconds
        counts.num_tokens += max(0, end - load.start)
        if end > load.start:
            counts.num_bytes += load.num_bytes
        if load.compute_s is not None:
            counts.saved_s += load.compute_s * (end > load.start) - report.seconds
            counts.num_regretted += report.seconds > load.compute_s
        failure = _failure(report)
        for request in load.waiting:
            request.loads.failure = failure
            if end > load.start:
                request.loads.spans.append((load.tier.name, load.start, end))
            else:
                request.loads.may_ask = False

    def _cancel(self, load: Load) -> None:
        load.ticket.cancel()
        self.counts[load.tier.name].num_cancelled += 1
        self._end(load)

    def _end(self, load: Load) -> None:
        self._loads.remove(load)
        self._num_ended += 1
        for key in load.keys:
            if self._owner_of.get(key) is load:
                del self._owner_of[key]
        for part in load.parts:
            self._manager.release_blocks(part.block_ids)
        self._manager.release_blocks(load.held)
        for request in load.waiting:
            del self._load_of[request]
        load.waiting.clear()

    def check_integrity(self, waiting: Iterable[Request]) -> None:
        """Raise AssertionError if a request that is not queued waits for a load, or if a request waits for a load that
        has ended.
        """
        assert self._load_of.keys() | self._probes.keys() <= set(waiting), (
            "a request that is not queued waits for a load"
        )
        assert all(load in self._loads for load in self._load_of.values()), "a request waits for a load that has ended"
        assert set(self._owner_of.values()) <= set(self._loads), "a key is kept for a load that has ended"


def _failure(report: Report) -> LoadFailure | None:
    """The reason why the tier failed to give a block, for the first such block; None if there is no such block."""
    return next((_FAILURES[outcome] for outcome in report.outcomes.tolist() if outcome in _FAILURES), None)


LEAST_TOKENS = 64
"""The fewest tokens of a step to learn from. A smaller step takes about the same time, whatever its tokens."""
KEPT = 0.98
"""At each new step, the weight of all earlier steps is multiplied by this number."""


class StepCost:
    """Estimates `seconds = a * tokens + b * tokens * context` of a step by least squares; older steps count less."""

    def __init__(self) -> None:
        self._products = np.zeros((2, 2))
        self._sums = np.zeros(2)
        self._fitted: tuple[float, float] | None = None
        """a and b; None: not computed yet for the steps so far."""

    def note_step(self, starts: Int64Array, ends: Int64Array, seconds: float) -> None:
        """Record the seconds of a step that computed positions `starts` to `ends` (exclusive) of some requests."""
        tokens = ends - starts
        if tokens.sum() < LEAST_TOKENS:
            return
        facts = np.array([tokens.sum(), (tokens * (starts + ends)).sum() / 2], np.float64)
        self._products = KEPT * self._products + np.outer(facts, facts)
        self._sums = KEPT * self._sums + facts * seconds
        self._fitted = None

    def seconds(self, start: int, end: int) -> float | None:
        """Estimate the seconds to compute positions `start` to `end` (exclusive); None if no step of at least
        LEAST_TOKENS tokens was recorded.
        """
        if not self._products[0, 0]:
            return None
        if self._fitted is None:
            self._fitted = self._fit()
        a, b = self._fitted
        return (end - start) * (a + b * (start + end) / 2)

    def _fit(self) -> tuple[float, float]:
        (a, b), _, rank, _ = np.linalg.lstsq(self._products, self._sums, rcond=1e-9)
        if rank < 2 or a <= 0.0 or b < 0.0:  # the steps so far do not determine both a and b
            a, b = self._sums[0] / self._products[0, 0], 0.0
        return float(a), float(b)
