"""What linking costs in answers, as it was measured with one model, and the bar that a method must pass to be served.

Knows names of methods and counts; knows nothing of prompts or engines. `foreword pml measure` writes the file:

    {"format": 1, "model": "<identity>", "methods": {"first-16": {"prompts": 500, "agreeing": 497}, ...},
     "with_gaps": {"first-16": {"prompts": 500, "agreeing": 493}, "all": {"prompts": 500, "agreeing": 495}}, ...}

An answer agrees if its tokens are those of the plain prompt (`all`, without gaps between positions), greedy. A file
without "with_gaps" covers no prompts with gaps. Further keys are for people.
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
"""The method that gives the plain prompt's bits if positions have no gaps; then it needs no measurement."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How often a method's answers were those of the plain prompt."""

    num_prompts: int
    num_agreeing: int

    @property
    def share(self) -> float:
        return self.num_agreeing / self.num_prompts

    def __str__(self) -> str:
        return f"{self.num_agreeing} of {self.num_prompts} prompts"


@dataclass(frozen=True)
class MeasuredLinks:
    """The agreements of one model."""

    model_id: str
    """`CacheIdentity.model_id`: weights, configuration and layout of the model that was measured."""
    agreements: Mapping[str, Agreement]
    """By the name of the method: prompts without gaps between positions."""
    with_gaps: Mapping[str, Agreement] = field(default_factory=dict)
    """The same prompts with gaps."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """For people: tasks, seeds, times."""

    def write(self, path: Path) -> None:
        """Write the file. Raises ConfigError if it cannot be written."""
        told = {"format": FORMAT, "model": self.model_id, "methods": _as_json(self.agreements)}
        told |= {"with_gaps": _as_json(self.with_gaps)} if self.with_gaps else {}
        told |= self.details
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
            agreements, with_gaps = _agreements(told.pop("methods")), _agreements(told.pop("with_gaps", {}))
            return cls(str(told.pop("model")), agreements, with_gaps, told)
        except OSError as error:
            raise ConfigError(f"link_measurements={str(path)!r} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"link_measurements={str(path)!r} is no file of `foreword pml measure` ({error!r:.80}); write one with "
                "`foreword pml measure --save FILE`"
            ) from error


def _as_json(agreements: Mapping[str, Agreement]) -> dict[str, dict[str, int]]:
    return {name: {"prompts": one.num_prompts, "agreeing": one.num_agreeing} for name, one in agreements.items()}


def _agreements(told: Mapping[str, Mapping[str, Any]]) -> dict[str, Agreement]:
    found = {}
    for name, one in told.items():
        prompts, agreeing = one["prompts"], one["agreeing"]
        if type(prompts) is not int or type(agreeing) is not int or not 0 <= agreeing <= prompts or not prompts:
            raise ValueError(f"{agreeing!r} of {prompts!r} prompts")
        found[name] = Agreement(prompts, agreeing)
    return found


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

    def serves(self, method: str, *, has_gaps: bool = False) -> bool:
        """Whether a method passes, for prompts with gaps between their positions or for those without."""
        found = self._agreements(has_gaps).get(method)
        return not self.least or (method == EXACT and not has_gaps) or (found is not None and found.share >= self.least)

    def check(self, method: str, *, has_gaps: bool = False) -> None:
        """Raise InvalidRequestError for a method that does not pass."""
        if self.serves(method, has_gaps=has_gaps):
            return
        measured = self._agreements(has_gaps)
        found = measured.get(method)
        if has_gaps:
            agreed = "was not measured" if found is None else f"gave the plain prompt's answer in {found}"
            remedy = "" if found is not None else "; the operator can measure it with `foreword pml measure --gaps`"
            raise InvalidRequestError(
                f"link={method!r} {agreed} with gaps between positions, which this prompt has, and this server asks "
                f'for {self.least:.1%} of such answers; send "positions": "dense", or leave link out{remedy}'
            )
        if found is None:
            raise InvalidRequestError(
                f"link={method!r} was not measured with this model; measured: "
                f"{', '.join(sorted({EXACT, *measured}))}; the operator can measure it with `foreword pml measure`"
            )
        raise InvalidRequestError(
            f"link={method!r} gave the plain prompt's answer in {found} with this model, and this server asks for "
            f"{self.least:.1%}; use another method, or leave link out"
        )

    def _agreements(self, has_gaps: bool) -> Mapping[str, Agreement]:
        if self.measured is None:
            return {}
        return self.measured.with_gaps if has_gaps else self.measured.agreements
