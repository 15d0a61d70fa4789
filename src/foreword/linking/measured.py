"""What linking costs in answers, as it was measured with one model, and the bar that a method must pass to be served.

Knows names of methods and counts; knows nothing of prompts or engines. `foreword pml measure` writes the file:

    {"format": 1, "model": "<identity>", "methods": {"first-16": {"prompts": 500, "agreeing": 497}, ...}, ...}

An answer agrees if its tokens are those of the plain prompt (`all`), greedy. Further keys are for people.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foreword.errors import ConfigError, InvalidRequestError

FORMAT = 1
EXACT = "all"
"""The method that gives the plain prompt's bits; it needs no measurement."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How often a method's answers were those of the plain prompt."""

    num_prompts: int
    num_agreeing: int

    @property
    def share(self) -> float:
        return self.num_agreeing / self.num_prompts


@dataclass(frozen=True)
class MeasuredLinks:
    """The agreements of one model."""

    model_id: str
    """`CacheIdentity.model_id`: weights, configuration and layout of the model that was measured."""
    agreements: Mapping[str, Agreement]
    """By the name of the method."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """For people: tasks, seeds, times."""

    def write(self, path: Path) -> None:
        """Write the file. Raises ConfigError if it cannot be written."""
        methods = {
            name: {"prompts": one.num_prompts, "agreeing": one.num_agreeing} for name, one in self.agreements.items()
        }
        told = {"format": FORMAT, "model": self.model_id, "methods": methods, **self.details}
        try:
            path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{str(path)!r} cannot be written: {error.strerror}; name a file in a folder of yours"
            ) from error

    @classmethod
    def read(cls, path: Path) -> MeasuredLinks:
        """The file's content. Raises ConfigError if it cannot be read, or is none."""
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            if told.pop("format") != FORMAT:
                raise ValueError("it has another format")
            agreements = {name: _agreement(one) for name, one in told.pop("methods").items()}
            return cls(str(told.pop("model")), agreements, told)
        except OSError as error:
            raise ConfigError(f"link_measurements={str(path)!r} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"link_measurements={str(path)!r} is no file of `foreword pml measure` ({error!r:.80}); write one with "
                "`foreword pml measure --save FILE`"
            ) from error


def _agreement(told: Mapping[str, Any]) -> Agreement:
    prompts, agreeing = told["prompts"], told["agreeing"]
    if type(prompts) is not int or type(agreeing) is not int or not 0 <= agreeing <= prompts or not prompts:
        raise ValueError(f"{agreeing!r} of {prompts!r} prompts")
    return Agreement(prompts, agreeing)


@dataclass(frozen=True)
class Gate:
    """Which methods may be served: those that agreed often enough."""

    least: float
    """The least share of equal answers; 0 lets every method pass, measured or not."""
    measured: MeasuredLinks | None = None

    def check_model(self, model_id: str) -> None:
        """Raise ConfigError if another model was measured."""
        if self.measured is not None and self.measured.model_id != model_id:
            raise ConfigError(
                "link_measurements is of another model, or of other options of its cache; measure this one with "
                "`foreword pml measure --model M --save FILE`, with the same block_size and dtype"
            )

    def check(self, method: str) -> None:
        """Raise InvalidRequestError for a method that does not pass."""
        if method == EXACT or not self.least:
            return
        found = None if self.measured is None else self.measured.agreements.get(method)
        if found is None:
            known = sorted({EXACT, *(self.measured.agreements if self.measured else ())})
            raise InvalidRequestError(
                f"link={method!r} was not measured with this model; measured: {', '.join(known)}; the operator can "
                "measure it with `foreword pml measure`"
            )
        if found.share < self.least:
            raise InvalidRequestError(
                f"link={method!r} gave the plain prompt's answer in {found.num_agreeing} of {found.num_prompts} "
                f"prompts with this model, and this server asks for {self.least:.1%}; use another method, or leave "
                "link out"
            )
