"""Uniform numbers, one for each (seed, step): numpy's Philox, for many seeds at once.

Philox4x64-10 is from Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011); numpy makes
one generator per seed, which takes microseconds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

FEW_SEEDS = 16
"""Below this number of seeds, numpy's own generators are faster; the numbers are the same."""
ROUNDS = 10
MULTIPLIERS = np.array([[0xD2E7470EE14C6C93], [0xCA5A826395121157]], np.uint64)
KEY_STEPS = np.array([[0x9E3779B97F4A7C15], [0xBB67AE8584CAA73B]], np.uint64)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def uniform_numbers(seeds: Words, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Numbers in [0, 1) for seeds and steps [n]: the first from each `np.random.Philox(key=seed, counter=step)`."""
    first = _few(seeds, steps) if len(seeds) < FEW_SEEDS else _many(seeds, steps)
    uniform: npt.NDArray[np.float64] = (first >> np.uint64(11)).astype(np.float64) / 2**53
    return uniform


def _few(seeds: Words, steps: npt.NDArray[np.int64]) -> Words:
    pairs = zip(seeds.tolist(), steps.tolist(), strict=True)
    generators = [np.random.Philox(key=seed, counter=step) for seed, step in pairs]
    return np.array([generator.random_raw() for generator in generators], np.uint64)


def _many(seeds: Words, steps: npt.NDArray[np.int64]) -> Words:
    nothing = np.zeros(len(seeds), np.uint64)
    key = np.stack((seeds, nothing))
    # Words 0 and 2 of the counter, then 1 and 3. numpy increments the counter before it draws.
    even, odd = np.stack((steps.astype(np.uint64) + np.uint64(1), nothing)), np.zeros_like(key)
    for _ in range(ROUNDS):
        high, low = _product(MULTIPLIERS, even)
        even, odd = high[::-1] ^ odd ^ key, low[::-1]
        key += KEY_STEPS
    first: Words = even[0]
    return first


def _product(left: Words, right: Words) -> tuple[Words, Words]:
    """Upper and lower 64 bits of 128-bit products."""
    left_low, left_high = left & _LOW, left >> _HALF
    right_low, right_high = right & _LOW, right >> _HALF
    low = left_low * right_low
    middle = left_high * right_low + (low >> _HALF)
    other = left_low * right_high + (middle & _LOW)
    return left_high * right_high + (middle >> _HALF) + (other >> _HALF), left * right
