"""Many replicas in simulated time: routers with the real `RoutingCore`, pools with the real cache.

Computes no tokens. A replica computes one prompt after the other at its rate, looks for a hit when it begins, and
generates answers beside that at no cost. Its pool is the engine's `KVCacheManager`; its events reach the routers late
if asked. `foreword.replay.timing` has steps, batches and decoding instead.

`RULES` has other routers' rules, as costs of replicas, to be compared with ours on equal traffic. They are written from
their published descriptions. All of them get exact and fresh knowledge of caches and load, including requests under
way, which their own systems estimate, poll or lack: the comparison is kind to them.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from foreword.cache import CacheLedger, EventLog, TokenSequence
from foreword.cache.block_ids import Int64Array
from foreword.cluster import (
    EventBatch,
    Fleet,
    LoadUpdate,
    ReplicaSpec,
    Reservation,
    RoutingCore,
    RoutingOptions,
    RoutingRequest,
    Rule,
)
from foreword.cluster.options import TURN_S
from foreword.cluster.reuse_ages import FloatArray
from foreword.cluster.ring import HashRing
from foreword.errors import ConfigError, NoReplicaError
from foreword.replay.caches import ManagerCache, as_sequence
from foreword.replay.trace import RecordedRequest, arrivals

COST = "cost"
"""Our own rule."""
STABLE_BLOCKS = 2
"""The boundary that routers hash without knowledge; recordings do not say where system prompts end."""
BEAT_S = 1.0


def first_token(fleet: Fleet) -> FloatArray:
    """The least predicted time to the first token: what the replica has to do, and what it lacks of the prompt."""
    costs: FloatArray = fleet.backlog_s + fleet.prefill_s
    return costs


class BoundedHash:
    """Consistent hashing with bounded loads of the session or the stable boundary (`ring.py`), a quarter of slack."""

    def __init__(self, slack: float = 0.25) -> None:
        self._slack = slack
        self._ring, self._num_slots = HashRing(), 0

    def __call__(self, fleet: Fleet) -> FloatArray:
        for slot in range(self._num_slots, len(fleet.usable)):
            self._ring.add(str(slot), slot)
            self._num_slots += 1
        costs = np.full(len(fleet.usable), np.inf)
        costs[self._ring.find(fleet.request.affinity(), fleet.usable, fleet.num_waiting, self._slack)] = 0.0
        return costs


class RoundRobin:
    """One replica after the other."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, fleet: Fleet) -> FloatArray:
        order = (np.arange(len(fleet.usable)) - self._next) % len(fleet.usable)
        costs: FloatArray = np.where(fleet.usable, order, np.inf)
        self._next = int(costs.argmin()) + 1
        return costs


class PowerOfTwo:
    """The shorter queue of two random replicas."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def __call__(self, fleet: Fleet) -> FloatArray:
        usable = np.flatnonzero(fleet.usable)
        two = self._rng.choice(usable, min(2, len(usable)), replace=False)
        costs = np.full(len(fleet.usable), np.inf)
        costs[two] = fleet.num_waiting[two]
        return costs


class RayPrefix:
    """Ray Serve LLM's PrefixCacheAffinityRouter: the longest match, among equals the shortest queue.

    Matches below a tenth of the prompt go to the smallest tree. Power of two decides if queues differ by more than
    `threshold` requests. Ray's code has an infinite threshold, its documentation 10.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._power_of_two = PowerOfTwo()

    def __call__(self, fleet: Fleet) -> FloatArray:
        queues = fleet.num_waiting[fleet.usable]
        if queues.max() - queues.min() > self._threshold:
            return self._power_of_two(fleet)
        matched = fleet.hit_blocks[fleet.usable].max()
        if matched < 0.1 * len(fleet.request.keys):
            return _shortest_queue(fleet, fleet.num_blocks - fleet.free_blocks)
        return _shortest_queue(fleet, -fleet.hit_blocks)


def sglang_cache_aware(fleet: Fleet) -> FloatArray:
    """SGLang's gateway, `cache_aware`: the longest match if it is more than half of the prompt, else the smallest tree.

    The shortest queue is chosen if the longest has more than 32 requests more and is more than 1.1 times as long.
    """
    queues = fleet.num_waiting[fleet.usable]
    longest, shortest = int(queues.max()), int(queues.min())
    if longest - shortest > 32 and longest > 1.1 * shortest:
        return fleet.num_waiting.astype(np.float64)
    if fleet.hit_blocks[fleet.usable].max() > 0.5 * len(fleet.request.keys):
        return _shortest_queue(fleet, -fleet.hit_blocks)
    return _shortest_queue(fleet, fleet.num_blocks - fleet.free_blocks)


def llm_d(fleet: Fleet) -> FloatArray:
    """llm-d's scorers: 2 x matched share + 1 x free share of the KV cache + 1 x shortness of the queue.

    Of four readings of "free share" (nothing, blocks held, prompts open, prompts waiting) the last waited least.
    """
    matched = fleet.hit_blocks / max(1, len(fleet.request.keys))
    used = np.minimum(fleet.waiting_tokens / (fleet.num_blocks * fleet.block_tokens), 1)
    queues = fleet.num_waiting[fleet.usable]
    shortest, spread = int(queues.min()), max(1, int(queues.max() - queues.min()))
    score: FloatArray = 2 * matched + (1 - used) + (1 - (fleet.num_waiting - shortest) / spread)
    return -score


def dynamo(fleet: Fleet) -> FloatArray:
    """NVIDIA Dynamo's cost: blocks to prefill, those under way included.

    Blocks that decode are left out: they delay nobody in this simulation, and with them the rule waits longer.
    """
    missing = fleet.waiting_tokens + fleet.request.num_tokens - fleet.hit_blocks * fleet.block_tokens
    costs: FloatArray = np.maximum(missing, 0) / fleet.block_tokens
    return costs


def _shortest_queue(fleet: Fleet, first: Int64Array) -> FloatArray:
    """Orders replicas by `first`, and equal ones by their queues."""
    costs: FloatArray = first + fleet.num_waiting / (1.0 + fleet.num_waiting.max())
    return costs


_RULES: dict[str, Callable[[], Rule | None]] = {
    COST: lambda: None,
    "first_token": lambda: first_token,
    "bounded_hash": BoundedHash,
    "round_robin": RoundRobin,
    "power_of_two": PowerOfTwo,
    "ray": lambda: RayPrefix(float("inf")),
    "ray_10": lambda: RayPrefix(10),
    "sglang": lambda: sglang_cache_aware,
    "llm_d": lambda: llm_d,
    "dynamo": lambda: dynamo,
}
RULES = tuple(_RULES)


def make_rule(name: str) -> Rule | None:
    """A rule by its name, with a state of its own; None: the core's own rule. Raises ConfigError if unknown."""
    if name not in _RULES:
        raise ConfigError(f"routing={name!r} is unknown; use one of {', '.join(RULES)}")
    return _RULES[name]()


@dataclass(frozen=True, slots=True)
class FleetChange:
    """A replica dies or joins during the recording."""

    at_s: float
    replica: str
    joins: bool
    """False: it dies with its pool and its requests. A name that died may join again, empty."""


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """The replicas and routers that serve the recording."""

    num_blocks: int
    """KV blocks of each replica."""
    tokens_per_s: tuple[float, ...]
    """Prefill rates; replica i has number i modulo their number."""
    num_replicas: int = 8
    routing: str = COST
    eviction_policy: str = "lru"
    num_routers: int = 1
    """Requests take routers in turn."""
    event_delay_s: float = 0.0
    """Time until the events of a pool reach the routers."""
    update_delay_s: float | None = 0.002
    """Time until a router's reservations reach the others; None: never."""
    turn_s: float = TURN_S
    """Length of a router's turn in a burst; 0: none."""
    decode_tokens_per_s: float = 50.0
    """Speed of one answer; it ends the request and delays nobody."""
    changes: tuple[FleetChange, ...] = ()
    price_weight: float = 1.0

    def __post_init__(self) -> None:
        make_rule(self.routing)
        for name, least in (("num_blocks", 1), ("num_replicas", 1), ("num_routers", 1), ("event_delay_s", 0)):
            if not least <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)} is too small; use at least {least}")
        if not self.tokens_per_s or not all(0 < rate < float("inf") for rate in self.tokens_per_s):
            raise ConfigError(f"tokens_per_s={self.tokens_per_s} are no rates; use numbers above 0")


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """Results for the requests."""

    requests: int
    requests_refused: int
    """Larger than a replica's pool, or left waiting without a replica at the end."""
    requests_retried: int
    """Requests whose replica died before their first token."""
    mean_ttft_s: float
    ttft_s: dict[str, float]
    """Arrival to first token: p50, p90, p99."""
    hit_ratio: float
    """Share of all blocks of the prompts that were found."""
    work_max_over_mean: float
    """Computed tokens of the busiest replica, over the mean of all replicas, idle ones too; 0 without work."""
    degraded: int
    """Decisions without any knowledge of the caches."""
    predicted_tokens: int
    delivered_tokens: int
    overcredited_tokens: int


@dataclass(slots=True, eq=False)
class _Job:
    sequence: TokenSequence
    recorded: RecordedRequest
    request: RoutingRequest
    router: int
    arrived_s: float
    reservation: Reservation | None = None


@dataclass(slots=True, eq=False)
class _Replica:
    name: str
    rate: float
    publisher_id: bytes
    pool: ManagerCache
    events: EventLog
    waiting: deque[_Job] = field(default_factory=deque)
    running: _Job | None = None
    is_alive: bool = True
    num_batches: int = 0


class ClusterSimulation:
    """One run; `serve` a recording once."""

    def __init__(self, options: ClusterOptions) -> None:
        self.options = options
        self.now = 0.0
        self.cores: list[RoutingCore] = []
        self.replicas: dict[str, _Replica] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        """(time, order, what happens): a heap."""
        self._order = count()
        self._lives = count()
        self._goes_on = True
        """Requests may still come."""
        self._stranded: list[_Job] = []
        self._ttft: list[float] = []
        self._computed: dict[str, int] = {}
        self._num_blocks = self._num_hits = self._num_refused = self._num_retried = 0

    def serve(self, recording: Iterable[RecordedRequest]) -> ClusterReport:
        """Serve requests as they arrive.

        Raises ConfigError for a recording without times.
        """
        for number, (at_s, recorded) in enumerate(arrivals(recording)):
            if not number:
                self._open(recorded.block_tokens)
            self._run(until=at_s)
            self.now = at_s
            self._arrive(recorded, number)
        self._goes_on = False
        self._run(until=float("inf"))
        return self._report()

    def _open(self, block_tokens: int) -> None:
        options = self.options
        routing = RoutingOptions(
            block_tokens,
            price_weight=options.price_weight,
            turn_s=options.turn_s,
            share_load=options.num_routers > 1 and options.update_delay_s is not None,
        )
        self.cores = [
            RoutingCore(routing, router=f"router-{number}", rule=make_rule(options.routing))
            for number in range(options.num_routers)
        ]
        for number in range(options.num_replicas):
            self._join(f"replica-{number}", number)
        for change in options.changes:
            if change.joins:
                index = int(change.replica.rpartition("-")[2]) if change.replica[-1:].isdigit() else 0
                self._at(change.at_s, lambda name=change.replica, index=index: self._join(name, index))  # type: ignore[misc]
            else:
                self._at(change.at_s, lambda name=change.replica: self._die(name))  # type: ignore[misc]
        if routing.share_load:
            self._beat()

    def _at(self, time_s: float, happens: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time_s, next(self._order), happens))

    def _run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, happens = heapq.heappop(self._events)
            happens()

    # ------------------------------------------------------------------ requests

    def _arrive(self, recorded: RecordedRequest, number: int) -> None:
        self._num_blocks += len(recorded.keys)
        if len(recorded.keys) > self.options.num_blocks:
            self._num_refused += 1
            return
        sequence = as_sequence(recorded)
        request = RoutingRequest(str(number), list(sequence.block_hashes()), recorded.num_prompt_tokens, STABLE_BLOCKS)
        self._route(_Job(sequence, recorded, request, number % len(self.cores), self.now))

    def _route(self, job: _Job) -> None:
        """Choose a replica once it is the router's turn."""
        wait_s = self.cores[job.router].wait_s(job.request, self.now)
        if wait_s:
            self._at(self.now + wait_s, lambda: self._choose(job))
        else:
            self._choose(job)

    def _choose(self, job: _Job) -> None:
        try:
            decision = self.cores[job.router].choose(job.request, self.now)
        except NoReplicaError:
            self._stranded.append(job)
            return
        job.reservation = decision.reservation
        self._share(job.router)
        replica = self.replicas[decision.replica]
        replica.waiting.append(job)
        self._begin(replica)

    def _begin(self, replica: _Replica) -> None:
        """Compute the next prompt if the replica is idle."""
        if replica.running is not None or not replica.waiting:
            return
        job = replica.running = replica.waiting.popleft()
        num_held = replica.pool.admit_sequence(job.sequence)
        self._publish(replica)
        self._num_hits += num_held
        cached = min(job.recorded.tokens_of(num_held), job.request.num_tokens - 1)
        computed = job.request.num_tokens - cached
        self._computed[replica.name] += computed
        self._at(self.now + computed / replica.rate, lambda: self._first_token(replica, job, cached))

    def _first_token(self, replica: _Replica, job: _Job, cached: int) -> None:
        if not replica.is_alive:
            return
        core, reservation = self.cores[job.router], job.reservation
        assert reservation is not None
        self._ttft.append(self.now - job.arrived_s)
        core.note_first_token(reservation, self.now, cached)
        self._share(job.router)
        replica.running = None
        self._at(
            self.now + job.recorded.num_output_tokens / self.options.decode_tokens_per_s,
            lambda: self._finish(job.router, reservation),
        )
        self._begin(replica)

    def _finish(self, router: int, reservation: Reservation) -> None:
        self.cores[router].release(reservation, self.now)
        self._share(router)

    # ------------------------------------------------------------------ what routers hear

    def _publish(self, replica: _Replica) -> None:
        batch = EventBatch(
            replica.publisher_id, replica.num_batches, tuple(each.event for each in replica.events.take())
        )
        replica.num_batches += 1
        if self.options.event_delay_s:
            self._at(self.now + self.options.event_delay_s, lambda: self._observe(replica, batch))
        else:
            self._observe(replica, batch)

    def _observe(self, replica: _Replica, batch: EventBatch) -> None:
        if replica.is_alive:
            for core in self.cores:
                core.observe(replica.name, batch, self.now)

    def _share(self, router: int) -> None:
        updates = self.cores[router].take_updates()
        if updates:
            assert self.options.update_delay_s is not None
            self._at(self.now + self.options.update_delay_s, lambda: self._merge(router, updates))

    def _merge(self, router: int, updates: list[LoadUpdate]) -> None:
        for number, core in enumerate(self.cores):
            if number != router:
                assert not core.merge(updates, self.now), "a simulated update was lost"

    def _beat(self) -> None:
        for number, core in enumerate(self.cores):
            core.beat()
            self._share(number)
        if self._goes_on:
            self._at(self.now + BEAT_S, self._beat)

    # ------------------------------------------------------------------ replicas

    def _join(self, name: str, number: int) -> None:
        options = self.options
        rate = options.tokens_per_s[number % len(options.tokens_per_s)]
        life = next(self._lives).to_bytes(16, "big")
        events = EventLog()
        pool = ManagerCache(options.num_blocks, options.eviction_policy, CacheLedger(options.num_blocks, events=events))
        self._computed.setdefault(name, 0)
        self.replicas[name] = _Replica(name, rate, life, pool, events)
        for core in self.cores:
            core.join(name, ReplicaSpec(options.num_blocks, rate, is_prefix_closed=True))
            core.install_snapshot(name, EventBatch(life, -1), self.now)
        stranded, self._stranded = self._stranded, []
        for job in stranded:
            self._route(job)

    def _die(self, name: str) -> None:
        """The replica's pool and its prompts are lost; routers hear of it at once and send the prompts elsewhere."""
        replica = self.replicas.pop(name, None)
        if replica is None:
            raise ConfigError(f"replica {name!r} cannot die at {self.now} s; there is none of this name")
        replica.is_alive = False
        for number, core in enumerate(self.cores):
            core.leave(name, self.now)
            self._share(number)
        lost = ([] if replica.running is None else [replica.running]) + list(replica.waiting)
        self._num_retried += len(lost)
        for job in lost:
            self._route(job)

    def _report(self) -> ClusterReport:
        ttft = np.array(self._ttft or [0.0])
        computed = list(self._computed.values())
        counts = [core.counts for core in self.cores]
        return ClusterReport(
            requests=len(self._ttft),
            requests_refused=self._num_refused + len(self._stranded),
            requests_retried=self._num_retried,
            mean_ttft_s=float(ttft.mean()),
            ttft_s=dict(zip(("p50", "p90", "p99"), np.percentile(ttft, (50, 90, 99)).round(3).tolist(), strict=True)),
            hit_ratio=self._num_hits / max(1, self._num_blocks),
            work_max_over_mean=max(computed, default=1) * len(computed) / max(1, sum(computed)),
            degraded=sum(each.degraded for each in counts),
            predicted_tokens=sum(each.predicted_tokens for each in counts),
            delivered_tokens=sum(each.delivered_tokens for each in counts),
            overcredited_tokens=sum(each.overcredited_tokens for each in counts),
        )
