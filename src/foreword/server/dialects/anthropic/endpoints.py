"""/v1/messages and /v1/messages/count_tokens.

Knows the wishes in a body besides its conversation: those that this server has no part in are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

from foreword.request import StructuredOutputsParams
from foreword.server.api_errors import APIError, bad_request
from foreword.server.calls import Call, Limits, sampling_params
from foreword.server.chats.chat import Chat, num_prompt_tokens, start_chat
from foreword.server.dialects.anthropic.answer import MessageAnswer
from foreword.server.dialects.anthropic.fields import CountMessageTokensRequest, CreateMessageRequest
from foreword.server.dialects.anthropic.messages import chat_of, output_format
from foreword.server.http import json_response, respond
from foreword.server.intake import call_of, takes
from foreword.server.service import new_id

router = APIRouter(tags=["anthropic"])

_DEFAULT_TRIGGER = {"clear_tool_uses_20250919": 100_000, "compact_20260112": 150_000}
"""Tokens of a prompt from which an edit changes it, unless it names another number."""


@router.post("/v1/messages", openapi_extra=takes(CreateMessageRequest))
async def create_message(
    call: Annotated[Call[CreateMessageRequest], Depends(call_of(CreateMessageRequest))],
) -> Response:
    """Answer a conversation."""
    body, service = call.body, call.service
    if body.thread is not None:  # its client then sends the whole conversation
        message = "thread is not supported by this server; send the full conversation"
        raise bad_request(message, code="thread_unsupported_request")
    thinking = body.thinking
    if thinking is not None and thinking.type == "enabled":
        if thinking.budget_tokens is None:
            raise bad_request("thinking.enabled.budget_tokens: Field required")
        if body.max_tokens and thinking.budget_tokens >= body.max_tokens:
            raise bad_request("max_tokens: must be greater than `thinking.budget_tokens`")
    schema = output_format(body)
    if not body.max_tokens:
        _check_nothing_wanted(body)
    chat = await _chat(call)
    structured = None if schema is None else StructuredOutputsParams(json=schema)
    params = await sampling_params(service, body, Limits(max(1, body.max_tokens), None), structured)
    answer = await start_chat(service, call.caller("messages"), new_id("msg_"), chat, params, stream=bool(body.stream))
    return await respond(call.request, MessageAnswer(answer, body, service))


@router.post("/v1/messages/count_tokens", openapi_extra=takes(CountMessageTokensRequest))
async def count_message_tokens(
    call: Annotated[Call[CountMessageTokensRequest], Depends(call_of(CountMessageTokensRequest))],
) -> Response:
    """The number of tokens of a conversation's prompt."""
    return json_response({"input_tokens": await num_prompt_tokens(call.service, await _chat(call))})


async def _chat(call: Call[CreateMessageRequest | CountMessageTokensRequest]) -> Chat:
    body, service = call.body, call.service
    service.check_model(body.model, call.tenant)
    call.refuse_unsupported()
    for edit in (body.context_management and body.context_management.edits) or ():
        if _changes_something(edit, service.max_model_len):
            raise _no_edits(edit)
    return await call.work(lambda: chat_of(service, body, call.num_bytes))


def _check_nothing_wanted(body: CreateMessageRequest) -> None:
    """Refuse wishes for an answer beside `max_tokens: 0`."""
    wishes = {
        "stream": bool(body.stream),
        "thinking": body.thinking is not None and body.thinking.type == "enabled",
        "output_config.format": output_format(body) is not None,
        "tool_choice": body.tool_choice is not None and body.tool_choice.type in ("any", "tool"),
    }
    wanted = next((name for name, is_wanted in wishes.items() if is_wanted), None)
    if wanted is not None:
        raise bad_request(f"max_tokens: 0 cannot be combined with {wanted}; it only prepares the cache")


def _changes_something(edit: dict[str, Any], max_model_len: int) -> bool:
    """Whether an edit can change a prompt that this model takes."""
    kind, trigger = str(edit.get("type")), edit.get("trigger")
    if kind == "clear_thinking_20251015":
        return edit.get("keep") != "all"
    num_tokens = _DEFAULT_TRIGGER.get(kind, 0)
    if isinstance(trigger, dict):
        value = trigger.get("value")
        num_tokens = value if trigger.get("type") == "input_tokens" and isinstance(value, int) else 0
    return num_tokens < max_model_len


def _no_edits(edit: dict[str, Any]) -> APIError:
    return bad_request(f"context_management.edits: {str(edit.get('type'))[:64]!r} is not supported by this server")
