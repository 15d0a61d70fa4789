"""Slot writes and block copies as Triton kernels."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from foreword.kernels.kv_format import KVBlocks
from foreword.kernels.triton.blocks import TritonBlocks, write_slots

LENIENT = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def random_pages(sizes: list[int], num_blocks: int, seed: int, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pages = (torch.randint(0, 256, (num_blocks, size), dtype=torch.uint8, generator=generator) for size in sizes)
    return [tensor.to(device) for tensor in pages]


@LENIENT
@given(
    sizes=st.lists(st.sampled_from([0, 6, 8, 40, 96, 3000]), min_size=1, max_size=4).filter(any),
    sources=st.lists(st.integers(0, 9), min_size=0, max_size=4),
    seed=st.integers(0, 99),
)
def test_whole_blocks_are_copied_in_every_tensor(
    sizes: list[int], sources: list[int], seed: int, device: torch.device
) -> None:
    """Sources may be targets of other copies: what they held before counts."""
    pages = random_pages(sizes, 10, seed, device)
    targets = torch.randperm(10, generator=torch.Generator().manual_seed(seed))[: len(sources)]
    copies = torch.stack((torch.tensor(sources, dtype=torch.int32), targets.int()), 1).to(device)
    expected = [tensor.clone() for tensor in pages]
    for tensor, before in zip(expected, pages, strict=True):
        for source, target in copies.tolist():
            tensor[target] = before[source]
    TritonBlocks(pages).copy(copies)
    assert all(torch.equal(tensor, other) for tensor, other in zip(pages, expected, strict=True))


@LENIENT
@given(
    heads=st.integers(1, 3),
    dims=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    block_size=st.integers(1, 20),
    num_tokens=st.integers(0, 12),
    gap=st.sampled_from([0, 5]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    index=st.sampled_from([torch.int32, torch.int64]),
)
def test_each_token_goes_to_its_slot_and_nothing_else_changes(
    heads: int,
    dims: tuple[int, int],
    block_size: int,
    num_tokens: int,
    gap: int,
    dtype: torch.dtype,
    index: torch.dtype,
    device: torch.device,
) -> None:
    blocks, new = [], []
    for dim in dims:
        used = block_size * heads * dim
        pages = torch.randn(13, used + gap, device=device).to(dtype)
        blocks.append(pages[:, :used].unflatten(1, (block_size, heads, dim)))
        new.append(torch.randn(heads, num_tokens, dim, device=device).to(dtype).transpose(0, 1))  # as models give it
    slots = torch.randperm(13 * block_size)[:num_tokens].to(index).to(device)
    expected = [tensor.clone() for tensor in blocks]
    for tensor, rows in zip(expected, new, strict=True):
        tensor[slots // block_size, slots % block_size] = rows
    write_slots(KVBlocks.plain(*blocks), slots, *new)
    assert all(torch.equal(tensor, other) for tensor, other in zip(blocks, expected, strict=True))


def test_keys_and_values_of_another_type_or_order_are_converted(device: torch.device) -> None:
    blocks = [torch.zeros(2, 4, 2, 8, dtype=torch.bfloat16, device=device) for _ in range(2)]
    keys = torch.randn(2, 8, 3, device=device).permute(2, 0, 1)  # dimensions apart from each other
    values = torch.randn(3, 2, 8, device=device)
    slots = torch.tensor([7, 0, 5], device=device)
    write_slots(KVBlocks.plain(*blocks), slots, keys, values)
    for tensor, rows in zip(blocks, (keys, values), strict=True):
        assert torch.equal(tensor.flatten(0, 1)[slots], rows.bfloat16())
