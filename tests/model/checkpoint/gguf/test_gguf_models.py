"""Models of GGUF files answer as transformers does with the values that their blocks have, cold and warm."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from foreword.assembly import load_tokenizer
from foreword.config import ModelConfig
from foreword.errors import ConfigError, ModelLoadError, UnsupportedModelError
from foreword.model.checkpoint import stored
from foreword.model.checkpoint.gguf.unfold import find_gguf, unfold
from foreword.model.cpu.product import can_multiply
from foreword.model.loader import load_model
from gguf_writer import write_gguf
from tiny_models import RECIPES, VOCAB_SIZE, Oracle, Recipe, build_engine, complete, greedy, random_tokens, save_model

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 256}
MODELS = {
    "llama": RECIPES["llama"],
    "llama with an untied head and llama3's angles": Recipe("llama", {"head_dim": 32, "rope_parameters": LLAMA3}),
    "llama with biases": Recipe("llama", {"attention_bias": True}),
    "mistral": Recipe("mistral", {"head_dim": 32, "sliding_window": None}),
    "qwen2": RECIPES["qwen2"],
    "qwen2 with yarn": Recipe("qwen2", {"rope_parameters": YARN}),
    "qwen3": RECIPES["qwen3"],
    "phi3": RECIPES["phi3"],
    "olmo2": RECIPES["olmo2"],
    "granite": Recipe("granite", {"num_attention_heads": 2, "num_key_value_heads": 1, "residual_multiplier": 0.7}),
    "gemma2": RECIPES["gemma2"],
    "gemma3": Recipe(
        "gemma3_text", {"head_dim": 32, "sliding_window": 8, "num_hidden_layers": 6, "query_pre_attn_scalar": 32}
    ),
    "smollm3": Recipe("smollm3", {"num_hidden_layers": 4}),
    "mixtral": Recipe("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3moe": Recipe(
        "qwen3_moe",
        {
            "head_dim": 32,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
        },
    ),
    "gpt-oss": Recipe(
        "gpt_oss", {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    ),
    "cohere2": Recipe("cohere2", {"sliding_window": 8, "num_hidden_layers": 4}),
}
IN_PROGRAM = {"llama with an untied head and llama3's angles", "mistral", "qwen2", "qwen3", "gemma3", "granite"}
"""Those whose layers run as one program: the others have another formula, or heads of less than two vectors."""
KINDS = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def check(path: Path, plain: Path, *, in_program: bool) -> None:
    """Compare tokens with transformers', and logits of a hit with those of a miss and of layers that are no program."""
    model = load_model(ModelConfig(model=str(unfold(path, with_tokenizer=False)), dtype="float32"))
    oracle = Oracle(plain, torch.float32)
    engine = build_engine(model, block_size=4, max_num_batched_tokens=37)
    rng = np.random.default_rng(3)
    shared = random_tokens(rng, 150)
    prompts = [random_tokens(rng, 5), shared, shared[:90]]
    cold = complete(engine, prompts, greedy(12, logprobs=3), name="cold")
    warm = complete(engine, prompts, greedy(12, logprobs=3), name="warm")
    for first, second in zip(cold, warm, strict=True):
        answer = first.outputs[0]
        assert answer.token_ids == oracle.likeliest(first.prompt_token_ids, answer.token_ids)
        assert (answer.token_ids, answer.logprobs) == (second.outputs[0].token_ids, second.outputs[0].logprobs)
    assert all(one.num_cached_tokens for one in warm)
    assert (model.decoder.chain is not None) == in_program
    model.decoder.chain = None
    for first, second in zip(cold, complete(engine, prompts, greedy(12, logprobs=3), name="parts"), strict=True):
        assert first.outputs[0].logprobs == second.outputs[0].logprobs, "operation by operation"


@pytest.mark.parametrize("name", MODELS)
def test_each_architecture_answers_as_transformers_does(tmp_path: Path, name: str) -> None:
    path, folder = tmp_path / "model.gguf", save_model(tmp_path / "plain", MODELS[name])
    weights, rng = load_file(folder / "model.safetensors"), np.random.default_rng(1)
    for place, values in weights.items():
        if place.endswith("bias"):  # transformers begins with zeros
            weights[place] = rng.standard_normal(values.shape).astype(values.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    check(path, write_gguf(folder, path, "Q8_0"), in_program=name in IN_PROGRAM)


@pytest.mark.parametrize("kind", KINDS)
def test_each_type_that_can_be_written_answers_as_transformers_does(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.gguf"
    plain = write_gguf(save_model(tmp_path / "plain", RECIPES["qwen3"]), path, kind)
    check(path, plain, in_program=kind != "F32")


@pytest.mark.skipif(not can_multiply(), reason="weights stay in their codes on this processor")
@pytest.mark.parametrize(
    ("kind", "stays"), [("Q8_0", True), ("Q4_0", True), ("F16", False), ("BF16", False), ("F32", False)]
)
def test_weights_that_would_grow_beyond_half_of_the_memory_stay_in_their_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, stays: bool
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(save_model(tmp_path / "plain", RECIPES["llama"]), path, kind)
    options = ModelConfig(str(unfold(path, with_tokenizer=False)))
    usual = load_model(options).dtype
    monkeypatch.setattr(stored, "total_cpu_bytes", lambda: 100_000)
    with caplog.at_level("INFO"):
        assert load_model(options).dtype == (torch.float32 if stays else usual)
    assert ("stay in their codes: expanded, they would take" in caplog.text) == stays
    assert load_model(replace(options, dtype="bfloat16")).dtype == torch.bfloat16
    if stays:
        assert usual == torch.bfloat16


def test_a_tokenizer_is_taken_as_it_is_whatever_the_model(tmp_path: Path) -> None:
    """transformers builds Qwen2's tokenizers anew, whatever their files say."""

    def change(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(["a", "1", "2", "12", *(f"t{number}" for number in range(VOCAB_SIZE - 4))])
        writer.add_token_merges(["1 2"])

    write_gguf(save_model(tmp_path / "plain", RECIPES["qwen2"]), tmp_path / "model.gguf", change=change)
    tokenizer = load_tokenizer(ModelConfig(model=str(unfold(tmp_path / "model.gguf"))))
    assert tokenizer is not None
    assert list(tokenizer.encode("a12")) == [0, 1, 2], "digits apart, as SmolLM's"


def test_a_file_that_changes_is_another_model_and_links_lead_to_parts(tmp_path: Path) -> None:
    path = tmp_path / "blobs" / "sha256-1"
    path.parent.mkdir()
    write_gguf(save_model(tmp_path / "plain", RECIPES["llama"]), path)
    link = tmp_path / "model.gguf"
    link.symlink_to(path)
    assert find_gguf(str(path)) == path, "known by its first bytes"
    first = unfold(link, with_tokenizer=False)
    assert unfold(link, with_tokenizer=False) == first
    path.write_bytes(path.read_bytes())
    assert unfold(link, with_tokenizer=False) != first


def test_folders_of_files_that_are_gone_or_changed_are_removed_after_a_day_without_use(tmp_path: Path) -> None:
    plain = save_model(tmp_path / "plain", RECIPES["llama"])
    folders = {}
    for name in ("gone", "changed", "recent", "same", "served"):
        write_gguf(plain, tmp_path / f"{name}.gguf")
        folders[name] = unfold(tmp_path / f"{name}.gguf", with_tokenizer=False)
    folders["killed"] = folders["gone"].parent / "new-killed"
    folders["killed"].mkdir()
    (tmp_path / "gone.gguf").unlink()
    for name in ("changed", "recent"):
        (tmp_path / f"{name}.gguf").write_bytes((tmp_path / f"{name}.gguf").read_bytes())
    for name in folders.keys() - {"recent"}:
        os.utime(folders[name], (0, 0))
    assert unfold(tmp_path / "served.gguf", with_tokenizer=False) == folders["served"]
    left = {name for name, folder in folders.items() if folder.exists()}
    assert left == {"recent", "same", "served"}
    assert folders["served"].stat().st_mtime > 0, "its use was noted"


@pytest.mark.parametrize("name", ["file", "x" * 300])
def test_where_nothing_can_be_kept_a_folder_of_this_process_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / name))
    write_gguf(save_model(tmp_path / "plain", RECIPES["llama"]), tmp_path / "model.gguf")
    folder = unfold(tmp_path / "model.gguf", with_tokenizer=False)
    assert (folder / "config.json").exists()


def refused(path: Path) -> str:
    with pytest.raises((UnsupportedModelError, ModelLoadError)) as caught:
        unfold(path, with_tokenizer=False)
    return str(caught.value)


def test_what_nobody_knows_is_refused_by_its_name(tmp_path: Path) -> None:
    plain = save_model(tmp_path / "plain", RECIPES["llama"])

    def changed(name: str, change: Any) -> Path:
        path = tmp_path / f"{name}.gguf"
        write_gguf(plain, path, change=change)
        return path

    assert "llama.attention.clamp_kqv=3.0" in refused(
        changed("key", lambda one: one.add_float32("llama.attention.clamp_kqv", 3.0))
    )
    assert "expert" in refused(changed("experts", lambda one: one.add_expert_count(8)))
    assert "'blk.0.attn_sinks.weight'" in refused(
        changed("tensor", lambda one: one.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, np.float32)))
    )
    assert "ggml's type 34" in refused(
        changed(
            "type",
            lambda one: one.add_tensor("x", np.zeros((1, 54), np.uint8), raw_dtype=gguf.GGMLQuantizationType.TQ1_0),
        )
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda writer: writer.add_expert_count(1 << 30), "of 1073741824 experts"),
        (lambda writer: writer.add_expert_used_count(9), "9 of 4 experts"),
        (lambda writer: writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID), "expert_gating_func=2"),
        (lambda writer: writer.add_expert_weights_scale(2.5), "weighs its experts in a way"),
    ],
)
def test_experts_that_are_chosen_otherwise_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    path = tmp_path / "model.gguf"

    def again(writer: gguf.GGUFWriter) -> None:
        for name in ("count", "used_count"):  # else there would be two
            if change.__code__.co_names[-1] == f"add_expert_{name}":
                del writer.kv_data[0][f"qwen3moe.expert_{name}"]
        change(writer)

    write_gguf(save_model(tmp_path / "plain", MODELS["qwen3moe"]), path, change=again)
    with pytest.raises(UnsupportedModelError, match=message):
        unfold(path, with_tokenizer=False)


def test_a_lacking_tensor_is_named(tmp_path: Path) -> None:
    plain = save_model(tmp_path / "plain", RECIPES["llama"])
    weights = load_file(plain / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    write_gguf(plain, tmp_path / "model.gguf")
    with pytest.raises(UnsupportedModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(ModelConfig(model=str(unfold(tmp_path / "model.gguf", with_tokenizer=False)), dtype="float32"))


def test_which_file_a_name_means(tmp_path: Path) -> None:
    assert find_gguf(str(tmp_path)) is None
    (tmp_path / "mmproj-x.gguf").touch()
    first = tmp_path / "a-00001-of-00002.gguf"
    first.touch()
    (tmp_path / "a-00002-of-00002.gguf").touch()
    assert find_gguf(str(tmp_path)) == first
    assert find_gguf(str(first)) == first
    (tmp_path / "b.GGUF").touch()
    assert find_gguf(str(tmp_path / "b.GGUF")) == tmp_path / "b.GGUF"
    (tmp_path / "c.gguf").touch()
    with pytest.raises(ConfigError, match=r"several GGUF files \(a-00001-of-00002.gguf, c.gguf\)"):
        find_gguf(str(tmp_path))
    with pytest.raises(ModelLoadError, match="does not exist"):
        find_gguf(str(tmp_path / "d.gguf"))
    (tmp_path / "model.safetensors").touch()
    assert find_gguf(str(tmp_path)) is None
