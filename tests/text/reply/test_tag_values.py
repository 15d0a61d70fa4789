"""What forced calls may write between tags, and what becomes of it: each schema's values, and none that it refuses."""

from __future__ import annotations

import datetime
import ipaddress
import json
import random
import re
import uuid
from typing import Any

import pytest

from foreword.errors import InvalidRequestError
from foreword.text.reply import Call, ReplyReader
from foreword.text.reply.arguments import MOST_SCHEMAS, cast, types_of
from foreword.text.reply.forced import forced_calls, without_patterns
from foreword.text.reply.format import family
from foreword.text.template_form import TemplateForm
from text.reply.replies import FORMATS, SAMPLES, named, read
from text.reply.test_forced import grammars, tokenizer, walk

__all__ = ["grammars", "tokenizer"]

FAMILIES = ["qwen3_coder", "glm4", "minimax_m2"]
DEFINITIONS = {"color": {"enum": ["red", "dark blue"]}, "level": {"enum": [1, 2]}}
ENFORCED: dict[str, tuple[dict[str, Any], Any]] = {
    "optional_enum": ({"anyOf": [{"enum": ["a", "bc"]}, {"type": "null"}]}, lambda v: v in ("a", "bc", None)),
    "const": ({"const": "yes"}, lambda v: v == "yes"),
    "const_number": ({"const": 5}, lambda v: v == 5),
    "pattern": ({"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,3}$"}, re.compile(r"[A-Z]{2}-[0-9]{1,3}").fullmatch),
    "max_length": ({"type": "string", "maxLength": 3}, lambda v: len(v) <= 3),
    "lengths_and_pattern": (
        {"type": "string", "minLength": 2, "maxLength": 4, "pattern": "^\\d*$"},
        re.compile("[0-9]{2,4}").fullmatch,
    ),
    "optional_length": ({"type": ["string", "null"], "maxLength": 2}, lambda v: v is None or len(v) <= 2),
    "reference": ({"$ref": "#/$defs/color"}, lambda v: v in ("red", "dark blue")),
    "reference_in_all_of": ({"allOf": [{"$ref": "#/$defs/level"}], "default": 1}, lambda v: v in (1, 2)),
    "optional_reference": ({"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}]}, lambda v: v != ""),
    "pattern_or_number": (
        {"anyOf": [{"type": "string", "pattern": "^[a-c]{1,4}$"}, {"type": "integer", "minimum": 1, "maximum": 9}]},
        lambda v: v in range(1, 10) if isinstance(v, int) else re.fullmatch("[a-c]+", v),
    ),
    "date": ({"type": "string", "format": "date"}, datetime.date.fromisoformat),
    "time": ({"type": "string", "format": "time"}, lambda v: re.fullmatch(r"\d\d:\d\d:\d\d.*", v)),
    "uuid": ({"type": "string", "format": "uuid"}, uuid.UUID),
    "ipv4": ({"type": "string", "format": "ipv4"}, ipaddress.IPv4Address),
    "ipv6": ({"type": "string", "format": "ipv6"}, ipaddress.IPv6Address),
    "mixed_enum": ({"enum": ["auto", 3, None, True]}, lambda v: v in ("auto", 3, None, True)),
    "object": (
        {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False},
        lambda v: isinstance(v["n"], int),
    ),
}
"""Schemas of a value, and whether a value is right (not false, and raises nothing)."""


def parameters(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"v": schema}, "required": ["v"], "$defs": DEFINITIONS}


def value_of(family: str, text: str, schema: dict[str, Any]) -> Any:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters(schema)}}]
    prompt_end = SAMPLES[family].prompt_end.removesuffix("<think>\n").removesuffix("<think>")
    [call] = read(family, text, 1000, prompt_end=prompt_end, tools=tools)
    assert call.is_complete
    return json.loads(call.arguments)["v"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", list(ENFORCED))
def test_a_forced_call_has_only_values_that_the_schema_allows(tokenizer, grammars, family, name):
    schema, is_right = ENFORCED[name]
    function = named("f", parameters(schema))
    grammar = forced_calls(FORMATS[family], [function], tokenizer.added_tokens, may_repeat=False)
    open_constraint, (eos,) = grammars.lark(grammar), tokenizer.eos_token_ids
    for seed in range(3):
        token_ids = walk(open_constraint(), eos, random.Random(seed), most=3000)
        text = tokenizer.spell(token_ids)
        value = value_of(family, text, schema)
        assert is_right(value) not in (None, False), text


def forced_text(family: str, value: str) -> str:
    """A call as the family writes it."""
    form = FORMATS[family].call_form
    begin, end = (form[key].replace("{name}", "f") for key in ("open", "close"))
    tags = form["arguments"]
    argument = tags["open"].replace("{key}", "v") + value + tags["close"]
    return form.get("begin", "") + begin + argument + end + form.get("end", "")


def allows(tokenizer, grammars, family: str, schema: dict[str, Any], text: str) -> bool:
    grammar = forced_calls(FORMATS[family], [named("f", parameters(schema))], tokenizer.added_tokens, may_repeat=False)
    constraint, written = grammars.lark(grammar)(), []
    for token in tokenizer.hf_tokenizer.encode(text, add_special_tokens=False):
        if not constraint.allowed(written)[token]:
            return False
        written.append(token)
    (eos,) = tokenizer.eos_token_ids
    return bool(constraint.allowed(written)[eos])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("x/y|^b+$", ["x/y", "\na x/y </p", "bb"], ["x", "ab", ""]),
        (r"[|)\]]\|", ["]|", "a)|"], ["|", "]"]),
        (r"^\d\w$", ["1a"], ["\u06611", "1\u00e9", "12a"]),
    ],
    ids=str,
)
def test_a_pattern_matches_where_json_schema_says(tokenizer, grammars, family, pattern, right, wrong):
    schema = {"type": "string", "pattern": pattern}
    for value in right:
        assert allows(tokenizer, grammars, family, schema, forced_text(family, value)), value
    for value in wrong:
        assert not allows(tokenizer, grammars, family, schema, forced_text(family, value)), value


OPTIONAL: list[dict[str, Any]] = [
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
    {"type": ["string", "null"]},
    {"type": "string", "nullable": True},
    {"anyOf": [{"type": "string"}, {"type": "integer"}]},
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("schema", OPTIONAL, ids=json.dumps)
def test_a_text_that_may_be_missing_is_written_as_a_text(tokenizer, grammars, family, schema):
    for value in ("x", "null", "02134"):
        text = forced_text(family, value)
        assert allows(tokenizer, grammars, family, schema, text)
        right = None if value == "null" and "null" in json.dumps(schema) else value
        assert value_of(family, text, schema) == right


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": ["string", "integer"]}, "02134", "02134"),
        ({"type": ["integer", "string"]}, "007", "007"),
        ({"type": ["number", "string"]}, "1e5", "1e5"),
        ({"type": ["number", "string"]}, " 4", " 4"),
        ({"type": ["string", "integer"]}, "42", 42),
        ({"type": ["string", "number"]}, "-1.5", -1.5),
        ({"type": ["string", "boolean"]}, "1", "1"),
        ({"type": ["string", "boolean"]}, "True", True),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, '["a","b"]', ["a", "b"]),
        ({"anyOf": [{"type": "string"}, {"type": "array"}]}, "[1e5]", "[1e5]"),
        ({"enum": ["1", 2]}, "1", "1"),
        ({"enum": ["1", 2]}, "2", 2),
        ({"type": "integer"}, "02134", 2134),
        ({"type": "number"}, "1e5", 100000),
        ({"type": "string"}, "null", "null"),
        ({"allOf": [{"$ref": "#/$defs/level"}]}, "2", 2),
        ({}, "02134", "02134"),
    ],
    ids=str,
)
def test_what_may_be_a_text_stays_one_unless_the_value_is_written_like_it(schema, text, value):
    got = cast({"v": text}, parameters(schema))["v"]
    assert got == value
    assert type(got) is type(value)


UNFOLLOWED = [r"^(?=.*\d)[a-z\d]+$", r"^(?!x).*$", r"(?<=a)b", r"\bword\b", r"(a)\1", "(", "(?:^|x)y"]


@pytest.mark.parametrize("family", [*FAMILIES, "hermes"])
def test_patterns_that_no_grammar_can_follow_are_found_and_left_out(tokenizer, grammars, family):
    """All else of the schema still holds."""
    followed = {"type": "string", "pattern": "^[a-c]{1,3}$"}
    texts = [{"type": "string", "maxLength": 3, "pattern": pattern} for pattern in UNFOLLOWED]
    schema = {
        "type": "object",
        "properties": {"v": followed, "pattern": texts[0], "more": {"anyOf": texts[1:]}},
        "required": ["v", "pattern", "more"],
        "additionalProperties": False,
    }
    left, found = without_patterns(schema, grammars.can_follow)
    assert [one.pattern for one in found] == UNFOLLOWED
    assert found[0].place == "$.properties.pattern.pattern"
    assert found[1].place == "$.properties.more.anyOf[0].pattern"
    assert left["properties"]["v"] == followed

    def grammar(one):
        return forced_calls(FORMATS[family], [named("f", one)], tokenizer.added_tokens, may_repeat=False)

    with pytest.raises(InvalidRequestError):
        grammars.lark(grammar(schema))
    open_constraint, (eos,) = grammars.lark(grammar(left)), tokenizer.eos_token_ids
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    prompt_end = SAMPLES[family].prompt_end.removesuffix("<think>\n").removesuffix("<think>")
    text = tokenizer.spell(walk(open_constraint(), eos, random.Random(0), most=3000))
    [call] = read(family, text, 1000, prompt_end=prompt_end, tools=tools)
    assert re.fullmatch("[a-c]{1,3}", json.loads(call.arguments)["v"])


def test_what_is_left_of_a_schema_never_takes_less(grammars):
    schema = {
        "patternProperties": {"^(?!q)": {"type": "string"}, "^a": {"const": {"pattern": "(?!x)"}}},
        "additionalProperties": False,
        "enum": [{"pattern": "(?!x)"}],
        "items": [{"pattern": "(?!x)"}, True],
        "minProperties": 1,
    }
    assert without_patterns(schema, grammars.can_follow)[0] == {
        "patternProperties": {"^a": {"const": {"pattern": "(?!x)"}}},
        "additionalProperties": True,
        "enum": [{"pattern": "(?!x)"}],
        "items": [{}, True],
        "minProperties": 1,
    }


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
        assert forced_calls(family(name), [named("f", parameters)], {}, may_repeat=False).startswith("start:")


def test_no_more_schemas_are_looked_at_than_the_limit() -> None:
    assert len(types_of(DOUBLING["properties"]["a"], DOUBLING)) <= MOST_SCHEMAS


def test_the_grammar_of_optional_arguments_is_linear_in_their_number() -> None:
    def size(count: int) -> int:
        schema = {"properties": {f"a{n}": {"type": "integer"} for n in range(count)}}
        return len(forced_calls(family("gemma4"), [named("f", schema)], {}, may_repeat=False))

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


KEYS = (
    "type properties required enum const anyOf oneOf allOf items $ref $defs format pattern minLength nullable".split()
)
CUT_CALLS = {
    "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=v>\n12",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="v">12',
    "glm4": "<tool_call>f\n<arg_key>v</arg_key>\n<arg_value>12",
}


@pytest.mark.parametrize("wrong", [5, "x", ["x"], {"x": 5}, {"v": {"anyOf": 5, "oneOf": {}}}, [[]], None], ids=repr)
@pytest.mark.parametrize("key", KEYS)
def test_parts_of_a_schema_that_are_none_count_as_missing(key, wrong):
    for schema in ({key: wrong}, parameters({key: wrong}), parameters({"type": "string", key: wrong})):
        function = {"name": "f", "parameters": schema}
        tools = [{"type": "function", "function": function}]
        messages, inputs = TemplateForm(tools="filled").write([{"role": "user", "content": "Hi"}], {"tools": tools})
        assert messages == [{"role": "user", "content": "Hi"}]
        assert inputs["tools"][0]["function"]["name"] == "f"
        without_patterns(schema, lambda pattern: False)
        for name, text in CUT_CALLS.items():
            assert forced_calls(family(name), [function], {}, may_repeat=True)
            reader = ReplyReader(family(name), tools=tools)
            assert [call.name for call in [*reader.push(text), *reader.finish()]] == ["f"]
