"""The segment writer: gathers runs in a buffer and appends them to the newest segment.

Knows runs, payloads and the open segment; knows nothing of queues or of who stores.

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
from foreword.tiers.disk.run_format import (
    ENTRY,
    MAX_RUN_BYTES,
    PAGE,
    RunHeader,
    block_checksum,
    encode_header,
    header_bytes_of,
    padded,
)
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
        self._staging = np.zeros(MAX_RUN_BYTES, np.uint8)
        self._open: Segment | None = None
        self._fd = -1
        self._sequence = 0

    def split(self, stored_bytes: npt.NDArray[np.int64], chosen: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
        """The chosen blocks of a run as parts that are written at once, each of at most `MAX_RUN_BYTES`."""
        parts: list[list[int]] = [[]]
        total = 0
        for index in chosen.tolist():
            size = padded(int(stored_bytes[index]))
            part = parts[-1]
            if part and header_bytes_of(len(part) + 1) + total + size > MAX_RUN_BYTES:
                parts.append([])
                total = 0
            parts[-1].append(index)
            total += size
        return [np.array(part, np.int64) for part in parts if part]

    def run_bytes(self, stored_bytes: npt.NDArray[np.int64]) -> int:
        """Bytes of a run of blocks with these stored lengths."""
        return header_bytes_of(len(stored_bytes)) + sum(padded(size) for size in stored_bytes.tolist())

    def append(self, run: BlockRun, part: npt.NDArray[np.int64], ticket: Ticket) -> npt.NDArray[np.int64]:
        """Write a part of a run, and index its blocks. Returns the indices in the run of those that are stored.

        Blocks whose source failed or whose ticket ended are left out. Raises OSError; then nothing is indexed.
        """
        state = self._state
        stored = (run.payload_bytes[part] + state.cipher.overhead_bytes).astype(np.int64)
        begin = header_bytes_of(len(part))
        self._reserve(self.run_bytes(stored))
        entries = np.zeros(len(part), ENTRY)
        kept: dict[int, int] = {}  # index in the run: index in what is written
        for index, stored_bytes in zip(part.tolist(), stored.tolist(), strict=True):
            end = begin + padded(stored_bytes)
            place = self._staging.data[begin : begin + stored_bytes]
            if not self._gather(run, index, ticket, place):
                continue
            self._staging[begin + stored_bytes : end] = 0
            key, group_id = run.keys.keys[index].tobytes(), int(run.keys.group_ids[index])
            checksum = block_checksum(run.keys.namespace, group_id, key, stored_bytes, self._staging[begin:end].data)
            entries[len(kept)] = (
                run.keys.keys[index],
                np.frombuffer(checksum, np.uint8),
                kept.get(int(run.parents[index]), -1),
                group_id,
                run.flags[index],
                stored_bytes,
                begin // PAGE,
                run.values[index],
                0,
            )
            kept[index] = len(kept)
            begin = end
        if not kept:
            return np.zeros(0, np.int64)
        stored_indices = np.array(list(kept), np.int64)
        created = state.clock.wall_s()
        expires = 0 if run.ttl_s is None else created + max(1, int(run.ttl_s))
        segment, offset = self._write(entries[: len(kept)], len(part), begin, run.keys.namespace, created, expires)
        keys = run.keys.select(stored_indices)
        moments = state.clock.expiry_of(created, expires), state.clock.now_s()
        state.index.insert(new_blocks(entries[: len(kept)], keys, segment.id, offset, *moments))
        state.drop_if_lost(segment)
        return stored_indices

    def copy(self, fd: int, keepers: Keepers) -> int:
        """Copy blocks from an open segment as they are, once they are verified; returns the number copied."""
        files, header, copied = self._state.files, keepers.header, 0
        lengths = header.entries["stored_bytes"].astype(np.int64)
        position = {index: at for at, index in enumerate(keepers.chosen.tolist())}
        for part in self.split(lengths, keepers.chosen):
            self._reserve(self.run_bytes(lengths[part]))
            begin = header_bytes_of(len(part))
            entries = header.entries[part].copy()
            kept: list[int] = []
            for index in part.tolist():
                entry = header.entries[index]
                end = begin + padded(int(entry["stored_bytes"]))
                out = self._staging[begin:end]
                if not read_block(files, fd, header, index, out.data, uncached=self._state.leaves_cache):
                    continue
                entries[len(kept)] = entry
                entries[len(kept)]["page"] = begin // PAGE
                entries[len(kept)]["parent"] = -1
                kept.append(index)
                begin = end
            if kept:
                segment, offset = self._write(
                    entries[: len(kept)], len(part), begin, header.namespace, header.created_s, header.expires_s
                )
                pages = (offset // PAGE + entries["page"][: len(kept)]).astype(np.uint32)
                moved = keepers.places.select(np.array([position[index] for index in kept]))
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

    def _reserve(self, num_bytes: int) -> None:
        if len(self._staging) < num_bytes:  # one block is longer than a run usually is
            self._staging = np.zeros(num_bytes, np.uint8)

    def _write(
        self,
        entries: npt.NDArray[np.void],
        num_planned: int,
        end: int,
        namespace: bytes,
        created_s: int,
        expires_s: int,
    ) -> tuple[Segment, int]:
        """Write the run that fills the buffer up to `end`; its header has room for `num_planned` blocks."""
        state = self._state
        segment = self._segment_for(end)
        offset = segment.num_bytes
        # Blocks that were left out leave a gap in the header's room, which must have the length that its count says.
        skipped = header_bytes_of(num_planned) - header_bytes_of(len(entries))
        entries["page"] -= skipped // PAGE
        self._sequence += 1
        header = RunHeader(
            header_bytes_of(len(entries)),
            end - skipped,
            self._sequence,
            namespace,
            state.cipher.cipher_id,
            created_s,
            expires_s,
            offset,
            entries,
        )
        self._staging[skipped : skipped + header.header_bytes] = np.frombuffer(encode_header(header), np.uint8)
        try:
            data = self._staging.data[skipped:end]
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
        return segment, offset

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
