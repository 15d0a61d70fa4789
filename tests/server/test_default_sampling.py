"""What a checkpoint recommends holds for requests that say nothing else, and answers say so."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from foreword import SamplingParams
from foreword.server.options import ServerConfig
from foreword.server.startup import log_model
from live_server import ServerThread, embedded_llm, post

RECOMMENDED = {"temperature": 0.7, "top_k": 12, "repetition_penalty": 1.3}
QUESTION = "What is the home of the silver violin?"
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


def test_python_follows_too_and_the_start_says_so(server: ServerThread, caplog: pytest.LogCaptureFixture) -> None:
    llm = server.service.llm
    assert llm.get_default_sampling_params() == SamplingParams(**RECOMMENDED)
    with caplog.at_level(logging.INFO):
        log_model(llm, "model")
    assert "temperature=0.7, top_k=12, repetition_penalty=1.3, as generation_config.json says" in caplog.text
