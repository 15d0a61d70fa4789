"""Matrix products in AMX tiles, as LLVM instructions for numba.

A tile is 16 rows of 64 bytes. A product of two tiles adds 32 products of bfloat16 to each element of a tile of 16 x 16
float32: `C[m, n] += sum over k of A[m, k] B[k, n]`, with B stored as 16 rows of 16 pairs (two neighbours of k).

Each element of a result starts at 0. Products of tiles are added to it one after the other, from the lowest k upwards.
The order in which the processor adds the 32 products of two tiles is always the same. So a row's bits do not depend on
the number of rows, on the row's place among them, or on the number of threads.

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
from typing import Any, NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir

from foreword.kernels.llvm import emit

TILE_ROWS = 16
TILE_BYTES = 1024
STEP = 32
"""The number of elements along k in one product of tiles."""
PRODUCT_PANEL = 32
"""The number of columns in a panel of weights. A panel is two tiles side by side, for all k."""
CONFIG_BYTES = 64

_REQUEST_PERMISSION, _TILE_DATA, _ARCH_PRCTL = 0x1023, 18, 158


@functools.cache
def has_tiles() -> bool:
    """Whether this processor multiplies tiles of bfloat16, and the system permits it."""
    features = llvm.get_host_cpu_features()
    if not (features.get("amx-tile") and features.get("amx-bf16") and features.get("avx512f")):
        return False
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    refused: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    return refused == 0


def _tile_call(builder: Any, name: str, *arguments: Any) -> None:
    """Emit an instruction for tiles.

    If there are no tiles, this function emits nothing: the code is then compiled, but never called.
    """
    if has_tiles():
        emit.call(builder, f"llvm.x86.{name}", *arguments, returns=ir.VoidType())


def _tile(number: int) -> ir.Constant:
    return ir.Constant(ir.IntType(8), number)


def _pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.IntType(8).as_pointer())


def _load(builder: Any, tile: int, address: Any, stride: Any, *, passing: bool = False) -> None:
    """Load a tile. `passing`: the tile's memory need not stay in the first cache."""
    name = "tileloaddt164" if passing else "tileloadd64"
    _tile_call(builder, name, _tile(tile), _pointer(builder, address), stride)


def _multiply(builder: Any, result: int, left: int, right: int) -> None:
    _tile_call(builder, "tdpbf16ps", _tile(result), _tile(left), _tile(right))


@emit.instructions("ai")
def lay_out(builder: Any, config: Any, num_rows: Any) -> None:
    """Lay out this thread's tiles for products of `num_rows` (1 to 32) rows of A; writes 64 bytes to `config`.

    Rows take one or two tiles. Up to 16 rows fit into the first; with more, the first has 16 rows, and the second has
    the rest.
    """
    byte, full = ir.IntType(8), emit.integer(TILE_ROWS)
    few = builder.icmp_signed("<=", num_rows, full)
    first = builder.select(few, num_rows, full)
    second = builder.select(few, num_rows, builder.sub(num_rows, full))
    emit.store(builder, ir.Constant(ir.VectorType(byte, CONFIG_BYTES), [1] + [0] * (CONFIG_BYTES - 1)), config)
    for tile, rows in enumerate((first, first, second, second, first, second, full, full)):
        emit.store(builder, ir.Constant(ir.IntType(16), 64), config, 16 + 2 * tile)
        emit.store(builder, builder.trunc(rows, byte), config, 48 + tile)
    _tile_call(builder, "ldtilecfg", _pointer(builder, config))


@emit.instructions("")
def release(builder: Any) -> None:
    """Release this thread's tiles, after which the thread has no tiles laid out."""
    _tile_call(builder, "tilerelease")


def _emit_step(builder: Any, num_row_tiles: int, a: Any, stride: Any, weights: Any, *, passing: bool = False) -> None:
    """Add the products of one or two tiles of rows and two tiles of weights.

    `passing`: weights come from the second cache. Then it is fastest to wait for both tiles of weights together. If
    they come from the first cache, it is fastest to wait for each tile by itself.
    """
    line, rows = emit.integer(64), [a, emit.at(builder, a, stride, TILE_ROWS)]
    _load(builder, 6, weights, line, passing=passing)
    _load(builder, 4, a, stride)
    if not passing:
        _multiply(builder, 0, 4, 6)
    _load(builder, 7, builder.add(weights, emit.integer(TILE_BYTES)), line, passing=passing)
    if not passing:
        _multiply(builder, 1, 4, 7)
    for row_tile in range(1, num_row_tiles):
        _load(builder, 4 + row_tile, rows[row_tile], stride)
    for result in range(0 if passing else 2, 2 * num_row_tiles):
        _multiply(builder, result, 4 + result // 2, 6 + result % 2)


def _sums_of_tiles(builder: Any, num_row_tiles: int, sums: Any) -> list[Any]:
    """The addresses, in sums [32, 32], of the tiles of results."""
    offsets = (tile // 2 * TILE_ROWS * 4 * PRODUCT_PANEL + tile % 2 * 64 for tile in range(2 * num_row_tiles))
    return [builder.add(sums, emit.integer(offset)) for offset in offsets]


def _emit_end(builder: Any, num_row_tiles: int, sums: Any) -> None:
    for tile, target in enumerate(_sums_of_tiles(builder, num_row_tiles, sums)):
        _tile_call(builder, "tilestored64", _tile(tile), _pointer(builder, target), emit.integer(4 * PRODUCT_PANEL))


class Product(NamedTuple):
    """The functions of a product of rows and a panel. Between these calls, tiles hold the sums."""

    begin: Any
    """Sets the sums to 0."""
    go_on: Any
    """Loads the sums from memory [32, 32]."""
    multiply: Any
    """Adds one step. Arguments: the address of rows, bytes between rows, the address of two tiles of weights."""
    end: Any
    """Writes the sums to memory [32, 32], as float32."""


def _product(num_row_tiles: int) -> Product:
    @emit.instructions("")
    def begin(builder: Any) -> None:
        for tile in range(2 * num_row_tiles):
            _tile_call(builder, "tilezero", _tile(tile))

    @emit.instructions("a")
    def go_on(builder: Any, sums: Any) -> None:
        for tile, source in enumerate(_sums_of_tiles(builder, num_row_tiles, sums)):
            _load(builder, tile, source, emit.integer(4 * PRODUCT_PANEL))

    @emit.instructions("aia")
    def multiply(builder: Any, a: Any, stride: Any, weights: Any) -> None:
        _emit_step(builder, num_row_tiles, a, stride, weights)

    @emit.instructions("a")
    def end(builder: Any, sums: Any) -> None:
        _emit_end(builder, num_row_tiles, sums)

    return Product(begin, go_on, multiply, end)


product_16, product_32 = _product(1), _product(2)
"""Products of at most 16 rows and of at most 32 rows."""


def multiply_beside(signature: str, beside: Callable[..., None]) -> Any:
    """Make a product of up to 32 rows that does other work in each step: vector instructions run while tiles multiply.

    `beside(builder, step, *others)` emits the other work. The made function takes rows, bytes between rows, weights,
    the number of steps, and then `others`, whose letters are `signature`.
    """

    @emit.instructions("aiai" + signature)
    def multiply(builder: Any, *arguments: Any) -> None:
        a, stride, weights, num_steps = arguments[:4]

        def body(step: Any) -> None:
            own_weights = emit.at(builder, weights, step, 2 * TILE_BYTES)
            own_rows = emit.at(builder, a, step, 64)
            _emit_step(builder, 2, own_rows, stride, own_weights, passing=True)
            beside(builder, step, *arguments[4:])

        emit.loop(builder, emit.integer(0), num_steps, 1, [], body)

    return multiply


def _emit_wide(builder: Any, shape: tuple[int, int], arguments: tuple[Any, ...]) -> None:
    """Emit a product. `shape`: the number of tiles of rows (one or two), and the number of tiles of columns."""
    num_row_tiles, num_tiles = shape
    a, lda, b, num_steps, c, ldc = arguments
    line, down = emit.integer(64 * num_tiles), emit.integer(TILE_ROWS)
    rows = [a, builder.add(a, builder.mul(lda, down))][:num_row_tiles]
    targets = [c, builder.add(c, builder.mul(ldc, down))]
    at_a_time = min(4 // num_row_tiles, num_tiles)
    places = [(number, column) for column in range(at_a_time) for number in range(num_row_tiles)]
    for first in range(0, num_tiles, at_a_time):
        for number, column in places:
            _tile_call(builder, "tilezero", _tile(2 * number + column))

        def body(step: Any, first: int = first) -> None:
            panel = emit.at(builder, b, step, TILE_BYTES * num_tiles)
            for pair in range(2):  # load two tiles of columns, two of rows before all products: the fastest order
                if pair < at_a_time:
                    right = builder.add(panel, emit.integer(64 * (first + pair)))
                    _load(builder, 6 + pair, right, line, passing=num_row_tiles == 2)
                if pair < num_row_tiles:
                    _load(builder, 4 + pair, emit.at(builder, rows[pair], step, 64), lda)
            for number in range(num_row_tiles):
                for column in range(at_a_time):
                    if column > 1:
                        right = builder.add(panel, emit.integer(64 * (first + column)))
                        _load(builder, 6 + column % 2, right, line)
                    _multiply(builder, 2 * number + column, 4 + number, 6 + column % 2)

        emit.loop(builder, emit.integer(0), num_steps, 1, [], body)
        for number, column in places:
            target = _pointer(builder, builder.add(targets[number], emit.integer(64 * (first + column))))
            _tile_call(builder, "tilestored64", _tile(2 * number + column), target, ldc)


def _wide_product(num_tiles: int) -> Any:
    @emit.instructions("iaiaiai")
    def product(builder: Any, num_rows: Any, *arguments: Any) -> None:
        """Compute C = A B. A has 1 to 32 rows, for which tiles are laid out; B has 16 * `num_tiles` columns.

        a, lda (bytes between rows); b: [16 * steps, columns] pairs without gaps; steps; c, ldc (bytes between rows).
        """
        few = builder.icmp_signed("<=", num_rows, emit.integer(TILE_ROWS))
        with builder.if_else(few) as (then, otherwise):
            with then:
                _emit_wide(builder, (1, num_tiles), arguments)
            with otherwise:
                _emit_wide(builder, (2, num_tiles), arguments)

    return product


tile_product_64, tile_product_32 = _wide_product(4), _wide_product(2)
"""Products whose result has 64 columns or 32 columns."""
