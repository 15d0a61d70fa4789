"""What each replica has to do: reservations, added up by slot.

Prompts wait in the order of their reservations. The first one counts as computed at the replica's rate since the one
before it ended, so a replica that hangs keeps its backlog:

    waiting_tokens   |== head ==|== second ==|== third ==|
    computed by now  |=====|                                 at most the head
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import Int64Array
from foreword.cluster.decision import Reservation
from foreword.cluster.rates import Rates
from foreword.cluster.reuse_ages import FloatArray

MIN_RATE_TOKENS = 64
"""Prompts with fewer computed tokens measure latency, not the rate."""


class SlotTable:
    """One array for each property of replicas, with an entry for each slot."""

    usable: npt.NDArray[np.bool_]
    num_blocks: Int64Array
    num_held: Int64Array
    oldest_use: FloatArray
    decode_s: FloatArray
    decode_tokens: FloatArray
    waiting_tokens: FloatArray
    other_tokens: FloatArray
    """Tokens to compute of which only the replica knows."""
    head_tokens: FloatArray
    head_since: FloatArray
    num_waiting: Int64Array
    num_open: Int64Array

    def __init__(self) -> None:
        for name, kind in self.__annotations__.items():
            dtype = {"npt.NDArray[np.bool_]": np.bool_, "Int64Array": np.int64}.get(kind, np.float64)
            setattr(self, name, np.zeros(0, dtype))

    def __len__(self) -> int:
        return len(self.usable)

    def grow(self) -> None:
        """Add a slot in no use."""
        for name in self.__annotations__:
            array = getattr(self, name)
            setattr(self, name, np.append(array, np.zeros(1, array.dtype)))


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
        self.table = SlotTable()
        self.rates = Rates()
        self.open: dict[Reservation, Work] = {}
        self._waiting: list[OrderedDict[Reservation, int]] = []
        """Tokens to compute of the requests without a first token, by slot."""

    def add_slot(self) -> int:
        """A new slot, in no use yet."""
        self.table.grow()
        self.rates.grow()
        self._waiting.append(OrderedDict())
        return len(self.table) - 1

    def reserve(self, reservation: Reservation, work: Work, now: float) -> None:
        """Add a request that waits for its first token."""
        self.open[reservation] = work
        table, slot, waiting = self.table, work.slot, self._waiting[work.slot]
        waiting[reservation] = work.computed_tokens
        table.waiting_tokens[slot] += work.computed_tokens
        table.num_waiting[slot] += 1
        table.num_open[slot] += 1
        if len(waiting) == 1:
            self._begin_head(work.slot, now)

    def note_started(self, reservation: Reservation, now: float) -> None:
        """The replica begins to compute the prompt."""
        work = self.open.get(reservation)
        if work is not None and next(iter(self._waiting[work.slot]), None) == reservation:
            self.table.head_since[work.slot] = now

    def note_prefilled(self, reservation: Reservation, now: float, computed_tokens: int | None = None) -> bool:
        """The prompt is computed; given the tokens that this took, learn the rate. False if it was already."""
        work = self.open.get(reservation)
        if work is None or reservation not in self._waiting[work.slot]:
            return False
        table, slot, waiting = self.table, work.slot, self._waiting[work.slot]
        was_head = next(iter(waiting)) == reservation
        if (
            was_head
            and computed_tokens is not None
            and computed_tokens >= MIN_RATE_TOKENS
            and now > table.head_since[slot]
        ):
            self.rates.note(slot, computed_tokens / (now - table.head_since[slot]))
        table.waiting_tokens[slot] -= waiting.pop(reservation)
        table.num_waiting[slot] -= 1
        if was_head:
            self._begin_head(work.slot, now)
        return True

    def release(self, reservation: Reservation, now: float) -> bool:
        """The request has ended, or never began. False if it was released before."""
        if reservation not in self.open:
            return False
        self.note_prefilled(reservation, now)
        work = self.open.pop(reservation)
        table, slot = self.table, work.slot
        table.num_open[slot] -= 1
        return True

    def note_truth(self, slot: int, waiting_tokens: int) -> None:
        """The replica reports its tokens to compute; those beyond the reservations come from elsewhere."""
        table = self.table
        table.other_tokens[slot] = max(0, waiting_tokens - table.waiting_tokens[slot])

    def backlogs(self, now: float) -> FloatArray:
        """Seconds until each replica has computed the prompts that wait there, [slots]."""
        table, rate = self.table, self.rates.tokens_per_s
        computed = np.minimum(np.maximum(now - table.head_since, 0) * rate, table.head_tokens)
        seconds: FloatArray = (table.waiting_tokens + table.other_tokens - computed) / rate
        return seconds

    def _begin_head(self, slot: int, now: float) -> None:
        waiting = self._waiting[slot]
        self.table.head_tokens[slot] = next(iter(waiting.values()), 0)
        self.table.head_since[slot] = now

    def check_integrity(self) -> None:
        """Compare the sums with the reservations."""
        table = self.table
        for slot in range(len(table)):
            mine = {reservation: work for reservation, work in self.open.items() if work.slot == slot}
            waiting = self._waiting[slot]
            assert set(waiting) <= set(mine), "a released request waits"
            assert table.num_open[slot] == len(mine)
            assert table.num_waiting[slot] == len(waiting)
            assert table.waiting_tokens[slot] == sum(waiting.values())
            assert table.head_tokens[slot] == next(iter(waiting.values()), 0)
