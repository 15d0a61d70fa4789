"""Adapters through `LLM`: keys by content, folders that change, prefixes that are pinned, exported and explained."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foreword import LLM, LoRARequest
from foreword.cache import MissReason
from foreword.errors import AdaptersBusyError, ConfigError, InvalidRequestError
from foreword.model.adapters import loaded
from peft_folders import save_adapter
from real_models import real_model
from tiny_models import TinyModels, greedy

OPTIONS: dict[str, Any] = {"kv_cache_memory_bytes": 4 << 20, "self_check": False, "enable_lora": True}
PROMPT = {"prompt_token_ids": list(range(3, 93))}


@pytest.fixture
def folder(tiny_models: TinyModels) -> Path:
    return tiny_models.folder("llama")


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), max_loras=2, **OPTIONS) as llm:
        yield llm
        llm.engine.check_integrity()


def ask(llm: LLM, request: LoRARequest | None, prompt: Any = PROMPT) -> tuple[list[int], int]:
    """The answer, and the number of tokens that were cached."""
    [output] = llm.generate(prompt, greedy(6), lora_request=request)
    return output.outputs[0].token_ids, output.num_cached_tokens


def test_the_same_bytes_under_two_names_share_and_other_bytes_under_one_name_do_not(
    llm: LLM, folder: Path, tmp_path: Path
) -> None:
    one = save_adapter(tmp_path / "one", folder)
    sql, other = LoRARequest("sql", 1, str(one)), LoRARequest("other", 2, str(shutil.copytree(one, tmp_path / "two")))
    plain, answer = ask(llm, None), ask(llm, sql)
    assert answer[0] != plain[0]
    assert answer[1] == 0
    assert ask(llm, other) == (answer[0], 89)
    assert llm.adapters is not None
    assert llm.adapters.get(sql.lora_path) is llm.adapters.get(other.lora_path)
    save_adapter(one, folder, seed=1)
    changed = ask(llm, sql)
    assert changed[0] != answer[0]
    assert changed[1] == 0
    found = llm.explain({"prompt_token_ids": list(range(3, 93))}, lora_request=LoRARequest("x", 3, str(one)))
    assert found.num_hit_tokens == 89
    save_adapter(one, folder)
    assert ask(llm, sql) == (answer[0], 89)
    assert ask(llm, None) == (plain[0], 89)


def test_a_miss_says_that_the_adapter_differs(llm: LLM, folder: Path, tmp_path: Path) -> None:
    request = LoRARequest("sql", 1, str(save_adapter(tmp_path / "one", folder)))
    ask(llm, None)
    explanation = llm.explain(PROMPT, lora_request=request)
    assert (explanation.num_hit_tokens, explanation.reason) == (0, MissReason.ADAPTER_DIFFERS)
    ask(llm, request)
    assert llm.explain(PROMPT, lora_request=request).num_hit_tokens == 89


def test_the_least_recently_used_adapter_leaves_memory(
    llm: LLM, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded, "SETTLED_S", -1e9)  # as if the files were old
    assert llm.adapters is not None
    paths = [str(save_adapter(tmp_path / str(n), folder, seed=n)) for n in range(3)]
    requests = [LoRARequest(f"a{n}", n + 1, path) for n, path in enumerate(paths)]
    output = llm.add_request(PROMPT, greedy(30), lora_request=requests[0])
    llm.engine.step()
    held = llm.adapters.num_bytes
    ask(llm, requests[1])  # the first request goes on beside it
    ask(llm, requests[2])
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    assert len(llm.adapters) == 2
    assert held < llm.adapters.num_bytes
    first, again = output.outputs[0].token_ids, llm.generate(PROMPT, greedy(30), lora_request=requests[0])
    assert again[0].outputs[0].token_ids == first
    kept = llm.adapters.get(paths[0])
    assert llm.adapters.get(paths[0]) is kept  # not read again


def test_a_folder_that_changed_in_place_is_read_again(
    llm: LLM, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded, "SETTLED_S", -1e9)
    assert llm.adapters is not None
    one, other = save_adapter(tmp_path / "one", folder), save_adapter(tmp_path / "other", folder, seed=1)
    before, file = llm.adapters.get(str(one)), one / loaded.WEIGHTS
    told = file.stat()
    file.write_bytes((other / loaded.WEIGHTS).read_bytes())
    os.utime(file, ns=(told.st_atime_ns, told.st_mtime_ns))
    now = file.stat()
    assert (now.st_ino, now.st_size, now.st_mtime_ns) == (told.st_ino, told.st_size, told.st_mtime_ns)
    assert llm.adapters.get(str(one)).digest != before.digest


def test_adapters_that_requests_hold_are_bounded_in_bytes(llm: LLM, folder: Path, tmp_path: Path) -> None:
    assert llm.adapters is not None
    paths = [str(save_adapter(tmp_path / str(n), folder, seed=n, rank=16)) for n in range(5)]
    held = [llm.adapters.get(path) for path in paths[:4]]  # max_loras=2 of the largest rank, twice
    with pytest.raises(AdaptersBusyError, match="raise max_loras"):
        llm.adapters.get(paths[4])
    assert llm.adapters.get(str(shutil.copytree(paths[0], tmp_path / "again"))) is held[0]
    assert llm.adapters.num_bytes == sum(adapter.num_bytes for adapter in held)
    digest = held.pop().digest
    assert llm.adapters.get(paths[4]).digest != digest


def test_a_list_has_an_adapter_for_each_prompt(llm: LLM, folder: Path, tmp_path: Path) -> None:
    request = LoRARequest("sql", 1, str(save_adapter(tmp_path / "one", folder)))
    own = [None, request, None, request]
    outputs = llm.generate([PROMPT] * 4, greedy(6), lora_request=own)
    answers = [output.outputs[0].token_ids for output in outputs]
    assert answers == [ask(llm, one)[0] for one in own]
    with pytest.raises(InvalidRequestError, match="4 prompts, but 1 lora_requests"):
        llm.generate([PROMPT] * 4, greedy(6), lora_request=[request])
    with pytest.raises(InvalidRequestError, match="max_lora_rank=16"):
        ask(llm, LoRARequest("wide", 1, str(save_adapter(tmp_path / "wide", folder, rank=17))))


def test_a_prefix_under_an_adapter_is_exported_pinned_and_found_again(llm: LLM, folder: Path, tmp_path: Path) -> None:
    for name, config in (("lora", {}), ("alora", {"alora_invocation_tokens": [60, 61]})):
        request = LoRARequest(name, 1, str(save_adapter(tmp_path / name, folder, **config)))
        answer, _ = ask(llm, request)
        assert llm.pin_prefix(PROMPT, lora_request=request) >= 80
        llm.unpin_prefix(PROMPT, lora_request=request)
        file = tmp_path / f"{name}.fwkv"
        llm.export_prefix(PROMPT, file, with_text=True, lora_request=request)
        with LLM(str(folder), **OPTIONS) as other:
            assert other.import_prefixes(file).rejected is None
            assert ask(other, None)[1] == (0 if name == "lora" else 57)
            assert ask(other, request) == (answer, 80)


def test_blocks_under_an_adapter_are_found_on_disk_by_content(folder: Path, tmp_path: Path) -> None:
    one = save_adapter(tmp_path / "one", folder)
    options = {**OPTIONS, "cache_dir": str(tmp_path / "cache")}
    with LLM(str(folder), **options) as llm:
        answer, _ = ask(llm, LoRARequest("sql", 1, str(one)))
    with LLM(str(folder), **options) as llm:
        renamed = shutil.copytree(one, tmp_path / "renamed")
        assert ask(llm, LoRARequest("x", 1, str(renamed))) == (answer, 80)
        save_adapter(one, folder, seed=1)
        assert ask(llm, LoRARequest("sql", 1, str(one)))[1] == 0


def test_what_cannot_have_adapters_says_so(folder: Path, tiny_models: TinyModels, tmp_path: Path) -> None:
    off = {**OPTIONS, "enable_lora": False}
    with LLM(str(folder), **off) as llm, pytest.raises(InvalidRequestError, match="enable_lora=True"):
        ask(llm, LoRARequest("x", 1, str(tmp_path)))
    with pytest.raises(ConfigError, match="written family"):
        LLM(str(tiny_models.folder("llama4_text")), **OPTIONS)
    with pytest.raises(ConfigError, match="max_loras=0"):
        LLM(str(folder), max_loras=0, **OPTIONS)


@pytest.mark.slow
def test_a_real_model_runs_under_an_adapter(tmp_path: Path) -> None:
    base = real_model("smollm2")
    shrunk = save_adapter(tmp_path / "one", base, rank=16, size=0.1)
    said = json.loads((shrunk / "adapter_config.json").read_text())
    assert len(said["target_modules"]) == 7
    with LLM(str(base), dtype="float32", **OPTIONS | {"kv_cache_memory_bytes": 64 << 20}) as llm:
        request = LoRARequest("made up", 1, str(shrunk))
        chat = [{"role": "user", "content": "Name three colours."}]
        cold = llm.chat(chat, greedy(8), lora_request=request)[0]
        plain = llm.chat(chat, greedy(8))[0]
        warm = llm.chat(chat, greedy(8), lora_request=request)[0]
        assert warm.outputs[0].token_ids == cold.outputs[0].token_ids != plain.outputs[0].token_ids
        assert plain.num_cached_tokens == 0
        assert warm.num_cached_tokens == len(warm.prompt_token_ids) - 1
