"""Cached contents with Google's official client: made, used, listed, moved and ended, by several tenants."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from threading import Event
from typing import Any

import httpx
import pytest
from google import genai
from google.genai import errors, types

from foreword.llm import LLM
from foreword.server.options import ServerConfig
from live_server import FACTS, MODEL, ServerThread, embedded_llm, tiny_server, wait_until
from server.dialects.gemini.sdk import ENDLESS, QUESTION, config, generate, google
from tiny_models import RECIPES, save_model, save_tokenizer

BLOCK = 16
GONE = "CachedContent not found (or permission denied)"
HEADERS = {"x-goog-api-key": "k"}


class Clocks:
    """The server's wall clock and the engine's clock, which a test moves on together."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def wall(self) -> float:
        return time.time() + self.ahead_s

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with embedded_llm(
        max_model_len=2048, num_gpu_blocks_override=132, kv_cache_memory_bytes=None, max_num_batched_tokens=128
    ) as llm:
        yield llm


@contextmanager
def serving(llm: LLM, **options: Any) -> Iterator[ServerThread]:
    """A server whose clocks a test can move (`server.clocks`)."""
    clocks, llm.engine.clock = Clocks(), time.monotonic
    with ServerThread(llm, ServerConfig(**options)) as server:
        server.clocks = clocks  # type: ignore[attr-defined]
        server.service.clock, llm.engine.clock = clocks.wall, clocks.monotonic
        yield server
        server.ask(lambda engine: engine.check_integrity())
        for entry in server.ask(lambda engine: engine.entries.entries()):
            server.ask(lambda engine, name=entry.name: engine.entries.drop(name))


@pytest.fixture
def server(llm: LLM) -> Iterator[ServerThread]:
    with serving(llm) as server:
        yield server


@pytest.fixture
def ask(server: ServerThread) -> Iterator[genai.Client]:
    with google(server.url) as client:
        yield client


def facts(name: str, count: int = 12) -> str:
    """A document that no other test has."""
    return "".join(f"The code of the {name} falcon {number} is 4821.\n" for number in range(count))


def make(ask: genai.Client, contents: Any = None, **fields: Any) -> types.CachedContent:
    return ask.caches.create(model=MODEL, config=types.CreateCachedContentConfig(contents=contents, **fields))


def use(ask: genai.Client, cache: types.CachedContent, contents: Any = QUESTION, **fields: Any) -> Any:
    given = {"system_instruction": None, "cached_content": cache.name, "response_logprobs": True, **fields}
    return ask.models.generate_content(model=MODEL, contents=contents, config=config(**given))


def bits(answer: Any) -> Any:
    [candidate] = answer.candidates
    return [
        (one.token_id, one.log_probability) for one in candidate.logprobs_result.chosen_candidates
    ], candidate.content.parts


def cached(answer: Any) -> int:
    return answer.usage_metadata.cached_content_token_count or 0


def whole_blocks(cache: types.CachedContent) -> int:
    return cache.usage_metadata.total_token_count // BLOCK * BLOCK


def entries(server: ServerThread) -> dict[str, int]:
    """Kept tokens of each entry."""
    return {one.name: one.num_kept_tokens for one in server.ask(lambda engine: engine.entries.entries())}


def refused(function: Any, code: int, message: str) -> None:
    with pytest.raises(errors.ClientError, match=re.escape(message)) as caught:
        function()
    assert (caught.value.code, caught.value.status) == (
        code,
        {400: "INVALID_ARGUMENT", 403: "PERMISSION_DENIED", 429: "RESOURCE_EXHAUSTED"}[code],
    )


def refused_everywhere(ask: genai.Client, name: str) -> None:
    cache = types.CachedContent(name=name)
    refused(lambda: use(ask, cache), 403, GONE)
    refused(lambda: ask.caches.get(name=name), 403, GONE)
    refused(lambda: ask.caches.update(name=name, config={"ttl": "9s"}), 403, GONE)
    refused(lambda: ask.caches.delete(name=name), 403, GONE)


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


def test_the_client_without_threads_gets_the_same(server):
    async def talk() -> None:
        async with google(server.url).aio as ask:
            wanted = types.CreateCachedContentConfig(contents=facts("red"), system_instruction=FACTS)
            cache = await ask.caches.create(model=MODEL, config=wanted)
            asked = config(system_instruction=None, cached_content=cache.name)
            answer = await ask.models.generate_content(model=MODEL, contents=QUESTION, config=asked)
            assert (answer.text, cached(answer) >= whole_blocks(cache)) == ("4821", True)
            assert [one.name async for one in await ask.caches.list()] == [cache.name]
            await ask.caches.update(name=cache.name, config={"ttl": "60s"})
            await ask.caches.delete(name=cache.name)
            with pytest.raises(errors.ClientError, match="PERMISSION_DENIED"):
                await ask.models.generate_content(model=MODEL, contents=QUESTION, config=asked)

    asyncio.run(talk())


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


def test_names_of_one_model_are_one_and_others_are_not(llm):
    with serving(llm, served_model_name=("a", "b")) as server, google(server.url) as ask:
        cache = ask.caches.create(model="a", config={"contents": facts("name")})
        assert cache.model == "models/a"
        asked = config(system_instruction=None, cached_content=cache.name)
        assert cached(ask.models.generate_content(model="b", contents=QUESTION, config=asked)) >= whole_blocks(cache)
        with pytest.raises(errors.ClientError, match="NOT_FOUND"):
            ask.caches.create(model="c", config={"contents": facts("name")})
        server.service.model_names = ("c",)  # a later start with another name
        refused(
            lambda: ask.models.generate_content(model="c", contents=QUESTION, config=asked), 400, "of 'a'; use the same"
        )


_NO_TTLS = ("5m", "-1s", "0s", "0.0s", "300", "s", "1e3s", "\u0661s")
_NO_TIMES = ("tomorrow", "2099-01-01", "2099-01-01T00:00:00", "2099-13-01T00:00:00Z", "2099-01-01T00:00:00+99:00")
_TOO_SMALL = "Cached content is too small. total_token_count=8, min_total_token_count=16"
BODY = {"model": f"models/{MODEL}", "contents": [{"parts": [{"text": facts("raw")}]}]}


@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        *(({"ttl": ttl}, "ttl", "is not a time to live") for ttl in _NO_TTLS),
        ({"ttl": "999999999999s"}, "ttl", "ends after 9999-12-31"),
        ({"ttl": "9" * 60}, "ttl", "is not a time"),
        ({"ttl": "9" * 99 + "s"}, "ttl", "at most 64 characters"),
        ({"ttl": 300}, "ttl", "valid string"),
        ({"ttl": "9s", "expireTime": "2099-01-01T00:00:00Z"}, "expireTime", "cannot be combined"),
        ({"expireTime": "2020-01-01T00:00:00Z"}, "expireTime", "has passed"),
        *(
            ({"expire_time": text}, "expireTime", "is not a time")
            for text in _NO_TIMES
        ),
        ({"contents": [{"parts": [{"text": "x"}]}]}, None, _TOO_SMALL),
        ({"contents": None}, "contents", "nothing to cache"),
        ({"contents": []}, "contents", "at least 1 item"),
        ({"contents": [{"parts": [{"inlineData": {"data": "AA=="}}]}]}, None, "inlineData is not supported"),
        ({"contents": [{"parts": [{"text": "x " * 3000}]}]}, None, "tokens"),
        ({"contents": [{"parts": [{"text": "x", "partMetadata": {"a": "\ud800"}}]}]}, None, "surrogate"),
        ({"model": None}, "model", "string"),
        ({"name": "cachedContents/mine"}, None, "name is not supported"),
        ({"kmsKeyName": "k"}, None, "kmsKeyName is not supported"),
        ({"displayName": "x" * 129}, "displayName", "at most 128"),
        ({"colour": 1}, "colour", 'Unknown name "colour": Cannot find field.'),
        ({"tools": [{"googleSearch": {}}]}, None, "googleSearch is not supported"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, None, "only allowed with functionDeclarations"),
    ],
    ids=lambda value: f"{value}"[:40] if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_cannot_be_kept_is_refused_and_leaves_nothing(server, change, field, message):
    body = json.dumps({**BODY, **change})  # with escapes, as JSON may write half of a surrogate
    given = {"content": body, "headers": {"Content-Type": "application/json"}}
    answer = httpx.post(f"{server.url}/v1beta/cachedContents", **given, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error["status"]) == (400, "INVALID_ARGUMENT")
    assert message in error["message"]
    if field is not None:
        assert error["details"][0]["fieldViolations"][0]["field"] == field
    assert httpx.get(f"{server.url}/v1beta/cachedContents").json() == {}
    assert entries(server) == {}


def test_each_tenants_number_is_bounded(llm, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkeys = ["a"]\n[bob]\nkeys = ["b"]\n')
    with serving(llm, keys_file=keys, max_cached_contents=2) as server, google(server.url, "a") as alice:
        first, _ = make(alice, facts("one")), make(alice, facts("two"))
        refused(lambda: make(alice, facts("three")), 429, "this tenant may have 2")
        with google(server.url, "b") as bob:
            make(bob, facts("one"))
        alice.caches.delete(name=first.name)
        make(alice, facts("three"))
    with serving(llm, max_cached_contents=0) as server, google(server.url) as ask:
        refused(lambda: make(ask, facts("one")), 429, "may have 0")


# --------------------------------------------------------------- lists and ends


def test_lists_come_in_pages_and_may_be_empty(server, ask):
    assert list(ask.caches.list()) == []
    assert httpx.get(f"{server.url}/v1/cachedContents").json() == {}
    made = [make(ask, facts(name)).name for name in ("first", "second", "third")]
    assert [cache.name for cache in ask.caches.list(config={"page_size": 1})] == made
    page = httpx.get(f"{server.url}/v1alpha/cachedContents?pageSize=2").json()
    ask.caches.delete(name=made[1])  # the last one of the page: the next page begins after its place
    after = httpx.get(f"{server.url}/v1/cachedContents?pageSize=1000&pageToken={page['nextPageToken']}").json()
    assert [cache["name"] for cache in after["cachedContents"]] == made[2:]
    assert "nextPageToken" not in after
    assert "contents" not in after["cachedContents"][0]
    for query in ("pageSize=x", "pageSize=-1", "pageToken=x", "pageToken=1-2", "pageToken=" + "9" * 40):
        assert httpx.get(f"{server.url}/v1/cachedContents?{query}").status_code == 400


def test_an_end_moves_when_it_is_told_to_and_not_by_use(server, ask):
    def left() -> float:
        [entry] = server.ask(lambda engine: engine.entries.entries())
        return entry.until - server.clocks.monotonic()

    cache = make(ask, facts("brown"), ttl="100s")
    assert 50 < left() <= 100
    for change, least, most in (
        ({"ttl": "600s"}, 550, 600),
        ({"ttl": "10.5s"}, 1, 10.5),
        ({"expire_time": datetime.now(UTC) + timedelta(seconds=3600)}, 3500, 3600),
    ):
        moved = ask.caches.update(name=cache.name, config=change)
        assert moved.update_time > cache.create_time == moved.create_time
        if "ttl" in change:
            assert moved.expire_time - moved.update_time == timedelta(seconds=float(change["ttl"][:-1]))
        else:
            assert moved.expire_time == change["expire_time"]
        assert least < left() <= most
    use(ask, cache)
    assert ask.caches.get(name=cache.name) == moved
    assert left() <= 3600
    server.clocks.ahead_s = 3700.0
    refused_everywhere(ask, cache.name)
    assert list(ask.caches.list()) == []
    use(ask, make(ask, facts("brown")))
    assert cache.name not in entries(server)


@pytest.mark.parametrize(
    ("query", "body", "message"),
    [
        ("", {}, "give ttl or expireTime"),
        ("", {"ttl": "9s", "displayName": "x"}, "displayName cannot change"),
        ("", {"ttl": "9s", "contents": []}, "contents cannot change"),
        ("", {"ttl": "5m"}, "is not a time to live"),
        ("", {"ttl": "9s", "expireTime": "2099-01-01T00:00:00Z"}, "cannot be combined"),
        ("", {"expireTime": "2020-01-01T00:00:00Z"}, "has passed"),
        ("", {"colour": 1}, "Unknown name"),
        ("updateMask=displayName", {"displayName": "x"}, "only ttl and expireTime can change"),
        ("updateMask=expireTime", {"ttl": "9s"}, "the body has none"),
        ("updateMask=", {"ttl": "9s"}, "only ttl and expireTime can change"),
    ],
)
def test_only_the_end_can_change(server, ask, query, body, message):
    cache = make(ask, facts("olive"))
    answer = httpx.patch(f"{server.url}/v1/{cache.name}?{query}", json=body)
    assert (answer.status_code, answer.json()["error"]["status"]) == (400, "INVALID_ARGUMENT")
    assert message in answer.json()["error"]["message"]
    assert ask.caches.get(name=cache.name) == cache
    masked = httpx.patch(f"{server.url}/v1/{cache.name}?updateMask=ttl", json={"ttl": "9s", "displayName": "x"})
    assert (masked.json()["displayName"], masked.json()["name"]) == ("", cache.name)


def test_a_deleted_content_is_gone_at_once_but_not_for_requests_that_run(server, ask):
    cache = make(ask, facts("amber"))
    body = {**ENDLESS, "cachedContent": cache.name}
    body["generationConfig"] = {**ENDLESS["generationConfig"], "maxOutputTokens": 100}
    path = f"/v1/models/{MODEL}:streamGenerateContent?alt=sse"
    with httpx.stream("POST", f"{server.url}{path}", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert cache.name in entries(server)
        assert httpx.delete(f"{server.url}/v1/{cache.name}").json() == {}
        assert entries(server) == {}
        rest = [line for line in lines if line]
    assert '"finishReason":"MAX_TOKENS"' in rest[-1].replace(" ", "")
    refused_everywhere(ask, cache.name)
    for name in ("cachedContents/" + "0" * 32, "cachedContents/x"):
        refused(lambda name=name: ask.caches.get(name=name), 403, GONE)
    assert entries(server) == {}


def test_what_ends_or_moves_while_a_request_is_on_its_way_is_not_kept_by_it(server, ask, monkeypatch):
    store, conversation = server.service.cached_contents, server.service.conversation
    change: Any = None

    async def slowly(*given: Any) -> Any:
        prompt = await conversation(*given)
        [one] = store._kept.values()
        if change == "delete":
            await store.delete(one)
            await server.service.thread.call(lambda engine: engine.entries.drop(f"cachedContents/{one.id}"))
        else:
            await store.set_end(one, store.now_us + 9 * 10**6, store.now_us)
            await server.service.thread.call(
                lambda engine: engine.entries.set_end(f"cachedContents/{one.id}", engine.clock() + 9)
            )
        return prompt

    cache = make(ask, facts("teal"))
    monkeypatch.setattr(server.service, "conversation", slowly)
    for wanted in ("move", "delete"):
        change = wanted
        assert cached(use(ask, cache)) >= whole_blocks(cache)
        ends = [entry.until for entry in server.ask(lambda engine: engine.entries.entries())]
        assert all(end <= server.clocks.monotonic() + 9 for end in ends)
    assert ends == []


def test_a_client_that_leaves_while_its_content_is_computed_leaves_nothing(server, monkeypatch):
    gate, runner = Event(), server.service.llm.engine._runner
    execute = runner.execute

    num_batches = itertools.count()

    def held(batch: Any) -> Any:
        if next(num_batches) == 1:  # the second part of the prompt
            gate.wait(60)
        return execute(batch)

    monkeypatch.setattr(runner, "execute", held)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/cachedContents", json=BODY, timeout=2)
    wait_until(lambda: server.service.cached_contents._coming and not server.service.thread.num_choices)
    gate.set()
    wait_until(lambda: not server.service.cached_contents._coming)
    assert entries(server) == {}
    assert httpx.get(f"{server.url}/v1/cachedContents").json() == {}


@pytest.mark.parametrize("options", [{"max_pinned_share": 0.0}, {"enable_prefix_caching": False}])
def test_an_engine_that_keeps_nothing_serves_them_all_the_same(options):
    with embedded_llm(**options) as llm, ServerThread(llm, ServerConfig()) as server, google(server.url) as ask:
        cache = make(ask, facts("gone"))
        assert (cached(use(ask, cache)) > 0) == ("max_pinned_share" in options)
        ask.caches.update(name=cache.name, config={"ttl": "9s"})
        ask.caches.delete(name=cache.name)
        refused_everywhere(ask, cache.name)


# ------------------------------------------------------------ tenants, pressure


def test_a_tenant_neither_sees_nor_moves_nor_ends_nor_uses_anothers(llm, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkeys = ["a", "a2"]\n[bob]\nkeys = ["b"]\n')
    with (
        serving(llm, keys_file=keys) as server,
        google(server.url, "a") as alice,
        google(server.url, "a2") as same,
        google(server.url, "b") as bob,
    ):
        cache, others = make(alice, facts("mine")), make(bob, facts("mine"))
        refused_everywhere(bob, cache.name)
        assert [one.name for one in bob.caches.list()] == [others.name]
        assert same.caches.get(name=cache.name) == cache
        assert cached(use(same, cache)) >= whole_blocks(cache)
        own = server.ask(lambda engine: engine.entries.entries())
        assert {entry.owner: entry.name for entry in own} == {"alice": cache.name, "bob": others.name}
        bob.caches.delete(name=others.name)
        assert cached(use(alice, cache)) >= whole_blocks(cache)
        with google(server.url, "c") as nobody:
            for function in (lambda: make(nobody, facts("mine")), lambda: list(nobody.caches.list())):
                with pytest.raises(errors.ClientError, match="UNAUTHENTICATED"):
                    function()


def flood(ask: genai.Client, name: str, requests: int, lines: int) -> None:
    for number in range(requests):
        text = facts(f"{name} {number}", lines)
        ask.models.generate_content(model=MODEL, contents=text, config={"max_output_tokens": 1})


def test_kv_outlives_a_flood_and_what_running_requests_needed_is_computed_again(server, ask):
    cache = make(ask, facts("deep", 30))
    total = cache.usage_metadata.total_token_count
    first = use(ask, cache)
    flood(ask, "flood", 6, 40)  # 2.5 times the pool
    assert entries(server) == {cache.name: total}
    after = use(ask, cache)
    assert cached(after) >= whole_blocks(cache)
    flood(ask, "long", 1, 112)  # needs nearly all of the pool
    kept = entries(server)[cache.name]
    assert kept < total
    again = use(ask, cache)
    assert cached(again) <= kept + BLOCK, "no more is claimed than was found"
    assert entries(server) == {cache.name: total}
    once_more = use(ask, cache)
    assert cached(once_more) >= whole_blocks(cache)
    assert bits(first) == bits(after) == bits(again) == bits(once_more)
    ask.caches.delete(name=cache.name)
    flood(ask, "other flood", 6, 40)
    assert cached(use(ask, make(ask, facts("deep", 30)))) >= whole_blocks(cache)


def test_random_calls_agree_with_a_plain_model(llm, tmp_path):
    """Contents are made, used, moved, ended and expire; entries of the engine are those of live contents."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkeys = ["a"]\n[bob]\nkeys = ["b"]\n')
    chance = random.Random(5)
    expected: dict[str, tuple[int, int, float]] = {}
    texts: dict[int, Any] = {}
    with serving(llm, keys_file=keys) as server, google(server.url, "a") as alice, google(server.url, "b") as bob:
        clients = (alice, bob)
        for step in range(70):
            who, ttl_s = chance.randrange(2), chance.choice((50, 500, 5000))
            own = [name for name, (owner, _, _) in expected.items() if owner == who]
            name = chance.choice(own) if own else ""
            match chance.randrange(7):
                case 0 | 1:
                    number = chance.randrange(3)
                    name = make(clients[who], facts(f"random {number}"), ttl=f"{ttl_s}s").name
                    expected[name] = (who, number, server.clocks.wall() + ttl_s)
                case 2 | 3 if own:
                    answer = use(clients[who], types.CachedContent(name=name))
                    number = expected[name][1]
                    assert bits(answer) == texts.setdefault(number, bits(answer)), step
                case 4 if own:
                    clients[who].caches.update(name=name, config={"ttl": f"{ttl_s}s"})
                    expected[name] = (*expected[name][:2], server.clocks.wall() + ttl_s)
                case 5 if own:
                    clients[who].caches.delete(name=name)
                    del expected[name]
                    refused(lambda name=name, who=who: use(clients[who], types.CachedContent(name=name)), 403, GONE)
                case 6:
                    server.clocks.ahead_s += 45.0 if chance.random() < 0.7 else 600.0
            now = server.clocks.wall()
            expected = {name: one for name, one in expected.items() if one[2] > now}
            for who in range(2):
                listed = {cache.name for cache in clients[who].caches.list()}
                assert listed == {name for name, one in expected.items() if one[0] == who}, step
            server.ask(lambda engine: engine.manager.expire_pins(engine.clock()))
            assert entries(server).keys() <= expected.keys(), step
        assert len(texts) == 3
