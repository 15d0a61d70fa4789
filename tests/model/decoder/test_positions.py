"""Rotary settings of real models beyond the original context: the logits of transformers, cold, warm and in chunks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foreword.config import ModelConfig
from foreword.model.decoder import families
from foreword.model.decoder.families import FAMILIES
from foreword.model.loader import LoadedModel, load_model
from foreword.model.self_check import ShortPrompt
from lanes import SLOW
from tiny_models import RECIPES, Oracle, Recipe, build_engine, complete, greedy, random_tokens, save_model

ORIGINAL, LENGTH = 64, 300
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e3, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
GPT_OSS = {**YARN, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
DEEPSEEK = {**YARN, "factor": 40.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.3 * n for n in range(8)],
    "long_factor": [2.0 + n for n in range(8)],
}
GEMMA3 = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 1e3}}
BEYOND: list[tuple[str, dict[str, Any]]] = [
    ("llama", LLAMA3),
    ("llama", YARN),
    ("llama", LINEAR),
    ("gemma3_text", GEMMA3),
    ("gpt_oss", GPT_OSS),
    ("deepseek_v3", DEEPSEEK),
]
MORE: list[tuple[str, dict[str, Any]]] = [
    *((name, YARN) for name in ("mistral", "qwen2", "qwen3", "smollm3", "granite", "olmo2", "cohere2")),
    *((name, YARN) for name in ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "glm4_moe_lite", "minicpm3")),
    *((name, LLAMA3) for name in ("smollm3", "qwen3")),
]
"""The same tables in other families."""
UP_TO: list[tuple[str, dict[str, Any]]] = [("llama", DYNAMIC), ("phi3", LONGROPE)]
"""Settings that change beyond the original context, which would change a prefix: such models end there."""


def recipe(name: str, said: dict[str, Any]) -> Recipe:
    own = RECIPES[name]
    parts = said if "full_attention" in said else {"": said}
    placed = {
        kind: one
        if one["rope_type"] in ("default", "linear")
        else {**one, "original_max_position_embeddings": ORIGINAL}
        for kind, one in parts.items()
    }
    heads = {"head_dim": 16} if name == "mixtral" else {}  # transformers' yarn needs it said
    ends = {"original_max_position_embeddings": ORIGINAL} if name == "phi3" else {}
    return Recipe(own.model_type, {**own.options, **heads, **ends, "rope_parameters": placed.get("", placed)})


def error(oracle: Oracle, model: LoadedModel, num_tokens: int) -> float:
    prompt = ShortPrompt(model, num_tokens)
    expected = oracle.logits(prompt.tokens.tolist())[-1]
    return float((prompt.logits - expected).abs().max() / expected.abs().max())


def named(cases: list[tuple[str, dict[str, Any]]], marks: list[Any]) -> list[Any]:
    return [pytest.param(*one, id=f"{one[0]}-{one[1].get('rope_type', 'two')}", marks=marks) for one in cases]


@pytest.mark.parametrize(("name", "said"), [*named(BEYOND, []), *named(MORE, SLOW), *named(UP_TO, [])])
def test_logits_are_those_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, said: dict[str, Any]
) -> None:
    folder = save_model(tmp_path, recipe(name, said))
    model, oracle = load_model(ModelConfig(str(folder), dtype="float32")), Oracle(folder, torch.float32)
    assert model.code == {"family": RECIPES[name].model_type}
    ends = said in (DYNAMIC, LONGROPE)
    assert model.max_positions == (ORIGINAL if ends else 1024)
    length = ORIGINAL - 8 if ends else LENGTH
    assert error(oracle, model, length) < 2e-5
    rng = np.random.default_rng(6)
    prompts, engine = [random_tokens(rng, length) for _ in range(2)], build_engine(model, max_num_batched_tokens=41)
    cold = complete(engine, prompts, greedy(8), name="cold")
    computed = engine.num_computed_tokens
    warm = complete(engine, prompts, greedy(8), name="warm")
    assert engine.num_computed_tokens - computed < computed
    for output in cold + warm:
        answer = output.outputs[0].token_ids
        assert answer == oracle.likeliest(output.prompt_token_ids, answer)
    own = FAMILIES[RECIPES[name].model_type]

    def other_kind(fields: families.Fields) -> Any:
        spec = own(fields)
        return replace(spec, rotaries=tuple(replace(one, kind="default") for one in spec.rotaries))

    monkeypatch.setattr(families, "FAMILIES", {**FAMILIES, RECIPES[name].model_type: other_kind})
    if said is not DYNAMIC:  # whose tables up to the original context are the usual ones
        assert error(oracle, load_model(ModelConfig(str(folder), dtype="float32")), length) > 2e-4
