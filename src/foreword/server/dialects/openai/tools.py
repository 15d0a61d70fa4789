"""Tools in a conversation: writes them into the prompt, forces calls, and reads calls from an answer.

Knows OpenAI's tools and the most common form in which chat templates have models write a call,

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Lisbon"}}
    </tool_call>

A forced call has this form if the template mentions `<tool_call>`, and is bare JSON otherwise; calls that a model makes
freely are read in this form only. Separators are those of templates, so that a call has the same tokens when the
conversation comes back.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from foreword.server.api_errors import bad_request
from foreword.server.calls import tools_for_template
from foreword.server.dialects.openai.fields import ChatRequest, NamedToolChoice, Tool

OPENING, CLOSING = "<tool_call>", "</tool_call>"
MAX_FORCED_CALLS = 16
"""Most forced calls in one answer: a model that is not trained for tools would not stop."""

_SEPARATORS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a model made."""

    name: str
    arguments: str
    """JSON text."""
    call_id: str

    def as_json(self) -> dict[str, Any]:
        """The call in OpenAI's form."""
        return {"id": self.call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolUse:
    """The tools of one request, and the form in which the model's template writes calls."""

    def __init__(self, body: ChatRequest, chat_template: str | None) -> None:
        """Raises APIError 400 if the template cannot show tools, or if the choice names a tool that is missing."""
        self._tools = body.tools or []
        self._choice = body.tool_choice or ("auto" if self._tools else "none")
        self._is_parallel = body.parallel_tool_calls is not False
        self._has_tags = OPENING in (chat_template or "")
        if self._tools and "tools" not in (chat_template or ""):
            raise bad_request("The model's chat template takes no tools; leave them out.", param="tools")
        if self._choice != "none" and not self._tools:
            raise bad_request("tool_choice is only allowed with tools", param="tool_choice")
        if isinstance(self._choice, NamedToolChoice) and not self._forced():
            raise bad_request(
                f"tool_choice names the function {self._choice.function.name!r}, which is not among the tools",
                param="tool_choice",
            )
        if self._forced() and body.response_format is not None and body.response_format.type != "text":
            raise bad_request("response_format cannot be combined with a forced tool_choice", param="tool_choice")

    @property
    def for_template(self) -> dict[str, Any]:
        """Inputs of the chat template; tools are in them even with tool_choice "none", so that the prefix stays the
        same.
        """
        return tools_for_template(self._tools)

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end the answer, besides the client's own."""
        free = self._choice == "auto" and self._has_tags
        return (CLOSING,) if free and not self._is_parallel else ()

    def grammar(self) -> str | None:
        """Lark grammar of the answer if a call is forced; None if not."""
        forced = self._forced()
        if not forced:
            return None
        rules = []
        for number, tool in enumerate(forced):
            head = json.dumps(f'{{"name": "{tool.function.name}", "arguments": ')
            schema = {**(tool.function.parameters or {"type": "object"}), "x-guidance": _SEPARATORS}
            rules += [f'c{number}: {head} a{number} "}}"', f"a{number}: %json {json.dumps(schema)}"]
        one_of = " | ".join(f"c{number}" for number in range(len(forced)))
        if not self._has_tags:
            return "\n".join([f"start: {one_of}", *rules])
        rules.append(f'call: "{OPENING}\\n" ({one_of}) "\\n{CLOSING}"')
        more = f' ("\\n" call){{0,{MAX_FORCED_CALLS - 1}}}' if self._may_repeat else ""
        return "\n".join([f"start: call{more}", *rules])

    @property
    def _may_repeat(self) -> bool:
        return self._is_parallel and self._choice == "required"

    def _forced(self) -> Sequence[Tool]:
        """The tools of which the model must call one."""
        if self._choice == "required":
            return self._tools
        if isinstance(self._choice, NamedToolChoice):
            return [tool for tool in self._tools if tool.function.name == self._choice.function.name]
        return []

    def reader(self) -> ToolCallReader | None:
        """Reads the calls of one choice; None if its text is left as it is."""
        if self._choice == "none" or (self._choice == "auto" and not self._has_tags):
            return None
        return ToolCallReader(bare=not self._has_tags)

    def finish_reason(self, reason: str | None, num_calls: int) -> str | None:
        """OpenAI's finish reason: "tool_calls" if the model chose to call, "stop" if a named function was forced."""
        chose = num_calls and not isinstance(self._choice, NamedToolChoice)
        return "tool_calls" if chose and reason == "stop" else reason


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

    def push(self, text: str) -> list[str | ToolCall]:
        """Add text of the answer; returns the parts that are clear now, in order."""
        self._held += text
        parts = _joined(self._parts())
        if parts:
            self._after_call = isinstance(parts[-1], ToolCall)
        return parts

    def finish(self) -> list[str | ToolCall]:
        """End the answer; returns the rest. A call without its closing tag counts if it is complete otherwise."""
        rest, self._held = self._held, ""
        if self._in_call and (call := _read_call(rest)) is not None:
            self.num_calls += 1
            return [call]
        if self._in_call and not self._bare:
            rest = OPENING + rest
        return [rest] if rest and not (self._after_call and rest.isspace()) else []

    def _parts(self) -> Iterator[str | ToolCall]:
        while not self._bare:
            if self._in_call:
                end = self._end_of_call()
                if end is None:
                    return
                body, self._held = self._held[:end], self._held[end + len(CLOSING) :]
                self._in_call = False
                call = _read_call(body)
                self.num_calls += call is not None
                yield call if call is not None else OPENING + body + CLOSING
            else:
                start = self._held.find(OPENING)
                if start < 0:
                    shown = len(self._held) - _num_unclear(self._held)
                    text, self._held = self._held[:shown], self._held[shown:]
                    yield text
                    return
                yield self._held[:start].rstrip()
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


def _joined(parts: Iterator[str | ToolCall]) -> list[str | ToolCall]:
    """Drop empty texts and join neighbouring ones."""
    joined: list[str | ToolCall] = []
    for part in parts:
        if part and isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part:
            joined.append(part)
    return joined


def _num_unclear(text: str) -> int:
    """Number of characters at the end of a text that may be the space before a call and the beginning of its tag."""
    length = next(length for length in range(len(OPENING) - 1, -1, -1) if text.endswith(OPENING[:length]))
    clear = text[: len(text) - length].rstrip()
    return len(text) - len(clear)


def _read_call(body: str) -> ToolCall | None:
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
    return ToolCall(call["name"], arguments, f"call_{secrets.token_hex(12)}")
