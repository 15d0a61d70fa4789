"""HTTP for the endpoints: the caller, answers as JSON or server-sent events, and clients that leave.

Knows FastAPI and the protocol of an API's answers; knows nothing of their fields.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Protocol

from fastapi import Depends, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from foreword.server.access.tenants import Tenant
from foreword.server.answer_stream import AnswerStream, Delta
from foreword.server.api_errors import APIError, from_error, timed_out
from foreword.server.bodies.json_pieces import to_json, to_long_json
from foreword.server.bodies.off_loop import off_loop
from foreword.server.service import Service

Event = tuple[str | None, dict[str, Any] | str]
"""Name (or None) and data of a server-sent event. Long data is JSON text already, written off the event loop."""


class AnswerWriter(Protocol):
    """Writes one answer in the form of an API."""

    answer: AnswerStream
    piece_depth: int
    """Levels of a whole answer that are written item by item, down to the log probabilities of single positions."""

    def num_bytes(self, deltas: Sequence[Delta]) -> int:
        """Estimate the number of bytes of these deltas."""

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """The body of an answer that is not streamed, from one delta per choice."""

    def events(self) -> AsyncIterator[list[Event]]:
        """The events of a streamed answer; those that can be sent together come in one list."""


def service_of(request: Request) -> Service:
    """The service that the app runs."""
    service: Service = request.app.state.service
    return service


async def authorized(request: Request) -> Tenant:
    """The tenant of a request. Raises APIError 401."""
    return service_of(request).authorize(request.headers)


Authorized = Annotated[Tenant, Depends(authorized)]
"""An endpoint's parameter of this type is the tenant; without a valid key the endpoint is not called."""


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(to_json(body), status, headers, "application/json")


def error_response(error: Exception) -> Response:
    """The answer to an exception, in OpenAI's form."""
    answer = from_error(error)
    return json_response(answer.body(), answer.status, answer.headers)


async def respond(request: Request, writer: AnswerWriter) -> Response:
    """Answer with the engine's result; if the client leaves before the end, its requests are aborted."""
    answer, limit_s = writer.answer, service_of(request).config.request_timeout_s
    if not answer.whole:
        return _EventStream(answer, _server_sent(writer), limit_s)
    try:
        async with asyncio.timeout(limit_s):
            deltas = await _unless_disconnected(request, _collect(answer))
    except TimeoutError:
        answer.close("timeout")
        raise timed_out(limit_s) from None
    finally:
        answer.close()
    if deltas is None:
        return Response(status_code=499)  # nobody reads this

    def write() -> Response:
        return Response(to_long_json(writer.whole(deltas), writer.piece_depth), media_type="application/json")

    return await off_loop(writer.num_bytes(deltas), write)


async def _collect(answer: AnswerStream) -> list[Delta]:
    return [delta async for deltas in answer.deltas() for delta in deltas]


async def _unless_disconnected(request: Request, work: Any) -> Any:
    """The result of `work`, or None if the client leaves first."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        task.cancel()
        leaving.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _server_sent(writer: AnswerWriter) -> AsyncIterator[bytes]:
    try:
        async for events in writer.events():
            yield "".join(_written(name, data) for name, data in events).encode()
    except APIError as error:
        yield _written(None, error.body()).encode()
    yield b"data: [DONE]\n\n"


def _written(name: str | None, data: Any) -> str:
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {data if isinstance(data, str) else to_json(data)}\n\n"


class _EventStream(StreamingResponse):
    """Server-sent events within a time limit; the answer is closed however the stream ends."""

    def __init__(self, answer: AnswerStream, events: AsyncIterator[bytes], limit_s: float) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        self._answer = answer
        self._limit_s = limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            self._answer.close("timeout")
            error = timed_out(self._limit_s)
            await send(
                {"type": "http.response.body", "body": _written(None, error.body()).encode(), "more_body": False}
            )
        finally:
            self._answer.close()
