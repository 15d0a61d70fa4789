"""HttpRequests: how many calls each endpoint answered with which status, those that were refused too."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import MutableMapping
from typing import Any

from foreword.server.api_errors import APIError

logger = logging.getLogger(__name__)

UNKNOWN = "unknown"
"""The endpoint of paths that there are none of: clients may make up any number of them."""


class HttpRequests:
    """Counts of calls. Belongs to the event loop; other threads may read `counts`."""

    def __init__(self, *, logs_refusals: bool) -> None:
        self.counts = Counter[tuple[str, str]]()
        """By endpoint and status."""
        self.num_running = 0
        """Calls that have come and not ended."""
        self._logs_refusals = logs_refusals

    def note(self, scope: MutableMapping[str, Any], status: int) -> None:
        """Count a call that has ended. `scope["state"]["error"]` is what refused it."""
        endpoint = getattr(scope.get("route"), "path", None) or UNKNOWN
        self.counts[endpoint, str(status)] += 1
        if status < 400 or not self._logs_refusals:
            return
        error = scope.get("state", {}).get("error")
        code, param = (error.code, error.param) if isinstance(error, APIError) else (None, None)
        fields = {
            "event": "refused",
            "request_id": scope.get("state", {}).get("request_id"),
            "method": scope["method"],
            "endpoint": endpoint,
            "status": status,
            "code": code,
            "param": param,
        }
        logger.info(
            "%s %s answered with %d%s%s",
            scope["method"],
            endpoint,
            status,
            f", {code}" if code else "",
            f", of {param}" if param else "",
            extra={"fields": fields},
        )
