"""What a checkpoint recommends holds for requests that say nothing else, and answers say so."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from foreword import SamplingParams
from foreword.server.observe.log import log_model
from foreword.server.options import ServerConfig
from live_server import MODEL, ServerThread, embedded_llm, post

RECOMMENDED = {"temperature": 0.7, "top_k": 12, "repetition_penalty": 1.3}
QUESTION = "What is the home of the silver violin?"
GEMINI_NAMES = {"top_k": "topK", "top_p": "topP"}
COMMON = {"seed": 7, "max_tokens": 24}
MESSAGES = {"messages": [{"role": "user", "content": QUESTION}]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    path = tmp_path_factory.mktemp("recommended") / "generation_config.json"
    path.write_text(json.dumps(RECOMMENDED))
    with (
        embedded_llm(generation_config=str(path), attention_kernel="reference") as llm,
        ServerThread(llm, ServerConfig()) as thread,
    ):
        yield thread


def answer(server: ServerThread, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = post(server.url, path, body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_a_request_that_says_nothing_is_sampled_as_recommended(server: ServerThread) -> None:
    silent = answer(server, "/v1/chat/completions", {**MESSAGES, **COMMON})
    spoken = answer(server, "/v1/chat/completions", {**MESSAGES, **COMMON, **RECOMMENDED})
    plain = {"temperature": 1, "top_k": 0, "repetition_penalty": 1}
    otherwise = answer(server, "/v1/chat/completions", {**MESSAGES, **COMMON, **plain})
    assert silent["choices"] == spoken["choices"]
    assert silent["choices"] != otherwise["choices"]
    assert silent["usage"]["foreword"]["sampling"] == RECOMMENDED
    assert otherwise["usage"]["foreword"]["sampling"] == plain
    text = answer(server, "/v1/completions", {"prompt": QUESTION, **COMMON})
    assert (
        text["choices"] == answer(server, "/v1/completions", {"prompt": QUESTION, **COMMON, **RECOMMENDED})["choices"]
    )


def test_a_response_says_what_it_was_sampled_by(server: ServerThread) -> None:
    body = {"input": QUESTION, "max_output_tokens": 4}
    assert answer(server, "/v1/responses", body)["temperature"] == 0.7
    assert answer(server, "/v1/responses", {**body, "temperature": 0, "top_p": 0.5})["temperature"] == 0


def said(server: ServerThread, dialect: str, **sampling: Any) -> str:
    """The text of an answer to `QUESTION` in a dialect; `sampling` by OpenAI's names."""
    if dialect == "chat":
        told = answer(server, "/v1/chat/completions", {**MESSAGES, "max_tokens": 24, **sampling})
        return str(told["choices"][0]["message"]["content"])
    if dialect == "responses":
        told = answer(server, "/v1/responses", {"input": QUESTION, "max_output_tokens": 24, **sampling})
        return str(told["output"][0]["content"][0]["text"])
    if dialect == "anthropic":
        told = answer(server, "/v1/messages", {**MESSAGES, "model": MODEL, "max_tokens": 24, **sampling})
        return str(told["content"][0]["text"])
    config = {"maxOutputTokens": 24, **{GEMINI_NAMES.get(name, name): value for name, value in sampling.items()}}
    contents = [{"role": "user", "parts": [{"text": QUESTION}]}]
    path = f"/v1beta/models/{MODEL}:generateContent"
    told = answer(server, path, {"contents": contents, "generationConfig": config})
    return str(told["candidates"][0]["content"]["parts"][0]["text"])


@pytest.mark.parametrize("dialect", ["chat", "responses", "anthropic", "gemini"])
def test_every_dialect_follows_and_a_request_that_says_otherwise_wins(server: ServerThread, dialect: str) -> None:
    """Only the likeliest token can be drawn with top_k=1, so what the recommended penalty changes shows."""
    penalized, plain = said(server, "chat", top_k=1), said(server, "chat", top_k=1, repetition_penalty=1)
    assert penalized != plain, "the penalty shows"
    own = {"temperature": 0} if dialect == "responses" else {"top_k": 1}
    assert said(server, dialect, **own) == penalized, "what the dialect cannot say is as recommended"
    if dialect != "responses":  # it has no seed
        assert said(server, dialect, seed=7) == said(server, "chat", seed=7, **RECOMMENDED)


def test_python_follows_too_and_the_start_says_so(server: ServerThread, caplog: pytest.LogCaptureFixture) -> None:
    llm = server.service.llm
    assert llm.get_default_sampling_params() == SamplingParams(**RECOMMENDED)
    with caplog.at_level(logging.INFO):
        log_model(llm, "model")
    assert "temperature=0.7, top_k=12, repetition_penalty=1.3, as generation_config.json says" in caplog.text
