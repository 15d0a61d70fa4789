"""How keys and values are stored: what is written is read, in blocks with gaps between them and without."""

from __future__ import annotations

import pytest
import torch

from foreword.kernels.kv_format import KVFormat


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gap", [0, 32])
def test_what_is_written_to_slots_is_read_from_their_blocks(dtype: torch.dtype, gap: int) -> None:
    kv_format, dims = KVFormat(dtype), (8, 12)
    pages = [torch.zeros(6, 4 * 2 * kv_format.row_bytes(dim) + gap, dtype=torch.uint8) for dim in dims]
    blocks = kv_format.view((pages[0], pages[1]), 4, 2, dims)
    assert blocks.format == kv_format
    assert blocks.is_contiguous == (gap == 0)
    assert (blocks.block_size, blocks.num_kv_heads, blocks.key_dim, blocks.value_dim) == (4, 2, *dims)
    assert blocks.token_bytes * 4 == sum(own.shape[1] - gap for own in pages)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(5, 2, dim, generator=generator) for dim in dims]
    slots = torch.tensor([21, 4, 0, 23, 7])
    blocks.write(slots, *rows)
    for own, elements in zip(rows, blocks.read(slots), strict=True):
        assert torch.equal(elements, own.to(dtype))
    for own, found in zip(rows, blocks.read_blocks(torch.tensor([[5, 1, 0]])), strict=True):
        assert found.dtype == torch.float32
        expected = torch.zeros(24, 2, own.shape[-1])
        expected[slots] = own.to(dtype).float()
        assert torch.equal(found, expected.view(6, 4, 2, -1)[[5, 1, 0]].view(1, 12, 2, -1))


def test_keys_tell_formats_apart_and_stay_what_they_were() -> None:
    assert KVFormat(torch.bfloat16).key(torch.bfloat16) == "torch.bfloat16"
    keys = {
        KVFormat(stored).key(computed)
        for stored in (torch.float32, torch.float16)
        for computed in (torch.float32, torch.bfloat16)
    }
    assert len(keys) == 4
