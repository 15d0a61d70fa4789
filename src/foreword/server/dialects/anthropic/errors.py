"""Anthropic's errors: their types, statuses and words.

Knows our errors and Anthropic's form of them.
"""

from __future__ import annotations

from typing import Any

from foreword.server.api_errors import APIError, InvalidFieldError, LongPromptError

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
