"""Calls of cached contents by Google's client, and a server whose clocks a test can move."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from google import genai
from google.genai import errors, types

from foreword.llm import LLM
from foreword.server.options import ServerConfig
from live_server import MODEL, ServerThread
from server.dialects.gemini.sdk import QUESTION, config

BLOCK = 16
GONE = "CachedContent not found (or permission denied)"
HEADERS = {"x-goog-api-key": "k"}


class Clocks:
    """The server's wall clock and the engine's clock, which a test moves on together."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def wall(self) -> float:
        return time.time() + self.ahead_s

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


@contextmanager
def serving(llm: LLM, **options: Any) -> Iterator[ServerThread]:
    """A server whose clocks a test can move (`server.clocks`)."""
    clocks, llm.engine.clock = Clocks(), time.monotonic
    with ServerThread(llm, ServerConfig(**options)) as server:
        server.clocks = clocks  # type: ignore[attr-defined]
        server.service.clock, llm.engine.clock = clocks.wall, clocks.monotonic
        yield server
        server.ask(lambda engine: engine.check_integrity())
        for entry in server.ask(lambda engine: engine.entries.entries()):
            server.ask(lambda engine, name=entry.name: engine.entries.drop(name))


def facts(name: str, count: int = 12) -> str:
    """A document that no other test has."""
    return "".join(f"The code of the {name} falcon {number} is 4821.\n" for number in range(count))


def make(ask: genai.Client, contents: Any = None, **fields: Any) -> types.CachedContent:
    return ask.caches.create(model=MODEL, config=types.CreateCachedContentConfig(contents=contents, **fields))


def use(ask: genai.Client, cache: types.CachedContent, contents: Any = QUESTION, **fields: Any) -> Any:
    given = {"system_instruction": None, "cached_content": cache.name, "response_logprobs": True, **fields}
    return ask.models.generate_content(model=MODEL, contents=contents, config=config(**given))


def bits(answer: Any) -> Any:
    [candidate] = answer.candidates
    return [
        (one.token_id, one.log_probability) for one in candidate.logprobs_result.chosen_candidates
    ], candidate.content.parts


def cached(answer: Any) -> int:
    return answer.usage_metadata.cached_content_token_count or 0


def whole_blocks(cache: types.CachedContent) -> int:
    return cache.usage_metadata.total_token_count // BLOCK * BLOCK


def entries(server: ServerThread) -> dict[str, int]:
    """Kept tokens of each entry."""
    return {one.name: one.num_kept_tokens for one in server.ask(lambda engine: engine.entries.entries())}


def refused(function: Any, code: int, message: str) -> None:
    with pytest.raises(errors.ClientError, match=re.escape(message)) as caught:
        function()
    assert (caught.value.code, caught.value.status) == (
        code,
        {400: "INVALID_ARGUMENT", 403: "PERMISSION_DENIED", 429: "RESOURCE_EXHAUSTED"}[code],
    )


def refused_everywhere(ask: genai.Client, name: str) -> None:
    cache = types.CachedContent(name=name)
    refused(lambda: use(ask, cache), 403, GONE)
    refused(lambda: ask.caches.get(name=name), 403, GONE)
    refused(lambda: ask.caches.update(name=name, config={"ttl": "9s"}), 403, GONE)
    refused(lambda: ask.caches.delete(name=name), 403, GONE)


BODY: dict[str, Any] = {"model": f"models/{MODEL}", "contents": [{"parts": [{"text": facts("raw")}]}]}
