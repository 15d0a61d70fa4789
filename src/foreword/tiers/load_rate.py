"""The rate of recent loads, and the estimate that it gives for the next load.

A tier that was slow once is not slow forever, but a tier without loads is not measured. So a slow rate counts for a
minute, and then the next load is a try.
"""

from __future__ import annotations

import time
from collections.abc import Callable

RATE_MEMORY = 0.8
"""Weight of the old rate when a new load is measured."""
RATE_MIN_BYTES = 1 << 20
"""The least bytes of a load that is measured."""
FIRST_GUESS_BYTES_PER_S = 500e6
LATENCY_S = 0.001
REMEMBERED_S = 60.0
"""The seconds for which a rate below the first guess counts after it was measured."""
LATE_MIN_S = 0.1
"""The least seconds of a load that is measured although its deadline ended it."""


class LoadRate:
    """A moving average. One thread measures, any thread may ask."""

    def __init__(self, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._measured_at = 0.0
        self.bytes_per_s = 0.0
        """The rate of recent loads; 0 before the first."""

    def estimate_s(self, num_bytes: int) -> float:
        """Seconds that a load of that size would take."""
        rate = self.bytes_per_s
        if not rate or self._monotonic() - self._measured_at > REMEMBERED_S:
            rate = max(rate, FIRST_GUESS_BYTES_PER_S)
        return LATENCY_S + num_bytes / rate

    def measure(self, num_bytes: int, seconds: float) -> None:
        if num_bytes >= RATE_MIN_BYTES and seconds > 0:
            rate, old = num_bytes / seconds, self.bytes_per_s
            self.bytes_per_s = RATE_MEMORY * old + (1 - RATE_MEMORY) * rate if old else rate
            self._measured_at = self._monotonic()

    def measure_late(self, num_bytes: int, seconds: float) -> None:
        """Note a load that its deadline ended after `num_bytes`; only this load decides the next estimate.

        A load that ran for less than `LATE_MIN_S` mostly waited for other loads, and says nothing about the tier.
        """
        if seconds >= LATE_MIN_S:
            self.bytes_per_s = max(1, num_bytes) / seconds
            self._measured_at = self._monotonic()
