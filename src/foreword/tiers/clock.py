"""The disk tier's time: seconds that never go back, and the wall clock's seconds in files.

Within a process, ages and expiry are measured with the monotonic clock. Files hold times of the wall clock, which may
have jumped by years when the files are read.
"""

from __future__ import annotations

import time
from collections.abc import Callable

EPOCH = 1 << 31
"""The value of `now_s` when a clock is made. It is so large that the ages that files report can be subtracted."""
LATEST = (1 << 32) - 1


class Clock:
    """Seconds of this process. `wall` and `monotonic` are the clocks to ask."""

    def __init__(self, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._start = monotonic()

    def now_s(self) -> int:
        """`EPOCH` plus the number of seconds since the clock was made."""
        return min(LATEST, EPOCH + int(self._monotonic() - self._start))

    def wall_s(self) -> int:
        """Seconds since 1970 as the system has them; never negative."""
        return max(0, int(self._wall()))

    def expiry_of(self, created_s: int, expires_s: int) -> int:
        """The time, on this clock, at which data with these times of the wall clock expire; 0: never.

        Wherever the wall clock has jumped to, the data expire within their whole time to live, because a wall clock
        before `created_s` counts as `created_s`.
        """
        if expires_s == 0:
            return 0
        ttl_s = expires_s - max(self.wall_s(), created_s)
        return min(LATEST, self.now_s() + ttl_s) if ttl_s > 0 else 1

    def moment_before(self, age_s: int) -> int:
        """The time, on this clock, `age_s` seconds ago. Negative ages count as 0."""
        return max(1, self.now_s() - max(0, age_s))
