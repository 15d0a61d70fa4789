"""SlotIndex: finds cached prefixes, for an engine that allocates the slots of its memory itself.

For engines that already have an allocator and page tables, as SGLang and mini-sglang have (`BasePrefixCache`):

    found = index.match(token_ids)         the slots that hold a beginning of these tokens; changes nothing
    index.lock(found)                      these slots stay while they are locked
    ... the engine computes the other tokens, into slots that the engine owns ...
    kept = index.insert(token_ids, slots)  the cache owns these slots from now on, except duplicates of cached slots
    index.unlock(found)
    free = index.evict(count)              the engine owns these slots again

A slot always belongs either to the engine or to the cache. Only `evict` and `reset` give slots back to the engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from foreword.cache.block_ids import BlockIds
from foreword.cache.blocks.block_pool import BlockPool
from foreword.cache.eviction.policies import make_policy
from foreword.cache.eviction.policy import EvictionPolicy
from foreword.cache.index.radix import RadixIndex
from foreword.cache.keys.hashing import NO_EXTRA_KEYS, ExtraKeys
from foreword.cache.keys.sequence import TokenSequence
from foreword.errors import AllocationError, CacheBusyError, ConfigError


@dataclass(frozen=True, slots=True, eq=False)
class SlotMatch:
    """The cached beginning of a sequence. Without a lock it is valid until the next `evict` or `reset`."""

    slots: BlockIds
    """The slots that hold this beginning, in order."""
    num_tokens: int
    """The number of tokens in these slots: `len(slots) * block_size`."""
    _sequence: TokenSequence


class SlotIndex:
    """Records which of an engine's slots hold which prefixes, and which slots are evicted first.

    A slot is a number below `num_slots` and holds `block_size` tokens (a page in SGLang). At first the engine owns all
    slots. Slots that nobody locks are evicted in the order of `eviction_policy`, which is a name or a policy for
    `num_slots` blocks. Raises ConfigError for sizes below 1 and for an unknown policy.
    """

    def __init__(self, num_slots: int, *, block_size: int = 1, eviction_policy: str | EvictionPolicy = "lru") -> None:
        if num_slots < 1 or block_size < 1:
            raise ConfigError(f"num_slots={num_slots} and block_size={block_size} must both be at least 1")
        self.num_slots, self.block_size = num_slots, block_size
        self._index = RadixIndex(num_slots, block_size, keep_tails=False)
        policy = make_policy(eviction_policy, num_slots) if isinstance(eviction_policy, str) else eviction_policy
        # The pool counts the engine as the holder of its slots; a slot of the cache is free unless it is locked.
        self._pool = BlockPool(num_slots, on_reuse=self._index.remove, policy=policy)
        self._pool.get_new_blocks(num_slots)
        self._is_owned: npt.NDArray[np.bool_] = np.ones(num_slots, np.bool_)
        """Whether the engine owns each slot."""
        self._locked: set[SlotMatch] = set()

    @property
    def num_evictable(self) -> int:
        """The number of the cache's slots that nobody locks."""
        return self._pool.get_num_free_blocks()

    @property
    def num_locked(self) -> int:
        """The number of the cache's slots that somebody locks."""
        return len(self._index) - self.num_evictable

    def match(self, token_ids: npt.ArrayLike, *, extra_keys: ExtraKeys = NO_EXTRA_KEYS) -> SlotMatch:
        """The longest cached beginning of these tokens, in whole slots. Changes nothing.

        Leave out a prompt's last token: it is computed for its logits. Raises InvalidRequestError for token ids below 0
        or beyond int32, and for extra keys that do not fit.
        """
        return self._match(TokenSequence("", token_ids, block_size=self.block_size, extra_keys=extra_keys))

    def lock(self, match: SlotMatch) -> None:
        """Keep the slots of a match until `unlock`, and count a use of them.

        Raises AllocationError, and changes nothing, if the match is locked already or one of its slots was evicted.
        """
        if match in self._locked:
            raise AllocationError("this match is locked already; match again for another lock")
        current = self._match(match._sequence)
        if not np.array_equal(current.slots[: len(match.slots)], match.slots):
            raise AllocationError(
                f"only {current.num_tokens} of the {match.num_tokens} tokens of this match are still in its slots; "
                "match again after each evict"
            )
        self._pool.touch(match.slots)
        self._locked.add(match)

    def unlock(self, match: SlotMatch) -> None:
        """Let a match's slots be evicted again, the last first. Raises AllocationError if the match is not locked."""
        if match not in self._locked:
            raise AllocationError("this match is not locked; unlock each locked match once")
        self._locked.remove(match)
        self._pool.free_blocks(match.slots[::-1].copy())

    def insert(
        self, token_ids: npt.ArrayLike, slots: npt.ArrayLike, *, extra_keys: ExtraKeys = NO_EXTRA_KEYS
    ) -> SlotMatch:
        """Give the cache the slots of computed tokens; returns the match of these tokens, which is not locked.

        `slots` has one entry for each whole block of `token_ids`. If the cache already has a slot for the same tokens,
        it keeps that slot: `slots[slots != match.slots]` still belong to the engine, which may free them once nobody
        reads them. The other slots now belong to the cache. Raises AllocationError, and changes nothing, for slots that
        the engine does not own, and for a wrong number of slots.
        """
        sequence = TokenSequence("", token_ids, block_size=self.block_size, extra_keys=extra_keys)
        ids = np.asarray(slots)
        if ids.dtype.kind not in "iu" and ids.size:
            raise AllocationError(f"slots are of the type {ids.dtype}; give whole numbers")
        ids = ids.astype(np.int64)
        if ids.shape != (sequence.num_full_blocks,):
            raise AllocationError(
                f"slots of shape {ids.shape} do not fit {len(sequence)} tokens; give {sequence.num_full_blocks}, one "
                f"for each {self.block_size} tokens"
            )
        cached = self._index.match(sequence).block_ids
        num_cached = len(cached)
        offered = np.concatenate((ids[:num_cached][ids[:num_cached] != cached], ids[num_cached:]))
        owned = offered[(offered >= 0) & (offered < self.num_slots)]
        if len(owned) < len(offered) or not self._is_owned[owned].all() or len(np.unique(offered)) < len(offered):
            raise AllocationError(
                f"slots {offered} must be distinct, below {self.num_slots}, and not the cache's; give each of them once"
            )
        new = ids[num_cached:].astype(np.int32)
        if len(new):
            self._index.insert(sequence, num_cached, new)
            self._is_owned[new] = False
            self._pool.note_cached(new, np.arange(num_cached, len(ids), dtype=np.int32))
            if self._pool.wants_keys:
                self._pool.note_keys(new, sequence.block_hashes()[num_cached:])
            self._pool.free_blocks(new[::-1].copy())
        return self._match(sequence)

    def evict(self, num_slots: int) -> BlockIds:
        """Forget `num_slots` slots or more, in the order of eviction, and give them back to the engine.

        Slots that can be found only through evicted slots are evicted too. Raises AllocationError, and changes nothing,
        if fewer than `num_slots` can be evicted.
        """
        if not 0 <= num_slots <= self.num_evictable:
            raise AllocationError(
                f"{num_slots} slots cannot be evicted: {self.num_evictable} are in the cache and not locked; unlock "
                "some, or ask num_evictable first"
            )
        evicted = [self._pool.get_new_blocks(num_slots)]
        evicted.append(self._pool.get_new_blocks(self._pool.num_empty))
        slots = np.concatenate(evicted)
        self._is_owned[slots] = True
        return slots

    def reset(self) -> BlockIds:
        """Forget everything, and give all slots back. Raises CacheBusyError while slots are locked."""
        if self._locked:
            raise CacheBusyError(f"the cache cannot be reset while {len(self._locked)} matches are locked; unlock them")
        return self.evict(self.num_evictable)

    def check_integrity(self) -> None:
        """Raise AssertionError if counts, index and locks contradict each other."""
        self._index.check_integrity()
        assert np.array_equal(np.sort(self._index.block_ids()), np.flatnonzero(~self._is_owned)), (
            "the indexed slots are not those that the cache owns"
        )
        holders = self._is_owned.astype(np.int32)
        for match in self._locked:
            self._index.check_table(match._sequence, match.slots)
            holders[match.slots] += 1
        self._pool.check_integrity(holders)

    def _match(self, sequence: TokenSequence) -> SlotMatch:
        slots = self._index.match(sequence).block_ids
        return SlotMatch(slots, len(slots) * self.block_size, sequence)
