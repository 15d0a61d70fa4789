"""CachedContent: the beginning of conversations that a tenant has the server keep under a name."""

from __future__ import annotations

import re
import secrets
import sys
from dataclasses import dataclass, replace

OVERHEAD_BYTES = 1024
"""Estimated bytes of a resource besides its source."""

_ID = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class CachedContent:
    """One resource. Times are in microseconds since 1970."""

    id: str
    tenant: str
    model: str
    """The served name that its maker gave."""
    display_name: str
    cache_salt: str | None
    source: bytes
    """What it begins conversations with, as JSON text in UTF-8."""
    created_us: int
    updated_us: int
    expires_us: int
    num_tokens: int = 0
    """Tokens of the source in a prompt."""

    @property
    def num_bytes(self) -> int:
        """Estimated bytes in memory."""
        names = (self.id, self.tenant, self.model, self.display_name, self.cache_salt or "")
        return len(self.source) + sum(map(sys.getsizeof, names)) + OVERHEAD_BYTES

    def until(self, expires_us: int, now_us: int) -> CachedContent:
        """Itself with another end."""
        return replace(self, expires_us=expires_us, updated_us=now_us)


def new_content_id() -> str:
    """An id that nobody can guess."""
    return secrets.token_hex(16)


def is_content_id(name: str) -> bool:
    """Whether a name can be an id, and so part of a path."""
    return _ID.fullmatch(name) is not None
