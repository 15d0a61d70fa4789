"""Ollama's official client, unchanged, against a real server process."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import ollama
import pytest

from foreword import __version__
from live_server import FACTS, FALCON, MODEL, ServerProcess, client, post

BLOCK = 16
GREEDY = {"temperature": 0}
QUESTION = FALCON[1]["content"]


@pytest.fixture
def ask(server: ServerProcess) -> Iterator[ollama.Client]:
    with ollama.Client(server.url) as whole:
        yield whole


def facts(name: str) -> str:
    """A document that no other test has."""
    return "".join(f"The code of the {name} falcon {number} is 4821.\n" for number in range(20))


# --------------------------------------------------------------------- answers


@pytest.mark.parametrize("prefix", ["", "/ollama"])
@pytest.mark.parametrize("tag", ["", ":latest"])
def test_a_conversation_is_answered_under_both_names_and_prefixes(server, prefix, tag):
    with ollama.Client(server.url + prefix) as ask:
        answer = ask.chat(MODEL + tag, FALCON, options=GREEDY, keep_alive="-1s", think=False)
    assert (answer.message.role, answer.message.content, answer.done_reason) == ("assistant", "4821", "stop")
    assert answer.model == MODEL + tag


def test_counts_are_those_of_chat_completions_and_durations_add_up(server, ask):
    answer = ask.chat(MODEL, FALCON, options=GREEDY)
    theirs = client(server.url).chat.completions.create(model=MODEL, messages=FALCON, temperature=0).usage
    assert (answer.prompt_eval_count, answer.eval_count) == (theirs.prompt_tokens, theirs.completion_tokens)
    parts = (answer.load_duration, answer.prompt_eval_duration, answer.eval_duration)
    assert min(parts) >= 0 < answer.prompt_eval_duration
    assert sum(parts) == answer.total_duration


def test_a_second_question_about_a_document_reports_its_hit(server):
    def cached(question: str) -> tuple[int, int]:
        messages = [{"role": "system", "content": facts("russet")}, {"role": "user", "content": question}]
        body = {"model": MODEL, "messages": messages, "options": GREEDY, "stream": False}
        answer = post(server.url, "/api/chat", body).json()
        return answer["prompt_cached_count"], answer["prompt_eval_count"]

    assert cached(QUESTION)[0] < 2 * BLOCK
    found, of = cached("Where is home?")
    assert found > of - 3 * BLOCK


def test_a_stream_adds_up_and_its_last_line_has_the_counts(ask):
    whole = ask.chat(MODEL, FALCON, options=GREEDY)
    *lines, last = ask.chat(MODEL, FALCON, options=GREEDY, stream=True)
    assert "".join(line.message.content for line in lines) + last.message.content == whole.message.content == "4821"
    assert [line.done for line in lines] == [False] * len(lines)
    assert (last.done, last.done_reason, last.eval_count) == (True, "stop", whole.eval_count)


def test_a_stream_is_the_default_and_has_a_json_text_on_each_line(server):
    answer = post(server.url, "/api/generate", {"model": MODEL, "prompt": QUESTION, "system": FACTS, "options": GREEDY})
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    *lines, rest = answer.text.split("\n")
    assert rest == ""
    assert "".join(json.loads(line)["response"] for line in lines) == "4821"


def test_a_context_goes_on_like_the_conversation_it_stands_for(server, ask):
    first = ask.generate(MODEL, QUESTION, system=FACTS, options=GREEDY)
    again = ask.generate(MODEL, "And the home of the quiet lantern?", context=first.context, options=GREEDY)
    told = [*FALCON, {"role": "assistant", "content": "4821"}]
    told.append({"role": "user", "content": "And the home of the quiet lantern?"})
    asked = post(server.url, "/tokenize", {"messages": told}).json()["tokens"]
    assert again.context[: len(asked)] == asked, "the tokens of the same conversation as messages"
    assert again.response == ask.chat(MODEL, told, options=GREEDY).message.content
    assert again.prompt_eval_count == len(asked)


def test_a_raw_prompt_is_continued_as_it_is(server, ask):
    prompt = "The code of the amber falcon is"
    raw = ask.generate(MODEL, prompt, raw=True, options={**GREEDY, "num_predict": 4, "num_thread": 2})
    theirs = client(server.url).completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=4)
    assert (raw.response, raw.prompt_eval_count) == (theirs.choices[0].text, theirs.usage.prompt_tokens)
    assert raw.context is None


# --------------------------------------------------------------------- options


def test_every_option_of_an_answer_is_obeyed(ask):
    def text(**options):
        answer = ask.chat(MODEL, FALCON, options={**GREEDY, **options})
        return answer.message.content, answer.done_reason

    assert text(stop=["21"]) == ("48", "stop")
    assert text(num_predict=1.0)[1] == "length"
    assert text(temperature=2, top_k=1) == text(temperature=2, top_p=1e-9) == text(temperature=2, min_p=1.0)
    assert text(temperature=2, top_k=1) == ("4821", "stop")
    unlikely = {"temperature": 3.0, "num_predict": 12, "top_p": 0.99}
    assert text(**unlikely, seed=1) == text(**unlikely, seed=1)
    assert len({text(**unlikely, seed=seed) for seed in range(4)}) > 1
    assert len({text(**unlikely, seed=-1) for _ in range(4)}) > 1


def test_penalties_count(ask):
    form = {"type": "string", "minLength": 30}
    texts = [
        ask.chat(MODEL, FALCON, format=form, options={**GREEDY, "num_predict": 30, **more}).message.content
        for more in ({}, {"repeat_penalty": 5.0}, {"presence_penalty": 2.0, "frequency_penalty": 2.0})
    ]
    assert len(set(texts)) > 1
    assert texts[0] != texts[1] != texts[2]


def test_an_answer_follows_a_format(ask):
    schema = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}
    assert json.loads(ask.chat(MODEL, FALCON, format=schema, options=GREEDY).message.content) == {"a": 7}
    begun = ask.chat(MODEL, FALCON, format="json", options={**GREEDY, "num_predict": 8}).message.content
    assert begun.startswith("{")
    assert ask.chat(MODEL, FALCON, format="", options=GREEDY).message.content == "4821"


def test_a_context_of_another_length_is_said_and_changes_nothing(server):
    for asked, told in ((10**9, True), (64, True), (None, False)):
        options = {**GREEDY, **({} if asked is None else {"num_ctx": asked})}
        answer = post(
            server.url, "/api/chat", {"model": MODEL, "messages": FALCON, "options": options, "stream": False}
        )
        assert answer.json()["message"]["content"] == "4821"
        assert ("num_ctx" in answer.json()) == told
        if told:
            assert answer.json()["num_ctx"] == ollama.Client(server.url).ps().models[0].context_length


def test_log_probabilities_are_those_of_chat_completions(server, ask):
    answer = ask.chat(MODEL, FALCON, options=GREEDY, logprobs=True, top_logprobs=2)
    ours = [(one.token, one.logprob, [(top.token, top.logprob) for top in one.top_logprobs]) for one in answer.logprobs]
    theirs = client(server.url).chat.completions.create(
        model=MODEL, messages=FALCON, temperature=0, logprobs=True, top_logprobs=2
    )
    content = theirs.choices[0].logprobs.content
    assert ours == [(one.token, one.logprob, [(top.token, top.logprob) for top in one.top_logprobs]) for one in content]
    streamed = ask.chat(MODEL, FALCON, options=GREEDY, logprobs=True, top_logprobs=2, stream=True)
    assert [one for line in streamed for one in line.logprobs or ()] == list(answer.logprobs)


def test_the_assistants_last_message_is_continued(server, ask):
    told = [*FALCON, {"role": "assistant", "content": "48"}]
    answer = ask.chat(MODEL, told, options=GREEDY)
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    theirs = client(server.url).chat.completions.create(model=MODEL, messages=told, temperature=0, extra_body=fields)
    assert answer.message.content == theirs.choices[0].message.content
    assert answer.prompt_eval_count == theirs.usage.prompt_tokens
    assert ask.chat(MODEL, [*FALCON, {"role": "assistant", "content": " "}], options=GREEDY).done, "a new answer"


# ---------------------------------------------------------------------- models


def test_the_model_is_listed_and_described(server, ask):
    [listed], [running] = ask.list().models, ask.ps().models
    assert listed.model == running.model == MODEL
    assert listed.size > 1000
    assert len(listed.digest) == 64
    assert running.expires_at.year == 9999
    shown = ask.show(MODEL)
    assert {"completion", "tools"} <= set(shown.capabilities)
    family = shown.modelinfo["general.architecture"]
    assert shown.details.family == listed.details.family == family != "unknown"
    assert shown.modelinfo[f"{family}.context_length"] == running.context_length
    assert httpx.get(f"{server.url}/api/version").json() == {"version": __version__}
    for path in ("/", "/ollama/"):
        assert (httpx.get(server.url + path).text, httpx.head(server.url + path).status_code) == (
            "foreword is running",
            200,
        )


def test_a_call_without_a_text_loads_the_model_which_is_there(ask):
    assert ask.generate(MODEL, "").done_reason == "load"
    assert ask.generate(MODEL, keep_alive=0).done_reason == "unload"
    assert ask.chat(MODEL, []).done_reason == "load"


# -------------------------------------------------------------------- refusals


def refusal(function, *args, **fields) -> tuple[int, str]:
    with pytest.raises(ollama.ResponseError) as caught:
        list(function(*args, **fields))
    return caught.value.status_code, caught.value.error


def test_what_changes_the_store_of_models_is_not_implemented(ask):
    for change in (ask.pull, ask.push, ask.delete):
        status, message = refusal(change, "llama3")
        assert status == 501
        assert "foreword serve" in message
    assert refusal(ask.copy, "a", "b")[0] == refusal(ask.create, "a", from_="b")[0] == 501
    assert refusal(ask.pull, "llama3", stream=True)[0] == 501


def test_another_model_is_not_found(ask):
    assert refusal(ask.chat, "llama3", FALCON)[0] == refusal(ask.show, "llama3:latest")[0] == 404
    assert "'llama3'" in refusal(ask.generate, "llama3", "x", stream=True)[1]


def test_what_this_server_lacks_is_refused_by_name(server, ask):
    image = b"\x89PNG"
    told = [{"role": "user", "content": "x", "images": [image]}]
    blind = 400, f"model {MODEL!r} takes no images; send text alone"
    assert refusal(ask.chat, MODEL, told) == blind == refusal(ask.generate, MODEL, "x", images=[image])
    for name, value in (("suffix", "y"), ("template", "{{ .Prompt }}")):
        assert refusal(ask.generate, MODEL, "x", **{name: value})[1].startswith(f"{name}: not supported")
    for options in ({"mirostat": 1}, {"tfs_z": 0.5}, {"typical_p": 0.9}, {"temprature": 1}):
        status, message = refusal(ask.chat, MODEL, FALCON, options=options)
        assert status == 400
        assert f"options.{next(iter(options))}" in message
    assert "context" in refusal(ask.generate, MODEL, "x", raw=True, context=[1])[1]
    assert "system" in refusal(ask.generate, MODEL, "x", raw=True, system="s")[1]
    assert refusal(ask.generate, MODEL, "x", context=[10**6])[0] == 400
    long = post(server.url, "/api/generate", {"model": MODEL, "prompt": "x", "context": [5] * 8190, "truncate": True})
    assert (long.status_code, "max_model_len" in long.text) == (400, True), "a context is not cut"


def test_errors_have_ollamas_form(server):
    for path, status in (("/api/nothing", 404), ("/api/chat", 400)):
        answer = post(server.url, path, {"messages": "x"})
        assert (answer.status_code, list(answer.json())) == (status, ["error"])
        assert isinstance(answer.json()["error"], str)
