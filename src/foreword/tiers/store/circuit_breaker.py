"""A circuit breaker: whether a server is worth another try.

It is open after some failures in a row and then leaves the server alone for a pause, which doubles with each try that
fails. The idea is Nygard's, from "Release It!".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class CircuitBreaker:
    """Closed: go on. Open: leave it. Half open: one caller is trying. Any thread may call any method."""

    def __init__(
        self,
        max_failures: int,
        first_pause_s: float = 1.0,
        longest_pause_s: float = 30.0,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_failures = max_failures
        self._first_pause_s, self._longest_pause_s = first_pause_s, longest_pause_s
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._state = "closed"
        self._failures = 0
        self._pause_s = first_pause_s
        self._try_at = 0.0
        self.num_trips = 0
        """How often it went from closed to open."""

    @property
    def state(self) -> str:
        """`closed`, `open` or `half-open`."""
        return self._state

    @property
    def is_closed(self) -> bool:
        return self._state == "closed"

    @property
    def seconds_to_try(self) -> float:
        """Until `may_try` gives the next try; 0 if it would now."""
        return max(0.0, self._try_at - self._monotonic())

    def may_try(self) -> bool:
        """Whether the caller may go on: always if closed, else one caller after each pause."""
        with self._lock:
            if self._state == "closed":
                return True
            if self._monotonic() < self._try_at:
                return False
            self._state = "half-open"
            # A caller that does not say how its try ended is not waited for.
            self._try_at = self._monotonic() + self._pause_s
            return True

    def succeeded(self) -> bool:
        """Close it. True if it was not closed."""
        with self._lock:
            was_closed = self._state == "closed"
            self._state, self._failures, self._pause_s = "closed", 0, self._first_pause_s
            return not was_closed

    def failed(self) -> bool:
        """Count a failure. True if it opens with this one."""
        with self._lock:
            if self._state == "half-open":
                self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
                self._open()
            elif self._state == "closed":
                self._failures += 1
                if self._failures >= self._max_failures:
                    self.num_trips += 1
                    self._open()
                    return True
            return False

    def trip(self) -> None:
        """Open it now."""
        with self._lock:
            self.num_trips += self._state == "closed"
            self._open()

    def _open(self) -> None:
        self._state = "open"
        self._try_at = self._monotonic() + self._pause_s
