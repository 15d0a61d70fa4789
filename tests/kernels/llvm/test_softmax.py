"""One chunk's softmax, instruction by instruction: weights, what is merged, and the edges of both."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from numba import njit

from foreword.kernels.llvm import softmax, tile_softmax
from foreword.kernels.llvm.emit import HAS_BF16_DOT, LOWEST
from foreword.kernels.llvm.tile_softmax import HAS_FLOAT16, MARGIN, MOST_SUM

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


@njit
def call_in_tiles(scores, stats, written, totals, num_rows, low, high, factor):  # type: ignore[no-untyped-def]
    tile_softmax.estimate_peaks(scores, 256, stats, num_rows, low, high, factor)
    if low <= 0 and high >= 64:
        tile_softmax.weigh_panel(scores, 256, written, 128, stats, totals, num_rows, factor)
    else:
        tile_softmax.weigh_seen(scores, 256, written, 128, stats, totals, num_rows, low, high, factor)
    for row in range(num_rows):
        tile_softmax.sum_lanes(totals + 64 * row, stats + 8 * row)


IN_ORDER = [16 * (word % 8 // 4) + 4 * (word // 8) + word % 4 for word in range(32)]
"""Which of 32 tokens a weight is of: two vectors, four by four of each in turn."""


def weights_in_tiles(
    scores: Floats, factor: float = 1.0, seen: tuple[int, int] = (0, 64)
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Weights of rows of 64 scores, in the order of tokens, and their stats."""
    num_rows = len(scores)
    stats, totals = np.zeros((num_rows, 2), np.float32), np.zeros((num_rows, 16), np.float32)
    written = np.full((num_rows, 2, 32), 0x7FC0, np.uint16)
    addresses = (array.ctypes.data for array in (scores, stats, written, totals))
    call_in_tiles(*addresses, num_rows, *seen, np.float32(factor))
    ordered = np.empty_like(written)
    ordered[:, :, IN_ORDER] = written
    found = (ordered.astype(np.uint32) << 16).view(np.float32).reshape(num_rows, 64)
    return found.astype(np.float64), stats.astype(np.float64)


needs_float16 = pytest.mark.skipif(not HAS_FLOAT16, reason="this processor has no vectors of float16")


@needs_float16
@pytest.mark.parametrize("factor", [1.0, 0.18033688])
def test_weights_in_tiles_are_powers_of_two(factor: float) -> None:
    scores = (-np.random.default_rng(0).exponential(8.0, (500, 64)) / factor).astype(np.float32)
    scores[:, 40] = 0.0
    found, stats = weights_in_tiles(scores, factor)
    assert (stats[:, 0] == MARGIN).all()
    assert (found[:, 40] == 2.0**-MARGIN).all()
    powers = scores.astype(np.float64) * np.float32(factor) - stats[:, :1]
    near = powers > -76
    error = found[near] / 2.0 ** powers[near] - 1
    assert np.abs(error).max() < 1.5 * 2**-8
    assert abs(error.mean()) < 2**-13
    assert (found[~near] == 2.0**-76).all()
    assert stats[:, 1] == pytest.approx(found.sum(1), rel=1e-6)


@needs_float16
@pytest.mark.parametrize("seen", [(0, 1), (0, 63), (63, 64), (5, 40), (-9, 17), (30, 100)])
def test_tokens_that_a_row_does_not_see_weigh_nothing(seen: tuple[int, int]) -> None:
    scores = np.random.default_rng(1).normal(0, 4, (3, 64)).astype(np.float32)
    place = np.arange(64)
    visible = (place >= seen[0]) & (place < seen[1])
    scores[:, ~visible] = [[np.nan], [np.inf], [3e38]]
    found, stats = weights_in_tiles(scores, seen=seen)
    assert (found[:, ~visible] == 0.0).all()
    assert (stats[:, 0] == np.ceil(scores[:, visible].max(1)) + MARGIN).all()
    alone = scores.copy()
    alone[:, ~visible] = -1e30
    whole, _ = weights_in_tiles(alone)
    assert np.array_equal(found[:, visible], whole[:, visible])


@needs_float16
@pytest.mark.parametrize("above", [MARGIN + 1, MARGIN + 60, 1e5, 1e30, np.inf, -16500.0, -20000.0, -32700.0])
def test_a_score_that_has_no_weight_shows_in_the_sum(above: float) -> None:
    """Far above the peak, which is that of another panel, or so far below that integers wrap around."""
    scores = np.zeros((2, 64), np.float32)
    scores[1, 50] = above
    stats, totals = np.array([[MARGIN, 0.0]] * 2, np.float32), np.zeros((2, 16), np.float32)
    written = np.zeros((2, 64), np.uint16)
    call_weigh_panel(*(array.ctypes.data for array in (scores, written, stats, totals)), 2, np.float32(1.0))
    assert totals[0].sum() == 64 * 2.0**-MARGIN
    assert totals[1].sum() >= MOST_SUM


@njit
def call_weigh_panel(scores, written, stats, totals, num_rows, factor):  # type: ignore[no-untyped-def]
    tile_softmax.weigh_panel(scores, 256, written, 128, stats, totals, num_rows, factor)


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
