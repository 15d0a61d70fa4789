"""EngineDoor: a server's connection to its engines. EngineThread: the thread that steps this process's only engine.

The two sides share only two queues:

    event loop                                   engine's thread
    submit(), abort(), ask() ── commands ──>     carried out between two steps
    AnswerStream             <── events ────    handed over after each step, for all requests together

The engine's thread never waits for a reader. While the event loop is busy, deltas collect in their stream, and the
reader then takes all of them as one delta.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from foreword.engine import Engine
from foreword.errors import EngineError
from foreword.llm import LLM
from foreword.request import RequestOutput
from foreword.server.answer_stream import Accepted, AnswerStream, Delta, Event, Finished, Job
from foreword.server.api_errors import APIError, engine_failed, from_error, step_failed
from foreword.server.records import Listener, Records
from foreword.server.verbs import T, Ts, Verb

logger = logging.getLogger(__name__)

STORE_POLL_S = 0.01
"""Seconds between two calls of `Engine.store_on` while no request runs."""
MAX_FAILED_STEPS = 3
"""Number of successive failed steps after which the engine, not a request, counts as broken."""


class PrefillSpeed:
    """Measures the seconds per prompt token, over steps that are mostly prefill."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._seconds = 0.0

    def note_step(self, num_tokens: int, num_running: int, seconds: float) -> None:
        """Add a step of `num_tokens` tokens for `num_running` requests. Steps that mostly decode are left out."""
        if num_tokens >= 2 * num_running + 16:
            self._num_tokens += num_tokens
            self._seconds += seconds

    @property
    def seconds_per_token(self) -> float:
        """The mean of the seconds per token since the start; 0.0 before the first prefill."""
        return self._seconds / self._num_tokens if self._num_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Number:
    """A metric that does not come from an engine."""

    name: str
    meaning: str
    values: Mapping[str, float]
    """The metric's values, by the value of `label`."""
    label: str
    is_counter: bool = False


class EngineDoor(Protocol):
    """The engines of one model. Only the event loop may call its methods, except `shrink`."""

    failure: str | None
    """Why no more requests are taken; None while requests are taken."""
    num_choices: int
    """The number of accepted choices that are not finished."""
    prefill: PrefillSpeed

    @property
    def num_engines(self) -> int:
        return 1

    def numbers(self) -> list[Number]:
        """Return further metrics."""
        return []

    def report(self) -> dict[str, Any] | None:
        """Report the engines and the routing's decisions, for JSON; None if there is only one engine."""
        return None

    def decisions(self, request_id: str | None, limit: int) -> list[dict[str, Any]]:
        """Report why requests went to their engines, the newest first. With a `request_id`, report all its attempts."""
        return []

    def start(self) -> None:
        """Begin to serve. Answers go to the event loop that is running now."""

    async def stop(self) -> None:
        """End the running requests. May be called twice."""

    def submit(self, jobs: Sequence[Job], *, whole: bool) -> AnswerStream:
        """Submit prompts. The stream's first event says whether all of them were accepted or all refused."""

    def shrink(self, namespace: str, max_blocks: int) -> None:
        """Evict a namespace's blocks down to `max_blocks` per engine. Called in the thread that sees requests end."""

    async def ask(self, verb: Verb[T, *Ts], *arguments: *Ts) -> T:
        """Run a verb on every engine between two steps, and merge the results. Raises the verb's exceptions."""

    async def change(self, verb: Verb[T, *Ts], *arguments: *Ts) -> T:
        """Do what `ask` does, for a verb that changes something. An engine that stands still runs the verb before it
        takes requests again. So the verb may run late, or twice.
        """
        return await self.ask(verb, *arguments)


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has ended, for listeners such as quotas."""

    job: Job
    answers: Sequence[Sequence[int]]
    """Generated tokens of each choice; empty if the request was refused."""


AfterStep = Listener[Sequence[Ended]]


@dataclass(slots=True)
class _Running:
    """A job in the engine, and the part of its output that the job's stream already has."""

    job: Job
    stream: AnswerStream
    output: RequestOutput
    first_choice: int
    handed_over: list[tuple[int, int, bool]] = field(default_factory=list)
    """For each choice: the numbers of characters and tokens handed over, and whether its end was handed over."""


class EngineThread(EngineDoor):
    """Steps an engine in a separate thread. Only the event loop may call public methods, except `shrink`."""

    def __init__(self, engine: Engine, records: Records, *, after_step: Sequence[AfterStep] = ()) -> None:
        """`after_step`: called on the engine's thread with the requests that ended in a step."""
        self.failure: str | None = None
        """Why the engine takes no more requests; None while it works."""
        self.num_steps = 0
        self.prefill = PrefillSpeed()
        self.num_choices = 0
        """Number of accepted choices that are not finished."""
        self.longest_step_s = 0.0
        self._came_round = time.monotonic()
        """The monotonic time at which the thread last began a step or a command."""
        self._engine = engine
        self._records = records
        self._after_step = after_step
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: dict[str, _Running] = {}
        self._open: set[AnswerStream] = set()
        self._failed_steps = 0
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outbox: dict[AnswerStream, list[Event]] = {}
        self._ended: list[Ended] = []
        self._thread = threading.Thread(target=self._run, name="foreword-engine", daemon=True)

    # ------------------------------------------------------- event loop's side

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        if self._thread.is_alive():
            self._commands.put(self._stop)
            await asyncio.to_thread(self._thread.join)

    def submit(self, jobs: Sequence[Job], *, whole: bool) -> AnswerStream:
        stream = AnswerStream(self, jobs, whole=whole)
        if self.failure is not None:
            raise engine_failed(self.failure)
        for job in jobs:
            self._records.open(job.record)
        self._open.add(stream)
        self.num_choices += sum(job.params.n for job in jobs)
        self._commands.put(lambda: self._add(stream))
        return stream

    def abort(self, stream: AnswerStream, outcome: str) -> None:
        """Abort an answer that nobody waits for."""
        self.forget(stream)
        self._commands.put(lambda: self._end(stream, outcome))

    def forget(self, stream: AnswerStream) -> None:
        """Forget an answer that is complete or was aborted."""
        if stream in self._open:
            self._open.remove(stream)
            self.num_choices -= sum(job.params.n for job in stream.jobs)

    def shrink(self, namespace: str, max_blocks: int) -> None:
        """Evict free blocks of a namespace until it has `max_blocks`. Only the engine's thread may call this method."""
        self._engine.shrink_namespace(namespace, max_blocks)

    async def ask(self, verb: Verb[T, *Ts], *arguments: *Ts) -> T:
        return await self.call(lambda engine: verb.run(engine, *arguments))

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run a function on the engine's thread, between two steps. Raises its exceptions."""
        if self.failure is not None:
            raise engine_failed(self.failure)
        future: Future[T] = Future()

        def carry_out() -> None:
            if not future.set_running_or_notify_cancel():
                return  # the caller no longer waits
            try:
                future.set_result(function(self._engine))
            except Exception as error:
                future.set_exception(error)

        self._commands.put(carry_out)
        return await asyncio.wrap_future(future)

    def still_s(self) -> float:
        """Return the seconds since the thread last began a step or a command; 0.0 if it has nothing to do."""
        has_work = self._thread.is_alive() and (self._running or not self._commands.empty())
        return time.monotonic() - self._came_round if has_work else 0.0

    # --------------------------------------------------------- engine's side

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._came_round = time.monotonic()
                is_idle = not self._engine.has_unfinished_requests()
                self._take_commands((STORE_POLL_S if self._engine.store_on() else None) if is_idle else 0.0)
                if self._engine.has_unfinished_requests():
                    self._step()
                self._hand_over()
        except BaseException as error:
            logger.exception("the engine's thread has ended")
            self._give_up(f"{type(error).__name__}: {error}")
        self._answer_the_rest()
        try:
            self._engine.close()
        except Exception:
            logger.exception("the cache could not be stored at the end")

    def _take_commands(self, wait_s: float | None) -> None:
        """Carry out all commands. Wait at most `wait_s` seconds for the first command; None: wait without a limit."""
        with suppress(queue.Empty):
            while True:
                command = self._commands.get(timeout=wait_s)
                if wait_s is None:
                    self._came_round = time.monotonic()
                wait_s = 0.0
                command()

    def _add(self, stream: AnswerStream) -> None:
        if self.failure is not None:
            self._refuse(stream, engine_failed(self.failure), "failed")
            return
        first_choice = 0
        for job in stream.jobs:
            record = job.record
            try:
                answered = [part.token_ids for part in job.answered]
                output = self._engine.add_request(record.request_id, job.prompt, job.params, answered)
            except Exception as error:
                answer = from_error(error)
                if answer.status >= 500:
                    logger.exception("request %s could not be queued", record.request_id)
                self._refuse(stream, answer, "refused")
                return
            stream.outputs.append(output)
            handed_over = [(part.num_chars, len(part.token_ids), part.is_ended) for part in job.answered]
            handed_over = handed_over or [(0, 0, False)] * job.params.n
            self._running[record.request_id] = _Running(job, stream, output, first_choice, handed_over)
            first_choice += job.params.n
        self._tell(stream, Accepted())
        for job in stream.jobs:
            if any(part.token_ids for part in job.answered):  # another engine may have generated the whole answer
                self._move(self._running[job.record.request_id])

    def _refuse(self, stream: AnswerStream, answer: APIError, outcome: str) -> None:
        self._end(stream, outcome)
        self._tell(stream, answer)

    def _end(self, stream: AnswerStream, outcome: str) -> None:
        for job in stream.jobs:
            running = self._running.pop(job.record.request_id, None)
            if running is not None:
                self._engine.abort_request(job.record.request_id)
                self._note(running, None)
            self._close(job, None if running is None else running.output, outcome)

    def _close(self, job: Job, output: RequestOutput | None, outcome: str) -> None:
        self._records.close(job.record, outcome)
        choices = () if output is None else output.outputs
        self._ended.append(Ended(job, [choice.token_ids for choice in choices]))

    def _step(self) -> None:
        self.num_steps += 1
        num_before, started = self._engine.num_known_tokens_computed, time.monotonic()
        self._came_round = started
        try:
            outputs = self._engine.step()
        except Exception as error:
            self._step_failed(error)
            return
        self._failed_steps = 0
        now = time.monotonic()
        self.longest_step_s = max(self.longest_step_s, now - started)
        self.prefill.note_step(self._engine.num_known_tokens_computed - num_before, len(self._running), now - started)
        for output in outputs:
            running = self._running.get(output.request_id)
            if running is not None:
                self._note(running, now)
                self._move(running)

    def _note(self, running: _Running, now: float | None) -> None:
        record, output = running.job.record, running.output
        if now is not None:
            record.token_times.append(now)
        if record.first_scheduled_time is None:
            record.first_scheduled_time = output.metrics.first_scheduled_time
            record.num_cached_tokens = output.num_cached_tokens
            record.explanation, record.link = output.explanation, output.link
        record.num_output_tokens = sum(len(completion.token_ids) for completion in output.outputs)

    def _move(self, running: _Running) -> None:
        output, stream = running.output, running.stream
        if not stream.whole:
            self._tell_deltas(running)
        if not output.finished:
            return
        del self._running[output.request_id]
        if stream.whole:
            self._tell_deltas(running)
        self._close(running.job, output, str(output.outputs[-1].finish_reason))
        stream.num_unfinished -= 1
        if not stream.num_unfinished:
            self._tell(stream, Finished())

    def _tell_deltas(self, running: _Running) -> None:
        for at, completion in enumerate(running.output.outputs):
            num_chars, num_tokens, ended = running.handed_over[at]
            if ended or (len(completion.token_ids) == num_tokens and not completion.finished):
                continue
            # A resumed answer has log probabilities only for its new tokens.
            num_elsewhere = len(running.job.answered[at].token_ids) if running.job.answered else 0
            logprobs = None if completion.logprobs is None else completion.logprobs[num_tokens - num_elsewhere :]
            self._tell(
                running.stream,
                Delta(
                    running.first_choice + at,
                    completion.text[num_chars:],
                    completion.token_ids[num_tokens:],
                    logprobs,
                    completion.finish_reason,
                    completion.stop_reason,
                ),
            )
            running.handed_over[at] = (len(completion.text), len(completion.token_ids), completion.finished)

    def _step_failed(self, error: Exception) -> None:
        """Fail the requests of a failed step, and keep the others.

        If the engine cannot say which requests took part, fail all of them.
        """
        self._failed_steps += 1
        logger.error("a step failed (%d in succession)", self._failed_steps, exc_info=error)
        if not isinstance(error, EngineError):
            self._engine.abort_all()
        reason = str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
        failed = set()
        for running in list(self._running.values()):
            if any(completion.finish_reason == "abort" for completion in running.output.outputs):
                failed.add(running.stream)
            elif running.output.finished:  # finished by an earlier step, whose results came while this step failed
                self._move(running)
        for stream in failed:
            self._refuse(stream, step_failed(reason), "failed")
        if self._failed_steps >= MAX_FAILED_STEPS:
            self._give_up(f"{self._failed_steps} successive steps failed, the last with: {reason}")

    def _give_up(self, reason: str) -> None:
        """Refuse every request from now on."""
        if not self._stopping:
            logger.critical("the engine has failed: %s", reason)
        self.failure = reason
        for stream in {running.stream for running in self._running.values()}:
            try:
                self._end(stream, "failed")
            except Exception:
                logger.exception("while giving up")
            self._tell(stream, engine_failed(reason))
        self._running.clear()
        self._hand_over()

    def _stop(self) -> None:
        self._stopping = True

    def _answer_the_rest(self) -> None:
        """At the end of the thread, fail everything that still waits for an answer."""
        if self.failure is None:
            self._give_up("the server has been stopped")
        while not self._stopping:  # the engine is broken, so refuse the calls that still arrive
            self._take_commands(None)
            self._hand_over()
        self._take_commands(0.0)
        self._hand_over()

    # -------------------------------------------------------------- hand-over

    def _tell(self, stream: AnswerStream, event: Event) -> None:
        self._outbox.setdefault(stream, []).append(event)

    def _hand_over(self) -> None:
        ended, self._ended = self._ended, []
        for keep_account in self._after_step if ended else ():
            keep_account(ended)
        if self._outbox:
            outbox, self._outbox = self._outbox, {}
            assert self._loop is not None
            try:
                self._loop.call_soon_threadsafe(_put_all, outbox)
            except RuntimeError:
                logger.debug("the event loop has ended before the engine")


def in_a_thread(llm: LLM, records: Records, after_step: Sequence[AfterStep]) -> EngineThread:
    """Return the EngineDoor of the model's own engine, which a thread of this process steps."""
    return EngineThread(llm.engine, records, after_step=after_step)


def _put_all(outbox: Mapping[AnswerStream, Sequence[Event]]) -> None:
    """Hand each stream its events. Runs on the event loop."""
    for stream, events in outbox.items():
        stream.put(events)
