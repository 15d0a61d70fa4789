"""config.json read without transformers means what it means to transformers, or is left to it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from foreword.model.checkpoint.config_json import complete
from foreword.model.checkpoint.tensors import UnreadableError
from foreword.model.decoder.families import FAMILIES, Fields, UnwrittenError
from foreword.model.spec import DecoderSpec
from tiny_models import BASE, RECIPES

READ = "llama mistral qwen2 qwen3 smollm3 granite gemma2 gemma3_text phi3 olmo2 cohere2".split()
READ += ["mixtral", "qwen3_moe", "gpt_oss", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"]
ROPES: tuple[Mapping[str, Any] | None, ...] = (
    None,
    {"type": "linear", "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
)
OTHERS: tuple[Mapping[str, Any], ...] = (
    {},
    {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
    {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 16},
    {"sliding_window_pattern": 3, "rope_local_base_freq": 7000.0, "sliding_window": None},
    {"num_key_value_heads": 1.5},
    {"eos_token_id": [1, 2], "original_max_position_embeddings": 128},
)


def variants(full: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Files of today without a field or with null in its place, and files as they were written once."""
    yield dict(full)
    for name in full:
        if name != "model_type":
            yield {key: value for key, value in full.items() if key != name}
            yield {**full, name: None}
    new = ("rope_parameters", "layer_types", "dtype", "no_rope_layers")
    older = {key: value for key, value in full.items() if key not in new} | {"torch_dtype": "float16"}
    for rope in ROPES:
        for other in OTHERS:
            yield {**older, "rope_scaling": rope, **other}


def meaning(values: Mapping[str, Any]) -> DecoderSpec | str:
    fields = Fields(values)
    try:
        spec = FAMILIES[values["model_type"]](fields)
    except UnwrittenError as error:
        return str(error)
    return str(fields.unread()) if fields.unread() else spec


@pytest.mark.parametrize("family", READ)
def test_a_file_means_what_it_means_to_transformers(family: str, tmp_path: Path) -> None:
    recipe = RECIPES[family]
    AutoConfig.for_model(recipe.model_type, **{**BASE, **recipe.options}).save_pretrained(tmp_path)
    path, num_read = tmp_path / "config.json", 0
    for raw in variants(json.loads(path.read_text())):
        try:
            own = complete(json.loads(json.dumps(raw)))
        except UnreadableError:
            continue
        found = meaning(own)
        if isinstance(found, str):
            continue  # transformers reads it
        path.write_text(json.dumps(raw))
        theirs = AutoConfig.from_pretrained(tmp_path).to_dict()  # raises what it refuses
        assert found == meaning(theirs), raw
        assert own["eos_token_id"] == theirs["eos_token_id"]
        assert str(own["dtype"]) == str(theirs["dtype"]).removeprefix("torch.")
        num_read += 1
    assert num_read >= 25
