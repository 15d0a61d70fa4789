"""Fused decoder layers compute the bits of the layers whose place they take, and take no other's."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from foreword.config import ModelConfig
from foreword.kernels.llvm.norms import ROUND_NORM
from foreword.model.cpu.rotary import HeadShapes, RotaryKernel
from foreword.model.cpu.row_functions import Norm
from foreword.model.fusion import accelerate
from foreword.model.fusion.fused_layer import FusedForward
from foreword.model.fusion.layers import fuse_layers
from foreword.model.fusion.packed import can_pack
from foreword.model.loader import load_model
from tiny_models import TinyModels, build_engine, complete, greedy, random_tokens

pytestmark = pytest.mark.skipif(not can_pack(torch.bfloat16, torch.device("cpu")), reason="no packed products here")
DTYPES = [torch.bfloat16, torch.float32]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def num_fused(module: nn.Module) -> int:
    return sum(isinstance(layer.forward, FusedForward) for layer in module.modules())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral"])
def test_all_layers_of_usual_models_are_fused(tiny_models: TinyModels, name: str, dtype: str) -> None:
    assert num_fused(tiny_models.loaded(name, dtype).module) == 3  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama", "olmo2", "granite", "gemma2", "cohere2", "phi3", "gpt_oss", "llama4_text"])
def test_layers_that_compute_something_else_stay_as_they_are(tiny_models: TinyModels, name: str) -> None:
    """llama's heads are too small here; others scale, soft-cap, add or turn in their own ways."""
    assert num_fused(tiny_models.loaded(name).module) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "mistral"])
def test_fused_layers_change_no_bit_of_an_answer(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch, name: str, dtype: Literal["bfloat16", "float32"]
) -> None:
    fused = tiny_models.loaded(name, dtype)
    monkeypatch.setattr(accelerate, "fuse_layers", lambda *_: 0)
    plain = load_model(ModelConfig(str(tiny_models.folder(name)), dtype=dtype))
    assert num_fused(plain.module) == 0
    rng = np.random.default_rng(3)
    prompts = [random_tokens(rng, length) for length in (1, 5, 40, 90)]
    params = greedy(8, logprobs=3, prompt_logprobs=2)
    answers = [complete(build_engine(model), prompts, params) for model in (fused, plain)]
    for one, two in zip(*answers, strict=True):
        assert one.outputs[0].token_ids == two.outputs[0].token_ids
        assert one.outputs[0].logprobs == two.outputs[0].logprobs
        assert one.prompt_logprobs == two.prompt_logprobs


def test_a_layer_that_gets_other_rows_than_it_was_handed_computes_their_norm(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a model adds something between its layers."""
    config = ModelConfig(str(tiny_models.folder("qwen3")), dtype="float32")
    models = [load_model(config)]
    monkeypatch.setattr(accelerate, "fuse_layers", lambda *_: 0)
    models.append(load_model(config))
    answers = []
    for model in models:
        layer = model.module.get_submodule("model.layers.1")
        layer.register_forward_pre_hook(lambda _, inputs: (inputs[0] + 0.5, *inputs[1:]))
        (output,) = complete(build_engine(model), [random_tokens(np.random.default_rng(3), 20)], greedy(4, logprobs=2))
        answers.append(output.outputs[0].logprobs)
    assert answers[0] == answers[1]


def test_a_layer_that_is_watched_stays_as_it_is(tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerate, "fuse_layers", lambda *_: 0)
    model = load_model(ModelConfig(str(tiny_models.folder("qwen2"))))
    attention = next(module for module in model.module.modules() if getattr(module, "layer_idx", None) == 1)
    attention.register_forward_hook(lambda *_: None)
    assert fuse_layers(model.module, model.layers) == 2


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.06), ("float32", 1e-4)])
def test_blocks_that_do_not_fill_their_pages_are_served_too(
    tiny_models: TinyModels, dtype: Literal["bfloat16", "float32"], tolerance: float
) -> None:
    """gemma4's groups share pages of one size; mistral's and qwen's do not, so the plain way is asked for by hand."""
    model = tiny_models.loaded("qwen3", dtype)
    rng = np.random.default_rng(4)
    prompts = [random_tokens(rng, length) for length in (3, 30)]
    found: list[list[float]] = []
    for apart in (False, True):
        engine = build_engine(model, max_num_batched_tokens=8)
        storage = engine._runner._storage  # type: ignore[attr-defined]
        if apart:
            for tensors in (storage.keys, storage.values):
                for layer, blocks in list(tensors.items()):
                    tensors[layer] = torch.stack((blocks, blocks), 1)[:, 0]
                    assert not tensors[layer].is_contiguous()
        outputs = complete(engine, prompts, greedy(1, prompt_logprobs=0))
        reports = [report for output in outputs for report in output.prompt_logprobs or [] if report]
        found.append([entry.logprob for report in reports for entry in report.values()])
    assert len(found[0]) == 2 + 29
    assert found[1] == pytest.approx(found[0], abs=tolerance)


# --------------------------------------------------------------------------------------------- the pass itself


def turned(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """transformers' rotary embedding of halves, in torch; `x` [rows, heads, dim]."""
    size = cosine.shape[-1]
    part, rest = x[..., :size], x[..., size:]
    low, high = part[..., : size // 2], part[..., size // 2 :]
    cosine, sine = cosine[0][:, None], sine[0][:, None]
    return torch.cat((part * cosine + torch.cat((-high, low), -1) * sine, rest), -1)


def normed(x: Tensor, norm: Norm | None) -> Tensor:
    if norm is None:
        return x
    wide = x.float()
    return norm.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.epsilon)).to(x.dtype)


@pytest.mark.parametrize("num_rows", [1, 5, 200])
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(
    "shapes",
    [HeadShapes(4, 2, 64, 64, 64), HeadShapes(3, 1, 128, 64, 32), HeadShapes(2, 2, 32, 16, 32)],
    ids=["whole", "a part is turned", "small"],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_normalised_turned_and_stored(
    dtype: torch.dtype, shapes: HeadShapes, with_norms: bool, num_rows: int
) -> None:
    norms = [
        Norm(random(shapes.key_dim, dtype=dtype, seed=n), 1e-5, ROUND_NORM) if with_norms else None for n in (1, 2)
    ]
    sizes = [shapes.query_heads * shapes.key_dim, shapes.kv_heads * shapes.key_dim, shapes.kv_heads * shapes.value_dim]
    projected = random(num_rows, sum(sizes), dtype=dtype)
    turns = (
        random(1, num_rows, shapes.turned, dtype=dtype, seed=3),
        random(1, num_rows, shapes.turned, dtype=dtype, seed=4),
    )
    num_slots = max(1, num_rows - 2)  # the last rows are padding
    slots = torch.randperm(16 * 20, generator=torch.Generator().manual_seed(5))[:num_slots]
    blocks = [
        torch.full((20, 16, shapes.kv_heads, dim), 7.0, dtype=dtype) for dim in (shapes.key_dim, shapes.value_dim)
    ]
    found = RotaryKernel(shapes, *norms)(projected, turns, slots, (blocks[0], blocks[1]))

    parts = [
        part.unflatten(1, (-1, dim))
        for part, dim in zip(projected.split(sizes, 1), (shapes.key_dim, shapes.key_dim, shapes.value_dim), strict=True)
    ]
    queries, keys = (turned(normed(part, norm), *turns) for part, norm in zip(parts, norms, strict=False))
    tolerance = (
        0.0 if not with_norms else 2**-6 if dtype == torch.bfloat16 else 1e-5
    )  # a mean is summed in another order
    torch.testing.assert_close(found, queries, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(blocks[0].flatten(0, 1)[slots], keys[:num_slots], rtol=tolerance, atol=tolerance)
    assert torch.equal(blocks[1].flatten(0, 1)[slots], parts[2][:num_slots])
    untouched = torch.ones(16 * 20, dtype=torch.bool)
    untouched[slots] = False
    assert all((block.flatten(0, 1)[untouched] == 7.0).all() for block in blocks)


def test_the_number_of_threads_changes_nothing() -> None:
    shapes = HeadShapes(8, 4, 64, 64, 64)
    projected, before = random(300, 16 * 64, dtype=torch.bfloat16), torch.get_num_threads()
    turns = random(1, 300, 64, dtype=torch.bfloat16, seed=1), random(1, 300, 64, dtype=torch.bfloat16, seed=2)
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            blocks = torch.zeros(20, 16, 4, 64, dtype=torch.bfloat16), torch.zeros(20, 16, 4, 64, dtype=torch.bfloat16)
            results.append((RotaryKernel(shapes, None, None)(projected, turns, torch.arange(300), blocks), *blocks))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, two) for other in results[1:] for one, two in zip(results[0], other, strict=True))
