"""The loader: reads blocks, verifies them, and hands them to the caller's memory.

While its thread verifies and copies what was read, a second one reads the next piece. The caller's memory sees verified
bytes only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foreword.tiers.cipher import block_name
from foreword.tiers.disk.block_places import Places
from foreword.tiers.disk.read_ahead import Content, Piece, ReadAhead
from foreword.tiers.disk.run_format import PAGE, block_checksum, padded
from foreword.tiers.disk.state import DiskState, is_forgotten
from foreword.tiers.load_rate import LoadRate
from foreword.tiers.ticket import Outcome, Ticket
from foreword.tiers.tier import BlockKeys, BlockSink, DoneCallback

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Load:
    """A load under way."""

    keys: BlockKeys
    payload_bytes: npt.NDArray[np.int64]
    sink: BlockSink
    ticket: Ticket

    @property
    def num_bytes(self) -> int:
        return int(self.payload_bytes.sum())


class Loader:
    """Loads in the order in which they were asked for. `start` begins its threads, `close` ends them."""

    def __init__(self, state: DiskState) -> None:
        self._state = state
        self._queue: deque[Load] = deque()
        self._wake = threading.Condition()
        self._queued_bytes = 0
        self._rate = LoadRate()
        self._reader = ReadAhead(state)
        self._opened = np.empty(0, np.uint8)
        """A decrypted payload."""
        self._thread = threading.Thread(target=self._run, name="foreword-tier-load", daemon=True)

    def start(self) -> None:
        self._reader.start()
        self._thread.start()

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    @property
    def bytes_per_s(self) -> float:
        """Of recent loads; 0 before the first."""
        return self._rate.bytes_per_s

    def estimate_s(self, num_bytes: int) -> float:
        """Seconds until a load that is asked for now would end."""
        return self._rate.estimate_s(self._queued_bytes + num_bytes)

    def add(
        self,
        keys: BlockKeys,
        payload_bytes: npt.NDArray[np.int64],
        sink: BlockSink,
        deadline_s: float,
        on_done: DoneCallback | None,
    ) -> Ticket:
        """Queue a load; a full queue ends its ticket at once."""

        def before_done(outcomes: npt.NDArray[np.uint8]) -> None:
            self._state.index.forget(keys.select(is_forgotten(outcomes)))
            self._state.count_load(outcomes)

        ticket = Ticket(len(keys), deadline_s=deadline_s, before_done=before_done, on_done=on_done)
        load = Load(keys, payload_bytes, sink, ticket)
        with self._wake:
            if self._state.closing.is_set():
                refusal = Outcome.CANCELLED
            elif len(self._queue) >= self._state.options.max_queued_loads:
                refusal = Outcome.QUEUE_FULL
            else:
                self._queue.append(load)
                self._queued_bytes += load.num_bytes
                self._wake.notify()
                return ticket
        ticket.finish(refusal)
        return ticket

    def close(self, timeout_s: float) -> None:
        """Cancel what is queued and end the threads; one that hangs in the system is left to itself."""
        with self._wake:
            waiting = list(self._queue)
            self._wake.notify_all()
        for load in waiting:
            load.ticket.cancel()
        self._thread.join(timeout_s)
        self._reader.close(timeout_s)

    # ------------------------------------------------------------------------------ the loading thread

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._queue and not self._state.closing.is_set():
                    self._wake.wait()
                if not self._queue:
                    return
                load = self._queue.popleft()
            try:
                self._load(load)
            except Exception:
                logger.exception("a load from disk failed unexpectedly; its blocks are computed instead")
                load.ticket.finish(Outcome.IO_ERROR)
            finally:
                with self._wake:
                    self._queued_bytes -= load.num_bytes

    def _load(self, load: Load) -> None:
        if load.ticket.done:
            return
        began = time.monotonic()
        places = self._state.index.locate(load.keys, self._state.clock.now_s())
        stored = load.payload_bytes + self._state.cipher.overhead_bytes
        # A block of another length is of another layout: whoever wrote it, it is not what is asked for.
        fits = (places.rows >= 0) & (places.stored_bytes == stored)
        load.ticket.settle(np.flatnonzero(~fits), Outcome.MISSING)
        for piece, content in self._reader.contents(places, np.flatnonzero(fits)):
            if load.ticket.done or self._state.closing.is_set():
                break
            self._deliver(load, piece, places, content)
        loaded = np.flatnonzero(load.ticket.outcomes_so_far() == Outcome.DONE)
        if len(loaded):
            self._state.index.touch(places.select(loaded), self._state.clock.now_s())
            num_bytes = int(load.payload_bytes[loaded].sum())
            self._state.count(num_loaded=len(loaded), loaded_bytes=num_bytes)
            self._rate.measure(num_bytes, time.monotonic() - began)
        load.ticket.finish(Outcome.CANCELLED)
        if Outcome.TIMEOUT in load.ticket.report.outcomes:
            self._rate.measure_late(int(load.payload_bytes[loaded].sum()), time.monotonic() - began)

    def _deliver(self, load: Load, piece: Piece, places: Places, content: Content) -> None:
        """Verify the blocks of a piece and hand them over."""
        for index in piece.indices:
            start = int(places.pages[index]) * PAGE - content.offset
            stored_bytes = int(places.stored_bytes[index])
            end = start + padded(stored_bytes)
            if start < 0 or end > len(content.data):  # not read, or the file is shorter than it was
                load.ticket.settle(index, content.error or Outcome.MISSING)
                continue
            data = content.data
            key, group_id = load.keys.keys[index].tobytes(), int(load.keys.group_ids[index])
            checksum = block_checksum(load.keys.namespace, group_id, key, stored_bytes, data[start:end])
            payload = None
            if checksum == places.checksums[index].tobytes():
                name = block_name(load.keys.namespace, group_id, key)
                stored = data[start : start + stored_bytes]
                payload = self._state.cipher.open(name, stored, self._room(stored_bytes))
            if payload is None:
                load.ticket.settle(index, Outcome.CORRUPT)
            elif load.ticket.transfer(index, lambda index=index, payload=payload: load.sink.put(index, payload)):  # type: ignore[misc]
                load.ticket.settle(index, Outcome.DONE)

    def _room(self, num_bytes: int) -> memoryview:
        """Memory for a decrypted payload."""
        if len(self._opened) < num_bytes:
            self._opened = np.empty(num_bytes, np.uint8)
        return self._opened.data
