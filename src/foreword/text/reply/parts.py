"""The parts of a reply, in the order in which the model wrote them."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.request import ToolCall


@dataclass(frozen=True, slots=True)
class Text:
    """Text for the reader of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thought before it answered."""

    text: str


Call = ToolCall
Part = Text | Reasoning | Call


def joined(parts: list[Part]) -> list[Part]:
    """Join neighbouring parts of one kind, and drop empty parts."""
    merged: list[Part] = []
    for part in parts:
        last = merged[-1] if merged else None
        if isinstance(part, Text) and isinstance(last, Text):
            merged[-1] = Text(last.text + part.text)
        elif isinstance(part, Reasoning) and isinstance(last, Reasoning):
            merged[-1] = Reasoning(last.text + part.text)
        elif isinstance(part, Call) or part.text:
            merged.append(part)
    return merged
