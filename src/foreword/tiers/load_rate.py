"""The rate of recent loads, which gives an estimate for the next load.

A tier that was slow once is not slow forever, but only loads measure the tier. So a slow rate counts for a minute, and
then the tier is tried again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

RATE_MEMORY = 0.8
"""Weight of the old rate when a new load is measured."""
RATE_MIN_BYTES = 1 << 20
"""Only loads of at least this number of bytes are measured."""
FIRST_GUESS_BYTES_PER_S = 500e6
LATENCY_S = 0.001
REMEMBERED_S = 60.0
"""A rate below the first guess counts for this number of seconds after it was measured."""
LATE_MIN_S = 0.1
"""A load that its deadline ended is measured if it ran for at least this number of seconds."""


class LoadRate:
    """A moving average of the rate of loads, in bytes per second. One thread measures; any thread may ask."""

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
        """Record a load that its deadline ended after `num_bytes` bytes. Only this load decides the next estimate.

        A load that ran for less than `LATE_MIN_S` mostly waited for other loads, so it is not measured.
        """
        if seconds >= LATE_MIN_S:
            self.bytes_per_s = max(1, num_bytes) / seconds
            self._measured_at = self._monotonic()
