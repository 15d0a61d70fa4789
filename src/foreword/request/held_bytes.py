"""Counts the memory of data that callers send beside tokens, such as picture files, while requests hold the data."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from foreword.errors import MediaBusyError


class HeldBytes:
    """The number of bytes that all requests hold together. Any thread may call it."""

    def __init__(self, limit: int | None = None) -> None:
        """`limit`: in bytes; None: no limit, because a Python caller holds the data itself in any case."""
        self.limit = limit
        self.num_bytes = 0
        self._lock = threading.RLock()  # a finalizer may run in the thread that holds it

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
            if self.limit is not None and self.num_bytes + num_bytes > self.limit:
                raise MediaBusyError(
                    f"requests hold pictures or embeddings of {self.num_bytes} bytes, and {self.limit} may be held; "
                    "try again when some have ended"
                )
            self.num_bytes += num_bytes

    def _give_back(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes -= num_bytes
