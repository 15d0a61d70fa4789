"""What one replica holds: an exact mirror from its events, and what the requests sent to it will add.

Knows keys, parents and batch numbers; knows neither load nor sockets. The mirror either equals the replica's index as
of the last batch, or says that it does not (`is_synced`), and is then not used.

    observe(batch n + 1) ...       applied; synced
    observe(batch n + 3)           n + 2 is missing: not synced, the batch waits
    observe(batch n + 2)           applied together with the waiting one; synced
    install(snapshot)              the whole state as of a batch; waiting batches after it are applied
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from foreword.cache import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from foreword.cluster.holders import HolderIndex, Key
from foreword.cluster.reuse_ages import ReuseAges

MAX_WAITING_BATCHES = 10_000
"""Batches that wait for a missing one; beyond them the oldest is dropped, and only a snapshot helps."""
DEVICE = "device"


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events that a replica published together; a snapshot has the same form. Without events it is a heartbeat."""

    publisher_id: bytes | None
    """Names one life of the replica's process. None: the replica does not say, so a number that goes back means that it
    may be another process."""
    number: int
    """Consecutive from 0 in each life. Of a snapshot: the last batch that it includes, -1 for none."""
    events: tuple[KVCacheEvent, ...] = ()


class ReplicaMirror:
    """The blocks of one replica, by key, in its slot of a shared `HolderIndex`."""

    def __init__(self, slot: int, holders: HolderIndex, ages: ReuseAges) -> None:
        self.slot = slot
        self.is_synced = False
        self.num_gaps = self.num_duplicates = self.num_restarts = 0
        self.parents: dict[Key, Key | None] = {}
        """The replica's blocks, each with the block before it."""
        self._holders, self._ages = holders, ages
        self._publisher_id: bytes | None = None
        self._next_number = 0
        self._is_wrong = False
        """The events contradict the mirror: only a snapshot or a reset helps."""
        self._waiting: dict[int, EventBatch] = {}
        self._claims: dict[int, list[Key]] = {}
        """Blocks that requests under way will leave, by claim."""
        self._next_claim = 0
        self._ends: OrderedDict[Key, float] = OrderedDict()
        """Last blocks of prefixes and the times of their last uses, about in the order of eviction."""

    # ------------------------------------------------------------------ events

    def observe(self, batch: EventBatch, now: float) -> None:
        """Take the next batch. Batches out of order wait; those seen before are ignored."""
        is_older = batch.number < self._next_number
        if batch.publisher_id != self._publisher_id or (batch.publisher_id is None and is_older):
            self.num_restarts += self._next_number > 0
            self.forget()
            self._publisher_id = batch.publisher_id
        elif is_older or batch.number in self._waiting:
            self.num_duplicates += 1
            return
        if any(isinstance(event, AllBlocksCleared) for event in batch.events):
            self._start_after(batch.number - 1)  # whatever is missing before a reset does not matter
        self._waiting[batch.number] = batch
        if len(self._waiting) > MAX_WAITING_BATCHES:
            del self._waiting[min(self._waiting)]
        self._apply_waiting(now)

    def install(self, snapshot: EventBatch, now: float) -> None:
        """Take the replica's whole state. Ignores a snapshot that is older than a synced mirror."""
        same = snapshot.publisher_id == self._publisher_id
        if same and self.is_synced and snapshot.number < self._next_number:
            return
        if not same:
            self.forget()
            self._publisher_id = snapshot.publisher_id
        self._start_after(snapshot.number)
        self.is_synced = True
        self._apply(snapshot.events, now)
        self._apply_waiting(now)

    def forget(self) -> None:
        """Drop everything, claims too: the replica's process has ended."""
        self._start_after(-1)
        self._waiting.clear()
        self.is_synced = False
        for claim in list(self._claims):
            self.unclaim(claim)

    def _start_after(self, number: int) -> None:
        """Begin with no blocks, and with the batch after this number."""
        self._clear()
        self._next_number = number + 1
        self._is_wrong = False
        self._waiting = {each: batch for each, batch in self._waiting.items() if each > number}

    def _apply_waiting(self, now: float) -> None:
        while not self._is_wrong and (batch := self._waiting.pop(self._next_number, None)):
            self._next_number += 1
            self.is_synced = True
            self._apply(batch.events, now)
        if (self._waiting or self._is_wrong) and self.is_synced:
            self.is_synced = False
            self.num_gaps += 1

    def _apply(self, events: Sequence[KVCacheEvent], now: float) -> None:
        resets = [at for at, event in enumerate(events) if isinstance(event, AllBlocksCleared)]
        if resets:
            self._clear()
        for event in events[resets[-1] + 1 :] if resets else events:
            match event:
                case BlockStored(medium="device", group_idx=0):
                    self._store(event.parent_block_hash, list(event.block_hashes), now)
                case BlockRemoved(medium="device", group_idx=0):
                    self._remove(event.block_hashes, now)

    def _store(self, parent: Key | None, keys: list[Key], now: float) -> None:
        self.parents.update(zip(keys, [parent, *keys], strict=False))
        self._holders.add(keys, self.slot)
        if parent is not None and (used_at := self._ends.pop(parent, None)) is not None:
            self._ages.note_reuse(now - used_at)
        self._ends[keys[-1]] = now
        self._ends.move_to_end(keys[-1])

    def _remove(self, keys: Sequence[Key], now: float) -> None:
        for key in keys:
            if key not in self.parents:
                self._is_wrong = True
                return
            parent = self.parents.pop(key)
            used_at = self._ends.pop(key, None)
            if used_at is None:
                continue
            self._ages.note_eviction(now - used_at)
            if parent in self.parents and parent not in self._ends:  # it goes next
                self._ends[parent] = used_at
                self._ends.move_to_end(parent, last=False)
        self._holders.discard(keys, self.slot)

    def _clear(self) -> None:
        self._holders.discard(self.parents, self.slot)
        self.parents.clear()
        self._ends.clear()

    # ------------------------------------------------------------------ requests under way

    def touch(self, last: Key, now: float) -> None:
        """Note that a request uses the prefix that ends with this block."""
        if last in self._ends:
            self._ends.move_to_end(last)
            self._ends[last] = now

    def claim(self, keys: list[Key]) -> int:
        """Expect these blocks: a request that will compute them was sent to the replica. Returns the claim's number."""
        self._holders.add(keys, self.slot)
        self._claims[self._next_claim] = keys
        self._next_claim += 1
        return self._next_claim - 1

    def unclaim(self, claim: int) -> None:
        """End a claim; later calls change nothing. Blocks that no event has reported are dropped.

        Another claim may have the same blocks, if the replica evicted them in between; they lose their credit too.
        """
        keys = self._claims.pop(claim, ())
        self._holders.discard([key for key in keys if key not in self.parents], self.slot)

    def oldest_use(self, now: float) -> float:
        """The time of the last use of what is evicted next (an estimate)."""
        return next(iter(self._ends.values()), now)

    def check_integrity(self, keys: Sequence[Key]) -> None:
        """Compare the mirror with the shared index, for all keys that exist."""
        claimed = {key for claim in self._claims.values() for key in claim}
        for key in keys:
            held = self._holders.holds(key, self.slot)
            assert held or key not in self.parents, "the index lacks a block"
            assert not held or key in self.parents or key in claimed, "the index credits a block that nobody has"
        assert set(self._ends) <= set(self.parents)
