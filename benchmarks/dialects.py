"""The four APIs in which benchmarks/server.py asks for the same answer: paths, bodies, and the text of an event.

Knows just enough of each API for a client of a few lines, because the client shares the processor with the server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, str]
Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Speech:
    """One API, as a client speaks it."""

    name: str
    path: str
    body: Callable[[Sequence[Message], int], dict[str, Any]]
    """Makes the body from a conversation that begins with a system message, and the answer's limit in tokens."""
    text: Callable[[Event], str]
    """The new text in an event of the stream; empty if it has none."""
    usage: Callable[[Event], tuple[int, int] | None]
    """The prompt tokens, and how many the cache had, from the event with the final count; None for other events."""
    headers: str = ""


def _chat(messages: Sequence[Message], most: int) -> dict[str, Any]:
    wish = {"max_tokens": most, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    return {"messages": messages, **wish}


def _chat_text(event: Event) -> str:
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def _chat_usage(event: Event) -> tuple[int, int] | None:
    used = event.get("usage")
    return None if not used else (used["prompt_tokens"], used["prompt_tokens_details"]["cached_tokens"])


def _responses(messages: Sequence[Message], most: int) -> dict[str, Any]:
    return {"input": messages, "max_output_tokens": most, "temperature": 0, "stream": True, "store": False}


def _responses_usage(event: Event) -> tuple[int, int] | None:
    used = event.get("response", {}).get("usage")
    return None if not used else (used["input_tokens"], used["input_tokens_details"]["cached_tokens"])


def _anthropic(messages: Sequence[Message], most: int) -> dict[str, Any]:
    system, *rest = messages
    wish = {"max_tokens": most, "temperature": 0, "stream": True, "model": "foreword-demo"}
    return {"system": system["content"], "messages": rest, **wish}


def _anthropic_usage(event: Event) -> tuple[int, int] | None:
    if event["type"] != "message_start":
        return None
    used = event["message"]["usage"]
    found = used["cache_read_input_tokens"]
    return used["input_tokens"] + used["cache_creation_input_tokens"] + found, found


def _gemini(messages: Sequence[Message], most: int) -> dict[str, Any]:
    system, *rest = messages
    roles = {"user": "user", "assistant": "model"}
    return {
        "systemInstruction": {"parts": [{"text": system["content"]}]},
        "contents": [{"role": roles[message["role"]], "parts": [{"text": message["content"]}]} for message in rest],
        "generationConfig": {"temperature": 0, "maxOutputTokens": most},
    }


def _gemini_text(event: Event) -> str:
    parts = event["candidates"][0].get("content", {}).get("parts", ()) if event.get("candidates") else ()
    return "".join(part.get("text", "") for part in parts)


def _gemini_usage(event: Event) -> tuple[int, int] | None:
    if not any(candidate.get("finishReason") for candidate in event.get("candidates", ())):
        return None
    used = event["usageMetadata"]
    return used["promptTokenCount"], used.get("cachedContentTokenCount", 0)


CHAT = Speech("chat completions", "/v1/chat/completions", _chat, _chat_text, _chat_usage)
SPEECHES = (
    CHAT,
    Speech(
        "responses",
        "/v1/responses",
        _responses,
        lambda event: event["delta"] if event["type"] == "response.output_text.delta" else "",
        _responses_usage,
    ),
    Speech(
        "anthropic",
        "/v1/messages",
        _anthropic,
        lambda event: event["delta"].get("text", "") if event["type"] == "content_block_delta" else "",
        _anthropic_usage,
        "anthropic-version: 2026-10-21\r\n",
    ),
    Speech(
        "gemini",
        "/v1beta/models/foreword-demo:streamGenerateContent?alt=sse",
        _gemini,
        _gemini_text,
        _gemini_usage,
    ),
)
