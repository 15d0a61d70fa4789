"""Link: how a front reaches its replicas. Knows names, bytes and messages; `ray_link.py` is one, tests have others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from foreword.errors import ForewordError
from foreword.fleet.messages import Told


class ReplicaLostError(ForewordError):
    """A replica cannot be reached, or went away before its answer was complete."""

    def __init__(self, message: str, *, died: bool) -> None:
        super().__init__(message)
        self.died = died
        """Whether it ended while it worked for the request, so that the request may be the reason."""


class Link(Protocol):
    """The way to replicas by name. All methods are for the event loop."""

    def generate(self, replica: str, data: bytes) -> AsyncIterator[list[Told]]:
        """`Replica.generate` there. Closing the iterator aborts the request. Raises ReplicaLostError."""

    async def call(self, replica: str, data: bytes) -> bytes:
        """`Replica.call` there. Raises ReplicaLostError."""
