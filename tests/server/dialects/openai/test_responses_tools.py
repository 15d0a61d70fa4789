"""Tools in /v1/responses: the official client on a tiny model whose template has tools and whose calls are forced.

Streamed and whole responses must be equal, and a conversation that goes on after a call must hit what it shares.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator

import openai
import pytest

from foreword.server.chats.chat import STRIDE, shortened
from foreword.server.dialects.openai.caching import Breakpoints
from foreword.server.dialects.openai.fields import FunctionCallItem, InputMessage
from foreword.server.dialects.openai.responses import continued
from live_server import MODEL, client, post, tiny_server
from tiny_models import TOOL_TEMPLATE

CITY = {"type": "object", "properties": {"city": {"enum": ["Lisbon", "Oslo"]}}, "required": ["city"]}
CITY["additionalProperties"] = False
WEATHER = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
CLOCK = {"type": "function", "name": "clock", "description": "the time", "parameters": None}
PATCH = {"type": "custom", "name": "patch", "description": "edit", "format": {"type": "text"}}
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
ASK = "How warm?"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with tiny_server(tmp_path_factory.mktemp("model"), TOOL_TEMPLATE) as server:
        yield server.url


def without_ids(item: dict) -> dict:
    return {key: value for key, value in item.items() if key not in ("id", "call_id")}


def call(url: str, **wish: object) -> openai.types.responses.Response:
    wishes = {"input": ASK, "tools": [WEATHER], "tool_choice": "required", "temperature": 0, "max_output_tokens": 400}
    return client(url).responses.create(model=MODEL, **{**wishes, "parallel_tool_calls": False, **wish})


def test_a_required_call_is_an_item_with_arguments_of_its_schema(url):
    response = call(url)
    (item,) = response.output
    assert (item.type, item.name, item.status) == ("function_call", "weather", "completed")
    assert json.loads(item.arguments)["city"] in ("Lisbon", "Oslo")
    assert (response.status, response.tool_choice, response.parallel_tool_calls) == ("completed", "required", False)
    assert response.tools[0].name == "weather"


@pytest.mark.parametrize(
    "wish",
    [
        {},
        {"tool_choice": "auto", "max_output_tokens": 20},
        {"tool_choice": {"type": "function", "name": "weather"}},
        {"tools": [WEATHER, CLOCK], "tool_choice": ALLOWED},
        {"parallel_tool_calls": True, "max_output_tokens": 120},
        {"include": ["message.output_text.logprobs"]},
        {"include": ["message.output_text.logprobs"], "tool_choice": "auto", "max_output_tokens": 20},
    ],
    ids=["required", "auto", "named", "allowed", "several, cut off", "required, logprobs", "auto, logprobs"],
)
def test_streamed_and_whole_responses_are_equal(url, wish):
    whole = call(url, **wish)
    events = list(call(url, **wish, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response
    assert [without_ids(item.model_dump()) for item in last.output] == [
        without_ids(item.model_dump()) for item in whole.output
    ]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.output
    for index, item in enumerate(last.output):
        deltas = [
            event.delta for event in events if getattr(event, "output_index", -1) == index and "delta" in event.type
        ]
        text = item.arguments if item.type == "function_call" else "".join(part.text for part in item.content)
        assert "".join(deltas) == text


def test_a_custom_tool_is_called_with_a_text(url):
    response = call(url, tools=[PATCH], max_output_tokens=30)
    (item,) = response.output  # random weights end no string: the call is cut off
    assert item.type in ("custom_tool_call", "message")
    kinds = {event.type for event in call(url, tools=[PATCH], max_output_tokens=30, stream=True)}
    assert "response.output_item.done" in kinds


def test_what_codex_sends_besides_is_taken_and_a_namespace_is_told_apart(url):
    inside = {"type": "namespace", "name": "sky", "description": "outside", "tools": [{**WEATHER, "strict": False}]}
    search = {"type": "web_search", "external_web_access": False}
    extra = {"client_metadata": {"thread_id": "x"}}
    choice = {"type": "function", "name": "sky__weather"}
    response = call(url, tools=[inside, search], tool_choice=choice, extra_body=extra)
    (item,) = response.output
    assert (item.name, item.namespace) == ("weather", "sky")
    output = {"type": "function_call_output", "call_id": item.call_id, "output": [{"type": "input_text", "text": "20"}]}
    said = [{"role": "user", "content": ASK}, item.model_dump(), output]
    after = call(url, input=said, tools=[inside, search], tool_choice="none", max_output_tokens=1)
    assert after.usage.input_tokens_details.cached_tokens > response.usage.input_tokens


def test_a_conversation_goes_on_after_a_call_and_hits(url):
    ask, long = client(url), ASK + " word" * 100
    first = call(url, input=long)
    output = {"type": "function_call_output", "call_id": first.output[0].call_id, "output": "20 degrees"}
    kept = call(url, input=[output], previous_response_id=first.id, tool_choice="none", max_output_tokens=5)
    sent = call(
        url, input=[{"role": "user", "content": long}, *first.output, output], tool_choice="none", max_output_tokens=5
    )
    assert kept.output_text == sent.output_text
    assert kept.usage.input_tokens == sent.usage.input_tokens
    computed_before = first.usage.input_tokens + first.usage.output_tokens
    block = 16
    assert kept.usage.input_tokens_details.cached_tokens >= (computed_before - 1) // block * block - block
    third = ask.responses.create(
        model=MODEL, input="And now?", previous_response_id=kept.id, max_output_tokens=1, tools=[WEATHER]
    )
    assert third.usage.input_tokens > kept.usage.input_tokens


def test_reasoning_items_come_back_as_they_were_sent(url):
    item = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "aGVsbG8="}
    answer = {"role": "assistant", "content": "Yes."}
    told = call(url, input=[{"role": "user", "content": ASK}, item, answer, {"role": "user", "content": "So?"}])
    assert told.status == "completed"
    for foreign in ("gAAAA*", "gAAé", "//8="):
        item["encrypted_content"] = foreign
        with pytest.raises(openai.BadRequestError, match="not of this server"):
            call(url, input=[{"role": "user", "content": ASK}, item])


@pytest.mark.parametrize(
    ("path", "wrong", "message"),
    [
        ("/v1/responses", [], "the list is empty; give at least one element"),
        ("/v1/responses", 5, "Input should be a valid string"),
        ("/v1/embeddings", [], "the list is empty; give at least one element"),
    ],
)
def test_an_input_that_is_neither_text_nor_a_list_is_named_without_our_types(url, path, wrong, message):
    error = post(url, path, {"input": wrong}).json()["error"]
    assert (error["param"], error["message"]) == ("input", f"Invalid value for input: {message}")


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": "1"}]}, "input[0].call_id"),
        ({"input": [{"type": "computer_call", "id": "x"}]}, "input[0].type"),
        ({"tools": [{"type": "file_search"}], "tool_choice": "auto"}, "tools[0].type"),
        ({"tools": [{"type": "function"}], "tool_choice": "auto"}, "tools[0].name"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "allowed_tools", "tools": []}}, "tool_choice.tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_object"}}}, "tool_choice"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_makes_no_sense_is_refused_by_name(url, wish, param):
    body = {"input": ASK, "tools": [WEATHER], "tool_choice": "required", "max_output_tokens": 5, **wish}
    answer = post(url, "/v1/responses", body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


# ------------------------------------------------------------------ truncation


def test_a_conversation_that_is_too_long_loses_its_beginning_if_the_client_agrees(url):
    roles = ("user", "assistant") * 40
    turns = [{"role": role, "content": f"{number} word"} for number, role in enumerate(roles)]
    long = [*turns, {"role": "user", "content": "last"}]
    wish = {"input": long, "instructions": "Be brief.", "tools": [], "tool_choice": "none", "max_output_tokens": 4}
    with pytest.raises(openai.BadRequestError):
        call(url, **wish)
    told = call(url, **wish, truncation="auto")
    assert told.truncation == "auto"
    hits = []
    for number in range(6):
        long += [{"role": "assistant", "content": "yes"}, {"role": "user", "content": f"more {number}"}]
        usage = call(url, **{**wish, "input": long}, truncation="auto").usage
        hits.append(usage.input_tokens_details.cached_tokens > 0.5 * usage.input_tokens)
    assert sum(hits) >= 4, "most turns begin like the one before"


@pytest.mark.parametrize("num_turns", [1, 3, 40])
@pytest.mark.parametrize("most", [0, 5, 30, 100, 1000])
def test_shortened_conversations_keep_system_and_last_message_and_begin_with_a_question(num_turns, most):
    turn = [("user", 2), ("assistant", 1), ("tool", 3), ("assistant", 2)]
    messages = [{"role": "system", "content": "x"}]
    messages += [{"role": role, "content": "x" * size} for _ in range(num_turns) for role, size in turn]
    messages.append({"role": "user", "content": "last"})

    async def count(some) -> int:
        return sum(len(message["content"]) for message in some)

    kept = asyncio.run(shortened(messages, most, count))
    assert kept[0] == messages[0]
    assert kept[-1] == messages[-1]
    assert list(kept[1:]) == messages[len(messages) - len(kept) + 1 :]
    assert kept[1]["role"] == "user"
    if most >= 5:
        assert asyncio.run(count(kept)) <= most
    left_out = len(messages) - len(kept)
    if most == 100 and num_turns == 40:
        assert left_out % STRIDE < len(turn), "at a stride, so that the next turn begins alike"


def test_calls_are_not_added_to_the_conversation_that_they_continue():
    first = FunctionCallItem(type="function_call", call_id="a", name="f", arguments="{}")
    more = [first.model_copy(update={"call_id": name}) for name in ("b", "c")]
    before = continued([], [first], Breakpoints())
    after = continued(before, [more[0], InputMessage(role="assistant", content="x"), more[1]], Breakpoints())
    assert [[call["id"] for call in message["tool_calls"]] for message in (*before, *after)] == [["a"], ["a", "b", "c"]]


@pytest.mark.slow
@pytest.mark.alone
def test_the_time_for_many_calls_is_in_proportion_to_their_number():
    item = FunctionCallItem(type="function_call", call_id="c", name="f", arguments="{}")

    def seconds(num_calls: int) -> float:
        started = time.thread_time()
        continued([], [item] * num_calls, Breakpoints())
        return time.thread_time() - started

    few, many = (min(seconds(count) for _ in range(3)) for count in (1000, 64_000))
    assert many < 256 * few
