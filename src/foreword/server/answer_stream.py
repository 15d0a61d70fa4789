"""The asyncio side of one call: its prompts, and the deltas of its answer as the engine makes them.

Deltas collect in a stream until its reader takes all of them at once, joined. So a slow reader costs only the memory of
its own answer, and delays no other reader.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Protocol

from foreword.engine import Prompt
from foreword.request import RequestOutput, SamplingParams, TokenLogprobs
from foreword.server.api_errors import APIError
from foreword.server.records import RequestRecord


@dataclass(frozen=True, slots=True)
class Delta:
    """The new text and tokens of one choice since its last delta."""

    choice: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    """Stop string or token that ended the choice, or a sentence that says why the grammar allows no further token."""


def joined(deltas: Sequence[Delta]) -> Delta:
    """Join successive deltas of one choice."""
    first, last = deltas[0], deltas[-1]
    if first is last:
        return first
    logprobs = None if first.logprobs is None else [of_token for delta in deltas for of_token in delta.logprobs or ()]
    token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
    return replace(last, text="".join(delta.text for delta in deltas), token_ids=token_ids, logprobs=logprobs)


@dataclass(frozen=True, slots=True)
class Accepted:
    """The engine has queued all prompts of an answer."""


@dataclass(frozen=True, slots=True)
class Finished:
    """All choices of an answer are complete."""


Event = Accepted | Delta | Finished | APIError


@dataclass(frozen=True, slots=True)
class Shown:
    """The part of a choice that a client already has."""

    token_ids: tuple[int, ...] = ()
    num_chars: int = 0
    is_ended: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to continue, and its record."""

    record: RequestRecord
    prompt: Prompt
    params: SamplingParams
    answered: Sequence[Shown] = ()
    """For each choice, the part that the client has already from another engine. The answer continues this part."""


DEADLINE: ContextVar[float] = ContextVar("foreword_deadline", default=math.inf)
"""The event loop's time by which the running task's call must have ended."""
CLOCK_S = 0.01
"""Timers of an event loop may be early by up to this many seconds."""


class Home(Protocol):
    """The owner of a stream's requests: the engine's thread."""

    def forget(self, stream: AnswerStream) -> None:
        """Forget a complete answer."""

    def abort(self, stream: AnswerStream, outcome: str) -> None:
        """Abort an answer that nobody wants any more."""


class AnswerStream:
    """The asyncio side of one call: the deltas of its choices, in the order in which they were made.

    Only the event loop may call its methods. The engine's thread hands events over to the event loop. Call `close()`
    when reading ends, which aborts the choices that still run.
    """

    def __init__(self, home: Home, jobs: Sequence[Job], *, whole: bool) -> None:
        self.jobs = jobs
        self.whole = whole
        """Whether to hand over only the finished answer: for calls that do not stream."""
        self.outputs: list[RequestOutput] = []
        """One output per job, once accepted. Read only finished outputs: the engine's thread changes the others."""
        self.num_unfinished = len(jobs)
        """The number of unfinished jobs, which the engine's thread counts down."""
        self._home = home
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._done = False
        self._tell_end: Callable[[], None] = lambda: None

    def when_ended(self, tell: Callable[[], None]) -> None:
        """Call `tell` when the answer ends: it is complete, has failed or was aborted. If it has ended, call it now."""
        if self._done:
            tell()
        else:
            self._tell_end = tell

    def put(self, events: Sequence[Event]) -> None:
        """Take events of the engine, in order. If the last event is Finished or an error, it ends the answer."""
        if not self._done:
            self._events.extend(events)
            self._arrived.set()
            self._done = isinstance(events[-1], Finished | APIError)
            if self._done:
                self._home.forget(self)
                self._tell_end()

    async def accepted(self) -> None:
        """Wait until the engine has queued all prompts. Raises APIError if it refused a prompt."""
        while not self._events:
            await self._wait()
        event = self._events.popleft()
        if isinstance(event, APIError):
            raise event
        assert isinstance(event, Accepted)

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """Yield the new deltas, one for each choice with new tokens. Raises APIError if the answer fails."""
        while True:
            by_choice: dict[int, list[Delta]] = {}
            end: Event | None = None
            while self._events and end is None:
                event = self._events.popleft()
                if isinstance(event, Delta):
                    by_choice.setdefault(event.choice, []).append(event)
                else:
                    end = event
            if by_choice:
                yield list(map(joined, by_choice.values()))
            if isinstance(end, APIError):
                raise end
            if end is not None:
                return
            if not by_choice:
                await self._wait()

    async def _wait(self) -> None:
        self._arrived.clear()
        await self._arrived.wait()

    def num_written_tokens(self) -> dict[float, int]:
        """Count the prompt tokens that marks keep and that were not cached before, by `ttl_s`.

        If several marks keep a token, it counts only for the longest `ttl_s` of these marks. The counts are right once
        each prompt has its first delta.
        """
        num_written: dict[float, int] = {}
        for job, output in zip(self.jobs, self.outputs, strict=True):
            num_kept: dict[float, int] = {}
            for mark, entry in zip(job.prompt.marks, output.kept, strict=False):
                num_kept[mark.keep.ttl_s] = max(num_kept.get(mark.keep.ttl_s, 0), entry.num_kept_tokens)
            num_cached = job.record.num_cached_tokens
            for ttl_s in sorted(num_kept, reverse=True):
                num_written[ttl_s] = num_written.get(ttl_s, 0) + max(0, num_kept[ttl_s] - num_cached)
                num_cached = max(num_cached, num_kept[ttl_s])
        return num_written

    def close(self) -> None:
        """Abort the unfinished jobs. The engine frees their blocks at its next step."""
        if not self._done:
            self._done = True
            is_late = asyncio.get_running_loop().time() >= DEADLINE.get() - CLOCK_S
            self._home.abort(self, "timeout" if is_late else "disconnected")
            self._tell_end()
