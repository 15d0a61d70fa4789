"""Products and small operations on rows: plain torch's results, and for a row the same bits among any others.

In the interpreter without a GPU, compiled on one.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from foreword.kernels.triton import products, rows

pytestmark = pytest.mark.usefixtures("fixed_products")
SIZES = [1, 65, 258]
"""Of each of the three tiles."""


def numbers(device_name: str, *shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator)).bfloat16().to(device_name)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("inner", "outputs", "processors"), [(64, 40, 1), (200, 72, 1), (1100, 72, 132)])
def test_a_product_is_that_of_torch_and_a_row_has_the_same_bits_among_any_rows(
    device_name: str, inner: int, outputs: int, processors: int, has_bias: bool
) -> None:
    x = numbers(device_name, SIZES[-1], inner)
    weight = numbers(device_name, outputs, inner, seed=1, scale=inner**-0.5)
    bias = numbers(device_name, outputs, seed=2) if has_bias else None
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    alone = products.multiply_rows(x[:1], weight, bias, processors=132)
    for size in SIZES:
        result = products.multiply_rows(x[:size], weight, bias, processors=processors)
        torch.testing.assert_close(result.double(), exact[:size], rtol=1e-2, atol=1e-2)
        assert torch.equal(result[0], alone[0]), size
        rolled = products.multiply_rows(x[:size].roll(1, 0), weight, bias, processors=processors)
        assert torch.equal(rolled[(1 % size)], alone[0]), size


def test_rows_of_a_product_may_have_gaps_between_them(device_name: str) -> None:
    wide, weight = numbers(device_name, 5, 200), numbers(device_name, 24, 96, seed=1)
    own = wide[:, 40:136]
    expected = products.multiply_rows(own.contiguous(), weight, None, processors=1)
    assert torch.equal(products.multiply_rows(own, weight, None, processors=1), expected)
    assert products.multiply_rows(own[:0], weight, None, processors=1).shape == (0, 24)


@pytest.mark.parametrize("inner", [16, 64, 576, 768, 896, 1536, 4864, 8960, 18_944])
def test_chunks_cover_the_inner_length_and_are_alike(inner: int) -> None:
    chunk = products.chunk_length(inner)
    num_chunks = -(-inner // chunk)
    assert chunk % products.INNER == 0
    assert (num_chunks - 1) * chunk < inner <= num_chunks * chunk
    assert chunk <= 2 * products.CHUNK_INNER


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("scales", [rows.ROUND_FIRST, rows.IN_FLOAT32, rows.ONE_MORE])
@pytest.mark.parametrize("width", [48, 128])
def test_norms_are_those_of_torch(device_name: str, width: int, scales: int, centred: bool) -> None:
    x, y, weight = (
        numbers(device_name, *shape, seed=seed) for seed, shape in enumerate([(7, width), (7, width), (width,)])
    )
    normed, sums = rows.norm_rows(x, y, weight, 1e-5, scales=scales, centred=centred)
    assert torch.equal(sums, x + y)
    wide = sums.double()
    wide = wide - wide.mean(-1, keepdim=True) if centred else wide
    exact = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    exact = exact * (weight.double() + 1.0 if scales == rows.ONE_MORE else weight.double())
    torch.testing.assert_close(normed.double(), exact, rtol=1.2e-2, atol=1e-6)
    alone, own = rows.norm_rows(sums[3:4], None, weight, 1e-5, scales=scales, centred=centred)
    assert torch.equal(alone[0], normed[3])
    assert torch.equal(own[0], sums[3])


@pytest.mark.parametrize("activation", [rows.SILU, rows.GELU_TANH])
def test_gates_are_those_of_torch(device_name: str, activation: int) -> None:
    both = numbers(device_name, 5, 2 * 1100, scale=3.0)
    gate, up = both[:, :1100], both[:, 1100:]
    active = (
        torch.nn.functional.silu(gate)
        if activation == rows.SILU
        else torch.nn.functional.gelu(gate, approximate="tanh")
    )
    torch.testing.assert_close(rows.gate_rows(both, activation), active * up, rtol=2e-2, atol=1e-3)


@pytest.mark.parametrize("in_float32", [True, False])
@pytest.mark.parametrize("turned", [16, 48])
def test_heads_are_turned_as_torch_turns_them(device_name: str, turned: int, in_float32: bool) -> None:
    projected = numbers(device_name, 6, 5 * 48)
    heads = projected[:, 48 : 4 * 48].unflatten(-1, (3, 48))
    angles = torch.randn(6, turned // 2).repeat(1, 2).to(device_name)
    dtype = torch.float32 if in_float32 else torch.bfloat16
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    first = heads[..., :turned].to(dtype)
    other = torch.cat((-first[..., turned // 2 :], first[..., : turned // 2]), -1)
    expected = (first * cosines[:, None] + other * sines[:, None]).bfloat16()
    result = rows.turn_heads(heads, cosines, sines)
    assert torch.equal(result[..., :turned], expected)
    assert torch.equal(result[..., turned:], heads[..., turned:])
