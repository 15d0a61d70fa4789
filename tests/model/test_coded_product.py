"""Products of weights that stay in their codes: the right values, and bits that depend on a row alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from foreword.kernels.products.coded import FORMATS, Codes
from foreword.model.checkpoint.gguf.blocks import BLOCKS
from foreword.model.cpu import coded_product
from foreword.model.cpu.coded_product import CodedLinear, CodedProduct, CodedRows
from foreword.model.decoder.linear import Embedding, Linear

KINDS = {blocks.name: blocks for blocks in BLOCKS.values() if blocks.name in FORMATS}
GROUPED = [name for name in FORMATS if name not in KINDS]
"""Formats without a type of GGUF files."""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def coded(name: str, outputs: int, inputs: int, seed: int = 0) -> CodedRows:
    """A weight of random codes with scales of usual size."""
    if name in GROUPED:
        return grouped(name, outputs, inputs, seed)
    blocks, rng = KINDS[name], np.random.default_rng(seed)
    own = blocks.codes(rng.integers(0, 256, (outputs, inputs // blocks.num_values * blocks.num_bytes), np.uint8))
    codes, heads = own.codes, own.heads
    if blocks.kind.scale == "none":
        whole = (rng.standard_normal(own.codes.shape) * 0.02).astype(np.float32)
        is_bfloat16 = blocks.kind.is_bfloat16
        codes = (whole.view(np.uint32) >> 16).astype(np.uint16) if is_bfloat16 else whole.astype(np.float16).view("u2")
    elif blocks.kind.scale == "exponent":
        heads = rng.integers(118, 126, own.heads.shape, np.uint8)
    else:
        heads = (rng.standard_normal(own.heads.shape) * 0.01).astype(np.float16).view(np.uint16)

    def some(first: int, end: int) -> Codes:
        parts = [None if part is None else part[first:end] for part in (codes, heads, own.integers)]
        return Codes(*parts)

    return CodedRows(blocks.kind, (outputs, inputs), some)


def grouped(name: str, outputs: int, inputs: int, seed: int) -> CodedRows:
    kind, rng = FORMATS[name], np.random.default_rng(seed)
    codes = rng.integers(0, 1 << kind.planes[0], (outputs, inputs), np.uint8)
    scales = (rng.standard_normal((outputs, inputs // 32, 1)) * 0.01).astype(np.float32)
    if kind.is_e4m3:
        codes[(codes & 0x7F) == 0x7F] = 0  # no numbers
        heads = scales.view(np.uint32)
        return CodedRows(kind, (outputs, inputs), lambda first, end: Codes(codes[first:end], heads[first:end]))
    is_half = kind.scale == "half"
    heads = scales.astype(np.float16).view(np.uint16) if is_half else (scales.view(np.uint32) >> 16).astype(np.uint16)
    # A difference of codes fits a signed byte: zeros of eight bits are near the middle.
    zeros = rng.integers(0, 16, (outputs, inputs // 32), np.uint8) if kind.planes == (4,) else None
    if kind.has_zeros and zeros is None:
        zeros = np.full((outputs, inputs // 32), 128, np.uint8)
    zeros = zeros if kind.has_zeros else None

    def some(first: int, end: int) -> Codes:
        return Codes(codes[first:end], heads[first:end], None, None if zeros is None else zeros[first:end])

    return CodedRows(kind, (outputs, inputs), some)


def smallest(name: str) -> int:
    """The inputs of one block, at least 32."""
    return 32 if name in GROUPED else max(32, KINDS[name].num_values)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("outputs", "blocks"), [(1, 1), (16, 3), (200, 5)])
def test_packed_weights_and_products_are_those_of_the_codes(name: str, outputs: int, blocks: int) -> None:
    weight = coded(name, outputs, blocks * smallest(name))
    plain, bias = weight.plain(torch.float32), torch.randn(outputs)
    product = CodedLinear([weight], bias)
    assert torch.equal(product.weight, plain)
    rows = torch.randn(130, plain.shape[1])
    expected = rows.double() @ plain.double().T + bias
    size = rows.double().abs() @ plain.double().abs().T + bias.abs()
    assert ((product(rows) - expected).abs() < 2e-6 * size).all()


@pytest.mark.parametrize("name", FORMATS)
def test_the_bits_of_a_row_do_not_depend_on_other_rows_or_threads(name: str) -> None:
    product = CodedLinear([coded(name, 90, 9 * smallest(name) if smallest(name) == 32 else 768)], None)
    rows = torch.randn(512, len(product.weight[0]))
    together = product(rows)
    for count in [*range(1, 65), 100, 511]:
        assert torch.equal(product(rows[:count]), together[:count])
        assert torch.equal(product(rows[512 - count :]), together[512 - count :])
    torch.set_num_threads(1)
    assert torch.equal(product(rows), together)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("in_integers", [False, True])
def test_some_outputs_have_the_bits_of_the_whole_product(name: str, in_integers: bool) -> None:
    if in_integers and not FORMATS[name].is_whole:
        return
    weight = replace(coded(name, 200, 768), in_integers=in_integers)
    head, rows = Linear([weight], torch.randn(200)), torch.randn(100, 768)
    whole = head(rows)
    for outputs in ([3], [199, 0, 17], [40, 41], list(range(0, 200, 7))):
        for count in (1, 2, 7, 100):
            assert torch.equal(head.some(rows[:count], torch.tensor(outputs)), whole[:count, outputs])


def test_weights_of_several_formats_share_a_result_and_other_types_of_rows_are_rounded_once() -> None:
    weights = [coded("Q4_K", 40, 256), coded("Q4_K", 8, 256, 1), coded("Q6_K", 16, 256), coded("Q5_1", 40, 256)]
    joined, rows = CodedLinear(weights, torch.arange(104.0)), torch.randn(2, 3, 256)
    apart = [
        CodedLinear([own], torch.arange(104.0)[at : at + len(own)])
        for own, at in zip(weights, (0, 40, 48, 64), strict=True)
    ]
    assert torch.equal(joined(rows), torch.cat([own(rows) for own in apart], -1))
    assert joined.format == "Q4_K, Q6_K, Q5_1"
    halves = rows.bfloat16()
    assert torch.equal(joined(halves), joined(halves.float()).bfloat16())


def test_powers_of_two_reach_the_ends_of_float32() -> None:
    kind, codes = FORMATS["MXFP4"], np.full((16, 64), 2, np.uint8)
    heads = np.array([[0, 254]] * 16, np.uint8)[:, :, None]
    weight = CodedRows(kind, (16, 64), lambda first, end: Codes(codes[first:end], heads[first:end]))
    rows = torch.zeros(2, 64)
    rows[0, 0], rows[1, 32] = 2.0, 0.5
    assert torch.equal(CodedLinear([weight], None)(rows), rows @ weight.plain(torch.float32).T)


def test_what_products_cannot_take_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, plain = coded("Q8_0", 16, 64), torch.randn(8, 64)
    assert Linear([weight], None).format == "Q8_0"
    mixed = Linear([weight, plain], None)
    assert mixed.format != "Q8_0"
    assert torch.equal(mixed.weight, torch.cat([weight.plain(torch.float32), plain]))
    monkeypatch.setattr(coded_product, "HAS_INSTRUCTIONS", False)
    assert not CodedProduct.can_take(weight)
    assert Linear([weight], None).format != "Q8_0"


def test_a_table_shares_the_memory_of_the_head_that_it_is_tied_to() -> None:
    table = coded("Q6_K", 500, 256)
    head, numbers = Linear([table], None), torch.tensor([499, 0, 17, 17])
    for own in (Embedding(table, head, torch.float32), Embedding(table, None, torch.float32)):
        assert torch.equal(own(numbers), table.plain(torch.float32)[numbers])
    assert Embedding(table, head, torch.float32)._coded is head.coded
    assert Embedding(table, head, torch.bfloat16)(numbers).dtype == torch.bfloat16
