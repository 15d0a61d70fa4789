"""Measures the time of prefill per token in the steps that run. Knows counts and seconds."""

from __future__ import annotations


class PrefillSpeed:
    """Seconds per prompt token, measured over steps that are mostly prefill."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._seconds = 0.0

    def note_step(self, num_tokens: int, num_running: int, seconds: float) -> None:
        """Note a step of `num_tokens` tokens for `num_running` requests. Steps that mostly decode do not count."""
        if num_tokens >= 2 * num_running + 16:
            self._num_tokens += num_tokens
            self._seconds += seconds

    @property
    def seconds_per_token(self) -> float:
        """Mean since the start; 0.0 before the first prefill."""
        return self._seconds / self._num_tokens if self._num_tokens else 0.0
