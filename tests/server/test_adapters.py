"""Adapters over HTTP: as models in every dialect, loaded and unloaded by operators."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from doors import take_no_adapter
from foreword.errors import ConfigError
from foreword.llm import LLM
from foreword.model.adapters import loaded
from foreword.model.adapters.weights import AdapterWeights
from foreword.server.access.adapters import ServedAdapters
from foreword.server.access.tenants import read_keys
from foreword.server.options import ServerConfig
from foreword.server.service import MANY_MESSAGES
from live_server import MODEL, ServerThread, client, wait_until
from peft_folders import save_adapter
from tiny_models import TinyModels

TEXT = "The prefix that two requests share is computed once, whoever asks for it."
OPERATOR = {"Authorization": "Bearer op"}


@pytest.fixture(scope="module")
def base(tiny_models: TinyModels) -> Path:
    return tiny_models.folder_with_tokenizer("llama")


@pytest.fixture(scope="module")
def sql(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapter(tmp_path_factory.mktemp("adapters") / "sql", base)


@pytest.fixture(scope="module")
def server(base: Path, sql: Path) -> Iterator[ServerThread]:
    config = ServerConfig(lora_modules=(f"sql={sql}",), operator_key="op")
    options: dict[str, Any] = {"kv_cache_memory_bytes": 4 << 20, "self_check": False, "enable_lora": True}
    with LLM(str(base), **options) as llm, ServerThread(llm, config) as server:
        yield server


def complete(server: ServerThread, model: str, prompt: str = TEXT, **more: Any) -> Any:
    return client(server.url).completions.create(
        model=model, prompt=prompt, max_tokens=6, temperature=0, extra_body={"ignore_eos": True}, **more
    )


def change(server: ServerThread, path: str, key: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json=body, headers=key or OPERATOR, timeout=60)


def cached(answer: Any) -> int:
    return answer.usage.prompt_tokens_details.cached_tokens


def test_an_adapter_is_a_model_in_every_dialect(server: ServerThread) -> None:
    [own, adapter] = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert (own["id"], own.get("parent")) == (MODEL, None)
    assert (adapter["id"], adapter["parent"]) == ("sql", MODEL)
    plain, changed = complete(server, MODEL), complete(server, "sql")
    assert plain.choices[0].text != changed.choices[0].text
    assert changed.model == "sql"
    [kept] = re.findall(
        r'^foreword_kept_bytes\{.*what="adapters".*\} (.+)$',
        httpx.get(f"{server.url}/metrics", headers=OPERATOR).text,
        re.M,
    )
    assert float(kept) > 1000
    assert cached(changed) == 0
    assert cached(complete(server, "sql")) > 0

    messages = [{"role": "user", "content": "a b c"}]
    anthropic = {"max_tokens": 6, "temperature": 0, "messages": messages}
    gemini = {
        "contents": [{"role": "user", "parts": [{"text": "a b c"}]}],
        "generationConfig": {"maxOutputTokens": 6, "temperature": 0},
    }
    openai = {"max_tokens": 6, "temperature": 0, "messages": messages}
    answers: dict[str, list[str]] = {"sql": [], MODEL: []}
    for model, texts in answers.items():
        chat = httpx.post(f"{server.url}/v1/chat/completions", json={"model": model, **openai}, timeout=60).json()
        texts.append(chat["choices"][0]["message"]["content"])
        message = httpx.post(f"{server.url}/v1/messages", json={"model": model, **anthropic}, timeout=60).json()
        texts.append("".join(part["text"] for part in message["content"]))
        content = httpx.post(f"{server.url}/v1beta/models/{model}:generateContent", json=gemini, timeout=60).json()
        texts.append("".join(part["text"] for part in content["candidates"][0]["content"]["parts"]))
        response = {"model": model, "input": messages, "max_output_tokens": 6, "temperature": 0}
        said = httpx.post(f"{server.url}/v1/responses", json=response, timeout=60).json()
        texts.append(said["output"][0]["content"][0]["text"])
    assert len(set(answers["sql"])) == len(set(answers[MODEL])) == 1
    assert answers["sql"] != answers[MODEL]
    names = httpx.get(f"{server.url}/v1beta/models").json()["models"]
    assert {name["name"] for name in names} == {"models/sql", f"models/{MODEL}"}


def test_a_lookup_is_explained_under_the_adapter(server: ServerThread) -> None:
    text = "Another text, which only the model itself has seen so far, and which fills a few blocks of its cache."
    complete(server, MODEL, text)

    def explain(model: str) -> Any:
        return httpx.post(f"{server.url}/v1/cache/explain", json={"model": model, "prompt": text}).json()

    assert explain(MODEL)["hit_tokens"] > 0
    told = explain("sql")
    assert told["hit_tokens"] == 0
    assert told["reason"] == "adapter_differs"


def test_operators_load_and_unload_adapters(server: ServerThread, base: Path, sql: Path, tmp_path: Path) -> None:
    new = save_adapter(tmp_path / "new", base, seed=1)
    assert change(server, "load_lora_adapter", {"x": "y"}, lora_name="new", lora_path=str(new)).status_code == 401
    assert change(server, "load_lora_adapter", lora_name=MODEL, lora_path=str(new)).status_code == 400
    assert change(server, "load_lora_adapter", lora_name="sql", lora_path=str(new)).status_code == 400
    wrong = change(server, "load_lora_adapter", lora_name="new", lora_path=str(tmp_path))
    assert wrong.status_code == 400
    assert "adapter_config.json" in wrong.text
    assert complete(server, "sql").choices
    with pytest.raises(Exception, match="404"):
        complete(server, "new")

    assert change(server, "load_lora_adapter", lora_name="new", lora_path=str(new)).status_code == 200
    first = complete(server, "new")
    assert first.choices[0].text != complete(server, "sql").choices[0].text
    # Other bytes under the name: no hit. The bytes of "sql": its hits.
    changed = change(server, "load_lora_adapter", lora_name="new", lora_path=str(sql), load_inplace=True)
    assert changed.status_code == 200
    second = complete(server, "new")
    assert second.choices[0].text == complete(server, "sql").choices[0].text
    assert cached(second) > 0
    save_adapter(new, base, seed=2)
    assert (
        change(server, "load_lora_adapter", lora_name="new", lora_path=str(new), load_inplace=True).status_code == 200
    )
    assert cached(complete(server, "new")) == 0
    assert change(server, "unload_lora_adapter", {"x": "y"}, lora_name="new").status_code == 401
    assert change(server, "unload_lora_adapter", lora_name="new", lora_int_id=3).status_code == 200
    assert change(server, "unload_lora_adapter", lora_name="new").status_code == 404
    with pytest.raises(Exception, match="404"):
        complete(server, "new")


def test_clients_do_not_see_where_a_broken_adapter_lies(
    server: ServerThread, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_adapter(tmp_path / "breaks", base, seed=3)
    assert change(server, "load_lora_adapter", lora_name="breaks", lora_path=str(folder)).status_code == 200
    content, messages = {"contents": [{"parts": [{"text": "a"}]}]}, [{"role": "user", "content": "a"}]
    calls: list[tuple[str, dict[str, Any]]] = [
        ("v1/completions", {"model": "breaks", "prompt": "a", "max_tokens": 1}),
        ("v1/chat/completions", {"model": "breaks", "messages": messages, "max_tokens": 1}),
        ("v1/messages", {"model": "breaks", "messages": messages, "max_tokens": 1}),
        ("v1beta/models/breaks:generateContent", content),
        ("v1/cache/explain", {"model": "breaks", "prompt": "a"}),
    ]

    def refused_with(status: int) -> None:
        for path, body in calls:
            answer = httpx.post(f"{server.url}/{path}", json=body, timeout=60)
            assert (answer.status_code, str(tmp_path) in answer.text) == (status, False), answer.text

    assert server.service.llm.adapters is not None
    save_adapter(folder, base, seed=6)
    with monkeypatch.context() as patch:
        take_no_adapter(patch, server.service.llm.adapters)
        refused_with(429)  # as if requests held too many others
    (folder / "adapter_model.safetensors").write_bytes(b"{}")
    refused_with(503)
    told = change(server, "load_lora_adapter", lora_name="breaks", lora_path=str(folder), load_inplace=True)
    assert (told.status_code, str(tmp_path) in told.text) == (400, True)
    assert change(server, "unload_lora_adapter", lora_name="breaks").status_code == 200


def test_an_adapter_that_is_slow_to_read_holds_up_nobody_else(
    server: ServerThread, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = str(save_adapter(tmp_path / "slow", base, seed=4))
    assert change(server, "load_lora_adapter", lora_name="slow", lora_path=folder).status_code == 200
    go_on, read = threading.Event(), loaded.read_adapter

    def slowly(path: str, *more: Any) -> AdapterWeights:
        assert path != folder or go_on.wait(60)
        return read(path, *more)

    monkeypatch.setattr(loaded, "read_adapter", slowly)
    service = server.service
    with ThreadPoolExecutor(6) as threads:
        try:
            slow = [threads.submit(complete, server, "slow") for _ in range(6)]
            wait_until(lambda: folder in service.adapters._next)
            assert complete(server, "sql").choices
            many = [{"role": "user", "content": "a"}] * MANY_MESSAGES  # tokenized in a thread
            body = {"model": MODEL, "messages": many, "max_tokens": 1}
            assert httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=30).status_code == 200
            crew = service.crews.adapters
            assert (crew.num_running, crew.num_waiting) == (1, 0)
        finally:
            go_on.set()
        assert len({one.result().choices[0].text for one in slow}) == 1
    assert not service.adapters._reading
    assert not service.adapters._next
    assert change(server, "unload_lora_adapter", lora_name="slow").status_code == 200


def test_a_cached_content_under_an_alora_adapter_is_found_by_conversations(
    server: ServerThread, base: Path, tmp_path: Path
) -> None:
    """The adapter begins at the last answer, and not at the earlier one in the cached content."""
    tokens = server.service.tokenizer.render_chat([{"role": "user", "content": "a"}]).tolist()
    invocation = tokens[len(tokens) - 1 - tokens[::-1].index(tokens[0]) :]
    folder = save_adapter(tmp_path / "judge", base, seed=5, alora_invocation_tokens=invocation)
    assert change(server, "load_lora_adapter", lora_name="judge", lora_path=str(folder)).status_code == 200
    contents = [{"role": "user", "parts": [{"text": "b"}]}, {"role": "model", "parts": [{"text": TEXT}]}]
    made = httpx.post(
        f"{server.url}/v1beta/cachedContents", json={"model": "models/judge", "contents": contents}
    ).json()
    num_tokens, size = made["usageMetadata"]["totalTokenCount"], server.service.llm.layout.block_size
    assert num_tokens >= 2 * size
    body = {
        "contents": [{"role": "user", "parts": [{"text": "c"}]}],
        "cachedContent": made["name"],
        "generationConfig": {"maxOutputTokens": 1},
    }
    answer = httpx.post(f"{server.url}/v1beta/models/judge:generateContent", json=body, timeout=60).json()
    assert answer["usageMetadata"]["cachedContentTokenCount"] >= num_tokens // size * size
    assert httpx.delete(f"{server.url}/v1beta/{made['name']}").status_code == 200
    assert change(server, "unload_lora_adapter", lora_name="judge").status_code == 200


def test_modules_are_names_and_paths_or_vllms_json(server: ServerThread, sql: Path) -> None:
    llm = server.service.llm
    served = ServedAdapters(llm, [f"a={sql}", f'{{"name": "b", "path": "{sql}"}}'], ())
    assert served.names == ("a", "b")
    for wrong in ("a", "{", '{"name": 1, "path": "x"}', "a="):
        with pytest.raises(ConfigError, match="use name=path"):
            ServedAdapters(llm, [wrong], ())


def calls_of(name: str) -> list[tuple[str, str, Any]]:
    """Calls that name a model, of every dialect."""
    plain, messages = {"model": name, "prompt": TEXT}, [{"role": "user", "content": "a b c"}]
    return [
        ("POST", "v1/completions", {**plain, "max_tokens": 2}),
        ("POST", "v1/cache/explain", plain),
        ("POST", "tokenize", plain),
        ("POST", "detokenize", {"model": name, "tokens": [1]}),
        ("GET", f"v1/models/{name}", None),
        ("POST", "v1/messages/count_tokens", {"model": name, "messages": messages}),
        ("GET", f"v1beta/models/{name}", None),
        ("POST", f"v1beta/models/{name}:countTokens", {"contents": [{"parts": [{"text": "a"}]}]}),
        ("POST", "api/show", {"model": f"{name}:latest"}),
        ("POST", "api/chat", {"model": name, "messages": []}),
    ]


def test_a_tenant_uses_the_adapters_that_its_keys_file_names(base: Path, sql: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text('[a]\nkeys = ["ka"]\nadapters = ["sql"]\n[b]\nkeys = ["kb"]\nadapters = []\n[c]\nkeys = ["kc"]\n')
    config = ServerConfig(lora_modules=(f"sql={sql}", f"new={sql}"), keys_file=keys)
    options: dict[str, Any] = {"kv_cache_memory_bytes": 4 << 20, "self_check": False, "enable_lora": True}
    with LLM(str(base), **options) as llm, ServerThread(llm, config) as server:
        for key, allowed in (("ka", {"sql"}), ("kb", set()), ("kc", {"sql", "new"})):
            own = {"Authorization": f"Bearer {key}"}
            listed = httpx.get(f"{server.url}/v1/models", headers=own).json()["data"]
            assert {one["id"] for one in listed} == {MODEL, *allowed}
            tags = httpx.get(f"{server.url}/api/tags", headers=own).json()["models"]
            assert {one["name"] for one in tags} == {MODEL, *allowed}
            for name in (MODEL, "sql", "new"):
                for method, path, body in calls_of(name):
                    answer = httpx.request(method, f"{server.url}/{path}", json=body, headers=own, timeout=60)
                    assert answer.status_code == (200 if name in {MODEL, *allowed} else 404), (path, answer.text)


def test_a_list_of_adapters_that_is_none_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text('[alice]\nkeys = ["a"]\nadapters = "sql"\n')
    with pytest.raises(ConfigError, match=r"alice.*adapters='sql' must be a list of names"):
        read_keys(path)


def test_a_linked_prompt_under_an_adapter_is_refused_before_anything_is_looked_up(server: ServerThread) -> None:
    asked = {"model": "sql", "link": "none", "session_id": "s"}
    for path, more in (
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("pml/completions", {"documents": ["a"], "question": "b"}),
        ("pml/explain", {"documents": ["a"], "question": "b"}),
    ):
        error = httpx.post(f"{server.url}/v1/{path}", json={**asked, **more}, timeout=60).json()["error"]
        assert (error["param"], "takes no model that is an adapter" in error["message"]) == ("model", True)
