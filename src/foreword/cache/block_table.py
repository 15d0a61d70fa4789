"""Block tables of the running requests, as rows of one array.

Knows block ids and row numbers; knows nothing of tokens or of what a block holds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from foreword.cache.block_pool import BlockIds


class BlockTables:
    """One append-only row of block ids per request: entry j holds positions j*block_size and on.

    Rows and columns are added when they run out, by doubling; entries past a row's length are
    meaningless.
    """

    def __init__(self, num_rows: int = 16, num_columns: int = 64) -> None:
        self._ids: BlockIds = np.zeros((num_rows, num_columns), np.int32)
        self._lengths: npt.NDArray[np.int32] = np.zeros(num_rows, np.int32)
        self._free_rows = list(range(num_rows - 1, -1, -1))

    def open_row(self) -> int:
        """Number of an empty row."""
        if not self._free_rows:
            rows = len(self._lengths)
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._lengths = np.concatenate((self._lengths, np.zeros_like(self._lengths)))
            self._free_rows = list(range(2 * rows - 1, rows - 1, -1))
        row = self._free_rows.pop()
        self._lengths[row] = 0
        return row

    def close_row(self, row: int) -> None:
        """Give a row back; its content is gone."""
        self._lengths[row] = 0
        self._free_rows.append(row)

    def append(self, row: int, block_ids: BlockIds) -> None:
        start = int(self._lengths[row])
        end = start + len(block_ids)
        if end > self._ids.shape[1]:
            wider = np.zeros((len(self._lengths), max(end, 2 * self._ids.shape[1])), np.int32)
            wider[:, : self._ids.shape[1]] = self._ids
            self._ids = wider
        self._ids[row, start:end] = block_ids
        self._lengths[row] = end

    def length(self, row: int) -> int:
        return int(self._lengths[row])

    def row(self, row: int) -> BlockIds:
        """Block ids of one request (a view, valid until the next change)."""
        return self._ids[row, : self._lengths[row]]

    def gather(self, rows: npt.NDArray[np.int64]) -> tuple[BlockIds, npt.NDArray[np.int32]]:
        """Tables of several requests, [len(rows), longest], and their lengths (copies)."""
        lengths = self._lengths[rows]
        return self._ids[rows, : int(lengths.max(initial=0))], lengths
