"""Mounts the dashboard, and checks who may see it.

NiceGUI keeps its pages in one global app, so a process has one dashboard. `run.serve` mounts it, not `make_app`.
Everything under /dashboard, WebSockets included, passes one check. A browser without the operator's key gets a form.
NiceGUI sets its headers in middleware of Starlette's `BaseHTTPMiddleware`, which raises "No response returned" if a
client leaves before its answer begins. `Edge` replaces this middleware.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from html import escape
from urllib.parse import parse_qs

from fastapi import FastAPI, Request
from starlette._utils import get_route_path  # Starlette matches routes by this path, so the check must use it
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreword.errors import extra_for
from foreword.server.access.operators import COOKIE, SESSION_S, Operators
from foreword.server.api_errors import APIError
from foreword.server.calls import read_body
from foreword.server.dashboard.parts import FORM_STYLE, ICON
from foreword.server.http import error_response
from foreword.server.service import Service

logger = logging.getLogger(__name__)
FILES_NEVER_CHANGE = "public, max-age=31536000, immutable"
"""The caching header of NiceGUI's files, whose paths contain its version."""
PATH = "/dashboard"
LOGIN = f"{PATH}/login"
WRONG_KEY_DELAY_S = 0.5
MAX_FORM_BYTES = 4096
"""Limit of the form in bytes, because anybody may send the form."""
MAX_FORM_FIELDS = 64


def give_edge(nicegui_app: FastAPI, files: str) -> None:
    """Replace NiceGUI's own middleware by an Edge. `files` is the beginning of the paths of NiceGUI's files."""
    nicegui_app.user_middleware[:] = [
        middleware
        for middleware in nicegui_app.user_middleware
        if not (isinstance(middleware.cls, type) and issubclass(middleware.cls, BaseHTTPMiddleware))
    ]
    nicegui_app.add_middleware(Edge, files=files)


class Edge:
    """Middleware that lets browsers keep files, adds a proxy's prefix to redirections, and lets clients leave early."""

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


def mount_dashboard(app: FastAPI, service: Service) -> None:
    """Show the dashboard of this app's engine at /dashboard. Raises ConfigError if NiceGUI is not installed."""
    with extra_for("the dashboard", "serve", ", or give dashboard=False"):
        from foreword.server.dashboard.page import View
    mount_page(app, service.operators, service.model_name, lambda: View(service))


def mount_page(
    app: FastAPI,
    operators: Operators,
    name: str,
    build: Callable[[], object],
    refuse: Callable[[Request, APIError], Response] = error_response,
) -> None:
    """Show a page at /dashboard to operators. `build` makes the page for each viewer, `refuse` answers programs."""
    from nicegui import __version__ as nicegui_version
    from nicegui import app as nicegui_app
    from nicegui import ui

    @app.post(LOGIN, include_in_schema=False)
    async def login(request: Request) -> Response:
        return await _log_in(request, operators)

    @ui.page("/")
    def page() -> None:
        build()

    ui.run_with(
        app,
        mount_path=PATH,
        title=f"foreword: {name}",
        favicon=ICON,
        dark=None,
        tailwind=False,
        binding_refresh_interval=None,
        show_welcome_message=False,
    )
    give_edge(nicegui_app, files=f"/_nicegui/{nicegui_version}/")
    app.add_middleware(_OperatorsOnly, operators=operators, refuse=refuse)


async def _log_in(request: Request, operators: Operators) -> Response:
    """Exchange the key for a cookie."""
    root_path = request.scope.get("root_path", "")
    body = (await read_body(request, MAX_FORM_BYTES)).decode("utf-8", "replace")
    try:
        key = parse_qs(body, max_num_fields=MAX_FORM_FIELDS).get("key", [""])[0]
    except ValueError:  # more fields than the form has
        key = ""
    session = operators.open_session(key)
    if session is None:
        await asyncio.sleep(WRONG_KEY_DELAY_S)
        return _form("That is not the operator's key.", root_path)
    answer = RedirectResponse(f"{root_path}{PATH}/", 303)
    path, secure, age_s = f"{root_path}{PATH}", request.url.scheme == "https", round(SESSION_S)
    answer.set_cookie(COOKIE, session, max_age=age_s, path=path, httponly=True, samesite="strict", secure=secure)
    return answer


class _OperatorsOnly:
    """Lets only operators reach /dashboard, and everybody reach everything else."""

    def __init__(self, app: ASGIApp, *, operators: Operators, refuse: Callable[[Request, APIError], Response]) -> None:
        self._app = app
        self._operators = operators
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The check uses the path without a proxy's root path. A lifespan scope has no path.
        path = get_route_path(scope) if scope["type"] in ("http", "websocket") else ""
        if path in (PATH, LOGIN) or not path.startswith(f"{PATH}/"):
            await self._app(scope, receive, send)
            return
        try:
            self._operators.check(scope)
        except APIError as error:
            if scope["type"] == "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1008, "reason": "operators only"})
                return
            await self._refusal(scope, error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope, error: APIError) -> Response:
        if error.status == 401 and "text/html" in Headers(scope=scope).get("accept", ""):
            return _form("", scope.get("root_path", ""))
        return self._refuse(Request(scope), error)


def _form(problem: str, root_path: str) -> Response:
    """Make the form that asks for the key. The form loads no other files."""
    action = f"{escape(root_path)}{LOGIN}"
    return HTMLResponse(
        "<!doctype html><html lang='en'><meta charset='utf-8'><meta name='viewport' content='width=device-width'>"
        f"<title>foreword</title><style>{FORM_STYLE}</style><form method='post' action='{action}'>{ICON}"
        "<h1>foreword</h1><label for='key'>Operator's key</label>"
        "<input id='key' name='key' type='password' autocomplete='current-password' autofocus required>"
        f"<p role='alert'>{escape(problem)}</p><button>Open the dashboard</button></form></html>",
        401,
        {"Cache-Control": "no-store"},
    )
