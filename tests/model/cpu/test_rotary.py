"""The pass over heads computes what norms, rotary embeddings and writes compute one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from foreword.kernels.kv_format import KVBlocks, KVFormat
from foreword.kernels.llvm.norms import ROUND_NORM
from foreword.model.cpu.rotary import HeadShapes, RotaryKernel
from foreword.model.cpu.row_functions import Norm

DTYPES = [torch.bfloat16, torch.float32]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


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
    found = RotaryKernel(shapes, *norms)(projected, turns, slots, KVBlocks.plain(*blocks))

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


@pytest.mark.parametrize("num_rows", [1, 5, 200])
@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize(
    "shapes", [HeadShapes(4, 2, 64, 64, 64), HeadShapes(3, 1, 128, 64, 32), HeadShapes(2, 3, 32, 16, 32)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_those_of_the_rows_that_other_blocks_hold(
    dtype: torch.dtype, shapes: HeadShapes, with_norms: bool, num_rows: int
) -> None:
    """Bit for bit, by the formula in torch; rows of zeros, and of no numbers, among them."""
    norms = [
        Norm(random(shapes.key_dim, dtype=dtype, seed=n), 1e-5, ROUND_NORM) if with_norms else None for n in (1, 2)
    ]
    width = (shapes.query_heads + shapes.kv_heads) * shapes.key_dim + shapes.kv_heads * shapes.value_dim
    projected = random(num_rows, width, dtype=dtype) * 2.0 ** torch.arange(-20, 20).repeat(5)[:num_rows, None]
    projected = projected.to(dtype)
    if num_rows > 5:
        projected[3], projected[4, -1], projected[5, -1] = 0.0, torch.nan, torch.inf
    turns = tuple(random(1, num_rows, shapes.turned, dtype=dtype, seed=seed) for seed in (3, 4))
    slots = torch.randperm(16 * 20, generator=torch.Generator().manual_seed(5))[: max(1, num_rows - 2)]
    dims = shapes.key_dim, shapes.value_dim
    plain, coded, expected = (
        own.view(
            (
                torch.zeros(20, 16 * shapes.kv_heads * own.row_bytes(dims[0]), dtype=torch.uint8),
                torch.zeros(20, 16 * shapes.kv_heads * own.row_bytes(dims[1]), dtype=torch.uint8),
            ),
            16,
            shapes.kv_heads,
            dims,
        )
        for own in (KVFormat(dtype), KVFormat(torch.int8), KVFormat(torch.int8))
    )
    kernel = RotaryKernel(shapes, *norms)
    assert kernel.can_write(coded, dtype)
    queries = kernel(projected, turns, slots, plain)
    expected.write(slots, *plain.read(slots))
    assert torch.equal(
        kernel(projected.clone(), turns, slots, coded).float().nan_to_num(), queries.float().nan_to_num()
    )
    assert torch.equal(coded.keys, expected.keys)
    assert torch.equal(coded.values, expected.values)
    assert coded.scales is not None
    assert expected.scales is not None
    for ours, theirs in zip(coded.scales, expected.scales, strict=True):
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))


def test_the_number_of_threads_changes_nothing() -> None:
    shapes = HeadShapes(8, 4, 64, 64, 64)
    projected, before = random(300, 16 * 64, dtype=torch.bfloat16), torch.get_num_threads()
    turns = random(1, 300, 64, dtype=torch.bfloat16, seed=1), random(1, 300, 64, dtype=torch.bfloat16, seed=2)
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            blocks = torch.zeros(20, 16, 4, 64, dtype=torch.bfloat16), torch.zeros(20, 16, 4, 64, dtype=torch.bfloat16)
            results.append(
                (
                    RotaryKernel(shapes, None, None)(projected, turns, torch.arange(300), KVBlocks.plain(*blocks)),
                    *blocks,
                )
            )
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(one, two) for other in results[1:] for one, two in zip(results[0], other, strict=True))
