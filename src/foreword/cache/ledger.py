"""Ledger: what the cache holds and has held, by key, so that it can say why it missed.

Knows keys, block ids, steps and extra keys; decides nothing. The manager reports what it indexes and
forgets; the ledger answers three questions:

- why did this lookup end where it did (`explain`);
- what would twice the memory have found (`ghost_hit_tokens`): forgotten keys live on in a list of as many
  entries as the pool has blocks, the oldest dropped first;
- what changed (`events`, if a log is given).
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from foreword.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, EventLog
from foreword.cache.hashing import NO_EXTRA_KEYS, BlockHash, ExtraKeys, hash_blocks, sha256
from foreword.cache.index import PrefixIndex
from foreword.cache.sequence import TokenSequence


class MissReason(enum.StrEnum):
    """Why the part of a prompt after the hit had to be computed."""

    NEVER_SEEN = "never_seen"
    EVICTED = "evicted"
    PARTIAL_BLOCK = "partial_block"
    """All full blocks were found; what is left does not fill a block."""
    SALT_DIFFERS = "salt_differs"
    ADAPTER_DIFFERS = "adapter_differs"
    MEDIA_DIFFERS = "media_differs"
    LOOKUP_SKIPPED = "lookup_skipped"
    IN_FLIGHT = "in_flight"
    """Another request is computing it just now."""


class EvictionCause(enum.StrEnum):
    """Why a block was forgotten."""

    REUSED = "reused"
    """Its memory was given to other tokens: the pool was too small."""
    REQUESTED = "requested"
    """Someone asked for it."""
    FAILED = "failed"
    """The step that was to fill it failed."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """When and why a key was forgotten."""

    step: int
    cause: EvictionCause
    pool_usage: float
    """Share of the blocks that were held by requests at that moment."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt left the closest cached one, and how both go on."""

    position: int
    ours: tuple[int, ...]
    theirs: tuple[int, ...]
    """Token ids; empty if nothing cached goes on from here."""


@dataclass(frozen=True, slots=True)
class LookupExplanation:
    """One lookup, told."""

    num_tokens: int
    num_hit_tokens: int
    reason: MissReason | None
    """Why the rest missed; None if only the last token is left, which is always computed."""
    eviction: Eviction | None = None
    """For `evicted`: of the first missing block."""
    divergence: Divergence | None = None


class CacheLedger:
    """Remembers what the index forgot. Costs nothing on a hit, and O(1) per stored or forgotten block.

    Keys of sequences without extra keys are not kept here while they are findable: the index has them.
    """

    def __init__(self, num_blocks: int, block_size: int, events: EventLog | None = None) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._events = events
        self._ghosts: OrderedDict[BlockHash, Eviction] = OrderedDict()
        self._variants: dict[BlockHash, dict[ExtraKeys, int]] = {}
        self._variant_of: dict[BlockHash, tuple[BlockHash, ExtraKeys]] = {}
        self.ghost_hit_tokens = 0
        """Tokens of missed blocks whose keys were still among the ghosts."""

    # ----------------------------------------------------------------- reports

    def stored(self, sequence: TokenSequence, new: Sequence[int]) -> None:
        """The sequence's full blocks with these numbers (ascending) became findable."""
        if not new:
            return
        keys = sequence.block_hashes()
        if self._ghosts:
            for number in new:
                self._ghosts.pop(keys[number], None)
        if sequence.extra_keys != NO_EXTRA_KEYS:
            plain = self._plain_keys(sequence)
            for number in new:
                variants = self._variants.setdefault(plain[number], {})
                variants[sequence.extra_keys] = variants.get(sequence.extra_keys, 0) + 1
                self._variant_of[keys[number]] = (plain[number], sequence.extra_keys)
        if self._events is not None:
            self._report_stored(self._events, sequence, keys, new)

    def removed(self, keys: Sequence[BlockHash], eviction: Eviction) -> None:
        """These keys ceased to be findable."""
        if not keys:
            return
        for key in keys:
            self._ghosts[key] = eviction
            if key in self._variant_of:
                self._forget_variant(key)
        while len(self._ghosts) > self._num_blocks:
            self._ghosts.popitem(last=False)
        if self._events is not None:
            self._events.append(BlockRemoved(tuple(keys)))

    def cleared(self) -> None:
        """Everything was forgotten on request."""
        self._ghosts.clear()
        self._variants.clear()
        self._variant_of.clear()
        self.ghost_hit_tokens = 0
        if self._events is not None:
            self._events.append(AllBlocksCleared())

    def missed(self, sequence: TokenSequence, num_hit_blocks: int) -> None:
        """An admitted request found `num_hit_blocks` blocks; count what more memory would have found."""
        if not self._ghosts or num_hit_blocks >= sequence.num_full_blocks:
            return
        for key in sequence.block_hashes()[num_hit_blocks:]:
            if key not in self._ghosts:
                break
            self.ghost_hit_tokens += self._block_size

    # ----------------------------------------------------------------- answers

    def reason(
        self, sequence: TokenSequence, num_hit_blocks: int, index: PrefixIndex
    ) -> tuple[MissReason, Eviction | None]:
        """Why the full block number `num_hit_blocks` was not found in `index`."""
        if num_hit_blocks >= sequence.num_full_blocks:
            return MissReason.PARTIAL_BLOCK, None
        eviction = self._ghosts.get(sequence.block_hashes()[num_hit_blocks])
        if eviction is not None:
            return MissReason.EVICTED, eviction
        for other in self._known_variants(sequence, num_hit_blocks, index):
            if other.salt != sequence.extra_keys.salt:
                return MissReason.SALT_DIFFERS, None
            if other.adapter != sequence.extra_keys.adapter:
                return MissReason.ADAPTER_DIFFERS, None
            return MissReason.MEDIA_DIFFERS, None
        return MissReason.NEVER_SEEN, None

    def _known_variants(self, sequence: TokenSequence, block: int, index: PrefixIndex) -> list[ExtraKeys]:
        """Other extra keys under which the same tokens are findable."""
        variants = list(self._variants.get(self._plain_keys(sequence)[block], ()))
        if sequence.extra_keys != NO_EXTRA_KEYS:
            plain = TokenSequence(sequence.request_id, sequence.token_ids, block_size=self._block_size)
            if len(index.match(plain).block_ids) > block:
                variants.append(NO_EXTRA_KEYS)
        return [variant for variant in variants if variant != sequence.extra_keys]

    # ------------------------------------------------------------------ inside

    def _report_stored(
        self, events: EventLog, sequence: TokenSequence, keys: Sequence[BlockHash], new: Sequence[int]
    ) -> None:
        """One event per run of consecutive new blocks."""
        size = self._block_size
        start = 0
        for at in range(1, len(new) + 1):
            if at < len(new) and new[at] == new[at - 1] + 1:
                continue
            begin, end = new[start], new[at - 1] + 1
            events.append(
                BlockStored(
                    block_hashes=tuple(keys[begin:end]),
                    parent_block_hash=keys[begin - 1] if begin else None,
                    token_ids=tuple(sequence.token_ids[begin * size : end * size].tolist()),
                    block_size=size,
                    adapter=sequence.extra_keys.adapter,
                )
            )
            start = at

    def _plain_keys(self, sequence: TokenSequence) -> list[BlockHash]:
        """Keys that the sequence would have without extra keys: equal tokens, equal plain keys."""
        if sequence.extra_keys == NO_EXTRA_KEYS:
            return sequence.block_hashes()
        whole = sequence.token_ids[: sequence.num_full_blocks * self._block_size]
        return hash_blocks(sha256, None, whole, self._block_size)

    def _forget_variant(self, key: BlockHash) -> None:
        plain, extra_keys = self._variant_of.pop(key)
        variants = self._variants[plain]
        variants[extra_keys] -= 1
        if not variants[extra_keys]:
            del variants[extra_keys]
        if not variants:
            del self._variants[plain]
