"""Endpoints about the server itself, and from text to tokens and back.

Knows the endpoints that generate nothing: /health, /version, /v1/models, /tokenize, /detokenize.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from foreword import __version__
from foreword.server.api_errors import bad_request
from foreword.server.bodies.off_loop import off_loop
from foreword.server.dialects.openai.fields import DetokenizeRequest, TokenizeRequest
from foreword.server.dialects.openai.messages import read_prompt
from foreword.server.http import Authorized, dialect_of, json_response, service_of
from foreword.server.intake import body_of, takes, with_body

router = APIRouter()


@router.get("/health", tags=["server"])
async def health(request: Request) -> Response:
    """200 while the engine works, 503 when it does not; names listeners (records, traces) that are failing."""
    service = service_of(request)
    details: dict[str, Any] = {}
    failing = {listener.name: listener for listener in service.listeners() if listener.failure is not None}
    if failing:
        details["failing_listeners"] = {
            name: {"reason": listener.failure, "failures": listener.num_failures, "lost": listener.num_lost}
            for name, listener in failing.items()
        }
    if service.thread.failure is not None:
        return json_response({"status": "failed", "reason": service.thread.failure, **details}, 503)
    if not service.thread.num_engines:
        return json_response({"status": "waiting", "reason": "no replica is ready", **details}, 503)
    return json_response({"status": "ok", **details})


@router.get("/ready", tags=["server"])
async def ready(request: Request) -> Response:
    """200 while the server takes requests: as /health, but 503 from SIGTERM on, before the listening socket closes."""
    if service_of(request).is_stopping:
        return json_response({"status": "stopping"}, 503)
    return await health(request)


@router.get("/ping", tags=["server"])
@router.post("/ping", tags=["server"])
async def ping(request: Request) -> Response:
    """The same as /health, for clouds that ask here."""
    return await health(request)


@router.get("/version", tags=["server"])
async def version() -> Response:
    """The server's version."""
    return json_response({"version": __version__})


@router.get("/v1/models", tags=["server"])
async def models(request: Request, tenant: Authorized) -> Response:
    """The names under which the server serves its model."""
    service = service_of(request)
    return json_response(dialect_of(request).models(service, service.models_of(tenant), request.query_params))


@router.get("/v1/models/{model:path}", tags=["server"])
async def model(model: str, request: Request, tenant: Authorized) -> Response:
    """One of these names."""
    service = service_of(request)
    return json_response(dialect_of(request).model(service, service.models_of(tenant), model))


@router.get("/v1/template", tags=["server"])
async def template(request: Request, tenant: Authorized) -> Response:
    """What the chat template shows, how messages are rewritten for it, and what it spoils."""
    service = service_of(request)
    report, tokenizer = service.template_report, service.llm.tokenizer
    form = None if tokenizer is None else tokenizer.reply_format
    return json_response(
        {
            "object": "template",
            "has_template": tokenizer is not None and tokenizer.chat_template is not None,
            "reply_format": None if form is None else form.name,
            "changes": report.changes,
            "shown_by_changes": [str(loss) for loss in report.as_given if loss.kind not in report.lost_kinds()],
            "not_shown": [str(loss) for loss in report.losses],
            "spoils_reuse": [str(change) for change in service.template_changes],
        }
    )


@router.post("/tokenize", tags=["tokens"], openapi_extra=takes(TokenizeRequest))
async def tokenize(
    body: Annotated[TokenizeRequest, Depends(body_of(TokenizeRequest))], request: Request, tenant: Authorized
) -> Response:
    """Token ids of a text or a conversation."""
    service = service_of(request)
    token_ids = (await read_prompt(service, tenant, body, request)).token_ids

    def answer() -> Response:
        tokens = token_ids.tolist()
        fields = {"count": len(tokens), "max_model_len": service.max_model_len, "tokens": tokens}
        if body.return_token_strs:
            fields["token_strs"] = [service.tokenizer.token_text(token_id) for token_id in tokens]
        return json_response(fields)

    return await off_loop(64 * len(token_ids), answer)


@router.post("/detokenize", tags=["tokens"], openapi_extra=takes(DetokenizeRequest))
async def detokenize(
    body: Annotated[DetokenizeRequest, Depends(body_of(DetokenizeRequest))], request: Request, tenant: Authorized
) -> Response:
    """Text of token ids, special tokens by name."""
    service = service_of(request)
    service.check_model(body.model, tenant)
    largest, size = max(body.tokens, default=0), service.tokenizer.vocab_size
    if largest >= size:
        raise bad_request(f"token {largest} is out of range; ids are 0 to {size - 1}", param="tokens")
    text = await with_body(request, lambda: service.tokenizer.spell(body.tokens))
    return json_response({"prompt": text})
