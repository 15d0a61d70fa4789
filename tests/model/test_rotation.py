"""Which models' keys can be moved is found by trial; the others are refused by layer and reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from foreword import LLM
from foreword.config import Dtype, ModelConfig
from foreword.errors import UnsupportedModelError
from foreword.model.loader import load_plain_model
from tiny_models import RECIPES, Recipe, save_model

YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 256}
FULL = ["full_attention"] * 3
MOVABLE = {
    "llama": Recipe("llama"),
    "yarn, whose tables are scaled": Recipe("llama", {"rope_parameters": YARN}),
    "phi, half of each head": Recipe("phi", {"partial_rotary_factor": 0.5}),
    "glm4, half of each head in pairs": RECIPES["glm4"],
    "cohere, tables in pairs": Recipe("cohere"),
    "smollm3, a layer without positions": Recipe("smollm3", {"no_rope_layers": [1, 0, 1], "layer_types": FULL}),
    "deepseek_v3, the end of each head": RECIPES["deepseek_v3"],
    "gpt_oss, tables with each angle once": Recipe("gpt_oss", {**RECIPES["gpt_oss"].options, "layer_types": FULL}),
}
REFUSED = {
    "gpt2": "values of layer 0 depend on the position",
    "opt": "values of layer 0 depend on the position",
    "bloom": "layer 0 biases scores by distance",
    "mamba2": "layer 0 is recurrent",
    "qwen3_next": "layer 0 is recurrent",
    "llama4_text": "keys of layer 0 do not move by rotation",
    "mistral": "layer 0 attends to a sliding window of 24 tokens",
    "gemma3_text": "layer 0 attends to a sliding window of 8 tokens",
}


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MOVABLE)
def test_keys_that_turn_can_be_moved(tmp_path: Path, name: str, dtype: Dtype) -> None:
    loaded = load_plain_model(ModelConfig(str(save_model(tmp_path, MOVABLE[name])), dtype=dtype, allow_links=True))
    assert loaded.rotation is not None
    assert list(loaded.rotation.turns) == list(loaded.layers)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_turn_is_refused_by_layer_and_reason(tmp_path: Path, name: str) -> None:
    options: dict[str, Any] = {"allow_links": True, "num_gpu_blocks_override": 64}
    with pytest.raises(UnsupportedModelError, match=REFUSED[name]):
        LLM(str(save_model(tmp_path, RECIPES.get(name, Recipe(name)))), **options)


@pytest.mark.usefixtures("on_cpu")
def test_a_window_that_no_request_can_leave_is_none(tmp_path: Path) -> None:
    folder = save_model(tmp_path, Recipe("mistral", {"head_dim": 32, "sliding_window": 256}))
    options: dict[str, Any] = {"allow_links": True, "num_gpu_blocks_override": 64}
    with LLM(str(folder), max_model_len=200, **options) as llm:
        assert llm.engine.limits.allows_links


@pytest.mark.usefixtures("on_cpu")
def test_nobody_tries_unless_links_are_allowed(tmp_path: Path) -> None:
    assert load_plain_model(ModelConfig(str(save_model(tmp_path, RECIPES["gpt2"])))).rotation is None
