"""The FastAPI app: all endpoints, limits on incoming requests, and errors in the caller's dialect.

The path of a request: app (chooses the dialect) -> an endpoint in dialects/ (reads the fields) -> service (checks the
tenant, picks the namespace) -> engine_thread (runs it) -> the dialect's writer (writes the answer) -> http (sends it).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from foreword import __version__
from foreword.errors import ForewordError
from foreword.llm import LLM
from foreword.server import about, cache_api, schemas_api
from foreword.server.api_errors import APIError
from foreword.server.arrival import Arrival
from foreword.server.calls import document_bodies, explain_invalid
from foreword.server.dialect import Dialect
from foreword.server.dialects.anthropic.endpoints import Anthropic
from foreword.server.dialects.gemini.endpoints import Gemini
from foreword.server.dialects.ollama.endpoints import Ollama
from foreword.server.dialects.openai.dialect import OpenAI
from foreword.server.engine_thread import in_a_thread
from foreword.server.full_passes import FullPasses
from foreword.server.http import TimeLimit, error_response
from foreword.server.options import ServerConfig
from foreword.server.service import OpenDoor, Service, new_id

logger = logging.getLogger(__name__)

DIALECTS: tuple[Dialect, ...] = (Anthropic(), Gemini(), Ollama(), OpenAI())
"""Dialects in the order in which they may claim a call. The last dialect takes every call."""


def make_app(llm: LLM, config: ServerConfig, model_name: str, open_door: OpenDoor = in_a_thread) -> FastAPI:
    """Build the app around the engine of `llm`, or around the engines that `open_door` connects to.

    The app owns the engines. Raises ConfigError for wrong options.
    """
    service = Service(llm, config, model_name, open_door)
    passes = FullPasses(lambda: service.http_requests.num_running)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.thread.start()
        service.traffic_log.start()
        passes.start()
        try:
            yield
        finally:
            await passes.stop()
            await service.traffic_log.stop()
            for crew in service.crews:
                crew.close()
            await service.thread.stop()
            if service.tracing is not None:
                await asyncio.to_thread(service.tracing.close)
            if service.recorder is not None:
                await asyncio.to_thread(service.recorder.close)

    app = _App(title="foreword", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.proxy_path = config.root_path
    app.state.service = service
    routers = [router for dialect in DIALECTS for router in dialect.routers]
    routers += [about.router, cache_api.router, schemas_api.router]
    for router in routers:
        app.include_router(router)
    document_bodies(app, routers)
    for kind in (ForewordError, RequestValidationError, HTTPException, Exception):  # starlette logs the last kind
        app.add_exception_handler(kind, _answer_error)
    app.add_middleware(TimeLimit, limit_s=config.request_timeout_s)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=config.allowed_origins, allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(
        Arrival, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s, counts=service.http_requests
    )
    return app


class _App(FastAPI):
    """An app that chooses each call's dialect. A proxy may publish the app under a path."""

    proxy_path = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.proxy_path and scope["type"] != "lifespan":  # before any middleware sees the path
            scope["root_path"] = self.proxy_path
            if not f"{scope['path']}/".startswith(f"{self.proxy_path}/"):  # the proxy stripped it
                scope["path"] = self.proxy_path + scope["path"]
        if scope["type"] == "http":
            send = self._choose_dialect(scope, send)
        await super().__call__(scope, receive, send)

    def _choose_dialect(self, scope: Scope, send: Send) -> Send:
        """Store the call's dialect and a new id in its scope. Returns a `send` that adds the id as a header."""
        dialect, path = choose(scope["path"].removeprefix(self.proxy_path), Headers(scope=scope))
        scope["path"] = self.proxy_path + path
        request_id = new_id("req_")
        scope["state"] = {**scope.get("state", {}), "dialect": dialect, "request_id": request_id}

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["request-id"] = headers["x-request-id"] = request_id
            await send(message)

        return with_id


def choose(path: str, headers: Mapping[str, str]) -> tuple[Dialect, str]:
    """Return the dialect of a call, and the call's path without the dialect's name in front."""
    for dialect in DIALECTS:
        if path.startswith(f"/{dialect.name}/"):
            return dialect, path.removeprefix(f"/{dialect.name}")
    return next(dialect for dialect in DIALECTS if dialect.speaks(path, headers)), path


async def _answer_error(request: Request, error: Exception) -> Response:
    match error:
        case RequestValidationError():
            error = explain_invalid([{**item, "loc": item["loc"][1:]} for item in error.errors()])  # without "query"
        case HTTPException():
            error = _explain_http(request, error)
    return error_response(request, error)


def _explain_http(request: Request, error: HTTPException) -> APIError:
    headers = dict(error.headers) if error.headers else None
    if error.status_code == 404:
        return APIError(404, f"Unknown request URL: {request.method} {request.url.path}", code="unknown_url")
    if error.status_code == 405:
        message = f"Not allowed to {request.method} on {request.url.path}"
        return APIError(405, message, code="method_not_supported", headers=headers)
    return APIError(error.status_code, str(error.detail), headers=headers)
