"""Places: where a part of a conversation ends in its prompt.

Templates may write parts in another order than clients send them, so a place is found by comparison: a conversation
that differs right after the place is rendered too, and the texts are equal up to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OTHER_TOOL = {"type": "function", "function": {"name": "\x01", "description": "\x01", "parameters": {}}}


@dataclass(frozen=True, slots=True)
class Place:
    """The end of a part of a conversation."""

    message: int | None
    """Index of the message; None: the part is the beginning of the tools."""
    size: int | None = None
    """Length of the part: characters of the message's content, or number of tools; None: the whole message."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a template renders."""

    messages: Sequence[Mapping[str, Any]]
    inputs: Mapping[str, Any]
    """The template's inputs besides the messages."""
    is_open: bool = True
    """Whether the prompt goes on after the last message, as where an answer begins."""

    def differing_after(self, place: Place) -> Conversation:
        """A conversation like this one up to a place, and different right after it."""
        if place.message is None:
            tools = [*self.inputs.get("tools", ())[: place.size], OTHER_TOOL]
            return Conversation(self.messages, {**self.inputs, "tools": tools}, self.is_open)
        at = place.message
        if place.size is None:
            at += 1
            if at == len(self.messages):
                return Conversation(self.messages, self.inputs, is_open=False)
            changed = {name: self.messages[at][name] for name in self.messages[at] if name not in _SAID_BESIDE}
            changed["content"] = _other(self.messages[at]["content"])
        else:
            content = self.messages[at]["content"]
            changed = {**self.messages[at], "content": content[: place.size] + _other(content[place.size :])}
        return Conversation([*self.messages[:at], changed, *self.messages[at + 1 :]], self.inputs, self.is_open)


_SAID_BESIDE = ("tool_calls", "reasoning_content")


def _other(text: str) -> str:
    """A text that differs from the first character on."""
    return "\x02" if text.startswith("\x01") else "\x01"


def common_beginning(text: Sequence[Any], other: Sequence[Any]) -> int:
    """The number of items that two texts, or lists, begin with in common. Compares each about twice."""
    known, most = 0, min(len(text), len(other))
    while known < most:
        middle = (known + most + 1) // 2
        if text[known:middle] == other[known:middle]:
            known = middle
        else:
            most = middle - 1
    return known
