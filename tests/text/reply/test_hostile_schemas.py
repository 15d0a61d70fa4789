"""Schemas that clients send and no sane tool has: they cost little and never end a reader with an exception."""

from __future__ import annotations

from typing import Any

import pytest

from foreword.text.reply import Call, ReplyReader
from foreword.text.reply.arguments import MOST_SCHEMAS, types_of
from foreword.text.reply.forced import Function, forced_calls
from foreword.text.reply.format import family

CALL = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
DOUBLING: dict[str, Any] = {
    "$defs": {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)},
    "properties": {"a": {"$ref": "#/$defs/d0"}},
}
"""Each of forty definitions names the next one twice."""


@pytest.mark.parametrize(
    "schema",
    [
        DOUBLING,
        {"properties": ["a"]},
        {"properties": {"a": {"type": 5}}},
        {"properties": {"a": {"anyOf": 5, "oneOf": {"x": 1}, "enum": 3}}},
        {"properties": {"a": 7}},
        {"required": 5},
        {"required": [5, ["a"]], "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}},
        [],
        "x",
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_a_schema_of_any_form_is_read(schema: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    reader = ReplyReader(family("qwen3_coder"), "<|im_start|>assistant\n", tools=[tool])
    (call,) = [*reader.push(CALL), *reader.finish()]
    assert isinstance(call, Call)
    assert call.arguments in ('{"a": "1"}', '{"a": 1}')
    parameters = schema if isinstance(schema, dict) else {}
    for name in ("qwen3_coder", "gemma4", "glm4"):
        assert forced_calls(family(name), [Function("f", parameters)], {}, may_repeat=False).startswith("start:")


def test_no_more_schemas_are_looked_at_than_the_limit() -> None:
    assert len(types_of(DOUBLING["properties"]["a"], DOUBLING)) <= MOST_SCHEMAS


def test_the_grammar_of_optional_arguments_is_linear_in_their_number() -> None:
    def size(count: int) -> int:
        schema = {"properties": {f"a{n}": {"type": "integer"} for n in range(count)}}
        return len(forced_calls(family("gemma4"), [Function("f", schema)], {}, may_repeat=False))

    assert size(400) < 2.2 * size(200)


def test_reasoning_spans_are_the_same_for_every_cut() -> None:
    text = " <think>x</think>\n<think>y</think> A visible answer, and <think>z</think>."
    spans = []
    for step in (1, 7, len(text)):
        reader = ReplyReader(family("hermes"), "<|im_start|>assistant\n")
        for at in range(0, len(text), step):
            reader.push(text[at : at + step])
        reader.finish()
        spans.append(reader.reasoning_spans)
    assert spans[0] == spans[1] == spans[2]
    begin, end = spans[0][0]
    assert text[begin:end].startswith("<think>x")
    assert len(spans[0]) == 2
