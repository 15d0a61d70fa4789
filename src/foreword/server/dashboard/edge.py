"""The layer between NiceGUI and its clients: two headers, and clients that leave.

Knows ASGI and NiceGUI's app. NiceGUI sets its headers in middleware of Starlette's `BaseHTTPMiddleware`, which raises
"No response returned" if a client leaves before its answer begins; this layer ignores such clients.
"""

from __future__ import annotations

import logging

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger(__name__)

FILES_NEVER_CHANGE = "public, max-age=31536000, immutable"
"""The paths of these files contain NiceGUI's version."""


def give_edge(nicegui_app: FastAPI, files: str) -> None:
    """Replace NiceGUI's own middleware by an Edge. `files` is the beginning of the paths of its files."""
    nicegui_app.user_middleware[:] = [
        middleware
        for middleware in nicegui_app.user_middleware
        if not (isinstance(middleware.cls, type) and issubclass(middleware.cls, BaseHTTPMiddleware))
    ]
    nicegui_app.add_middleware(Edge, files=files)


class Edge:
    """Lets browsers keep files, puts a proxy's prefix before redirections, and lets clients leave."""

    def __init__(self, app: ASGIApp, *, files: str) -> None:
        self._app = app
        self._files = files

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))  # before a mount below changes the scope
        has_left = has_begun = False

        async def receiving() -> Message:
            nonlocal has_left
            message = await receive()
            has_left = has_left or message["type"] == "http.disconnect"
            return message

        async def sending(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                self._set_headers(path, Headers(scope=scope), message["status"], MutableHeaders(raw=message["headers"]))
            await send(message)

        try:
            await self._app(scope, receiving, sending)
        except Exception:
            if not has_left or has_begun:
                raise
            logger.debug("a client left before its answer had begun", exc_info=True)

    def _set_headers(self, path: str, request_headers: Headers, status: int, headers: MutableHeaders) -> None:
        exists = status in (200, 206, 304)
        if exists and path.startswith(self._files) and not path.startswith(f"{self._files}dynamic_resources/"):
            headers["Cache-Control"] = FILES_NEVER_CHANGE
        if headers.get("Location", "").startswith("/"):
            headers["Location"] = request_headers.get("x-forwarded-prefix", "") + headers["Location"]
