"""The blocks of one replica: an exact mirror from its events, and the blocks that requests sent to it will add.

The mirror's `Follower` says whether the mirror equals the replica's index as of the last batch (`is_synced`).
Otherwise the mirror is not used.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from foreword.cache import BlockRemoved, BlockStored
from foreword.cluster.follower import Follower
from foreword.cluster.holders import HolderIndex, Key
from foreword.cluster.reuse_ages import ReuseAges

MEDIUM, GROUP = "device", 0
"""The storage medium and the cache group whose blocks are mirrored."""


class ReplicaMirror:
    """The blocks of one replica, by key, in its slot of a shared `HolderIndex`. It is the sink of its follower."""

    def __init__(self, slot: int, holders: HolderIndex, ages: ReuseAges) -> None:
        self.slot = slot
        self.follower = Follower(self, has_replay=False, has_snapshot=True)
        self.parents: dict[Key, Key | None] = {}
        """For each block of the replica, the key of the block before it."""
        self._holders, self._ages = holders, ages
        self._now = 0.0
        self._claims: dict[int, list[Key]] = {}
        """Keys of the blocks that requests under way will add, by claim."""
        self._next_claim = 0
        self._ends: OrderedDict[Key, float] = OrderedDict()
        """The last block of each prefix, with the time of its last use; about in the order of eviction."""

    @property
    def is_synced(self) -> bool:
        """Whether the mirror equals the replica's index."""
        return self.follower.is_exact

    # ------------------------------------------------------------------ events

    def learn(self, tell_follower: Callable[[], object], now: float) -> None:
        """Let the follower take messages.

        If the replica has restarted, or its events have stopped, all claims are ended.
        """
        counts, self._now = self.follower.counts, now
        lives = counts["restarts"] + counts["silences"]
        tell_follower()
        if counts["restarts"] + counts["silences"] > lives:
            for claim in list(self._claims):
                self.unclaim(claim)

    def store(self, event: BlockStored) -> None:
        if (event.medium, event.group_idx) != (MEDIUM, GROUP) or not event.block_hashes:
            return
        now, parent = self._now, event.parent_block_hash
        keys: list[Key] = list(event.block_hashes)
        self.parents.update(zip(keys, [parent, *keys], strict=False))
        self._holders.add(keys, self.slot)
        if parent is not None and (used_at := self._ends.pop(parent, None)) is not None:
            self._ages.note_reuse(now - used_at)
        self._ends[keys[-1]] = now
        self._ends.move_to_end(keys[-1])

    def remove(self, event: BlockRemoved) -> bool:
        if (event.medium, event.group_idx) != (MEDIUM, GROUP):
            return True
        for number, key in enumerate(event.block_hashes):
            if key not in self.parents:
                self._holders.discard(event.block_hashes[:number], self.slot)
                return False
            parent = self.parents.pop(key)
            used_at = self._ends.pop(key, None)
            if used_at is None:
                continue
            self._ages.note_eviction(self._now - used_at)
            if parent in self.parents and parent not in self._ends:  # the parent is evicted next
                self._ends[parent] = used_at
                self._ends.move_to_end(parent, last=False)
        self._holders.discard(event.block_hashes, self.slot)
        return True

    def clear(self) -> None:
        self._holders.discard(self.parents, self.slot)
        self.parents.clear()
        self._ends.clear()

    # ------------------------------------------------------------------ requests under way

    def touch(self, last: Key, now: float) -> None:
        """Record that a request uses the prefix that ends with this block."""
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
        """End a claim; ending it again changes nothing. Blocks that no event has reported are dropped.

        If the replica evicted blocks of this claim, another claim may have them too. Then they are dropped for both.
        """
        keys = self._claims.pop(claim, ())
        self._holders.discard([key for key in keys if key not in self.parents], self.slot)

    def oldest_use(self, now: float) -> float:
        """The time of the last use of the block that is evicted next (an estimate)."""
        return next(iter(self._ends.values()), now)

    def check_integrity(self, keys: Sequence[Key]) -> None:
        """Compare the mirror with the shared index; `keys`: all keys that exist."""
        claimed = {key for claim in self._claims.values() for key in claim}
        for key in keys:
            held = self._holders.holds(key, self.slot)
            assert held or key not in self.parents, "the index lacks a block"
            assert not held or key in self.parents or key in claimed, "the index credits a block that nobody has"
        assert set(self._ends) <= set(self.parents)
