"""How likely the blocks that a full pool evicts next would have been used again."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
NUM_DOUBLINGS = 24


class ReuseAges:
    """Learns which share of the prefixes of an age (seconds since the last use) is used before that age doubles.

    A new block takes a place of a full pool for about the age at which the pool evicts. So other blocks are evicted
    earlier: by that age in total, which is one doubling. So each new block costs about `chances(age)` uses (hazard rate
    times age).
    """

    def __init__(self) -> None:
        self._ended: FloatArray = np.zeros(NUM_DOUBLINGS)
        self._reused: FloatArray = np.zeros(NUM_DOUBLINGS)
        self._chances: FloatArray | None = None
        """For each doubling of the age, the chance of a use; None if the chances must be computed anew."""

    def note_reuse(self, age_s: float) -> None:
        """Record that a prefix was used again `age_s` seconds after its last use."""
        self._reused[_doubling(age_s)] += 1
        self.note_eviction(age_s)

    def note_eviction(self, age_s: float) -> None:
        """Record that a prefix was evicted `age_s` seconds after its last use."""
        self._ended[_doubling(age_s)] += 1
        self._chances = None

    def chances(self, ages_s: FloatArray) -> FloatArray:
        """The expected number of uses lost per block that is evicted at these ages, 0 to 1."""
        if self._chances is None:
            self._chances = self._reused / (np.cumsum(self._ended[::-1])[::-1] + 1)
        doublings = np.log2(np.maximum(ages_s, 1)).astype(np.int64)
        chances: FloatArray = self._chances[np.minimum(doublings, NUM_DOUBLINGS - 1)]
        return chances


def _doubling(age_s: float) -> int:
    return min(NUM_DOUBLINGS - 1, int(math.log2(max(age_s, 1.0))))
