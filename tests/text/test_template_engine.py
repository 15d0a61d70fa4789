"""Chat templates render as transformers renders them, and see and change nothing else."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from foreword.text.template_engine import render
from real_models import real_tokenizer

TOOL = {"type": "function", "function": {"name": "f", "description": "ä", "parameters": {"type": "object"}}}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": "b"}}}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <b>ä"}],
    [{"role": "user", "content": "u"}, {"role": "assistant", "content": " a \n"}],
    [{"role": "user", "content": "u"}, {"role": "assistant", "content": "Hm", "reasoning": "think"}],
    [{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "par "}]}],
    [{"role": "user", "content": "u"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
]
TEMPLATES = {
    "blocks": "{% for m in messages %}{% set x = 1 %}{% generation %}{% set x = 2 %}{{ m.role }}{{ x }}"
    "{% endgeneration %}{{ x }}{{ m.content }}{% if loop.index > 3 %}{% break %}{% endif %}{% endfor %}",
    "values": "{{ messages | tojson(indent=2, sort_keys=true) }}{{ tools }}{{ strftime_now('%Y') }}{{ extra }}content",
    "helpers": "{{ dict(a=1) | tojson }}{{ dict.fromkeys([1, 2], 3) }}{% set n = namespace(a=1) %}"
    "{% set n.a = 5 %}{{ n.a }}",
    "trimmed": "{% for m in messages %}\n  {{ m.content | trim }}\n{% endfor %}\n",
    "refuses": "{{ raise_exception('no') }}",
    "changes": "{{ messages.append(1) }}",
    "reaches out": "{{ messages.__class__.__mro__ }}",
    "hides": "{% set n = namespace(_x=1) %}",
    "breaks": "{% for %}",
}


def outcome(function: Any, *arguments: Any, **named: Any) -> Any:
    try:
        return function(*arguments, **named)
    except Exception:
        return None


def theirs(source: str, chat: list[dict[str, Any]], *, is_open: bool, continues: bool, **inputs: Any) -> Any:
    flags = {"add_generation_prompt": is_open, "continue_final_message": continues}
    texts, _ = render_jinja_template([chat], chat_template=source, **flags, **inputs)
    return texts[0]


def check_same(source: str) -> None:
    for chat in CHATS:
        for continues in (False, True):
            for tools in (None, [TOOL]):
                inputs = {"tools": tools, "documents": None, "bos_token": "<s>", "extra": (np.float32(1), object, "q")}
                given = {"is_open": not continues, "continues": continues}
                assert outcome(render, source, chat, inputs, **given) == outcome(
                    theirs, source, chat, **given, **inputs
                )


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_in_transformers(name: str) -> None:
    check_same(TEMPLATES[name])


@pytest.mark.parametrize("name", ["qwen3", "llama3", "gemma3", "deepseek_v3"])
def test_templates_of_real_models_render_as_in_transformers(name: str) -> None:
    said = json.loads((real_tokenizer(name) / "tokenizer_config.json").read_text())["chat_template"]
    check_same(said if isinstance(said, str) else said[0]["template"])


def test_tools_may_be_functions() -> None:
    def weather(city: str) -> str:
        """The weather.

        Args:
            city: Where.
        """
        return city

    assert '"name": "weather"' in render(
        "{{ tools | tojson }}", CHATS[0], {"tools": [weather]}, is_open=True, continues=False
    )
    with pytest.raises(ValueError, match="tools must be JSON schemas, or functions"):
        render("", CHATS[0], {"tools": [1]}, is_open=True, continues=False)


def test_inputs_may_have_the_names_of_our_own_parameters() -> None:
    inputs = {"source": "web", "is_open": 1, "continues": 2}
    assert (
        render("{{ source }}{{ is_open }}{{ continues }}", CHATS[0], inputs, is_open=True, continues=False) == "web12"
    )
