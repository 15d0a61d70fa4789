"""Google's official client, unchanged, against a real server process: answers, streams, forms, counts and models."""

from __future__ import annotations

import enum
import json
import time
from typing import Annotated, Any

import httpx
import pydantic
import pytest
from google.genai import types

from foreword.server.dialects.gemini.contents import read_chat
from foreword.server.dialects.gemini.fields import GenerateContentRequest
from live_server import FACTS, FALCON, MODEL, client, post
from server.dialects.gemini.sdk import BODY, QUESTION, config, generate, google

BLOCK = 16
LONG = {"type": "string", "minLength": 30}


@pytest.fixture
def ask(server):
    with google(server.url) as whole:  # it closes its connections once nobody holds it
        yield whole.models


def facts(name: str) -> str:
    """A document that no other test has."""
    return "".join(f"The code of the {name} falcon {number} is 4821.\n" for number in range(20))


# --------------------------------------------------------------------- answers


@pytest.mark.parametrize("version", [None, "v1beta", "v1alpha"])
@pytest.mark.parametrize("prefix", ["", "/gemini"])
def test_a_question_is_answered_under_every_version_and_prefix(server, version, prefix):
    with google(server.url + prefix, api_version=version) as ask:
        answer = ask.models.generate_content(model=MODEL, contents=QUESTION, config=config())
    [candidate] = answer.candidates
    assert (answer.text, candidate.finish_reason, candidate.content.role) == ("4821", "STOP", "model")
    assert answer.model_version == MODEL
    assert answer.response_id


def test_usage_is_that_of_chat_completions(server, ask):
    usage = ask.generate_content(model=MODEL, contents=QUESTION, config=config()).usage_metadata
    theirs = client(server.url).chat.completions.create(model=MODEL, messages=FALCON, temperature=0).usage
    assert usage.prompt_token_count == theirs.prompt_tokens
    assert usage.candidates_token_count == theirs.completion_tokens
    assert usage.total_token_count == theirs.total_tokens
    assert [(one.modality, one.token_count) for one in usage.prompt_tokens_details] == [("TEXT", theirs.prompt_tokens)]


def test_a_second_question_about_a_document_reports_its_hit(ask):
    """What Google calls implicit caching."""
    answers = [
        ask.generate_content(model=MODEL, contents=text, config=config(system_instruction=facts("scarlet")))
        for text in (QUESTION, "Where is home?")
    ]
    cold, warm = (answer.usage_metadata.cached_content_token_count or 0 for answer in answers)
    assert cold < 2 * BLOCK < answers[1].usage_metadata.prompt_token_count - 3 * BLOCK < warm
    [of_cache] = answers[1].usage_metadata.cache_tokens_details
    assert of_cache.token_count == warm


def test_a_stream_adds_up_and_its_last_chunk_has_the_reason_and_all_usage(ask):
    whole = ask.generate_content(model=MODEL, contents=QUESTION, config=config())
    chunks = list(ask.generate_content_stream(model=MODEL, contents=QUESTION, config=config()))
    assert "".join(chunk.text for chunk in chunks) == whole.text == "4821"
    assert [chunk.candidates[0].finish_reason for chunk in chunks] == [*[None] * (len(chunks) - 1), "STOP"]
    assert len({chunk.response_id for chunk in chunks}) == 1
    last, all_at_once = chunks[-1].usage_metadata, whole.usage_metadata
    assert last.total_token_count == all_at_once.total_token_count
    assert all(chunk.usage_metadata.prompt_token_count == all_at_once.prompt_token_count for chunk in chunks)


def test_a_streams_bytes_are_chunks_and_nothing_else(server):
    path = f"/v1beta/models/{MODEL}:streamGenerateContent"
    events = generate(server.url, BODY, f"{path}?alt=sse")
    assert events.headers["content-type"].startswith("text/event-stream")
    *lines, rest = events.text.split("\n\n")
    assert rest == ""
    assert all(line.startswith("data: {") for line in lines)
    array = generate(server.url, BODY, path)
    assert array.headers["content-type"] == "application/json"
    for chunks in ([json.loads(line[6:]) for line in lines], array.json()):
        assert "".join(chunk["candidates"][0]["content"]["parts"][0]["text"] for chunk in chunks) == "4821"


def test_a_chat_keeps_its_history_and_hits_all_of_it(server):
    whole = google(server.url)
    system = facts("violet") + FACTS
    chat = whole.chats.create(model=MODEL, config=config(system_instruction=system))
    forced = {"response_mime_type": "application/json", "response_json_schema": {"enum": ["purple rivers sing"]}}
    unlikely = config(system_instruction=system, **forced)  # words that nothing has: they come one by one
    first = "".join(chunk.text or "" for chunk in chat.send_message_stream(QUESTION, config=unlikely))
    assert first == '"purple rivers sing"'
    assert len([content for content in chat.get_history() if content.role == "model"]) > 1, "the chunks, one by one"
    answer = chat.send_message("And the home of the quiet lantern?")
    told = [{"role": "system", "content": system}, FALCON[1]]
    told += [
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And the home of the quiet lantern?"},
    ]
    prompt = post(server.url, "/tokenize", {"messages": told}).json()["count"]
    assert answer.usage_metadata.prompt_token_count == prompt, "the chunks are one message"
    assert answer.usage_metadata.cached_content_token_count > prompt - 3 * BLOCK


# -------------------------------------------------------------------- sampling


def test_every_setting_of_an_answer_is_obeyed(ask):
    def text(**fields: Any) -> types.Candidate:
        return ask.generate_content(model=MODEL, contents=QUESTION, config=config(**fields)).candidates[0]

    stopped = text(stop_sequences=["21"])
    assert (stopped.content.parts[0].text, stopped.finish_reason) == ("48", "STOP")
    assert text(max_output_tokens=1).finish_reason == "MAX_TOKENS"
    unlikely = {"temperature": 2, "max_output_tokens": 12, "top_p": 0.99, "system_instruction": None}
    assert text(**unlikely, seed=1) == text(**unlikely, seed=1)
    assert len({text(**unlikely, seed=seed).content.parts[0].text for seed in range(4)}) > 1
    assert text(temperature=2, top_k=1, seed=1).content.parts[0].text == "4821", "the SDK sends 1.0"
    long = {"response_mime_type": "application/json", "response_json_schema": LONG, "max_output_tokens": 30}
    assert text(**long, frequency_penalty=2, presence_penalty=2) != text(**long)


def test_candidates_differ_and_stream_each_for_itself(ask):
    fields = {"temperature": 2, "candidate_count": 3, "seed": 5, "max_output_tokens": 8, "system_instruction": None}
    whole = ask.generate_content(model=MODEL, contents=QUESTION, config=config(**fields))
    texts = [candidate.content.parts[0].text for candidate in whole.candidates]
    assert [candidate.index for candidate in whole.candidates] == [0, 1, 2]
    assert len(set(texts)) > 1
    streamed = ["", "", ""]
    for chunk in ask.generate_content_stream(model=MODEL, contents=QUESTION, config=config(**fields)):
        for candidate in chunk.candidates:
            streamed[candidate.index] += candidate.content.parts[0].text
        usage = chunk.usage_metadata
    assert streamed == texts
    assert usage.candidates_token_count == whole.usage_metadata.candidates_token_count


def test_log_probabilities_name_the_chosen_tokens_and_the_likeliest(ask):
    asked = config(response_logprobs=True, logprobs=2)
    [candidate] = ask.generate_content(model=MODEL, contents=QUESTION, config=asked).candidates
    chosen, top = candidate.logprobs_result.chosen_candidates, candidate.logprobs_result.top_candidates
    assert "".join(token.token for token in chosen[:-1]) == "4821"
    assert [one.candidates[0] for one in top] == chosen, "greedy"
    assert {len(one.candidates) for one in top} == {2}
    assert candidate.avg_logprobs == pytest.approx(sum(token.log_probability for token in chosen) / len(chosen))


def test_both_spellings_and_single_objects_for_lists_are_read(server):
    written = {
        "contents": {"parts": {"text": QUESTION}},
        "system_instruction": {"parts": {"text": FACTS}},
        "generation_config": {
            "temperature": 0,
            "top_k": 3.0,
            "stop_sequences": ["21"],
            "maxOutputTokens": 9,
            "thinkingConfig": {"thinking_budget": 0},
        },
        "safety_settings": [{"category": "HARM_CATEGORY_HARASSMENT", "threshold": "BLOCK_NONE"}],
        "labels": {"team": "a"},
        "store": False,
        "service_tier": "standard",
    }
    answer = generate(server.url, written).json()
    assert answer["candidates"][0]["content"]["parts"] == [{"text": "48"}]


# ---------------------------------------------------------------------- forms


class Animal(enum.Enum):
    FALCON = "falcon"
    OTTER = "otter"


class Fact(pydantic.BaseModel):
    animal: Animal
    code: Annotated[int, pydantic.Field(ge=0, le=9)] | None
    names: list[Animal] = pydantic.Field(max_length=2)


@pytest.mark.parametrize("seed", range(3))
def test_an_answer_follows_a_schema_whoever_wrote_it(ask, seed):
    wild = {"temperature": 2, "seed": seed, "response_mime_type": "application/json"}
    upper = {
        "type": "OBJECT",
        "properties": {
            "b": {"type": "STRING", "enum": ["x", "y"]},
            "a": {"type": "INTEGER", "nullable": True, "minimum": 0, "maximum": 9},
            "c": {"type": "ARRAY", "items": {"type": "BOOLEAN"}, "min_items": 1, "maxItems": "2"},
        },
        "required": ["a", "b", "c"],
        "propertyOrdering": ["a", "b", "c"],
    }
    made = ask.generate_content(model=MODEL, contents="x", config=config(**wild, response_schema=upper)).parsed
    assert list(made) == ["a", "b", "c"]
    assert made["b"] in ("x", "y")
    assert made["a"] is None or 0 <= made["a"] <= 9
    assert len(made["c"]) in (1, 2)
    plain = {**Fact.model_json_schema(), "additionalProperties": False}
    for fields in ({"response_schema": Fact}, {"response_json_schema": plain}):
        answer = ask.generate_content(model=MODEL, contents="x", config=config(**wild, **fields))
        assert answer.parsed is not None
        assert Fact.model_validate_json(answer.text).animal in Animal


def test_an_enum_is_one_of_its_texts(ask):
    wild = {"temperature": 2, "seed": 1, "response_schema": Animal}
    bare = ask.generate_content(model=MODEL, contents="x", config=config(**wild, response_mime_type="text/x.enum"))
    quoted = ask.generate_content(
        model=MODEL, contents="x", config=config(**wild, response_mime_type="application/json")
    )
    assert bare.parsed in Animal
    assert bare.text == bare.parsed.value
    assert json.loads(quoted.text) == quoted.parsed.value
    free = ask.generate_content(
        model=MODEL, contents="x", config=config(response_mime_type="application/json", max_output_tokens=4)
    )
    assert free.text.startswith("{")


# ---------------------------------------------------------- counts and models


def test_a_count_is_the_prompts_length(server, ask):
    answer = ask.generate_content(model=MODEL, contents=QUESTION, config=config(system_instruction=None))
    assert ask.count_tokens(model=MODEL, contents=QUESTION).total_tokens == answer.usage_metadata.prompt_token_count
    path = f"/v1/models/{MODEL}:countTokens"
    whole = generate(server.url, {"generateContentRequest": {"model": f"models/{MODEL}", **BODY}}, path).json()
    assert whole["totalTokens"] == generate(server.url, BODY).json()["usageMetadata"]["promptTokenCount"]
    null = generate(server.url, {"contents": BODY["contents"], "generateContentRequest": None}, path).json()
    assert null == generate(server.url, {"contents": BODY["contents"]}, path).json()
    for neither in ({}, {"contents": BODY["contents"], "generate_content_request": BODY}):
        assert generate(server.url, neither, path).status_code == 400


def test_models_are_told_to_each_client_in_its_own_words(server, ask):
    [model] = ask.list()
    assert model == ask.get(model=MODEL)
    assert (model.name, model.input_token_limit) == (f"models/{MODEL}", 8192)
    assert "generateContent" in model.supported_actions
    assert [one.id for one in client(server.url).models.list()] == [MODEL]
    assert httpx.get(f"{server.url}/v1alpha/models/{MODEL}").json()["name"] == f"models/{MODEL}"
    assert httpx.get(f"{server.url}/gemini/v1/models").json()["models"][0]["name"] == f"models/{MODEL}"


@pytest.mark.slow
@pytest.mark.alone
def test_the_time_for_an_answer_in_many_contents_is_in_proportion_to_their_number():
    content = {"role": "model", "parts": [{"text": "x" * 200}]}

    def seconds(num_contents: int) -> float:
        body = GenerateContentRequest.model_validate({"contents": [content] * num_contents})
        started = time.thread_time()
        [message] = read_chat(body, "", 0).messages
        taken = time.thread_time() - started
        assert len(message["content"]) == 200 * num_contents
        return taken

    few, many = (min(seconds(count) for _ in range(3)) for count in (1000, 32_000))
    assert many < 128 * few
