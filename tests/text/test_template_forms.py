"""Forms of chat templates: whatever a template wants, the model sees every message."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from foreword.errors import ChatTemplateError
from foreword.text import Tokenizer
from foreword.text.template_probe import SAMPLES
from lanes import slow
from real_models import real_model, real_tokenizer
from tiny_models import CHAT_TEMPLATE, save_tokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Where."}}},
    },
}
HEAD = "{% for m in messages %}<{{ m.role }}>"
TAIL = "</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
TOOLS_FIRST = "{% if tools %}{{ tools | tojson }}{% endif %}"
CALLS = "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}"
SHOWS_ALL = TOOLS_FIRST + HEAD + "{{ m.content }}" + CALLS + TAIL
IGNORES_CALLS = TOOLS_FIRST + HEAD + "{{ m.content }}" + TAIL
WANTS_NONE = TOOLS_FIRST + HEAD + "{% if m.content is none %}" + CALLS + "{% else %}{{ m.content }}{% endif %}" + TAIL
WANTS_TEXT = (
    TOOLS_FIRST
    + HEAD
    + "{{ m.content }}"
    + CALLS.replace(" | tojson", "").replace("{{ c.function.arguments }}", "{{ '' + c.function.arguments }}")
    + TAIL
)
WANTS_NINE = SHOWS_ALL.replace(
    CALLS,
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('ids have 9 letters') }}{% endif %}"
    "{% endfor %}" + CALLS,
)
NAMES_IN_IDS = SHOWS_ALL.replace("c.function.name", "c.id")
ONE_CALL = SHOWS_ALL.replace("in m.tool_calls or []", "in (m.tool_calls or [])[:1]")
SYSTEM_FIRST = (
    TOOLS_FIRST
    + "{% if messages[0].role == 'system' %}<system>{{ messages[0].content }}</system>{% endif %}"
    + HEAD.replace("messages %}", "messages if m.role != 'system' %}")
    + "{{ m.content }}"
    + CALLS
    + TAIL
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
)
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WANTS_FIELDS = SHOWS_ALL.replace(
    "{{ tools | tojson }}",
    "{% for t in tools %}{{ t.function.name + ': ' + t.function.description }}"
    "{% for k, v in t.function.parameters.properties.items() %}{{ k + ' ' + v.type + ' ' + v.description }}{% endfor %}"
    "{% endfor %}",
)
PARTS = SHOWS_ALL.replace("{{ m.content }}", "{% for part in m.content %}{{ part.text }}{% endfor %}")
FORMS = {
    "as it is": (SHOWS_ALL, {}),
    "no calls": (IGNORES_CALLS, {"calls": "written"}),
    "content none": (WANTS_NONE, {"call_content": "none", "beside_call": "before"}),
    "arguments as text": (WANTS_TEXT, {"arguments": "text"}),
    "short ids": (WANTS_NINE, {"ids": "nine"}),
    "ids with names": (NAMES_IN_IDS, {"ids": "numbered"}),
    "one call": (ONE_CALL, {"calls": "one by one"}),
    "one system message": (SYSTEM_FIRST, {"systems": "joined", "later_system": "question"}),
    "no system message": (NO_SYSTEM + SHOWS_ALL, {"system": "question", "later_system": "question"}),
    "fields of tools": (WANTS_FIELDS, {"tools": "filled"}),
    "contents in parts": (PARTS, {"content": "parts"}),
    "a bare chat": (CHAT_TEMPLATE, {"tools": "written", "calls": "written"}),
    "turns": (ALTERNATES, {"questions": "joined", "answers": "joined", "results": "question", "tools": "written"}),
}


@pytest.fixture(scope="module")
def load(tmp_path_factory) -> Callable[[str], Tokenizer]:
    def make(template: str) -> Tokenizer:
        folder = save_tokenizer(tmp_path_factory.mktemp("template"), chat_template=template)
        tokenizer = Tokenizer.load(str(folder))
        assert tokenizer is not None
        return tokenizer

    return make


def call(name: str, arguments: Any, call_id: str = "call_0123456789abcdef01234567") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


ROME = call("weather", '{"city": "Rome"}', "b")
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "developer", "content": "Be kind."},
    {"role": "user", "content": "Oslo and Rome?"},
    {"role": "assistant", "content": "I look.", "tool_calls": [call("weather", {"city": "Oslo"}), ROME]},
    {"role": "tool", "tool_call_id": "call_0123456789abcdef01234567", "content": "snow"},
    {"role": "tool", "tool_call_id": "b", "content": "sunny"},
    {"role": "assistant", "content": "Snow, and sun."},
    {"role": "system", "content": "It is late."},
    {"role": "user", "content": "And Bonn?"},
    {"role": "user", "content": "Please."},
    {"role": "assistant", "content": None, "tool_calls": [call("weather", '{"city": "Bo', "c")]},
    {"role": "tool", "tool_call_id": "c", "content": "not JSON"},
]  # fmt: skip
SHOWN = [one["content"] for one in CONVERSATION if one["content"]] + ["Oslo", "Rome", "weather"]


def text_of(tokenizer: Tokenizer, messages: list[dict[str, Any]], **inputs: Any) -> str:
    return tokenizer.render_text(messages, add_generation_prompt=True, template_inputs=inputs)


@pytest.mark.parametrize("name", FORMS)
def test_every_message_is_shown_whatever_form_a_template_wants(load, name: str) -> None:
    template, expected = FORMS[name]
    tokenizer = load(template)
    report = tokenizer.template_report()
    assert expected.items() <= dict(report.changes).items()
    assert {loss.kind for loss in report.losses} <= {"reasoning before a call"}
    text = text_of(tokenizer, CONVERSATION, tools=[TOOL, {"type": "function", "function": {"name": "bare"}}])
    assert [shown for shown in [*SHOWN, "Where.", "bare"] if shown not in text] == []
    at = [text.index(shown) for shown in ("Oslo and Rome?", "snow", "sunny", "Snow, and sun.", "And Bonn?", "not JSON")]
    assert at == sorted(at)
    assert [loss.kind for loss in report.as_given] or not expected


@pytest.mark.parametrize("name", FORMS)
def test_a_conversation_that_grows_keeps_its_beginning_in_every_form(load, name: str) -> None:
    tokenizer = load(FORMS[name][0])
    plain = [{**one, "content": one["content"] if "tool_calls" not in one else ""} for one in CONVERSATION]
    before = ""
    for end in (3, 6, 10, 12):
        text = text_of(tokenizer, plain[:end], tools=[TOOL])
        assert text.startswith(before)
        before = text.removesuffix("<assistant>").removesuffix("<s>assistant ")


def test_ids_of_nine_letters_stay_and_others_are_replaced_with_their_results(load) -> None:
    shows_ids = WANTS_NINE.replace("[{{ c.function.name }}", "[{{ c.function.name }} {{ c.id }}").replace(
        "{{ m.content }}", "{{ m.tool_call_id }} {{ m.content }}"
    )
    tokenizer = load(shows_ids)
    messages = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "tool_calls": [call("a", {}, "Abc123xyZ"), call("b", {})]},
        {"role": "tool", "tool_call_id": "Abc123xyZ", "content": "one"},
        {"role": "tool", "tool_call_id": call("b", {})["id"], "content": "two"},
    ]
    text = text_of(tokenizer, messages)
    assert "Abc123xyZ one" in text
    made = text.split(" two")[0].split(">")[-1]
    assert len(made) == 9
    assert f"b {made}" in text
    assert text_of(tokenizer, messages) == text


def test_what_no_form_shows_is_refused_by_name(load) -> None:
    deaf = load("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    assert text_of(deaf, [{"role": "user", "content": "Hi"}]) == "Hi"
    with pytest.raises(ChatTemplateError, match="does not show questions and answers"):
        text_of(deaf, [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}])


def test_named_templates_serve_conversations_with_tools_and_without(load) -> None:
    tokenizer = load(CHAT_TEMPLATE)
    named = {"default": "plain " + SHOWS_ALL.replace(CALLS, ""), "tool_use": "tools " + SHOWS_ALL}
    tokenizer.hf_tokenizer.chat_template = named
    asked = [{"role": "user", "content": "Hi"}]
    assert text_of(tokenizer, asked).startswith("plain ")
    assert text_of(tokenizer, asked, tools=[TOOL]).startswith("tools ")
    assert "weather" in text_of(tokenizer, [*asked, *CONVERSATION[3:6]])


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"city": "Os', '{"city": "Os'),
        ("[1, 2]", "[1, 2]"),
        ('{"n": 1e999}', "1e999"),
        ('{"n": NaN}', "NaN"),
        ("", "{}"),
        ("9" * 5000, "9" * 5000),
    ],
    ids=lambda value: value[:12],
)
@pytest.mark.parametrize(
    "template", [SHOWS_ALL, WANTS_TEXT, WANTS_FIELDS, CHAT_TEMPLATE], ids=["json", "text", "fields", "none"]
)
def test_arguments_that_are_no_object_are_taken_as_text(load, template: str, arguments: str, shown: str) -> None:
    messages = [
        {"role": "user", "content": "Go."},
        {"role": "assistant", "content": "", "tool_calls": [call("weather", arguments)]},
        {"role": "tool", "tool_call_id": call("weather", {})["id"], "content": "no such city"},
    ]
    text = text_of(load(template), messages)
    assert shown in text or json.dumps(shown)[1:-1] in text
    assert "no such city" in text


# ---------------------------------------------------------------- control tokens


def test_a_control_token_in_a_message_is_text_unless_the_option_says_otherwise(load) -> None:
    tokenizer = load(CHAT_TEMPLATE)
    special = {index for index, token in tokenizer.hf_tokenizer.added_tokens_decoder.items() if token.special}
    names = sorted(str(tokenizer.hf_tokenizer.added_tokens_decoder[index]) for index in special)
    text = f"a ⿻ b{names[0]}c"
    plain, ours = (tokenizer.render_chat([{"role": "user", "content": one}]) for one in ("abc", text))
    assert np.isin(ours, list(special)).sum() == np.isin(plain, list(special)).sum()
    tokenizer.take_control_tokens()
    theirs = tokenizer.render_chat([{"role": "user", "content": text}])
    assert np.isin(theirs, list(special)).sum() == np.isin(plain, list(special)).sum() + 1


# ------------------------------------------------------------------- real models


@pytest.mark.parametrize("name", ["qwen3", "gptoss", *slow("llama3", "gemma3", "deepseek_v3")])
def test_real_tokenizers_write_control_tokens_of_users_as_text(name: str) -> None:
    tokenizer = Tokenizer.load(str(real_tokenizer(name)))
    assert tokenizer is not None
    if tokenizer.chat_template is None:
        tokenizer.hf_tokenizer.chat_template = CHAT_TEMPLATE
    special = {index for index, token in tokenizer.hf_tokenizer.added_tokens_decoder.items() if token.special}
    stop = tokenizer.hf_tokenizer.eos_token
    for content in (f"Hi {stop} bye", f"{stop}{stop}", f"x⿻{stop}"):
        ids = tokenizer.render_chat([{"role": "user", "content": content}])
        assert content in tokenizer.spell(ids)
        plain = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
        assert np.isin(ids, list(special)).sum() == np.isin(plain, list(special)).sum()


@pytest.mark.parametrize("name", ["gemma3", *slow("qwen3", "llama3", "deepseek_v3")])
def test_templates_of_real_tokenizers_show_everything(name: str) -> None:
    tokenizer = Tokenizer.load(str(real_tokenizer(name)))
    assert tokenizer is not None
    assert {loss.kind for loss in tokenizer.template_report().losses} <= {"reasoning before a call"}
    text = text_of(tokenizer, CONVERSATION, tools=[TOOL])
    assert [shown for shown in SHOWN if shown not in text] == []


def test_smollm2_sees_tools_and_calls_and_its_calls_are_read() -> None:
    tokenizer = Tokenizer.load(str(real_model("smollm2")))
    assert tokenizer is not None
    assert {sample.kind for sample in SAMPLES} - {loss.kind for loss in tokenizer.template_report().as_given}
    text = text_of(tokenizer, CONVERSATION, tools=[TOOL])
    assert [shown for shown in [*SHOWN, "<tool_call>", "Tells the weather."] if shown not in text] == []
    assert tokenizer.reply_format is not None
    assert tokenizer.reply_format.reads_calls
