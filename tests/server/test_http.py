"""Streams, piece by piece: what a client has when one ends in the middle of a long event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Request

from foreword.server import http
from foreword.server.answer_stream import DEADLINE
from foreword.server.dialect import Dialect
from foreword.server.dialects.gemini.endpoints import Gemini
from foreword.server.dialects.ollama.endpoints import Ollama
from foreword.server.dialects.openai.dialect import OpenAI

LONG = {"text": "a" * 10 * http.SENT_AT_ONCE}


class OneEvent:
    """A writer whose only event takes the client long to read."""

    answer = SimpleNamespace(close=lambda: None, jobs=[SimpleNamespace(record=SimpleNamespace(route=None))])

    async def events(self) -> AsyncIterator[list[tuple[str, str]]]:
        yield [("long", json.dumps(LONG))]


async def received(dialect: Dialect, frames: http.Frames) -> bytes:
    """All that a client gets who takes a piece every 50 ms, with a limit of 200 ms."""
    service = SimpleNamespace(config=SimpleNamespace(request_timeout_s=0.2))
    state = SimpleNamespace(request_id="x", dialect=dialect)
    pieces: list[bytes] = []

    async def send(message: dict[str, Any]) -> None:
        await asyncio.sleep(0.05)  # uvicorn waits for room first, and writes then
        pieces.append(message.get("body", b""))

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    scope = {"type": "http", "asgi": {"spec_version": "2.4"}, "state": vars(state), "headers": []}
    scope["app"] = SimpleNamespace(state=SimpleNamespace(service=service))
    DEADLINE.set(asyncio.get_running_loop().time() + 0.2)
    stream = http._EventStream(Request(scope), OneEvent(), frames)  # type: ignore[arg-type]
    await stream(scope, receive, send)  # type: ignore[arg-type]
    return b"".join(pieces)


@pytest.mark.parametrize(
    ("dialect", "frames"),
    [(OpenAI(), http.ServerSent(OpenAI())), (Ollama(), http.Frames()), (Gemini(), http.JsonArray())],
)
def test_a_time_limit_in_a_long_event_sends_its_rest_and_the_error_after_it(
    dialect: Dialect, frames: http.Frames
) -> None:
    body = asyncio.run(received(dialect, frames)).decode()
    if isinstance(frames, http.ServerSent):
        events = [event.rpartition("data: ")[2] for event in body.split("\n\n") if "data: {" in event]
    else:
        events = body.splitlines() if type(frames) is http.Frames else list(map(json.dumps, json.loads(body)))
    assert json.loads(events[0]) == LONG
    assert len(events) == 2
    assert "error" in json.loads(events[1])
