"""Methods: which tokens of a composition are copied from their sources, and which are computed in the prompt.

Knows compositions, methods and an engine's prompts; knows nothing of blocks, of what is cached, or of tensors. A linked
token has seen its source's beginning and nothing of the prompt before it. What a method computes besides:

    none        nothing: Prompt Cache (Gim et al., MLSys 2024)
    first-K     the first K tokens of each module or document: EPIC's LegoLink (Hu et al., ICML 2025)
    all         everything: the plain prompt, bit for bit, if its positions have no gaps

Every method computes the rest of a text after an argument, too: in the source, it has seen placeholders instead.
The beginning of a prompt is exact if it is the beginning of its sources; it is computed, or found as a prefix.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

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


@dataclass(frozen=True, slots=True)
class Method:
    """One way to choose what is copied."""

    name: str
    first_k: int | None
    """The first tokens of each module that are computed; None: all of them."""
    after_arguments: bool = True
    """Whether the text after an argument is computed. False shows what that is good for: its answers are wrong."""

    @classmethod
    def parse(cls, name: str | Method) -> Method:
        """The method with this name. Raises InvalidRequestError for an unknown one."""
        if isinstance(name, Method):
            return name
        if name in ("none", "all"):
            return cls(name, 0 if name == "none" else None)
        found = _FIRST.fullmatch(name) if isinstance(name, str) else None
        if found is None:
            raise InvalidRequestError(
                f"link={name!r} is no method; use 'none', 'first-16' (or another number of tokens) or 'all'"
            )
        return cls(name, int(found[1]))

    def num_computed(self, part: Part) -> int:
        """The number of a linkable part's first tokens that are computed in the prompt."""
        assert part.span is not None
        first_k = self.first_k if part.first_k is None or self.first_k is None else part.first_k
        if first_k is None:
            return len(part.token_ids)
        before = part.span.begin - part.span.source.begin  # tokens of the module before this part
        after_argument = part.num_after_argument if self.after_arguments else 0
        return min(len(part.token_ids), max(first_k - before, after_argument, 0))


def link_parts(composition: Composition, method: Method) -> Links:
    """The runs of a composition that a method copies, and its positions.

    Its last token is computed, for the logits of the answer's first one. Raises InvalidRequestError without tokens.
    """
    if not composition.num_tokens:
        raise InvalidRequestError("the prompt is empty; give at least one token")
    runs, spans = [], []
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
    positions: npt.NDArray[np.int32] = composition.positions
    return Links(method.name, tuple(runs), positions, tuple(spans))


def composition_of(prompt: Any, text: Callable[[], SchemaText | None]) -> Composition | None:
    """The parts of a prompt of a schema, or of documents; None for others. Raises InvalidRequestError.

    `text` gives what a tokenizer says of parts of prompts; None: the model has none.
    """
    if isinstance(prompt, Mapping) and "documents" in prompt:
        return compose_documents(prompt, text())
    inner = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return inner.composition if isinstance(inner, SchemaPrompt) else None


def with_links(prompt: Prompt, composition: Composition | None, link: str | Method) -> Prompt:
    """The prompt with its parts linked by a method. Raises InvalidRequestError if it has no parts."""
    method = Method.parse(link)
    if composition is None:
        raise InvalidRequestError(
            f"link={method.name!r} needs parts that can be linked, and this prompt has none; give "
            "{'documents': [...], 'question': ...} or a schema's prompt, or leave link out"
        )
    return replace(prompt, links=link_parts(composition, method))
