"""LLM.chat: content, reasoning and calls of answers, on a tiny model whose template opens a thinking region."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from foreword import LLM, SamplingParams
from foreword.errors import ConfigError, InvalidRequestError
from foreword.request import StructuredOutputsParams
from tiny_models import RECIPES, TOOL_TEMPLATE, save_model, save_tokenizer

THINKING = TOOL_TEMPLATE.replace("<s>assistant: {% endif %}", "<s>assistant: <think>\n{% endif %}")
ASK = [{"role": "user", "content": "How warm?"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
FORM = StructuredOutputsParams(choice=("yes", "no"))


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, RECIPES["qwen3"])
    save_tokenizer(folder, chat_template=THINKING)
    with LLM(str(folder), kv_cache_memory_bytes=16 * 2**20, self_check=False) as llm:
        yield llm


def params(**wishes: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "seed": 3, "ignore_eos": True, "max_tokens": 30, **wishes})  # type: ignore[arg-type]


def test_a_budget_ends_the_thinking_and_the_reply_has_both_parts(llm):
    (output,) = llm.chat(ASK, params(n=2), thinking_budget=5)
    for one in output.outputs:
        thought, end, content = one.text.partition("</think>\n\n")
        assert end
        assert one.reply.reasoning == thought.strip()
        assert one.reply.content == content.lstrip()
        assert len(llm.tokenizer.decode(one.token_ids[:5])) >= len(thought.rstrip())
    (unlimited,) = llm.chat(ASK, params())
    assert unlimited.outputs[0].reply.content == ""
    assert unlimited.outputs[0].reply.reasoning == unlimited.outputs[0].text.strip()


def test_structured_outputs_rule_the_answer_after_the_thinking(llm):
    (output,) = llm.chat(ASK, params(structured_outputs=FORM), thinking_budget=4)
    assert output.outputs[0].reply.content in ("yes", "no")
    assert output.outputs[0].finish_reason == "stop"


def test_a_stream_ends_with_the_reply_of_the_whole_answer(llm):
    (whole,) = llm.chat(ASK, params(), thinking_budget=6, tools=[TOOL])
    lengths = []
    for output in llm.stream_chat(ASK, params(), thinking_budget=6, tools=[TOOL]):
        reply = output.outputs[0].reply
        lengths.append(len(reply.content) + len(reply.reasoning))
    assert reply == whole.outputs[0].reply
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 3, "it grows"


def test_calls_are_parts_of_the_reply_where_tools_were_given(llm):
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    wish = StructuredOutputsParams(choice=(call,))
    (output,) = llm.chat(ASK, params(structured_outputs=wish, max_tokens=200), thinking_budget=0, tools=[TOOL])
    (called,) = output.outputs[0].reply.tool_calls
    assert (called.name, json.loads(called.arguments), called.is_complete) == ("f", {"a": 1}, True)
    (output,) = llm.chat(ASK, params(structured_outputs=wish, max_tokens=200), thinking_budget=0)
    assert output.outputs[0].reply.tool_calls == []
    assert output.outputs[0].reply.content == call


def test_a_reply_that_is_plain_text_is_its_content(tmp_path):
    save_model(tmp_path, RECIPES["qwen3"])
    save_tokenizer(tmp_path)
    options = {"kv_cache_memory_bytes": 16 * 2**20, "self_check": False}
    with LLM(str(tmp_path), **options) as llm:
        (output,) = llm.chat(ASK, params())
        assert output.outputs[0].reply.content == output.outputs[0].text
        with pytest.raises(InvalidRequestError, match="thinking_budget=3 needs a model"):
            llm.chat(ASK, params(), thinking_budget=3)
    with pytest.raises(ConfigError, match="response_template='no such family'"):
        LLM(str(tmp_path), response_template="no such family", **options)
