"""/v1/messages and /v1/messages/count_tokens.

Knows the wishes in a body besides its conversation: those that this server has no part in are refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from foreword.request import StructuredOutputsParams
from foreword.server.access.tenants import Tenant
from foreword.server.api_errors import APIError, bad_request
from foreword.server.calls import Limits, caller_of, sampling_params
from foreword.server.chats.chat import Chat, num_prompt_tokens, start_chat
from foreword.server.dialects.anthropic.answer import MessageAnswer
from foreword.server.dialects.anthropic.fields import CountMessageTokensRequest, CreateMessageRequest
from foreword.server.dialects.anthropic.messages import chat_of, output_format
from foreword.server.http import Authorized, json_response, respond, service_of
from foreword.server.intake import body_of, takes, with_body
from foreword.server.service import Service, new_id

router = APIRouter(tags=["anthropic"])

_DEFAULT_TRIGGER = {"clear_tool_uses_20250919": 100_000, "compact_20260112": 150_000}
"""Tokens of a prompt from which an edit changes it, unless it names another number."""


@router.post("/v1/messages", openapi_extra=takes(CreateMessageRequest))
async def create_message(
    body: Annotated[CreateMessageRequest, Depends(body_of(CreateMessageRequest))], request: Request, tenant: Authorized
) -> Response:
    """Answer a conversation."""
    service = service_of(request)
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
    chat = await _chat(service, tenant, body, request)
    structured = None if schema is None else StructuredOutputsParams(json=schema)
    params = await sampling_params(service, body, Limits(max(1, body.max_tokens), None), structured)
    caller = caller_of(body, request, tenant, "messages")
    answer = await start_chat(service, caller, new_id("msg_"), chat, params, stream=bool(body.stream))
    return await respond(request, MessageAnswer(answer, body, service))


@router.post("/v1/messages/count_tokens", openapi_extra=takes(CountMessageTokensRequest))
async def count_message_tokens(
    body: Annotated[CountMessageTokensRequest, Depends(body_of(CountMessageTokensRequest))],
    request: Request,
    tenant: Authorized,
) -> Response:
    """The number of tokens of a conversation's prompt."""
    service = service_of(request)
    return json_response(
        {"input_tokens": await num_prompt_tokens(service, await _chat(service, tenant, body, request))}
    )


async def _chat(
    service: Service, tenant: Tenant, body: CreateMessageRequest | CountMessageTokensRequest, request: Request
) -> Chat:
    service.check_model(body.model, tenant)
    unsupported = body.asks_for_unsupported()
    if unsupported is not None:
        raise bad_request(f"{unsupported}: not supported by this server; leave it out")
    for edit in (body.context_management and body.context_management.edits) or ():
        if _changes_something(edit, service.max_model_len):
            raise _no_edits(edit)
    return await with_body(request, lambda: chat_of(service, body, request.state.num_body_bytes))


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
