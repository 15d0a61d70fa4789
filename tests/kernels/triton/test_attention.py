"""Triton's attention kernels, interpreted (or on a GPU, compiled), against naive attention in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from foreword.errors import ConfigError
from foreword.kernels.kv_format import KVBlocks
from foreword.kernels.reference import AttentionOptions
from foreword.kernels.select import make_kernel
from foreword.kernels.step_plan import FEW_QUERIES, plan_step
from foreword.kernels.triton.attention import TritonAttention
from foreword.kernels.triton.plan import decoding_shape, lay_out, lay_out_alone
from lanes import slow
from paged_case import Case, Shape, random_options, random_shape, random_spans, share_blocks

HALVES = [torch.bfloat16, torch.float16]
SLOW = pytest.mark.slow
DTYPES = [torch.float32, *HALVES]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}
"""Of values around 1: weights and results are rounded to the element type."""
LENIENT = settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check(case: Case, options: AttentionOptions, device: torch.device) -> None:
    result = case.run(TritonAttention(), options, device=device).double()
    tolerance = TOLERANCE[case.shape.dtype]
    torch.testing.assert_close(result, case.expected(options), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("seed", [0, 1, 5, *(pytest.param(seed, marks=SLOW) for seed in range(6, 14))])
def test_random_ragged_batches_agree_with_naive_attention(seed: int, device: torch.device) -> None:
    rng = np.random.default_rng(seed)
    shape = random_shape(rng, DTYPES[seed % 3])
    check(Case(shape, random_spans(rng, longest=30 if seed % 2 else 600), rng), random_options(rng, shape), device)


@LENIENT
@given(
    kv_heads=st.integers(1, 2),
    groups=st.integers(1, 9),
    dims=st.tuples(st.integers(1, 130), st.integers(1, 130)),
    block_size=st.integers(1, 300),
    spans=st.lists(st.tuples(st.integers(1, 400), st.integers(1, 40)), min_size=1, max_size=2),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape_agrees_with_naive_attention(
    kv_heads: int,
    groups: int,
    dims: tuple[int, int],
    block_size: int,
    spans: list[tuple[int, int]],
    dtype: torch.dtype,
    seed: int,
    device: torch.device,
) -> None:
    rng = np.random.default_rng(seed)
    shape = Shape(kv_heads * groups, kv_heads, *dims, block_size, dtype)
    options = replace(random_options(rng, shape), scale=dims[0] ** -0.5)
    check(Case(shape, [(max(0, end - length), end) for end, length in spans], rng), options, device)


@pytest.mark.parametrize("dtype", [*HALVES, pytest.param(torch.float32, marks=SLOW)])
@pytest.mark.parametrize("dim", [80, 128, *(pytest.param(dim, marks=SLOW) for dim in (64, 96, 192, 256))])
def test_head_sizes_of_models_with_grouped_heads(dim: int, dtype: torch.dtype, device: torch.device) -> None:
    case = Case(Shape(8, 2, dim, dim, 16, dtype), [(0, 40), (299, 300)], np.random.default_rng(dim))
    check(case, AttentionOptions(dim**-0.5), device)


def test_more_heads_than_a_tile_has_rows(device: torch.device) -> None:
    case = Case(Shape(150, 1, 16, 16, 16, torch.float16), [(30, 31), (0, 20)], np.random.default_rng(1))
    check(case, AttentionOptions(0.25), device)


SPAN_GRID = {
    "one token": [(0, 1)],
    "one whole chunk of KV": [(0, 256)],
    "the first query after a chunk": [(256, 257)],
    "a tile that straddles two chunks": [(200, 300)],
    "decodes of very different lengths": [(0, 1), (511, 512), (512, 513), (3, 4)],
    "as many queries as are split, and one more": [(250, 250 + FEW_QUERIES), (250, 251 + FEW_QUERIES)],
}


@pytest.mark.parametrize("spans", SPAN_GRID.values(), ids=SPAN_GRID)
@pytest.mark.parametrize("reach", [8, pytest.param(1, marks=SLOW), pytest.param(256, marks=SLOW)])
@pytest.mark.parametrize("kind", ["sliding_window", "local_chunk"])
def test_the_edges_of_chunks_and_tiles(
    spans: list[tuple[int, int]], kind: str, reach: int, device: torch.device
) -> None:
    case = Case(Shape(4, 2, 16, 16, 16, torch.float16), spans, np.random.default_rng(7))
    check(case, AttentionOptions(0.25, **{kind: reach}), device)


def test_huge_scores_neither_overflow_nor_vanish(device: torch.device) -> None:
    case = Case(Shape(2, 1, 16, 16, 4), [(0, 40), (290, 300)], np.random.default_rng(8))
    options = AttentionOptions(scale=1e4)
    result = case.run(TritonAttention(), options, device=device).double()
    torch.testing.assert_close(result, case.expected(options), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("dtype", "softcap"), [(torch.float32, 2.0), (torch.bfloat16, None)])
def test_scores_rise_towards_the_query(dtype: torch.dtype, softcap: float | None, device: torch.device) -> None:
    case = Case(Shape(4, 2, 16, 16, 16, dtype), [(256, 300), (290, 291), (0, 3)], np.random.default_rng(18))
    check(case, AttentionOptions(0.25, softcap=softcap, slopes=torch.tensor([0.9, 0.25, 2**-4, 2**-8])), device)


def test_a_sink_of_great_weight_takes_everything(device: torch.device) -> None:
    case = Case(Shape(2, 1, 16, 16, 4), [(0, 40), (9, 10)], np.random.default_rng(9))
    sinks = torch.tensor([200.0, -200.0])
    result = case.run(TritonAttention(), AttentionOptions(0.25, sinks=sinks), device=device)
    assert torch.equal(result[:, 0], torch.zeros_like(result[:, 0]))
    without = case.run(TritonAttention(), AttentionOptions(0.25), device=device)
    assert torch.equal(result[:, 1], without[:, 1])


def test_rows_of_padding_change_nothing_and_come_back_as_zeros(device: torch.device) -> None:
    case = Case(Shape(4, 2, 16, 16, 4, torch.float16), [(0, 40), (20, 21)], np.random.default_rng(10))
    options = AttentionOptions(0.25)
    padded = case.run(TritonAttention(), options, num_padding_rows=6, device=device)
    assert torch.equal(padded[:41], case.run(TritonAttention(), options, device=device))
    assert torch.equal(padded[41:], torch.zeros_like(padded[41:]))


def test_blocks_may_have_gaps_between_them(device: torch.device) -> None:
    case = Case(Shape(4, 2, 16, 16, 4, torch.float16), [(0, 40), (20, 21)], np.random.default_rng(11))
    options, kernel = AttentionOptions(0.25), TritonAttention()
    expected = case.run(kernel, options, device=device)
    gapped = []
    for blocks in (case.key_blocks, case.value_blocks):
        used = blocks[0].numel()
        pages = torch.full((len(blocks), used + 48), torch.nan, dtype=blocks.dtype, device=device)
        pages[:, :used] = blocks.flatten(1).to(device)
        gapped.append(pages[:, :used].unflatten(1, blocks.shape[1:]))
    plan = kernel.plan(case.batch, len(case.key_blocks) - 1, 4, device)
    assert torch.equal(
        kernel.attend(torch.cat(case.queries).to(device), KVBlocks.plain(*gapped), plan, options).cpu(), expected
    )


# ------------------------------------------------------------------------------------------------- equal bits


Spans = Sequence[tuple[int, int]]


def ask(whole: Case, options: AttentionOptions, device: torch.device, spans: Spans, others: Spans = ()) -> Tensor:
    """The rows of some spans of a case's only request, computed beside other requests."""
    rng = np.random.default_rng(len(spans))
    beside = Case(whole.shape, [*others, *spans], rng)
    for row, (start, end) in enumerate(spans, start=len(others)):
        beside.queries[row] = whole.queries[0][start:end]
        positions = np.arange(end)
        table = beside.batch.block_tables[row]
        blocks, offsets = table[positions // whole.shape.block_size], positions % whole.shape.block_size
        beside.key_blocks[blocks, offsets] = whole.keys[0][:end]
        beside.value_blocks[blocks, offsets] = whole.values[0][:end]
    return beside.run(TritonAttention(), options, device=device)[sum(end - start for start, end in others) :]


def check_equal_bits(
    shape: Shape, seed: int, device: torch.device, longest: int, options: AttentionOptions | None = None
) -> None:
    """One request whole, behind a hit, and one query at a time, alone and among others."""
    rng = np.random.default_rng(200 + seed)
    options = options or random_options(rng, shape)
    length = int(rng.integers(258, longest))
    whole = Case(shape, [(0, length)], rng)
    expected = whole.run(TritonAttention(), options, device=device)
    cut = int(rng.integers(length - 60, length))
    assert torch.equal(ask(whole, options, device, [(0, cut)]), expected[:cut])
    assert torch.equal(ask(whole, options, device, [(cut, length)], [(0, 30), (299, 300)]), expected[cut:])
    for position in (length - 1, int(rng.integers(0, length))):
        alone = ask(whole, options, device, [(position, position + 1)], [(310, 311), (0, 1), (7, 50)])
        assert torch.equal(alone[0], expected[position])


@pytest.mark.parametrize("dtype", [torch.float32, *(pytest.param(dtype, marks=SLOW) for dtype in HALVES)])
def test_a_query_has_the_same_bits_in_every_batch(dtype: torch.dtype, device: torch.device) -> None:
    check_equal_bits(Shape(3, 1, 20, 24, 16, dtype), 0, device, longest=290)


@pytest.mark.parametrize("dtype", slow(torch.bfloat16))
def test_so_it_has_with_slopes(dtype: torch.dtype, device: torch.device) -> None:
    options = AttentionOptions(0.2, slopes=torch.tensor([0.5, 0.06, 0.004], device=device))
    check_equal_bits(Shape(3, 1, 20, 24, 16, dtype), 0, device, 290, options)


@SLOW
@pytest.mark.parametrize(
    ("seed", "dtype"),
    [*zip((3, 5, 11), DTYPES, strict=True), (8, DTYPES[1]), (9, DTYPES[2])],  # the last two: large heads
)
def test_a_query_has_the_same_bits_in_every_batch_of_many_shapes(
    seed: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Among them heads of 16 and of 256 elements, 2 to 8 query heads for each KV head, and blocks of 4 and of 16."""
    rng = np.random.default_rng(seed)
    heads = int(rng.integers(1, 3))
    dims = (int(rng.choice([16, 20, 64, 96, 128, 256])), int(rng.choice([24, 64, 128, 256])))
    shape = Shape(heads * int(rng.integers(1, 9)), heads, *dims, int(rng.choice([4, 16, 48])), dtype)
    check_equal_bits(shape, seed, device, longest=560)


def check_sharing(seed: int, dtype: torch.dtype, device: torch.device, longest: int) -> None:
    """Random groups of decodes and short suffixes beside a prompt; other heads, sizes and options each time."""
    rng = np.random.default_rng(seed)
    shape = random_shape(rng, dtype)
    ends = rng.integers(300, longest, 5).tolist()
    spans = [*((end - int(rng.choice([1, 1, 7, 16])), end) for end in ends), (0, 20)]
    case = Case(shape, spans, rng)
    share_blocks(case, [([0, 1, 2], int(rng.integers(0, 300))), ([3, 4], int(rng.integers(0, 300)))])
    options = random_options(rng, shape)
    expected = case.run(TritonAttention(share=False), options, device=device)
    assert expected.isfinite().all()
    assert torch.equal(case.run(TritonAttention(), options, device=device), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=SLOW)])
def test_sharing_chunks_changes_no_bit(dtype: torch.dtype, device: torch.device) -> None:
    check_sharing(6, dtype, device, longest=400)


@SLOW
@settings(LENIENT, max_examples=4)
@given(seed=st.integers(0, 2**32 - 1), dtype=st.sampled_from(DTYPES))
def test_sharing_random_chunks_changes_no_bit(seed: int, dtype: torch.dtype, device: torch.device) -> None:
    check_sharing(seed, dtype, device, longest=900)


def test_what_is_shared_is_read_once() -> None:
    case = Case(Shape(2, 1, 16, 16, 16), [(599, 600)] * 3, np.random.default_rng(16))
    share_blocks(case, [([0, 1, 2], 512)])
    plain = TritonAttention(share=False).lay_out(case.batch, 0, 16)
    shared = TritonAttention().lay_out(case.batch, 0, 16)
    assert (plain.shape.num_items, shared.shape.num_items) == (9, 5)
    kernel = TritonAttention()
    kernel.plan(case.batch, 0, 16, torch.device("cpu"))
    assert "5 chunks of 256 tokens instead of 9" in kernel.explain()


def test_items_are_cut_to_tiles_and_the_cut_changes_no_bit(device: torch.device) -> None:
    """A plan is first made without knowing how many heads fill a tile."""
    case = Case(Shape(8, 1, 16, 16, 16, torch.float16), [(284, 300)], np.random.default_rng(17))
    kernel, options = TritonAttention(), AttentionOptions(0.25)
    sizes, results = [], []
    for _ in range(2):
        sizes.append(kernel.lay_out(case.batch, 0, 16).shape.num_items)
        results.append(case.run(kernel, options, device=device))
    assert sizes == [2, 4], "64 rows are 8 queries of 8 heads, so 16 queries take two items for each of two chunks"
    assert torch.equal(*results)


# ------------------------------------------------------------------------------------- plans of a fixed shape


def decoding_case(ends: Sequence[int], shape: Shape, seed: int) -> Case:
    return Case(shape, [(end - 1, end) for end in ends], np.random.default_rng(seed))


def padded_queries(case: Case, num_rows: int) -> Tensor:
    query = torch.cat(case.queries)
    return torch.cat((query, query.new_full((num_rows - len(query), *query.shape[1:]), torch.nan)))


@pytest.mark.parametrize("seed", range(20))
def test_single_tokens_that_share_nothing_have_the_plan_of_any_step(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ends = rng.integers(1, 1200, rng.integers(1, 12)).tolist()
    batch = decoding_case(ends, Shape(1, 1, 16, 16, 16), seed).batch
    shape = decoding_shape(len(ends) + int(rng.integers(0, 4)), 1200, 16)
    expected = lay_out(plan_step(batch, 16, None), 16, shape)
    assert np.array_equal(lay_out_alone(batch, shape).data, expected.data)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=SLOW)])
def test_steps_take_each_others_place_in_one_shape(dtype: torch.dtype, device: torch.device) -> None:
    """What a CUDA graph does: the same launches with the same tensors, whose contents change."""
    shape = Shape(6, 2, 16, 16, 16, dtype)
    options = AttentionOptions(0.25, sinks=torch.zeros(6, device=device))
    kernel, metadata = TritonAttention(), None
    for seed, ends in enumerate([[5, 300, 257], [256], [290, 301], [1, 2]]):
        case = decoding_case(ends, shape, seed)
        share_blocks(case, [(range(len(ends)), 256)] if min(ends) > 256 else [])
        host = kernel.lay_out_decoding(case.batch, len(case.key_blocks) - 1, 16, num_rows=4, max_tokens=500)
        if metadata is None:
            metadata = torch.empty(host.shape.size, dtype=torch.int32, device=device)
            plan = host.at(metadata)
        assert host.shape == plan.shape
        assert len(host.data) < host.most, "what is not in use is not copied"
        metadata[: len(host.data)].copy_(torch.from_numpy(host.data))
        result = kernel.attend(padded_queries(case, 4).to(device), case.blocks(device), plan, options).cpu()
        assert torch.equal(result[: len(ends)], case.run(TritonAttention(), options, device=device))
        assert torch.equal(result[len(ends) :], torch.zeros_like(result[len(ends) :]))


def test_the_choice_of_a_kernel(device: torch.device) -> None:
    assert isinstance(make_kernel("triton", device), TritonAttention)
    with pytest.raises(ConfigError, match="attention_kernel='triton' cannot run here: the model is on meta"):
        make_kernel("triton", torch.device("meta"))


def test_without_a_gpu_triton_is_refused_unless_it_interprets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ConfigError, match="the model is on cpu"):
        make_kernel("triton", torch.device("cpu"))


def test_the_interpreter_multiplies_rows_that_do_not_depend_on_their_number(device: torch.device) -> None:
    """Its own product is numpy's, whose rows do on some processors (OPENBLAS_CORETYPE=Haswell shows it)."""
    if device.type != "cpu":
        pytest.skip("a GPU is not interpreted")
    rng = np.random.default_rng(18)
    left, right = (TensorHandle(rng.normal(size=size).astype(np.float32), tl.float32) for size in [(64, 20), (20, 64)])
    builder, total = InterpreterBuilder(), TensorHandle(np.zeros((64, 64), np.float32), tl.float32)
    whole = builder.create_dot(left, right, total, None, 0).data
    assert np.allclose(whole, left.data @ right.data, atol=1e-5)
    for num_rows in range(1, 64):
        part, sums = (TensorHandle(handle.data[:num_rows], tl.float32) for handle in (left, total))
        assert np.array_equal(builder.create_dot(part, right, sums, None, 0).data, whole[:num_rows])
