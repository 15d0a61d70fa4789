"""The asyncio end of one call: what a request becomes, and the deltas of its answer as they are made.

Knows prompts and outputs; knows neither threads nor HTTP. A stream's deltas pile up until its reader takes them, all at
once and joined, so a slow reader costs memory for the rest of its own answer, and nobody else's time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from foreword.engine import Prompt
from foreword.request import RequestOutput, SamplingParams, TokenLogprobs
from foreword.server.api_errors import APIError
from foreword.server.records import RequestRecord


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in one choice since its last delta."""

    choice: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs] | None
    finish_reason: str | None
    stop_reason: int | str | None = None
    """The stop string or token that ended it, or a sentence about why nothing may follow."""

    def then(self, later: Delta) -> Delta:
        """This and the next delta of the same choice as one."""
        return Delta(
            self.choice,
            self.text + later.text,
            [*self.token_ids, *later.token_ids],
            None if self.logprobs is None else [*self.logprobs, *(later.logprobs or ())],
            later.finish_reason,
            later.stop_reason,
        )


@dataclass(frozen=True, slots=True)
class Accepted:
    """The engine has queued all prompts of an answer."""


@dataclass(frozen=True, slots=True)
class Finished:
    """All choices of an answer are complete."""


Event = Accepted | Delta | Finished | APIError


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to continue, and where it is accounted for."""

    record: RequestRecord
    prompt: Prompt
    params: SamplingParams


class Home(Protocol):
    """Where a stream's requests run."""

    def forget(self, stream: AnswerStream) -> None:
        """An answer is complete."""

    def abort(self, stream: AnswerStream, outcome: str) -> None:
        """An answer is not wanted any more."""


class AnswerStream:
    """The asyncio end of one call: deltas of its choices in the order in which they were made.

    Belongs to the event loop; the engine's thread only hands events over. `close()` is to be called when nobody
    will read on: what still runs is then aborted.
    """

    def __init__(self, home: Home, jobs: Sequence[Job], *, whole: bool) -> None:
        self.jobs = jobs
        self.whole = whole
        """Hand over only when everything is finished: for answers that are not streamed."""
        self.outputs: list[RequestOutput] = []
        """One per job, once accepted. They grow on the engine's thread; read them when finished."""
        self.num_unfinished = len(jobs)
        """Counted on the engine's thread."""
        self._home = home
        self._events: deque[Event] = deque()
        self._arrived = asyncio.Event()
        self._done = False

    def put(self, events: Sequence[Event]) -> None:
        """What the engine made, in its order; the last event ends the answer if it is one that does."""
        if not self._done:
            self._events.extend(events)
            self._arrived.set()
            self._done = isinstance(events[-1], Finished | APIError)
            if self._done:
                self._home.forget(self)

    async def accepted(self) -> None:
        """Wait until the engine has queued all prompts. Raises APIError if it refused one."""
        while not self._events:
            await self._wait()
        event = self._events.popleft()
        if isinstance(event, APIError):
            raise event
        assert isinstance(event, Accepted)

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """Deltas, one for each choice of which something has come. Raises APIError where the answer fails."""
        while True:
            taken: dict[int, Delta] = {}
            while self._events:
                event = self._events.popleft()
                if isinstance(event, Delta):
                    before = taken.get(event.choice)
                    taken[event.choice] = event if before is None else before.then(event)
                    continue
                if taken:
                    yield list(taken.values())
                if isinstance(event, APIError):
                    raise event
                return
            if taken:
                yield list(taken.values())
            else:
                await self._wait()

    async def _wait(self) -> None:
        self._arrived.clear()
        await self._arrived.wait()

    def close(self, outcome: str = "disconnected") -> None:
        """Abort what is unfinished; its blocks are free at the engine's next step."""
        if not self._done:
            self._done = True
            self._home.abort(self, outcome)
