"""Bodies of requests: the linter reads them as the server's dialects do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from foreword.lint.bodies import read_body
from foreword.server.dialects.anthropic.fields import CreateMessageRequest
from foreword.server.dialects.anthropic.messages import chat_of
from foreword.server.dialects.gemini.contents import read_chat
from foreword.server.dialects.gemini.fields import GenerateContentRequest
from foreword.server.dialects.openai import messages as openai
from foreword.server.dialects.openai import responses
from foreword.server.dialects.openai.caching import Breakpoints
from foreword.server.dialects.openai.fields import ChatRequest, ResponsesRequest

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
ADD = {"name": "add", "description": "Adds.", "parameters": SCHEMA}


def call(number: int, arguments: str) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": "add", "arguments": arguments}}


CHAT = {
    "messages": [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "short."}]},
        {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "1 + 1?"}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "I "}, {"type": "text", "text": "add."}],
            "reasoning_content": "Two numbers.",
            "tool_calls": [call(1, '{"a": 1}'), call(2, '{"a": 1'), call(3, "")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ],
    "tools": [{"type": "function", "function": ADD}],
}
RESPONSES = {
    "instructions": "Be short.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "What is"}, {"type": "input_text", "text": "1?"}]},
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
}
ANTHROPIC = {
    "model": "m",
    "max_tokens": 1,
    "system": [{"type": "text", "text": "x-anthropic-billing-header: 7"}, {"type": "text", "text": "Be short."}],
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
}
GEMINI = {
    "systemInstruction": {"parts": [{"text": "Be"}, {"text": "short."}]},
    "contents": [
        {"role": "user", "parts": [{"text": "What is"}, {"text": "1 + 1?"}]},
        {"role": "model", "parts": [{"text": "Two ", "thought": True}]},
        {"role": "model", "parts": [{"text": "numbers.", "thought": True}, {"text": "I "}, {"thoughtSignature": "s"}]},
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
    "tools": [{"functionDeclarations": [{**ADD, "parametersJsonSchema": None}]}],
}


def of_chat(body: dict[str, Any]) -> tuple[Any, Any]:
    request = ChatRequest.model_validate(body)
    return openai.plain_messages(request.messages, Breakpoints()), openai.plain_tools(request.tools)


def of_responses(body: dict[str, Any]) -> tuple[Any, Any]:
    request = ResponsesRequest.model_validate(body)
    head = [{"role": "system", "content": request.instructions}]
    return responses.continued(head, request.input, Breakpoints()), responses.plain_tools(request.tools or ())


def of_anthropic(body: dict[str, Any]) -> tuple[Any, Any]:
    service: Any = SimpleNamespace(tokenizer=SimpleNamespace(chat_template=""))  # all that is read of it
    chat = chat_of(service, CreateMessageRequest.model_validate(body), 0)
    return chat.messages, chat.tools


def of_gemini(body: dict[str, Any]) -> tuple[Any, Any]:
    chat = read_chat(GenerateContentRequest.model_validate(body), "", 0)
    return chat.messages, chat.tools


@pytest.mark.parametrize(
    ("body", "read"),
    [(CHAT, of_chat), (RESPONSES, of_responses), (ANTHROPIC, of_anthropic), (GEMINI, of_gemini)],
    ids=["chat", "responses", "anthropic", "gemini"],
)
def test_the_linter_and_the_server_read_the_same_conversation(body: dict[str, Any], read: Any) -> None:
    messages, tools = read(body)
    conversation = read_body(body)
    assert conversation is not None
    assert conversation.messages == messages
    assert conversation.inputs["tools"] == list(tools)
