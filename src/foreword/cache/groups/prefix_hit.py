"""PrefixHit: the cached beginning of a sequence, as a lookup finds it."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.cache.block_ids import BlockIds
from foreword.cache.index.prefix_index import PartialBlock


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """The cached beginning of a sequence. Valid until the next call that changes the cache."""

    tables: tuple[BlockIds, ...]
    """For each group, the block ids of the leading full blocks that were found; NULL_BLOCK where none is needed."""
    partial: PartialBlock | None
    """A block that holds some of the tokens after them; it is copied if a request takes the hit."""
    num_tokens: int
    """Leading tokens that need not be computed.

    It can be one less than `num_shared_tokens`: if the blocks hold the whole sequence, its last token is still computed
    for its logits, but its KV is not written again.
    """
    num_shared_tokens: int
    """Leading tokens whose KV is in the blocks themselves; it must not be written again."""
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
