"""LruStack: the distance to each block's last use, which gives LRU at every capacity at once.

The distance of a block that comes again is the number of different blocks used since, itself included: LRU finds it if
and only if the capacity is at least that. (A request uses its blocks from the tail to the head, when it ends; so a head
is nearer than its tail.)

After Mattson, Gecsei, Slutz and Traiger, "Evaluation techniques for storage hierarchies" (1970); counts are kept as
by Fenwick, "A new data structure for cumulative frequency tables" (1994). The loops over blocks are in `compiled`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import Int64Array
from foreword.replay.keys import PrefixKeys
from foreword.replay.tables import Tables, Uses

MIN_BLOCKS = 1024


class LruStack:
    """Distances of blocks that come again. Memory: some 90 bytes for each different block."""

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
        """The next request's blocks [blocks] -> distance of each, 0 for those never seen."""
        return self.admit_each(keys, [len(keys)], [0.0]).distances

    def admit_each(self, keys: PrefixKeys, lengths: Sequence[int], times: Sequence[float]) -> Uses:
        """The next requests, laid end to end [blocks]; request i has `lengths[i]` blocks and ends at `times[i]`."""
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
        """Keys of the `count` most recently used blocks, or of all, the latest last."""
        return self._tables.key_of[self._in_order()[-count:]]

    def keep_latest(self, count: int) -> None:
        """Forget all but the `count` most recently used blocks; the others count as never seen when they come again.

        The times of use are forgotten, too.
        """
        kept = self.latest(count)
        self._forget()
        self.admit(kept[::-1])

    def _in_order(self) -> npt.NDArray[np.int32]:
        """Numbers of all blocks in the order of their last use."""
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
        """Close the gaps between used stamps, and make room for as many again."""
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
