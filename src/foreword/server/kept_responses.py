"""Responses kept for `previous_response_id`, limited in number and in bytes.

Knows conversations and the answers that were sent; each tenant finds only its own.
"""

from __future__ import annotations

import sys
from collections import Counter, OrderedDict
from threading import Lock
from typing import Any

from foreword.server.access.tenants import Tenant
from foreword.server.api_errors import APIError
from foreword.server.bodies.json_scan import to_long_json
from foreword.text.conversation import pictures_of

Messages = list[dict[str, Any]]

PIECE_DEPTH = 7
"""Levels of a response that are written item by item, down to the log probabilities of single positions."""
MESSAGE_BYTES = 300
"""Estimated bytes of a message besides its texts."""


class KeptResponses:
    """Answers and their conversations by response id; for new ones the oldest are dropped of the tenant with most.

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
        self._num_of, self._bytes_of = Counter[str](), Counter[str]()
        """By tenant."""
        self._uses = Counter[int]()
        """Of pictures, by their files' identity: a conversation's turns share them, and they count once."""

    def keep(self, tenant: Tenant, messages: Messages, response: dict[str, Any]) -> None:
        """Keep a finished response, and the conversation that ends with it."""
        written = to_long_json(response, PIECE_DEPTH)
        with self._lock:
            self._kept[response["id"]] = (tenant.name, messages, written)
            self._count(tenant.name, 1, _num_bytes(messages, written) + self._picture_bytes(messages, 1))
            while len(self._kept) > self._max_responses or self.num_bytes > self._max_bytes:
                shares = self._num_of if len(self._kept) > self._max_responses else self._bytes_of
                [(most, _)] = shares.most_common(1)
                self._drop(next(name for name, (owner, _, _) in self._kept.items() if owner == most))

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
            if response_id in self._kept:  # else `keep` in another thread has just dropped it
                self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        owner, messages, written = self._kept.pop(response_id)
        self._count(owner, -1, -_num_bytes(messages, written) - self._picture_bytes(messages, -1))

    def _picture_bytes(self, messages: Messages, change: int) -> int:
        """Count uses of pictures, and return the bytes of those that are new, or that nobody uses any more."""
        num_bytes = 0
        for file in pictures_of(messages):
            self._uses[id(file)] += change
            if self._uses[id(file)] == max(change, 0):
                num_bytes += file.num_bytes
            if not self._uses[id(file)]:
                del self._uses[id(file)]
        return num_bytes

    def _count(self, owner: str, number: int, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._num_of[owner] += number
        self._bytes_of[owner] += num_bytes


def _num_bytes(messages: Messages, written: str) -> int:
    return len(written) + sum(MESSAGE_BYTES + _size(message) for message in messages)


def _size(value: Any) -> int:
    """Estimated bytes of a message, however deep its parts lie."""
    if isinstance(value, dict):
        return sys.getsizeof(value) + sum(_size(key) + _size(one) for key, one in value.items())
    if isinstance(value, list):
        return sys.getsizeof(value) + sum(map(_size, value))
    return sys.getsizeof(value)
