"""Agents' loops to their right answers: the embedded model calls a function, the client runs it and sends its result.

Each official client runs its own loop, as its users have it, against a real server process.
"""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import anthropic
import pytest
from google import genai
from google.genai import types

from live_server import MODEL, ServerProcess, client

NOTES = {"the code of the amber falcon": "4821", "the home of the quiet lantern": "Lisbon"}
ASKED = [("What is the code of the amber falcon?", "4821"), ("Tell me the home of the quiet lantern.", "Lisbon")]
SCHEMA = {"type": "object", "properties": {"fact": {"type": "string"}}, "required": ["fact"]}
DESCRIPTION = "Look up a fact."


@pytest.fixture
def looked_up() -> list[str]:
    """The facts that the function was asked for."""
    return []


def answer_of(fact: str) -> str:
    return f"{fact[0].upper()}{fact[1:]} is {NOTES[fact]}."


def test_responses_loop_with_kept_responses(server: ServerProcess, looked_up: list[str]) -> None:
    ask = client(server.url)
    tool: Any = {"type": "function", "name": "lookup", "description": DESCRIPTION, "parameters": SCHEMA}
    given: Any = []
    previous, cached = None, []
    for question, answer in ASKED:
        given = [*given, {"role": "user", "content": question}]
        while True:
            response = ask.responses.create(
                model=MODEL, input=given, tools=[tool], previous_response_id=previous, temperature=0
            )
            assert response.usage is not None
            cached.append((response.usage.input_tokens_details.cached_tokens, response.usage.input_tokens))
            previous, given = response.id, []
            for item in response.output:
                if item.type == "function_call":
                    fact = json.loads(item.arguments)["fact"]
                    looked_up.append(fact)
                    given.append({"type": "function_call_output", "call_id": item.call_id, "output": answer_of(fact)})
            if not given:
                break
        assert response.output_text == answer
    assert looked_up == list(NOTES)
    for (_, before), (found, whole) in pairwise(cached):
        assert found >= before - 16, f"{found} of {whole}: each turn finds all of the turn before"


def test_chat_completions_loop_streamed(server: ServerProcess) -> None:
    ask = client(server.url)
    tool: Any = {"type": "function", "function": {"name": "lookup", "description": DESCRIPTION, "parameters": SCHEMA}}
    messages: list[Any] = []
    for question, answer in ASKED:
        messages.append({"role": "user", "content": question})
        with ask.chat.completions.stream(model=MODEL, messages=messages, tools=[tool], temperature=0) as stream:
            called = stream.get_final_completion().choices[0]
        assert called.finish_reason == "tool_calls"
        assert called.message.tool_calls is not None
        (call,) = called.message.tool_calls
        fact = json.loads(call.function.arguments)["fact"]
        messages.append(called.message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": answer_of(fact)})
        done = ask.chat.completions.create(model=MODEL, messages=messages, tools=[tool], temperature=0)
        assert done.choices[0].message.content == answer
        assert done.usage is not None
        details = done.usage.prompt_tokens_details
        assert details is not None
        assert details.cached_tokens is not None
        assert details.cached_tokens >= done.usage.prompt_tokens - 48, "all but the tool's result and the last block"
        messages.append({"role": "assistant", "content": answer})


def test_anthropics_tool_runner(server: ServerProcess, looked_up: list[str]) -> None:
    @anthropic.beta_tool
    def lookup(fact: str) -> str:
        """Look up a fact."""
        looked_up.append(fact)
        return answer_of(fact)

    ask = anthropic.Anthropic(base_url=server.url, api_key="none")
    messages: list[Any] = []
    for question, answer in ASKED:
        messages.append({"role": "user", "content": question})
        runner = ask.beta.messages.tool_runner(
            model=MODEL, max_tokens=60, messages=messages, tools=[lookup], extra_body={"temperature": 0}
        )
        told = list(runner)
        assert [message.stop_reason for message in told] == ["tool_use", "end_turn"]
        assert told[-1].content[0].text == answer  # type: ignore[union-attr]
        usage = told[-1].usage
        assert (usage.cache_read_input_tokens or 0) > usage.input_tokens
        messages.append({"role": "assistant", "content": answer})
    assert looked_up == list(NOTES)


def test_geminis_automatic_function_calling(server: ServerProcess, looked_up: list[str]) -> None:
    def lookup(fact: str) -> str:
        """Look up a fact."""
        looked_up.append(fact)
        return answer_of(fact)

    ask = genai.Client(api_key="none", http_options=types.HttpOptions(base_url=server.url))
    chat = ask.chats.create(model=MODEL, config=types.GenerateContentConfig(tools=[lookup], temperature=0))
    for question, answer in ASKED:
        response = chat.send_message(question)
        assert response.text == answer
        assert response.usage_metadata is not None
        assert response.usage_metadata.cached_content_token_count
    assert looked_up == list(NOTES)
