"""Which replicas hold which blocks: one table for all replicas, so that one walk along a prompt serves them all.

A key's holders are the bits of one integer. The walk ANDs the integers of the prompt's keys: a replica is as deep as
its bit survives.

    keys of the prompt      k0    k1    k2    k3
    holders (slots 2 1 0)   111   011   011   001
    AND up to here          111   011   011   001       depths: slot 0: 4, slot 1: 3, slot 2: 1
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import accumulate, repeat
from operator import and_, or_

import numpy as np

from foreword.cache.block_ids import Int64Array

Key = Hashable
"""A block's key: `BlockHash` of foreword's replicas, integers of others."""
MAX_LEVELS = 24
"""Up to this number of different depths, a search is faster than a walk."""
FEW_BITS = 8
"""Up to this number of bits, finding them one by one is faster than numpy."""


class HolderIndex:
    """The replicas that hold each block, as bits of an integer. A key without holders takes no memory."""

    def __init__(self) -> None:
        self._holders: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, keys: list[Key], slot: int) -> None:
        """Note that the slot's replica holds these blocks."""
        bit = 1 << slot
        if self._holders.keys().isdisjoint(keys):  # the usual case, at half the cost
            self._holders.update(dict.fromkeys(keys, bit))
        else:
            held = map(self._holders.get, keys, repeat(0))
            self._holders.update(zip(keys, map(or_, held, repeat(bit)), strict=False))

    def discard(self, keys: Iterable[Key], slot: int) -> None:
        """Note that the slot's replica does not hold these blocks."""
        keep = ~(1 << slot)
        for key in keys:
            left = self._holders.get(key, 0) & keep
            if left:
                self._holders[key] = left
            else:
                self._holders.pop(key, None)

    def holds(self, key: Key, slot: int) -> bool:
        """Whether the slot's replica holds this block."""
        return bool(self._holders.get(key, 0) >> slot & 1)

    def depths(self, keys: list[Key], among: int, num_slots: int, closed: bool = False) -> Int64Array:
        """The number of leading blocks that each replica holds, [num_slots]; 0 for slots whose bit `among` lacks.

        `closed` promises that who holds a block holds all blocks before it. A search then takes the place of the walk,
        unless replicas end at very many depths.
        """
        depths = np.zeros(num_slots, np.int64)
        slots: list[int] = []
        depth_of: list[int] = []
        deeper = 0
        for depth, mask in self._levels(keys, among, closed):
            found = slots_of(mask ^ deeper)
            slots += found
            depth_of += [depth] * len(found)
            deeper = mask
        depths[slots] = depth_of
        return depths

    def depths_of_each(
        self, prefixes: Sequence[list[Key]], among: int, num_slots: int, closed: bool = False
    ) -> Int64Array:
        """The `depths` of each of many prefixes, [prefixes, num_slots]; the bits of all are found at once."""
        if not among or not prefixes:
            return np.zeros((len(prefixes), num_slots), np.int64)
        num_bytes, begins = -(-num_slots // 8), list[int]()
        depth_of: list[int] = []
        masks: list[bytes] = []
        for keys in prefixes:
            begins.append(len(masks))
            for depth, mask in self._levels(keys, among, closed):
                depth_of.append(depth)
                masks.append(mask.to_bytes(num_bytes, "little"))
        raw = np.frombuffer(b"".join(masks), np.uint8).reshape(-1, num_bytes)
        bits = np.unpackbits(raw, axis=1, count=num_slots, bitorder="little")
        reached = bits * np.array(depth_of, np.int64)[:, np.newaxis]
        depths: Int64Array = np.maximum.reduceat(reached, begins, axis=0)
        return depths

    def _levels(self, keys: list[Key], among: int, closed: bool) -> Iterable[tuple[int, int]]:
        """Each depth at which replicas end, and those that reach it; the deepest first."""
        levels = self._search(keys, among) if closed else None
        return self._walk(keys, among) if levels is None else levels

    def _walk(self, keys: list[Key], among: int) -> Iterator[tuple[int, int]]:
        """`_levels`, of any replicas."""
        masks = list(accumulate(map(self._holders.get, keys, repeat(0)), and_, initial=among))
        masks.reverse()  # an AND only clears bits, so these numbers ascend
        at = 0
        while at < len(masks):
            mask = masks[at]
            yield len(masks) - 1 - at, mask
            at += 1
            if at < len(masks) and masks[at] == mask:
                at = bisect_right(masks, mask, at)

    def _search(self, keys: list[Key], among: int) -> list[tuple[int, int]] | None:
        """`_levels` of closed replicas, from few look-ups; None if there are more than `MAX_LEVELS` depths."""
        get, levels = self._holders.get, list[tuple[int, int]]()
        low, mask = 0, among  # the first `low` blocks are held by all of `mask`
        while mask:
            if len(levels) == MAX_LEVELS:
                return None
            high = len(keys) + 1
            while high - low > 1:
                middle = (low + high) // 2
                if get(keys[middle - 1], 0) & mask == mask:
                    low = middle
                else:
                    high = middle
            levels.append((low, mask))
            if high > len(keys):
                break
            low, mask = high, mask & get(keys[high - 1], 0)
        levels.reverse()
        return levels


def slots_of(mask: int) -> list[int]:
    """The numbers of the bits that are set."""
    if mask.bit_count() > FEW_BITS:
        raw = np.frombuffer(mask.to_bytes(-(-mask.bit_length() // 8), "little"), np.uint8)
        return np.flatnonzero(np.unpackbits(raw, bitorder="little")).tolist()
    slots = []
    while mask:
        slots.append(mask.bit_length() - 1)
        mask ^= 1 << slots[-1]
    return slots
