"""EngineDoor: a server's interface to its engines: a single engine in this process, or several in other processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from foreword.server.answer_stream import AnswerStream, Job
from foreword.server.verbs import T, Ts, Verb


class PrefillSpeed:
    """Seconds per prompt token, measured over steps that are mostly prefill."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._seconds = 0.0

    def note_step(self, num_tokens: int, num_running: int, seconds: float) -> None:
        """Note a step of `num_tokens` tokens for `num_running` requests. Steps that mostly decode are left out."""
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
    """The engines of one model. All methods are for the event loop."""

    failure: str | None
    """Why no more requests are taken; None while requests are taken."""
    num_choices: int
    """The number of accepted choices that are not finished."""
    prefill: PrefillSpeed

    @property
    def num_engines(self) -> int:
        """The number of engines that take requests now."""
        return 1

    def numbers(self) -> list[Number]:
        """Return further metrics."""
        return []

    def report(self) -> dict[str, Any] | None:
        """Report the engines and the routing's decisions, for JSON; None if there is only one engine."""
        return None

    def decisions(self, request_id: str | None, limit: int) -> list[dict[str, Any]]:
        """Report why requests went to their engines, the newest first. For a `request_id`, report all its attempts."""
        return []

    def start(self) -> None:
        """Begin to serve; answers go to the event loop that is running now."""

    async def stop(self) -> None:
        """End the running requests. May be called twice."""

    def submit(self, jobs: Sequence[Job], *, whole: bool) -> AnswerStream:
        """Submit prompts. The stream's first event says whether all of them were accepted or all refused."""

    def shrink(self, namespace: str, max_blocks: int) -> None:
        """Shrink a namespace's share of each engine's cache. Called in the thread that notices ended requests."""

    async def ask(self, verb: Verb[T, *Ts], *arguments: *Ts) -> T:
        """Run a verb on every engine between two steps, and merge the results. Raises the verb's exceptions."""

    async def change(self, verb: Verb[T, *Ts], *arguments: *Ts) -> T:
        """Like `ask`, run a verb, which changes something. An engine that stands still runs the verb before it takes
        requests again, so the verb may run late, or twice.
        """
        return await self.ask(verb, *arguments)
