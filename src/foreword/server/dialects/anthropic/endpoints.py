"""Anthropic's dialect: /v1/messages and /v1/messages/count_tokens, errors, pings and models.

A call belongs to this dialect by its path, or by the header with Anthropic's version. Fields for features that this
server lacks are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from foreword.request import StructuredOutputsParams
from foreword.server.api_errors import APIError, InvalidFieldError, LongPromptError, bad_request, unknown_model
from foreword.server.calls import Call, CallWith, sampling_of, sampling_params
from foreword.server.chats.chat import Chat, num_prompt_tokens, start_chat
from foreword.server.dialect import Dialect
from foreword.server.dialects.anthropic.answer import MessageAnswer
from foreword.server.dialects.anthropic.fields import CountMessageTokensRequest, CreateMessageRequest
from foreword.server.dialects.anthropic.messages import chat_of, output_format
from foreword.server.http import json_response, respond
from foreword.server.service import Service, new_id

router = APIRouter(tags=["anthropic"])

_DEFAULT_TRIGGER = {"clear_tool_uses_20250919": 100_000, "compact_20260112": 150_000}
"""The default length in tokens from which an edit changes a prompt, by the type of the edit."""
OVERLOADED = 529
MOST_MODELS = 1000


@router.post("/v1/messages")
async def create_message(
    call: CallWith[CreateMessageRequest],
) -> Response:
    """Answer a conversation."""
    body, service = call.body, call.service
    if body.thread is not None:  # after this error, the client sends the whole conversation
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
    fields = sampling_of(body) | {"max_tokens": max(1, body.max_tokens)}
    params = await sampling_params(service, fields, structured)
    answer = await start_chat(service, call.caller("messages"), new_id("msg_"), chat, params, stream=bool(body.stream))
    return await respond(call.request, MessageAnswer(answer, body, service))


@router.post("/v1/messages/count_tokens")
async def count_message_tokens(
    call: CallWith[CountMessageTokensRequest],
) -> Response:
    """Count the tokens of a conversation's prompt."""
    return json_response({"input_tokens": await num_prompt_tokens(call.service, await _chat(call))})


async def _chat(call: Call[CreateMessageRequest | CountMessageTokensRequest]) -> Chat:
    body, service = call.body, call.service
    service.check_model(body.model, call.tenant)
    call.refuse_unsupported("{}: not supported by this server; leave it out")
    for edit in (body.context_management and body.context_management.edits) or ():
        if _changes_something(edit, service.max_model_len):
            kind = str(edit.get("type"))[:64]
            raise bad_request(f"context_management.edits: {kind!r} is not supported by this server")
    return await call.work(lambda: chat_of(service, body, call.num_bytes))


def _check_nothing_wanted(body: CreateMessageRequest) -> None:
    """Raise APIError 400 for fields that ask for an answer, although `max_tokens` is 0."""
    wishes = {
        "stream": bool(body.stream),
        "thinking": body.thinking is not None and body.thinking.type == "enabled",
        "output_config.format": output_format(body) is not None,
        "tool_choice": body.tool_choice is not None and body.tool_choice.type in ("any", "tool"),
    }
    wish = next((name for name, is_wanted in wishes.items() if is_wanted), None)
    if wish is not None:
        raise bad_request(f"max_tokens: 0 cannot be combined with {wish}; it only prepares the cache")


def _changes_something(edit: dict[str, Any], max_model_len: int) -> bool:
    """Say whether an edit can change a prompt that this model takes."""
    kind, trigger = str(edit.get("type")), edit.get("trigger")
    if kind == "clear_thinking_20251015":
        return edit.get("keep") != "all"
    num_tokens = _DEFAULT_TRIGGER.get(kind, 0)
    if isinstance(trigger, dict):
        value = trigger.get("value")
        num_tokens = value if trigger.get("type") == "input_tokens" and isinstance(value, int) else 0
    return num_tokens < max_model_len


_TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED: "overloaded_error",
}
_STATUSES = {"timeout": 504, "engine_failed": OVERLOADED}
"""Anthropic's status for errors that have another status in foreword, by foreword's error code."""


def _message(error: APIError) -> str:
    match error:
        case InvalidFieldError():
            return f"{'.'.join(map(str, error.where)) or 'the body'}: {error.problem}"
        case LongPromptError():
            return f"prompt is too long: {error.num_tokens} tokens > {error.max_tokens} maximum"
        case APIError(code="context_length_exceeded"):
            return f"prompt is too long: {error}"
    return str(error)


class Anthropic(Dialect):
    """The API of Anthropic's clients, in all versions of the API."""

    name = "anthropic"
    routers = (router,)
    error_event = "error"
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def speaks(self, path: str, headers: Mapping[str, str]) -> bool:
        return "anthropic-version" in headers or f"{path}/".startswith("/v1/messages/")

    def status(self, error: APIError) -> int:
        return _STATUSES.get(error.code or "", error.status)

    def error(self, error: APIError, request_id: str) -> dict[str, Any]:
        status = self.status(error)
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        described: dict[str, Any] = {"type": kind, "message": _message(error)}
        if error.code is not None:  # foreword's code
            described["details"] = {"error_code": error.code}
        return {"type": "error", "error": described, "request_id": request_id}

    def models(self, service: Service, names: Sequence[str], query: Mapping[str, str]) -> Mapping[str, Any]:
        limit = query.get("limit", "20")
        if not limit.isdecimal() or len(limit) > 9 or not 1 <= int(limit) <= MOST_MODELS:
            raise bad_request(f"limit: must be a number from 1 to {MOST_MODELS}")
        after, before, max_items = query.get("after_id"), query.get("before_id"), int(limit)
        for cursor in (after, before):
            if cursor is not None and cursor not in names:
                raise unknown_model(cursor)
        if before is not None:
            remaining = names[: names.index(before)]
            page = remaining[-max_items:]
        else:
            remaining = names if after is None else names[names.index(after) + 1 :]
            page = remaining[:max_items]
        return {
            "data": [self.model(service, names, name) for name in page],
            "has_more": len(page) < len(remaining),
            "first_id": page[0] if page else None,
            "last_id": page[-1] if page else None,
        }

    def model(self, service: Service, names: Sequence[str], name: str) -> Mapping[str, Any]:
        if name not in names:
            raise unknown_model(name)
        return {
            "id": name,
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(service.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "lifecycle": "active",
            "max_input_tokens": service.max_model_len,
            "max_tokens": service.max_model_len,
            "capabilities": None,
        }
