"""Conversations: messages from users in one plain form, and the keywords of `LLM.chat(...)`.

Knows roles, text parts and tool calls; knows no templates, which may want another form (`template_form.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypedDict

from foreword.errors import InvalidRequestError
from foreword.text.picture_marks import joined


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose content is one text and whose tool calls have arguments as mappings, or as texts that are none.

    A content may be a list of text parts, `[{"type": "text", "text": ...}]`, which `joined_parts` makes one; with tool
    calls it may be missing. Raises InvalidRequestError for anything else.
    """
    if isinstance(messages, str | Mapping):
        raise InvalidRequestError(
            'a conversation is a list of messages such as {"role": "user", "content": "Hello"}, '
            f"not a {type(messages).__name__}"
        )
    if not messages:
        raise InvalidRequestError("the conversation is empty; give at least one message")
    return [_plain_message(message, index) for index, message in enumerate(messages)]


def _plain_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"message {index} is a {type(message).__name__}, not a mapping with role and content")
    plain = dict(message)
    if isinstance(plain.get("content"), Sequence) and not isinstance(plain["content"], str):
        plain["content"] = joined_parts([_text_of(part, index) for part in plain["content"]], plain.get("role"))
    if plain.get("tool_calls"):
        plain["content"] = plain.get("content") or ""
        plain["tool_calls"] = [_plain_call(call, index) for call in plain["tool_calls"]]
    for key in ("role", "content"):
        if not isinstance(plain.get(key), str):
            raise InvalidRequestError(f"message {index} needs a string {key!r}, but has {plain.get(key)!r} there")
    return plain


def _text_of(part: Any, index: int) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type", "text") == "text" and isinstance(part.get("text"), str):
        text: str = part["text"]
        return text
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidRequestError(
        f"message {index} has a part of type {kind!r}; this engine takes only text, as "
        '{"type": "text", "text": "..."}'
    )


def _plain_call(call: Any, index: int) -> dict[str, Any]:
    """A tool call with its arguments as a mapping: templates write the JSON themselves."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequestError(f"message {index} has a tool call without a function's name: {call!r:.80}")
    arguments = function.get("arguments")
    if not isinstance(arguments, Mapping):
        arguments = read_arguments(arguments if isinstance(arguments, str) else json.dumps(arguments or {}))
    return {**call, "function": {**function, "arguments": arguments}}


def joined_parts(texts: Sequence[str], role: Any) -> str:
    """The parts of a content as one text: an answer's are pieces of it, those of others stand in lines of their own."""
    return joined(texts, "" if role == "assistant" else "\n")


def read_arguments(text: str) -> Mapping[str, Any] | str:
    """Arguments of an earlier call; the text itself if it is no JSON object.

    Models write such calls too: cut off at the last token, a list, a number that no float holds.
    """
    try:
        arguments = json.loads(text or "{}", parse_constant=_no_number, parse_float=_finite)
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, Mapping) else text


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"no float is as large as {text[:40]}")
    return number


class ChatKeywords(TypedDict, total=False):
    """How a conversation becomes a prompt."""

    tools: Sequence[Mapping[str, Any]] | None
    """Functions in OpenAI's form."""
    chat_template: str | None
    """Jinja template in place of the tokenizer's."""
    chat_template_kwargs: Mapping[str, Any] | None
    """Further inputs of the template."""
    add_generation_prompt: bool
    """Whether the prompt ends where an answer begins (the default), or after the last message."""
    continue_final_message: bool
    """Let the model continue the last message instead of starting a new one."""
    thinking_budget: int | None
    """Most tokens of thinking; after them the model has to answer."""


def template_inputs(rendering: ChatKeywords) -> dict[str, Any]:
    """Inputs of the chat template besides the messages. Raises InvalidRequestError for unknown or wrong keywords."""
    unknown = sorted(set(rendering) - set(ChatKeywords.__annotations__))
    if unknown:
        raise InvalidRequestError(
            f"unknown argument {unknown[0]!r}; known are {', '.join(ChatKeywords.__annotations__)}"
        )
    inputs, tools = rendering.get("chat_template_kwargs") or {}, rendering.get("tools")
    if not isinstance(inputs, Mapping):
        raise InvalidRequestError(f"chat_template_kwargs={inputs!r:.60} is not a mapping such as {{'name': value}}")
    if not tools:
        return dict(inputs)
    if isinstance(tools, str | Mapping) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InvalidRequestError(f"tools={tools!r:.60} is not a list of tools in OpenAI's form")
    return {**inputs, "tools": [dict(tool) for tool in tools]}
