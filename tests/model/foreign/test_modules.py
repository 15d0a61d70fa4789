"""Fused modules: taken for what they compute, not for what they are called, and equal to what they replace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from foreword.config import Dtype, ModelConfig
from foreword.model.decoder.linear import can_pack
from foreword.model.foreign.modules import FusedGate, FusedNorm, ProductPart, fuse
from foreword.model.loader import load_foreign_model
from tiny_models import TinyModels

pytestmark = pytest.mark.skipif(not can_pack(torch.bfloat16, torch.device("cpu")), reason="no packed products here")
DTYPES = [torch.bfloat16, torch.float32]
TOLERANCE = {torch.bfloat16: 2**-7, torch.float32: 1e-5}


def random(*size: int, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> Tensor:
    return (torch.randn(*size, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


# ------------------------------------------------------------------------------------------- modules


class PlainNorm(nn.Module):
    """A root-mean-square norm that nobody has seen before."""

    def __init__(self, width: int, dtype: torch.dtype, *, centre: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype), requires_grad=False)
        self.tiny = 1e-5
        self.centre = centre

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        if self.centre:
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.tiny)
        return self.weight * wide.to(x.dtype)


class Gated(nn.Module):
    def __init__(self, dtype: torch.dtype, activation: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(48, 80, bias=False, dtype=dtype)
        self.second = nn.Linear(48, 80, bias=False, dtype=dtype)
        self.third = nn.Linear(80, 48, bias=False, dtype=dtype)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.activation(self.second(x)) * self.first(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_is_known_by_its_formula_and_keeps_its_weight(dtype: torch.dtype) -> None:
    module = nn.Sequential(PlainNorm(64, dtype), PlainNorm(64, dtype, centre=True), PlainNorm(60, dtype))
    weight = random(64, dtype=dtype, seed=3)
    module[0].weight.copy_(weight)
    expected = module[0](random(5, 64, dtype=dtype))
    fuse(module)
    assert isinstance(module[0], FusedNorm)
    assert torch.equal(module[0].weight, weight)
    assert isinstance(module[1], PlainNorm), "it subtracts the mean first"
    assert isinstance(module[2], PlainNorm), "60 is not whole vectors"
    torch.testing.assert_close(module[0](random(5, 64, dtype=dtype)), expected, rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_norm_kept_in_float32_takes_rows_of_another_type(dtype: torch.dtype) -> None:
    module = nn.Sequential(PlainNorm(64, torch.float32))
    rows = random(5, 64, dtype=dtype)
    expected = module[0](rows)
    fuse(module)
    assert isinstance(module[0], FusedNorm)
    assert torch.equal(module[0](rows), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gated_network_is_known_by_its_formula_whatever_its_parts_are_called(dtype: torch.dtype) -> None:
    module = nn.Sequential(Gated(dtype, nn.SiLU()), Gated(dtype, nn.GELU())).requires_grad_(False)
    x = random(3, 48, dtype=dtype)
    expected = module[0](x)
    fuse(module)
    assert isinstance(module[0], FusedGate)
    assert isinstance(module[1], Gated), "its activation is another one"
    torch.testing.assert_close(module[0](x), expected, rtol=2 * TOLERANCE[dtype], atol=2e-3)


def test_a_module_that_is_watched_stays_as_it_is() -> None:
    module = nn.Sequential(PlainNorm(64, torch.float32))
    module[0].register_forward_hook(lambda *_: None)
    fuse(module)
    assert isinstance(module[0], PlainNorm)


def test_layers_that_share_a_product_also_serve_inputs_of_their_own() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = nn.Linear(32, 64), nn.Linear(32, 16), nn.Linear(32, 16)

    module = nn.Sequential(Attention()).requires_grad_(False)
    x, y = random(4, 32, dtype=torch.float32), random(5, 32, dtype=torch.float32, seed=1)
    plain = [(layer(x), layer(y), layer.weight, layer.bias) for layer in module[0].children()]
    fuse(module)
    layers = list(module[0].children())
    assert all(isinstance(layer, ProductPart) for layer in layers)
    for order in ([0, 1, 2], [2, 1, 0], [1, 1, 0], [2, 2, 2]):
        for number in order:
            torch.testing.assert_close(layers[number](x), plain[number][0])
            torch.testing.assert_close(layers[number](y), plain[number][1])
    assert all(torch.equal(layer.weight, own[2]) for layer, own in zip(layers, plain, strict=True))
    assert all(torch.equal(layer.bias, own[3]) for layer, own in zip(layers, plain, strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral", "granite", "smollm3"])
def test_the_usual_layers_are_fused(tiny_models: TinyModels, name: str, dtype: Dtype) -> None:
    found = {type(module) for module in _foreign(tiny_models, name, dtype).modules()}
    assert {FusedNorm, FusedGate, ProductPart} <= found


def _foreign(tiny_models: TinyModels, name: str, dtype: Dtype) -> nn.Module:
    return load_foreign_model(ModelConfig(str(tiny_models.folder(name)), dtype=dtype)).flat.module
