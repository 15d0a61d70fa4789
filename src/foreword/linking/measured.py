"""What linking costs in right answers, as it was measured with one model, and the bar that a method must pass.

`foreword pml measure` writes the file:

    {"format": 2, "model": "<identity>", "methods": {"first-16": {"prompts": 500, "lost": 7, "gained": 4}, ...},
     "with_gaps": {"first-16": {"prompts": 500, "lost": 9, "gained": 4}, "all": {...}}, ...}

A prompt is lost if the plain prompt (`all`, without gaps between positions) was answered rightly and the method's was
not, and gained if it is the other way round; greedy. A file without "with_gaps" covers no prompts with gaps. Further
keys are for people.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foreword.errors import ConfigError, InvalidRequestError

FORMAT = 2
EXACT = "all"
"""The method that gives the plain prompt's bits if positions have no gaps; then it needs no measurement."""
Z = 1.96
"""Quantile of the normal distribution for intervals of 95%."""


@dataclass(frozen=True, slots=True)
class Rightness:
    """Right answers of a method beside those of the plain prompt, over the same prompts."""

    num_prompts: int
    num_lost: int
    """Right for the plain prompt alone."""
    num_gained: int
    """Right for the method alone."""

    @property
    def loss(self) -> float:
        """The share of the prompts that the method answers worse, less those that it answers better."""
        return (self.num_lost - self.num_gained) / self.num_prompts

    @property
    def loss_interval(self) -> tuple[float, float]:
        """The 95% interval of `loss`: of a difference of paired shares (Bonett and Price, 2012).

        With n prompts, l = (lost + 1) / (n + 2) and g = (gained + 1) / (n + 2), it is
        l - g -+ 1.96 sqrt((l + g - (l - g)^2) / (n + 2)).
        """
        size = self.num_prompts + 2
        lost, gained = (self.num_lost + 1) / size, (self.num_gained + 1) / size
        half = Z * math.sqrt((lost + gained - (lost - gained) ** 2) / size)
        return max(-1.0, lost - gained - half), min(1.0, lost - gained + half)

    @property
    def p_value(self) -> float:
        """McNemar's exact test: how likely a split of the differing prompts that is as uneven or more is by chance.

        Twice the binomial tail of min(lost, gained) among lost + gained trials of 1/2, at most 1 (McNemar, 1947).
        """
        trials = self.num_lost + self.num_gained
        tail = sum(math.comb(trials, number) for number in range(min(self.num_lost, self.num_gained) + 1))
        return min(1.0, tail / 2 ** (trials - 1)) if trials else 1.0

    def __str__(self) -> str:
        return f"{self.num_lost} lost and {self.num_gained} gained of {self.num_prompts} prompts"


@dataclass(frozen=True)
class MeasuredLinks:
    """The measured methods of one model."""

    model_id: str
    """`CacheIdentity.model_id`: weights, configuration and layout of the model that was measured."""
    methods: Mapping[str, Rightness]
    """By the name of the method: prompts without gaps between positions."""
    with_gaps: Mapping[str, Rightness] = field(default_factory=dict)
    """The same prompts with gaps."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """For people: tasks, seeds, times."""

    def write(self, path: Path) -> None:
        """Write the file. Raises ConfigError if it cannot be written."""
        told = {"format": FORMAT, "model": self.model_id, "methods": _as_json(self.methods)}
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
            if (version := told.pop("format")) == 1:
                raise ConfigError(
                    f"link_measurements={str(path)!r} has format 1, of an earlier version: it counts equal answers, "
                    "and this version asks for right ones; measure again with `foreword pml measure --save FILE`"
                )
            if version != FORMAT:
                raise ValueError(f"its format is {version!r:.40}, and this version reads {FORMAT}")
            methods, with_gaps = _methods(told.pop("methods")), _methods(told.pop("with_gaps", {}))
            return cls(str(told.pop("model")), methods, with_gaps, told)
        except ConfigError:
            raise
        except OSError as error:
            raise ConfigError(f"link_measurements={str(path)!r} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"link_measurements={str(path)!r} is no file of `foreword pml measure` ({error!r:.80}); write one with "
                "`foreword pml measure --save FILE`"
            ) from error


def _as_json(methods: Mapping[str, Rightness]) -> dict[str, dict[str, int]]:
    return {
        name: {"prompts": one.num_prompts, "lost": one.num_lost, "gained": one.num_gained}
        for name, one in methods.items()
    }


def _methods(told: Mapping[str, Mapping[str, Any]]) -> dict[str, Rightness]:
    found = {}
    for name, one in told.items():
        prompts, lost, gained = counts = one["prompts"], one["lost"], one["gained"]
        if any(type(count) is not int or count < 0 for count in counts) or not prompts or lost + gained > prompts:
            raise ValueError(f"{lost!r} lost and {gained!r} gained of {prompts!r} prompts")
        found[name] = Rightness(prompts, lost, gained)
    return found


@dataclass(frozen=True)
class Gate:
    """Which methods may be served: those that keep enough of the right answers."""

    least: float
    """1 less the largest loss of right answers, as a share of all prompts, that the method's 95% interval may reach; 0
    lets every method pass, measured or not."""
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
        found = self._measured(has_gaps).get(method)
        if not self.least or (method == EXACT and not has_gaps):
            return True
        return found is not None and found.loss_interval[1] <= 1 - self.least

    def check(self, method: str, *, has_gaps: bool = False) -> None:
        """Raise InvalidRequestError for a method that does not pass."""
        if self.serves(method, has_gaps=has_gaps):
            return
        measured = self._measured(has_gaps)
        found = measured.get(method)
        asked = f"this server lets it lose {1 - self.least:.1%} of the prompts (95% confidence)"
        if has_gaps:
            told = "was not measured" if found is None else f"may lose {found.loss_interval[1]:.1%} ({found})"
            remedy = "" if found is not None else "; the operator can measure it with `foreword pml measure --gaps`"
            raise InvalidRequestError(
                f"link={method!r} {told} with gaps between positions, which this prompt has, and {asked}; send "
                f'"positions": "dense", or leave link out{remedy}'
            )
        if found is None:
            raise InvalidRequestError(
                f"link={method!r} was not measured with this model; measured: "
                f"{', '.join(sorted({EXACT, *measured}))}; the operator can measure it with `foreword pml measure`"
            )
        raise InvalidRequestError(
            f"link={method!r} may lose {found.loss_interval[1]:.1%} with this model ({found}), and {asked}; use "
            "another method, or leave link out"
        )

    def _measured(self, has_gaps: bool) -> Mapping[str, Rightness]:
        if self.measured is None:
            return {}
        return self.measured.with_gaps if has_gaps else self.measured.methods
