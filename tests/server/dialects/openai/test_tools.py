"""Tools in chat completions: the official client on a tiny model whose template has tools.

The model has random weights, so its calls are forced by grammar; calls that a model makes of its own accord are read
from text, apart.
"""

from __future__ import annotations

import copy
import json

import pytest

from foreword.server.chats.chat import with_calls
from foreword.server.chats.tools import ToolChoice, ToolUse
from foreword.text import Tokenizer
from foreword.text.reply import Call, Part, Reasoning, Text
from foreword.text.reply.turn import Turn
from live_server import MODEL, client, post, tiny_server
from tiny_models import CHAT_TEMPLATE, TOOL_TEMPLATE

UNTAGGED = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT_TEMPLATE


def tool(name: str, **properties: object) -> dict[str, object]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


WEATHER = tool("weather", city={"enum": ["Lisbon", "Oslo"]}, days={"type": "integer", "minimum": 1, "maximum": 9})
CLOCK = tool("clock", zone={"$ref": "#/$defs/zone"})
CLOCK["function"]["parameters"]["$defs"] = {"zone": {"enum": ["UTC", "CET"]}}  # type: ignore[index]
ASK = [{"role": "user", "content": "How warm?"}]
CHECKED = {
    "weather": lambda a: a["city"] in ("Lisbon", "Oslo") and 1 <= a["days"] <= 9,
    "clock": lambda a: set(a) == {"zone"},
}


@pytest.fixture(scope="module")
def tagged(tmp_path_factory):
    with tiny_server(tmp_path_factory.mktemp("model"), TOOL_TEMPLATE) as server:
        yield server


@pytest.fixture(scope="module")
def untagged(tmp_path_factory):
    with tiny_server(tmp_path_factory.mktemp("model"), UNTAGGED) as server:
        yield server


def assert_valid(calls) -> None:
    assert calls
    for call in calls:
        assert call.type == "function"
        assert call.id.startswith("call_")
        assert CHECKED[call.function.name](json.loads(call.function.arguments))
    assert len({call.id for call in calls}) == len(calls)


# -------------------------------------------------------------------- forced


@pytest.mark.parametrize("kind", ["tagged", "untagged"])
@pytest.mark.parametrize("seed", range(3))
def test_a_required_call_is_one_of_the_tools_with_arguments_of_its_schema(request, kind, seed):
    answer = client(request.getfixturevalue(kind).url).chat.completions.create(
        model=MODEL,
        messages=ASK,
        tools=[WEATHER, CLOCK],
        tool_choice="required",
        parallel_tool_calls=False,
        seed=seed,
        temperature=1,
    )
    (choice,) = answer.choices
    assert_valid(choice.message.tool_calls)
    assert (len(choice.message.tool_calls), choice.message.content) == (1, None)
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("name", ["weather", "clock"])
def test_a_named_call_is_of_that_function(tagged, name):
    for seed in range(3):
        (choice,) = (
            client(tagged.url)
            .chat.completions.create(
                model=MODEL,
                messages=ASK,
                tools=[WEATHER, CLOCK],
                tool_choice={"type": "function", "function": {"name": name}},
                seed=seed,
            )
            .choices
        )
        (call,) = choice.message.tool_calls
        assert call.function.name == name
        assert_valid([call])
        assert choice.finish_reason == "stop", "as OpenAI's, where the function was named"


def test_several_calls_may_come_at_once_unless_that_is_forbidden(tagged):
    counts = set()
    for seed in range(4):
        (choice,) = (
            client(tagged.url)
            .chat.completions.create(
                model=MODEL, messages=ASK, tools=[CLOCK], tool_choice="required", seed=seed, temperature=2
            )
            .choices
        )
        assert_valid(choice.message.tool_calls)
        counts.add(len(choice.message.tool_calls))
    assert max(counts) > 1


def test_a_streams_deltas_add_up_to_the_whole_calls(tagged):
    wish = {"model": MODEL, "messages": ASK, "tools": [CLOCK], "tool_choice": "required", "seed": 5, "n": 2}
    wish["max_tokens"] = 200  # cuts an answer of many calls in the middle of one
    whole = client(tagged.url).chat.completions.create(**wish)
    told: dict[int, dict[int, dict[str, str]]] = {0: {}, 1: {}}
    reasons, texts = {}, {0: "", 1: ""}
    for chunk in client(tagged.url).chat.completions.create(**wish, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        for piece in choice.delta.tool_calls or ():
            call = told[choice.index].setdefault(piece.index, {"name": piece.function.name, "arguments": ""})
            assert (piece.id is None) is (piece.function.name is None)
            call["arguments"] += piece.function.arguments
        reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    for choice in whole.choices:
        calls = [{"name": c.function.name, "arguments": c.function.arguments} for c in choice.message.tool_calls]
        assert list(told[choice.index].values()) == calls
        assert calls
        assert texts[choice.index] == (choice.message.content or "")
        assert reasons[choice.index] == choice.finish_reason


# -------------------------------------------------------------- conversations


def test_a_call_its_result_and_the_next_question_reuse_the_conversation_so_far(tagged):
    ask = client(tagged.url).chat.completions
    options = {"model": MODEL, "tools": [WEATHER], "temperature": 0}
    first = ask.create(messages=ASK, tool_choice="required", parallel_tool_calls=False, **options)
    told = [*ASK, first.choices[0].message]
    (call,) = first.choices[0].message.tool_calls
    told.append({"role": "tool", "tool_call_id": call.id, "content": "21 degrees"})
    second = ask.create(messages=told, tool_choice="none", max_tokens=4, **options)
    assert second.choices[0].message.tool_calls is None
    reused = second.usage.prompt_tokens_details.cached_tokens
    so_far = first.usage.prompt_tokens + first.usage.completion_tokens
    assert reused >= so_far - 16 - 2, "the call is written as it was generated, so its tokens are found"


def test_tools_reach_the_prompt_also_where_none_may_be_called(tagged):
    counts = {
        choice: client(tagged.url)
        .chat.completions.create(model=MODEL, messages=ASK, tools=[WEATHER], tool_choice=choice, max_tokens=1)
        .usage.prompt_tokens
        for choice in ("none", "auto")
    }
    without = client(tagged.url).chat.completions.create(model=MODEL, messages=ASK, max_tokens=1).usage.prompt_tokens
    assert counts["none"] == counts["auto"] > without
    told = post(tagged.url, "/tokenize", {"messages": ASK, "tools": [WEATHER]}).json()["count"]
    assert told == counts["auto"]


def test_other_tools_are_named_as_the_cause_of_a_miss(tagged):
    body = {"messages": ASK, "tools": [WEATHER], "max_tokens": 1}
    first = post(tagged.url, "/v1/chat/completions", body).json()
    body |= {"tools": [CLOCK], "prompt_cache_options": {"comparison_response_id": first["id"]}}
    miss = post(tagged.url, "/v1/chat/completions", body).json()["prompt_cache_diagnostics"]
    assert (miss["type"], miss["reason"]) == ("cache_miss", "tools_changed")


BAD_NAME = {"type": "function", "function": {"name": "a b"}}


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": [BAD_NAME]}, "tools[0].function.name"),
        ({"tools": [WEATHER], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        ({"messages": [*ASK, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_makes_no_sense_is_refused_by_name(tagged, wish, param):
    answer = post(tagged.url, "/v1/chat/completions", {"messages": ASK, "max_tokens": 1, **wish})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_images_stay_refused(tagged):
    image = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,x"}}]
    answer = post(tagged.url, "/v1/chat/completions", {"messages": [{"role": "user", "content": image}]})
    assert answer.status_code == 400


@pytest.mark.parametrize("kind", ["tagged", "untagged"])
def test_a_pattern_that_no_grammar_can_follow_is_left_out_with_a_log_line(request, kind, caplog):
    server = request.getfixturevalue(kind)
    sent = tool("sent", to={"type": "string", "pattern": r"^(?!\\.)[a-z]{1,3}$", "maxLength": 3}, days={"const": 3})
    other = tool("other", to={"type": "string", "pattern": r"^(?!y)z$"})
    choice = {"type": "function", "function": {"name": "sent"}}
    body = {"messages": ASK, "tools": [other, sent], "tool_choice": choice, "max_tokens": 200}
    with caplog.at_level("WARNING", logger="foreword"):
        for _ in range(2):
            answer = post(server.url, "/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    [call] = answer.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["days"] == 3
    [line] = [record.getMessage() for record in caplog.records if "do not enforce" in record.getMessage()]
    assert "at '$.properties.to.pattern' of 'sent'" in line
    assert "(?!y)" not in line, "it cannot be called"
    wrong = post(
        server.url,
        "/v1/chat/completions",
        {**body, "tools": [tool("sent", to={"type": "string", "minLength": 5, "maxLength": 2})]},
    )
    assert wrong.status_code == 400, "what else is wrong is still refused"
    for pattern in ("(", "[a", "b)"):
        broken = tool("sent", to={"type": "string", "pattern": pattern}, at={"type": "string", "pattern": "^(?!y)z$"})
        wrong = post(server.url, "/v1/chat/completions", {**body, "tools": [broken]})
        assert wrong.status_code == 400, "it is no regular expression"
        assert "regex" in wrong.json()["error"]["message"]


def test_names_of_properties_cannot_break_a_log_line(tagged):
    named = tool("look", **{"a\nb": {"type": "string", "pattern": "(?!x)"}})
    use = ToolUse([named], ToolChoice("required"), tagged.service.llm.tokenizer)
    [told] = use.relax(lambda pattern: False)
    assert told == r"'(?!x)' at '$.properties.a\nb.pattern' of 'look'"


# -------------------------------------------------------------- reading calls


class Written(Tokenizer):
    """A tokenizer with another chat template."""

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        super().__init__(copy.copy(tokenizer.hf_tokenizer))
        self.set_chat_template(template)


def read(tokenizer: Tokenizer, text: str, mode: str = "auto") -> list[Part]:
    use = ToolUse([WEATHER], ToolChoice(mode), tokenizer)
    reader = use.reader(Turn(tokenizer, tokenizer.encode("<s>assistant: ")))
    return [Text(text)] if reader is None else [*reader.push(text), *reader.finish()]


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
BARE = '{"name": "f", "arguments": {"a": 1}}'


def test_calls_are_read_where_the_template_writes_them_and_the_choice_allows_them(tagged):
    tokenizer = tagged.service.llm.tokenizer
    plain = Written(tokenizer, UNTAGGED)
    called = [Call("f", '{"a": 1}')]
    assert read(tokenizer, CALL) == read(tokenizer, CALL, "required") == called
    assert read(tokenizer, CALL, "none") == read(plain, CALL) == [Text(CALL)]
    assert read(plain, BARE, "required") == called
    assert read(plain, BARE) == [Text(BARE)]
    assert read(Written(tokenizer, TOOL_TEMPLATE), "<think>x</think> y " + CALL) == [Reasoning("x"), Text("y"), *called]


def test_the_first_call_ends_an_answer_that_may_have_only_one(tagged):
    tokenizer = tagged.service.llm.tokenizer

    assert ToolUse([WEATHER], ToolChoice(), tokenizer).stop == ()
    assert ToolUse([WEATHER], ToolChoice(at_most_one=True), tokenizer).stop == ("</tool_call>",)
    assert not ToolUse([WEATHER], ToolChoice(), tokenizer).is_forced
    parts = [Text("a"), *[Call("f", "{}")] * 2, Text("b")]
    assert with_calls(parts, 1) == [Text("a"), Call("f", "{}"), Text("b")]
    assert with_calls(parts, 0) == [Text("a"), Text("b")]
