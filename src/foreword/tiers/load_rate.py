"""The rate of recent loads, and what it says of the next one.

Knows bytes and seconds.
"""

from __future__ import annotations

RATE_MEMORY = 0.8
"""Weight of the old rate when a new load is measured."""
RATE_MIN_BYTES = 1 << 20
"""Of loads that are measured."""
FIRST_GUESS_BYTES_PER_S = 500e6
LATENCY_S = 0.001


class LoadRate:
    """A moving average. One thread measures, any thread may ask."""

    def __init__(self) -> None:
        self.bytes_per_s = 0.0
        """Of recent loads; 0 before the first."""

    def estimate_s(self, num_bytes: int) -> float:
        """Seconds that a load of that size would take."""
        return LATENCY_S + num_bytes / (self.bytes_per_s or FIRST_GUESS_BYTES_PER_S)

    def measure(self, num_bytes: int, seconds: float) -> None:
        """Note a load that has ended."""
        if num_bytes >= RATE_MIN_BYTES and seconds > 0:
            rate, old = num_bytes / seconds, self.bytes_per_s
            self.bytes_per_s = RATE_MEMORY * old + (1 - RATE_MEMORY) * rate if old else rate
