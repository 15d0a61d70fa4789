"""Tools in a conversation: which of them may or must be called in an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from foreword.server.api_errors import bad_request
from foreword.text import Tokenizer
from foreword.text.reply import ReplyReader
from foreword.text.reply.forced import Function, forced_calls, without_patterns
from foreword.text.reply.turn import Turn

Tool = Mapping[str, Any]
"""`{"type": "function", "function": {"name", "description", "parameters"}}`, as chat templates take it."""
Message = dict[str, Any]
"""A message, or a call in it, as chat templates take it."""
MOST_PATTERNS = 256
logger = logging.getLogger(__name__)
MOST_TOLD = 3
"""Patterns that a log line names."""
MOST_KNOWN = 1_000
"""Patterns that are remembered; beyond these nothing is logged."""


def function_tool(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """A function that may be called; None stands for what its client leaves out."""
    given = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in given.items() if value is not None}}


def earlier_call(call_id: str, name: str, arguments: Any) -> Message:
    """A call in an earlier answer."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def take_call(waiting: list[Message], call_id: str | None, name: str | None, *, any_name: bool) -> Message | None:
    """The call that a result answers, which waits no longer: that of its id, else the first of its name.

    `any_name`: whether the first call of another name will do. None if no call waits for it.
    """
    of_id = [call for call in waiting if call_id is not None and call["id"] == call_id]
    of_name = [call for call in waiting if call["function"]["name"] == name]
    found = next(iter([*of_id, *of_name, *(waiting if any_name else ())]), None)
    if found is not None:
        waiting.remove(found)
    return found


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which calls the model may make."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] | None = None
    """The only functions that a required call may name; None: all."""
    at_most_one: bool = False


class ToolUse:
    """The tools of one request, and which of them may or must be called."""

    def __init__(self, tools: Sequence[Tool], choice: ToolChoice, tokenizer: Tokenizer) -> None:
        """Raises APIError 400 if the choice names a tool that is missing."""
        self.choice = choice if tools else ToolChoice("none")
        self._tools = tools
        self._tokenizer = tokenizer
        self._form = tokenizer.reply_format
        self._relaxed: dict[str, Any] = {}
        """By function: its parameters without the patterns that no grammar can follow."""
        if choice.mode == "required" and not tools:
            raise bad_request("tool_choice is only allowed with tools", param="tool_choice")
        known = {tool["function"]["name"] for tool in tools}
        missing = next((name for name in choice.names or () if name not in known), None)
        if missing is not None:
            message = f"tool_choice names the function {missing!r}, which is not among the tools"
            raise bad_request(message, param="tool_choice")

    @property
    def is_forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.choice.mode == "required"

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end the answer, besides the client's own."""
        ends_early = self.choice.mode == "auto" and self.choice.at_most_one and self._form is not None
        return self._form.stop if ends_early and self._form is not None else ()

    @property
    def _forced(self) -> list[Mapping[str, Any]]:
        """The functions that a forced call may name."""
        names, functions = self.choice.names, [tool["function"] for tool in self._tools]
        return [function for function in functions if names is None or function["name"] in names]

    def grammar(self) -> str:
        """Lark grammar of a forced call, or of several."""
        forced = [
            Function(function["name"], self._relaxed.get(function["name"], function.get("parameters") or {}))
            for function in self._forced
        ]
        return forced_calls(self._form, forced, self._tokenizer.added_tokens, may_repeat=not self.choice.at_most_one)

    def relax(self, can_follow: Callable[[str], bool]) -> list[str]:
        """Leave the patterns that no grammar can follow out of the next `grammar`; a description of each, for a log.

        Looks at MOST_PATTERNS different ones: each takes a millisecond.
        """
        known: dict[str, bool] = {}

        def follows(pattern: str) -> bool:
            if pattern not in known and len(known) < MOST_PATTERNS:
                known[pattern] = can_follow(pattern)
            return known.get(pattern, True)

        told = []
        for function in self._forced:
            self._relaxed[function["name"]], left_out = without_patterns(function.get("parameters") or {}, follows)
            told += [f"{one.pattern!r:.200} at {one.place!r:.200} of {function['name']!r:.200}" for one in left_out]
        return told

    def reader(self, turn: Turn) -> ReplyReader | None:
        """Reads one choice; None if its text is left as it is."""
        reads_calls = self.choice.mode != "none"
        return turn.reader(tools=self._tools, reads_calls=reads_calls, has_bare_call=self.is_forced)


class ToldPatterns:
    """One server's memory of what it has told. Belongs to the event loop."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def note(self, left_out: Sequence[str]) -> None:
        """Log the patterns that were not told yet."""
        new = [one for one in dict.fromkeys(left_out) if one not in self._known][: MOST_KNOWN - len(self._known)]
        if new:
            self._known.update(new)
            more = f" and {len(new) - MOST_TOLD} more" if len(new) > MOST_TOLD else ""
            logger.warning("forced calls do not enforce the pattern %s%s", "; ".join(new[:MOST_TOLD]), more)
