"""Norms, sums and gates of rows are those of exact arithmetic, and a row's bits are its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from foreword.kernels.llvm.norms import ADD_ONE, ROUND_NORM
from foreword.model.cpu.row_functions import ALONE_ELEMENTS, Norm, RowKernels

DTYPES = [torch.bfloat16, torch.float32]
TOLERANCE = {torch.bfloat16: 2**-7, torch.float32: 1e-5}


@pytest.fixture(scope="module")
def kernels() -> RowKernels:
    return RowKernels()


@pytest.fixture(params=[1, 2])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def random(*size: int, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> Tensor:
    return (torch.randn(*size, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


@pytest.mark.parametrize("form", [0, ROUND_NORM, ADD_ONE])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_norm_is_that_of_exact_arithmetic(kernels: RowKernels, dtype: torch.dtype, form: int) -> None:
    x, weight = random(2, 9, 96, dtype=dtype, scale=3.0), random(96, dtype=dtype, seed=1)
    exact = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
    exact *= weight.double() + (1.0 if form == ADD_ONE else 0.0)
    found = kernels.rms_norm(x, Norm(weight, 1e-3, form))
    torch.testing.assert_close(found.double(), exact, rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates_are_those_of_exact_arithmetic(kernels: RowKernels, dtype: torch.dtype, scale: float) -> None:
    x = random(7, 2 * 64, dtype=dtype, scale=scale)
    gate, up = x.double().split(64, -1)
    found = kernels.gate("silu", x).double()
    torch.testing.assert_close(found, gate / (1 + (-gate).exp()) * up, rtol=2 * TOLERANCE[dtype], atol=1e-30)
    found, exact = kernels.gate("gelu_tanh", x).double(), torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(found, exact, rtol=2 * TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_second_term_of_a_sum_is_scaled_and_rounded_first(kernels: RowKernels, dtype: torch.dtype) -> None:
    x, y, norm = (
        random(5, 64, dtype=dtype),
        random(5, 64, dtype=dtype, seed=1),
        Norm(torch.ones(64, dtype=dtype), 0.1, 0),
    )
    total, normed = kernels.add_norm(x, y, norm, 0.22)
    assert torch.equal(total, x + y * 0.22)
    assert torch.equal(normed, kernels.rms_norm(total, norm))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_a_number_stays_that(kernels: RowKernels, dtype: torch.dtype) -> None:
    x = torch.full((1, 32), torch.nan, dtype=dtype)
    assert kernels.gate("silu", x).isnan().all()
    assert kernels.rms_norm(x, Norm(torch.ones(32, dtype=dtype), 1e-6, 0)).isnan().all()


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_alone_and_among_more_than_one_thread_takes(
    kernels: RowKernels, dtype: torch.dtype
) -> None:
    width = 512
    rows = random(ALONE_ELEMENTS // width + 37, 2 * width, dtype=dtype)
    weight = random(2 * width, dtype=dtype, seed=1)
    norm = Norm(weight, 1e-6, ROUND_NORM)
    gates, norms = kernels.gate("silu", rows), kernels.rms_norm(rows, norm)
    for row in range(0, len(rows), 11):
        assert torch.equal(kernels.gate("silu", rows[row : row + 1]), gates[row : row + 1])
        assert torch.equal(kernels.rms_norm(rows[row : row + 1], norm), norms[row : row + 1])
