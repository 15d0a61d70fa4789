"""Tools in a conversation: writes them into the prompt, forces calls, and names the calls of an answer.

Knows OpenAI's tools and choices of tools. `foreword.text.reply` knows the forms in which models write calls.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from foreword.server.api_errors import bad_request
from foreword.server.calls import tools_for_template
from foreword.server.dialect import ChatRequest, NamedToolChoice, Tool
from foreword.text import Tokenizer
from foreword.text.reply import Call, ReplyReader
from foreword.text.reply.forced import Function, forced_calls
from foreword.text.reply.turn import Turn


def call_as_json(call: Call) -> dict[str, Any]:
    """The call in OpenAI's form; it gets an id unless the model wrote one."""
    call_id = call.id or f"call_{secrets.token_hex(12)}"
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


class ToolUse:
    """The tools of one request, and which of them may or must be called."""

    def __init__(self, body: ChatRequest, tokenizer: Tokenizer | None) -> None:
        """Raises APIError 400 if the template cannot show tools, or if the choice names a tool that is missing."""
        self._tools = body.tools or []
        self._choice = body.tool_choice or ("auto" if self._tools else "none")
        self.is_parallel = body.parallel_tool_calls is not False
        """Whether an answer may have several calls."""
        self._tokenizer = tokenizer
        self._form = None if tokenizer is None else tokenizer.reply_format
        template = "" if tokenizer is None else tokenizer.chat_template or ""
        if self._tools and "tools" not in template:
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
        if self._choice != "auto" or self.is_parallel or self._form is None:
            return ()
        return self._form.stop

    def grammar(self) -> str | None:
        """Lark grammar of the answer if a call is forced; None if not."""
        forced = [Function(tool.function.name, tool.function.parameters or {}) for tool in self._forced()]
        if not forced or self._tokenizer is None:
            return None
        may_repeat = self.is_parallel and self._choice == "required"
        return forced_calls(self._form, forced, self._tokenizer.added_tokens, may_repeat=may_repeat)

    def _forced(self) -> Sequence[Tool]:
        """The tools of which the model must call one."""
        if self._choice == "required":
            return self._tools
        if isinstance(self._choice, NamedToolChoice):
            return [tool for tool in self._tools if tool.function.name == self._choice.function.name]
        return []

    def reader(self, turn: Turn | None) -> ReplyReader | None:
        """Reads one choice; None if its text is left as it is."""
        if turn is None:
            return None
        tools = self.for_template.get("tools", ())
        return turn.reader(tools=tools, reads_calls=self._choice != "none", has_bare_call=bool(self._forced()))

    def finish_reason(self, reason: str | None, num_calls: int) -> str | None:
        """OpenAI's finish reason: "tool_calls" if the model chose to call, "stop" if a named function was forced."""
        chose = num_calls and not isinstance(self._choice, NamedToolChoice)
        return "tool_calls" if chose and reason == "stop" else reason
