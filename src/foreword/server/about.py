"""Endpoints about the server itself, and endpoints that convert texts to tokens and back. None generates text.

/health, /version, /v1/models, /tokenize, /detokenize. For operators, /v1/cluster reports the replicas, and
/v1/load_lora_adapter and /v1/unload_lora_adapter change which adapters are served.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from pydantic import Field
from starlette.responses import Response

from foreword import __version__
from foreword.request import LoRARequest
from foreword.server.api_errors import APIError, bad_request, unknown_model
from foreword.server.bodies.fields import Body
from foreword.server.calls import CallWith, operators_body_of
from foreword.server.crews import off_loop
from foreword.server.dialects.openai.fields import DetokenizeRequest, TokenizeRequest
from foreword.server.dialects.openai.messages import read_prompt
from foreword.server.http import Authorized, dialect_of, json_response, service_of
from foreword.server.service import Service

router = APIRouter()
MOST_LISTED = 256


@router.get("/health", tags=["server"])
async def health(request: Request) -> Response:
    """Answer 200 while the engine works, otherwise 503. The body names failing listeners, such as traces."""
    service = service_of(request)
    failing = {
        listener.name: {"reason": listener.failure, "failures": listener.num_failures, "lost": listener.num_lost}
        for listener in service.listeners()
        if listener.failure is not None
    }
    details = {"failing_listeners": failing} if failing else {}
    if service.thread.failure is not None:
        return json_response({"status": "failed", "reason": service.thread.failure, **details}, 503)
    if not service.thread.num_engines:
        return json_response({"status": "waiting", "reason": "no replica is ready", **details}, 503)
    return json_response({"status": "ok", **details})


@router.get("/ready", tags=["server"])
async def ready(request: Request) -> Response:
    """Answer like /health until SIGTERM, then 503. The listening socket closes later."""
    if service_of(request).is_stopping:
        return json_response({"status": "stopping"}, 503)
    return await health(request)


@router.get("/ping", tags=["server"])
@router.post("/ping", tags=["server"])
async def ping(request: Request) -> Response:
    """Answer like /health, under the path that some clouds use."""
    return await health(request)


@router.get("/version", tags=["server"])
async def version() -> Response:
    """Report the server's version."""
    return json_response({"version": __version__})


@router.get("/v1/models", tags=["server"])
@router.get("/v1beta/models", tags=["gemini"])
@router.get("/v1alpha/models", tags=["gemini"])
async def models(request: Request, tenant: Authorized) -> Response:
    """List the names under which the server serves its model."""
    service = service_of(request)
    return json_response(dialect_of(request).models(service, service.models_of(tenant), request.query_params))


@router.get("/v1/models/{model:path}", tags=["server"])
@router.get("/v1beta/models/{model:path}", tags=["gemini"])
@router.get("/v1alpha/models/{model:path}", tags=["gemini"])
async def model(model: str, request: Request, tenant: Authorized) -> Response:
    """Describe the model under one of its names."""
    service = service_of(request)
    return json_response(dialect_of(request).model(service, service.models_of(tenant), model))


@router.get("/v1/template", tags=["server"])
async def template(request: Request, tenant: Authorized) -> Response:
    """Report which parts of messages the chat template leaves out, how messages are rewritten for the template, and
    which turns the template changes later, so that their KV cannot be reused.
    """
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


@router.post("/tokenize", tags=["tokens"])
async def tokenize(call: CallWith[TokenizeRequest]) -> Response:
    """Convert a text or a conversation to token ids."""
    body, service = call.body, call.service
    token_ids = (await read_prompt(call)).token_ids

    def answer() -> Response:
        tokens = token_ids.tolist()
        fields = {"count": len(tokens), "max_model_len": service.max_model_len, "tokens": tokens}
        if body.return_token_strs:
            fields["token_strs"] = [service.tokenizer.token_text(token_id) for token_id in tokens]
        return json_response(fields)

    return await off_loop(64 * len(token_ids), answer)


@router.post("/detokenize", tags=["tokens"])
async def detokenize(call: CallWith[DetokenizeRequest]) -> Response:
    """Convert token ids to text, with special tokens by name."""
    body, service = call.body, call.service
    service.check_model(body.model, call.tenant)
    largest, size = max(body.tokens, default=0), service.tokenizer.vocab_size
    if largest >= size:
        raise bad_request(f"token {largest} is out of range; ids are 0 to {size - 1}", param="tokens")
    text = await call.work(lambda: service.tokenizer.spell(body.tokens))
    return json_response({"prompt": text})


@router.get("/v1/cluster")
async def cluster(request: Request) -> Response:
    """Report the replicas, the routers' view of the replicas' caches, and the routing's counts since the start."""
    report = _service(request).thread.report()
    assert report is not None
    return json_response({"object": "cluster", **report})


@router.get("/v1/cluster/explain")
async def explain(request: Request, request_id: str | None = None, limit: int = 20) -> Response:
    """Say why requests went to their replicas, the newest first. With `request_id`, list all attempts of a response."""
    service = _service(request)
    if not 1 <= limit <= MOST_LISTED:
        raise bad_request(f"limit={limit} is out of range; use 1 to {MOST_LISTED}", param="limit")
    decisions = service.thread.decisions(request_id, limit)
    if request_id is not None and not decisions:
        raise APIError(404, f"There is no decision about {request_id!r:.100} (any more).", code="not_found")
    return json_response({"object": "list", "data": decisions})


def _service(request: Request) -> Service:
    """Return the service. Raises APIError 401 or 403 if the caller is no operator, 404 if a single engine serves."""
    service = service_of(request)
    service.operators.check(request.scope)
    if service.thread.report() is None:
        raise APIError(404, "One engine serves here; start the server with --replicas for several.", code="no_cluster")
    return service


Name = Annotated[str, Field(min_length=1, max_length=256)]


class LoadRequest(Body):
    """POST /v1/load_lora_adapter."""

    HOLDS = "tokens"

    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    load_inplace: bool = False


class UnloadRequest(Body):
    """POST /v1/unload_lora_adapter."""

    HOLDS = "tokens"

    lora_name: Name
    lora_int_id: int | None = None


@router.post("/v1/load_lora_adapter", tags=["adapters"])
async def load(body: Annotated[LoadRequest, Depends(operators_body_of(LoadRequest))], request: Request) -> Response:
    """Read and check the adapter in a folder, and serve it under a name. For operators."""
    service = service_of(request)
    lora = LoRARequest(body.lora_name, lora_path=body.lora_path, load_inplace=body.load_inplace)
    service.adapters.check_new(lora)
    adapter = await service.adapters.load_in(service.crews.adapters, lora)
    service.adapters.check_new(lora)  # another call may have added this name meanwhile
    service.adapters.add(lora)
    return json_response({"object": "adapter", "id": body.lora_name, "digest": adapter.digest, "loaded": True})


@router.post("/v1/unload_lora_adapter", tags=["adapters"])
async def unload(
    body: Annotated[UnloadRequest, Depends(operators_body_of(UnloadRequest))], request: Request
) -> Response:
    """Stop serving an adapter. Running requests keep the adapter until they end. For operators."""
    if not service_of(request).adapters.remove(body.lora_name):
        raise unknown_model(body.lora_name)
    return json_response({"object": "adapter", "id": body.lora_name, "loaded": False})
