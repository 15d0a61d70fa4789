"""The forms of replies: how one is chosen, and conversations that come back with the tokens that were generated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jinja2 import Environment

import foreword.text.reply
from foreword.errors import ConfigError, ModelLoadError
from foreword.text.reply import Call, Reasoning, ReplyReader, Text, choose_format
from foreword.text.reply.format import BARE, FAMILIES, GENERIC
from foreword.text.reply.reader import joined
from text.reply.replies import NAMES, SAMPLES, read, wide

OWN = {"start_anchor": "A:", "fields": {"thinking": {"open": "<mull>", "close": "</mull>"}, "content": {}}}

# One assistant message each, as the family's own template writes it: r is reasoning, c the text, calls the calls.
TEMPLATES = {
    "hermes": (
        "<think>\n{{ r }}\n</think>\n\n{{ c }}{% for f in calls %}\n<tool_call>\n"
        '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>{% endfor %}'
    ),
    "qwen3_coder": (
        "{{ r }}\n</think>\n\n{{ c }}{% for f in calls %}{{ '\n\n' if loop.first else '\n' }}<tool_call>\n"
        "<function={{ f.name }}>\n{% for key, value in f.arguments.items() %}<parameter={{ key }}>\n{{ value }}\n"
        "</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
    ),
    "glm4": (
        "\n<think>{{ r }}</think>\n{{ c }}{% for f in calls %}\n<tool_call>{{ f.name }}\n"
        "{% for key, value in f.arguments.items() %}<arg_key>{{ key }}</arg_key>\n<arg_value>{{ value }}</arg_value>\n"
        "{% endfor %}</tool_call>{% endfor %}"
    ),
    "minimax_m2": (
        "{{ r }}\n</think>\n\n{{ c }}\n<minimax:tool_call>\n{% for f in calls %}"
        '<invoke name="{{ f.name }}">\n{% for key, value in f.arguments.items() %}<parameter name="{{ key }}">'
        "{{ value }}</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>"
    ),
    "mistral": (
        "[THINK]{{ r }}[/THINK]{{ c }}{% for f in calls %}[TOOL_CALLS]{{ f.name }}{% if f.id %}[CALL_ID]{{ f.id }}"
        "{% endif %}[ARGS]{{ f.arguments | tojson }}{% endfor %}"
    ),
    "mistral_old": (
        "[TOOL_CALLS] [{% for f in calls %}{% if not loop.first %}, {% endif %}"
        '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}, "id": "{{ f.id }}"}{% endfor %}]'
    ),
    "deepseek_v3": (
        "{{ r }}\n</think>\n\n{{ c }}<|tool_calls_begin|>{% for f in calls %}{% if not loop.first %}\n{% endif %}"
        "<|tool_call_begin|>function<|tool_sep|>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```<|tool_call_end|>"
        "{% endfor %}<|tool_calls_end|>"
    ),
    "kimi_k2": (
        "<think>{{ r }}</think>{{ c }}<|tool_calls_section_begin|>{% for f in calls %}<|tool_call_begin|>{{ f.id }}"
        "<|tool_call_argument_begin|>{{ f.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>"
    ),
    "granite3": (
        "<think>\n{{ r }}\n</think>\n\n{{ c }}<|tool_call|>[{% for f in calls %}{% if not loop.first %}, {% endif %}"
        '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}{% endfor %}]'
    ),
    "gemma4": (
        "<|channel>thought\n{{ r }}<channel|>{{ c }}{% for f in calls %}<|tool_call>call:{{ f.name + '{' }}"
        "{% for key, value in f.arguments.items() %}{% if not loop.first %},{% endif %}{{ key }}:"
        '{% if value is string %}<|"|>{{ value }}<|"|>{% else %}{{ value }}{% endif %}{% endfor %}}<tool_call|>'
        "{% endfor %}"
    ),
}


def rendered(name: str, parts) -> str:
    environment = Environment()
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    calls = [
        {"name": part.name, "arguments": json.loads(part.arguments), "id": part.id}
        for part in parts
        if isinstance(part, Call)
    ]
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    content = "".join(part.text for part in parts if isinstance(part, Text))
    return environment.from_string(TEMPLATES[name]).render(r=reasoning, c=content, calls=calls)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_reply_that_comes_back_is_rendered_as_it_was_written(name):
    text = SAMPLES[name].text
    again = rendered(name, read(name, text))
    assert (wide(again) if name == "deepseek_v3" else again) == text


# Marks that chat templates of these models have; the rest of a template does not matter.
MARKS = {
    "Qwen2.5 and Qwen3": ("hermes", "<|im_start|> <tool_call> {{ tool_call.name }} </tool_call> <think>"),
    "Qwen3-Coder, Nemotron 3": ("qwen3_coder", "<|im_start|> <tool_call>\n<function=' + name"),
    "QwQ and distilled": ("think", "{% if '</think>' in content %}"),
    "GLM 4.5": ("glm4", "<|assistant|> <tool_call>{{ tc.name }} <arg_key>{{ k }}</arg_key>"),
    "Llama 3.2": ("llama3", "<|start_header_id|> {{- '\"parameters\": ' }}"),
    "Llama 4": ("llama4", "<|header_start|> {{- '\"parameters\": ' }} <|python_start|>"),
    "Mistral": ("mistral", "[INST] [TOOL_CALLS] [ARGS]"),
    "Mistral 0.3": ("mistral_old", "[INST] [TOOL_CALLS] ["),
    "gpt-oss": ("gpt_oss", "<|start|>assistant<|channel|>final<|message|>"),
    "Kimi": ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>"),
    "MiniMax": ("minimax_m2", "<minimax:tool_call> <invoke <think>"),
    "Granite 3": ("granite3", "<|start_of_role|> <|tool_call|>"),
    "Granite 4": ("hermes", "<|start_of_role|> <tool_call>"),
    "Gemma 4": ("gemma4", "<|tool_call>call:"),
    "FunctionGemma": ("functiongemma", "<start_function_call>call:"),
    "Nemotron": ("nemotron", "<TOOLCALL>[ </think>"),
}


@pytest.mark.parametrize("model", MARKS)
def test_the_family_is_found_by_the_marks_of_the_chat_template(model):
    family, template = MARKS[model]
    form = choose_format(None, None, template)
    assert form is not None
    assert form.name == family


def test_a_template_without_marks_means_plain_text():
    assert choose_format(None, None, "{{ messages }}") is None
    assert choose_format(None, None, None) is None


def test_the_option_goes_before_the_checkpoints_own_template_and_that_before_the_chat_templates_family(tmp_path):
    path = tmp_path / "form.json"
    path.write_text(json.dumps(OWN))
    chat_template = MARKS["Qwen2.5 and Qwen3"][1]
    for option, own, name in [
        ("glm4", OWN, "glm4"),
        (str(path), OWN, "option"),
        (json.dumps(OWN), None, "option"),
        (None, OWN, "checkpoint"),
        (None, None, "hermes"),
    ]:
        form = choose_format(option, own, chat_template)
        assert form is not None
        assert form.name == name
    form = choose_format(None, OWN, chat_template)
    assert form is not None
    reader = ReplyReader(form, "A:<mull>")
    assert [*reader.push("hm</mull> So."), *reader.finish()] == [Reasoning("hm"), Text("So.")]


@pytest.mark.parametrize(
    "option", ["qwen9", "{not JSON", '{"fields": {}}', "[" * 3000 + "{", '{"response_template": 1}']
)
def test_an_option_that_is_no_template_is_refused_with_the_families(option):
    with pytest.raises(ConfigError, match="response_template=") as refusal:
        choose_format(option, None, None)
    assert "hermes" in str(refusal.value)


def test_a_damaged_template_of_the_checkpoint_names_the_remedy():
    with pytest.raises(ModelLoadError, match="response_template cannot be used"):
        choose_format(None, {"fields": {"content": {"open": ""}}, "start_anchor": "A"}, None)


OTHER = {
    "start_anchor": "A:",
    "fields": {
        "content": {},
        "tool_calls": {
            "open_pattern": r"\s*CALL (?P<name>\w+)\n",
            "close": "END",
            "content": "kv-lines",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


@pytest.mark.parametrize("step", [1, 1000])
def test_other_contents_of_a_checkpoints_template_are_read_as_transformers_does(step):
    form = choose_format(None, OTHER, None)
    assert form is not None
    tools = [{"function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}}]
    text = "Hi. " + " " * 100 + "CALL f\nn: 7\ns: x\nEND CALL f\nno end"
    reader = ReplyReader(form, "A:", tools=tools)
    parts = [part for at in range(0, len(text), step) for part in reader.push(text[at : at + step])]
    parts = joined([*parts, *reader.finish()])
    assert parts == [Text("Hi."), Call("f", '{"n": 7, "s": "x"}'), Text(" CALL f\nno end")]


def test_every_family_has_its_file_and_a_sample():
    folder = Path(foreword.text.reply.__file__).parent / "templates"
    named = {path.stem for path in folder.iterdir()} - {GENERIC}  # hermes's without thinking
    assert named == {*FAMILIES, BARE} == set(SAMPLES) == set(NAMES)
