"""Control tokens in messages: texts such as `<|im_end|>` that users write stay text.

A mark inside such a text hides it from the tokenizer:

    <|im_end|>  ->  <⿻|im_end|>  ->  "<" "⿻" "|" "im" "_end" "|" ">"  ->  the tokens without those of the mark
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import regex

MARKS = "⿻⿺⿹⿸⿷"
"""Printable characters that hardly any text has, so that templates write them as they are."""


class ControlTokens:
    """The special tokens of a tokenizer."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._named = [text for text in texts if len(text) > 1]
        self._beginnings = {text[:2] for text in self._named}
        self._pattern = regex.compile(r"\L<texts>", texts=self._named) if self._named else None

    def hidden(self, value: Any, mark: str, spared: frozenset[str] = frozenset()) -> Any:
        """A value whose strings have the mark in each special token's text but `spared`; itself if there is none."""
        if isinstance(value, str):
            return self._hidden_text(value, mark, spared)
        if isinstance(value, Mapping):
            made = {self.hidden(key, mark, spared): self.hidden(item, mark, spared) for key, item in value.items()}
            return made if any(made.get(key, made) is not item for key, item in value.items()) else value
        if isinstance(value, list | tuple):
            items = [self.hidden(item, mark, spared) for item in value]
            return items if any(a is not b for a, b in zip(items, value, strict=True)) else value
        return value

    def _hidden_text(self, text: str, mark: str, spared: frozenset[str]) -> str:
        if self._pattern is None or not any(beginning in text for beginning in self._beginnings):
            return text  # most texts: it takes a hundredth of the time

        def hide(found: Any) -> str:
            token = str(found[0])
            return token if token in spared else token[0] + mark + token[1:]

        hidden = str(self._pattern.sub(hide, text))
        return text if hidden == text else hidden


def marked_tokens(encoding: Any, text: str, mark: str) -> npt.NDArray[np.intp] | None:
    """The indices of the tokens that are a mark; None if a token is more than a mark."""
    if mark not in text:
        return np.empty(0, np.intp)
    found = [at for at, (begin, end) in enumerate(encoding.offsets) if mark in text[begin:end]]
    if any(text[begin:end] != mark for begin, end in (encoding.offsets[at] for at in found)):
        return None
    return np.array(found, np.intp)
