"""Replica: one engine that answers a front's requests. Each actor runs one replica."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from foreword.cluster import ReplicaSpec
from foreword.errors import ForewordError
from foreword.events.sources import reachable
from foreword.fleet.front import EngineFacts
from foreword.fleet.messages import Codec, Complete, PromptComputed, Queued, Refused, Submission, Told, asked_for
from foreword.llm import LLM
from foreword.request import RequestOutput
from foreword.server.answer_stream import AnswerStream, Job
from foreword.server.api_errors import from_error
from foreword.server.engine_thread import EngineThread
from foreword.server.records import Records, RequestRecord

logger = logging.getLogger(__name__)

PIECE_S = 0.1
"""Seconds between two pieces of an answer if the client waits only for its end."""
STEPS_STILL = 20.0
"""An engine is stalled if a step takes longer than `LEAST_STILL_S`, and this many times as long as its longest step."""
LEAST_STILL_S = 120.0
MOST_STILL_S = 600.0
"""An engine is stalled if a step takes longer than this. Until the first step has ended, this is the only limit."""


@dataclass(frozen=True, slots=True)
class ReplicaFacts:
    """The facts that a replica gives when it joins."""

    spec: ReplicaSpec
    events: dict[str, str]
    """The addresses of the replica's cache events and their snapshots, by option name; empty without a cache."""
    process_id: int


class Replica:
    """Serves one engine. All methods must be called on the event loop on which `start` was called."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._codec = Codec(llm)
        self._records = Records()
        self._thread = EngineThread(llm.engine, self._records)

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """Abort the running requests and close the engine."""
        await self._thread.stop()

    def complaint(self) -> str | None:
        """Why this replica should be replaced: its engine has failed or stands still. None: the replica is healthy."""
        if self._thread.failure is not None:
            return self._thread.failure
        still_s = self._thread.still_s()
        longest_s = self._thread.longest_step_s
        patience_s = min(MOST_STILL_S, max(LEAST_STILL_S, STEPS_STILL * longest_s)) if longest_s else MOST_STILL_S
        if still_s > patience_s:
            return f"the engine has made no step for {still_s:.0f} s"
        return None

    def facts_of_engine(self) -> EngineFacts:
        """The facts with which a front checks requests."""
        return EngineFacts.of(self._llm)

    def facts(self, host: str) -> ReplicaFacts:
        """The facts that a router needs. `host` is the address of this machine for other machines."""
        cache = self._llm.config.cache
        is_closed = cache.prefix_index == "radix" and self._llm.layout.is_one_full_group
        spec = ReplicaSpec.of_engine(self._llm.engine.snapshot().num_blocks, is_prefix_closed=is_closed)
        addresses = self._llm.event_addresses
        return ReplicaFacts(spec, {name: reachable(address, host) for name, address in addresses.items()}, os.getpid())

    async def generate(self, data: bytes) -> AsyncGenerator[list[Told]]:
        """Answer a submission. Closing the iterator aborts the request."""
        try:
            submission = await asyncio.to_thread(self._codec.decode, data)
            stream = self._submit(submission)
        except Exception as error:  # another replica could not answer this request either
            if not isinstance(error, ForewordError):
                logger.exception("a request could not be read")
            yield [Refused.of(from_error(error))]
            return
        try:
            async for messages in self._tell(submission, stream):
                yield messages
        except Exception as error:
            answer = from_error(error)
            if answer is not error:
                logger.exception("request %s failed", submission.request_id)
            yield [Refused.of(answer)]
        finally:
            stream.close()

    def _submit(self, submission: Submission) -> AnswerStream:
        prompt, name = submission.prompt, submission.request_id
        record = RequestRecord(
            name, name, "", "replica", prompt.token_ids, num_choices=submission.params.n, stream=submission.is_streamed
        )
        return self._thread.submit([Job(record, prompt, submission.params, submission.answered)], whole=False)

    async def _tell(self, submission: Submission, stream: AnswerStream) -> AsyncGenerator[list[Told]]:
        await stream.accepted()
        yield [Queued()]
        [output] = stream.outputs
        is_first = True
        async for deltas in stream.deltas():
            first: list[Told] = [_computed(output, self._llm.engine.clock())] if is_first else []
            is_first = False
            yield [*first, *deltas]
            if not submission.is_streamed:
                await asyncio.sleep(PIECE_S)
        yield [Complete(_bare(output))]

    async def call(self, data: bytes) -> bytes:
        """Run a verb (packed by `asking`) on the engine's thread. Returns the pickled result, or the pickled error."""
        try:
            result = await self._thread.call(asked_for(data))
        except Exception as error:
            result = Refused.of(from_error(error))
        return pickle.dumps(result)


def _computed(output: RequestOutput, clock: float) -> PromptComputed:
    metrics = output.metrics
    queued_s = (metrics.first_scheduled_time or metrics.arrival_time) - metrics.arrival_time
    empty = replace(output, prompt_token_ids=[], outputs=[])
    return PromptComputed(empty, queued_s, clock)


def _bare(output: RequestOutput) -> RequestOutput:
    """The output without the prompt, which the front has. Lists are copied, because the engine still changes them."""
    answers = [replace(each, token_ids=list(each.token_ids)) for each in output.outputs]
    return replace(output, prompt_token_ids=[], outputs=answers)
