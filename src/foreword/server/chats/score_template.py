"""ScoreTemplate: the conversation in which a model judges a text, and the tokens of its verdict.

A template is a few lines of text with placeholders for the judged texts: a document and a query, or an input alone. The
model's chat template adds the rest of the prompt. Scores mean nothing without the template that a model was trained
with, so the server has no default.
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
"""Names of the placeholders that a template's user message must have: for rankings, and for classifications."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreTemplate:
    """The messages that show texts to a model that judges them."""

    user: str
    """The user's message, with {query} and {document}, or with {input}. It may have {instruction} too."""
    labels: tuple[str, ...]
    """The possible answers, one token each. In a ranking, the first label means that the document is relevant."""
    system: str = ""
    """The system message; empty: no system message."""
    instruction: str = ""
    """The default of {instruction}."""
    template_inputs: Mapping[str, Any] = field(default_factory=dict)
    """Inputs of the chat template, except the messages."""

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
        """Return the template of an option, which is one of `KNOWN` or is read from a TOML file with these fields.

        The user message must have exactly these `places`, and may have {instruction}. Raises ConfigError.
        """
        template = KNOWN[name] if name in KNOWN else cls._read(option, name, places)
        present = template._places()
        if present != set(places):
            wrong = present - set(places)
            has = (
                f"the place {{{min(wrong)}}}, which it does not fill"
                if wrong
                else "no place for " + " and ".join(f"{{{place}}}" for place in places if place not in present)
            )
            needed = " and ".join(f"{{{place}}}" for place in places)
            raise ConfigError(f"the user message of {option}={name!r} has {has}; write {needed}")
        return template

    def _places(self) -> set[str]:
        """The placeholders of the user message, except {instruction}."""
        return set(_PLACE.findall(self.user)) - {"instruction"}

    @classmethod
    def _read(cls, option: str, name: str, places: tuple[str, ...]) -> ScoreTemplate:
        try:
            table = tomllib.loads(Path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            known = ", ".join(each for each, template in KNOWN.items() if template._places() == set(places))
            is_none = f"is neither a TOML file nor one of {known}" if known else "is no TOML file"
            raise ConfigError(f"{option}={name!r} {is_none}: {error}") from error
        wrong = set(table) - {key.name for key in fields(cls)}
        lacking = {"user", "labels"} - set(table)
        if wrong or lacking:
            what = f"the unknown field {min(wrong)!r}" if wrong else f"no {min(lacking)!r}"
            raise ConfigError(f"{option}={name!r} has {what}; it has user, labels, system, instruction, ...")
        return cls(**table)

    def messages(self, texts: Mapping[str, str], instruction: str | None = None) -> list[dict[str, str]]:
        """Return the conversation about `texts` (placeholder -> text). Raises InvalidRequestError."""
        if instruction is not None and "{instruction}" not in self.user:
            raise InvalidRequestError(
                "the server's template has no place for an instruction; leave it out, or start the server with "
                "{instruction} in the template's user message"
            )
        texts = {"instruction": instruction or self.instruction, **texts}
        user = _PLACE.sub(lambda place: texts[place[1]], self.user)
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, {"role": "user", "content": user}]

    def tokens(self, tokenizer: Tokenizer, texts: Mapping[str, str], instruction: str | None = None) -> TokenIds:
        """Return the token ids of the prompt about `texts` (placeholder -> text). Raises InvalidRequestError."""
        return tokenizer.render_chat(self.messages(texts, instruction), template_inputs=self.template_inputs)

    def label_ids(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """Return the tokens of the labels. Raises ConfigError for a label of several tokens, or two equal labels."""
        encoded = [tokenizer.encode_part(label) for label in self.labels]
        long = next((label for label, ids in zip(self.labels, encoded, strict=True) if len(ids) != 1), None)
        if long is not None:
            raise ConfigError(f"the label {long!r} of a template is not one token; use another word")
        ids = [token_ids[0] for token_ids in encoded]
        if len(set(ids)) < len(ids):
            raise ConfigError(f"two labels of {self.labels!r} are the same token; use other words")
        return tuple(ids)


class Judge(NamedTuple):
    """A template, and the token ids of its labels for the server's model."""

    template: ScoreTemplate
    label_ids: tuple[int, ...]

    @classmethod
    def open(cls, option: str, name: str | None, places: tuple[str, ...], tokenizer: Tokenizer | None) -> Judge | None:
        """Open an option's judge; None without a `name`. Raises ConfigError if the template does not fit the model."""
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
