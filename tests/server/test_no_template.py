"""A model without a chat template: conversations are refused with what a client of the server can do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from live_server import MODEL, ServerThread, post, tiny_server

MESSAGES = [{"role": "user", "content": "Hello"}]
CONTENTS = [{"role": "user", "parts": [{"text": "Hello"}]}]


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    with tiny_server(tmp_path_factory.mktemp("model"), None) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2, "stream": True}),
        ("/v1/responses", {"input": "Hello"}),
        ("/v1/messages", {"model": MODEL, "messages": MESSAGES, "max_tokens": 2}),
        ("/v1/messages/count_tokens", {"model": MODEL, "messages": MESSAGES}),
        (f"/v1beta/models/{MODEL}:generateContent", {"contents": CONTENTS}),
        (f"/v1beta/models/{MODEL}:countTokens", {"contents": CONTENTS}),
        ("/v1beta/cachedContents", {"model": f"models/{MODEL}", "contents": CONTENTS}),
        ("/tokenize", {"messages": MESSAGES}),
    ],
)
def test_conversations_are_refused_with_a_remedy_over_http(
    base_model: ServerThread, path: str, body: dict[str, Any]
) -> None:
    answer = post(base_model.url, path, body)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert "/v1/completions" in message
    assert "--chat-template" in message
    assert "generate()" not in message


def test_texts_are_answered(base_model: ServerThread) -> None:
    assert post(base_model.url, "/v1/completions", {"prompt": "Hello", "max_tokens": 2}).status_code == 200
