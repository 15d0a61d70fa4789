"""/v1/models/NAME:generateContent, :streamGenerateContent and :countTokens; the same under /v1beta and /v1alpha.

Knows Google's paths and what its fields mean for a chat; answer.py writes the answers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from foreword.server.access.tenants import Tenant
from foreword.server.api_errors import bad_request
from foreword.server.calls import caller_of
from foreword.server.chats.chat import Chat, num_prompt_tokens, start_chat
from foreword.server.crews import off_loop
from foreword.server.dialects.gemini.answer import GeneratedContent, tokens_of_text
from foreword.server.dialects.gemini.cached_contents import Use, settle, use_of
from foreword.server.dialects.gemini.contents import read_chat, sampling_params, structured_outputs, template_of
from foreword.server.dialects.gemini.fields import (
    CountTokensRequest,
    GenerateContentRequest,
    GenerationConfig,
    ThinkingConfig,
    served,
)
from foreword.server.http import Authorized, JsonArray, dialect_of, json_response, respond, service_of
from foreword.server.intake import body_of, with_body
from foreword.server.service import Service, new_id

METHODS = ("generateContent", "streamGenerateContent", "countTokens")

router = APIRouter(tags=["gemini"])


@served(router, "POST", "models/{model:path}:generateContent", GenerateContentRequest)
async def generate_content(
    model: str,
    body: Annotated[GenerateContentRequest, Depends(body_of(GenerateContentRequest))],
    request: Request,
    tenant: Authorized,
) -> Response:
    """Answer a conversation."""
    return await respond(request, await _start(model, body, request, tenant, stream=False))


@served(router, "POST", "models/{model:path}:streamGenerateContent", GenerateContentRequest)
async def stream_generate_content(
    model: str,
    body: Annotated[GenerateContentRequest, Depends(body_of(GenerateContentRequest))],
    request: Request,
    tenant: Authorized,
) -> Response:
    """Answer a conversation in chunks: server-sent events with alt=sse, else one JSON array."""
    form = request.query_params.get("alt", "json")
    if form not in ("sse", "json"):
        raise bad_request(f"alt={form!r:.60} is not known; use sse or json", param="alt")
    writer = await _start(model, body, request, tenant, stream=True)
    return await respond(request, writer, None if form == "sse" else JsonArray())


@served(router, "POST", "models/{model:path}:countTokens", CountTokensRequest)
async def count_tokens(
    model: str,
    body: Annotated[CountTokensRequest, Depends(body_of(CountTokensRequest))],
    request: Request,
    tenant: Authorized,
) -> Response:
    """The number of tokens of contents' prompt, or of a whole request's."""
    service = service_of(request)
    asked = body.generate_content_request
    if (body.contents is None) == (asked is None):
        raise bad_request("give either contents or generateContentRequest")
    if asked is None:
        asked = GenerateContentRequest.model_construct(contents=body.contents)
    chat, use = await _read(service, model, asked, request, tenant)
    num_tokens = await num_prompt_tokens(service, replace(chat, marks=()))
    counted = {"totalTokens": num_tokens, "promptTokensDetails": tokens_of_text(num_tokens)}
    return json_response(counted | ({"cachedContentTokenCount": use.content.num_tokens} if use is not None else {}))


@router.get("/v1beta/models")
@router.get("/v1alpha/models")
async def models(request: Request, tenant: Authorized) -> Response:
    """The names under which the server serves its model."""
    service = service_of(request)
    return json_response(dialect_of(request).models(service, service.models_of(tenant), request.query_params))


@router.get("/v1beta/models/{model:path}")
@router.get("/v1alpha/models/{model:path}")
async def one_model(model: str, request: Request, tenant: Authorized) -> Response:
    """One of these names."""
    service = service_of(request)
    return json_response(dialect_of(request).model(service, service.models_of(tenant), model))


async def _read(
    service: Service, model: str, body: GenerateContentRequest, request: Request, tenant: Tenant
) -> tuple[Chat, Use | None]:
    """The chat that a call of a model asks for, and the cached content that it begins with."""
    service.check_model(model, tenant)
    if body.model is not None and body.model.removeprefix("models/") != model:
        raise bad_request(f"model is {body.model!r:.100}, and the path names {model!r}; leave it out", param="model")
    use, template = await use_of(service, tenant, body, model), template_of(service)
    if use is None:
        return await with_body(request, lambda: read_chat(body, template, request.state.num_body_bytes)), None
    num_bytes = request.state.num_body_bytes + len(use.content.source)
    return await off_loop(num_bytes, lambda: read_chat(body, template, num_bytes, use.beginning)), use


async def _start(
    model: str, body: GenerateContentRequest, request: Request, tenant: Tenant, *, stream: bool
) -> GeneratedContent:
    service = service_of(request)
    chat, use = await _read(service, model, body, request, tenant)
    config = body.generation_config or GenerationConfig()
    form = await with_body(request, lambda: structured_outputs(config))
    params = await sampling_params(service, config, form)
    caller = replace(caller_of(body, request, tenant, "generate_content"), model=model)
    if use is not None:
        caller = replace(caller, cache_salt=use.content.cache_salt)
    answer = await start_chat(service, caller, new_id("gen-"), chat, params, stream=stream)
    if use is not None:
        try:
            await settle(service, tenant, use)
        except BaseException:
            answer.stream.close()
            raise
    thinking = config.thinking_config or ThinkingConfig()
    return GeneratedContent(
        service, answer, model, num_top=params.logprobs, with_thoughts=bool(thinking.include_thoughts)
    )
