"""Responses kept for `previous_response_id`, limited in number and bytes. A tenant finds only its own responses."""

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
"""The number of levels of a response that are written item by item, down to single log probabilities."""
MESSAGE_BYTES = 300
"""Estimated bytes of a message without its texts."""


class KeptResponses:
    """Answers and their conversations, by response id. Beyond a limit, the tenant with the most loses its oldest.

    Answers are kept as JSON text, because a dictionary of log probabilities takes several times the memory. Any thread
    may call `keep`, but only the event loop may call the other methods.
    """

    def __init__(self, max_responses: int = 1000, max_bytes: int = 64 * 2**20) -> None:
        self.num_bytes = 0
        """Estimated bytes of everything that is kept."""
        self._responses: OrderedDict[str, tuple[str, Messages, str]] = OrderedDict()
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._lock = Lock()
        self._num_of, self._bytes_of = Counter[str](), Counter[str]()
        """Numbers and bytes of responses, by tenant."""
        self._uses = Counter[int]()
        """The number of uses of each picture, by the file's identity. The bytes of a shared picture count once."""

    def keep(self, tenant: Tenant, messages: Messages, response: dict[str, Any]) -> None:
        """Keep a finished response, and the conversation that ends with it."""
        json_text = to_long_json(response, PIECE_DEPTH)
        with self._lock:
            self._responses[response["id"]] = (tenant.name, messages, json_text)
            self._count(tenant.name, 1, _num_bytes(messages, json_text) + self._picture_bytes(messages, 1))
            while len(self._responses) > self._max_responses or self.num_bytes > self._max_bytes:
                shares = self._num_of if len(self._responses) > self._max_responses else self._bytes_of
                [(largest, _)] = shares.most_common(1)
                self._drop(next(name for name, (owner, _, _) in self._responses.items() if owner == largest))

    def get(self, tenant: Tenant, response_id: str) -> tuple[Messages, str]:
        """Return the conversation and the JSON text of a tenant's response. Raises APIError 404."""
        owner, messages, json_text = self._responses.get(response_id, ("", [], ""))
        if not json_text or owner != tenant.name:
            message = (
                f"Response with id {response_id[:100]!r} not found: it was not stored, or was deleted, or is not among "
                f"the {self._max_responses} that are kept. Send the whole conversation as input instead."
            )
            raise APIError(404, message, param="previous_response_id")
        return messages, json_text

    def delete(self, tenant: Tenant, response_id: str) -> None:
        """Forget a tenant's response. Raises APIError 404."""
        self.get(tenant, response_id)
        with self._lock:
            if response_id in self._responses:  # otherwise `keep` in another thread has just dropped it
                self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        owner, messages, json_text = self._responses.pop(response_id)
        self._count(owner, -1, -_num_bytes(messages, json_text) - self._picture_bytes(messages, -1))

    def _picture_bytes(self, messages: Messages, change: int) -> int:
        """Count uses of pictures. Returns the bytes of the pictures that became used or unused."""
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


def _num_bytes(messages: Messages, json_text: str) -> int:
    return len(json_text) + sum(MESSAGE_BYTES + _size(message) for message in messages)


def _size(value: Any) -> int:
    """Estimate the bytes of a message with all its nested parts."""
    if isinstance(value, dict):
        return sys.getsizeof(value) + sum(_size(key) + _size(item) for key, item in value.items())
    if isinstance(value, list):
        return sys.getsizeof(value) + sum(map(_size, value))
    return sys.getsizeof(value)
