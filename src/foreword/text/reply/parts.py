"""The parts of a reply: text, reasoning and calls, in the order in which the model wrote them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model wrote before its answer, for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A function that the model calls."""

    name: str
    arguments: str
    """JSON text; the beginning of one if the call is not complete."""
    is_complete: bool = True
    """False if the answer ended inside the call."""


Part = Text | Reasoning | Call
