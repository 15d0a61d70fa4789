"""The official client, unchanged, against a real server process."""

from __future__ import annotations

import json

import httpx
import openai
import pytest
from openai import OpenAI

from live_server import FACTS, FALCON, MODEL, ServerProcess, client, post

BLOCK = 16
AS_JSON = {"Content-Type": "application/json"}


@pytest.fixture
def ask(server: ServerProcess) -> OpenAI:
    return client(server.url)


def long_chat(name: str) -> list[dict[str, str]]:
    """A conversation that no other test has."""
    facts = "".join(f"The code of the {name} falcon {number} is 4821.\n" for number in range(20))
    return [{"role": "system", "content": facts}, *FALCON[1:]]


# ----------------------------------------------------------------------- chat


def test_a_question_is_answered_from_its_document(ask):
    answer = ask.chat.completions.create(model=MODEL, messages=FALCON, temperature=0)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.content == "4821"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_cached_tokens_are_reported_cold_and_warm(ask):
    usages = [
        ask.chat.completions.create(model=MODEL, messages=long_chat("silver"), temperature=0).usage for _ in range(2)
    ]
    assert usages[0].prompt_tokens_details.cached_tokens < BLOCK + len("<|im_start|>system\nThe code of the")
    assert usages[1].prompt_tokens_details.cached_tokens >= usages[1].prompt_tokens - 1 - BLOCK


def test_a_stream_adds_up_to_the_whole_answer(ask):
    chunks = list(
        ask.chat.completions.create(
            model=MODEL, messages=FALCON, temperature=0, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "4821"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens >= 0
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_each_chunk_says_what_was_used_so_far_if_that_is_asked_for(ask):
    options = {"include_usage": True, "continuous_usage_stats": True}
    request = {"model": MODEL, "temperature": 0, "stream": True, "stream_options": options}
    for chunks in (
        list(ask.chat.completions.create(messages=FALCON, **request)),
        list(ask.completions.create(prompt="The code of the silver", max_tokens=4, **request)),
    ):
        *during, last = [chunk.usage for chunk in chunks]
        assert {one.prompt_tokens for one in during} == {last.prompt_tokens}
        counts = [one.completion_tokens for one in during]
        assert counts == sorted(counts)
        assert counts[-1] == last.completion_tokens > 0
        assert all(one.total_tokens == one.prompt_tokens + one.completion_tokens for one in during)


def test_a_stream_has_no_usage_unless_it_is_asked_for(ask):
    chunks = list(ask.chat.completions.create(model=MODEL, messages=FALCON, temperature=0, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


def test_n_choices_of_equal_seeds_are_equal_and_differ_among_themselves(ask):
    def texts() -> list[str | None]:
        answer = ask.chat.completions.create(
            model=MODEL, messages=FALCON, n=4, seed=7, temperature=2, max_tokens=12, extra_body={"ignore_eos": True}
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        return [choice.message.content for choice in answer.choices]

    first = texts()
    assert texts() == first
    assert len(set(first)) > 1


def test_logprobs_name_tokens_bytes_and_the_likeliest_others(ask):
    answer = ask.chat.completions.create(model=MODEL, messages=FALCON, temperature=0, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert "".join(position.token for position in content[:-1]) == "4821"
    for position in content:
        assert position.logprob <= 0
        assert bytes(position.bytes).decode() == position.token
        assert len(position.top_logprobs) == 3
        assert position.top_logprobs[0].token == position.token  # greedy


def test_streamed_logprobs_are_those_of_the_whole_answer(ask):
    whole = ask.chat.completions.create(model=MODEL, messages=FALCON, temperature=0, logprobs=True)
    chunks = list(ask.chat.completions.create(model=MODEL, messages=FALCON, temperature=0, logprobs=True, stream=True))
    streamed = [p for chunk in chunks if chunk.choices[0].logprobs for p in chunk.choices[0].logprobs.content]
    assert streamed == whole.choices[0].logprobs.content


def test_a_stop_string_ends_the_answer_and_is_not_part_of_it(ask):
    answer = ask.chat.completions.create(model=MODEL, messages=FALCON, temperature=0, stop="21")
    assert answer.choices[0].message.content == "48"
    assert answer.choices[0].finish_reason == "stop"


def test_a_short_limit_ends_with_length(ask):
    answer = ask.chat.completions.create(model=MODEL, messages=FALCON, temperature=0, max_completion_tokens=1)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 1


def test_content_may_come_in_parts(ask):
    parts = [{"type": "text", "text": line} for line in FACTS.splitlines(keepends=True)]
    answer = ask.chat.completions.create(
        model=MODEL, messages=[{"role": "developer", "content": parts}, FALCON[1]], temperature=0
    )
    assert answer.choices[0].message.content == "4821"


def test_an_answers_message_can_be_sent_back(ask):
    first = ask.chat.completions.create(model=MODEL, messages=FALCON, temperature=0)
    told = [*FALCON, first.choices[0].message, {"role": "user", "content": "And the home of the quiet lantern?"}]
    second = ask.chat.completions.create(model=MODEL, messages=told, temperature=0)
    assert second.choices[0].message.content == "Lisbon"


def test_a_prompt_cache_key_is_taken_and_keeps_nothing_apart(ask):
    cached = [
        ask.chat.completions.create(
            model=MODEL, messages=long_chat("copper"), temperature=0, prompt_cache_key=key
        ).usage.prompt_tokens_details.cached_tokens
        for key in ("one", "two")
    ]
    assert cached[1] > cached[0]


# -------------------------------------------------------------------- grammar

SCHEMA = {
    "type": "object",
    "properties": {"animal": {"enum": ["falcon", "otter"]}, "code": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["animal", "code"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_follows_a_json_schema(ask, seed):
    answer = ask.chat.completions.create(
        model=MODEL,
        messages=FALCON,
        seed=seed,
        temperature=2,
        response_format={"type": "json_schema", "json_schema": {"name": "fact", "schema": SCHEMA, "strict": True}},
    )
    fact = json.loads(answer.choices[0].message.content)
    assert set(fact) == {"animal", "code"}
    assert fact["animal"] in ("falcon", "otter")
    assert 0 <= fact["code"] <= 99
    assert answer.choices[0].finish_reason == "stop"


def test_json_object_begins_an_object(ask):
    answer = ask.chat.completions.create(
        model=MODEL, messages=FALCON, temperature=0, max_tokens=8, response_format={"type": "json_object"}
    )
    assert answer.choices[0].message.content.startswith("{")


def test_choices_follow_a_grammar_each_for_itself(ask):
    answer = ask.completions.create(
        model=MODEL,
        prompt=["a", "b"],
        n=3,
        temperature=2,
        max_tokens=64,
        extra_body={"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    )
    assert all(set(json.loads(choice.text)) == {"animal", "code"} for choice in answer.choices)


# ---------------------------------------------------------------- completions


def test_several_prompts_are_continued_in_order(ask):
    answer = ask.completions.create(model=MODEL, prompt=["amber falcon", "quiet lantern"], n=2, max_tokens=3, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    begun = [choice.text.startswith("amber falcon") for choice in answer.choices]
    assert begun == [True, True, False, False]


def test_token_ids_are_a_prompt_too(ask, server):
    token_ids = post(server.url, "/tokenize", {"prompt": "The code of the amber falcon is"}).json()["tokens"]
    texts = [
        ask.completions.create(model=MODEL, prompt=prompt, max_tokens=4, temperature=0).choices[0].text
        for prompt in ("The code of the amber falcon is", token_ids, [token_ids])
    ]
    assert texts[0] == texts[1] == texts[2]


def test_an_echoed_prompt_has_log_probabilities(ask):
    answer = ask.completions.create(model=MODEL, prompt="The code of the falcon", max_tokens=0, echo=True, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert answer.choices[0].text == "".join(logprobs.tokens) == "The code of the falcon"
    assert logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in logprobs.token_logprobs[1:])
    assert logprobs.text_offset == [sum(map(len, logprobs.tokens[:at])) for at in range(len(logprobs.tokens))]


def test_streamed_completions_of_several_prompts_add_up(ask):
    whole = ask.completions.create(model=MODEL, prompt=["x", "amber"], max_tokens=6, temperature=0, logprobs=1)
    texts, tokens = ["", ""], [[], []]
    for chunk in ask.completions.create(
        model=MODEL, prompt=["x", "amber"], max_tokens=6, temperature=0, logprobs=1, stream=True
    ):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
    assert texts == [choice.text for choice in whole.choices]
    assert tokens == [choice.logprobs.tokens for choice in whole.choices]


# ------------------------------------------------------------------ responses


def test_a_response_answers_and_reports_cached_tokens(ask):
    first, second = (ask.responses.create(model=MODEL, input=long_chat("humble"), temperature=0) for _ in range(2))
    assert first.status == "completed"
    assert first.output_text == second.output_text
    assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens_details.cached_tokens


def test_a_response_goes_on_from_an_earlier_one(ask):
    first = ask.responses.create(model=MODEL, input=FALCON, temperature=0)
    question = "And the home of the quiet lantern?"
    second = ask.responses.create(model=MODEL, input=question, previous_response_id=first.id, temperature=0)
    assert (first.output_text, second.output_text) == ("4821", "Lisbon")
    assert ask.responses.retrieve(first.id).output_text == "4821"
    ask.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        ask.responses.create(model=MODEL, input=question, previous_response_id=first.id)


def test_response_events_come_in_order_and_add_up(ask):
    events = list(ask.responses.create(model=MODEL, input=FALCON, temperature=0, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "4821"
    assert events[-1].response.output_text == "4821"


def test_a_response_follows_a_schema(ask):
    answer = ask.responses.create(
        model=MODEL, input=FALCON, text={"format": {"type": "json_schema", "name": "fact", "schema": SCHEMA}}
    )
    assert set(json.loads(answer.output_text)) == {"animal", "code"}


def test_a_response_that_is_cut_is_incomplete(ask):
    answer = ask.responses.create(model=MODEL, input=FALCON, max_output_tokens=1)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"


# --------------------------------------------------------------------- others


def test_the_served_model_is_listed(ask):
    assert [model.id for model in ask.models.list()] == [MODEL]
    assert ask.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        ask.models.retrieve("other/model")


def test_text_survives_tokenize_and_detokenize(server):
    text = "The code of the ämber fälcon 🦅 is 4821."
    tokens = post(server.url, "/tokenize", {"prompt": text, "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert post(server.url, "/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": text}
    chat = post(server.url, "/tokenize", {"messages": FALCON}).json()
    assert chat["max_model_len"] == tokens["max_model_len"]
    assert chat["count"] > tokens["count"]


def test_health_and_version_ask_for_no_key(server):
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}
    assert "version" in httpx.get(f"{server.url}/version").json()


# ------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": "hello"}, "messages"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 10_000}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stop": [""]}, None),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1_0": 1}}, "logit_bias"),
        ({"logit_bias": {" 10": 1}}, "logit_bias"),
        ({"logit_bias": {"010": 1}}, "logit_bias"),
        ({"logit_bias": {"\u0661": 1}}, "logit_bias"),
        ({"logit_bias": {"99999999": 1}}, None),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}}, None),
        ({"typo": 1}, "typo"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"seed": 1.5}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None),
    ],
)
def test_a_bad_field_is_refused_and_named(server, change, param):
    body = json.dumps({"model": MODEL, "messages": FALCON, **change})
    answer = httpx.post(f"{server.url}/v1/chat/completions", content=body, headers=AS_JSON, timeout=60)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"].startswith(param)
    assert error["message"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b"[" * 100_000, b'{"seed": ' + b"9" * 5000 + b"}"],
)
def test_a_body_that_is_no_request_is_refused(server, content):
    answer = httpx.post(f"{server.url}/v1/chat/completions", content=content, headers=AS_JSON, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_a_body_of_another_type_is_refused_even_if_a_parameter_says_json(server):
    body = json.dumps({"messages": FALCON, "max_tokens": 1})
    for kind in ("", "text/plain", "text/plain; a=json", "text/plain;application/json"):
        answer = httpx.post(f"{server.url}/v1/chat/completions", content=body, headers={"Content-Type": kind})
        assert answer.status_code == 415, kind
    for kind in ("Application/JSON", "application/vnd.api+json; charset=utf-8"):
        answer = httpx.post(f"{server.url}/v1/chat/completions", content=body, headers={"Content-Type": kind})
        assert answer.status_code == 200, kind


def test_a_long_prompt_is_refused_with_openais_code(ask):
    with pytest.raises(openai.BadRequestError) as caught:
        ask.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x y " * 9000}])
    assert caught.value.code == "context_length_exceeded"


def test_another_model_is_not_found(ask):
    with pytest.raises(openai.NotFoundError) as caught:
        ask.chat.completions.create(model="gpt-4o", messages=FALCON)
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"prompt": []}, 400),
        ({"prompt": [[]]}, 400),
        ({"prompt": ["a", 1]}, 400),
        ({"prompt": [-1]}, 400),
        ({"prompt": [2**31]}, 400),
        ({"prompt": [2**31 - 1]}, 400),
        ({"prompt": ""}, 400),
        ({"prompt": "x", "max_tokens": 0}, 400),
        ({"prompt": "x", "best_of": 3}, 400),
        ({"prompt": "x", "suffix": "y"}, 400),
        ({"prompt": ["x"] * 200}, 400),
        ({"prompt": ["x", ""], "stream": True}, 400),
    ],
)
def test_a_bad_completion_is_refused(server, body, status):
    answer = post(server.url, "/v1/completions", {"model": MODEL, **body})
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_unknown_urls_and_methods_are_answered_as_openai_does(server):
    assert httpx.get(f"{server.url}/v1/nothing").json()["error"]["code"] == "unknown_url"
    answer = httpx.get(f"{server.url}/v1/chat/completions")
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_supported")
    assert post(server.url, "/detokenize", {"tokens": [10**6]}).status_code == 400
    assert post(server.url, "/tokenize", {}).status_code == 400
