"""The segment writer: gathers runs in a buffer and appends them to the newest segment.

A run is written by one call, header first. There is no sync before its blocks are found: what a crash tears does not
verify. A segment is synced once, when it is sealed.
"""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt

from foreword.tiers.cipher import block_name
from foreword.tiers.disk.eviction import Keepers
from foreword.tiers.disk.files import close_quietly, write_fully
from foreword.tiers.disk.run_buffer import RunBuffer, split_run
from foreword.tiers.disk.run_format import PAGE, RunHeader
from foreword.tiers.disk.segments import Segment, new_blocks, read_block
from foreword.tiers.disk.space import SpaceBook
from foreword.tiers.disk.state import DiskState
from foreword.tiers.ticket import Ticket
from foreword.tiers.tier import BlockRun

logger = logging.getLogger(__name__)


class SegmentWriter:
    """Appends runs. The storing thread alone calls it."""

    def __init__(self, state: DiskState, space: SpaceBook) -> None:
        self._state = state
        self._space = space
        self._buffer = RunBuffer()
        self._open: Segment | None = None
        self._fd = -1
        self._sequence = 0

    def append(self, run: BlockRun, part: npt.NDArray[np.int64], ticket: Ticket) -> npt.NDArray[np.int64]:
        """Write a part of a run, and index its blocks. Returns the indices in the run of those that are stored.

        Blocks whose source failed or whose ticket ended are left out. Raises OSError; then nothing is indexed.
        """
        state, buffer = self._state, self._buffer
        stored = (run.payload_bytes[part] + state.cipher.overhead_bytes).astype(np.int64)
        buffer.begin(stored)
        for index, stored_bytes in zip(part.tolist(), stored.tolist(), strict=True):
            if self._gather(run, index, ticket, buffer.place(stored_bytes)[:stored_bytes]):
                buffer.add(run, index, stored_bytes)
        kept = buffer.kept
        if not len(kept):
            return kept
        created = state.clock.wall_s()
        expires = 0 if run.ttl_s is None else created + max(1, int(run.ttl_s))
        segment, header = self._write(run.keys.namespace, created, expires)
        moments = state.clock.expiry_of(created, expires), state.clock.now_s()
        state.index.insert(new_blocks(header.entries, run.keys.select(kept), segment.id, header.offset, *moments))
        state.drop_if_lost(segment)
        return kept

    def copy(self, fd: int, keepers: Keepers) -> int:
        """Copy blocks from an open segment as they are, once they are verified; returns the number copied."""
        files, header, buffer, copied = self._state.files, keepers.header, self._buffer, 0
        lengths = header.entries["stored_bytes"].astype(np.int64)
        position = {index: at for at, index in enumerate(keepers.chosen.tolist())}
        for part in split_run(lengths, keepers.chosen):
            buffer.begin(lengths[part])
            for index in part.tolist():
                out = buffer.place(int(lengths[index]))
                if read_block(files, fd, header, index, out, uncached=self._state.leaves_cache):
                    buffer.copy(header, index)
            kept = buffer.kept
            if len(kept):
                segment, written = self._write(header.namespace, header.created_s, header.expires_s)
                pages = (written.offset // PAGE + written.entries["page"]).astype(np.uint32)
                moved = keepers.places.select(np.array([position[index] for index in kept.tolist()]))
                copied += self._state.index.move(moved, segment.id, pages)
                self._state.drop_if_lost(segment)
        return copied

    def seal(self) -> None:
        """Sync and close the open segment; it is only read from now on. Raises OSError, but it is sealed then too."""
        if self._open is None:
            return
        segment, fd = self._open, self._fd
        self._open, self._fd = None, -1
        segment.is_open = False
        try:
            self._state.files.sync(fd)
        finally:
            close_quietly(self._state.files, fd)
        try:
            self._space.measure(segment)
        except FileNotFoundError:  # somebody removed it
            self._state.lose_segment(segment)

    # ------------------------------------------------------------------------------ within

    def _gather(self, run: BlockRun, index: int, ticket: Ticket, out: memoryview) -> bool:
        cipher = self._state.cipher
        if not cipher.overhead_bytes:
            return ticket.transfer(index, lambda: run.source.take(index, out))
        payload = memoryview(bytearray(int(run.payload_bytes[index])))
        if not ticket.transfer(index, lambda: run.source.take(index, payload)):
            return False
        key, group_id = run.keys.keys[index].tobytes(), int(run.keys.group_ids[index])
        cipher.seal(block_name(run.keys.namespace, group_id, key), payload, out)
        return True

    def _write(self, namespace: bytes, created_s: int, expires_s: int) -> tuple[Segment, RunHeader]:
        """Write the run in the buffer."""
        state = self._state
        segment = self._segment_for(self._buffer.num_bytes)
        offset = segment.num_bytes
        self._sequence += 1
        cipher_id, moments = state.cipher.cipher_id, {"created_s": created_s, "expires_s": expires_s}
        header, data = self._buffer.finish(self._sequence, namespace, cipher_id, offset, **moments)
        try:
            write_fully(state.files, self._fd, data, offset, uncached=state.leaves_cache)
        except OSError:
            self._abandon(offset)
            raise
        segment.num_bytes = offset + header.run_bytes
        state.count(written_bytes=header.run_bytes)
        try:
            self._space.measure(segment)
        except FileNotFoundError:
            self._drop_open()
            raise
        except OSError:
            segment.physical_bytes = segment.num_bytes
        return segment, header

    def _segment_for(self, num_bytes: int) -> Segment:
        """The open segment if the run fits into it, otherwise a new one."""
        if self._open is not None and self._state.table.get(self._open.id) is None:
            self._drop_open()  # the loader found that its file is gone
        if self._open is not None and self._open.num_bytes + num_bytes > self._space.segment_bytes:
            try:
                self.seal()
            except OSError as error:  # a sync that fails may have lost what was written, which then does not verify
                logger.warning("a segment could not be sealed: %s", error)
        if self._open is None:
            segment = self._state.table.open_new(self._state.directory.home)
            try:
                self._fd = self._state.files.create(segment.path)
            except OSError:
                self._state.table.remove(segment)
                raise
            self._open = segment
        return self._open

    def _drop_open(self) -> None:
        """Give up the open segment, whose file somebody removed."""
        assert self._open is not None
        self._state.lose_segment(self._open)
        close_quietly(self._state.files, self._fd)
        self._open, self._fd = None, -1

    def _abandon(self, offset: int) -> None:
        """Seal a segment after a failed write, without what was written of the run; an empty one goes."""
        assert self._open is not None
        segment = self._open
        try:
            self._state.files.truncate(self._fd, offset)
        except OSError as error:
            logger.warning("a torn run stays at the end of a segment: %s", error)
        try:
            self.seal()
            if offset == 0:  # otherwise the next eviction would take it, and free nothing
                self._state.lose_segment(segment)
                self._state.files.unlink(segment.path)
        except OSError as error:
            logger.warning("a segment could not be sealed: %s", error)
