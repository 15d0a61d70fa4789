"""Packed linear layers: the products are those of plain ones, and a row's bits do not depend on the others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from foreword.config import ModelConfig
from foreword.model.decoder.linear import can_pack
from foreword.model.foreign import modules
from foreword.model.foreign.flat_model import FlatModel
from foreword.model.foreign.modules import PackedLinear, pack_linears
from foreword.model.loader import load_foreign_model
from tiny_models import TinyModels

CPU = torch.device("cpu")
ROWS = [*range(1, 65), 100, 512]
needs_packing = pytest.mark.skipif(not can_pack(torch.bfloat16, CPU), reason="no bfloat16 products of oneDNN here")


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def linear(outputs: int, inputs: int, dtype: torch.dtype, *, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias)
    generator = torch.Generator().manual_seed(outputs + inputs)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, inputs**-0.5, generator=generator)
    return layer.to(dtype).requires_grad_(False)


def rows_of(count: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(1)).to(dtype)


@needs_packing
@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize(("outputs", "inputs"), [(128, 896), (896, 896), (896, 4864), (4864, 896), (37, 61)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_row_has_the_same_bits_among_any_number_of_rows(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    layer = PackedLinear.stack([linear(outputs, inputs, dtype)])
    rows = rows_of(max(ROWS), inputs, dtype)
    together = layer(rows)
    for count in ROWS:
        if count > 1 or dtype == torch.bfloat16:  # float32 is padded to more rows than one
            assert torch.equal(layer(rows[:count]), together[:count]), f"{count} rows"
            assert torch.equal(layer(rows[-count:].clone()), together[-count:]), f"the last {count} rows"


@needs_packing
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_packed_product_is_that_of_the_plain_layer(dtype: torch.dtype, bias: bool) -> None:
    plain = linear(300, 200, dtype, bias=bias)
    rows = rows_of(2 * 9, 200, dtype).view(2, 9, 200)
    found, expected = PackedLinear.stack([plain])(rows), plain(rows)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@needs_packing
def test_a_packed_layer_takes_rows_that_are_part_of_others() -> None:
    layer = PackedLinear.stack([linear(64, 100, torch.bfloat16)])
    wide = rows_of(5, 200, torch.bfloat16)
    assert torch.equal(layer(wide[:, :100]), layer(wide[:, :100].contiguous()))


@needs_packing
def test_a_packed_layer_gives_back_its_plain_weight() -> None:
    plain = linear(100, 60, torch.bfloat16)
    assert torch.equal(PackedLinear.stack([plain]).weight, plain.weight)


@needs_packing
def test_only_plain_linear_layers_are_packed() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    shared = linear(8, 8, torch.bfloat16)
    module = nn.Sequential(shared, Scaled(8, 8), shared, nn.Embedding(8, 8))
    assert pack_linears(module) == 1
    assert module[0] is module[2]
    assert isinstance(module[0], PackedLinear)
    assert type(module[1]) is Scaled
    assert not FlatModel(module, None, CPU).is_packed


@needs_packing
def test_a_tied_output_head_is_packed_and_the_embedding_keeps_its_rows(tiny_models: TinyModels) -> None:
    module = load_foreign_model(ModelConfig(str(tiny_models.folder("odd_llama")), dtype="bfloat16")).flat.module
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()
    assert isinstance(head, PackedLinear)
    assert torch.equal(head.weight, embedding.weight)
    assert not any(isinstance(child, nn.Linear) for child in module.modules())


@needs_packing
def test_models_with_other_matrices_than_linear_layers_are_told_apart(tiny_models: TinyModels) -> None:
    assert load_foreign_model(ModelConfig(str(tiny_models.folder("llama")))).is_packed
    assert not tiny_models.loaded("gpt2").is_packed


def test_where_nothing_can_be_packed_the_plain_layers_stay(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules, "can_pack", lambda *_: False)
    model = load_foreign_model(ModelConfig(str(tiny_models.folder("llama"))))
    assert isinstance(model.flat.module.get_output_embeddings(), nn.Linear)
    assert not model.is_packed


def test_half_precision_and_other_devices_are_not_packed() -> None:
    assert not can_pack(torch.float16, CPU)
    assert not can_pack(torch.bfloat16, torch.device("cuda"))
