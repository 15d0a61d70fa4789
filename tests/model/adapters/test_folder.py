"""PEFT's folders: what is read, what its digest names, and what is refused in one line."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from foreword.errors import InvalidRequestError
from foreword.model.adapters.loaded import read_adapter
from foreword.model.adapters.weights import AdaptedRows, AdapterWeights, LowRank, places
from foreword.model.spec import DecoderSpec, LayerSpec, NormSpec, RotarySpec
from peft_folders import save_adapter
from tiny_models import TinyModels

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def base(tiny_models: TinyModels) -> Path:
    return tiny_models.folder("llama")


@pytest.fixture(scope="module")
def spec(tiny_models: TinyModels) -> DecoderSpec:
    return tiny_models.loaded("llama").decoder.spec


def read(folder: Path, spec: DecoderSpec, max_rank: int = 16) -> AdapterWeights:
    return read_adapter(str(folder), spec, max_rank)


def change(folder: Path, **fields: Any) -> None:
    said = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**said, **fields}))


def test_a_digest_names_what_is_computed_and_nothing_else(tmp_path: Path, base: Path, spec: DecoderSpec) -> None:
    one = read(save_adapter(tmp_path / "one", base), spec)
    again = save_adapter(tmp_path / "another name", base)
    change(again, base_model_name_or_path="elsewhere", lora_dropout=0.3, peft_version="9", inference_mode=True)
    assert read(again, spec).digest == one.digest
    assert len(one.digest) == 64
    others: list[dict[str, Any]] = [
        {"seed": 1},
        {"lora_alpha": 9},
        {"use_rslora": True},
        {"alpha_pattern": {"q_proj": 9}},
        {"layers": [0, 1]},
        {"targets": ["q_proj"]},
        {"alora_invocation_tokens": [5, 6]},
        {"alora_invocation_tokens": [5, 7]},
    ]
    digests = {read(save_adapter(tmp_path / str(n), base, **other), spec).digest for n, other in enumerate(others)}
    assert len(digests | {one.digest}) == len(others) + 1


@pytest.mark.parametrize(
    "targets",
    [
        "all-linear",
        r"model\.layers\.\d+\.(self_attn|mlp)\.[a-z]+_proj",
        ["self_attn.q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "mlp.down_proj"],
    ],
)
def test_targets_are_a_list_a_pattern_or_all(tmp_path: Path, base: Path, spec: DecoderSpec, targets: Any) -> None:
    folder = save_adapter(tmp_path, base, ranks={"v_proj": 2}, alpha_pattern={"layers.1.self_attn.[qk]_proj": 3})
    change(folder, target_modules=targets)
    assert read(folder, spec).most_rank == 4


def test_an_invocation_is_found_where_it_is_last(tmp_path: Path, base: Path, spec: DecoderSpec) -> None:
    weights = read(save_adapter(tmp_path, base, alora_invocation_tokens=[7, 8]), spec)
    for tokens, begin in (([1, 7, 8, 2], 1), ([7, 8, 7, 8], 2), ([7, 7, 8], 1), ([7], None), ([8, 7], None)):
        assert weights.begin_in(np.array(tokens, np.int32)) == begin
    assert read(save_adapter(tmp_path / "lora", base), spec).begin_in(np.array([1], np.int32)) == 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "use_dora=True"),
    ({"bias": "all"}, "bias='all'"),
    ({"lora_bias": True}, "lora_bias"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"target_parameters": ["mlp.experts.down_proj"]}, "target_parameters"),
    ({"trainable_token_indices": [1]}, "trainable_token_indices"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ({"a_field_of_tomorrow": 1}, "a_field_of_tomorrow"),
    ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
    ({"init_lora_weights": "pissa_niter_16"}, "path_initial_model"),
    ({"init_lora_weights": "olora"}, "olora"),
    ({"init_lora_weights": ["x"]}, "init_lora_weights"),
    ({"peft_type": "LOHA"}, "other kinds"),
    ({"r": 10**6}, "rank 1000000, and max_lora_rank=16"),
    ({"r": 0}, "r=0"),
    ({"r": True}, "r=True"),
    ({"r": 8}, "has shape"),
    ({"lora_alpha": "8"}, "lora_alpha"),
    ({"lora_alpha": 1e300}, "lora_alpha"),
    ({"lora_alpha": 10**400}, "lora_alpha"),
    ({"lora_alpha": -(10**400)}, "lora_alpha"),
    ({"lora_alpha": float("nan")}, "lora_alpha"),
    ({"alpha_pattern": {"q_proj": 10**400}}, "alpha_pattern"),
    ({"alpha_pattern": {"q_proj": [1]}}, "alpha_pattern"),
    ({"rank_pattern": ["q_proj"]}, "must be an object"),
    ({"target_modules": ["q_proj"]}, "target_modules does not name"),
    ({"target_modules": None}, "target_modules=None"),
    ({"target_modules": "(a+)+b"}, "may take too long"),
    ({"target_modules": r"(.*)\1"}, "may take too long"),
    ({"target_modules": "(?=.*x).*"}, "may take too long"),
    ({"target_modules": ".*" * 9}, "may take too long"),
    ({"target_modules": "x" * 10_000}, "no text of at most"),
    ({"target_modules": "["}, "no regular expression"),
    ({"rank_pattern": {"((a*)*)*": 3}}, "may take too long"),
    ({"rank_pattern": {f"layers.{n}.q_proj": 4 for n in range(1025)}}, "rank_pattern has 1025 keys"),
    ({"alpha_pattern": {f"layers.{n}.*x": 4 for n in range(33)}}, "33 of them with repeats"),
    ({"layers_to_transform": [0]}, "target_modules does not name"),
    ({"layers_to_transform": ["0"]}, "layers_to_transform"),
    ({"alora_invocation_tokens": []}, "alora_invocation_tokens"),
    ({"alora_invocation_tokens": [-1]}, "alora_invocation_tokens"),
    ({"alora_invocation_tokens": "<|start|>"}, "alora_invocation_tokens"),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED, ids=lambda one: None if isinstance(one, dict) else one[:30])
def test_what_is_not_understood_is_refused_by_name(
    tmp_path: Path, base: Path, spec: DecoderSpec, fields: dict[str, Any], reason: str
) -> None:
    folder = save_adapter(tmp_path, base)
    change(folder, **fields)
    check_refusal(folder, spec, reason)


def check_refusal(folder: Path, spec: DecoderSpec, reason: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read(folder, spec)
    message = str(caught.value)
    assert reason in message
    assert "\n" not in message
    assert len(message) < 900


def test_files_that_lie_are_refused(tmp_path: Path, base: Path, spec: DecoderSpec) -> None:
    check_refusal(tmp_path / "nothing", spec, "no folder")
    folder = save_adapter(tmp_path / "adapter", base)
    whole, tensors = (folder / WEIGHTS).read_bytes(), load_file(folder / WEIGHTS)
    name = next(name for name in tensors if "q_proj.lora_B" in name)

    def refused_with(reason: str, **changed: torch.Tensor | None) -> None:
        new = {name: tensor for name, tensor in {**tensors, **changed}.items() if tensor is not None}
        save_file(new, folder / WEIGHTS, metadata={"format": "pt"})
        check_refusal(folder, spec, reason)

    refused_with("has only one", **{name: None})
    refused_with("has shape", **{name: tensors[name][:-1].clone()})
    refused_with("has shape", **{name: tensors[name].T.contiguous()})
    refused_with("not finite", **{name: torch.full_like(tensors[name], float("nan"))})
    change(folder, lora_alpha=16)  # a scale of 4
    refused_with("its scale 4 has numbers", **{name: torch.full_like(tensors[name], 1e38)})
    change(folder, lora_alpha=8)
    refused_with("of type I64", **{name: torch.zeros(64, 4, dtype=torch.int64)})
    for strange in (
        "base_model.model.lm_head.lora_A.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector",
        "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight",
        "base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight",
        "../../etc/passwd",
    ):
        refused_with("no low-rank product", **{strange: torch.zeros(4, 64)})
    for damaged in (b"", whole[:100], whole[:-8], struct.pack("<Q", 1 << 60) + whole[8:], b"\xff" * 200):
        (folder / WEIGHTS).write_bytes(damaged)
        check_refusal(folder, spec, "cannot be used")
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(tensors))
    check_refusal(folder, spec, "pickled weights are not read")
    (folder / WEIGHTS).mkdir()
    check_refusal(folder, spec, "pickled weights are not read")
    for config in (b"", b"[1]", b"{" * 100_000, b" " * (2 << 20), b"\xff\xfe"):
        (folder / CONFIG).write_bytes(config)
        check_refusal(folder, spec, CONFIG)


Q, V, OUT = (f"model.layers.0.self_attn.{name}" for name in ("q_proj", "v_proj", "o_proj"))


def spec_of(hidden: int, heads: int, head_dim: int) -> DecoderSpec:
    return DecoderSpec(
        "llama",
        hidden,
        32,
        heads,
        heads,
        head_dim,
        64,
        (LayerSpec(),),
        (RotarySpec(1e4, head_dim),),
        NormSpec(1e-6),
        1.0,
    )


def adapter(spec: DecoderSpec, names: list[str], rank: int, seed: int) -> tuple[AdapterWeights, dict[str, LowRank]]:
    rng, found = np.random.default_rng(seed), places(spec)
    changes = {
        name: LowRank(
            rng.standard_normal((rank, found[name].inputs), np.float32),
            rng.standard_normal((found[name].width, rank), np.float32),
            0.5 * rank,
            b"",
        )
        for name in names
    }
    return AdapterWeights(spec, changes, None), changes


# The second has widths that fill no vector: parts begin and end inside one.
@pytest.mark.parametrize("shape", [(64, 4, 16), (52, 3, 12)])
def test_each_part_gets_its_product(shape: tuple[int, int, int]) -> None:
    spec = spec_of(*shape)
    width = shape[1] * shape[2]
    adapters, changes = zip(*(adapter(spec, names, rank, rank) for names, rank in (([Q, V], 3), ([V], 8))), strict=True)
    rows, result = torch.randn(7, shape[0]), torch.randn(7, 3 * width)
    numbers = [0, -1, 1, 1, 0, 0, -1]
    added = AdaptedRows(adapters, np.array(numbers)).layer(0)
    assert added.output is added.gate is added.down is None
    assert added.project is not None
    found = added.project.add(rows, result.clone())
    for row, number in enumerate(numbers):
        wanted = result[row].double().numpy()
        for name, change in changes[number].items() if number >= 0 else ():
            first = {Q: 0, V: 2 * width}[name]
            delta = change.scale * (change.up.astype(np.float64) @ (change.down.astype(np.float64) @ rows[row].numpy()))
            wanted[first : first + width] += delta
        np.testing.assert_allclose(found[row].numpy(), wanted, rtol=1e-5, atol=1e-4)
        if number < 0:
            assert torch.equal(found[row], result[row])


def test_a_rows_bits_depend_on_no_other_row_and_no_other_adapter() -> None:
    spec = spec_of(576, 9, 64)
    adapters = [adapter(spec, [Q, V], rank, seed)[0] for seed, rank in enumerate((16, 5, 1))]
    rows, result = torch.randn(511, 576), torch.randn(511, 3 * 576)
    numbers = np.random.default_rng(1).integers(-1, 3, 511)
    alone = torch.cat(
        [
            AdaptedRows(adapters, numbers[row : row + 1])
            .layer(0)
            .project.add(rows[row : row + 1], result[row : row + 1].clone())  # type: ignore[union-attr]
            for row in range(511)
        ]
    )
    for count in [*range(1, 65), 100, 511]:
        added = AdaptedRows(adapters, numbers[:count]).layer(0).project
        assert added is not None
        assert torch.equal(added.add(rows[:count], result[:count].clone()), alone[:count]), f"{count} rows"
    only = AdaptedRows(adapters[:1], np.where(numbers == 0, 0, -1)).layer(0).project
    assert only is not None
    own = numbers == 0
    assert torch.equal(only.add(rows, result.clone())[own], alone[own])


def test_rows_of_another_type_are_rounded_once_and_others_keep_their_bits() -> None:
    spec = spec_of(64, 4, 16)
    weights, changes = adapter(spec, [OUT], 4, 0)
    rows, result = torch.randn(3, 64).bfloat16(), torch.randn(3, 64).bfloat16()
    result[1, :8] = -0.0
    added = AdaptedRows([weights], np.array([0, -1, 0])).layer(0).output
    assert added is not None
    found = added.add(rows, result.clone())
    assert torch.equal(found[1].view(torch.int16), result[1].view(torch.int16))
    change = changes[OUT]
    delta = rows.float() @ torch.from_numpy(change.down).T @ torch.from_numpy(change.up).T * change.scale
    torch.testing.assert_close(found[::2], (result.float() + delta).bfloat16()[::2])
