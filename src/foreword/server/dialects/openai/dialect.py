"""OpenAI's dialect: errors, ends of streams and models. Calls that no other dialect claims belong to this dialect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from foreword.server.api_errors import APIError, InvalidFieldError, UnknownFieldError, unknown_model
from foreword.server.dialect import Dialect
from foreword.server.dialects.openai import completions, modules, responses, scores
from foreword.server.service import Service


class OpenAI(Dialect):
    """The API of openai's clients."""

    name = "openai"
    routers = (completions.router, modules.router, responses.router, scores.router)
    stream_end = b"data: [DONE]\n\n"
    ping = b": the request waits\n\n"

    def speaks(self, path: str, headers: Mapping[str, str]) -> bool:
        return True

    def error(self, error: APIError, request_id: str) -> dict[str, Any]:
        code = error.code
        match error:
            case UnknownFieldError():
                code = "unknown_parameter"
            case InvalidFieldError(problem="Field required"):
                code = "missing_required_parameter"
            case InvalidFieldError():
                code = "invalid_value"
        return {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": code}}

    def models(self, service: Service, names: Sequence[str], query: Mapping[str, str]) -> Mapping[str, Any]:
        return {"object": "list", "data": [_model(service, name) for name in names]}

    def model(self, service: Service, names: Sequence[str], name: str) -> Mapping[str, Any]:
        if name not in names:
            raise unknown_model(name)
        return _model(service, name)


def _model(service: Service, name: str) -> dict[str, Any]:
    parent = {"parent": service.model_name} if name in service.adapters else {}
    return parent | {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "foreword",
        "max_model_len": service.max_model_len,
    }
