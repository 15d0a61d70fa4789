"""Google's official client, and plain requests in its dialect."""

from __future__ import annotations

from typing import Any

import httpx
from google import genai
from google.genai import types

from live_server import FACTS, MODEL, post

QUESTION = "What is the code of the amber falcon?"
BODY: dict[str, Any] = {
    "contents": [{"parts": [{"text": QUESTION}]}],
    "systemInstruction": {"parts": [{"text": FACTS}]},
    "generationConfig": {"temperature": 0},
}
ENDLESS: dict[str, Any] = {
    "contents": [{"parts": [{"text": "x"}]}],
    "generationConfig": {
        "responseMimeType": "application/json",
        "responseJsonSchema": {"type": "array", "items": {"enum": [1]}, "minItems": 3000},
        "maxOutputTokens": 2000,
    },
}
"""A grammar keeps the answer from ending."""


def google(url: str, key: str = "none", **options: Any) -> genai.Client:
    return genai.Client(api_key=key, http_options=types.HttpOptions(base_url=url, timeout=120_000, **options))


def config(**fields: Any) -> types.GenerateContentConfig:
    return types.GenerateContentConfig(**{"system_instruction": FACTS, "temperature": 0, **fields})


def generate(url: str, body: Any, path: str = f"/v1/models/{MODEL}:generateContent", **options: Any) -> httpx.Response:
    return post(url, path, body, **options)
