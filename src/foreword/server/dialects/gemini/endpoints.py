"""Google's dialect: /v1/models/NAME:generateContent, :streamGenerateContent and :countTokens; errors, keys and models.

The paths are the same under /v1beta and /v1alpha.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from foreword.server.access.tenants import shown_key
from foreword.server.api_errors import APIError, UnknownFieldError, bad_request, unknown_model
from foreword.server.calls import Call, CallWith, sampling_params
from foreword.server.chats.chat import Chat, num_prompt_tokens, start_chat
from foreword.server.crews import off_loop
from foreword.server.dialect import Dialect
from foreword.server.dialects.gemini import cached_contents
from foreword.server.dialects.gemini.answer import GeneratedContent, tokens_of_text
from foreword.server.dialects.gemini.cached_contents import named_content, settle
from foreword.server.dialects.gemini.contents import read_chat, sampling_of, structured_outputs, template_of
from foreword.server.dialects.gemini.fields import (
    CountTokensRequest,
    GenerateContentRequest,
    GenerationConfig,
    ThinkingConfig,
    number_in,
    page_size,
    served,
)
from foreword.server.http import JsonArray, json_response, respond
from foreword.server.resources.store import CachedContent
from foreword.server.service import Service, new_id

METHODS = ("generateContent", "streamGenerateContent", "countTokens")

router = APIRouter(tags=["gemini"])
_TYPE = "type.googleapis.com/google.rpc."


@served(router, "POST", "models/{model:path}:generateContent")
async def generate_content(model: str, call: CallWith[GenerateContentRequest]) -> Response:
    """Answer a conversation."""
    return await respond(call.request, await _start(model, call, stream=False))


@served(router, "POST", "models/{model:path}:streamGenerateContent")
async def stream_generate_content(model: str, call: CallWith[GenerateContentRequest]) -> Response:
    """Answer a conversation in chunks: server-sent events with alt=sse, otherwise one JSON array."""
    form = call.request.query_params.get("alt", "json")
    if form not in ("sse", "json"):
        raise bad_request(f"alt={form!r:.60} is not known; use sse or json", param="alt")
    writer = await _start(model, call, stream=True)
    return await respond(call.request, writer, None if form == "sse" else JsonArray())


@served(router, "POST", "models/{model:path}:countTokens")
async def count_tokens(model: str, call: CallWith[CountTokensRequest]) -> Response:
    """Count the tokens in the prompt of contents, or of a whole request."""
    body, request = call.body, call.body.generate_content_request
    if (body.contents is None) == (request is None):
        raise bad_request("give either contents or generateContentRequest")
    if request is None:
        request = GenerateContentRequest.model_construct(contents=body.contents)
    chat, used = await _read(model, Call(request, call.request, call.service, call.tenant, call.num_bytes))
    num_tokens = await num_prompt_tokens(call.service, chat)
    counted = {"totalTokens": num_tokens, "promptTokensDetails": tokens_of_text(num_tokens)}
    return json_response(counted | ({} if used is None else {"cachedContentTokenCount": used.num_tokens}))


async def _read(model: str, call: Call[GenerateContentRequest]) -> tuple[Chat, CachedContent | None]:
    """Return the chat that a call asks for, and the cached content with which it begins, if any."""
    body, service = call.body, call.service
    service.check_model(model, call.tenant)
    if body.model is not None and body.model.removeprefix("models/") != model:
        raise bad_request(f"model is {body.model!r:.100}, and the path names {model!r}; leave it out", param="model")
    (content, beginning), template = await named_content(call, model), template_of(service)
    num_bytes = call.num_bytes + (0 if content is None else len(content.source))
    return await off_loop(num_bytes, lambda: read_chat(body, template, num_bytes, beginning)), content


async def _start(model: str, call: Call[GenerateContentRequest], *, stream: bool) -> GeneratedContent:
    service = call.service
    chat, used = await _read(model, call)
    config = call.body.generation_config or GenerationConfig()
    form = await call.work(lambda: structured_outputs(config))
    params = await sampling_params(service, sampling_of(config), form)
    caller = call.caller("generate_content", model)
    if used is not None:
        caller = replace(caller, cache_salt=used.cache_salt)
    answer = await start_chat(service, caller, new_id("gen-"), chat, params, stream=stream)
    if used is not None:
        try:
            await settle(service, call.tenant, used)
        except BaseException:
            answer.stream.close()
            raise
    thinking = config.thinking_config or ThinkingConfig()
    return GeneratedContent(
        service, answer, model, num_top=params.logprobs, with_thoughts=bool(thinking.include_thoughts)
    )


_STATUSES = {405: 404, 408: 504}
"""Statuses that Google's API does not use -> the statuses that it uses instead."""
_NAMES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


class Gemini(Dialect):
    """The API of google-genai's clients. A stream consists only of chunks, and ends with the last chunk."""

    name = "gemini"
    routers = (router, cached_contents.router)

    def speaks(self, path: str, headers: Mapping[str, str]) -> bool:
        return (
            "x-goog-api-key" in headers
            or "x-goog-api-client" in headers
            or path.startswith(("/v1beta/", "/v1alpha/", "/v1/cachedContents"))
            or path.rpartition(":")[2] in METHODS
        )

    def key(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
        return headers.get("x-goog-api-key") or query.get("key") or shown_key(headers)

    def status(self, error: APIError) -> int:
        return _STATUSES.get(error.status, error.status)

    def error(self, error: APIError, request_id: str) -> dict[str, Any]:
        status, message = self.status(error), _message(error)
        details: list[dict[str, Any]] = []
        if error.param is not None:
            violation = {"field": error.param, "description": message}
            details.append({"@type": f"{_TYPE}BadRequest", "fieldViolations": [violation]})
        if error.headers and "Retry-After" in error.headers:
            details.append({"@type": f"{_TYPE}RetryInfo", "retryDelay": f"{error.headers['Retry-After']}s"})
        name = _NAMES.get(status, "INVALID_ARGUMENT" if status < 500 else "INTERNAL")
        described = {"code": status, "message": message, "status": name}
        return {"error": described | ({"details": details} if details else {})}

    def models(self, service: Service, names: Sequence[str], query: Mapping[str, str]) -> Mapping[str, Any]:
        start = number_in(query, "pageToken")
        end = start + page_size(query)
        page: dict[str, Any] = {"models": [_model(service, name) for name in names[start:end]]}
        return page | ({"nextPageToken": str(end)} if end < len(names) else {})

    def model(self, service: Service, names: Sequence[str], name: str) -> Mapping[str, Any]:
        if name not in names:
            raise unknown_model(name)
        return _model(service, name)


def _message(error: APIError) -> str:
    """Return the message of an error, in Google's words where clients look for these words."""
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
