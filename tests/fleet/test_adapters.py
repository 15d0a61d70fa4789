"""Adapters behind replicas: each replica reads them for itself, and nobody hits KV of another."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from doors import num_usable
from fleet.local_fleet import Fleet, assert_nothing_is_left, fleet
from foreword.demo.run import embedded_model
from foreword.llm import LLM
from foreword.request import LoRARequest, SamplingParams
from foreword.server.options import ServerConfig
from live_server import MODEL, wait_until
from peft_folders import save_adapter

LORA: dict[str, Any] = {"enable_lora": True, "max_lora_rank": 8}
OPERATOR = {"Authorization": "Bearer op"}
INVOCATION = [65, 66]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    with embedded_model() as base:
        return {
            "sql": save_adapter(root / "sql", base),
            "other": save_adapter(root / "other", base, seed=1),
            "expert": save_adapter(root / "expert", base, seed=2, alora_invocation_tokens=INVOCATION),
        }


@pytest.fixture(scope="module")
def two(folders: dict[str, Path]) -> Iterator[Fleet]:
    names = tuple(f"{name}={folders[name]}" for name in ("sql", "expert"))
    with fleet(2, ServerConfig(lora_modules=names, operator_key="op"), **LORA) as found:
        yield found


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    with embedded_model() as base, LLM(str(base), num_gpu_blocks_override=256, self_check=False, **LORA) as llm:
        yield llm


def prompt_of(topic: int, invoked: bool = False) -> list[int]:
    text = [100 + (topic * 31 + at * at) % 300 for at in range(120)]
    return text + (INVOCATION if invoked else []) + [7, 8, 9]


def complete(found: Fleet, model: str, prompt: list[int], **fields: Any) -> Any:
    body = {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **fields}
    answer = httpx.post(f"{found.url}/v1/completions", json={**body, "logprobs": 0}, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def bits(answer: Any) -> list[float]:
    """The log probabilities of the answer's tokens."""
    return list(answer["choices"][0]["logprobs"]["token_logprobs"])


def expected(alone: LLM, folder: Path | None, prompt: list[int]) -> list[float]:
    asked = None if folder is None else LoRARequest("x", 1, str(folder))
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=0)
    [output] = alone.generate([{"prompt_token_ids": prompt}], params, lora_request=asked)
    [answer] = output.outputs
    return [own[token].logprob for own, token in zip(answer.logprobs, answer.token_ids, strict=True)]


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("kill_after", [None, 0, 3])
def test_answers_are_those_of_one_engine_also_if_a_replica_dies(
    kill_after: int | None, two: Fleet, alone: LLM, folders: dict[str, Path]
) -> None:
    prompt = prompt_of(1)
    for model, folder in ((MODEL, None), ("sql", folders["sql"]), ("expert", folders["expert"])):
        two.link.deaths[:] = [] if kill_after is None else [kill_after]
        assert bits(complete(two, model, prompt)) == expected(alone, folder, prompt)
        two.link.deaths.clear()
    assert_nothing_is_left(two)


def test_an_adapter_hits_its_own_prefix_alone_and_an_expert_the_base_s(two: Fleet) -> None:
    prompt = prompt_of(2, invoked=True)
    assert cached(complete(two, MODEL, prompt)) == 0
    assert cached(complete(two, "sql", prompt)) == 0
    assert cached(complete(two, "sql", prompt)) > 100
    before = dict(two.link.requests)
    assert cached(complete(two, "expert", prompt)) >= 112, "what comes before the invocation is the base's"
    where = {name for name, count in two.link.requests.items() if count > before[name]}
    assert len(where) == 1


def test_other_bytes_under_one_name_are_read_anew_everywhere(
    two: Fleet, alone: LLM, folders: dict[str, Path], tmp_path: Path
) -> None:
    prompt, folder = prompt_of(3), tmp_path / "changing"
    shutil.copytree(folders["sql"], folder)
    load = {"lora_name": "changing", "lora_path": str(folder)}
    assert httpx.post(f"{two.url}/v1/load_lora_adapter", json=load, headers=OPERATOR).status_code == 200
    first = complete(two, "changing", prompt)
    assert bits(first) == expected(alone, folders["sql"], prompt)
    shutil.copytree(folders["other"], folder, dirs_exist_ok=True)
    answer = complete(two, "changing", prompt)
    assert cached(answer) == 0
    assert bits(answer) == expected(alone, folders["other"], prompt)


def test_a_folder_that_a_replica_cannot_read_is_503_and_not_named(
    two: Fleet, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(folders["other"], tmp_path / "here-alone")
    load = {"lora_name": "far", "lora_path": str(folder)}
    assert httpx.post(f"{two.url}/v1/load_lora_adapter", json=load, headers=OPERATOR).status_code == 200
    for llm in two.link.llms.values():  # as if each were a machine without the folder
        monkeypatch.setattr(llm.adapters, "get", lambda folder, get=llm.adapters.get: get(folder + "-elsewhere"))
    body = {"model": "far", "prompt": prompt_of(4), "max_tokens": 2}
    answer = httpx.post(f"{two.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 503
    assert "here-alone" not in answer.text
    assert_nothing_is_left(two)


@pytest.mark.slow
def test_a_new_replica_is_warmed_under_the_adapter(folders: dict[str, Path], alone: LLM) -> None:
    config = ServerConfig(lora_modules=(f"sql={folders['sql']}", f"expert={folders['expert']}"))
    prompts = {"sql": prompt_of(5), "expert": prompt_of(6, invoked=True)}
    with fleet(2, config, **LORA) as found:
        facts = found.on_loop(lambda: found.link.replicas["b"].facts("127.0.0.1"))
        found.on_loop(lambda: found.door.leave("b"))
        for model, prompt in prompts.items():
            for _ in range(3):
                complete(found, model, prompt)
        found.on_loop(lambda: found.door.join("b", facts))
        wait_until(lambda: found.on_loop(lambda: len(found.door.core.mirror("b").parents)) >= 14)
        wait_until(lambda: found.on_loop(lambda: num_usable(found.door.core)) == 2)
        found.on_loop(lambda: found.door.leave("a"))
        for model, prompt in prompts.items():
            answer = complete(found, model, prompt)
            assert cached(answer) >= 96
            assert bits(answer) == expected(alone, folders[model], prompt)
        assert_nothing_is_left(found)
