"""What each replica has to do: reservations, added up by slot.

Knows tokens, rates and times that callers pass in; knows no keys. Prompts wait in the order of their reservations. The first
one is taken to be computed at the replica's rate since the one before it ended, so a replica that hangs keeps its backlog:

    waiting_tokens   |== head ==|== second ==|== third ==|
    computed by now  |=====|                                 at most the head
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foreword.cluster.decision import Reservation
from foreword.cluster.reuse_ages import FloatArray

RATE_WEIGHT = 0.1
"""Weight of the newest measurement of a replica's rate."""
MIN_RATE_TOKENS = 64
"""Prompts with fewer computed tokens measure latency, not the rate."""
MAX_RATE_STEP = 4.0

SLOT = np.dtype(
    [
        ("usable", np.bool_),
        ("is_synced", np.bool_),
        ("num_blocks", np.int64),
        ("num_held", np.int64),
        ("oldest_use", np.float64),
        ("rate", np.float64),
        ("decode_s", np.float64),
        ("waiting_tokens", np.float64),
        ("other_tokens", np.float64),
        ("head_tokens", np.float64),
        ("head_since", np.float64),
        ("active_tokens", np.float64),
        ("num_waiting", np.int64),
        ("num_open", np.int64),
    ]
)


@dataclass(frozen=True, slots=True)
class Work:
    """One reserved request."""

    slot: int
    prompt_tokens: int
    computed_tokens: int
    """Tokens to compute before its first token, as far as the router knows."""


class Loads:
    """Open reservations and their sums, one entry of `table` for each slot."""

    def __init__(self) -> None:
        self.table: npt.NDArray[np.void] = np.zeros(0, SLOT)
        self.open: dict[Reservation, Work] = {}
        self._waiting: list[OrderedDict[Reservation, int]] = []
        """Tokens to compute of the requests without a first token, by slot."""

    def add_slot(self) -> int:
        """A new slot, in no use yet."""
        self.table = np.concatenate((self.table, np.zeros(1, SLOT)))
        self.table["rate"][-1] = 1
        self._waiting.append(OrderedDict())
        return len(self.table) - 1

    def reserve(self, reservation: Reservation, work: Work, now: float) -> None:
        """Add a request that waits for its first token."""
        self.open[reservation] = work
        row, waiting = self.table[work.slot], self._waiting[work.slot]
        waiting[reservation] = work.computed_tokens
        row["waiting_tokens"] += work.computed_tokens
        row["active_tokens"] += work.prompt_tokens
        row["num_waiting"] += 1
        row["num_open"] += 1
        if len(waiting) == 1:
            self._begin_head(work.slot, now)

    def note_started(self, reservation: Reservation, now: float) -> None:
        """The replica begins to compute the prompt."""
        work = self.open.get(reservation)
        if work is not None and next(iter(self._waiting[work.slot]), None) == reservation:
            self.table[work.slot]["head_since"] = now

    def note_prefilled(self, reservation: Reservation, now: float, computed_tokens: int | None = None) -> bool:
        """The prompt is computed; given the tokens that this took, learn the rate. False if it was already."""
        work = self.open.get(reservation)
        if work is None or reservation not in self._waiting[work.slot]:
            return False
        row, waiting = self.table[work.slot], self._waiting[work.slot]
        was_head = next(iter(waiting)) == reservation
        if was_head and computed_tokens is not None and computed_tokens >= MIN_RATE_TOKENS and now > row["head_since"]:
            measured, known = computed_tokens / (now - row["head_since"]), row["rate"]
            measured = min(max(measured, known / MAX_RATE_STEP), known * MAX_RATE_STEP)
            row["rate"] += RATE_WEIGHT * (measured - known)
        row["waiting_tokens"] -= waiting.pop(reservation)
        row["num_waiting"] -= 1
        if was_head:
            self._begin_head(work.slot, now)
        return True

    def release(self, reservation: Reservation, now: float) -> bool:
        """The request has ended, or never began. False if it was released before."""
        if reservation not in self.open:
            return False
        self.note_prefilled(reservation, now)
        work = self.open.pop(reservation)
        row = self.table[work.slot]
        row["active_tokens"] -= work.prompt_tokens
        row["num_open"] -= 1
        return True

    def note_truth(self, slot: int, waiting_tokens: int) -> None:
        """The replica reports its tokens to compute; those beyond the reservations come from elsewhere."""
        row = self.table[slot]
        row["other_tokens"] = max(0, waiting_tokens - row["waiting_tokens"])

    def backlogs(self, now: float) -> FloatArray:
        """Seconds until each replica has computed the prompts that wait there, [slots]."""
        table = self.table
        computed = np.minimum(np.maximum(now - table["head_since"], 0) * table["rate"], table["head_tokens"])
        seconds: FloatArray = (table["waiting_tokens"] + table["other_tokens"] - computed) / table["rate"]
        return seconds

    def _begin_head(self, slot: int, now: float) -> None:
        waiting = self._waiting[slot]
        self.table[slot]["head_tokens"] = next(iter(waiting.values()), 0)
        self.table[slot]["head_since"] = now

    def check_integrity(self) -> None:
        """Compare the sums with the reservations."""
        for slot, row in enumerate(self.table):
            mine = {reservation: work for reservation, work in self.open.items() if work.slot == slot}
            waiting = self._waiting[slot]
            assert set(waiting) <= set(mine), "a released request waits"
            assert row["num_open"] == len(mine)
            assert row["num_waiting"] == len(waiting)
            assert row["waiting_tokens"] == sum(waiting.values())
            assert row["active_tokens"] == sum(work.prompt_tokens for work in mine.values())
            assert row["head_tokens"] == next(iter(waiting.values()), 0)
