"""Stores: prefixes that the pool has and a tier lacks, written while the engine goes on.

A sequence is offered when its prompt is computed and when its request leaves. Sequences are stored in the order of
`Offers`, in chunks, one at a time: the head of a prefix before its tail.

Fences. The blocks of a chunk are held until the tiers have them, so that nobody overwrites them. When a chunk is
chosen, a planned step may still have to fill a block of the chunk. So the chunk is stored only after all steps that
were planned then are settled. A chunk that takes too long is cancelled. While requests run, stores take a fifth of the
time. For the rest of the time they leave memory and disk to the steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foreword.cache import NULL_BLOCK, KVCacheManager, TokenSequence
from foreword.engine.tiering.block_memory import BlockMemory, BlocksOfParts, Part, names_of
from foreword.engine.tiering.offers import Offer, Offers
from foreword.tiers.ticket import Outcome, Ticket
from foreword.tiers.tier import EXACT, BlockRun, BoolArray, Tier

CHUNK_BYTES = 32 << 20
PATIENCE_S = 10.0
"""A chunk that a tier does not write within this time is given up."""
REST_FACTOR = 4.0
"""While requests run, a pause follows each chunk. It is this many times as long as the chunk took."""
DAY_S = 86_400


@dataclass(slots=True)
class _Chunk:
    """Blocks on their way to the tiers."""

    offer: Offer
    parts: list[Part]
    tiers: list[Tier]
    """The tiers that lack some of the blocks."""
    is_last: bool
    """Whether the chunk has the last blocks of the sequence that the tiers lack."""
    num_planned: int
    """The number of steps that were planned when the chunk was chosen."""
    num_bytes: int
    run: BlockRun | None = None
    """The run of blocks that the tiers store; None before the store begins."""
    tickets: list[Ticket] = field(default_factory=list)
    started: float = 0.0


class _Apart(NamedTuple):
    """Payloads other than blocks of the pool, on their way to the tiers."""

    run: BlockRun
    tickets: list[Ticket]
    num_bytes: int
    """The bytes that all tiers store."""
    started: float


class Stores:
    """The offers, and the chunk under way. Only the engine's thread calls the methods."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        memory: BlockMemory,
        manager: KVCacheManager,
        namespace: bytes,
        offers: Offers,
        *,
        max_bytes_per_day: int | None = None,
    ) -> None:
        self._tiers, self._memory, self._manager, self._namespace = tiers, memory, manager, namespace
        self._max_bytes_per_day = max_bytes_per_day
        self._offers = offers
        self._chunk: _Chunk | None = None
        self._apart: list[_Apart] = []
        self._rest_until = 0.0
        self._day_began, self._bytes_today = time.monotonic(), 0
        self.counts = offers.counts

    def __len__(self) -> int:
        """The number of offers that are not stored yet."""
        return len(self._offers) + (self._chunk is not None)

    @property
    def holds_blocks(self) -> bool:
        return self._chunk is not None

    @property
    def bytes_today(self) -> int:
        """Bytes stored since the day of `max_bytes_per_day` began."""
        return 0 if time.monotonic() - self._day_began > DAY_S else self._bytes_today

    def go_on(self, num_planned: int, num_settled: int, *, is_busy: bool) -> None:
        """Finish, begin or choose the next chunk, without waiting. `is_busy`: requests run, so leave them time."""
        self._settle_apart()
        chunk = self._chunk
        if chunk is not None and chunk.tickets:
            if not all(ticket.done for ticket in chunk.tickets):
                if time.monotonic() - chunk.started > PATIENCE_S:
                    self.cancel()
                return
            self._finish(chunk, is_busy=is_busy)
            chunk = None
        is_new = chunk is None
        if chunk is None and self._offers and not (is_busy and time.monotonic() < self._rest_until):
            chunk = self._chunk = self._choose(num_planned)
        if chunk is not None and chunk.num_planned <= num_settled:
            if is_new or self._is_still_cached(chunk):
                self._begin(chunk)
            else:
                self._release(chunk)

    def cancel(self) -> None:
        """Give up the chunk under way, with its sequence, and release its blocks; count the blocks that are stored.

        A tier that is writing at this moment may still finish the piece that it writes, at most 8 MiB. `bytes_today`
        does not count this piece.
        """
        chunk = self._chunk
        if chunk is not None:
            for ticket in chunk.tickets:
                ticket.cancel()
                self._count(chunk, ticket)
            self._release(chunk)

    def forget_offers(self) -> None:
        self.cancel()
        self._offers.clear()

    @property
    def is_storing(self) -> bool:
        return len(self) > 0 or len(self._apart) > 0

    def admits_apart(self, key: bytes) -> bool:
        """Whether to store a payload that is no block of the pool. Call it once each time a payload is made."""
        return self._offers.admits_apart(key)

    def store_apart(self, run: BlockRun) -> None:
        """Begin to store payloads that are no blocks of the pool, unless this day's bytes are spent."""
        num_bytes = int(run.payload_bytes.sum()) * len(self._tiers)
        if self._may_write(num_bytes):
            tickets = [tier.store(run) for tier in self._tiers]
            self._apart.append(_Apart(run, tickets, num_bytes, time.monotonic()))
        else:
            self.counts.num_dropped_offers += 1

    def _settle_apart(self) -> None:
        """Count the results of stores that `store_apart` began; cancel those that take too long."""
        pending, self._apart = self._apart, []
        for store in pending:
            if time.monotonic() - store.started > PATIENCE_S:
                for ticket in store.tickets:
                    ticket.cancel()
            if all(ticket.done for ticket in store.tickets):
                for ticket in store.tickets:
                    self._count(store, ticket)
            else:
                self._apart.append(store)

    # ------------------------------------------------------------------ chunks

    def _choose(self, num_planned: int) -> _Chunk | None:
        """Choose and hold the next blocks that a tier lacks, and drop offers that have none. None: no offer is left."""
        while (offer := self._offers.take()) is not None:
            chunk = self._chunk_of(offer, num_planned)
            if chunk is None:
                continue
            if not self._may_write(chunk.num_bytes * len(chunk.tiers)):
                self._offers.drop(offer)
                continue
            for part in chunk.parts:
                self._manager.hold_blocks(part.block_ids)
            return chunk
        return None

    def _chunk_of(self, offer: Offer, num_planned: int) -> _Chunk | None:
        """Of those blocks of a sequence that are cached and that a tier lacks, the first ones; None if there are
        none.
        """
        parts = cached_parts(self._manager, offer.sequence, offer.num_tokens)
        if not parts:
            return None
        names = names_of(self._manager, self._namespace, offer.sequence, parts)
        missing = [(tier, ~tier.lookup(names)) for tier in self._tiers]
        lacking = np.logical_or.reduce([lacks for _, lacks in missing])
        if offer.admitted is not None:
            lacking &= np.concatenate([self._admitted(part, offer.admitted) for part in parts])
        if not lacking.any():
            return None
        chosen: list[npt.NDArray[np.int64]] = []
        num_bytes, at = 0, 0
        for part in parts:
            size, is_lacking = self._memory.payload_bytes(part.group_id), lacking[at : at + len(part.numbers)]
            places = np.flatnonzero(is_lacking)[: max(num_bytes == 0, (CHUNK_BYTES - num_bytes) // size)]
            chosen.append(places)
            num_bytes += len(places) * size
            at += len(part.numbers)
        starts = np.cumsum([0, *(len(part.numbers) for part in parts)])[:-1]
        flat = np.concatenate([places + start for places, start in zip(chosen, starts, strict=True)])
        return _Chunk(
            offer,
            [
                Part(part.group_id, part.numbers[places], part.block_ids[places])
                for part, places in zip(parts, chosen, strict=True)
            ],
            [tier for tier, lacks in missing if lacks[flat].any()],
            len(flat) == np.count_nonzero(lacking),
            num_planned,
            num_bytes,
        )

    def _admitted(self, part: Part, admitted: BoolArray) -> BoolArray:
        """Which blocks of a part to store. If a block of the part covers several blocks of the sequence, the last of
        these decides.
        """
        width = self._manager.groups[part.group_id].block_size // self._manager.block_size
        return admitted[(part.numbers + 1) * width - 1]

    def _is_still_cached(self, chunk: _Chunk) -> bool:
        """Whether the chunk's blocks are still cached. If a step that was to fill a block has failed, they are not."""
        now = cached_parts(self._manager, chunk.offer.sequence, chunk.offer.num_tokens)
        return _places(chunk.parts).items() <= _places(now).items()

    def _begin(self, chunk: _Chunk) -> None:
        chunk.started = time.monotonic()
        run = run_of(self._manager, self._memory, self._namespace, chunk.offer.sequence, chunk.parts)
        chunk.run = run
        chunk.tickets += [tier.store(run) for tier in chunk.tiers]

    def _finish(self, chunk: _Chunk, *, is_busy: bool) -> None:
        """Count a chunk and release it. If a tier took any of its blocks, the rest of its sequence is offered again."""
        seconds, run = time.monotonic() - chunk.started, chunk.run
        assert run is not None, "the chunk has not begun"
        is_stored = np.zeros(len(run.keys), np.bool_)
        for ticket in chunk.tickets:
            outcomes = ticket.report.outcomes
            self._count(chunk, ticket)
            refused = np.isin(outcomes, (Outcome.QUEUE_FULL, Outcome.NO_ROOM))
            self._offers.dropped.note([key.tobytes() for key in run.keys.keys[refused]])
            is_stored |= np.isin(outcomes, (Outcome.DONE, Outcome.PRESENT))
        self._offers.dropped.forget([key.tobytes() for key in run.keys.keys[is_stored]])
        self.counts.num_chunks += 1
        if not chunk.is_last:
            (self._offers.put_back if is_stored.any() else self._offers.drop)(chunk.offer)
        if is_busy:
            self._rest_until = time.monotonic() + REST_FACTOR * seconds
        self._release(chunk)

    def _release(self, chunk: _Chunk) -> None:
        for part in reversed(chunk.parts):
            self._manager.release_blocks(part.block_ids)
        self._chunk = None

    def _count(self, store: _Chunk | _Apart, ticket: Ticket) -> None:
        assert store.run is not None, "the store has not begun"
        self.counts.blocks_by_outcome.update(ticket.report.by_reason())
        num_bytes = int(store.run.payload_bytes[ticket.report.outcomes == Outcome.DONE].sum())
        self.counts.num_bytes += num_bytes
        self._bytes_today += num_bytes

    def _may_write(self, num_bytes: int) -> bool:
        """Whether the day's limit allows writing `num_bytes` more bytes, summed over all tiers, after the writes under
        way.
        """
        if time.monotonic() - self._day_began > DAY_S:
            self._day_began, self._bytes_today = time.monotonic(), 0
        num_bytes += self._bytes_today + sum(store.num_bytes for store in self._apart)
        return self._max_bytes_per_day is None or num_bytes <= self._max_bytes_per_day


def cached_parts(manager: KVCacheManager, sequence: TokenSequence, num_tokens: int) -> list[Part]:
    """The cached blocks that the first `num_tokens` tokens fill, by group; groups without such blocks are left out."""
    parts = []
    tables, all_keys = manager.cached_blocks(sequence), manager.keys_by_group(sequence)
    for group_id, (spec, table, keys) in enumerate(zip(manager.groups, tables, all_keys, strict=True)):
        num_full = min(len(keys), num_tokens // spec.block_size)
        numbers = np.flatnonzero(table[:num_full] != NULL_BLOCK).astype(np.int32)
        if len(numbers):
            parts.append(Part(group_id, numbers, table[numbers]))
    return parts


def run_of(
    manager: KVCacheManager, memory: BlockMemory, namespace: bytes, sequence: TokenSequence, parts: list[Part]
) -> BlockRun:
    """A sequence's blocks in `parts` as a run that can be stored; the run reads the pool when it is stored."""
    names, blocks = names_of(manager, namespace, sequence, parts), BlocksOfParts(memory, parts)
    flags, values = np.full(len(names), EXACT, np.uint16), np.ones(len(names), np.float32)
    return BlockRun(names, blocks.payload_bytes, blocks, _parents(parts), flags, values)


def _places(parts: Sequence[Part]) -> dict[tuple[int, int], int]:
    """(Group, number) of each block -> its id in the pool."""
    return {
        (part.group_id, number): block_id
        for part in parts
        for number, block_id in zip(part.numbers.tolist(), part.block_ids.tolist(), strict=True)
    }


def _parents(parts: Sequence[Part]) -> npt.NDArray[np.int32]:
    """For each block, the place of its predecessor among all blocks, [blocks]; -1 if the predecessor is missing."""
    parents, start = [], 0
    for part in parts:
        part_parents = np.arange(start - 1, start - 1 + len(part.numbers), dtype=np.int32)
        part_parents[np.flatnonzero(np.diff(part.numbers, prepend=-9) != 1)] = -1
        parents.append(part_parents)
        start += len(part.numbers)
    return np.concatenate(parents)
