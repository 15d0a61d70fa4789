"""Requests in the order in which they are served.

Knows requests; knows nothing of budgets, blocks or steps.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from operator import attrgetter

from foreword.request import Request

SERVICE_KEY = attrgetter("service_key")


class Queue:
    """Requests in the order in which they are served: priority (lower first), then arrival."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        bisect.insort(self._requests, request, key=SERVICE_KEY)

    def remove(self, request: Request) -> None:
        del self._requests[bisect.bisect_left(self._requests, request.service_key, key=SERVICE_KEY)]
