"""Groups of layers: their attention types, and for each type the blocks that it needs, looks up and releases.

The types and names are vLLM v1's.

The blocks that a group needs to compute position p (block size 4, p = 13):

    full              |0123|4567|89ab|c       all
    sliding window 6            |89ab|c       positions 8 to 13, so blocks 2 and 3
    chunked 8                   |89ab|c       the chunk of position 13 begins at 8
    recurrent                        |c       the state after position 12, in the block that covers it

The group releases all earlier blocks: their table entries become NULL_BLOCK, and the blocks join the free queue. They
stay cached until they are overwritten.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import NO_BLOCKS, NULL_BLOCK, BlockIds, Int64Array, without_null
from foreword.cache.blocks.block_pool import BlockPool
from foreword.cache.blocks.block_table import BlockTable
from foreword.cache.keys.hashing import BlockHash
from foreword.errors import ConfigError

Position = TypeVar("Position", int, Int64Array)
BlockFinder = Callable[[BlockHash], int | None]
"""Returns the block that is cached under a key, or None."""


class _Sizes:
    """A spec whose fields are numbers of tokens or positions. Raises ConfigError for a number below 1."""

    def __post_init__(self) -> None:
        for name, value in ((field.name, getattr(self, field.name)) for field in fields(self)):  # type: ignore[arg-type]
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} is too small; use at least 1")


@dataclass(frozen=True, slots=True)
class FullAttentionSpec(_Sizes):
    """Every position attends to all earlier positions."""

    block_size: int = 16
    """Tokens per block."""


@dataclass(frozen=True, slots=True)
class SinkFullSpec(_Sizes):
    """Full attention, and `num_sink_tokens` positions that all requests share and attend to."""

    num_sink_tokens: int
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class SlidingWindowSpec(_Sizes):
    """Every position attends to the last `window` positions, itself included."""

    window: int
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class ChunkedLocalSpec(_Sizes):
    """Every position attends to the earlier positions of its chunk. A chunk has `chunk` positions."""

    chunk: int
    block_size: int = 16


@dataclass(frozen=True, slots=True)
class MambaSpec(_Sizes):
    """A recurrent layer's state, which each token changes; one block holds one state.

    Named as in vLLM, whatever the recurrence is: Mamba, gated delta rules, linear attention.

    A state can be saved after every `block_size` tokens, and is saved after every `interval_tokens`
    (None: `block_size`) and where the request asks for it.
    """

    block_size: int = 16
    interval_tokens: int | None = None

    def __post_init__(self) -> None:
        _Sizes.__post_init__(self)  # a class with slots has no `super()` in 3.11
        if self.interval_tokens is not None and self.interval_tokens % self.block_size:
            raise ConfigError(
                f"interval_tokens={self.interval_tokens} is not a multiple of block_size={self.block_size}; states "
                "are saved at the ends of blocks only"
            )


GroupSpec = FullAttentionSpec | SinkFullSpec | SlidingWindowSpec | ChunkedLocalSpec | MambaSpec


class SingleTypeKVCacheManager(ABC):
    """One group's tables, and the rules of its attention type. The coordinator opens and closes rows.

    This base class serves attention over a suffix of the sequence. The suffix begins with `first_needed_block`.
    """

    only_appends = True
    """Whether `extend` only appends new blocks to a table."""
    releases_blocks = True
    """Whether blocks are released while a request runs."""
    hits_every_prefix = False
    """Whether each beginning of a hit is a hit."""
    readable_in_same_step = True
    """Whether a step may read blocks that another request of the same batch writes: True for KV, False for states."""

    def __init__(self, block_size: int, tables: BlockTable, reach: int = 0) -> None:
        """Let each position attend to at most `reach` positions, itself included; 0: to all positions before it."""
        self.block_size = block_size
        self.tables = tables
        self._reach = reach
        self.num_indexed: list[int] = []
        """[rows]: the number of leading blocks that were offered to the index or came from a hit."""
        self._num_released: Int64Array = np.zeros(0, np.int64)

    def reserve(self, pool: BlockPool) -> None:  # noqa: B027 - only sinks need any
        """Take the blocks that belong to no request and are never evicted. Call it once."""

    def held_forever(self) -> BlockIds:
        """The blocks that `reserve` took."""
        return NO_BLOCKS

    # ------------------------------------------------------------------ lookup

    @abstractmethod
    def first_needed_block(self, position: Position) -> Position:
        """The number of the first block needed to compute `position`; a negative number means block 0."""

    def find_longest_cache_hit(
        self, keys: Sequence[BlockHash], block_of: BlockFinder, max_num_tokens: int, alignment: int
    ) -> BlockIds:
        """Table entries of the longest hit of at most `max_num_tokens` tokens; NULL_BLOCK where no block is needed.

        `keys` are the keys of the group's blocks, at least up to `max_num_tokens`. The hit's length in tokens is a
        multiple of `alignment`, which is a multiple of `block_size`. The search goes from right to left. A length that
        needs a missing block is not a hit, so the search goes on left of that block and looks up no block twice.
        """
        size = self.block_size
        length = max_num_tokens // alignment * alignment
        block_ids: list[int] = []
        number = length // size - 1
        while length:
            first = max(0, self.first_needed_block(length))
            while number >= first:
                block_id = block_of(keys[number])
                if block_id is None:
                    break
                block_ids.append(block_id)
                number -= 1
            else:
                break
            length = number * size // alignment * alignment
            number = length // size - 1
            block_ids.clear()
        entries = np.full(length // size, NULL_BLOCK, np.int32)
        if block_ids:
            entries[-len(block_ids) :] = block_ids[::-1]
        return entries

    # -------------------------------------------------------------------- need

    def num_new_blocks(self, row: int, start: int, end: int) -> int:
        """The number of new blocks that a row needs to compute positions `start` to `end` (exclusive)."""
        return max(0, -(-end // self.block_size) - self.tables.length(row))

    def num_admission_blocks(self, num_hit_blocks: int, end: int) -> int:
        """The number of new blocks needed to compute positions up to `end` after a hit of `num_hit_blocks` entries."""
        return max(0, -(-end // self.block_size) - num_hit_blocks)

    def max_num_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """The most blocks that a request of `num_tokens` holds at a time, in steps of at most `max_step_tokens`."""
        num_blocks = -(-num_tokens // self.block_size)
        if not self._reach:
            return num_blocks
        span = self._reach - 1 + max_step_tokens
        return min(num_blocks, 1 - (1 - span) // self.block_size)

    def changes(self, rows: Int64Array, starts: Int64Array, ends: Int64Array) -> npt.NDArray[np.bool_]:
        """Whether each row takes or releases blocks when positions `starts` to `ends` are computed."""
        grows: npt.NDArray[np.bool_] = self.tables.lengths(rows) * self.block_size < ends
        if self.releases_blocks:
            grows |= self.first_needed_block(starts) > self._num_released[rows]
        return grows

    # ------------------------------------------------------------------ tables

    def open(self, row: int, entries: BlockIds) -> None:
        """Begin a row with the table entries of a hit."""
        while row >= len(self.num_indexed):
            self.num_indexed.append(0)
        if row >= len(self._num_released):
            self._num_released = np.concatenate((self._num_released, np.zeros(row + 16, np.int64)))
        self.num_indexed[row] = len(entries)
        self._num_released[row] = self._num_needless(len(entries) * self.block_size) if len(entries) else 0
        self.tables.append(row, entries)

    def releasable(self, row: int, start: int) -> BlockIds:
        """A new array of the blocks that no position from `start` on needs, the last block first."""
        end = self._num_needless(start)
        released = int(self._num_released[row])
        if end <= released:
            return NO_BLOCKS
        return without_null(self.tables.row(row)[released:end][::-1])

    def release(self, row: int, start: int) -> None:
        """Remove `releasable(row, start)` from the table; the caller frees them."""
        end = self._num_needless(start)
        released = int(self._num_released[row])
        if end > released:
            self.tables.row(row)[released:end] = NULL_BLOCK
            self._num_released[row] = end

    def release_each(self, rows: Int64Array, starts: Int64Array) -> tuple[Int64Array, BlockIds]:
        """Remove the `releasable` blocks of many rows; returns the index into `rows` of each block, and the blocks."""
        released, ends = self._num_released[rows], self.first_needed_block(starts)
        leaving = np.flatnonzero(ends > released)
        if not len(leaving):
            return leaving, NO_BLOCKS
        rows, released, ends = rows[leaving], released[leaving], ends[leaving]
        block_ids = self.tables.replace_each(rows, released, ends, NULL_BLOCK)
        self._num_released[rows] = ends
        return np.repeat(leaving, ends - released), block_ids

    def extend(self, row: int, start: int, end: int, new_ids: BlockIds) -> None:
        """Add the `num_new_blocks(row, start, end)` new blocks to the table."""
        self.tables.append(row, new_ids)

    def blocks_to_index(self, row: int, num_tokens: int, num_findable: int) -> range:
        """The numbers of the blocks that the first `num_tokens` tokens fill and that are not indexed yet.

        Other requests may find only the first `num_findable` tokens.
        """
        return range(self.num_indexed[row], min(num_tokens, num_findable) // self.block_size)

    def set_indexed(self, row: int, num_blocks: int) -> None:
        """Record that the row's blocks before number `num_blocks` were offered to the index."""
        self.num_indexed[row] = num_blocks

    def check_row(self, row: int) -> None:
        """Raise AssertionError if a row holds blocks that it has released, or lacks blocks that it needs."""
        table, released = self.tables.row(row), int(self._num_released[row])
        assert (table[:released] == NULL_BLOCK).all(), "a block was given up but is still in the table"
        assert (table[released:] != NULL_BLOCK).all(), "a block that is needed is missing from the table"

    def _num_needless(self, start: int) -> int:
        return max(0, self.first_needed_block(start)) if self.releases_blocks else 0


class FullAttentionManager(SingleTypeKVCacheManager):
    """Needs all blocks. Only in this type, each beginning of a hit is a hit, so its groups are looked up first."""

    releases_blocks = False
    hits_every_prefix = True

    def first_needed_block(self, position: Position) -> Position:
        return 0 * position

    def find_longest_cache_hit(
        self, keys: Sequence[BlockHash], block_of: BlockFinder, max_num_tokens: int, alignment: int
    ) -> BlockIds:
        """The search goes from left to right, up to the first missing block."""
        block_ids: list[int] = []
        for key in keys[: max_num_tokens // self.block_size]:
            block_id = block_of(key)
            if block_id is None:
                break
            block_ids.append(block_id)
        length = len(block_ids) * self.block_size // alignment * alignment
        return np.array(block_ids[: length // self.block_size], np.int32)


class SinkFullAttentionManager(FullAttentionManager):
    """Full attention with sink blocks that are taken once, for all requests, and never released.

    The sink blocks are in no request's table: attention reads them before the table's blocks.
    """

    def __init__(self, spec: SinkFullSpec, tables: BlockTable) -> None:
        super().__init__(spec.block_size, tables)
        self._num_sink_tokens = spec.num_sink_tokens
        self._sink_ids = NO_BLOCKS

    def reserve(self, pool: BlockPool) -> None:
        num_blocks = -(-self._num_sink_tokens // self.block_size)
        if num_blocks >= pool.get_num_free_blocks():
            raise ConfigError(
                f"num_sink_tokens={self._num_sink_tokens} take {num_blocks} blocks and leave none of "
                f"{pool.get_num_free_blocks()} to requests; give the cache more memory"
            )
        self._sink_ids = pool.get_new_blocks(num_blocks)

    def held_forever(self) -> BlockIds:
        return self._sink_ids


class SlidingWindowManager(SingleTypeKVCacheManager):
    """Needs each block that holds a token of the window before the next position."""

    def first_needed_block(self, position: Position) -> Position:
        return (position - self._reach + 1) // self.block_size


class ChunkedLocalAttentionManager(SingleTypeKVCacheManager):
    """Needs the blocks of the next position's chunk."""

    def first_needed_block(self, position: Position) -> Position:
        return position // self._reach * self._reach // self.block_size


class MambaManager(SingleTypeKVCacheManager):
    """Needs only the last state. A request holds one block; its steps overwrite it and move it to later table entries.

        block size 4      entries     step computes
        start 0, end 6    - 5         positions 0 to 5, into block 5
        start 6, end 8    - 5         in place; the state after 8 tokens is saved: block 5 is indexed
        start 8, end 9    - 5 7       reads block 5, which must not be overwritten, writes block 7
        start 9, end 10   - - 7       block 5 is released (and stays cached)
        start 10, end 13  - - - 7     the state after 12 tokens is not saved: block 7 moves on

    So a step that computes positions `start` to `end` (exclusive) writes the entry of position end - 1. The step reads
    the entry of position start - 1 or, if that entry is NULL_BLOCK, the entry that it writes. At start 0, the step
    begins without a state.
    """

    only_appends = False
    readable_in_same_step = False

    def __init__(self, spec: MambaSpec, tables: BlockTable, alignment: int) -> None:
        super().__init__(spec.block_size, tables)
        self._interval = math.lcm(spec.interval_tokens or spec.block_size, alignment)
        self._alignment = alignment
        self._is_kept: dict[int, bool] = {}
        self._asked_for: dict[int, set[int]] = {}

    def first_needed_block(self, position: Position) -> Position:
        return (position - 1) // self.block_size

    def num_new_blocks(self, row: int, start: int, end: int) -> int:
        moves = self.tables.length(row) * self.block_size < end
        return int(moves and (self._is_kept[row] or not self.tables.length(row)))

    def num_admission_blocks(self, num_hit_blocks: int, end: int) -> int:
        return int(num_hit_blocks * self.block_size < end)

    def max_num_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        return min(2, -(-num_tokens // self.block_size))

    def ask_for_states(self, row: int, positions: Iterable[int]) -> None:
        """Save states after these numbers of tokens, too. No state is saved at a position where no step ends."""
        self._asked_for[row] |= {position for position in positions if position % self._alignment == 0}

    def is_state_saved(self, row: int, num_tokens: int) -> bool:
        """Whether to save the state after `num_tokens` tokens."""
        return num_tokens % self._interval == 0 or num_tokens in self._asked_for[row]

    def open(self, row: int, entries: BlockIds) -> None:
        super().open(row, entries)
        self._is_kept[row] = len(entries) > 0
        self._asked_for[row] = set()

    def extend(self, row: int, start: int, end: int, new_ids: BlockIds) -> None:
        length = self.tables.length(row)
        target = -(-end // self.block_size)
        if target <= length:
            return
        added = np.full(target - length, NULL_BLOCK, np.int32)
        if len(new_ids):
            added[-1] = new_ids[0]
        else:
            table = self.tables.row(row)
            added[-1], table[-1] = table[-1], NULL_BLOCK
        self.tables.append(row, added)
        self._is_kept[row] = False

    def blocks_to_index(self, row: int, num_tokens: int, num_findable: int) -> range:
        number = num_tokens // self.block_size
        if num_tokens > num_findable or num_tokens % self.block_size or number <= self.num_indexed[row]:
            return range(0)
        if not self.is_state_saved(row, num_tokens):
            return range(0)
        return range(number - 1, number)

    def set_indexed(self, row: int, num_blocks: int) -> None:
        super().set_indexed(row, num_blocks)
        self._is_kept[row] = True

    def check_row(self, row: int) -> None:
        table, released = self.tables.row(row), int(self._num_released[row])
        assert (table[:released] == NULL_BLOCK).all(), "a state was given up but is still in the table"
        assert not len(table) or table[-1] != NULL_BLOCK, "a request has lost its state"
        assert (table != NULL_BLOCK).sum() <= 2, "a request holds states that no step reads"


def make_group_manager(spec: GroupSpec, tables: BlockTable, alignment: int) -> SingleTypeKVCacheManager:
    """Make the manager for a spec's type; hits are multiples of `alignment` tokens."""
    match spec:
        case FullAttentionSpec():
            return FullAttentionManager(spec.block_size, tables)
        case SinkFullSpec():
            return SinkFullAttentionManager(spec, tables)
        case SlidingWindowSpec():
            return SlidingWindowManager(spec.block_size, tables, spec.window)
        case ChunkedLocalSpec():
            return ChunkedLocalAttentionManager(spec.block_size, tables, spec.chunk)
        case MambaSpec():
            return MambaManager(spec, tables, alignment)
