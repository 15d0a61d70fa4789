"""A tokenizer of words, so that positions can be counted by eye, and plain messages around them."""

from __future__ import annotations

import re

from foreword.errors import ChatTemplateError
from foreword.pml.layout import SchemaText
from foreword.pml.library import Library, LoadedSchema
from foreword.pml.schema import Role

PLACEHOLDER = 0


class Words:
    """One token a word; white space has none."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {"<unk>": PLACEHOLDER}

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._ids.setdefault(word, len(self._ids)) for word in re.findall(r"\S+", text))

    def spell(self, token_ids: object) -> str:
        words = list(self._ids)
        return " ".join(words[token_id] for token_id in token_ids)  # type: ignore[attr-defined]


def around(previous: Role | None, role: Role) -> tuple[str, str]:
    if previous == role:
        raise ChatTemplateError(f"two {role} messages follow each other")
    return f" <{role}> ", f" </{role}> "


def library(words: Words | None = None, *, opening: str = "") -> Library:
    words = words or Words()
    return Library(SchemaText(words.encode, words.encode(opening), PLACEHOLDER, around, lambda _role: " <assistant> "))


def load(text: str, words: Words | None = None, *, opening: str = "") -> LoadedSchema:
    return library(words, opening=opening).load(text)
