"""Ollama's dialect: errors and models. A call is in it by its path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foreword.server.api_errors import APIError
from foreword.server.dialect import Dialect, ErrorAnswer, Event
from foreword.server.dialects.ollama import endpoints
from foreword.server.dialects.ollama.endpoints import listed, served_name, shown
from foreword.server.dialects.ollama.fields import (
    EmbedRequest,
    GenerateRequest,
    ModelRequest,
    OldEmbedRequest,
    OllamaChatRequest,
)
from foreword.server.service import Service


class Ollama(Dialect):
    """The API of ollama's clients. A stream is lines of JSON; an error in the middle is one of them."""

    name = "ollama"
    routers = (endpoints.router,)
    bodies = (OllamaChatRequest, GenerateRequest, ModelRequest, EmbedRequest, OldEmbedRequest)

    def speaks(self, path: str, headers: Mapping[str, str]) -> bool:
        return path.startswith("/api/")

    def error(self, error: APIError, request_id: str) -> ErrorAnswer:
        return ErrorAnswer(error.status, {"error": str(error)}, error.headers or {})

    def error_event(self, error: APIError, request_id: str) -> Event:
        return None, {"error": str(error)}

    def models(self, service: Service, names: Sequence[str], query: Mapping[str, str]) -> Mapping[str, Any]:
        return listed(service, names)

    def model(self, service: Service, names: Sequence[str], name: str) -> Mapping[str, Any]:
        return shown(service, served_name(names, name))
