"""How keys and values are stored: what is written is read, in blocks with gaps between them and without."""

from __future__ import annotations

import pytest
import torch

from foreword.kernels.kv_format import KVFormat, decode, encode


def stored(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is read of rows that were written in a format."""
    return decode(*encode(rows)) if dtype == torch.int8 else rows.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
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
        assert torch.equal(elements, stored(own, dtype))
    for own, found in zip(rows, blocks.read_blocks(torch.tensor([[5, 1, 0]])), strict=True):
        assert found.dtype == torch.float32
        expected = torch.zeros(24, 2, own.shape[-1])
        expected[slots] = stored(own, dtype).float()
        assert torch.equal(found, expected.view(6, 4, 2, -1)[[5, 1, 0]].view(1, 12, 2, -1))


def test_keys_tell_formats_apart_and_stay_what_they_were() -> None:
    assert KVFormat(torch.bfloat16).key(torch.bfloat16) == "torch.bfloat16"
    keys = {
        KVFormat(kept).key(computed)
        for kept in (torch.float32, torch.float16, torch.int8)
        for computed in (torch.float32, torch.bfloat16)
    }
    assert len(keys) == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_and_scales_follow_from_their_row_by_the_formula(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    sizes = 2.0 ** torch.randint(-30, 30, (50, 1), generator=generator)
    rows = (torch.randn(50, 64, generator=generator) * sizes).to(dtype)
    codes, scales = encode(rows)
    assert (codes.dtype, scales.dtype) == (torch.int8, torch.bfloat16)
    for row, own_codes, scale in zip(rows.double().tolist(), codes.tolist(), scales.double().tolist(), strict=True):
        least = max(map(abs, row)) / 127
        below = (torch.tensor(scale, dtype=torch.bfloat16).view(torch.int16) - 1).view(torch.bfloat16).item()
        assert least * (1 - 2**-24) <= scale <= least * (1 + 2**-7), "rounded up, to the next bfloat16 at most"
        assert own_codes == [round(element / scale) for element in row]
        assert max(map(abs, own_codes)) in (126, 127)
        assert below < least * (1 + 2**-24), "no smaller scale would do"
    error = (decode(codes, scales) - rows.float()).abs().amax(-1)
    assert (error <= scales.float() / 2 * (1 + 2**-20)).all()
    for count in (1, 7, 50):
        assert torch.equal(encode(rows[:count])[0], codes[:count]), "no row depends on another"


def test_rows_of_zeros_and_of_no_numbers_stay_so() -> None:
    rows = torch.ones(6, 32)
    rows[0], rows[1, 3], rows[2, 3], rows[3, 3], rows[4] = 0.0, torch.nan, torch.inf, -torch.inf, 1e-45
    codes, scales = encode(rows)
    read = decode(codes, scales)
    assert torch.equal(read[0], torch.zeros(32))
    assert scales[0] == 0.0
    assert read[1:4].isnan().all()
    assert torch.equal(read[4], torch.zeros(32)), "too small for any scale"
    assert torch.allclose(read[5], rows[5], rtol=2**-7)
    nan = torch.tensor([[0x7FFFFFFF] + [0] * 31], dtype=torch.int32).view(torch.float32)
    assert decode(*encode(nan)).isnan().all()


@pytest.mark.parametrize(("dim", "more_tokens"), [(64, 1.93), (128, 1.96), (256, 1.98)])
def test_codes_hold_nearly_twice_the_tokens_of_bfloat16(dim: int, more_tokens: float) -> None:
    assert KVFormat(torch.bfloat16).row_bytes(dim) / KVFormat(torch.int8).row_bytes(dim) > more_tokens
