"""Reads Ollama's messages, tools and options into a chat and its sampling.

In Ollama's messages calls may have no ids, so a result belongs to the first waiting call with its name. Calls without
ids get ids by their place, so that the next turn renders the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foreword.pictures import file_of_base64
from foreword.request import StructuredOutputsParams
from foreword.server import calls
from foreword.server.api_errors import bad_request
from foreword.server.chats.chat import Chat, thinking_inputs
from foreword.server.dialects.ollama.fields import (
    GenerateRequest,
    OllamaChatRequest,
    OllamaMessage,
    OllamaTool,
    Options,
)
from foreword.server.service import Ending, Service
from foreword.text.conversation import MARK, PICTURES, earlier_call, function_tool, take_call

Plain = dict[str, Any]


def chat_of(service: Service, body: OllamaChatRequest | GenerateRequest, num_bytes: int) -> Chat:
    """Return the chat that a body asks for. Raises APIError 400."""
    if isinstance(body, GenerateRequest):
        has_system = body.system and not body.context  # a context begins with the system message
        messages: list[Plain] = [{"role": "system", "content": body.system}] if has_system else []
        if body.context and body.images:
            raise bad_request("images cannot be combined with context; send messages to /api/chat", param="images")
        messages.append(_shown("user", body.prompt, body.images))
        tools: Sequence[OllamaTool] = ()
    else:
        messages, tools = _messages(body.messages or ()), body.tools or ()
    last = messages[-1]
    continues = last["role"] == "assistant" and bool(last["content"].strip()) and "tool_calls" not in last
    return Chat(
        messages,
        [
            function_tool(
                function.name,
                function.description,
                {"type": "object", "properties": {}} if function.parameters is None else function.parameters,
            )
            for function in (tool.function for tool in tools)
        ],
        template_inputs=_thinking(service, body),
        ending=Ending(continue_final_message=continues),
        shortens=bool(body.truncate),
        context=(body.context or ()) if isinstance(body, GenerateRequest) else (),
        num_bytes=num_bytes,
    )


def _messages(messages: Sequence[OllamaMessage]) -> list[Plain]:
    plain_messages: list[Plain] = []
    waiting: list[Plain] = []
    num_calls = 0
    for message in messages:
        plain = _shown(message.role, message.content, message.images)
        if message.role == "assistant":
            waiting = [
                earlier_call(call.id or f"call{num_calls + at:05d}", call.function.name, call.function.arguments or {})
                for at, call in enumerate(message.tool_calls or ())
            ]
            num_calls += len(waiting)
            plain |= {"tool_calls": list(waiting)} if waiting else {}
            plain |= {"reasoning_content": message.thinking} if message.thinking else {}
        elif message.role == "tool":
            plain |= _result(message, waiting)
        plain_messages.append(plain)
    return plain_messages


def _shown(role: str, text: str | None, images: Sequence[str] | None) -> Plain:
    """Return a message whose pictures, given in base64, stand before its text."""
    plain: Plain = {"role": role, "content": MARK * len(images or ()) + (text or "")}
    return plain | {PICTURES: [file_of_base64(image) for image in images]} if images else plain


def _result(message: OllamaMessage, waiting: list[Plain]) -> Plain:
    """Return the fields of a tool's message that name its call. Removes the call from `waiting`."""
    name = message.tool_name or message.name
    call = take_call(waiting, message.tool_call_id, name, any_name=name is None)
    if call is None:  # its call was not sent
        return {"name": name} if name is not None else {}
    return {"name": call["function"]["name"], "tool_call_id": call["id"]}


def can_think(service: Service) -> bool:
    """Say whether the model's template mentions thinking."""
    template = service.tokenizer.chat_template or ""
    return "think" in template or "reasoning_effort" in template


def _thinking(service: Service, body: OllamaChatRequest | GenerateRequest) -> Plain:
    if body.think in (None, ""):
        return {}
    if body.think and not can_think(service):
        raise bad_request(f"{body.model!r} does not support thinking; leave think out", param="think")
    effort = body.think if isinstance(body.think, str) else None
    return thinking_inputs(service.tokenizer.chat_template or "", enabled=bool(body.think), effort=effort)


def sampling_of(body: OllamaChatRequest | GenerateRequest) -> dict[str, Any]:
    """Return the sampling parameters of a call's options."""
    options = body.options or Options()
    return calls.sampling_of(options) | {
        "repetition_penalty": options.repeat_penalty,
        "seed": options.seed if (options.seed or 0) >= 0 else None,  # below 0: a new seed each time
        "max_tokens": options.num_predict if (options.num_predict or 0) > 0 else None,
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
    }


def output_format(body: OllamaChatRequest | GenerateRequest) -> StructuredOutputsParams | None:
    """Return the structured outputs that the call asks for; None for any text."""
    if isinstance(body.format, dict):
        return StructuredOutputsParams(json=body.format)
    return StructuredOutputsParams(json_object=True) if body.format else None
