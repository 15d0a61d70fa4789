"""Template form: how messages have to be written so that a chat template shows all of them.

Clients' messages are not changed: a form writes new ones for each rendering. How a message is written depends
only on the messages before it, so a conversation that grows keeps its beginning.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from foreword.text.reply.arguments import properties_of
from foreword.text.reply.format import GENERIC, ReplyFormat, family

Message = dict[str, Any]
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
_NINE = re.compile(r"[a-zA-Z0-9]{9}")
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "required": []}


def written_calls(calls: Sequence[Mapping[str, Any]], reply: ReplyFormat | None) -> str:
    """The text of calls, in the format in which the model writes them in replies."""
    form = _call_form(reply)
    one_by_one = [_written(call["function"], form, number) for number, call in enumerate(calls)]
    between = str(form.get("between", ""))
    return f"{form.get('begin', '')}{between.join(one_by_one)}{form.get('end', '')}"


def tool_instructions(tools: Sequence[Mapping[str, Any]], reply: ReplyFormat | None) -> str:
    """A text that lists a model's tools and says how to call them."""
    lines = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools]
    example = written_calls([{"function": {"name": "NAME", "arguments": {"KEY": "VALUE"}}}], reply)
    return "\n".join(["You can call these functions:", *lines, "", "To call a function, answer with:", example])


def _call_form(reply: ReplyFormat | None) -> Mapping[str, Any]:
    form = reply.call_form if reply is not None and reply.call_form is not None else family(GENERIC).call_form
    assert form is not None
    return form


def _written(function: Mapping[str, Any], form: Mapping[str, Any], number: int) -> str:
    opening, closing = (
        str(form[key])
        .replace("{name}", function["name"])
        .replace("{number}", str(number))
        .replace("{id}", f"{number:09d}")
        for key in ("open", "close")
    )
    return f"{opening}{_arguments(function['arguments'], form.get('arguments'))}{closing}"


def _arguments(arguments: Any, tags: Mapping[str, str] | None) -> str:
    if isinstance(arguments, str):
        return arguments
    if tags is None:
        return json.dumps(arguments, ensure_ascii=False)
    mark = tags.get("string", "")
    pairs = []
    for key, value in arguments.items():
        text = f"{mark}{value}{mark}" if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        pairs.append(tags["open"].replace("{key}", key) + text + tags["close"])
    return tags.get("between", "").join(pairs)


@dataclass(frozen=True, slots=True)
class TemplateForm:
    """The form of messages that one template needs. The defaults change nothing."""

    content: Literal["text", "parts"] = "text"
    """Whether a content is one text, or a list with one part."""
    system: Literal["kept", "question"] = "kept"
    """A system message at the beginning stays there, or becomes the beginning of the first question."""
    systems: Literal["kept", "joined"] = "kept"
    """Several system messages at the beginning stay apart, or become one."""
    later_system: Literal["kept", "question"] = "kept"
    """A later system message. kept: it stays. question: it is added to the end of the question before it, or becomes a
    question if no question comes before it."""
    questions: Literal["kept", "joined"] = "kept"
    answers: Literal["kept", "joined"] = "kept"
    """Consecutive messages of one role stay apart, or become one."""
    calls: Literal["together", "one by one", "written"] = "together"
    """Parallel calls. together: in one message. one by one: each has its own message, followed by its result. written:
    calls are text."""
    call_content: Literal["empty", "none", "missing"] = "empty"
    """The content of an answer with calls and without text."""
    beside_call: Literal["kept", "before", "written"] = "kept"
    """The text of a message that also has calls. kept: it stays. before: it becomes a message before the calls.
    written: all calls of the conversation become text, and their results questions."""
    arguments: Literal["object", "text"] = "object"
    broken_arguments: Literal["kept", "wrapped"] = "kept"
    """Arguments that are not a JSON object stay a text, or become an object that holds the text."""
    ids: Literal["kept", "nine", "numbered", "indexed"] = "kept"
    """Ids of calls. kept: they stay. nine: 9 letters and digits (Mistral). numbered, indexed: `functions.NAME:NUMBER`
    (Kimi); NUMBER counts the calls of the conversation (numbered) or of the message (indexed)."""
    results: Literal["tool", "question"] = "tool"
    """Results of calls. tool: messages with a role of their own. question: messages of the user."""
    reasoning: Literal["reasoning_content", "reasoning", "thinking", "parts"] = "reasoning_content"
    """The field for an answer's reasoning; parts: the reasoning is a part of the content."""
    no_tools: Literal["missing", "empty"] = "missing"
    """Without tools, the template gets no list of tools, or an empty list."""
    tools: Literal["kept", "filled", "written"] = "kept"
    """Tools. kept: they stay. filled: they get the fields that clients may leave out. written: they become text of the
    system message."""
    reply: ReplyFormat | None = None
    """The form in which calls are written as text."""

    def write(
        self, messages: Sequence[Mapping[str, Any]], inputs: Mapping[str, Any]
    ) -> tuple[list[Message], dict[str, Any]]:
        """Write messages and the template's inputs in this form."""
        if self.beside_call == "written" and any(turn.get("tool_calls") and turn["content"] for turn in messages):
            return replace(self, beside_call="kept", calls="written", results="question").write(messages, inputs)
        inputs, tools_text = self._tools(dict(inputs))
        converted = self._identified(messages)
        converted = [answer for message in self._one_by_one(converted) for answer in self._answer(message)]
        converted = self._systems(converted, tools_text)
        converted = self._joined(converted)
        if self.content == "parts":
            converted = [_in_parts(message) for message in converted]
        return converted, inputs

    def _tools(self, inputs: dict[str, Any]) -> tuple[dict[str, Any], str]:
        tools = inputs.get("tools")
        if not tools and self.no_tools == "empty":
            return {**inputs, "tools": []}, ""
        if not tools or self.tools == "kept":
            return inputs, ""
        if self.tools == "filled":
            return {**inputs, "tools": [_filled(tool) for tool in tools]}, ""
        del inputs["tools"]
        return inputs, tool_instructions(tools, self.reply)

    def _identified(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Give calls ids that the template takes, and give results these ids and the names of their functions."""
        converted: list[Message] = []
        ids: dict[Any, tuple[Any, str]] = {}
        number = 0
        for source in messages:
            message = {key: value for key, value in source.items() if value is not None}
            if message["role"] == "developer":
                message["role"] = "system"
            if message.get("tool_calls"):
                calls = []
                for index, call in enumerate(message["tool_calls"]):
                    name, old = call["function"]["name"], call.get("id")
                    new = self._id(old, name, index if self.ids == "indexed" else number)
                    number += 1
                    ids[old] = new, name
                    calls.append(call if new is None else {**call, "id": new})
                message["tool_calls"] = calls
            elif message["role"] == "tool" and message.get("tool_call_id") in ids:
                new, name = ids[message.get("tool_call_id")]
                message = {"name": name, **message}
                if new is not None:
                    message["tool_call_id"] = new
            converted.append(message)
        return converted

    def _id(self, old: Any, name: str, number: int) -> Any:
        if self.ids == "kept":
            return old
        text = old if isinstance(old, str) else ""
        if self.ids != "nine":
            return text if re.fullmatch(rf"functions\.{re.escape(name)}:\d+", text) else f"functions.{name}:{number}"
        if _NINE.fullmatch(text):
            return text
        value = int.from_bytes(hashlib.sha256((text or f"{name}:{number}").encode()).digest())
        return "".join(_DIGITS[value // len(_DIGITS) ** place % len(_DIGITS)] for place in range(9))

    def _one_by_one(self, messages: list[Message]) -> list[Message]:
        """Give each of several calls its own message with its result after it, if the template needs that."""
        if self.calls != "one by one":
            return messages
        converted: list[Message] = []
        at = 0
        while at < len(messages):
            message = messages[at]
            at += 1
            calls = message.get("tool_calls") or ()
            if len(calls) < 2:
                converted.append(message)
                continue
            results = []
            while at < len(messages) and messages[at]["role"] == "tool":
                results.append(messages[at])
                at += 1
            for number, call in enumerate(calls):
                base = message if not number else {"role": "assistant", "content": ""}
                converted.append({**base, "tool_calls": [call]})
                answers = [result for result in results if result.get("tool_call_id") == call.get("id")]
                converted += answers
                results = [result for result in results if result not in answers]
            converted += results
        return converted

    def _answer(self, message: Message) -> list[Message]:
        """Write a message of the assistant or of a tool in this form, as one or two messages."""
        if message["role"] == "tool" and self.results == "question":
            return [{"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}]
        if message["role"] != "assistant":
            return [message]
        before: list[Message] = []
        if message.get("tool_calls"):
            message = {**message, "tool_calls": [self._call(call) for call in message["tool_calls"]]}
            text = message["content"]
            if self.calls == "written":
                calls = written_calls(message.pop("tool_calls"), self.reply)
                message["content"] = f"{text}\n{calls}" if text else calls
            elif text and self.beside_call == "before":
                before, message["content"] = [{"role": "assistant", "content": text}], ""
            if not message["content"] and self.call_content == "none":
                message["content"] = None
            elif not message["content"] and self.call_content == "missing":
                del message["content"]
        return [*before, self._with_reasoning(message)]

    def _call(self, call: Mapping[str, Any]) -> Message:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str) and self.broken_arguments == "wrapped" and self.calls != "written":
            arguments = {"arguments": arguments}
        if not isinstance(arguments, str) and self.arguments == "text":
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}

    def _with_reasoning(self, message: Message) -> Message:
        thought = message.get("reasoning_content")
        if thought is None or self.reasoning == "reasoning_content":
            return message
        message = {key: value for key, value in message.items() if key != "reasoning_content"}
        if self.reasoning != "parts":
            return {**message, self.reasoning: thought}
        parts = [{"type": "thinking", "thinking": thought}]
        if message.get("content"):
            parts.append({"type": "text", "text": message["content"]})
        return {**message, "content": parts}

    def _systems(self, messages: list[Message], tools_text: str) -> list[Message]:
        """Move system messages to where the template takes them, and add the text about tools."""
        head = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
        first, converted = messages[:head], []
        if tools_text:
            text = "\n\n".join(filter(None, [*(system["content"] for system in first), tools_text]))
            first = [{"role": "system", "content": text}]
        elif len(first) > 1 and "joined" in (self.systems, self.system):
            first = [{"role": "system", "content": "\n\n".join(system["content"] for system in first)}]
        if self.system == "kept":
            converted, first = list(first), []
        for message in messages[head:]:
            if message["role"] == "system" and self.later_system == "question":
                if converted and converted[-1]["role"] == "user":
                    converted[-1] = {**converted[-1], "content": f"{converted[-1]['content']}\n\n{message['content']}"}
                    continue
                message = {**message, "role": "user"}
            if first and message["role"] == "user":
                text = "\n\n".join([*(system["content"] for system in first), message["content"]])
                message, first = {**message, "content": text}, []
            converted.append(message)
        return [*({**system, "role": "user"} for system in first), *converted]

    def _joined(self, messages: list[Message]) -> list[Message]:
        """Join consecutive messages of one role, if the template needs that."""
        joined = {"user": self.questions == "joined", "assistant": self.answers == "joined"}
        converted: list[Message] = []
        for message in messages:
            if converted and joined.get(message["role"]) and converted[-1]["role"] == message["role"]:
                converted[-1] = _both(converted[-1], message)
            else:
                converted.append(message)
        return converted


def explained_form(form: TemplateForm, reply: ReplyFormat | None) -> ReplyFormat | None:
    """The format of replies with this template form: `reply`, unless the prompt explains how to write calls."""
    if form.tools != "written":
        return reply
    return family(GENERIC if reply is None else "hermes")


def _both(first: Message, second: Message) -> Message:
    both = {**first, **second}
    for key in ("content", "reasoning_content"):
        texts = [text for text in (first.get(key), second.get(key)) if isinstance(text, str) and text]
        if texts:
            both[key] = "\n\n".join(texts)
    calls = [*(first.get("tool_calls") or ()), *(second.get("tool_calls") or ())]
    return {**both, "tool_calls": calls} if calls else both


def _in_parts(message: Message) -> Message:
    if not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _filled(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add the fields that templates read without checking whether a tool has them."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    schema = function["parameters"] if isinstance(function.get("parameters"), Mapping) else {}
    properties = {
        name: {"type": _type_of(member), "description": "", **member} if isinstance(member, Mapping) else member
        for name, member in properties_of(schema).items()
    }
    parameters = {**NO_PARAMETERS, **schema, "properties": properties}
    return {**tool, "type": "function", "function": {"description": "", **function, "parameters": parameters}}


def _type_of(schema: Mapping[str, Any]) -> str:
    """Find the type of a schema without `type` in its other fields; "string" if these do not say it."""
    for key in ("anyOf", "oneOf"):
        for variant in schema[key] if isinstance(schema.get(key), list) else ():
            if isinstance(variant, Mapping) and isinstance(variant.get("type"), str) and variant["type"] != "null":
                return str(variant["type"])
    return "object" if "properties" in schema else "string"
