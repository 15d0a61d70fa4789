"""A warning that may come often, and is logged at most once a minute."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

PERIOD_S = 60.0


class RareWarning:
    """Logs the first of many warnings at once, then at most one a minute, with their number. Any thread may call it."""

    def __init__(self, logger: logging.Logger, text: str, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._text, self._monotonic = logger, text + "%s", monotonic
        self._lock = threading.Lock()
        self._next_at = -PERIOD_S
        self._num_silent = 0
        """The number of warnings that were not logged since the last log line."""

    def note(self, *facts: object) -> bool:
        """Log the warning, or only count it; `facts` fill its text. Returns True if it was logged."""
        with self._lock:
            if (now := self._monotonic()) < self._next_at:
                self._num_silent += 1
                return False
            self._next_at, num_silent, self._num_silent = now + PERIOD_S, self._num_silent, 0
        more = f" ({num_silent} more since the last such line)" if num_silent else ""
        self._logger.warning(self._text, *facts, more)
        return True
