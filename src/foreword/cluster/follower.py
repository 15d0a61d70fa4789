"""Follower: keeps a correct copy of a remote cache's content, though messages are lost, repeated and reordered.

The follower gets every batch that arrives, tells its `Sink` which blocks to store and remove, and says what to ask for
(`Need`):

    first batch   ─> SNAPSHOT, or REPLAY from 0          a publisher's very first batch needs neither
    gap           ─> REPLAY of missing batches ─> if too old: SNAPSHOT ─> if not available: an incomplete copy
    reset         ─> nothing: batches that are missing before it do not matter
    other publisher id, numbers that start again, silence ─> as at the first batch

While the follower waits for a replay or a snapshot, it keeps later batches and applies them afterwards. Repeated
batches are ignored.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from foreword.cache import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent

MAX_BUFFERED = 100_000
"""The most batches that wait for a missing batch. If there are more, the follower starts again."""
NUM_REMEMBERED = 1024
"""The number of applied batches that are remembered for a publisher without an id, to recognize repeated batches."""


@dataclass(frozen=True, slots=True)
class UnknownEvent:
    """An event that this version does not know; a later version of a publisher may send it."""

    tag: str


Event = KVCacheEvent | UnknownEvent


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events that a cache published together; a snapshot has the same form. Without events it is a heartbeat."""

    publisher_id: bytes | None
    """Identifies the publisher's process. None: the publisher gives no id. Then a batch with a smaller number than
    before may mean that the publisher has restarted."""
    number: int
    """Batches count from 0 in each process of the publisher. In a snapshot: the last batch that it includes, or -1."""
    events: tuple[Event, ...] = ()
    time: float = 0.0
    """Time in seconds by the publisher's clock."""


class Sink(Protocol):
    """The copy that a follower keeps correct."""

    def store(self, event: BlockStored) -> None:
        """Add consecutive blocks."""

    def remove(self, event: BlockRemoved) -> bool:
        """Remove blocks. False: the copy lacks a block to remove, so the copy is wrong."""

    def clear(self) -> None:
        """Remove all blocks."""


class Witness(Protocol):
    """Sees all events in order, except the events in a snapshot."""

    def note(self, time: float, event: Event) -> None:
        """Called with an event before the sink gets it."""

    def end_batch(self, time: float) -> None:
        """Called when the last event of a batch was applied."""


class Need(enum.Enum):
    """The next thing to ask a publisher for."""

    NOTHING = enum.auto()
    REPLAY = enum.auto()
    SNAPSHOT = enum.auto()


class Follower:
    """Applies a publisher's batches in order, and finds out what is missing."""

    def __init__(self, sink: Sink, *, has_replay: bool, has_snapshot: bool) -> None:
        self.witness: Witness | None = None
        self.need = Need.REPLAY if has_replay and not has_snapshot else Need.NOTHING
        self.publisher_id: bytes | None = None
        self.counts: Counter[str] = Counter()
        """Counts by name: batches, repeated, bad, gaps, restarts, silences, resyncs, snapshots, failed (requests),
        incomplete_replays and unknown_events."""
        self._sink = sink
        self._has_replay, self._has_snapshot = has_replay, has_snapshot
        self._next: int | None = None
        """The number of the next batch to apply; None until the copy has a starting point."""
        self._last = -1
        """The highest batch number that has arrived."""
        self._is_complete = self._is_wrong = False
        """`_is_wrong`: the events contradict the copy, so only a snapshot or a reset helps."""
        self._later: dict[int, EventBatch] = {}
        """Batches that wait for earlier ones, by number."""
        self._applied: dict[int, int] = {}
        """For a publisher without an id, the hashes of the latest applied batches, by number."""

    @property
    def is_exact(self) -> bool:
        """Whether the copy equals the publisher's cache as of its last batch."""
        return self._is_complete and self.need is Need.NOTHING and self._has_all

    @property
    def state(self) -> str:
        """The follower's state in a word or two."""
        if self.is_exact:
            return "exact"
        if self.need is not Need.NOTHING:
            return f"waiting for a {self.need.name.lower()}"
        return "waiting for a message" if self._next is None else "incomplete"

    @property
    def next_number(self) -> int:
        """The number from which to ask for a replay."""
        return self._next or 0

    @property
    def _has_all(self) -> bool:
        return self._next is not None and self._next > self._last and not self._later and not self._is_wrong

    # -------------------------------------------------------------- what arrives

    def take(self, batch: EventBatch) -> None:
        """Take a batch as it is published."""
        if self._is_of_other(batch):
            self._start_again("restarts", batch)
        elif self._next is not None and batch.number < self._next:
            self._take_old(batch)
        elif batch.number in self._later:
            self.counts["repeated"] += 1
        else:
            self._add(batch)
            self._go_on()

    def take_replayed(self, batch: EventBatch) -> None:
        """Take a batch of a replay. Call `end_replay` after the last batch."""
        if batch.number >= self.next_number and not self._is_of_other(batch):
            self._later.setdefault(batch.number, batch)

    def end_replay(self) -> None:
        """Apply a replay that has ended. If batches are still missing, only a snapshot helps."""
        self.need = Need.NOTHING
        if self._next is None and 0 in self._later:
            self._begin(0, complete=True)
        self._apply_later()
        if self._has_all or (self._next is None and not self._later and not self._has_snapshot):
            return
        self.counts["incomplete_replays"] += 1
        if self._has_snapshot:
            self._reset()
        else:
            self._go_on_without()

    def install(self, snapshot: EventBatch) -> None:
        """Take the publisher's whole state. A snapshot that is older than an exact copy is ignored."""
        if any(batch.publisher_id != snapshot.publisher_id for batch in self._later.values()):
            self._start_again("restarts", None)  # the publisher restarted meanwhile; which life is later is not known
            return
        is_same = snapshot.publisher_id == self.publisher_id
        if is_same and self.is_exact and snapshot.number < self.next_number:
            return
        self.counts["restarts"] += not is_same and self.publisher_id is not None
        self._sink.clear()
        for event in snapshot.events:
            self._tell(event)
        self.counts["snapshots"] += 1
        self.publisher_id = snapshot.publisher_id
        self._begin(snapshot.number + 1, complete=True)
        self._go_on()

    def request_failed(self) -> None:
        """Record that a request for a replay or snapshot got no usable answer in time."""
        self.counts["failed"] += 1
        if self.need is Need.REPLAY:
            self.end_replay()
        elif self._has_replay:
            self.need = Need.REPLAY

    def lose_one(self) -> None:
        """Count an unreadable batch, and treat it as missed."""
        self.counts["bad"] += 1
        self._miss()

    def fall_silent(self) -> None:
        """Drop the copy because the publisher's heartbeats stopped. A publisher that sends again is followed again."""
        self._start_again("silences", None)
        self.need = Need.NOTHING

    # ------------------------------------------------------------------- order

    def _is_of_other(self, batch: EventBatch) -> bool:
        """Whether the batch comes from another process than the earlier batches."""
        if self.publisher_id is None and self._next is None and not self._later:
            self.publisher_id = batch.publisher_id
        return self.publisher_id != batch.publisher_id

    def _take_old(self, batch: EventBatch) -> None:
        """Take a batch with an old number: a repeated batch or, without ids, a batch of a restarted publisher."""
        if batch.publisher_id is not None or self._applied.get(batch.number) == hash(batch.events):
            self.counts["repeated"] += 1
        else:
            self._start_again("restarts", batch)

    def _start_again(self, reason: str, first: EventBatch | None) -> None:
        """Forget everything about the publisher. `first` is the first batch of its new process, if one has come."""
        self.counts[reason] += 1
        self._later, self._last, self.publisher_id = {}, -1, None
        self._reset()
        if first is not None:
            self.publisher_id = first.publisher_id
            self._add(first)
            self._go_on()

    def _reset(self) -> None:
        """Forget the copy."""
        self.counts["resyncs"] += 1
        self._sink.clear()
        self._next, self._is_complete, self._is_wrong = None, False, False
        self._applied.clear()
        self.need = self._remedy

    @property
    def _remedy(self) -> Need:
        return Need.SNAPSHOT if self._has_snapshot else Need.REPLAY if self._has_replay else Need.NOTHING

    def _add(self, batch: EventBatch) -> None:
        """Keep a batch until its turn comes. A batch that resets the cache has its turn at once."""
        is_next = self._next == batch.number and not self._is_wrong
        if not is_next and any(isinstance(event, AllBlocksCleared) for event in batch.events):
            self._sink.clear()
            self._begin(batch.number, complete=True)
        self._later[batch.number] = batch
        self._last = max(self._last, batch.number)

    def _begin(self, number: int, *, complete: bool) -> None:
        """Go on with batch `number`: the copy is right as of the batch before it."""
        self._next, self._is_complete, self._is_wrong, self.need = number, complete, False, Need.NOTHING
        self._later = {other: batch for other, batch in self._later.items() if other >= number}
        self._last = max(self._later, default=-1)

    def _go_on(self) -> None:
        """Apply the batches that are next, and find out whether a batch is missing."""
        if self._next is None and 0 in self._later:
            self._begin(0, complete=True)  # nothing was published before
        elif self._next is None and self._later and self.need is Need.NOTHING:
            self.need = self._remedy
            if self.need is Need.NOTHING:
                self._begin(min(self._later), complete=False)
        self._apply_later()
        if len(self._later) > MAX_BUFFERED:
            self._later.clear()
            self._reset()
        elif self._has_all:
            self.need = Need.NOTHING
        elif self._next is not None and self.need is Need.NOTHING:
            self.counts["gaps"] += 1
            self._miss()

    def _apply_later(self) -> None:
        while self._next is not None and self._next in self._later and not self._is_wrong:
            batch = self._later.pop(self._next)
            self._apply(batch)
            if batch.publisher_id is None:
                self._applied[batch.number] = hash(batch.events)
                self._applied.pop(batch.number - NUM_REMEMBERED, None)
            self.counts["batches"] += 1
            self._next = batch.number + 1

    def _apply(self, batch: EventBatch) -> None:
        resets = [at for at, event in enumerate(batch.events) if isinstance(event, AllBlocksCleared)]
        for at, event in enumerate(batch.events):
            if self.witness is not None:
                self.witness.note(batch.time, event)
            if self.witness is not None or not resets or at >= resets[-1]:  # a witness may look at any block
                self._tell(event)
        if self.witness is not None:
            self.witness.end_batch(batch.time)

    def _tell(self, event: Event) -> None:
        match event:
            case BlockStored():
                self._sink.store(event)
            case BlockRemoved():
                self._is_wrong = not self._sink.remove(event) or self._is_wrong
            case AllBlocksCleared():
                self._sink.clear()
                self._is_complete, self._is_wrong = True, False
            case UnknownEvent():
                self.counts["unknown_events"] += 1

    def _miss(self) -> None:
        """Ask for a replay or a snapshot: a batch is missing or unreadable, or contradicts the copy."""
        if self.need is not Need.NOTHING:
            return
        if self._has_replay and not self._is_wrong:
            self.need = Need.REPLAY
        elif self._has_snapshot:
            self.need = Need.SNAPSHOT
        else:
            self._go_on_without()

    def _go_on_without(self) -> None:
        """Continue after batches that nobody has, with an incomplete copy."""
        self._reset()
        self.need, self._last = Need.NOTHING, -1
        if self._later:
            self._begin(min(self._later), complete=False)
            self._go_on()
