"""Conversations: messages from users in one plain form, and the keywords of `LLM.chat(...)`."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, NoReturn, TypedDict

from foreword.errors import InvalidRequestError

MARK = f"\x02picture {secrets.token_hex(16)}\x03"
"""The mark of a picture in a text. No client can guess it, so each mark in a text stands for a picture."""
PICTURES = "\x02pictures"
"""The key of a plain message's list of its pictures' files, in the order of their marks. Callers do not use it."""
OTHER_TOOL = {"type": "function", "function": {"name": "\x01", "description": "\x01", "parameters": {}}}


def pictures_of(messages: Sequence[Mapping[str, Any]]) -> list[Any]:
    """The files of all pictures of a conversation, in the order of their marks."""
    return [file for message in messages for file in message.get(PICTURES, ())]


def pictures_in_order(
    messages: Sequence[Mapping[str, Any]], write: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
) -> list[Any]:
    """The files of all pictures, in the order that their marks have after `write`, which may move texts."""
    files, numbers = pictures_of(messages), count()
    if (num_marks := sum(str(turn["content"]).count(MARK) for turn in messages)) != len(files):
        raise InvalidRequestError(f"the messages have {len(files)} pictures, but {num_marks} places for them")
    numbered = [
        {**turn, "content": re.sub(MARK, lambda m: f"{m[0]}{next(numbers)};", turn["content"])} for turn in messages
    ]
    contents = [message.get("content") or "" for message in write(numbered)]
    texts = [body if isinstance(body, str) else "".join(part.get("text", "") for part in body) for body in contents]
    return [files[int(number)] for number in re.findall(rf"{MARK}(\d+);", "".join(texts))]


def in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write messages for a template that shows pictures: a content with a picture's mark becomes a list of parts."""
    return [_in_parts({key: value for key, value in message.items() if key != PICTURES}) for message in messages]


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content, parts = message.get("content"), list[dict[str, Any]]()
    if content is None or (isinstance(content, str) and MARK not in content):
        return message
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        if part.get("type") != "text":
            parts.append(part)
            continue
        for number, text in enumerate(part["text"].split(MARK)):
            parts += [{"type": "image"}] if number else []
            parts += [{"type": "text", "text": text}] if text else []
    return {**message, "content": parts}


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Bring messages into plain form: one text as content, and mappings as arguments of tool calls.

    A content may be a list of text parts, `[{"type": "text", "text": ...}]`, which `joined_parts` joins. A message with
    tool calls may lack its content. Arguments that are not a JSON object stay a text. Raises InvalidRequestError.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Iterable):
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
    if calls := plain.get("tool_calls"):
        if not isinstance(calls, Sequence):
            raise InvalidRequestError(f"message {index} has tool_calls={calls!r:.60}, which is no list of calls")
        plain["content"] = plain.get("content") or ""
        plain["tool_calls"] = [_plain_call(call, index) for call in calls]
    if not isinstance(plain.get("tool_call_id"), Hashable):
        raise InvalidRequestError(f"message {index} has tool_call_id={plain['tool_call_id']!r:.60}; give a text")
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
    if not isinstance(call.get("id"), Hashable):
        raise InvalidRequestError(f"message {index} has a tool call with id={call['id']!r:.60}; give a text")
    arguments = function.get("arguments")
    if not isinstance(arguments, Mapping):
        arguments = read_arguments(arguments if isinstance(arguments, str) else json.dumps(arguments or {}))
    return {**call, "function": {**function, "arguments": arguments}}


def joined_parts(texts: Sequence[str], role: Any) -> str:
    """Join the parts of a content. Parts get their own lines, except parts of an answer and pictures."""
    between = "" if role == "assistant" else "\n"
    if MARK not in texts:
        return between.join(texts)
    whole = ""
    for text in texts:
        whole += text if not whole or text == MARK or whole.endswith(MARK) else between + text
    return whole


def read_arguments(text: str) -> Mapping[str, Any] | str:
    """Read the arguments of an earlier call. Returns the text itself if it is not a JSON object.

    Models also write arguments that are cut off, that are a list, or that have a number too large for a float.
    """
    try:
        arguments = parse_json(text or "{}")
    except ValueError:
        return text
    return arguments if isinstance(arguments, Mapping) else text


def parse_json(text: str) -> Any:
    """Parse a JSON text.

    Raises ValueError if the text is not JSON, has NaN, has a number that no float can hold, or nests too deeply for
    Python.
    """
    try:
        return json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except RecursionError:
        raise ValueError("lists and objects are too deep inside each other") from None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number


def function_tool(name: str, description: str | None, parameters: Any) -> dict[str, Any]:
    """A tool in OpenAI's form, for a function that may be called. Fields that are None are left out."""
    fields = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in fields.items() if value is not None}}


def earlier_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call of an earlier answer in OpenAI's form."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def take_call(
    waiting: list[dict[str, Any]], call_id: str | None, name: str | None, *, any_name: bool
) -> dict[str, Any] | None:
    """Remove from `waiting` the call that a result answers: the call with its id, else the first with its name.

    `any_name`: if no call has the id or the name, take the first call of any name. Returns the call; None if no call
    waits.
    """
    of_id = [call for call in waiting if call_id is not None and call["id"] == call_id]
    of_name = [call for call in waiting if call["function"]["name"] == name]
    answered = next(iter([*of_id, *of_name, *(waiting if any_name else ())]), None)
    if answered is not None:
        waiting.remove(answered)
    return answered


class ChatKeywords(TypedDict, total=False):
    """How a conversation becomes a prompt."""

    tools: Sequence[Mapping[str, Any]] | None
    """Functions in OpenAI's form."""
    chat_template: str | None
    """Jinja template to use instead of the tokenizer's."""
    chat_template_kwargs: Mapping[str, Any] | None
    """Further inputs of the template."""
    add_generation_prompt: bool
    """Whether the prompt ends where an answer begins (the default), or after the last message."""
    continue_final_message: bool
    """Let the model continue the last message instead of starting a new one."""
    thinking_budget: int | None
    """The most tokens of thinking. After these, the model must answer."""


def template_inputs(rendering: ChatKeywords) -> dict[str, Any]:
    """Inputs of the chat template, without the messages. Raises InvalidRequestError for unknown or wrong keywords."""
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


@dataclass(frozen=True, slots=True)
class Place:
    """The end of a part of a conversation."""

    message: int | None
    """Index of the message; None: the part is the beginning of the tools."""
    size: int | None = None
    """Length of the part: characters of the message's content, or number of tools; None: the whole message."""


class Rendering(TypedDict, total=False):
    """How a conversation is rendered."""

    add_generation_prompt: bool | None
    """False: the result ends after the last message. Otherwise it ends where the assistant's answer begins."""
    continue_final_message: bool
    """Whether the result ends inside the last message."""
    template_inputs: Mapping[str, Any] | None
    """Further values for the template, such as `tools`. A template ignores values that it does not know."""
    chat_template: str | None
    """Template to use instead of the tokenizer's."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages and inputs that a template renders."""

    messages: Sequence[Mapping[str, Any]]
    inputs: Mapping[str, Any]
    """The template's inputs, without the messages."""
    is_open: bool = True
    """Whether the prompt ends with the beginning of an answer. Otherwise it ends after the last message."""
    continues: bool = False
    """Whether the prompt ends inside the last message."""
    chat_template: str | None = None
    """The template; None: the tokenizer's."""

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, Any]], rendering: Rendering) -> Conversation:
        """Return the conversation of messages from users. Raises InvalidRequestError."""
        plain, is_open = plain_messages(messages), rendering.get("add_generation_prompt")
        continues = rendering.get("continue_final_message", False)
        if continues and is_open:
            raise InvalidRequestError(
                "continue_final_message=True and add_generation_prompt=True cannot be combined; leave one out"
            )
        if continues and not plain[-1]["content"].strip():
            raise InvalidRequestError("continue_final_message=True needs a last message with text to continue")
        inputs = rendering.get("template_inputs") or {}
        return cls(plain, inputs, is_open is not False, continues, rendering.get("chat_template"))

    def differing_after(self, place: Place) -> Conversation:
        """Make a conversation that is equal to this one up to a place, and differs right after it."""
        if place.message is None:
            tools = [*self.inputs.get("tools", ())[: place.size], OTHER_TOOL]
            return replace(self, inputs={**self.inputs, "tools": tools})
        at = place.message
        if place.size is None:
            at += 1
            if at == len(self.messages):
                return replace(self, is_open=False)
            changed = {name: self.messages[at][name] for name in self.messages[at] if name not in _SAID_BESIDE}
            changed["content"] = _other(self.messages[at]["content"])
        else:
            content = self.messages[at]["content"]
            changed = {**self.messages[at], "content": content[: place.size] + _other(content[place.size :])}
        return replace(self, messages=[*self.messages[:at], changed, *self.messages[at + 1 :]])


_SAID_BESIDE = ("tool_calls", "reasoning_content")


def _other(text: str) -> str:
    """A text that differs from the given one in its first character."""
    return "\x02" if text.startswith("\x01") else "\x01"


def common_beginning(text: Sequence[Any], other: Sequence[Any]) -> int:
    """The number of leading items that two texts, or lists, have in common. Compares each item about twice."""
    common, limit = 0, min(len(text), len(other))
    while common < limit:
        middle = (common + limit + 1) // 2
        if text[common:middle] == other[common:middle]:
            common = middle
        else:
            limit = middle - 1
    return common
