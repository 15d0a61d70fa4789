"""Products of compact weights, in AMX tiles and in pairs: right, and with the same bits for a row in any company."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from foreword.kernels.llvm import tiles
from foreword.kernels.llvm.emit import HAS_BF16_DOT
from foreword.kernels.products import weights12 as compact
from foreword.kernels.products.pair_worker import PAIR_WORKER
from foreword.kernels.products.tile_worker import TILE_WORKER
from foreword.kernels.products.units import ProductWorker
from foreword.kernels.products.weights12 import COUNTED, HAS_BYTE_LOOK_UP
from foreword.model.cpu import product as compact_product
from foreword.model.cpu.product import CompactProduct
from foreword.model.foreign.modules import PackedLinear
from lanes import SLOW

SIZES = [(128, 896), (4864, 896), (896, 4864), (1, 32), (37, 64), (33, 96), (500, 4096)]


WORKERS = {"tiles": (TILE_WORKER, tiles.has_tiles()), "pairs": (PAIR_WORKER, HAS_BF16_DOT and HAS_BYTE_LOOK_UP)}


@pytest.fixture(autouse=True, params=WORKERS)
def worker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ProductWorker:
    """What multiplies."""
    chosen, available = WORKERS[request.param]
    if not available:
        pytest.skip(f"this processor has no instructions for {request.param}")
    monkeypatch.setattr(compact_product, "fastest_worker", lambda: chosen)
    return chosen


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("outputs", "inputs", "num_threads"),
    [
        pytest.param(*size, num_threads, marks=SLOW if prod(size) > 10**6 and num_threads < 3 else ())
        for size in SIZES
        for num_threads in (1, 2, 3)
    ],
)
def test_a_row_has_the_same_bits_among_any_rows_and_threads(outputs: int, inputs: int, num_threads: int) -> None:
    product = CompactProduct([(random(outputs, inputs) * inputs**-0.5).bfloat16()], random(outputs, seed=1).bfloat16())
    rows, before = random(600, inputs, seed=2).bfloat16(), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        together = product(rows)
        torch.set_num_threads(num_threads)
        for count in (*range(1, 36), 63, 64, 65, 81, 255, 256, 257, 288, 289, 512, 513, 600):
            assert torch.equal(product(rows[:count]), together[:count]), f"{count} rows"
            assert torch.equal(product(rows[-count:].clone()), together[-count:]), f"the last {count} rows"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("bias", [True, False])
def test_the_product_is_that_of_exact_arithmetic_rounded_once(outputs: int, inputs: int, bias: bool) -> None:
    weight, added = (random(outputs, inputs) * inputs**-0.5).bfloat16(), random(outputs, seed=1).bfloat16()
    rows = random(2, 9, inputs, seed=2).bfloat16()
    exact = rows.double() @ weight.double().T + (added.double() if bias else 0.0)
    found = CompactProduct([weight], added if bias else None)(rows)
    assert found.shape == (2, 9, outputs)
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_some_outputs_have_the_bits_of_the_whole_product(outputs: int, inputs: int) -> None:
    weight = random(outputs, inputs) * inputs**-0.5
    weight[::3] *= 2.0 ** random(len(weight[::3]), 1, seed=3).mul(20).round()  # many exponents: some have no code
    product = CompactProduct([weight.bfloat16()], random(outputs, seed=1).bfloat16())
    assert product.num_exceptions or outputs < 33
    rows = random(90, inputs, seed=2).bfloat16()
    whole = product(rows)
    for wanted in ([0], [outputs - 1, 0], [outputs // 2], list(range(0, outputs, 97)), list(range(outputs))):
        for count in (1, 3, 90):
            assert torch.equal(product.some(rows[:count], np.array(wanted)), whole[:count, wanted])


@pytest.mark.parametrize("width", [16, 48, 33, 4864])
def test_a_gated_product_is_the_gate_of_two_products(width: int) -> None:
    gate, up = (random(width, 128, seed=seed).bfloat16() * 0.2 for seed in (1, 2))
    bias = random(2 * width, seed=3).bfloat16()
    rows = random(40, 128, seed=4).bfloat16()
    found = CompactProduct([gate, up], bias, gated=True)(rows)
    both = CompactProduct([gate, up], bias)(rows)
    assert found.shape == (40, width)
    torch.testing.assert_close(found, nn.functional.silu(both[:, :width]) * both[:, width:], rtol=2**-6, atol=2**-8)
    assert torch.equal(CompactProduct([gate, up], bias, gated=True).before_gate(rows), both)


@pytest.mark.parametrize("num_rows", [1, 5, 12, 39, 300])
def test_a_gated_row_has_the_same_bits_among_any_rows(num_rows: int) -> None:
    product = CompactProduct([random(33, 928).bfloat16(), random(33, 928, seed=1).bfloat16()], None, gated=True)
    rows = random(300, 928, seed=2).bfloat16()
    assert torch.equal(product(rows[:num_rows]), product(rows)[:num_rows])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5, 7, 8, 9, 13, 16, 17, 19, 289])
def test_nothing_is_written_beyond_the_result(num_rows: int, gated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    product = CompactProduct([random(74, 64).bfloat16()], None, gated=gated)
    size = num_rows * product.width
    memory = torch.full((size + 512,), 2.0**60, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda _, *shape: memory[:size].view(shape))
    output = product(random(num_rows, 64).bfloat16())
    assert output.data_ptr() == memory.data_ptr()
    assert not (output == 2.0**60).any()
    assert (memory[size:] == 2.0**60).all()


@contextmanager
def ending_at_a_wall(num_bytes: int) -> Iterator[Tensor]:
    """So many bytes, behind which memory may be neither read nor written."""
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    everything = torch.frombuffer(memory, dtype=torch.uint8)
    guard, protect = ctypes.c_void_p(everything.data_ptr() + size), ctypes.CDLL(None).mprotect
    assert protect(guard, mmap.PAGESIZE, 0) == 0
    yield everything[size - num_bytes : size]
    assert protect(guard, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE) == 0


@pytest.mark.parametrize("num_rows", [1, 7, 9, 16, 17, 33, 48, 64, 65, 80, 97, 520])
def test_nothing_is_read_beyond_the_rows(num_rows: int) -> None:
    product = CompactProduct([random(40, 2048).bfloat16()], None)
    with ending_at_a_wall(num_rows * 2048 * 2) as memory:
        rows = memory.view(torch.bfloat16).view(num_rows, 2048)
        rows.copy_(random(num_rows, 2048))
        assert torch.equal(product(rows), product(rows.clone()))


@pytest.mark.parametrize("num_rows", [1, 8, 9, 16, 17, 22, 288, 289, 700])
@pytest.mark.parametrize("num_steps", [1, 28, 29, 64])
def test_scratch_memory_suffices(num_rows: int, num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    product = CompactProduct([random(600, 32 * num_steps).bfloat16()], None)
    rows, before = random(num_rows, 32 * num_steps).bfloat16(), torch.get_num_threads()
    expected = product(rows)
    try:
        torch.set_num_threads(1)
        with ending_at_a_wall(product.thread_scratch) as memory:
            monkeypatch.setattr(compact_product, "thread_memory", lambda _: memory.data_ptr())
            assert torch.equal(product(rows), expected)
    finally:
        torch.set_num_threads(before)


def test_one_rows_infinities_stay_its_own() -> None:
    product = CompactProduct([random(64, 64).bfloat16()], None)
    rows = random(5, 64).bfloat16()
    clean = product(rows)
    rows[2] = torch.inf
    found = product(rows)
    assert not found[2].isfinite().any()
    assert torch.equal(found[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


def test_rows_apart_in_memory_and_no_rows_at_all() -> None:
    product = CompactProduct([random(48, 64).bfloat16()], None)
    wide = random(6, 128).bfloat16()
    assert torch.equal(product(wide[:, :64]), product(wide[:, :64].contiguous()))
    assert product(wide[:0, :64]).shape == (0, 48)


@pytest.mark.parametrize("gated", [False, True])
def test_the_plain_weight_is_given_back(gated: bool) -> None:
    weight = random(74, 64).bfloat16()
    assert torch.equal(CompactProduct([weight], None, gated=gated).weight, weight)


def test_weights_begin_at_cache_lines() -> None:
    """Or most loads of a step's weights would take two lines."""
    for outputs in (1, 37, 128):
        assert CompactProduct([random(outputs, 64).bfloat16()], None)._panels.steps.ctypes.data % 64 == 0


def test_weights_that_are_packed_together_follow_each_other() -> None:
    weights = [random(outputs, 64, seed=outputs).bfloat16() for outputs in (70, 9, 33)]
    product = CompactProduct(weights, None)
    assert torch.equal(product.weight, torch.cat(weights))
    rows = random(5, 64).bfloat16()
    assert torch.equal(product(rows), CompactProduct([torch.cat(weights)], None)(rows))


def test_few_exponents_are_missed_where_one_dimension_of_each_head_is_unlike_the_others() -> None:
    weight = random(64, 64, 64)
    weight[:, 0] *= 2.0**-20
    assert CompactProduct([weight.flatten(0, 1).bfloat16()], None).num_exceptions < weight.numel() // 100


def test_only_weights_that_fill_tiles_are_taken() -> None:
    assert CompactProduct.can_take(random(5, 64).bfloat16())
    assert not CompactProduct.can_take(random(5, 61).bfloat16())
    assert not CompactProduct.can_take(random(5, 64))
    assert PackedLinear([random(5, 61).bfloat16()], None)(random(3, 61).bfloat16()).shape == (3, 5)


def test_a_processor_that_cannot_look_codes_up_takes_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact, "HAS_BYTE_LOOK_UP", False)
    assert not CompactProduct.can_take(random(5, 64).bfloat16())
    assert PackedLinear([random(5, 64).bfloat16()], None)(random(3, 64).bfloat16()).shape == (3, 5)


@pytest.mark.parametrize("rows", [torch.ones(2, 64), torch.ones(2, 63).bfloat16(), torch.ones(2, 64).half()])
def test_rows_of_another_type_or_width_are_refused_and_not_read_as_what_they_are_not(rows: Tensor) -> None:
    with pytest.raises(RuntimeError, match="rows are"):
        PackedLinear([random(48, 64).bfloat16()], None)(rows)


def any_bits(*shape: int) -> Tensor:
    """Weights with every exponent there is, infinities and NaN among them."""
    bits = torch.randint(-(2**15), 2**15, shape, generator=torch.Generator().manual_seed(0)).to(torch.int16)
    return bits.view(torch.bfloat16)


@pytest.mark.parametrize(
    "weight",
    [any_bits(74, 64), any_bits(500, 96), torch.zeros(33, 64).bfloat16(), torch.full((1, 32), -0.0).bfloat16()],
    ids=["any", "more", "zeros", "negative zeros"],
)
def test_no_bit_of_a_weight_is_lost(weight: Tensor) -> None:
    assert torch.equal(CompactProduct([weight], None).weight.view(torch.int16), weight.view(torch.int16))


def test_no_bit_is_lost_where_the_outputs_that_are_counted_are_unlike_the_others() -> None:
    """There is no room for so many exceptions at first."""
    weight = any_bits(300, 64)
    weight[:: len(weight) // COUNTED | 1] = 1.0
    product = CompactProduct([weight], None)
    assert product.num_exceptions > weight.numel() // 2
    assert torch.equal(product.weight.view(torch.int16), weight.view(torch.int16))


@pytest.mark.parametrize("inputs", [32, 96, 1312])
@pytest.mark.parametrize("num_rows", [1, 8, 13, 20, 64, 100])
def test_exceptions_take_part_in_products_as_other_weights_do(
    inputs: int, num_rows: int, caplog: pytest.LogCaptureFixture
) -> None:
    weight = any_bits(45, inputs)
    exponent = (weight.view(torch.int16) >> 7) & 255
    weight[(exponent == 255) | (exponent == 0)] = 3.0  # tiles take no denormal numbers, and infinities spread
    product = CompactProduct([weight], None)
    assert product.num_exceptions > weight.numel() // 2
    assert "unusual exponents" in caplog.text
    chosen = torch.randint(inputs, (num_rows,), generator=torch.Generator().manual_seed(1))
    assert torch.equal(product(torch.eye(inputs)[chosen].bfloat16()), weight.T[chosen])


def test_weights_of_a_normal_distribution_take_three_quarters_of_their_size() -> None:
    weight = random(896, 896).bfloat16()
    assert CompactProduct([weight], None).num_bytes < 0.752 * 2 * weight.numel()
