"""Dialect: an API that the server speaks, without its endpoints.

Several dialects share paths such as /v1/models, and unknown paths need an error in the caller's form. So the server
chooses a dialect for each call before it routes the call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from fastapi import APIRouter

from foreword.server.access.tenants import shown_key
from foreword.server.api_errors import APIError
from foreword.server.service import Service

Event = tuple[str | None, dict[str, Any] | str]
"""Name (or None) and data of a server-sent event. Long data comes as JSON text that was written off the event loop."""


class Dialect(ABC):
    """One API. The dialect's folder has the API's fields, endpoints and answers."""

    name: ClassVar[str]
    """The dialect's name. It may stand before every path of the dialect: /anthropic/v1/messages is /v1/messages."""
    routers: ClassVar[Sequence[APIRouter]]
    stream_end: ClassVar[bytes] = b""
    """The bytes after the last event of a stream."""
    error_event: ClassVar[str | None] = None
    """The name of the event with an error in a stream; None: it has no name."""
    ping: ClassVar[bytes | None] = None
    """Bytes that keep a stream alive while there is nothing to send; None if such bytes would break clients."""

    @abstractmethod
    def speaks(self, path: str, headers: Mapping[str, str]) -> bool:
        """Say whether a call is in this dialect, by its path and its headers."""

    def key(self, headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
        """Return the key that a call shows; None if it shows no key."""
        return shown_key(headers)

    def status(self, error: APIError) -> int:
        """Return the status of the answer to a failed call."""
        return error.status

    @abstractmethod
    def error(self, error: APIError, request_id: str) -> dict[str, Any]:
        """Return the body of the answer to a failed call, which is also the last event of a stream that fails."""

    @abstractmethod
    def models(self, service: Service, names: Sequence[str], query: Mapping[str, str]) -> Mapping[str, Any]:
        """Return the body that lists the models; `names`: the models that the caller may use."""

    @abstractmethod
    def model(self, service: Service, names: Sequence[str], name: str) -> Mapping[str, Any]:
        """Return the body that describes the model `name`. Raises APIError 404 if it is not among `names`."""
