"""Draws without a sort against ones that sort whole rows: the same tokens for every seed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from numba import njit

from foreword.kernels.sampling import draw as compiled_weights
from foreword.kernels.sampling.draw import BLOCK, WEIGHT_BITS, shortest_beginning
from foreword.model.sampling.draws import Draws

Options = npt.NDArray[np.float64]


@njit
def weights_of(values: Any, top: float, scale: float, weights: Any) -> None:
    for at in range(len(values)):
        weights[at] = compiled_weights.weight(values[at], top, scale)


def some_logits(rng: np.random.Generator, rows: int, vocab: int) -> npt.NDArray[np.float32]:
    """Rows of every kind: peaked, flat, with many ties, with infinities, both zeros, hardly different numbers."""
    logits = rng.normal(0, 1, (rows, vocab)) * rng.choice([1e-3, 0.5, 3.0, 12.0], (rows, 1))
    kinds = rng.integers(0, 6, rows)
    logits[kinds == 1] = logits[kinds == 1].round()
    logits[kinds == 2] = np.where(rng.random((int((kinds == 2).sum()), vocab)) < 0.9, -np.inf, logits[kinds == 2])
    logits[kinds == 2, rng.integers(vocab)] = 0.5
    logits[kinds == 3] = rng.choice([0.0, -0.0, -1.0], (int((kinds == 3).sum()), vocab))
    logits[kinds == 4] = np.sort(logits[kinds == 4])
    logits[:, rng.integers(vocab)] += 1.0
    return logits.astype(np.float32)


def some_options(rng: np.random.Generator, rows: int, vocab: int) -> Options:
    def maybe(values: npt.NDArray[Any], otherwise: float) -> npt.NDArray[Any]:
        return np.where(rng.random(rows) < 0.5, values, otherwise)

    temperature = rng.choice([1e-300, 1e-3, 0.3, 0.7, 1.0, 2.0, 100.0, 1e30], rows)
    top_k = maybe(np.maximum(1, (vocab ** rng.random(rows)).astype(int)), vocab)
    min_p = maybe(rng.choice([1e-14, 1e-3, 0.05, 0.9, 1.0], rows), 0.0)
    top_p = maybe(rng.choice([1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 1e-15], rows), 1.0)
    uniform = maybe(rng.random(rows), 1 - 2.0**-53)
    scale = math.log2(math.e) / temperature
    return np.stack((scale, np.ceil(min_p * 2.0**WEIGHT_BITS), top_k, top_p, uniform), 1)


def draws_of(options: Options, vocab: int) -> Draws:
    is_cut = bool(((options[:, 2] < vocab) | (options[:, 3] < 1) | (options[:, 1] > 0)).any())
    return Draws(torch.arange(len(options)), torch.from_numpy(options), is_cut)


def draw_by_definition(logits: npt.NDArray[np.float32], options: Options) -> int:
    """A draw in whole numbers of Python, after a sort of all tokens."""
    scale, min_weight, top_k, top_p, uniform = options.tolist()
    weights = np.empty(len(logits), np.int64)
    weights_of(logits, float(logits.max()), scale, weights)
    order = list(range(len(logits)))
    if top_k < len(logits) or top_p < 1 or min_weight > 0:
        order = [at for at in np.argsort(-logits, kind="stable").tolist() if weights[at] >= max(1, min_weight)]
        order = order[: int(top_k)]
    total = sum(int(weights[at]) for at in order)
    if top_p < 1:
        target, running, kept = min(max(1, math.ceil(top_p * float(total))), total), 0, []
        for at in order:
            if running < target:
                kept.append(at)
            running += int(weights[at])
        order = kept
        total = sum(int(weights[at]) for at in order)
    place, running = min(int(uniform * float(total)), total - 1), 0
    for at in order:
        running += int(weights[at])
        if running > place:
            return at
    raise AssertionError("no token")


@pytest.mark.parametrize("vocab", [3, 64, 1000, 5003])
def test_a_draw_takes_the_token_that_a_full_sort_would_give_it(vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    for _ in range(4):
        logits, options = some_logits(rng, 60, vocab), some_options(rng, 60, vocab)
        drawn = draws_of(options, vocab).draw(torch.from_numpy(logits))
        expected = [draw_by_definition(own, option) for own, option in zip(logits, options, strict=True)]
        assert drawn.tolist() == expected


@pytest.mark.parametrize("vocab", [5, 777, 20_000])
def test_other_devices_draw_what_a_cpu_draws(vocab: int) -> None:
    """Their weights may differ in the last of 42 bits, which no draw here meets."""
    rng = np.random.default_rng(vocab)
    for _ in range(3):
        logits, options = torch.from_numpy(some_logits(rng, 80, vocab)), some_options(rng, 80, vocab)
        draws = draws_of(options, vocab)
        assert draws.draw(logits).tolist() == draws.draw_sorted(logits).tolist()
        uncut = draws_of(np.where([True, False, False, False, True], options, [0, 0, vocab, 1, 0]), vocab)
        assert not uncut.is_cut
        assert uncut.draw(logits).tolist() == uncut.draw_sorted(logits).tolist()


def test_bfloat16_draws_what_its_float32_draws_whatever_its_rows() -> None:
    rng = np.random.default_rng(1)
    vocab = 40 * BLOCK + 7
    logits = torch.from_numpy(some_logits(rng, 100, vocab)).bfloat16()
    draws = draws_of(some_options(rng, 100, vocab), vocab)
    drawn = draws.draw(logits)
    assert drawn.tolist() == draws.draw(logits.float()).tolist()
    rows = torch.arange(99, -1, -3)
    some = Draws(rows, draws.options[rows], is_cut=True)
    assert some.draw(logits).tolist() == drawn[rows].tolist(), "neighbours change nothing"
    assert some.draw(logits.T.contiguous().T).tolist() == drawn[rows].tolist(), "rows need not be contiguous"


@pytest.mark.parametrize("special", [np.inf, np.nan, -np.inf])
def test_a_row_without_finite_numbers_gives_a_token(special: float) -> None:
    logits = np.zeros((1, 300), np.float32) if special != -np.inf else np.full((1, 300), -np.inf, np.float32)
    logits[0, 70] = special
    for options in (
        [1.0, 0, 300, 1, 0.5],
        [1.0, 0, 300, 0.9, 0.5],
        [1.0, 0, 40, 0.9, 0.5],
        [1.0, 2.0**40, 300, 1, 0.5],
    ):
        draws = draws_of(np.array([options]), 300)
        token = int(draws.draw(torch.from_numpy(logits)))
        assert token == (0 if special == -np.inf else 70)
        assert token == int(draws.draw_sorted(torch.from_numpy(logits)))


def test_the_shortest_beginning_is_that_of_the_sorted_list() -> None:
    rng = np.random.default_rng(2)
    for _ in range(200):
        keys = rng.permutation(200)[: rng.integers(1, 200)].astype(np.uint64)
        weights = rng.integers(1, 9, len(keys))
        order = (-keys.astype(np.int64)).argsort()
        running = weights[order].cumsum()
        target = int(rng.integers(1, running[-1] + 1))
        expected = int(running.searchsorted(target)) + 1
        length, total = shortest_beginning(keys.copy(), own := weights.copy(), len(keys), target, 0)
        assert (length, total) == (expected, running[expected - 1])
        assert own[:length].sum() == total
        count = int(rng.integers(1, len(keys) + 1))
        moved = keys.copy()
        assert shortest_beginning(moved, weights.copy(), len(keys), count, 1) == (count, count)
        assert sorted(moved[:count].tolist()) == sorted(keys[order[:count]].tolist())


def test_weights_are_shares_of_the_likeliest() -> None:
    values = np.linspace(-60, 0, 20_001).astype(np.float32)
    weights = np.empty(len(values), np.int64)
    weights_of(values, 0.0, math.log2(math.e), weights)
    assert np.abs(weights - np.exp(values.astype(np.float64)) * 2.0**WEIGHT_BITS).max() < 0.51
    assert weights[-1] == 1 << WEIGHT_BITS
