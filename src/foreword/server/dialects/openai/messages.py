"""Reads OpenAI's messages, tools and forms of answers, and the prompts of calls that name a text or a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from foreword.engine import Prompt
from foreword.request import StructuredOutputsParams
from foreword.server.api_errors import bad_request
from foreword.server.bodies.body_limits import MAX_DEPTH
from foreword.server.bodies.json_scan import scan_json
from foreword.server.calls import Call
from foreword.server.dialects.openai.caching import Breakpoints, refuse_breakpoint
from foreword.server.dialects.openai.fields import (
    ChatMessage,
    ChatRequest,
    ExplainRequest,
    ResponseFormat,
    StructuredOutputs,
    TextFormat,
    TokenizeRequest,
    Tool,
    pictures_in,
)
from foreword.server.service import Ending
from foreword.text.conversation import earlier_call, read_arguments

GUIDED = ("json", "regex", "choice", "grammar")


def check_call(call: Call[Any]) -> None:
    """Raise APIError for other models, and for fields of features that this engine lacks."""
    call.service.check_model(call.body.model, call.tenant)
    call.refuse_unsupported()
    if call.body.stream_options is not None and not call.body.stream:
        raise bad_request("stream_options is only allowed with stream=true", param="stream_options")


def template_inputs(reasoning_effort: str | None, others: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a chat template's inputs, except the messages; empty if the client gave no inputs."""
    return {**(others or {}), **({} if reasoning_effort is None else {"reasoning_effort": reasoning_effort})}


def ending_of(body: ChatRequest | TokenizeRequest | ExplainRequest) -> Ending:
    """Return how the prompt ends."""
    return Ending(body.add_generation_prompt, body.continue_final_message)


def plain_messages(messages: Sequence[ChatMessage], breakpoints: Breakpoints) -> list[dict[str, Any]]:
    """Convert messages for chat templates: each content becomes one text, OpenAI's "developer" becomes "system"."""
    return [_plain_message(message, index, breakpoints) for index, message in enumerate(messages)]


def _plain_message(message: ChatMessage, index: int, breakpoints: Breakpoints) -> dict[str, Any]:
    content, where = message.content, f"messages[{index}]"
    refuse_breakpoint(message, where)
    text = breakpoints.text(content, f"{where}.content", index, message.role)
    plain: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": text}
    plain |= pictures_in(content)
    if message.function_call or message.audio:
        raise bad_request("function_call and audio are not supported by this server", param=where)
    if content is None and not message.tool_calls:
        raise bad_request(f"Missing required parameter: {where}.content", param=f"{where}.content")
    if message.role == "tool" and message.tool_call_id is None:
        raise bad_request(f"Missing required parameter: {where}.tool_call_id", param=f"{where}.tool_call_id")
    plain |= {
        key: value
        for key in ("name", "tool_call_id", "reasoning_content")
        if (value := getattr(message, key)) is not None
    }
    for number, call in enumerate(message.tool_calls or ()):
        refuse_breakpoint(call, f"{where}.tool_calls[{number}]")
    if message.tool_calls:
        plain["tool_calls"] = [
            earlier_call(call.id, call.function.name, arguments_for_template(call.function.arguments))
            for call in message.tool_calls
        ]
    return plain


async def read_prompt(call: Call[TokenizeRequest | ExplainRequest]) -> Prompt:
    """Read the prompt in a call of an endpoint that generates nothing: a text, token ids or a conversation.

    Raises APIError 400 unless the call has exactly one of `prompt` and `messages`, and 404 for another model.
    """
    body, service = call.body, call.service
    service.check_model(body.model, call.tenant)

    def read() -> tuple[list[dict[str, Any]] | None, dict[str, Any]]:
        inputs = template_inputs(body.reasoning_effort, body.chat_template_kwargs)
        if body.tools:
            inputs["tools"] = plain_tools(body.tools)
        return None if body.messages is None else plain_messages(body.messages, Breakpoints()), inputs

    messages, inputs = await call.work(read)
    if (body.prompt is None) == (messages is None):
        raise bad_request("give either prompt or messages")
    if messages is not None:
        return await service.conversation(messages, inputs, ending_of(body))
    text = body.prompt
    return Prompt(await service.encode(text) if isinstance(text, str) else np.array(text, np.int32))


def plain_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """Convert tools to the form for chat templates."""
    return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools or ()]


def arguments_for_template(arguments: str) -> Mapping[str, Any] | str:
    """Return an earlier call's arguments for templates: an object, or the text if it is no object or is too deep."""
    if scan_json(arguments.encode("utf-8", "replace")).depth > MAX_DEPTH:
        return arguments
    return read_arguments(arguments)


def structured_outputs(body: Any, text_format: ResponseFormat | TextFormat | None) -> StructuredOutputsParams | None:
    """Return the structured outputs that a call asks for; None if the answer may be any text.

    Raises APIError or InvalidRequestError.
    """
    forms: dict[str, StructuredOutputsParams] = {}
    of_format = _of_format(text_format)
    if of_format is not None:
        forms["response_format"] = of_format
    vllm_form: StructuredOutputs | None = body.structured_outputs
    if vllm_form is not None:
        forms["structured_outputs"] = StructuredOutputsParams(
            json=vllm_form.json_schema,
            regex=vllm_form.regex,
            choice=None if vllm_form.choice is None else tuple(vllm_form.choice),
            grammar=vllm_form.grammar,
            json_object=vllm_form.json_object,
        )
    for kind in GUIDED:
        value = getattr(body, f"guided_{kind}")
        if value is not None:
            params: dict[str, Any] = {kind: tuple(value) if isinstance(value, list) else value}
            forms[f"guided_{kind}"] = StructuredOutputsParams(**params)
    if len(forms) > 1:
        raise bad_request(f"{' and '.join(forms)} cannot be combined; give one of them", param=list(forms)[1])
    return next(iter(forms.values()), None)


def _of_format(text_format: ResponseFormat | TextFormat | None) -> StructuredOutputsParams | None:
    if text_format is None or text_format.type == "text":
        return None
    if text_format.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    described = text_format.json_schema if isinstance(text_format, ResponseFormat) else text_format
    schema = None if described is None else described.json_schema
    if schema is None:
        raise bad_request("response_format json_schema needs json_schema.schema", param="response_format")
    return StructuredOutputsParams(json=schema)
