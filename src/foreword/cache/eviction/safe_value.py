"""The `value` policy, made safe: two shadow pools compete, and the real pool follows the better one.

Knows block ids, depths and keys; knows neither tokens, requests nor time. docs/decisions/0028-safe-value.md has the
measurements and the variants that were tried.

`ValuePolicy` learns which prefixes come back. On most traffic it finds much more than `lru`; where its classes mislead
it, it finds less. So two `ShadowPool`s, one for each policy, see each use of a block and count the hits that they would
have had. The real pool evicts the blocks that the followed shadow no longer holds. So it gradually comes to hold the
same blocks as that shadow, and never evicts a block merely because the followed shadow has changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import BlockIds
from foreword.cache.eviction.empty_first import EmptyFirstPolicy
from foreword.cache.eviction.free_queue import FreeKVCacheBlockQueue
from foreword.cache.eviction.policies import LruPolicy
from foreword.cache.eviction.shadow_pool import NO_KEY, Keys, ShadowPool
from foreword.cache.eviction.value import ValuePolicy, key_numbers
from foreword.cache.keys.hashing import BlockHash

LEAD_OF_USES = 1 / 2048
LEAD_OF_POOL = 0.01
MIN_LEAD = 64
"""The policy switches to the other shadow when that leads by more hits than these shares of all uses and of the pool,
and by more than `MIN_LEAD`. Following the wrong shadow costs no more than that lead. A switch costs a few per cent of
the pool until the contents have changed, so small leads are not worth one."""
LEAD_IN_REQUESTS = 4
"""LRU must lead by this multiple of the largest difference that one request has made: the first few long prompts decide
nothing, because `ValuePolicy` has not learned yet."""


class SafeValuePolicy(EmptyFirstPolicy):
    """First the blocks that the followed shadow does not hold, least recently freed first; then that shadow's order.

    Needs no settings, but the blocks' keys (`note_keys`). Costs as much as both policies and O(1) a block; takes about
    300 bytes for each block of the pool, beyond the ghosts of `ValuePolicy`.
    """

    wants_keys = True

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._lru = ShadowPool(LruPolicy(num_blocks), num_blocks)
        self._learner = ValuePolicy(num_blocks)
        self._value = ShadowPool(self._learner, num_blocks)
        self._shadows = (self._lru, self._value)
        self._followed = self._value
        self.num_uses = 0
        """The number of blocks that requests have used so far."""
        self.num_switches = 0
        self._lead = self._most_of_a_request = 0
        """The lead of `ValuePolicy` in hits, and the largest change of it by one request."""
        self._key: Keys = np.zeros(num_blocks, np.uint64)
        self._depth: BlockIds = np.zeros(num_blocks, np.int32)
        self._freed_at: npt.NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self._num_freed = 0
        self._given_up = FreeKVCacheBlockQueue.empty(num_blocks)
        """The free cached blocks that the followed shadow does not hold."""
        self._unkeyed: list[BlockIds] = []
        """Blocks that were just cached; the pool may report their keys next."""
        self._is_unkeyed: npt.NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        self._num_blank = 0
        """The number of held blocks that hold nothing cached."""

    @property
    def follows_value(self) -> bool:
        """Whether the real pool follows `ValuePolicy`; if not, it follows `lru`."""
        return self._followed is self._value

    @property
    def num_hits_alone(self) -> int:
        """The number of blocks that `ValuePolicy` alone would have found."""
        return self._value.num_hits

    def chance_of_return(self, num_blocks: int) -> float:
        """What its `ValuePolicy` has learned, whichever shadow it follows."""
        return self._learner.chance_of_return(num_blocks)

    # ---------------------------------------------------------------- events for the shadows

    def append(self, block_ids: BlockIds) -> None:
        self._tell_unkeyed()
        self._num_blank -= len(block_ids) - int(np.count_nonzero(self._is_cached[block_ids]))
        super().append(block_ids)
        self._settle()
        self._choose()

    def remove(self, block_ids: BlockIds) -> None:
        self._tell_unkeyed()
        cached, empty = self._divide(block_ids)
        self._num_blank += len(empty)
        super().remove(block_ids)
        if not len(cached):
            return
        for shadow in self._shadows:
            self._give_up(shadow, shadow.take(cached, self._key[cached], self._depth[cached]))

    def popleft(self, count: int) -> BlockIds:
        self._tell_unkeyed()
        block_ids = super().popleft(count)
        self._num_blank += count
        return block_ids

    def note_cached(self, block_ids: BlockIds, depths: BlockIds) -> None:
        super().note_cached(block_ids, depths)
        self._num_blank -= len(block_ids)
        self._depth[block_ids] = depths
        self._key[block_ids] = NO_KEY
        self._is_unkeyed[block_ids] = True
        self._unkeyed.append(block_ids)

    def note_keys(self, block_ids: BlockIds, keys: Sequence[BlockHash]) -> None:
        self._key[block_ids] = key_numbers(keys)
        self._is_unkeyed[block_ids] = False
        self._fill(block_ids)

    def note_hit(self, block_ids: BlockIds) -> None:
        self._tell_unkeyed()
        block_ids = block_ids[self._is_cached[block_ids]]
        if not len(block_ids):
            return
        self.num_uses += len(block_ids)
        for shadow in self._shadows:
            shadow.note_hit(block_ids)

    def note_forgotten(self, block_ids: BlockIds) -> None:
        self._tell_unkeyed()
        cached = block_ids[self._is_cached[block_ids]]
        self._num_blank += int(np.count_nonzero(~self._is_free[cached]))
        for shadow in self._shadows:
            shadow.forget(cached, self._is_free[cached])
        super().note_forgotten(block_ids)

    def _fill(self, block_ids: BlockIds) -> None:
        self.num_uses += len(block_ids)
        for shadow in self._shadows:
            self._give_up(shadow, shadow.fill(block_ids, self._key[block_ids], self._depth[block_ids]))

    def _tell_unkeyed(self) -> None:
        """Report the blocks that were cached last and whose keys did not follow: they have no keys."""
        if self._unkeyed:
            block_ids = np.concatenate(self._unkeyed)
            self._unkeyed.clear()
            block_ids = block_ids[self._is_unkeyed[block_ids]]
            self._is_unkeyed[block_ids] = False
            if len(block_ids):
                self._fill(block_ids)

    def _settle(self) -> None:
        for shadow in self._shadows:
            self._give_up(shadow, shadow.hold_blank(self._num_blank))

    # ---------------------------------------------------------------- the choice of a shadow

    def _choose(self) -> None:
        lead = self._value.num_hits - self._lru.num_hits
        self._most_of_a_request = max(self._most_of_a_request, abs(lead - self._lead))
        self._lead = lead
        needed = max(LEAD_OF_USES * self.num_uses, LEAD_OF_POOL * len(self._is_free), MIN_LEAD)
        if self.follows_value and -lead > max(needed, LEAD_IN_REQUESTS * self._most_of_a_request):
            self._follow(self._lru)
        elif not self.follows_value and lead > needed:
            self._follow(self._value)

    def _follow(self, shadow: ShadowPool) -> None:
        """Evict first, from now on, the blocks that this shadow does not hold."""
        self._followed = shadow
        self.num_switches += 1
        kept = np.flatnonzero(self._is_free & self._is_cached).astype(np.int32)
        kept = kept[~shadow.holds(kept)]
        self._given_up = FreeKVCacheBlockQueue.empty(len(self._is_free))
        self._given_up.append(kept[np.argsort(self._freed_at[kept])])

    def _give_up(self, shadow: ShadowPool, block_ids: BlockIds) -> None:
        """Note that a shadow has evicted the contents of these blocks."""
        if shadow is self._followed and len(block_ids):
            self._given_up.append(block_ids[self._is_free[block_ids]])

    # ---------------------------------------------------------------- order

    def _add(self, block_ids: BlockIds) -> None:
        if not len(block_ids):
            return
        self._freed_at[block_ids] = np.arange(self._num_freed, self._num_freed + len(block_ids))
        self._num_freed += len(block_ids)
        for shadow in self._shadows:
            shadow.release(block_ids)
        self._given_up.append(block_ids[~self._followed.holds(block_ids)])

    def _discard(self, block_ids: BlockIds) -> None:
        self._given_up.remove(block_ids[self._given_up.holds(block_ids)])

    def _take(self, count: int) -> BlockIds:
        taken = [self._given_up.popleft(min(count, len(self._given_up)))]
        missing = count - len(taken[0])
        while missing and len(self._followed.policy):
            lost = self._followed.give_away(missing)
            taken.append(lost)
            missing -= len(lost)
        block_ids = np.concatenate(taken)
        assert len(block_ids) == count, "the followed shadow holds blocks that the pool does not"
        for shadow in self._shadows:
            shadow.note_evicted(block_ids)
        return block_ids

    def _kept(self) -> BlockIds:
        return np.concatenate((self._given_up.in_order(), self._followed.in_order()))

    def _check_kept(self) -> None:
        self._given_up.check_integrity()
        for shadow in self._shadows:
            shadow.check_integrity()
        given_up = self._given_up.in_order()
        assert not self._followed.holds(given_up).any(), "a block is given up that the followed shadow holds"
        assert not self._unkeyed or self._is_cached[np.concatenate(self._unkeyed)].all(), "a key is awaited in vain"
        num_held_cached = int(np.count_nonzero(self._is_cached & ~self._is_free))
        assert self._num_blank == len(self._is_free) - self._num_free - num_held_cached, "blank blocks are miscounted"
