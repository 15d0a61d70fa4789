"""Chooses a replica if the router knows no replica's cache: consistent hashing with bounded loads.

The method is that of Mirrokni, Thorup and Zadimoghaddam (2018). Clockwise from the request's point, the first replica
with room takes the request. A replica has room up to `1 + slack` times its fair share of the open requests.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import Int64Array

POINTS_PER_REPLICA = 64


class HashRing:
    """Points of replicas on a circle of 64-bit numbers."""

    def __init__(self) -> None:
        self._points: list[tuple[int, int]] = []
        """(point, slot), in order."""

    def add(self, name: str, slot: int) -> None:
        """Add a replica. Its points depend on its name alone."""
        points = [(_point(f"{name}\n{number}"), slot) for number in range(POINTS_PER_REPLICA)]
        self._points = sorted(self._points + points)

    def remove(self, slot: int) -> None:
        self._points = [point for point in self._points if point[1] != slot]

    def find(self, key: object, usable: npt.NDArray[np.bool_], num_open: Int64Array, slack: float) -> int:
        """The slot of the first usable replica that has room for a request, clockwise from the key's point.

        `num_open` [slots] counts open requests. The replica with the fewest requests always has room.
        """
        room = math.ceil((1 + slack) * (int(num_open[usable].sum()) + 1) / int(np.count_nonzero(usable)))
        start = bisect_left(self._points, (_point(key), -1))
        for at in range(start, start + len(self._points)):
            slot = self._points[at % len(self._points)][1]
            if usable[slot] and num_open[slot] < room:
                return slot
        raise AssertionError("no replica has room")


def _point(key: object) -> int:
    data = key if isinstance(key, bytes) else str(key).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")
