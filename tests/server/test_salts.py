"""Prompts under one `cache_salt` are not found under another, at every endpoint that computes prompts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from foreword.llm import LLM
from foreword.server.options import ServerConfig
from live_server import MODEL, ServerThread, document, post, wait_until

TEMPLATE = """
user = "{query} {instruction}: {document}"
instruction = "plainly"
labels = ["a", "b"]
"""
CLASSES = TEMPLATE.replace("{query} {instruction}: {document}", "{input} {instruction}")
TEXT = document("salted")
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": TEXT}]}
CONTENTS = {"contents": [{"parts": [{"text": TEXT}]}]}
GEMINI = f"/v1beta/models/{MODEL}"
RANKING = {"query": TEXT, "documents": ["x"]}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {**CHAT, "max_tokens": 1},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 1},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 1},
    "/v1/messages": {**CHAT, "max_tokens": 1},
    f"{GEMINI}:generateContent": {**CONTENTS, "generationConfig": {"maxOutputTokens": 1}},
    f"{GEMINI}:streamGenerateContent": {**CONTENTS, "generationConfig": {"maxOutputTokens": 1}},
    "/v1beta/cachedContents": {"model": f"models/{MODEL}", **CONTENTS},
    "/api/chat": {**CHAT, "options": {"num_predict": 1}},
    "/api/generate": {"model": MODEL, "prompt": TEXT, "options": {"num_predict": 1}},
    "/api/embed": {"model": MODEL, "input": TEXT},
    "/api/embeddings": {"model": MODEL, "prompt": TEXT},
    "/v1/embeddings": {"input": TEXT},
    "/v1/score": {"query": TEXT, "items": "x", "label_token_ids": [1]},
    "/v1/rerank": RANKING,
    "/v2/rerank": RANKING,
    "/rerank": RANKING,
    "/v1/classify": {"input": TEXT},
    "/classify": {"input": TEXT},
    "/v1/pml/completions": {"documents": [TEXT], "question": "x", "max_tokens": 1},
    "/v1/cache/entries": {"prompt": TEXT},
}
COMPUTE_NOTHING = {"/v1/cache/explain", "/v1/pml/explain"}


@pytest.fixture(scope="module")
def server(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    folder = tmp_path_factory.mktemp("salts")
    files = {"score_template": TEMPLATE, "classify_template": CLASSES}
    for name, text in files.items():
        (folder / name).write_text(text)
    options = {name: str(folder / name) for name in files}
    with ServerThread(llm, ServerConfig(dashboard=False, **options)) as server:
        yield server


@pytest.mark.parametrize("path", BODIES)
def test_a_salt_keeps_prompts_apart(server: ServerThread, path: str) -> None:
    def num_cached(salt: str) -> int:
        number = len(server.service.records.recent(1000))
        answer = post(server.url, path, {**BODIES[path], "cache_salt": f"{path} {salt}"})
        assert answer.status_code == 200, answer.text
        wait_until(lambda: len(server.service.records.recent(1000)) > number)
        return server.service.records.recent(1)[0].num_cached_tokens

    first, other, again = [num_cached(salt) for salt in "aba"]
    assert (first, other) == (0, 0)
    assert again > 100


def test_no_endpoint_that_takes_a_salt_is_left_out(server: ServerThread) -> None:
    api = server.app.openapi()
    taking = set()
    for path, methods in api["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        name = content.get("application/json", {}).get("schema", {}).get("$ref", "").rpartition("/")[2]
        fields = api["components"]["schemas"][name].get("properties", {}) if name else {}
        if {"cache_salt", "cacheSalt"} & fields.keys():
            taking.add(path.replace("{model}", MODEL).replace("/v1alpha/", "/v1beta/"))
    twins = {path.replace("/v1beta/", "/v1/") for path in BODIES if "/v1beta/" in path}
    assert taking == {*BODIES, *COMPUTE_NOTHING, *twins}
