"""Requests in the order in which they are served, and prefixes that one of them computes for others.

Knows requests and keys of blocks; knows nothing of budgets, blocks or steps.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

from foreword.cache import BlockHash
from foreword.request import Request

SortKey = tuple[int, int]
"""Priority, number of arrival."""


class Queue:
    """Requests in the order in which they are served: priority (lower first), then arrival."""

    def __init__(self) -> None:
        self._keys: list[SortKey] = []
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, key: SortKey, request: Request) -> None:
        at = bisect.bisect(self._keys, key)
        self._keys.insert(at, key)
        self._requests.insert(at, request)

    def remove(self, key: SortKey) -> None:
        at = bisect.bisect_left(self._keys, key)
        del self._keys[at], self._requests[at]

    def last(self) -> Request:
        return self._requests[-1]


class InFlightPrefixes:
    """Blocks of prompts that admitted requests have still to compute.

    A waiting request whose next missing block is here waits for it instead of computing it a second
    time. Each key belongs to the request that computes it, and is dropped when that request has
    computed its prompt or leaves.
    """

    def __init__(self) -> None:
        self._owner_of: dict[BlockHash, str] = {}
        self._keys_of: dict[str, Sequence[BlockHash]] = {}

    def __contains__(self, key: BlockHash) -> bool:
        return key in self._owner_of

    def __len__(self) -> int:
        return len(self._owner_of)

    def open(self, request_id: str, keys: Sequence[BlockHash]) -> None:
        self._keys_of[request_id] = keys
        for key in keys:
            self._owner_of.setdefault(key, request_id)

    def owner_of(self, key: BlockHash) -> str | None:
        """The request that computes a block."""
        return self._owner_of.get(key)

    def owner_ids(self) -> set[str]:
        """Requests that have prefixes open."""
        return set(self._keys_of)

    def close(self, request_id: str) -> None:
        for key in self._keys_of.pop(request_id, ()):
            if self._owner_of.get(key) == request_id:
                del self._owner_of[key]
