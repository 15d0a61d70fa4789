"""Checkpoints with quantized weights: those that load give the tokens of the plain numbers they stand for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foreword import LLM, SamplingParams
from foreword.config import Dtype, ModelConfig
from foreword.errors import ModelLoadError, UnsupportedModelError
from foreword.model.checkpoint.stored import read_stored
from foreword.model.checkpoint.tensors import UnreadableError
from foreword.model.cpu.coded_product import HAS_INSTRUCTIONS
from foreword.model.decoder.linear import Linear, can_pack
from foreword.model.loader import load_model
from tiny_models import RECIPES, TinyModels, save_model

needs_packed = pytest.mark.skipif(not can_pack(torch.bfloat16, torch.device("cpu")), reason="codes take its place")
PROMPTS = [{"prompt_token_ids": ids} for ids in ([*range(20, 60)], [*range(20, 52)], [7, 5, 3])]
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def describe(folder: Path, **description: Any) -> None:
    """Write into config.json what its weights are."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **description}))


def answers(folder: Path, dtype: Dtype = "bfloat16") -> list[list[int]]:
    with LLM(folder, dtype=dtype, kv_cache_memory_bytes=1 << 20) as llm:
        assert llm.generate(PROMPTS[:1], SamplingParams(temperature=0, max_tokens=1))
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12))
    assert outputs[1].num_cached_tokens > 0
    return [list(output.outputs[0].token_ids) for output in outputs]


def rewrite(plain: Path, quantized: Path, names: str, quantize: Any) -> None:
    """Where a weight's name matches: what `quantize` says it is made of in one folder, and its value in the other."""
    weights, packed = load_file(plain / "model.safetensors"), {}
    for name in [name for name in weights if re.search(names, name)]:
        parts, value = quantize(weights.pop(name))
        packed.update({name + ending: part.contiguous() for ending, part in parts.items()})
        weights[name] = value.contiguous()
    assert packed
    save_file(weights, plain / "model.safetensors", {"format": "pt"})
    kept = {name: weight for name, weight in weights.items() if name not in packed and not re.search(names, name)}
    save_file({**kept, **packed}, quantized / "model.safetensors", {"format": "pt"})


def to_fp8(height: int, width: int, name: str = "_scale_inv") -> Any:
    """Blocks of numbers with a scale each; 0: a whole row or column."""

    def quantize(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        size = height or weight.shape[0], width or weight.shape[1]
        blocks = weight.view(weight.shape[0] // size[0], size[0], weight.shape[1] // size[1], size[1])
        scales = blocks.abs().amax((1, 3)) / 448
        eighths = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
        value = eighths.float() * scales[:, None, :, None]
        return {"": eighths.view(weight.shape), name: scales}, value.view(weight.shape)

    return quantize


def to_mxfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """[experts, in, out] becomes [experts, out, in / 32, 16] bytes of two numbers, and one exponent each."""
    experts, rows, columns = weight.shape
    generator = torch.Generator().manual_seed(rows)
    blocks = torch.randint(0, 256, (experts, columns, rows // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(122, 126, (experts, columns, rows // 32), generator=generator, dtype=torch.uint8)
    numbers = (
        FP4[torch.stack((blocks & 15, blocks >> 4), -1).long()].flatten(3) * torch.exp2(scales.float() - 127)[..., None]
    )
    return {"_blocks": blocks, "_scales": scales}, numbers.flatten(2).transpose(1, 2)


def formats(folder: Path, dtype: Dtype) -> set[str]:
    """The formats of weights that a model is held in."""
    return set(load_model(ModelConfig(str(folder), dtype=dtype)).parts())


@pytest.mark.parametrize(
    ("name", "dtype", "size"),
    [
        ("llama", "bfloat16", 16),
        ("llama", "float32", 16),
        ("llama", "float32", 32),
        ("qwen3_moe", "bfloat16", 16),
        ("deepseek_v3", "bfloat16", 16),
    ],
)
def test_an_fp8_checkpoint_answers_as_the_numbers_that_it_stands_for(
    tmp_path: Path, name: str, dtype: Dtype, size: int
) -> None:
    plain, quantized = (save_model(tmp_path / kind, RECIPES[name]) for kind in ("plain", "quantized"))
    rewrite(plain, quantized, r"_proj\.weight", to_fp8(size, size))
    said = {"quant_method": "fp8", "weight_block_size": [size, size]}
    describe(quantized, quantization_config=said, dtype="bfloat16")
    assert answers(quantized, dtype) == answers(plain, dtype)
    if size == 32 and dtype == "float32":
        assert ("E4M3" in formats(quantized, dtype)) == HAS_INSTRUCTIONS


@pytest.mark.parametrize("height", [1, 0])
def test_floats_of_compressed_tensors_have_scales_of_rows_or_one(tmp_path: Path, height: int) -> None:
    plain, quantized = (save_model(tmp_path / kind, RECIPES["llama"]) for kind in ("plain", "quantized"))
    rewrite(plain, quantized, r"_proj\.weight", to_fp8(height, 0, "_scale"))
    groups = {"group_0": {"weights": {"type": "float", "num_bits": 8, "strategy": "channel" if height else "tensor"}}}
    said = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    describe(quantized, quantization_config=said, dtype="bfloat16")
    assert answers(quantized, "float32") == answers(plain, "float32")
    assert ("E4M3" in formats(quantized, "float32")) == HAS_INSTRUCTIONS


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=needs_packed)])
def test_an_mxfp4_checkpoint_answers_as_the_numbers_that_it_stands_for(tmp_path: Path, dtype: Dtype) -> None:
    """As every gpt-oss comes."""
    plain, quantized = (save_model(tmp_path / kind, RECIPES["gpt_oss"]) for kind in ("plain", "quantized"))
    rewrite(plain, quantized, r"experts\.(gate_up|down)_proj$", to_mxfp4)
    describe(
        quantized, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    )
    assert answers(quantized, dtype) == answers(plain, dtype)
    if dtype == "float32":
        assert ("MXFP4" in formats(quantized, dtype)) == HAS_INSTRUCTIONS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weight: weight.view(torch.int8), "a scale"),
        (lambda weight: torch.zeros(0, 64, dtype=torch.float8_e4m3fn), "of shape"),
        (lambda weight: torch.full_like(weight.view(torch.uint8), 0xFF).view(weight.dtype), "are no numbers"),
    ],
)
def test_fp8_that_cannot_be_meant_is_not_read(tmp_path: Path, change: Any, message: str) -> None:
    plain, quantized = (save_model(tmp_path / kind, RECIPES["llama"]) for kind in ("plain", "quantized"))
    rewrite(plain, quantized, r"_proj\.weight", to_fp8(32, 32))
    describe(quantized, quantization_config={"quant_method": "fp8", "weight_block_size": [32, 32]})
    weights = load_file(quantized / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name] = change(weights[name])
    save_file(weights, quantized / "model.safetensors", {"format": "pt"})

    def pack() -> None:
        Linear([read_stored(ModelConfig(str(quantized), dtype="float32")).weights[name]], None)

    with pytest.raises((UnreadableError, UnsupportedModelError), match=message):
        pack()


def test_experts_in_one_tensor_of_16_bits_run(tmp_path: Path) -> None:
    folder = save_model(tmp_path, RECIPES["gpt_oss"])
    expected = answers(folder, "float32")
    assert expected
    weights = {name: weight.bfloat16() for name, weight in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    describe(folder, dtype="bfloat16")
    assert load_model(ModelConfig(str(folder))).dtype == torch.bfloat16, "experts would take twice their bytes"
    assert answers(folder, "float32")


def test_parts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    plain, quantized = (save_model(tmp_path / kind, RECIPES["gpt_oss"]) for kind in ("plain", "quantized"))
    rewrite(plain, quantized, r"experts\.(gate_up|down)_proj$", to_mxfp4)
    weights = load_file(quantized / "model.safetensors")
    for place in [place for place in weights if place.endswith("_scales")]:
        weights[place] = weights[place][:, :1].contiguous()
    save_file(weights, quantized / "model.safetensors", {"format": "pt"})
    describe(quantized, quantization_config={"quant_method": "mxfp4"})
    with pytest.raises((ModelLoadError, UnsupportedModelError)):
        load_model(ModelConfig(str(quantized), dtype="float32"))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bitsandbytes": ({"quantization_config": {"load_in_4bit": True, "quant_method": "bitsandbytes"}}, "bitsandbytes"),
    "NVFP4": ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "modelopt NVFP4"),
    "compressed-tensors of old": ({"compression_config": {"quant_method": "compressed-tensors"}}, "compressed-tensors"),
    "torchao": ({"quantization_config": {"quant_method": "torchao"}}, "torchao"),
    "one that nobody knows": ({"quantization_config": {"quant_method": "abacus"}}, "abacus"),
    "one without a name": ({"quantization_config": {}}, "a format without a name"),
}


@pytest.mark.parametrize(("description", "method"), REFUSED.values(), ids=REFUSED)
def test_weights_that_cannot_be_loaded_are_refused_by_name_before_they_are_read(
    tiny_models: TinyModels, tmp_path: Path, description: dict[str, Any], method: str
) -> None:
    (tmp_path / "config.json").write_bytes((tiny_models.folder("llama") / "config.json").read_bytes())
    describe(tmp_path, **description)
    with pytest.raises(UnsupportedModelError, match=rf"quantized as '{method}'; .*FP8 .*MXFP4") as raised:
        LLM(tmp_path)
    assert "\n" not in str(raised.value)


SIDE_FILES = {
    "modelopt": ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "modelopt FP8"),
    "AutoGPTQ": ("quantize_config.json", {"bits": 4}, "gptq"),
    "AutoAWQ": ("quant_config.json", {"w_bit": 4}, "awq"),
}


@pytest.mark.parametrize(("file", "said", "method"), SIDE_FILES.values(), ids=SIDE_FILES)
def test_weights_that_only_a_file_beside_the_config_describes_are_refused(
    tiny_models: TinyModels, tmp_path: Path, file: str, said: dict[str, Any], method: str
) -> None:
    (tmp_path / "config.json").write_bytes((tiny_models.folder("llama") / "config.json").read_bytes())
    (tmp_path / file).write_text(json.dumps(said))
    with pytest.raises(UnsupportedModelError, match=f"quantized as '{method}'"):
        LLM(tmp_path)


def test_a_quantized_kv_cache_is_no_quantized_weight(tmp_path: Path) -> None:
    folder = save_model(tmp_path, RECIPES["llama"])
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": null, "kv_cache_quant_algo": "FP8"}}')
    assert answers(folder)


@pytest.mark.parametrize("name", ["model-q4.gguf", ""])
def test_a_damaged_gguf_file_is_named_as_a_folder_and_as_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "model-q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelLoadError, match=r"model-q4\.gguf is no GGUF file"):
        LLM(tmp_path / name)


def test_gguf_files_of_a_hub_that_cannot_be_reached_are_named() -> None:
    with pytest.raises(
        ModelLoadError, match=r"'somebody/model-gguf' cannot be fetched from the hub: .*give a file's path"
    ):
        LLM("somebody/model-gguf")
