"""Tools and thinking: Ollama's client on a model whose weights are set by hand, so that it calls of its own accord."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import ollama
import pytest

from foreword.llm import LLM
from foreword.server.options import ServerConfig
from live_server import MODEL, ServerThread, post
from scripted_model import save_scripted_model
from tiny_models import TOOL_TEMPLATE

SUM = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "add", "arguments": [1]}\n</tool_call>'
THOUGHT = "<think>\nOne and two.\n</think>\n\nThree."
SCRIPT = {"<asked>": SUM, "<twice>": f"Both.\n{SUM}\n{SUM}", "<told>": "It is 3.", "<odd>": BROKEN, "<mused>": THOUGHT}
TEMPLATE = TOOL_TEMPLATE.partition("{% if add_generation_prompt %}")[0] + (
    "{% if add_generation_prompt %}{% set last = messages[-1] %}<s>assistant: "
    "{% if enable_thinking is defined and enable_thinking %}<mused>{% elif last.role == 'tool' %}<told>"
    "{% elif 'twice' in last.content %}<twice>{% elif 'odd' in last.content %}<odd>{% else %}<asked>{% endif %}"
    "{% endif %}{# <think> </think> #}"
)
ASK = [{"role": "user", "content": "1 + 2?"}]


@contextmanager
def serving(folder: Path, template: str) -> Iterator[str]:
    save_scripted_model(folder, template, SCRIPT)
    with (
        LLM(str(folder), kv_cache_memory_bytes=16 * 2**20, dtype="float32", self_check=False) as llm,
        ServerThread(llm, ServerConfig()) as server,
    ):
        yield server.url


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("model"), TEMPLATE) as found:
        yield found


@pytest.fixture
def ask(url: str) -> Iterator[ollama.Client]:
    with ollama.Client(url) as whole:
        yield whole


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


@pytest.mark.parametrize("stream", [False, True])
def test_a_python_function_is_called_and_its_result_answered(ask, stream):
    answers = ask.chat(MODEL, ASK, tools=[add], options={"temperature": 0}, stream=stream)
    lines = list(answers) if stream else [answers]
    [call] = [call for line in lines for call in line.message.tool_calls or ()]
    assert (call.function.name, call.function.arguments) == ("add", {"a": 1, "b": 2})
    assert (lines[-1].done_reason, "".join(line.message.content for line in lines)) == ("stop", "")
    message = next(line.message for line in lines if line.message.tool_calls)
    told = [*ASK, message, {"role": "tool", "content": str(add(**call.function.arguments)), "tool_name": "add"}]
    assert ask.chat(MODEL, told, tools=[add], options={"temperature": 0}).message.content == "It is 3."


def test_two_calls_have_their_indices_and_results_find_their_calls(url, ask):
    body = {"model": MODEL, "messages": [{"role": "user", "content": "twice"}], "stream": False}
    body |= {"tools": [{"type": "function", "function": {"name": "add"}}], "options": {"temperature": 0}}
    message = post(url, "/api/chat", body).json()["message"]
    assert [call["function"]["index"] for call in message["tool_calls"]] == [0, 1]
    assert message["content"].strip() == "Both."
    results = [{"role": "tool", "content": number} for number in "34"]  # they name no call
    again = post(url, "/api/chat", {**body, "messages": [*body["messages"], message, *results]})
    assert again.json()["message"]["content"] == "It is 3."


def test_tools_are_the_same_prefix_as_in_chat_completions(url):
    function = {"name": "add", "description": "Adds two numbers.", "parameters": {"type": "object", "properties": {}}}
    body = {"model": MODEL, "messages": ASK, "tools": [{"type": "function", "function": function}], "stream": False}
    asked = post(url, "/v1/chat/completions", {**body, "max_tokens": 1}).json()["usage"]
    found = post(url, "/api/chat", {**body, "options": {"num_predict": 1}}).json()
    assert found["prompt_eval_count"] == asked["prompt_tokens"] == found["prompt_cached_count"] + 1


def test_a_call_without_an_object_of_arguments_is_shown_as_text(ask):
    message = ask.chat(MODEL, [{"role": "user", "content": "odd"}], tools=[add], options={"temperature": 0}).message
    assert not message.tool_calls
    assert "[1]" in message.content


@pytest.mark.parametrize("stream", [False, True])
def test_thinking_comes_apart_from_the_answer(ask, stream):
    answers = ask.chat(MODEL, ASK, think=True, options={"temperature": 0}, stream=stream)
    lines = list(answers) if stream else [answers]
    assert "".join(line.message.thinking or "" for line in lines).strip() == "One and two."
    assert "".join(line.message.content for line in lines).strip() == "Three."
    plain = ask.generate(MODEL, "1 + 2?", think=True, options={"temperature": 0})
    assert (plain.thinking.strip(), plain.response.strip()) == ("One and two.", "Three.")
    assert "thinking" in ask.show(MODEL).capabilities
    assert not ask.chat(MODEL, ASK, think=False, tools=[add], options={"temperature": 0}).message.thinking


def test_a_model_that_cannot_think_refuses_to(tmp_path):
    with serving(tmp_path, TOOL_TEMPLATE) as url, ollama.Client(url) as ask:
        for think in (True, "high"):
            with pytest.raises(ollama.ResponseError, match="does not support thinking"):
                ask.chat(MODEL, ASK, think=think)
        assert ask.chat(MODEL, ASK, think=False, options={"num_predict": 1}).done
        assert "thinking" not in ask.show(MODEL).capabilities
