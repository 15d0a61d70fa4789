"""Ollama's dialect: /api/chat, /api/generate and /api/embed; about the model: /api/tags, /api/ps, /api/show.

A call belongs to this dialect by its path. A server has only the model that it was started with, so calls that would
change the models get 501.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from foreword import __version__
from foreword.engine import Prompt
from foreword.server import embeddings
from foreword.server.answer_stream import AnswerStream
from foreword.server.api_errors import APIError, bad_request, unknown_model
from foreword.server.bodies.fields import Body
from foreword.server.calls import Call, CallWith, sampling_params
from foreword.server.chats.chat import ChatAnswer, start_chat
from foreword.server.crews import off_loop
from foreword.server.dialect import Dialect
from foreword.server.dialects.ollama.answer import OllamaAnswer, now
from foreword.server.dialects.ollama.fields import (
    EmbedRequest,
    GenerateRequest,
    ModelRequest,
    OldEmbedRequest,
    OllamaChatRequest,
)
from foreword.server.dialects.ollama.messages import can_think, chat_of, output_format, sampling_of
from foreword.server.http import Authorized, Frames, json_response, respond, service_of
from foreword.server.service import Service, new_id

LATEST = ":latest"
NEVER = "9999-12-31T23:59:59Z"
_WEIGHTS = (".safetensors", ".gguf", ".bin")

Json = dict[str, Any]


def served_name(names: Sequence[str], name: str) -> str:
    """Return the server's name for the model that a client names. Raises APIError 404."""
    for known_name in (name, name.removesuffix(LATEST)):
        if known_name in names:
            return known_name
    raise unknown_model(name.removesuffix(LATEST))


def listed(service: Service, names: Sequence[str]) -> Json:
    """Return the body of /api/tags."""
    about = _about(service) | {"modified_at": _modified(service)}
    return {"models": [{"name": name, "model": name, **about} for name in names]}


def running(service: Service, names: Sequence[str]) -> Json:
    """Return the body of /api/ps."""
    on_cpu = service.llm.config.model.device == "cpu"
    about = _about(service)
    about |= {
        "expires_at": NEVER,
        "size_vram": 0 if on_cpu else about["size"],
        "context_length": service.max_model_len,
    }
    return {"models": [{"name": name, "model": name, **about} for name in names]}


def shown(service: Service, name: str) -> Json:
    """Return the body of /api/show for a model."""
    tokenizer, family = service.llm.tokenizer, _family(service)
    template = (tokenizer and tokenizer.chat_template) or ""
    parameters = {"num_ctx": service.max_model_len, **service.sampling_defaults}
    capabilities = ["completion"] + (["tools"] if template else [])
    if tokenizer is not None and can_think(service):
        capabilities.append("thinking")
    if service.llm.pictures is not None:
        capabilities.append("vision")
    if service.llm.engine.limits.hidden_size is not None and service.llm.pooling.refusal is None:
        capabilities.append("embedding")
    return {
        "modelfile": f"# foreword serves this model; it has no Modelfile.\nFROM {name}\n",
        "parameters": "\n".join(f"{key:<24} {value}" for key, value in parameters.items()),
        "template": template,
        "details": _details(service),
        "model_info": {"general.architecture": family, f"{family}.context_length": service.max_model_len},
        "capabilities": capabilities,
        "modified_at": _modified(service),
    }


def _about(service: Service) -> Json:
    return {
        "size": _num_bytes(Path(service.llm.config.model.model)),
        "digest": service.llm.cache_identity.model_id,
        "details": _details(service),
    }


def _details(service: Service) -> Json:
    family, of_layers = _family(service), service.llm.dtype
    is_gguf = service.llm.config.model.model.endswith(".gguf")
    return {
        "parent_model": "",
        "format": "gguf" if is_gguf else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": "" if is_gguf else of_layers,
    }


def _family(service: Service) -> str:
    code = service.llm.cache_identity.facts.get("model", {}).get("code", {})
    return str(code.get("family") or code.get("class", "unknown").rpartition(".")[2])


def _modified(service: Service) -> str:
    return datetime.fromtimestamp(service.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _num_bytes(model: Path) -> int:
    """Return the number of bytes of the weight files at this path; 0 if there are none."""
    files = model.iterdir() if model.is_dir() else [model]
    return sum(file.stat().st_size for file in files if file.suffix in _WEIGHTS and file.is_file())


router = APIRouter(tags=["ollama"])


@router.post("/api/chat")
async def chat(call: CallWith[OllamaChatRequest]) -> Response:
    """Answer a conversation."""
    body, service = call.body, call.service
    caller = call.caller("ollama.chat", _model(call, body.model))
    if not body.messages:  # the call only asks to load the model
        return json_response(_loaded(body) | {"message": {"role": "assistant", "content": ""}})
    chat = await call.work(lambda: chat_of(service, body, call.num_bytes))
    params = await sampling_params(service, sampling_of(body), output_format(body))
    answer = await start_chat(service, caller, new_id("ollama-"), chat, params, stream=body.stream is not False)
    return await respond(call.request, OllamaAnswer(service, answer, body), Frames())


@router.post("/api/generate")
async def generate(call: CallWith[GenerateRequest]) -> Response:
    """Answer a text, or continue it."""
    body, service = call.body, call.service
    caller = call.caller("ollama.generate", _model(call, body.model))
    call.refuse_unsupported("{}: not supported by this server; leave it out")
    if not body.prompt:  # the call only asks to load the model
        return json_response(_loaded(body) | {"response": ""})
    params = await sampling_params(service, sampling_of(body), output_format(body))
    answer: ChatAnswer | AnswerStream
    if body.raw:
        if body.context:
            raise bad_request("context cannot be combined with raw; send the whole prompt as text", param="context")
        for name in ("images", "system"):
            if getattr(body, name):
                raise bad_request(f"{name} cannot be combined with raw; leave raw out", param=name)
        prompt = service.fit(Prompt(await service.encode(body.prompt)), params)
        answer = await service.start(caller, new_id("ollama-"), [prompt], params, stream=body.stream is not False)
    else:
        chat = await call.work(lambda: chat_of(service, body, call.num_bytes))
        answer = await start_chat(service, caller, new_id("ollama-"), chat, params, stream=body.stream is not False)
    return await respond(call.request, OllamaAnswer(service, answer, body), Frames())


@router.post("/api/embed")
async def embed(call: CallWith[EmbedRequest]) -> Response:
    """Return the vectors of texts."""
    body, started = call.body, time.monotonic()
    caller = call.caller("ollama.embed", _model(call, body.model))
    embedded = await embeddings.embed(
        call.service, caller, new_id("ollama-"), body.input or [], body.dimensions, truncates=body.truncate is not False
    )
    took = {"total_duration": round(1e9 * (time.monotonic() - started)), "load_duration": 0}
    counts = {"prompt_eval_count": embedded.num_tokens, "prompt_cached_count": embedded.num_cached_tokens}

    def write() -> Response:
        vectors = [vector.tolist() for vector in embedded.vectors]
        return json_response({"model": body.model, "embeddings": vectors} | took | counts)

    return await off_loop(embedded.num_json_bytes, write)


@router.post("/api/embeddings")
async def old_embed(call: CallWith[OldEmbedRequest]) -> Response:
    """Return the vector of one text."""
    body = call.body
    caller = call.caller("ollama.embed", _model(call, body.model))
    embedded = await embeddings.embed(call.service, caller, new_id("ollama-"), body.prompt or [], None, truncates=True)
    vectors = embedded.vectors or [np.empty(0, np.float32)]
    return await off_loop(embedded.num_json_bytes, lambda: json_response({"embedding": vectors[0].tolist()}))


@router.post("/api/show")
async def show(call: CallWith[ModelRequest]) -> Response:
    """Report the model's properties and abilities."""
    name = call.body.model or call.body.name
    if name is None:
        raise bad_request("model is required", param="model")
    return json_response(shown(call.service, _model(call, name)))


@router.get("/api/tags")
async def tags(request: Request, tenant: Authorized) -> Response:
    """List the names under which the server serves its model."""
    return json_response(listed(service_of(request), service_of(request).models_of(tenant)))


@router.get("/api/ps")
async def ps(request: Request, tenant: Authorized) -> Response:
    """Report the model, which stays in memory as long as the server runs."""
    return json_response(running(service_of(request), service_of(request).models_of(tenant)))


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def alive() -> Response:
    """Answer the first call of Ollama's clients, by which they see that a server runs."""
    return PlainTextResponse("foreword is running")


@router.get("/api/version")
async def version() -> Response:
    """Report the version of this server."""
    return json_response({"version": __version__})


@router.post("/api/pull", include_in_schema=False)
@router.post("/api/push", include_in_schema=False)
@router.post("/api/create", include_in_schema=False)
@router.post("/api/copy", include_in_schema=False)
@router.delete("/api/delete", include_in_schema=False)
@router.post("/api/blobs/{digest}", include_in_schema=False)
async def change_models(request: Request, tenant: Authorized) -> Response:
    """Refuse with 501, because this server has no store of models. /openapi.json does not list refused calls."""
    raise APIError(
        501,
        f"{request.url.path}: this server has no store of models to change; it serves the one that it was started "
        "with: foreword serve FOLDER, or a GGUF file",
        code="not_implemented",
    )


def _model(call: Call[Body], name: str) -> str:
    """Return the server's name for a model. Raises APIError 404 for another model."""
    return served_name(call.service.models_of(call.tenant), name)


def _loaded(body: OllamaChatRequest | GenerateRequest) -> dict[str, Any]:
    """Return the answer to a call that only loads or unloads the model. The model always stays loaded."""
    reason = "unload" if body.keep_alive in (0, "0") else "load"
    return {"model": body.model, "created_at": now(), "done": True, "done_reason": reason}


class Ollama(Dialect):
    """The API of Ollama's clients. A stream consists of lines of JSON. An error is a line too."""

    name = "ollama"
    routers = (router,)

    def speaks(self, path: str, headers: Mapping[str, str]) -> bool:
        return path.startswith("/api/")

    def error(self, error: APIError, request_id: str) -> dict[str, Any]:
        return {"error": str(error)}

    def models(self, service: Service, names: Sequence[str], query: Mapping[str, str]) -> Mapping[str, Any]:
        return listed(service, names)

    def model(self, service: Service, names: Sequence[str], name: str) -> Mapping[str, Any]:
        return shown(service, served_name(names, name))
