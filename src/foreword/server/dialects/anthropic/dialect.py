"""Anthropic's dialect: errors, pings and models. A call is in it by its path, or by the version that it names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from foreword.server.api_errors import APIError, InvalidFieldError, LongPromptError, bad_request, unknown_model
from foreword.server.dialect import Dialect, ErrorAnswer, Event
from foreword.server.dialects.anthropic import endpoints
from foreword.server.dialects.anthropic.fields import CountMessageTokensRequest, CreateMessageRequest
from foreword.server.service import Service

OVERLOADED = 529
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
"""Statuses by the codes of our errors, where Anthropic's are others."""
MOST_MODELS = 1000


def status_of(error: APIError) -> int:
    """The status of an error's answer."""
    return _STATUSES.get(error.code or "", error.status)


def body_of_error(error: APIError, request_id: str) -> dict[str, Any]:
    """The body of an error's answer; `details.error_code` is our code."""
    status = status_of(error)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    told: dict[str, Any] = {"type": kind, "message": _message(error)}
    if error.code is not None:
        told["details"] = {"error_code": error.code}
    return {"type": "error", "error": told, "request_id": request_id}


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
    """The API of anthropic's clients, in all of its versions."""

    name = "anthropic"
    routers = (endpoints.router,)
    bodies = (CreateMessageRequest, CountMessageTokensRequest)
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    def speaks(self, path: str, headers: Mapping[str, str]) -> bool:
        return "anthropic-version" in headers or f"{path}/".startswith("/v1/messages/")

    def error(self, error: APIError, request_id: str) -> ErrorAnswer:
        return ErrorAnswer(status_of(error), body_of_error(error, request_id), error.headers or {})

    def error_event(self, error: APIError, request_id: str) -> Event:
        return "error", body_of_error(error, request_id)

    def models(self, service: Service, names: Sequence[str], query: Mapping[str, str]) -> Mapping[str, Any]:
        limit = query.get("limit", "20")
        if not limit.isdecimal() or len(limit) > 9 or not 1 <= int(limit) <= MOST_MODELS:
            raise bad_request(f"limit: must be a number from 1 to {MOST_MODELS}")
        after, before, most = query.get("after_id"), query.get("before_id"), int(limit)
        for cursor in (after, before):
            if cursor is not None and cursor not in names:
                raise unknown_model(cursor)
        if before is not None:
            rest = names[: names.index(before)]
            page = rest[-most:]
        else:
            rest = names if after is None else names[names.index(after) + 1 :]
            page = rest[:most]
        return {
            "data": [self.model(service, names, name) for name in page],
            "has_more": len(page) < len(rest),
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
