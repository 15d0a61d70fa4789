"""Products of weights that stay in their codes: the right values, and in integers the right sums to the bit, whatever
the rows, the threads and the instructions.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np
import numpy.typing as npt
import pytest
import torch
from llvmlite import ir

from foreword.config import ModelConfig
from foreword.errors import ConfigError
from foreword.kernels.llvm import emit
from foreword.kernels.products import integer_worker
from foreword.kernels.products.coded import FORMATS, QUAD, CodeFormat, Codes, Panels
from foreword.model import loader
from foreword.model.checkpoint.gguf.file import BLOCKS
from foreword.model.checkpoint.gguf.unfold import unfold
from foreword.model.cpu import coded_product
from foreword.model.cpu.coded_product import CodedLinear, CodedProduct, CodedRows
from foreword.model.decoder.linear import Embedding, Linear
from foreword.model.identity import arithmetic_facts, model_facts
from foreword.model.loader import LoadedModel, load_model
from gguf_writer import write_gguf
from tiny_models import RECIPES, TinyModels, build_engine, complete, greedy, random_tokens, save_model

Floats = npt.NDArray[np.float32]
WHOLE = [name for name, kind in FORMATS.items() if kind.is_whole]
OUTPUTS, INPUTS = 40, 768
needs_codes = pytest.mark.skipif(not coded_product.HAS_INSTRUCTIONS, reason="this processor has no products of codes")
pytestmark = needs_codes


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def weight_of(name: str, *, extreme: bool = False) -> CodedRows:
    """A weight of random codes, or of the first, the last and the middle code alone."""
    weight = replace(coded(name, OUTPUTS, INPUTS), in_integers=True)
    if not extreme:
        return weight
    most, rng = (1 << sum(weight.kind.planes)) - 1, np.random.default_rng(0)
    codes = rng.choice(np.array([0, most, (most + 1) // 2], np.uint8), (OUTPUTS, 1))
    whole = replace(weight.codes(0, OUTPUTS), codes=np.repeat(codes, INPUTS, 1))
    return replace(weight, codes=lambda first, end: some(whole, first, end))


def some(codes: Codes, first: int, end: int) -> Codes:
    names = ("codes", "heads", "integers", "zeros")
    return Codes(*(None if (part := getattr(codes, name)) is None else part[first:end] for name in names))


def rows_of(count: int, *, extreme: bool = False) -> torch.Tensor:
    """Random rows with some groups of zeros and of tiny numbers, or rows that become 127 and -127 alone."""
    draw = torch.Generator().manual_seed(0)
    if extreme:
        signs = torch.randint(0, 2, (count, INPUTS), generator=draw) * 2.0 - 1
        signs[0], signs[1] = 1, -1
        return signs * 3
    rows = torch.randn(count, INPUTS, generator=draw) * torch.logspace(-3, 3, INPUTS // 32).repeat_interleave(32)
    rows[0, :32], rows[1, 32:64], rows[2] = 0, 1e-38, torch.arange(INPUTS) % 200
    rows[2, ::32] = 254  # odd numbers are halves, then
    return rows


def numbers_and_scales(kind: CodeFormat, codes: Codes) -> tuple[npt.NDArray[Any], Floats]:
    """The whole numbers [outputs, inputs] of weights, and their scales and offsets [outputs, groups, parts]."""
    assert codes.heads is not None
    one = {"half": 0x3C00, "integers": 0x3C00, "bfloat16": 0x3F80, "float": 0x3F800000, "exponent": 128}[kind.scale]
    heads = np.zeros_like(codes.heads)
    heads[..., 0] = one
    ones = None if codes.integers is None else np.ones_like(codes.integers)
    numbers = replace(codes, heads=heads, integers=ones).values(kind).astype(np.int64)
    if kind.scale == "exponent":
        scales = np.ldexp(np.float32(1), codes.heads.astype(np.int32) - 128)
    elif kind.scale == "bfloat16":
        scales = (codes.heads.astype(np.uint32) << 16).view(np.float32)
    else:
        scales = codes.heads.view(np.float16).astype(np.float32)
    if codes.integers is not None:
        scales = np.repeat(scales, codes.integers.shape[1] // scales.shape[1], 1) * codes.integers.astype(np.float32)
    return numbers, scales


def fma(left: Floats, right: Floats, addend: Floats) -> Floats:
    """left * right + addend: exact in 80 bits but for the last bit, then rounded."""
    wide = left.astype(np.longdouble) * right.astype(np.longdouble) + addend.astype(np.longdouble)
    return wide.astype(np.float32)


def reference(weight: CodedRows, rows: torch.Tensor) -> torch.Tensor:
    """The same products in plain numpy."""
    kind = weight.kind
    x = rows.numpy().reshape(len(rows), -1, 32)
    most = np.abs(x).max(-1)
    is_tiny = most < np.float32(2.0**-100)
    safe = np.where(is_tiny, np.float32(1), most)
    inverse = np.where(is_tiny, np.float32(0), np.float32(127) / safe)
    scale = np.where(is_tiny, np.float32(0), safe / np.float32(127))
    whole = np.rint(x * inverse[..., None]).astype(np.int64).reshape(len(rows), -1, kind.group)
    scale = np.repeat(scale, 32 // kind.group, 1)
    numbers, scales = numbers_and_scales(kind, weight.codes(0, len(weight)))
    numbers = numbers.reshape(len(weight), -1, kind.group)
    total = np.zeros((len(rows), len(weight)), np.float32)
    for group in range(numbers.shape[1]):
        own = scale[:, group, None]
        part = (whole[:, group] @ numbers[:, group].T).astype(np.float32) * own
        total = fma(scales[None, :, group, 0], part, total)
        if kind.has_offset:
            total = fma(scales[None, :, group, 1], whole[:, group].sum(1).astype(np.float32)[:, None] * own, total)
    return torch.from_numpy(total)


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("name", WHOLE)
def test_products_are_those_of_plain_numpy_to_the_bit(name: str, extreme: bool) -> None:
    weight, rows = weight_of(name, extreme=extreme), rows_of(7, extreme=extreme)
    bias = torch.arange(OUTPUTS) / 8
    product = CodedLinear([weight], bias)
    assert product.format == f"{name} int8"
    assert torch.equal(product.weight, weight.plain(torch.float32))
    assert torch.equal(product(rows), reference(weight, rows) + bias)
    halves = rows.bfloat16()
    assert torch.equal(product(halves), product(halves.float()).bfloat16())


@pytest.mark.parametrize("name", WHOLE)
def test_the_bits_of_a_row_do_not_depend_on_other_rows_or_threads(name: str) -> None:
    product, rows = CodedLinear([weight_of(name)], None), torch.randn(512, INPUTS)
    together = product(rows)
    for count in [*range(1, 65), 100, 511]:
        assert torch.equal(product(rows[512 - count :]), together[512 - count :])
    for count in (1, 3):
        torch.set_num_threads(count)
        assert torch.equal(product(rows), together)


def portable(builder: Any, total: Any, codes: Any, numbers: Any) -> Any:
    """`integer_worker.Dot` without any instruction of its own."""
    wide = ir.VectorType(emit.I32, 64)
    products = builder.mul(builder.zext(codes, wide), builder.sext(numbers, wide))
    for first in range(QUAD):
        order = ir.Constant(emit.I32S, list(range(first, 64, QUAD)))
        total = builder.add(total, builder.shuffle_vector(products, products, order))
    return total


def module_of(kind: CodeFormat, dot: integer_worker.Dot | None) -> llvm.ModuleRef:
    """A function product(panel, heads of it, row, sums) that adds products in 32 bits."""
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [emit.I64] * 4), "product")
    builder = ir.IRBuilder(function.append_basic_block())
    source, num_supers, row, sums = function.args
    [total] = integer_worker.emit_product(builder, kind, dot, source, num_supers, [row])
    emit.store(builder, total, sums)
    builder.ret_void()
    return llvm.parse_assembly(str(module))


@pytest.mark.parametrize("extreme", [False, True])
@pytest.mark.parametrize("name", WHOLE)
def test_sums_in_32_bits_are_those_in_16(name: str, extreme: bool) -> None:
    """VNNI's way: run with portable instructions, and compiled with its own; and that of AVX2, where VNNI is."""
    weight, rows = weight_of(name, extreme=extreme), rows_of(3, extreme=extreme)[2:].repeat(2, 1)
    rows[1, 6] = torch.inf
    kind, shape = weight.kind, weight.shape
    panels = Panels(kind, shape, np.zeros(Panels.num_bytes(kind, shape), np.uint8), QUAD)
    panels.fill(0, weight.codes(0, OUTPUTS))
    quantised = np.zeros((2, INPUTS // 32 * integer_worker.STEP_BYTES), np.uint8)
    quantise = coded_product.QuantiseOperation(INPUTS)
    quantise.bind(rows.data_ptr(), 2, 0, quantised.ctypes.data)
    quantise.run(alone=True)
    expected = CodedLinear([weight], None)(rows)[:, :16]
    assert expected[1].isnan().all()
    for dot in (portable, None):
        machine = llvm.Target.from_default_triple().create_target_machine(  # an engine owns its machine
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten()
        )
        with llvm.create_mcjit_compiler(module_of(kind, dot), machine) as engine:
            engine.finalize_object()
            call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(engine.get_function_address("product"))
            for row, bits in zip(quantised, expected, strict=True):
                sums = np.zeros(16, np.float32)
                call(panels.memory.ctypes.data, panels.memory.shape[1], row.ctypes.data, sums.ctypes.data)
                assert np.array_equal(sums, bits.numpy(), equal_nan=True)
    if not extreme:
        other = llvm.Target.from_triple("x86_64-unknown-linux-gnu").create_target_machine(cpu="icelake-server", opt=2)
        assert "vpdpbusd" in other.emit_assembly(module_of(kind, integer_worker.vnni))


@pytest.mark.parametrize("name", ["Q4_1", "Q8_0"])
def test_what_is_no_number_stays_none_and_infinity_does_not_vanish(name: str) -> None:
    product, rows = CodedLinear([weight_of(name)], None), rows_of(4)
    rows[1, 5], rows[2, 6] = torch.nan, torch.inf
    found, expected = product(rows), product(rows[[0, 3]])
    assert not found[1:3].isfinite().any()
    assert torch.equal(found[[0, 3]], expected)


@pytest.mark.slow
def test_formats_with_and_without_integers_share_a_result_and_rows_are_rounded_once_for_all() -> None:
    weights = [weight_of("Q4_K"), weight_of("Q6_K"), coded("BF16", 24, INPUTS), weight_of("Q4_K")]
    joined, rows = CodedLinear(weights, None), rows_of(5)
    assert torch.equal(joined(rows), torch.cat([CodedLinear([own], None)(rows) for own in weights], -1))
    assert joined.format == "Q4_K int8, Q6_K int8, BF16"
    names = [type(operation).__name__ for operation in joined.operations()]
    assert names == ["QuantiseOperation", "IntegerOperation", "IntegerOperation", "CodedOperation", "IntegerOperation"]


def test_a_table_shares_the_memory_of_a_head_in_integers_and_keeps_its_values() -> None:
    table, numbers = weight_of("Q6_K"), torch.tensor([39, 0, 17, 17])
    head = Linear([table], None)
    embedding = Embedding(table, head, torch.float32)
    assert embedding._coded is head.coded
    assert torch.equal(embedding(numbers), table.plain(torch.float32)[numbers])


# --------------------------------------------------------------------------------------------------- models


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model of codes of four bits, whose layers are one program."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(save_model(tmp_path / "plain", RECIPES["qwen3"]), tmp_path / "model.gguf", "Q4_1")
    return unfold(tmp_path / "model.gguf", with_tokenizer=False)


def answers(model: LoadedModel) -> list[object]:
    """Answers of a cold and of a warm cache, which are equal."""
    rng, engine = np.random.default_rng(3), build_engine(model, block_size=4, max_num_batched_tokens=37)
    shared, found = random_tokens(rng, 150), []
    for name in ("cold", "warm"):
        outputs = complete(engine, [shared, shared[:90]], greedy(12, logprobs=3), name=name)
        found.append([(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs])
    assert all(one.num_cached_tokens for one in outputs)
    assert found[0] == found[1]
    return found


def test_a_model_in_integers_answers_with_the_same_bits_cold_and_warm_on_any_threads(file: Path) -> None:
    options = ModelConfig(str(file), weight_arithmetic="int8")
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        model = load_model(options)
        assert model.decoder.chain is not None
        found.append(answers(model))
    model.decoder.chain = None
    assert found == [answers(model)] * 3, "operation by operation"
    assert found[0] != answers(load_model(replace(options, weight_arithmetic="exact")))


def test_the_mode_is_part_of_the_model_and_of_its_arithmetic(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    exact, integers = (load_model(ModelConfig(str(file), weight_arithmetic=mode)) for mode in ("exact", "int8"))
    assert "weight_arithmetic" not in exact.config, "what was cached before is still found"
    assert model_facts(exact, "weights", ()) != model_facts(integers, "weights", ())
    assert arithmetic_facts(exact, "probe") != arithmetic_facts(integers, "probe")
    assert all(name.endswith("int8") or name == "in one program" for name in integers.parts())
    assert "weights multiplied in integers: Q4_1" in caplog.messages
    loader._report_integers(Counter({"Q4_K int8, F16": 3, "Q6_K int8": 1, "plain": 1}), ModelConfig(str(file)))
    assert caplog.messages[-1] == "weights multiplied in integers: Q4_K, Q6_K; exactly: F16, plain"


@pytest.mark.parametrize(
    ("family", "reason"),
    [("qwen3", "its weights are "), ("gpt2", "transformers reads it, because of ")],
)
def test_a_model_without_whole_numbers_is_refused(tiny_models: TinyModels, family: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"weight_arithmetic='int8' needs weights in codes .* {reason}.*; leave it"):
        load_model(ModelConfig(str(tiny_models.folder(family)), weight_arithmetic="int8"))


KINDS = {blocks.name: blocks for blocks in BLOCKS.values() if blocks.name in FORMATS}
GROUPED = [name for name in FORMATS if name not in KINDS]
"""Formats without a type of GGUF files."""


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
def test_the_bits_of_a_row_of_codes_do_not_depend_on_other_rows_or_threads(name: str) -> None:
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
