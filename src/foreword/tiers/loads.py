"""A tier's loads: each waits in the queue of a thread, ends at its deadline at the latest, and measures the tier."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.tiers.load_rate import LoadRate
from foreword.tiers.ticket import FORGOTTEN, IndexArray, JobThread, Outcome, Ticket
from foreword.tiers.tier import BlockKeys, BlockSink, BoolArray, DoneCallback, TierCounts


@dataclass(slots=True)
class Load:
    """A load under way."""

    keys: BlockKeys
    payload_bytes: npt.NDArray[np.int64]
    sink: BlockSink
    ticket: Ticket
    deadline: float
    """The time of `time.monotonic` at which the ticket ends."""
    places: npt.NDArray[np.void] | None = None
    """The places at which the tier's thread found the blocks; None before, and for a tier that does not record them."""


class Loads:
    """Takes loads for a tier's thread, and measures how fast the tier loads."""

    def __init__(
        self,
        thread: JobThread[Any],
        counts: TierCounts,
        forget: Callable[[Load, BoolArray], None],
        is_usable: Callable[[], bool] = lambda: True,
    ) -> None:
        """`forget` is called before a load is done, with its blocks that must not be found again, [blocks].

        While `is_usable` returns False, loads end at once.
        """
        self._thread, self._counts, self._forget, self._is_usable = thread, counts, forget, is_usable
        self.rate = LoadRate()

    def load(
        self,
        keys: BlockKeys,
        payload_bytes: npt.NDArray[np.int64],
        sink: BlockSink,
        *,
        deadline_s: float,
        on_done: DoneCallback | None = None,
    ) -> Ticket:
        """See `Tier.load`. A full queue ends the ticket at once. So does a tier that is not usable, with IO_ERROR."""

        def before_done(outcomes: npt.NDArray[np.uint8]) -> None:
            self._forget(load, np.isin(outcomes, FORGOTTEN))
            self._counts.count_load(outcomes)

        ticket = Ticket(len(keys), deadline_s=deadline_s, before_done=before_done, on_done=on_done)
        load = Load(keys, payload_bytes, sink, ticket, time.monotonic() + deadline_s)
        if self._is_usable():
            self._thread.add(load, int(payload_bytes.sum()))
        else:
            ticket.finish(Outcome.IO_ERROR)
        return ticket

    def estimate_s(self, num_bytes: int) -> float:
        """See `Tier.estimate_load_s`."""
        return self.rate.estimate_s(self._thread.amount + num_bytes)

    def measure(self, load: Load, began: float) -> IndexArray:
        """Count and measure the blocks that a load has given since `began`. Returns their indices in the load."""
        loaded = np.flatnonzero(load.ticket.outcomes_so_far() == Outcome.DONE)
        num_bytes = int(load.payload_bytes[loaded].sum())
        self._counts.count(num_loaded=len(loaded), loaded_bytes=num_bytes)
        self.rate.measure(num_bytes, time.monotonic() - began)
        return loaded

    def finish(self, load: Load, outcome: Outcome, began: float) -> None:
        """End a load; blocks that are not settled get `outcome`. If its deadline ended the load, measure the rate."""
        load.ticket.finish(outcome)
        outcomes = load.ticket.report.outcomes
        if Outcome.TIMEOUT in outcomes:
            num_bytes = int(load.payload_bytes[outcomes == Outcome.DONE].sum())
            self.rate.measure_late(num_bytes, time.monotonic() - began)
