"""Requests in the order in which they are served.

Knows requests; knows nothing of budgets, blocks or steps.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

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
