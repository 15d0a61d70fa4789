"""Reasoning in chat completions: split off, counted and limited, on a tiny model whose template lets it think."""

from __future__ import annotations

import json

import pytest

from foreword.llm import LLM
from foreword.server.options import ServerConfig
from live_server import MODEL, ServerThread, client, post
from test_chat import THINKING
from tiny_models import RECIPES, save_model, save_tokenizer

ASK = [{"role": "user", "content": "How warm?"}]
TOOL = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}}},
}
WISH = {"model": MODEL, "messages": ASK, "temperature": 1, "seed": 4}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, RECIPES["qwen3"])
    save_tokenizer(folder, chat_template=THINKING)
    with (
        LLM(str(folder), kv_cache_memory_bytes=16 * 2**20, self_check=False) as llm,
        ServerThread(llm, ServerConfig()) as server,
    ):
        yield server


def test_reasoning_is_split_off_and_counted_and_the_stream_says_the_same(server):
    ask = client(server.url).chat.completions
    extra = {"thinking_budget": 12, "ignore_eos": True, "max_tokens": 40}
    whole = ask.create(**WISH, extra_body=extra)
    message = whole.choices[0].message
    tokenizer = server.service.llm.tokenizer
    closing = len(tokenizer.hf_tokenizer.encode("\n</think>", add_special_tokens=False))
    assert whole.usage.completion_tokens_details.reasoning_tokens == pytest.approx(12 + closing, abs=1)
    assert message.reasoning_content
    assert message.content
    assert "think>" not in message.content + message.reasoning_content
    texts = {"content": "", "reasoning_content": ""}
    for chunk in ask.create(**WISH, extra_body=extra, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            for key in texts:
                texts[key] += getattr(choice.delta, key, None) or ""
        usage = chunk.usage
    assert texts == {"content": message.content, "reasoning_content": message.reasoning_content}
    counted = usage.completion_tokens_details  # drafts differ: the second time, the cache knows the answer
    assert counted.reasoning_tokens == whole.usage.completion_tokens_details.reasoning_tokens


def test_log_probabilities_of_reasoning_make_no_items_of_a_streamed_response(server):
    wish = {"model": MODEL, "temperature": 0, "max_output_tokens": 40, "include": ["message.output_text.logprobs"]}
    wish["extra_body"] = {"ignore_eos": True}
    for number in range(6):
        *_, last = client(server.url).responses.create(**wish, input=f"How warm {number}?", stream=True)
        [item] = last.response.output
        assert item.type == "reasoning"
        whole = client(server.url).responses.create(**wish, input=f"How warm {number}?")
        assert [each.content for each in whole.output] == [item.content]


def test_a_call_is_forced_after_the_thinking(server):
    answer = client(server.url).chat.completions.create(
        **WISH, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, extra_body={"thinking_budget": 3}
    )
    (choice,) = answer.choices
    (call,) = choice.message.tool_calls
    assert call.function.name == "clock"
    assert json.loads(call.function.arguments).get("zone", "UTC") in ("UTC", "CET")
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None


def test_a_form_is_kept_after_the_thinking(server):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, 2]}}}
    answer = client(server.url).chat.completions.create(**WISH, response_format=form, extra_body={"thinking_budget": 3})
    assert answer.choices[0].message.content in ("1", "2")


def test_a_budget_out_of_range_is_refused(server):
    assert post(server.url, "/v1/chat/completions", {**WISH, "thinking_budget": -1}).status_code == 400
