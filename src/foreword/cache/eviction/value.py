"""The `value` policy: keep the blocks that are most likely to be hit per unit of memory and time.

Blocks of a prompt that many requests repeat stay cached. Blocks of prompts that nobody repeats are evicted early, even
if there are many such prompts. The policy learns from the traffic which kinds of blocks are used again.

The policy counts time in uses: each block that a request frees is one use. docs/decisions/0010-value-policy.md lists
the variants that were tried.

Each freed block has a class. The class depends on the number of the block's uses, on whether it is the last block of
its request, and on the number of blocks that the request added. For each class the policy counts the blocks that reach
an age, and the blocks that are hit before the next age. Evicted blocks count too: the policy remembers their keys as
ghosts. The ratio of the two counts is the hazard. From the hazards, the policy computes the value of keeping a block,
for each class and age. The value is the maximum, over all horizons, of

    probability of a hit within the horizon / expected time for which the block occupies memory, until hit or horizon

(Gittins' index, as in EVA and LHD). The block with the least value is evicted first. A head is worth at least as much
as the blocks after it, so a tail is evicted before its head.

The method follows Beckmann, Chen and Cidon, "LHD: improving cache hit rate by maximizing hit density" (NSDI 2018).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import NO_BLOCKS, BlockIds, Int64Array, are_distinct
from foreword.cache.eviction.policy import EmptyFirstPolicy
from foreword.cache.keys.hashing import BlockHash

FloatArray = npt.NDArray[np.float64]

USE_CLASS = np.array([0, 1, 2, 3, 4, 4, 5], np.int16)
"""[number of earlier uses] -> part of the class; the last entry covers all larger numbers."""

NUM_SIZES = 26
"""The number of classes for the number of blocks that a request added: one for 0, one for 1, two for each doubling."""

NUM_CLASSES = 6 * 2 * NUM_SIZES
NEIGHBOUR_WEIGHTS = (0.5, 0.25, 0.125)
"""Weights of the evidence from sizes one, two and three classes away. Without them, the results depend on where
classes happen to end."""
HORIZON = 32
"""The highest age that the policy distinguishes, in uses per block of the pool."""
MIN_REMEMBERED = 1 << 16
"""The least number of uses that the policy remembers, even in a small pool."""
PRIOR_HAZARD = 0.05
"""The hazard of every bin of ages before there is evidence. With it, a block's value falls with age, as in LRU."""
PRIOR_WEIGHT = 20.0
SHRINKAGE = 10.0
"""A class with this number of observed blocks is estimated half from these blocks, half from the average class."""
MEMORY_USES = 200_000
"""In small pools, evidence counts half after this number of uses."""
MEMORY_CAPACITIES = 16
"""In large pools, evidence counts half after this number of uses per block of the pool."""
BINS_PER_DOUBLING = 2
STEPS_PER_DOUBLING = 4
"""Values are rounded to steps, because estimates are not more precise. Among equal values, the order is LRU."""
BATCH_SHARE = 32
"""A batch of the first blocks in the ranking, 1/32 of the pool, keeps its order even after other blocks are used. So
sorting costs amortised O(log n) a block."""


def key_numbers(keys: Sequence[BlockHash]) -> npt.NDArray[np.uint64]:
    """A nonzero number for each key, from its first bytes and its last bytes, which may be the number of a group."""
    mixed = (int.from_bytes(key[:8], "little") ^ (int.from_bytes(key[-4:], "big") << 32) for key in keys)
    return np.array([number | 1 for number in mixed], np.uint64)


class _History:
    """The last uses of cached and evicted blocks, in a ring buffer that grows up to `max_uses` entries."""

    def __init__(self, max_uses: int) -> None:
        self.max_uses = max_uses
        self.num_uses = 0
        """The number of uses so far: the policy's clock, and the number of the next use."""
        self._entry_of: dict[int, int] = {}
        self._allocate(1024)

    def _allocate(self, size: int) -> None:
        self._key: npt.NDArray[np.uint64] = np.zeros(size, np.uint64)
        self._class: npt.NDArray[np.int16] = np.zeros(size, np.int16)
        self._times: npt.NDArray[np.int8] = np.zeros(size, np.int8)
        self._latest: npt.NDArray[np.bool_] = np.zeros(size, np.bool_)

    @property
    def oldest(self) -> int:
        """The number of the oldest use in the ring buffer."""
        return max(0, self.num_uses - len(self._key))

    def add(
        self, keys: npt.NDArray[np.uint64], classes: npt.NDArray[np.int16], times: npt.NDArray[np.int8]
    ) -> Int64Array:
        """Record uses of blocks; returns the numbers of these uses. Key 0 means no key."""
        count = len(keys)
        while self.num_uses + count > len(self._key) < self.max_uses:
            self._grow()
        count_kept = min(count, len(self._key))  # a request longer than the ring overwrites itself
        entries = np.arange(self.num_uses, self.num_uses + count)
        recent = entries[count - count_kept :]
        places = recent % len(self._key)
        self._forget(self._key[places], recent - len(self._key))
        self._key[places] = keys[count - count_kept :]
        self._class[places] = classes[count - count_kept :]
        self._times[places] = times[count - count_kept :]
        self._latest[places] = True
        self.num_uses += count
        has_key = keys[count - count_kept :] != 0
        self._entry_of.update(zip(keys[count - count_kept :][has_key].tolist(), recent[has_key].tolist(), strict=True))
        return entries

    def find(self, keys: Sequence[int]) -> Int64Array:
        """The number of each key's last use; -1 if that use is not in the ring buffer."""
        entry_of = self._entry_of
        return np.array([entry_of.get(key, -1) for key in keys], np.int64)

    def is_latest(self, entries: Int64Array) -> npt.NDArray[np.bool_]:
        """Whether each of these uses is in the ring buffer, without a later use of the same block."""
        remembered = entries >= self.oldest
        remembered[remembered] = self._latest[entries[remembered] % len(self._key)]
        return remembered

    def is_followed(self, entries: Int64Array) -> None:
        """Record that these uses are no longer the latest of their blocks."""
        self._latest[entries % len(self._key)] = False

    def classes(self, entries: Int64Array) -> npt.NDArray[np.int16]:
        return self._class[entries % len(self._key)]

    def times(self, entries: Int64Array) -> npt.NDArray[np.int8]:
        """For each of these uses, the number of earlier uses of the same block."""
        return self._times[entries % len(self._key)]

    def _grow(self) -> None:
        old = np.arange(self.oldest, self.num_uses)
        columns = [column[old % len(self._key)] for column in self._columns()]
        self._allocate(min(self.max_uses, 2 * len(self._key)))
        places = old % len(self._key)
        for column, values in zip(self._columns(), columns, strict=True):
            column[places] = values

    def _columns(self) -> list[npt.NDArray[Any]]:
        return [self._key, self._class, self._times, self._latest]

    def _forget(self, keys: npt.NDArray[np.uint64], entries: Int64Array) -> None:
        if entries[-1] < 0:
            return
        entry_of = self._entry_of
        for key, entry in zip(keys[entries >= 0].tolist(), entries[entries >= 0].tolist(), strict=True):
            if entry_of.get(key) == entry:
                del entry_of[key]

    def check_integrity(self) -> None:
        for key, entry in self._entry_of.items():
            assert self.oldest <= entry < self.num_uses, "a forgotten use is still found by its key"
            assert self._key[entry % len(self._key)] == key, "a key leads to another block's use"


class _Hazards:
    """For each class and age, the number of blocks that reached the age, and the number hit before the next age.

    Ages are divided into bins. Each edge is the square root of 2 times the edge before it:

        edges   0 | c/64 | c/45 | c/32 | ...          c: capacity
    """

    def __init__(self, capacity: int, max_age: int) -> None:
        edges = [0.0]
        edge = max(1.0, capacity / 64)
        while edge < max_age:
            edges.append(edge)
            edge *= 2 ** (1 / BINS_PER_DOUBLING)
        self.edges: FloatArray = np.array(edges)
        self.widths: FloatArray = np.append(np.diff(self.edges), self.edges[-1] or 1.0)
        self.reached: FloatArray = np.zeros((NUM_CLASSES, len(edges)))
        self.hit: FloatArray = np.zeros((NUM_CLASSES, len(edges)))
        self.counted_to: Int64Array = np.zeros(len(edges), np.int64)
        """For each edge (an age): the number of the first use that was not yet counted as reaching this age."""
        self._value: FloatArray = np.empty_like(self.reached)
        self._chance: FloatArray = np.empty(NUM_CLASSES)
        self.settle()

    def bins(self, ages: Int64Array) -> Int64Array:
        bins: Int64Array = np.searchsorted(self.edges, ages, side="right") - 1
        return bins

    def note_hits(self, classes: npt.NDArray[np.int16], entries: Int64Array, now: int) -> None:
        """Record that blocks of these classes, last used at `entries`, are used again now."""
        ages = now - entries
        np.add.at(self.hit, (classes, self.bins(ages)), 1.0)
        # `count` will skip these uses, which are no longer their blocks' latest. So count here the edges they reached.
        uses, bins = np.nonzero((entries[:, None] >= self.counted_to) & (ages[:, None] >= self.edges))
        np.add.at(self.reached, (classes[uses], bins), 1.0)

    def count(self, history: _History) -> None:
        """Count the uses that reached an edge since the last call and are still the latest of their blocks."""
        now, oldest = history.num_uses, history.oldest
        for number, edge in enumerate(self.edges.tolist()):
            end = now - math.ceil(edge) + 1
            start = max(int(self.counted_to[number]), oldest)
            if end > start:
                entries = np.arange(start, min(end, now))
                entries = entries[history.is_latest(entries)]
                self.reached[:, number] += np.bincount(history.classes(entries), minlength=NUM_CLASSES)
            self.counted_to[number] = max(end, start) if end > 0 else 0
        np.minimum(self.counted_to, now, out=self.counted_to)

    def fade(self) -> None:
        self.reached *= 0.5
        self.hit *= 0.5

    def settle(self) -> None:
        """From now on, derive `value` and `chance` from the current counts."""
        self._settled: tuple[FloatArray, FloatArray] | None = self.hit.copy(), self.reached.copy()

    @property
    def value(self) -> FloatArray:
        """[classes, bins]: log2 of the value times STEPS_PER_DOUBLING, rounded.

        The array is computed on demand, so that hits do not wait for the computation.
        """
        self._update()
        return self._value

    @property
    def chance(self) -> FloatArray:
        """[classes]: the probability that a block is hit before the highest age."""
        self._update()
        return self._chance

    def _update(self) -> None:
        if self._settled is None:
            return
        hazards = np.minimum(_estimates(*self._settled), 0.98)
        self._settled = None
        num_bins = hazards.shape[1]
        for start in range(num_bins):
            later = hazards[:, start:]
            survival = np.cumprod(1.0 - later, axis=1)  # probability of no hit until the end of each bin
            before = np.concatenate((np.ones((NUM_CLASSES, 1)), survival[:, :-1]), axis=1)
            if not start:
                self._chance[:] = 1.0 - survival[:, -1]
            time = np.cumsum(self.widths[start:] * (before + survival) / 2, axis=1)
            self._value[:, start] = ((1.0 - survival) / time).max(axis=1)
        self._value = np.rint(STEPS_PER_DOUBLING * np.log2(self._value))


def _size(num_added: int) -> int:
    return min(1 + int(2 * math.log2(num_added)), NUM_SIZES - 1) if num_added else 0


def _estimates(hit: FloatArray, reached: FloatArray) -> FloatArray:
    """[classes, bins]: the hazards. With little evidence for a class, they are close to the average of all classes."""
    everywhere = (hit.sum(axis=0) + PRIOR_WEIGHT * PRIOR_HAZARD) / (reached.sum(axis=0) + PRIOR_WEIGHT)
    hit, reached = _with_neighbours(hit), _with_neighbours(reached)
    ratios = (hit.sum(axis=1) + SHRINKAGE) / (reached @ everywhere + SHRINKAGE)
    lean = np.minimum(everywhere * ratios[:, None], 0.95)
    estimates: FloatArray = (hit + SHRINKAGE * lean) / (reached + SHRINKAGE)
    return estimates


def _with_neighbours(counts: FloatArray) -> FloatArray:
    """[classes, bins]: each count, plus a share of the counts of classes with similar sizes."""
    by_size = counts.reshape(-1, NUM_SIZES, counts.shape[1])
    total = by_size.copy()
    for distance, weight in enumerate(NEIGHBOUR_WEIGHTS, 1):
        total[:, distance:] += weight * by_size[:, :-distance]
        total[:, :-distance] += weight * by_size[:, distance:]
    return total.reshape(counts.shape)


class ValuePolicy(EmptyFirstPolicy):
    """Evicts first the block with the fewest expected hits per memory and time; among equals, the least recently freed.

    The policy learns while it runs, and needs no settings. Until it has evidence, its order is that of `lru`. Prompts
    that nobody repeats give their class few hits, so their blocks are evicted before blocks that are reused. The policy
    needs keys (`note_keys`) to learn from evicted blocks; without keys it learns only from cached blocks. The cost is
    amortised O(log n) a block. A ghost takes about 150 bytes. There are up to 32 ghosts for each block of the pool, or
    up to 65,536 ghosts if that is more.
    """

    wants_keys = True

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._history = _History(max(MIN_REMEMBERED, HORIZON * num_blocks))
        self._hazards = _Hazards(num_blocks, self._history.max_uses)
        self._key: npt.NDArray[np.uint64] = np.zeros(num_blocks, np.uint64)
        self._depth: BlockIds = np.zeros(num_blocks, np.int32)
        self._parent: BlockIds = np.full(num_blocks, -1, np.int32)
        self._times: npt.NDArray[np.int8] = np.zeros(num_blocks, np.int8)
        """The number of earlier uses, at most len(USE_CLASS) - 1."""
        self._class: npt.NDArray[np.int16] = np.zeros(num_blocks, np.int16)
        self._entry: Int64Array = np.full(num_blocks, -1, np.int64)
        """The number of the block's last use; -1 if it was not used since it was cached."""
        self._ranking: BlockIds = NO_BLOCKS
        self._ranked_entries: Int64Array = np.empty(0, np.int64)
        self._place = self._batch_end = 0
        """Positions in the ranking: the next block to evict, and the end of the batch, whose order is still valid."""
        self._next_count = self._next_fade = 0
        self._num_blocks = num_blocks

    # ---------------------------------------------------------------- learning

    def _learn(self, block_ids: BlockIds, depths: BlockIds) -> None:
        self._depth[block_ids] = depths
        self._key[block_ids] = 0
        self._parent[block_ids] = -1
        self._times[block_ids] = 0
        self._entry[block_ids] = -1

    def note_keys(self, block_ids: BlockIds, keys: Sequence[BlockHash]) -> None:
        numbers = key_numbers(keys)
        self._key[block_ids] = numbers
        entries = self._history.find(numbers.tolist())
        is_latest = self._history.is_latest(entries)
        if is_latest.any():
            entries = entries[is_latest]
            self._hazards.note_hits(self._history.classes(entries), entries, self._history.num_uses)
            self._history.is_followed(entries)
            self._times[block_ids[is_latest]] = np.minimum(self._history.times(entries) + 1, len(USE_CLASS) - 1)

    def note_hit(self, block_ids: BlockIds) -> None:
        block_ids = block_ids[self._is_cached[block_ids]]
        self._times[block_ids] = np.minimum(self._times[block_ids] + 1, len(USE_CLASS) - 1)
        entries = self._entry[block_ids]
        latest = self._history.is_latest(entries)
        if latest.any():
            self._hazards.note_hits(self._class[block_ids[latest]], entries[latest], self._history.num_uses)
            self._history.is_followed(entries[latest])

    def _classify(self, block_ids: BlockIds) -> npt.NDArray[np.int16]:
        """The classes of blocks that a request frees, the last block of its prefix first."""
        times = self._times[block_ids]
        num_added = int(np.count_nonzero(times == 0))
        classes = USE_CLASS[times] * (2 * NUM_SIZES) + _size(num_added)
        classes[0] += NUM_SIZES
        return classes

    def chance_of_return(self, num_blocks: int) -> float:
        """The expected share of a request's blocks that will be used again, if the request adds `num_blocks` blocks."""
        return float(self._hazards.chance[_size(num_blocks)])

    def _tell_time(self) -> None:
        """Count uses from time to time; `value` computes values from the counts on demand."""
        now = self._history.num_uses
        if now < self._next_count:
            return
        self._hazards.count(self._history)
        if now >= self._next_fade:
            self._next_fade = now + max(MEMORY_USES, MEMORY_CAPACITIES * self._num_blocks)
            self._hazards.fade()
        self._hazards.settle()
        self._next_count = now + max(500, self._num_blocks // 16)

    # ------------------------------------------------------------------- order

    def _add(self, block_ids: BlockIds) -> None:
        if not len(block_ids):
            return
        follows = self._depth[block_ids[:-1]] == self._depth[block_ids[1:]] + 1
        self._parent[block_ids[:-1][follows]] = block_ids[1:][follows]
        classes = self._classify(block_ids)
        self._class[block_ids] = classes
        entries = self._entry[block_ids]  # two requests held it without a hit, and freed it one after the other
        self._history.is_followed(entries[self._history.is_latest(entries)])
        self._entry[block_ids] = self._history.add(self._key[block_ids], classes, self._times[block_ids])
        self._end_ranking()
        self._tell_time()

    def _discard(self, block_ids: BlockIds) -> None:
        self._end_ranking()  # the blocks before these blocks may be worth less now

    def _take(self, count: int) -> BlockIds:
        parts: list[BlockIds] = [NO_BLOCKS]
        missing = count
        while missing:
            if self._place >= self._batch_end:
                self._rank()
            end = min(self._place + 2 * missing, self._batch_end)
            standing = self._place + np.flatnonzero(self._stands(slice(self._place, end)))[:missing]
            parts.append(self._ranking[standing])
            self._is_free[parts[-1]] = False
            missing -= len(standing)
            self._place = end if missing else int(standing[-1]) + 1
        return np.concatenate(parts)

    def _rank(self) -> None:
        """Sort all free cached blocks. When a block changes, only the order of the first batch stays valid."""
        self._ranking = self._by_value(self._is_free & self._is_cached)
        self._ranked_entries = self._entry[self._ranking]
        self._place = 0
        self._batch_end = len(self._ranking)

    def _end_ranking(self) -> None:
        """Invalidate the order of the blocks after the current batch."""
        self._batch_end = min(self._batch_end, max(self._num_blocks // BATCH_SHARE, self._place))

    def _stands(self, places: slice) -> npt.NDArray[np.bool_]:
        """Whether each block in these places of the ranking is still free, and was not used since the ranking."""
        block_ids = self._ranking[places]
        stands: npt.NDArray[np.bool_] = self._is_free[block_ids] & self._is_cached[block_ids]
        stands &= self._entry[block_ids] == self._ranked_entries[places]
        return stands

    def _by_value(self, candidate: npt.NDArray[np.bool_]) -> BlockIds:
        """The blocks that `candidate` marks, the least value first; among equals, the least recently used first."""
        block_ids = np.flatnonzero(candidate).astype(np.int32)
        entries = self._entry[block_ids]
        ages = self._hazards.bins(self._history.num_uses - entries)
        value = np.full(self._num_blocks, -np.inf)
        value[block_ids] = self._hazards.value[self._class[block_ids], ages]
        self._lift_heads(block_ids, candidate, value)
        return block_ids[np.lexsort((entries, value[block_ids]))]

    def _lift_heads(self, block_ids: BlockIds, candidate: npt.NDArray[np.bool_], value: FloatArray) -> None:
        """Raise each block's value to at least the values of all blocks after it in its prefix.

        Pass n compares blocks that are 2**(n - 1) blocks apart.
        """
        ancestor = np.full(self._num_blocks, -1, np.int32)
        parents = self._parent[block_ids]
        linked = (parents >= 0) & candidate[parents] & (self._depth[parents] == self._depth[block_ids] - 1)
        block_ids, parents = block_ids[linked], parents[linked]
        ancestor[block_ids] = parents
        while len(block_ids):
            np.maximum.at(value, parents, value[block_ids])
            ancestor[block_ids] = parents = ancestor[parents]
            block_ids, parents = block_ids[parents >= 0], parents[parents >= 0]

    def _kept(self) -> BlockIds:
        batch = slice(self._place, self._batch_end)
        first = self._ranking[batch][self._stands(batch)]
        others = self._is_free & self._is_cached
        others[first] = False
        return np.concatenate((first, self._by_value(others)))

    def _check_kept(self) -> None:
        self._history.check_integrity()
        block_ids = np.flatnonzero(self._is_free & self._is_cached)
        assert (self._entry[block_ids] >= 0).all(), "a free cached block was never freed"
        assert (self._entry[block_ids] < self._history.num_uses).all(), "a block is used in the future"
        assert are_distinct(self._entry[block_ids]), "two blocks share a use"
