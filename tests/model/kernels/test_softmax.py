"""One chunk's softmax, instruction by instruction: weights, what is merged, and the edges of both."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from numba import njit

from foreword.model.kernels import softmax
from foreword.model.kernels.simd import HAS_BF16_DOT, LOWEST

Floats = npt.NDArray[np.float32]


@njit
def call_weigh(scores, stats, size, factor):  # type: ignore[no-untyped-def]
    softmax.weigh(scores, stats, 0, size, factor)


@njit
def call_weigh_pairs(scores, stats, size, factor):  # type: ignore[no-untyped-def]
    softmax.weigh_pairs(scores, stats, 0, size, factor)


@njit
def call_merge(stats, chunk_stats, factors, num_rows):  # type: ignore[no-untyped-def]
    softmax.merge_stats(stats, chunk_stats, factors, num_rows)


@njit
def call_merge_row(stats, mixed, chunk_stats, chunk_mixed, width):  # type: ignore[no-untyped-def]
    softmax.merge(stats, mixed, chunk_stats, chunk_mixed, width)


def weights(powers: Floats, *, pairs: bool) -> tuple[npt.NDArray[np.float64], float]:
    """2 ** powers as they are written, and their sum."""
    memory, stats = powers.copy(), np.zeros(2, np.float32)
    (call_weigh_pairs if pairs else call_weigh)(memory.ctypes.data, stats.ctypes.data, len(memory), np.float32(1.0))
    if pairs:
        halves = memory.view(np.uint16)[: len(powers)].astype(np.uint32) << 16
        memory = halves.view(np.float32)
    return memory.astype(np.float64), float(stats[1])


@pytest.mark.parametrize(
    "pairs", [False, pytest.param(True, marks=pytest.mark.skipif(not HAS_BF16_DOT, reason="none"))]
)
def test_weights_are_powers_of_two(pairs: bool) -> None:
    """Exactly 1 at the peak, exactly 0 where a number of this type would lose its precision, or is masked."""
    rng = np.random.default_rng(0)
    powers = -rng.exponential(12.0, 64 * 50).astype(np.float32)
    powers[:10] = 0.0, -1.0, -2.0, -125.0, -126.0, -126.5, -140.0, -200.0, LOWEST, -np.inf
    found, total = weights(powers, pairs=pairs)
    assert found[:3].tolist() == [1.0, 0.5, 0.25]
    assert found[3] == 2.0**-125
    assert (found[4:10] == 0.0).all()
    normal = powers > -126
    error = np.abs(found[normal] / 2.0 ** powers[normal].astype(np.float64) - 1).max()
    assert error < (2**-8 + 2**-13 if pairs else 2**-22)
    assert total == pytest.approx(found.sum(), rel=1e-6)


@pytest.mark.parametrize("num_rows", [1, 5, 7, 8, 13, 32])
def test_rows_are_merged_as_one_by_one(num_rows: int) -> None:
    """And rows that see nothing of the chunk, or have seen nothing before; those beyond stay as they are."""
    rng = np.random.default_rng(num_rows)
    stats, chunk = rng.normal(0, 20, (2, 48, 2)).astype(np.float32)
    stats[:, 1], chunk[:, 1] = rng.uniform(1, 50, (2, 48))
    stats[::5], chunk[1::4] = (LOWEST, 0.0), (LOWEST, 0.0)
    expected, mixed = stats.copy(), rng.normal(size=(2, 48, 16)).astype(np.float32)
    for row in range(num_rows):
        addresses = (array[row].ctypes.data for array in (expected, mixed[0], chunk, mixed[1]))
        call_merge_row(*addresses, 16)
    factors = np.zeros((48, 2), np.float32)
    call_merge(stats.ctypes.data, chunk.ctypes.data, factors.ctypes.data, num_rows)
    assert np.array_equal(stats, expected)
    seen = chunk[:num_rows, 1] > 0
    assert (factors[:num_rows][~seen & (stats[:num_rows, 0] > LOWEST)] == [1.0, 0.0]).all()
    assert np.isfinite(factors[:num_rows]).all()
