"""ScoreTemplate: the conversation in which a model judges a text, and the tokens of its verdict.

Knows a few lines of text with places for what is judged: a document by a query, or an input alone. The model's chat
template writes the rest. A score without the template that a model was trained with means nothing, so a server has none
unless it is given one.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foreword.errors import ConfigError, InvalidRequestError
from foreword.text import Tokenizer

TokenIds = npt.NDArray[np.int32]
_PLACE = re.compile(r"\{(query|document|input|instruction)\}")
RANKING, CLASSIFYING = ("query", "document"), ("input",)
"""The places that a template must have, by what it is for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTemplate:
    """How texts are shown to a model that judges them."""

    user: str
    """The user's message, with {query} and {document}, or with {input}; and perhaps {instruction}."""
    labels: tuple[str, ...]
    """What the model may answer, each in one token; in a ranking, the first means that the document is relevant."""
    system: str = ""
    """The system message; none if it is empty."""
    instruction: str = ""
    """What {instruction} is unless a request says otherwise."""
    template_inputs: Mapping[str, Any] = field(default_factory=dict)
    """Inputs of the chat template besides the messages."""

    def __post_init__(self) -> None:
        for name in ("user", "system", "instruction"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name}={getattr(self, name)!r} of a template is no text")
        labels = self.labels if isinstance(self.labels, list | tuple) else ()
        if not all(isinstance(label, str) for label in labels) or not 1 < len(labels) == len(set(labels)):
            raise ConfigError(f"labels={self.labels!r} of a template must be two or more different texts")
        if _PLACE.search(self.system):
            raise ConfigError(f"system={self.system!r} of a template has a place; places stand in user alone")
        if not isinstance(self.template_inputs, Mapping):
            raise ConfigError(f"template_inputs={self.template_inputs!r} of a template must be a table")

    @classmethod
    def named(cls, option: str, name: str, places: tuple[str, ...]) -> ScoreTemplate:
        """One of `KNOWN`, or that of a TOML file with these fields, for an option that needs these places.

        Raises ConfigError.
        """
        template = KNOWN[name] if name in KNOWN else cls._read(option, name)
        found = set(_PLACE.findall(template.user)) - {"instruction"}
        if found != set(places):
            wrong = found - set(places)
            has = (
                f"the place {{{min(wrong)}}}, which it does not fill"
                if wrong
                else "no place for " + " and ".join(f"{{{place}}}" for place in places if place not in found)
            )
            raise ConfigError(
                f"the user message of {option}={name!r} has {has}; write {' and '.join(f'{{{one}}}' for one in places)}"
            )
        return template

    @classmethod
    def _read(cls, option: str, name: str) -> ScoreTemplate:
        try:
            found = tomllib.loads(Path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{option}={name!r} is neither a TOML file nor one of {', '.join(KNOWN)}: {error}"
            ) from error
        wrong = set(found) - {one.name for one in fields(cls)}
        lacking = {"user", "labels"} - set(found)
        if wrong or lacking:
            what = f"the unknown field {min(wrong)!r}" if wrong else f"no {min(lacking)!r}"
            raise ConfigError(f"{option}={name!r} has {what}; it has user, labels, system, instruction, ...")
        return cls(**found)

    def messages(self, given: Mapping[str, str], instruction: str | None = None) -> list[dict[str, str]]:
        """The conversation about what is `given` for each place. Raises InvalidRequestError."""
        if instruction is not None and "{instruction}" not in self.user:
            raise InvalidRequestError(
                "the server's template has no place for an instruction; leave it out, or start the server with "
                "{instruction} in the template's user message"
            )
        given = {"instruction": instruction or self.instruction, **given}
        user = _PLACE.sub(lambda place: given[place[1]], self.user)
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, {"role": "user", "content": user}]

    def tokens(self, tokenizer: Tokenizer, given: Mapping[str, str], instruction: str | None = None) -> TokenIds:
        """The prompt about what is `given` for each place. Raises InvalidRequestError."""
        return tokenizer.render_chat(self.messages(given, instruction), template_inputs=self.template_inputs)

    def label_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The tokens of the labels. Raises ConfigError for a label of several tokens."""
        found = [tokenizer.encode_part(label) for label in self.labels]
        long = next((label for label, ids in zip(self.labels, found, strict=True) if len(ids) != 1), None)
        if long is not None:
            raise ConfigError(f"the label {long!r} of a template is not one token; use another word")
        ids = [own[0] for own in found]
        if len(set(ids)) < len(ids):
            raise ConfigError(f"two labels of {self.labels!r} are the same token; use other words")
        return tuple(ids)


class Judge(NamedTuple):
    """A template that a server's model was tried with."""

    template: ScoreTemplate
    label_ids: tuple[int, ...]

    @classmethod
    def open(cls, option: str, name: str | None, places: tuple[str, ...], tokenizer: Tokenizer | None) -> Judge | None:
        """That of an option, if it is given. Raises ConfigError if this model's chat template cannot show it."""
        if name is None:
            return None
        template = ScoreTemplate.named(option, name, places)
        if tokenizer is None:
            raise ConfigError(f"{option} needs a tokenizer, and this model has none; leave it out, or give --tokenizer")
        label_ids = template.label_ids(tokenizer)
        try:
            template.tokens(tokenizer, dict.fromkeys(places, "text"))
        except InvalidRequestError as error:
            raise ConfigError(f"{option} cannot be shown to this model: {error}") from error
        return cls(template, label_ids)


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
