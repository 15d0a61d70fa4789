"""Tools, thinking and failures: Anthropic's client on a tiny model whose template has tools and a switch for thinking.

The model has random weights, so its calls are forced by grammar.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, Literal

import anthropic
import httpx
import pytest

from foreword.server import http as server_http
from foreword.server.api_errors import engine_failed, timed_out, too_busy
from foreword.server.dialects.anthropic.answer import _BlockEvents, _blocks
from foreword.server.dialects.anthropic.endpoints import Anthropic
from foreword.server.dialects.anthropic.fields import CreateMessageRequest
from foreword.server.dialects.anthropic.messages import chat_of
from foreword.text.reply import Call, Reasoning, Text
from live_server import MODEL, ServerThread, tiny_server
from tiny_models import TOOL_TEMPLATE

TEMPLATE = "{% if enable_thinking %}<s>think{% endif %}" + TOOL_TEMPLATE.replace(
    "{{ m.content }}", "{{ m.reasoning_content or '' }}{{ m.content }}", 1
)
ALTERNATING = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
    "<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
ASK: list[dict[str, Any]] = [{"role": "user", "content": "How warm?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Lisbon", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "Says how warm it is.", "input_schema": SCHEMA}
CLOCK = {**WEATHER, "name": "clock"}
FORCED: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 300,
    "tools": [WEATHER],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
}
DIALECT = Anthropic()


@pytest.fixture(scope="module")
def agents(tmp_path_factory):
    with tiny_server(tmp_path_factory.mktemp("model"), TEMPLATE) as server:
        yield server


@pytest.fixture
def ask(agents) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=agents.url, api_key="none", max_retries=0, timeout=60)


def calls_of(message) -> list[Any]:
    return [block for block in message.content if block.type == "tool_use"]


def prompt_of(server: ServerThread, **body: Any) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """The messages, template inputs and prompt of a call."""
    read = CreateMessageRequest.model_validate({"model": MODEL, "max_tokens": 3000, "messages": ASK, **body})
    chat = chat_of(server.service, read, 0)
    tokens = server.service.tokenizer.render_chat(chat.messages, template_inputs=chat.template_inputs)
    return list(chat.messages), dict(chat.template_inputs), server.service.tokenizer.spell(tokens.tolist())


# ------------------------------------------------------------------------ tools


def test_a_call_its_result_and_the_answer_reuse_the_conversation_so_far(ask):
    first = ask.messages.create(**FORCED, messages=ASK)
    (call,) = calls_of(first)
    assert call.id.startswith("toolu_")
    assert (call.name, first.stop_reason) == ("weather", "tool_use")
    assert call.input["city"] in ("Lisbon", "Oslo")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "21"}]}
    told = [*ASK, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    options = FORCED | {"tool_choice": {"type": "none"}, "max_tokens": 4}
    second = ask.messages.create(**options, messages=told)
    assert not calls_of(second)
    usage = first.usage
    so_far = usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens
    assert second.usage.cache_read_input_tokens >= so_far - 16 - 2
    counted = ask.messages.count_tokens(model=MODEL, messages=told, tools=[WEATHER], tool_choice={"type": "none"})
    assert second.usage.input_tokens + second.usage.cache_read_input_tokens == counted.input_tokens


def test_a_streamed_call_is_the_whole_one(ask):
    wish = {**FORCED, "messages": ASK, "tools": [WEATHER, CLOCK], "extra_body": {"temperature": 0, "seed": 3}}
    whole = ask.messages.create(**wish)
    told = ""
    with ask.messages.stream(**wish) as stream:
        for event in stream:
            if event.type == "content_block_delta":
                told += event.delta.partial_json
        streamed = stream.get_final_message()
    (call,) = calls_of(streamed)
    assert call.input == json.loads(told) == calls_of(whole)[0].input
    assert (call.name, streamed.stop_reason) == (calls_of(whole)[0].name, whole.stop_reason)


def test_several_calls_come_at_once_unless_that_is_forbidden_and_a_named_tool_is_called(ask):
    several = FORCED | {"tool_choice": {"type": "any"}, "max_tokens": 2000}
    counts = (
        len(calls_of(ask.messages.create(**several, messages=ASK, extra_body={"temperature": 2, "seed": seed})))
        for seed in range(20)
    )
    assert any(count > 1 for count in counts)
    named = FORCED | {"tools": [WEATHER, CLOCK], "tool_choice": {"type": "tool", "name": "clock"}}
    assert [call.name for call in calls_of(ask.messages.create(**named, messages=ASK))] == ["clock"]


def test_the_clients_own_loop_runs_to_its_end_without_threads(ask):
    cities = []

    @anthropic.beta_tool
    def weather(city: Literal["Lisbon", "Oslo"]) -> str:
        """Says how warm it is.

        Args:
            city: Lisbon.
        """
        cities.append(city)
        return "21"

    runner = ask.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=200,
        messages=ASK,
        tools=[weather],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        max_iterations=3,
        extra_body={"temperature": 0},
    )
    usages = [message.usage for message in runner]
    assert len(usages) == 3
    assert cities
    prompts = [usage.input_tokens + usage.cache_read_input_tokens for usage in usages]
    assert prompts == sorted(set(prompts)), "each turn has the whole conversation before it"


# --------------------------------------------------------------------- messages


def test_thinking_errors_and_calls_reach_the_template(agents):
    call = {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Oslo"}, "caller": None}
    answer = [
        {"type": "thinking", "thinking": "Let me look.", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "One moment.", "citations": None},
        call,
    ]
    result = {"type": "tool_result", "tool_use_id": "t", "content": "no network", "is_error": True}
    told = [*ASK, {"role": "assistant", "content": answer}, {"role": "user", "content": [result]}, *ASK]
    messages, _, _ = prompt_of(agents, messages=told, tools=[WEATHER])
    assert messages[1] | {"tool_calls": None} == {
        "role": "assistant",
        "content": "One moment.",
        "reasoning_content": "Let me look.",
        "tool_calls": None,
    }
    assert messages[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    assert messages[2:] == [
        {"role": "tool", "tool_call_id": "t", "name": "weather", "content": "Error: no network"},
        ASK[0],
    ]


@pytest.mark.parametrize(
    ("thinking", "switch"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "adaptive"}, True),
        ({"type": "between_tools"}, True),
        ({"type": "enabled", "budget_tokens": 2000}, True),
    ],
)
def test_thinking_is_the_templates_switch(agents, thinking, switch):
    assert prompt_of(agents, thinking=thinking)[1] == {"enable_thinking": switch}


def test_a_system_message_is_written_in_place_whatever_the_template_takes(agents, tmp_path):
    told = [*ASK, {"role": "system", "content": "be brief"}]
    assert [message["role"] for message in prompt_of(agents, messages=told)[0]] == ["user", "system"]
    assert "later_system" not in agents.service.template_report.changes
    with tiny_server(tmp_path, ALTERNATING) as other:
        messages, _, prompt = prompt_of(other, messages=told)
        assert [message["role"] for message in messages] == ["user", "system"]
        assert other.service.template_report.changes["later_system"] == "question"
        assert prompt.index("be brief") > prompt.index("How warm?")


def test_parts_become_blocks_and_events_alike():
    parts = [Reasoning("a"), Reasoning("b"), Text("c"), Text("d"), Call("f", '{"x": [1]}'), Text("e")]
    cut = [*parts, Call("g", '{"x": "half', is_complete=False), Call("h", '"text"')]
    blocks = _blocks(cut)
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "text", "tool_use", "tool_use"]
    assert (blocks[0]["thinking"], len(blocks[0]["signature"]), blocks[1]["text"]) == ("ab", 64, "cd")
    assert [block["input"] for block in blocks if block["type"] == "tool_use"] == [
        {"x": [1]},
        {},
        {"arguments": "text"},
    ]
    events = _BlockEvents()
    told = [event for part in cut for event in events.of(part)]
    starts = [event["index"] for event in told if event["type"] == "content_block_start"]
    assert starts == list(range(6))
    assert sum(event["type"] == "content_block_stop" for event in told) == 6


# --------------------------------------------------------------------- failures


def test_pings_come_before_the_message_begins(monkeypatch):
    monkeypatch.setattr(server_http, "PING_INTERVAL_S", 0.001)
    start = [("message_start", {"type": "message_start"})]

    async def slow() -> AsyncIterator[list[Any]]:
        await asyncio.sleep(0.1)
        yield start

    async def read() -> list[Any]:
        return [sent async for sent in server_http._pinged(slow(), DIALECT.ping)]

    *pings, last = asyncio.run(read())
    assert last == start
    assert set(pings) == {b'event: ping\ndata: {"type":"ping"}\n\n'}


@pytest.mark.parametrize(
    ("error", "status", "kind", "header"),
    [
        (timed_out(1), 504, "timeout_error", {"x-should-retry": "false"}),
        (too_busy("The queue is full.", 7), 429, "rate_limit_error", {"Retry-After": "7"}),
        (engine_failed("x"), 529, "overloaded_error", {}),
    ],
)
def test_our_errors_have_its_statuses_and_types(error, status, kind, header):
    request: Any = SimpleNamespace(state=SimpleNamespace(request_id="req_1", dialect=DIALECT))
    answer = server_http.error_response(request, error)
    body = json.loads(answer.body)
    assert (answer.status_code, body["error"]["type"], body["request_id"]) == (status, kind, "req_1")
    assert {
        name: answer.headers[name] for name in ("x-should-retry", "Retry-After") if name in answer.headers
    } == header
    assert server_http.error_event(request, error) == ("error", body)


@pytest.mark.parametrize("max_tokens", [5, 20, 30, 36, 40, 50, 60])
def test_a_call_cut_off_anywhere_is_an_answer(agents, max_tokens):
    answer = httpx.post(f"{agents.url}/v1/messages", json={**FORCED, "messages": ASK, "max_tokens": max_tokens})
    assert answer.status_code == 200
    for block in answer.json()["content"]:
        assert block["type"] == "text" or isinstance(block["input"], dict)


@pytest.mark.parametrize("arguments", ["", '{"a": "\\ud83d"}', '{"a": NaN', '{"a": 1', "[" * 5000, '{"a": {"b": [1, 2'])
def test_arguments_of_any_form_are_an_object(arguments):
    (block,) = _blocks([Call("f", arguments, is_complete=False)])
    assert isinstance(block["input"], dict)


def test_a_page_of_models_has_no_number_that_python_cannot_read(agents):
    headers = {"anthropic-version": "2023-06-01"}
    answer = httpx.get(f"{agents.url}/v1/models?limit=000000001{'0' * 5000}", headers=headers)
    assert answer.status_code == 400


def test_a_stream_that_cannot_be_written_ends_with_an_error():
    class Writer:
        async def events(self) -> AsyncIterator[list[Any]]:
            yield [("message_start", {})]
            raise AttributeError("a fault of ours")

    asked = SimpleNamespace(state=SimpleNamespace(dialect=DIALECT, request_id="req_1"))

    async def read() -> bytes:
        frames = server_http.ServerSent(DIALECT)
        return b"".join([sent async for sent in server_http._streamed(asked, Writer(), frames)])

    assert b'event: error\ndata: {"type":"error","error":{"type":"api_error"' in asyncio.run(read())
