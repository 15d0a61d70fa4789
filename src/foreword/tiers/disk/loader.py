"""The loader: reads blocks, verifies them, and hands them to the caller's memory.

While one thread verifies and copies a piece, a second thread reads the next piece. The caller's memory gets only
verified bytes.

Blocks are read in a few large reads, one read ahead of the thread that works on them (`ReadAhead`). Neighbours in a
segment are read together. Reads end at multiples of 2 MiB in the file, wherever blocks end. Otherwise a read that
bypasses the page cache would end within a large page of the cache and throw the page away, and the next read would
fetch the page again.

    file      |........|........|........|      every 2 MiB
    blocks       | 0 | 1 | 2 | 3 | 4 | 5 |
    pieces       ^=====^=================^      block 1 is in the second piece, which gets its first bytes as `carry`
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foreword.tiers.cipher import block_name
from foreword.tiers.disk.files import close_quietly, read_fully
from foreword.tiers.disk.segment_index import Rows
from foreword.tiers.disk.segments import PAGE, block_checksum, padded
from foreword.tiers.disk.state import DiskState
from foreword.tiers.loads import Load, Loads
from foreword.tiers.rare_warning import RareWarning
from foreword.tiers.ticket import JobThread, Outcome
from foreword.tiers.tier import BoolArray

logger = logging.getLogger(__name__)
ALIGNED_BYTES = 2 << 20
MAX_GAP_PAGES = 32
"""Gaps of at most this number of pages are cheaper to read than to skip. The header of a run is such a gap."""
NOTHING = memoryview(b"")


@dataclass(frozen=True, slots=True)
class Piece:
    """One read, and the blocks that end in it."""

    segment_id: int
    offset: int
    num_bytes: int
    carry_bytes: int
    """The number of bytes before `offset` that the piece's first block needs: the last bytes of the preceding piece."""
    indices: list[int]
    """The indices of its blocks in the load."""
    is_last: bool
    """Whether it is the last piece of its extent."""


@dataclass(frozen=True, slots=True)
class Content:
    """The result of reading a piece."""

    offset: int
    """The offset of `data` in the segment: the piece's offset, less the bytes that were carried over."""
    data: memoryview
    """The bytes that the file has; valid until the next piece is asked for."""
    error: Outcome | None
    """Why not all bytes were read; None if all bytes were read."""


Extent = list[tuple[int, int, int]]
"""Blocks that lie near each other in a segment: for each, its index in the load, and its begin and end in the file."""


def extents_of(places: Rows, indices: npt.NDArray[np.int64]) -> Iterator[tuple[int, Extent]]:
    """Divide the blocks at `indices` of a load into extents, in order. Yields the segment's id and the extent."""
    blocks: Extent = []
    segment, last_end = -1, 0
    for index in indices.tolist():
        begin = int(places["page"][index]) * PAGE
        end = begin + padded(int(places["stored_bytes"][index]))
        near = segment == places["segment"][index] and last_end <= begin <= last_end + MAX_GAP_PAGES * PAGE
        if blocks and not near:
            yield segment, blocks
            blocks = []
        segment, last_end = int(places["segment"][index]), end
        blocks.append((index, begin, end))
    if blocks:
        yield segment, blocks


def pieces_of(segment_id: int, blocks: Extent, max_bytes: int) -> Iterator[Piece]:
    """The reads of an extent, each of at most `max_bytes`, or of twice the longest block if that is more."""
    longest = max(end - begin for _, begin, end in blocks)
    step = max(max_bytes, 2 * longest, ALIGNED_BYTES) // ALIGNED_BYTES * ALIGNED_BYTES
    step = max(step, 2 * longest)
    offset, last_end, following = blocks[0][1], blocks[-1][2], 0
    while offset < last_end:
        stop = min(last_end, offset + step)
        if stop < last_end and stop // ALIGNED_BYTES * ALIGNED_BYTES > offset + longest:
            stop = stop // ALIGNED_BYTES * ALIGNED_BYTES
        first = following
        while following < len(blocks) and blocks[following][2] <= stop:
            following += 1
        ending = blocks[first:following]
        carry = max(0, offset - ending[0][1]) if ending else 0
        yield Piece(segment_id, offset, stop - offset, carry, [index for index, _, _ in ending], stop == last_end)
        offset = stop


class ReadAhead:
    """Reads pieces in a thread of its own into two buffers. One thread at a time may call `contents`."""

    def __init__(self, state: DiskState) -> None:
        self._state = state
        self._requests: queue.SimpleQueue[tuple[Piece, memoryview] | None] = queue.SimpleQueue()
        self._read: queue.SimpleQueue[Content] = queue.SimpleQueue()
        self._buffers = [np.empty(state.options.staging_bytes, np.uint8) for _ in range(2)]
        self._file: tuple[int, int] | None = None
        """Segment id and descriptor of the file that is open. All reads of an extent use one descriptor, so that the
        kernel sees that they are sequential."""
        self._unreadable = RareWarning(logger, "a segment of the cache cannot be read: %s")
        self._thread = threading.Thread(target=self._run, name="foreword-tier-read", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        self._requests.put(None)
        self._thread.join(timeout_s)

    def contents(self, places: Rows, indices: npt.NDArray[np.int64]) -> Iterator[tuple[Piece, Content]]:
        """Yield the pieces of the blocks at these indices of `places`, in order, each with its content."""
        max_bytes = self._state.options.staging_bytes
        pieces = [piece for extent in extents_of(places, indices) for piece in pieces_of(*extent, max_bytes)]
        if not pieces:
            return
        front = max(piece.carry_bytes for piece in pieces)
        size = front + max(piece.num_bytes for piece in pieces)
        for number, buffer in enumerate(self._buffers):
            if len(buffer) < size:
                self._buffers[number] = np.empty(size, np.uint8)
        rooms = [buffer.data for buffer in self._buffers]
        if len(pieces) == 1:  # one read has nothing to overlap with
            yield pieces[0], self._read_piece(pieces[0], rooms[0])
            return
        waits = False
        try:
            before = Content(0, NOTHING, None)
            self._requests.put((pieces[0], rooms[0][front:]))
            waits = True
            for number, piece in enumerate(pieces):
                content = self._read.get()
                waits = False
                content = _carried_over(piece, before, content, rooms[number % 2], front)
                if number + 1 < len(pieces):  # the next piece uses the buffer of the piece before
                    self._requests.put((pieces[number + 1], rooms[(number + 1) % 2][front:]))
                    waits = True
                yield piece, content
                before = content
        finally:
            if waits:
                self._read.get()
            self._close()  # after a cancelled load: an evicted file takes up space on disk while it is open

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            self._read.put(self._read_piece(*request))
        self._close()

    def _read_piece(self, piece: Piece, room: memoryview) -> Content:
        """Read a piece into the beginning of `room`. Raises nothing, because a thread waits for the result."""
        error: Outcome | None = None
        count = 0
        try:
            fd = self._open(piece.segment_id)
            if fd is None:
                error = Outcome.MISSING
            else:
                out = room[: piece.num_bytes]
                count = read_fully(self._state.files, fd, out, piece.offset, uncached=self._state.leaves_cache)
                if count < piece.num_bytes:
                    error = Outcome.MISSING
        except OSError as failure:
            self._unreadable.note(failure)
            error = Outcome.IO_ERROR
        except Exception:
            logger.exception("a read from disk failed unexpectedly; its blocks are computed instead")
            error = Outcome.IO_ERROR
        if piece.is_last or error is not None:
            self._close()
        return Content(piece.offset, room[:count], error)

    def _open(self, segment_id: int) -> int | None:
        """The descriptor of a segment; None if its file is gone. Then the index forgets the segment's blocks."""
        if self._file is not None and self._file[0] == segment_id:
            return self._file[1]
        self._close()
        segment = self._state.index.segment(segment_id)
        if segment is None:
            return None
        try:
            fd = self._state.files.open_for_reading(segment.path)
        except FileNotFoundError:
            self._state.index.remove_segment(segment)
            return None
        self._file = segment_id, fd
        return fd

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            close_quietly(self._state.files, file[1])


def _carried_over(piece: Piece, before: Content, content: Content, room: memoryview, front: int) -> Content:
    """A piece's content, with the bytes in front of it that its first block needs from the preceding piece."""
    carry = piece.carry_bytes
    missing = before.offset + len(before.data) != piece.offset
    if not carry or missing:
        return content
    room[front - carry : front] = before.data[-carry:]
    return Content(content.offset - carry, room[front - carry : front + len(content.data)], content.error)


class Loader:
    """Works on loads in the order of the calls of `load`. `start` begins its threads, `close` ends them."""

    def __init__(self, state: DiskState) -> None:
        self._state = state
        self._reader = ReadAhead(state)
        self._opened = np.empty(0, np.uint8)
        """The memory for decrypted payloads."""
        self.thread: JobThread[Load] = JobThread("foreword-tier-load", self._load, state.options.max_queued_load_bytes)
        self.loads = Loads(self.thread, state, self._forget)

    def start(self) -> None:
        self._reader.start()
        self.thread.start()

    def close(self, timeout_s: float) -> None:
        """Cancel queued loads and end the threads; a thread that hangs in a system call is left alone."""
        self.thread.stop_after(0.0)
        self.thread.join(timeout_s)
        self._reader.close(timeout_s)

    def _forget(self, load: Load, lost: BoolArray) -> None:
        self._state.index.forget(load.keys.select(lost), None if load.places is None else load.places[lost])

    # ------------------------------------------------------------------------------ the loading thread

    def _load(self, load: Load) -> None:
        if load.ticket.done:
            return
        began = time.monotonic()
        places = load.places = self._state.index.locate(load.keys, self._state.clock.now_s())
        stored = load.payload_bytes + self._state.cipher.overhead_bytes
        # A stored block of another length has another layout, so it is not the block that is asked for.
        fits = (places["name"] != 0) & (places["stored_bytes"] == stored)
        load.ticket.settle(np.flatnonzero(~fits), Outcome.MISSING)
        for piece, content in self._reader.contents(places, np.flatnonzero(fits)):
            if load.ticket.done or self._state.closing.is_set():
                break
            self._deliver(load, piece, places, content)
        loaded = self.loads.measure(load, began)
        self._state.index.touch(load.keys.select(loaded), self._state.clock.now_s())
        self.loads.finish(load, Outcome.CANCELLED, began)

    def _deliver(self, load: Load, piece: Piece, places: Rows, content: Content) -> None:
        """Verify the blocks of a piece and hand them over."""
        for index in piece.indices:
            start = int(places["page"][index]) * PAGE - content.offset
            stored_bytes = int(places["stored_bytes"][index])
            end = start + padded(stored_bytes)
            if start < 0 or end > len(content.data):  # not read, or the file is shorter than it was
                load.ticket.settle(index, content.error or Outcome.MISSING)
                continue
            data = content.data
            key, group_id = load.keys.keys[index].tobytes(), int(load.keys.group_ids[index])
            checksum = block_checksum(load.keys.namespace, group_id, key, stored_bytes, data[start:end])
            payload = None
            if checksum == places["checksum"][index].tobytes():
                name = block_name(load.keys.namespace, group_id, key)
                stored = data[start : start + stored_bytes]
                payload = self._state.cipher.open(name, stored, self._room(stored_bytes))
            if payload is None:
                load.ticket.settle(index, Outcome.CORRUPT)
            elif load.ticket.transfer(index, lambda index=index, payload=payload: load.sink.put(index, payload)):  # type: ignore[misc]
                load.ticket.settle(index, Outcome.DONE)

    def _room(self, num_bytes: int) -> memoryview:
        if len(self._opened) < num_bytes:
            self._opened = np.empty(num_bytes, np.uint8)
        return self._opened.data
