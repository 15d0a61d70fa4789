"""Link: how a front reaches its replicas, by name, with bytes and messages. `RayLink` is one; tests have others."""

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
        """Whether the request may choose the replica again once the replica takes requests."""
        self.may_be_healthy = may_be_healthy
        """Whether the replica could not be reached for a reason that may pass, such as the network."""
        self.died = died
        """Whether the replica ended while it had the request. A request that had begun there may be the cause."""


class Members(Protocol):
    """Learns which replicas join and leave."""

    def join(self, name: str, facts: ReplicaFacts) -> None:
        """Called when a replica is ready."""

    def leave(self, name: str) -> None:
        """Called when a replica is gone, or will be soon."""


class Link(Protocol):
    """The way to replicas by name. All methods must be called on the event loop."""

    def start(self, members: Members) -> None:
        """Begin to tell `members` which replicas join and leave."""

    async def stop(self) -> None:
        """Stop the reports."""

    def generate(self, replica: str, data: bytes) -> AsyncGenerator[list[Told]]:
        """Call `Replica.generate` at a replica. Closing the iterator aborts the request. Raises ReplicaLostError."""

    async def call(self, replica: str, data: bytes) -> bytes:
        """Call `Replica.call` at a replica. Raises ReplicaLostError."""

    async def complaint(self, replica: str) -> str | None:
        """Call `Replica.complaint` at a replica, and wait while its process is stopped. Raises ReplicaLostError."""
