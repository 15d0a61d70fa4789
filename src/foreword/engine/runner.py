"""The protocol of runners, which compute the engine's batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from foreword.batch import Batch, BatchResult
from foreword.request import Alone, Picture


class Runner(Protocol):
    """Computes batches. The KV of a batch's tokens is in place when `execute` returns."""

    def execute(self, batch: Batch) -> BatchResult: ...


class PendingStep(Protocol):
    """A batch that is being computed."""

    def is_ready(self) -> bool:
        """Whether `result` would return at once."""

    def result(self) -> BatchResult:
        """Wait for the batch. If an interrupt ends the wait, the caller calls this again. Raises all errors since the
        launch.
        """


@runtime_checkable
class LaunchingRunner(Protocol):
    """A `Runner` that can also compute while the caller goes on.

    Batches are computed in the order in which they are launched. At most one batch is launched while the result of
    another is pending. Placeholder tokens in the new batch stand for the tokens that the pending batch will sample.
    """

    def launch(self, batch: Batch) -> PendingStep: ...


class Encoder(Protocol):
    """Encodes the pictures of a runner's batches."""

    def missing(self, picture: Picture, rows: range, salt: str | Alone | None) -> Sequence[range]:
        """The pieces of a picture that a step with these rows would encode, as ascending ranges of its rows."""

    def counts(self) -> Counter[str]:
        """The number of pictures' rows that steps needed, by where the rows came from: `encoder`, `memory` or
        `tier`.
        """


@runtime_checkable
class SeeingRunner(Protocol):
    """A `Runner` whose batches may show pictures."""

    encoder: Encoder | None
    """The encoder; None: the model takes no pictures."""


@dataclass(frozen=True, slots=True)
class Computed:
    """The finished step of a runner that cannot launch."""

    known: BatchResult

    def is_ready(self) -> bool:
        return True

    def result(self) -> BatchResult:
        return self.known
