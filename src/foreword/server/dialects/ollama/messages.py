"""Reads Ollama's messages, tools and options into a chat and its sampling.

Knows Ollama's fields and the form that chat templates take. Its messages name no calls: a result belongs to the first
call of its name that waits for one, and calls get ids by their place, so that the next turn renders them alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foreword.pictures import file_of_base64
from foreword.request import SamplingParams, StructuredOutputsParams
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
from foreword.text.conversation import MARK, PICTURES

Plain = dict[str, Any]


def chat_of(service: Service, body: OllamaChatRequest | GenerateRequest, num_bytes: int) -> Chat:
    """The chat that a body asks for. Raises APIError 400."""
    if isinstance(body, GenerateRequest):
        has_system = body.system and not body.context  # which begins with it
        messages = [{"role": "system", "content": body.system}] if has_system else []
        if body.context and body.images:
            raise bad_request("images cannot be combined with context; send messages to /api/chat", param="images")
        messages.append(_shown("user", body.prompt, body.images))
        tools: Sequence[OllamaTool] = ()
    else:
        messages, tools = _messages(body.messages or ()), body.tools or ()
    last = messages[-1]
    continues = last["role"] == "assistant" and bool(last["content"]) and "tool_calls" not in last
    return Chat(
        messages,
        [_tool(tool) for tool in tools],
        template_inputs=_thinking(service, body),
        ending=Ending(continue_final_message=continues),
        shortens=bool(body.truncate),
        context=(body.context or ()) if isinstance(body, GenerateRequest) else (),
        num_bytes=num_bytes,
    )


def _messages(messages: Sequence[OllamaMessage]) -> list[Plain]:
    told: list[Plain] = []
    waiting: list[Plain] = []
    num_calls = 0
    for message in messages:
        plain = _shown(message.role, message.content, message.images)
        if message.role == "assistant":
            waiting = [
                {
                    "id": call.id or f"call{num_calls + at:05d}",
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments or {}},
                }
                for at, call in enumerate(message.tool_calls or ())
            ]
            num_calls += len(waiting)
            plain |= {"tool_calls": list(waiting)} if waiting else {}
            plain |= {"reasoning_content": message.thinking} if message.thinking else {}
        elif message.role == "tool":
            plain |= _result(message, waiting)
        told.append(plain)
    return told


def _shown(role: str, text: str | None, images: Sequence[str] | None) -> Plain:
    """A message with pictures, each in base64, before its text."""
    plain: Plain = {"role": role, "content": MARK * len(images or ()) + (text or "")}
    return plain | {PICTURES: [file_of_base64(image) for image in images]} if images else plain


def _result(message: OllamaMessage, waiting: list[Plain]) -> Plain:
    """The call that a tool's message answers, as fields of it; it waits no longer."""
    name = message.tool_name or message.name
    of_id = [call for call in waiting if message.tool_call_id is not None and call["id"] == message.tool_call_id]
    of_name = [call for call in waiting if call["function"]["name"] == name]
    found = next(iter([*of_id, *of_name, *(waiting if name is None else ())]), None)
    if found is None:  # its call was not sent
        return {"name": name} if name is not None else {}
    waiting.remove(found)
    return {"name": found["function"]["name"], "tool_call_id": found["id"]}


def _tool(tool: OllamaTool) -> Plain:
    function = tool.function.model_dump(exclude_none=True)
    return {"type": "function", "function": {"parameters": {"type": "object", "properties": {}}, **function}}


def can_think(service: Service) -> bool:
    """Whether the model's template speaks of thinking."""
    template = service.tokenizer.chat_template or ""
    return "think" in template or "reasoning_effort" in template


def _thinking(service: Service, body: OllamaChatRequest | GenerateRequest) -> Plain:
    if body.think in (None, ""):
        return {}
    if body.think and not can_think(service):
        raise bad_request(f"{body.model!r} does not support thinking; leave think out", param="think")
    effort = body.think if isinstance(body.think, str) else None
    return thinking_inputs(service.tokenizer.chat_template or "", enabled=bool(body.think), effort=effort)


async def sampling_params(service: Service, body: OllamaChatRequest | GenerateRequest) -> SamplingParams:
    """How an answer is sampled: what the options say, and else what the model's files say.

    Raises InvalidRequestError for formats that no answer can follow.
    """
    options = body.options or Options()
    form = None
    if isinstance(body.format, dict):
        form = StructuredOutputsParams(json=body.format)
    elif body.format:
        form = StructuredOutputsParams(json_object=True)
    given = {name: getattr(options, name) for name in _SAME_NAMES} | {"repetition_penalty": options.repeat_penalty}
    if options.seed is not None and options.seed >= 0:  # others mean: another one each time
        given["seed"] = options.seed
    most = options.num_predict or 0
    return SamplingParams(
        max_tokens=most if most > 0 else None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        open_constraint=None if form is None else await service.compile_grammar(form),
        **{**service.sampling_defaults, **{name: value for name, value in given.items() if value is not None}},
    )


_SAME_NAMES = "temperature top_k top_p min_p stop presence_penalty frequency_penalty".split()
