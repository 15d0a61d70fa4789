"""The keys and values of a model's second attention layer, without the model: in any chunks, and beside a step."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from doors import deviations_of
from foreword import LLM, SamplingParams
from foreword.config import Dtype, ModelConfig
from foreword.model import deviation
from foreword.model.deviation import Beginning, KeysValues
from foreword.model.loader import load_model
from tiny_models import RECIPES, VOCAB_SIZE, Recipe, TinyModels, save_model

FULL = ["full_attention"] * 3
MODELS = {
    "llama": RECIPES["llama"],
    "wide_llama": RECIPES["wide_llama"],
    "odd_llama": RECIPES["odd_llama"],
    "cohere2": Recipe("cohere2", {"layer_types": FULL}),
    "phi3": RECIPES["phi3"],
    "qwen2_moe": RECIPES["qwen2_moe"],
    "mistral": RECIPES["mistral"],
    "gpt_oss": Recipe("gpt_oss", {**RECIPES["gpt_oss"].options, "layer_types": FULL}),
}
WINDOWS = {"mistral": 24}
TOKENS = np.random.default_rng(0).integers(3, VOCAB_SIZE, 600).astype(np.int32)
POSITIONS = np.arange(len(TOKENS), dtype=np.int32)


def load(folder: Path, dtype: Dtype = "float32") -> Beginning:
    return Beginning(load_model(ModelConfig(str(folder), dtype=dtype)).decoder)


def same(found: KeysValues, expected: KeysValues) -> bool:
    return all(map(torch.equal, found, expected))


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_later_tokens_and_chunks_change_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: Dtype
) -> None:
    beginning = load(save_model(tmp_path, MODELS[name]), dtype)
    whole = beginning.compute(TOKENS, POSITIONS)
    assert whole[0].shape[:2] == whole[1].shape[:2] == (len(TOKENS), whole[0].shape[1])
    other = np.where(POSITIONS < 300, TOKENS, 5).astype(np.int32)
    changed = beginning.compute(other, POSITIONS)
    assert same((changed[0][:300], changed[1][:300]), (whole[0][:300], whole[1][:300]))
    assert not same(changed, whole)
    for length in (1, 2, 299, 300):
        shorter = beginning.compute(TOKENS[:length], POSITIONS[:length])
        assert same(shorter, (whole[0][:length], whole[1][:length]))
    monkeypatch.setattr(deviation, "PASS_TOKENS", 77)
    assert same(beginning.compute(TOKENS, POSITIONS), whole)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", MODELS)
def test_keys_and_values_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """Windows hide what they hide in the model: with `keep_all_kv` such a model can be linked."""
    beginning = load(save_model(tmp_path, MODELS[name]))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    positions = POSITIONS + np.where(POSITIONS < 200, 3, 90).astype(np.int32)
    with torch.inference_mode():
        every = torch.ones(len(TOKENS), len(TOKENS), dtype=torch.bool)
        hidden = every.triu(1) | every.tril(-WINDOWS.get(name, len(TOKENS)))
        seen = torch.zeros(1, 1, *hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
        cache = plain(
            torch.from_numpy(TOKENS)[None].long(),
            position_ids=torch.from_numpy(positions)[None].long(),
            attention_mask=seen,
            past_key_values=DynamicCache(),  # keeps what windows hide, too
            use_cache=True,
        ).past_key_values
    expected = (cache.layers[1].keys[0].transpose(0, 1), cache.layers[1].values[0].transpose(0, 1))
    for found, own in zip(beginning.compute(TOKENS, positions), expected, strict=True):
        assert float((found - own).abs().max() / own.abs().max()) < 2.0**-16


@pytest.mark.usefixtures("on_cpu")
def test_it_is_computed_beside_steps(tiny_models: TinyModels) -> None:
    """Neither the steps' tokens nor its own bits change."""
    params = SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True)
    with LLM(str(tiny_models.folder("llama")), allow_links=True, num_gpu_blocks_override=90, self_check=False) as llm:
        prompts = [{"prompt_token_ids": TOKENS[start : start + 40].tolist()} for start in range(0, 200, 40)]
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        beginning = deviations_of(llm)._beginning
        assert beginning is not None
        whole, found, done = beginning.compute(TOKENS, POSITIONS), [], threading.Event()

        def compute() -> None:
            while not done.is_set() or not found:
                found.append(same(beginning.compute(TOKENS, POSITIONS), whole))

        threads = [threading.Thread(target=compute) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            llm.reset_prefix_cache()
            again = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        finally:
            done.set()
            for thread in threads:
                thread.join(60)
        assert again == expected
        assert len(found) > 1
        assert all(found)
