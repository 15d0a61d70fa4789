"""A chat template of one's own, and what requests may hand to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from foreword.demo.recall import LOOKUP
from foreword.server.options import ServerConfig
from live_server import FALCON, MODEL, ServerThread, embedded_llm, post

TEMPLATE = (
    "{% if mood %}In a {{ mood }} mood. {% endif %}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}\nAnswer: {% endif %}"
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


def test_a_template_without_tools_refuses_them(own_template: ServerThread) -> None:
    answer = post(own_template.url, "/v1/chat/completions", {"messages": FALCON, "tools": [LOOKUP]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
