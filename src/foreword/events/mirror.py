"""Mirror: the blocks that a remote cache holds, from its events; Follower: keeps a mirror right when messages are lost.

Knows messages; knows nothing of sockets and time. A follower gets every frame that arrives, and says what it
needs next (`Need`):

    first message ─> SNAPSHOT, or REPLAY from 0          a publisher's very first batch needs neither
    gap           ─> REPLAY of what is missing ─> if too old: SNAPSHOT ─> if there is none: an incomplete mirror
    other publisher id, numbers that start again, silence ─> as at the first message

While it needs something, it keeps later messages and applies them afterwards. Repeated messages are ignored.
"""

from __future__ import annotations

import enum
import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from foreword.events.wire import (
    UNAVAILABLE,
    Cleared,
    Event,
    EventBatch,
    Removed,
    Stored,
    WireError,
    WireHash,
    decode_batch,
    decode_live,
    decode_replay,
    decode_snapshot,
)

MAX_BUFFERED = 100_000
"""Most messages that wait for a missing one; beyond, the follower starts again."""
NUM_REMEMBERED = 1024
"""Applied messages whose repetition is recognized without a publisher id."""

BlockName = tuple[str, int, WireHash]
"""Medium, group and hash of a block."""


@dataclass(frozen=True, slots=True)
class MirroredBlock:
    """A block of a remote cache."""

    parent: WireHash | None
    token_ids: tuple[int, ...] | None
    """None if the publisher left blocks out, so that tokens and blocks do not correspond."""
    block_size: int
    lora_name: str | None
    extra_keys: tuple[Any, ...] | None


@dataclass(frozen=True, slots=True)
class CommonPrefix:
    """A prefix that several cached sequences begin with."""

    num_tokens: int
    num_ends: int
    """The number of sequences that begin with it."""


class Mirror:
    """The blocks of a remote cache."""

    def __init__(self) -> None:
        self.blocks: dict[BlockName, MirroredBlock] = {}
        self.num_tokens = 0
        self.num_blocks: Counter[tuple[str, int]] = Counter()
        """The number of blocks by medium and group."""
        self.counts: Counter[str] = Counter()
        """The number of blocks stored and removed, of unknown removed ones, and of events that are not understood."""

    def apply(self, event: Event) -> None:
        """Apply the next event."""
        match event:
            case Stored():
                self._store(event)
            case Removed():
                for one in event.block_hashes:
                    found = self._forget((event.medium or "GPU", event.group_idx or 0, one))
                    self.counts["removed" if found else "removed_unknown"] += 1
            case Cleared():
                self.clear()
            case _:
                self.counts["unknown_events"] += 1

    def clear(self) -> None:
        """Forget all blocks."""
        self.blocks.clear()
        self.num_blocks.clear()
        self.num_tokens = 0

    def _store(self, event: Stored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        whole = len(event.token_ids) == size * len(event.block_hashes)
        for at, one in enumerate(event.block_hashes):
            name = (event.medium or "GPU", event.group_idx or 0, one)
            tokens = event.token_ids[at * size : (at + 1) * size] if whole else None
            extra = event.extra_keys[at] if event.extra_keys and at < len(event.extra_keys) else None
            self._forget(name)
            self.blocks[name] = MirroredBlock(parent, tokens, size, event.lora_name, extra)
            self.num_blocks[name[:2]] += 1
            self.num_tokens += size
            parent = one
        self.counts["stored"] += len(event.block_hashes)

    def _forget(self, name: BlockName) -> bool:
        block = self.blocks.pop(name, None)
        if block is None:
            return False
        self.num_blocks[name[:2]] -= 1
        self.num_tokens -= block.block_size
        return True

    def common_prefixes(self, limit: int) -> list[CommonPrefix]:
        """Where sequences part: the prefixes with which most of them begin, by blocks. Looks at all blocks."""
        children: Counter[BlockName] = Counter()
        for name, block in self.blocks.items():
            if block.parent is not None:
                children[(*name[:2], block.parent)] += 1
        ends: Counter[BlockName] = Counter()
        lengths: Counter[BlockName] = Counter()
        for name in self.blocks:
            if name in children:
                continue
            path = self._path(name)
            length = sum(self.blocks[one].block_size for one in path)
            for one in path:  # from the end to the beginning
                if children[one] > 1:
                    ends[one] += 1
                    lengths[one] = length
                length -= self.blocks[one].block_size
        return [CommonPrefix(lengths[name], count) for name, count in ends.most_common(limit)]

    def _path(self, end: BlockName) -> list[BlockName]:
        """A block and those before it, backwards."""
        path = {end: None}
        while (parent := self.blocks[end].parent) is not None:
            end = (*end[:2], parent)
            if end not in self.blocks or end in path:
                break
            path[end] = None
        return list(path)


class Need(enum.Enum):
    """The next thing to ask a publisher for."""

    NOTHING = enum.auto()
    REPLAY = enum.auto()
    SNAPSHOT = enum.auto()


@dataclass(frozen=True, slots=True)
class _Message:
    seq: int
    batch: EventBatch
    digest: bytes


class Witness(Protocol):
    """Sees the events that happen while it looks, not those of a snapshot, in order."""

    def note(self, time: float, event: Event) -> None:
        """An event, before the mirror applies it."""

    def end_batch(self, time: float) -> None:
        """The last event of a batch is applied."""


class Follower:
    """Applies a publisher's messages in order, and finds out what is missing."""

    def __init__(self, *, has_replay: bool, has_snapshot: bool) -> None:
        self.mirror = Mirror()
        self.witness: Witness | None = None
        self.need = Need.REPLAY if has_replay and not has_snapshot else Need.NOTHING
        self.publisher_id: bytes | None = None
        self.counts: Counter[str] = Counter()
        """The numbers of batches, repeated, bad, gaps, restarts, silences, resyncs, snapshots, failed requests."""
        self._has_replay, self._has_snapshot = has_replay, has_snapshot
        self._next: int | None = None
        """The number of the next message to apply; None before the mirror has a beginning."""
        self._last = -1
        """The highest number that was heard of."""
        self._is_complete = False
        self._later: dict[int, _Message] = {}
        """Messages that wait for others."""
        self._applied: dict[int, bytes] = {}
        """The digests of the latest applied messages."""

    @property
    def is_exact(self) -> bool:
        """Whether the mirror has all that the publisher held at its last message."""
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
    def next_seq(self) -> int:
        """The number from which to ask for a replay."""
        return self._next or 0

    @property
    def _has_all(self) -> bool:
        return self._next is not None and self._next > self._last and not self._later

    # -------------------------------------------------------------- what arrives

    def take_live(self, frames: Sequence[bytes]) -> None:
        """A message of the publisher."""
        try:
            seq, payload = decode_live(frames)
            message = _read(seq, payload)
        except WireError:
            self.counts["bad"] += 1
            self._lost_one()
            return
        if self._is_of_other(message):
            self._start_again("restarts", message)
        elif self._next is not None and seq < self._next:
            self._take_old(message)
        else:
            self._later[seq] = message
            self._last = max(self._last, seq)
            self._go_on()

    def take_replay(self, frames: Sequence[bytes]) -> bool:
        """A part of a replay. Returns whether it was the last one."""
        try:
            found = decode_replay(frames)
            message = None if found is None else _read(*found)
        except WireError:
            self.counts["bad"] += 1
            return False
        if message is None:
            self._replayed()
            return True
        if message.seq >= self.next_seq and not self._is_of_other(message):
            self._later.setdefault(message.seq, message)
        return False

    def take_snapshot(self, frames: Sequence[bytes]) -> None:
        """The answer to a request for a snapshot."""
        try:
            seq, publisher_id, batches = decode_snapshot(frames)
        except WireError:
            self.counts["bad"] += 1
            self.request_failed()
            return
        if seq <= UNAVAILABLE:
            self.request_failed()
        elif any(one.batch.publisher_id != publisher_id for one in self._later.values()):
            self._start_again("restarts", None)  # it restarted meanwhile; we cannot know which life is the later one
        else:
            self.mirror.clear()
            for batch in batches:
                for event in batch.events:
                    self.mirror.apply(event)
            self.counts["snapshots"] += 1
            self.publisher_id = publisher_id
            self._begin(seq + 1, complete=True)
            self._go_on()

    def request_failed(self) -> None:
        """No usable answer came in time."""
        self.counts["failed"] += 1
        if self.need is Need.REPLAY:
            self._replayed()
        elif self._has_replay:
            self.need = Need.REPLAY

    def fell_silent(self) -> None:
        """A publisher that sends heartbeats sends none: do not trust the mirror until it speaks."""
        self._start_again("silences", None)
        self.need = Need.NOTHING

    # ------------------------------------------------------------------- order

    def _is_of_other(self, message: _Message) -> bool:
        """Whether the message comes from another process than those before."""
        told, is_first = message.batch.publisher_id, self._next is None and not self._later
        if is_first and self.publisher_id is None:
            self.publisher_id = told
        return self.publisher_id != told

    def _take_old(self, message: _Message) -> None:
        """A number again: the same message, or, if there are no ids, a publisher that has restarted."""
        known = self._applied.get(message.seq)
        is_late = known is None and message.batch.publisher_id is not None and self._is_complete
        if known == message.digest or is_late:
            self.counts["repeated"] += 1
        else:
            self._start_again("restarts", message)

    def _start_again(self, reason: str, first: _Message | None) -> None:
        """Forget everything of the publisher; `first` is the first message of its next life."""
        self.counts[reason] += 1
        self._reset()
        self._later, self._last, self.publisher_id = {}, -1, None
        if first is not None:
            self._later, self._last, self.publisher_id = {first.seq: first}, first.seq, first.batch.publisher_id
            self._go_on()

    def _reset(self) -> None:
        """Forget the mirror. A snapshot will have what waits now."""
        self.counts["resyncs"] += 1
        self.mirror.clear()
        self._next, self._is_complete = None, False
        self._applied.clear()
        self.need = Need.SNAPSHOT if self._has_snapshot else Need.REPLAY if self._has_replay else Need.NOTHING
        if self._has_snapshot:
            self._later.clear()

    def _begin(self, seq: int, *, complete: bool) -> None:
        """The mirror is right before message `seq`."""
        self._next, self._is_complete, self.need = seq, complete, Need.NOTHING
        self._later = {number: one for number, one in self._later.items() if number >= seq}
        self._last = max(self._later, default=-1)

    def _go_on(self) -> None:
        """Apply the messages that are next; find out whether one is missing."""
        if self._next is None and 0 in self._later:
            last = self._last
            self._begin(0, complete=True)  # nothing was published before
            self._last = last
        elif self._next is None and self._later and self.need is Need.NOTHING:
            self.need = Need.SNAPSHOT if self._has_snapshot else Need.REPLAY if self._has_replay else Need.NOTHING
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
            self._lost_one()

    def _apply_later(self) -> None:
        while self._next is not None and (message := self._later.pop(self._next, None)) is not None:
            batch, witness = message.batch, self.witness
            for event in batch.events:
                if witness is not None:
                    witness.note(batch.time, event)
                self.mirror.apply(event)
                self._is_complete = self._is_complete or isinstance(event, Cleared)
            if witness is not None:
                witness.end_batch(batch.time)
            self._applied[message.seq] = message.digest
            self._applied.pop(message.seq - NUM_REMEMBERED, None)
            self.counts["batches"] += 1
            self._next = message.seq + 1

    def _lost_one(self) -> None:
        """A message is missing or unreadable."""
        if self.need is not Need.NOTHING:
            return
        if self._has_replay:
            self.need = Need.REPLAY
        elif self._has_snapshot:
            self._reset()
        else:
            self._go_on_without()

    def _replayed(self) -> None:
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

    def _go_on_without(self) -> None:
        """Nobody has the missing messages: go on after them with an incomplete mirror."""
        self._reset()
        self.need, self._last = Need.NOTHING, -1
        if self._later:
            self._begin(min(self._later), complete=False)
            self._go_on()


def _read(seq: int, payload: bytes) -> _Message:
    return _Message(seq, decode_batch(payload), hashlib.blake2b(payload, digest_size=16).digest())
