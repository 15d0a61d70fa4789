"""Compiled grammars that are kept for the next request that asks for them, bounded in bytes.

Knows sources and what was made of them; knows nothing of grammars.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

MAX_KEPT_BYTES = 64 * 2**20
MAX_KEPT = 64

BYTES_PER_CHARACTER = 256
"""What llguidance takes for each character of a source: 60 were measured for properties of objects, 90 for patterns,
240 for nested objects."""
LEAST_BYTES = 64 * 1024


class KeptGrammars:
    """The grammars that were used last. Belongs to one thread at a time."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self.num_bytes = 0
        """What they take, estimated by their sources."""
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, str], Any] = OrderedDict()

    def get(self, kind: str, source: str) -> Any:
        """What was made of a source; None if it is not kept."""
        found = self._kept.get((kind, source))
        if found is not None:
            self._kept.move_to_end((kind, source))
        return found

    def keep(self, kind: str, source: str, compiled: Any) -> None:
        """Keep what was made of a source; those that were not used for longest make room."""
        self._kept[kind, source] = compiled
        self.num_bytes += _num_bytes(source)
        while len(self._kept) > MAX_KEPT or self.num_bytes > self._max_bytes:
            (_, dropped), _ = self._kept.popitem(last=False)
            self.num_bytes -= _num_bytes(dropped)


def _num_bytes(source: str) -> int:
    return LEAST_BYTES + BYTES_PER_CHARACTER * len(source)
