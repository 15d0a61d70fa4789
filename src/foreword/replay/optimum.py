"""The best that any eviction policy could do if it knew the future: Belady's rule on prefixes.

Knows the prefix keys of all requests, in order. After each request, the cache keeps the blocks that are needed soonest,
among the held blocks and the request's new ones. It never keeps a block that is not needed again (bypass). A head is
needed no later than its tail, so the tail goes first, and every kept block can be found.

After Belady, "A study of replacement algorithms for a virtual-storage computer" (1966).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from foreword.cache.block_ids import Int64Array
from foreword.replay.keys import PrefixKeys


class Optimum:
    """All requests of a recording, ready to be replayed at any capacity. 16 bytes a block."""

    def __init__(self, requests: Sequence[PrefixKeys]) -> None:
        lengths = np.array([len(keys) for keys in requests], np.int64)
        self._starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths)))
        keys = np.concatenate(requests) if requests else np.empty(0, np.uint64)
        unique, ids = np.unique(keys, return_inverse=True)
        self._num_blocks = len(unique)
        self._ids: Int64Array = ids.astype(np.int64)
        self._next_use = _next_uses(self._ids, np.repeat(np.arange(len(requests)), lengths), len(requests))

    def hits(self, capacity: int) -> Int64Array:
        """Number of leading blocks that were held when each request came, [requests]."""
        num_requests = len(self._starts) - 1
        needed_at = [-1] * self._num_blocks  # the request that needs it next; -1: not held
        latest: list[tuple[int, int, int]] = []  # heap of (-needed at, -depth, id); stale if it is needed earlier
        num_held = 0
        hits = np.zeros(num_requests, np.int64)
        for request in range(num_requests):
            start, end = self._starts[request : request + 2]
            ids = self._ids[start:end].tolist()
            num_hits = next((n for n, block in enumerate(ids) if needed_at[block] < 0), len(ids))
            hits[request] = num_hits
            for depth, (block, needed) in enumerate(zip(ids, self._next_use[start:end].tolist(), strict=True)):
                num_held -= needed_at[block] >= 0
                needed_at[block] = -1
                if needed < num_requests:
                    needed_at[block] = needed
                    num_held += 1
                    heapq.heappush(latest, (-needed, -depth, block))
            while num_held > capacity:
                needed, _, block = heapq.heappop(latest)
                if needed_at[block] == -needed:
                    needed_at[block] = -1
                    num_held -= 1
        return hits


def _next_uses(ids: Int64Array, request_of: Int64Array, never: int) -> Int64Array:
    """For each access, the request in which its block is used next, or `never`."""
    order = np.lexsort((request_of, ids))
    again = np.full(len(ids), never, np.int64)
    same = ids[order[1:]] == ids[order[:-1]]
    again[order[:-1][same]] = request_of[order[1:][same]]
    return again
