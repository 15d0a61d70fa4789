"""Function calling: Google's client on a model whose weights are set by hand, so that it calls of its own accord."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from google.genai import types

from foreword.errors import ForewordError
from foreword.llm import LLM
from foreword.server.api_errors import APIError
from foreword.server.dialects.gemini.answer import content_part
from foreword.server.dialects.gemini.contents import json_schema, read_chat
from foreword.server.dialects.gemini.fields import Content, GenerateContentRequest
from foreword.server.options import ServerConfig
from foreword.text.reply import Call, Reasoning, Text
from live_server import MODEL, ServerThread
from scripted_model import save_scripted_model
from server.dialects.gemini.sdk import generate, google
from tiny_models import TOOL_TEMPLATE

SUM = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
SCRIPT = {"<asked>": SUM, "<twice>": f"Both.\n{SUM}\n{CLOCK}", "<told>": "The sum is 3."}
TEMPLATE = TOOL_TEMPLATE.partition("{% if add_generation_prompt %}")[0] + (
    "{% if add_generation_prompt %}{% set last = messages[-1] %}<s>assistant: "
    "{% if last.role == 'tool' %}<told>{% elif 'twice' in last.content %}<twice>{% else %}<asked>{% endif %}{% endif %}"
)
ASK = {"contents": [{"parts": [{"text": "1 + 2?"}]}], "generationConfig": {"temperature": 0}}
ADD = {
    "name": "add",
    "description": "Adds.",
    "parameters": {
        "type": "OBJECT",
        "properties": {"a": {"type": "INTEGER", "minimum": 0, "maximum": 9}, "b": {"type": "INTEGER", "enum": [2]}},
        "required": ["a", "b"],
    },
}
TIME = {"name": "clock", "parameters_json_schema": {"type": "object", "additionalProperties": False}}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = save_scripted_model(tmp_path_factory.mktemp("model"), TEMPLATE, SCRIPT)
    with (
        LLM(str(folder), kv_cache_memory_bytes=16 * 2**20, dtype="float32", self_check=False) as llm,
        ServerThread(llm, ServerConfig()) as server,
    ):
        yield server.url


def config(**fields: Any) -> types.GenerateContentConfig:
    return types.GenerateContentConfig(temperature=0, **fields)


def calling(mode: str, *names: str) -> dict[str, Any]:
    return {"functionCallingConfig": {"mode": mode, **({"allowedFunctionNames": names} if names else {})}}


def parts(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return answer["candidates"][0]["content"]["parts"]


# ----------------------------------------------------------------------- loops


def test_the_client_calls_python_functions_until_the_answer_is_text(url):
    seen = []

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        seen.append((a, b))
        return a + b

    async def add_later(client: Any) -> str:
        async with client.aio as ask:
            return (await ask.models.generate_content(model=MODEL, contents="1 + 2?", config=config(tools=[add]))).text

    with google(url) as ask:
        answer = ask.models.generate_content(model=MODEL, contents="1 + 2?", config=config(tools=[add]))
        assert (answer.text, seen) == ("The sum is 3.", [(1, 2)])
        [_, call, result] = answer.automatic_function_calling_history
        assert call.parts[0].function_call.args == {"a": 1, "b": 2}
        assert result.parts[0].function_response.response == {"result": 3}
        chunks = ask.models.generate_content_stream(model=MODEL, contents="1 + 2?", config=config(tools=[add]))
        assert "".join(chunk.text or "" for chunk in chunks) == "The sum is 3."
    assert asyncio.run(add_later(google(url))) == "The sum is 3."
    assert seen == 3 * [(1, 2)]


def test_a_chat_with_functions_hits_its_history(url):
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    with google(url) as ask:
        chat = ask.chats.create(model=MODEL, config=config(tools=[add]))
        assert chat.send_message("1 + 2?").text == "The sum is 3."
        usage = chat.send_message("Once more?").usage_metadata
    assert usage.cached_content_token_count > 0.8 * usage.prompt_token_count


# ----------------------------------------------------------------------- calls


def test_calls_stand_after_the_text_before_them_whole_and_streamed(url):
    body = {**ASK, "contents": {"parts": {"text": "twice"}}, "tools": {"functionDeclarations": [ADD, TIME]}}
    wanted = [
        {"text": "Both."},
        {"functionCall": {"name": "add", "args": {"a": 1, "b": 2}}},
        {"functionCall": {"name": "clock", "args": {}}},
    ]
    whole = generate(url, body).json()
    assert parts(whole) == wanted
    assert whole["candidates"][0]["finishReason"] == "STOP"
    chunks = generate(url, body, f"/v1/models/{MODEL}:streamGenerateContent").json()
    assert [part for chunk in chunks for part in parts(chunk) if part != {"text": ""}] == wanted


@pytest.mark.parametrize("seed", range(2))
def test_any_forces_a_call_of_an_allowed_function_and_none_forbids_all(url, seed):
    hot = {
        **ASK,
        "generationConfig": {"temperature": 1, "seed": seed},
        "tools": [{"functionDeclarations": [ADD, TIME]}],
    }
    for names in ((), ("add",), ("clock",)):
        calls = [
            part["functionCall"] for part in parts(generate(url, {**hot, "toolConfig": calling("ANY", *names)}).json())
        ]
        assert {call["name"] for call in calls} <= set(names or ("add", "clock"))
        assert all(0 <= call["args"]["a"] <= 9 and call["args"]["b"] == 2 for call in calls if call["name"] == "add")
    answer = generate(url, {**ASK, "tools": hot["tools"], "tool_config": calling("NONE")}).json()
    assert parts(answer) == [{"text": SUM}]


def test_functions_reach_the_prompt_and_the_count_whether_or_not_they_may_be_called(url):
    with_tools = {**ASK, "tools": [{"function_declarations": [ADD]}]}
    counts = {
        generate(url, {**with_tools, "toolConfig": calling(mode)}).json()["usageMetadata"]["promptTokenCount"]
        for mode in ("NONE", "AUTO", "ANY")
    }
    path = f"/v1/models/{MODEL}:countTokens"
    assert counts == {generate(url, {"generateContentRequest": with_tools}, path).json()["totalTokens"]}
    assert generate(url, {"generateContentRequest": ASK}, path).json()["totalTokens"] < min(counts)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"toolConfig": calling("ANY")}, "toolConfig.functionCallingConfig.mode"),
        ({"tools": [{"functionDeclarations": [ADD]}], "toolConfig": calling("ANY", "x")}, "allowedFunctionNames"),
        ({"tools": [{"functionDeclarations": [ADD]}], "toolConfig": calling("AUTO", "add")}, "allowedFunctionNames"),
        ({"toolConfig": calling("VALIDATED")}, "toolConfig.functionCallingConfig.mode"),
        ({"tools": [{"functionDeclarations": [{"name": "a b"}]}]}, "tools[0].functionDeclarations[0].name"),
        ({"tools": [{"functionDeclarations": [{**ADD, **TIME}]}]}, "tools[0].functionDeclarations[0]"),
        (
            {"tools": [{"functionDeclarations": [{"name": "f", "parameters": {"type": "SET"}}]}]},
            "tools[0].functionDeclarations[0].parameters.type",
        ),
        ({"tools": [{"googleSearch": {}}]}, "tools[0]"),
        ({"tools": [{"codeExecution": {}}]}, "tools[0]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_functions_that_make_no_sense_are_refused_by_name(url, change, field):
    error = generate(url, {**ASK, **change}).json()["error"]
    assert (error["code"], error["status"]) == (400, "INVALID_ARGUMENT")
    assert error["details"][0]["fieldViolations"][0]["field"].endswith(field)


def test_thoughts_are_shown_on_request_and_calls_that_are_none_are_not():
    shown = {
        Text("a"): {"text": "a"},
        Reasoning("b"): {"text": "b", "thought": True},
        Call("f", '{"a": 1}'): {"functionCall": {"name": "f", "args": {"a": 1}}},
        Call("f", "[1]"): None,
        Call("f", '{"a": NaN}'): None,
        Call("f", "{}", is_complete=False): None,
    }
    assert {part: content_part(part, with_thoughts=True) for part in shown} == shown
    assert content_part(Reasoning("b"), with_thoughts=False) is None


# -------------------------------------------------------------------- contents


def call(name: str, id: str | None = None, **args: Any) -> dict[str, Any]:
    return {"functionCall": {"name": name, "args": args} | ({} if id is None else {"id": id})}


def result(name: str, value: Any, id: str | None = None) -> dict[str, Any]:
    return {"functionResponse": {"name": name, "response": {"result": value}} | ({} if id is None else {"id": id})}


def read(*contents: tuple[str | None, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    told = [Content.model_validate({"role": role, "parts": held}) for role, held in contents]
    return read_chat(GenerateContentRequest.model_construct(contents=told), "", 0).messages


def told(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The call that each result answers."""
    of = {c["id"]: c["function"]["name"] for m in messages for c in m.get("tool_calls", ())}
    assert len(of) == sum(len(m.get("tool_calls", ())) for m in messages)
    return [(of[m["tool_call_id"]], m["content"]) for m in messages if m["role"] == "tool"]


def test_a_result_finds_its_call_by_id_by_name_or_by_order():
    one, two = '{"result": 1}', '{"result": 2}'
    by_id = read(("model", [call("f", "x"), call("f", "y")]), ("user", [result("f", 1, "y"), result("f", 2, "x")]))
    assert [message["tool_call_id"] for message in by_id[1:]] == ["y", "x"]
    by_name = read(("model", [call("f"), call("g")]), ("user", [result("g", 1), result("f", 2)]))
    assert told(by_name) == [("g", one), ("f", two)]
    by_order = read(("model", [call("f"), call("f")]), ("function", [result("f", 1), result("other", 2)]))
    assert [message["tool_call_id"] for message in by_order[1:]] == ["call00000", "call00001"]
    again = read(
        ("user", [{"text": "a"}]),
        ("model", [call("f")]),
        ("user", [{"text": "b"}, result("f", 1), {"text": "c"}, {"text": "d"}]),
        ("model", [call("f")]),
        ("user", [result("f", 2)]),
    )
    assert told(again) == [("f", one), ("f", two)]
    assert [message["role"] for message in again] == "user assistant user tool user assistant tool".split()
    assert again[4]["content"] == "c\nd"


def test_an_answer_in_several_contents_is_one_message_with_its_thoughts():
    [message] = read(
        ("model", [{"text": "Hm.", "thought": True, "thoughtSignature": "AA=="}, {"text": "One "}]),
        ("model", [{"text": "two."}, call("f"), {"thought_signature": "AA=="}]),
        ("model", [call("g", a=1)]),
    )
    assert (message["content"], message["reasoning_content"]) == ("One two.", "Hm.")
    assert [one["function"] for one in message["tool_calls"]] == [
        {"name": "f", "arguments": {}},
        {"name": "g", "arguments": {"a": 1}},
    ]


@pytest.mark.parametrize(
    "contents",
    [
        [("user", [result("f", 1)])],
        [("model", [call("f")]), ("user", [result("f", 1), result("f", 2)])],
        [("model", [result("f", 1)])],
        [("user", [call("f")])],
        [("user", [])],
        [("user", [{}])],
        [("user", [{"text": "a", **call("f")}])],
        [("system", [{"text": "a"}])],
    ],
    ids=str,
)
def test_contents_that_make_no_sense_are_refused_with_their_place(contents):
    with pytest.raises(APIError, match=r"contents\[[01]\]") as caught:
        read(*contents)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("thinking", "template", "inputs", "budget"),
    [
        ({"thinkingBudget": 0}, "enable_thinking", {"enable_thinking": False}, None),
        ({"thinking_budget": 64}, "enable_thinking", {"enable_thinking": True}, 64),
        ({"thinkingBudget": -1}, "enable_thinking", {"enable_thinking": True}, None),
        ({"thinkingLevel": "HIGH"}, "reasoning_effort", {"reasoning_effort": "high"}, None),
        ({"thinkingLevel": "MINIMAL"}, "enable_thinking", {"enable_thinking": False}, None),
        ({"includeThoughts": True}, "enable_thinking", {}, None),
        ({"thinkingBudget": 0}, "plain", {}, None),
    ],
)
def test_thinking_is_switched_by_the_templates_own_inputs(thinking, template, inputs, budget):
    body = GenerateContentRequest.model_validate({**ASK, "generationConfig": {"thinkingConfig": thinking}})
    chat = read_chat(body, f"{{{{ {template} }}}}", 0)
    assert (chat.template_inputs, chat.thinking_budget) == (inputs, budget)
    both = {"thinkingConfig": {"thinkingBudget": 1, "thinkingLevel": "LOW"}}
    with pytest.raises(ForewordError, match="cannot be combined"):
        read_chat(GenerateContentRequest.model_validate({**ASK, "generationConfig": both}), "", 0)


# --------------------------------------------------------------------- schemas


def test_googles_schemas_become_json_schemas():
    schema = {
        "type": "OBJECT",
        "title": "T",
        "description": "D",
        "nullable": True,
        "properties": {
            "z": {"any_of": [{"type": "NUMBER"}, {"type": "string", "format": "date", "maxLength": "3"}]},
            "min_items": {"type": "TYPE_UNSPECIFIED"},
            "a": {"type": "ARRAY", "prefixItems": [{"ref": "#/$defs/x"}], "items": {"type": "NULL"}},
        },
        "required": ["a"],
        "property_ordering": ["a", "z"],
        "defs": {"x": {"type": "OBJECT", "additionalProperties": {"type": "BOOLEAN"}, "example": {}}},
    }
    made = json_schema(schema, "s")
    assert made == {
        "title": "T",
        "description": "D",
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "a": {"type": "array", "prefixItems": [{"$ref": "#/$defs/x"}], "items": {"type": "null"}},
                    "z": {"anyOf": [{"type": "number"}, {"type": "string", "maxLength": 3}]},
                    "min_items": {},
                },
                "required": ["a"],
                "additionalProperties": False,
            },
            {"type": "null"},
        ],
        "$defs": {"x": {"type": "object", "additionalProperties": {"type": "boolean"}}},
    }
    assert list(made["anyOf"][0]["properties"]) == ["a", "z", "min_items"]


@pytest.mark.parametrize("schema", [5, {"type": 5}, {"properties": []}, {"anyOf": {}}, {"colour": 1}, {"items": [1]}])
def test_schemas_that_are_none_are_refused_with_their_place(schema):
    with pytest.raises(APIError) as caught:
        json_schema({"type": "OBJECT", "properties": {"x": schema}}, "s")
    assert caught.value.param.startswith("s.properties.x")
