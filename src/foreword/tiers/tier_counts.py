"""The counts of a tier, which its threads add to."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from foreword.tiers.ticket import Outcome
from foreword.tiers.tier import TierStats


@dataclass(slots=True, kw_only=True)
class TierCounts:
    """Counts under a lock. Any thread may call any method."""

    stats: TierStats = field(default_factory=TierStats)
    stats_lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, **amounts: int) -> None:
        """Add to counts of `stats`."""
        with self.stats_lock:
            for name, amount in amounts.items():
                setattr(self.stats, name, getattr(self.stats, name) + amount)

    def count_load(self, outcomes: npt.NDArray[np.uint8]) -> None:
        """Count what a load did not give."""
        self._count_rest(self.stats.not_loaded, outcomes)

    def count_store(self, outcomes: npt.NDArray[np.uint8]) -> None:
        """Count what a store dropped."""
        self._count_rest(self.stats.not_stored, outcomes)

    def copy_of_stats(self) -> TierStats:
        """The counts as they are now."""
        with self.stats_lock:
            stats = self.stats
            return replace(stats, not_loaded=dict(stats.not_loaded), not_stored=dict(stats.not_stored))

    def _count_rest(self, counts: dict[str, int], outcomes: npt.NDArray[np.uint8]) -> None:
        with self.stats_lock:
            for value, count in Counter(outcomes.tolist()).items():
                if value not in (Outcome.DONE, Outcome.PRESENT):
                    name = Outcome(value).name.lower()
                    counts[name] = counts.get(name, 0) + count
