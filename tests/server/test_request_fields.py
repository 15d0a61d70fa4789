"""Fields beside OpenAI's that say what an answer may look like, what a prompt is and when it runs: vLLM's names."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from doors import waiting_in
from foreword.llm import LLM
from foreword.request import NOTHING_ALLOWED, SamplingParams, StructuredOutputsParams
from foreword.server.options import ServerConfig
from live_server import ENDLESS, FALCON, MODEL, ServerProcess, ServerThread, client, embedded_llm, post, wait_until

PROMPT = "The code of the amber falcon is"
SCHEMA = {
    "type": "object",
    "properties": {"code": {"enum": [1, 2]}},
    "required": ["code"],
    "additionalProperties": False,
}
GRAMMARS = [
    ({"regex": "[0-9]{3}-[a-c]{1,9}"}, "[0-9]{3}-[a-c]{1,9}"),
    ({"choice": ["falcon", 'an "ötter"\n']}, 'falcon|an "ötter"\n'),
    ({"grammar": 'root ::= "yes" | "no" more\nmore ::= " " [0-9]+'}, "yes|no [0-9]+"),
    ({"grammar": 'start: "yes" | "no" / [0-9]+/'}, "yes|no [0-9]+"),
    ({"json": SCHEMA}, '{"code":[12]}'),
    ({"json": json.dumps(SCHEMA)}, '{"code":[12]}'),
]


@pytest.fixture(scope="module")
def ask(server: ServerProcess) -> OpenAI:
    return client(server.url)


def complete(ask: OpenAI, **fields: Any) -> Any:
    given = {"prompt": PROMPT, "temperature": 2, "seed": 1, "max_tokens": 60}
    own = {name: fields.pop(name) for name in ("prompt", "temperature", "max_tokens", "stop") if name in fields}
    return ask.completions.create(model=MODEL, **{**given, **own}, extra_body=fields).choices[0]


def refusal(ask: OpenAI, **fields: Any) -> str:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(ask, **fields)
    return str(caught.value.body["message"])  # type: ignore[index]


# ------------------------------------------------------------------ structured outputs


@pytest.mark.parametrize(("wanted", "pattern"), GRAMMARS, ids=str)
def test_an_answer_has_the_wanted_structure_by_vllms_names_old_and_new(ask, wanted, pattern):
    new = complete(ask, structured_outputs=wanted)
    old = complete(ask, **{f"guided_{kind}": value for kind, value in wanted.items()})
    assert re.fullmatch(pattern, new.text)
    assert (old.text, old.finish_reason) == (new.text, new.finish_reason) == (new.text, "stop")


def test_conversations_and_responses_have_structure_too(ask):
    fields = {"structured_outputs": {"choice": ["falcon", "otter"]}}
    chat = ask.chat.completions.create(model=MODEL, messages=FALCON, temperature=2, extra_body=fields)
    response = ask.responses.create(model=MODEL, input=FALCON, temperature=2, extra_body=fields)
    assert {chat.choices[0].message.content, response.output_text} <= {"falcon", "otter"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guided_regex": "("}, "the regex cannot be followed"),
        ({"guided_regex": "(" * 20_000}, "the regex cannot be followed"),
        ({"guided_grammar": "root ::= ((("}, "the grammar cannot be followed"),
        ({"guided_json": "{"}, "is not valid JSON"),
        ({"guided_choice": []}, r"choice=\(\) is out of range; name a text"),
        ({"guided_choice": ["a", ""]}, "give texts that are not empty"),
        ({"guided_json": "[" * 300_000}, "json has 300000 characters; at most 200000"),
        ({"guided_json": "[" * 150_000}, "is not valid JSON"),
        ({"guided_regex": "a" * 60_000}, "regex has 60000 characters; at most 50000"),
        ({"structured_outputs": {}}, "name nothing; give exactly one of"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "name regex and json_object; give exactly one"),
        ({"structured_outputs": {"regex": "a"}, "guided_choice": ["a"]}, "structured_outputs and guided_choice cannot"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format and guided_regex cannot"),
    ],
    ids=str,
)
def test_what_no_answer_can_follow_is_refused_by_name(ask, fields, message):
    told = refusal(ask, **fields)
    assert re.search(message, told)
    assert len(told) < 500


@pytest.mark.parametrize("temperature", [0, 2])
def test_a_complete_answer_ends_although_min_tokens_asks_for_more(ask, temperature):
    fields = {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}, "min_tokens": 50}
    answer = complete(ask, temperature=temperature, **fields)
    assert re.fullmatch('{"code":[12]}', answer.text)
    assert answer.finish_reason == "stop"


# ------------------------------------------------------------------ tokens


def test_an_answer_is_made_of_allowed_tokens(ask, server):
    allowed = post(server.url, "/tokenize", {"prompt": "48"}).json()["tokens"]
    answer = complete(ask, allowed_token_ids=allowed, max_tokens=20)
    assert set(answer.text) <= {"4", "8"}
    assert answer.finish_reason == "length"


def test_bad_words_do_not_come(ask):
    def answer(*words: str) -> str:
        fields = {"bad_words": words}
        chat = ask.chat.completions.create(model=MODEL, messages=FALCON, temperature=0, extra_body=fields)
        return chat.choices[0].message.content

    assert answer() == answer("falcon") == "4821"
    assert "4821" not in answer("falcon", "4821")


def test_the_stop_string_that_ended_an_answer_is_named(ask):
    chunks = list(ask.chat.completions.create(model=MODEL, messages=FALCON, temperature=0, stop=["21"], stream=True))
    whole = ask.chat.completions.create(model=MODEL, messages=FALCON, temperature=0, stop=["21"])
    assert chunks[-1].choices[0].stop_reason == whole.choices[0].stop_reason == "21"


def test_an_answer_that_nothing_may_follow_says_so(ask):
    fields = {"guided_regex": "[ab]{5}", "bad_words": ["a", "b"]}
    answer = complete(ask, **fields)
    assert (answer.finish_reason, answer.stop_reason) == ("content_filter", NOTHING_ALLOWED)
    response = ask.responses.create(model=MODEL, input=FALCON, extra_body=fields)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "content_filter")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"allowed_token_ids": []}, r"allowed_token_ids=\(\) is out of range; name a token"),
        (
            {"allowed_token_ids": [10**6]},
            "token id 1000000 in allowed_token_ids is out of range; the model's ids are 0",
        ),
        ({"allowed_token_ids": ["x"]}, "allowed_token_ids"),
        ({"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 2}, "min_tokens=2 forbids the end"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x"] * 200}, "bad_words"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0 .*use 1 or more, or -1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ({"priority": 1}, "priority=1 has no effect under scheduling_policy='fcfs'; leave it out"),
        ({"priority": "high"}, "priority"),
    ],
    ids=str,
)
def test_values_that_cannot_be_obeyed_are_refused_by_name(ask, fields, message):
    assert re.search(message, refusal(ask, **fields))


# ------------------------------------------------------------------ prompts


def test_the_end_of_a_prompt_is_kept(ask, server):
    token_ids = post(server.url, "/tokenize", {"prompt": PROMPT}).json()["tokens"]
    kept, whole = complete(ask, truncate_prompt_tokens=4), complete(ask, prompt=token_ids[-4:])
    assert kept.text == whole.text
    usage = ask.chat.completions.create(
        model=MODEL, messages=FALCON, max_tokens=2, extra_body={"truncate_prompt_tokens": 9}
    ).usage
    assert usage.prompt_tokens == 9


BEGUN = [*FALCON, {"role": "assistant", "content": "482"}]


def test_the_final_message_is_continued(ask, server):
    answer = ask.chat.completions.create(
        model=MODEL,
        messages=BEGUN,
        temperature=0,
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )
    assert answer.choices[0].message.content == "1"

    def tokens(**fields: Any) -> list[int]:
        return list(post(server.url, "/tokenize", {"messages": BEGUN, **fields}).json()["tokens"])

    continued, ended, asked = tokens(continue_final_message=True), tokens(add_generation_prompt=False), tokens()
    assert continued == ended[: len(continued)] == asked[: len(continued)]
    assert len(continued) < len(ended) < len(asked)


def test_a_prompt_may_end_after_the_last_message(ask, server):
    answer = ask.chat.completions.create(
        model=MODEL, messages=FALCON, max_tokens=1, extra_body={"add_generation_prompt": False}
    )
    ended = post(server.url, "/tokenize", {"messages": FALCON, "add_generation_prompt": False}).json()["count"]
    assert answer.usage.prompt_tokens == ended


@pytest.mark.parametrize(
    ("messages", "fields", "message"),
    [
        (BEGUN, {"continue_final_message": True, "add_generation_prompt": True}, "cannot be combined"),
        ([*FALCON, {"role": "assistant", "content": " "}], {"continue_final_message": True}, "last message with text"),
    ],
)
def test_a_final_message_that_cannot_be_continued_is_refused(ask, messages, fields, message):
    with pytest.raises(openai.BadRequestError, match=message):
        ask.chat.completions.create(model=MODEL, messages=messages, extra_body=fields)


# ------------------------------------------------------------------ unknown fields

CONVERSATION = {"messages": FALCON}
ENDPOINTS = {
    "/v1/chat/completions": CONVERSATION,
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/tokenize": CONVERSATION,
    "/detokenize": {"tokens": [5]},
    "/v1/cache/explain": CONVERSATION,
}
NESTED = [
    ({"response_format": {"type": "text", "colour": 1}}, "response_format.colour"),
    ({"structured_outputs": {"regex": "a", "colour": 1}}, "structured_outputs.colour"),
    ({"stream_options": {"colour": 1}, "stream": True}, "stream_options.colour"),
    ({"foreword": {"colour": 1}}, "foreword.colour"),
]


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_field_that_is_unknown_is_refused_with_its_name_and_the_remedy(server, path):
    answer = post(server.url, path, {**ENDPOINTS[path], "colour": "blue"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "colour"
    message = answer.json()["error"]["message"]
    assert message.startswith("Unrecognized request argument supplied: colour.")
    assert "--ignore-unknown-fields" in message


@pytest.mark.parametrize(("fields", "name"), NESTED)
def test_a_field_that_is_unknown_inside_another_is_refused_too(server, fields, name):
    answer = post(server.url, "/v1/chat/completions", {**CONVERSATION, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


def test_unknown_fields_can_be_ignored_and_are_told_once_a_name(caplog):
    with embedded_llm() as llm, ServerThread(llm, ServerConfig(ignore_unknown_fields=True)) as server:
        for _ in range(2):
            for path, body in ENDPOINTS.items():
                assert post(server.url, path, {**body, "colour": "blue"}).is_success
            for fields, _name in NESTED:
                assert post(server.url, "/v1/chat/completions", {**CONVERSATION, **fields, "shape": []}).is_success
        wrong = post(server.url, "/v1/chat/completions", {**CONVERSATION, "colour": 1, "temperature": -1})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "temperature")
        with_tool = {"tools": [{"type": "function", "function": {"name": "f", "colour": 1}}], "tool_choice": "none"}
        assert post(server.url, "/v1/chat/completions", {**CONVERSATION, **with_tool}).is_success
        with_tool["tools"] *= 3
        assert post(server.url, "/v1/chat/completions", {**CONVERSATION, **with_tool}).is_success
    told = [record.args[0] for record in caplog.records if record.name == "foreword.server.bodies.fields"]
    names = ["colour", "shape", "tools.function.colour", *(name for _, name in NESTED)]
    assert sorted(told) == sorted(names)


# ------------------------------------------------------------------ in this process


def test_lower_priorities_go_first_where_the_scheduler_looks_at_them():
    with embedded_llm(max_num_seqs=1, scheduling_policy="priority") as llm, ServerThread(llm, ServerConfig()) as server:

        def send(priority: int) -> threading.Thread:
            body = {"prompt": "x", "priority": priority, "max_tokens": 1, **ENDLESS}
            thread = threading.Thread(target=post, args=(server.url, "/v1/completions", body))
            thread.start()
            return thread

        def waiting() -> list[int]:
            return server.ask(lambda engine: [request.priority for request in waiting_in(engine)])

        body = {"prompt": "x", "priority": -5, "max_tokens": 4000, "stream": True, **ENDLESS}
        threads = []
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120):  # ends when this leaves
            wait_until(lambda: server.ask(lambda engine: engine.scheduler.num_running))
            for priority, queued in ((5, [5]), (2, [2, 5]), (-1, [-1, 2, 5])):
                threads.append(send(priority))
                wait_until(lambda queued=queued: waiting() == queued)
        for thread in threads:
            thread.join(60)


@pytest.mark.parametrize(("wanted", "pattern"), GRAMMARS, ids=str)
def test_offline_answers_have_structure(llm: LLM, wanted: dict[str, Any], pattern: str):
    params = SamplingParams(temperature=2, max_tokens=60, structured_outputs=StructuredOutputsParams(**wanted))
    [output] = llm.generate(PROMPT, params)
    assert re.fullmatch(pattern, output.outputs[0].text)


def test_offline_a_message_is_continued_and_bad_words_do_not_come(llm: LLM):
    [output] = llm.chat(BEGUN, SamplingParams(temperature=0, max_tokens=8), continue_final_message=True)
    assert output.outputs[0].text == "1"
    [output] = llm.chat(FALCON, SamplingParams(temperature=0, bad_words=("4821",)))
    assert "4821" not in output.outputs[0].text


def test_offline_a_dead_end_is_told_with_its_reason(llm: LLM):
    wanted = StructuredOutputsParams(regex="[ab]{5}")
    [output] = llm.generate(PROMPT, SamplingParams(structured_outputs=wanted, bad_words=("a", "b")))
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("content_filter", NOTHING_ALLOWED)
