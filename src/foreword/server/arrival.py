"""Arrival: reads a call's body as it comes in, within limits, and notices clients that leave.

Three things hold for every call:

    a body that is too long, or too slow    413 or 408
    a client that leaves                    the call's task is cancelled, and one debug line says so
    an answer before the body is read       the rest of the body is read and dropped first: a connection that closes
                                            with unread bytes is reset, and the client never sees the answer
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreword.server.api_errors import APIError
from foreword.server.observe.log import log_event

logger = logging.getLogger(__name__)

MOST_DROPPED_BYTES = 64 * 2**20
MOST_DROPPING_S = 10.0
"""After an answer, the rest of the body is read and dropped: at most this many bytes, for at most this many seconds."""
LEFT = 499
"""The status under which a call is counted if its client left before the answer."""
UNKNOWN = "unknown"
"""The endpoint under which calls of unknown paths are counted, because clients may invent any number of paths."""


class HttpRequests:
    """Counts of calls. Only the event loop may change them. Other threads may read `counts`."""

    def __init__(self, *, logs_refusals: bool) -> None:
        self.counts = Counter[tuple[str, str]]()
        """The number of ended calls by endpoint and status."""
        self.num_running = 0
        """The number of calls that have not ended."""
        self._logs_refusals = logs_refusals

    def note(self, scope: MutableMapping[str, Any], status: int) -> None:
        """Count a call that has ended. `scope["state"]["error"]` is the error that refused it."""
        endpoint = getattr(scope.get("route"), "path", None) or UNKNOWN
        self.counts[endpoint, str(status)] += 1
        if status < 400 or not self._logs_refusals:
            return
        error = scope.get("state", {}).get("error")
        code, param = (error.code, error.param) if isinstance(error, APIError) else (None, None)
        log_event(
            "refused",
            "{method} {endpoint} answered with {status}"
            + (", {code}" if code else "")
            + (", of {param}" if param else ""),
            request_id=scope.get("state", {}).get("request_id"),
            method=scope["method"],
            endpoint=endpoint,
            status=status,
            code=code,
            param=param,
        )


class Arrival:
    """The outermost middleware of an app."""

    def __init__(self, app: ASGIApp, *, max_bytes: int, timeout_s: float, counts: HttpRequests) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        call = _Call(scope, receive, send, self._max_bytes, self._timeout_s)
        self._counts.num_running += 1
        try:
            await call.run(self._app)
        finally:
            self._counts.num_running -= 1
            self._counts.note(scope, call.status if call.status is not None else LEFT if call.has_left else 500)


class _Call:
    """One call: its body, and whether its client is still there."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, max_bytes: int, timeout_s: float) -> None:
        self.status: int | None = None
        """The answer's status; None until the answer begins."""
        self.has_left = False
        self._scope, self._receive, self._send = scope, receive, send
        self._max_bytes = max_bytes
        self._headers = Headers(scope=scope)
        self._num_bytes = 0
        self._has_body = "content-length" in self._headers or "transfer-encoding" in self._headers
        self._is_complete = False
        self._is_answered = False
        self._loop = asyncio.get_running_loop()
        self._timeout_s, self._deadline = timeout_s, self._loop.time() + timeout_s
        self._task = asyncio.current_task()
        self._watch: asyncio.Task[None] | None = None

    async def run(self, app: ASGIApp) -> None:
        if not self._has_body:
            self._watch = asyncio.create_task(self._await_leaving())
        try:
            await app(self._scope, self._take, self._give)
        except asyncio.CancelledError:
            if not self.has_left or self._task is None or self._task.uncancel():
                raise  # the server stops
        finally:
            if self._watch is not None:
                self._watch.cancel()
        if self.has_left:
            logger.debug("the client of %s %.200s has left", self._scope["method"], self._scope["path"])

    async def _take(self) -> Message:
        if self._is_complete:
            await asyncio.Event().wait()  # until the client leaves, which cancels this
        if not self._has_body:
            self._is_complete = True
            return {"type": "http.request", "body": b"", "more_body": False}
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            detail = (
                f"The body did not arrive within {self._timeout_s:g} s (--body-timeout-s); send it faster, or less."
            )
            raise HTTPException(408, detail, {"Connection": "close"}) from None
        if message["type"] == "http.disconnect":
            self._leave()
            await asyncio.Event().wait()
        self._count(message)
        if self._num_bytes > self._max_bytes:
            detail = f"The body is longer than the {self._max_bytes} bytes that this server takes."
            raise HTTPException(413, detail, {"Connection": "close"})
        if self._is_complete:
            self._watch = asyncio.create_task(self._await_leaving())
        return message

    def _count(self, message: Message) -> None:
        self._num_bytes += len(message.get("body", b""))
        self._is_complete = not message.get("more_body", False)

    async def _await_leaving(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _leave(self) -> None:
        """Handle the end of the connection. If the answer is not complete, the client has left, so cancel the call."""
        if not self._is_answered and not self.has_left:
            self.has_left = True
            assert self._task is not None
            self._task.cancel()

    async def _give(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if is_last:
            if self._has_body and not self._is_complete and not self.has_left and "expect" not in self._headers:
                await self._send({**message, "more_body": True})
                await self._drop_the_rest()
                message = {"type": "http.response.body", "body": b""}
            self._is_answered = True
        await self._send(message)

    async def _drop_the_rest(self) -> None:
        deadline = min(self._deadline, self._loop.time() + MOST_DROPPING_S)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(deadline):
                while not self._is_complete and self._num_bytes <= MOST_DROPPED_BYTES:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        return
                    self._count(message)
