"""EngineDoor: what a server asks of its engines, be it one in a thread of this process or several elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from foreword.engine import Engine
from foreword.server.answer_stream import AnswerStream, Job
from foreword.server.prefill_speed import PrefillSpeed

T = TypeVar("T")
Merge = Callable[[list[T]], T]
"""One answer from those of several engines, of which there is at least one."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number for metrics, besides those of an engine."""

    name: str
    meaning: str
    values: Mapping[str, float]
    """By the value of `label`."""
    label: str
    is_counter: bool = False


class EngineDoor(Protocol):
    """The engines of one model. All methods are for the event loop."""

    failure: str | None
    """Why no request is taken any more; None while requests are taken."""
    num_choices: int
    """Number of accepted choices that are not finished."""
    prefill: PrefillSpeed

    @property
    def num_engines(self) -> int:
        """The number of engines that take requests now."""

    def numbers(self) -> list[Number]:
        """Further metrics."""

    def report(self) -> dict[str, Any] | None:
        """The engines and what routing did, for JSON; None if there is only one."""

    def decisions(self, request_id: str | None, limit: int) -> list[dict[str, Any]]:
        """Why requests went to their engines, the newest first; of one request, all its attempts."""

    def start(self) -> None:
        """Begin to serve; answers go to the event loop that is running now."""

    async def stop(self) -> None:
        """End the running requests. May be called twice."""

    def submit(self, jobs: Sequence[Job], *, whole: bool) -> AnswerStream:
        """Submit prompts. The stream's first event says whether they were accepted: all or none."""

    def shrink(self, namespace: str, max_blocks: int) -> None:
        """Shrink a namespace's share of each engine's cache. Called where requests are found to have ended."""

    async def call(self, function: Callable[[Engine], T], merge: Merge[T]) -> T:
        """Run a function on every engine between two of its steps, and merge what they return.

        It must be picklable with cloudpickle, and so must its result. Raises what it raises.
        """

    async def change(self, function: Callable[[Engine], T], merge: Merge[T]) -> T:
        """The same for a function that changes something. Engines that stand still run it before they take requests
        again, so it may run twice and later.
        """


def first(found: list[T]) -> T:
    """Merges answers of which one is as good as another."""
    return found[0]
