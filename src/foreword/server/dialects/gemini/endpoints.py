"""/v1/models/NAME:generateContent, :streamGenerateContent and :countTokens; the same under /v1beta and /v1alpha.

Knows Google's paths and what its fields mean for a chat; answer.py writes the answers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import Response

from foreword.server.api_errors import bad_request
from foreword.server.calls import Call
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
from foreword.server.http import JsonArray, json_response, respond
from foreword.server.intake import call_of
from foreword.server.service import new_id

METHODS = ("generateContent", "streamGenerateContent", "countTokens")

router = APIRouter(tags=["gemini"])


@served(router, "POST", "models/{model:path}:generateContent", GenerateContentRequest)
async def generate_content(
    model: str, call: Annotated[Call[GenerateContentRequest], Depends(call_of(GenerateContentRequest))]
) -> Response:
    """Answer a conversation."""
    return await respond(call.request, await _start(model, call, stream=False))


@served(router, "POST", "models/{model:path}:streamGenerateContent", GenerateContentRequest)
async def stream_generate_content(
    model: str, call: Annotated[Call[GenerateContentRequest], Depends(call_of(GenerateContentRequest))]
) -> Response:
    """Answer a conversation in chunks: server-sent events with alt=sse, else one JSON array."""
    form = call.request.query_params.get("alt", "json")
    if form not in ("sse", "json"):
        raise bad_request(f"alt={form!r:.60} is not known; use sse or json", param="alt")
    writer = await _start(model, call, stream=True)
    return await respond(call.request, writer, None if form == "sse" else JsonArray())


@served(router, "POST", "models/{model:path}:countTokens", CountTokensRequest)
async def count_tokens(
    model: str, call: Annotated[Call[CountTokensRequest], Depends(call_of(CountTokensRequest))]
) -> Response:
    """The number of tokens of contents' prompt, or of a whole request's."""
    body, asked = call.body, call.body.generate_content_request
    if (body.contents is None) == (asked is None):
        raise bad_request("give either contents or generateContentRequest")
    if asked is None:
        asked = GenerateContentRequest.model_construct(contents=body.contents)
    chat, use = await _read(model, Call(asked, call.request, call.service, call.tenant, call.num_bytes))
    num_tokens = await num_prompt_tokens(call.service, replace(chat, marks=()))
    counted = {"totalTokens": num_tokens, "promptTokensDetails": tokens_of_text(num_tokens)}
    return json_response(counted | ({"cachedContentTokenCount": use.content.num_tokens} if use is not None else {}))


async def _read(model: str, call: Call[GenerateContentRequest]) -> tuple[Chat, Use | None]:
    """The chat that a call of a model asks for, and the cached content that it begins with."""
    body, service = call.body, call.service
    service.check_model(model, call.tenant)
    if body.model is not None and body.model.removeprefix("models/") != model:
        raise bad_request(f"model is {body.model!r:.100}, and the path names {model!r}; leave it out", param="model")
    use, template = await use_of(call, model), template_of(service)
    if use is None:
        return await call.work(lambda: read_chat(body, template, call.num_bytes)), None
    num_bytes = call.num_bytes + len(use.content.source)
    return await off_loop(num_bytes, lambda: read_chat(body, template, num_bytes, use.beginning)), use


async def _start(model: str, call: Call[GenerateContentRequest], *, stream: bool) -> GeneratedContent:
    service = call.service
    chat, use = await _read(model, call)
    config = call.body.generation_config or GenerationConfig()
    form = await call.work(lambda: structured_outputs(config))
    params = await sampling_params(service, config, form)
    caller = call.caller("generate_content", model)
    if use is not None:
        caller = replace(caller, cache_salt=use.content.cache_salt)
    answer = await start_chat(service, caller, new_id("gen-"), chat, params, stream=stream)
    if use is not None:
        try:
            await settle(service, call.tenant, use)
        except BaseException:
            answer.stream.close()
            raise
    thinking = config.thinking_config or ThinkingConfig()
    return GeneratedContent(
        service, answer, model, num_top=params.logprobs, with_thoughts=bool(thinking.include_thoughts)
    )
