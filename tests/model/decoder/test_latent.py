"""Latent KV: its bytes, its identity, whom it agrees with, and what it refuses. Families' facts: test_families.py."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from doors import correction_of
from foreword import LLM
from foreword.config import ModelConfig
from foreword.errors import ConfigError, UnsupportedModelError
from foreword.kernels.kv_format import KVFormat
from foreword.kernels.products.pair_worker import PAIR_WORKER
from foreword.kernels.triton.attention import TritonAttention
from foreword.model.cpu import product
from foreword.model.decoder import families
from foreword.model.decoder.families import FAMILIES, Fields
from foreword.model.decoder.linear import HeadLinear
from foreword.model.kv_quality import tokens_a_gigabyte
from foreword.model.layout import LayoutOptions
from foreword.model.loader import LoadedModel, load_foreign_model, load_model
from foreword.model.self_check import ShortPrompt
from foreword.model.storage import KVStorage
from foreword.replay.capacity import IS_EXPANDED, LATENT_FAMILIES, kv_bytes_per_token, read_model_config
from foreword.replay.timing import StepCost
from lanes import SLOW
from tiny_models import (
    BASE,
    RECIPES,
    Oracle,
    Recipe,
    TinyModels,
    build_engine,
    complete,
    greedy,
    random_tokens,
    save_model,
)

LATENT = ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"]


@pytest.mark.parametrize("name", LATENT)
def test_a_token_takes_the_bytes_of_one_vector_a_layer(tiny_models: TinyModels, name: str) -> None:
    folder, own = tiny_models.folder(name), RECIPES[name].options
    config = read_model_config(str(folder))
    model = load_model(ModelConfig(str(folder), dtype="bfloat16"))
    layout = model.plan_layout(LayoutOptions(16))
    wanted = 2 * (own["kv_lora_rank"] + own["qk_rope_head_dim"]) * 3
    assert layout.bytes_per_block == 16 * wanted
    storage = KVStorage(layout, 4, model.device)
    assert sum(page.shape[1] for page in storage.pages()) == 16 * wanted
    assert sum(blocks.token_bytes for blocks in storage.blocks.values()) == wanted
    assert kv_bytes_per_token({**config, "dtype": "bfloat16"}) == wanted
    expanded = load_foreign_model(ModelConfig(str(folder), dtype="bfloat16"))
    keys = own["qk_nope_head_dim"] + own["qk_rope_head_dim"]
    assert expanded.plan_layout(LayoutOptions(16)).bytes_per_block == 16 * 3 * 2 * 4 * (keys + own["v_head_dim"])


@pytest.mark.parametrize("name", LATENT)
def test_expanded_kv_gives_the_same_answers(tiny_models: TinyModels, name: str) -> None:
    """Of transformers' modules, which multiply by other matrices in another order."""
    foreign = ShortPrompt(load_foreign_model(ModelConfig(str(tiny_models.folder(name)), dtype="float32")))
    own = ShortPrompt(tiny_models.loaded(name))
    torch.testing.assert_close(own.logits, foreign.logits, rtol=1e-4, atol=2e-5 * float(foreign.logits.abs().max()))


def test_families_with_latent_kv_are_those_that_capacities_know() -> None:
    found = set()
    for recipe in RECIPES.values():
        config = AutoConfig.for_model(recipe.model_type, **{**BASE, **recipe.options}).to_dict()
        if recipe.model_type in FAMILIES and FAMILIES[recipe.model_type](Fields(config)).latent is not None:
            found.add(recipe.model_type)
    assert FAMILIES["kimi_k2"] is FAMILIES["deepseek_v3"]
    assert {*found, "kimi_k2"} == set(LATENT_FAMILIES)


def test_replay_expands_kv_where_a_server_does(
    tiny_models: TinyModels, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, own = tmp_path / "model", RECIPES["deepseek_v3"].options
    shutil.copytree(tiny_models.folder("deepseek_v3"), folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"a_new_field": 3}))
    model, config = load_model(ModelConfig(str(folder), dtype="bfloat16")), read_model_config(str(folder))
    assert "a_new_field" in caplog.text
    assert model.plan_layout(LayoutOptions(16)).bytes_per_block == 16 * kv_bytes_per_token(
        {**config, "dtype": "bfloat16"}
    )
    keys = own["qk_nope_head_dim"] + own["qk_rope_head_dim"]
    assert kv_bytes_per_token(config, "int8") == 3 * 4 * (keys + own["v_head_dim"] + 4)  # a server would not refuse it
    assert kv_bytes_per_token(read_model_config(str(path))) != kv_bytes_per_token(config)  # config.json alone says less


def test_estimates_count_the_work_on_vectors(tiny_models: TinyModels) -> None:
    config = read_model_config(str(tiny_models.folder("deepseek_v3")))
    cost = StepCost.of_model(config, flops_per_s=1e12, bytes_per_s=1e10)
    assert cost.flops_per_pair == 3 * 2 * 4 * (16 + 8 + 16)
    attention = 64 * 32 + 32 * 4 * 24 + 64 * 24 + 16 * 4 * (16 + 24) + 4 * 24 * 64
    assert cost.flops_per_token == 2 * (3 * (attention + 3 * 64 * 96) + 64 * 320)


def test_estimates_count_the_work_on_expanded_heads(tiny_models: TinyModels) -> None:
    config = read_model_config(str(tiny_models.folder("deepseek_v3"))) | {"v_head_dim": 40}
    latent, expanded = (
        StepCost.of_model(own, flops_per_s=1e12, bytes_per_s=1e10) for own in (config, {**config, IS_EXPANDED: True})
    )
    assert expanded.flops_per_token == latent.flops_per_token, "the weights are the same"
    assert expanded.flops_per_pair == 3 * 2 * 4 * (16 + 8 + 40)  # queries and keys, and values


def test_weights_that_are_missing_do_not_make_kv_expanded(
    tiny_models: TinyModels, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_models.folder("deepseek_v3"), folder)
    [weights] = folder.glob("*.safetensors")
    shard, other = folder / "model-00001-of-00002.safetensors", folder / "model-00002-of-00002.safetensors"
    with safe_open(weights, framework="np") as file:
        names = sorted(file.keys())
    weights.rename(shard)
    index = json.dumps({"weight_map": dict.fromkeys(names, shard.name) | {names[0]: other.name}})
    for told, content in ((None, b""), (index, None), (index, b""), (index, shard.read_bytes()[:-1])):
        (folder / "model.safetensors.index.json").unlink(missing_ok=True)
        other.unlink(missing_ok=True)
        if told is not None:
            (folder / "model.safetensors.index.json").write_text(told)
        if content is not None:
            other.write_bytes(content)
        caplog.clear()
        assert IS_EXPANDED not in read_model_config(str(folder))
        assert "not complete" in caplog.text
    index = json.dumps({"weight_map": dict.fromkeys([*names, "model.a_new_one"], shard.name)})
    (folder / "model.safetensors.index.json").write_text(index)
    caplog.clear()
    assert IS_EXPANDED not in read_model_config(str(folder))
    assert "a_new_one" in caplog.text


def test_blocks_of_latent_kv_meet_no_others(tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tiny_models.folder("deepseek_v2"))
    with LLM(folder) as llm:
        own = llm.cache_identity.namespace, llm.layout.kv_format.name
    monkeypatch.setattr("foreword.model.loader.load_model", load_foreign_model)
    with LLM(folder) as llm:
        assert llm.layout.kv_format.name == "float32"
        assert llm.cache_identity.namespace != own[0]
    assert own[1] == "latent float32"
    keys = {
        KVFormat(dtype, latent).key(torch.float32) for dtype in (torch.float32, torch.bfloat16) for latent in (0, 1)
    }
    assert len(keys) == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype='int8' .* KV of model .* is latent: .* leave it out"),
        ({"enable_lora": True}, "enable_lora=True, and models with latent KV take no adapters yet; leave it out"),
        ({"allow_links": True}, "allow_links=True, .* its KV is latent, .* leave it out"),
    ],
)
def test_what_latent_kv_does_not_go_with_is_refused(
    tiny_models: TinyModels, options: dict[str, Any], said: str
) -> None:
    with pytest.raises((ConfigError, UnsupportedModelError), match=said):
        LLM(str(tiny_models.folder("minicpm3")), **options)


def test_kernels_and_measurements_that_know_no_latent_kv_say_so(tiny_models: TinyModels) -> None:
    model = tiny_models.loaded("minicpm3")
    options = model.decoder.options[0]
    assert TritonAttention().why_not(model.kv_format, options) == "takes no latent KV"
    with pytest.raises(ConfigError, match="this model's KV is latent"):
        tokens_a_gigabyte(model)


def test_files_with_layers_that_guess_ahead_and_other_names_are_read(tiny_models: TinyModels, tmp_path: Path) -> None:
    """As DeepSeek's and Moonshot's files have them; corrections keep their bits in a model of bfloat16."""
    folder = shutil.copytree(tiny_models.folder("deepseek_v3"), tmp_path / "more")
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "x.X"}, "num_nextn_predict_layers": 1, "ep_size": 1}
    rope = config.pop("rope_parameters")
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type")
    (folder / "config.json").write_text(
        json.dumps({**config, "rope_theta": theta, "rope_scaling": {"type": kind, **rope}})
    )
    weights = load_file(folder / "model.safetensors")
    weights |= {
        name.replace("layers.2.", "layers.3."): own.clone() for name, own in weights.items() if "layers.2." in name
    }
    weights["model.layers.3.eh_proj.weight"] = torch.ones(64, 128)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model = load_model(ModelConfig(str(folder), dtype="float32"))
    assert model.code == {"family": "kimi_k2"}
    assert ShortPrompt(model).digest() == ShortPrompt(tiny_models.loaded("deepseek_v3")).digest()
    own = correction_of(load_model(ModelConfig(str(folder), dtype="bfloat16")).decoder.layers[1])
    assert torch.equal(own, weights["model.layers.1.mlp.gate.e_score_correction_bias"])


@pytest.mark.parametrize("worker", ["fastest", "pairs"])
@pytest.mark.parametrize("sizes", [(3, 64, 96), (5, 128, 32), (2, 24, 40)])
def test_products_of_heads_give_a_row_the_same_bits_among_any(
    monkeypatch: pytest.MonkeyPatch, worker: str, sizes: tuple[int, int, int]
) -> None:
    if not product.can_multiply():
        pytest.skip("this processor multiplies no pairs of bfloat16")
    if worker == "pairs":
        monkeypatch.setattr(product, "fastest_worker", lambda: PAIR_WORKER)
    (heads, outputs, inputs), generator = sizes, torch.Generator().manual_seed(0)
    weights = torch.randn(heads, outputs, inputs, generator=generator).bfloat16()
    rows = torch.randn(150, heads, inputs + 8, generator=generator).bfloat16()[..., :inputs]
    linear = HeadLinear(weights)
    assert linear.format == ("12 bits" if inputs % 32 == 0 else "packed")

    def run(own: torch.Tensor) -> torch.Tensor:
        room = torch.full((len(own), heads, outputs + 16), 7.0).bfloat16()
        linear(own, room[..., :outputs])
        assert (room[..., outputs:] == 7).all()
        return room[..., :outputs].clone()

    whole = run(rows)
    expected = torch.einsum("rhi,hoi->rho", rows.double(), weights.double())
    torch.testing.assert_close(whole.double(), expected, rtol=2**-8, atol=1e-3)
    for count in (4, 5, 17, 33, 65, 100):
        assert torch.equal(run(rows[:count]), whole[:count])
        assert torch.equal(run(rows[-count:]), whole[-count:])


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
