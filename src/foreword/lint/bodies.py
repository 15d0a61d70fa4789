"""Reads bodies of requests to OpenAI's, Anthropic's and Google's APIs as conversations for a chat template.

Knows the fields that reach a prompt, and passes over all others: what a body asks besides is the server's business. A
part that is no text, such as an image, is written as its type in brackets, because a template has no place for it; a
picture with a digest of what was sent, so that two pictures differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from foreword.errors import InvalidRequestError

Plain = dict[str, Any]
BILLING_HEADER = "x-anthropic-billing-header:"
"""Beginning of a block that coding agents put before the system prompt; the server leaves it out, too."""
PICTURE_KINDS = ("image", "image_url", "input_image", "inlineData", "inline_data")
DIGEST_DIGITS = 12
_TEXTS = frozenset(("text", "input_text", "output_text", "reasoning_text", "summary_text"))
ANTHROPIC_BLOCKS = frozenset("tool_use tool_result thinking redacted_thinking".split())


@dataclass(slots=True)
class Conversation:
    """Messages as chat templates take them, and the template's other inputs."""

    messages: list[Plain]
    inputs: Plain = field(default_factory=dict)

    @property
    def texts(self) -> tuple[str, ...]:
        """Tools, if any, and each message as one text."""
        parts = [self.inputs["tools"], *self.messages] if "tools" in self.inputs else self.messages
        return tuple(json.dumps(part, ensure_ascii=False) for part in parts)


def read_body(body: Mapping[str, Any]) -> Conversation | None:
    """The conversation of a body; None if it has none. Raises InvalidRequestError, naming the field."""
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
    """What stands for a part that is no text."""
    if kind not in PICTURE_KINDS:
        return f"[{kind}]"
    shown = part.get(kind, part.get("image_url", part.get("source"))) if isinstance(part, Mapping) else None
    if isinstance(shown, Mapping):  # a marker beside the picture, its detail and its type change nothing that it shows
        shown = shown.get("data") or shown.get("url") or shown
    told = json.dumps(shown or part, sort_keys=True)
    return f"[{kind} {hashlib.sha256(told.encode()).hexdigest()[:DIGEST_DIGITS]}]"


def _joined(content: Any, role: str) -> str:
    """A content's parts as the server joins them: an answer's are pieces, those of others stand in lines."""
    if isinstance(content, str):
        return content
    return ("" if role == "assistant" else "\n").join(_text(part) for part in content or ())


def _call(call_id: Any, name: Any, arguments: Any) -> Plain:
    given = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments or {}
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}


def _tool(tool: Mapping[str, Any], parameters: Any) -> Plain:
    function: Plain = {"name": tool["name"]}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function | ({} if parameters is None else {"parameters": parameters})}


def _with_tools(messages: list[Plain], tools: Sequence[Plain]) -> Conversation:
    return Conversation(messages, {"tools": list(tools)} if tools else {})


# ------------------------------------------------------------------------ OpenAI


def _openai(body: Mapping[str, Any]) -> Conversation:
    messages = []
    for message in body["messages"]:
        role = message["role"]
        plain: Plain = {
            "role": "system" if role == "developer" else role,
            "content": _joined(message.get("content"), role),
        }
        plain |= {name: message[name] for name in ("name", "tool_call_id", "reasoning_content") if message.get(name)}
        if message.get("tool_calls"):
            plain["tool_calls"] = [
                _call(call.get("id"), call["function"]["name"], call["function"].get("arguments"))
                for call in message["tool_calls"]
            ]
        messages.append(plain)
    tools = [tool["function"] for tool in body.get("tools") or () if "function" in tool]
    return _with_tools(messages, [_tool(tool, tool.get("parameters")) for tool in tools])


def _responses(body: Mapping[str, Any]) -> Conversation:
    given = body["input"]
    messages: list[Plain] = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    names: dict[Any, Any] = {}
    reasoning = ""
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        match item.get("type") or "message":
            case "message":
                role = item["role"]
                plain: Plain = {
                    "role": "system" if role == "developer" else role,
                    "content": _joined(item["content"], role),
                }
                if role == "assistant":
                    plain |= {"reasoning_content": reasoning} if reasoning else {}
                    reasoning = ""
                messages.append(plain)
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
                pass  # an item of the vendor's own, such as a search
    tools = [tool for tool in body.get("tools") or () if tool.get("name")]
    conversation = _with_tools(messages, [_tool(tool, tool.get("parameters")) for tool in tools])
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
        messages.append({"role": "system", "content": _joined(blocks, "system")})
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
            texts = [part for part in parts if part.get("type", "text") not in ANTHROPIC_BLOCKS]
            plain: Plain = {"role": role, "content": _joined(texts, role)}
            plain |= {"reasoning_content": thoughts} if thoughts else {}
            if calls:
                plain["tool_calls"] = [_call(call["id"], call["name"], call.get("input")) for call in calls]
            messages.append(plain)
            continue
        for is_result, some in groupby(parts, lambda part: part.get("type") == "tool_result"):
            if not is_result:
                messages.append({"role": role, "content": _joined(list(some), role)})
                continue
            for part in some:
                text = ("Error: " if part.get("is_error") else "") + _joined(part.get("content"), "tool")
                own_id = part["tool_use_id"]
                messages.append(
                    {"role": "tool", "tool_call_id": own_id, "name": names.get(own_id, ""), "content": text}
                )
    tools = [tool for tool in body.get("tools") or () if "input_schema" in tool]
    return _with_tools(messages, [_tool(tool, tool["input_schema"]) for tool in tools])


# ------------------------------------------------------------------------ Google


def _google(body: Mapping[str, Any]) -> Conversation:
    system = _field(body, "systemInstruction")
    messages: list[Plain] = []
    if system:
        parts = [system] if isinstance(system, str) else system["parts"]
        messages.append({"role": "system", "content": "\n".join(_google_text(part) for part in parts)})
    contents, waiting = body["contents"], []
    num_calls = 0
    for content in [{"parts": [{"text": contents}]}] if isinstance(contents, str) else contents:
        role = "assistant" if content.get("role") == "model" else "user"
        plain: Plain = {"role": role, "content": ""}
        for part in content["parts"]:
            call, result = _field(part, "functionCall"), _field(part, "functionResponse")
            if call is not None:
                made = _call(call.get("id") or f"call{num_calls:05d}", call["name"], call.get("args"))
                num_calls += 1
                waiting.append(made)
                plain.setdefault("tool_calls", []).append(made)
            elif result is not None:
                of_name = [
                    one for one in waiting if result.get("id") == one["id"] or result["name"] == one["function"]["name"]
                ]
                own_id = of_name[0]["id"] if of_name else ""
                waiting = [one for one in waiting if one not in of_name[:1]]
                text = json.dumps(result.get("response") or {}, ensure_ascii=False)
                messages.append({"role": "tool", "tool_call_id": own_id, "name": result["name"], "content": text})
            else:
                name = "reasoning_content" if part.get("thought") else "content"
                between = "\n" if role == "user" and plain["content"] else ""
                plain[name] = plain.get(name, "") + between + _google_text(part)
        if len(plain) > 2 or plain["content"]:
            messages.append(plain)
    declared = [one for tool in body.get("tools") or () for one in _field(tool, "functionDeclarations") or ()]
    nothing = {"type": "object", "properties": {}}
    tools = [_tool(one, _field(one, "parametersJsonSchema") or one.get("parameters") or nothing) for one in declared]
    return _with_tools(messages, tools)


def _field(given: Mapping[str, Any], name: str) -> Any:
    """A field by its name in camel case or with underscores: SDKs write both."""
    snake = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name)
    return given.get(name, given.get(snake))


def _google_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    return str(part["text"]) if "text" in part else _in_brackets(next(iter(part), "nothing"), part)
