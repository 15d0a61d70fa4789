"""How keys and values are stored: what is written is read, in blocks with gaps between them and without."""

from __future__ import annotations

import pytest
import torch

from foreword.kernels.kv_format import KVFormat


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gap", [0, 32])
def test_what_is_written_to_slots_is_read_from_their_blocks(dtype: torch.dtype, gap: int) -> None:
    kv_format = KVFormat(dtype)
    pages = torch.zeros(6, kv_format.num_bytes(4 * 2 * 8) + gap, dtype=torch.uint8)
    blocks = kv_format.view(pages, 4, 2, 8)
    assert KVFormat.of(blocks) == kv_format
    assert blocks.is_contiguous() == (gap == 0)
    rows = torch.randn(5, 2, 8, generator=torch.Generator().manual_seed(0))
    slots = torch.tensor([21, 4, 0, 23, 7])
    kv_format.write(blocks, slots, rows)
    found = kv_format.read(blocks, torch.tensor([[5, 1, 0]]))
    assert found.dtype == torch.float32
    expected = torch.zeros(24, 2, 8)
    expected[slots] = rows.to(dtype).float()
    assert torch.equal(found, expected.view(6, 4, 2, 8)[[5, 1, 0]].view(1, 12, 2, 8))


def test_keys_tell_formats_apart_and_stay_what_they_were() -> None:
    assert KVFormat(torch.bfloat16).key(torch.bfloat16) == "torch.bfloat16"
    keys = {
        KVFormat(stored).key(computed)
        for stored in (torch.float32, torch.float16)
        for computed in (torch.float32, torch.bfloat16)
    }
    assert len(keys) == 4
