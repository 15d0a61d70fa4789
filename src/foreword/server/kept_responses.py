"""Responses that are kept for `previous_response_id`, a bounded number and a bounded number of bytes of them.

Knows conversations and answers as they were sent, each for its own tenant only.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from threading import Lock
from typing import Any

from foreword.server.access.tenants import Tenant
from foreword.server.api_errors import APIError
from foreword.server.bodies.json_pieces import to_long_json

Messages = list[dict[str, str]]

PIECE_DEPTH = 7
"""Levels of a response that are written item by item, down to single positions' log probabilities."""
MESSAGE_BYTES = 300
"""What a message takes besides its text."""


class KeptResponses:
    """Answers and the conversations that they belong to, by response id; the oldest make room.

    Answers are kept as they are sent: a dictionary of log probabilities takes several times as much. `keep` may be
    called from any thread, the rest belongs to the event loop.
    """

    def __init__(self, max_responses: int = 1000, max_bytes: int = 64 * 2**20) -> None:
        self.num_bytes = 0
        """Of all that is kept, roughly."""
        self._kept: OrderedDict[str, tuple[str, Messages, str]] = OrderedDict()
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._lock = Lock()

    def keep(self, tenant: Tenant, messages: Messages, response: dict[str, Any]) -> None:
        """Remember a finished response, and what was said up to and with it."""
        written = to_long_json(response, PIECE_DEPTH)
        with self._lock:
            self._kept[response["id"]] = (tenant.name, messages, written)
            self.num_bytes += _num_bytes(messages, written)
            while len(self._kept) > self._max_responses or self.num_bytes > self._max_bytes:
                _, (_, dropped, dropped_written) = self._kept.popitem(last=False)
                self.num_bytes -= _num_bytes(dropped, dropped_written)

    def get(self, tenant: Tenant, response_id: str) -> tuple[Messages, str]:
        """Conversation and JSON of a tenant's response. Raises APIError 404."""
        owner, messages, written = self._kept.get(response_id, ("", [], ""))
        if not written or owner != tenant.name:
            raise APIError(404, f"Response with id {response_id[:100]!r} not found.", param="previous_response_id")
        return messages, written

    def delete(self, tenant: Tenant, response_id: str) -> None:
        """Forget a tenant's response. Raises APIError 404."""
        self.get(tenant, response_id)
        with self._lock:
            dropped = self._kept.pop(response_id, None)
            if dropped is not None:  # else a thread that keeps another one just made room
                self.num_bytes -= _num_bytes(dropped[1], dropped[2])


def _num_bytes(messages: Messages, written: str) -> int:
    return len(written) + sum(MESSAGE_BYTES + sys.getsizeof(message["content"]) for message in messages)
