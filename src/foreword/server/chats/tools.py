"""Tools in a conversation: writes them into the prompt, forces calls, and reads calls from an answer.

Knows tools in the form that chat templates take, and the most common form in which they have models write a call,

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Lisbon"}}
    </tool_call>

A forced call has this form if the template mentions `<tool_call>`, and is bare JSON otherwise; calls that a model makes
freely are read in this form only. Separators are those of templates, so that a call has the same tokens when the
conversation comes back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from foreword.server.api_errors import bad_request
from foreword.text.reply import Call, Part, Text

OPENING, CLOSING = "<tool_call>", "</tool_call>"
MAX_FORCED_CALLS = 16
"""Most forced calls in one answer: a model that is not trained for tools would not stop."""

_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

Tool = Mapping[str, Any]
"""`{"type": "function", "function": {"name", "description", "parameters"}}`, as chat templates take it."""


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Which calls the model may make."""

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] | None = None
    """The only functions that a required call may name; None: all."""
    at_most_one: bool = False


class ToolUse:
    """The tools of one request, and the form in which the model's template writes calls."""

    def __init__(self, tools: Sequence[Tool], choice: ToolChoice, chat_template: str | None) -> None:
        """Raises APIError 400 if the template cannot show tools, or if the choice names a tool that is missing."""
        self._tools = tools
        self._choice = choice if tools else ToolChoice("none")
        self._has_tags = OPENING in (chat_template or "")
        if tools and "tools" not in (chat_template or ""):
            raise bad_request("The model's chat template takes no tools; leave them out.", param="tools")
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
        return self._choice.mode == "required"

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end the answer, besides the client's own."""
        return (CLOSING,) if self._choice.mode == "auto" and self._has_tags and self._choice.at_most_one else ()

    def grammar(self) -> str:
        """Lark grammar of a forced call, or of several."""
        choice = self._choice
        functions = [tool["function"] for tool in self._tools]
        forced = [function for function in functions if choice.names is None or function["name"] in choice.names]
        rules = []
        for number, function in enumerate(forced):
            head = json.dumps(f'{{"name": "{function["name"]}", "arguments": ')
            schema = {**(function.get("parameters") or {"type": "object"}), "x-guidance": _SEPARATORS}
            rules += [f'c{number}: {head} a{number} "}}"', f"a{number}: %json {json.dumps(schema)}"]
        one_of = " | ".join(f"c{number}" for number in range(len(forced)))
        if not self._has_tags:
            return "\n".join([f"start: {one_of}", *rules])
        rules.append(f'call: "{OPENING}\\n" ({one_of}) "\\n{CLOSING}"')
        more = "" if choice.at_most_one else f' ("\\n" call){{0,{MAX_FORCED_CALLS - 1}}}'
        return "\n".join([f"start: call{more}", *rules])

    def reader(self) -> ToolCallReader | None:
        """Reads the calls of one choice; None if its text is left as it is."""
        mode = self._choice.mode
        if mode == "none" or (mode == "auto" and not self._has_tags):
            return None
        return ToolCallReader(bare=not self._has_tags)


class ToolCallReader:
    """Splits one answer, as it comes, into text and calls.

    Holds back text that may begin a call until that is clear, and drops space around calls. Text that only looks like a
    call stays text.
    """

    def __init__(self, *, bare: bool = False) -> None:
        """`bare`: the whole answer is one call, without tags."""
        self.num_calls = 0
        self._bare = bare
        self._in_call = bare
        self._after_call = False
        """Whether nothing was shown since the last call."""
        self._held = ""

    def push(self, text: str) -> list[Part]:
        """Add text of the answer; returns the parts that are clear now, in order."""
        self._held += text
        parts = _joined(self._parts())
        if parts:
            self._after_call = isinstance(parts[-1], Call)
        return parts

    def finish(self) -> list[Part]:
        """End the answer; returns the rest. A call without its closing tag counts if it is complete otherwise."""
        rest, self._held = self._held, ""
        if self._in_call and (call := _read_call(rest)) is not None:
            self.num_calls += 1
            return [call]
        if self._in_call and not self._bare:
            rest = OPENING + rest
        return [Text(rest)] if rest and not (self._after_call and rest.isspace()) else []

    def _parts(self) -> Iterator[Part]:
        while not self._bare:
            if self._in_call:
                end = self._end_of_call()
                if end is None:
                    return
                body, self._held = self._held[:end], self._held[end + len(CLOSING) :]
                self._in_call = False
                call = _read_call(body)
                self.num_calls += call is not None
                yield call if call is not None else Text(OPENING + body + CLOSING)
            else:
                start = self._held.find(OPENING)
                if start < 0:
                    shown = len(self._held) - _num_unclear(self._held)
                    text, self._held = self._held[:shown], self._held[shown:]
                    yield Text(text)
                    return
                yield Text(self._held[:start].rstrip())
                self._held = self._held[start + len(OPENING) :]
                self._in_call = True

    def _end_of_call(self) -> int | None:
        """Position of the first closing tag that is not inside a string of the call's JSON."""
        end = self._held.find(CLOSING)
        while end >= 0:
            try:
                json.loads(self._held[:end])
            except json.JSONDecodeError as error:
                if not error.msg.startswith("Unterminated string"):
                    return end
            except (ValueError, RecursionError):  # a number of 5,000 digits, or lists nested too deeply
                return end
            else:
                return end
            end = self._held.find(CLOSING, end + 1)
        return None


def _joined(parts: Iterator[Part]) -> list[Part]:
    """Drop empty texts and join neighbouring ones."""
    joined: list[Part] = []
    for part in parts:
        if isinstance(part, Text) and joined and isinstance(joined[-1], Text):
            joined[-1] = Text(joined[-1].text + part.text)
        elif part != Text(""):
            joined.append(part)
    return joined


def _num_unclear(text: str) -> int:
    """Number of characters at the end of a text that may be the space before a call and the beginning of its tag."""
    length = next(length for length in range(len(OPENING) - 1, -1, -1) if text.endswith(OPENING[:length]))
    clear = text[: len(text) - length].rstrip()
    return len(text) - len(clear)


def _read_call(body: str) -> Call | None:
    """The call that a JSON object describes; None for anything else."""
    try:
        call = json.loads(body)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments = call.get("arguments", call.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
    return Call(call["name"], arguments)
