"""Follower: keeps a copy of what a remote cache holds right, though messages are lost, repeated and reordered.

It gets every batch that arrives, tells its `Sink` what to store and remove, and says what it needs next (`Need`):

    first batch   ─> SNAPSHOT, or REPLAY from 0          a publisher's very first batch needs neither
    gap           ─> REPLAY of what is missing ─> if too old: SNAPSHOT ─> if there is none: an incomplete copy
    reset         ─> nothing: what is missing before it does not matter
    other publisher id, numbers that start again, silence ─> as at the first batch

While it needs something, it keeps later batches and applies them afterwards. Repeated batches are ignored.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from foreword.cache import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent

MAX_BUFFERED = 100_000
"""Most batches that wait for a missing one; beyond, the follower starts again."""
NUM_REMEMBERED = 1024
"""Applied batches whose repetition is recognized without a publisher id."""


@dataclass(frozen=True, slots=True)
class UnknownEvent:
    """An event of a later version of a publisher."""

    tag: str


Event = KVCacheEvent | UnknownEvent


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events that a cache published together; a snapshot has the same form. Without events it is a heartbeat."""

    publisher_id: bytes | None
    """Names one life of the publisher's process. None: it does not say, so a number that goes back means that it may be
    another process."""
    number: int
    """Consecutive from 0 in each life. Of a snapshot: the last batch that it includes, -1 for none."""
    events: tuple[Event, ...] = ()
    time: float = 0.0
    """By the publisher's clock."""


class Sink(Protocol):
    """The copy that a follower keeps right."""

    def store(self, event: BlockStored) -> None:
        """Add consecutive blocks."""

    def remove(self, event: BlockRemoved) -> bool:
        """Remove blocks. False: the copy lacks one of them, so it is wrong."""

    def clear(self) -> None:
        """Remove all blocks."""


class Witness(Protocol):
    """Sees the events that happen while it looks, not those of a snapshot, in order."""

    def note(self, time: float, event: Event) -> None:
        """An event, before the sink gets it."""

    def end_batch(self, time: float) -> None:
        """The last event of a batch is applied."""


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
        """The numbers of batches, repeated, bad, gaps, restarts, silences, resyncs, snapshots, failed requests,
        and unknown events."""
        self._sink = sink
        self._has_replay, self._has_snapshot = has_replay, has_snapshot
        self._next: int | None = None
        """The number of the next batch to apply; None before the copy has a beginning."""
        self._last = -1
        """The highest number that was heard of."""
        self._is_complete = self._is_wrong = False
        """Wrong: the events contradict the copy, so only a snapshot or a reset helps."""
        self._later: dict[int, EventBatch] = {}
        """Batches that wait for others."""
        self._applied: dict[int, int] = {}
        """Hashes of the latest applied batches of a publisher without an id."""

    @property
    def is_exact(self) -> bool:
        """Whether the copy has all that the publisher held at its last batch."""
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
        """A batch as it is published."""
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
        """A batch of a replay; `end_replay` comes after the last one."""
        if batch.number >= self.next_number and not self._is_of_other(batch):
            self._later.setdefault(batch.number, batch)

    def end_replay(self) -> None:
        """A replay has ended: apply it. If it left a hole, only a snapshot helps."""
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
        """The publisher's whole state. Ignores one that is older than an exact copy."""
        if any(batch.publisher_id != snapshot.publisher_id for batch in self._later.values()):
            self._start_again("restarts", None)  # it restarted meanwhile; we cannot know which life is the later one
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
        """No usable answer came in time."""
        self.counts["failed"] += 1
        if self.need is Need.REPLAY:
            self.end_replay()
        elif self._has_replay:
            self.need = Need.REPLAY

    def lose_one(self) -> None:
        """A batch came that cannot be read."""
        self.counts["bad"] += 1
        self._miss()

    def fall_silent(self) -> None:
        """A publisher that sends heartbeats sends none: do not trust the copy until it speaks."""
        self._start_again("silences", None)
        self.need = Need.NOTHING

    # ------------------------------------------------------------------- order

    def _is_of_other(self, batch: EventBatch) -> bool:
        """Whether the batch comes from another process than those before."""
        if self.publisher_id is None and self._next is None and not self._later:
            self.publisher_id = batch.publisher_id
        return self.publisher_id != batch.publisher_id

    def _take_old(self, batch: EventBatch) -> None:
        """A number again: the same batch, or, if there are no ids, a publisher that has restarted."""
        if batch.publisher_id is not None or self._applied.get(batch.number) == hash(batch.events):
            self.counts["repeated"] += 1
        else:
            self._start_again("restarts", batch)

    def _start_again(self, reason: str, first: EventBatch | None) -> None:
        """Forget everything of the publisher; `first` is the first batch of its next life."""
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
        """Keep a batch until its turn comes. After a reset of the cache its turn is now."""
        is_next = self._next == batch.number and not self._is_wrong
        if not is_next and any(isinstance(event, AllBlocksCleared) for event in batch.events):
            self._sink.clear()
            self._begin(batch.number, complete=True)
        self._later[batch.number] = batch
        self._last = max(self._last, batch.number)

    def _begin(self, number: int, *, complete: bool) -> None:
        """The copy is right before batch `number`."""
        self._next, self._is_complete, self._is_wrong, self.need = number, complete, False, Need.NOTHING
        self._later = {other: batch for other, batch in self._later.items() if other >= number}
        self._last = max(self._later, default=-1)

    def _go_on(self) -> None:
        """Apply the batches that are next; find out whether one is missing."""
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
        """A batch is missing or unreadable, or contradicts the copy."""
        if self.need is not Need.NOTHING:
            return
        if self._has_replay and not self._is_wrong:
            self.need = Need.REPLAY
        elif self._has_snapshot:
            self.need = Need.SNAPSHOT
        else:
            self._go_on_without()

    def _go_on_without(self) -> None:
        """Nobody has the missing batches: go on after them with an incomplete copy."""
        self._reset()
        self.need, self._last = Need.NOTHING, -1
        if self._later:
            self._begin(min(self._later), complete=False)
            self._go_on()
