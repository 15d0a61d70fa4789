"""Why a lookup ended where it did.

`MissReason` lists the possible reasons; docs/concepts/cache.md says what to do about each.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from foreword.cache.account.ledger import Eviction, MissReason
from foreword.cache.groups.coordinator import KVCacheCoordinator
from foreword.cache.index.prefix_index import Divergence, PrefixHit
from foreword.cache.keys.sequence import TokenSequence

MAX_CONTINUATION_TOKENS = 16
"""The number of tokens to show of each continuation after a divergence."""


COMPUTED_ELSEWHERE_IF_AT_ALL = (
    MissReason.NEVER_SEEN,
    MissReason.SALT_DIFFERS,
    MissReason.ADAPTER_DIFFERS,
    MissReason.MEDIA_DIFFERS,
)
"""Reasons that say that no block has the missing key. Another request may be computing a block with this key now."""
MAY_LIE_BELOW = (*COMPUTED_ELSEWHERE_IF_AT_ALL, MissReason.STATE_NOT_SAVED, MissReason.EVICTED)


class Below(Protocol):
    """What explanations need to know about the tiers below the pool."""

    def why_missed(self, sequence: TokenSequence, num_tokens: int, *, was_here: bool) -> MissReason | None:
        """Say why the pool lacks the sequence's block after `num_tokens` tokens; None if the tiers know no reason.

        `was_here`: whether the pool has held this block before.
        """
        ...


class LoadFailure(enum.StrEnum):
    """Why a tier below the pool did not give the blocks for which a request waited."""

    TIER_SLOW = "tier_slow"
    """The tier did not answer in time."""
    TIER_CORRUPT = "tier_corrupt"
    """The tier's data was damaged."""
    TIER_ERROR = "tier_error"
    """The system below the tier reported an error."""


@dataclass(frozen=True, slots=True)
class LookupExplanation:
    """The result of one lookup, and the reason why it found no more."""

    num_tokens: int
    """The number of tokens in the sequence that was looked up."""
    num_hit_tokens: int
    reason: MissReason | None
    """Why the tokens after the hit have to be computed. None if only the last token is left: it is always computed."""
    eviction: Eviction | None = None
    """When and why the first missing block was evicted; None if it was not evicted."""
    divergence: Divergence | None = None
    """Where the sequence first differs from all cached ones. None if it does not, or if the index cannot tell."""
    num_ghost_tokens: int = 0
    """The number of tokens right after the hit that a pool with twice the blocks would still have held."""
    num_filling_tokens: int = 0
    """The number of tokens right after the hit that are in a block which the step of this lookup computes.

    These tokens are not hits, because requests of one step share only whole blocks."""
    loaded_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tier -> the number of the hit's tokens that were loaded from this tier while the request waited."""
    load_failure: LoadFailure | None = None
    """Why the request waited for a tier in vain; None if it did not wait in vain."""

    @property
    def num_missed_tokens(self) -> int:
        return self.num_tokens - self.num_hit_tokens

    def __str__(self) -> str:
        loaded = [f"{num_tokens} of them from {name}" for name, num_tokens in self.loaded_tokens.items()]
        parts = [", ".join([f"{self.num_hit_tokens} of {self.num_tokens} tokens found", *loaded])]
        if self.load_failure is not None:
            parts.append(self.load_failure.value.replace("_", " "))
        if self.reason is not None and (self.load_failure is None or self.reason is not MissReason.NEVER_SEEN):
            parts.append(self.reason.value.replace("_", " "))
        if self.eviction is not None:
            parts[-1] += f" ({self.eviction.cause}, with {self.eviction.pool_usage:.0%} of the blocks in use)"
        if self.num_ghost_tokens:
            parts.append(f"twice the blocks would have found {self.num_ghost_tokens} more")
        if self.num_filling_tokens:
            parts.append(
                f"{self.num_filling_tokens} more are in a block that is computed in the same step, which shares whole "
                "blocks only"
            )
        if self.divergence is not None and self.divergence.theirs:
            parts.append(f"differs from what is cached at token {self.divergence.position}")
        return "; ".join(parts)


def explain_lookup(
    sequence: TokenSequence,
    hit: PrefixHit,
    coordinator: KVCacheCoordinator,
    others: Iterable[TokenSequence],
    below: Below | None = None,
) -> LookupExplanation:
    """Explain the lookup of `sequence` that found `hit`; `others` are the sequences that hold blocks now."""
    length = len(sequence)
    if hit.skipped:
        return LookupExplanation(length, 0, MissReason.LOOKUP_SKIPPED)
    if hit.num_tokens >= length - 1:
        return LookupExplanation(length, hit.num_tokens, None)
    limit = sequence.most_hit_tokens
    if limit is not None and hit.num_tokens >= coordinator.longest_hit(limit):
        return LookupExplanation(length, hit.num_tokens, MissReason.LOOKUP_SKIPPED)
    reason, eviction = coordinator.why_missed(sequence, hit)
    missing = hit.num_shared_tokens // sequence.block_size
    if reason in COMPUTED_ELSEWHERE_IF_AT_ALL and _is_in_flight(sequence, missing, others):
        reason = MissReason.IN_FLIGHT
    elif below is not None and reason in MAY_LIE_BELOW:
        was_here = reason is MissReason.EVICTED
        reason_below = below.why_missed(sequence, hit.num_shared_tokens, was_here=was_here)
        if reason_below is not None:  # a block is not loaded if the limit ends in it
            reason = reason_below if sequence.may_hit(missing) else MissReason.LOOKUP_SKIPPED
    divergence = coordinator.index.diverges(sequence, MAX_CONTINUATION_TOKENS)
    num_filling = 0
    if divergence is not None and divergence.position > hit.num_tokens:
        num_filling = coordinator.find_hit_of_next_step(sequence).num_tokens - hit.num_tokens
    ghosts_end = hit.num_shared_tokens + coordinator.num_ghost_tokens(sequence, hit)
    num_ghosts = min(ghosts_end, sequence.num_hittable_tokens) - hit.num_tokens  # the hit may include a part of them
    return LookupExplanation(
        length,
        hit.num_tokens,
        reason,
        eviction,
        divergence,
        max(0, num_ghosts),
        max(0, num_filling),
    )


def _is_in_flight(sequence: TokenSequence, missing: int, others: Iterable[TokenSequence]) -> bool:
    """Whether another running sequence has the same beginning, including the missing block."""
    hashes = sequence.block_hashes()
    if missing >= len(hashes):
        return False
    return any(
        other is not sequence and other.num_full_blocks > missing and other.block_hashes()[missing] == hashes[missing]
        for other in others
    )
