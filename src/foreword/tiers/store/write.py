"""The storing thread: values for the store, unless it has them.

The server expires what is written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from foreword.tiers.job_thread import JobThread
from foreword.tiers.store.ask import exist
from foreword.tiers.store.client import Link, Refusal, ServerGoneError
from foreword.tiers.store.state import StoreState
from foreword.tiers.store.value import HEADER_BYTES, server_key
from foreword.tiers.ticket import Outcome, Ticket
from foreword.tiers.tier import BlockRun, DoneCallback


@dataclass(frozen=True, slots=True)
class Store:
    """A store under way."""

    names: list[bytes]
    run: BlockRun
    ticket: Ticket


class StoreWriter:
    """Stores in the order in which they were asked for."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self.link = state.server.link()
        self.thread: JobThread[Store] = JobThread(
            "foreword-store-write", self._store, state.options.max_queued_store_bytes
        )

    def add(self, names: list[bytes], run: BlockRun, on_done: DoneCallback | None) -> Ticket:
        """Queue a run; a full queue or an open breaker drops it at once."""
        ticket = Ticket(len(names), before_done=self._state.count_store, on_done=on_done)
        if self._state.breaker.is_closed or self._state.closing.is_set():
            self.thread.add(Store(names, run, ticket), int(run.payload_bytes.sum()))
        else:
            ticket.finish(Outcome.NO_ROOM)
        return ticket

    def _store(self, store: Store) -> None:
        state, rest = self._state, Outcome.NO_ROOM
        try:
            if not store.ticket.done and state.breaker.is_closed and state.room.may_try():
                with state.session(self.link, longest_s=state.options.store_session_s) as link:
                    self._write(store, self._absent(store, link), link)
        except ServerGoneError:
            rest = Outcome.CANCELLED if state.closing.is_set() else Outcome.IO_ERROR
        store.ticket.finish(rest)

    def _absent(self, store: Store, link: Link) -> list[int]:
        """The blocks that are to be written; the others are PRESENT."""
        view, names = self._state.view, store.names
        known, _ = view.look(names)
        ask = np.flatnonzero(~known & ~view.is_refused(names)).tolist()
        found = exist(link, [names[index] for index in ask])
        view.note_present(
            [names[index] for index, here in zip(ask, found, strict=True) if here], self._present_s(store)
        )
        known[ask] = found
        first = dict(zip(reversed(names), reversed(range(len(names))), strict=True))
        absent = [index for index, name in enumerate(names) if first[name] == index and not known[index]]
        store.ticket.settle(np.setdiff1d(np.arange(len(names)), absent), Outcome.PRESENT)
        return absent

    def _write(self, store: Store, indices: list[int], link: Link) -> None:
        run, ticket = store.run, store.ticket
        ttl_ms = max(1, math.ceil(1000 * (self._state.options.ttl_s if run.ttl_s is None else run.ttl_s)))
        longest = max((int(run.payload_bytes[index]) for index in indices), default=0)
        staging = memoryview(bytearray(HEADER_BYTES + longest))
        sent: list[int] = []
        for index in indices:
            value = staging[: HEADER_BYTES + int(run.payload_bytes[index])]
            payload = value[HEADER_BYTES:]
            if ticket.transfer(index, lambda index=index, payload=payload: run.source.take(index, payload)):  # type: ignore[misc]
                self._state.format.complete(store.names[index], int(run.flags[index]), value)
                link.send([("SET", server_key(store.names[index]), value, "PX", ttl_ms)])
                sent.append(index)
            if int(run.payload_bytes[sent].sum()) >= self._state.options.window_bytes:
                self._settle_sent(store, sent, link)
            if ticket.done or self._state.room.state == "open":
                break
        self._settle_sent(store, sent, link)

    def _settle_sent(self, store: Store, sent: list[int], link: Link) -> None:
        """Await the replies for blocks that were sent, and empty the list."""
        state, written = self._state, []
        for index in sent:
            reply = link.reply()
            if reply == "OK":
                written.append(index)
                continue
            refusal = reply if isinstance(reply, Refusal) else Refusal(f"ERR {reply!r}")
            state.note_refused_store(refusal)
            store.ticket.settle(index, Outcome.NO_ROOM if refusal.code == "OOM" else Outcome.IO_ERROR)
        if len(written) == len(sent) and written:
            state.room.succeeded()
        state.view.note_stored([store.names[index] for index in written], self._present_s(store))
        num_bytes = int(store.run.payload_bytes[written].sum()) + HEADER_BYTES * len(written)
        state.count(num_written=len(written), written_bytes=num_bytes)
        store.ticket.settle(written, Outcome.DONE)
        sent.clear()

    def _present_s(self, store: Store) -> float:
        ttl_s = self._state.options.ttl_s if store.run.ttl_s is None else store.run.ttl_s
        return min(self._state.options.present_s, ttl_s)
