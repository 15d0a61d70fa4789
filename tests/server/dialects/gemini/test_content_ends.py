"""Cached contents of several tenants: listed, moved, ended, evicted."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from threading import Event
from typing import Any

import httpx
import pytest
from google import genai
from google.genai import errors, types

from doors import runner_of
from foreword.llm import LLM
from foreword.server.options import ServerConfig
from live_server import MODEL, ServerThread, embedded_llm, wait_until
from server.dialects.gemini.content_calls import (
    BLOCK,
    BODY,
    GONE,
    bits,
    cached,
    entries,
    facts,
    make,
    refused,
    refused_everywhere,
    serving,
    use,
    whole_blocks,
)
from server.dialects.gemini.sdk import ENDLESS, google


@pytest.fixture
def server(small_llm: LLM) -> Iterator[ServerThread]:
    with serving(small_llm) as server:
        yield server


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


_NO_CHANGES = [
    ("", {}, "give one of them"),
    ("", {"ttl": "9s", "displayName": "x"}, "displayName cannot change"),
    ("", {"ttl": "9s", "contents": []}, "contents cannot change"),
    ("", {"ttl": "5m"}, "is not a time to live"),
    ("", {"ttl": "9s", "expireTime": "2099-01-01T00:00:00Z"}, "cannot be combined"),
    ("", {"expireTime": "2020-01-01T00:00:00Z"}, "has passed"),
    ("", {"colour": 1}, "Unknown name"),
    ("updateMask=displayName", {"displayName": "x"}, "only ttl and expireTime can change"),
    ("updateMask=expireTime", {"ttl": "9s"}, "the body has none"),
    ("updateMask=", {"ttl": "9s"}, "only ttl and expireTime can change"),
]


def test_only_the_end_can_change(server, ask):
    cache = make(ask, facts("olive"))
    for query, body, message in _NO_CHANGES:
        answer = httpx.patch(f"{server.url}/v1/{cache.name}?{query}", json=body)
        assert (answer.status_code, answer.json()["error"]["status"]) == (400, "INVALID_ARGUMENT"), (query, body)
        assert message in answer.json()["error"]["message"], (query, body)
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
        [one] = store._contents.values()
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
    gate, runner = Event(), runner_of(server.service.llm.engine)
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


def test_a_content_that_an_earlier_version_kept_for_too_long_is_listed(server, ask):
    cache, store = make(ask, facts("opal")), server.service.cached_contents
    [content] = store._contents.values()
    server.start(store.set_end(content, 10**18, store.now_us)).result(60)
    [listed] = httpx.get(f"{server.url}/v1/cachedContents").json()["cachedContents"]
    assert (listed["name"], listed["expireTime"]) == (cache.name, "9999-12-31T23:59:59.000000Z")


def test_a_client_that_leaves_while_its_content_is_stored_leaves_the_content_and_its_entry(server):
    store = server.service.cached_contents
    server.start(store._writing.acquire()).result(60)  # a slow disk
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/cachedContents", json=BODY, timeout=2)
    wait_until(lambda: not store._coming)
    assert len(entries(server)) == 1

    async def release() -> None:
        store._writing.release()

    server.start(release()).result(60)
    wait_until(lambda: store.num_bytes)
    [content] = httpx.get(f"{server.url}/v1/cachedContents").json()["cachedContents"]
    assert list(entries(server)) == [content["name"]]
    assert httpx.delete(f"{server.url}/v1/{content['name']}").json() == {}
    assert entries(server) == {}


@pytest.mark.parametrize("options", [{"max_pinned_share": 0.0}, {"enable_prefix_caching": False}])
def test_an_engine_that_keeps_nothing_serves_them_all_the_same(options):
    with embedded_llm(**options) as llm, ServerThread(llm, ServerConfig()) as server, google(server.url) as ask:
        cache = make(ask, facts("gone"))
        assert (cached(use(ask, cache)) > 0) == ("max_pinned_share" in options)
        ask.caches.update(name=cache.name, config={"ttl": "9s"})
        ask.caches.delete(name=cache.name)
        refused_everywhere(ask, cache.name)


# ------------------------------------------------------------ tenants, pressure


def test_a_tenant_neither_sees_nor_moves_nor_ends_nor_uses_anothers(small_llm, tmp_path):
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkeys = ["a", "a2"]\n[bob]\nkeys = ["b"]\n')
    with (
        serving(small_llm, keys_file=keys) as server,
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


def test_random_calls_agree_with_a_plain_model(small_llm, tmp_path):
    """Contents are made, used, moved, ended and expire; entries of the engine are those of live contents."""
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkeys = ["a"]\n[bob]\nkeys = ["b"]\n')
    chance = random.Random(5)
    expected: dict[str, tuple[int, int, float]] = {}
    texts: dict[int, Any] = {}
    with serving(small_llm, keys_file=keys) as server, google(server.url, "a") as alice, google(server.url, "b") as bob:
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
