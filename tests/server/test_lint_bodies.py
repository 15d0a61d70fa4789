"""The linter reads bodies of all dialects as the prompts that the server makes of them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from foreword.lint.prompts import read_prompts
from foreword.server.options import ServerConfig
from live_server import FACTS, MODEL, ServerThread, embedded_llm, post

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
ADD = {"name": "add", "description": "Adds.", "parameters": SCHEMA}
DOUBLE = {"name": "double", "description": "Doubles.", "parametersJsonSchema": SCHEMA}


def call(number: int, arguments: str) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": "add", "arguments": arguments}}


BODIES = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": FACTS}, {"type": "text", "text": "short."}]},
            {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "1 + 1?"}]},
            {
                "role": "assistant",
                "content": [{"type": "text", "text": "I "}, {"type": "text", "text": "add."}],
                "reasoning_content": "Two numbers.",
                "tool_calls": [call(1, '{"a": 1}'), call(2, '{"a": 1'), call(3, "")],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "2"},
            {"role": "assistant", "content": None, "tool_calls": [call(4, '{"a": 4}')]},
            {"role": "tool", "tool_call_id": "c4", "content": "8"},
        ],
        "tools": [{"type": "function", "function": ADD}],
        "max_tokens": 1,
    },
    "/v1/responses": {
        "instructions": FACTS,
        "input": [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "What is"}, {"type": "input_text", "text": "1?"}],
            },
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Two numbers."}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
            {"type": "custom_tool_call", "call_id": "c2", "name": "note", "input": "one"},
            {"role": "assistant", "content": "I add."},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "2"}]},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "noted"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "It is 2."}]},
            {"role": "developer", "content": "Go on."},
        ],
        "tools": [{"type": "function", **ADD}],
        "max_output_tokens": 1,
    },
    "/v1/messages": {
        "model": MODEL,
        "max_tokens": 1,
        "system": [{"type": "text", "text": "x-anthropic-billing-header: 7"}, {"type": "text", "text": FACTS}],
        "messages": [
            {"role": "user", "content": "What is"},
            {"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Two numbers.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "d"},
                    {"type": "text", "text": "I "},
                    {"type": "text", "text": "add."},
                    {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "is_error": True, "content": "no"},
                    {"type": "text", "text": "Then guess."},
                ],
            },
        ],
        "tools": [{"name": "add", "description": "Adds.", "input_schema": SCHEMA}],
    },
    f"/v1beta/models/{MODEL}:generateContent": {
        "systemInstruction": {"parts": [{"text": FACTS}, {"text": "short."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "What is"}, {"text": "1 + 1?"}]},
            {"role": "model", "parts": [{"text": "Two ", "thought": True}]},
            {
                "role": "model",
                "parts": [{"text": "numbers.", "thought": True}, {"text": "I "}, {"thoughtSignature": "s"}],
            },
            {"role": "model", "parts": [{"text": "add."}, {"functionCall": {"name": "add", "args": {"a": 1}}}]},
            {"role": "model", "parts": [{"function_call": {"id": "c2", "name": "add", "args": {"a": 2}}}]},
            {
                "role": "user",
                "parts": [
                    {"text": "Here:"},
                    {"functionResponse": {"id": "c2", "name": "add", "response": {"sum": 4}}},
                    {"function_response": {"name": "add", "response": {"sum": 2}}},
                    {"text": "Go on."},
                ],
            },
        ],
        "tools": [{"functionDeclarations": [{**ADD, "parametersJsonSchema": None}, DOUBLE]}],
        "generationConfig": {"maxOutputTokens": 1},
    },
}


@pytest.fixture(scope="module")
def running():
    with embedded_llm() as llm, ServerThread(llm, ServerConfig()) as server:
        yield server


@pytest.mark.parametrize("path", BODIES)
def test_a_body_is_read_as_the_prompt_that_the_server_makes_of_it(running, tmp_path, path):
    answer = post(running.url, path, BODIES[path])
    assert answer.status_code == 200, answer.text
    (record,) = running.service.records.recent(1)
    (tmp_path / "one.jsonl").write_text(json.dumps(BODIES[path]))
    tokenizer = running.service.tokenizer
    (prompt,) = read_prompts(tmp_path / "one.jsonl", tokenizer).prompts
    assert tokenizer.spell(prompt.token_ids) == tokenizer.spell(record.prompt_token_ids)
    assert np.array_equal(prompt.token_ids, record.prompt_token_ids)
