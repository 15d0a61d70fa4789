"""The linter reads bodies of all dialects as the prompts that the server makes of them."""

from __future__ import annotations

import json

import numpy as np
import pytest

from foreword.lint.prompts import read_prompts
from foreword.server.options import ServerConfig
from live_server import FACTS, MODEL, ServerThread, embedded_llm, post

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
SPOKEN = {"name": "weather", "description": "Get the weather.", "parameters": SCHEMA}
CALL = {"id": "call00000", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
BODIES = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "developer", "content": FACTS},
            {"role": "user", "content": [{"type": "text", "text": "Is it "}, {"type": "text", "text": "cold?"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call00000", "content": "-3"},
        ],
        "tools": [{"type": "function", "function": SPOKEN}],
        "max_tokens": 1,
    },
    "/v1/responses": {
        "instructions": FACTS,
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Is it cold?"}]},
            {"type": "function_call", "call_id": "a", "name": "weather", "arguments": '{"city": "Oslo"}'},
            {"type": "function_call_output", "call_id": "a", "output": "-3"},
            {"role": "user", "content": "And now?"},
        ],
        "tools": [{"type": "function", **SPOKEN}],
        "max_output_tokens": 1,
    },
    "/v1/messages": {
        "model": MODEL,
        "system": [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": FACTS}],
        "messages": [
            {"role": "user", "content": "Is it"},
            {"role": "user", "content": [{"type": "text", "text": "cold?"}]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Oslo"}}],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": "-3", "is_error": True},
                    {"type": "text", "text": "Well?"},
                ],
            },
        ],
        "tools": [{"name": "weather", "description": "Get the weather.", "input_schema": SCHEMA}],
        "max_tokens": 1,
    },
    f"/v1beta/models/{MODEL}:generateContent": {
        "systemInstruction": {"parts": [{"text": FACTS}]},
        "contents": [
            {"role": "user", "parts": [{"text": "Is it "}, {"text": "cold?"}]},
            {"role": "model", "parts": [{"functionCall": {"name": "weather", "args": {"city": "Oslo"}}}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "weather", "response": {"celsius": -3}}}]},
        ],
        "tools": [
            {"functionDeclarations": [{"name": "weather", "description": "Get it.", "parametersJsonSchema": SCHEMA}]}
        ],
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
