"""Compiled grammars, kept for later requests that ask for them, limited in bytes."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

MAX_KEPT_BYTES = 64 * 2**20
MAX_KEPT = 64

BYTES_PER_CHARACTER = 256
"""Bytes that llguidance takes per character of a source: measured 60 for properties of objects, 90 for patterns, 240
for nested objects.
"""
LEAST_BYTES = 64 * 1024


class KeptGrammars:
    """The most recently used grammars. Belongs to one thread at a time."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self.num_bytes = 0
        """The bytes of all kept grammars, estimated from their sources."""
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, str], Any] = OrderedDict()

    def get(self, kind: str, source: str) -> Any:
        """The result for a source; None if it is not kept."""
        found = self._kept.get((kind, source))
        if found is not None:
            self._kept.move_to_end((kind, source))
        return found

    def keep(self, kind: str, source: str, compiled: Any) -> None:
        """Keep the result for a source; the least recently used ones make room."""
        self._kept[kind, source] = compiled
        self.num_bytes += _num_bytes(source)
        while len(self._kept) > MAX_KEPT or self.num_bytes > self._max_bytes:
            (_, dropped), _ = self._kept.popitem(last=False)
            self.num_bytes -= _num_bytes(dropped)


def _num_bytes(source: str) -> int:
    return LEAST_BYTES + BYTES_PER_CHARACTER * len(source)
