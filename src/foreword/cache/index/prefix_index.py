"""PrefixIndex: the protocol of indexes, which find the blocks that hold a prefix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import BlockIds
from foreword.cache.keys.hashing import TokenArray
from foreword.cache.keys.sequence import TokenSequence


@dataclass(frozen=True, slots=True)
class PartialBlock:
    """A block whose first tokens continue a match; copy it to use them (copy on write)."""

    block_id: int
    num_tokens: int
    """The number of leading tokens that match, 1 to block_size - 1."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The indexed beginning of a sequence."""

    block_ids: BlockIds
    """The ids of the blocks that hold the sequence's leading full blocks."""
    partial: PartialBlock | None = None
    """A block that begins with the tokens after the full blocks. None if no block does, or if only full blocks are
    found."""


NO_MATCH = PrefixMatch(np.empty(0, np.int32))


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached beginning of a sequence. Valid until the next call that changes the cache."""

    tables: tuple[BlockIds, ...]
    """For each group, the block ids of the leading full blocks that were found; NULL_BLOCK where no block is needed."""
    partial: PartialBlock | None
    """A block that holds some of the tokens after the full blocks. The block is copied if a request takes the hit."""
    num_tokens: int
    """The number of leading tokens that need not be computed.

    `num_tokens` can be one less than `num_shared_tokens`: if the blocks hold the whole sequence, the last token is
    still computed for its logits, but its KV is not written again.
    """
    num_shared_tokens: int
    """The number of leading tokens whose KV is in the full blocks of `tables`. This KV must not be written again."""
    resumed: bool = False
    """Whether the request was preempted before; such lookups have counters of their own."""
    forked: bool = False
    """Whether this is another answer to a prompt whose lookup was counted; such lookups have counters of their own."""
    skipped: bool = False
    """Whether nothing was looked up, because caching is off or the request asked for no lookup."""

    @property
    def block_ids(self) -> BlockIds:
        """The first group's table."""
        return self.tables[0]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position at which a sequence differs from every indexed sequence, and how both continue.

    Numbers below 0 represent media.
    """

    position: int
    """The number of leading tokens that are indexed, including tokens inside a block."""
    ours: tuple[int, ...]
    theirs: tuple[int, ...]
    """The continuation that was indexed first; empty if the indexed tokens end here."""


MAX_SHOWN_TOKENS = 256
"""At most this number of a node's tokens are shown, from its first token on."""


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """Consecutive cached tokens after the parent's tokens, for display. A copy, valid even after the cache changes."""

    node_id: int
    """Stays the same while the node exists. If the node is split, the lower part keeps this id."""
    parent_id: int | None
    salt: str | None
    """The salt under which lookups find the node; None if they find it without a salt."""
    start: int
    """The number of tokens before this node."""
    num_tokens: int
    token_ids: tuple[int, ...]
    """The node's first tokens, at most `MAX_SHOWN_TOKENS`. Negative numbers represent media."""
    block_ids: BlockIds
    """The blocks that end in this node."""
    num_reuses: int
    """The number of requests that reused this node; 0 if nothing counts reuses."""
    num_children: int


class PrefixIndex(Protocol):
    """Finds the blocks that already hold the beginning of a sequence."""

    @property
    def keeps_tails(self) -> bool:
        """Whether the index keeps tails (`insert_tail`)."""

    @property
    def num_tails(self) -> int:
        """The number of indexed tails, which `len` does not count."""

    def match(self, sequence: TokenSequence) -> PrefixMatch:
        """The longest indexed beginning of `sequence`. Changes nothing."""

    def holds(self, sequence: TokenSequence, block: int) -> bool:
        """Whether the sequence's full block number `block` is indexed, given that all blocks before it are indexed."""

    def diverges(self, sequence: TokenSequence, num_tokens: int) -> Divergence | None:
        """Returns the first position at which the sequence differs from every indexed sequence, and how both continue.

        Both continuations are cut to `num_tokens` tokens. None if the whole sequence is indexed, or if the index cannot
        tell. Changes nothing.
        """

    def following(self, sequence: TokenSequence, num_tokens: int) -> TokenArray:
        """The tokens after the sequence in a longer indexed sequence, at most `num_tokens`; empty if there are none.

        Of several longer sequences, it uses the sequence that was indexed last. Changes nothing.
        """

    def original_of(self, block_id: int) -> int | None:
        """The block that lookups find instead of this duplicate; None if the block is no duplicate."""

    def insert(self, sequence: TokenSequence, first: int, block_ids: BlockIds) -> bool:
        """Index `block_ids` as the sequence's full blocks number `first`, `first + 1`, ...

        A block may duplicate an indexed block: both stay. Returns False, and changes nothing, if the blocks before
        `first` are no longer indexed and lookups therefore could not find the new blocks.
        """

    def insert_each(
        self, sequences: Sequence[TokenSequence], numbers: Sequence[int], block_ids: BlockIds
    ) -> list[bool]:
        """`insert` one block for each of these sequences: `block_ids[i]` is block number `numbers[i]`."""

    def insert_tail(self, sequence: TokenSequence, num_tokens: int, block_id: int) -> bool:
        """Index a block as a tail, which holds the tokens from the end of the last full block up to `num_tokens`.

        Lookups find the tail as a `PartialBlock`. Returns False, and changes nothing, if the index keeps no tails, if
        the full blocks before the tail are not indexed, or if other blocks already hold the same tokens.
        """

    def superseded_tails(self) -> BlockIds:
        """Tails that became unnecessary since the last call: blocks or longer tails hold their tokens too."""

    def tail_block_ids(self) -> BlockIds:
        """A new array of all indexed tails."""

    def remove(self, block_ids: BlockIds) -> BlockIds:
        """Forget these (distinct) blocks and tails, and the blocks and tails that cannot be found without them.

        Returns all forgotten blocks. Ignores blocks that were not indexed, but returns them too.
        """

    def clear(self) -> None:
        """Forget all blocks."""

    def top(
        self, limit: int, num_reuses: npt.NDArray[np.int64] | None, under_salt: str = ""
    ) -> list[PrefixNode] | None:
        """The `limit` nodes of the tree that were reused most; None if the index has no tree.

        `num_reuses` has a count for each block; without it, nodes are ordered by length. `under_salt` selects nodes
        under salts that begin with that text. Changes nothing.
        """

    def block_ids(self) -> BlockIds:
        """A new array of all indexed full blocks, including duplicates."""

    def __len__(self) -> int:
        """The number of indexed full blocks, including duplicates."""

    def check_integrity(self) -> None:
        """Raise AssertionError if the index contradicts itself."""

    def check_table(self, sequence: TokenSequence, block_ids: BlockIds) -> None:
        """Raise AssertionError if a block in this table of the sequence is indexed as some other block."""
