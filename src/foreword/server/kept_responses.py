"""Responses kept for `previous_response_id`, limited in number and in bytes.

Knows conversations and the answers that were sent; each tenant finds only its own.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from threading import Lock
from typing import Any

from foreword.server.access.tenants import Tenant
from foreword.server.api_errors import APIError
from foreword.server.bodies.json_pieces import to_long_json

Messages = list[dict[str, Any]]

PIECE_DEPTH = 7
"""Levels of a response that are written item by item, down to the log probabilities of single positions."""
MESSAGE_BYTES = 300
"""Estimated bytes of a message besides its texts."""


class KeptResponses:
    """Answers and their conversations by response id; the oldest are dropped for new ones.

    Answers are kept as JSON text: a dictionary of log probabilities takes several times the memory. Any thread may call
    `keep`; the rest belongs to the event loop.
    """

    def __init__(self, max_responses: int = 1000, max_bytes: int = 64 * 2**20) -> None:
        self.num_bytes = 0
        """Estimated bytes of everything that is kept."""
        self._kept: OrderedDict[str, tuple[str, Messages, str]] = OrderedDict()
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._lock = Lock()

    def keep(self, tenant: Tenant, messages: Messages, response: dict[str, Any]) -> None:
        """Keep a finished response, and the conversation that ends with it."""
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
            if dropped is not None:  # else `keep` in another thread has just dropped it
                self.num_bytes -= _num_bytes(dropped[1], dropped[2])


def _num_bytes(messages: Messages, written: str) -> int:
    return len(written) + sum(MESSAGE_BYTES + _size(message) for message in messages)


def _size(value: Any) -> int:
    """Estimated bytes of a message, however deep its parts lie."""
    if isinstance(value, dict):
        return sys.getsizeof(value) + sum(_size(key) + _size(one) for key, one in value.items())
    if isinstance(value, list):
        return sys.getsizeof(value) + sum(map(_size, value))
    return sys.getsizeof(value)
