"""RoutedEngines: the engines of a server with replicas. Routes each request, follows its answer, and continues the
answer on another replica if a replica is lost.

One request:

    check (as an engine would)  ->  choose, which reserves  ->  generate on the replica  ->  deltas to the client
                                        ^                            |
                                        +--- the replica is lost ----+   with the tokens that the client has

A replica that continues an answer makes the same bits, so the client sees one answer. The seed is fixed before the
first attempt.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from foreword.cache import PIN, TokenSequence
from foreword.cluster import CopiedRun, Decision, RoutingCore, RoutingRequest
from foreword.cluster.decision import DecisionLog, Reason
from foreword.cluster.holders import Key
from foreword.errors import NoReplicaError
from foreword.events.core_feed import CoreFeed
from foreword.events.peer_link import PeerLink
from foreword.fleet.answering import Acceptance, Answering
from foreword.fleet.calls import ENGINE_FAILED, Calls, none_ready
from foreword.fleet.link import Link, ReplicaLostError
from foreword.fleet.messages import Codec, Complete, Queued, Refused, Submission
from foreword.fleet.pulse import Pulse
from foreword.fleet.replica import ReplicaFacts
from foreword.fleet.warmth import Warmth
from foreword.llm import LLM
from foreword.server.answer_stream import Accepted, AnswerStream, Job
from foreword.server.api_errors import APIError, engine_failed, from_error
from foreword.server.engine_thread import AfterStep, Ended, Number, PrefillSpeed
from foreword.server.hints import RETAIN
from foreword.server.records import Records
from foreword.server.verbs import SHRINK

logger = logging.getLogger(__name__)
MAX_DEATHS = 2
"""If this number of replicas died while they worked on one request, the request may be the cause, and it fails."""
MAX_SENT_DEATHS = 20
"""As `MAX_DEATHS`, for replicas that died before they had queued the request. Most of them were dead before it came."""
AVOIDED_S = 1.0
"""Seconds until a request tries unreachable replicas again, if no other replica takes requests."""
READY_S = 300.0
"""The longest wait of a request, in seconds, while no replica takes requests. A busy machine replaces replicas in
minutes. The request's own time limit may end the wait earlier."""


_GAUGES = {
    "cached_blocks": "Blocks that the replica has cached, as far as its events say.",
    "open_requests": "Requests that were sent to the replica and have not ended.",
    "waiting_tokens": "Prompt tokens that it has to compute.",
}


@dataclass(slots=True)
class FleetCounts:
    """Sums since the start."""

    deaths: int = 0
    """Deaths of replicas while they had a request, begun or not. A death counts once for each request."""
    resumed: int = 0
    """Attempts that continued an answer that another replica had begun."""
    given_up: int = 0
    """Requests that ended with an error, because too many replicas died while they had the request."""


@dataclass(slots=True)
class _Request:
    """One job of a stream, and the state of its answer."""

    job: Job
    routing: RoutingRequest
    answering: Answering
    num_attempts: int = 0
    num_deaths: int = 0
    """The number of replicas that died after they had queued the request."""
    num_sent_deaths: int = 0
    """The number of replicas that died before they had queued the request."""
    num_returns: int = 0
    """The number of times that the request tried unreachable replicas again."""
    avoided: set[str] = field(default_factory=set)
    """Replicas that were lost while they had the request."""
    unreached: set[str] = field(default_factory=set)
    """Replicas that could not be reached but may be healthy."""


class RoutedEngines:
    """The engines of a server with replicas, as one object. All methods must be called on the event loop."""

    def __init__(
        self,
        front: LLM,
        records: Records,
        after_step: Sequence[AfterStep],
        core: RoutingCore,
        link: Link,
        *,
        open_peers: Callable[[], PeerLink] | None = None,
        seed: int | None = None,
    ) -> None:
        """`after_step` is called with the requests that have ended.

        `open_peers` opens the link to other fronts of the same replicas. `seed` seeds requests without a seed.
        """
        self.failure: str | None = None
        self.num_choices = 0
        self.prefill = PrefillSpeed()
        self.core, self.counts = core, FleetCounts()
        self.log = core.log = DecisionLog() if core.log is None else core.log
        self._front, self._records, self._after_step, self._link = front, records, after_step, link
        self._codec = Codec(front)
        self._seeds = random.Random(seed)
        self._feed = CoreFeed(core)
        self._tasks: dict[AnswerStream, asyncio.Task[None]] = {}
        self._outcomes: dict[AnswerStream, str] = {}
        """For each aborted stream, the outcome to record."""
        self._joined = asyncio.Event()
        self._shrinking: set[asyncio.Task[None]] = set()
        self.facts: dict[str, ReplicaFacts] = {}
        """The facts that each replica gave when it joined."""
        self._open_peers = open_peers
        self._peers: PeerLink | None = None
        self._warmth = Warmth(core, link, self._codec)
        self.pulse = Pulse(link, self._retire, self._ready)
        self._calls = Calls(link, lambda: core.replicas, self.pulse.still, self._ready)
        self.ask, self.change = self._calls.read, self._calls.change
        """Run a verb on the replicas. A replica that misses a change makes it before it takes requests again."""
        self._has_tiers = any(
            getattr(front.config.tiers, name) is not None for name in ("cache_dir", "cache_store", "cache_host_bytes")
        )

    # ------------------------------------------------------------------ replicas

    @property
    def num_engines(self) -> int:
        return len(self.core.replicas)

    def join(self, name: str, facts: ReplicaFacts) -> None:
        """Send requests to a new replica as soon as it has hot prefixes. The first replica gets requests at once."""
        self.facts[name] = facts
        hot = self._warmth.for_new_replica(facts.spec)
        self.core.join(name, facts.spec)
        if facts.events:
            self._feed.follow(name, facts.events["kv_events"], facts.events["kv_events_snapshot"])
        self.pulse.follow(name)
        if hot:
            self.core.retire(name)
            self._warmth.warm_up(name, hot, lambda: self._ready(name))
        else:
            self._ready(name)

    def _ready(self, name: str) -> None:
        """Send requests to a replica from now on. Does nothing if it has left, stands still or is not warm yet.

        A replica that has missed changes makes them first.
        """
        if name not in self.core.replicas or name in self.pulse.still or self._warmth.is_warming(name):
            return
        if self._calls.catch_up(name):
            return
        facts = self.facts[name]
        self.core.join(name, facts.spec)
        logger.info("replica %s takes requests: %d blocks", name, facts.spec.num_blocks)
        self._joined.set()
        self._joined = asyncio.Event()

    def leave(self, name: str) -> None:
        """Send no more requests to a replica. If the replica is gone, its present requests fail by themselves."""
        if name in self.core.replicas:
            logger.info("replica %s has left", name)
            alone = [] if self._has_tiers else self._warmth.only_at(name)
            self._feed.leave(name)
            self._warmth.leave(name)
            self.pulse.leave(name)
            del self.facts[name]
            self.core.leave(name, time.monotonic())
            self._calls.leave(name)
            self._note_fewer()
            if alone and self.failure is None:
                self._warmth.hand_over(alone)

    def _retire(self, name: str) -> None:
        """Send no more requests to a replica that stands still."""
        self.core.retire(name)
        self._note_fewer()

    def _note_fewer(self) -> None:
        if not self.core.is_any_usable:
            self._warmth.hurry()

    # ------------------------------------------------------------------ the server's side

    def start(self) -> None:
        """Begin to listen for replicas, and connect to other fronts."""
        self._link.start(self)
        if self._open_peers is not None:
            self._peers = self._open_peers()
            self._peers.start()

    async def stop(self) -> None:
        """End all answers, and stop following replicas."""
        self.failure = self.failure or "the server has been stopped"
        for stream in list(self._tasks):
            self.abort(stream, "failed")
            stream.put([engine_failed(self.failure)])
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        self._warmth.stop()
        self.pulse.stop()
        self._calls.stop()
        if self._peers is not None:
            await self._peers.close()
        await self._link.stop()
        await self._feed.close()

    def submit(self, jobs: Sequence[Job], *, whole: bool) -> AnswerStream:
        """Submit prompts. The stream's first event says whether replicas have queued all of them, or failed."""
        if self.failure is not None:
            raise engine_failed(self.failure)
        stream = AnswerStream(self, jobs, whole=whole)
        for job in jobs:
            self._records.open(job.record)
        self.num_choices += sum(job.params.n for job in jobs)
        self._tasks[stream] = asyncio.create_task(self._answer(stream), name=jobs[0].record.request_id)
        return stream

    def abort(self, stream: AnswerStream, outcome: str) -> None:
        """Abort an answer for which no client waits."""
        if (task := self._tasks.get(stream)) is not None:
            self._outcomes[stream] = outcome
            task.cancel()

    def forget(self, stream: AnswerStream) -> None:
        """Nothing to do: the stream's task ends by itself."""

    def shrink(self, namespace: str, max_blocks: int) -> None:
        """Tell each replica that it may hold only `max_blocks` blocks of the namespace."""
        task = asyncio.create_task(self._shrink(namespace, max_blocks))
        self._shrinking.add(task)
        task.add_done_callback(self._shrinking.discard)

    async def _shrink(self, namespace: str, max_blocks: int) -> None:
        with suppress(APIError):  # if there is no replica, no blocks have to be given up
            await self.change(SHRINK, namespace, max_blocks)

    # ------------------------------------------------------------------ what operators see

    def report(self) -> dict[str, Any]:
        """The replicas, and the counts of routing since the start."""
        return {
            "front": {"name": self.core.router, "process_id": os.getpid()},
            "replicas": self.replicas(),
            "routing": {**asdict(self.core.total_counts()), "degraded": self.core.counts[Reason.HASHED].decisions},
            "reasons": {reason.value: asdict(counts) for reason, counts in self.core.counts.items()},
            "failover": asdict(self.counts),
        }

    def decisions(self, request_id: str | None, limit: int) -> list[dict[str, Any]]:
        """Explanations of at most `limit` decisions. `request_id`: the id of a response or of one of its prompts."""
        if request_id is None:
            decisions = list(self.log)
        else:
            of_prompts = (each for each in self.log if each.reservation.request_id.rpartition("-")[0] == request_id)
            decisions = list(of_prompts) or self.log.of_request(request_id)
        return [each.as_dict() for each in decisions[:limit]]

    def replicas(self) -> list[dict[str, Any]]:
        """For each replica, the known facts about its cache and its load."""
        loads = self.core.loads()
        return [
            {
                "name": name,
                "is_synced": self.core.mirror(name).is_synced,
                "cached_blocks": len(self.core.mirror(name).parents),
                "blocks": load.num_blocks,
                "open_requests": load.num_open,
                "waiting_tokens": load.waiting_tokens,
                "tokens_per_s": load.tokens_per_s,
                "process_id": self.facts[name].process_id,
                "complaint": self.pulse.still.get(name),
            }
            for name, load in loads.items()
        ]

    def numbers(self) -> list[Number]:
        """The numbers of replicas and routing, for metrics."""
        replicas, counts = self.replicas(), self.core.total_counts()
        of = {key: {each["name"]: float(each[key]) for each in replicas} for key in (*_GAUGES, "is_synced")}
        gauges = [Number(f"replica_{key}", meaning, of[key], "replica") for key, meaning in _GAUGES.items()]
        still = {each["name"]: float(each["complaint"] is not None) for each in replicas}
        reasons = {reason.value: float(sums.decisions) for reason, sums in self.core.counts.items()}
        tokens = {name: float(getattr(counts, f"{name}_tokens")) for name in ("predicted", "delivered", "overcredited")}
        failed = {name: float(value) for name, value in asdict(self.counts).items()}
        return [
            *gauges,
            Number("replica_synced", "1 where the replica's cache is known.", of["is_synced"], "replica"),
            Number(
                "replica_still", "1 where the replica does not answer, or its engine makes no step.", still, "replica"
            ),
            Number("routing_decisions", "Choices of a replica, by what decided.", reasons, "reason", True),
            Number("routing_tokens", "Prompt tokens that choices counted on, and got.", tokens, "what", True),
            Number("failover", "Requests whose replica died, and what followed.", failed, "what", True),
        ]

    # ------------------------------------------------------------------ one stream

    async def _answer(self, stream: AnswerStream) -> None:
        """Answer all jobs of a stream. In any case, the stream's records are closed and its reservations released."""
        requests: list[_Request] = []
        try:
            requests += self._checked(stream)
            accepted = Acceptance(len(requests))

            async def run(request: _Request) -> None:
                await self._run(stream, request, accepted)

            async with asyncio.TaskGroup() as group:
                for request in requests:
                    group.create_task(run(request))
        except* asyncio.CancelledError:
            self._close(stream, requests, self._outcomes.get(stream, "disconnected"))
        except* Exception as failed:
            error = from_error(failed.exceptions[0])
            if error.status >= 500 and not isinstance(failed.exceptions[0], APIError):
                logger.exception("request %s failed", stream.jobs[0].record.request_id)
            self._close(stream, requests, "refused" if error.status < 500 else "failed")
            stream.put([error])
        finally:
            self._outcomes.pop(stream, None)
            self.num_choices -= sum(job.params.n for job in stream.jobs)
            del self._tasks[stream]

    def _checked(self, stream: AnswerStream) -> list[_Request]:
        """Check a stream's jobs and make their requests. Raises InvalidRequestError if no replica could serve a job."""
        requests, first_choice = list[_Request](), 0
        for job in stream.jobs:
            if job.params.seed is None:
                job = replace(job, params=replace(job.params, seed=self._seeds.randrange(2**32)))
            sequence, linked = self._front.engine.check(job.record.request_id, job.prompt, job.params)
            copied = [CopiedRun(run.begin, run.end, _keys_to(run.source_end, source)) for run, source in linked]
            ends = (mark.end for mark in job.prompt.marks if mark.keep.source not in (RETAIN, PIN))  # no hints'
            routing = RoutingRequest.of_sequence(sequence, max(ends, default=None), job.prompt.session, copied)
            if not job.params.reads_cache:
                routing = replace(routing, keys=[])
            answering = Answering(stream, job, first_choice, self._front.engine.clock)
            stream.outputs.append(answering.output)
            requests.append(_Request(job, routing, answering))
            first_choice += job.params.n
        return requests

    async def _run(self, stream: AnswerStream, request: _Request, accepted: Acceptance) -> None:
        is_accepted = False
        while True:
            decision = await self._choose(request)
            has_begun = False
            try:
                sent = self._link.generate(decision.replica, self._submission(stream, request))
                async with self.pulse.wait_for(decision.replica), aclosing(sent) as pieces:
                    async for messages in pieces:
                        has_begun = has_begun or isinstance(messages[0], Queued)
                        if has_begun and not is_accepted:
                            if await accepted.wait():
                                stream.put([Accepted()])
                            is_accepted = True
                        if self._take(request, decision, messages, has_begun):
                            self._close_one(request, str(request.answering.output.outputs[-1].finish_reason))
                            return
                raise ReplicaLostError(f"replica {decision.replica} ended an answer in the middle", died=False)
            except ReplicaLostError as lost:
                self._note_lost(request, decision, lost, has_begun)
            finally:
                self.core.release(decision.reservation, time.monotonic())

    def _take(self, request: _Request, decision: Decision, messages: Sequence[object], has_begun: bool) -> bool:
        """Take messages of a replica. Returns True after the last message.

        Raises APIError if the replica refuses the request, and ReplicaLostError if its engine has failed.
        """
        for message in messages:
            if isinstance(message, Refused):
                if message.code == ENGINE_FAILED:  # the engine failed before this request or during it
                    raise ReplicaLostError(message.message, died=has_begun)
                raise message.error()
        cached = request.answering.take(messages)
        if cached is not None:
            self.core.note_first_token(decision.reservation, time.monotonic(), cached)
            plain = min([cached, *(index for index, _ in request.job.record.jumps[:1])])
            self._warmth.note(request.job.prompt, request.routing.keys, plain)
        return isinstance(messages[-1], Complete)

    def _submission(self, stream: AnswerStream, request: _Request) -> bytes:
        job, choices = request.job, request.answering.shown
        answered = tuple(choices) if any(choice.token_ids for choice in choices) else ()
        request.num_attempts += 1  # a new name, because a replica may still have the last attempt
        name = f"{job.record.request_id}.{request.num_attempts}"
        self.counts.resumed += bool(answered)
        return self._codec.encode(Submission(name, job.prompt, job.params, answered, is_streamed=not stream.whole))

    async def _choose(self, request: _Request) -> Decision:
        """Choose a replica and reserve the work. Waits while no replica takes requests. Raises APIError 503."""
        if wait_s := self.core.wait_s(request.routing, time.time()):
            await asyncio.sleep(wait_s)  # other fronts decide first
        try:
            async with asyncio.timeout(READY_S):
                decision = await self._chosen(request)
        except TimeoutError:
            raise none_ready() from None
        if self._peers is not None:
            self._peers.flush()
        request.job.record.route = decision.text()
        return decision

    async def _chosen(self, request: _Request) -> Decision:
        while True:
            gone = (request.avoided | request.unreached).intersection(self.core.replicas)
            with suppress(NoReplicaError):
                return self.core.choose(request.routing, time.monotonic(), gone)
            may_return = bool(request.unreached) and request.num_returns < READY_S / AVOIDED_S
            try:
                async with asyncio.timeout(AVOIDED_S if may_return else None):
                    await self._joined.wait()
            except TimeoutError:
                request.num_returns += 1
                request.unreached.clear()

    def _note_lost(self, request: _Request, decision: Decision, lost: ReplicaLostError, has_begun: bool) -> None:
        """Record that a replica with a request was lost. Raises APIError 500 if the request may be the cause."""
        logger.warning("request %s: %s", request.job.record.request_id, lost)
        if lost.may_be_healthy:
            request.unreached.add(decision.replica)
        elif not lost.comes_back:
            request.avoided.add(decision.replica)
        if lost.died:
            request.num_deaths += has_begun
            request.num_sent_deaths += not has_begun
            self.counts.deaths += 1
        if request.num_deaths >= MAX_DEATHS or request.num_sent_deaths >= MAX_SENT_DEATHS:
            self.counts.given_up += 1
            ended = request.num_deaths + request.num_sent_deaths
            raise APIError(
                500,
                f"{ended} replicas ended while they had this request; it is not tried on another one",
                kind="server_error",
                code="replicas_died",
            )

    def _close(self, stream: AnswerStream, requests: Sequence[_Request], outcome: str) -> None:
        """Close the open records of a stream that ends early."""
        for request in requests:
            self._close_one(request, outcome)
        for job in stream.jobs[len(requests) :]:
            self._records.close(job.record, outcome)

    def _close_one(self, request: _Request, outcome: str) -> None:
        if request.answering.is_closed:
            return
        request.answering.is_closed = True
        job = request.job
        self._records.close(job.record, outcome)
        answers = [choice.token_ids for choice in request.answering.shown]
        for keep_account in self._after_step:
            keep_account([Ended(job, answers if job.record.token_times else [])])
        request.answering.finish()


def _keys_to(end: int, source: TokenSequence) -> list[Key]:
    """The keys of the blocks that hold a source's first `end` tokens."""
    return list(source.block_hashes()[: -(-end // source.block_size)])
