"""GGUF files as llama.cpp's converter writes them, from small checkpoints; names, keys and blocks are gguf-py's."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import load_file, save_file

ARCHITECTURE_OF = {
    "gemma3_text": "gemma3",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen3_moe": "qwen3moe",
    "gpt_oss": "gpt-oss",
}
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
PERMUTED = ("llama", "granite", "smollm3")
PLUS_ONE = ("gemma2", "gemma3")


def permuted(rows: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Elements i and i + half of each head's rows side by side, as llama.cpp turns them."""
    shape = rows.shape
    return rows.reshape(num_heads, 2, shape[0] // num_heads // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def llama3_factors(rope: Mapping[str, Any], head_dim: int) -> np.ndarray[Any, Any]:
    """Divisors of the angles (arXiv 2407.21783)."""
    found = []
    for exponent in np.arange(0, head_dim, 2, dtype=np.float32) / head_dim:
        length = 2 * math.pi * rope["rope_theta"] ** exponent
        original = rope["original_max_position_embeddings"]
        if length < original / rope["high_freq_factor"]:
            found.append(1.0)
        elif length > original / rope["low_freq_factor"]:
            found.append(rope["factor"])
        else:
            share = (original / length - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            found.append(1 / ((1 - share) / rope["factor"] + share))
    return np.array(found, np.float32)


def write_gguf(
    checkpoint: Path, path: Path, kind: str = "Q8_0", change: Callable[[gguf.GGUFWriter], None] = lambda writer: None
) -> Path:
    """Write `path`, and give the folder of a checkpoint with the values that its blocks have."""
    config: dict[str, Any] = json.loads((checkpoint / "config.json").read_text())
    name = ARCHITECTURE_OF.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, name)
    _write_keys(writer, name, config)
    table = gguf.get_tensor_name_map(
        next(own for own, text in gguf.MODEL_ARCH_NAMES.items() if text == name), config["num_hidden_layers"]
    )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    values = {}
    loaded = load_file(checkpoint / "model.safetensors")
    for place, names, stack in _experts(loaded):
        own = table.get_name(place, try_suffixes=(".weight", ".bias"))
        assert own is not None, place
        blocks = Type[kind] if place.endswith(".weight") else Type.F32
        packed = gguf.quants.quantize(stack, blocks)
        writer.add_tensor(own, packed, raw_dtype=blocks)
        back = gguf.quants.dequantize(packed, blocks).reshape(stack.shape)
        if len(names) == len(back):
            values |= {one: np.ascontiguousarray(part) for one, part in zip(names, back, strict=True)}
            continue
        [name_of_all], start = names, place.partition(".experts.")[2].startswith("up")
        whole = values.setdefault(name_of_all, np.zeros(loaded[name_of_all].shape, np.float32))
        back = back.swapaxes(1, 2) if back.ndim == 3 else back
        if "down" in place:
            whole[:] = back
        else:
            whole[..., int(start) :: 2] = back
    for place, weight in loaded.items():
        if ".experts." in place:
            continue
        own = table.get_name(place, try_suffixes=(".weight", ".bias"))
        assert own is not None, place
        own = f"{own}.weight" if own.endswith("attn_sinks") else own
        rows = weight.astype(np.float32)
        is_permuted = name in PERMUTED and ("q_proj" in place or "k_proj" in place)
        num_heads = heads if "q_proj" in place else kv_heads
        stored = permuted(rows, num_heads) if is_permuted else rows
        if name in PLUS_ONE and place.endswith("norm.weight"):
            stored = stored + 1
        blocks = Type[kind] if stored.ndim > 1 else Type.F32
        packed = gguf.quants.quantize(stored, blocks)
        writer.add_tensor(own, packed, raw_dtype=blocks)
        back = gguf.quants.dequantize(packed, blocks).reshape(stored.shape)
        if is_permuted:
            halves = back.reshape(num_heads, -1, 2, *back.shape[1:])
            back = np.concatenate((halves[:, :, 0], halves[:, :, 1]), axis=1).reshape(rows.shape)
        values[place] = np.ascontiguousarray(rows if stored.ndim == 1 else back)
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, config["head_dim"]))
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    folder = path.with_name(f"{path.name}-plain")
    folder.mkdir()
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _experts(
    loaded: Mapping[str, np.ndarray[Any, Any]],
) -> Iterator[tuple[str, list[str], np.ndarray[Any, Any]]]:
    """Of each tensor of all experts: its place, the weights that it is made of, and [experts, ...]."""
    apart: dict[str, dict[int, str]] = {}
    for name, weight in loaded.items():
        if matched := EXPERT.fullmatch(name):
            apart.setdefault(f"{matched[1]}.{matched[3]}.weight", {})[int(matched[2])] = name
        elif ".experts." in name:  # gpt-oss: [experts, in, out], outputs of gate and up in turn
            own = weight.astype(np.float32)
            own = own.swapaxes(1, 2) if own.ndim == 3 else own
            end = ".bias" if name.endswith("_bias") else ".weight"
            place = name.removesuffix("_bias")
            if "down" in name:
                yield f"{place}{end}", [name], np.ascontiguousarray(own)
                continue
            for number, part in enumerate(("gate_proj", "up_proj")):
                yield place.replace("gate_up_proj", part) + end, [name], np.ascontiguousarray(own[:, number::2])
    for place, names in apart.items():
        own_names = [names[number] for number in range(len(names))]
        yield place, own_names, np.stack([loaded[name].astype(np.float32) for name in own_names])


def _write_keys(writer: gguf.GGUFWriter, name: str, config: Mapping[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config["vocab_size"])
    if name != "gemma3":
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
        writer.add_rope_freq_base(rope["rope_theta"])
    else:
        writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    if name == "cohere2":
        writer.add_layer_norm_eps(config["layer_norm_eps"])
        writer.add_logit_scale(config["logit_scale"])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if name in ("gemma2", "gemma3", "cohere2", "gpt-oss"):
        writer.add_sliding_window(config["sliding_window"])
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if name == "granite":
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if name == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        writer.add_sliding_window(config["sliding_window"] or 0)
    experts = config.get("num_experts") or config.get("num_local_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if name in ("qwen3moe", "gpt-oss"):
        writer.add_expert_feed_forward_length(config.get("moe_intermediate_size") or config["intermediate_size"])
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
