"""HTTP for the endpoints: finds the caller, sends answers as JSON or events, and handles clients that leave."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Annotated, Any, cast

from fastapi import Depends, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreword.server.access.tenants import Tenant
from foreword.server.answer_stream import DEADLINE, AnswerStream, Delta
from foreword.server.api_errors import APIError, from_error, timed_out
from foreword.server.bodies.json_scan import to_json, to_long_json
from foreword.server.crews import CALLER, off_loop
from foreword.server.dialect import Dialect, Event
from foreword.server.service import Service

logger = logging.getLogger(__name__)

SENT_AT_ONCE = 2**16
"""The number of characters that a stream sends before the event loop serves other calls."""
PING_INTERVAL_S = 10.0
"""Seconds without an event after which a stream sends its dialect's ping. Some clients give up after 300 seconds."""


class AnswerWriter(ABC):
    """Writes one answer in the form of an API."""

    answer: AnswerStream
    piece_depth: int
    """The number of levels of a whole answer that are written item by item, down to single log probabilities."""

    @abstractmethod
    def num_bytes(self, deltas: Sequence[Delta]) -> int:
        """Estimate the number of bytes of these deltas."""

    @abstractmethod
    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed, from one delta per choice."""

    @abstractmethod
    def events_of(self, deltas: Sequence[Delta]) -> list[Event]:
        """Return the events of these deltas in a streamed answer. Called in a thread if the deltas are long."""

    async def events(self) -> AsyncIterator[list[Event]]:
        """Yield lists of events of a streamed answer. All events of a list can be sent at once."""
        async for deltas in self.answer.deltas():
            yield await off_loop(self.num_bytes(deltas), partial(self.events_of, deltas))


def service_of(request: Request) -> Service:
    """Return the service that the app runs."""
    return cast(Service, request.app.state.service)


def dialect_of(request: Request) -> Dialect:
    """Return the dialect of a call, which the app chose before it routed the call."""
    return cast(Dialect, request.state.dialect)


def request_id_of(request: Request) -> str:
    """Return the id in the answer's `request-id` header."""
    return cast(str, request.state.request_id)


async def authorized(request: Request) -> Tenant:
    """Return the tenant of a request. Raises APIError 401."""
    tenant = service_of(request).authorize(dialect_of(request).key(request.headers, request.query_params))
    CALLER.set(tenant.name)
    return tenant


Authorized = Annotated[Tenant, Depends(authorized)]
"""An endpoint's parameter of this type is the tenant. Without a valid key the endpoint is not called."""


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Make a JSON answer."""
    return Response(to_json(body), status, headers, "application/json")


def error_response(request: Request, error: Exception) -> Response:
    """Make the answer to an exception, in the caller's dialect."""
    request.state.error = api_error = from_error(error)
    dialect = dialect_of(request)
    return json_response(
        dialect.error(api_error, request_id_of(request)), dialect.status(api_error), dict(api_error.headers or {})
    )


def error_event(request: Request, error: APIError) -> Event:
    """Return the last event of a stream that fails."""
    dialect = dialect_of(request)
    return dialect.error_event, dialect.error(error, request_id_of(request))


async def respond(request: Request, writer: AnswerWriter, frames: Frames | None = None) -> Response:
    """Answer with the engine's result. If the client leaves before the end, the call's requests are aborted.

    `frames` is the form of a stream; None: server-sent events.
    """
    if not writer.answer.whole:
        return _EventStream(request, writer, frames or ServerSent(dialect_of(request)))
    deltas = await finished(writer.answer)

    def write() -> Response:
        body = to_long_json(writer.whole(deltas), writer.piece_depth)
        return Response(body, headers=route_of(writer.answer), media_type="application/json")

    return await off_loop(writer.num_bytes(deltas), write)


def route_of(answer: AnswerStream) -> dict[str, str]:
    """Return a header that says which of several engines answers, and why; empty with a single engine."""
    route = answer.jobs[0].record.route
    return {} if route is None else {"x-foreword-route": route}


async def finished(answer: AnswerStream) -> list[Delta]:
    """Wait for the end of an answer, and return its deltas. Raises APIError.

    The answer ends with this call, even if the client leaves or the time limit passes.
    """
    try:
        return [delta async for deltas in answer.deltas() for delta in deltas]
    finally:
        answer.close()


class TimeLimit:
    """Ends calls whose answer has not begun in time, whether they wait for a thread, the queue or a token.

    An answer that has begun is not ended here, because a stream ends itself at `DEADLINE`.
    """

    def __init__(self, app: ASGIApp, *, limit_s: float) -> None:
        self._app, self._limit_s = app, limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        deadline = asyncio.get_running_loop().time() + self._limit_s
        DEADLINE.set(deadline)
        limit = asyncio.timeout_at(deadline)

        async def begin(message: Message) -> None:
            if message["type"] == "http.response.start" and not limit.expired():
                limit.reschedule(None)
            await send(message)

        try:
            async with limit:
                await self._app(scope, receive, begin)
        except TimeoutError:
            if not limit.expired():
                raise
            await error_response(Request(scope), timed_out(self._limit_s))(scope, receive, send)


class Frames:
    """Turns the events of one stream into bytes: a JSON value on each line, without the events' names."""

    media_type = "application/x-ndjson"
    ping: bytes | None = None
    """Bytes that keep the stream alive while there is nothing to send; None: send nothing then."""
    unsent: tuple[str, int] = "", 0
    """The text that is being sent, and the index of its unsent rest. A stream that ends early sends the rest first."""

    def frame(self, event: Event) -> str:
        return f"{_data(event)}\n"

    def end(self) -> bytes:
        """Return the bytes after the last event."""
        return b""


def _data(event: Event) -> str:
    return event[1] if isinstance(event[1], str) else to_json(event[1])


class ServerSent(Frames):
    """Server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, dialect: Dialect) -> None:
        self.ping, self._end = dialect.ping, dialect.stream_end

    def frame(self, event: Event) -> str:
        head = "" if event[0] is None else f"event: {event[0]}\n"
        return f"{head}data: {_data(event)}\n\n"

    def end(self) -> bytes:
        return self._end


class JsonArray(Frames):
    """One JSON array, an item for each event."""

    media_type = "application/json"

    def __init__(self) -> None:
        self._opening = "["

    def frame(self, event: Event) -> str:
        opening, self._opening = self._opening, ",\r\n"
        return f"{opening}{_data(event)}"

    def end(self) -> bytes:
        return b"[]" if self._opening == "[" else b"]"


async def _streamed(request: Request, writer: AnswerWriter, frames: Frames) -> AsyncIterator[bytes]:
    try:
        async for events in _pinged(writer.events(), frames.ping):
            if isinstance(events, bytes):
                yield events
                continue
            text = "".join(map(frames.frame, events))
            for at in range(0, len(text), SENT_AT_ONCE):
                frames.unsent = text, at
                if at:
                    await asyncio.sleep(0)  # sending may never wait, so let the event loop serve other calls here
                yield text[at : at + SENT_AT_ONCE].encode()
            frames.unsent = "", 0
    except Exception as error:
        if not isinstance(error, APIError):
            logger.exception("an answer could not be written to its end")
        yield frames.frame(error_event(request, from_error(error))).encode()
    yield frames.end()


async def _pinged(events: AsyncIterator[list[Event]], ping: bytes | None) -> AsyncIterator[list[Event] | bytes]:
    while True:
        coming = asyncio.ensure_future(anext(events))
        try:
            while not (await asyncio.wait((coming,), timeout=PING_INTERVAL_S))[0]:
                if ping is not None:
                    yield ping
            yield await coming
        except StopAsyncIteration:
            return
        finally:
            coming.cancel()


class _EventStream(StreamingResponse):
    """A stream with a time limit. When the stream ends, for whatever reason, the answer is closed."""

    def __init__(self, request: Request, writer: AnswerWriter, frames: Frames) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **route_of(writer.answer)}
        super().__init__(_streamed(request, writer, frames), media_type=frames.media_type, headers=headers)
        self._frames = frames
        self._request = request
        self._answer = writer.answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout_at(DEADLINE.get()):
                await super().__call__(scope, receive, send)
        except TimeoutError:
            self._answer.close()
            error = timed_out(service_of(self._request).config.request_timeout_s)
            event = error_event(self._request, error)
            text, at = self._frames.unsent
            last = (text[at:] + self._frames.frame(event)).encode() + self._frames.end()
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            self._answer.close()
