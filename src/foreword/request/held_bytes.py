"""Counts the memory of data that callers send beside tokens, such as picture files, while requests hold the data."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from foreword.errors import MediaBusyError

PASS_EVERY_S = 1.0
"""The least seconds between two garbage collections that are to free memory. One may stop the process for 100 ms."""


class HeldBytes:
    """The number of bytes that all requests hold together. Any thread may call it."""

    def __init__(self, limit: int | None = None) -> None:
        """`limit`: in bytes; None: no limit, because a Python caller holds the data itself in any case."""
        self.limit = limit
        self.num_bytes = 0
        self._lock = threading.RLock()  # a finalizer may run in the thread that holds it
        self._next_pass = 0.0

    def __reduce__(self) -> tuple[type[HeldBytes], tuple[int | None]]:
        """Pickle the limit alone: in another process no bytes are held yet."""
        return HeldBytes, (self.limit,)

    def hold(self, thing: object, num_bytes: int) -> None:
        """Count bytes until `thing` is freed. Raises MediaBusyError if requests hold too many."""
        self._take(num_bytes)
        weakref.finalize(thing, self._give_back, num_bytes).atexit = False

    @contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """Count bytes while the context is open. Raises MediaBusyError if requests hold too many."""
        self._take(num_bytes)
        try:
            yield
        finally:
            self._give_back(num_bytes)

    def _take(self, num_bytes: int) -> None:
        with self._lock:
            if self._lacks_room(num_bytes) and time.monotonic() >= self._next_pass:
                gc.collect()  # a client that left, or a replica that died, may leave what it held in cycles
                self._next_pass = time.monotonic() + PASS_EVERY_S
            if self._lacks_room(num_bytes):
                raise MediaBusyError(
                    f"requests hold pictures or embeddings of {self.num_bytes} bytes, and {self.limit} may be held; "
                    "try again when some have ended"
                )
            self.num_bytes += num_bytes

    def _lacks_room(self, num_bytes: int) -> bool:
        return self.limit is not None and self.num_bytes + num_bytes > self.limit

    def _give_back(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes -= num_bytes
