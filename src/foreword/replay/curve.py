"""LRU's hit ratio over capacity: of a recording (`LruCurve`), and of traffic that keeps coming (`LiveLruCurve`).

`LruStack` finds each block's distance: the number of different blocks used since the block's last use, counting the
block itself. LRU finds a block if and only if the capacity is at least the block's distance, so distances give LRU's
hits at every capacity at once. A request uses its blocks when it ends, from the last to the first, so the first block
has the smallest distance. Both curves (`LruCurve`, `LiveLruCurve`) use all blocks or a sample of them. The live curve
forgets blocks whose distance exceeds the largest capacity, because they cannot be hits.

After Mattson, Gecsei, Slutz and Traiger, "Evaluation techniques for storage hierarchies" (1970); counts are kept as by
Fenwick, "A new data structure for cumulative frequency tables" (1994), and sampled after Waldspurger, Park, Garthwaite
and Ahmad, "Efficient MRC construction with SHARDS" (FAST 2015). The loops over blocks are in `compiled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import Int64Array
from foreword.errors import ConfigError
from foreword.replay.keys import PrefixKeys

FloatArray = npt.NDArray[np.float64]
MIN_BLOCKS = 1024
NUM_PARTS = 16
"""The number of parts of the sample. The differences between the parts give an estimate of the error."""
MAX_SAMPLED_BLOCKS = 32_768
"""The number of blocks in the sample; they take about 3 MB. If no capacity is larger, the sample has all blocks."""
WINDOW_BLOCKS = 2**22
"""The number of prompt blocks after which older counts are halved, so that old traffic fades."""


class Uses(NamedTuple):
    """For each use of a block by a request, the state just before that use. Requests are concatenated: [all blocks]."""

    distances: Int64Array
    """[blocks]: distance of each block, 0 for a block never seen before."""
    idle: FloatArray
    """[blocks]: time since the last use of each block; meaningless for a block never seen before."""


class Tables(NamedTuple):
    """The tables of an `LruStack`. Blocks are numbered in the order in which they came first.

    A block's last use has a stamp. The distance is the number of stamps in use from the block's own stamp on:

        stamps    . x . x | . . x x | x . . .        x: some block's last use
                      ^ 1   +   2   + 1  = 4
    """

    block_of_bucket: npt.NDArray[np.int32]
    """[a power of 2, at least twice the number of blocks]: a hash table with linear probing. -1: an empty bucket."""
    key_of: PrefixKeys
    """[blocks]: the key of each block."""
    stamp_of: Int64Array
    """[blocks]: the stamp of each block's last use, or -1."""
    last_use: FloatArray
    """[blocks]: the time of each block's last use."""
    block_of_stamp: npt.NDArray[np.int32]
    """[stamps]: the block that got each stamp. Stamp s is in use if `stamp_of[block_of_stamp[s]]` is s."""
    counts: npt.NDArray[np.int32]
    """[stamps + 1]: a Fenwick tree. Entry i counts the stamps in use from i - (i & -i) to i - 1."""


class LruStack:
    """Finds the distances of blocks that come again. Takes some 90 bytes of memory for each different block."""

    def __init__(self) -> None:
        from foreword.replay import compiled  # numba is slow to import

        self._compiled = compiled
        self._forget()

    def _forget(self) -> None:
        self._num_blocks = self._next_stamp = 0
        self._tables = Tables(
            np.full(2 * MIN_BLOCKS, -1, np.int32),
            np.zeros(MIN_BLOCKS, np.uint64),
            np.full(MIN_BLOCKS, -1, np.int64),
            np.zeros(MIN_BLOCKS, np.float64),
            np.zeros(2 * MIN_BLOCKS, np.int32),
            np.zeros(2 * MIN_BLOCKS + 1, np.int32),
        )

    def __len__(self) -> int:
        """Number of different blocks seen."""
        return self._num_blocks

    def admit(self, keys: PrefixKeys) -> Int64Array:
        """Use the next request's blocks. Returns the distance of each block, [blocks]; 0 if the block is new."""
        return self.admit_each(keys, [len(keys)], [0.0]).distances

    def admit_each(self, keys: PrefixKeys, lengths: Sequence[int], times: Sequence[float]) -> Uses:
        """Use the next requests' blocks. `keys` is concatenated: request i has `lengths[i]` and ends at `times[i]`."""
        self._make_room(len(keys))
        uses = Uses(np.zeros(len(keys), np.int64), np.zeros(len(keys), np.float64))
        self._num_blocks, self._next_stamp = self._compiled.use_blocks(
            self._tables,
            uses,
            np.ascontiguousarray(keys),
            np.array(lengths, np.int64),
            np.array(times, np.float64),
            self._num_blocks,
            self._next_stamp,
        )
        return uses

    def latest(self, count: int) -> PrefixKeys:
        """Keys of the most recently used blocks, at most `count` of them, the latest last."""
        return self._tables.key_of[self._in_order()[-count:]]

    def keep_latest(self, count: int) -> None:
        """Forget all but the `count` most recently used blocks, and all times of use.

        A forgotten block counts as never seen when it comes again.
        """
        keys = self.latest(count)
        self._forget()
        self.admit(keys[::-1])

    def _in_order(self) -> npt.NDArray[np.int32]:
        """The numbers (indices) of all blocks, in the order of their last use, the most recent last."""
        blocks = self._tables.block_of_stamp[: self._next_stamp]
        in_order: npt.NDArray[np.int32] = blocks[self._tables.stamp_of[blocks] == np.arange(self._next_stamp)]
        return in_order

    def _make_room(self, num_new: int) -> None:
        tables, needed = self._tables, self._num_blocks + num_new
        if needed > len(tables.key_of):
            size = 2 * needed
            tables = tables._replace(
                key_of=_resized(tables.key_of, size),
                stamp_of=_resized(tables.stamp_of, size),
                last_use=_resized(tables.last_use, size),
            )
        if 2 * needed > len(tables.block_of_bucket):
            buckets = np.full(1 << (4 * needed - 1).bit_length() - 1, -1, np.int32)
            self._compiled.place_blocks(buckets, tables.key_of, self._num_blocks)
            tables = tables._replace(block_of_bucket=buckets)
        self._tables = tables
        if self._next_stamp + num_new > len(tables.block_of_stamp):
            self._renumber(num_new)

    def _renumber(self, num_new: int) -> None:
        """Renumber the stamps in use without gaps, and make room for twice the stamps that are needed."""
        in_order = self._in_order()
        count = len(in_order)
        self._tables.stamp_of[in_order] = np.arange(count)
        ends = np.arange(2 * count + 2 * num_new + 1)
        counts = np.minimum(ends, count) - np.minimum(ends - (ends & -ends), count)
        self._tables = self._tables._replace(
            block_of_stamp=_resized(in_order, len(ends) - 1), counts=counts.astype(np.int32)
        )
        self._next_stamp = count


def _resized(values: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    grown = np.zeros(size, values.dtype)
    grown[: len(values)] = values
    return grown


class LruCurve:
    """LRU hit ratio over capacity, for the admitted requests.

    With `sampling_rate` below 1, the curve is computed from that share of the blocks, chosen by key. Their distances
    are scaled up.
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
        """[parts, distances]: number of accesses; column 0 counts blocks never seen before."""

    def admit(self, keys: PrefixKeys) -> None:
        self.admit_each(keys, [len(keys)], [0.0])

    def admit_each(self, keys: PrefixKeys, lengths: Sequence[int], times: Sequence[float]) -> Uses:
        """Add the next requests, as `LruStack.admit_each` does. Returns the uses of the blocks in the sample."""
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
        """Keys of the `count` most recently used blocks of the sample, the latest last."""
        return self._stack.latest(count)

    @property
    def num_blocks(self) -> int:
        """Number of different blocks, estimated if sampled."""
        return round(len(self._stack) / self.sampling_rate)

    def hit_ratios(self, capacities: npt.ArrayLike) -> FloatArray:
        """Share of all block accesses that LRU would find, for each capacity in blocks.

        A sample seldom has exactly its share of the accesses. Popular blocks cause the difference, so the difference is
        counted as hits at every capacity (SHARDS-adj).
        """
        hits = np.sum([self._hits(part, capacities) for part in range(self._num_parts)], axis=0)
        if self.sampling_rate < 1.0:
            hits = hits + self.num_accesses * self.sampling_rate - self.num_sampled
        scale = max(1.0, self.num_accesses * self.sampling_rate)
        ratios: FloatArray = np.clip(np.asarray(hits, np.float64) / scale, 0.0, 1.0)
        return ratios

    def standard_errors(self, capacities: npt.ArrayLike) -> FloatArray:
        """Standard errors of `hit_ratios`, from the differences between parts of the sample; zeros without sampling."""
        capacities = np.asarray(capacities)
        if self.sampling_rate == 1.0:
            return np.zeros(capacities.shape)
        parts = np.stack([self._hits(part, capacities) for part in range(NUM_PARTS)])
        parts = parts * NUM_PARTS / max(1.0, self.num_accesses * self.sampling_rate)
        errors: FloatArray = parts.std(axis=0, ddof=1) / np.sqrt(NUM_PARTS)
        return errors

    def _hits(self, part: int, capacities: npt.ArrayLike) -> FloatArray:
        histogram = self._histograms[part].copy()
        histogram[0] = 0
        distances = np.flatnonzero(histogram)
        counts = np.concatenate(([0], np.cumsum(histogram[distances])))
        at_capacity = np.searchsorted(distances / self.sampling_rate, capacities, side="right")
        hits: FloatArray = counts[at_capacity].astype(np.float64)
        return hits


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """The estimate for one capacity."""

    num_blocks: int
    hit_rate: float
    """Share of the prompt tokens that LRU would have found, in whole blocks."""
    standard_error: float
    """Standard error of the sampling; 0.0 if the sample has all blocks."""


class LiveLruCurve:
    """Hit rate over capacity, for live requests. Counts of old requests fade.

    The sample has the blocks whose key is below a threshold. Their distances are divided by the sampling rate. A
    request costs a few array operations over its blocks.
    """

    def __init__(
        self,
        capacities: Sequence[int],
        *,
        block_tokens: int,
        max_sampled_blocks: int = MAX_SAMPLED_BLOCKS,
        window_blocks: int = WINDOW_BLOCKS,
    ) -> None:
        """`capacities` in blocks of `block_tokens`, ascending. Raises ConfigError."""
        if not capacities or min(capacities) < 1 or list(capacities) != sorted(capacities):
            raise ConfigError(f"capacities={list(capacities)} are not blocks in ascending order; use 1 or more")
        if max_sampled_blocks < 1 or block_tokens < 1 or window_blocks < 1:
            raise ConfigError(
                f"max_sampled_blocks={max_sampled_blocks}, block_tokens={block_tokens} and "
                f"window_blocks={window_blocks} must be at least 1"
            )
        self.block_tokens = block_tokens
        self.sampling_rate = min(1.0, max_sampled_blocks / capacities[-1])
        self._capacities = np.array(capacities, np.int64)
        self._threshold = np.uint64(round(self.sampling_rate * 2**32))
        self._max_sampled = max_sampled_blocks
        self._window = window_blocks
        self.reset()

    def reset(self) -> None:
        self._stack = LruStack()
        self._hits = np.zeros((NUM_PARTS, len(self._capacities)))
        """[parts of the sample, capacities]: the number of sampled blocks that were found."""
        self._looked_up = np.zeros(NUM_PARTS)
        """[parts of the sample]: the number of sampled blocks that were looked for."""
        self._num_blocks = 0.0
        self._num_tokens = 0.0

    def admit(self, keys: PrefixKeys, num_prompt_tokens: int) -> None:
        """Add the next request. `keys` has the keys of its full blocks, the prompt's blocks first.

        The blocks after the prompt hold its answer: later prompts can find them, but this request did not look them up.
        """
        num_looked_up = num_prompt_tokens // self.block_tokens
        self._num_tokens += num_prompt_tokens
        self._num_blocks += num_looked_up
        if self.sampling_rate < 1.0:
            chosen = np.flatnonzero((keys >> np.uint64(32)) < self._threshold)
            keys, num_looked_up = keys[chosen], int(np.searchsorted(chosen, num_looked_up))
        parts = (keys[:num_looked_up] % np.uint64(NUM_PARTS)).astype(np.int64)
        np.add.at(self._looked_up, parts, 1)
        distances = self._stack.admit(keys)[:num_looked_up]
        seen = distances > 0
        # A sampled distance D counts the block itself and D - 1 other sampled blocks. Only the others are scaled up.
        needed = (distances[seen] - 1) / self.sampling_rate + 1
        np.add.at(self._hits, parts[seen], needed[:, None] <= self._capacities)
        if len(self._stack) > self._max_sampled * 5 // 4:
            self._stack.keep_latest(self._max_sampled)
        if self._num_blocks > self._window:
            self._fade()

    def _fade(self) -> None:
        self._hits /= 2
        self._looked_up /= 2
        self._num_blocks /= 2
        self._num_tokens /= 2

    def points(self) -> list[CurvePoint]:
        """The curve so far; no points before the first request."""
        if not self._num_tokens:
            return []
        rate, per_token = self.sampling_rate, self.block_tokens / self._num_tokens
        # The number of lookups is known; the misses are estimated. An estimate of the hits would depend on whether the
        # most popular blocks are in the sample (SHARDS-adj).
        missed = self._looked_up[:, None] - self._hits
        rates = np.clip((self._num_blocks - missed.sum(axis=0) / rate) * per_token, 0.0, 1.0)
        errors = missed.std(axis=0, ddof=1) * np.sqrt(NUM_PARTS) / rate * per_token * (rate < 1.0)
        return [
            CurvePoint(int(capacity), float(hit_rate), float(error))
            for capacity, hit_rate, error in zip(self._capacities, rates, errors, strict=True)
        ]
