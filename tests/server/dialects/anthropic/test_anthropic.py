"""Anthropic's official client, unchanged, against a real server process; older clients as requests that they sent."""

from __future__ import annotations

import json
from typing import Any, Literal

import anthropic
import httpx
import pytest
from pydantic import BaseModel

from live_server import FACTS, FALCON, MODEL, ServerProcess, post

QUESTION = FALCON[1:]
ASK: dict[str, Any] = {"model": MODEL, "max_tokens": 50, "system": FACTS, "messages": QUESTION, "temperature": 0}
OLD = {"x-api-key": "none", "anthropic-version": "2023-06-01"}
EPHEMERAL = {"type": "ephemeral"}


def sdk(url: str, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120, **options)


@pytest.fixture
def ask(server: ServerProcess) -> anthropic.Anthropic:
    return sdk(server.url)


def wish(**more: Any) -> dict[str, Any]:
    """A call with the official client, which has no parameter for the temperature."""
    body = {**ASK, **more}
    temperature = body.pop("temperature")
    return {**body, "extra_body": {"temperature": temperature}}


def refused(server: ServerProcess, body: Any, **options: Any) -> dict[str, Any]:
    answer = post(server.url, "/v1/messages", body, **options)
    told = answer.json()
    assert (answer.status_code, told["type"]) == (400, "error")
    assert told["request_id"] == answer.headers["request-id"]
    assert told["error"]["type"] == "invalid_request_error"
    return told["error"]


# ---------------------------------------------------------------------- answers


def test_a_question_is_answered_whole_and_streamed_alike(ask):
    message = ask.messages.create(**wish())
    assert message.id.startswith("msg_")
    assert message._request_id.startswith("req_")
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert ([block.text for block in message.content], message.stop_reason) == (["4821"], "end_turn")
    with ask.messages.stream(**wish()) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
        assert stream.request_id.startswith("req_")
    assert text == stream.get_final_text() == "4821"
    assert (final.stop_reason, final.usage.output_tokens) == (message.stop_reason, message.usage.output_tokens)


def test_events_come_in_their_order_and_nothing_follows_the_last(server):
    raw = post(server.url, "/v1/messages", {**ASK, "stream": True}, headers=OLD).text
    names = [line.removeprefix("event: ") for line in raw.splitlines() if line.startswith("event: ")]
    told = [json.loads(line.removeprefix("data: ")) for line in raw.splitlines() if line.startswith("data: ")]
    assert names == [event["type"] for event in told]
    assert [name for name in names if name != "content_block_delta"] == [
        "message_start",
        "content_block_start",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "[DONE]" not in raw
    whole = post(server.url, "/v1/messages", ASK, headers=OLD).json()
    for message, block in ((whole, whole["content"][0]), (told[0]["message"], told[1]["content_block"])):
        assert block.keys() == {"type", "text"}  # clients that check a text's fields refuse nulls
        assert {name for name, value in message.items() if value is None} <= {"stop_reason", "stop_sequence"}
    inputs = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    start, end = told[0]["message"]["usage"], told[-2]["usage"]
    assert [start[name] for name in inputs] == [end[name] for name in inputs]


def test_the_second_call_reads_the_cache_and_each_sum_is_the_counted_prompt(ask):
    document = "".join(f"The code of the pewter falcon {number} is 4821.\n" for number in range(20))
    told = {"system": [{"type": "text", "text": document}], "messages": QUESTION}
    usages = [ask.messages.create(**wish(**told)).usage for _ in range(2)]
    counted = ask.messages.count_tokens(model=MODEL, **told).input_tokens
    for usage in usages:
        assert usage.cache_creation_input_tokens == usage.cache_creation.ephemeral_1h_input_tokens == 0
        assert usage.input_tokens + usage.cache_read_input_tokens == counted
    assert usages[0].cache_read_input_tokens < 48 < counted - 17 <= usages[1].cache_read_input_tokens


def test_stop_reasons(ask):
    stopped = ask.messages.create(**wish(stop_sequences=["21"]))
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "21", "48")
    assert ask.messages.create(**wish(max_tokens=1)).stop_reason == "max_tokens"


@pytest.mark.slow
def test_the_context_may_end_inside_the_answer_but_not_inside_the_prompt(ask, server):
    def told(num: int) -> dict[str, Any]:
        return {"model": MODEL, "messages": [{"role": "user", "content": "a b" * num}]}

    fixed = ask.messages.count_tokens(**told(1)).input_tokens - ask.messages.count_tokens(**told(2)).input_tokens
    num = (ask.models.retrieve(MODEL).max_input_tokens - 60) // -fixed
    schema = {"type": "string", "minLength": 4000}
    message = ask.messages.create(
        **told(num), max_tokens=4000, output_config={"format": {"type": "json_schema", "schema": schema}}
    )
    assert message.stop_reason == "model_context_window_exceeded"
    assert refused(server, {**told(9000), "max_tokens": 1})["message"].startswith("prompt is too long: ")


def test_a_last_message_of_the_assistant_is_continued(ask):
    for prefill in ("482", [{"type": "text", "text": "482"}]):
        told = [*QUESTION, {"role": "assistant", "content": prefill}]
        assert ask.messages.create(**wish(messages=told)).content[0].text == "1"
    assert ask.messages.create(**wish(messages=[*QUESTION, {"role": "assistant", "content": ""}])).content


def test_an_answer_has_the_form_of_a_model_of_pydantic(ask):
    class Code(BaseModel):
        code: Literal["4821", "1234"]

    message = ask.messages.parse(**wish(output_format=Code))
    assert message.parsed_output.code in ("4821", "1234")
    again = [*QUESTION, {"role": "assistant", "content": message.content}, *QUESTION]
    usage = ask.messages.create(**wish(messages=again)).usage
    assert usage.cache_read_input_tokens > 0, "blocks come back as they were sent, nulls included"


def test_a_system_message_in_the_middle_stays_there(ask, server):
    note = {"role": "system", "content": "900 tokens left"}
    told = [*QUESTION, note]
    first = ask.messages.create(**wish(messages=told))
    usage = first.usage
    told += [{"role": "assistant", "content": first.content}, *QUESTION]
    before = usage.input_tokens + usage.cache_read_input_tokens
    assert ask.messages.create(**wish(messages=told)).usage.cache_read_input_tokens >= before - 17
    for wrong in ([note, *QUESTION], [*QUESTION, note, *QUESTION]):
        assert "system" in refused(server, {**ASK, "messages": wrong})["message"]


def test_the_billing_header_is_no_part_of_the_prompt(ask):
    counts = {
        ask.messages.count_tokens(
            model=MODEL, messages=QUESTION, system=[*head, {"type": "text", "text": FACTS}]
        ).input_tokens
        for head in ([], *([{"type": "text", "text": f"x-anthropic-billing-header: cch={n};"}] for n in (1, 22222)))
    }
    assert len(counts) == 1


# ---------------------------------------------------------------------- clients

AGENT = {
    "thinking": {"type": "adaptive", "display": "omitted"},
    "output_config": {"effort": "high"},
    "metadata": {"user_id": "u"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "cache_control": EPHEMERAL,
    "diagnostics": {"previous_message_id": None},
    "service_tier": "auto",
    "speed": None,
}


@pytest.mark.parametrize(
    "headers",
    [
        OLD | {"user-agent": "Anthropic/Python 0.40.0"},
        OLD | {"user-agent": "Anthropic/Python 1.17.0", "anthropic-beta": "new-2027-01-01,other-2026-02-02"},
        {"authorization": "Bearer none", "anthropic-version": "2026-10-21", "anthropic-beta": "x"},
        {},
    ],
)
def test_clients_of_every_version_are_answered(server, headers):
    for path in ("/v1/messages", "/v1/messages?beta=true", "/anthropic/v1/messages?beta=true"):
        answer = post(server.url, path, {**ASK, **AGENT}, headers=headers)
        assert (answer.status_code, answer.json()["content"][0]["text"]) == (200, "4821")
        assert answer.json()["context_management"] == {"applied_edits": []}
        assert answer.json()["diagnostics"] is None


def test_models_in_pages(ask, server):
    (model,) = ask.models.list(limit=1)
    assert (model.id, model.lifecycle, ask.models.retrieve(MODEL)) == (MODEL, "active", model)
    assert httpx.get(f"{server.url}/v1/models").json()["object"] == "list", "others get their own form"
    with pytest.raises(anthropic.NotFoundError):
        ask.models.retrieve("other")
    with pytest.raises(anthropic.BadRequestError):
        ask.models.list(limit=0)


# ----------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("system", "told"),
    [("x" * 500_000, "hold at most"), ([{}] * 9001, "contents of system has 9001")],
    ids=["text", "blocks"],
)
def test_a_system_prompt_that_no_model_holds_is_refused_by_count(server, system, told):
    answer = post(server.url, "/v1/messages", {**ASK, "system": system})
    assert answer.status_code == 400
    assert told in answer.json()["error"]["message"]


THOUGHT = {"type": "thinking", "thinking": "Hm.", "signature": ""}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"foo": 1}, "foo: Extra inputs are not permitted"),
        ({"max_tokens": -1}, "max_tokens: Input should be greater than or equal to 0"),
        ({"max_tokens": None}, "max_tokens: Input should be a valid integer"),
        ({"speed": "fast"}, "speed: Input should be 'standard'"),
        ({"container": "c"}, "container: not supported"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers: not supported"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "max_tokens: must be greater than"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}, "max_tokens": 3000}, "thinking.type: 'enabled'"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management.edits"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0.type: 'bash_20250124' is not supported"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: may only be specified while providing tools"),
        ({"cache_control": {"type": "persistent"}}, "cache_control.type: "),
        ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl: "),
        ({"messages": [{"role": "user", "content": []}]}, "messages.0.content: "),
        ({"messages": [*ASK["messages"], {"role": "assistant", "content": [THOUGHT]}]}, "messages.1: the last answer"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_this_server_lacks_is_refused_by_name(server, change, message):
    assert refused(server, {**ASK, **change})["message"].startswith(message)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"type": "image", "source": {}}, "messages[0].content[0] is of the type 'image'"),
        ({"type": "server_tool_use", "id": "x"}, "messages.0.content.0: Input tag 'server_tool_use'"),
        ({"type": "tool_use", "id": "t", "name": "f", "input": {}}, "messages.0.content.0: `tool_use` blocks"),
        ({"type": "tool_result", "tool_use_id": "t"}, "messages.0.content.0: unexpected `tool_use_id`"),
        (
            {"type": "text", "text": "", "cache_control": EPHEMERAL},
            "messages.0.content.0.text: cache_control cannot be set for empty text blocks",
        ),
        (
            {"type": "thinking", "thinking": "x", "signature": "", "cache_control": EPHEMERAL},
            "messages.0.content.0.thinking.cache_control: Extra inputs are not permitted",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else value["type"],
)
def test_blocks_that_do_not_belong_there_are_refused_by_place(server, block, message):
    told = {**ASK, "messages": [{"role": "user", "content": [block]}]}
    assert refused(server, told)["message"].startswith(message)


def test_a_thread_is_refused_so_that_the_client_sends_everything(server):
    error = refused(server, {**ASK, "thread": {"type": "create"}})
    assert error["details"]["error_code"] == "thread_unsupported_request"


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("GET", "/v1/files", 404, "not_found_error"),
    ],
)
def test_unknown_paths_are_refused_in_its_shape(server, method, path, status, kind):
    answer = httpx.request(method, server.url + path, headers=OLD)
    assert (answer.status_code, answer.json()["error"]["type"]) == (status, kind)
    assert answer.json()["request_id"] == answer.headers["request-id"]


def test_another_model_is_not_found(ask):
    with pytest.raises(anthropic.NotFoundError) as raised:
        ask.messages.create(**wish(model="claude-opus-9"))
    assert (raised.value.type, raised.value.error_code) == ("not_found_error", "model_not_found")


GARBAGE = (None, 0, -1.5, True, "x", [], [[]], {}, {"type": "x"}, [{"type": None}], "\ud800", [{"role": "user"}])


def test_garbage_in_any_field_is_a_400(server):
    from foreword.server.dialects.anthropic.fields import CountMessageTokensRequest, CreateMessageRequest

    with httpx.Client(base_url=server.url, timeout=60) as http:
        for path, model in (("", CreateMessageRequest), ("/count_tokens", CountMessageTokensRequest)):
            for name in model.model_fields:
                for value in GARBAGE:
                    body = {key: ASK[key] for key in ("model", "messages")} | ({} if path else {"max_tokens": 1})
                    data = json.dumps(body | {name: value}).encode()
                    answer = http.post(
                        f"/v1/messages{path}", content=data, headers={"content-type": "application/json"}
                    )
                    assert answer.status_code in (200, 400, 404), (name, value, answer.text)
        for data in (b"", b"{", b"[]", b"\xff", b'"x"'):
            answer = http.post("/v1/messages", content=data, headers={"content-type": "application/json"})
            assert (answer.status_code, answer.json()["type"]) == (400, "error")
