"""Which replicas hold which blocks: one table for all replicas, so that one walk along a prompt serves them all.

A key's holders are the bits of one integer. The walk ANDs the integers of the prompt's keys. A replica's depth is the
number of keys after which its bit is still set.

    keys of the prompt      k0    k1    k2    k3
    holders (slots 2 1 0)   111   011   011   001
    AND up to here          111   011   011   001       depths: slot 0: 4, slot 1: 3, slot 2: 1

Parts of a linked prompt are copied from sources (`SourceHits`). For each source, a replica first computes the blocks
that it lacks, separately from the prompt. Then it copies the part's KV, which costs next to nothing:

    prompt     |==== cached ====|--- computed ---|~~~ copied ~~~|--- computed ---|~~~ copied ~~~|--- computed ---|
    sources                             |== cached ==|- computed -|            |======= cached =======|

A part that lies in the prompt's cached beginning needs no source. Blocks that a source shares with the prompt or with
other sources, such as the instructions, are computed once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, repeat
from operator import and_, or_
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import Int64Array

Key = Hashable
"""A block's key: a `BlockHash` for foreword's replicas, an integer for others."""
MAX_LEVELS = 24
"""If the replicas' held prefixes end at no more than this number of depths, `_search` is faster than `_walk`."""


class HolderIndex:
    """The replicas that hold each block, as bits of an integer. A key without holders takes no memory."""

    def __init__(self) -> None:
        self._holders: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, keys: list[Key], slot: int) -> None:
        """Record that the slot's replica holds these blocks."""
        bit = 1 << slot
        if self._holders.keys().isdisjoint(keys):  # the usual case, at half the cost
            self._holders.update(dict.fromkeys(keys, bit))
        else:
            held = map(self._holders.get, keys, repeat(0))
            self._holders.update(zip(keys, map(or_, held, repeat(bit)), strict=False))

    def discard(self, keys: Iterable[Key], slot: int) -> None:
        """Record that the slot's replica does not hold these blocks."""
        keep = ~(1 << slot)
        for key in keys:
            holders = self._holders.get(key, 0) & keep
            if holders:
                self._holders[key] = holders
            else:
                self._holders.pop(key, None)

    def holds(self, key: Key, slot: int) -> bool:
        return bool(self._holders.get(key, 0) >> slot & 1)

    def depths(self, prefixes: Sequence[list[Key]], among: int, num_slots: int, closed: bool = False) -> Int64Array:
        """The number of leading blocks of each prefix that each replica holds, [prefixes, num_slots].

        0 for slots whose bit is not in `among`. `closed` promises that a replica with a block has all blocks before it.
        Then a search replaces the walk, unless the replicas' held prefixes end at very many depths.
        """
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
        """Each depth at which replicas' held prefixes end, with the replicas that reach it; the deepest first."""
        levels = self._search(keys, among) if closed else None
        return self._walk(keys, among) if levels is None else levels

    def _walk(self, keys: list[Key], among: int) -> Iterator[tuple[int, int]]:
        """The result of `_levels` for any replicas, from a look-up of every key."""
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
        """`_levels` for closed replicas, from few look-ups; None if it has more than `MAX_LEVELS` depths."""
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


class CopiedRun(NamedTuple):
    """Tokens `begin` to `end` (exclusive) of a prompt that are copied from a source."""

    begin: int
    end: int
    keys: list[Key]
    """Keys of the source's blocks, from the first block to the block that holds the run's last token."""


@dataclass(frozen=True, slots=True)
class SourceHits:
    """The sources of one prompt on all replicas."""

    runs: tuple[CopiedRun, ...]
    depths: Int64Array
    """The number of leading blocks of each run's source that each replica has, [runs, slots]."""
    pending: npt.NDArray[np.bool_]
    """Whether each run reaches beyond the prompt's tokens that each replica has, [runs, slots]."""
    num_blocks: int
    """The number of different blocks of all sources, without blocks that the prompt has too."""
    missing_blocks: Int64Array
    """The number of the sources' blocks that each replica needs and lacks, [slots]."""
    copied_tokens: Int64Array
    """The number of the prompt's tokens that each replica would copy from sources, [slots]."""

    @classmethod
    def of(
        cls,
        runs: Sequence[CopiedRun],
        prompt_keys: Sequence[Key],
        hit_tokens: Int64Array,
        depths: Int64Array,
    ) -> SourceHits:
        """`hit_tokens`: the number of the prompt's tokens that each replica has, [slots]; `depths`: see the field."""
        begins, ends, lengths = np.array([(run.begin, run.end, len(run.keys)) for run in runs]).T[:, :, np.newaxis]
        # A replica needs only the sources of the runs that lie beyond its hit, so of the last runs. A block that
        # several sources have is therefore counted for the last of these runs.
        shared = np.array(_shared_with_later(runs, prompt_keys))[:, np.newaxis]
        pending = ends > hit_tokens
        missing = np.maximum(lengths - np.maximum(depths, shared), 0) * pending
        copied = np.maximum(ends - np.maximum(begins, hit_tokens), 0)
        num_blocks = int((lengths - shared).sum())
        return cls(tuple(runs), depths, pending, num_blocks, missing.sum(axis=0), copied.sum(axis=0))

    def lacking(self, slot: int) -> list[Key]:
        """The keys of the blocks that this replica would compute for sources."""
        return list(dict.fromkeys(key for run, depth in self._needed(slot) for key in run.keys[depth:]))

    def last_held(self, slot: int) -> list[Key]:
        """For each source that this replica would use, the key of the deepest block that the replica has."""
        return list(dict.fromkeys(run.keys[depth - 1] for run, depth in self._needed(slot) if depth))

    def _needed(self, slot: int) -> list[tuple[CopiedRun, int]]:
        depths, pending = self.depths[:, slot].tolist(), self.pending[:, slot].tolist()
        return [(run, depth) for run, depth, is_needed in zip(self.runs, depths, pending, strict=True) if is_needed]

    def counts(self) -> SourceHits:
        """The sums alone, for a log."""
        return replace(self, runs=(), depths=self.depths[:0], pending=self.pending[:0])


def _shared_with_later(runs: Sequence[CopiedRun], prompt_keys: Sequence[Key]) -> list[int]:
    """For each run, the number of its leading blocks that the prompt or a later run has too.

    A key identifies all tokens before its block too, so equal keys mean equal beginnings.
    """
    seen, shared = set(prompt_keys), []
    for run in reversed(runs):
        shared.append(next((at for at, key in enumerate(run.keys) if key not in seen), len(run.keys)))
        seen.update(run.keys)
    return shared[::-1]
