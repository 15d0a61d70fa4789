"""The loader: reads blocks, verifies them, and hands them to the caller's memory.

Knows keys, places and payloads; knows nothing of budgets or of who asked.

Neighbours in a segment are read together into one of two staging buffers. While this thread verifies and copies one
buffer, a second thread reads the next. The caller's memory sees verified bytes only.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foreword.tiers.block_places import Places
from foreword.tiers.cipher import block_name
from foreword.tiers.disk_state import DiskState, is_forgotten
from foreword.tiers.files import close_quietly, read_fully
from foreword.tiers.run_format import PAGE, block_checksum, padded
from foreword.tiers.ticket import Outcome, Ticket
from foreword.tiers.tier import BlockKeys, BlockSink, DoneCallback

logger = logging.getLogger(__name__)

MAX_GAP_PAGES = 32
"""Pages between two blocks that are cheaper to read than to skip; a run's header lies between runs."""
RATE_MEMORY = 0.8
"""Weight of the old rate when a new load is measured."""
RATE_MIN_BYTES = 1 << 20
"""Of loads that are measured."""
FIRST_GUESS_BYTES_PER_S = 500e6
LATENCY_S = 0.001


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


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks of a load that lie near each other: one read."""

    segment_id: int
    offset: int
    num_bytes: int
    indices: list[int]
    """Of its blocks in the load."""


@dataclass(frozen=True, slots=True)
class Content:
    """What came of reading a piece."""

    data: memoryview
    """As far as the file goes."""
    error: Outcome | None


class Loader:
    """Loads in the order in which they were asked for. `start` begins its threads, `close` ends them."""

    def __init__(self, state: DiskState) -> None:
        self._state = state
        self._queue: deque[Load] = deque()
        self._wake = threading.Condition()
        self._queued_bytes = 0
        self._rate = 0.0
        self._reads: queue.SimpleQueue[tuple[Piece, npt.NDArray[np.uint8]] | None] = queue.SimpleQueue()
        self._contents: queue.SimpleQueue[Content] = queue.SimpleQueue()
        self._staging = [np.empty(state.options.staging_bytes, np.uint8) for _ in range(2)]
        self._opened = np.empty(0, np.uint8)
        """A decrypted payload."""
        self._threads = [
            threading.Thread(target=self._run, name="foreword-tier-load", daemon=True),
            threading.Thread(target=self._read_ahead, name="foreword-tier-read", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def queued_bytes(self) -> int:
        return self._queued_bytes

    @property
    def bytes_per_s(self) -> float:
        """Of recent loads; 0 before the first."""
        return self._rate

    def estimate_s(self, num_bytes: int) -> float:
        """Seconds until a load that is asked for now would end."""
        return LATENCY_S + (self._queued_bytes + num_bytes) / (self._rate or FIRST_GUESS_BYTES_PER_S)

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
        self._state.count_load(ticket.report)
        return ticket

    def close(self, timeout_s: float) -> None:
        """Cancel what is queued and end the threads; one that hangs in the system is left to itself."""
        with self._wake:
            waiting = list(self._queue)
            self._wake.notify_all()
        for load in waiting:
            load.ticket.cancel()
        self._threads[0].join(timeout_s)
        self._reads.put(None)
        self._threads[1].join(timeout_s)

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
            self._state.count_load(load.ticket.report)

    def _load(self, load: Load) -> None:
        if load.ticket.done:
            return
        began = time.monotonic()
        places = self._state.index.locate(load.keys, self._state.clock.now_s())
        stored = load.payload_bytes + self._state.cipher.overhead_bytes
        # A block of another length is of another layout: whoever wrote it, it is not what is asked for.
        fits = (places.rows >= 0) & (places.stored_bytes == stored)
        load.ticket.settle(np.flatnonzero(~fits), Outcome.MISSING)
        pieces = list(pieces_of(places, np.flatnonzero(fits), self._state.options.staging_bytes))
        for piece, content in self._read_all(pieces):
            if load.ticket.done or self._state.closing.is_set():
                continue  # what was asked of the second thread must still be taken from it
            if content.error is not None:
                load.ticket.settle(piece.indices, content.error)
                continue
            self._deliver(load, piece, places, content.data)
        loaded = np.flatnonzero(load.ticket.outcomes_so_far() == Outcome.DONE)
        if len(loaded):
            self._state.index.touch(places.select(loaded), self._state.clock.now_s())
            num_bytes = int(load.payload_bytes[loaded].sum())
            self._state.count(num_loaded=len(loaded), loaded_bytes=num_bytes)
            self._measure(num_bytes, time.monotonic() - began)
        load.ticket.finish(Outcome.CANCELLED)

    def _read_all(self, pieces: list[Piece]) -> Iterator[tuple[Piece, Content]]:
        """Pieces and their content, which is valid until the next step."""
        if len(pieces) == 1:  # one read has nothing to overlap with
            yield pieces[0], self._read(pieces[0], self._buffer(0, pieces[0]))
            return
        asked = taken = 0
        try:
            for number, piece in enumerate(pieces):
                while asked < min(number + 2, len(pieces)):
                    # Buffer `asked` % 2 is free: it was last that of piece `asked` - 2, which is through.
                    self._reads.put((pieces[asked], self._buffer(asked % 2, pieces[asked])))
                    asked += 1
                content = self._contents.get()
                taken += 1
                yield piece, content
        finally:
            for _ in range(asked - taken):
                self._contents.get()

    def _buffer(self, number: int, piece: Piece) -> npt.NDArray[np.uint8]:
        if len(self._staging[number]) < piece.num_bytes:  # one block is longer than a buffer
            self._staging[number] = np.empty(piece.num_bytes, np.uint8)
        return self._staging[number][: piece.num_bytes]

    def _deliver(self, load: Load, piece: Piece, places: Places, data: memoryview) -> None:
        """Verify the blocks of a piece and hand them over."""
        for index in piece.indices:
            start = int(places.pages[index]) * PAGE - piece.offset
            stored_bytes = int(places.stored_bytes[index])
            end = start + padded(stored_bytes)
            if end > len(data):
                load.ticket.settle(index, Outcome.MISSING)  # the file is shorter than it was
                continue
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

    def _measure(self, num_bytes: int, seconds: float) -> None:
        if num_bytes >= RATE_MIN_BYTES and seconds > 0:
            rate = num_bytes / seconds
            self._rate = rate if not self._rate else RATE_MEMORY * self._rate + (1 - RATE_MEMORY) * rate

    # ------------------------------------------------------------------------------ the reading thread

    def _read_ahead(self) -> None:
        while (asked := self._reads.get()) is not None:
            self._contents.put(self._read(*asked))

    def _read(self, piece: Piece, buffer: npt.NDArray[np.uint8]) -> Content:
        """Read a piece. A file that is gone takes all its blocks with it. Raises nothing: a thread waits for it."""
        try:
            return self._read_file(piece, buffer)
        except Exception:
            logger.exception("a read from disk failed unexpectedly; its blocks are computed instead")
            return Content(memoryview(b""), Outcome.IO_ERROR)

    def _read_file(self, piece: Piece, buffer: npt.NDArray[np.uint8]) -> Content:
        files = self._state.files
        nothing = memoryview(b"")
        segment = self._state.table.get(piece.segment_id)
        if segment is None:
            return Content(nothing, Outcome.MISSING)
        try:
            fd = files.open_for_reading(segment.path)
        except FileNotFoundError:
            self._state.lose_segment(segment)
            return Content(nothing, Outcome.MISSING)
        except OSError as error:
            logger.warning("%s cannot be opened: %s", segment.path, error)
            return Content(nothing, Outcome.IO_ERROR)
        try:
            out = buffer.data
            count = read_fully(files, fd, out, piece.offset, uncached=self._state.leaves_cache)
            return Content(out[:count], None)
        except OSError as error:
            logger.warning("%s cannot be read: %s", segment.path, error)
            return Content(nothing, Outcome.IO_ERROR)
        finally:
            close_quietly(files, fd)


def pieces_of(places: Places, indices: npt.NDArray[np.int64], max_bytes: int) -> Iterator[Piece]:
    """Reads that bring the blocks at these places, in order; neighbours come in one read of at most `max_bytes`.

    | block 7 | block 8 | header | block 9 | block 10 |      blocks of one prefix, stored by two runs
    ^ offset                                ^ num_bytes      one piece
    """
    current: list[int] = []
    segment, begin, end = -1, 0, 0
    for index in indices.tolist():
        start = int(places.pages[index])
        stop = start + padded(int(places.stored_bytes[index])) // PAGE
        near = segment == places.segments[index] and end <= start <= end + MAX_GAP_PAGES
        if not near or (stop - begin) * PAGE > max_bytes:
            if current:
                yield Piece(segment, begin * PAGE, (end - begin) * PAGE, current)
            current, segment, begin = [], int(places.segments[index]), start
        current.append(index)
        end = stop
    if current:
        yield Piece(segment, begin * PAGE, (end - begin) * PAGE, current)
