"""ReplyReader on replies of every family: whole, cut, malformed and ended too early."""

from __future__ import annotations

import json
import re

import pytest
from transformers.utils.chat_parsing import parse_response

from foreword.text.reply import Call, Reasoning, Text
from text.reply.replies import FORMATS, NAMES, SAMPLES, TOOLS, read


def squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)


def texts(parts, kind) -> str:
    return squeezed("".join(part.text for part in parts if isinstance(part, kind)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_a_reply_is_split_into_reasoning_text_and_calls(name, step):
    assert read(name, SAMPLES[name].text, step) == SAMPLES[name].parts


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_are_those_that_transformers_reads(name):
    sample, parts = SAMPLES[name], read(name, SAMPLES[name].text)
    told = parse_response(sample.text, FORMATS[name].template, prefix=sample.prompt_end, tools=TOOLS)
    assert squeezed(told.get("thinking", "")) == texts(parts, Reasoning)
    assert squeezed(told.get("content", "")) == texts(parts, Text)
    calls = told.get("tool_calls", [])
    if calls and isinstance(calls[0], list):
        calls = [call for several in calls for call in several]
    read_calls = [(part.name, json.loads(part.arguments)) for part in parts if isinstance(part, Call)]
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in calls] == read_calls
