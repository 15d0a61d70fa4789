"""From projections to attention in one pass: heads are normalised and rotated, keys and values go to their blocks.

A row's bits depend on nothing but the row. torch needs about fifteen operations to normalise and rotate heads, each
with a pass over memory, and two more to write keys and values.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from foreword.kernels.kv_format import SCALE_BYTES, KVBlocks
from foreword.kernels.llvm import norms as rows
from foreword.kernels.llvm import simd
from foreword.kernels.llvm.emit import LANES
from foreword.kernels.runtime.compiled import Worker, inlined, record, worker
from foreword.kernels.runtime.threads import OfThread, Operation
from foreword.model.cpu.row_functions import Norm

ALONE_ELEMENTS = 1 << 16
"""The calling thread computes up to this many elements alone, because waking other threads takes longer."""
UNIT_ROWS = 4
HEADS = record(
    "rows",
    "cosine",
    "sine",
    "query",
    "keys",
    "values",
    "slots",
    "num_rows",
    "num_slots",
    "item_bytes",
    "coded_tokens",  # tokens of a block of codes; 0: rows are stored as they are
    "query_heads",
    "kv_heads",
    "key_dim",
    "value_dim",
    "turned",
    "counters",
    "query_norm",  # address of the weight of the queries' norm; 0: no norm
    "query_form",
    "key_norm",
    "key_form",
    query_epsilon=np.float32,
    key_epsilon=np.float32,
)
"""The arguments: addresses, and counts."""
STEP_ARGUMENTS = "cosine", "sine", "slots", "num_slots"
"""Arguments that change in every step."""


@dataclass(frozen=True, slots=True)
class HeadShapes:
    """The layout of one row of projections: all queries, then all keys, then all values."""

    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    turned: int
    """The number of a head's elements that the rotary embedding rotates, from the first on."""

    def can_take(self) -> bool:
        """Whether a head, and each half of its rotated part, fills whole vector registers."""
        return not (
            self.turned % (2 * LANES) or self.key_dim % LANES or self.value_dim % LANES or self.turned > self.key_dim
        )


@inlined
def _write_codes(size: int, row: int, blocks: int, slot: int, place: tuple[int, int, int, int]) -> None:
    """Write a row as codes into its block.

    `size`: bytes of one element of the row; `place`: (tokens of a block, heads, the row's head, elements of the row).
    """
    tokens, heads, head, dim = place
    block = slot // tokens
    at, num_rows = (slot - block * tokens) * heads + head, tokens * heads
    first = blocks + block * num_rows * (dim + SCALE_BYTES)
    codes, scale = first + at * dim, first + num_rows * dim + at * SCALE_BYTES
    if size == 2:
        rows.code_bf16(row, codes, scale, dim)
    else:
        rows.code_f32(row, codes, scale, dim)


@inlined
def _turn_head(a: Any, source: int, target: int, row: int, norm: tuple[int, Any, int]) -> None:
    """Normalise, rotate and write a head; `norm`: its weight (0: no norm), epsilon and form."""
    size = a.item_bytes
    weight, epsilon, form = norm
    cosine, sine = a.cosine + row * a.turned * size, a.sine + row * a.turned * size
    if weight == 0:
        if target != source:
            simd.copy_bytes(target, source, a.key_dim * size)
    elif size == 2:
        rows.norm_bf16(source, weight, target, a.key_dim, epsilon, form)
    else:
        rows.norm_f32(source, weight, target, a.key_dim, epsilon, form)
    if size == 2:
        rows.rotate_bf16(target, cosine, sine, a.turned // 2)
    else:
        rows.rotate_f32(target, cosine, sine, a.turned // 2)


@functools.cache
def _compile_worker() -> Worker:
    """Compile the function that every thread runs: it computes rows until no row is left."""

    @worker(HEADS)
    def place_heads(arguments: Any) -> None:
        a = carray(arguments, 1)[0]
        size, query_heads, kv_heads, coded = a.item_bytes, a.query_heads, a.kv_heads, a.coded_tokens
        key_bytes, value_bytes = a.key_dim * size, a.value_dim * size
        row_bytes = (query_heads + kv_heads) * key_bytes + kv_heads * value_bytes
        while True:
            first = simd.fetch_add(a.counters, UNIT_ROWS)
            if first >= a.num_rows:
                return
            for row in range(first, min(first + UNIT_ROWS, a.num_rows)):
                stored = row < a.num_slots
                slot = simd.load_int(a.slots + 8 * row) if stored else 0
                source = a.rows + row * row_bytes
                for head in range(query_heads + kv_heads if stored else query_heads):
                    norm = a.query_norm, a.query_epsilon, a.query_form
                    target = a.query + (row * query_heads + head) * key_bytes
                    if head >= query_heads:
                        norm = a.key_norm, a.key_epsilon, a.key_form
                        target = a.keys + (slot * kv_heads + head - query_heads) * key_bytes
                        if coded != 0:
                            target = source
                    _turn_head(a, source, target, row, norm)
                    if coded != 0 and head >= query_heads:
                        _write_codes(size, target, a.keys, slot, (coded, kv_heads, head - query_heads, a.key_dim))
                    source += key_bytes
                if stored and coded == 0:
                    simd.copy_bytes(a.values + slot * kv_heads * value_bytes, source, kv_heads * value_bytes)
                elif stored:
                    for head in range(kv_heads):
                        row_of_head = source + head * value_bytes
                        _write_codes(size, row_of_head, a.values, slot, (coded, kv_heads, head, a.value_dim))

    return place_heads


class RotaryOperation(Operation):
    """Normalises, rotates and stores heads of one kind, for the rows and blocks that were bound last."""

    def __init__(self, shapes: HeadShapes, norms: tuple[Norm | None, Norm | None]) -> None:
        """`norms`: of queries and of keys."""
        super().__init__(_compile_worker())
        self._norms = norms
        a = self.arguments
        a["query_heads"], a["kv_heads"] = shapes.query_heads, shapes.kv_heads
        a["key_dim"], a["value_dim"], a["turned"] = shapes.key_dim, shapes.value_dim, shapes.turned
        for name, norm in zip(("query", "key"), norms, strict=True):
            if norm is not None:
                a[f"{name}_norm"], a[f"{name}_epsilon"] = norm.weight.data_ptr(), norm.epsilon
                a[f"{name}_form"] = norm.form

    def bind_blocks(self, blocks: KVBlocks, dtype: torch.dtype) -> None:
        """Write rows of type `dtype` to these blocks.

        The blocks must take such rows (`can_write`). The caller keeps the blocks alive.
        """
        a = self.arguments
        a["keys"], a["values"] = blocks.keys.data_ptr(), blocks.values.data_ptr()
        a["item_bytes"], a["coded_tokens"] = dtype.itemsize, blocks.block_size if blocks.format.is_coded else 0

    def bind_rows(self, projected: int, num_rows: int, queries: int) -> None:
        """Set the addresses of the rows' projections, in which keys may change, and of the resulting queries."""
        a = self.arguments
        a["rows"], a["num_rows"], a["query"] = projected, num_rows, queries


class RotaryKernel:
    """Runs a `RotaryOperation` on tensors."""

    def __init__(self, shapes: HeadShapes, query_norm: Norm | None, key_norm: Norm | None) -> None:
        self.shapes = shapes
        self.operation = functools.partial(RotaryOperation, shapes, (query_norm, key_norm))
        """Makes a new `RotaryOperation`; many may exist."""
        self._of_thread = OfThread(self.operation)

    @staticmethod
    def can_write(blocks: KVBlocks, dtype: torch.dtype) -> bool:
        """Whether the blocks take rows of this type, and lie without gaps."""
        return blocks.is_contiguous and blocks.format.can_take(dtype)

    def __call__(self, projected: Tensor, turns: tuple[Tensor, Tensor], slots: Tensor, blocks: KVBlocks) -> Tensor:
        """Return queries [rows, heads, key_dim]; write keys and values of the first len(slots) rows.

        `projected` [rows, width] without gaps; `turns`: cosines and sines [1, rows, turned]; `slots` [tokens] int64;
        `blocks`: without gaps. All have one type, except slots and blocks of codes. With codes, keys are rotated
        in place in `projected`.
        """
        turns, slots = (turns[0].contiguous(), turns[1].contiguous()), slots.contiguous()
        output = projected.new_empty(len(projected), self.shapes.query_heads, self.shapes.key_dim)
        operation = self._of_thread.operation
        operation.bind_blocks(blocks, projected.dtype)
        operation.bind_rows(projected.data_ptr(), len(projected), output.data_ptr())
        for argument, number in zip(STEP_ARGUMENTS, step_numbers(turns, slots), strict=True):
            operation.arguments[argument] = number
        operation.run(alone=projected.numel() <= ALONE_ELEMENTS)
        return output


def step_numbers(turns: tuple[Tensor, Tensor], slots: Tensor) -> tuple[int, int, int, int]:
    """Values of STEP_ARGUMENTS, from cosines and sines [1, rows, turned] and slots [tokens].

    The tensors have no gaps, and the caller keeps them alive.
    """
    return turns[0].data_ptr(), turns[1].data_ptr(), slots.data_ptr(), len(slots)
