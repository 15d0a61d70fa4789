"""Checkpoints of GPTQ, AWQ and compressed-tensors answer as transformers does with the values of their codes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from foreword.config import ModelConfig
from foreword.errors import UnsupportedModelError
from foreword.model.loader import load_model
from foreword.model.self_check import ShortPrompt
from tiny_models import RECIPES, Oracle, build_engine, complete, greedy, random_tokens, save_model

Arrays = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], torch.Tensor]
AWQ = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
"""The output in each place of an int32, as AutoAWQ orders them."""
CHECKPOINTS: Mapping[str, dict[str, Any]] = {
    "gptq, symmetric": {"quant_method": "gptq", "bits": 4, "sym": True},
    "gptq of 8 bits": {"quant_method": "gptq", "bits": 8, "sym": True},
    "gptq with zeros": {"quant_method": "gptq", "bits": 4},
    "gptq with desc_act": {"quant_method": "gptq", "bits": 4, "desc_act": True},
    "gptq of the second form": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
    "awq": {"quant_method": "awq", "bits": 4, "version": "gemm"},
    "packed, symmetric": {"quant_method": "compressed-tensors", "format": "pack-quantized", "bits": 4, "sym": True},
    "packed with zeros": {"quant_method": "compressed-tensors", "format": "pack-quantized", "bits": 4},
    "packed of 8 bits": {"quant_method": "compressed-tensors", "format": "pack-quantized", "bits": 8, "sym": True},
    "packed with actorder": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "bits": 4,
        "actorder": 1,
    },
    "bytes of channels": {"quant_method": "compressed-tensors", "format": "int-quantized", "bits": 8, "sym": True},
}


def quantize(weight: np.ndarray[Any, Any], bits: int, size: int, is_symmetric: bool, dtype: torch.dtype) -> Arrays:
    """Codes [out, in], zeros and scales [out, groups] of a weight in groups of `size`."""
    groups = weight.reshape(len(weight), -1, size)
    top = (1 << bits) - 1
    low, high = groups.min(-1), groups.max(-1)
    if is_symmetric:
        high = np.abs(groups).max(-1)
        low = -high
    scales = torch.from_numpy((high - low) / top + 1e-6).to(dtype)
    own = scales.float().numpy()
    zeros = np.full(own.shape, 1 << bits - 1) if is_symmetric else np.clip(np.round(-low / own), 0, top).astype(int)
    codes = np.clip(np.round(groups / own[:, :, None]) + zeros[:, :, None], 0, top).astype(np.uint32)
    return codes.reshape(weight.shape), zeros, scales


def packed(codes: np.ndarray[Any, Any], bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Codes of each row in int32, the first in the lowest bits, or the one that `order` says."""
    number = 32 // bits
    own = codes.astype(np.uint32).reshape(len(codes), -1, number)[:, :, list(order or range(number))]
    shifted = own << (np.arange(number, dtype=np.uint32) * bits)
    return torch.from_numpy(np.bitwise_or.reduce(shifted, -1).view(np.int32))


def parts_of(
    said: Mapping[str, Any], codes: Any, zeros: Any, scales: torch.Tensor, index: torch.Tensor
) -> dict[str, torch.Tensor]:
    """`index`: the group of each input."""
    bits = said["bits"]
    if said["quant_method"] == "gptq":
        stored = zeros if said.get("checkpoint_format") else zeros - 1
        parts = {"qweight": packed(codes, bits).T, "qzeros": packed(stored.T, bits), "scales": scales.T}
        return {**parts, "g_idx": index}
    if said["quant_method"] == "awq":
        order = AWQ[bits]
        return {"qweight": packed(codes.T, bits, order), "qzeros": packed(zeros.T, bits, order), "scales": scales.T}
    if said["format"] == "int-quantized":
        return {"weight": torch.from_numpy((codes.astype(int) - 128).astype(np.int8)), "weight_scale": scales}
    parts = {"weight_packed": packed(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor(codes.shape)}
    if said.get("actorder"):
        parts["weight_g_idx"] = index
    return parts if said.get("sym") else {**parts, "weight_zero_point": packed(zeros.T, bits).T}


def write(folder: Path, said: Mapping[str, Any], size: int = 32, **changed: Any) -> Path:
    """Quantize the model of a folder in place; returns a folder with the values of its codes."""
    is_packed = said["quant_method"] == "compressed-tensors"
    dtype = torch.bfloat16 if is_packed else torch.float16
    loaded, plain = load_file(folder / "model.safetensors"), folder.with_name("values")
    stored, values = {}, {}
    for name, weight in loaded.items():
        if "_proj.weight" not in name:
            stored[name] = values[name] = weight.float()
            continue
        own = weight.float().numpy()
        inputs = np.arange(own.shape[1])
        order = np.random.default_rng(0).permutation(inputs) if said.keys() & {"desc_act", "actorder"} else inputs
        places = np.argsort(order)
        own = own[:, order]
        per_group = own.shape[1] if said.get("format") == "int-quantized" else size
        codes, zeros, scales = quantize(own, said["bits"], per_group, bool(said.get("sym")), dtype)
        numbers = codes.astype(np.float32) - np.repeat(zeros, per_group, 1)
        values[name] = (torch.from_numpy(numbers) * scales.float().repeat_interleave(per_group, 1))[:, places]
        stem, index = name.removesuffix("weight"), torch.from_numpy((places // per_group).astype(np.int32))
        for part, tensor in parts_of(said, codes[:, places], zeros, scales, index).items():
            stored[f"{stem}{part}"] = tensor.contiguous()
    plain.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config))
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    told = {key: value for key, value in said.items() if key not in ("sym", "bits" if is_packed else "")}
    if is_packed:
        weights = {"num_bits": said["bits"], "type": "int", "symmetric": bool(said.get("sym")), "group_size": size}
        told["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {**told, **changed}}))
    return plain


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_quantized_checkpoints_answer_as_transformers_does_with_their_values(tmp_path: Path, name: str) -> None:
    family = "qwen2" if name == "gptq with zeros" else "qwen3_moe" if name == "awq" else "llama"
    recipe = RECIPES[family]
    if family == "qwen3_moe":
        recipe = type(recipe)("qwen3_moe", {**recipe.options, "moe_intermediate_size": 64})
    folder = save_model(tmp_path / "model", recipe)
    plain = write(folder, CHECKPOINTS[name])
    model = load_model(ModelConfig(model=str(folder), dtype="float32"))
    assert not {"packed", "plain"} >= set(model.parts()), "products take the codes"
    oracle, engine = Oracle(plain, torch.float32), build_engine(model, block_size=4, max_num_batched_tokens=37)
    shared = random_tokens(np.random.default_rng(3), 90)
    prompts = [shared, shared[:50]]
    cold = complete(engine, prompts, greedy(12, logprobs=3), name="cold")
    warm = complete(engine, prompts, greedy(12, logprobs=3), name="warm")
    for first, second in zip(cold, warm, strict=True):
        answer = first.outputs[0]
        assert answer.token_ids == oracle.likeliest(first.prompt_token_ids, answer.token_ids)
        assert (answer.token_ids, answer.logprobs) == (second.outputs[0].token_ids, second.outputs[0].logprobs)


def test_groups_that_products_do_not_take_are_expanded(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", RECIPES["llama"])
    plain = write(folder, CHECKPOINTS["gptq with zeros"], size=16)
    name = "model.layers.0.mlp.down_proj.weight"
    expected = load_file(plain / "model.safetensors")[name]
    model = load_model(ModelConfig(model=str(folder), dtype="float32"))
    assert torch.equal(model.decoder.layers[0].products[-1].weight, expected)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bits": 3}, "3 bits"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        ({"quant_method": "awq", "version": "gemv"}, "version='gemv'"),
        ({"bits": 8}, "do not fit"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
    ],
)
def test_other_forms_are_refused_by_name(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    folder = save_model(tmp_path / "model", RECIPES["llama"])
    write(folder, CHECKPOINTS["gptq, symmetric"], **changed)
    with pytest.raises(UnsupportedModelError, match=message):
        load_model(ModelConfig(model=str(folder), dtype="float32"))


@pytest.mark.parametrize(
    ("name", "part", "dtype"),
    [
        ("bytes of channels", "weight", torch.float32),
        ("bytes of channels", "weight", torch.bfloat16),
        ("gptq, symmetric", "qweight", torch.int64),
        ("gptq with zeros", "qzeros", torch.int64),
        ("packed with zeros", "weight_zero_point", torch.int64),
        ("awq", "scales", torch.int32),
    ],
)
def test_parts_of_other_types_are_refused(tmp_path: Path, name: str, part: str, dtype: torch.dtype) -> None:
    folder = save_model(tmp_path / "model", RECIPES["llama"])
    write(folder, CHECKPOINTS[name])
    stored = load_file(folder / "model.safetensors")
    place = f"model.layers.1.mlp.up_proj.{part}"
    stored[place] = stored[place].to(dtype)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"quantized as|are not read"):
        load_model(ModelConfig(model=str(folder), dtype="float32"))


def test_gate_and_up_with_other_orders_of_inputs_are_right(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", RECIPES["llama"])
    plain = write(folder, CHECKPOINTS["gptq, symmetric"])
    stored, values = load_file(folder / "model.safetensors"), load_file(plain / "model.safetensors")
    stem = "model.layers.1.mlp.up_proj."
    stored[f"{stem}g_idx"] = stored[f"{stem}g_idx"].flip(0)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    model = load_model(ModelConfig(model=str(folder), dtype="float32"))
    weight = model.decoder.layers[1].products[2].product.weight
    scales = stored[f"{stem}scales"].T.float().repeat_interleave(32, 1)
    expected = values[f"{stem}weight"].float() / scales * scales.flip(1)
    assert torch.allclose(weight[len(weight) // 2 :], expected, rtol=1e-5)


def test_an_order_that_was_never_filled_in_is_none(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", RECIPES["llama"])
    write(folder, CHECKPOINTS["packed, symmetric"])
    logits = ShortPrompt(load_model(ModelConfig(model=str(folder), dtype="float32"))).logits
    stored = load_file(folder / "model.safetensors")
    stems = [name.removesuffix("packed") for name in stored if name.endswith(".weight_packed")]
    inputs = {stem: 32 * stored[f"{stem}scale"].shape[1] for stem in stems}
    for filled in (-1, -2):
        orders = {f"{stem}g_idx": torch.full((count,), filled) for stem, count in inputs.items()}
        save_file({**stored, **orders}, folder / "model.safetensors", metadata={"format": "pt"})
        if filled == -1:
            model = load_model(ModelConfig(model=str(folder), dtype="float32"))
            assert torch.equal(ShortPrompt(model).logits, logits)
    with pytest.raises(UnsupportedModelError, match="g_idx that does not put"):
        load_model(ModelConfig(model=str(folder), dtype="float32"))


def test_groups_of_other_sizes_are_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", RECIPES["llama"])
    write(folder, CHECKPOINTS["gptq with desc_act"])
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.1.mlp.up_proj.g_idx"][0] += 1
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"up_proj.*g_idx that does not put 64 inputs into 2 groups"):
        load_model(ModelConfig(model=str(folder), dtype="float32"))
