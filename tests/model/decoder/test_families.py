"""A wrong fact changes the answer; a field or weight that nobody knows sends a model to transformers' modules."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from doors import correction_of, network_of, shared_gate_of, storage_of
from foreword.config import Dtype, ModelConfig
from foreword.model.decoder import families
from foreword.model.decoder.families import FAMILIES
from foreword.model.decoder.linear import Linear
from foreword.model.loader import LoadedModel, load_foreign_model, load_model
from foreword.model.passes import RowPadding
from foreword.model.self_check import ShortPrompt, find_inexactness
from foreword.model.spec import DecoderSpec, LayerSpec, NetworkNames
from tiny_models import RECIPES, TinyModels, build_engine, complete, greedy, random_tokens

WRITTEN = sorted(name for name, recipe in RECIPES.items() if recipe.model_type in FAMILIES)
Change = Callable[[DecoderSpec], DecoderSpec]


def error(tiny_models: TinyModels, name: str, model: LoadedModel) -> float:
    """How far a model's logits are from transformers', as a share of the largest."""
    prompt = ShortPrompt(model)
    expected = tiny_models.oracle(name).logits(prompt.tokens.tolist())[-1]
    return float((prompt.logits - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("name", WRITTEN)
def test_logits_are_those_of_transformers_however_a_prompt_is_cut(tiny_models: TinyModels, name: str) -> None:
    model = tiny_models.loaded(name)
    assert model.code == {"family": RECIPES[name].model_type}
    assert error(tiny_models, name, model) < 2e-5
    assert find_inexactness(model) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "granite", "smollm3"])
def test_a_written_decoder_has_the_bits_of_transformers_modules(
    tiny_models: TinyModels, name: str, dtype: Dtype
) -> None:
    """KV included. Caches on disk and golden answers are older than the written decoder. Gates by gelu are our own."""
    foreign = load_foreign_model(ModelConfig(str(tiny_models.folder(name)), dtype=dtype))
    if dtype == "bfloat16" and not foreign.is_packed:
        pytest.skip("without packed products, rounding depends on how rows are joined")
    assert ShortPrompt(tiny_models.loaded(name, dtype)).digest() == ShortPrompt(foreign).digest()


def test_a_head_in_the_file_is_used_though_the_config_says_that_it_is_tied(
    tiny_models: TinyModels, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_models.folder("gemma2"), tmp_path / "own-head")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    written, foreign = (load(ModelConfig(str(folder))) for load in (load_model, load_foreign_model))
    assert written.code == {"family": "gemma2"}
    torch.testing.assert_close(ShortPrompt(written).logits, ShortPrompt(foreign).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [{"auto_map": {"AutoConfig": "configuration_x.X"}}, {"use_mrope": False}])
def test_fields_that_say_nothing_do_not_send_a_model_to_transformers_modules(
    tiny_models: TinyModels, tmp_path: Path, changes: dict[str, Any]
) -> None:
    folder = shutil.copytree(tiny_models.folder("qwen2"), tmp_path / "more-fields")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    assert load_model(ModelConfig(str(folder))).code == {"family": "qwen2"}


def layers(change: Callable[[int, LayerSpec], LayerSpec]) -> Change:
    return lambda spec: replace(spec, layers=tuple(change(n, own) for n, own in enumerate(spec.layers)))


def turned(**facts: Any) -> Change:
    return lambda spec: replace(spec, rotaries=tuple(replace(own, **facts) for own in spec.rotaries))


def swapped(*places: str) -> Change:
    """The norms of two places, one for the other."""
    first, second = places

    def change(spec: DecoderSpec) -> DecoderSpec:
        names = {first: getattr(spec.names, second), second: getattr(spec.names, first)}
        return replace(spec, names=replace(spec.names, **names))

    return change


def named(**places: Any) -> Change:
    return lambda spec: replace(spec, names=replace(spec.names, **places))


def experts(**facts: Any) -> Change:
    return lambda spec: replace(spec, experts=replace(spec.experts, **facts))  # type: ignore[type-var]


def latent(**facts: Any) -> Change:
    return lambda spec: replace(spec, latent=replace(spec.latent, **facts))  # type: ignore[type-var]


YARN = RECIPES["deepseek_v3"].options["rope_parameters"]
MUTANTS: list[tuple[str, str, Change]] = [
    ("llama", "epsilon", lambda spec: replace(spec, norm=replace(spec.norm, epsilon=1e-2))),
    ("llama", "scale of scores", lambda spec: replace(spec, score_scale=1.1 * spec.score_scale)),
    ("llama", "theta", turned(theta=9e3)),
    ("llama", "rope kind", turned(kind="linear", parameters={"factor": 2.0})),
    ("llama", "pairs", turned(interleaved=True)),
    ("llama", "place of norms", swapped("before_attention", "before_network")),
    ("llama", "activation", lambda spec: replace(spec, activation="gelu_tanh")),
    ("llama", "keys and values", named(project=("self_attn.q_proj", "self_attn.v_proj", "self_attn.k_proj"))),
    ("llama", "gate and up", named(network=NetworkNames(("mlp.up_proj", "mlp.gate_proj")))),
    ("phi3", "part of a head", turned(turned=16)),
    ("phi3", "activation", lambda spec: replace(spec, activation="gelu_tanh")),
    ("mistral", "window", layers(lambda n, own: replace(own, window=None))),
    ("qwen3", "norms of heads", swapped("query_norm", "key_norm")),
    ("smollm3", "layers that turn", layers(lambda n, own: replace(own, rotary=0))),
    ("smollm3", "parity of windows", layers(lambda n, own: replace(own, window=12 if own.window is None else None))),
    ("granite", "multiplier of embeddings", lambda spec: replace(spec, embedding_scale=1.0)),
    ("granite", "multiplier of sums", lambda spec: replace(spec, residual_scale=1.0)),
    ("granite", "multiplier of logits", lambda spec: replace(spec, logit_scale=1.0)),
    ("gemma2", "parity of windows", layers(lambda n, own: replace(own, window=8 if own.window is None else None))),
    ("gemma2", "cap of scores", lambda spec: replace(spec, score_cap=None)),
    ("gemma2", "cap of logits", lambda spec: replace(spec, logit_cap=3.0)),
    ("gemma2", "scales of norms", lambda spec: replace(spec, norm=replace(spec.norm, scales="in float32"))),
    ("gemma2", "place of norms", swapped("before_network", "after_network")),
    ("gemma3_text", "angles of windows", layers(lambda n, own: replace(own, rotary=0))),
    ("gemma3_text", "multiplier of embeddings", lambda spec: replace(spec, embedding_scale=1.0)),
    ("olmo2", "epsilon", lambda spec: replace(spec, norm=replace(spec.norm, epsilon=1e-2))),
    ("olmo2", "place of norms", swapped("after_attention", "before_attention")),
    ("olmo2", "scales of norms", lambda spec: replace(spec, norm=replace(spec.norm, scales="one more"))),
    ("cohere2", "side by side", lambda spec: replace(spec, parallel=False)),
    ("cohere2", "pairs", turned(interleaved=False)),
    ("cohere2", "centred norms", lambda spec: replace(spec, norm=replace(spec.norm, centred=False))),
    ("cohere2", "layers that turn", layers(lambda n, own: replace(own, rotary=0))),
    ("cohere2", "multiplier of logits", lambda spec: replace(spec, logit_scale=1.0)),
    ("mixtral", "sum of weights", experts(normalised=False)),
    ("mixtral", "gate and up", experts(gate="block_sparse_moe.experts.{}.w3", up="block_sparse_moe.experts.{}.w1")),
    ("qwen2_moe", "sum of weights", experts(normalised=True)),
    ("qwen2_moe", "choice before the softmax", experts(weights="softmax of chosen")),
    ("qwen2_moe", "number of a row's experts", experts(chosen=2)),
    ("qwen3_moe", "sum of weights", experts(normalised=True)),
    ("qwen3_moe", "norms of heads", swapped("query_norm", "key_norm")),
    ("gpt_oss", "softmax before the choice", experts(weights="softmax of all")),
    ("gpt_oss", "gate", lambda spec: replace(spec, clamp=None)),
    ("gpt_oss", "limit of the gate", lambda spec: replace(spec, clamp=replace(spec.clamp, limit=0.05))),  # type: ignore[type-var]
    ("gpt_oss", "slope of the gate", lambda spec: replace(spec, clamp=replace(spec.clamp, slope=1.0))),  # type: ignore[type-var]
    ("deepseek_v2", "weights by sigmoid", experts(weights="sigmoid")),
    ("deepseek_v2", "choice among all groups", experts(groups=1)),
    ("deepseek_v2", "number of groups", experts(chosen_groups=1)),
    ("deepseek_v2", "a group's score", experts(group_best=2)),
    ("deepseek_v2", "scale of weights", experts(scale=1.0)),
    ("deepseek_v2", "pairs", turned(interleaved=False)),
    ("deepseek_v2", "epsilon of the latent norm", latent(epsilon=1e-2)),
    ("deepseek_v3", "weights by softmax", experts(weights="softmax of all")),
    ("deepseek_v3", "sum of weights", experts(normalised=False)),
    ("deepseek_v3", "choice among all groups", experts(groups=1)),
    ("deepseek_v3", "a group's score", experts(group_best=1)),
    ("deepseek_v3", "scale of weights", experts(scale=1.0)),
    ("deepseek_v3", "pairs", turned(interleaved=False)),
    ("deepseek_v3", "scale of scores without its stretch", lambda spec: replace(spec, score_scale=24**-0.5)),
    ("deepseek_v3", "scale of tables", turned(parameters={**YARN, "mscale": 1.0})),
    ("glm4_moe_lite", "epsilon of the latent norm", latent(epsilon=1e-2)),
    ("glm4_moe_lite", "pairs", turned(interleaved=False)),
    ("minicpm3", "pairs", turned(interleaved=True)),
    ("youtu", "pairs", turned(interleaved=False)),
    ("youtu", "epsilon of the latent norm", latent(epsilon=1e-2)),
    ("minicpm3", "multiplier of embeddings", lambda spec: replace(spec, embedding_scale=1.0)),
    ("minicpm3", "multiplier of sums", lambda spec: replace(spec, residual_scale=1.0)),
    ("minicpm3", "multiplier of logits", lambda spec: replace(spec, logit_scale=1.0)),
    ("gpt_oss", "parity of windows", layers(lambda n, own: replace(own, window=8 if own.window is None else None))),
]


@pytest.mark.parametrize(("name", "fact", "change"), MUTANTS, ids=[f"{name}: {fact}" for name, fact, _ in MUTANTS])
def test_a_wrong_fact_fails_the_oracle(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch, name: str, fact: str, change: Change
) -> None:
    family, own = RECIPES[name].model_type, FAMILIES[RECIPES[name].model_type]
    monkeypatch.setattr(families, "FAMILIES", {**FAMILIES, family: lambda fields: change(own(fields))})
    mutant = load_model(ModelConfig(str(tiny_models.folder(name)), dtype="float32"))
    assert mutant.code == {"family": family}
    assert error(tiny_models, name, mutant) > 2e-4


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("gpt_oss", lambda spec: replace(spec, names=replace(spec.names, sinks=None)), "self_attn.sinks"),
        (
            "gpt_oss",
            layers(lambda n, own: replace(own, has_experts=n != 1)),
            r"no weight 'model.layers.1.mlp.down_proj",
        ),
        ("qwen2_moe", experts(shared=None, shared_gate=None), r"weight 'model.layers.0.mlp.shared_expert"),
        ("deepseek_v3", experts(correction=None), r"weight 'model.layers.1.mlp.gate.e_score_correction_bias"),
        ("minicpm3", latent(query_rank=None), r"weight 'model.layers.0.self_attn.q_a_layernorm.weight"),
        (
            "qwen2_moe",
            layers(lambda n, own: replace(own, has_experts=True)),
            r"no weight 'model.layers.1.mlp.experts.0",
        ),
        ("mixtral", experts(count=3), r"weight 'model.layers.0.block_sparse_moe.experts.3"),
    ],
)
def test_a_spec_that_leaves_out_a_weight_is_not_used(
    tiny_models: TinyModels,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    change: Change,
    said: str,
) -> None:
    own = FAMILIES[name]
    monkeypatch.setattr(families, "FAMILIES", {**FAMILIES, name: lambda fields: change(own(fields))})
    with caplog.at_level(logging.INFO, logger="foreword.model.loader"):
        assert "class" in load_model(ModelConfig(str(tiny_models.folder(name)), dtype="float32")).code
    assert re.search(said, caplog.text)


def flip(product: Linear) -> None:
    """Negate a product's weight."""
    product.__init__([-product.weight], None)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("gpt_oss", lambda layer: setattr(layer, "attention", replace(layer.attention, sinks=None))),
        ("qwen2_moe", lambda layer: flip(shared_gate_of(layer))),
        ("deepseek_v3", lambda layer: correction_of(layer).zero_()),
        ("deepseek_v3", lambda layer: correction_of(layer).neg_()),
    ],
)
def test_what_no_fact_says_counts(tiny_models: TinyModels, name: str, spoil: Callable[[Any], None]) -> None:
    model = load_model(ModelConfig(str(tiny_models.folder(name)), dtype="float32"))
    spoil(model.decoder.layers[-1])
    assert error(tiny_models, name, model) > 2e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3"])
def test_an_experts_rows_have_the_same_bits_however_many_they_are(
    tiny_models: TinyModels, name: str, dtype: Dtype
) -> None:
    """Alone, with rows that chose others, and with more of its own; rows of padding get nothing."""
    model = load_model(ModelConfig(str(tiny_models.folder(name)), dtype=dtype))
    network, generator = network_of(model.decoder.layers[-1]), torch.Generator().manual_seed(0)
    padded = RowPadding.for_model(
        model.activation_widths(), model.dtype, torch.get_num_threads(), packed=model.is_packed
    )
    rows = torch.randn(150, model.decoder.spec.hidden_size, generator=generator).to(model.dtype)

    def run(own: torch.Tensor) -> torch.Tensor:
        room = own.new_zeros(padded(len(own)), own.shape[1])
        room[: len(own)] = own
        return network(room, len(own))[: len(own)]

    with torch.inference_mode():
        whole = run(rows)
        for length in (1, 2, 3, 5, 17, 64, 149):
            assert torch.equal(run(rows[:length]), whole[:length])
            assert torch.equal(run(rows[-length:]), whole[-length:])
        flipped = run(rows.flip(0))
    assert torch.equal(flipped.flip(0), whole)


def changed(folder: Path, target: Path, **fields: Any) -> ModelConfig:
    """A copy with other fields in its config."""
    shutil.copytree(folder, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **fields}))
    return ModelConfig(str(target), dtype="float32")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"key_temperature": 2.0}, "config field key_temperature=2.0"),
        ({"use_qk_norm": True}, "config field use_qk_norm=True"),
        ({"rope_interleaved": True}, "rope_interleaved=True"),
        ({"layer_types": ["full_attention"] * 3}, "config field layer_types="),
    ],
)
def test_a_field_that_nobody_knows_sends_a_model_to_transformers_modules(
    tiny_models: TinyModels, tmp_path: Path, caplog: pytest.LogCaptureFixture, fields: dict[str, Any], said: str
) -> None:
    with caplog.at_level(logging.INFO, logger="foreword.model.loader"):
        model = load_model(changed(tiny_models.folder("llama"), tmp_path / "own", **fields))
    assert "class" in model.code
    assert [record.getMessage() for record in caplog.records if said in record.getMessage()]
    assert error(tiny_models, "llama", model) < 2e-5


@pytest.mark.parametrize(
    ("family", "facts"),
    [
        ("llama", {"pretraining_tp": 2}),
        ("llama", {"partial_rotary_factor": 0.5}),
        ("llama", {"hidden_act": "relu"}),
        ("llama", {"rope_parameters": {"rope_type": "abacus", "rope_theta": 1e4}}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2]}}),
        ("gemma3_text", {"use_bidirectional_attention": True}),
        ("qwen3", {"layer_types": ["chunked_attention"] * 3}),
        ("deepseek_v2", {"norm_topk_prob": True}),
        ("deepseek_v2", {"num_key_value_heads": 2}),
        ("deepseek_v3", {"scoring_func": "softmax"}),
        ("deepseek_v3", {"topk_group": 5}),
        ("deepseek_v3", {"topk_group": 1}),  # three experts, of which four are chosen
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse"]}),
    ],
)
def test_values_that_are_not_written_are_named(tiny_models: TinyModels, family: str, facts: dict[str, Any]) -> None:
    config = json.loads((tiny_models.folder(family) / "config.json").read_text())
    with pytest.raises(families.UnwrittenError):
        families.find_spec({**config, **facts}, ())


def test_a_weight_that_has_no_place_sends_a_model_to_transformers_modules(tiny_models: TinyModels) -> None:
    config = json.loads((tiny_models.folder("llama") / "config.json").read_text())
    names = list(load_file(tiny_models.folder("llama") / "model.safetensors"))
    assert families.find_spec(config, names).family == "llama"
    with pytest.raises(families.UnwrittenError, match=r"weight 'model.layers.0.self_attn.q_norm.weight'"):
        families.find_spec(config, [*names, "model.layers.0.self_attn.q_norm.weight"])
    with pytest.raises(families.UnwrittenError, match=r"no weight 'model.norm.weight'"):
        families.find_spec(config, [name for name in names if name != "model.norm.weight"])


def test_a_bias_is_added_wherever_the_file_has_one(tiny_models: TinyModels, tmp_path: Path) -> None:
    """Mistral's code has no biases; llama's has them in all products if the config says so."""
    options = changed(tiny_models.folder("llama"), tmp_path / "own", attention_bias=True, mlp_bias=True)
    path = tmp_path / "own" / "model.safetensors"
    weights, generator = load_file(path), torch.Generator().manual_seed(0)
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        weights[name.replace("weight", "bias")] = torch.randn(len(weights[name]), generator=generator) / 4
    save_file(weights, path, metadata={"format": "pt"})
    own, foreign = ShortPrompt(load_model(options)), ShortPrompt(load_foreign_model(options))
    assert own.digest() == foreign.digest()
    assert not torch.equal(own.logits, ShortPrompt(tiny_models.loaded("llama")).logits)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.06), ("float32", 1e-4)])
def test_blocks_that_do_not_fill_their_pages_are_served_too(
    tiny_models: TinyModels, dtype: Dtype, tolerance: float
) -> None:
    """Groups of unequal layers share pages of one size. Those of written families do not, so the test forces it."""
    model = tiny_models.loaded("qwen3", dtype)
    rng = np.random.default_rng(4)
    prompts = [random_tokens(rng, length) for length in (3, 30)]
    found: list[list[float]] = []
    for apart in (False, True):
        engine = build_engine(model, max_num_batched_tokens=8)
        storage = storage_of(engine)
        if apart:
            for layer, blocks in list(storage.blocks.items()):
                keys, values = (torch.stack((own, own), 1)[:, 0] for own in (blocks.keys, blocks.values))
                storage.blocks[layer] = replace(blocks, keys=keys, values=values)
                assert not storage.blocks[layer].is_contiguous
        outputs = complete(engine, prompts, greedy(1, prompt_logprobs=0))
        reports = [report for output in outputs for report in output.prompt_logprobs or [] if report]
        found.append([entry.logprob for report in reports for entry in report.values()])
    assert len(found[0]) == 2 + 29
    assert found[1] == pytest.approx(found[0], abs=tolerance)
