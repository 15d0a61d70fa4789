"""Sessions over HTTP: every dialect names them, each tenant sees and closes its own, and hints act on them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import anthropic
import httpx
import numpy as np
import ollama
import openai
import pytest
from google import genai

from doors import num_given_up, pool_of
from foreword.cache import CacheEntry
from foreword.engine import Prompt
from foreword.request import Links
from foreword.server import records
from foreword.server.api_errors import too_busy
from foreword.server.hints import Hints, KvHints
from foreword.server.options import ServerConfig
from foreword.server.records import Records, RequestRecord
from live_server import MODEL, ServerThread, document, embedded_llm, wait_until

OPERATOR, NUM_BLOCKS = "operator", 96


class World(ServerThread):
    """A server for two tenants and an operator."""

    def call(self, method: str, path: str, body: Any = None, key: str = "alice", **headers: str) -> httpx.Response:
        sent = {"authorization": f"Bearer {key}", **{name.replace("_", "-"): value for name, value in headers.items()}}
        return httpx.request(method, f"{self.url}{path}", json=body, headers=sent, timeout=120)

    def complete(
        self, prompt: str | list[int], key: str = "alice", headers: dict[str, str] | None = None, **fields: Any
    ) -> Any:
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0, **fields}
        answer = self.call("POST", "/v1/completions", body, key, **(headers or {}))
        assert answer.status_code == 200, answer.text
        return answer.json()

    def sessions(self, key: str = "alice") -> dict[str, Any]:
        return {one["id"]: one for one in self.call("GET", "/v1/cache/sessions", key=key).json()["data"]}

    def end(self, session_id: str, key: str = "alice") -> httpx.Response:
        return self.call("DELETE", f"/v1/cache/sessions/{quote(session_id, safe='')}", key=key)

    def cached(self, prompt: str, key: str = "alice") -> int:
        return int(self.call("POST", "/v1/cache/explain", {"prompt": prompt}, key).json()["hit_tokens"])


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text('[alice]\nkeys = ["alice"]\n\n[bob]\nkeys = ["bob"]\n')
    config = ServerConfig(keys_file=keys, operator_key=OPERATOR)
    with embedded_llm(num_gpu_blocks_override=NUM_BLOCKS, eviction_policy="lru") as llm, World(llm, config) as server:
        yield server
        server.ask(lambda engine: engine.check_integrity())


def ask_openai(url: str, headers: dict[str, str], **fields: Any) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="alice", default_headers=headers, max_retries=0)
    client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "a"}], max_tokens=1, extra_body=fields
    )
    client.responses.create(model=MODEL, input="a", max_output_tokens=1, extra_body=fields)
    client.completions.create(model=MODEL, prompt="a", max_tokens=1, extra_body=fields)


def ask_anthropic(url: str, headers: dict[str, str], **fields: Any) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="alice", default_headers=headers, max_retries=0)
    metadata = {"metadata": fields.pop("metadata")} if "metadata" in fields else {}
    messages = [{"role": "user", "content": "a"}]
    client.messages.create(model=MODEL, max_tokens=1, messages=messages, extra_body=fields, **metadata)


def ask_gemini(url: str, headers: dict[str, str], **fields: Any) -> None:
    options = genai.types.HttpOptions(base_url=url, headers=headers, extra_body=fields or None)
    client = genai.Client(api_key="alice", http_options=options)
    client.models.generate_content(model=MODEL, contents="a", config={"max_output_tokens": 1})


def ask_ollama(url: str, headers: dict[str, str]) -> None:
    client = ollama.Client(host=url, headers={"authorization": "Bearer alice", **headers})
    client.chat(model=MODEL, messages=[{"role": "user", "content": "a"}], options={"num_predict": 1})


def test_official_clients_of_all_dialects_name_their_session_in_a_header(world):
    headers = {"X-Session-ID": "in a header"}
    for ask, num_requests in ((ask_openai, 3), (ask_anthropic, 4), (ask_gemini, 5), (ask_ollama, 6)):
        ask(world.url, headers)
        assert world.sessions()["in a header"]["requests"] == num_requests, ask.__name__
    for value in ("ünïcode".encode(), "ünïcode".encode("latin-1")):
        sent = {"authorization": "Bearer alice", "x-session-id": value}
        body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
        assert httpx.post(f"{world.url}/v1/completions", json=body, headers=sent, timeout=60).status_code == 200
    assert world.sessions()["ünïcode"]["requests"] == 2


def test_a_field_goes_before_a_header_and_a_header_before_what_else_names_a_session(world):
    header = {"X-Session-ID": "the header"}
    ask_openai(world.url, header, session_id="the field", prompt_cache_key="the key")
    ask_anthropic(world.url, header, session_id="the field")
    ask_gemini(world.url, header, sessionId="the field")
    body = {"model": MODEL, "messages": [{"role": "user", "content": "a"}], "session_id": "the field", "stream": False}
    assert world.call("POST", "/api/chat", body | {"options": {"num_predict": 1}}).status_code == 200
    assert world.sessions()["the field"]["requests"] == 6
    assert not {"the header", "the key"} & set(world.sessions())
    ask_openai(world.url, {}, prompt_cache_key="the key")
    assert world.sessions()["the key"]["requests"] == 3


@pytest.mark.parametrize(
    ("user_id", "session"),
    [
        ("user_0a1b_account_6c7d_session_57a121ec-f78c-48c3-a745-e3036a3ecc33", "57a121ec-f78c-48c3-a745-e3036a3ecc33"),
        ("user_0a1b_account__session_57a121ec", "57a121ec"),
        (json.dumps({"device_id": "d", "account_uuid": "", "session_id": "54c1eb09"}), "54c1eb09"),
        ("somebody", None),
        ("{", None),
        ('{"session_id": 7}', None),
        ('{"session_id": "a\\nb"}', None),
        ('{"session_id": "%s"}' % ("x" * 257), None),
    ],
)
def test_claude_codes_user_id_and_its_header_name_the_session(world, user_id, session):
    before = world.sessions()
    ask_anthropic(world.url, {}, metadata={"user_id": user_id})
    new = [one for one, found in world.sessions().items() if found != before.get(one)]
    assert new == ([] if session is None else [session])
    ask_anthropic(world.url, {"X-Claude-Code-Session-Id": "by header"}, metadata={"user_id": user_id})
    assert "by header" in world.sessions()


def test_hits_are_counted_by_session_and_by_the_turns_of_all(world):
    text = document("counted")
    world.complete(text, session_id="counted")
    world.complete(text + "more", session_id="counted")
    told = world.call("GET", "/v1/cache/sessions/counted").json()
    assert (told["requests"], told["output_tokens"], told["tenant"]) == (2, 4, "alice")
    assert told["hit_tokens"] > 100
    assert told["hit_rate"] == pytest.approx(told["hit_tokens"] / told["queried_tokens"])
    metrics = world.call("GET", "/metrics", key=OPERATOR).text
    found = [line for line in metrics.splitlines() if "session_hit_tokens_total{" in line]
    assert {line.split('turn="')[1].split('"')[0] for line in found} == {"first", "later", "none"}
    later = next(float(line.split()[-1]) for line in found if 'turn="later"' in line)
    assert later >= told["hit_tokens"]
    assert "counted" not in metrics


def test_a_closed_session_leaves_first_what_only_it_used(world):
    world.ask(lambda engine: engine.reset_prefix_cache())
    shared, own, old = document("shared"), document("alone"), document("older")
    world.complete(old, session_id="older")
    world.complete(shared, session_id="other")
    world.complete(shared + own, session_id="closing")
    answer = world.end("closing").json()
    assert answer["closed"]
    assert answer["blocks_given_up"] > 5
    assert "closing" not in world.sessions()
    before = world.cached(shared + own)
    assert before > world.cached(shared) + 50, "what was given up is found until it is evicted"
    size, num_empty = world.ask(lambda engine: (engine.manager.block_size, pool_of(engine.manager).num_empty))
    flood = [5 + number % 7 for number in range(size * (num_empty + 5) - 3)]
    for at in range(0, len(flood), 20 * size):
        world.complete([4, *flood[at : at + 20 * size - 3]], session_id=f"flood {at}")
    assert world.cached(old) > 100
    assert world.cached(shared) > 100
    assert world.cached(shared + own) < before


def test_a_tenant_neither_sees_nor_closes_the_sessions_of_another_and_operators_do(world):
    world.complete(document("private"), session_id="private")
    assert "private" not in world.sessions("bob")
    for answer in (world.end("private", "bob"), world.call("GET", "/v1/cache/sessions/private", key="bob")):
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == "There is no session 'private' (any more)."
    assert world.sessions(OPERATOR)["private"]["tenant"] == "alice"
    closed = world.end("private", OPERATOR).json()
    assert (closed["tenant"], closed["blocks_given_up"] > 0) == ("alice", True)
    assert world.end("private", OPERATOR).status_code == 404
    for key in ("alice", "bob"):
        world.complete(document("of both"), key, session_id="of both")
    path = "/v1/cache/sessions/of both?tenant=alice"
    assert world.call("GET", path, key="bob").status_code == 404
    assert world.call("DELETE", path, key=OPERATOR).json()["tenant"] == "alice"
    assert "of both" in world.sessions("bob")
    assert world.call("GET", path, key=OPERATOR).status_code == 404


@pytest.mark.parametrize("session_id", ["a/b", "é ü", "a?b#c", "%2F", '"', "x" * 256])
def test_an_id_may_be_any_printable_text(world, session_id):
    world.complete("a", session_id=session_id)
    assert world.end(session_id).json()["id"] == session_id


def test_hostile_ids_get_errors_of_one_line(world):
    for session_id, told in (("x" * 257, "256"), ("", "1 character"), (7, "string"), (["a"], "string")):
        answer = world.call("POST", "/v1/completions", {"model": MODEL, "prompt": "a", "session_id": session_id})
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert told in message
        assert "\n" not in message
    assert (
        "control characters"
        in world.call("POST", "/v1/completions", {"model": MODEL, "prompt": "a", "session_id": "a\x00b"}).json()[
            "error"
        ]["message"]
    )
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    before = world.sessions()
    for named in ({"x_session_id": "x" * 1_000}, {"x_session_id": "a\tb"}):
        assert world.call("POST", "/v1/completions", body, **named).status_code == 200
    assert world.call("POST", "/v1/completions", body | {"prompt_cache_key": "a\nb"}).status_code == 200
    assert world.sessions() == before, "what cannot be an id names no session"
    headers = {"authorization": "Bearer alice", "x-session-id": "größe 7".encode()}
    httpx.post(f"{world.url}/v1/completions", json=body, headers=headers, timeout=120).raise_for_status()
    assert "größe 7" in world.sessions()
    assert world.call("POST", "/v1/completions", body, x_session_id="").status_code == 200
    assert world.call("GET", "/v1/cache/sessions?limit=0").status_code == 400
    assert world.end("x" * 257).status_code == 400


def test_a_million_sessions_cost_bounded_memory(monkeypatch):
    monkeypatch.setattr(records, "MAX_SESSIONS", 50)
    kept = Records(max_finished=10)
    for number in range(500):
        record = RequestRecord(f"r{number}", f"r{number}", "alice", "x", [], session_id=f"s{number}")
        record.prompt_token_ids, record.first_scheduled_time = np.zeros(1, np.int32), 1.0
        kept.open(record)
        kept.close(record, "stop")
    refused = RequestRecord("r", "r", "alice", "x", np.zeros(1, np.int32), session_id="refused")
    kept.open(refused)
    kept.close(refused, "refused")
    assert [one for _, one, _ in kept.sessions(3)] == ["s499", "s498", "s497"]
    assert len(kept.sessions(None)) == 50
    assert kept.session("alice", "s449") is None


def test_without_keys_only_operators_list_sessions(server):
    assert httpx.get(f"{server.url}/v1/cache/sessions").status_code == 200, "from this machine"
    forwarded = {"x-forwarded-for": "203.0.113.7", "x-session-id": "unlisted"}
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    httpx.post(f"{server.url}/v1/completions", json=body, headers=forwarded, timeout=120).raise_for_status()
    assert httpx.get(f"{server.url}/v1/cache/sessions", headers=forwarded).status_code == 403
    assert httpx.delete(f"{server.url}/v1/cache/sessions/unlisted", headers=forwarded).status_code == 200


def test_the_code_of_the_guide_prints_what_it_says(server, capsys):
    page = (Path(__file__).parents[2] / "docs" / "guides" / "sessions.md").read_text()
    [code] = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    exec(compile(code.replace("http://127.0.0.1:8000", server.url), "<sessions.md>", "exec"), {})
    assert capsys.readouterr().out.splitlines() == re.findall(r"^print\(.*\)  # (.*)$", code, re.MULTILINE)


# ------------------------------------------------------------------------------------------ hints


def envelope(*actions: dict[str, Any], protocol: str = "0.1") -> dict[str, Any]:
    filled = [
        {"action_id": f"a{number}", "action_version": "1.0", "payload": {}, **action}
        for number, action in enumerate(actions)
    ]
    return {"protocol_version": protocol, "message_id": "m", "actions": filled}


def action(name: str, version: str = "1.0", **payload: Any) -> dict[str, Any]:
    return {"action_type": f"kv.{name}", "action_version": version, "payload": payload}


def entries(world: World, source: str) -> list[dict[str, Any]]:
    return [one for one in world.call("GET", "/v1/cache/entries").json()["data"] if one["source"] == source]


def test_hints_of_a_request_keep_its_prompt_and_the_answer_has_their_outcomes(world):
    text = document("hinted")
    directives = [
        {"start": 0, "end": 64, "priority": 80, "duration": 60.0},
        {"start": 64, "end": 128, "priority": 20, "duration": 30.0},
        {"start": 128, "end": None, "priority": 0},
    ]
    asked = envelope(
        action("retain", directives=directives),
        action("pin", ttl_seconds=50, end=32),
        action("fetch", block_hashes=["1"]),
        action("pin", version="2.0"),
        action("pin", ttl_seconds=float(10**12)),
        action("demote"),
        action("retain", end=16),
    )
    told = world.complete(text, kv_hints=asked)["foreword"]["kv_hints"]
    outcomes = [one["outcome"] for one in told]
    assert outcomes == ["accepted", "accepted", "ignored", "ignored", "rejected", "missing", "accepted"]
    assert told[6]["entry"] != told[0]["entry"]
    assert told[0]["kept_tokens"] == 128
    [retained, short], [pinned] = entries(world, "retain"), entries(world, "pin")
    assert short["kept_tokens"] == 16
    assert (retained["id"], retained["tokens"], retained["refresh_s"]) == (told[0]["entry"], 128, 60.0)
    assert (pinned["tokens"], pinned["refresh_s"]) == (32, None)
    for one in (retained, short, pinned):
        assert world.call("DELETE", f"/v1/cache/entries/{one['id']}").status_code == 200


def test_a_prompt_with_links_takes_no_hint_to_keep_it():
    hints = Hints(KvHints.model_validate(envelope(action("retain"), action("prefetch"))))
    prompt = Prompt(np.arange(4, dtype=np.int32), links=Links("none", (), np.arange(4, dtype=np.int32)))
    assert hints.on(prompt) == ()
    hints.note_request(None, 4, ())
    assert [one["outcome"] for one in hints.report()] == ["rejected", "accepted"]


def test_outcomes_say_what_was_kept(world):
    """A prompt without a whole block, an uncached call, an end beyond the prompt, the worst of several prompts."""

    def told(prompt: Any, *actions: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
        return list(world.complete(prompt, kv_hints=envelope(*actions), **fields)["foreword"]["kv_hints"])

    def drop() -> None:
        for one in entries(world, "retain") + entries(world, "pin"):
            world.call("DELETE", f"/v1/cache/entries/{one['id']}")

    covers = {"directives": [{"priority": 1, "covers_output": True}]}
    [output, beyond] = told(document("outcomes"), action("retain", **covers), action("pin", end=10**6))
    assert (output["outcome"], beyond["outcome"]) == ("clipped", "clipped")
    assert output["kept_tokens"] > 100
    drop()
    [short] = told([7, 8], action("pin"), max_tokens=1)
    assert [short["entry"]] == [one["id"] for one in entries(world, "pin")], "a tail is kept; others are missing"
    hints = Hints(KvHints.model_validate(envelope(action("pin"))))
    hints.note_request(None, 2, [CacheEntry("name", None, "pin", 2, 0, 0, 1.0)])
    assert [(one["outcome"], one.get("entry")) for one in hints.report()] == [("missing", None)]
    drop()
    off = {"prompt_cache_options": {"mode": "explicit"}}
    outcomes = told(document("uncached"), action("retain"), action("pin"), action("prefetch"), **off)
    assert [one["outcome"] for one in outcomes] == ["rejected", "rejected", "accepted"]
    assert not entries(world, "retain") + entries(world, "pin")
    [first, *_] = told([document("several"), "a"], action("pin", end=32), max_tokens=1)
    assert first["outcome"] in ("clipped", "missing"), "the second prompt has fewer tokens"
    drop()
    told(document("budget", 60), action("pin"))
    [broke] = told(document("nothing left"), action("pin"))
    assert (broke["outcome"], broke["kept_tokens"], broke.get("entry")) == ("clipped", 0, None)
    assert "budget" in broke["detail"]
    drop()


def test_a_prompt_whose_adapter_begins_inside_is_not_computed_without_it(world):
    record = RequestRecord("inside", "inside", "alice", "x", np.arange(5, 60, dtype=np.int32), session_id="inside")
    record.first_scheduled_time, record.adapter_begins_inside = 1.0, True
    world.service.records.open(record)
    world.service.records.close(record, "stop")
    sent = {"kv_hints": envelope(action("prefetch", session_id="inside"))}
    [told] = world.call("POST", "/v1/cache/hints", sent).json()["actions"]
    assert (told["outcome"], "adapter" in told["detail"]) == ("missing", True)


def test_an_action_that_fails_leaves_the_others_their_outcomes(world, monkeypatch):
    world.complete(document("half"), session_id="half")

    async def refuse(*_: Any, **__: Any) -> None:
        raise too_busy("The queue is full.", 1)

    monkeypatch.setattr(world.service, "start", refuse)
    sent = {"kv_hints": envelope(action("prefetch", session_id="half"), action("demote", session_id="half"))}
    told = world.call("POST", "/v1/cache/hints", sent).json()["actions"]
    assert [one["outcome"] for one in told] == ["rejected", "accepted"]
    assert told[0]["detail"]


def test_hints_of_responses_have_outcomes_too_and_budgets_clip_them(world):
    body = {"model": MODEL, "input": document("clipped", 60), "max_output_tokens": 1, "stream": True}
    body |= {"kv_hints": envelope(action("pin"))}
    with httpx.stream(
        "POST", f"{world.url}/v1/responses", json=body, headers={"authorization": "Bearer alice"}
    ) as answer:
        lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: {")]
    [told] = json.loads(lines[-1])["response"]["foreword"]["kv_hints"]
    assert told["outcome"] == "clipped"
    assert 0 < told["kept_tokens"] < 60 * 20
    assert world.call("DELETE", f"/v1/cache/entries/{told['entry']}").status_code == 200


def test_a_demote_hint_closes_the_session_once_its_request_has_ended(world, monkeypatch, caplog):
    world.complete(document("to demote"), session_id="demoted")
    before = world.ask(lambda engine: num_given_up(engine.manager))
    body = {"model": MODEL, "messages": [{"role": "user", "content": document("to demote")}], "max_tokens": 2}
    body |= {"session_id": "demoted", "kv_hints": envelope(action("demote")), "stream": True}
    with httpx.stream(
        "POST", f"{world.url}/v1/chat/completions", json=body, headers={"authorization": "Bearer alice"}
    ) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: {")]
    assert json.loads(lines[-1][6:])["foreword"]["kv_hints"][0]["outcome"] == "deferred"
    assert world.ask(lambda engine: num_given_up(engine.manager)) > before + 5
    assert world.call("DELETE", "/v1/cache/sessions/demoted").status_code == 404, "its totals are gone too"

    world.complete(document("to demote"), session_id="other")
    told = world.complete(
        document("to demote"), session_id="mine", kv_hints=envelope(action("demote", session_id="other"))
    )
    assert told["foreword"]["kv_hints"][0]["outcome"] == "missing"
    assert {"mine", "other"} <= set(world.sessions()), "neither is closed"

    async def unreached(*_: Any) -> None:
        raise too_busy("The queue is full.", 1)

    monkeypatch.setattr(world.service.thread, "change", unreached)
    told = world.complete(document("no engine"), session_id="open", kv_hints=envelope(action("demote")))
    assert told["foreword"]["kv_hints"][0]["outcome"] == "deferred"
    wait_until(lambda: "the session 'open' that a hint demotes stays open" in caplog.text)
    assert world.sessions()["open"]["requests"] == 1


def test_an_envelope_without_a_request_is_about_the_newest_prompt_of_a_session(world):
    def hint(*actions: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
        answer = world.call("POST", "/v1/cache/hints", {"kv_hints": envelope(*actions, **more)})
        assert answer.status_code == 200, answer.text
        return list(answer.json()["actions"])

    world.ask(lambda engine: engine.reset_prefix_cache())
    text = document("tool gap")
    world.complete(text, session_id="gap")
    world.ask(lambda engine: engine.reset_prefix_cache())
    [fetched] = hint(action("prefetch", session_id="gap"))
    assert (fetched["outcome"], fetched["cached_tokens"]) == ("accepted", 0)
    assert fetched["computed_tokens"] > 100
    assert world.sessions()["gap"]["requests"] == 1, "the hint's own request counts for no session"
    assert world.cached(text) > 100
    retained, pinned = hint(action("retain", session_id="gap", ttl_seconds=9), action("pin", session_id="gap"))
    assert retained["outcome"] == pinned["outcome"] == "accepted"
    assert retained["kept_tokens"] > 100
    for one in (retained, pinned):
        world.call("DELETE", f"/v1/cache/entries/{one['entry']}")
    assert hint(action("demote", session_id="gap"))[0]["blocks_given_up"] > 5
    world.complete(text, session_id="salted", cache_salt="s")
    outcomes = hint(
        action("demote", session_id="nobody"),
        action("retain", session_id="nobody"),
        action("retain"),
        action("prefetch", session_id="salted"),
        action("teleport", session_id="gap"),
    )
    assert [one["outcome"] for one in outcomes] == ["missing", "missing", "rejected", "missing", "ignored"]
    assert all(one["detail"] and "\n" not in one["detail"] for one in outcomes)
    assert [one["outcome"] for one in hint(action("demote", session_id="gap"), protocol="7.0")] == ["ignored"]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"message_id": "m", "actions": []}, "protocol_version"),
        ({"protocol_version": 1, "message_id": "m"}, "protocol_version"),
        (envelope(*[{"action_type": "kv.pin"}] * 17), "at most 16"),
        (envelope({"action_type": "kv.pin", "payload": []}), "payload"),
        (envelope({"action_type": "x" * 257}), "256"),
        ([], "kv_hints"),
    ],
)
def test_a_malformed_envelope_is_refused(world, wrong, told):
    for path, body in (
        ("/v1/cache/hints", {"kv_hints": wrong}),
        ("/v1/completions", {"model": MODEL, "prompt": "a", "kv_hints": wrong}),
    ):
        answer = world.call("POST", path, body)
        assert answer.status_code == 400
        assert told in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "payload",
    [
        {"directives": {}},
        {"directives": [7]},
        {"directives": [{"priority": True}]},
        {"directives": [{"priority": 101}]},
        {"directives": [{"priority": 1}] * 257},
        {"directives": [{"priority": 1, "end": 0}]},
        {"directives": [{"priority": 1, "duration": "x"}]},
        {"ttl_seconds": 0},
        {"ttl_seconds": True},
        {"ttl_seconds": 10**400},
        {"end": "7"},
    ],
)
def test_a_payload_that_cannot_be_is_rejected_and_the_request_answered(world, payload):
    told = world.complete("a", kv_hints=envelope({"action_type": "kv.retain", "payload": payload}))
    assert [one["outcome"] for one in told["foreword"]["kv_hints"]] == ["rejected"]
    assert told["choices"][0]["text"]
