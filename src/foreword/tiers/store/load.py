"""The loading thread: values from the store, verified one by one as they come."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from foreword.tiers.job_thread import JobThread
from foreword.tiers.load_rate import LoadRate
from foreword.tiers.rare_warning import RareWarning
from foreword.tiers.store.client import Link, Refusal, Reply, ServerGoneError
from foreword.tiers.store.state import StoreState
from foreword.tiers.store.value import HEADER_BYTES, server_key
from foreword.tiers.ticket import FORGOTTEN, Outcome, Ticket
from foreword.tiers.tier import BlockSink, DoneCallback

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Load:
    """A load under way."""

    names: list[bytes]
    payload_bytes: list[int]
    sink: BlockSink
    ticket: Ticket
    deadline: float
    bad: list[bytes] = field(default_factory=list)
    """Blocks whose values will be deleted."""


class StoreLoader:
    """Loads in the order in which they were asked for."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self.link = state.server.link()
        self.rate = LoadRate()
        self._bad_values = RareWarning(logger, "the store holds a damaged or foreign value under %s; it is deleted")
        self._undeleted = RareWarning(logger, "bad values could not be deleted from the store: %s")
        self.thread: JobThread[Load] = JobThread("foreword-store-load", self._load, state.options.max_queued_load_bytes)

    def add(
        self,
        names: list[bytes],
        payload_bytes: list[int],
        sink: BlockSink,
        deadline_s: float,
        on_done: DoneCallback | None,
    ) -> Ticket:
        """Queue a load; a full queue or an open breaker ends its ticket at once."""

        def before_done(outcomes: npt.NDArray[np.uint8]) -> None:
            failed = np.flatnonzero(np.isin(outcomes, FORGOTTEN))
            self._state.view.note_absent([names[at] for at in failed], self._state.options.absent_s)
            self._state.count_load(outcomes)

        ticket = Ticket(len(names), deadline_s=deadline_s, before_done=before_done, on_done=on_done)
        load = Load(names, payload_bytes, sink, ticket, time.monotonic() + deadline_s)
        if self._state.breaker.is_closed or self._state.closing.is_set():
            self.thread.add(load, sum(payload_bytes))
        else:
            ticket.finish(Outcome.IO_ERROR)
        return ticket

    def _load(self, load: Load) -> None:
        if load.ticket.done or not self._state.breaker.is_closed:
            load.ticket.finish(Outcome.IO_ERROR)
            return
        rest, began = Outcome.CANCELLED, time.monotonic()
        try:
            with self._state.session(self.link, deadline=load.deadline) as link:
                self._receive(load, link)
        except ServerGoneError as error:
            rest = Outcome.TIMEOUT if error.is_deadline else Outcome.IO_ERROR
        loaded = np.flatnonzero(load.ticket.outcomes_so_far() == Outcome.DONE).tolist()
        num_bytes = sum(load.payload_bytes[index] for index in loaded)
        self._state.count(num_loaded=len(loaded), loaded_bytes=num_bytes)
        self._state.view.note_present([load.names[index] for index in loaded], self._state.options.present_s)
        self.rate.measure(num_bytes, time.monotonic() - began)
        self._delete(load.bad)
        load.ticket.finish(rest)
        if Outcome.TIMEOUT in load.ticket.report.outcomes:
            self.rate.measure_late(num_bytes, time.monotonic() - began)

    def _receive(self, load: Load, link: Link) -> None:
        """Ask for blocks, at most a window ahead, and deliver them as they come."""
        count, asked, in_flight = len(load.names), 0, 0
        for index in range(count):
            if 2 * in_flight <= self._state.options.window_bytes:
                begin = asked
                while asked < count and (asked == index or in_flight < self._state.options.window_bytes):
                    in_flight += load.payload_bytes[asked]
                    asked += 1
                # One byte more than there should be: what is longer is not ours, however long it is.
                ends = [HEADER_BYTES + load.payload_bytes[at] for at in range(begin, asked)]
                keys = [server_key(name) for name in load.names[begin:asked]]
                link.send([("GETRANGE", key, 0, end) for key, end in zip(keys, ends, strict=True)])
            reply = link.reply(HEADER_BYTES + load.payload_bytes[index] + 1)
            in_flight -= load.payload_bytes[index]
            if load.ticket.done or self._state.closing.is_set():
                return
            self._deliver(load, index, reply)

    def _deliver(self, load: Load, index: int, reply: Reply) -> None:
        """Verify a block's value and hand its payload over."""
        ticket, name = load.ticket, load.names[index]
        if isinstance(reply, memoryview) and len(reply):
            outcome = self._state.format.verify(name, load.payload_bytes[index], reply)
        elif isinstance(reply, Refusal):
            outcome = Outcome.CORRUPT if reply.code == "WRONGTYPE" else Outcome.IO_ERROR
        else:
            ticket.settle(index, Outcome.MISSING)
            return
        if outcome == Outcome.DONE:
            assert isinstance(reply, memoryview)
            payload = reply[HEADER_BYTES:].toreadonly()
            if ticket.transfer(index, lambda: load.sink.put(index, payload)):
                ticket.settle(index, Outcome.DONE)
            return
        if outcome == Outcome.CORRUPT:
            self._bad_values.note(server_key(name))
            load.bad.append(name)
        if outcome != Outcome.IO_ERROR:
            self._state.view.refuse([name])
        ticket.settle(index, outcome)

    def _delete(self, names: list[bytes]) -> None:
        if names:
            try:
                with self._state.session(self.link) as link:
                    link.send([("DEL", *map(server_key, names))])
                    link.reply()
            except ServerGoneError as error:
                self._undeleted.note(error)
