"""/v1/cache/entries: prefixes are kept on request, and each tenant sees and ends its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from foreword.server.options import ServerConfig
from live_server import MODEL, ServerThread, document, embedded_llm

OPERATOR = "operator"
NUM_BLOCKS = 96


class World(ServerThread):
    """A server for two tenants and an operator, whose engine's time the tests move."""

    now = 1e9  # after the real clock, which the engine read before the tests set it

    def call(self, method: str, path: str = "", body: Any = None, key: str = "alice") -> httpx.Response:
        url = f"{self.url}/v1/cache/entries{path}"
        return httpx.request(method, url, json=body, headers={"authorization": f"Bearer {key}"}, timeout=120)

    def create(self, key: str = "alice", **body: Any) -> dict[str, Any]:
        answer = self.call("POST", "", body, key)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def listed(self, key: str = "alice") -> list[dict[str, Any]]:
        return self.call("GET", key=key).json()["data"]

    def cached(self, prompt: str, key: str = "alice") -> int:
        answer = httpx.post(
            f"{self.url}/v1/cache/explain", json={"prompt": prompt}, headers={"authorization": f"Bearer {key}"}
        )
        return answer.json()["hit_tokens"]

    def run(self, prompt: str, key: str = "alice") -> None:
        body = {"prompt": prompt, "max_tokens": 1, "model": MODEL}
        headers = {"authorization": f"Bearer {key}"}
        assert httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=120).status_code == 200

    def flood(self) -> None:
        for number in range(4):
            self.now += 1
            self.run(document(f"flood {self.now} {number}", 30), "bob")


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text('[alice]\nkeys = ["alice"]\n\n[bob]\nkeys = ["bob"]\n')
    config = ServerConfig(keys_file=keys, operator_key=OPERATOR)
    with embedded_llm(num_gpu_blocks_override=NUM_BLOCKS, eviction_policy="lru") as llm, World(llm, config) as server:
        llm.engine.clock = lambda: server.now
        yield server


@pytest.fixture(autouse=True)
def _a_new_day(world) -> Iterator[None]:
    yield
    world.now += 400 * 86_400


def test_a_text_is_kept_under_a_flood_until_its_time_and_then_goes(world):
    text = document("kept")
    entry = world.create(prompt=text, ttl_s=60)
    assert entry["object"] == "cache.entry"
    assert (entry["source"], entry["tenant"], entry["refresh_s"]) == ("pin", "alice", None)
    assert (entry["is_whole"], entry["expires_in_s"]) == (True, 60.0)
    assert entry["tokens"] >= entry["kept_tokens"] > 100
    world.flood()
    assert world.cached(text) >= entry["kept_tokens"] // 16 * 16
    assert [one["id"] for one in world.listed()] == [entry["id"]]
    world.run(text + " again")
    world.now += 61
    assert world.listed() == [], "uses do not keep it longer"
    world.flood()
    assert world.cached(text) == 0


def test_conversations_and_token_ids_are_kept_too(world):
    messages = [{"role": "system", "content": document("a conversation")}, {"role": "user", "content": "?"}]
    assert world.create(messages=messages, add_generation_prompt=False)["kept_tokens"] > 100
    assert world.create(prompt=list(range(20, 60)))["kept_tokens"] >= 32
    assert len(world.listed()) == 2


def test_an_entry_ends_sooner_later_or_now_and_another_with_its_head_stays(world):
    head = document("head")
    short, long = world.create(prompt=head), world.create(prompt=head + document("tail", 4))
    assert world.call("PATCH", f"/{short['id']}", {"ttl_s": 3000}).json()["expires_in_s"] == 3000
    assert world.call("PATCH", f"/{short['id']}", {"ttl_s": 10}).json()["expires_in_s"] == 10
    assert world.call("DELETE", f"/{long['id']}").json() == {
        "id": long["id"],
        "object": "cache.entry",
        "deleted": True,
    }
    assert [one["id"] for one in world.listed()] == [short["id"]]
    world.flood()
    assert short["kept_tokens"] // 16 * 16 <= world.cached(head + document("tail", 4)) < long["kept_tokens"] - 16
    assert world.call("DELETE", f"/{long['id']}").status_code == 404


def test_an_entry_whose_new_end_is_over_at_once_is_changed_and_gone(world):
    entry = world.create(prompt=document("brief"), ttl_s=60)
    changed = world.call("PATCH", f"/{entry['id']}", {"ttl_s": 5e-324})
    assert (changed.status_code, changed.json()["expires_in_s"]) == (200, 0.0)
    assert world.call("PATCH", f"/{entry['id']}", {"ttl_s": 60}).status_code == 404


def test_tenants_cannot_see_change_or_end_each_others_entries(world):
    text = document("a secret")
    mine = world.create(prompt=text)
    theirs = world.create("bob", prompt=text)
    assert mine["id"] != theirs["id"], "equal texts do not show that another keeps them"
    assert theirs["cached_tokens"] == 0
    assert [one["id"] for one in world.listed("bob")] == [theirs["id"]]
    for method, body in (("PATCH", {"ttl_s": 1}), ("DELETE", None)):
        gone = world.call(method, f"/{mine['id']}", body, "bob")
        unknown = world.call(method, f"/{'0' * 32}", body, "bob")
        assert (gone.status_code, gone.json()["error"]["code"]) == (404, "not_found")
        assert gone.text.replace(mine["id"], "0" * 32) == unknown.text
    assert [one["expires_in_s"] for one in world.listed()] == [300.0]
    assert {one["tenant"] for one in world.listed(OPERATOR)} == {"alice", "bob"}
    assert world.call("DELETE", f"/{mine['id']}", key=OPERATOR).status_code == 200
    assert world.listed() == []
    assert world.call("GET", key="nobody").status_code == 401


def test_broken_entries_are_listed_and_counted(world):
    entry = world.create(prompt=document("broken", 30))
    assert entry["kept_tokens"] < entry["tokens"], "a quarter of the pool is a tenant's"
    assert not entry["is_whole"]
    (listed,) = world.listed()
    assert (listed["is_whole"], listed["kept_tokens"]) == (False, entry["kept_tokens"])
    headers = {"authorization": f"Bearer {OPERATOR}"}
    text = httpx.get(f"{world.url}/metrics", headers=headers).text
    for name, value in (
        ("cache_entries", 1.0),
        ("cache_entries_broken", 1.0),
        ("cache_entry_tokens", float(entry["kept_tokens"])),
    ):
        assert f'foreword_{name}{{model_name="{MODEL}",source="pin"}} {value}' in text
    assert f'foreword_cache_entries{{model_name="{MODEL}",source="breakpoint"}} 0.0' in text
    running = document("needs everything", 68)  # requests take the blocks of entries if no other is left
    world.run(running, "bob")
    broken = next(
        line
        for line in httpx.get(f"{world.url}/metrics", headers=headers).text.splitlines()
        if line.startswith("foreword_cache_entry_blocks_broken_total")
    )
    assert float(broken.split()[-1]) > 0
    (listed,) = world.listed()
    assert listed["kept_tokens"] < entry["kept_tokens"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, None),
        ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, None),
        ({"prompt": "x", "ttl_s": 0}, "ttl_s"),
        ({"prompt": "x", "ttl_s": -1}, "ttl_s"),
        ({"prompt": "x", "ttl_s": 1e300}, "ttl_s"),
        ({"prompt": "x", "ttl_s": "5m"}, "ttl_s"),
        ({"prompt": "x", "ttl": 5}, "ttl"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ""}, None),
    ],
)
def test_wrong_wishes_are_refused_by_name(world, body, param):
    answer = world.call("POST", "", body)
    assert answer.status_code == 400, answer.text
    if param is not None:
        assert answer.json()["error"]["param"].startswith(param)
    assert world.listed() == []


def test_a_server_without_pins_says_so():
    with embedded_llm(max_pinned_share=0.0) as llm, ServerThread(llm, ServerConfig()) as server:
        url = f"{server.url}/v1/cache/entries"
        answer = httpx.post(url, json={"prompt": "x"})
        assert (answer.status_code, "max_pinned_share" in answer.text) == (400, True)
        assert httpx.get(url).json() == {"object": "list", "data": []}
        assert httpx.delete(f"{url}/x").status_code == 404
