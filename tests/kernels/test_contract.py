"""The contract of paged attention: every kernel agrees with naive attention in float64, whatever the shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foreword.batch import Batch
from foreword.errors import ConfigError
from foreword.kernels import reference
from foreword.kernels.cpu.attention import CpuAttention, LeadingChunks, fastest_mode, join_leading
from foreword.kernels.cpu.layout import PAIRS, TILES, WIDENED
from foreword.kernels.kv_format import KVBlocks, KVFormat
from foreword.kernels.llvm.emit import HAS_BF16_DOT
from foreword.kernels.reference import AttentionOptions, plan_tiles
from foreword.kernels.runtime import threads as team
from foreword.kernels.select import AttentionKernel, ReferenceAttention, choose_kernel, make_kernel
from foreword.kernels.step_plan import FOLD, LEADING, SHARED, SharingRule, plan_step
from lanes import slow
from paged_case import Case, CodedCase, LatentCase, Shape, random_options, random_shape, random_spans, share_blocks

KERNELS: dict[str, Callable[[], AttentionKernel]] = {
    "reference": ReferenceAttention,
    "cpu": CpuAttention,
    "cpu-widened": lambda: CpuAttention(bfloat16=WIDENED),
    "cpu-pairs": lambda: CpuAttention(bfloat16=PAIRS if HAS_BF16_DOT else WIDENED),
    "cpu-unshared": lambda: CpuAttention(share=False),
}


@pytest.fixture(params=sorted(KERNELS))
def kernel(request: pytest.FixtureRequest) -> AttentionKernel:
    return KERNELS[request.param]()


@pytest.mark.parametrize("seed", [*range(8), *slow(*range(8, 20))])
def test_random_ragged_batches_agree_with_naive_attention(kernel: AttentionKernel, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = random_shape(rng)
    case = Case(shape, random_spans(rng, longest=30 if seed % 2 else 600), rng)
    options = random_options(rng, shape)
    result = case.run(kernel, options)
    torch.testing.assert_close(result.double(), case.expected(options), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", [*range(4), *slow(*range(4, 12))])
def test_queries_may_see_each_other_and_keep_their_bits_beside_others(kernel: AttentionKernel, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = random_shape(rng)
    spans = random_spans(rng, longest=30 if seed % 2 else 600)
    case = Case(shape, [*spans, (200, 200 + int(rng.integers(1, 300)))], rng)
    case.see_ahead(rng)
    assert case.batch.seen_to is not None
    options = random_options(rng, shape)
    result = case.run(kernel, options)
    torch.testing.assert_close(result.double(), case.expected(options), rtol=1e-4, atol=1e-5)
    for row, (start, end) in enumerate(case.spans):  # from any query on to where a run ends
        begin = int(case.batch.query_starts[row])
        ends = np.flatnonzero(case.batch.seen_to[begin : begin + end - start] == np.arange(start, end) + 1) + 1
        last = int(rng.choice(ends))
        own = slice(begin + int(rng.integers(0, last)), begin + last)
        part = Batch.bare(
            case.batch.token_ids[own],
            case.batch.positions[own],
            np.array([0, own.stop - own.start], np.int32),
            (case.batch.block_tables[row : row + 1],),
        )
        part = replace(part, seen_to=case.batch.seen_to[own])
        plan = kernel.plan(part, len(case.key_blocks) - 1, shape.block_size, torch.device("cpu"))
        alone = kernel.attend(torch.cat(case.queries)[own], case.blocks(), plan, options)
        assert torch.equal(alone, result[own])


@pytest.mark.parametrize("seed", [*range(8), *slow(*range(8, 20))])
def test_codes_are_attended_as_the_numbers_that_are_read_of_them(kernel: AttentionKernel, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = random_shape(rng)
    case = CodedCase(shape, random_spans(rng, longest=30 if seed % 2 else 600), rng)
    options = random_options(rng, shape)
    assert kernel.why_not(case.blocks().format, options) is None
    result = case.run(kernel, options)
    torch.testing.assert_close(result.double(), case.expected(options), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("seed", [*range(6), *slow(*range(6, 16))])
@pytest.mark.parametrize(("mode", "rounding"), [(None, 2.5), (PAIRS, 2.0), (WIDENED, 0.0)])
def test_codes_are_rounded_once_where_bfloat16_is_multiplied(seed: int, mode: int | None, rounding: float) -> None:
    """A key or a value is off by 2**-9 of itself, and a weight by as much as it is over KV in bfloat16."""
    if mode != WIDENED and not HAS_BF16_DOT:
        pytest.skip("this processor multiplies no pairs of bfloat16")
    rng = np.random.default_rng(100 + seed)
    shape = replace(random_shape(rng), dtype=torch.bfloat16)
    case = CodedCase(shape, random_spans(rng, longest=600), rng)
    options = random_options(rng, shape)
    result = case.run(CpuAttention(bfloat16=mode), options).double()
    if rounding:
        case.keys = [own.bfloat16() for own in case.keys]
        case.values = [own.bfloat16() for own in case.values]
    expected = case.expected(options)
    case.values = [values.abs() for values in case.values]
    assert ((result - expected).abs() <= 2**-8 * (expected.abs() + rounding * case.expected(options)) + 1e-4).all()


@pytest.mark.parametrize("seed", range(4))
def test_values_that_are_parts_of_keys_are_found_there(kernel: AttentionKernel, seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups, value_dim, more, block_size = (int(rng.choice(own)) for own in ([1, 3, 40], [8, 24, 64], [8, 32], [3, 16]))
    shape = Shape(groups, 1, value_dim + more, value_dim, block_size)
    case = LatentCase(shape, random_spans(rng, longest=30 if seed % 2 else 600), rng)
    options = random_options(rng, shape)
    assert kernel.why_not(case.blocks().format, options) is None
    result = case.run(kernel, options)
    torch.testing.assert_close(result.double(), case.expected(options), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "shape"), [(CodedCase, (6, 2, 64, 64, 16)), (LatentCase, (6, 1, 96, 64, 16))])
def test_bits_over_codes_and_latents_depend_on_no_neighbour_and_no_cut(
    kernel: AttentionKernel, dtype: torch.dtype, kind: type[Case], shape: tuple[int, int, int, int, int]
) -> None:
    """Each query alone, in chunks, and beside requests that share its blocks."""
    options = AttentionOptions(0.125)
    case = kind(Shape(*shape, dtype), [(260, 300), (299, 300), (250, 290)], np.random.default_rng(3))
    share_blocks(case, [((0, 1, 2), 256)])
    together = case.run(kernel, options)
    whole = together.split([end - start for start, end in case.spans])
    for row, (start, end) in enumerate(case.spans):
        for first, last in ((start, end), (start, start + 1), (end - 1, end)):
            part = Batch.bare(
                np.zeros(last - first, np.int32),
                np.arange(first, last, dtype=np.int32),
                np.array([0, last - first], np.int32),
                (case.batch.block_tables[row : row + 1],),
            )
            plan = kernel.plan(part, len(case.key_blocks) - 1, 16, torch.device("cpu"))
            own = kernel.attend(case.queries[row][first - start : last - start], case.blocks(), plan, options)
            assert torch.equal(own, whole[row][first - start : last - start])


@settings(max_examples=25, deadline=None)
@given(
    kv_heads=st.integers(1, 4),
    groups=st.integers(1, 9),
    dims=st.tuples(st.integers(1, 130), st.integers(1, 130)),
    block_size=st.integers(1, 300),
    spans=st.lists(st.tuples(st.integers(1, 600), st.integers(1, 40)), min_size=1, max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape_agrees_with_naive_attention(
    kv_heads: int, groups: int, dims: tuple[int, int], block_size: int, spans: list[tuple[int, int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    shape = Shape(kv_heads * groups, kv_heads, *dims, block_size)
    case = Case(shape, [(max(0, end - length), end) for end, length in spans], rng)
    options = random_options(rng, shape)
    result = case.run(CpuAttention(), options)
    # A score is off by what float32 rounds of the terms that it is the sum of, and moves weight between values by that.
    largest_score = options.scale * largest_norm(case.queries) * largest_norm(case.keys)
    largest_value = max(values.abs().max().item() for values in case.values)
    atol = 1e-5 + 2**-23 * largest_score * largest_value
    torch.testing.assert_close(result.double(), case.expected(options), rtol=1e-4, atol=atol)


def largest_norm(parts: Sequence[Tensor]) -> float:
    """Of the vectors along the last dimension."""
    return max(part.norm(dim=-1).max().item() for part in parts)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("make", [ReferenceAttention, KERNELS["cpu-widened"]])
def test_bfloat16_kv_is_rounded_only_at_the_end(make: Callable[[], AttentionKernel], seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    shape = Shape(4, 2, 64, 64, 16, torch.bfloat16)
    case = Case(shape, random_spans(rng, longest=400), rng)
    options = random_options(rng, shape)
    result = case.run(make(), options)
    assert result.dtype == torch.bfloat16
    expected = case.expected(options)
    torch.testing.assert_close(result.double(), expected, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("seed", [*range(6), *slow(*range(6, 16))])
@pytest.mark.parametrize(("mode", "rounding"), [(None, 1.5), (PAIRS, 1.0)])
def test_weights_of_bfloat16_are_rounded_once(seed: int, mode: int | None, rounding: float) -> None:
    """A weight is off by at most 2**-8 of itself, in tiles by half as much again: errors found are within that."""
    if not HAS_BF16_DOT:
        pytest.skip("this processor multiplies no pairs of bfloat16")
    rng = np.random.default_rng(100 + seed)
    shape = replace(random_shape(rng), dtype=torch.bfloat16)
    case = Case(shape, random_spans(rng, longest=600), rng)
    options = random_options(rng, shape)
    result, expected = case.run(CpuAttention(bfloat16=mode), options).double(), case.expected(options)
    case.values = [values.abs() for values in case.values]
    assert ((result - expected).abs() <= 2**-8 * (expected.abs() + rounding * case.expected(options)) + 1e-6).all()


@pytest.mark.parametrize("late", [30.0, 60.0, 400.0, 3000.0])
@pytest.mark.parametrize("spans", [[(511, 512)], [(440, 512)]], ids=["decoding", "prefill"])
def test_later_scores_may_be_much_larger_than_those_a_row_sees_first(spans: list[tuple[int, int]], late: float) -> None:
    """Every second head finds them; rows of other heads beside them keep what they have."""
    case = Case(Shape(6, 2, 64, 64, 16, torch.bfloat16), spans, np.random.default_rng(23))
    case.queries[0][..., 7] = 0.0
    case.queries[0][:, ::2, 7] = 8.0
    alone = case.run(CpuAttention(), AttentionOptions(0.125))[:, 1::2]
    for token in (200, 255, 300):
        case.keys[0][token, :, 7] = late
        case.key_blocks[case.batch.block_tables[0, token // 16], token % 16] = case.keys[0][token]
    options = AttentionOptions(0.125)
    result, expected = case.run(CpuAttention(), options), case.expected(options)
    torch.testing.assert_close(result.double(), expected, rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(result[:, 1::2], alone, rtol=0, atol=0)


SPAN_GRID = {
    "one token": [(0, 1)],
    "one whole chunk of KV": [(0, 256)],
    "the first query after a chunk": [(256, 257)],
    "a tile that ends where a chunk ends": [(128, 256)],
    "a tile that straddles two chunks": [(200, 300)],
    "decodes of very different lengths": [(0, 1), (511, 512), (512, 513), (3, 4)],
    "more queries than a tile takes": [(0, 300), (40, 41)],
}


REACHES = [(torch.float32, 1), (torch.float32, 8), (torch.float32, 256), (torch.bfloat16, 64), (torch.bfloat16, 100)]


MASKS = [
    ("sliding_window", torch.float32, None),
    *((kind, *reach) for kind in ("sliding_window", "local_chunk") for reach in REACHES),
]


@pytest.mark.parametrize(
    ("kernel", "spans", "mask"),
    [
        (kernel, spans, mask)
        for k, kernel in enumerate(sorted(KERNELS))
        for m, spans in enumerate(SPAN_GRID)
        for n, mask in enumerate(MASKS)
        if (n + m + k) % 3 == 0
    ],
    indirect=["kernel"],
)
def test_the_edges_of_chunks_and_tiles(
    kernel: AttentionKernel, spans: str, mask: tuple[str, torch.dtype, int | None]
) -> None:
    """Every kernel meets each span and each mask, and each span each mask."""
    kind, dtype, reach = mask
    case = Case(Shape(4, 2, 16, 16, 16, dtype), SPAN_GRID[spans], np.random.default_rng(7))
    options = AttentionOptions(0.25, **{kind: reach})
    bounds = {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 0.012}
    torch.testing.assert_close(case.run(kernel, options).double(), case.expected(options), **bounds)


def test_huge_scores_neither_overflow_nor_vanish(kernel: AttentionKernel) -> None:
    case = Case(Shape(2, 1, 16, 16, 4), [(0, 40), (290, 300)], np.random.default_rng(8))
    options = AttentionOptions(scale=1e4)
    torch.testing.assert_close(case.run(kernel, options).double(), case.expected(options), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("scale", [1e2, 1e3, 3e3, 1e4, 1e5, 1e6])
@pytest.mark.parametrize("mode", [None, PAIRS])
def test_nor_do_they_in_bfloat16(mode: int | None, scale: float) -> None:
    """Scores so far apart that integers would wrap around: all but the largest weigh nothing."""
    if mode == PAIRS and not HAS_BF16_DOT:
        pytest.skip("this processor multiplies no pairs of bfloat16")
    case = Case(Shape(2, 1, 16, 16, 4, torch.bfloat16), [(0, 40), (290, 300)], np.random.default_rng(8))
    result, expected = (
        case.run(CpuAttention(bfloat16=mode), AttentionOptions(scale)),
        case.expected(AttentionOptions(scale)),
    )
    torch.testing.assert_close(result.double(), expected, rtol=2**-7, atol=0.02)


@pytest.mark.parametrize("mode", [None, PAIRS])
def test_whether_a_row_is_a_number_depends_on_no_other(mode: int | None) -> None:
    """Keys that are infinite, and products that overflow, in heads beside others in which they do not.

    In tiles whoever sees an infinite key gets no number; in pairs who has no score of minus infinity for it.
    """
    if not HAS_BF16_DOT:
        pytest.skip("this processor multiplies no pairs of bfloat16")
    options, in_tiles = AttentionOptions(0.125), mode is None and fastest_mode() == TILES
    for size, key in ((torch.inf, (torch.inf, 1.0)), (3e38, (3e38, 3e38))):
        found = []
        for first in (-1.0, 0.0, 8.0):
            case = Case(Shape(4, 1, 64, 64, 16, torch.bfloat16), [(299, 300)], np.random.default_rng(29))
            block = case.batch.block_tables[0, 6]
            case.key_blocks[block, 5, :, 0], case.key_blocks[block, 5, :, 1] = key
            case.queries[0][:, 0, :2] = first
            case.queries[0][:, 1, 0], case.queries[0][:, 1, 1] = 8.0, -8.0
            case.queries[0][:, 2:, :2] = -1.0
            found.append(case.run(CpuAttention(bfloat16=mode), options)[:, 1:])
            if size == torch.inf:
                assert found[-1][:, 0].isnan().all()
                assert (found[-1][:, 1:].isnan() == in_tiles).all()
        for other in found[1:]:
            assert torch.equal(found[0].isnan(), other.isnan())
            assert torch.equal(found[0].nan_to_num(), other.nan_to_num())


def test_a_sink_of_great_weight_takes_everything(kernel: AttentionKernel) -> None:
    case = Case(Shape(2, 1, 16, 16, 4), [(0, 40)], np.random.default_rng(9))
    result = case.run(kernel, AttentionOptions(0.25, sinks=torch.tensor([200.0, -200.0])))
    assert torch.equal(result[:, 0], torch.zeros_like(result[:, 0]))
    without = case.run(kernel, AttentionOptions(0.25))
    torch.testing.assert_close(result[:, 1], without[:, 1])


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slopes_raise_scores_towards_the_query(dtype: torch.dtype, softcap: float | None) -> None:
    case = Case(Shape(4, 2, 16, 16, 16, dtype), [(256, 300), (290, 291), (0, 3)], np.random.default_rng(18))
    options = AttentionOptions(0.25, softcap=softcap, slopes=torch.tensor([0.9, 0.25, 2**-4, 2**-8]))
    tolerance = 2e-5 if dtype == torch.float32 else 2**-8
    result = case.run(ReferenceAttention(), options)
    torch.testing.assert_close(result.double(), case.expected(options), rtol=tolerance, atol=tolerance)
    with pytest.raises(AssertionError, match="takes no scores with linear biases"):
        case.run(CpuAttention(), options)


def test_rows_of_padding_change_nothing_and_come_back_as_zeros(kernel: AttentionKernel) -> None:
    case = Case(Shape(4, 2, 16, 16, 4), [(0, 9), (20, 21)], np.random.default_rng(10))
    options = AttentionOptions(0.25)
    padded = case.run(kernel, options, num_padding_rows=6)
    assert torch.equal(padded[:10], case.run(kernel, options))
    assert torch.equal(padded[10:], torch.zeros_like(padded[10:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [*range(4), *slow(*range(4, 8))])
def test_a_query_has_the_same_bits_in_every_batch(kernel: AttentionKernel, seed: int, dtype: torch.dtype) -> None:
    """One request whole, in two pieces, and one query at a time among others.

    Heads of whole vectors are multiplied where they lie if rows are few, and packed if they are many.
    """
    rng = np.random.default_rng(200 + seed)
    num_heads, key_dim, value_dim = [(6, 16, 24), (6, 64, 32), (10, 20, 24), (18, 128, 64)][seed % 4]
    shape = Shape(num_heads, 2, key_dim, value_dim, int(rng.choice([4, 16])), dtype)
    options = random_options(rng, shape)
    length = int(rng.integers(20, 560))
    whole = Case(shape, [(0, length)], rng)
    expected = whole.run(kernel, options)

    def ask(*spans: tuple[int, int], others: Sequence[tuple[int, int]] = ()) -> Tensor:
        """The rows of these spans of the same request, computed beside other requests."""
        beside = Case(shape, [*others, *spans], rng)
        for row, (start, end) in enumerate(spans, start=len(others)):
            beside.queries[row] = whole.queries[0][start:end]
            positions = np.arange(end)
            table = beside.batch.block_tables[row]
            blocks, offsets = table[positions // shape.block_size], positions % shape.block_size
            beside.key_blocks[blocks, offsets] = whole.keys[0][:end]
            beside.value_blocks[blocks, offsets] = whole.values[0][:end]
        return beside.run(kernel, options)[sum(end - start for start, end in others) :]

    cut = int(rng.integers(1, length))
    assert torch.equal(ask((0, cut)), expected[:cut])
    assert torch.equal(ask((cut, length), others=[(0, 30), (599, 600)]), expected[cut:])
    for position in rng.integers(0, length, 5).tolist():
        alone = ask((position, position + 1), others=[(610, 611), (0, 1), (7, 50)])
        assert torch.equal(alone[0], expected[position])


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("mode", [None, PAIRS])
@pytest.mark.parametrize("soft_cap", [None, 4.0])
def test_what_a_thread_computed_before_changes_no_bit(mode: int | None, soft_cap: float | None) -> None:
    """Scores that are no numbers lie behind those of a shorter request, whether its rows are few or many."""
    if mode == PAIRS and not HAS_BF16_DOT:
        pytest.skip("this processor multiplies no pairs of bfloat16")
    torch.set_num_threads(1)
    shape, options = Shape(6, 2, 64, 32, 16, torch.bfloat16), AttentionOptions(0.125, softcap=soft_cap)
    case = Case(shape, [(0, 100)], np.random.default_rng(31))
    expected = case.run(CpuAttention(bfloat16=mode), options)
    assert expected.isfinite().all()
    for start in (0, 99):
        kernel, before = CpuAttention(bfloat16=mode), Case(shape, [(start, 256)], np.random.default_rng(32))
        before.key_blocks[:] = torch.nan
        assert before.run(kernel, options).isnan().all()
        assert torch.equal(case.run(kernel, options), expected)
        last = Case(shape, [(99, 100)], np.random.default_rng(33))
        last.queries[0] = case.queries[0][-1:]
        blocks = last.batch.block_tables[0]
        last.key_blocks[blocks], last.value_blocks[blocks] = (
            kv[case.batch.block_tables[0]] for kv in (case.key_blocks, case.value_blocks)
        )
        before.run(kernel, options)
        assert torch.equal(last.run(kernel, options)[0], expected[-1])


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("spans", [[(70, 71)], [(300, 301)], [(0, 9)]], ids=["one chunk", "two", "prefill"])
def test_a_plan_serves_layers_whose_kv_lies_elsewhere(kernel: AttentionKernel, spans: list[tuple[int, int]]) -> None:
    """The second one's values are those of the first with the other sign, and so is what it gives."""
    torch.set_num_threads(1)
    case = Case(Shape(4, 2, 32, 32, 16, torch.bfloat16), spans, np.random.default_rng(34))
    plan = kernel.plan(case.batch, len(case.key_blocks) - 1, 16, torch.device("cpu"))
    layers = [KVBlocks.plain(case.key_blocks.clone(), sign * case.value_blocks) for sign in (1, -1)]
    first, second = (kernel.attend(case.queries[0], layer, plan, AttentionOptions(0.2)) for layer in layers)
    assert torch.equal(second, -first)
    assert first.count_nonzero() == first.numel()


def test_tiles_cover_every_query_once_and_hide_the_ends_of_tables() -> None:
    spans = [(0, 300), (9, 10), (50, 90), (511, 512)]
    case = Case(Shape(2, 1, 8, 8, 16), spans, np.random.default_rng(11))
    scrap = len(case.key_blocks) - 1
    plan = plan_tiles(case.batch, scrap, 16)
    tiles = plan.at(torch.from_numpy(plan.data))
    rows = torch.cat([tile.query_index.flatten() for tile in tiles])
    assert rows.sort().values.tolist() == list(range(case.batch.num_tokens))
    for tile in tiles:
        assert tile.query_index.shape[1] <= reference.TILE_QUERIES
        assert tile.shape.first_position == tile.positions.min()
        assert tile.shape.last_position == tile.positions.max()
        owned = tile.positions[:, -1:] // 16 + 1
        beyond = torch.arange(tile.block_tables.shape[1]) >= owned
        assert torch.equal(tile.block_tables == scrap, beyond)
    [decodes] = [tile for tile in tiles if tile.query_index.shape[1] == 1]
    assert decodes.query_index.flatten().tolist() == [300, 341], "single queries share one tile"


# ------------------------------------------------------------------------------------- two-phase attention


def shared_items(case: Case, rule: SharingRule | None) -> set[tuple[int, tuple[int, ...]]]:
    """(chunk, requests) of every item that several requests share."""
    plan = plan_step(case.batch, case.shape.block_size, rule)
    items = (
        (int(chunk), tuple(sorted(plan.members[first:end].tolist())))
        for kind, chunk, first, end in plan.items
        if kind == SHARED
    )
    return {item for item in items if len(item[1]) > 1}


LOOK_ALWAYS = SharingRule(token_bytes=0)


def test_groups_and_nested_prefixes_are_found_from_the_block_tables() -> None:
    spans = [(1099, 1100), (599, 600), (800, 801), (1030, 1031), (300, 301), (1000, 1001), (0, 40)]
    case = Case(Shape(2, 1, 8, 8, 16), spans, np.random.default_rng(12))
    share_blocks(case, [([0, 2, 5], 272), ([0, 5], 800), ([1, 4], 256), ([3, 1], 0)])
    expected = {(0, (0, 2, 5)), (1, (0, 5)), (2, (0, 5)), (0, (1, 4))}
    assert shared_items(case, LOOK_ALWAYS) == expected
    assert shared_items(case, None) == set()


def test_what_is_shared_is_not_looked_for_where_it_cannot_pay() -> None:
    case = Case(Shape(2, 1, 8, 8, 16), [(299, 300), (299, 300)], np.random.default_rng(13))
    share_blocks(case, [([0, 1], 272)])
    assert shared_items(case, SharingRule(token_bytes=100_000)) == {(0, (0, 1))}
    assert shared_items(case, SharingRule(token_bytes=10)) == set()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_sharing_chunks_changes_no_bit(seed: int) -> None:
    """Random groups of decodes and short suffixes beside a prompt; other heads, sizes and options each time."""
    rng = np.random.default_rng(seed)
    shape = replace(random_shape(rng), dtype=[torch.float32, torch.bfloat16][seed % 2])
    ends = rng.integers(300, 900, 5).tolist()
    spans = [*((end - int(rng.choice([1, 1, 7, 16])), end) for end in ends), (0, 50)]
    case = Case(shape, spans, rng)
    share_blocks(case, [([0, 1, 2], int(rng.integers(0, 300))), ([3, 4], int(rng.integers(0, 300)))])
    options = random_options(rng, shape)
    expected = case.run(CpuAttention(share=False), options)
    assert expected.isfinite().all()
    assert torch.equal(case.run(CpuAttention(), options), expected)


@pytest.mark.parametrize("mode", [None, PAIRS, WIDENED])
def test_a_key_that_is_no_number_is_not_hidden(mode: int | None) -> None:
    """Who sees it gets no number: a damaged model or block must not look like a sound one."""
    if mode == PAIRS and not HAS_BF16_DOT:
        pytest.skip("this processor multiplies no pairs of bfloat16")
    case = Case(Shape(4, 2, 64, 64, 16, torch.bfloat16), [(299, 300), (0, 100)], np.random.default_rng(17))
    for row, block in enumerate((3, 0)):
        case.key_blocks[case.batch.block_tables[row, block], 5] = torch.nan
    seen = case.run(CpuAttention(bfloat16=mode), AttentionOptions(0.125)).isnan().all(-1).all(-1)
    assert seen.tolist() == [True, *[False] * 5, *[True] * 95]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_joined_leading_chunks_are_all_chunks_once(seed: int) -> None:
    """And nobody's chunks are merged before those in front of them."""
    rng = np.random.default_rng(seed)
    ends = rng.integers(1, 1500, 6).tolist()
    spans = [*((max(0, end - int(rng.choice([1, 5, 16]))), end) for end in ends), (0, 200)]
    case = Case(Shape(2, 1, 8, 8, 16), spans, rng)
    groups = [([0, 1, 2], min(ends[:3])), ([3, 4], min(ends[3:5]))]
    share_blocks(case, [(rows, int(rng.integers(0, most + 1))) for rows, most in groups])
    step = plan_step(case.batch, 16, LOOK_ALWAYS)
    joined = join_leading(step, int(rng.choice([1, 2, 8])), int(rng.choice([1, 2, 3, 16])))
    seen: list[tuple[int, int]] = []
    merged = {request: num_leading for request, _, num_leading in joined.merges.tolist()}
    for kind, number, first, end in joined.items.tolist():
        if kind == FOLD:
            assert (first, end) == (0, step.requests[number, 1]) or number == len(spans) - 1
            seen += [(number, chunk) for chunk in range(step.requests[number, 3]) if first == 0]
            assert number not in merged
            continue
        chunks = range(number) if kind == LEADING else range(number, number + 1)
        for request in step.members[first:end].tolist():
            seen += [(request, chunk) for chunk in chunks]
            assert (kind == LEADING and merged[request] == number) or merged[request] <= number
    every = [(row, chunk) for row, num_chunks in enumerate(step.requests[:, 3].tolist()) for chunk in range(num_chunks)]
    assert sorted(seen) == every


def test_only_a_step_that_is_cut_as_the_one_before_is_joined_as_it() -> None:
    spans = [[(767, 768)] * 3, [(768, 769)] * 3, [(766, 767)] * 3, [(766, 768)] * 3, [(0, 200), *[(767, 768)] * 3]]
    sharing: list[list[int]] = [[], [0, 1], [], [1, 2], []]
    steps = []
    for ends, shared in [*((each, []) for each in spans), *((spans[0], each) for each in sharing)]:
        case = Case(Shape(2, 2, 8, 8, 16), ends, np.random.default_rng(16))
        share_blocks(case, [(shared, 512)] if shared else [])
        steps.append(plan_step(case.batch, 16, LOOK_ALWAYS))
    leading, teams = LeadingChunks(), [(2, 2), (2, 4), (1, 4), (1, 3)]
    for step, heads_and_threads in [*product(steps, teams), *((step, one) for one in teams for step in steps)]:
        joined, expected = leading.join(step, *heads_and_threads), join_leading(step, *heads_and_threads)
        assert np.array_equal(joined.items, expected.items)
        assert np.array_equal(joined.merges, expected.merges)
        assert leading.join(step, *heads_and_threads) is joined


def test_a_step_further_is_joined_as_the_one_before() -> None:
    leading = LeadingChunks()
    steps = [Case(Shape(2, 2, 8, 8, 16), [(end - 1, end)], np.random.default_rng(16)).batch for end in (766, 767)]
    before, after = (leading.join(plan_step(step, 16, None), 2, 4) for step in steps)
    assert before is after


def test_joining_is_left_where_threads_would_wait() -> None:
    """One long request for two heads: two threads take a head each, four share its chunks."""
    case = Case(Shape(2, 2, 8, 8, 16), [(4095, 4096)], np.random.default_rng(16))
    step = plan_step(case.batch, 16, None)
    assert [tuple(item) for item in join_leading(step, 2, 2).items.tolist()] == [(FOLD, 0, 0, 1)]
    assert len(join_leading(step, 2, 2).merges) == 0
    items = join_leading(step, 2, 4).items.tolist()
    assert items[0] == [LEADING, 8, 0, 1]
    assert items[1:] == [[SHARED, chunk, 0, 1] for chunk in range(8, 16)]


def test_a_request_of_one_chunk_leaves_no_partial_results() -> None:
    """For however many threads; one that shares its only chunk does, and so does a chunk behind a shared one."""
    spans = [(70, 71), (255, 256), (255, 256), (9, 10), (599, 600), (599, 600)]
    case = Case(Shape(2, 2, 8, 8, 16), spans, np.random.default_rng(16))
    share_blocks(case, [([1, 2], 256), ([4, 5], 512)])
    joined = join_leading(plan_step(case.batch, 16, LOOK_ALWAYS), 2, 16)
    folds = [item[1] for item in joined.items.tolist() if item[0] == FOLD]
    assert sorted(folds) == [0, 3]
    assert sorted(joined.merges[:, 0].tolist()) == [1, 2, 4, 5]


@pytest.mark.parametrize("num_threads", [1, 2, 16])
def test_nor_do_requests_that_all_have_one_chunk(num_threads: int) -> None:
    """One that shares its chunk with the beginning of a longer one leaves some, as that does."""
    shape, rng = Shape(2, 2, 8, 8, 16), np.random.default_rng(16)
    short = join_leading(plan_step(Case(shape, [(70, 71), (9, 12)], rng).batch, 16, LOOK_ALWAYS), 2, num_threads)
    assert sorted(short.items.tolist()) == [[FOLD, 0, 0, 1], [FOLD, 1, 0, 3]]
    assert len(short.merges) == 0
    case = Case(shape, [(255, 256), (299, 300)], rng)
    share_blocks(case, [([0, 1], 256)])
    shared = join_leading(plan_step(case.batch, 16, LOOK_ALWAYS), 2, num_threads)
    assert FOLD not in shared.items[:, 0]
    assert sorted(shared.merges[:, 0].tolist()) == [0, 1]


@pytest.mark.usefixtures("num_threads")
def test_the_number_of_threads_changes_no_bit() -> None:
    rng = np.random.default_rng(14)
    shape = Shape(6, 2, 64, 64, 16, torch.bfloat16)
    case = Case(shape, [(0, 300), (599, 600), (100, 108), (0, 20), (700, 701), (1590, 1600), (1300, 1301)], rng)
    share_blocks(case, [([5, 6], 1200)])
    options = AttentionOptions(0.125)
    results = []
    for num_threads in (1, 2, 3, 4, 16):
        torch.set_num_threads(num_threads)
        kernel = CpuAttention()
        results += [case.run(kernel, options) for _ in range(2)]  # it knows the number of heads from the first run
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_folds_are_smaller_where_many_heads_share_keys_which_changes_no_bit(dtype: torch.dtype) -> None:
    """A plan goes by the layers of the step before, so the first one has the usual size."""
    case = LatentCase(Shape(80, 1, 96, 64, 16, dtype), [(0, 150), (270, 310)], np.random.default_rng(21))
    kernel, options = CpuAttention(), AttentionOptions(0.1)
    usual = case.run(kernel, options)
    assert torch.equal(case.run(kernel, options), usual)
    sizes = [
        own.plan(case.batch, len(case.key_blocks) - 1, 16, torch.device("cpu")).step for own in (CpuAttention(), kernel)
    ]
    assert [(step.fold_queries, step.num_folds) for step in sizes] == [(64, 3 + 1), (16, 10 + 3)]


def test_threads_without_openmp_do_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "gnu_openmp", lambda: None)
    case = Case(Shape(6, 2, 64, 64, 16), [(0, 300), (599, 600)], np.random.default_rng(15))
    expected = case.run(CpuAttention(), AttentionOptions(0.125))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(case.run(CpuAttention(), AttentionOptions(0.125)), expected)


def test_explain_says_what_was_shared() -> None:
    case = Case(Shape(2, 1, 8, 8, 16), [(599, 600), (599, 600), (599, 600)], np.random.default_rng(16))
    kernel = CpuAttention()
    assert "nothing to share in 0 steps" in kernel.explain()
    share_blocks(case, [([0, 1, 2], 512)])
    case.run(kernel, AttentionOptions(1.0))
    assert "1 of 1 steps" in kernel.explain()
    assert "groups of 3 requests" in kernel.explain()
    assert "5 chunks of 256 tokens instead of 9" in kernel.explain()
    assert "plain torch" in ReferenceAttention().explain()


@pytest.mark.parametrize(
    ("dtype", "options", "reason"),
    [
        (torch.float32, AttentionOptions(1.0, slopes=torch.ones(2)), "takes no scores with linear biases"),
        (torch.float16, AttentionOptions(1.0), "takes no dtype='float16'; use 'float32', which is faster"),
        (torch.bfloat16, AttentionOptions(0.0), "takes no scale of scores that is not positive, such as 0"),
        (torch.float32, AttentionOptions(1.0, 4, 5.0, torch.ones(2)), None),
    ],
)
def test_a_kernel_says_what_it_refuses_and_the_choice_follows(
    dtype: torch.dtype, options: AttentionOptions, reason: str | None
) -> None:
    assert CpuAttention().why_not(KVFormat(dtype), options) == reason
    assert ReferenceAttention().why_not(KVFormat(dtype), options) is None
    layers, cpu = [AttentionOptions(1.0), options], torch.device("cpu")
    chosen = choose_kernel("auto", cpu, KVFormat(dtype), layers)
    assert isinstance(chosen, CpuAttention if reason is None else ReferenceAttention)
    if reason is not None:
        with pytest.raises(ConfigError, match=f"attention_kernel='cpu' {reason}, or leave"):
            choose_kernel("cpu", cpu, KVFormat(dtype), layers)


def test_the_reference_runs_where_the_compiled_kernel_cannot() -> None:
    assert isinstance(make_kernel("auto", torch.device("meta")), ReferenceAttention)
    assert isinstance(make_kernel("reference", torch.device("cpu")), ReferenceAttention)
    assert isinstance(make_kernel("auto", torch.device("cpu")), CpuAttention)
    with pytest.raises(ConfigError, match="attention_kernel='cpu'"):
        make_kernel("cpu", torch.device("meta"))
