"""Places in a conversation: the tokens before one are those that every other continuation leaves as they are."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.text import Tokenizer
from foreword.text.conversation import Conversation, Place, common_beginning
from tiny_models import CHAT_TEMPLATE, TOOL_TEMPLATE, save_tokenizer

PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}reply: {% endif %}"
)
SYSTEM_FIRST = (
    "{% if messages[0].role == 'system' %}<s>{{ messages[0].content | trim }}\n{% endif %}"
    "{% for tool in tools or [] %}{{ tool.function.name }}({{ tool.function.parameters | tojson }}){% endfor %}</s>"
    "{% for m in messages if m.role != 'system' %}<s>{{ m.role }} {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)
FOLDED = (
    "{% if messages[0].role == 'system' %}{% set head, rest = messages[0].content ~ ' -- ', messages[1:] %}"
    "{% else %}{% set head, rest = '', messages %}{% endif %}"
    "{% for m in rest %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "<s>{{ m.role }} {{ head if loop.first }}{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant {% endif %}"
)
TEMPLATES = {"chat": CHAT_TEMPLATE, "tools": TOOL_TEMPLATE, "plain": PLAIN, "first": SYSTEM_FIRST, "folded": FOLDED}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory) -> dict[str, Tokenizer]:
    made = {}
    for name, template in TEMPLATES.items():
        found = Tokenizer.load(str(save_tokenizer(tmp_path_factory.mktemp(name), chat_template=template)))
        assert found is not None
        made[name] = found
    return made


TEXTS = st.text(st.sampled_from("the requst ha\n  \x01é<s>"), min_size=1, max_size=40)
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}
    for name in ("alpha", "alpine", "beta")
]


@settings(max_examples=60, deadline=None)
@given(st.data())
@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_before_a_place_are_those_of_a_conversation_that_differs_after_it(tokenizers, name, data) -> None:
    roles = ["user", "assistant"] * data.draw(st.integers(0, 2)) + ["user"]
    roles = ["system"] * data.draw(st.integers(0, 1)) + roles
    messages: list[dict[str, Any]] = [{"role": role, "content": data.draw(TEXTS)} for role in roles]
    inputs = {"tools": TOOLS} if name in ("tools", "first") else {}
    at = data.draw(st.integers(0, len(messages) - 1))
    place = Place(at, data.draw(st.none() | st.integers(0, len(messages[at]["content"]))))
    if inputs and data.draw(st.booleans()):
        place = Place(None, data.draw(st.integers(1, len(TOOLS))))
    tokenizer = tokenizers[name]
    token_ids, (position,) = tokenizer.render_places(messages, [place], template_inputs=inputs)
    assert np.array_equal(token_ids, tokenizer.render_chat(messages, template_inputs=inputs))
    other = Conversation(messages, inputs).differing_after(place)
    changed = tokenizer.render_chat(
        other.messages, template_inputs=other.inputs, add_generation_prompt=None if other.is_open else False
    )
    exact = common_beginning(token_ids.tolist(), changed.tolist())
    assert exact - 2 <= position <= exact, (place, exact)


def test_a_place_in_tools_is_found_where_the_system_message_lists_them(tokenizers) -> None:
    messages = [{"role": "user", "content": "the request"}]
    found = [
        tokenizers["chat"].render_places(messages, [Place(None, 1)], template_inputs={"tools": tools})
        for tools in (TOOLS, [TOOLS[0], TOOLS[2]])
    ]
    ends = [positions[0] for _, positions in found]
    assert ends[0] == ends[1] > 0
    assert {tuple(ids[: ends[0]]) for ids, _ in found} == {tuple(found[0][0][: ends[0]])}


def test_a_place_whose_conversation_the_template_refuses_has_no_tokens(tokenizers) -> None:
    tokenizer = Tokenizer(tokenizers["chat"].hf_tokenizer)
    picky = "{% if messages[0].content != 'same' %}{{ raise_exception('no') }}{% endif %}" + CHAT_TEMPLATE
    before = tokenizer.chat_template
    try:
        tokenizer.set_chat_template(picky + "\n")
        assert tokenizer.render_places([{"role": "user", "content": "same"}], [Place(0, 2)])[1] == [0]
    finally:
        tokenizer.set_chat_template(before + "\n")


def test_the_common_beginning_of_texts() -> None:
    rng = random.Random(0)
    for _ in range(300):
        one, other = ("".join(rng.choices("ab", k=rng.randrange(12))) for _ in range(2))
        count = common_beginning(one, other)
        assert one[:count] == other[:count]
        assert one[count : count + 1] != other[count : count + 1] or count == min(len(one), len(other))
