"""OpenAI's `prediction`, and what usage, metrics and statistics say of drafted tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from foreword.server.options import ServerConfig
from live_server import MODEL, ServerThread, client, embedded_llm

QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "Repeat what was said of the falcon."}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with embedded_llm(draft_tokens=8) as llm, ServerThread(llm, ServerConfig()) as server:
        yield server.url


@pytest.fixture(scope="module")
def ask(url: str) -> OpenAI:
    return client(url)


def create(ask: OpenAI, **fields: Any) -> Any:
    return ask.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=1, seed=7, max_tokens=40, extra_body={"ignore_eos": True}, **fields
    )


def test_a_prediction_changes_no_answer_and_is_counted(ask: OpenAI, url: str) -> None:
    first = create(ask)
    text = first.choices[0].message.content
    for content in (text, [{"type": "text", "text": text[:20]}, {"type": "text", "text": text[20:]}]):
        again = create(ask, prediction={"type": "content", "content": content})
        assert again.choices[0].message.content == text
        assert again.usage.completion_tokens == first.usage.completion_tokens
        assert again.usage.completion_tokens_details.accepted_prediction_tokens > 10
    wrong = create(ask, prediction={"type": "content", "content": "something else entirely " * 9})
    assert wrong.choices[0].message.content == text
    chunks = list(create(ask, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage.completion_tokens_details.accepted_prediction_tokens > 10

    report = httpx.get(f"{url}/v1/cache").json()["statistics"]["drafted_tokens"]
    assert sum(report["accepted"].values()) > 30
    metrics = httpx.get(f"{url}/metrics").text
    for name in ("spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"):
        assert f'foreword_{name}{{model_name="{MODEL}",source="cache"}}' in metrics


def test_an_answer_that_reports_tells_its_drafts_by_source(ask: OpenAI) -> None:
    create(ask)
    answer = ask.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        temperature=1,
        seed=7,
        max_tokens=40,
        extra_body={"ignore_eos": True, "foreword": {"cache": True}},
    )
    drafts = answer.foreword["drafts"]
    counted = answer.usage.completion_tokens_details
    assert drafts["accepted"]["cache"] > 10
    assert sum(drafts["accepted"].values()) == counted.accepted_prediction_tokens
    assert sum(drafts["rejected"].values()) == counted.rejected_prediction_tokens


@pytest.mark.parametrize(
    "prediction",
    [
        {"type": "content"},
        {"type": "words", "content": "a"},
        {"type": "content", "content": [{"type": "image"}]},
        "text",
    ],
    ids=str,
)
def test_a_prediction_of_another_form_is_refused(ask: OpenAI, prediction: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(ask, prediction=prediction)
    assert "prediction" in str(caught.value)
