"""Pins: cached blocks that are kept for a time, within a budget."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import BlockIds
from foreword.cache.eviction.free_queue import FreeKVCacheBlockQueue
from foreword.cache.eviction.policy import EvictionPolicy, KeyedPolicy
from foreword.cache.keys.hashing import BlockHash
from foreword.errors import ConfigError


@dataclass(slots=True)
class _Pin:
    """One holder of blocks."""

    owner: str | None
    until: float
    refresh_s: float | None
    """Seconds for which the pin stays after a hit of its last block; None: hits do not prolong the pin."""
    blocks: dict[int, None] = field(default_factory=dict)
    """The blocks that the pin still has, head first."""
    last: int | None = None
    """The pin's last block, by which the pin is indexed."""


class PinnedPolicy:
    """Evicts blocks without a pin first, in another policy's order; then pinned blocks, the least recently freed first.

    Several pins may hold a block; the block is pinned until the last of these pins ends. A pin is soft: if all other
    blocks are held, pinned blocks are evicted too, and `num_broken` counts them. A pin ends at its time or at `unpin`.
    A block whose content is forgotten loses its pins. At most `max_share` of the pool can be pinned, because a fully
    pinned pool would have no eviction policy. One owner can pin at most `max_owner_share` of the pool.

    The inner policy counts pinned free blocks as held. Pins cost O(1) more for each block, and O(log pins) for each pin
    that starts or ends.
    """

    def __init__(
        self, inner: EvictionPolicy, num_blocks: int, *, max_share: float = 0.5, max_owner_share: float = 1.0
    ) -> None:
        for name, share in (("max_pinned_share", max_share), ("max_owner_share", max_owner_share)):
            if not 0.0 <= share <= 1.0:
                raise ConfigError(f"{name}={share} is not a share of the pool; use 0.0 to 1.0")
        self.inner = inner
        self.max_pinned = int(max_share * num_blocks)
        self.max_pinned_by_owner = int(max_owner_share * num_blocks)
        self.num_pinned = 0
        """The number of pinned blocks, held or free."""
        self.num_pinned_by: Counter[str] = Counter()
        """The number of pinned blocks by owner; a block that two owners pin counts for both."""
        self.num_broken = 0
        """The number of pinned blocks that were evicted because no other block was free."""
        self._pins: dict[Hashable, _Pin] = {}
        self._holders: dict[int, dict[str | None, set[Hashable]]] = {}
        """Block id -> owner -> names of the owner's pins that have the block."""
        self._ending_at: dict[int, set[Hashable]] = {}
        """Block id -> names of the pins that a hit refreshes and whose last block has this id."""
        self._is_pinned: npt.NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        self._is_cached: npt.NDArray[np.bool_] = np.zeros(num_blocks, np.bool_)
        self._is_free: npt.NDArray[np.bool_] = np.ones(num_blocks, np.bool_)
        self._queue = FreeKVCacheBlockQueue.empty(num_blocks)
        self._ends: list[tuple[float, int, Hashable]] = []
        """Heap of (time, number, pin). The pin ends at this time. If the end has moved later, the entry is put back
        into the heap."""
        self._num_pushed = 0
        self._now = -np.inf

    # -------------------------------------------------------------------- pins

    def pin(
        self,
        pin: Hashable,
        block_ids: BlockIds,
        until: float,
        now: float,
        *,
        owner: str | None = None,
        refresh_s: float | None = None,
    ) -> BlockIds:
        """Add blocks to the pin of this name, or begin a pin. Returns the given blocks that the pin has now.

        `block_ids` has the head of a prefix first. Pinning stops at the first block that the budget does not cover or
        that holds nothing cached. A call never moves the pin's end earlier (`set_end` can do that). Of several calls,
        the longest `refresh_s` and the first `owner` count. Modifies the order of the free blocks: the last block of
        the prefix is evicted first.
        """
        held = self._pins.get(pin)
        if held is None:
            if until <= now:
                return block_ids[:0]
            held = self._pins[pin] = _Pin(owner, until, refresh_s)
            self._push(until, pin)
        held.until = max(held.until, until)
        if refresh_s is not None:
            held.refresh_s = max(held.refresh_s or 0.0, refresh_s)
        fresh = list(self._add(pin, held, block_ids.tolist()))
        in_order = {block_id: None for block_id in block_ids.tolist() if block_id in held.blocks}
        held.blocks = in_order | held.blocks
        self._note_last(pin, held)
        freed = np.array([block_id for block_id in reversed(fresh) if self._is_free[block_id]], np.int32)
        self.inner.remove(freed)
        self._queue.append(freed)
        return np.array([block_id for block_id in block_ids.tolist() if block_id in held.blocks], np.int32)

    def _add(self, name: Hashable, pin: _Pin, block_ids: list[int]) -> Iterator[int]:
        """Add blocks as long as the budgets last; yields the blocks that no pin had before."""
        owner = pin.owner
        for block_id in block_ids:
            if block_id in pin.blocks:
                continue
            holders = self._holders.get(block_id, {})
            is_new_to_owner = owner is not None and owner not in holders
            if (
                not self._is_cached[block_id]
                or (not holders and self.num_pinned >= self.max_pinned)
                or (is_new_to_owner and owner is not None and self.num_pinned_by[owner] >= self.max_pinned_by_owner)
            ):
                return
            pin.blocks[block_id] = None
            if is_new_to_owner and owner is not None:
                self.num_pinned_by[owner] += 1
            is_new = not holders
            self._holders.setdefault(block_id, holders).setdefault(owner, set()).add(name)
            if is_new:
                self._is_pinned[block_id] = True
                self.num_pinned += 1
                yield block_id

    def set_end(self, pin: Hashable, until: float, now: float) -> None:
        """Set the time at which a pin ends, earlier or later than before. Does nothing if there is no such pin."""
        held = self._pins.get(pin)
        if held is None:
            return
        if until < held.until:
            self._push(until, pin)
        held.until = until
        if until <= now:
            self.unpin(pin)

    def unpin(self, pin: Hashable) -> None:
        """End a pin. Free blocks without another pin count as freed now, the last block of the prefix first.

        Does nothing if there is no such pin.
        """
        held = self._pins.get(pin)
        if held is None:
            return
        ended = self._release(pin, held, list(reversed(held.blocks)))
        del self._pins[pin]
        freed = ended[self._queue.holds(ended)]
        self._queue.remove(freed)
        self.inner.append(freed)

    def _release(self, name: Hashable, pin: _Pin, block_ids: Iterable[int]) -> BlockIds:
        """Remove blocks from a pin. Returns the blocks that no pin has any more."""
        ended = []
        for block_id in block_ids:
            del pin.blocks[block_id]
            holders = self._holders[block_id]
            holders[pin.owner].discard(name)
            if holders[pin.owner]:
                continue
            del holders[pin.owner]
            if pin.owner is not None:
                self.num_pinned_by[pin.owner] -= 1
                if not self.num_pinned_by[pin.owner]:
                    del self.num_pinned_by[pin.owner]
            if not holders:
                del self._holders[block_id]
                ended.append(block_id)
        self._note_last(name, pin)
        gone = np.array(ended, np.int32)
        self._is_pinned[gone] = False
        self.num_pinned -= len(gone)
        return gone

    def _note_last(self, name: Hashable, pin: _Pin) -> None:
        """Update the index of pins by their last block. Only pins that hits refresh are in the index."""
        last = next(reversed(pin.blocks), None)
        if pin.refresh_s is None or last == pin.last:
            return
        if pin.last is not None:
            names = self._ending_at[pin.last]
            names.discard(name)
            if not names:
                del self._ending_at[pin.last]
        if last is not None:
            self._ending_at.setdefault(last, set()).add(name)
        pin.last = last

    def _lose(self, block_ids: BlockIds) -> None:
        """Remove blocks, whose content was forgotten, from all pins."""
        for block_id in block_ids[self._is_pinned[block_ids]].tolist():
            for name in [name for names in self._holders[block_id].values() for name in names]:
                self._release(name, self._pins[name], [block_id])

    def expire(self, now: float) -> list[Hashable]:
        """End the pins whose time has come, as `unpin` does; returns their names. Call it once a step."""
        self._now = max(self._now, now)
        ended: list[Hashable] = []
        while self._ends and self._ends[0][0] <= now:
            _, _, name = heapq.heappop(self._ends)
            held = self._pins.get(name)
            if held is None:
                continue
            if held.until <= now:
                self.unpin(name)
                ended.append(name)
            else:
                self._push(held.until, name)
        return ended

    def has_room(self, owner: str | None) -> bool:
        """Whether the budgets of the pool and the owner cover another block."""
        within = owner is None or self.num_pinned_by[owner] < self.max_pinned_by_owner
        return within and self.num_pinned < self.max_pinned

    def end_of(self, pin: Hashable) -> float | None:
        """The time at which a pin ends; None if no pin has this name."""
        held = self._pins.get(pin)
        return None if held is None else held.until

    def blocks_of(self, pin: Hashable) -> BlockIds:
        """A new array of the blocks that a pin still has, head first; empty if there is no such pin."""
        held = self._pins.get(pin)
        return np.array([] if held is None else list(held.blocks), np.int32)

    def pinned_block_ids(self) -> BlockIds:
        """A new array of the blocks with a pin, held or free, in the order of their ids."""
        return np.flatnonzero(self._is_pinned).astype(np.int32)

    def _push(self, until: float, pin: Hashable) -> None:
        if len(self._ends) > 2 * len(self._pins) + 16:  # most entries belong to pins that ended early
            self._ends = [(held.until, number, name) for number, (name, held) in enumerate(self._pins.items())]
            heapq.heapify(self._ends)
            self._num_pushed = len(self._ends)
        heapq.heappush(self._ends, (until, self._num_pushed, pin))
        self._num_pushed += 1

    # ---------------------------------------------------- an eviction policy

    def __len__(self) -> int:
        return len(self.inner) + len(self._queue)

    @property
    def num_empty(self) -> int:
        return self.inner.num_empty

    def append(self, block_ids: BlockIds) -> None:
        self._is_free[block_ids] = True
        if not self.num_pinned:
            self.inner.append(block_ids)
            return
        pinned = self._is_pinned[block_ids]
        self.inner.append(block_ids[~pinned])
        self._queue.append(block_ids[pinned])

    def remove(self, block_ids: BlockIds) -> None:
        self._is_free[block_ids] = False
        if not self.num_pinned:
            self.inner.remove(block_ids)
            return
        pinned = self._is_pinned[block_ids]
        self.inner.remove(block_ids[~pinned])
        self._queue.remove(block_ids[pinned])

    def popleft(self, count: int) -> BlockIds:
        block_ids = self.inner.popleft(min(count, len(self.inner)))
        missing = count - len(block_ids)
        if missing:
            broken = self._queue.popleft(missing)
            self._lose(broken)
            self.num_broken += missing
            self.inner.note_forgotten(broken)
            block_ids = np.concatenate((block_ids, broken))
        self._is_free[block_ids] = self._is_cached[block_ids] = False
        return block_ids

    def in_order(self) -> BlockIds:
        return np.concatenate((self.inner.in_order(), self._queue.in_order()))

    def note_cached(self, block_ids: BlockIds, depths: BlockIds) -> None:
        self._is_cached[block_ids] = True
        self.inner.note_cached(block_ids, depths)

    @property
    def wants_keys(self) -> bool:
        return isinstance(self.inner, KeyedPolicy) and self.inner.wants_keys

    def note_keys(self, block_ids: BlockIds, keys: Sequence[BlockHash]) -> None:
        assert isinstance(self.inner, KeyedPolicy)
        self.inner.note_keys(block_ids, keys)

    def note_hit(self, block_ids: BlockIds) -> None:
        """Refresh the pins whose last block was hit. The time of the hit is the latest time that `expire` was given."""
        self.inner.note_hit(block_ids)
        if not self.num_pinned:
            return
        for block_id in block_ids[self._is_pinned[block_ids]].tolist():
            for name in self._ending_at.get(block_id, ()):
                held = self._pins[name]
                held.until = max(held.until, self._now + (held.refresh_s or 0.0))

    def note_forgotten(self, block_ids: BlockIds) -> None:
        self._is_cached[block_ids] = False
        if self.num_pinned:
            freed = block_ids[self._is_pinned[block_ids] & self._queue.holds(block_ids)]
            self._lose(block_ids)
            self._queue.remove(freed)
            self.inner.append(freed)
        self.inner.note_forgotten(block_ids)

    def check_integrity(self) -> None:
        self.inner.check_integrity()
        self._queue.check_integrity()
        pinned = self.pinned_block_ids()
        free = np.sort(self.in_order())
        assert np.array_equal(free, np.flatnonzero(self._is_free)), (
            "the ordinary and the pinned are not the free blocks"
        )
        assert len(pinned) == self.num_pinned, "the pins are miscounted"
        assert self.num_pinned <= self.max_pinned, "there are more pins than the budget allows"
        assert self._is_cached[pinned].all(), "a block that holds nothing has a pin"
        assert self._is_pinned[self._queue.in_order()].all(), "a block without a pin is kept as pinned"
        assert not self._is_pinned[self.inner.in_order()].any(), "a pinned block goes with the others"
        held = {(block_id, name) for name, pin in self._pins.items() for block_id in pin.blocks}
        noted = [(b, o, n) for b, by_owner in self._holders.items() for o, names in by_owner.items() for n in names]
        assert held == {(b, name) for b, _, name in noted}, "pins and holders differ"
        assert all(self._pins[name].owner == owner for _, owner, name in noted), "a pin counts for another owner"
        assert sorted({block_id for block_id, _ in held}) == pinned.tolist(), "a block's pins are miscounted"
        ending: dict[int, set[Hashable]] = {}
        for name, pin in self._pins.items():
            if pin.refresh_s is not None and pin.blocks:
                assert pin.last == next(reversed(pin.blocks)), "a pin's last block is miscounted"
                ending.setdefault(pin.last, set()).add(name)
        assert ending == self._ending_at, "the index of pins by their last block is wrong"
        owned = Counter(owner for _, owner in {(b, self._pins[name].owner) for b, name in held} if owner is not None)
        assert owned == self.num_pinned_by, "the pins of an owner are miscounted"
        assert max(owned.values(), default=0) <= self.max_pinned_by_owner, "an owner pins more than its share"
        ends: dict[Hashable, float] = {}
        for until, _, name in self._ends:
            ends[name] = min(until, ends.get(name, np.inf))
        assert all(ends.get(name, np.inf) <= pin.until for name, pin in self._pins.items()), "a pin never ends"
