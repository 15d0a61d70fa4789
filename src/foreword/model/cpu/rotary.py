"""From projections to attention in one pass: heads are normalised and turned, keys and values go to their blocks.

Knows rows of numbers and slots; knows nothing of modules. A row's bits depend on nothing but the row. torch needs some
fifteen operations for it, each with a pass over memory, and two more to write keys and values.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import carray
from torch import Tensor

from foreword.kernels.cpu.layout import source_digest
from foreword.kernels.llvm import norms as rows
from foreword.kernels.llvm import simd
from foreword.kernels.llvm.simd import LANES
from foreword.kernels.runtime.threads import Operation, native_worker
from foreword.model.cpu.row_functions import Norm

ALONE_ELEMENTS = 1 << 16
"""Work on fewer elements is done by the calling thread: waking the others takes longer."""
UNIT_ROWS = 4
(ROWS, COSINE, SINE, QUERY, KEYS, VALUES, SLOTS, NUM_ROWS, NUM_SLOTS, ITEM_BYTES) = range(10)
(QUERY_HEADS, KV_HEADS, KEY_DIM, VALUE_DIM, TURNED, COUNTER) = range(10, 16)
(QUERY_NORM, QUERY_EPSILON, QUERY_FORM, KEY_NORM, KEY_EPSILON, KEY_FORM, NUM_ARGUMENTS) = range(16, 23)
"""int64 each: addresses, and counts. A norm's weight is 0 where there is none; epsilons are addresses of float32."""
STEP_ARGUMENTS = COSINE, SINE, SLOTS, NUM_SLOTS
"""Arguments that change in every step."""


@dataclass(frozen=True, slots=True)
class HeadShapes:
    """How one row of projections is laid out: all queries, then all keys, then all values."""

    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    turned: int
    """How many elements of a head the rotary embedding turns."""

    def can_take(self) -> bool:
        """Whether heads, and the halves of what is turned, are whole vectors."""
        return self.turned > 0 and not (
            self.turned % (2 * LANES) or self.key_dim % LANES or self.value_dim % LANES or self.turned > self.key_dim
        )


@functools.cache
def _compile_worker() -> Any:
    """What each thread of a team runs: rows until none are left. Compiled once per machine and kept."""
    digest = source_digest()

    @native_worker  # type: ignore[untyped-decorator]
    def worker(arguments: Any) -> None:
        a = carray(arguments, NUM_ARGUMENTS)
        if digest == 0:
            return
        size, key_dim, value_dim = a[ITEM_BYTES], a[KEY_DIM], a[VALUE_DIM]
        query_heads, kv_heads = a[QUERY_HEADS], a[KV_HEADS]
        key_bytes, value_bytes = key_dim * size, value_dim * size
        row_bytes = (query_heads + kv_heads) * key_bytes + kv_heads * value_bytes
        while True:
            first = simd.fetch_add(a[COUNTER], UNIT_ROWS)
            if first >= a[NUM_ROWS]:
                return
            for row in range(first, min(first + UNIT_ROWS, a[NUM_ROWS])):
                stored = row < a[NUM_SLOTS]
                slot = simd.load_int(a[SLOTS] + 8 * row) if stored else 0
                source = a[ROWS] + row * row_bytes
                cosine, sine = a[COSINE] + row * a[TURNED] * size, a[SINE] + row * a[TURNED] * size
                for head in range(query_heads + kv_heads if stored else query_heads):
                    norm, epsilon, form = a[QUERY_NORM], a[QUERY_EPSILON], a[QUERY_FORM]
                    target = a[QUERY] + (row * query_heads + head) * key_bytes
                    if head >= query_heads:
                        norm, epsilon, form = a[KEY_NORM], a[KEY_EPSILON], a[KEY_FORM]
                        target = a[KEYS] + (slot * kv_heads + head - query_heads) * key_bytes
                    if norm == 0:
                        simd.copy_bytes(target, source, key_bytes)
                    elif size == 2:
                        rows.norm_bf16(source, norm, target, key_dim, simd.load_float(epsilon), form)
                    else:
                        rows.norm_f32(source, norm, target, key_dim, simd.load_float(epsilon), form)
                    if size == 2:
                        rows.rotate_bf16(target, cosine, sine, a[TURNED] // 2)
                    else:
                        rows.rotate_f32(target, cosine, sine, a[TURNED] // 2)
                    source += key_bytes
                if stored:
                    simd.copy_bytes(a[VALUES] + slot * kv_heads * value_bytes, source, kv_heads * value_bytes)

    return worker


class RotaryOperation(Operation):
    """The pass for heads of one kind, for the rows and blocks that it was bound to last."""

    def __init__(self, shapes: HeadShapes, norms: tuple[Norm | None, Norm | None]) -> None:
        """`norms`: of queries and of keys."""
        super().__init__(_compile_worker(), NUM_ARGUMENTS, COUNTER)
        self._norms = norms
        self._epsilons = np.array([norm.epsilon if norm else 0.0 for norm in norms], np.float32)
        a = self.arguments
        a[QUERY_HEADS], a[KV_HEADS] = shapes.query_heads, shapes.kv_heads
        a[KEY_DIM], a[VALUE_DIM], a[TURNED] = shapes.key_dim, shapes.value_dim, shapes.turned
        for number, norm in enumerate(norms):
            if norm is not None:
                at = (QUERY_NORM, KEY_NORM)[number]
                a[at : at + 3] = norm.weight.data_ptr(), self._epsilons.ctypes.data + 4 * number, norm.form

    def bind_blocks(self, keys: Tensor, values: Tensor) -> None:
        """[blocks, block_size, kv_heads, dim] without gaps, which are the caller's to keep."""
        a = self.arguments
        a[KEYS], a[VALUES], a[ITEM_BYTES] = keys.data_ptr(), values.data_ptr(), keys.element_size()

    def bind_rows(self, projected: int, num_rows: int, queries: int) -> None:
        """Addresses of the rows' projections, and of where their queries go."""
        a = self.arguments
        a[ROWS], a[NUM_ROWS], a[QUERY] = projected, num_rows, queries


class RotaryKernel:
    """The pass on tensors. One thread at a time."""

    def __init__(self, shapes: HeadShapes, query_norm: Norm | None, key_norm: Norm | None) -> None:
        self.shapes = shapes
        self._norms = query_norm, key_norm
        self._own = self.operation()

    def operation(self) -> RotaryOperation:
        """The pass as an operation, of which there may be many."""
        return RotaryOperation(self.shapes, self._norms)

    def __call__(
        self, projected: Tensor, turns: tuple[Tensor, Tensor], slots: Tensor, blocks: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Queries [rows, heads, key_dim]; keys and values of the first len(slots) rows are written.

        `projected` [rows, width] without gaps; `turns`: cosines and sines [1, rows, turned]; `slots` [tokens] int64;
        `blocks`: keys and values [blocks, block_size, kv_heads, dim] without gaps. All of one type but the slots.
        """
        turns, slots = (turns[0].contiguous(), turns[1].contiguous()), slots.contiguous()
        output = projected.new_empty(len(projected), self.shapes.query_heads, self.shapes.key_dim)
        self._own.bind_blocks(*blocks)
        self._own.bind_rows(projected.data_ptr(), len(projected), output.data_ptr())
        for argument, number in zip(STEP_ARGUMENTS, step_numbers(turns, slots), strict=True):
            self._own.arguments[argument] = number
        self._own.run(alone=projected.numel() <= ALONE_ELEMENTS)
        return output


def step_numbers(turns: tuple[Tensor, Tensor], slots: Tensor) -> tuple[int, int, int, int]:
    """STEP_ARGUMENTS of a step: cosines and sines [1, rows, turned], slots [tokens], all without gaps and kept."""
    return turns[0].data_ptr(), turns[1].data_ptr(), slots.data_ptr(), len(slots)
