"""config.json read without transformers means what it means to transformers, or is left to it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from foreword import LLM, SamplingParams
from foreword.config import ModelConfig
from foreword.errors import ForewordError, ModelLoadError
from foreword.model.checkpoint.config_json import complete
from foreword.model.checkpoint.tensors import UnreadableError
from foreword.model.decoder.families import FAMILIES, Fields, UnwrittenError
from foreword.model.loader import load_model
from foreword.model.spec import DecoderSpec
from foreword.request import StructuredOutputsParams
from tiny_models import BASE, RECIPES, TinyModels

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


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"vocab_size": 0}, "cannot"),
        ({"num_attention_heads": 0}, "cannot"),
        ({"text_config": []}, "cannot"),
        ({"model_type": {"a": 1}}, "cannot"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000; at most 4096 are read"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2, "original_max_position_embeddings": "x"}},
            "original_max_position_embeddings='x', which is no number of tokens",
        ),
        ({"eos_token_id": "</s>"}, "cannot"),
        (DEEP, "cannot be read"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_file_that_makes_no_sense_is_refused(
    tiny_models: TinyModels, tmp_path: Path, changes: dict[str, Any] | str, complaint: str
) -> None:
    folder = shutil.copytree(tiny_models.folder("llama"), tmp_path / "model")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(changes if isinstance(changes, str) else json.dumps({**raw, **changes}))
    with pytest.raises(ForewordError, match=re.escape(complaint)):
        load_model(ModelConfig(str(folder)))


@pytest.mark.parametrize("ends", ["</s>", [1, "2"], [[1]], 2.0])
def test_end_tokens_that_are_no_numbers_are_refused(tiny_models: TinyModels, tmp_path: Path, ends: Any) -> None:
    folder = shutil.copytree(tiny_models.folder("llama"), tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with pytest.raises(ModelLoadError, match="which is neither a token's number nor a list"):
        load_model(ModelConfig(str(folder)))


def test_end_tokens_beyond_the_vocabulary_end_nothing(tiny_models: TinyModels, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_models.folder_with_tokenizer("llama"), tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, 10**12]}))
    llm = LLM(str(folder))
    [output] = llm.generate("Hello", SamplingParams(temperature=0, min_tokens=4, max_tokens=4))
    assert len(output.outputs[0].token_ids) == 4
    regex = SamplingParams(temperature=0, max_tokens=4, structured_outputs=StructuredOutputsParams(regex="ab"))
    [output] = llm.generate("Hello", regex)
    assert output.outputs[0].text == "ab"
