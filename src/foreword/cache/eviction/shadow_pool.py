"""ShadowPool: an imagined pool of the same size, under a policy of its own.

Knows block ids, keys and the blocks that the real pool's requests use; knows neither the real pool's policy nor the
other shadows. It shows which blocks the real pool would hold now under this policy, and counts the hits that it would
have had. It moves no KV and takes no decision.

The shadow's blocks are called stand-ins. A stand-in *stands for* a real block while both hold the same content:

    real block   5  6  7  8        block 6: the shadow would have evicted it
    stand-in     2  -  0  1        stand-in 3: the real pool has evicted its content

A request holds in the shadow what it holds in the real pool, so the shadow always has room for it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import NO_BLOCKS, BlockIds
from foreword.cache.eviction.policy import EvictionPolicy
from foreword.cache.eviction.value import ValuePolicy

Keys = npt.NDArray[np.uint64]
NO_KEY = 0


class ShadowPool:
    """The contents of a pool of `num_blocks` under `policy`; O(1) and about 150 bytes a block beyond the policy."""

    def __init__(self, policy: EvictionPolicy, num_blocks: int) -> None:
        self.policy = policy
        self.num_hits = 0
        """The number of blocks that requests wanted and that this pool held."""
        self._stand_in_of_key: dict[int, int] = {}
        self._key: Keys = np.zeros(num_blocks, np.uint64)
        self._num_holders: npt.NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self._block: BlockIds = np.full(num_blocks, -1, np.int32)
        """The real block that each stand-in stands for; -1 for none."""
        self._stand_in: BlockIds = np.full(num_blocks, -1, np.int32)
        """The stand-in of each real block's content or holder; -1 for none."""
        self._is_fresh: npt.NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        """Whether a lookup took the real block that would have missed in this pool."""
        self._blank: BlockIds = NO_BLOCKS
        """Stand-ins that are held for blocks whose contents have no key (yet)."""

    def holds(self, block_ids: BlockIds) -> npt.NDArray[np.bool_]:
        """Whether a stand-in stands for each of these real blocks."""
        stand_ins = self._stand_in[block_ids]
        held: npt.NDArray[np.bool_] = (stand_ins >= 0) & (self._block[stand_ins] == block_ids)
        return held

    # ---------------------------------------------------- requests

    def take(self, block_ids: BlockIds, keys: Keys, depths: BlockIds) -> BlockIds:
        """Hold these real blocks, which were free. Returns the real blocks that lost their stand-ins."""
        stand_ins = self._stand_in[block_ids]
        unknown = ~self.holds(block_ids)
        if not unknown.any():
            return self._hold(stand_ins, block_ids)
        stand_ins[unknown] = self._find(keys[unknown])
        missing = stand_ins < 0
        self._is_fresh[block_ids] = missing
        lost = self._hold(stand_ins[~missing], block_ids[~missing])
        return np.concatenate((lost, self._load(block_ids[missing], keys[missing], depths[missing])))

    def note_hit(self, block_ids: BlockIds) -> None:
        """Note that a lookup found these real blocks, which a request holds now."""
        hits = block_ids[~self._is_fresh[block_ids]]
        self._is_fresh[block_ids] = False
        self.num_hits += len(hits)
        self.policy.note_hit(self._stand_in[hits])

    def fill(self, block_ids: BlockIds, keys: Keys, depths: BlockIds) -> BlockIds:
        """Cache these held blocks, as the pool does after a miss. Returns real blocks that lost their stand-ins."""
        stand_ins = self._find(keys)
        missing = stand_ins < 0
        if missing.all():
            return self._load(block_ids, keys, depths)
        found = stand_ins[~missing]
        self.num_hits += len(found)
        lost = self._hold(found, block_ids[~missing])
        self.policy.note_hit(found)
        return np.concatenate((lost, self._load(block_ids[missing], keys[missing], depths[missing])))

    def release(self, block_ids: BlockIds) -> None:
        """Note that nobody holds these real blocks. A stand-in stands for the last of several with equal contents."""
        self._is_fresh[block_ids] = False
        stand_ins = self._stand_in[block_ids]
        np.subtract.at(self._num_holders, stand_ins, 1)
        is_last = self._num_holders[stand_ins] == 0
        self._block[stand_ins[~is_last]] = -1
        self._block[stand_ins[is_last]] = block_ids[is_last]
        self.policy.append(_distinct(stand_ins[is_last]))

    def hold_blank(self, count: int) -> BlockIds:
        """Note that `count` real blocks are held without a key. Returns the real blocks that lost their stand-ins."""
        excess = len(self._blank) - count
        if excess > 0:
            self.policy.append(self._blank[:excess])
            self._blank = self._blank[excess:]
        return self.give_away(-excess)

    # ---------------------------------------------------- the real pool

    def give_away(self, count: int) -> BlockIds:
        """Take stand-ins for blocks that will be filled. Returns the real blocks that lost their stand-ins."""
        if count <= 0:
            return NO_BLOCKS
        stand_ins = self.policy.popleft(min(count, len(self.policy)))
        blocks = self._block[stand_ins]
        self._drop(stand_ins)
        self._blank = np.concatenate((self._blank, stand_ins))
        return blocks[blocks >= 0]

    def note_evicted(self, block_ids: BlockIds) -> None:
        """Note that these real blocks, which were free, have lost their contents."""
        stand_ins = self._stand_in[block_ids[self.holds(block_ids)]]
        self._block[stand_ins] = -1
        self._stand_in[block_ids] = -1

    def forget(self, block_ids: BlockIds, is_free: npt.NDArray[np.bool_]) -> None:
        """Forget the contents of these real blocks; `is_free` marks the blocks that nobody holds."""
        stand_ins = self._stand_in[block_ids[self.holds(block_ids)]]
        self._drop(stand_ins)
        self.policy.note_forgotten(stand_ins)
        held = block_ids[~is_free]
        self.release(held)
        self._block[self._stand_in[held]] = -1
        self._stand_in[block_ids] = -1

    # ---------------------------------------------------- stand-ins

    def _find(self, keys: Keys) -> BlockIds:
        stand_in_of_key = self._stand_in_of_key
        return np.array([stand_in_of_key.get(key, -1) for key in keys.tolist()], np.int32)

    def _hold(self, stand_ins: BlockIds, block_ids: BlockIds) -> BlockIds:
        """Hold these real blocks in existing stand-ins. Returns the real blocks that lost these stand-ins."""
        if not len(stand_ins):
            return NO_BLOCKS
        self.policy.remove(np.unique(stand_ins[self._num_holders[stand_ins] == 0]))
        np.add.at(self._num_holders, stand_ins, 1)
        before = self._block[stand_ins]
        self._block[stand_ins] = block_ids
        self._stand_in[block_ids] = stand_ins
        return _distinct(before[(before >= 0) & (before != block_ids)])  # equal blocks have one stand-in

    def _load(self, block_ids: BlockIds, keys: Keys, depths: BlockIds) -> BlockIds:
        """Hold these real blocks in new stand-ins. Returns the real blocks that lost theirs."""
        count = len(block_ids)
        if not count:
            return NO_BLOCKS
        lost = self.give_away(count - len(self._blank))
        stand_ins, self._blank = self._blank[:count], self._blank[count:]
        self._num_holders[stand_ins] = 1
        self._block[stand_ins] = block_ids
        self._stand_in[block_ids] = stand_ins
        known = keys != NO_KEY
        if len(set(keys.tolist())) < count:
            known &= np.isin(np.arange(count), np.unique(keys, return_index=True)[1])
            keys = np.where(known, keys, np.uint64(NO_KEY))
        self._key[stand_ins] = keys
        self._stand_in_of_key.update(zip(keys[known].tolist(), stand_ins[known].tolist(), strict=True))
        self.policy.note_cached(stand_ins, depths)
        if isinstance(self.policy, ValuePolicy):
            self.policy.note_key_numbers(stand_ins[known], keys[known])
        return lost

    def _drop(self, stand_ins: BlockIds) -> None:
        """Forget the contents of these stand-ins."""
        for key in self._key[stand_ins].tolist():
            self._stand_in_of_key.pop(key, None)
        self._key[stand_ins] = NO_KEY
        self._block[stand_ins] = -1

    def in_order(self) -> BlockIds:
        """The real blocks in the order in which they would go."""
        blocks = self._block[self.policy.in_order()]
        return blocks[blocks >= 0]

    def check_integrity(self) -> None:
        """Raise AssertionError if stand-ins, keys and real blocks contradict each other."""
        self.policy.check_integrity()
        for key, stand_in in self._stand_in_of_key.items():
            assert int(self._key[stand_in]) == key, "a key leads to a stand-in of another content"
        assert np.count_nonzero(self._key) == len(self._stand_in_of_key), "a stand-in's content cannot be found"
        stands = np.flatnonzero(self._block >= 0)
        assert (self._stand_in[self._block[stands]] == stands).all(), (
            "a stand-in stands for a block of another stand-in"
        )
        busy = np.union1d(np.flatnonzero(self._num_holders), self._blank)
        assert len(self.policy) + len(busy) == len(self._key), "a stand-in is neither free nor held"
        assert not any(stand_in in self.policy for stand_in in busy.tolist()), "a held stand-in is free"


def _distinct(numbers: BlockIds) -> BlockIds:
    """Each number once, in the order of its first place."""
    distinct = dict.fromkeys(numbers.tolist())
    return numbers if len(distinct) == len(numbers) else np.fromiter(distinct, np.int32, len(distinct))
