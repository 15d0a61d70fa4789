"""Link: how a front reaches its replicas. Knows names, bytes and messages; `ray_link.py` is one, tests have others."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from foreword.errors import ForewordError
from foreword.fleet.messages import Told
from foreword.fleet.replica import ReplicaFacts


class ReplicaLostError(ForewordError):
    """A replica cannot be reached, or went away before its answer was complete."""

    def __init__(self, message: str, *, died: bool, comes_back: bool = False, may_be_healthy: bool = False) -> None:
        super().__init__(message)
        self.comes_back = comes_back
        """Whether it may be chosen again as soon as it takes requests."""
        self.may_be_healthy = may_be_healthy
        """Whether it could not be reached for a reason that may pass, such as the network."""
        self.died = died
        """Whether it ended while it had the request. Once the request has begun there, it may be the reason."""


class Members(Protocol):
    """Who is told which replicas there are."""

    def join(self, name: str, facts: ReplicaFacts) -> None:
        """A replica is ready."""

    def leave(self, name: str) -> None:
        """A replica is gone, or is going to be."""


class Link(Protocol):
    """The way to replicas by name. All methods are for the event loop."""

    def start(self, members: Members) -> None:
        """Begin to tell which replicas there are."""

    async def stop(self) -> None:
        """End it."""

    def generate(self, replica: str, data: bytes) -> AsyncGenerator[list[Told]]:
        """`Replica.generate` there. Closing the iterator aborts the request. Raises ReplicaLostError."""

    async def call(self, replica: str, data: bytes) -> bytes:
        """`Replica.call` there. Raises ReplicaLostError."""

    async def complaint(self, replica: str) -> str | None:
        """`Replica.complaint` there. Waits for a process that is stopped. Raises ReplicaLostError."""
