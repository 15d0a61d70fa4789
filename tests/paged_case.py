"""Requests in the middle of their lives, with KV in blocks, and naive attention in float64 to compare with.

All KV that no query may see is NaN, the scrap block included: a kernel that lets it into a sum is caught.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from foreword.batch import NO_ENTRIES, Batch
from foreword.kernels.kv_format import KVBlocks, KVFormat, decode, encode
from foreword.kernels.reference import AttentionOptions
from foreword.kernels.select import AttentionKernel

CPU = torch.device("cpu")


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
            entries=NO_ENTRIES,
            token_ids=np.zeros(sum(end - start for start, end in spans), np.int32),
            positions=np.concatenate([np.arange(start, end, dtype=np.int32) for start, end in spans]),
            query_starts=np.cumsum([0, *(end - start for start, end in spans)], dtype=np.int32),
            group_tables=(tables,),
            write_from=np.zeros(len(spans), np.int32),
            copies=np.empty((0, 2), np.int32),
        )

    def _normal(self, rng: np.random.Generator, *size: int) -> Tensor:
        return torch.from_numpy(rng.standard_normal(size)).to(self.shape.dtype)

    def run(
        self,
        kernel: AttentionKernel,
        options: AttentionOptions,
        num_padding_rows: int = 0,
        device: torch.device = CPU,
    ) -> Tensor:
        self._give_up_unseen(options)
        query = torch.cat(self.queries)
        padding = torch.full((num_padding_rows, *query.shape[1:]), torch.nan, dtype=query.dtype)
        plan = kernel.plan(self.batch, len(self.key_blocks) - 1, self.shape.block_size, device)
        if options.sinks is not None:
            options = replace(options, sinks=options.sinks.to(device))
        if options.slopes is not None:
            options = replace(options, slopes=options.slopes.to(device))
        return kernel.attend(torch.cat((query, padding)).to(device), self.blocks(device), plan, options).cpu()

    def see_ahead(self, rng: np.random.Generator) -> None:
        """Let runs of each request's queries see each other, as tokens of a picture do."""
        seen_to = self.batch.positions + np.int32(1)
        for first, last in pairwise(self.batch.query_starts.tolist()):
            cuts = np.sort(rng.integers(first, last + 1, 4)).tolist()
            for begin, end in ((cuts[0], cuts[1]), (cuts[2], cuts[3])):
                seen_to[begin:end] = seen_to[begin:end].max(initial=0)
        self.batch = replace(self.batch, seen_to=seen_to)

    def blocks(self, device: torch.device = CPU) -> KVBlocks:
        """The pool on a device."""
        return KVBlocks.plain(self.key_blocks.to(device), self.value_blocks.to(device))

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
        seen_to = self.batch.positions + 1 if self.batch.seen_to is None else self.batch.seen_to
        for (start, end), queries, keys, values in zip(self.spans, self.queries, self.keys, self.values, strict=True):
            for position in range(start, end):
                seen = first_seen(position, options), int(seen_to[len(rows)])
                rows.append(
                    torch.stack(
                        [
                            self._head(queries[position - start], keys, values, head, seen, options)
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
        if options.slopes is not None:  # keys seen end with the query's own
            scores += options.slopes[head].double() * torch.arange(1 - len(scores), 1)
        if options.sinks is not None:
            scores = torch.cat((scores, options.sinks[head].double()[None]))
        weights = scores.softmax(0)[: seen[1] - seen[0]]
        return weights @ values[seen[0] : seen[1], kv_head].double()


class CodedCase(Case):
    """The same with KV in codes; the keys and values to compare with are what is read of them."""

    def __init__(self, shape: Shape, spans: Sequence[tuple[int, int]], rng: np.random.Generator) -> None:
        super().__init__(shape, spans, rng)
        self.keys, self.values = ([decode(*encode(own)) for own in rows] for rows in (self.keys, self.values))

    def blocks(self, device: torch.device = CPU) -> KVBlocks:
        kv_format, parts = KVFormat(torch.int8), (self.key_blocks, self.value_blocks)
        num_blocks, size, heads, _ = self.key_blocks.shape
        pages = [
            torch.empty(num_blocks, size * heads * kv_format.row_bytes(own.shape[3]), dtype=torch.uint8, device=device)
            for own in parts
        ]
        blocks = kv_format.view((pages[0], pages[1]), size, heads, (parts[0].shape[3], parts[1].shape[3]))
        blocks.write(torch.arange(num_blocks * size), parts[0].flatten(0, 1), parts[1].flatten(0, 1))
        return blocks


class LatentCase(Case):
    """The same with values that are the first elements of keys."""

    def __init__(self, shape: Shape, spans: Sequence[tuple[int, int]], rng: np.random.Generator) -> None:
        super().__init__(shape, spans, rng)
        self.values = [keys[..., : shape.value_dim] for keys in self.keys]

    def blocks(self, device: torch.device = CPU) -> KVBlocks:
        return KVBlocks.of_latents(self.key_blocks.to(device), self.shape.value_dim)


def random_shape(rng: np.random.Generator, dtype: torch.dtype = torch.float32) -> Shape:
    num_kv_heads = int(rng.choice([1, 2, 3]))
    return Shape(
        num_heads=num_kv_heads * int(rng.choice([1, 2, 5])),
        num_kv_heads=num_kv_heads,
        head_dim=int(rng.choice([8, 20, 64])),
        value_dim=int(rng.choice([8, 24, 64])),
        block_size=int(rng.choice([1, 3, 4, 16, 48])),
        dtype=dtype,
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


def share_blocks(case: Case, groups: Sequence[tuple[Sequence[int], int]]) -> None:
    """Make requests agree on their first tokens: (requests, tokens), later groups over earlier ones."""
    for (first, *others), num_tokens in groups:
        num_blocks = num_tokens // case.shape.block_size
        shared = num_blocks * case.shape.block_size
        for row in others:
            case.batch.block_tables[row, :num_blocks] = case.batch.block_tables[first, :num_blocks]
            case.keys[row][:shared] = case.keys[first][:shared]
            case.values[row][:shared] = case.values[first][:shared]
