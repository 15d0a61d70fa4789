"""UnknownFields: refuses or ignores fields of a body that the server does not know.

By default the server refuses unknown fields, so that a typing mistake is not taken for a default. Where gateways add
fields of their own, the server can ignore them; it then logs each name once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from threading import Lock
from typing import Any, TypeVar

from pydantic import ValidationError

from foreword.server.bodies.fields import Body

logger = logging.getLogger(__name__)

MAX_LOGGED = 256
"""Most names that are logged and remembered."""

AnyBody = TypeVar("AnyBody", bound=Body)
Place = tuple[int | str, ...]


class UnknownFields:
    """One server's treatment of unknown fields. Safe to use from any thread."""

    def __init__(self, *, ignored: bool) -> None:
        self._ignored = ignored
        self._logged: set[str] = set()
        self._lock = Lock()

    def validate(self, model: type[AnyBody], body: Any) -> AnyBody:
        """Validate parsed JSON; unknown fields are removed from it if they are ignored. Raises ValidationError."""
        try:
            return model.model_validate(body)
        except ValidationError as error:
            unknown = _unknown(error)
            if not self._ignored or not unknown:
                raise
        for place in unknown:
            _remove(body, place)
            self._log(place)
        return model.model_validate(body)

    def _log(self, place: Place) -> None:
        name = ".".join(str(part) for part in place if isinstance(part, str))[:100]
        with self._lock:
            if name in self._logged or len(self._logged) >= MAX_LOGGED:
                return
            self._logged.add(name)
        logger.warning("requests have the field %r, which is unknown here; it is ignored", name)


def _unknown(error: ValidationError) -> Sequence[Place]:
    found = error.errors(include_url=False, include_input=False)
    return [one["loc"] for one in found if one["type"] == "extra_forbidden"]


def _remove(body: Any, place: Sequence[Any]) -> None:
    """Remove a field. Some parts of its place name a type of a union, not a key; they are skipped."""
    *inside, name = place
    for part in inside:
        inner = body[part] if isinstance(body, list) and isinstance(part, int) else None
        if isinstance(body, dict):
            inner = body.get(part)
        if isinstance(inner, dict | list):  # a type may have the name of one of its fields
            body = inner
    if isinstance(body, dict):
        body.pop(name, None)
