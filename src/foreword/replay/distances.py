"""LRU at every capacity in one pass: stack distances, exact or from a sample of the blocks.

Know prefix keys; know no capacity. The distance of a block that comes again is the number of different blocks
used since, itself included: LRU finds it if and only if the capacity is at least that. (A request uses its
blocks from the tail to the head, when it ends; so a head is nearer than its tail.)

After Mattson, Gecsei, Slutz and Traiger, "Evaluation techniques for storage hierarchies" (1970); sampling after
Waldspurger, Park, Garthwaite and Ahmad, "Efficient MRC construction with SHARDS" (FAST 2015).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foreword.errors import ConfigError
from foreword.replay.keys import PrefixKeys

IntArray = npt.NDArray[np.int64]

BUCKET = 1024
"""Stamps that are counted together."""

NUM_GROUPS = 16
"""Parts of the sample whose disagreement gives the error."""


class LruStack:
    """Distances of blocks that come again. Memory: about 150 bytes for each different block.

    Each block's last use has a stamp. The distance is the number of stamps in use from the block's own on:

        stamps    . x . x | . . x x | x . . .        x: some block's last use
                      ^ 1   +   2   + 1  = 4
    """

    def __init__(self) -> None:
        self._stamp_of: dict[int, int] = {}
        self._next_stamp = 0
        self._alive = np.zeros(8 * BUCKET, np.bool_)
        self._per_bucket = np.zeros(8, np.int64)

    def __len__(self) -> int:
        """Different blocks seen."""
        return len(self._stamp_of)

    def admit(self, keys: PrefixKeys) -> IntArray:
        """The next request's blocks [blocks] -> distance of each, 0 for those never seen."""
        if self._next_stamp + len(keys) > len(self._alive):
            self._renumber(len(keys))
        blocks = keys.tolist()
        stamps = np.array([self._stamp_of.get(block, -1) for block in blocks], np.int64)
        seen = stamps[stamps >= 0]
        distances = np.zeros(len(blocks), np.int64)
        distances[stamps >= 0] = self._count_from(seen)
        self._alive[seen] = False
        np.subtract.at(self._per_bucket, seen // BUCKET, 1)
        first = self._next_stamp
        self._next_stamp += len(blocks)
        new = np.arange(first, self._next_stamp)
        self._alive[new] = True
        np.add.at(self._per_bucket, new // BUCKET, 1)
        self._stamp_of.update(zip(reversed(blocks), range(first, self._next_stamp), strict=True))
        return distances

    def keep_latest(self, count: int) -> None:
        """Forget all blocks but the `count` used last; the others, when they come again, count as never seen."""
        in_order = sorted(self._stamp_of, key=self._stamp_of.__getitem__)
        for block in in_order[: max(0, len(in_order) - count)]:
            del self._stamp_of[block]
        self._renumber(0)

    def _count_from(self, stamps: IntArray) -> IntArray:
        """How many stamps in use are not before each of these."""
        buckets = stamps // BUCKET
        behind = np.cumsum(self._per_bucket[::-1])[::-1] - self._per_bucket
        counts = behind[buckets]
        for bucket in np.unique(buckets).tolist():
            within = self._alive[bucket * BUCKET : (bucket + 1) * BUCKET]
            own = buckets == bucket
            counts[own] += np.cumsum(within[::-1])[::-1][stamps[own] - bucket * BUCKET]
        return counts

    def _renumber(self, num_needed: int) -> None:
        """Close the gaps between stamps in use, and make room for as many again."""
        in_order = sorted(self._stamp_of, key=self._stamp_of.__getitem__)
        self._stamp_of = {block: stamp for stamp, block in enumerate(in_order)}
        count = len(in_order)
        size = -(-(2 * count + num_needed + BUCKET) // BUCKET) * BUCKET
        self._alive = np.zeros(size, np.bool_)
        self._alive[:count] = True
        self._per_bucket = self._alive.reshape(-1, BUCKET).sum(axis=1, dtype=np.int64)
        self._next_stamp = count


class LruCurve:
    """Hit ratio of LRU over capacity, of the requests it was told.

    With `sampling_rate` below 1 it follows that share of the blocks, chosen by key, and scales distances up.
    """

    def __init__(self, sampling_rate: float = 1.0) -> None:
        if not 0.0 < sampling_rate <= 1.0:
            raise ConfigError(f"sampling_rate={sampling_rate} is not a share of the blocks; use (0, 1]")
        self.sampling_rate = sampling_rate
        self.num_accesses = 0
        self.num_sampled = 0
        self._stack = LruStack()
        self._threshold = np.uint64(round(sampling_rate * 2**32))
        self._histograms: list[dict[int, int]] = [{} for _ in range(NUM_GROUPS)]

    def admit(self, keys: PrefixKeys) -> None:
        """The next request."""
        self.num_accesses += len(keys)
        if self.sampling_rate < 1.0:
            keys = keys[(keys >> np.uint64(32)) < self._threshold]
            if not len(keys):
                return
        self.num_sampled += len(keys)
        distances = self._stack.admit(keys)
        groups = (keys % np.uint64(NUM_GROUPS)) if self.sampling_rate < 1.0 else np.zeros(len(keys), np.uint64)
        for group, distance in zip(groups.tolist(), distances.tolist(), strict=True):
            if distance:
                histogram = self._histograms[group]
                histogram[distance] = histogram.get(distance, 0) + 1

    @property
    def num_blocks(self) -> int:
        """Different blocks, estimated if sampled."""
        return round(len(self._stack) / self.sampling_rate)

    def hit_ratios(self, capacities: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Share of all block accesses that LRU would find, for each capacity in blocks.

        A sample has seldom just its share of the accesses; what it has too many or too few are taken as hits at
        any capacity, as popular blocks are (SHARDS-adj).
        """
        hits = np.sum([self._hits(group, capacities) for group in range(NUM_GROUPS)], axis=0)
        if self.sampling_rate < 1.0:
            hits = hits + self.num_accesses * self.sampling_rate - self.num_sampled
        scale = max(1.0, self.num_accesses * self.sampling_rate)
        ratios: npt.NDArray[np.float64] = np.clip(np.asarray(hits, np.float64) / scale, 0.0, 1.0)
        return ratios

    def standard_errors(self, capacities: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Of `hit_ratios`, from how much parts of the sample disagree; zeros if all blocks were followed."""
        capacities = np.asarray(capacities)
        if self.sampling_rate == 1.0:
            return np.zeros(capacities.shape)
        parts = np.stack([self._hits(group, capacities) for group in range(NUM_GROUPS)])
        parts = parts * NUM_GROUPS / max(1.0, self.num_accesses * self.sampling_rate)
        errors: npt.NDArray[np.float64] = parts.std(axis=0, ddof=1) / np.sqrt(NUM_GROUPS)
        return errors

    def _hits(self, group: int, capacities: npt.ArrayLike) -> npt.NDArray[np.float64]:
        histogram = self._histograms[group]
        distances = np.array(sorted(histogram), np.float64) / self.sampling_rate
        counts = np.concatenate(([0], np.cumsum([histogram[distance] for distance in sorted(histogram)])))
        found: npt.NDArray[np.float64] = counts[np.searchsorted(distances, capacities, side="right")].astype(np.float64)
        return found
