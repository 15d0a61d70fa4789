"""The contract of paged attention: every kernel agrees with naive attention in float64, whatever the shapes.

All KV that no query may see is NaN, the scrap block included: a kernel that lets it into a sum is caught.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from foreword.batch import Batch
from foreword.model.kernels import reference
from foreword.model.kernels.cpu_attention import CpuAttention
from foreword.model.kernels.reference import AttentionOptions, plan_tiles
from foreword.model.kernels.select import AttentionKernel, ReferenceAttention

KERNELS: dict[str, Callable[[], AttentionKernel]] = {
    "reference": ReferenceAttention,
    "cpu": CpuAttention,
    "cpu-widened": lambda: CpuAttention(multiply_pairs=False),
    "cpu-unshared": lambda: CpuAttention(share=False),
}


@pytest.fixture(params=sorted(KERNELS))
def kernel(request: pytest.FixtureRequest) -> AttentionKernel:
    return KERNELS[request.param]()


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
            block_tables=tables,
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

    def _give_up_unseen(self, options: AttentionOptions) -> None:
        """Blocks before everything that a request's queries see are scrap in its table, and NaN."""
        for row, (start, _) in enumerate(self.spans):
            num_unseen = first_seen(start, options) // self.shape.block_size
            given_up = self.batch.block_tables[row, :num_unseen]
            self.key_blocks[given_up], self.value_blocks[given_up] = torch.nan, torch.nan
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
