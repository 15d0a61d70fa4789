"""/v1/pml/explain: what linking would do with a prompt now. It says what Python says, and leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from foreword import LLM, SamplingParams
from foreword.linking import LinkExplanation, MeasuredLinks, Rightness
from foreword.server.options import ServerConfig
from linking.prompts import documents
from live_server import ServerThread, embedded_llm, post, wait_until

pytestmark = pytest.mark.usefixtures("on_cpu")

BLOCK, HEAD = 4, 7
COMPLETIONS, EXPLAIN = "/v1/pml/completions", "/v1/pml/explain"
OPTIONS: dict[str, Any] = {"allow_links": True, "block_size": BLOCK, "max_model_len": 2048}
SCHEMA = """<schema name="notes"><system>You answer from the notes.</system>
  <module name="falcon"> The code of the amber falcon is 4821. </module>
  <module name="lisbon"> The home of the silver violin is Lisbon. </module></schema>"""
GREEDY: dict[str, Any] = {"max_tokens": 2, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with embedded_llm(**OPTIONS) as llm, ServerThread(llm, ServerConfig(link_gate=0.0)) as opened:
        yield opened


@pytest.fixture(scope="module")
def python() -> Iterator[LLM]:
    """The same model without a server."""
    with embedded_llm(**OPTIONS) as llm:
        yield llm


def explained(server: ServerThread, body: dict[str, Any], link: str = "none", **more: Any) -> dict[str, Any]:
    answer = post(server.url, EXPLAIN, {**body, "link": link, **more})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def completed(server: ServerThread, body: dict[str, Any], path: str = COMPLETIONS, **more: Any) -> dict[str, Any]:
    answer = post(server.url, path, {**body, **GREEDY, **more})
    assert answer.status_code == 200, answer.text
    wait_until(lambda: not server.service.records.running())
    found: dict[str, Any] = answer.json()
    return found


def as_json(found: LinkExplanation) -> dict[str, Any]:
    parts = [
        {
            "name": part.name,
            "tokens": part.num_tokens,
            "linked_tokens": part.num_linked_tokens,
            "missing_tokens": part.num_missing_tokens,
        }
        for part in found.parts
    ]
    return {
        "object": "pml.explanation",
        "model": "foreword-demo",
        "link": found.method,
        "prompt_tokens": found.num_tokens,
        "linked_tokens": found.num_linked_tokens,
        "missing": list(found.missing),
        "too_short": list(found.too_short),
        "parts": parts,
    }


@pytest.mark.parametrize("link", ["none", "first-8", "deviation-20", "all"])
def test_it_says_what_python_says_before_and_after(server: ServerThread, python: LLM, link: str) -> None:
    prompt = documents((40, 50, 33), seed=len(link))
    before = explained(server, prompt, link)
    assert before == as_json(python.explain_links(prompt, link))
    assert before["missing"] == ([] if link == "all" else ["1", "2"])
    usage = completed(server, prompt, link=link)["usage"]
    python.generate(prompt, SamplingParams(max_tokens=2, temperature=0.0), link=link)
    after = explained(server, prompt, link)
    assert after == as_json(python.explain_links(prompt, link))
    assert after["missing"] == []
    assert after["linked_tokens"] == usage.get("foreword", {}).get("linked_tokens", 0) == before["linked_tokens"]


def test_it_takes_the_body_of_a_completion(server: ServerThread) -> None:
    prompt = documents(seed=11)
    more = {**GREEDY, "n": 3, "stream": True, "stream_options": {"include_usage": True}, "logprobs": 2, "stop": ["a"]}
    assert explained(server, prompt, **more) == explained(server, prompt)


def test_modules_have_their_names(server: ServerThread) -> None:
    assert post(server.url, "/v1/pml/schemas", {"schema": SCHEMA}).status_code == 200
    asked: dict[str, Any] = {"schema": "notes", "modules": {"falcon": {}, "lisbon": {}}, "text": "Where?"}
    found = explained(server, asked, "first-4")
    assert [part["name"] for part in found["parts"]] == ["", "falcon", "lisbon"]
    assert found["missing"] == ["falcon", "lisbon"]
    pml = '<prompt schema="notes"><falcon/><lisbon/>Where?</prompt>'
    assert explained(server, {"schema": "notes", "prompt": pml}, "first-4")["parts"] == found["parts"]
    completed(server, {**asked, "modules": {"lisbon": {}}}, link="first-4")
    assert explained(server, asked, "first-4")["missing"] == ["falcon"]


def test_it_runs_counts_and_holds_nothing(server: ServerThread) -> None:
    def counted() -> tuple[Any, ...]:
        return server.ask(
            lambda engine: (
                engine.snapshot().totals,
                engine.num_computed_tokens,
                engine.manager.get_num_free_blocks(),
                engine.has_unfinished_requests(),
            )
        )

    prompt = documents(seed=12)
    completed(server, documents(seed=13), link="none")
    records, before = len(server.service.records.recent(1000)), counted()
    for seed in (12, 13):
        for link in ("none", "first-8", "deviation-20", "all"):
            explained(server, documents(seed=seed), link)
    assert counted() == before
    assert len(server.service.records.recent(1000)) == records
    assert explained(server, prompt)["missing"] == ["1", "2", "3"], "what was explained was not computed"
    server.ask(lambda engine: engine.check_integrity())
    server.ask(lambda engine: engine.reset_prefix_cache())  # raises if a block is held


@pytest.mark.parametrize("uses_it", [False, True], ids=["explained", "used"])
@pytest.mark.parametrize("index", ["radix", "hash"])
def test_what_is_explained_is_not_used(index: str, uses_it: bool) -> None:
    """Of two sources the older one is evicted first, however often it was explained; a use makes it the newer one."""
    options = {"num_gpu_blocks_override": 64, "prefix_index": index, "eviction_policy": "lru", "max_model_len": 240}
    with embedded_llm(**{**OPTIONS, **options}) as llm, ServerThread(llm, ServerConfig(link_gate=0.0)) as server:
        older, newer = (documents((8, 80), seed=seed) for seed in (14, 15))
        sources = [[*one["instructions"], *one["documents"][1]] for one in (older, newer)]
        for source in sources:
            completed(server, {"prompt": source}, "/v1/completions", max_tokens=1)
        assert [explained(server, one)["missing"] for one in (older, newer, older, older)] == [[]] * 4
        if uses_it:
            completed(server, {"prompt": sources[0]}, "/v1/completions", max_tokens=1)
        filler = documents((100,), seed=16)["documents"][0]
        completed(server, {"prompt": filler}, "/v1/completions", max_tokens=1)
        found = [explained(server, one)["missing"] for one in (older, newer)]
        assert found == ([[], ["1"]] if uses_it else [["1"], []])


# ---------------------------------------------------------------- who may ask


def test_a_tenant_sees_its_own_documents_and_schemas(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[alice]\nkeys = ["alice"]\n\n[bob]\nkeys = ["bob"]\n')
    prompt = documents(seed=21)
    with embedded_llm(**OPTIONS) as llm, ServerThread(llm, ServerConfig(keys_file=keys, link_gate=0.0)) as server:

        def ask(path: str, body: dict[str, Any], key: str | None) -> httpx.Response:
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=120)

        body = {**prompt, "link": "none"}
        assert ask(COMPLETIONS, {**body, **GREEDY}, "alice").status_code == 200
        assert ask(EXPLAIN, body, "alice").json()["missing"] == []
        assert ask(EXPLAIN, {**body, "cache_salt": "mine"}, "alice").json()["missing"] == ["1", "2", "3"]
        assert ask(EXPLAIN, body, "bob").json()["missing"] == ["1", "2", "3"]
        for key in (None, "mallory"):
            assert ask(EXPLAIN, body, key).status_code == 401
        assert ask("/v1/pml/schemas", {"schema": SCHEMA}, "alice").status_code == 200
        of_schema = {"schema": "notes", "modules": {"falcon": {}}, "text": "What?", "link": "none"}
        assert ask(EXPLAIN, of_schema, "alice").status_code == 200
        assert ask(EXPLAIN, of_schema, "bob").status_code == 404


# ------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "more",
    [
        {"link": "some"},
        {"link": 123},
        {"link": "none", "echo": True, "logprobs": 1},
        {"link": "none", "truncate_prompt_tokens": 5},
        {"link": "none", "prompt_cache_options": {"mode": "implicit"}},
        {"link": "none", "documents": []},
        {"link": "none", "documents": [[5, 10**6]]},
        {"link": "none", "documents": [[5] * 3000]},
        {"link": "none", "documents": [[5] * 2000, [6] * 2000]},
        {"link": "none", "question": None},
        {"link": "none", "schema": "notes"},
        {"link": "none", "documents": None, "question": None, "instructions": None, "schema": "nosuch"},
        {"link": "none", "documents": [[5, 6]] * 1000, "instructions": [7] * 900},
        {"link": "none", "model": "other"},
        {"link": "none", "suffix": "a"},
        {"link": "none", "colour": "blue"},
    ],
    ids=lambda more: " ".join(more),
)
def test_what_a_completion_refuses_is_refused_in_the_same_words(server: ServerThread, more: dict[str, Any]) -> None:
    body = {**documents(seed=31), **more}
    told, expected = (post(server.url, path, body) for path in (EXPLAIN, COMPLETIONS))
    assert told.status_code == expected.status_code in (400, 404)
    assert told.json() == expected.json()


def test_without_a_method_there_is_nothing_to_explain(server: ServerThread) -> None:
    error = post(server.url, EXPLAIN, documents(seed=32)).json()["error"]
    assert error["param"] == "link"
    assert error["message"].startswith("Missing required parameter: link")


def test_a_method_that_is_not_served_is_not_explained(python: LLM, tmp_path: Path) -> None:
    body = documents(seed=33)
    with embedded_llm() as llm, ServerThread(llm, ServerConfig()) as server:
        answer = post(server.url, EXPLAIN, {**body, "link": "none"})
        assert (answer.status_code, "--allow-links" in answer.json()["error"]["message"]) == (400, True)
    file = tmp_path / "links.json"
    MeasuredLinks(python.cache_identity.model_id, {"first-16": Rightness(200, 1, 0)}).write(file)
    with embedded_llm(**OPTIONS) as llm, ServerThread(llm, ServerConfig(link_measurements=file)) as server:
        assert explained(server, body, "first-16")["missing"]
        answer = post(server.url, EXPLAIN, {**body, "link": "none"})
        assert (answer.status_code, "was not measured" in answer.json()["error"]["message"]) == (400, True)
        assert post(server.url, "/v1/pml/schemas", {"schema": SCHEMA}).status_code == 200
        with_gaps = {"schema": "notes", "modules": {"lisbon": {}}, "text": "What?", "link": "first-16"}
        told, expected = (post(server.url, path, with_gaps) for path in (EXPLAIN, COMPLETIONS))
        assert (told.status_code, told.json()) == (400, expected.json())
        assert explained(server, with_gaps, "first-16", positions="dense")["link"] == "first-16"


def test_the_apis_document_has_it(server: ServerThread) -> None:
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert paths[EXPLAIN]["post"]["requestBody"] == paths[COMPLETIONS]["post"]["requestBody"]
