"""Why it missed, over HTTP: reports on request, explain, diagnostics, statistics, and what tenants do not learn."""

from __future__ import annotations

import json

import httpx
import numpy as np
import pytest

from foreword.cache import NO_EXTRA_KEYS, ExtraKeys
from foreword.engine import Prompt
from foreword.server.observe.insight import block_keys
from foreword.server.options import ServerConfig
from foreword.server.template_check import check_template
from foreword.text import Tokenizer
from live_server import FALCON, MODEL, ServerProcess, ServerThread, client, embedded_llm, post, wait_until
from real_models import real_tokenizer

BLOCK = 16
KEYS = '[alice]\nkeys = ["sk-alice"]\n\n[bob]\nkeys = ["sk-bob"]\n'
OPERATOR = "sk-operator"


def facts(name: str, code: int = 4821, number: int = 12) -> str:
    """A document that no other test has."""
    return "".join(f"The code of the {name} falcon {index} is {code + index}.\n" for index in range(number))


def chat(document: str, question: str = "What is the code of the amber falcon?", **more: object) -> dict[str, object]:
    messages = [{"role": "system", "content": document}, {"role": "user", "content": question}]
    return {"messages": messages, "temperature": 0, "max_tokens": 4, **more}


def reported(url: str, body: dict[str, object], **options: object) -> dict:
    answer = post(url, "/v1/chat/completions", {**body, "foreword": {"cache": True}}, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()["foreword"]["cache"]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys.toml"
    path.write_text(KEYS)
    with embedded_llm() as llm, ServerThread(llm, ServerConfig(keys_file=path, operator_key=OPERATOR)) as server:
        yield server


def as_(name: str) -> dict[str, dict[str, str]]:
    return {"headers": {"Authorization": f"Bearer sk-{name}"}}


# --------------------------------------------------------------------- reports


def test_a_response_says_nothing_of_the_cache_unless_it_is_asked(server):
    assert "foreword" not in post(server.url, "/v1/chat/completions", chat(facts("unasked"))).json()


@pytest.mark.parametrize("how", ["body", "header"])
def test_a_response_reports_its_lookup_when_asked(server, how):
    body = chat(facts(f"asked by {how}"))
    options = {}
    if how == "body":
        body["foreword"] = {"cache": True}
    else:
        options["headers"] = {"X-Foreword-Cache": "1"}
    for warm in (False, True):
        answer = post(server.url, "/v1/chat/completions", body, **options).json()
        report = answer["foreword"]["cache"]
        assert report["hit_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert report["hit_tokens"] + report["computed_tokens"] == answer["usage"]["prompt_tokens"]
        assert (report["hit_tokens"] > 100) is warm
        assert report["reason"] == (None if warm else "never_seen")
        assert report["computed_tokens"] == 1 or not warm


def test_the_first_diverging_token_is_shown_with_text_on_both_sides(server):
    post(server.url, "/v1/chat/completions", chat(facts("diverging", 1000)))
    report = reported(server.url, chat(facts("diverging", 5000)))
    diverged = report["diverged"]
    assert report["reason"] == "never_seen"
    assert diverged["before"].endswith("falcon 0 is ")
    assert diverged["yours"]["text"].startswith("5")
    assert diverged["cached"]["text"].startswith("1")
    assert diverged["yours"]["token_id"] != diverged["cached"]["token_id"]
    ids = post(server.url, "/tokenize", {"messages": chat(facts("diverging", 5000))["messages"]}).json()["tokens"]
    assert ids[diverged["position"]] == diverged["yours"]["token_id"]


def test_a_stream_reports_at_its_end_and_the_official_client_passes_it_on(server):
    chunks = list(
        client(server.url).chat.completions.create(
            model=MODEL, messages=FALCON, stream=True, max_tokens=3, extra_body={"foreword": {"cache": True}}
        )
    )
    assert chunks[-1].foreword["cache"]["prompt_tokens"] > 0
    assert all("foreword" not in chunk.model_dump() for chunk in chunks[:-1])


def test_several_prompts_have_a_report_each(server):
    body = {"prompt": [facts("first"), facts("second")], "max_tokens": 1, "foreword": {"cache": True}}
    reports = post(server.url, "/v1/completions", body).json()["foreword"]["cache"]
    assert len(reports) == 2
    assert all(report["prompt_tokens"] > 50 for report in reports)


def test_a_skipped_lookup_is_named_as_the_reason(server):
    post(server.url, "/v1/chat/completions", chat(facts("skipped")))
    report = reported(server.url, chat(facts("skipped"), skip_reading_prefix_cache=True))
    assert (report["hit_tokens"], report["reason"]) == (0, "lookup_skipped")


def test_a_prompt_that_is_scored_at_its_end_is_told_that_the_rest_was_computed(server):
    ask = {"prompt": facts("scored"), "max_tokens": 1, "echo": True, "logprobs": 0, "score_from": 20}
    for _ in range(2):
        answer = post(server.url, "/v1/completions", {**ask, "foreword": {"cache": True}})
    report = answer.json()["foreword"]["cache"]
    assert (report["hit_tokens"], report["reason"]) == (19, "lookup_skipped")
    assert "or the rest of it" in report["in_words"]


def test_an_index_that_knows_keys_only_compares_with_earlier_prompts():
    with embedded_llm(prefix_index="hash") as llm, ServerThread(llm, ServerConfig()) as server:
        reported(server.url, chat(facts("hashed", 1000)))
        report = reported(server.url, chat(facts("hashed", 5000)))
        assert report["diverged"]["yours"]["text"].startswith("5")
        assert report["diverged"]["cached"]["text"].startswith("1")
        listed = httpx.get(f"{server.url}/v1/cache").json()
        assert "tree" not in listed
        assert [prompt["cached_tokens"] > 50 for prompt in listed["prompts"]] == [True, True]


# --------------------------------------------------------------------- explain


def test_explain_foretells_what_the_run_finds_and_changes_nothing(server):
    for document in (facts("foretold"), facts("foretold"), facts("foretold", number=14)):
        body = chat(document)
        foretold = post(server.url, "/v1/cache/explain", {"messages": body["messages"]}).json()
        again = post(server.url, "/v1/cache/explain", {"messages": body["messages"]}).json()
        run = reported(server.url, body)
        assert {name: foretold[name] for name in run} == run == {name: again[name] for name in run}
        assert foretold["object"] == "cache.explanation"


def test_explain_takes_texts_and_tokens_and_refuses_neither_and_both(server):
    prompt = facts("typed")
    post(server.url, "/v1/completions", {"prompt": prompt, "max_tokens": 1})
    tokens = post(server.url, "/tokenize", {"prompt": prompt}).json()["tokens"]
    by_text, by_tokens = (
        post(server.url, "/v1/cache/explain", {"prompt": form}).json()["hit_tokens"] for form in (prompt, tokens)
    )
    assert by_text == by_tokens > 50
    for wrong in (
        {},
        {"prompt": "a", "messages": FALCON},
        {"prompt": [10**6]},
        {"prompt": []},
        {"prompt": "a", "x": 1},
    ):
        assert post(server.url, "/v1/cache/explain", wrong).status_code == 400


# ----------------------------------------------------------------- diagnostics


def diagnosed(url: str, document: str, earlier: str | None, **more: object) -> dict:
    options = {} if earlier is None else {"prompt_cache_options": {"comparison_response_id": earlier}}
    body = {"instructions": document, "input": "What is it?", "max_output_tokens": 2, **options, **more}
    answer = post(url, "/v1/responses", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_response_is_compared_with_the_one_that_it_names(server):
    first = diagnosed(server.url, facts("compared"), None)
    assert "prompt_cache_diagnostics" not in first
    same = diagnosed(server.url, facts("compared"), first["id"])
    assert same["prompt_cache_diagnostics"] == {"type": "cache_hit"}
    assert same["prompt_cache_options"]["comparison_response_id"] == first["id"]
    changed = diagnosed(server.url, facts("compared", 9000), first["id"])["prompt_cache_diagnostics"]
    assert (changed["type"], changed["reason"]) == ("cache_miss", "input_changed")
    assert changed["comparison_reusable_tokens"] == first["usage"]["input_tokens"]
    assert 100 < changed["cache_missed_tokens"] < first["usage"]["input_tokens"]
    salted = diagnosed(server.url, facts("compared"), first["id"], cache_salt="s")["prompt_cache_diagnostics"]
    assert (salted["type"], salted["reason"]) == ("cache_miss", "prompt_cache_key_changed")
    skipped = diagnosed(server.url, facts("compared"), first["id"], skip_reading_prefix_cache=True)
    assert skipped["prompt_cache_diagnostics"] == {"type": "unavailable", "reason": "lookup_skipped"}


def test_a_prompt_that_is_shorter_than_a_block_is_found(server):
    ask = {"prompt": "A falcon, 12", "max_tokens": 1}
    first = post(server.url, "/v1/completions", ask).json()
    ask["prompt_cache_options"] = {"comparison_response_id": first["id"]}
    again = post(server.url, "/v1/completions", ask).json()
    assert again["prompt_cache_diagnostics"]["type"] == "cache_hit"


def test_what_was_evicted_or_forgotten_since_is_told_apart_from_a_changed_input():
    with embedded_llm(kv_cache_memory_bytes=2 * 2**20) as llm, ServerThread(llm, ServerConfig()) as server:
        first = diagnosed(server.url, facts("small pool"), None)
        for number in range(4):
            diagnosed(server.url, facts(f"crowd {number}"), None)
        evicted = diagnosed(server.url, facts("small pool"), first["id"])["prompt_cache_diagnostics"]
        assert evicted == {"type": "unavailable", "reason": "evicted"}
        post(server.url, "/reset_prefix_cache", None).raise_for_status()
        forgotten = diagnosed(server.url, facts("small pool"), first["id"])["prompt_cache_diagnostics"]
        assert forgotten == {"type": "unavailable", "reason": "forgotten"}
        longer = diagnosed(server.url, facts("small pool"), first["id"])["prompt_cache_diagnostics"]
        assert longer == {"type": "cache_hit"}


def test_another_reasoning_effort_is_named_where_the_template_writes_it():
    with embedded_llm() as llm:
        llm.tokenizer.set_chat_template("{% if reasoning_effort %}Think {{ reasoning_effort }}.{% endif %}" + APPENDING)
        with ServerThread(llm, ServerConfig()) as server:
            first = diagnosed(server.url, facts("effort"), None, reasoning={"effort": "low"})
            named = diagnosed(server.url, facts("effort"), first["id"], reasoning={"effort": "high"})
            miss = named["prompt_cache_diagnostics"]
            assert (miss["type"], miss["reason"]) == ("cache_miss", "reasoning_effort_changed")
            assert miss["cache_missed_tokens"] > 100
            body = chat(facts("effort"), reasoning_effort="low")
            first = post(server.url, "/v1/chat/completions", body).json()
            body |= {"reasoning_effort": "high", "prompt_cache_options": {"comparison_response_id": first["id"]}}
            miss = post(server.url, "/v1/chat/completions", body).json()["prompt_cache_diagnostics"]
            assert miss["reason"] == "reasoning_effort_changed"


def test_diagnostics_pass_the_official_clients_types(server):
    ask = client(server.url).responses
    first = ask.create(model=MODEL, input="hello", max_output_tokens=2)
    options = {"comparison_response_id": first.id}
    again = ask.create(model=MODEL, input="hello", max_output_tokens=2, extra_body={"prompt_cache_options": options})
    assert again.prompt_cache_diagnostics.type == "cache_hit"


def test_unknown_responses_are_not_found_and_unknown_options_refused(server):
    answer = diagnosed(server.url, facts("lost"), "resp_0")
    assert answer["prompt_cache_diagnostics"] == {"type": "comparison_response_not_found"}
    body = {"input": "hello", "prompt_cache_options": {"comparison": "x"}}
    assert post(server.url, "/v1/responses", body).status_code == 400


# ------------------------------------------------------- statistics and resets


def test_the_curve_over_memory_tells_what_a_larger_pool_then_finds():
    """The documents go round in a pool that just does not hold them: LRU finds nothing until all of them fit."""

    def hit_rate(factor: float) -> tuple[float, dict]:
        options = {"kv_cache_memory_bytes": int(factor * 2**20), "eviction_policy": "lru"}
        with embedded_llm(**options) as llm, ServerThread(llm, ServerConfig()) as server:
            for _ in range(3):
                for number in range(9):
                    post(server.url, "/v1/completions", {"prompt": facts(f"{number}"), "max_tokens": 2})
            statistics = httpx.get(f"{server.url}/v1/cache").json()["statistics"]
            post(server.url, "/reset_prefix_cache", None).raise_for_status()
            assert httpx.get(f"{server.url}/v1/cache").json()["statistics"]["more_memory"]["curve"] == []
        return statistics["hit_rate"], statistics

    _, small = hit_rate(2)
    curve = {point["factor"]: point for point in small["more_memory"]["curve"]}
    assert list(curve) == pytest.approx([1, 1.25, 1.5, 2, 3, 4, 6, 8], abs=0.02)
    assert small["more_memory"]["sampling_rate"] == 1.0
    assert curve[1]["blocks"] == small["blocks"]["total"]
    assert curve[1]["hit_rate"] == pytest.approx(small["hit_rate"], abs=0.05)
    assert curve[8]["hit_rate"] > curve[1]["hit_rate"] + 0.3
    assert curve[8]["hit_rate"] == pytest.approx(hit_rate(16)[0], abs=0.05)


def test_the_curves_keys_keep_namespaces_apart_from_where_their_salt_begins():
    tokens, answer = np.arange(64, dtype=np.int32), [7] * 17
    plain, salted, behind = (
        block_keys(Prompt(tokens, None, extra), answer, BLOCK).tolist()
        for extra in (NO_EXTRA_KEYS, ExtraKeys(salt="a"), ExtraKeys(salt="a", salt_offset=32))
    )
    assert len(plain) == 5, "the last token of an answer is never computed"
    assert not set(plain) & set(salted)
    assert behind == plain[:2] + salted[2:]


def test_operators_see_statistics_and_the_tree_with_reuse_counts():
    with embedded_llm() as llm, ServerThread(llm, ServerConfig()) as server:
        usages = [post(server.url, "/v1/chat/completions", chat(facts("watched"))).json()["usage"] for _ in range(4)]
        seen = httpx.get(f"{server.url}/v1/cache").json()
        statistics = seen["statistics"]
        assert statistics["requests"] == 4
        assert statistics["queried_tokens"] == sum(usage["prompt_tokens"] for usage in usages)
        assert statistics["hit_tokens"] == sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        assert statistics["misses"]["never_seen"] == 1
        assert (
            sum(statistics["blocks"][state] for state in ("free", "cached", "in_use", "pinned"))
            == llm.engine.manager.num_blocks
        )
        assert seen["tree"][0]["reuses"] == 3
        assert seen["tree"][0]["text"].startswith("<|im_start|>system\nThe code of the watched falcon 0")
        assert httpx.get(f"{server.url}/v1/cache?nodes=0").json()["tree"] == []
        assert httpx.get(f"{server.url}/v1/cache?nodes=-1").status_code == 400


def test_a_reset_forgets_the_cache_and_is_refused_while_it_is_in_use():
    with embedded_llm() as llm, ServerThread(llm, ServerConfig()) as server:
        reported(server.url, chat(facts("forgotten")))
        running = {"prompt": facts("running"), "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=running, timeout=60):
            wait_until(lambda: server.ask(lambda engine: engine.scheduler.num_running))
            busy = post(server.url, "/reset_prefix_cache", None)
            assert busy.status_code == 409
            assert "hold its blocks" in busy.json()["error"]["message"]
        wait_until(lambda: not server.ask(lambda engine: engine.has_unfinished_requests()))
        assert post(server.url, "/reset_prefix_cache", None).status_code == 200
        assert reported(server.url, chat(facts("forgotten")))["hit_tokens"] == 0


# --------------------------------------------------------------------- tenants


def test_another_tenants_prompt_shows_neither_as_hit_nor_text_nor_reason(keyed):
    secret, unsaid = (facts(f"secret of {name}", 7777) for name in ("alice", "nobody"))
    half = facts("secret of alice", 7777, number=6) + "Something else.\n" * 8
    half_unsaid = facts("secret of nobody", 7777, number=6) + "Something else.\n" * 8
    reported(keyed.url, chat(secret), **as_("alice"))
    for said, not_said in ((secret, unsaid), (half, half_unsaid)):
        explained = [
            post(keyed.url, "/v1/cache/explain", {"messages": chat(document)["messages"]}, **as_("bob")).json()
            for document in (said, not_said)
        ]
        # Whatever bob asks, it makes no difference that alice has said the one and nobody the other.
        for name in ("hit_tokens", "reason", "in_words", "evicted", "twice_the_blocks_would_find"):
            assert explained[0][name] == explained[1][name]
        for name in ("position", "before", "cached"):
            assert explained[0]["diverged"][name] == explained[1]["diverged"][name]
    told = reported(keyed.url, chat(secret), **as_("bob"))
    assert told["hit_tokens"] < BLOCK, "a chat template's beginning, and bob's own"
    assert told["reason"] == "never_seen"
    assert told["diverged"]["cached"] is None


def test_the_operator_sees_the_reason_that_clients_are_not_told(keyed):
    document = facts("two tenants")
    for name in ("alice", "bob"):
        assert reported(keyed.url, chat(document), **as_(name))["reason"] == "never_seen"
    seen = httpx.get(f"{keyed.url}/v1/cache", **as_("operator")).json()
    assert seen["statistics"]["misses"]["salt_differs"] >= 1
    assert {"alice", "bob"} <= set(seen["tenants"])
    assert {"alice", "bob"} <= {node["tenant"] for node in seen["tree"]}


def test_a_tenant_sees_its_own_statistics_and_prefixes_only(keyed):
    reported(keyed.url, chat(facts("papers of alice")), **as_("alice"))
    reported(keyed.url, chat(facts("papers of bob")), **as_("bob"))
    answer = httpx.get(f"{keyed.url}/v1/cache", **as_("bob"))
    seen = answer.json()
    assert set(seen) == {"object", "statistics", "tree"}
    assert "papers of bob" in answer.text
    assert "papers of alice" not in answer.text
    assert {node["tenant"] for node in seen["tree"]} == {"bob"}
    assert seen["statistics"]["requests"] == keyed.service.records.tenants()["bob"].requests


def test_another_tenants_response_cannot_be_compared_with(keyed):
    body = {"input": "hello", "max_output_tokens": 1}
    first = post(keyed.url, "/v1/responses", body, **as_("alice")).json()
    body["prompt_cache_options"] = {"comparison_response_id": first["id"]}
    for name, kind in (("alice", "cache_hit"), ("bob", "comparison_response_not_found")):
        answer = post(keyed.url, "/v1/responses", body, **as_(name)).json()
        assert answer["prompt_cache_diagnostics"]["type"] == kind


def test_tenants_of_a_shared_prefix_see_each_others_branches_nowhere(tmp_path):
    public = facts("public")
    keys, shared = tmp_path / "keys.toml", tmp_path / "public.txt"
    keys.write_text(KEYS)
    shared.write_text(public)
    config = ServerConfig(keys_file=keys, share_prefix=(shared,), operator_key=OPERATOR)
    with embedded_llm() as llm, ServerThread(llm, config) as server:
        private = {name: public + facts(f"private of {name}") for name in ("alice", "bob")}
        for name in ("alice", "bob"):
            body = {"prompt": private[name], "max_tokens": 1, "foreword": {"cache": True}}
            report = post(server.url, "/v1/completions", body, **as_(name)).json()["foreword"]["cache"]
            other = "bob" if name == "alice" else "alice"
            assert f"private of {other}" not in json.dumps(report)
            assert (report["hit_tokens"] > 100) is (name == "bob"), "the public part is shared"
        seen = httpx.get(f"{server.url}/v1/cache", **as_("bob"))
        assert "private of bob" in seen.text
        assert "private of alice" not in seen.text
        everything = httpx.get(f"{server.url}/v1/cache", **as_("operator")).text
        assert "private of alice" in everything
        assert "private of bob" in everything


# ------------------------------------------------------------------- operators


@pytest.mark.parametrize("path", ["/metrics", "/reset_prefix_cache"])
def test_with_keys_the_operators_pages_need_the_operators_key(keyed, path):
    method = "GET" if path == "/metrics" else "POST"
    for options, status in (({}, 401), (as_("alice"), 403), (as_("wrong"), 401)):
        assert httpx.request(method, f"{keyed.url}{path}", **options).status_code == status
    assert httpx.request(method, f"{keyed.url}{path}", **as_("operator")).status_code == 200
    assert post(keyed.url, "/v1/chat/completions", chat("x"), **as_("operator")).status_code == 401


def test_with_keys_and_no_operators_key_nobody_is_an_operator():
    with embedded_llm() as llm, ServerThread(llm, ServerConfig(api_key="sk-all")) as server:
        for options in ({}, as_("all")):
            refused = post(server.url, "/reset_prefix_cache", None, **options)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "operators_only")
        assert "tree" not in httpx.get(f"{server.url}/v1/cache", **as_("all")).json()


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"X-Forwarded-For": "203.0.113.7"},
        {"Origin": "http://evil.example"},
        {"Forwarded": "for=x"},
    ],
    ids=lambda headers: next(iter(headers)),
)
def test_an_open_server_takes_only_this_machines_own_requests_for_an_operators(server, headers):
    assert post(server.url, "/reset_prefix_cache", None, headers=headers).status_code == 403
    assert "tree" not in httpx.get(f"{server.url}/v1/cache", headers=headers).json()


# -------------------------------------------------------------- template check


APPENDING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COUNTING = "{{ messages | length }} messages\n" + APPENDING
FORGETFUL = APPENDING.replace("{{ m.content }}", "{{ m.content if loop.last else m.content.split('</think>')[-1] }}")


CALLING = APPENDING.replace(
    "{{ m.content }}",
    "{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}",
).replace("{% for m", "{% if tools %}{{ tools | tojson }}{% endif %}{% for m", 1)
THINKING = (
    "{% set ns = namespace(asked=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}"
    "{% endif %}{% endfor %}"
    + CALLING.replace(
        "{{ m.content }}",
        "{% if m.reasoning_content and loop.index0 > ns.asked %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content }}",
    )
)
"""Drops reasoning once the next question follows, as many families do."""


def with_template(llm, template: str):
    llm.tokenizer.set_chat_template(template)
    return check_template(llm.tokenizer)


def test_a_template_that_changes_earlier_turns_is_found_with_the_position():
    with embedded_llm() as llm:
        assert check_template(llm.tokenizer) == []
        assert with_template(llm, APPENDING) == []
        counting = with_template(llm, COUNTING)[0]
        assert (counting.turn, counting.position) == (1, 0)
        assert counting.was.startswith("2 messages")
        assert counting.becomes.startswith("4 messages")
        (forgetful,) = with_template(llm, FORGETFUL)
        assert forgetful.conversation == "answers with reasoning"
        assert forgetful.turn == 1
        assert forgetful.was.startswith("<think>")
        assert forgetful.becomes.lstrip().startswith("The answer")
        assert 0 < forgetful.position < forgetful.num_tokens
        assert "turn 1" in str(forgetful)
        last = with_template(llm, THINKING)
        names = [change.conversation for change in last]
        assert names == ["answers with separate reasoning", "calls of tools with reasoning"]
        assert last[0].turn == last[1].turn == 1
        assert "think>" in last[1].was
        assert with_template(llm, THINKING.replace("loop.index0 > ns.asked", "true")) == []
        (growing,) = with_template(llm, CALLING.replace("{{ call", "{{ messages | length }}{{ call"))
        assert (growing.conversation, growing.turn) == ("calls of tools", 1)
        assert with_template(llm, CALLING) == []
        llm.tokenizer.hf_tokenizer.chat_template = None
        assert check_template(llm.tokenizer) == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen3", {"answers with reasoning", "answers with separate reasoning", "calls of tools with reasoning"}),
        ("llama3", set()),
        ("gemma3", set()),
        ("deepseek_v3", set()),
    ],
)
def test_the_check_of_real_templates_finds_what_real_turns_lose(name, expected):
    tokenizer = Tokenizer.load(str(real_tokenizer(name)))
    found = {change.conversation for change in check_template(tokenizer)}
    if name == "qwen3":
        expected = expected | {f"{kind}, enable_thinking=False" for kind in ("plain answers", "calls of tools")}
    assert found == expected


def test_a_server_warns_of_such_a_template_at_its_start(caplog):
    with embedded_llm() as llm:
        llm.tokenizer.set_chat_template(COUNTING)
        with ServerThread(llm, ServerConfig()) as server:
            assert "2 messages" in httpx.get(f"{server.url}/v1/cache").json()["template"][0]
    assert "the chat template spoils reuse" in caplog.text


def test_the_real_process_explains_too(server: ServerProcess):
    assert (
        post(server.url, "/v1/cache/explain", {"prompt": "Nobody has asked this before. " + facts("process")}).json()[
            "hit_tokens"
        ]
        < BLOCK
    )
