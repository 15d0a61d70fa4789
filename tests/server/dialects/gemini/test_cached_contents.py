"""Cached contents with Google's official client: made, used, refused."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import httpx
import pytest
from google.genai import errors, types

from foreword.llm import LLM
from foreword.server.access.tenants import Tenant
from live_server import FACTS, MODEL, ServerThread, tiny_server
from server.dialects.gemini.content_calls import (
    BLOCK,
    BODY,
    bits,
    cached,
    entries,
    facts,
    make,
    refused,
    serving,
    use,
    whole_blocks,
)
from server.dialects.gemini.sdk import QUESTION, config, generate, google
from tiny_models import RECIPES, save_model, save_tokenizer


@pytest.fixture
def server(small_llm: LLM) -> Iterator[ServerThread]:
    with serving(small_llm) as server:
        yield server


# ----------------------------------------------------------------- made and used


def test_a_cached_content_is_described_without_what_it_holds(server, ask):
    cache = make(ask, [facts("blue")], system_instruction=FACTS, ttl="300s", display_name="d")
    assert re.fullmatch(r"cachedContents/[a-z0-9]{16,}", cache.name)
    assert (cache.model, cache.display_name) == (f"models/{MODEL}", "d")
    assert cache.expire_time - cache.create_time == timedelta(seconds=300)
    assert cache.update_time == cache.create_time
    assert ask.caches.get(name=cache.name) == cache
    raw = httpx.get(f"{server.url}/v1/{cache.name}").json()
    assert set(raw) == {"name", "model", "displayName", "createTime", "updateTime", "expireTime", "usageMetadata"}
    plain = make(ask, facts("blue"))
    assert plain.expire_time - plain.create_time == timedelta(hours=1)
    assert plain.display_name == ""
    assert "createCachedContent" in ask.models.get(model=MODEL).supported_actions


def test_an_answer_from_a_cached_content_has_the_bits_of_the_whole_prompt(server, ask):
    document = facts("green")
    apart = types.HttpOptions(extra_body={"cache_salt": "apart"})
    both = [types.Content(role="user", parts=[types.Part(text=text)]) for text in (document, QUESTION)]
    whole = ask.models.generate_content(
        model=MODEL, contents=both, config=config(response_logprobs=True, http_options=apart)
    )
    cache = make(ask, document, system_instruction=FACTS)
    answer = use(ask, cache)
    assert bits(answer) == bits(whole)
    assert cached(whole) == 0
    assert whole_blocks(cache) <= cached(answer) <= cache.usage_metadata.total_token_count
    usage = answer.usage_metadata
    assert usage.prompt_token_count == whole.usage_metadata.prompt_token_count
    assert usage.total_token_count == usage.prompt_token_count + usage.candidates_token_count
    chunks = list(
        ask.models.generate_content_stream(
            model=MODEL, contents=QUESTION, config=config(system_instruction=None, cached_content=cache.name)
        )
    )
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert chunks[-1].usage_metadata.cached_content_token_count >= whole_blocks(cache)
    body = {"contents": [{"parts": [{"text": QUESTION}]}], "cachedContent": cache.name}
    counted = generate(server.url, {"generateContentRequest": body}, f"/v1/models/{MODEL}:countTokens").json()
    assert counted["totalTokens"] == usage.prompt_token_count
    assert counted["cachedContentTokenCount"] == cache.usage_metadata.total_token_count


def test_conversations_go_on_from_a_cached_one(ask):
    """A cached content may hold turns of the model; chats that begin with it hit more and more."""
    told = [
        types.Content(role="user", parts=[types.Part(text=facts("grey"))]),
        types.Content(role="model", parts=[types.Part(text="I see.")]),
    ]
    cache = make(ask, told, system_instruction=FACTS)
    chat = ask.chats.create(model=MODEL, config=config(system_instruction=None, cached_content=cache.name))
    first, second = chat.send_message(QUESTION), chat.send_message(QUESTION)
    assert whole_blocks(cache) <= cached(first) < cached(second)
    assert second.usage_metadata.prompt_token_count > first.usage_metadata.prompt_token_count


@pytest.mark.parametrize(
    "fields", [{"system_instruction": facts("lone")}, {"tools": "lookup"}], ids=["system", "tools"]
)
def test_a_system_instruction_or_tools_alone_can_be_cached_and_rule_the_answer(ask, fields):
    if "tools" in fields:
        lookup = types.FunctionDeclaration(
            name="lookup",
            description=facts("tool"),
            parameters_json_schema={
                "type": "object",
                "properties": {"key": {"enum": ["a"]}},
                "required": ["key"],
                "additionalProperties": False,
            },
        )
        forced = types.ToolConfig(function_calling_config=types.FunctionCallingConfig(mode="ANY"))
        fields = {"tools": [types.Tool(function_declarations=[lookup])], "tool_config": forced}
    cache = make(ask, **fields)
    answer = use(ask, cache, response_logprobs=None)
    assert cached(answer) >= whole_blocks(cache) > 3 * BLOCK
    if "tools" in fields:
        assert [(call.name, call.args) for call in answer.function_calls] == [("lookup", {"key": "a"})]


ONE_BY_ONE = (
    "{% for message in messages %}{% if loop.index0 and message.role == messages[loop.index0 - 1].role %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "[{{ message.role }}]{{ message.content }}[end]{% endfor %}{% if add_generation_prompt %}[answer]{% endif %}"
)


def test_a_template_that_wants_an_answer_after_each_question_gets_one_question(tmp_path):
    with tiny_server(tmp_path, ONE_BY_ONE) as server:
        document = "".join(f"Line {number} of it.\n" for number in range(30))
        body = {"model": "models/foreword-demo", "contents": [{"parts": [{"text": document}]}]}
        cache = generate(server.url, body, "/v1/cachedContents").json()
        asked = {"contents": [{"parts": [{"text": "and so?"}]}], "generationConfig": {"maxOutputTokens": 2}}
        usage = generate(server.url, {**asked, "cachedContent": cache["name"]}).json()["usageMetadata"]
        total = cache["usageMetadata"]["totalTokenCount"]
        assert usage["cachedContentTokenCount"] >= total // BLOCK * BLOCK > 3 * BLOCK
        joined = [*body["contents"], *asked["contents"]]
        whole = generate(server.url, {**asked, "contents": joined}).json()["usageMetadata"]
        assert whole["promptTokenCount"] == usage["promptTokenCount"]


def test_recurrent_states_at_the_end_of_a_content_are_kept(tmp_path):
    save_model(tmp_path, RECIPES["qwen3_next"])
    save_tokenizer(tmp_path, chat_template=ONE_BY_ONE)
    document = "".join(f"Line {number} of it.\n" for number in range(30))
    with (
        LLM(str(tmp_path), kv_cache_memory_bytes=16 * 2**20, self_check=False) as llm,
        serving(llm) as server,
        google(server.url) as ask,
    ):
        cache = make(ask, [document, "And now?"], system_instruction="Be brief.")
        total = cache.usage_metadata.total_token_count
        answers = [use(ask, cache, max_output_tokens=3) for _ in range(2)]
        apart = types.HttpOptions(extra_body={"cache_salt": "apart"})
        parts = [types.Content(role="user", parts=[types.Part(text=text) for text in (document, "And now?")])]
        parts.append(types.Content(role="user", parts=[types.Part(text=QUESTION)]))
        fields = {"system_instruction": "Be brief.", "max_output_tokens": 3, "response_logprobs": True}
        whole = ask.models.generate_content(model=MODEL, contents=parts, config=config(**fields, http_options=apart))
        assert cached(whole) == 0
        assert bits(whole) == bits(answers[0]) == bits(answers[1])
        size, interval = llm.layout.block_size, llm.engine.state_interval
        assert interval > total, "no state would be saved there without the mark"
        assert cached(answers[0]) == total // size * size


def test_a_salt_belongs_to_the_cached_content(server, ask):
    salted = {"http_options": types.HttpOptions(extra_body={"cache_salt": "s"})}
    cache = make(ask, facts("salt"), **salted)
    assert cached(use(ask, cache)) >= whole_blocks(cache)
    assert cached(use(ask, cache, **salted)) >= whole_blocks(cache)
    other = {"http_options": types.HttpOptions(extra_body={"cache_salt": "t"})}
    refused(lambda: use(ask, cache, **other), 400, "cache_salt differs")


# -------------------------------------------------------------------- refusals


def test_what_belongs_into_the_cached_content_is_refused_beside_it(ask):
    cache = make(ask, facts("pink"), system_instruction=FACTS)
    tool = types.Tool(function_declarations=[types.FunctionDeclaration(name="f")])
    none = types.ToolConfig(function_calling_config=types.FunctionCallingConfig(mode="NONE"))
    for fields in ({"system_instruction": FACTS}, {"tools": [tool]}, {"tool_config": none}):
        refused(
            lambda fields=fields: use(ask, cache, **fields),
            400,
            "CachedContent can not be used with GenerateContent request setting system_instruction, tools or "
            "tool_config.",
        )


def test_names_of_one_model_are_one_and_others_are_not(small_llm):
    with serving(small_llm, served_model_name=("a", "b")) as server, google(server.url) as ask:
        cache = ask.caches.create(model="a", config={"contents": facts("name")})
        assert cache.model == "models/a"
        asked = config(system_instruction=None, cached_content=cache.name)
        assert cached(ask.models.generate_content(model="b", contents=QUESTION, config=asked)) >= whole_blocks(cache)
        with pytest.raises(errors.ClientError, match="NOT_FOUND"):
            ask.caches.create(model="c", config={"contents": facts("name")})
        server.service._model_names = ("c",)  # a later start with another name
        refused(
            lambda: ask.models.generate_content(model="c", contents=QUESTION, config=asked), 400, "of 'a'; use the same"
        )


_NO_TTLS = ("5m", "-1s", "0s", "0.0s", "300", "s", "1e3s", "\u0661s")
_NO_TIMES = ("tomorrow", "2099-01-01", "2099-01-01T00:00:00", "2099-13-01T00:00:00Z", "2099-01-01T00:00:00+99:00")
_TOO_SMALL = "Cached content is too small. total_token_count=8, min_total_token_count=16"


_NOT_KEPT = [
    *(({"ttl": ttl}, "ttl", "is not a time to live") for ttl in _NO_TTLS),
    ({"ttl": "999999999999s"}, "ttl", "ends after 9999-12-31"),
    ({"ttl": "9" * 60}, "ttl", "is not a time"),
    ({"ttl": "9" * 99 + "s"}, "ttl", "at most 64 characters"),
    ({"ttl": 300}, "ttl", "valid string"),
    ({"ttl": "9s", "expireTime": "2099-01-01T00:00:00Z"}, "expireTime", "cannot be combined"),
    ({"expireTime": "2020-01-01T00:00:00Z"}, "expireTime", "has passed"),
    ({"expireTime": "9999-12-31T23:59:59-23:59"}, "expireTime", "is after 9999-12-31"),
    *(({"expire_time": text}, "expireTime", "is not a time") for text in _NO_TIMES),
    ({"contents": [{"parts": [{"text": "x"}]}]}, None, _TOO_SMALL),
    ({"contents": None}, "contents", "nothing to cache"),
    ({"contents": []}, "contents", "at least 1 item"),
    ({"contents": [{"parts": [{"inlineData": {"data": "AA==", "mimeType": "image/png"}}]}]}, None, "no images"),
    ({"contents": [{"parts": [{"text": "x " * 3000}]}]}, None, "tokens"),
    ({"contents": [{"parts": [{"text": "x", "partMetadata": {"a": "\ud800"}}]}]}, None, "surrogate"),
    ({"model": None}, "model", "string"),
    ({"name": "cachedContents/mine"}, None, "name is not supported"),
    ({"kmsKeyName": "k"}, None, "kmsKeyName is not supported"),
    ({"displayName": "x" * 129}, "displayName", "at most 128"),
    ({"colour": 1}, "colour", 'Unknown name "colour": Cannot find field.'),
    ({"tools": [{"googleSearch": {}}]}, None, "googleSearch is not supported"),
    ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, None, "only allowed with functionDeclarations"),
]


def test_what_cannot_be_kept_is_refused_and_leaves_nothing(server):
    for change, field, message in _NOT_KEPT:
        body = json.dumps({**BODY, **change})  # with escapes, as JSON may write half of a surrogate
        given = {"content": body, "headers": {"Content-Type": "application/json"}}
        answer = httpx.post(f"{server.url}/v1beta/cachedContents", **given, timeout=60)
        error = answer.json()["error"]
        assert (answer.status_code, error["status"]) == (400, "INVALID_ARGUMENT"), change
        assert message in error["message"], change
        if field is not None:
            assert error["details"][0]["fieldViolations"][0]["field"] == field, change
        assert httpx.get(f"{server.url}/v1beta/cachedContents").json() == {}, change
        assert entries(server) == {}, change


def test_a_content_with_a_field_of_a_newer_version_is_refused_with_a_remedy(server, ask):
    cache = make(ask, facts("blue"))
    contents, name = server.service.cached_contents, cache.name.removeprefix("cachedContents/")
    kept = contents.now(Tenant("default"), name)
    asyncio.run(contents.add(replace(kept, source=b'{"newField": 1}')))
    with pytest.raises(
        errors.ClientError, match=f"{name}.*with newField by a newer version.*update the server"
    ) as caught:
        use(ask, cache)
    assert caught.value.code == 409
    assert not server.ask(lambda engine: engine.has_unfinished_requests())


def test_each_tenants_number_is_bounded(small_llm, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkeys = ["a"]\n[bob]\nkeys = ["b"]\n')
    with serving(small_llm, keys_file=keys, max_cached_contents=2) as server, google(server.url, "a") as alice:
        first, _ = make(alice, facts("one")), make(alice, facts("two"))
        refused(lambda: make(alice, facts("three")), 429, "this tenant may have 2")
        with google(server.url, "b") as bob:
            make(bob, facts("one"))
        alice.caches.delete(name=first.name)
        make(alice, facts("three"))
    with serving(small_llm, max_cached_contents=0) as server, google(server.url) as ask:
        refused(lambda: make(ask, facts("one")), 429, "may have 0")
