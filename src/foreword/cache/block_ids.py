"""Arrays of block ids. A block is a number, and each function takes many blocks in one call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from foreword.errors import AllocationError

BlockIds = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
NO_BLOCKS: BlockIds = np.empty(0, np.int32)
NULL_BLOCK = -1
"""Table entry of a block that is not needed; no block of the pool has this id."""
ELSEWHERE = -2
"""Table entry of a block that is not in the pool, but in a place from which it can be loaded."""


def without_null(entries: BlockIds) -> BlockIds:
    """A new array of the table entries that are not NULL_BLOCK."""
    block_ids: BlockIds = entries[entries != NULL_BLOCK]
    return block_ids


def are_distinct(numbers: BlockIds | Int64Array) -> bool:
    """Whether each number occurs only once. Sorting takes a tenth of the time of `np.unique`."""
    in_order = np.sort(numbers)
    return bool((in_order[1:] != in_order[:-1]).all())


def as_block_ids(block_ids: Iterable[int], num_blocks: int) -> BlockIds:
    """The distinct blocks of these table entries, in the order of the entries. Entries below 0 stand for no block.

    Raises AllocationError for an id that is not in the pool.
    """
    distinct = dict.fromkeys(map(int, block_ids))
    beyond = max(distinct, default=0)
    if beyond >= num_blocks:
        raise AllocationError(f"block {beyond} is not in this pool; its {num_blocks} blocks are 0 to {num_blocks - 1}")
    return np.array([block_id for block_id in distinct if block_id >= 0], np.int32)


def elsewhere(table: BlockIds) -> BlockIds:
    """The positions in a table at which the entry is ELSEWHERE, ascending."""
    return np.flatnonzero(table == ELSEWHERE).astype(np.int32)


def in_pool(tables: Sequence[BlockIds]) -> BlockIds:
    """The blocks of all these tables that are in the pool."""
    entries = np.concatenate(tables)
    block_ids: BlockIds = entries[(entries != ELSEWHERE) & (entries != NULL_BLOCK)]
    return block_ids
