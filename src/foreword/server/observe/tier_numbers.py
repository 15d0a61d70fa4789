"""The numbers of tiers that metrics show: name, meaning and where they stand in the engine's report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from foreword.engine import TierReport
from foreword.tiers.ticket import Outcome


class TierNumber(NamedTuple):
    """One number of each tier."""

    name: str
    meaning: str
    read: Callable[[TierReport], float]


GAUGES = (
    TierNumber("blocks", "Blocks that can be looked up.", lambda tier: tier.stats.num_blocks),
    TierNumber("bytes", "Physical bytes, those of other processes included.", lambda tier: tier.stats.shared_bytes),
    TierNumber("budget_bytes", "Physical bytes that the tier may take.", lambda tier: tier.stats.budget_bytes),
    TierNumber(
        "seconds_saved",
        "Estimated seconds to compute what was loaded, less the seconds of loads. Falls when loads are in vain.",
        lambda tier: tier.loads.saved_s,
    ),
    TierNumber(
        "breaker_open", "1 while a server that failed is left alone.", lambda tier: tier.stats.breaker != "closed"
    ),
)
COUNTERS = (
    TierNumber("loads", "Loads that ended.", lambda tier: tier.loads.num_loads),
    TierNumber("loaded_tokens", "Tokens by which loads made hits longer.", lambda tier: tier.loads.num_tokens),
    TierNumber("loaded_bytes", "Bytes of loads that made hits longer.", lambda tier: tier.loads.num_bytes),
    TierNumber("load_seconds", "Seconds of loads.", lambda tier: tier.loads.seconds),
    TierNumber("declined", "Prefixes computed because a load is no faster.", lambda tier: tier.loads.num_declined),
    TierNumber("regretted", "Loads that took longer than computing.", lambda tier: tier.loads.num_regretted),
    TierNumber("cancelled", "Loads that were given up.", lambda tier: tier.loads.num_cancelled),
    TierNumber("lookups", "Blocks looked up, for loads and for stores.", lambda tier: tier.stats.num_looked_up),
    TierNumber("found", "Blocks of lookups that were there.", lambda tier: tier.stats.num_found),
    TierNumber("written_bytes", "Physical bytes written.", lambda tier: tier.stats.written_bytes),
)


class OutcomeNumber(NamedTuple):
    """One number of each tier and outcome."""

    name: str
    meaning: str
    outcomes: tuple[Outcome, ...]
    """Those that are shown even if they never came."""
    read: Callable[[TierReport], Mapping[str, int]]


_FAILED = (Outcome.CORRUPT, Outcome.IO_ERROR, Outcome.TIMEOUT, Outcome.QUEUE_FULL)
OUTCOMES = (
    OutcomeNumber(
        "load_blocks",
        "Blocks of loads that ended.",
        (Outcome.DONE, Outcome.MISSING, *_FAILED),
        lambda tier: tier.loads.blocks_by_outcome,
    ),
    OutcomeNumber(
        "store_blocks",
        "Blocks written, and blocks dropped instead.",
        (Outcome.DONE, Outcome.NO_ROOM, *_FAILED),
        lambda tier: {"done": tier.stats.num_written, **tier.stats.not_stored},
    ),
)
