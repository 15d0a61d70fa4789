"""Tools in a conversation, and the calls that an answer may or must make."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from foreword.server.api_errors import bad_request
from foreword.text import Tokenizer
from foreword.text.reply import ReplyReader
from foreword.text.reply.forced import forced_calls, without_patterns
from foreword.text.reply.turn import Turn

Tool = Mapping[str, Any]
"""`{"type": "function", "function": {"name", "description", "parameters"}}`, as chat templates take a tool."""
MOST_PATTERNS = 256
logger = logging.getLogger(__name__)
MOST_NAMED = 3
"""Limit of the patterns in a log line."""
MOST_REMEMBERED = 1_000
"""Limit of the patterns that are logged and remembered."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which calls the model may make."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] | None = None
    """The only functions that a required call may name; None: all functions."""
    at_most_one: bool = False


class ToolUse:
    """The tools of one request, and the calls that its answer may or must make."""

    def __init__(self, tools: Sequence[Tool], choice: ToolChoice, tokenizer: Tokenizer) -> None:
        """Check the choice. Raises APIError 400 if it names a tool that is missing."""
        self.choice = choice if tools else ToolChoice("none")
        self._tools = tools
        self._tokenizer = tokenizer
        self._form = tokenizer.reply_format
        self._relaxed: dict[str, Any] = {}
        """Function name -> the parameters without the patterns that no grammar can follow."""
        if choice.mode == "required" and not tools:
            raise bad_request("tool_choice is only allowed with tools", param="tool_choice")
        tool_names = {tool["function"]["name"] for tool in tools}
        missing = next((name for name in choice.names or () if name not in tool_names), None)
        if missing is not None:
            message = f"tool_choice names the function {missing!r}, which is not among the tools"
            raise bad_request(message, param="tool_choice")

    @property
    def is_forced(self) -> bool:
        return self.choice.mode == "required"

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end the answer, in addition to the client's stop strings."""
        ends_early = self.choice.mode == "auto" and self.choice.at_most_one and self._form is not None
        return self._form.stop if ends_early and self._form is not None else ()

    @property
    def _forced(self) -> list[Mapping[str, Any]]:
        """The functions that a forced call may name."""
        names, functions = self.choice.names, [tool["function"] for tool in self._tools]
        return [function for function in functions if names is None or function["name"] in names]

    def grammar(self) -> str:
        """Return the Lark grammar of a forced call, or of several calls."""
        forced = [
            {**function, "parameters": self._relaxed.get(function["name"], function.get("parameters") or {})}
            for function in self._forced
        ]
        return forced_calls(self._form, forced, self._tokenizer.added_tokens, may_repeat=not self.choice.at_most_one)

    def relax(self, can_follow: Callable[[str], bool]) -> list[str]:
        """Make the next `grammar` ignore the patterns that no grammar can follow. Returns their descriptions for a log.

        It checks at most MOST_PATTERNS different patterns, which take a millisecond each.
        """
        verdicts: dict[str, bool] = {}

        def follows(pattern: str) -> bool:
            if pattern not in verdicts and len(verdicts) < MOST_PATTERNS:
                verdicts[pattern] = can_follow(pattern)
            return verdicts.get(pattern, True)

        descriptions = []
        for function in self._forced:
            self._relaxed[function["name"]], left_out = without_patterns(function.get("parameters") or {}, follows)
            name = f"{function['name']!r:.200}"
            descriptions += [f"{entry.pattern!r:.200} at {entry.place!r:.200} of {name}" for entry in left_out]
        return descriptions

    def reader(self, turn: Turn) -> ReplyReader | None:
        """Return the reader of one choice; None if the choice's text stays as it is."""
        reads_calls = self.choice.mode != "none"
        return turn.reader(tools=self._tools, reads_calls=reads_calls, has_bare_call=self.is_forced)


class LoggedPatterns:
    """The patterns that a server has logged. Only the event loop may use it."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def note(self, left_out: Sequence[str]) -> None:
        """Log the patterns that were not logged before."""
        new = [pattern for pattern in dict.fromkeys(left_out) if pattern not in self._logged]
        new = new[: MOST_REMEMBERED - len(self._logged)]
        if new:
            self._logged.update(new)
            more = f" and {len(new) - MOST_NAMED} more" if len(new) > MOST_NAMED else ""
            logger.warning("forced calls do not enforce the pattern %s%s", "; ".join(new[:MOST_NAMED]), more)
