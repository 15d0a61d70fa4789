"""Agreement: the same prompts with every method, and how often their answers are right.

Sources are computed before a prompt is asked, so times are those of prompts whose documents are cached, and a method
pays for what it computes in the prompt.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from itertools import islice
from typing import Any

from foreword.linking import Method
from foreword.linking.measured import EXACT, Rightness, Z
from foreword.llm import LLM
from foreword.modules.questions import Asked
from foreword.pml.composition import Composition
from foreword.pml.library import SchemaPrompt
from foreword.request import RequestOutput, SamplingParams

_COMPUTE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
Interval = tuple[float, float]


@dataclass(frozen=True)
class Arm:
    """One way to answer a prompt."""

    name: str
    method: Method
    salt: str | None = None
    """A namespace of its own, for an arm that caches other bits than its keys say, or whose times count."""
    changed: Callable[[LLM], AbstractContextManager[None]] = lambda llm: nullcontext()
    """What is changed while it answers: a negative control."""

    @classmethod
    def of(cls, name: str) -> Arm:
        """The arm of a method. Raises InvalidRequestError for an unknown one."""
        return cls(name, Method.parse(name))


@dataclass(frozen=True, slots=True)
class Answer:
    """One arm's answer to one prompt."""

    output: RequestOutput
    first_token_ms: float
    """From the call to the first token: choosing what is linked takes time, too."""


@dataclass
class Tally:
    """What one arm did with the prompts of one cell."""

    num_asked: int = 0
    num_with_answer: int = 0
    """Prompts whose right answer is known."""
    num_right: int = 0
    num_plain_right: int = 0
    """Of the same prompts, those that `all` without gaps answers rightly."""
    num_lost: int = 0
    num_gained: int = 0
    num_agreeing: int = 0
    num_linked: int = 0
    """Prompts with an answer of which something was linked, or that have gaps between positions: the others tell
    nothing about the method, and are neither lost nor gained."""
    shares: list[float] = field(default_factory=list)
    """Of each prompt: the share of its tokens that were neither linked nor part of its exact beginning."""
    times_ms: list[float] = field(default_factory=list)
    """Of each prompt: to the first token."""

    def __add__(self, other: Tally) -> Tally:
        return Tally(**{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(Tally)})

    def add(self, asked: Asked, answer: Answer, plain: Answer, num_exact: int) -> None:
        """Count one answer; `plain` is the answer of `all` without gaps."""
        output = answer.output
        assert output.link is not None
        own, wanted = output.outputs[0], plain.output.outputs[0]
        num_tokens = len(output.prompt_token_ids)
        is_right, was_right = asked.is_right(own.text), asked.is_right(wanted.text)
        self.num_asked += 1
        self.num_with_answer += asked.answer is not None
        self.num_right += is_right
        self.num_plain_right += was_right
        self.num_lost += was_right and not is_right
        self.num_gained += is_right and not was_right
        self.num_agreeing += list(own.token_ids) == list(wanted.token_ids)
        self.num_linked += asked.answer is not None and not output.link.exact
        self.shares.append((num_tokens - num_exact - output.link.linked_tokens) / num_tokens)
        self.times_ms.append(answer.first_token_ms)

    def beside_all(self, num_prompts: int) -> Rightness:
        """Lost and gained right answers among `num_prompts` prompts."""
        return Rightness(num_prompts, self.num_lost, self.num_gained)

    def as_json(self) -> dict[str, Any]:
        """Percentages with 95% intervals, the mean share, and the median time."""
        asked = self.num_with_answer
        found: dict[str, Any] = {"prompts": self.num_asked, "linked_prompts": self.num_linked, "right": None}
        if asked:
            beside = self.beside_all(asked)
            low, high = (round(-100 * bound, 1) for bound in reversed(beside.loss_interval))
            found |= {
                "right": round(100 * self.num_right / asked, 1),
                "interval": wilson(self.num_right, asked),
                "lost": self.num_lost,
                "gained": self.num_gained,
                "difference": round(-100 * beside.loss, 1) + 0.0,  # never -0.0
                "difference_interval": (low, high),
                "p": round(beside.p_value, 4),
            }
        return {
            **found,
            "agreement": round(100 * self.num_agreeing / self.num_asked, 1),
            "agreement_interval": wilson(self.num_agreeing, self.num_asked),
            "computed_share": round(statistics.fmean(self.shares), 3),
            "ttft_ms": round(statistics.median(self.times_ms), 2),
        }


def wilson(right: int, asked: int) -> Interval:
    """The 95% interval of a share, in percent (Wilson, 1927)."""
    z, share = Z, right / asked
    middle = share + z * z / (2 * asked)
    half = z * math.sqrt(share * (1 - share) / asked + z * z / (4 * asked * asked))
    low, high = (100 * (middle + sign * half) / (1 + z * z / asked) for sign in (-1, 1))
    return round(max(0.0, low), 1), round(min(100.0, high), 1)


def tally(
    llm: LLM, prompts: Iterable[Asked], arms: Sequence[Arm], params: SamplingParams, *, at_once: int = 1
) -> dict[str, Tally]:
    """Ask all prompts with `all`, without gaps between positions, and with each arm; by the arms' names.

    `at_once` prompts run together, which is faster; times are worth reading only with one. Then each arm has a
    namespace of its own: what a method computes of a part another one would find cached.
    """
    if at_once == 1:
        arms = [replace(arm, salt=arm.salt or arm.name) for arm in arms]
    found = {arm.name: Tally() for arm in arms}
    waiting = iter(prompts)
    while several := list(islice(waiting, at_once)):
        _compute_sources(llm, several, None)
        dense = [replace(one, composition=one.dense or one.composition) for one in several]
        plain = _answers(llm, dense, Arm.of(EXACT), params)
        for arm in arms:
            answers = _linked_answers(llm, several, arm, params, plain)
            for asked, answer, wanted in zip(several, answers, plain, strict=True):
                found[arm.name].add(asked, answer, wanted, _exact_tokens(llm, asked))
    return found


def _linked_answers(
    llm: LLM, several: Sequence[Asked], arm: Arm, params: SamplingParams, plain: Sequence[Answer]
) -> list[Answer]:
    """A method that links nothing of a prompt without gaps gives the plain prompt's bits: these are not asked again."""
    differs = [one.composition.has_gaps or _links_any(one.composition, arm.method) for one in several]
    linked = [one for one, may_differ in zip(several, differs, strict=True) if may_differ]
    if arm.salt is not None:
        _compute_sources(llm, linked, arm.salt)
    with arm.changed(llm):
        answers = iter(_answers(llm, linked, arm, params))
    return [next(answers) if may_differ else known for may_differ, known in zip(differs, plain, strict=True)]


def _answers(llm: LLM, several: Sequence[Asked], arm: Arm, params: SamplingParams) -> list[Answer]:
    inputs = [{"prompt": SchemaPrompt(one.composition, "", ()), "cache_salt": arm.salt} for one in several]
    started = time.monotonic()
    outputs = llm.generate(inputs, params, link=arm.method, show_progress=False)
    return [Answer(one, 1e3 * ((one.metrics.first_token_time or started) - started)) for one in outputs]


def _links_any(composition: Composition, method: Method) -> bool:
    return any(
        part.span is not None
        and begin + len(part.token_ids) > composition.num_exact_tokens
        and method.num_computed(part) < len(part.token_ids)
        for part, begin in zip(composition.parts, composition.begins, strict=False)
    )


def _exact_tokens(llm: LLM, asked: Asked) -> int:
    """The leading tokens that every method finds as a prefix once the sources are computed."""
    block_size = llm.layout.block_size
    return asked.composition.num_exact_tokens // block_size * block_size


def _compute_sources(llm: LLM, several: Sequence[Asked], salt: str | None) -> None:
    """Compute the sources, so that no arm pays for them."""
    sources = [source for one in several for source in (*one.composition.sources, *one.hidden)]
    prompts = [{"prompt_token_ids": source.token_ids, "cache_salt": salt} for source in dict.fromkeys(sources)]
    llm.generate(prompts, _COMPUTE, show_progress=False)
