"""The curve of LRU over capacity, from the stack distances of all blocks or of a sample of them.

Knows prefix keys and counts of distances; `stack` finds the distances. Sampling after Waldspurger, Park, Garthwaite
and Ahmad, "Efficient MRC construction with SHARDS" (FAST 2015).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import Int64Array
from foreword.errors import ConfigError
from foreword.replay.keys import PrefixKeys
from foreword.replay.stack import LruStack
from foreword.replay.tables import Uses

NUM_PARTS = 16
"""Parts of the sample; the error is estimated from the differences between them."""


class LruCurve:
    """LRU hit ratio over capacity, for the requests that it followed.

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
        self._num_parts = NUM_PARTS if sampling_rate < 1.0 else 1
        self._histograms: Int64Array = np.zeros((self._num_parts, 1024), np.int64)
        """[parts, distances]: accesses; column 0: of blocks never seen."""

    def admit(self, keys: PrefixKeys) -> None:
        """Follow the next request."""
        self.admit_each(keys, [len(keys)], [0.0])

    def admit_each(self, keys: PrefixKeys, lengths: Sequence[int], times: Sequence[float]) -> Uses:
        """Follow the next requests, as in `LruStack.admit_each`; returns facts about the followed blocks."""
        self.num_accesses += len(keys)
        parts = np.zeros(1, np.int64)
        if self.sampling_rate < 1.0:
            chosen = (keys >> np.uint64(32)) < self._threshold
            before = np.concatenate((np.zeros(1, np.int64), np.cumsum(chosen)))
            lengths = np.diff(before[np.cumsum([0, *lengths])]).tolist()
            keys = keys[chosen]
            parts = (keys % np.uint64(NUM_PARTS)).astype(np.int64)
        self.num_sampled += len(keys)
        uses = self._stack.admit_each(keys, lengths, times)
        missing = int(uses.distances.max(initial=0)) + 1 - self._histograms.shape[1]
        if missing > 0:
            self._histograms = np.pad(self._histograms, ((0, 0), (0, missing + len(self._stack))))
        np.add.at(self._histograms, (parts, uses.distances), 1)
        return uses

    def latest(self, count: int) -> PrefixKeys:
        """Keys of the `count` most recently used blocks, or of all followed ones, the latest last."""
        return self._stack.latest(count)

    @property
    def num_blocks(self) -> int:
        """Number of different blocks, estimated if sampled."""
        return round(len(self._stack) / self.sampling_rate)

    def hit_ratios(self, capacities: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Share of all block accesses that LRU would find, for each capacity in blocks.

        A sample seldom has exactly its share of the accesses; the difference is counted as hits at every capacity,
        because popular blocks cause it (SHARDS-adj).
        """
        hits = np.sum([self._hits(part, capacities) for part in range(self._num_parts)], axis=0)
        if self.sampling_rate < 1.0:
            hits = hits + self.num_accesses * self.sampling_rate - self.num_sampled
        scale = max(1.0, self.num_accesses * self.sampling_rate)
        ratios: npt.NDArray[np.float64] = np.clip(np.asarray(hits, np.float64) / scale, 0.0, 1.0)
        return ratios

    def standard_errors(self, capacities: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Standard errors of `hit_ratios`, from the differences between parts of the sample; zeros without sampling."""
        capacities = np.asarray(capacities)
        if self.sampling_rate == 1.0:
            return np.zeros(capacities.shape)
        parts = np.stack([self._hits(part, capacities) for part in range(NUM_PARTS)])
        parts = parts * NUM_PARTS / max(1.0, self.num_accesses * self.sampling_rate)
        errors: npt.NDArray[np.float64] = parts.std(axis=0, ddof=1) / np.sqrt(NUM_PARTS)
        return errors

    def _hits(self, part: int, capacities: npt.ArrayLike) -> npt.NDArray[np.float64]:
        histogram = self._histograms[part].copy()
        histogram[0] = 0
        found = np.flatnonzero(histogram)
        counts = np.concatenate(([0], np.cumsum(histogram[found])))
        at_capacity = np.searchsorted(found / self.sampling_rate, capacities, side="right")
        hits: npt.NDArray[np.float64] = counts[at_capacity].astype(np.float64)
        return hits
