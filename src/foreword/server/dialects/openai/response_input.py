"""Turns a response's input into a chat: items into messages, tools into functions.

Knows the items of /v1/responses and the form that chat templates take. An assistant's turn is several items here
(reasoning, a message, calls) and one message there.
"""

from __future__ import annotations

import base64
import binascii
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from foreword.server.api_errors import bad_request
from foreword.server.chats.tools import ToolChoice
from foreword.server.dialects.openai.caching import Breakpoints, refuse_breakpoint
from foreword.server.dialects.openai.fields import pictures_in
from foreword.server.dialects.openai.messages import arguments_for_template
from foreword.server.dialects.openai.response_fields import (
    CallOutputItem,
    CustomCallItem,
    FunctionCallItem,
    InputMessage,
    Item,
    ReasoningItem,
    ResponsesRequest,
    ResponseTool,
)

logger = logging.getLogger(__name__)

Message = dict[str, Any]

CUSTOM_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""The arguments of the function that a custom tool is for the model."""


def continued(conversation: Sequence[Message], given: str | Sequence[Item], breakpoints: Breakpoints) -> list[Message]:
    """A conversation and the items that follow it, whose breakpoints are taken.

    Raises APIError 400 for items that make no sense there.
    """
    messages = list(conversation)
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    reasoning: str | None = None
    for number, item in enumerate(given):
        where, index = f"input[{number}]", len(messages)
        refuse_breakpoint(item, where)
        match item:
            case InputMessage(role="assistant"):
                if pictures_in(item.content):
                    raise bad_request(
                        f"{where} is the model's, and has a picture; models write text, send it in a user's message",
                        param=f"{where}.content",
                    )
                text = breakpoints.text(item.content, f"{where}.content", index, item.role)
                if reasoning is None and messages and messages[-1].get("tool_calls"):  # text between calls and outputs
                    messages[-1] = {**messages[-1], "content": messages[-1]["content"] + text}
                else:
                    messages.append(_assistant(text, reasoning))
                reasoning = None
            case InputMessage():
                role = "system" if item.role == "developer" else item.role
                text = breakpoints.text(item.content, f"{where}.content", index, role)
                messages.append({"role": role, "content": text, **pictures_in(item.content)})
            case FunctionCallItem() | CustomCallItem():
                if reasoning is not None or not messages or messages[-1]["role"] != "assistant":
                    messages.append(_assistant("", reasoning))
                    reasoning = None
                last = messages[-1] = {**messages[-1]}  # a kept conversation stays as it is
                call = _call(item)
                last["tool_calls"] = [*last.get("tool_calls", ()), call]
                names[item.call_id] = call["function"]["name"]
            case CallOutputItem():
                if item.call_id not in names:
                    message = f"No tool call found for the output with call_id {item.call_id[:100]!r}"
                    raise bad_request(f"{message}; send the call before it", param=f"{where}.call_id")
                result = {"role": "tool", "tool_call_id": item.call_id, "name": names[item.call_id]}
                text = breakpoints.text(item.output, f"{where}.output", index, "tool")
                messages.append({**result, "content": text, **pictures_in(item.output)})
            case ReasoningItem():
                reasoning = (reasoning or "") + _reasoning(item, where)
            case _:
                raise bad_request(
                    f"Items of the type {item.type[:100]!r} are not supported by this server; leave it out",
                    param=f"{where}.type",
                )
    return messages


def _assistant(text: str, reasoning: str | None) -> Message:
    message = {"role": "assistant", "content": text}
    return message if reasoning is None else {**message, "reasoning_content": reasoning}


def _call(item: FunctionCallItem | CustomCallItem) -> Message:
    arguments: Mapping[str, Any] | str
    if isinstance(item, CustomCallItem):
        name, arguments = item.name, {"input": item.input}
    else:
        name, arguments = called_name(item.name, item.namespace), arguments_for_template(item.arguments)
    return {"id": item.call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _reasoning(item: ReasoningItem, where: str) -> str:
    if item.content or item.encrypted_content is None:
        return "".join(part.text for part in item.content or item.summary or ())
    try:
        return base64.b64decode(item.encrypted_content, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        message = "encrypted_content is not of this server; leave the reasoning item out"
        raise bad_request(message, param=f"{where}.encrypted_content") from None


# ---------------------------------------------------------------------- tools


def called_name(name: str, namespace: str | None) -> str:
    """The name under which the model knows a function: templates have no namespaces."""
    return name if namespace is None else f"{namespace}__{name}"


def all_functions(tools: Sequence[ResponseTool]) -> Iterator[tuple[str, str | None, ResponseTool]]:
    """Place, namespace and tool of everything that can be called. Raises APIError 400 for what is not."""
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        refuse_breakpoint(tool, where)
        if tool.type == "namespace":
            for inner, function in enumerate(tool.tools or ()):
                refuse_breakpoint(function, f"{where}.tools[{inner}]")
                yield f"{where}.tools[{inner}]", tool.name, function
        elif tool.type.startswith("web_search"):
            _warn_of_search()
        else:
            yield where, None, tool


@functools.cache
def _warn_of_search() -> None:
    logger.warning("requests have a web_search tool, which this server cannot run; the model does not see it")


def plain_tools(tools: Sequence[ResponseTool]) -> list[dict[str, Any]]:
    """Tools as chat templates take them. Raises APIError 400 for tools that only the vendor can run.

    Agents send web searches unasked, so those alone are left out.
    """
    plain = []
    for where, namespace, tool in all_functions(tools):
        if tool.type not in ("function", "custom"):
            message = f"Tools of the type {tool.type[:100]!r} are not supported by this server; leave it out"
            raise bad_request(message, param=f"{where}.type")
        if tool.name is None:
            raise bad_request(f"Missing required parameter: {where}.name", param=f"{where}.name")
        function: dict[str, Any] = {"name": called_name(tool.name, namespace)}
        description = tool.description
        if tool.type == "custom":
            grammar = (tool.format or {}).get("definition")
            description = "\n\n".join(text for text in (description, grammar) if isinstance(text, str)) or None
        if description is not None:
            function["description"] = description
        parameters = CUSTOM_INPUT if tool.type == "custom" else tool.parameters
        if parameters is not None:
            function["parameters"] = parameters
        plain.append({"type": "function", "function": function})
    return plain


def tool_choice(body: ResponsesRequest) -> ToolChoice:
    """The calls that a response may make. Raises APIError 400 for a choice without its tools."""
    wanted, at_most_one = body.tool_choice, body.parallel_tool_calls is False
    if wanted is None or isinstance(wanted, str):
        if wanted == "required" and not body.tools:
            raise bad_request("tool_choice is only allowed with tools", param="tool_choice")
        return ToolChoice(wanted or "auto", at_most_one=at_most_one)
    if wanted.type == "allowed_tools":
        names = tuple(tool.name for tool in wanted.tools or ())
        if not names:
            raise bad_request("allowed_tools names no tools", param="tool_choice.tools")
        return ToolChoice(wanted.mode, names, at_most_one)
    if wanted.name is None:
        raise bad_request("Missing required parameter: tool_choice.name", param="tool_choice.name")
    return ToolChoice("required", (wanted.name,), at_most_one=True)
