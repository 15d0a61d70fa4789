"""Matrix products in AMX tiles, as LLVM instructions for numba.

Knows memory addresses and tiles; knows nothing of models. A tile is 16 rows of 64 bytes. A product of two tiles adds
32 products of bfloat16 to each element of a tile of 16 x 16 float32: `C[m, n] += sum over k of A[m, k] B[k, n]`, with B
stored as 16 rows of 16 pairs (two neighbours of k).

One element of a result is one chain of such additions along k, from 0 upwards, starting at 0. What order the processor
sums the 32 products of one step in is its own affair, but always the same; so a row's bits depend neither on
the number of rows, nor on its place among them, nor on the number of threads.

    tile    0   1      results: rows of A0 x columns of B0, B1
            2   3               rows of A1 x columns of B0, B1
            4   5      A0, A1: up to 16 rows each
            6   7      B0, B1: 16 columns each
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils

from foreword.model.kernels import simd
from foreword.model.kernels.simd import I32

TILE_ROWS = 16
TILE_BYTES = 1024
STEP = 32
"""How many elements along k one product of tiles takes."""
PANEL = 32
"""Columns of a panel of weights: two tiles side by side, for all k."""
CONFIG_BYTES = 64
FETCHED_AHEAD = 8192
"""How many bytes before their use few rows' weights are asked for: they come from memory, not from a cache."""

_REQUEST_PERMISSION, _TILE_DATA, _ARCH_PRCTL = 0x1023, 18, 158


@functools.cache
def has_tiles() -> bool:
    """Whether this processor multiplies tiles of bfloat16, and the system lets this process do it."""
    features = llvm.get_host_cpu_features()
    if not (features.get("amx-tile") and features.get("amx-bf16") and features.get("avx512f")):
        return False
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    refused: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    return refused == 0


def _tile_call(builder: Any, name: str, *arguments: Any) -> None:
    """An instruction for tiles; none where there are none: such code is compiled there, but never called."""
    if not has_tiles():
        return
    kind = ir.FunctionType(ir.VoidType(), [argument.type for argument in arguments])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), arguments)


def _tile(number: int) -> ir.Constant:
    return ir.Constant(ir.IntType(8), number)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.IntType(8).as_pointer())


def _load(builder: Any, tile: int, address: Any, stride: Any) -> None:
    _tile_call(builder, "tileloadd64", _tile(tile), _pointer(builder, address), stride)


def _multiply(builder: Any, result: int, left: int, right: int) -> None:
    _tile_call(builder, "tdpbf16ps", _tile(result), _tile(left), _tile(right))


def _fetch(builder: Any, address: Any, num_lines: int) -> None:
    """Ask for memory that will be read soon; whatever is there."""
    kinds = [ir.IntType(8).as_pointer(), I32, I32, I32]
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), kinds), "llvm.prefetch.p0")
    read, into_all_caches, data = (ir.Constant(I32, number) for number in (0, 3, 1))
    for line in range(num_lines):
        at = _pointer(builder, builder.add(address, simd._int(64 * line)))
        builder.call(function, [at, read, into_all_caches, data])


@simd._instructions("ai")
def lay_out(builder: Any, config: Any, num_rows: Any) -> None:
    """Lay out this thread's tiles for products of `num_rows` (1 to 32) rows of A; writes 64 bytes to `config`.

    Up to 16 rows all tiles of rows have that many; beyond, the second have what the first leave.
    """
    byte, most = ir.IntType(8), simd._int(TILE_ROWS)
    few = builder.icmp_signed("<=", num_rows, most)
    first = builder.select(few, num_rows, most)
    second = builder.select(few, num_rows, builder.sub(num_rows, most))
    simd._store(builder, ir.Constant(ir.VectorType(byte, CONFIG_BYTES), [1] + [0] * (CONFIG_BYTES - 1)), config)
    for tile, rows in enumerate((first, first, second, second, first, second, most, most)):
        simd._store(builder, ir.Constant(ir.IntType(16), 64), config, 16 + 2 * tile)
        simd._store(builder, builder.trunc(rows, byte), config, 48 + tile)
    _tile_call(builder, "ldtilecfg", _pointer(builder, config))


@simd._instructions("")
def release(builder: Any) -> None:
    """Give this thread's tiles back."""
    _tile_call(builder, "tilerelease")


def _emit_product(
    builder: Any, num_row_tiles: int, arguments: tuple[Any, ...], meanwhile: Callable[[Any], None] | None = None
) -> None:
    """A product with a panel of weights; `meanwhile` emits what else is done in each step."""
    a, stride, b, num_steps, c = arguments
    line, c_bytes = simd._int(64), simd._int(4 * PANEL)
    for tile in range(2 * num_row_tiles):
        _tile_call(builder, "tilezero", _tile(tile))
    second = builder.add(a, builder.mul(stride, simd._int(TILE_ROWS)))

    def body(step: Any) -> list[Any]:
        inner = builder.mul(step, simd._int(64))
        weights = builder.add(b, builder.mul(step, simd._int(2 * TILE_BYTES)))
        _load(builder, 6, weights, line)
        _load(builder, 4, builder.add(a, inner), stride)
        _multiply(builder, 0, 4, 6)
        _load(builder, 7, builder.add(weights, simd._int(TILE_BYTES)), line)
        _multiply(builder, 1, 4, 7)
        if num_row_tiles == 2:
            _load(builder, 5, builder.add(second, inner), stride)
            _multiply(builder, 2, 5, 6)
            _multiply(builder, 3, 5, 7)
        else:
            _fetch(builder, builder.add(weights, simd._int(FETCHED_AHEAD)), 2 * TILE_BYTES // 64)
        if meanwhile is not None:
            meanwhile(step)
        return []

    simd._loop(builder, simd._int(0), num_steps, 1, [], body)
    for tile in range(2 * num_row_tiles):
        target = builder.add(c, simd._int(tile // 2 * TILE_ROWS * 4 * PANEL + tile % 2 * 64))
        _tile_call(builder, "tilestored64", _tile(tile), _pointer(builder, target), c_bytes)


def _product(num_row_tiles: int) -> Any:
    @simd._instructions("aiaia")
    def product(builder: Any, *arguments: Any) -> None:
        """C of up to 32 rows and 32 columns, [32, 32] float32.

        a: bfloat16 rows; bytes between them; b: a panel, so many times two tiles; how many; c.
        """
        _emit_product(builder, num_row_tiles, arguments)

    return product


product_16, product_32 = _product(1), _product(2)
"""By the number of rows that they take at most."""


def product_beside(finish: Callable[[Any, Any, Any, Any], None]) -> Any:
    """`product_32` that also ends rows of a product before: the vectors work while the tiles do.

    `finish(builder, sums, bias, target)` emits what ends one row. Each step ends one, so the first `num_steps` at most.
    """

    @simd._instructions("aiaiaiaaai")
    def product(builder: Any, *arguments: Any) -> None:
        """As `product_32`; then how many rows are to be ended, their sums, bias and target, bytes between targets."""
        num_rows, sums, bias, target, target_bytes = arguments[5:]

        def meanwhile(step: Any) -> None:
            with builder.if_then(builder.icmp_signed("<", step, num_rows)):
                own_sums = builder.add(sums, builder.mul(step, simd._int(4 * PANEL)))
                finish(builder, own_sums, bias, builder.add(target, builder.mul(step, target_bytes)))

        _emit_product(builder, 2, arguments[:5], meanwhile)

    return product


def _emit_wide(builder: Any, shape: tuple[int, int], arguments: tuple[Any, ...]) -> None:
    """A product of one or two tiles of rows and so many tiles of columns."""
    num_row_tiles, num_tiles = shape
    a, lda, b, num_steps, c, ldc = arguments
    line, down = simd._int(64 * num_tiles), simd._int(TILE_ROWS)
    rows = [a, builder.add(a, builder.mul(lda, down))][:num_row_tiles]
    targets = [c, builder.add(c, builder.mul(ldc, down))]
    at_a_time = min(4 // num_row_tiles, num_tiles)
    places = [(number, column) for column in range(at_a_time) for number in range(num_row_tiles)]
    for first in range(0, num_tiles, at_a_time):
        for number, column in places:
            _tile_call(builder, "tilezero", _tile(2 * number + column))

        def body(step: Any, first: int = first) -> list[Any]:
            panel = builder.add(b, builder.mul(step, simd._int(TILE_BYTES * num_tiles)))
            for number, row in enumerate(rows):
                _load(builder, 4 + number, builder.add(row, builder.mul(step, simd._int(64))), lda)
            for column in range(at_a_time):
                right = 6 + column % 2
                _load(builder, right, builder.add(panel, simd._int(64 * (first + column))), line)
                for number in range(num_row_tiles):
                    _multiply(builder, 2 * number + column, 4 + number, right)
            return []

        simd._loop(builder, simd._int(0), num_steps, 1, [], body)
        for number, column in places:
            target = _pointer(builder, builder.add(targets[number], simd._int(64 * (first + column))))
            _tile_call(builder, "tilestored64", _tile(2 * number + column), target, ldc)


def _wide_product(num_tiles: int) -> Any:
    @simd._instructions("iaiaiai")
    def product(builder: Any, num_rows: Any, *arguments: Any) -> None:
        """C = A B of 1 to 32 rows, for which tiles are laid out, and 16 * `num_tiles` columns.

        a, lda (bytes between rows); b: [16 * steps, columns] pairs without gaps; steps; c, ldc (bytes between rows).
        """
        few = builder.icmp_signed("<=", num_rows, simd._int(TILE_ROWS))
        with builder.if_else(few) as (then, otherwise):
            with then:
                _emit_wide(builder, (1, num_tiles), arguments)
            with otherwise:
                _emit_wide(builder, (2, num_tiles), arguments)

    return product


tile_product_64, tile_product_32 = _wide_product(4), _wide_product(2)
"""By the number of columns."""
