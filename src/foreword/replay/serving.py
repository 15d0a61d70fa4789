"""Serves requests in simulated time: routers send them to replicas, and a cost model gives the time of each step.

Routers are the real `RoutingCore`, with our rule or another one (`rules`). There are two kinds of replica. One runs
the steps of the engine's scheduler, whose time comes from arithmetic and memory traffic (`StepCost`). The other
computes one prompt after the other at a rate (`PromptRates`). Both have the engine's `KVCacheManager`. An option delays
the events of caches on their way to the routers. Replicas can die and join.

Two kinds of events are queued by time. *Acts* change what replicas do: a router's choice of a replica, or a replica's
death or join. *News* only tells routers what replicas did. So between two acts, each replica runs by itself.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, Literal

import numpy as np

from foreword.cache import NO_EXTRA_KEYS, KVCacheEvent
from foreword.cluster import EventBatch, LoadUpdate, Reason, Reservation, RoutingCore, RoutingOptions, RoutingRequest
from foreword.cluster.options import TURN_S
from foreword.config import SchedulerConfig
from foreword.engine import Prompt, depth_first
from foreword.errors import ConfigError, NoReplicaError
from foreword.replay.caches import PIECES, as_token_ids
from foreword.replay.rules import COST, make_rule
from foreword.replay.timing import PromptRates, PromptReplica, Replica, StepCost
from foreword.replay.trace import RecordedRequest, arrivals

STABLE_BLOCKS = 2
"""The number of leading blocks that routers hash to choose a replica when no replica's cache contents are known. A
recording does not say where its system prompts end."""
BEAT_S = 1.0
Scheduling = Literal["fcfs", "prefix", "dfs"]
"""fcfs: order of arrival. prefix: the scheduling policy of that name. dfs: all requests come at once, and run
depth-first over their tree of prefixes, in the order in which `LLM.generate` puts prompts."""
_Event = tuple[float, int, Callable[[], None]]
"""An entry of a heap: the time in seconds, a number that orders events of equal time, and the function to call."""


@dataclass(frozen=True, slots=True)
class FleetChange:
    """A replica dies or joins during the recording."""

    at_s: float
    replica: str
    joins: bool
    """False: the replica dies with its pool and its requests. A replica may join again later, with an empty cache."""


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """The replicas and routers that serve the recording."""

    num_blocks: int
    """KV blocks of each replica. A block has as many tokens as a block of the recording."""
    cost: StepCost | PromptRates
    num_replicas: int = 1
    routing: str = COST
    """One of `rules.RULES`."""
    eviction_policy: str = "lru"
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """The scheduler's options in replicas that run steps (`StepCost`)."""
    num_routers: int = 1
    """The number of routers; requests go to them in turn."""
    event_delay_s: float = 0.0
    """Seconds until the events of a cache reach the routers."""
    update_delay_s: float | None = 0.002
    """Seconds until a router's reservations reach the other routers; None: they never do."""
    turn_s: float = TURN_S
    """Seconds of each router's time slot: in a burst, routers decide one after the other. 0: routers do not wait."""
    changes: tuple[FleetChange, ...] = ()

    def __post_init__(self) -> None:
        make_rule(self.routing)
        for name, minimum in (("num_blocks", 1), ("num_replicas", 1), ("num_routers", 1), ("event_delay_s", 0)):
            if not minimum <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name}={getattr(self, name)} is too small; use at least {minimum}")


@dataclass(frozen=True, slots=True)
class ServingReport:
    """Results for the requests."""

    requests: int
    requests_refused: int
    """Requests that were too large for a replica's cache."""
    requests_stranded: int
    """Requests without a first token at the end, because no replica was left."""
    requests_retried: int
    """Requests whose replica died before their first token."""
    requests_resumed: int
    """Requests that another replica continued, because their replica died after their first token."""
    mean_ttft_s: float
    ttft_s: dict[str, float]
    """Seconds from arrival to first token: p50, p90, p99."""
    ttft_ms: dict[str, float]
    queue_ms: dict[str, float]
    """Milliseconds from arrival to first step: p50, p90, p99."""
    hit_ratio: float
    """With `StepCost`, the share of looked-up tokens that were found. With `PromptRates`, the share of all prompts'
    blocks that were found, including refused prompts. A prompt counts again when another replica takes it over."""
    work_max_over_mean: float
    """Computed tokens of the busiest replica, divided by the mean over all replicas, idle or not; 0 without work."""
    generated_tokens_per_s: float
    prompt_tokens_per_s: float
    seconds: float
    """Simulated seconds from the first arrival to the last token."""
    busy_share: float
    """The share of all replicas' time that was spent computing. A replica's time ends when it dies."""
    degraded: int
    """The number of routing decisions that were made without any knowledge of the caches."""
    predicted_tokens: int
    delivered_tokens: int
    overcredited_tokens: int


@dataclass(slots=True, eq=False)
class _Job:
    request: Any
    """A `Request` or a `_Prompt`, as the job's kind of replica needs."""
    routing: RoutingRequest
    router: int
    arrived_s: float
    reservation: Reservation | None = None
    has_answer: bool = False


class _Member:
    """One life of a replica in the fleet, from join to death. What the replica does is passed on to routers as news."""

    def __init__(self, simulation: ServingSimulation, name: str, place: int, life: int) -> None:
        self.name = name
        self.publisher_id = life.to_bytes(16, "big")
        self.is_alive = True
        self.joined_s, self.left_s = simulation.now, float("inf")
        self.jobs: dict[str, _Job] = {}
        """The replica's unfinished requests, by request id."""
        self._simulation, self._num_batches = simulation, 0
        self.replica = simulation.make_replica(place, self)

    def add(self, job: _Job, now: float) -> None:
        self.jobs[job.routing.request_id] = job
        self.replica.add(job.request, now)
        self.replica.run_until(now)

    def busy_and_all_s(self, began_s: float, ended_s: float) -> tuple[float, float]:
        """Seconds that the replica computed, and seconds that it lived between the first arrival and the last token.

        If the replica dies during a step, the step's time before the death counts, even if the last token of all
        requests came earlier.
        """
        clock_s = self.replica.clock_s
        ended_s = min(self.left_s, max(ended_s, clock_s))
        busy_s = self.replica.busy_s - max(0.0, clock_s - self.left_s)
        return busy_s, max(0.0, ended_s - max(self.joined_s, began_s))

    def publish(self, events: Sequence[KVCacheEvent], at_s: float) -> None:
        batch = EventBatch(self.publisher_id, self._num_batches, tuple(events))
        self._num_batches += 1
        delay_s = self._simulation.options.event_delay_s
        self._tell(at_s + delay_s, lambda: self._simulation.observe(self.name, batch))

    def note_first_token(self, request_id: str, started_s: float, cached_tokens: int, at_s: float) -> None:
        job = self.jobs[request_id]
        self._tell(at_s, lambda: self._simulation.note_first_token(job, started_s, cached_tokens))

    def note_end(self, request_id: str, at_s: float) -> None:
        self._tell(at_s, lambda: self._simulation.note_end(self.jobs.pop(request_id)))

    def _tell(self, at_s: float, news: Callable[[], None]) -> None:
        self._simulation.tell(at_s, lambda: news() if self.is_alive else None)


class ServingSimulation:
    """One simulation: call `serve` or `serve_depth_first` once."""

    def __init__(self, options: ServingOptions) -> None:
        self.options = options
        self.now = 0.0
        self.cores: list[RoutingCore] = []
        self._members: dict[str, _Member] = {}
        self._all_members: list[_Member] = []
        """All members, including those that died."""
        self._acts: list[_Event] = []
        self._news: list[_Event] = []
        self._order = count()
        self._goes_on = True
        """Whether requests may still come."""
        self._stranded: list[_Job] = []
        self._block_tokens = 0
        self._first_arrival_s: float | None = None
        self._last_token_s = 0.0
        self._ttft: list[float] = []
        self._queued: list[float] = []
        self._num_refused_blocks = self._num_prompt_tokens = 0
        self._num_refused = self._num_retried = self._num_resumed = 0

    def serve(self, recording: Iterable[RecordedRequest]) -> ServingReport:
        """Serve requests as they arrive. Raises ConfigError for a recording without times."""
        return self._serve(arrivals(recording))

    def serve_depth_first(self, requests: Sequence[RecordedRequest]) -> ServingReport:
        """Serve requests that all arrive at time 0, in depth-first order over their tree of prefixes."""
        in_order = ((0.0, requests[number]) for number in sorted_depth_first(requests))
        max_queued = 2 * self.options.scheduler.max_num_seqs  # requests hold tokens, so only some are made at once
        return self._serve(in_order, max_queued)

    def _serve(
        self, recording: Iterable[tuple[float, RecordedRequest]], max_queued: int | None = None
    ) -> ServingReport:
        for number, (arrived_s, recorded) in enumerate(recording):
            if not number:
                self._open(recorded.block_tokens)
            self._run(until=arrived_s)
            self.now = max(self.now, arrived_s)  # `_make_room` runs ahead of arrivals
            if max_queued is not None:
                self._make_room(max_queued)
            self._arrive(recorded, number, arrived_s)
        self._goes_on = False
        self._run(until=float("inf"))
        return self._report()

    def _make_room(self, max_queued: int) -> None:
        """Run replicas until each live replica has fewer than `max_queued` requests."""
        for member in list(self._members.values()):
            while member.is_alive and len(member.replica) >= max_queued:
                member.replica.step()
                self._run(until=member.replica.clock_s)

    def _open(self, block_tokens: int) -> None:
        options, self._block_tokens = self.options, block_tokens
        routing = RoutingOptions(
            block_tokens,
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
            self._add(self._acts, change.at_s, partial(self._change, change))
        if routing.share_load:
            self._beat()

    def make_replica(self, place: int, member: _Member) -> Replica | PromptReplica:
        options = self.options
        if isinstance(options.cost, PromptRates):
            return PromptReplica(options.num_blocks, options.eviction_policy, options.cost, place, member)
        return Replica(
            options.num_blocks,
            self._block_tokens,
            options.eviction_policy,
            options.scheduler,
            options.cost,
            member,
            publishes=options.num_replicas > 1 or bool(options.changes),  # else routers have no choice
        )

    def tell(self, at_s: float, news: Callable[[], None]) -> None:
        """Call `news` at `at_s` seconds. It may change only what routers know."""
        self._add(self._news, at_s, news)

    def _add(self, events: list[_Event], at_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(events, (at_s, next(self._order), call))

    def _run(self, until: float) -> None:
        """Run all events up to a time. At equal times, reports to routers (news) come before changes (acts)."""
        while True:
            moment = min(until, self._acts[0][0]) if self._acts else until
            for member in self._members.values():
                member.replica.run_until(moment)
            while self._news and self._news[0][0] <= moment:
                self.now, _, call = heapq.heappop(self._news)
                call()
            if not self._acts or self._acts[0][0] > until:
                return
            self.now, _, call = heapq.heappop(self._acts)
            call()

    # ------------------------------------------------------------------ requests

    def _arrive(self, recorded: RecordedRequest, number: int, arrived_s: float) -> None:
        replica = self._all_members[0].replica  # all replicas have the same number of blocks
        request: Any = replica.make_request(recorded, number)
        if not replica.can_hold(request):
            self._num_refused += 1
            self._num_refused_blocks += len(recorded.keys)
            return
        if self._first_arrival_s is None:
            self._first_arrival_s = arrived_s
        self._num_prompt_tokens += recorded.num_prompt_tokens
        keys = list(request.sequence.block_hashes())
        routing = RoutingRequest(str(number), keys, recorded.num_prompt_tokens, STABLE_BLOCKS)
        self._route(_Job(request, routing, number % len(self.cores), arrived_s))

    def _route(self, job: _Job) -> None:
        """Choose a replica: at once, or when the router's time slot for choices begins, if it has to wait for that."""
        wait_s = self.cores[job.router].wait_s(job.routing, self.now)
        if wait_s:
            self._add(self._acts, self.now + wait_s, partial(self._choose, job))
        else:
            self._choose(job)

    def _choose(self, job: _Job) -> None:
        try:
            decision = self.cores[job.router].choose(job.routing, self.now)
        except NoReplicaError:
            self._stranded.append(job)
            return
        job.reservation = decision.reservation
        self._share(job.router)
        self._members[decision.replica].add(job, self.now)

    def note_first_token(self, job: _Job, started_s: float, cached_tokens: int) -> None:
        """Record a request's first token, or the first token of a replica that continues an answer after a death."""
        assert job.reservation is not None
        if not job.has_answer:
            job.has_answer = True
            self._ttft.append(self.now - job.arrived_s)
            self._queued.append(started_s - job.arrived_s)
        self._last_token_s = self.now
        self.cores[job.router].note_first_token(job.reservation, self.now, cached_tokens)
        self._share(job.router)

    def note_end(self, job: _Job) -> None:
        assert job.reservation is not None
        self._last_token_s = self.now
        self.cores[job.router].release(job.reservation, self.now)
        self._share(job.router)

    # ------------------------------------------------------------------ what routers hear

    def observe(self, name: str, batch: EventBatch) -> None:
        for core in self.cores:
            core.observe(name, batch, self.now)

    def _share(self, router: int) -> None:
        updates = self.cores[router].take_updates()
        if updates:
            assert self.options.update_delay_s is not None
            self.tell(self.now + self.options.update_delay_s, lambda: self._merge(router, updates))

    def _merge(self, router: int, updates: list[LoadUpdate]) -> None:
        for number, core in enumerate(self.cores):
            if number != router:
                assert not core.merge(updates, self.now), "a simulated update was lost"

    def _beat(self) -> None:
        for number, core in enumerate(self.cores):
            core.beat()
            self._share(number)
        if self._goes_on:
            self.tell(self.now + BEAT_S, self._beat)

    # ------------------------------------------------------------------ replicas

    def _change(self, change: FleetChange) -> None:
        name = change.replica
        if change.joins:
            number = re.search(r"\d+$", name)
            self._join(name, int(number[0]) if number else 0)
        else:
            self._die(name)

    def _join(self, name: str, place: int) -> None:
        if name in self._members:
            raise ConfigError(f"replica {name!r} cannot join at {self.now} s; there is one of this name")
        member = _Member(self, name, place, len(self._all_members))
        self._members[name] = member
        self._all_members.append(member)
        for core in self.cores:
            core.join(name, member.replica.spec)
            core.install_snapshot(name, EventBatch(member.publisher_id, -1), self.now)
        stranded, self._stranded = self._stranded, []
        for job in stranded:
            self._route(job)

    def _die(self, name: str) -> None:
        """Remove a replica with its cache. Routers know at once, and send the replica's requests to other replicas."""
        member = self._members.pop(name, None)
        if member is None:
            raise ConfigError(f"replica {name!r} cannot die at {self.now} s; there is none of this name")
        member.is_alive, member.left_s = False, self.now
        for number, core in enumerate(self.cores):
            core.leave(name, self.now)
            self._share(number)
        for job in member.jobs.values():
            self._num_resumed += job.has_answer
            self._num_retried += not job.has_answer
            job.request = member.replica.give_up(job.request, self.now, has_answer=job.has_answer)
            self._route(job)

    def computed_tokens(self) -> dict[str, int]:
        """The number of tokens that each replica has computed, over all its lives."""
        computed: Counter[str] = Counter()
        for member in self._all_members:
            computed[member.name] += member.replica.computed_tokens
        return dict(computed)

    def _report(self) -> ServingReport:
        replicas = [member.replica for member in self._all_members]
        computed = list(self.computed_tokens().values())
        counts = [core.total_counts() for core in self.cores]
        began_s = self._first_arrival_s or 0.0
        seconds = max(0.0, self._last_token_s - began_s)
        spent = [member.busy_and_all_s(began_s, self._last_token_s) for member in self._all_members]
        num_looked_up = sum(replica.num_looked_up for replica in replicas)
        if isinstance(self.options.cost, PromptRates):
            num_looked_up += self._num_refused_blocks
        return ServingReport(
            requests=len(self._ttft),
            requests_refused=self._num_refused,
            requests_stranded=sum(not job.has_answer for job in self._stranded),
            requests_retried=self._num_retried,
            requests_resumed=self._num_resumed,
            mean_ttft_s=float(np.mean(self._ttft or [0.0])),
            ttft_s=_percentiles(self._ttft, 1, 3),
            ttft_ms=_percentiles(self._ttft, 1000, 2),
            queue_ms=_percentiles(self._queued, 1000, 2),
            hit_ratio=sum(replica.num_hits for replica in replicas) / max(1, num_looked_up),
            work_max_over_mean=max(computed, default=1) * len(computed) / max(1, sum(computed)),
            generated_tokens_per_s=sum(replica.generated_tokens for replica in replicas) / max(seconds, 1e-9),
            prompt_tokens_per_s=self._num_prompt_tokens / max(seconds, 1e-9),
            seconds=seconds,
            busy_share=sum(busy for busy, _ in spent) / max(sum(lifetime for _, lifetime in spent), 1e-9),
            degraded=sum(core.counts[Reason.HASHED].decisions for core in self.cores),
            predicted_tokens=sum(each.predicted_tokens for each in counts),
            delivered_tokens=sum(each.delivered_tokens for each in counts),
            overcredited_tokens=sum(each.overcredited_tokens for each in counts),
        )


def _percentiles(seconds: list[float], scale: float, digits: int) -> dict[str, float]:
    if not seconds:
        return {}
    values = np.percentile(np.array(seconds) * scale, (50, 90, 99)).round(digits).tolist()
    return dict(zip(("p50", "p90", "p99"), values, strict=True))


def simulate_scheduling(
    requests: Iterable[RecordedRequest], scheduling: Scheduling, options: ServingOptions
) -> ServingReport:
    """Serve requests in one of these orders.

    Under dfs all requests arrive at time 0, so times to first tokens count from there. Under the other orders, a
    recording without times raises ConfigError.
    """
    if scheduling == "dfs":
        return ServingSimulation(options).serve_depth_first(list(requests))
    config = replace(options.scheduler, scheduling_policy=scheduling)
    return ServingSimulation(replace(options, scheduler=config)).serve(requests)


def sorted_depth_first(requests: Sequence[RecordedRequest]) -> list[int]:
    """The numbers of the requests, in depth-first order over their tree of prefixes."""
    prompts = [Prompt(as_token_ids(request), None, NO_EXTRA_KEYS) for request in requests]
    return depth_first(prompts, PIECES, lambda _: 0)


def at_load(requests: Iterable[RecordedRequest], load: float) -> Iterable[RecordedRequest]:
    """Yield the same requests, which arrive `load` times as fast."""
    for request in requests:
        at = request.timestamp_ms
        yield request if at is None else request._replace(timestamp_ms=at / load)
