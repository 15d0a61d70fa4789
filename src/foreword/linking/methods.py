"""Methods: which tokens of a composition are copied from their sources, and which are computed in the prompt.

A linked token has seen its source's beginning and nothing of the prompt before it. What a method computes besides:

    none        nothing: Prompt Cache (Gim et al., MLSys 2024)
    first-K     the first K tokens of each module or document: EPIC's LegoLink (Hu et al., ICML 2025)
    deviation-R the R% of the linkable tokens whose KV deviates most from the plain prompt's, at the second attention
                layer: CacheBlend (Yao et al., EuroSys 2025)
    all         everything: the plain prompt, bit for bit, if its positions have no gaps

Every method computes the rest of a text after an argument, too: in the source, it has seen placeholders instead.
The beginning of a prompt is exact if it is the beginning of its sources; it is computed, or found as a prefix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from foreword.engine import Prompt
from foreword.errors import InvalidRequestError
from foreword.pml.composition import Composition, Part
from foreword.pml.documents import compose_documents
from foreword.pml.layout import SchemaText
from foreword.pml.library import SchemaPrompt
from foreword.request import LinkedRun, Links

_FIRST = re.compile(r"first-([1-9][0-9]{0,5})")
_DEVIATION = re.compile(r"deviation-([1-9][0-9]?)")
IntArray = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]


class Deviations(Protocol):
    """Measures how far links are from the plain prompt."""

    def measure(self, token_ids: IntArray, links: Links, salt: str | None = None) -> FloatArray:
        """The squared deviation of each linked token's KV, [tokens]; it depends on tokens, positions and runs alone.

        `salt`: the tenant's. Raises InvalidRequestError.
        """
        ...


@dataclass(frozen=True, slots=True)
class Method:
    """One way to choose what is copied."""

    name: str
    first_k: int | None
    """The first tokens of each module that are computed; None: all of them."""
    after_arguments: bool = True
    """Whether the text after an argument is computed. False shows what that is good for: its answers are wrong."""
    percent: int | None = None
    """The share of the linkable tokens that are computed because they deviate most; None: the method asks for none."""

    @classmethod
    def parse(cls, name: str | Method) -> Method:
        """The method with this name. Raises InvalidRequestError for an unknown one."""
        if isinstance(name, Method):
            return name
        if name in ("none", "all"):
            return cls(name, 0 if name == "none" else None)
        first, share = (one.fullmatch(name) if isinstance(name, str) else None for one in (_FIRST, _DEVIATION))
        if first is not None:
            return cls(name, int(first[1]))
        if share is not None:
            return cls(name, 0, percent=int(share[1]))
        raise InvalidRequestError(
            f"link={name!r} is no method; use 'none', 'first-16' (or another number of tokens), 'deviation-15' (or "
            "another percentage from 1 to 99) or 'all'"
        )

    def num_computed(self, part: Part) -> int:
        """The number of a linkable part's first tokens that are computed in the prompt."""
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
    """The runs of a composition that a method copies, and its positions.

    Its last token is computed, for the logits of the answer's first one. `deviations` measures for methods that ask
    which tokens deviate, `salt` is the tenant's. Raises InvalidRequestError without tokens, or without `deviations`.
    """
    if not composition.num_tokens:
        raise InvalidRequestError("the prompt is empty; give at least one token")
    runs, spans, may_choose = [], [], np.zeros(composition.num_tokens, np.bool_)
    arrays: dict[int, npt.NDArray[np.int32]] = {}  # of a source, which many runs may share
    for part, begin in zip(composition.parts, composition.begins, strict=False):
        end = begin + len(part.token_ids)
        if part.span is None or end <= composition.num_exact_tokens:
            continue
        spans.append((begin, end))
        first, last = begin + method.num_computed(part), min(end, composition.num_tokens - 1)
        if first < last:
            source = arrays.get(id(part.span.source))
            if source is None:
                source = arrays[id(part.span.source)] = np.array(part.span.source.token_ids, np.int32)
            runs.append(LinkedRun(first, last, source, part.span.begin + first - begin))
            may_choose[first:last] = part.first_k is None
    links = Links(method.name, tuple(runs), composition.positions, tuple(spans))
    if method.percent is None:
        return links
    if deviations is None:
        raise InvalidRequestError(
            f"link={method.name!r} needs the first layers of a model, and this process has none for it; load the model "
            "here with allow_links=True"
        )
    found = deviations.measure(composition.token_ids, links, salt)
    return links.without(most_deviating(found, may_choose, method.percent))


def most_deviating(deviations: FloatArray, may_choose: BoolArray, percent: int) -> BoolArray:
    """Which tokens are among the given share of those that may be chosen, rounded up, [tokens].

    Of tokens that deviate equally the first are chosen.
    """
    [indices] = np.nonzero(may_choose)
    order = np.argsort(-deviations[indices], kind="stable")
    chosen = np.zeros_like(may_choose)
    chosen[indices[order[: -(-len(indices) * percent // 100)]]] = True
    return chosen


def composition_of(prompt: Any, text: Callable[[], SchemaText | None]) -> Composition | None:
    """The parts of a prompt of a schema, or of documents; None for others. Raises InvalidRequestError.

    `text` gives what a tokenizer says of parts of prompts; None: the model has none.
    """
    if isinstance(prompt, Mapping) and "documents" in prompt:
        return compose_documents(prompt, text())
    inner = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return inner.composition if isinstance(inner, SchemaPrompt) else None


def with_links(
    prompt: Prompt, composition: Composition | None, link: str | Method, deviations: Deviations | None = None
) -> Prompt:
    """The prompt with its parts linked by a method. Raises InvalidRequestError if it has no parts.

    `deviations`: None if the engine links nothing.
    """
    method = Method.parse(link)
    if composition is None:
        raise InvalidRequestError(
            f"link={method.name!r} needs parts that can be linked, and this prompt has none; give "
            "{'documents': [...], 'question': ...} or a schema's prompt, or leave link out"
        )
    return replace(prompt, links=link_parts(composition, method, deviations, prompt.extra_keys.salt))
