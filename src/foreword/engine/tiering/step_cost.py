"""StepCost: the seconds that the model needs for tokens, fitted to the steps so far."""

from __future__ import annotations

import numpy as np

from foreword.batch import Int64Array

LEAST_TOKENS = 64
"""Smaller steps cost mostly what a step costs whatever it computes, and say little about tokens."""
KEPT = 0.98
"""Weight of what is known after each step."""


class StepCost:
    """`seconds = a * tokens + b * tokens * context`, by least squares; older steps count less."""

    def __init__(self) -> None:
        self._products = np.zeros((2, 2))
        self._sums = np.zeros(2)
        self._fitted: tuple[float, float] | None = None
        """a and b; None: not known for the steps so far."""

    def note_step(self, starts: Int64Array, ends: Int64Array, seconds: float) -> None:
        """Note what a step cost that computed positions `starts` to `ends` (exclusive) of some requests."""
        tokens = ends - starts
        if tokens.sum() < LEAST_TOKENS:
            return
        facts = np.array([tokens.sum(), (tokens * (starts + ends)).sum() / 2], np.float64)
        self._products = KEPT * self._products + np.outer(facts, facts)
        self._sums = KEPT * self._sums + facts * seconds
        self._fitted = None

    def seconds(self, start: int, end: int) -> float | None:
        """Seconds to compute positions `start` to `end` (exclusive); None before the first step that says something."""
        if not self._products[0, 0]:
            return None
        if self._fitted is None:
            self._fitted = self._fit()
        a, b = self._fitted
        return (end - start) * (a + b * (start + end) / 2)

    def _fit(self) -> tuple[float, float]:
        (a, b), _, rank, _ = np.linalg.lstsq(self._products, self._sums, rcond=1e-9)
        if rank < 2 or a <= 0.0 or b < 0.0:  # the steps so far do not tell the two apart
            a, b = self._sums[0] / self._products[0, 0], 0.0
        return float(a), float(b)
