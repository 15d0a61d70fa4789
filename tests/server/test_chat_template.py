"""A chat template of one's own, and what requests may hand to it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from foreword.demo.recall import LOOKUP
from foreword.server.options import ServerConfig
from live_server import FALCON, MODEL, ServerThread, embedded_llm, post

TEMPLATE = (
    "{% if mood %}In a {{ mood }} mood. {% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}\nAnswer: {% endif %}"
)


ONLY_TURNS = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def own_template() -> Iterator[ServerThread]:
    with embedded_llm(chat_template=TEMPLATE) as llm, ServerThread(llm, ServerConfig()) as server:
        yield server


def test_requests_hand_inputs_to_the_servers_chat_template(own_template: ServerThread) -> None:
    asked = {"messages": [{"role": "user", "content": "Hi"}]}
    counts = [
        post(own_template.url, "/tokenize", {**asked, **inputs}).json()["count"]
        for inputs in ({}, {"chat_template_kwargs": {"mood": "good"}}, {"chat_template_kwargs": {"mood": None}})
    ]
    assert counts[1] > counts[0] == counts[2]
    answer = post(
        own_template.url,
        "/v1/chat/completions",
        {**asked, "model": MODEL, "max_tokens": 1, "chat_template_kwargs": {"mood": "good"}},
    ).json()
    assert answer["usage"]["prompt_tokens"] == counts[1]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"tokenize": False}, "'tokenize' is not an input"),
        ({"chat_template": "{{ 1 }}"}, "'chat_template' is not an input"),
        ({"deep": {"er": 1}}, "chat_template_kwargs"),
        ({"long": "x" * 513}, "chat_template_kwargs"),
        ({str(number): 1 for number in range(17)}, "chat_template_kwargs"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_is_no_input_of_a_template_is_refused(
    own_template: ServerThread, inputs: dict[str, object], message: str
) -> None:
    for path in ("/tokenize", "/v1/chat/completions"):
        answer = post(own_template.url, path, {"messages": FALCON, "chat_template_kwargs": inputs})
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]


def test_tools_stand_in_the_system_message_if_a_template_takes_none(own_template: ServerThread) -> None:
    answer = post(own_template.url, "/v1/chat/completions", {"messages": FALCON, "tools": [LOOKUP], "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    asked = {"messages": FALCON, "return_token_strs": True}
    plain, told = (post(own_template.url, "/tokenize", one).json() for one in (asked, {**asked, "tools": [LOOKUP]}))
    assert LOOKUP["function"]["name"] in "".join(told["token_strs"])
    assert told["count"] > plain["count"]


def test_the_server_reports_what_its_template_shows(
    own_template: ServerThread, caplog: pytest.LogCaptureFixture
) -> None:
    report = httpx.get(f"{own_template.url}/v1/template").json()
    assert report["changes"]["tools"] == report["changes"]["calls"] == "written"
    assert "tools (left out)" in report["shown_by_changes"]
    assert [loss.split(" (")[0] for loss in report["not_shown"]] == ["reasoning before a call"]
    assert (report["has_template"], report["reply_format"]) == (True, "generic")


CALL = {"id": "call_1", "type": "function", "function": {"name": "lookup", "arguments": '{"name": "am'}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {
                "messages": [
                    *FALCON,
                    {"role": "assistant", "content": None, "tool_calls": [CALL]},
                    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "cut off"}]},
                    {"role": "developer", "content": "Be brief."},
                ],
            },
        ),
        (
            "/v1/responses",
            {
                "input": [
                    {"role": "user", "content": "Look."},
                    {"type": "function_call", "call_id": "call_1", "name": "lookup", "arguments": "[1"},
                    {"role": "assistant", "content": "I look."},
                    {"type": "function_call_output", "call_id": "call_1", "output": "cut off"},
                    {"role": "developer", "content": "Be brief."},
                ]
            },
        ),
        (
            "/v1/messages",
            {
                "max_tokens": 1,
                "messages": [
                    {"role": "user", "content": "Look."},
                    {
                        "role": "assistant",
                        "content": [
                            {"type": "text", "text": "I look."},
                            {"type": "tool_use", "id": "toolu_1", "name": "lookup", "input": {}},
                        ],
                    },
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "found"}],
                    },
                    {"role": "system", "content": "Be brief."},
                ],
            },
        ),
        (
            f"/v1beta/models/{MODEL}:generateContent",
            {
                "contents": [
                    {"role": "user", "parts": [{"text": "Look"}, {"text": "twice."}]},
                    {"role": "model", "parts": [{"functionCall": {"name": "lookup", "args": {}}}]},
                    {
                        "role": "user",
                        "parts": [{"functionResponse": {"name": "lookup", "response": {}}}, {"text": "Go."}],
                    },
                ],
                "generationConfig": {"maxOutputTokens": 1},
            },
        ),
    ],
    ids=["chat", "responses", "anthropic", "gemini"],
)
def test_every_dialect_reaches_a_template_that_takes_only_turns(path: str, body: dict[str, object]) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    given = body if "generateContent" in path else {"model": MODEL, **body}
    with embedded_llm(chat_template=ONLY_TURNS) as llm, ServerThread(llm, ServerConfig()) as server:
        answer = httpx.post(f"{server.url}{path}", json=given, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
