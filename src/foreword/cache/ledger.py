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
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foreword.cache.block_pool import BlockIds
from foreword.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, EventLog
from foreword.cache.hashing import NO_EXTRA_KEYS, BlockHash, ExtraKeys, hash_blocks, sha256
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
    """Keeps track of keys. Costs nothing on a hit, and O(1) per stored or forgotten block."""

    def __init__(self, num_blocks: int, block_size: int, events: EventLog | None = None) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._events = events
        self._keys: npt.NDArray[np.object_] = np.full(num_blocks, None, object)
        """Key of each block that is indexed, None for others."""
        self._num_copies: dict[BlockHash, int] = {}
        self._ghosts: OrderedDict[BlockHash, Eviction] = OrderedDict()
        self._variants: dict[BlockHash, dict[ExtraKeys, int]] = {}
        self._variant_of: dict[BlockHash, tuple[BlockHash, ExtraKeys]] = {}
        self.ghost_hit_tokens = 0
        """Tokens of missed blocks whose keys were still among the ghosts."""

    # ----------------------------------------------------------------- reports

    def stored(self, sequence: TokenSequence, first: int, block_ids: BlockIds) -> None:
        """The sequence's full blocks number `first` and on were indexed as `block_ids`."""
        keys = sequence.block_hashes()
        own = keys[first : first + len(block_ids)]
        self._keys[block_ids] = own
        copies = self._num_copies
        new: list[int] = []
        for number, key in enumerate(own, first):
            if key in copies:
                copies[key] += 1
            else:
                copies[key] = 1
                new.append(number)
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

    def removed(self, block_ids: BlockIds, eviction: Eviction) -> None:
        """These blocks were forgotten; those that were not indexed are ignored."""
        keys: list[BlockHash] = []
        copies = self._num_copies
        for key in self._keys[block_ids].tolist():
            if key is None:
                continue
            copies[key] -= 1
            if not copies[key]:
                del copies[key]
                keys.append(key)
        self._keys[block_ids] = None
        if not keys:
            return
        for key in keys:
            self._ghosts[key] = eviction
            self._ghosts.move_to_end(key)
            if key in self._variant_of:
                self._forget_variant(key)
        while len(self._ghosts) > self._num_blocks:
            self._ghosts.popitem(last=False)
        if self._events is not None:
            self._events.append(BlockRemoved(tuple(keys)))

    def cleared(self) -> None:
        """Everything was forgotten on request."""
        self._keys.fill(None)
        self._num_copies.clear()
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

    def reason(self, sequence: TokenSequence, num_hit_blocks: int) -> tuple[MissReason, Eviction | None]:
        """Why the full block number `num_hit_blocks` was not found."""
        if num_hit_blocks >= sequence.num_full_blocks:
            return MissReason.PARTIAL_BLOCK, None
        eviction = self._ghosts.get(sequence.block_hashes()[num_hit_blocks])
        if eviction is not None:
            return MissReason.EVICTED, eviction
        for other in self._known_variants(sequence, num_hit_blocks):
            if other.salt != sequence.extra_keys.salt:
                return MissReason.SALT_DIFFERS, None
            if other.adapter != sequence.extra_keys.adapter:
                return MissReason.ADAPTER_DIFFERS, None
            return MissReason.MEDIA_DIFFERS, None
        return MissReason.NEVER_SEEN, None

    def check_integrity(self, indexed: set[int]) -> None:
        """Raise AssertionError unless exactly the `indexed` blocks are recorded."""
        recorded = {block_id: key for block_id, key in enumerate(self._keys.tolist()) if key is not None}
        assert set(recorded) == indexed, "ledger and index know different blocks"
        assert Counter(recorded.values()) == self._num_copies, "the ledger miscounts a key"
        assert not set(self._ghosts) & set(self._num_copies), "a findable key is among the ghosts"
        assert set(self._variant_of) <= set(self._num_copies), "a forgotten key still has a variant"

    def _known_variants(self, sequence: TokenSequence, block: int) -> list[ExtraKeys]:
        """Other extra keys under which the same tokens are findable."""
        plain = self._plain_keys(sequence)[block]
        variants = list(self._variants.get(plain, ()))
        if plain in self._num_copies:
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
