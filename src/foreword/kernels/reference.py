"""Paged attention in plain torch, with arithmetic that is fixed per absolute KV position.

The promise is that a query's result has the same bits however its step was put together. Three rules
keep it:

1. KV is cut at absolute positions into chunks of a fixed number of tokens. A query's result is the
   merge, in ascending order, of one partial result per chunk (m = row maximum of the scores,
   n = row sum of exp(score - m), o = exp(score - m) V; ChunkAttention's formulas). A chunk that a query
   may not see at all adds exactly nothing, so neighbours in the tile do not matter.
2. Each matrix product has a fixed inner length and output width; its number of rows is padded to a
   multiple of 16. With such numbers, the CPU's matrix product gives each row the same bits whatever
   the number of rows (docs/decisions/0002-exactness.md has the measurements). There are always at
   least two matrices in a product: the library computes a single one differently.
3. Everything else works on one row at a time, in float32, and never as a fused multiply-add that only some code
   paths have.

    positions     0        256       512       768
    chunks        |----0----|----1----|----2----|
    tile of queries               qqqqqqqq            chunk 0: all seen; 1: partly masked; 2: skipped
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.batch import Batch, IntArray
from foreword.kernels.kv_format import KVBlocks

CHUNK_TOKENS = 256
"""The number of tokens in a chunk of KV (rounded down to whole blocks, at least one block)."""
TILE_QUERIES = 256
"""The most queries of one request that share a tile."""
ROW_MULTIPLE = 16
_LOWEST = torch.finfo(torch.float32).min
Position = TypeVar("Position", int, Tensor)


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """A layer's options of attention, in addition to the causal mask."""

    scale: float
    sliding_window: int | None = None
    """A query at position p sees positions p - sliding_window + 1 to p; None: there is no window."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap); None: scores stay as they are."""
    sinks: Tensor | None = None
    """[heads]: for each head, one more score in the softmax. It lowers the weights of the keys, and has no value
    itself."""
    local_chunk: int | None = None
    """A query at position p sees positions p // local_chunk * local_chunk to p. A layer with local chunks has no
    window."""
    slopes: Tensor | None = None
    """[heads]: a score is raised by slope * (key's position - query's position), as in ALiBi (arXiv 2108.12409)."""

    def modify(self, scores: Tensor, distances: Tensor | None) -> None:
        """Apply cap and bias to scaled scores [requests, kv_heads, queries, groups, keys], in place.

        score = cap * tanh(scale * product / cap) + slope * (key's position - query's position)

        The bias depends on the distance, not on the key's position, although both would give the same softmax. So the
        bias is small where weights are large, and independent of the rest of the batch. `distances` [requests, queries,
        keys] is needed only with slopes.
        """
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.slopes is not None and distances is not None:
            slopes = self.slopes.float().view(1, scores.shape[1], 1, -1, 1)
            scores.add_(slopes * distances[:, None, :, None].float())


@dataclass(frozen=True, slots=True)
class TileShape:
    """One tile's sizes, and the positions that bound its chunks."""

    num_requests: int
    num_queries: int
    num_blocks: int
    first_position: int
    last_position: int
    """The last position that a query sees. The tile visits chunks from the first seen position up to this position."""
    shortest: int
    """The last position of the shortest request, whose KV at later positions may be unwritten."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries of some requests that are computed together: the same number from each request."""

    shape: TileShape
    query_index: Tensor
    """[requests, queries]: rows of the flattened batch."""
    positions: Tensor
    """[requests, queries], ascending."""
    seen_to: Tensor
    """[requests, queries]: the position after the last position that each query sees, ascending."""
    block_tables: Tensor
    """[requests, blocks]: physical blocks; the scrap block where a table has ended or given up a block."""


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Tiles before they are on a device: query index, positions, `seen_to` and block tables, tile after tile."""

    shapes: tuple[TileShape, ...]
    data: IntArray

    @property
    def most(self) -> int:
        """See `select.HostPlan`. All plans of one shape have the same length."""
        return len(self.data)

    def at(self, metadata: Tensor) -> list[Tile]:
        """The tiles for `data` after it was copied into `metadata`, on any device."""
        tiles, start = [], 0
        for shape in self.shapes:
            size = shape.num_requests * shape.num_queries
            sizes = (size, size, size, shape.num_requests * shape.num_blocks)
            index, positions, seen_to, tables = metadata[start : start + sum(sizes)].split_with_sizes(sizes)
            start += sum(sizes)
            tiles.append(
                Tile(
                    shape,
                    index.view(shape.num_requests, -1).long(),
                    positions.view(shape.num_requests, -1),
                    seen_to.view(shape.num_requests, -1),
                    tables.view(shape.num_requests, -1).long(),
                )
            )
        return tiles


def plan_tiles(batch: Batch, scrap_block: int, block_size: int) -> TilePlan:
    """Cut a batch into tiles: one tile for all single queries, and tiles for each request with more queries.

    Single queries of different requests share a tile because they are the same computation with different blocks. The
    longest context decides how many chunks the tile visits.
    """
    starts, ends = batch.query_starts[:-1], batch.query_starts[1:]
    lengths = ends - starts
    shapes: list[TileShape] = []
    parts: list[IntArray] = []

    def add(rows: npt.NDArray[np.intp], query_index: IntArray) -> None:
        positions = batch.positions[query_index]
        seen_to = positions + 1 if batch.seen_to is None else batch.seen_to[query_index]
        ends = seen_to[:, -1]
        last = int(ends.max()) - 1
        num_blocks = last // block_size + 1
        tables = _tables(batch, rows, -(-ends // block_size), num_blocks, scrap_block)
        num_requests, num_queries = query_index.shape
        first, shortest = int(positions.min()), int(ends.min()) - 1
        shapes.append(TileShape(num_requests, num_queries, num_blocks, first, last, shortest))
        parts.extend((query_index, positions, seen_to, tables))

    single = np.flatnonzero(lengths == 1)
    if single.size:
        add(single, starts[single][:, None])
    for row in np.flatnonzero(lengths > 1):
        for start in range(starts[row], ends[row], TILE_QUERIES):
            end = min(start + TILE_QUERIES, int(ends[row]))
            add(np.array([row]), np.arange(start, end, dtype=np.int32)[None])
    return TilePlan(tuple(shapes), np.concatenate([part.ravel() for part in parts]))


def plan_decoding_tile(batch: Batch, scrap_block: int, block_size: int, *, num_rows: int, max_tokens: int) -> TilePlan:
    """Plan one tile of `num_rows` single queries, which visits every chunk of `max_tokens` tokens."""
    num_own, num_blocks = batch.num_tokens, -(-max_tokens // block_size)
    positions = np.zeros(num_rows, np.int32)
    positions[:num_own] = batch.positions
    tables = np.full((num_rows, num_blocks), scrap_block, np.int32)
    tables[:num_own] = _tables(batch, np.arange(num_own), batch.positions // block_size + 1, num_blocks, scrap_block)
    shape = TileShape(num_rows, 1, num_blocks, 0, max_tokens - 1, 0)
    queries = np.arange(num_rows, dtype=np.int32), positions, positions + np.int32(1)
    return TilePlan((shape,), np.concatenate((*queries, tables.ravel())))


def _tables(batch: Batch, rows: npt.NDArray[np.intp], owned: IntArray, num_blocks: int, scrap_block: int) -> IntArray:
    """The first blocks of some requests, [rows, num_blocks]; the scrap block follows the blocks that they own."""
    tables = np.full((len(rows), num_blocks), scrap_block, np.int32)
    present = batch.block_tables[rows, :num_blocks]
    tables[:, : present.shape[1]] = present
    tables[np.arange(num_blocks) >= owned[:, None]] = scrap_block
    return tables


def paged_attention(query: Tensor, blocks: KVBlocks, tiles: list[Tile], options: AttentionOptions) -> Tensor:
    """Causal attention of a flattened batch over paged KV.

    query         [tokens, heads, key_dim]
    Returns       [tokens, heads, value_dim] in query's dtype; rows that are in no tile are 0.
    """
    output = query.new_zeros(*query.shape[:2], blocks.value_dim)
    for tile in tiles:
        output[tile.query_index] = _attend_tile(query, blocks, tile, options).to(query.dtype)
    return output


def _attend_tile(query: Tensor, kv: KVBlocks, tile: Tile, options: AttentionOptions) -> Tensor:
    """The result of one tile, [requests, queries, heads, value_dim], float32."""
    num_requests, num_queries = tile.query_index.shape
    block_size, num_kv_heads = kv.block_size, kv.num_kv_heads
    num_groups = query.shape[1] // num_kv_heads  # query heads per KV head
    num_rows = num_queries * num_groups

    # [requests * kv_heads, rows, head_dim]; a row is a (query, group); rows are padded to a multiple of ROW_MULTIPLE
    rows = query[tile.query_index].float().mul_(options.scale)
    rows = rows.view(num_requests, num_queries, num_kv_heads, num_groups, -1).permute(0, 2, 1, 3, 4)
    rows = rows.reshape(num_requests * num_kv_heads, num_rows, -1)
    padding = -num_rows % ROW_MULTIPLE
    if padding:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, padding))

    peak = rows.new_full((*rows.shape[:2], 1), _LOWEST)  # m of the merge so far
    total = torch.zeros_like(peak)  # n
    mixed = rows.new_zeros(*rows.shape[:2], kv.value_dim)  # o

    chunk_blocks = max(1, CHUNK_TOKENS // block_size)
    chunk = chunk_blocks * block_size
    first_seen = _first_seen(tile.shape.first_position, options)
    for start in range(max(0, first_seen) // chunk * chunk, tile.shape.last_position + 1, chunk):
        at = start // block_size
        blocks = tile.block_tables[:, at : at + chunk_blocks]
        keys, values = (_in_chunk(part, chunk) for part in kv.read_blocks(blocks))
        hidden = _hidden(tile, start, chunk, options)
        if start + chunk - 1 > tile.shape.shortest or start < _first_seen(tile.shape.last_position, options):
            _zero_unseen(values, tile, start, options)
        scores = _products(rows, keys.transpose(1, 2))
        # [requests, kv_heads, queries, groups, chunk]; padding rows stay as they are
        view = scores.view(num_requests, num_kv_heads, num_rows + padding, chunk)[:, :, :num_rows]
        view = torch.unflatten(view, 2, (num_queries, num_groups))
        options.modify(view, None if options.slopes is None else _distances(tile, start, chunk))
        if hidden is not None:
            view.masked_fill_(hidden[:, None, :, None, :], -torch.inf)

        # The chunk's partial result m, n, o. A row that may see nothing of the chunk has n = 0, o = 0 and
        # the lowest m, so the merge multiplies what came before by exactly 1 and adds exactly 0.
        chunk_peak = scores.amax(-1, keepdim=True).clamp_(min=_LOWEST)
        weights = scores.sub_(chunk_peak).exp_()
        new_peak = torch.maximum(peak, chunk_peak)
        decay, gain = peak.sub_(new_peak).exp_(), chunk_peak.sub_(new_peak).exp_()
        total = total.mul_(decay).add_(weights.sum(-1, keepdim=True).mul_(gain))
        mixed = mixed.mul_(decay).add_(_products(weights, values).mul_(gain))
        peak = new_peak

    if options.sinks is not None:
        sinks = options.sinks.float().view(1, num_kv_heads, 1, num_groups)
        sinks = sinks.expand(num_requests, -1, num_queries, -1).reshape(num_requests * num_kv_heads, num_rows, 1)
        sinks = torch.nn.functional.pad(sinks, (0, 0, 0, padding))
        new_peak = torch.maximum(peak, sinks)
        decay = peak.sub_(new_peak).exp_()
        total = total.mul_(decay).add_(sinks.sub(new_peak).exp_())
        mixed = mixed.mul_(decay)

    result = mixed.div_(total)[:, :num_rows]
    result = result.view(num_requests, num_kv_heads, num_queries, num_groups, -1).permute(0, 2, 1, 3, 4)
    return result.reshape(num_requests, num_queries, num_kv_heads * num_groups, -1)


def _products(left: Tensor, right: Tensor) -> Tensor:
    """Products of matrices, [n, rows, inner] x [n, inner, width], with equal bits whatever n is.

    With three or more threads, the library cuts the inner length of a single product among them. It does not do so with
    several products. So a single product (one KV head, one request) is computed as two halves.
    """
    if len(left) > 1:
        return torch.bmm(left, right)
    num_rows = left.shape[1]
    halves = torch.nn.functional.pad(left, (0, 0, 0, -num_rows % (2 * ROW_MULTIPLE))).view(2, -1, left.shape[2])
    return torch.bmm(halves, right.expand(2, -1, -1)).view(1, -1, right.shape[2])[:, :num_rows]


def _in_chunk(rows: Tensor, chunk: int) -> Tensor:
    """Rows [requests, tokens, kv_heads, dim] as [requests * kv_heads, chunk, dim]; zeros where tables have ended."""
    flat = rows.permute(0, 2, 1, 3).flatten(0, 1)
    missing = chunk - flat.shape[1]
    return torch.nn.functional.pad(flat, (0, 0, 0, missing)) if missing else flat


def _first_seen(position: Position, options: AttentionOptions) -> Position:
    """The first position that a query at `position` sees; a negative result stands for 0."""
    if options.sliding_window is not None:
        return position - options.sliding_window + 1
    if options.local_chunk is not None:
        return position // options.local_chunk * options.local_chunk
    return 0 * position


def _distances(tile: Tile, start: int, chunk: int) -> Tensor:
    """Positions of a chunk's keys minus the queries' positions, [requests, queries, chunk]."""
    return torch.arange(start, start + chunk, device=tile.positions.device) - tile.positions[..., None]


def _hidden(tile: Tile, start: int, chunk: int, options: AttentionOptions) -> Tensor | None:
    """Which positions of a chunk each query must not see, [requests, queries, chunk]; None: queries see all of them."""
    if start + chunk - 1 <= tile.shape.first_position and _first_seen(tile.shape.last_position, options) <= start:
        return None
    kv = torch.arange(start, start + chunk, device=tile.positions.device)
    queries = tile.positions[..., None]
    hidden = kv >= tile.seen_to[..., None]
    if options.sliding_window is not None or options.local_chunk is not None:
        hidden |= kv < _first_seen(queries, options)
    return hidden


def _zero_unseen(values: Tensor, tile: Tile, start: int, options: AttentionOptions) -> None:
    """Set values to 0 if no query of a request sees them: their weight is 0, but 0 * NaN is not 0."""
    kv = torch.arange(start, start + values.shape[1], device=values.device)
    unseen = (kv >= tile.seen_to[:, -1:]) | (kv < _first_seen(tile.positions[:, :1], options))
    values.masked_fill_(unseen.repeat_interleave(len(values) // len(unseen), 0)[..., None], 0.0)
