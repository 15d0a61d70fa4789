"""Block keys say whose KV they are: the weights' content, the layout, and the arithmetic that runs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foreword import LLM, SamplingParams
from foreword.cache import HashIndex, KVCacheManager, TokenSequence
from foreword.engine import Prompt
from foreword.model import identity
from foreword.model.self_check import ShortPrompt
from tiny_models import RECIPES, TinyModels, save_model

PROMPT = list(range(3, 67))


def open_llm(folder: Path, **options: Any) -> LLM:
    options = {"dtype": "float32", "kv_cache_memory_bytes": 1 << 22, "self_check": False, **options}
    return LLM(str(folder), **options)


def root_of(folder: Path, **options: Any) -> bytes:
    with open_llm(folder, **options) as llm:
        return sequence_of(llm).root


def sequence_of(llm: LLM) -> TokenSequence:
    return llm.engine.check("r", Prompt(np.array(PROMPT, np.int32)), SamplingParams(max_tokens=1))[0]


pytestmark = pytest.mark.usefixtures("on_cpu")


def test_other_weights_in_a_folder_of_the_same_name_find_nothing(tmp_path: Path) -> None:
    """Both requests look into one index, as they would into one store."""
    sequences = []
    for seed in (0, 1):
        folder = save_model(tmp_path / str(seed) / "model", RECIPES["llama"], seed=seed)
        with open_llm(folder) as llm:
            sequences.append(sequence_of(llm))
    for number, writer in enumerate(sequences):
        for reader in sequences:
            shared = KVCacheManager(16, block_size=16, index=HashIndex(16))
            held = shared.get_computed_blocks(writer)
            assert held.num_tokens == 0
            shared.begin_step()
            assert shared.allocate_slots(writer, len(writer), held) is not None
            shared.free(writer.request_id)
            found = shared.get_computed_blocks(reader).num_tokens
            assert found == (len(PROMPT) - 1 if reader is writer else 0), number


def test_one_flipped_bit_of_the_weights_is_another_model(chat_model: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(chat_model, moved)
    with open_llm(chat_model) as llm:
        own = llm.cache_identity
    with open_llm(moved) as llm:
        assert llm.cache_identity == own, "neither place nor name is part of it"
    path = moved / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-4] ^= 1  # the least bit of the last weight
    path.write_bytes(content)
    with open_llm(moved) as llm:
        assert llm.cache_identity.model_id != own.model_id
        assert llm.cache_identity.layout == own.layout
        assert llm.cache_identity.namespace != own.namespace


def test_precision_layout_sinks_salt_and_configuration_change_the_root(chat_model: Path, tmp_path: Path) -> None:
    slower = tmp_path / "other configuration"
    shutil.copytree(chat_model, slower)
    config = json.loads((slower / "config.json").read_text())
    config["rms_norm_eps"] = 2 * config["rms_norm_eps"]
    (slower / "config.json").write_text(json.dumps(config))
    roots = [
        root_of(chat_model),
        root_of(slower),
        root_of(chat_model, dtype="bfloat16"),
        root_of(chat_model, block_size=32),
        root_of(chat_model, kv_cache_dtype="int8"),
        root_of(chat_model, dtype="bfloat16", kv_cache_dtype="int8"),
        root_of(chat_model, sink_token_ids=(1,) * 16),
        root_of(chat_model, sink_token_ids=(2,) * 16),
        root_of(chat_model, key_salt="another deployment"),
        root_of(chat_model, attention_kernel="reference"),
        root_of(chat_model, cache_exact=False),
    ]
    assert len(set(roots)) == len(roots)
    same = [
        root_of(chat_model, self_check=True),
        root_of(chat_model, num_gpu_blocks_override=9),
        root_of(chat_model, prefix_index="hash"),
    ]
    assert set(same) == {roots[0]}


def test_kernels_of_other_bits_share_blocks_only_if_they_are_asked_to(chat_model: Path) -> None:
    def identities(**options: Any) -> list[Any]:
        found = []
        for kernel in ("cpu", "reference"):
            with open_llm(chat_model, attention_kernel=kernel, **options) as llm:
                found.append(llm.cache_identity)
        return found

    exact, shared = identities(), identities(cache_exact=False)
    assert exact[0].model_id == exact[1].model_id == shared[0].model_id
    assert exact[0].arithmetic_id != exact[1].arithmetic_id
    assert shared[0].namespace == shared[1].namespace
    assert len({*(one.namespace for one in exact), shared[0].namespace}) == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon_h1", "gemma2"])
@pytest.mark.usefixtures("num_threads")
def test_arithmetic_is_the_same_with_one_thread_and_two(tiny_models: TinyModels, family: str, dtype: Any) -> None:
    model, found = tiny_models.loaded(family, dtype), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(identity.arithmetic_facts(model, ShortPrompt(model).digest()))
    assert found[0] == found[1]


def test_the_probe_notices_what_no_version_tells(tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_models.loaded("llama")
    before = ShortPrompt(model).digest()
    assert ShortPrompt(model).digest() == before
    attend = type(model.kernel).attend

    def last_bits_off(*arguments: Any) -> torch.Tensor:
        output = attend(*arguments)
        output.view(torch.int32)[:] ^= 1
        return output

    monkeypatch.setattr(type(model.kernel), "attend", last_bits_off)
    assert ShortPrompt(model).digest() != before


def test_a_new_version_of_the_arithmetic_is_other_arithmetic(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_models.loaded("llama")
    before = identity.arithmetic_facts(model, "probe")
    monkeypatch.setattr(identity, "ARITHMETIC_VERSION", identity.ARITHMETIC_VERSION + 1)
    assert identity.arithmetic_facts(model, "probe") != before


def test_another_process_finds_the_same_identity(chat_model: Path) -> None:
    with open_llm(chat_model) as llm:
        own = llm.cache_identity.description()
    code = (
        "import gc, json, sys; gc.disable(); from foreword import LLM; import torch; torch.set_num_threads(1);"
        "llm = LLM(sys.argv[1], dtype='float32', kv_cache_memory_bytes=1 << 22, self_check=False);"
        "print(json.dumps(llm.cache_identity.description()))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(chat_model)], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == json.loads(json.dumps(own))


def test_hits_in_one_process_are_as_before(chat_model: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2)
    with open_llm(chat_model, cache_exact=False) as llm:
        outputs = [llm.generate({"prompt_token_ids": PROMPT}, params)[0] for _ in range(2)]
    assert [output.num_cached_tokens for output in outputs] == [0, len(PROMPT) - 1]
