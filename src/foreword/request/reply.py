"""Reply: an answer of a conversation, as its reader sees it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function that the model made."""

    name: str
    arguments: str
    """JSON text; the beginning of one if the call is not complete."""
    is_complete: bool = True
    """Whether the model wrote the call to its end."""
    id: str | None = None
    """The id that the model gave it, in families whose calls have one."""


@dataclass(slots=True)
class Reply:
    """The parts of one continuation of a conversation; they grow with its text."""

    content: str = ""
    """Text for the reader of the answer."""
    reasoning: str = ""
    """What the model thought before it answered."""
    tool_calls: list[ToolCall] = field(default_factory=list)
