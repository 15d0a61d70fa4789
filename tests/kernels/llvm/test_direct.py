"""Keys and values multiplied where they lie: every sum has the bits that packed memory gives it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from numba import njit

from foreword.kernels.llvm import emit, simd
from foreword.kernels.llvm import simd as direct

pytestmark = pytest.mark.skipif(not emit.HAS_BF16_DOT, reason="this processor multiplies no pairs of bfloat16")
PANEL = 64


@njit
def score_packed(num_rows, queries, keys, num_words, packed, scores):  # type: ignore[no-untyped-def]
    for word in range(0, num_words, 16):
        simd.transpose_words(keys, 4 * word, packed + 4 * PANEL * word, 4 * PANEL)
    simd.pair_product_64(num_rows, queries, 4 * num_words, packed, num_words, scores, 4 * PANEL)


@njit
def score_directly(num_rows, queries, keys, offset, num_words, scores):  # type: ignore[no-untyped-def]
    direct.score_keys(num_rows, queries, 4 * num_words, keys, offset, num_words, scores, 4 * PANEL)


@njit
def mix_packed(num_rows, weights, values, first, last, packed, mixed):  # type: ignore[no-untyped-def]
    for pair in range(first, last):
        one, other = simd.load_int(values + 16 * pair), simd.load_int(values + 16 * pair + 8)
        simd.interleave(one, other, packed + 128 * (pair - first))
    simd.pair_product_32(num_rows, weights + 4 * first, 4 * PANEL, packed, last - first, mixed, 4 * PANEL)


@njit
def add_directly(num_rows, weights, values, offset, first, last, mixed):  # type: ignore[no-untyped-def]
    rows, own = weights + 4 * first, values + 16 * first
    direct.add_values(num_rows, rows, 4 * PANEL, own, offset, last - first, mixed, 4 * PANEL)


def bfloat16(rng: np.random.Generator, *shape: int) -> npt.NDArray[np.uint16]:
    """Random numbers' bits."""
    return (rng.standard_normal(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def places(rng: np.random.Generator, memory: npt.NDArray[np.uint16], count: int) -> npt.NDArray[np.int64]:
    """Addresses of tokens in no order."""
    return memory.ctypes.data + rng.permutation(len(memory))[:count] * memory.strides[0]


@pytest.mark.parametrize("num_rows", range(1, simd.ROWS + 1))
@pytest.mark.parametrize("dim", [32, 64, 96, 256])
def test_scores_have_the_bits_of_packed_keys(dim: int, num_rows: int) -> None:
    rng = np.random.default_rng(num_rows)
    memory, queries = bfloat16(rng, 40, 2, dim), bfloat16(rng, num_rows, dim)
    keys = places(rng, memory, 16)
    packed = np.zeros((dim // 2, PANEL), np.uint32)
    expected, found = np.zeros((num_rows, PANEL), np.float32), np.full((num_rows + 1, PANEL), 7, np.float32)
    own_keys = keys + 2 * dim  # of the second head
    score_packed(
        num_rows, queries.ctypes.data, own_keys.ctypes.data, dim // 2, packed.ctypes.data, expected.ctypes.data
    )
    score_directly(num_rows, queries.ctypes.data, keys.ctypes.data, 2 * dim, dim // 2, found.ctypes.data)
    assert found[:num_rows, :16].tobytes() == expected[:, :16].tobytes()
    assert np.count_nonzero(expected[:, :16]) == 16 * num_rows
    assert (found[:num_rows, 16:] == 7).all()
    assert (found[num_rows] == 7).all()


@pytest.mark.parametrize("num_rows", range(1, simd.ROWS + 1))
def test_mixtures_have_the_bits_of_packed_values(num_rows: int) -> None:
    """In pieces, of one pair and of many, as of all pairs at once."""
    rng = np.random.default_rng(num_rows)
    memory, weights = bfloat16(rng, 80, 2, 32), bfloat16(rng, num_rows, 2 * PANEL)
    values = places(rng, memory, 42)
    packed = np.zeros((21, 32), np.uint32)
    expected, found = np.zeros((num_rows, PANEL), np.float32), np.zeros((num_rows + 1, PANEL), np.float32)
    own_values = values + 64  # of the second head
    mix_packed(num_rows, weights.ctypes.data, own_values.ctypes.data, 0, 21, packed.ctypes.data, expected.ctypes.data)
    found[:, 32:] = found[num_rows] = 7
    for first, last in ((0, 8), (8, 9), (9, 9), (9, 21)):
        add_directly(num_rows, weights.ctypes.data, values.ctypes.data, 64, first, last, found.ctypes.data)
    assert found[:num_rows, :32].tobytes() == expected[:, :32].tobytes()
    assert np.count_nonzero(expected[:, :32]) == 32 * num_rows
    assert (found[:num_rows, 32:] == 7).all()
    assert (found[num_rows] == 7).all()
