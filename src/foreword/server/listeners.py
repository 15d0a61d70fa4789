"""Listeners: functions that are called with events of requests, and cannot harm the caller.

Knows functions and their exceptions. The engine's thread calls listeners (records, metrics, traces, quotas). A full
disk or a bug in a listener must not end that thread: an exception is counted, logged at most once a minute, and shown
by `/health` and `/metrics`; the listener is called again for the next request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOGS = 60.0

T = TypeVar("T")


class ListenerHealth:
    """The state of one listener. One thread writes it, any thread may read it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.num_failures = 0
        self.num_lost = 0
        """Requests that the listener lost."""
        self.failure: str | None = None
        """Why its last attempt failed; None if the attempt succeeded."""
        self._logged: float | None = None

    def failed(self, error: Exception | str) -> None:
        """Note a failed attempt, with its exception or a reason."""
        self.num_failures += 1
        self.failure = error if isinstance(error, str) else what_failed(error)
        now = time.monotonic()
        if self._logged is None or now - self._logged >= SECONDS_BETWEEN_LOGS:
            self._logged = now
            logger.error(
                "listener %s failed: %s (%d failures so far); requests are served all the same",
                self.name,
                error,
                self.num_failures,
                exc_info=error if isinstance(error, Exception) else None,
            )

    def worked(self) -> None:
        """Note a successful attempt."""
        if self.failure is not None:
            self.failure = None
            self._logged = None
            logger.info("listener %s works again; it lost %d requests so far", self.name, self.num_lost)


class Listener(Generic[T]):
    """A function that is called with events, and whose exceptions stop here."""

    def __init__(self, name: str, tell: Callable[[T], None]) -> None:
        self.health = ListenerHealth(name)
        self._tell = tell

    def __call__(self, what: T) -> None:
        try:
            self._tell(what)
        except Exception as error:
            self.health.num_lost += 1
            self.health.failed(error)
        else:
            self.health.worked()


def what_failed(error: Exception) -> str:
    """An error as shown to people without a key: the system's message, without paths or values."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    cause = error.__cause__
    return what_failed(cause) if isinstance(cause, Exception) else type(error).__name__
