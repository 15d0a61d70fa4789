"""Block tables of the running requests: one array for each group of layers, with a row for each request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import BlockIds


class BlockTable:
    """One row of block ids per request: entry j is the block of positions j * block_size to (j + 1) * block_size.

    The array doubles when rows or columns run out. Entries beyond a row's length are meaningless.
    """

    def __init__(self) -> None:
        self._ids: BlockIds = np.zeros((16, 64), np.int32)
        self._lengths: npt.NDArray[np.int32] = np.zeros(16, np.int32)
        self._free_rows = list(range(15, -1, -1))

    def open_row(self) -> int:
        """Open an empty row; returns its number."""
        if not self._free_rows:
            rows = len(self._lengths)
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._lengths = np.concatenate((self._lengths, np.zeros_like(self._lengths)))
            self._free_rows = list(range(2 * rows - 1, rows - 1, -1))
        row = self._free_rows.pop()
        self._lengths[row] = 0
        return row

    def close_row(self, row: int) -> None:
        self._lengths[row] = 0
        self._free_rows.append(row)

    def append(self, row: int, block_ids: BlockIds) -> None:
        start = int(self._lengths[row])
        end = start + len(block_ids)
        if end > self._ids.shape[1]:
            self._widen(end)
        self._ids[row, start:end] = block_ids
        self._lengths[row] = end

    def append_each(self, rows: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], block_ids: BlockIds) -> None:
        """Append the first `counts[0]` of the ids to row `rows[0]`, the next `counts[1]` to `rows[1]`, ...

        The rows are distinct and no count is 0.
        """
        starts = self._lengths[rows]
        ends = starts + counts
        longest = int(ends.max(initial=0))
        if longest > self._ids.shape[1]:
            self._widen(longest)
        if len(block_ids) == len(rows):
            self._ids[rows, starts] = block_ids
        else:
            shifts = np.repeat(starts - np.cumsum(counts) + counts, counts)
            self._ids[np.repeat(rows, counts), shifts + np.arange(len(block_ids))] = block_ids
        self._lengths[rows] = ends

    def replace_each(
        self, rows: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], block_id: int
    ) -> BlockIds:
        """Write `block_id` into entries `starts[i]` to `ends[i]` (exclusive) of row `rows[i]`; returns the old entries.

        The old entries come row by row, the last entry of each row first.
        """
        counts = ends - starts
        if len(counts) == counts.sum():
            at = (rows, starts)
        else:
            lasts = np.repeat(ends - 1 + np.cumsum(counts) - counts, counts)
            at = (np.repeat(rows, counts), lasts - np.arange(len(lasts)))
        replaced: BlockIds = self._ids[at]
        self._ids[at] = block_id
        return replaced

    def _widen(self, least: int) -> None:
        wider = np.zeros((len(self._lengths), max(least, 2 * self._ids.shape[1])), np.int32)
        wider[:, : self._ids.shape[1]] = self._ids
        self._ids = wider

    def length(self, row: int) -> int:
        return int(self._lengths[row])

    def lengths(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """A new array of the lengths of several rows, in blocks."""
        return self._lengths[rows]

    def row(self, row: int) -> BlockIds:
        """A view of one request's block ids, valid until the table changes."""
        return self._ids[row, : self._lengths[row]]

    def entries(self, rows: npt.NDArray[np.int64], numbers: npt.NDArray[np.integer]) -> BlockIds:
        """A new array: for each i, entry `numbers[i]` of row `rows[i]`."""
        block_ids: BlockIds = self._ids[rows, numbers]
        return block_ids

    def gather(self, rows: npt.NDArray[np.int64]) -> tuple[BlockIds, npt.NDArray[np.int32]]:
        """Copies of several requests' tables, [len(rows), longest], and the tables' lengths in blocks, [len(rows)]."""
        lengths = self._lengths[rows]
        return self._ids[rows, : int(lengths.max(initial=0))], lengths


class MultiGroupBlockTable:
    """One table per group. A request has the same row number in all tables."""

    def __init__(self, num_groups: int) -> None:
        self.groups = tuple(BlockTable() for _ in range(num_groups))

    def open_row(self) -> int:
        """Open a row that is empty in every group; returns its number."""
        row, *others = (tables.open_row() for tables in self.groups)
        assert all(other == row for other in others), "the groups' rows are out of step"
        return row

    def close_row(self, row: int) -> None:
        for tables in self.groups:
            tables.close_row(row)

    def held(self, row: int, block_sizes: Sequence[int]) -> BlockIds:
        """A new array of a row's blocks in all groups, in the order of the positions where they end, the last first."""
        if len(self.groups) == 1:
            table = self.groups[0].row(row)[::-1]
            return table[table >= 0]
        tables = [tables.row(row) for tables in self.groups]
        ends = [np.arange(1, len(t) + 1) * size for t, size in zip(tables, block_sizes, strict=True)]
        block_ids = np.concatenate(tables)[np.argsort(-np.concatenate(ends), kind="stable")]
        return block_ids[block_ids >= 0]
