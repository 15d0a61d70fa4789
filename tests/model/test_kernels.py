"""The contract of paged attention: every kernel agrees with naive attention in float64, whatever the shapes.

All KV that no query may see is NaN, the scrap block included: a kernel that lets it into a sum is caught.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foreword.batch import Batch
from foreword.errors import ConfigError
from foreword.model.kernels import cpu_attention, reference
from foreword.model.kernels.cpu_attention import CpuAttention
from foreword.model.kernels.cpu_layout import SHARED
from foreword.model.kernels.cpu_plan import SharingRule, plan_step
from foreword.model.kernels.reference import AttentionOptions, plan_tiles
from foreword.model.kernels.select import AttentionKernel, ReferenceAttention, make_kernel

KERNELS: dict[str, Callable[[], AttentionKernel]] = {
    "reference": ReferenceAttention,
    "cpu": CpuAttention,
    "cpu-widened": lambda: CpuAttention(multiply_pairs=False),
    "cpu-unshared": lambda: CpuAttention(share=False),
}


@pytest.fixture(params=sorted(KERNELS))
def kernel(request: pytest.FixtureRequest) -> AttentionKernel:
    return KERNELS[request.param]()


@pytest.fixture
def num_threads() -> Iterator[None]:
    """Gives torch back its number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Shape:
    """Sizes of one attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    block_size: int
    dtype: torch.dtype = torch.float32


def first_seen(position: int, options: AttentionOptions) -> int:
    """The first position that a query sees."""
    if options.local_chunk is not None:
        return position - position % options.local_chunk
    return 0 if options.sliding_window is None else max(0, position - options.sliding_window + 1)


class Case:
    """Some requests in the middle of their lives: KV up to `start` is in blocks, `start` to `end` is asked."""

    def __init__(self, shape: Shape, spans: Sequence[tuple[int, int]], rng: np.random.Generator) -> None:
        self.shape, self.spans = shape, spans
        lengths = [end for _, end in spans]
        num_blocks = [math.ceil(length / shape.block_size) for length in lengths]
        pool = sum(num_blocks) + 3
        ids = rng.permutation(pool).astype(np.int32)
        tables = rng.integers(0, pool, (len(spans), max(num_blocks))).astype(np.int32)  # ends are meaningless
        self.keys = [self._normal(rng, length, shape.num_kv_heads, shape.head_dim) for length in lengths]
        self.values = [self._normal(rng, length, shape.num_kv_heads, shape.value_dim) for length in lengths]
        self.queries = [self._normal(rng, end - start, shape.num_heads, shape.head_dim) for start, end in spans]
        self.key_blocks = torch.full(
            (pool + 1, shape.block_size, shape.num_kv_heads, shape.head_dim), torch.nan, dtype=shape.dtype
        )
        self.value_blocks = torch.full(
            (pool + 1, shape.block_size, shape.num_kv_heads, shape.value_dim), torch.nan, dtype=shape.dtype
        )
        for row, length in enumerate(lengths):
            first = sum(num_blocks[:row])
            tables[row, : num_blocks[row]] = ids[first : first + num_blocks[row]]
            positions = np.arange(length)
            blocks, offsets = tables[row, positions // shape.block_size], positions % shape.block_size
            self.key_blocks[blocks, offsets] = self.keys[row]
            self.value_blocks[blocks, offsets] = self.values[row]
        self.batch = Batch(
            entries=(),
            token_ids=np.zeros(sum(end - start for start, end in spans), np.int32),
            positions=np.concatenate([np.arange(start, end, dtype=np.int32) for start, end in spans]),
            query_starts=np.cumsum([0, *(end - start for start, end in spans)], dtype=np.int32),
            group_tables=(tables,),
            write_from=np.zeros(len(spans), np.int32),
            copies=np.empty((0, 2), np.int32),
        )

    def _normal(self, rng: np.random.Generator, *size: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal(size)).to(self.shape.dtype)

    def run(self, kernel: AttentionKernel, options: AttentionOptions, num_padding_rows: int = 0) -> Tensor:
        self._give_up_unseen(options)
        query = torch.cat(self.queries)
        padding = torch.full((num_padding_rows, *query.shape[1:]), torch.nan, dtype=query.dtype)
        plan = kernel.plan(self.batch, len(self.key_blocks) - 1, self.shape.block_size, query.device)
        return kernel.attend(torch.cat((query, padding)), self.key_blocks, self.value_blocks, plan, options)

    def _owned(self, row: int) -> np.ndarray:
        """The part of a request's table that means something."""
        return self.batch.block_tables[row, : math.ceil(self.spans[row][1] / self.shape.block_size)]

    def _give_up_unseen(self, options: AttentionOptions) -> None:
        """Blocks before everything that a request's queries see are scrap in its table, and NaN."""
        for row, (start, _) in enumerate(self.spans):
            num_unseen = first_seen(start, options) // self.shape.block_size
            given_up = self.batch.block_tables[row, :num_unseen]
            kept = [
                self._owned(other)[first_seen(self.spans[other][0], options) // self.shape.block_size :]
                for other in range(len(self.spans))
            ]
            unseen = given_up[~np.isin(given_up, np.concatenate(kept))]  # by any request that shares them
            self.key_blocks[unseen], self.value_blocks[unseen] = torch.nan, torch.nan
            given_up[:] = len(self.key_blocks) - 1

    def expected(self, options: AttentionOptions) -> Tensor:
        """One query at a time, one head at a time, in float64."""
        rows = []
        for (start, end), queries, keys, values in zip(self.spans, self.queries, self.keys, self.values, strict=True):
            for position in range(start, end):
                first = first_seen(position, options)
                rows.append(
                    torch.stack(
                        [
                            self._head(queries[position - start], keys, values, head, (first, position + 1), options)
                            for head in range(self.shape.num_heads)
                        ]
                    )
                )
        return torch.stack(rows)

    def _head(
        self, query: Tensor, keys: Tensor, values: Tensor, head: int, seen: tuple[int, int], options: AttentionOptions
    ) -> Tensor:
        kv_head = head // (self.shape.num_heads // self.shape.num_kv_heads)
        scores = keys[seen[0] : seen[1], kv_head].double() @ query[head].double() * options.scale
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        if options.sinks is not None:
            scores = torch.cat((scores, options.sinks[head].double()[None]))
        weights = scores.softmax(0)[: seen[1] - seen[0]]
        return weights @ values[seen[0] : seen[1], kv_head].double()


def random_shape(rng: np.random.Generator) -> Shape:
    num_kv_heads = int(rng.choice([1, 2, 3]))
    return Shape(
        num_heads=num_kv_heads * int(rng.choice([1, 2, 5])),
        num_kv_heads=num_kv_heads,
        head_dim=int(rng.choice([8, 20, 64])),
        value_dim=int(rng.choice([8, 24, 64])),
        block_size=int(rng.choice([1, 3, 4, 16, 48])),
    )


def random_spans(rng: np.random.Generator, longest: int) -> list[tuple[int, int]]:
    """Decodes (one query at the end), whole prompts and chunks in the middle, in any order."""
    spans = []
    for _ in range(int(rng.integers(1, 6))):
        end = int(rng.integers(1, longest + 1))
        start = int(rng.choice([0, end - 1, rng.integers(0, end)]))
        spans.append((max(start, end - 40), end))
    return spans


def random_options(rng: np.random.Generator, shape: Shape) -> AttentionOptions:
    def sometimes(value: float) -> float | None:
        return value if rng.random() < 0.5 else None

    window, softcap = sometimes(int(rng.integers(1, 300))), sometimes(float(rng.uniform(0.5, 5.0)))
    sinks = torch.from_numpy(rng.standard_normal(shape.num_heads)) if rng.random() < 0.5 else None
    scale = float(rng.choice([shape.head_dim**-0.5, 1.0]))
    if window is not None and rng.random() < 0.4:
        return AttentionOptions(scale, None, softcap, sinks, local_chunk=int(window))
    return AttentionOptions(scale, None if window is None else int(window), softcap, sinks)


@pytest.mark.parametrize("seed", range(40))
def test_random_ragged_batches_agree_with_naive_attention(kernel: AttentionKernel, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = random_shape(rng)
    case = Case(shape, random_spans(rng, longest=30 if seed % 2 else 600), rng)
    options = random_options(rng, shape)
    result = case.run(kernel, options)
    torch.testing.assert_close(result.double(), case.expected(options), rtol=1e-4, atol=1e-5)


@settings(max_examples=40, deadline=None)
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
    torch.testing.assert_close(result.double(), case.expected(options), rtol=1e-4, atol=2e-5)


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


@pytest.mark.parametrize("seed", range(12))
def test_pairs_of_bfloat16_round_each_weight_once(seed: int) -> None:
    """The bound: a weight is off by at most 2**-9 of itself, and so is the sum that it is divided by."""
    rng = np.random.default_rng(100 + seed)
    shape = replace(random_shape(rng), dtype=torch.bfloat16)
    case = Case(shape, random_spans(rng, longest=600), rng)
    options = random_options(rng, shape)
    result, expected = case.run(CpuAttention(), options).double(), case.expected(options)
    case.values = [values.abs() for values in case.values]
    assert ((result - expected).abs() <= 2**-8 * (expected.abs() + case.expected(options)) + 1e-6).all()


SPAN_GRID = {
    "one token": [(0, 1)],
    "one whole chunk of KV": [(0, 256)],
    "the first query after a chunk": [(256, 257)],
    "a tile that ends where a chunk ends": [(128, 256)],
    "a tile that straddles two chunks": [(200, 300)],
    "decodes of very different lengths": [(0, 1), (511, 512), (512, 513), (3, 4)],
    "more queries than a tile takes": [(0, 300), (40, 41)],
}


@pytest.mark.parametrize("spans", SPAN_GRID.values(), ids=SPAN_GRID)
@pytest.mark.parametrize("reach", [None, 1, 8, 256])
@pytest.mark.parametrize("kind", ["sliding_window", "local_chunk"])
def test_the_edges_of_chunks_and_tiles(
    kernel: AttentionKernel, spans: list[tuple[int, int]], kind: str, reach: int | None
) -> None:
    case = Case(Shape(4, 2, 16, 16, 16), spans, np.random.default_rng(7))
    options = AttentionOptions(0.25, **{kind: reach})
    torch.testing.assert_close(case.run(kernel, options).double(), case.expected(options), rtol=1e-4, atol=1e-5)


def test_huge_scores_neither_overflow_nor_vanish(kernel: AttentionKernel) -> None:
    case = Case(Shape(2, 1, 16, 16, 4), [(0, 40), (290, 300)], np.random.default_rng(8))
    options = AttentionOptions(scale=1e4)
    torch.testing.assert_close(case.run(kernel, options).double(), case.expected(options), rtol=1e-3, atol=1e-3)


def test_a_sink_of_great_weight_takes_everything(kernel: AttentionKernel) -> None:
    case = Case(Shape(2, 1, 16, 16, 4), [(0, 40)], np.random.default_rng(9))
    result = case.run(kernel, AttentionOptions(0.25, sinks=torch.tensor([200.0, -200.0])))
    assert torch.equal(result[:, 0], torch.zeros_like(result[:, 0]))
    without = case.run(kernel, AttentionOptions(0.25))
    torch.testing.assert_close(result[:, 1], without[:, 1])


def test_rows_of_padding_change_nothing_and_come_back_as_zeros(kernel: AttentionKernel) -> None:
    case = Case(Shape(4, 2, 16, 16, 4), [(0, 9), (20, 21)], np.random.default_rng(10))
    options = AttentionOptions(0.25)
    padded = case.run(kernel, options, num_padding_rows=6)
    assert torch.equal(padded[:10], case.run(kernel, options))
    assert torch.equal(padded[10:], torch.zeros_like(padded[10:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(8))
def test_a_query_has_the_same_bits_in_every_batch(kernel: AttentionKernel, seed: int, dtype: torch.dtype) -> None:
    """One request whole, in two pieces, and one query at a time among others."""
    rng = np.random.default_rng(200 + seed)
    shape = Shape(6, 2, int(rng.choice([16, 20, 64])), 24, int(rng.choice([4, 16])), dtype)
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


def test_tiles_cover_every_query_once_and_hide_the_ends_of_tables() -> None:
    spans = [(0, 300), (9, 10), (50, 90), (511, 512)]
    case = Case(Shape(2, 1, 8, 8, 16), spans, np.random.default_rng(11))
    scrap = len(case.key_blocks) - 1
    tiles = plan_tiles(case.batch, scrap, 16, torch.device("cpu"))
    rows = torch.cat([tile.query_index.flatten() for tile in tiles])
    assert rows.sort().values.tolist() == list(range(case.batch.num_tokens))
    for tile in tiles:
        assert tile.query_index.shape[1] <= reference.TILE_QUERIES
        assert tile.first_position == tile.positions.min()
        assert tile.last_position == tile.positions.max()
        owned = tile.positions[:, -1:] // 16 + 1
        beyond = torch.arange(tile.block_tables.shape[1]) >= owned
        assert torch.equal(tile.block_tables == scrap, beyond)
    [decodes] = [tile for tile in tiles if tile.query_index.shape[1] == 1]
    assert decodes.query_index.flatten().tolist() == [300, 341], "single queries share one tile"


# ------------------------------------------------------------------------------------- two-phase attention


def share_blocks(case: Case, groups: Sequence[tuple[Sequence[int], int]]) -> None:
    """Make requests agree on their first tokens: (requests, tokens), later groups over earlier ones."""
    for (first, *others), num_tokens in groups:
        num_blocks = num_tokens // case.shape.block_size
        shared = num_blocks * case.shape.block_size
        for row in others:
            case.batch.block_tables[row, :num_blocks] = case.batch.block_tables[first, :num_blocks]
            case.keys[row][:shared] = case.keys[first][:shared]
            case.values[row][:shared] = case.values[first][:shared]


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


@settings(max_examples=40, deadline=None)
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


@pytest.mark.usefixtures("num_threads")
def test_the_number_of_threads_changes_no_bit() -> None:
    rng = np.random.default_rng(14)
    shape = Shape(6, 2, 64, 64, 16, torch.bfloat16)
    case = Case(shape, [(0, 300), (599, 600), (100, 108), (0, 20), (700, 701)], rng)
    options = AttentionOptions(0.125)
    results = []
    for num_threads in (1, 2, 3, 4):
        torch.set_num_threads(num_threads)
        results.append(case.run(CpuAttention(), options))
    assert all(torch.equal(result, results[0]) for result in results)


def test_threads_without_openmp_do_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_attention, "_gnu_parallel", lambda: None)
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


def test_the_reference_runs_where_the_compiled_kernel_cannot() -> None:
    assert isinstance(make_kernel("auto", torch.device("meta")), ReferenceAttention)
    assert isinstance(make_kernel("reference", torch.device("cpu")), ReferenceAttention)
    assert isinstance(make_kernel("auto", torch.device("cpu")), CpuAttention)
    with pytest.raises(ConfigError, match="attention_kernel='cpu'"):
        make_kernel("cpu", torch.device("meta"))
