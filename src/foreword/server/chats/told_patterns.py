"""ToldPatterns: says once of each tool's pattern that forced calls do not enforce it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

logger = logging.getLogger(__name__)

MOST_TOLD = 3
"""Patterns that a log line names."""
MOST_KNOWN = 1_000
"""Patterns that are remembered; beyond these nothing is logged."""


class ToldPatterns:
    """One server's memory of what it has told. Belongs to the event loop."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def note(self, left_out: Sequence[str]) -> None:
        """Log the patterns that were not told yet."""
        new = [one for one in dict.fromkeys(left_out) if one not in self._known][: MOST_KNOWN - len(self._known)]
        if new:
            self._known.update(new)
            more = f" and {len(new) - MOST_TOLD} more" if len(new) > MOST_TOLD else ""
            logger.warning("forced calls do not enforce the pattern %s%s", "; ".join(new[:MOST_TOLD]), more)
