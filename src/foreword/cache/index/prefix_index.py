"""Which block holds which prefix.

Knows block ids and the sequences whose leading blocks they hold; knows nothing of reference counts or
of free and used blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import BlockIds
from foreword.cache.index.tree_view import PrefixNode
from foreword.cache.keys.sequence import TokenSequence


@dataclass(frozen=True, slots=True)
class PartialBlock:
    """A block whose first tokens continue a match; copy it to use them (copy on write)."""

    block_id: int
    num_tokens: int
    """Leading tokens that match, 1 to block_size - 1."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The indexed beginning of a sequence."""

    block_ids: BlockIds
    """Blocks of its leading full blocks."""
    partial: PartialBlock | None = None
    """What matches beyond them, where the index can tell."""


NO_MATCH = PrefixMatch(np.empty(0, np.int32))


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a sequence leaves what is indexed, and how both go on. Numbers below 0 stand for media."""

    position: int
    """Number of leading tokens that are indexed; tokens inside a block count."""
    ours: tuple[int, ...]
    theirs: tuple[int, ...]
    """Of several continuations, the one that was indexed first; empty if nothing goes on from here."""


class PrefixIndex(Protocol):
    """Finds the blocks that already hold the beginning of a sequence."""

    @property
    def keeps_tails(self) -> bool:
        """Whether `insert_tail` is of use."""

    @property
    def num_tails(self) -> int:
        """Number of indexed tails, which `len` does not count."""

    def match(self, sequence: TokenSequence) -> PrefixMatch:
        """The longest indexed beginning of `sequence`. Changes nothing."""

    def holds(self, sequence: TokenSequence, block: int) -> bool:
        """Whether the sequence's full block number `block` is indexed, given that those before it are."""

    def diverges(self, sequence: TokenSequence, num_tokens: int) -> Divergence | None:
        """Where the sequence leaves what is indexed, with `num_tokens` of each continuation at most.

        None if all of it is indexed, or if the index cannot tell. Changes nothing.
        """

    def original_of(self, block_id: int) -> int | None:
        """The block that is found in this duplicate's place; None if it is no duplicate."""

    def insert(self, sequence: TokenSequence, first: int, block_ids: BlockIds) -> bool:
        """From now on `block_ids` hold the sequence's full blocks number `first`, `first + 1`, ...

        A block may be a duplicate of one that is indexed already: both stay. False, and no change, if the
        blocks before `first` are not indexed any more and these could not be found without them.
        """

    def insert_each(
        self, sequences: Sequence[TokenSequence], numbers: Sequence[int], block_ids: BlockIds
    ) -> list[bool]:
        """`insert` of one block for each of these sequences: `block_ids[i]` is number `numbers[i]` of its own."""

    def insert_tail(self, sequence: TokenSequence, num_tokens: int, block_id: int) -> bool:
        """From now on `block_id`, which is not indexed, holds what of these first tokens is after the last full block.

        It is found as a `PartialBlock`. False, and no change, if the index keeps no tails, if the full blocks
        before are not indexed, or if other blocks hold the same tokens already.
        """

    def superseded_tails(self) -> BlockIds:
        """Tails that became superfluous since the last call: blocks or longer tails hold their tokens too."""

    def tail_block_ids(self) -> BlockIds:
        """All indexed tails (a copy)."""

    def remove(self, block_ids: BlockIds) -> BlockIds:
        """Forget these (distinct) blocks and tails, and what can no longer be found without them; returns all of those.

        Blocks that were not indexed are ignored, and returned too.
        """

    def clear(self) -> None:
        """Forget all blocks."""

    def top(
        self, limit: int, num_reuses: npt.NDArray[np.int64] | None, under_salt: str = ""
    ) -> list[PrefixNode] | None:
        """The `limit` nodes of the tree that were reused most; None if the index has no tree.

        `num_reuses` counts by block; without it nodes are ordered by length. With `under_salt`, only nodes that are
        found under salts that begin so. Changes nothing.
        """

    def block_ids(self) -> BlockIds:
        """All indexed full blocks, duplicates included (a copy)."""

    def __len__(self) -> int:
        """Number of indexed full blocks, duplicates included."""

    def check_integrity(self) -> None:
        """Raise AssertionError if the index contradicts itself."""

    def check_table(self, sequence: TokenSequence, block_ids: BlockIds) -> None:
        """Raise AssertionError if a block of this sequence's table is indexed as anything but what it holds there."""
