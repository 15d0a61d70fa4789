"""ScoreTemplate: the conversation in which a model judges a document by a query, and the tokens of its verdict.

Knows a few lines of text with places for query and document; the model's chat template writes the rest. A score without
the template that a model was trained with means nothing, so a server has none unless it is given one.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.errors import ConfigError, InvalidRequestError
from foreword.text import Tokenizer

TokenIds = npt.NDArray[np.int32]
_PLACE = re.compile(r"\{(query|document|instruction)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTemplate:
    """How pairs of a query and a document are shown to a model."""

    user: str
    """The user's message, with {query} and {document}, and perhaps {instruction}."""
    labels: tuple[str, ...]
    """What the model may answer, each in one token; the first one means that the document is relevant."""
    system: str = ""
    """The system message; none if it is empty."""
    instruction: str = ""
    """What {instruction} is unless a request says otherwise."""
    template_inputs: Mapping[str, Any] = field(default_factory=dict)
    """Inputs of the chat template besides the messages."""

    def __post_init__(self) -> None:
        for name in ("user", "system", "instruction"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name}={getattr(self, name)!r} of the score template is no text")
        missing = {"query", "document"} - set(_PLACE.findall(self.user))
        if missing:
            raise ConfigError(f"the score template's user message has no place {{{min(missing)}}}; write it there")
        labels = self.labels if isinstance(self.labels, list | tuple) else ()
        if not all(isinstance(label, str) for label in labels) or not 1 < len(labels) == len(set(labels)):
            raise ConfigError(f"labels={self.labels!r} of the score template must be two or more different texts")
        if not isinstance(self.template_inputs, Mapping):
            raise ConfigError(f"template_inputs={self.template_inputs!r} of the score template must be a table")

    @classmethod
    def named(cls, name: str) -> ScoreTemplate:
        """One of `KNOWN`, or that of a TOML file with these fields. Raises ConfigError."""
        if name in KNOWN:
            return KNOWN[name]
        try:
            found = tomllib.loads(Path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"score_template={name!r} is neither a TOML file nor one of {', '.join(KNOWN)}: {error}"
            ) from error
        wrong = set(found) - {one.name for one in fields(cls)}
        lacking = {"user", "labels"} - set(found)
        if wrong or lacking:
            what = f"the unknown field {min(wrong)!r}" if wrong else f"no {min(lacking)!r}"
            raise ConfigError(f"score_template={name!r} has {what}; it has user, labels, system, instruction, ...")
        return cls(**found)

    def messages(self, query: str, document: str, instruction: str | None) -> list[dict[str, str]]:
        """The conversation about one document."""
        given = {"query": query, "document": document, "instruction": instruction or self.instruction}
        user = _PLACE.sub(lambda place: given[place[1]], self.user)
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, {"role": "user", "content": user}]

    def tokens(self, tokenizer: Tokenizer, query: str, document: str, instruction: str | None) -> TokenIds:
        """The prompt about one document. Raises InvalidRequestError."""
        messages = self.messages(query, document, instruction)
        return tokenizer.render_chat(messages, template_inputs=self.template_inputs)

    def try_on(self, tokenizer: Tokenizer) -> None:
        """Raises ConfigError if this model's chat template cannot show it."""
        try:
            self.tokens(tokenizer, "query", "document", None)
        except InvalidRequestError as error:
            raise ConfigError(f"the score template cannot be shown to this model: {error}") from error

    def label_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The tokens of the labels. Raises ConfigError for a label of several tokens."""
        found = [tokenizer.encode_part(label) for label in self.labels]
        long = next((label for label, ids in zip(self.labels, found, strict=True) if len(ids) != 1), None)
        if long is not None:
            raise ConfigError(f"the label {long!r} of the score template is not one token; use another word")
        return tuple(ids[0] for ids in found)


KNOWN = {
    "qwen3-reranker": ScoreTemplate(
        system="Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".',
        user="<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}",
        instruction="Given a web search query, retrieve relevant passages that answer the query",
        labels=("yes", "no"),
        template_inputs={"enable_thinking": False},
    )
}
"""Templates by the names of the models that were trained with them."""
