"""Each replica's prefill rate, learnt from the prompts that it computes.

Knows slots, tokens and seconds. A rate that an operator or a simulation declares is corrected by what is measured. One
that nobody knows is the mean of all such replicas, as they mostly run on equal machines and a measurement is noisy:

    own rate      mean of the replica's measurements; late ones, and many, count more
    its rate      the mean of all until the replica's own measurements outweigh `DOUBT`, and while it is `ALIKE`

So a slow first prompt, which compiled something, keeps no replica from requests: what it measured fades while others
are measured. A replica that is really slower is measured again, and found slower again.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foreword.cluster.reuse_ages import FloatArray

RATE_WEIGHT = 0.1
"""Weight of the newest measurement of a declared rate."""
MAX_RATE_STEP = 4.0
"""A measurement that is further from what is known counts as this many times more, or less."""
DOUBT = 4.0
"""The number of measurements that the mean of all counts as."""
FADING = 0.9
"""What a measurement of any replica leaves of the weight of earlier ones."""
ALIKE = 0.25
"""Replicas whose rates differ from the mean by less than this share count as equal: their caches are filled evenly."""


class Rates:
    """The rates of all slots."""

    def __init__(self) -> None:
        self.tokens_per_s: FloatArray = np.zeros(0)
        self._own: FloatArray = np.zeros(0)
        self._trust: FloatArray = np.zeros(0)
        """The number of measurements that count."""
        self._is_pooled: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)

    def grow(self) -> None:
        """Add a slot in no use."""
        self.tokens_per_s = np.append(self.tokens_per_s, 1.0)
        self._own, self._trust = np.append(self._own, 0.0), np.append(self._trust, 0.0)
        self._is_pooled = np.append(self._is_pooled, False)

    def join(self, slot: int, tokens_per_s: float, *, is_known: bool) -> None:
        """A replica takes a slot. `is_known`: whether its rate is declared; otherwise it is a guess."""
        self.tokens_per_s[slot], self._own[slot], self._trust[slot] = tokens_per_s, 0.0, 0.0
        self._is_pooled[slot] = not is_known
        self._share()

    def leave(self, slot: int) -> None:
        """A replica is gone."""
        self._is_pooled[slot], self._trust[slot] = False, 0.0

    def note(self, slot: int, measured: float) -> None:
        """A replica computed this many tokens a second."""
        known = self.tokens_per_s[slot]
        measured = min(max(measured, known / MAX_RATE_STEP), known * MAX_RATE_STEP)
        if not self._is_pooled[slot]:
            self.tokens_per_s[slot] += RATE_WEIGHT * (measured - known)
            return
        self._trust *= FADING
        self._trust[slot] += 1.0
        self._own[slot] += (measured - self._own[slot]) / self._trust[slot]
        self._share()

    def _share(self) -> None:
        """The rates of those whose rate nobody declared."""
        total = self._trust.sum()
        if total <= 0.0:
            return
        mean = (self._trust * self._own).sum() / total
        rates = (self._trust * self._own + DOUBT * mean) / (self._trust + DOUBT)
        rates[np.abs(rates - mean) < ALIKE * mean] = mean
        self.tokens_per_s[self._is_pooled] = rates[self._is_pooled]
