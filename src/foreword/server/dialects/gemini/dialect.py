"""Google's Gemini API: errors, keys and models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foreword.server.access.tenants import shown_key
from foreword.server.api_errors import APIError, UnknownFieldError, unknown_model
from foreword.server.dialect import Dialect, ErrorAnswer, Event
from foreword.server.dialects.gemini import cached_contents, endpoints
from foreword.server.dialects.gemini.fields import (
    CountTokensRequest,
    CreateCachedContentRequest,
    GenerateContentRequest,
    UpdateCachedContentRequest,
    number_in,
    page_size,
)
from foreword.server.service import Service

_STATUSES = {405: 404, 408: 504}
"""Statuses that Google does not use here, and those that it uses in their place."""
_NAMES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_TYPE = "type.googleapis.com/google.rpc."


class Gemini(Dialect):
    """The API of google-genai's clients. Their streams end with their last chunk, and bear nothing but chunks."""

    name = "gemini"
    routers = (endpoints.router, cached_contents.router)
    bodies = (
        GenerateContentRequest,
        CountTokensRequest,
        CreateCachedContentRequest,
        UpdateCachedContentRequest,
    )

    def speaks(self, path: str, headers: Mapping[str, str]) -> bool:
        return (
            "x-goog-api-key" in headers
            or "x-goog-api-client" in headers
            or path.startswith(("/v1beta/", "/v1alpha/", "/v1/cachedContents"))
            or path.rpartition(":")[2] in endpoints.METHODS
        )

    def key(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
        return headers.get("x-goog-api-key") or query.get("key") or shown_key(headers)

    def error(self, error: APIError, request_id: str) -> ErrorAnswer:
        return ErrorAnswer(_status(error), _body(error), error.headers or {})

    def error_event(self, error: APIError, request_id: str) -> Event:
        return None, _body(error)

    def models(self, service: Service, names: Sequence[str], query: Mapping[str, str]) -> Mapping[str, Any]:
        start = number_in(query, "pageToken")
        end = start + page_size(query)
        page: dict[str, Any] = {"models": [_model(service, name) for name in names[start:end]]}
        return page | ({"nextPageToken": str(end)} if end < len(names) else {})

    def model(self, service: Service, names: Sequence[str], name: str) -> Mapping[str, Any]:
        if name not in names:
            raise unknown_model(name)
        return _model(service, name)


def _status(error: APIError) -> int:
    return _STATUSES.get(error.status, error.status)


def _body(error: APIError) -> dict[str, Any]:
    status, message = _status(error), _message(error)
    name = _NAMES.get(status, "INVALID_ARGUMENT" if status < 500 else "INTERNAL")
    details: list[dict[str, Any]] = []
    if error.param is not None:
        violation = {"field": error.param, "description": message}
        details.append({"@type": f"{_TYPE}BadRequest", "fieldViolations": [violation]})
    if error.headers and "Retry-After" in error.headers:
        details.append({"@type": f"{_TYPE}RetryInfo", "retryDelay": f"{error.headers['Retry-After']}s"})
    described = {"code": status, "message": message, "status": name}
    return {"error": described | ({"details": details} if details else {})}


def _message(error: APIError) -> str:
    """The message, in Google's words where clients look for them."""
    if isinstance(error, UnknownFieldError):
        place, _, name = (error.param or "").rpartition(".")
        at = f" at '{place}'" if place else ""
        return f'Invalid JSON payload received. Unknown name "{name}"{at}: Cannot find field.'
    if error.code == "invalid_api_key":
        return "API key not valid, or none. Send a key of this server as the header x-goog-api-key."
    return str(error)


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "name": f"models/{name}",
        "version": "1",
        "displayName": name,
        "description": "Served by foreword.",
        "inputTokenLimit": service.max_model_len,
        "outputTokenLimit": service.max_model_len,
        "supportedGenerationMethods": ["generateContent", "countTokens", "createCachedContent"],
        "temperature": 1.0,
        "topP": 1.0,
        "maxTemperature": 2.0,
    }
