"""Linking: copies tokens of a prompt from their sources, and checks how well a model answers linked prompts.

A linked token's KV was computed in the token's source: it depends on the source's earlier tokens, but not on the text
that stands before the token in the prompt. The methods differ in the linkable tokens that they compute instead of
linking them:

    none        nothing: Prompt Cache (Gim et al., MLSys 2024)
    first-K     the first K tokens of each module or document: EPIC's LegoLink (Hu et al., ICML 2025)
    deviation-R the R% of the linkable tokens whose KV deviates most from the plain prompt's, at the second attention
                layer: CacheBlend (Yao et al., EuroSys 2025)
    all         everything: the plain prompt, bit for bit, if its positions have no gaps

Every method also computes the rest of a text after an argument, because in the source this text comes after
placeholders. If a prompt begins like its sources, this beginning is exact. It is computed, or found as a prefix.

`foreword pml measure` counts the right answers that linking costs with one model, and writes this file:

    {"format": 2, "model": "<identity>", "methods": {"first-16": {"prompts": 500, "lost": 7, "gained": 4}, ...},
     "with_gaps": {"first-16": {"prompts": 500, "lost": 9, "gained": 4}, "all": {...}}, ...}

All answers are greedy. A prompt is lost if the plain prompt (`all`, without gaps between positions) was answered
rightly and the method's prompt was not. It is gained if only the method's prompt was answered rightly. A file without
"with_gaps" covers no prompts with gaps. A file without "edits" (of the same form) covers no edits of chats. Further
keys are for people.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from foreword.engine import Prompt
from foreword.errors import ConfigError, InvalidRequestError
from foreword.pml.composition import Composition, Part
from foreword.pml.documents import compose_documents
from foreword.pml.layout import SchemaText
from foreword.pml.library import SchemaPrompt
from foreword.request import LinkedRun, LinkReport, Links, RequestOutput

_FIRST = re.compile(r"first-([1-9][0-9]{0,5})")
_DEVIATION = re.compile(r"deviation-([1-9][0-9]?)")
IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]
FORMAT = 2
EXACT = "all"
"""The method that gives the plain prompt's bits if positions have no gaps. Without gaps it needs no measurement."""
Z = 1.96
"""Quantile of the normal distribution for intervals of 95%."""
METHODS = ("none", "first-16", EXACT)


class Deviations(Protocol):
    """Measures how far links are from the plain prompt."""

    def measure(self, token_ids: IntArray, links: Links, salt: str | None = None) -> FloatArray:
        """Return the squared deviation of each linked token's KV, [tokens].

        The deviation depends only on tokens, positions and runs. `salt` is the tenant's. Raises InvalidRequestError.
        """
        ...


@dataclass(frozen=True, slots=True)
class Method:
    """One way to choose which tokens are copied."""

    name: str
    first_k: int | None
    """The number of first tokens of each module that are computed; None: all tokens."""
    after_arguments: bool = True
    """Whether the text after an argument is computed. False is only for comparison, because its answers are wrong."""
    percent: int | None = None
    """The percentage of the linkable tokens to compute, the most deviating ones; None: deviations do not matter."""

    @classmethod
    def parse(cls, name: str | Method) -> Method:
        """Return the method with this name. Raises InvalidRequestError for an unknown name."""
        if isinstance(name, Method):
            return name
        if name in ("none", "all"):
            return cls(name, 0 if name == "none" else None)
        first, share = (pattern.fullmatch(name) if isinstance(name, str) else None for pattern in (_FIRST, _DEVIATION))
        if first is not None:
            return cls(name, int(first[1]))
        if share is not None:
            return cls(name, 0, percent=int(share[1]))
        raise InvalidRequestError(
            f"link={name!r} is no method; use 'none', 'first-16' (or another number of tokens), 'deviation-15' (or "
            "another percentage from 1 to 99) or 'all'"
        )

    def num_computed(self, part: Part) -> int:
        """Return the number of first tokens of a linkable part that are computed in the prompt."""
        assert part.span is not None
        first_k = self.first_k if part.first_k is None or self.first_k is None else part.first_k
        if first_k is None:
            return len(part.token_ids)
        before = part.span.begin - part.span.source.begin  # tokens of the module before this part
        after_argument = part.num_after_argument if self.after_arguments else 0
        return min(len(part.token_ids), max(first_k - before, after_argument, 0))


def link_parts(
    composition: Composition, method: Method, deviations: Deviations | None = None, salt: str | None = None
) -> Links:
    """Return the links of a composition: the runs that a method copies, and the positions.

    The last token is always computed, because its logits give the answer's first token. `deviations` is for methods
    that choose by deviation, and `salt` is the tenant's. Raises InvalidRequestError for a composition without tokens,
    or if such a method has no `deviations`.
    """
    if not composition.num_tokens:
        raise InvalidRequestError("the prompt is empty; give at least one token")
    runs, spans, may_choose = [], [], np.zeros(composition.num_tokens, np.bool_)
    arrays: dict[int, npt.NDArray[np.int32]] = {}  # one array per source, because many runs may share a source
    for part, begin in zip(composition.parts, composition.begins, strict=False):
        end = begin + len(part.token_ids)
        if part.span is None or end <= composition.num_exact_tokens:
            continue
        spans.append((begin, end))
        first, last = begin + method.num_computed(part), min(end, composition.num_tokens - 1)
        if first < last:
            tokens = part.span.source.token_ids
            source = arrays.get(id(tokens))
            if source is None:
                source = arrays[id(tokens)] = np.array(tokens, np.int32)
            runs.append(LinkedRun(first, last, source, part.span.begin + first - begin))
            may_choose[first:last] = part.first_k is None
    links = Links(method.name, tuple(runs), composition.positions, tuple(spans))
    check_choice(method, deviations)
    if method.percent is None or deviations is None:
        return links
    deviation = deviations.measure(composition.token_ids, links, salt)
    return links.without(most_deviating(deviation, may_choose, method.percent))


def check_choice(method: Method, deviations: Deviations | None) -> None:
    """Raise InvalidRequestError if the method needs deviations and `deviations`, which measures them, is None."""
    if method.percent is not None and deviations is None:
        raise InvalidRequestError(
            f"link={method.name!r} needs the first layers of a model, and this process has none for it; load the model "
            "here with allow_links=True"
        )


def most_deviating(deviations: FloatArray, may_choose: BoolArray, percent: int) -> BoolArray:
    """Choose the most deviating `percent` of the tokens that may be chosen, rounded up. Returns a mask, [tokens].

    Of tokens that deviate equally, the first are chosen.
    """
    [indices] = np.nonzero(may_choose)
    order = np.argsort(-deviations[indices], kind="stable")
    chosen = np.zeros_like(may_choose)
    chosen[indices[order[: -(-len(indices) * percent // 100)]]] = True
    return chosen


def composition_of(prompt: Any, text: Callable[[], SchemaText | None]) -> Composition | None:
    """Return the parts of a schema's prompt or of documents; None for other prompts. Raises InvalidRequestError.

    `text` returns the tokenizer's functions for parts of prompts, or None if the model has no tokenizer.
    """
    if isinstance(prompt, Mapping) and "documents" in prompt:
        return compose_documents(prompt, text())
    inner = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return inner.composition if isinstance(inner, SchemaPrompt) else None


def with_links(
    prompt: Prompt, composition: Composition | None, link: str | Method, deviations: Deviations | None = None
) -> Prompt:
    """Return the prompt with its parts linked by a method. Raises InvalidRequestError if the prompt has no parts.

    `deviations`: None if the engine links nothing.
    """
    method = Method.parse(link)
    if composition is None:
        raise InvalidRequestError(
            f"link={method.name!r} needs parts that can be linked, and this prompt has none; give "
            "{'documents': [...], 'question': ...} or a schema's prompt, or leave link out"
        )
    return replace(prompt, links=link_parts(composition, method, deviations, prompt.extra_keys.salt))


@dataclass(frozen=True, slots=True)
class Rightness:
    """A comparison of a method's right answers with the plain prompt's, over the same prompts."""

    num_prompts: int
    num_lost: int
    """The number of prompts that only the plain prompt answers rightly."""
    num_gained: int
    """The number of prompts that only the method answers rightly."""

    @property
    def loss(self) -> float:
        """The share of lost prompts less the share of gained prompts."""
        return (self.num_lost - self.num_gained) / self.num_prompts

    @property
    def loss_interval(self) -> tuple[float, float]:
        """The 95% interval of `loss`, which is a difference of paired shares (Bonett and Price, 2012).

        With n prompts, l = (lost + 1) / (n + 2) and g = (gained + 1) / (n + 2), the interval is
        l - g -+ 1.96 sqrt((l + g - (l - g)^2) / (n + 2)).
        """
        size = self.num_prompts + 2
        lost, gained = (self.num_lost + 1) / size, (self.num_gained + 1) / size
        half = Z * math.sqrt((lost + gained - (lost - gained) ** 2) / size)
        return max(-1.0, lost - gained - half), min(1.0, lost - gained + half)

    @property
    def p_value(self) -> float:
        """The p-value of McNemar's exact test (McNemar, 1947).

        It is the chance that lost and gained prompts split at least this unevenly, if both are equally likely: twice
        the binomial tail of min(lost, gained) among lost + gained trials of 1/2, at most 1.
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
    """Results for prompts without gaps between positions, by the name of the method."""
    with_gaps: Mapping[str, Rightness] = field(default_factory=dict)
    """Results for the same prompts with gaps, by method."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further keys for people: tasks, seeds, times."""
    edits: Mapping[str, Rightness] = field(default_factory=dict)
    """Results for prompts that were cut in the middle and linked to their earlier versions, by method."""

    def write(self, path: Path) -> None:
        """Write the file. Raises ConfigError if it cannot be written."""
        content = {"format": FORMAT, "model": self.model_id, "methods": _as_json(self.methods)}
        content |= {"with_gaps": _as_json(self.with_gaps)} if self.with_gaps else {}
        content |= {"edits": _as_json(self.edits)} if self.edits else {}
        content |= self.details
        try:
            path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"{str(path)!r} cannot be written: {error.strerror}; name a file in a folder of yours"
            ) from error

    @classmethod
    def read(cls, path: Path) -> MeasuredLinks:
        """Read the file. Raises ConfigError if it cannot be read, or is no file of measurements."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if (version := content.pop("format")) != FORMAT:
                raise ValueError(f"its format is {version!r:.40}, and this version reads {FORMAT}")
            methods = _methods(content.pop("methods"))
            with_gaps, edits = (_methods(content.pop(name, {})) for name in ("with_gaps", "edits"))
            return cls(str(content.pop("model")), methods, with_gaps, content, edits)
        except OSError as error:
            raise ConfigError(f"link_measurements={str(path)!r} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"link_measurements={str(path)!r} is no file of `foreword pml measure` ({error!r:.80}); write one with "
                "`foreword pml measure --save FILE`"
            ) from error


def _as_json(methods: Mapping[str, Rightness]) -> dict[str, dict[str, int]]:
    return {
        name: {"prompts": rightness.num_prompts, "lost": rightness.num_lost, "gained": rightness.num_gained}
        for name, rightness in methods.items()
    }


def _methods(content: Mapping[str, Mapping[str, Any]]) -> dict[str, Rightness]:
    methods = {}
    for name, entry in content.items():
        prompts, lost, gained = counts = entry["prompts"], entry["lost"], entry["gained"]
        if any(type(count) is not int or count < 0 for count in counts) or not prompts or lost + gained > prompts:
            raise ValueError(f"{lost!r} lost and {gained!r} gained of {prompts!r} prompts")
        methods[name] = Rightness(prompts, lost, gained)
    return methods


@dataclass(frozen=True)
class Gate:
    """Allows the methods that keep enough of the right answers."""

    least: float
    """A method passes if the upper end of the 95% interval of its loss, as a share of all prompts, is at most 1 -
    `least`. If `least` is 0, every method passes, measured or not."""
    measured: MeasuredLinks | None = None

    def check_model(self, model_id: str) -> None:
        """Raise ConfigError if another model was measured."""
        if self.measured is not None and self.measured.model_id != model_id:
            raise ConfigError(
                "link_measurements is of another model, or of other options of its cache; measure this one with "
                "`foreword pml measure --model M --save FILE`, with the same block_size and dtype"
            )

    def serves(self, method: str, *, has_gaps: bool = False) -> bool:
        """Say whether a method passes, for prompts with or without gaps between their positions."""
        return (method == EXACT and not has_gaps) or self._passes(self._measured(has_gaps).get(method))

    def check(self, method: str, *, has_gaps: bool = False) -> None:
        """Raise InvalidRequestError for a method that does not pass."""
        if self.serves(method, has_gaps=has_gaps):
            return
        measured = self._measured(has_gaps)
        score = measured.get(method)
        limit = f"this server lets it lose {1 - self.least:.1%} of the prompts (95% confidence)"
        if has_gaps:
            result = "was not measured" if score is None else f"may lose {score.loss_interval[1]:.1%} ({score})"
            remedy = "" if score is not None else "; the operator can measure it with `foreword pml measure --gaps`"
            raise InvalidRequestError(
                f"link={method!r} {result} with gaps between positions, which this prompt has, and {limit}; send "
                f'"positions": "dense", or leave link out{remedy}'
            )
        if score is None:
            raise InvalidRequestError(
                f"link={method!r} was not measured with this model; measured: "
                f"{', '.join(sorted({EXACT, *measured}))}; the operator can measure it with `foreword pml measure`"
            )
        raise InvalidRequestError(
            f"link={method!r} may lose {score.loss_interval[1]:.1%} with this model ({score}), and {limit}; use "
            "another method, or leave link out"
        )

    def serves_edits(self, method: str) -> bool:
        """Say whether a method passes for edited prompts."""
        return method == EXACT or self._passes(self._all_measured.edits.get(method))

    def check_edits(self, method: str) -> None:
        """Raise InvalidRequestError for a method that does not pass for edited prompts."""
        if self.serves_edits(method):
            return
        score = self._all_measured.edits.get(method)
        if score is None:
            raise InvalidRequestError(
                f"link={method!r} was not measured for edits with this model; the operator can measure it with "
                "`foreword pml measure --tasks independent,parameters,edit --save FILE`, and give FILE with "
                "--link-measurements; leave link out"
            )
        raise InvalidRequestError(
            f"link={method!r} may lose {score.loss_interval[1]:.1%} of edited prompts with this model ({score}), and "
            f"this server lets it lose {1 - self.least:.1%} (95% confidence); use another method, or leave link out"
        )

    def _passes(self, score: Rightness | None) -> bool:
        return not self.least or (score is not None and score.loss_interval[1] <= 1 - self.least)

    @property
    def _all_measured(self) -> MeasuredLinks:
        return self.measured or MeasuredLinks("", {})

    def _measured(self, has_gaps: bool) -> Mapping[str, Rightness]:
        return self._all_measured.with_gaps if has_gaps else self._all_measured.methods


@dataclass(frozen=True, slots=True)
class PartLinks:
    """One part of a prompt that has a source: a document, or a text of a module."""

    name: str
    """The document's number, or the module's path."""
    num_tokens: int
    num_linked_tokens: int
    """Tokens that would be copied; the others are computed in the prompt."""
    num_missing_tokens: int
    """Tokens of the part's source that are not cached, and that would be computed separately before the prompt."""


@dataclass(frozen=True, slots=True)
class LinkExplanation:
    """The tokens that a method would link in a prompt, by part, as if the prompt itself were not cached."""

    method: str
    num_tokens: int
    """Tokens of the prompt."""
    parts: tuple[PartLinks, ...]
    block_size: int
    too_short: tuple[str, ...] = ()
    """The names of the parts without a token in a whole block of their source, each once. They are never linked."""

    @property
    def num_linked_tokens(self) -> int:
        return sum(part.num_linked_tokens for part in self.parts)

    @property
    def missing(self) -> tuple[str, ...]:
        """The names of the parts whose sources are not cached, each once."""
        return tuple(dict.fromkeys(part.name for part in self.parts if part.num_missing_tokens))

    def __str__(self) -> str:
        linked = f"{self.method}: {self.num_linked_tokens} of {self.num_tokens} tokens would be linked"
        missing = f"; not cached: {', '.join(self.missing)}" if self.missing else ""
        if not self.too_short:
            return linked + missing
        short = f"; in no whole block of {self.block_size} tokens, so never linked: {', '.join(self.too_short)}"
        return f"{linked}{missing}{short} (a smaller block_size links them)"


def explain_parts(
    composition: Composition, method: Method, runs: Sequence[tuple[LinkedRun, int]], block_size: int
) -> LinkExplanation:
    """Count linked and missing tokens by part. `runs`: copied run, number of its source's uncached tokens."""
    waiting, parts = deque(runs), []  # each run lies in one part; a method may leave several in a part
    in_blocks: dict[str, bool] = {}
    """Name -> whether any token lies in a whole block of its source."""
    for part, end in zip(composition.parts, composition.begins[1:], strict=True):
        if part.span is not None:
            num_linked = num_missing = 0
            while waiting and waiting[0][0].begin < end:
                run, num_lacking = waiting.popleft()
                num_linked, num_missing = num_linked + run.end - run.begin, max(num_missing, num_lacking)
            whole_end = len(part.span.source.token_ids) // block_size * block_size
            in_blocks[part.name] = in_blocks.get(part.name, False) or part.span.begin < whole_end
            parts.append(PartLinks(part.name, len(part.token_ids), num_linked, num_missing))
    short = tuple(name for name, is_in_block in in_blocks.items() if not is_in_block)
    return LinkExplanation(method.name, composition.num_tokens, tuple(parts), block_size, short)


@dataclass(frozen=True, slots=True)
class LinkedAnswer:
    """A method's answer to a prompt, compared with the plain prompt's answer."""

    method: str
    text: str
    token_ids: tuple[int, ...]
    num_equal_tokens: int
    """The number of leading tokens that are the same as in the answer of the method `all`."""
    is_equal: bool
    """Whether the whole answer has the same tokens as the answer of `all`."""
    link: LinkReport
    """Counts of the prompt's linked, computed and cached tokens."""
    first_token_ms: float
    """Milliseconds from reading the prompt's text to the first token. Of the prompt, only the sources are cached."""


def compare_methods(
    methods: Sequence[str], answer: Callable[[Method], tuple[RequestOutput, float]]
) -> list[LinkedAnswer]:
    """Return each method's answer, in the order of `methods`. If `all` is not in `methods`, its answer comes last.

    `answer` answers the prompt by one method, and returns the output and the milliseconds to the first token. Raises
    InvalidRequestError for unknown methods, or if no method is given.
    """
    if isinstance(methods, str) or not methods:
        raise InvalidRequestError(f"methods={methods!r} is no list of methods; give some, such as {METHODS}")
    parsed = {method.name: method for method in map(Method.parse, (*methods, EXACT))}
    outputs = {name: answer(method) for name, method in parsed.items()}
    exact = outputs[EXACT][0].outputs[0].token_ids
    return [_answer(name, output, elapsed, exact) for name, (output, elapsed) in outputs.items()]


def _answer(name: str, output: RequestOutput, elapsed: float, exact: list[int]) -> LinkedAnswer:
    assert output.link is not None
    first = output.outputs[0]
    pairs = zip(first.token_ids, exact, strict=False)
    num_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    is_equal = first.token_ids == exact
    return LinkedAnswer(name, first.text, tuple(first.token_ids), num_equal, is_equal, output.link, elapsed)
