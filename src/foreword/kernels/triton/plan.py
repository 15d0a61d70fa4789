"""A step's metadata for the Triton kernels: one int32 array, copied to the device once and used by every layer.

The parts follow each other without gaps:

    header      [HEADER]            the numbers of entries in use, and the parts' beginnings
    folds       [folds, 4]          request, first query, queries, position of the first query    (prefill)
    queries     [queries, 4]        row of the batch, position, slot of chunk 0, 0; queries of a request are neighbours,
                                    and so are queries of requests that share chunks. Position -1: a row of padding
    starts      [requests]          a request's first row of the batch
    items       [items, 4]          request whose blocks are read, chunk, first query, queries    (decoding)
    tables      [requests, width]   block ids

Under CUDA graphs the shapes must not change from step to step: a plan in `decoding_shape` reserves room for the largest
step that a graph serves. Its array ends with the last entry in use. Items and tables, which are most of the array, come
last, and kernels read their places, numbers and width from the header.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from foreword.batch import Batch, IntArray
from foreword.kernels.step_plan import CHUNK, StepPlan

HEADER = 12
NUM_FOLDS, NUM_ITEMS, NUM_QUERIES, FOLDS, ITEMS, QUERIES, STARTS, TABLES, TABLE_WIDTH = range(9)
"""Places in the header."""
UNUSED_POSITION = -1


@dataclass(frozen=True, slots=True)
class PlanShape:
    """Sizes of a plan's parts; plans of one shape can take each other's place in a CUDA graph."""

    num_tokens: int
    num_requests: int
    table_width: int
    num_folds: int
    num_items: int
    num_queries: int
    num_slots: int
    block_size: int

    @property
    def folds(self) -> int:
        """The index in the plan's array at which `folds` begins. The properties below are such indices, too."""
        return HEADER

    @property
    def queries(self) -> int:
        return self.folds + 4 * self.num_folds

    @property
    def starts(self) -> int:
        return self.queries + 4 * self.num_queries

    @property
    def items(self) -> int:
        return self.starts + self.num_requests

    @property
    def size(self) -> int:
        """The most int32 numbers of the whole plan."""
        return self.items + 4 * self.num_items + self.num_requests * self.table_width


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """A step on the device."""

    shape: PlanShape
    metadata: Tensor
    """[shape.size] int32, contiguous, at a multiple of 16 bytes. An array that only this plan uses may be shorter."""


@dataclass(frozen=True, slots=True)
class HostPlan:
    """A step before it is copied to the device. `data` may be copied into a buffer that a graph has captured."""

    shape: PlanShape
    data: IntArray
    """[n], n at most shape.size"""

    @property
    def most(self) -> int:
        """The greatest number of elements that the `data` of a plan with this `shape` has."""
        return self.shape.size

    def to(self, device: torch.device) -> TritonPlan:
        """Copy the plan alone to a device, without other arrays."""
        return TritonPlan(self.shape, torch.from_numpy(self.data).to(device))

    def at(self, metadata: Tensor) -> TritonPlan:
        """The plan whose data is copied to `metadata`, [shape.size] int32 on the device."""
        assert metadata.shape == (self.shape.size,)
        assert metadata.dtype == torch.int32
        assert metadata.is_contiguous()
        return TritonPlan(self.shape, metadata)


def decoding_shape(num_rows: int, max_tokens: int, block_size: int) -> PlanShape:
    """The shape with room for `num_rows` requests of at most `max_tokens` tokens, each of which decodes one token."""
    num_chunks = num_rows * -(-max_tokens // CHUNK)
    return PlanShape(
        num_tokens=num_rows,
        num_requests=num_rows,
        table_width=-(-max_tokens // block_size),
        num_folds=0,
        num_items=num_chunks,
        num_queries=num_rows,
        num_slots=num_chunks,
        block_size=block_size,
    )


def fitting_shape(step: StepPlan, tile_queries: int) -> PlanShape:
    """The smallest shape that holds a step."""
    num_requests, width = step.tables.shape
    return PlanShape(
        num_tokens=step.num_tokens,
        num_requests=num_requests,
        table_width=width,
        num_folds=step.num_folds,
        num_items=len(_items(step, tile_queries)),
        num_queries=len(step.merges),
        num_slots=step.num_slots,
        block_size=step.block_size,
    )


def lay_out(step: StepPlan, tile_queries: int, shape: PlanShape) -> HostPlan:
    """A step's plan as one array, in a shape that holds it.

    `tile_queries`: the most queries of an item; it changes no result. Tables are cut to the shape's width, because
    blocks after a request's last token have no meaning.
    """
    folds = step.items[: step.num_folds, 1:]
    items = _items(step, tile_queries)
    num_queries = len(step.merges)
    assert len(folds) == shape.num_folds
    assert step.num_slots <= shape.num_slots
    data = _frame(shape, len(items), num_queries, step.tables)
    if len(folds):
        part = data[shape.folds : shape.queries].reshape(-1, 4)
        part[:, :3] = folds
        part[:, 3] = step.requests[folds[:, 0], 2] + folds[:, 1]
    numbers = step.merges[:, 1]
    row, _, position, num_chunks, slot = step.requests[step.merges[:, 0]].T
    part = data[shape.queries : shape.starts].reshape(-1, 4)
    part[:num_queries, 0] = row + numbers
    part[:num_queries, 1] = position + numbers
    part[:num_queries, 2] = slot + numbers * num_chunks
    data[shape.starts : shape.starts + len(step.tables)] = step.requests[:, 0]
    data[shape.items :][: items.size].reshape(-1, 4)[:] = items
    return HostPlan(shape, data)


def lay_out_alone(batch: Batch, shape: PlanShape) -> HostPlan:
    """`lay_out` for single tokens that share no KV, as in most decoding steps. Takes less than half the time."""
    num_chunks = batch.positions // CHUNK + 1
    ends = num_chunks.cumsum()
    assert ends[-1] <= shape.num_slots
    chunk, request = (np.arange(num_chunks.max())[:, None] < num_chunks).nonzero()
    data = _frame(shape, len(chunk), batch.num_tokens, batch.block_tables)
    rows = np.arange(batch.num_tokens)
    queries = data[shape.queries :][: 4 * len(rows)].reshape(-1, 4)
    queries[:, 0], queries[:, 1], queries[:, 2] = rows, batch.positions, ends - num_chunks
    data[shape.starts : shape.starts + len(rows)] = rows
    items = data[shape.items :][: 4 * len(chunk)].reshape(-1, 4)
    items[:, 0], items[:, 1], items[:, 2], items[:, 3] = request, chunk, request, 1
    return HostPlan(shape, data)


def _frame(shape: PlanShape, num_items: int, num_queries: int, tables: IntArray) -> IntArray:
    """Make a plan's array with its header, padding and tables. The caller writes the other parts."""
    assert num_items <= shape.num_items
    assert num_queries <= shape.num_queries
    width = min(tables.shape[1], shape.table_width)
    tables_at = shape.items + 4 * num_items
    data = np.zeros(tables_at + len(tables) * width, np.int32)
    data[NUM_FOLDS], data[NUM_ITEMS], data[NUM_QUERIES] = shape.num_folds, num_items, num_queries
    data[FOLDS], data[ITEMS], data[QUERIES], data[STARTS] = shape.folds, shape.items, shape.queries, shape.starts
    data[TABLES], data[TABLE_WIDTH] = tables_at, width
    if num_queries < shape.num_queries:  # rows after the batch's own
        padding = data[shape.queries : shape.starts].reshape(-1, 4)[num_queries:]
        padding[:, 0] = np.arange(num_queries, shape.num_queries)
        padding[:, 1] = UNUSED_POSITION
    data[tables_at:].reshape(len(tables), width)[:] = tables[:, :width]
    return data


def _items(step: StepPlan, tile_queries: int) -> IntArray:
    """The SHARED items, [items, 4], with the columns of `items` above. An item has at most `tile_queries` queries."""
    _, chunk, first, last = step.items[step.num_folds :].T
    starts = np.zeros(len(step.members) + 1, np.int64)
    np.cumsum(step.requests[step.members, 1], out=starts[1:])
    begin, end = starts[first], starts[last]
    owner = step.members[first]
    if step.most_queries > tile_queries:
        pieces = -(-(end - begin) // tile_queries)
        item = np.repeat(np.arange(len(pieces)), pieces)
        number = np.arange(len(item)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        owner, chunk, end, begin = owner[item], chunk[item], end[item], begin[item] + number * tile_queries
    items = np.empty((len(owner), 4), np.int32)
    items[:, 0], items[:, 1], items[:, 2] = owner, chunk, begin
    items[:, 3] = np.minimum(tile_queries, end - begin)
    return items
