"""ReplyReader on replies of every family: whole, cut, malformed and ended too early."""

from __future__ import annotations

import json
import re
from importlib.resources import files

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_templates import load_response_template

from foreword.text.reply import Call, Reasoning, ReplyReader, Text
from foreword.text.reply.call_bodies import JsonScanner
from text.reply.replies import CLOCK, FORMATS, NAMES, SAMPLES, TOOLS, WEATHER, read, tagged

WITH_CALLS = [name for name in NAMES if SAMPLES[name].num_calls]


def template_of(name: str):
    """The response template of a family, as its file has it."""
    file = files("foreword.text.reply").joinpath("templates", f"{name}.json")
    return json.loads(file.read_text(encoding="utf-8"))["response_template"]


def squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)


def texts(parts, kind) -> str:
    return squeezed("".join(part.text for part in parts if isinstance(part, kind)))


def calls_of(parts) -> list[Call]:
    return [part for part in parts if isinstance(part, Call)]


# -------------------------------------------------------------- whole replies


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_a_reply_is_split_into_reasoning_text_and_calls(name, step):
    assert read(name, SAMPLES[name].text, step) == SAMPLES[name].parts


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_are_those_that_transformers_reads(name):
    sample, parts = SAMPLES[name], read(name, SAMPLES[name].text)
    theirs, own = load_response_template(template_of(name)), FORMATS[name].template
    assert own.start_anchor_re == theirs.start_anchor_re
    for field in own.fields.values():
        assert all(getattr(field, key) == getattr(theirs.fields[field.name], key) for key in vars(field)), field
    told = parse_response(sample.text, theirs, prefix=sample.prompt_end, tools=TOOLS)
    assert squeezed(told.get("thinking", "")) == texts(parts, Reasoning)
    assert squeezed(told.get("content", "")) == texts(parts, Text)
    calls = told.get("tool_calls", [])
    if calls and isinstance(calls[0], list):
        calls = [call for several in calls for call in several]
    read_calls = [(call.name, json.loads(call.arguments)) for call in calls_of(parts)]
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in calls] == read_calls


@pytest.mark.parametrize("name", WITH_CALLS)
def test_calls_that_nobody_wants_stay_text_and_reasoning_is_split_off_all_the_same(name):
    sample = SAMPLES[name]
    parts = read(name, sample.text, 5, reads_calls=False)
    assert not calls_of(parts)
    assert texts(parts, Reasoning) == squeezed(sample.reasoning)
    first_call = sample.text[sample.text.index("get_weather") :]
    assert texts(parts, Text).endswith(squeezed(first_call))


@pytest.mark.parametrize(
    ("prompt_end", "parts"),
    [
        ("<|im_start|>assistant\n<think>\n", [Reasoning("x"), Text("y")]),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", [Text("x\n</think>\n\ny")]),
        ("<|im_start|>assistant\n", [Text("x\n</think>\n\ny")]),
        ("[no anchor]<think>\n", [Reasoning("x"), Text("y")]),
        ("<think> in a question<|im_start|>assistant\n", [Text("x\n</think>\n\ny")]),
        ("<|im_start|>assistant\n<think>\nSo far, <b", [Reasoning("x"), Text("y")]),
        ("<|im_start|>assistant\n<think>old</think>Begun: ", [Text("x\n</think>\n\ny")]),
        ("", [Text("x\n</think>\n\ny")]),
    ],
)
def test_the_reader_starts_in_the_region_that_the_prompt_opened(prompt_end, parts):
    assert read("hermes", "x\n</think>\n\ny", 2, prompt_end=prompt_end) == parts


def hermes_call(name: str, arguments: str = "{}") -> str:
    return f"<tool_call>\n{tagged(name, arguments)}\n</tool_call>"


@pytest.mark.parametrize("step", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Just text, 1 < 2.", [Text("Just text, 1 < 2.")]),
        ("text with space at its end  ", [Text("text with space at its end  ")]),
        ("   ", [Text("   ")]),
        ("", []),
        (
            hermes_call("f") + " between " + hermes_call("g") + "\n",
            [Call("f", "{}"), Text(" between"), Call("g", "{}")],
        ),
        (hermes_call("f") + " done ", [Call("f", "{}"), Text(" done ")]),
        (
            hermes_call("f", r'{"a": "</tool_call>\"}, <think>"}'),
            [Call("f", r'{"a": "</tool_call>\"}, <think>"}')],
        ),
        (hermes_call("f", '{"a": "two\nlines"}'), [Call("f", r'{"a": "two\nlines"}')]),
        (
            hermes_call("f", r'{"a": "\ud83d\ude00", "b": "\ud83d"}'),
            [Call("f", r'{"a": "\ud83d\ude00", "b": "\ud83d"}')],
        ),
        ('<tool_call>{"name": "f", "parameters": {"ü": 1}}</tool_call>', [Call("f", '{"ü": 1}')]),
        ('<tool_call>{"name": "f"}</tool_call>', [Call("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{}"}', [Call("f", "{}")]),
        # What is no call stays text, markers included.
        ("<tool_call>not JSON</tool_call> text", [Text("<tool_call>not JSON</tool_call> text")]),
        ('a\n<tool_call>{"name": 1}</tool_call>', [Text('a\n<tool_call>{"name": 1}</tool_call>')]),
        ('<tool_call>{"name": "f"}}</tool_call>', [Text('<tool_call>{"name": "f"}}</tool_call>')]),
        ('<tool_call>{"a": NaN}</tool_call>', [Text('<tool_call>{"a": NaN}</tool_call>')]),
        (r'<tool_call>{"a": "\d"}</tool_call>', [Text(r'<tool_call>{"a": "\d"}</tool_call>')]),
        ("<tool_call>[]</tool_call>", [Text("<tool_call>[]</tool_call>")]),
        ("<tool_call>\n" + hermes_call("f"), [Text("<tool_call>"), Call("f", "{}")]),
        ("<tool_call>" + "[" * 2000 + "</tool_call>", [Text("<tool_call>" + "[" * 2000 + "</tool_call>")]),
        ("<tool_call>" + "9" * 5000 + "</tool_call>", [Text("<tool_call>" + "9" * 5000 + "</tool_call>")]),
        (hermes_call("f", '{"a": 1e999}'), [Call("f", '{"a": 1e999}')]),
        (hermes_call("f", '{"a": [-1e999, 1.5]}'), [Call("f", '{"a": [-1e999, 1.5]}')]),
        (hermes_call("f", '{"a": "\\u0000number x"}'), [Call("f", '{"a": "\\u0000number x"}')]),
        (hermes_call("\\ud800"), [Text(hermes_call("\\ud800"))]),
        # The end cuts the reply.
        ('<tool_call>{"name": "cut off', [Text('<tool_call>{"name": "cut off')]),
        ('<tool_call>{"name": "f", "argum', [Call("f", "", False)]),
        ('<tool_call>{"name": "f", "arguments": {"a": [1, tr', [Call("f", '{"a": [1, tr', False)]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1}', [Call("f", '{"a": 1}', False)]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f", ', [Call("f", '{"a": 1}', False)]),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_', [Call("f", "{}")]),
        (
            '<tool_call>{"name": "f", "arguments": {"a": tool',
            [Text('<tool_call>{"name": "f", "arguments": {"a": tool')],
        ),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": \\', [Call("f", '{"a": ', False)]),
        ('<tool_call>{"name": "f", "arguments": "see', [Text('<tool_call>{"name": "f", "arguments": "see')]),
        (hermes_call("f", '"see"'), [Text(hermes_call("f", '"see"'))]),
        (hermes_call("f", "[1]"), [Text(hermes_call("f", "[1]"))]),
        (hermes_call("f", "null"), [Call("f", "{}")]),
        ("a <tool_", [Text("a <tool_")]),
        ('<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 5000, [Call("f", '{"a": ' + "[" * 5000, False)]),
        (
            '<tool_call>{"name": "f", "arguments": ' + "[" * 5000,
            [Text('<tool_call>{"name": "f", "arguments": ' + "[" * 5000)],
        ),
        ("<tool_call>" + '{"a":' * 5000, [Text("<tool_call>" + '{"a":' * 5000)]),
        ("<think>\nx\n", [Reasoning("x")]),
    ],
)
def test_calls_are_read_off_text_however_it_is_cut(text, parts, step):
    assert read("hermes", text, step) == parts


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("llama3", '{"name": "Ann", "age": 3}', [Text('{"name": "Ann", "age": 3}')]),
        ("llama3", 'a {"name": "f", "parameters": {}}', [Text('a {"name": "f", "parameters": {}}')]),
        ("llama3", f"<|python_tag|>{tagged('clock', CLOCK, 'parameters')}<|eom_id|>", [Call("clock", CLOCK)]),
        ("bare", '{"name": "f", "argu', [Text('{"name": "f", "argu')]),
        ("bare", '{"name": "f", "arguments": {"a', [Call("f", '{"a', False)]),
        ("mistral", "[TOOL_CALLS]f[ARGS]{} text", [Call("f", "{}"), Text(" text")]),
        ("mistral_old", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"na', None),
        (
            "mistral_old",
            '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a',
            [Call("f", "{}"), Call("g", '{"a', False)],
        ),
        ("gemma4", '<|tool_call>call:f{a:<|"|>x<', [Call("f", '{"a":"x', False)]),
        ("gemma4", "<|tool_call>call:f{a:oops}<tool_call|>", [Text("<|tool_call>call:f{a:oops}<tool_call|>")]),
        ("glm4", "<tool_call>f\nwhat</tool_call>", [Text("<tool_call>f\nwhat</tool_call>")]),
        ("gpt_oss", "<|channel|>final<|message|>Hi ", [Text("Hi ")]),
        ("granite3", "<response>Hi.</response>", [Text("Hi.")]),
        (
            "kimi_k2",
            "<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>",
            [Call("f", "{}", True, "f")],
        ),
    ],
)
def test_families_differ_where_a_call_is_unusual(name, text, parts):
    assert read(name, text, 1) == read(name, text, 1000) == (parts if parts is not None else [Text(text)])


CODER = "<tool_call>\n<function=get_weather>\n"


@pytest.mark.parametrize(
    ("text", "arguments", "is_complete"),
    [
        ("<parameter=city>\n7\n</parameter>\n<parameter=days>\n7\n</parameter>\n", '{"city": "7", "days": 7}', True),
        ("<parameter=days>\n3.0\n</parameter>\n<parameter=city>\n\n</parameter>", '{"days": 3, "city": ""}', True),
        ("<parameter=city>\na\n</parameter>\n", '{"city": "a"', False),
        ("<parameter=city>\na</par", '{"city": "a', False),
        ("<parameter=days>\n1", "{", False),
        ("<parameter=city>\na\n</parameter>\n<param", '{"city": "a', False),
        ('<parameter=tags>\n["x"]\n</parameter>\n<parameter=other>\n7\n', '{"tags": ["x"], "other": "7', False),
    ],
)
def test_arguments_between_tags_have_the_types_of_the_tools_schemas(text, arguments, is_complete):
    (call,) = read("qwen3_coder", CODER + text, 3, prompt_end="")
    assert call == Call("get_weather", arguments, is_complete)


# ---------------------------------------------------------------------- cuts


PIECES = {
    name: [*re.findall(r"<[^<>]*>|\[[A-Z_/]+\]|\s+|[{}\",:]|[^<\[\s{}\",:]+", SAMPLES[name].text), "<", "[", "\n"]
    for name in NAMES
}


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_the_parts_are_the_same_for_every_way_of_cutting_the_text(name, data):
    sample = SAMPLES[name]
    begin = data.draw(st.integers(0, len(sample.text)))
    soup = "".join(data.draw(st.lists(st.sampled_from(PIECES[name]), max_size=25)))
    text = data.draw(st.sampled_from([sample.text, sample.text[:begin] + soup, soup + sample.text, soup]))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    assert read(name, text, cuts) == read(name, text, len(text) + 1) == read(name, text, 1)


@pytest.mark.parametrize("name", NAMES)
def test_wherever_the_reply_ends_nothing_is_lost(name):
    sample, ends = SAMPLES[name], {0: 0}
    whole = calls_of(sample.parts)
    for length in range(len(sample.text) + 1):
        cut = sample.text[:length]
        parts = read(name, cut, length + 1)
        thought = texts(parts, Reasoning)  # the last marker may be cut: then its beginning is text
        assert squeezed(cut).endswith(thought) or thought == squeezed(sample.reasoning)
        calls = calls_of(parts)
        num_complete = sum(call.is_complete for call in calls)
        assert calls[:num_complete] == whole[:num_complete]
        ends.setdefault(num_complete, length)
        shown = texts(parts, Text)
        if len(calls) > num_complete:
            (begun,) = calls[num_complete:]
            assert begun.name == whole[num_complete].name
            assert is_beginning(begun.arguments)
            assert squeezed(whole[num_complete].arguments).startswith(squeezed(begun.arguments))
            assert shown == squeezed(sample.content)
        else:
            rest, left = shown.removeprefix(squeezed(sample.content)), squeezed(cut[ends[num_complete] :])
            assert rest in left
            lost = left.replace(rest, "", 1) if rest else left
            assert not re.search(r"get_weather|clock|Lisb|UTC|days", lost), "only markers and shown text may be missing"


def is_beginning(text: str) -> bool:
    """Whether a text is the beginning of a JSON object."""
    scanner = JsonScanner()
    return text == "" or (scanner.read(text, 0) == len(text) and scanner.is_beginning)


def test_a_long_call_is_read_once_however_small_its_pieces():
    text = hermes_call("f", json.dumps({"a": "x\n" * 50_000}))
    reader = ReplyReader(FORMATS["hermes"])
    for at in range(0, len(text) - 3, 3):
        assert reader.push(text[at : at + 3]) == []
        assert len(reader._buffer) < 200, "what was read is not kept to be read again"
    (call,) = [*reader.push(text[at + 3 :]), *reader.finish()]
    assert len(json.loads(call.arguments)["a"]) == 100_000


@pytest.mark.parametrize("text", [WEATHER, '[1, -2.5e3, {"a": [], "b": {}}, null, true]', '["\\u00e9\\n\\"", ""]'])
def test_the_scanner_agrees_with_json_on_values_and_their_ends(text):
    scanner = JsonScanner()
    assert scanner.read(text + "rest", 0) == len(text)
    assert scanner.is_done
    assert json.loads(scanner.text) == json.loads(text)


@settings(max_examples=60, deadline=None)
@given(st.text('{}[]",:\\ntrue01.-e \n', max_size=14), st.integers(0, 14))
def test_the_scanner_fails_where_json_does(text, cut):
    scanner = JsonScanner()
    at = scanner.read(text[:cut], 0)
    scanner.read(text[at:], 0)
    try:
        value, _ = json.JSONDecoder(strict=False).raw_decode(text.lstrip(" \n"))
    except ValueError:
        value = None
    if isinstance(value, dict | list):
        assert scanner.is_done
        assert json.loads(scanner.text) == value
    else:
        assert not scanner.is_done


@pytest.mark.parametrize("name", [name for name in NAMES if FORMATS[name].thinking is not None and name != "gpt_oss"])
def test_thinking_that_is_only_mentioned_hides_nothing(name):
    marks = FORMATS[name].thinking
    opened, closed = marks.opens, marks.closes
    prompt_end = SAMPLES[name].prompt_end.removesuffix("<think>\n").removesuffix("<think>")
    for mention in (f"Write {opened} before it.", f"Use:\n{opened}\nthen\n{closed}\nend", f"`{opened}`"):
        for size in (1, 3, 1000):
            assert read(name, mention, size, prompt_end=prompt_end) == [Text(mention)]
            assert read(name, f"{opened}Hm.{closed}{mention}", size, prompt_end=prompt_end) == [
                Reasoning("Hm."),
                Text(mention),
            ]
    thought = f"\n\n{opened}Hm.{closed}\n{opened}Yes.{closed}\n\nGood."
    assert read(name, thought, 1, prompt_end=prompt_end)[-1] == Text("Good.")
    assert isinstance(read(name, thought, 1, prompt_end=prompt_end)[0], Reasoning)
