"""Reads bodies of requests to OpenAI's, Anthropic's and Google's APIs as conversations for a chat template.

The server's dialects read such bodies too, and refuse fields that this server does not support. Recorded bodies come
from any server, so the linter reads the fields that reach a prompt and ignores all others. A part that is not text
becomes its type in brackets, because templates have no place for it. A picture also gets a digest, so that different
pictures become different texts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from foreword.errors import InvalidRequestError
from foreword.text.conversation import earlier_call, function_tool, joined_parts, read_arguments, take_call

Plain = dict[str, Any]
BILLING_HEADER = "x-anthropic-billing-header:"
"""Start of a block that coding agents put before the system prompt. The block differs by request, and is left out."""
PICTURE_KINDS = ("image", "image_url", "input_image", "inlineData", "inline_data")
DIGEST_DIGITS = 12
_TEXTS = frozenset(("text", "input_text", "output_text", "reasoning_text", "summary_text"))
ANTHROPIC_BLOCKS = frozenset("tool_use tool_result thinking redacted_thinking".split())
SIGNATURES = frozenset("thought thoughtSignature thought_signature".split())
"""Fields of Google's parts that carry no content."""


@dataclass(slots=True)
class Conversation:
    """Messages in the form for chat templates, and the template's other inputs."""

    messages: list[Plain]
    inputs: Plain = field(default_factory=dict)

    @property
    def texts(self) -> tuple[str, ...]:
        """The tools as one text, if there are tools, and each message as one text."""
        parts = [self.inputs["tools"], *self.messages] if "tools" in self.inputs else self.messages
        return tuple(json.dumps(part, ensure_ascii=False) for part in parts)


def read_body(body: Mapping[str, Any]) -> Conversation | None:
    """Read the conversation of a body; None if it has no conversation. Raises InvalidRequestError, naming the keys."""
    if not {"contents", "messages", "input"} & set(body):
        return None
    try:
        if "contents" in body:
            conversation = _google(body)
        elif "input" in body:
            conversation = _responses(body)
        else:
            conversation = _anthropic(body) if _is_anthropic(body) else _openai(body)
        if body.get("chat_template_kwargs"):
            conversation.inputs |= dict(body["chat_template_kwargs"])
        if body.get("reasoning_effort"):
            conversation.inputs["reasoning_effort"] = body["reasoning_effort"]
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(
            f"the body with the keys {', '.join(list(body)[:6])} cannot be read ({type(error).__name__}: "
            f"{str(error)[:60]}); give the body that an API takes"
        ) from error
    if not conversation.messages:
        raise InvalidRequestError("the body holds no message; give at least one")
    return conversation


def _is_anthropic(body: Mapping[str, Any]) -> bool:
    if "system" in body or any("input_schema" in tool for tool in body.get("tools") or ()):
        return True
    contents = [message.get("content") for message in body["messages"]]
    blocks = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and part.get("type") in ANTHROPIC_BLOCKS for part in blocks)


def _text(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text")
    return str(part["text"]) if kind in _TEXTS else _in_brackets(kind, part)


def _in_brackets(kind: str, part: Any) -> str:
    """Return the text that stands for a part that is not text."""
    if kind not in PICTURE_KINDS:
        return f"[{kind}]"
    source = part.get(kind, part.get("image_url", part.get("source"))) if isinstance(part, Mapping) else None
    if isinstance(source, Mapping):  # other fields, such as detail and type, do not change what the picture shows
        source = source.get("data") or source.get("url") or source
    digest = hashlib.sha256(json.dumps(source or part, sort_keys=True).encode()).hexdigest()
    return f"[{kind} {digest[:DIGEST_DIGITS]}]"


def _joined(content: Any, role: str) -> str:
    return content if isinstance(content, str) else joined_parts([_text(part) for part in content or ()], role)


def _message(role: str, content: Any) -> Plain:
    return {"role": "system" if role == "developer" else role, "content": _joined(content, role)}


def _call(call_id: Any, name: Any, arguments: Any) -> Plain:
    return earlier_call(call_id, name, read_arguments(arguments) if isinstance(arguments, str) else arguments or {})


def _with_tools(messages: list[Plain], tools: Iterable[tuple[Mapping[str, Any], Any]]) -> Conversation:
    """Make a conversation with tools; `tools` has pairs of a tool and its parameters."""
    functions = [function_tool(tool["name"], tool.get("description"), parameters) for tool, parameters in tools]
    return Conversation(messages, {"tools": functions} if functions else {})


# ------------------------------------------------------------------------ OpenAI


def _openai(body: Mapping[str, Any]) -> Conversation:
    messages = []
    for message in body["messages"]:
        plain = _message(message["role"], message.get("content"))
        plain |= {name: message[name] for name in ("name", "tool_call_id", "reasoning_content") if message.get(name)}
        if message.get("tool_calls"):
            plain["tool_calls"] = [
                _call(call.get("id"), call["function"]["name"], call["function"].get("arguments"))
                for call in message["tool_calls"]
            ]
        messages.append(plain)
    functions = [tool["function"] for tool in body.get("tools") or () if "function" in tool]
    return _with_tools(messages, ((function, function.get("parameters")) for function in functions))


def _responses(body: Mapping[str, Any]) -> Conversation:
    items = body["input"]
    messages: list[Plain] = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    names: dict[Any, Any] = {}
    reasoning = ""
    for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
        match item.get("type") or "message":
            case "message" if (
                item["role"] == "assistant" and not reasoning and messages and "tool_calls" in messages[-1]
            ):
                messages[-1]["content"] += _joined(item["content"], "assistant")  # text between calls and outputs
            case "message":
                messages.append(_message(item["role"], item["content"]))
                if item["role"] == "assistant":
                    messages[-1] |= {"reasoning_content": reasoning} if reasoning else {}
                    reasoning = ""
            case "function_call" | "custom_tool_call" as kind:
                if reasoning or not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": ""})
                    messages[-1] |= {"reasoning_content": reasoning} if reasoning else {}
                    reasoning = ""
                arguments = {"input": item["input"]} if kind == "custom_tool_call" else item.get("arguments")
                names[item["call_id"]] = item["name"]
                messages[-1].setdefault("tool_calls", []).append(_call(item["call_id"], item["name"], arguments))
            case "function_call_output" | "custom_tool_call_output":
                result = {"role": "tool", "tool_call_id": item["call_id"], "name": names.get(item["call_id"], "")}
                messages.append({**result, "content": _joined(item.get("output"), "tool")})
            case "reasoning":
                reasoning += _joined(item.get("content") or item.get("summary"), "assistant")
            case _:
                pass  # an item that only the vendor makes, such as a search
    tools = [tool for tool in body.get("tools") or () if tool.get("name")]
    conversation = _with_tools(messages, ((tool, tool.get("parameters")) for tool in tools))
    if (body.get("reasoning") or {}).get("effort"):
        conversation.inputs["reasoning_effort"] = body["reasoning"]["effort"]
    return conversation


# --------------------------------------------------------------------- Anthropic


def _anthropic(body: Mapping[str, Any]) -> Conversation:
    system, messages = body.get("system") or [], []
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else list(system)
    if blocks and _text(blocks[0]).startswith(BILLING_HEADER):
        del blocks[0]
    if blocks:
        messages.append(_message("system", blocks))
    names: dict[Any, Any] = {}
    for role, same in groupby(body["messages"], lambda message: message["role"]):
        parts = [
            {"type": "text", "text": part} if isinstance(part, str) else part
            for message in same
            for part in ([message["content"]] if isinstance(message["content"], str) else message["content"])
        ]
        if role == "assistant":
            calls = [part for part in parts if part.get("type") == "tool_use"]
            names |= {call["id"]: call["name"] for call in calls}
            thoughts = "".join(part["thinking"] for part in parts if part.get("type") == "thinking")
            plain = _message(role, [part for part in parts if part.get("type", "text") not in ANTHROPIC_BLOCKS])
            plain |= {"reasoning_content": thoughts} if thoughts else {}
            if calls:
                plain["tool_calls"] = [_call(call["id"], call["name"], call.get("input")) for call in calls]
            messages.append(plain)
            continue
        for is_result, some in groupby(parts, lambda part: part.get("type") == "tool_result"):
            if not is_result:
                messages.append(_message(role, list(some)))
                continue
            for part in some:
                text = ("Error: " if part.get("is_error") else "") + _joined(part.get("content"), "tool")
                call_id = part["tool_use_id"]
                result = {"role": "tool", "tool_call_id": call_id, "name": names.get(call_id, "")}
                messages.append({**result, "content": text})
    tools = [tool for tool in body.get("tools") or () if "input_schema" in tool]
    return _with_tools(messages, ((tool, tool["input_schema"]) for tool in tools))


# ------------------------------------------------------------------------ Google


def _google(body: Mapping[str, Any]) -> Conversation:
    system = _field(body, "systemInstruction")
    messages: list[Plain] = []
    if system:
        texts = [system] if isinstance(system, str) else [_google_text(part) for part in system["parts"]]
        messages.append({"role": "system", "content": joined_parts(texts, "system")})
    contents = body["contents"]
    waiting: list[Plain] = []
    num_calls = 0
    for content in [{"parts": [{"text": contents}]}] if isinstance(contents, str) else contents:
        parts = [part for part in content["parts"] if set(part) - SIGNATURES]
        if content.get("role") == "model":
            if parts and (not messages or messages[-1]["role"] != "assistant"):  # otherwise it continues the answer
                messages.append({"role": "assistant", "content": ""})
                waiting = []
            for part in parts:
                call = _field(part, "functionCall")
                if call is None:
                    name = "reasoning_content" if part.get("thought") else "content"
                    messages[-1][name] = messages[-1].get(name, "") + _google_text(part)
                else:
                    waiting.append(_call(call.get("id") or f"call{num_calls:05d}", call["name"], call.get("args")))
                    num_calls += 1
                    messages[-1].setdefault("tool_calls", []).append(waiting[-1])
            continue
        for is_result, some in groupby(parts, lambda part: _field(part, "functionResponse") is not None):
            if not is_result:
                messages.append({"role": "user", "content": joined_parts(list(map(_google_text, some)), "user")})
                continue
            for result in (_field(part, "functionResponse") for part in some):
                answered = take_call(waiting, result.get("id"), result["name"], any_name=True) or {"id": ""}
                text = json.dumps(result.get("response") or {}, ensure_ascii=False)
                call_id = answered["id"]
                messages.append({"role": "tool", "tool_call_id": call_id, "name": result["name"], "content": text})
    nothing = {"type": "object", "properties": {}}
    declared = [tool for tools in body.get("tools") or () for tool in _field(tools, "functionDeclarations") or ()]
    schemas = (_field(tool, "parametersJsonSchema") or tool.get("parameters") or nothing for tool in declared)
    return _with_tools(messages, zip(declared, schemas, strict=True))


def _field(fields: Mapping[str, Any], name: str) -> Any:
    """Return a field by its name in camel case or with underscores, because SDKs write both."""
    snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
    return fields.get(name, fields.get(snake))


def _google_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    return str(part["text"]) if "text" in part else _in_brackets(next(iter(part), "nothing"), part)
