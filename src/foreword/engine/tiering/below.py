"""BelowThePool: what is known of a block that the pool lacks, for explanations.

Knows loads under way, tiers' keys, keys that were not stored, and other identities; changes nothing. It is asked about
one block where a lookup ended, and reads memory only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foreword.cache import BlockHash, KVCacheManager, MissReason, TokenSequence
from foreword.engine.tiering.loads import Loads
from foreword.engine.tiering.offers import DroppedKeys
from foreword.tiers.ticket import Outcome
from foreword.tiers.tier import BlockKeys, Tier

MOST_BLOCKS = 256
"""Keys of another identity are computed for this number of blocks at most; later in a prompt nobody asks about it."""
NEXT_BLOCKS = 16
"""Blocks after a hit of which another identity must have one; groups keep every n-th."""
MOST_GROUPS = 8
"""Of another identity, whose groups are not known."""


@dataclass(frozen=True, slots=True)
class OtherIdentity:
    """Another model or another arithmetic, whose blocks may lie in the same place."""

    tier: Tier
    namespace: bytes
    root: BlockHash
    block_size: int
    reason: MissReason
    """What its blocks explain."""

    def has_more(self, sequence: TokenSequence, num_tokens: int) -> bool:
        """Whether it has blocks of this content after the first `num_tokens` tokens."""
        first = num_tokens // self.block_size
        end = min(first + NEXT_BLOCKS, MOST_BLOCKS, len(sequence) // self.block_size)
        if first >= end:
            return False
        keys = sequence.keys_after(self.root, self.block_size, end)[first:]
        one = BlockKeys.of_group(self.namespace, 0, keys)
        group_ids = np.repeat(np.arange(MOST_GROUPS, dtype=np.uint16), len(keys))
        names = BlockKeys(self.namespace, group_ids, np.tile(one.keys, (MOST_GROUPS, 1)))
        ticket = self.tier.probe(names)
        return ticket.done and bool((ticket.report.outcomes == Outcome.PRESENT).any())


class BelowThePool:
    """Answers explanations; see `foreword.cache.explain.Below`."""

    def __init__(
        self, loads: Loads, dropped: DroppedKeys, manager: KVCacheManager, others: Sequence[OtherIdentity]
    ) -> None:
        self._loads, self._dropped, self._manager, self._others = loads, dropped, manager, others

    def why_missed(self, sequence: TokenSequence, num_tokens: int, *, was_here: bool) -> MissReason | None:
        """What is known of the sequence's block after `num_tokens` tokens, which the pool lacks; None: nothing."""
        keys, number = sequence.block_hashes(), num_tokens // sequence.block_size
        if number >= len(keys):
            return None
        if self._loads.is_loading(sequence, keys[number]):
            return MissReason.LOADING
        if self._loads.can_load(sequence, num_tokens):
            return MissReason.IN_TIER
        by_group = zip(self._manager.groups, self._manager.keys_by_group(sequence), strict=True)
        own = [
            keys[num_tokens // spec.block_size] for spec, keys in by_group if num_tokens // spec.block_size < len(keys)
        ]
        if any(key in self._dropped for key in own):
            return MissReason.DROPPED_BY_ADMISSION
        if was_here:
            return None
        return next((other.reason for other in self._others if other.has_more(sequence, num_tokens)), None)
