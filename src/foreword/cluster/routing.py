"""RoutingCore: chooses a replica for a request and reserves the work there, in one call.

The core knows keys, tokens, replicas' names, and times, which callers pass in. It knows no text, sockets, threads or
clocks, and draws no random numbers: equal calls give equal decisions. One request's life:

    decision = choose(request, now)              the cheapest replica; its work is reserved, its blocks are expected
    note_first_token(reservation, now, cached)   the work is done; compares the hit with the predicted one
    release(reservation, now)                    the end, a rejection or a death; may be called again
    choose(request, now, exclude)                a further attempt; the earlier attempt is released

The cost of a replica, in seconds:

    backlog + to compute / rate + reuse + price of the evicted blocks + decode pressure

The first two are the request's own wait. `reuse` is the cost of the choice for other requests. A block that another
replica holds is computed once more here, in time t. So the requests that wait at a replica, q on average, each wait t
longer. Later requests will share the new copy, so only a part p of that cost is charged to this request:

    reuse = sum of t * ((1 + q) * p - 1)       p: 1 for a conversation's own blocks, towards 0 for a prefix that
                                               everybody asks for (demand.py)

`to compute` is the number of the prompt's tokens after the hit. For a linked prompt it is a sum: these tokens without
those that are copied, and the tokens of source blocks that the replica lacks (holders.py). For linked prompts p is 1.

The chosen replica has the least cost. So for every other replica j: backlog - backlog(j) <= (1 + q) * (the prefill
seconds that the hit saves against j) + (price and decode seconds of j - those of the chosen replica). This limits how
much longer a request queues for its hit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import Int64Array
from foreword.cluster.decision import Decision, DecisionLog, Fleet, Reason, Reservation, RoutingCounts, RoutingRequest
from foreword.cluster.demand import Demand, PromptNode, lost_shares
from foreword.cluster.follower import EventBatch, Follower
from foreword.cluster.holders import HolderIndex, Key, SourceHits
from foreword.cluster.loads import Loads, Work
from foreword.cluster.mirror import ReplicaMirror
from foreword.cluster.options import ReplicaLoad, ReplicaSpec, RoutingOptions
from foreword.cluster.peers import Change, LoadUpdate, Outbox, Peer, RouterLoad, time_to_turn
from foreword.cluster.reuse_ages import FloatArray, ReuseAges
from foreword.cluster.ring import HashRing
from foreword.errors import ConfigError, NoReplicaError

MAX_WAIT_SHARE = 0.01
"""Longest wait of a request for its router's time slot, as a share of the request's prefill time."""
Rule = Callable[[Fleet], FloatArray]
"""Returns the cost of each slot, [slots]. The usable slot with the lowest cost is chosen."""


@dataclass(slots=True)
class _Expected:
    """The blocks, also of sources, that a reservation's replica will have, and the hit that the decision counted on."""

    mirror: ReplicaMirror
    claim: int
    hit_tokens: int
    prompt: PromptNode
    reason: Reason


class RoutingCore:
    """The state of one router and its decisions. `life` names this process, for its peers; `log` keeps explanations."""

    def __init__(
        self,
        options: RoutingOptions,
        *,
        router: str = "router",
        life: str = "",
        rule: Rule | None = None,
        log: DecisionLog | None = None,
    ) -> None:
        self.options = options
        self.router = router
        self.counts = {reason: RoutingCounts() for reason in Reason}
        self._rule, self.log = rule or self._cost, log
        self._holders, self._ages, self._ring, self._loads = HolderIndex(), ReuseAges(), HashRing(), Loads()
        self._demand = Demand()
        self._names: list[str] = []
        """The replica in each slot; empty for unused slots."""
        self._mirrors: list[ReplicaMirror] = []
        self._slot_of: dict[str, int] = {}
        self._synced = 0
        """Bits of the slots whose mirrors are synced. `_usable`, below: bits of the slots that may be chosen."""
        self._usable = 0
        self._open_prefixes = 0
        """Bits of the slots whose replicas may hold a block without the blocks before it."""
        self._attempts: dict[str, Reservation] = {}
        """The latest open reservation of each of this router's requests."""
        self._expected: dict[Reservation, _Expected] = {}
        self._expectations: deque[tuple[float, _Expected]] = deque()
        """Expected blocks, each with the time at which the expectation ends; in the order of these times."""
        self._outbox = Outbox(router, life)
        self._peers: dict[str, Peer] = {}

    # ------------------------------------------------------------------ replicas

    @property
    def replicas(self) -> list[str]:
        """The names of the replicas that have joined and not left."""
        return list(self._slot_of)

    @property
    def is_any_usable(self) -> bool:
        """Whether a request could be sent anywhere."""
        return self._usable != 0

    def join(self, name: str, spec: ReplicaSpec) -> None:
        """Add a replica, or take a retired replica back. Nothing is known of a new replica's cache."""
        if name not in self._slot_of:
            slot = self._names.index("") if "" in self._names else self._loads.add_slot()
            mirror = ReplicaMirror(slot, self._holders, self._ages)
            self._names[slot : slot + 1], self._mirrors[slot : slot + 1] = [name], [mirror]
            self._slot_of[name] = slot
            self._ring.add(name, slot)
        slot, table = self._slot_of[name], self._loads.table
        self._usable |= 1 << slot
        self._open_prefixes = self._open_prefixes & ~(1 << slot) | (not spec.is_prefix_closed) << slot
        table.usable[slot], table.num_blocks[slot] = True, spec.num_blocks
        self._loads.rates.join(slot, spec.tokens_per_s, is_known=spec.is_rate_known)
        table.decode_s[slot], table.decode_tokens[slot] = spec.decode_s, spec.decode_tokens

    def retire(self, name: str) -> None:
        """Send no more requests to a replica. Its present requests go on."""
        slot = self._slot(name)
        self._usable &= ~(1 << slot)
        self._loads.table.usable[slot] = False

    def leave(self, name: str, now: float) -> list[Reservation]:
        """Forget a replica and release all its open reservations. Returns those that this router made."""
        slot = self._slot(name)
        self.retire(name)
        lost = [reservation for reservation, work in self._loads.open.items() if work.slot == slot]
        for reservation in lost:
            self.release(reservation, now)
        self.learn(name, Follower.fall_silent, now)
        self._ring.remove(slot)
        self._loads.rates.leave(slot)
        self._open_prefixes &= ~(1 << slot)
        del self._slot_of[name]
        self._names[slot] = ""
        return [reservation for reservation in lost if reservation.router == self.router]

    def _slot(self, name: str) -> int:
        slot = self._slot_of.get(name)
        if slot is None:
            raise ConfigError(f"replica {name!r} is unknown; call join first. Known: {', '.join(self.replicas)}")
        return slot

    def loads(self) -> dict[str, ReplicaLoad]:
        table = self._loads.table
        return {
            name: ReplicaLoad(
                int(table.num_blocks[slot]),
                int(table.num_open[slot]),
                int(table.waiting_tokens[slot]),
                float(self._loads.rates.tokens_per_s[slot]),
            )
            for name, slot in self._slot_of.items()
        }

    # ------------------------------------------------------------------ knowledge

    def observe(self, name: str, batch: EventBatch, now: float) -> bool:
        """Take a replica's next events. False: the mirror is no longer right, so a snapshot is needed."""
        return self.learn(name, lambda follower: follower.take(batch), now)

    def install_snapshot(self, name: str, snapshot: EventBatch, now: float) -> bool:
        """Take a replica's whole state. False: batches after the snapshot are missing; a newer snapshot is needed."""
        return self.learn(name, lambda follower: follower.install(snapshot), now)

    def learn(self, name: str, tell: Callable[[Follower], object], now: float) -> bool:
        """Call `tell` with a replica's follower, to pass on what has arrived. False: its mirror is not synced then."""
        slot = self._slot(name)
        mirror = self._mirrors[slot]
        mirror.learn(lambda: tell(mirror.follower), now)
        return self._note_mirror(slot, now)

    def mirror(self, name: str) -> ReplicaMirror:
        """The copy of what a replica's cache holds. Read only."""
        return self._mirrors[self._slot(name)]

    def unsynced(self) -> list[str]:
        """The replicas that need a snapshot."""
        return [name for name, slot in self._slot_of.items() if not self._mirrors[slot].is_synced]

    def _note_mirror(self, slot: int, now: float) -> bool:
        mirror, table = self._mirrors[slot], self._loads.table
        table.num_held[slot] = len(mirror.parents)
        table.oldest_use[slot] = mirror.oldest_use(now)
        self._synced = self._synced | 1 << slot if mirror.is_synced else self._synced & ~(1 << slot)
        return mirror.is_synced

    # ------------------------------------------------------------------ decisions

    def wait_s(self, request: RoutingRequest, clock_s: float) -> float:
        """Seconds to wait before `choose`, so that routers decide one after the other; 0.0 if there is one router.

        `clock_s` is the time of a clock that all routers share, such as `time.time()`. If another router does not know
        this choice, this prompt's prefill can delay that router's requests. A wait helps only if it is much shorter
        than the prefill, so short prompts do not wait.
        """
        wait_s = time_to_turn(self.router, self._peers, self.options.turn_s, clock_s)
        table = self._loads.table
        rate = float(self._loads.rates.tokens_per_s[table.usable].max(initial=0)) or 1.0
        return wait_s if wait_s <= MAX_WAIT_SHARE * request.num_tokens / rate else 0.0

    def choose(
        self, request: RoutingRequest, now: float, exclude: Collection[str] = (), *, is_counted: bool = True
    ) -> Decision:
        """Choose a replica that is not in `exclude` and reserve the work there. Releases the request's earlier attempt.

        `is_counted`: False for work that no client asked for; `counts` and `log` leave it out.

        Raises NoReplicaError if no replica can take the request.
        """
        for peer in [name for name, peer in self._peers.items() if peer.heard_at + self.options.peer_silence_s < now]:
            self.forget_router(peer, now)
        attempt = 1
        if (earlier := self._attempts.get(request.request_id)) is not None:
            attempt = earlier.attempt + 1
            self.release(earlier, now)
        excluded = [self._slot_of[name] for name in exclude if name in self._slot_of]
        usable = self._usable & ~sum(1 << slot for slot in set(excluded))
        if not usable:
            raise NoReplicaError(
                f"none of {len(self.replicas)} replicas can take request {request.request_id!r} ({len(excluded)} are "
                "excluded); wait until a replica joins"
            )
        fleet = self._fleet(request, now, excluded)
        degraded = not usable & self._synced
        costs = np.where(fleet.usable, self._rule(fleet), np.inf)
        if degraded:
            slot = self._ring.find(request.affinity(), fleet.usable, fleet.num_open, self.options.load_slack)
        else:
            slot = _least(costs, fleet)
        reservation = Reservation(self.router, request.request_id, attempt, self._names[slot])
        hit_blocks = int(fleet.hit_blocks[slot])
        hit_tokens = min(hit_blocks * self.options.block_tokens, request.most_hit_tokens)
        self._reserve(reservation, Work(slot, request.num_tokens, max(1, int(fleet.computed_tokens[slot]))), now)
        self._attempts[request.request_id] = reservation
        used, new = request.keys[max(0, hit_blocks - 1) : hit_blocks], request.keys[hit_blocks:]
        if fleet.sources is not None:
            used, new = used + fleet.sources.last_held(slot), new + fleet.sources.lacking(slot)
        mirror = self._mirrors[slot]
        for key in used:
            mirror.touch(key, now)
        if used:
            self._loads.table.oldest_use[slot] = mirror.oldest_use(now)
        prompt = self._demand.enter(request.keys, int(self._loads.table.num_blocks.sum()))
        names = tuple(self._names)
        decision = Decision(reservation, slot, degraded, hit_tokens, fleet, costs, names, self._synced, tuple(excluded))
        self._expected[reservation] = _Expected(mirror, mirror.claim(new), hit_tokens, prompt, decision.reason)
        if is_counted:
            self.counts[decision.reason].decisions += 1
            if self.log is not None:
                self.log.add(decision)
        return decision

    def _fleet(self, request: RoutingRequest, now: float, excluded: list[int]) -> Fleet:
        table, size = self._loads.table, self.options.block_tokens
        usable = table.usable.copy()
        if excluded:
            usable[excluded] = False
        among, is_closed, sources = self._synced, not self._open_prefixes, None
        prefixes = [request.keys, *(run.keys for run in request.runs)]
        hits, *depths = self._holders.depths(prefixes, among, len(table), is_closed)
        computed, new_blocks = request.num_tokens - hits * size, len(request.keys) - hits
        if request.runs:
            sources = SourceHits.of(request.runs, request.keys, hits * size, np.array(depths))
            computed += sources.missing_blocks * size - sources.copied_tokens
            new_blocks += sources.missing_blocks
        rate, waiting = self._loads.rates.tokens_per_s, table.waiting_tokens
        free = np.maximum(table.num_blocks - table.num_held - (waiting / size).astype(np.int64), 0)
        evicted = np.maximum(new_blocks - free, 0)
        price = self.options.price_weight * evicted * size / rate
        return Fleet(
            request,
            size,
            usable,
            hits,
            computed,
            self._loads.backlogs(now),
            np.maximum(computed, 1) / rate,
            self._reuse_s(request, usable, hits, computed),
            price * self._ages.chances(now - table.oldest_use) if evicted.any() else price,
            table.decode_s * (table.num_open - table.num_waiting) + table.decode_tokens / rate * table.num_open,
            table.num_waiting,
            table.num_open,
            waiting,
            free,
            table.num_blocks,
            sources,
        )

    def _reuse_s(
        self, request: RoutingRequest, usable: npt.NDArray[np.bool_], hits: Int64Array, computed: Int64Array
    ) -> FloatArray:
        """`Fleet.reuse_s`: the seconds that other requests lose if a slot is chosen, [slots]."""
        table, size, reuse = self._loads.table, self.options.block_tokens, np.zeros(len(usable))
        waiting = table.num_waiting[usable]
        num_waiting = float(waiting.sum())
        per_replica = num_waiting / len(waiting)
        if request.runs:
            reuse[usable] = per_replica * (computed[usable] - computed[usable].min())
        elif hits.any():
            stretches, of_all = self._demand.of_prompt(request.keys), num_waiting / max(1, len(self._expected))
            lost, shares = lost_shares(stretches, hits[usable], of_all)
            reuse[usable] = size * ((1 + per_replica) * shares - lost)
        seconds: FloatArray = reuse / self._loads.rates.tokens_per_s
        return seconds

    def _cost(self, fleet: Fleet) -> FloatArray:
        costs: FloatArray = fleet.backlog_s + fleet.prefill_s + fleet.reuse_s + fleet.price_s + fleet.decode_s
        return costs

    def _reserve(self, reservation: Reservation, work: Work, now: float) -> None:
        self._loads.reserve(reservation, work, now)
        self._tell(Change.RESERVED, reservation, work.prompt_tokens, work.computed_tokens)

    def note_first_token(self, reservation: Reservation, now: float, cached_tokens: int) -> None:
        """Record that the first token has come, and that the replica had `cached_tokens` exact tokens of the prompt."""
        work, expected = self._loads.open.get(reservation), self._expected.get(reservation)
        if work is None or expected is None:
            return
        # `cached_tokens` leaves out a linked prompt's sources: for them, the number of the choice counts.
        computed = work.computed_tokens + expected.hit_tokens - cached_tokens
        if not self._loads.note_prefilled(reservation, now, computed):
            return
        del self._expected[reservation]
        self._demand.leave(expected.prompt)
        self._tell(Change.PREFILLED, reservation)
        if self.log is not None:
            self.log.note_delivered(reservation, cached_tokens)
        counts = self.counts[expected.reason]
        counts.delivered += 1
        counts.prompt_tokens += work.prompt_tokens
        counts.predicted_tokens += expected.hit_tokens
        counts.delivered_tokens += cached_tokens
        counts.overcredited_tokens += max(0, expected.hit_tokens - cached_tokens)
        self._expectations.append((now + self.options.expectation_s, expected))
        self._expire(now)

    def total_counts(self) -> RoutingCounts:
        return RoutingCounts(*map(sum, zip(*map(astuple, self.counts.values()), strict=True)))

    def release(self, reservation: Reservation, now: float) -> bool:
        """Release a request that ended, was rejected or died with its replica. False: it was released before."""
        if not self._loads.release(reservation, now):
            return False
        expected = self._expected.pop(reservation, None)
        if expected is not None:  # its prompt was never computed
            expected.mirror.unclaim(expected.claim)
            self._demand.leave(expected.prompt)
        if self._attempts.get(reservation.request_id) == reservation:
            del self._attempts[reservation.request_id]
        if reservation.router == self.router:
            self._tell(Change.RELEASED, reservation)
        return True

    def _expire(self, now: float) -> None:
        while self._expectations and self._expectations[0][0] <= now:
            _, expected = self._expectations.popleft()
            expected.mirror.unclaim(expected.claim)

    # ------------------------------------------------------------------ other routers

    def take_updates(self) -> list[LoadUpdate]:
        """Changes of this router's reservations since the last call, for its peers' `merge`."""
        return self._outbox.take()

    def beat(self) -> None:
        """Add an update that only says that this router lives. Call it more often than `peer_silence_s`."""
        self._tell(Change.ALIVE, Reservation(self.router, "", 0, ""))

    def export_load(self) -> RouterLoad:
        """Return all open reservations of this router, for a peer that has missed updates."""
        changes = []
        for reservation, work in self._loads.open.items():
            if reservation.router == self.router:
                changes.append((Change.RESERVED, reservation, work.prompt_tokens, work.computed_tokens))
                if reservation not in self._expected:
                    changes.append((Change.PREFILLED, reservation, 0, 0))
        return self._outbox.whole(changes)

    def merge(self, updates: Sequence[LoadUpdate], now: float) -> list[str]:
        """Take other routers' updates. Returns the routers whose `export_load` is needed."""
        lost = dict[str, None]()
        for update in updates:
            peer = self._peers.setdefault(update.router, Peer(now))
            if update.life != peer.life:
                self._release_all(update.router, now)
            if peer.follows(update, now):
                self._apply(update, now)
            elif not peer.is_synced:
                lost[update.router] = None
        return list(lost)

    def install_load(self, load: RouterLoad, now: float) -> None:
        """Take all reservations of another router. A state that is older than the updates seen is ignored."""
        peer = self._peers.setdefault(load.router, Peer(now))
        peer.heard_at = now
        if peer.is_synced and peer.life == load.life and load.number < peer.next_number - 1:
            return
        self._release_all(load.router, now, keep={update.reservation for update in load.updates})
        peer.life, peer.next_number, peer.is_synced = load.life, load.number + 1, True
        for update in load.updates:
            self._apply(update, now)

    def forget_router(self, router: str, now: float) -> None:
        self._peers.pop(router, None)
        self._release_all(router, now)

    def _apply(self, update: LoadUpdate, now: float) -> None:
        match update.change:
            case Change.RESERVED:
                slot = self._slot_of.get(update.reservation.replica)
                if slot is not None and update.reservation not in self._loads.open:
                    work = Work(slot, update.prompt_tokens, update.computed_tokens)
                    self._loads.reserve(update.reservation, work, now)
            case Change.PREFILLED:
                self._loads.note_prefilled(update.reservation, now)
            case Change.RELEASED:
                self._loads.release(update.reservation, now)

    def _release_all(self, router: str, now: float, keep: Collection[Reservation] = ()) -> None:
        for reservation in [each for each in self._loads.open if each.router == router and each not in keep]:
            self._loads.release(reservation, now)

    def _tell(self, change: Change, reservation: Reservation, prompt_tokens: int = 0, computed_tokens: int = 0) -> None:
        if self.options.share_load:
            self._outbox.put(change, reservation, prompt_tokens, computed_tokens)

    def check_integrity(self, keys: Sequence[Key]) -> None:
        """Check sums against reservations, and mirrors against the index; `keys`: all keys that exist."""
        self._loads.check_integrity()
        self._demand.check_integrity()
        for name, slot in self._slot_of.items():
            mirror = self._mirrors[slot]
            mirror.check_integrity(keys)
            assert bool(self._synced >> slot & 1) == mirror.is_synced, f"the knowledge of {name} is wrong"
        assert set(self._expected) <= set(self._loads.open), "a released request is expected to leave blocks"


def _least(costs: FloatArray, fleet: Fleet) -> int:
    """The slot with the least cost; among equals, the slot with the most free blocks, then with the fewest requests."""
    ties = np.flatnonzero(costs == costs.min())
    if len(ties) > 1:
        ties = ties[np.lexsort((ties, fleet.num_open[ties], -fleet.free_blocks[ties]))]
    return int(ties[0])
