"""The load of each replica: reservations, added up by slot.

Prompts wait in the order of their reservations. Only the first prompt counts as being computed, at the replica's rate,
from the time when the prompt before it ended. So a replica that hangs keeps its backlog:

    waiting_tokens   |== head ==|== second ==|== third ==|
    computed by now  |=====|                                 at most the head

A replica's prefill rate is learnt from the prompts that it computes. If an operator or a simulation declares a rate,
measurements correct it. All replicas without a declared rate share their measurements, because they mostly run on equal
machines and a measurement is noisy:

    own mean      mean of the replica's measurements; newer ones have more weight
    mean of all   mean of all such replicas' measurements
    its rate      mean of both, where the mean of all weighs `DOUBT` measurements; if `ALIKE`, the mean of all alone

So a slow first prompt, which compiled something, does not keep requests away from its replica for long: the prompt's
weight fades while other replicas are measured. A replica that is really slower is measured again, and found slower
again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import Int64Array
from foreword.cluster.decision import Reservation
from foreword.cluster.reuse_ages import FloatArray

RATE_WEIGHT = 0.1
"""The weight of the newest measurement when it corrects a declared rate."""
MAX_RATE_STEP = 4.0
"""A measurement counts as at most this many times the known rate, and at least the known rate divided by this."""
DOUBT = 4.0
"""In a replica's rate, the mean rate of all replicas weighs as much as this number of its own measurements."""
FADING = 0.9
"""Factor by which a measurement of any replica lowers the weight of all earlier ones."""
ALIKE = 0.25
"""A rate that differs from the mean rate by less than this share is set to the mean, so that caches fill evenly."""
MIN_RATE_TOKENS = 64
"""A prompt with fewer computed tokens is not used to measure a rate: latency dominates its time."""


class Rates:
    """The prefill rates of all slots, in tokens per second."""

    def __init__(self) -> None:
        self.tokens_per_s: FloatArray = np.zeros(0)
        self._measured: FloatArray = np.zeros(0)
        """Means of the replicas' own measurements."""
        self._trust: FloatArray = np.zeros(0)
        """The weight of each replica's measurements: a measurement adds 1, which `FADING` lowers later."""
        self._is_pooled: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)

    def grow(self) -> None:
        self.tokens_per_s = np.append(self.tokens_per_s, 1.0)
        self._measured, self._trust = np.append(self._measured, 0.0), np.append(self._trust, 0.0)
        self._is_pooled = np.append(self._is_pooled, False)

    def join(self, slot: int, tokens_per_s: float, *, is_known: bool) -> None:
        """Put a replica into a slot. `is_known`: whether its rate is declared; otherwise it is a guess."""
        self.tokens_per_s[slot], self._measured[slot], self._trust[slot] = tokens_per_s, 0.0, 0.0
        self._is_pooled[slot] = not is_known
        self._share()

    def leave(self, slot: int) -> None:
        self._is_pooled[slot], self._trust[slot] = False, 0.0

    def note(self, slot: int, measured: float) -> None:
        """Record a measurement: a replica computed this number of tokens per second."""
        rate = self.tokens_per_s[slot]
        measured = min(max(measured, rate / MAX_RATE_STEP), rate * MAX_RATE_STEP)
        if not self._is_pooled[slot]:
            self.tokens_per_s[slot] += RATE_WEIGHT * (measured - rate)
            return
        self._trust *= FADING
        self._trust[slot] += 1.0
        self._measured[slot] += (measured - self._measured[slot]) / self._trust[slot]
        self._share()

    def _share(self) -> None:
        """Set the rates of the replicas without a declared rate."""
        total = self._trust.sum()
        if total <= 0.0:
            return
        mean = (self._trust * self._measured).sum() / total
        rates = (self._trust * self._measured + DOUBT * mean) / (self._trust + DOUBT)
        rates[np.abs(rates - mean) < ALIKE * mean] = mean
        self.tokens_per_s[self._is_pooled] = rates[self._is_pooled]


class SlotTable:
    """One array for each property of replicas, with an entry for each slot."""

    usable: npt.NDArray[np.bool_]
    num_blocks: Int64Array
    num_held: Int64Array
    oldest_use: FloatArray
    decode_s: FloatArray
    decode_tokens: FloatArray
    waiting_tokens: FloatArray
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
        for name in self.__annotations__:
            array = getattr(self, name)
            setattr(self, name, np.append(array, np.zeros(1, array.dtype)))


@dataclass(frozen=True, slots=True)
class Work:
    """One reserved request."""

    slot: int
    prompt_tokens: int
    computed_tokens: int
    """Tokens to compute before the request's first token, as far as the router knows."""


class Loads:
    """Open reservations and their sums, one entry of `table` for each slot."""

    def __init__(self) -> None:
        self.table = SlotTable()
        self.rates = Rates()
        self.open: dict[Reservation, Work] = {}
        self._waiting: list[OrderedDict[Reservation, int]] = []
        """[slot]: reservation of a request without a first token -> the number of its prompt tokens to compute."""

    def add_slot(self) -> int:
        """Add a slot that is not in use yet, and return it."""
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

    def note_prefilled(self, reservation: Reservation, now: float, computed_tokens: int | None = None) -> bool:
        """Record that a prompt is computed; `computed_tokens`, if given, measure the rate. False: recorded already."""
        work = self.open.get(reservation)
        if work is None or reservation not in self._waiting[work.slot]:
            return False
        table, slot, waiting = self.table, work.slot, self._waiting[work.slot]
        was_head, since = next(iter(waiting)) == reservation, table.head_since[slot]
        if was_head and computed_tokens is not None and computed_tokens >= MIN_RATE_TOKENS and now > since:
            self.rates.note(slot, computed_tokens / (now - since))
        table.waiting_tokens[slot] -= waiting.pop(reservation)
        table.num_waiting[slot] -= 1
        if was_head:
            self._begin_head(work.slot, now)
        return True

    def release(self, reservation: Reservation, now: float) -> bool:
        """Remove a request that has ended or never began. False: the request was removed before."""
        if reservation not in self.open:
            return False
        self.note_prefilled(reservation, now)
        self.table.num_open[self.open.pop(reservation).slot] -= 1
        return True

    def backlogs(self, now: float) -> FloatArray:
        """Seconds until each replica has computed the prompts that wait there, [slots]."""
        table, rate = self.table, self.rates.tokens_per_s
        computed = np.minimum(np.maximum(now - table.head_since, 0) * rate, table.head_tokens)
        seconds: FloatArray = (table.waiting_tokens - computed) / rate
        return seconds

    def _begin_head(self, slot: int, now: float) -> None:
        waiting = self._waiting[slot]
        self.table.head_tokens[slot] = next(iter(waiting.values()), 0)
        self.table.head_since[slot] = now

    def check_integrity(self) -> None:
        table = self.table
        for slot in range(len(table)):
            mine = {reservation: work for reservation, work in self.open.items() if work.slot == slot}
            waiting = self._waiting[slot]
            assert set(waiting) <= set(mine), "a released request waits"
            assert table.num_open[slot] == len(mine)
            assert table.num_waiting[slot] == len(waiting)
            assert table.waiting_tokens[slot] == sum(waiting.values())
            assert table.head_tokens[slot] == next(iter(waiting.values()), 0)
