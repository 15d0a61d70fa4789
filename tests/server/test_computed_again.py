"""Two reasons for computing what another request has, or had: no state was saved there, or it is not finished yet."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from doors import runner_of
from foreword.llm import LLM
from foreword.server.options import ServerConfig
from live_server import MODEL, ServerThread, client, embedded_llm, post, wait_until

CACHE = {"foreword": {"cache": True}}


def complete(url: str, prompt: object, **more: object) -> dict:
    answer = post(url, "/v1/completions", {"prompt": prompt, "max_tokens": 1, **CACHE, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


def comparing(response: dict) -> dict[str, object]:
    return {"prompt_cache_options": {"comparison_response_id": response["id"]}}


# ------------------------------------------------------- states of recurrent layers


@pytest.fixture(scope="module", params=["mamba2", "qwen3_next"])
def hybrid(request, tiny_models):
    folder = tiny_models.folder_with_tokenizer(request.param)
    options = {
        "block_size": 4,
        "state_block_size": 4,
        "state_interval": 512,
        "kv_cache_memory_bytes": 8 * 2**20,
        "dtype": "float32",
    }
    with LLM(str(folder), self_check=False, **options) as llm, ServerThread(llm, ServerConfig()) as server:
        yield server


@pytest.mark.parametrize("hybrid", ["qwen3_next"], indirect=True)  # its attention layers know that the prompt was there
def test_a_prompt_that_ends_where_no_state_was_saved_says_so(hybrid):
    whole = list(range(10, 90))
    first = complete(hybrid.url, whole)
    half = complete(hybrid.url, whole[:41], **comparing(first))
    assert half["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert half["foreword"]["cache"]["reason"] == "state_not_saved"
    assert half["foreword"]["cache"]["computed_tokens"] == 41
    assert half["prompt_cache_diagnostics"] == {"type": "unavailable", "reason": "state_not_saved"}
    again = complete(hybrid.url, whole[:41], **comparing(first))
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 40
    assert again["prompt_cache_diagnostics"] == {"type": "cache_hit"}


def conversation(*said: str) -> list[dict[str, str]]:
    roles = ["system", *["user", "assistant"] * len(said)]
    return [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]


def ask_chat(url: str, *said: str) -> tuple[int, int]:
    usage = post(url, "/v1/chat/completions", {"messages": conversation(*said), "max_tokens": 1}).json()["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def ask_responses(url: str, *said: str) -> tuple[int, int]:
    usage = client(url).responses.create(model=MODEL, input=conversation(*said), max_output_tokens=1).usage
    return usage.input_tokens, usage.input_tokens_details.cached_tokens


@pytest.mark.parametrize("ask", [ask_chat, ask_responses])
def test_a_conversation_that_is_asked_otherwise_finds_the_state_behind_the_message_before(hybrid, ask):
    """Without a state behind each message the second one would begin anew, and only the third one hit."""
    system = f"{ask.__name__}: be brief, and answer in the language in which the question was asked."
    beginning = post(
        hybrid.url, "/tokenize", {"messages": conversation(system), "add_generation_prompt": False}
    ).json()["count"]
    assert ask(hybrid.url, system, "How high is a falcon's nest?")[1] < beginning - 4
    num_tokens, num_cached = ask(hybrid.url, system, "What does an otter eat all day long?")
    assert beginning - 4 < num_cached <= beginning + 4 < num_tokens


# ------------------------------------------------------------ prompts being computed


@pytest.fixture
def slow_prefill():
    """Prompts are computed 32 tokens at a time, and nobody waits for another's."""
    with embedded_llm(coalesce_in_flight=False, long_prefill_token_threshold=32) as llm:
        yield llm


def test_what_another_request_is_computing_at_that_moment_says_so(slow_prefill, monkeypatch):
    reached, go_on = threading.Event(), threading.Event()
    runner = runner_of(slow_prefill.engine)
    execute = runner.execute

    def held(batch):
        reached.set()
        assert go_on.wait(60)
        return execute(batch)

    prompt = list(range(10, 410))
    with ServerThread(slow_prefill, ServerConfig()) as server, ThreadPoolExecutor(2) as pool:
        earlier = complete(server.url, prompt)
        post(server.url, "/reset_prefix_cache", None).raise_for_status()
        monkeypatch.setattr(runner, "execute", held)
        first = pool.submit(complete, server.url, prompt)
        wait_until(reached.is_set)
        second = pool.submit(complete, server.url, prompt, **comparing(earlier))
        wait_until(lambda: server.service.thread.num_choices == 2)
        go_on.set()
        assert first.result()["foreword"]["cache"]["reason"] == "never_seen"
        told = second.result()
        report = told["foreword"]["cache"]
        assert report["reason"] == "in_flight"
        assert report["in_words"] == "another request was computing it at that moment"
        assert report["hit_tokens"] < 100
        assert told["prompt_cache_diagnostics"] == {"type": "unavailable", "reason": "in_flight"}


def test_prompts_of_one_call_that_are_alike_say_so_too(slow_prefill):
    with ServerThread(slow_prefill, ServerConfig()) as server:
        prompt = list(range(10, 410))
        reports = complete(server.url, [prompt, prompt])["foreword"]["cache"]
        assert [report["reason"] for report in reports] == ["never_seen", "in_flight"]
