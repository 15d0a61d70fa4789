"""PinnableCache: pins on the cached prefixes of sequences.

Knows sequences, and which of their blocks are cached; knows nothing of requests.
"""

from __future__ import annotations

import numpy as np

from foreword.cache.block_ids import NULL_BLOCK, BlockIds, Int64Array
from foreword.cache.eviction.pins import PinnedPolicy
from foreword.cache.keys.sequence import TokenSequence
from foreword.cache.view import CacheView
from foreword.errors import ConfigError


class PinnableCache(CacheView):
    """A cache that can pin the blocks of prefixes, if its eviction policy is a PinnedPolicy."""

    def pin_prefix(self, sequence: TokenSequence, until: float, now: float) -> int:
        """Evict the cached blocks of `sequence` last until that time; returns the number of tokens in them.

        The budget may cover fewer tokens than are cached: the head of the prefix is pinned first. A tail is pinned too,
        and then kept like a full block. Pins are soft: when nothing else is free, they break. Raises ConfigError
        without a PinnedPolicy.
        """
        block_ids, ends = self._found(sequence)
        pins, is_tail = self._checked_pins(), self._pool.is_tail(block_ids)
        pinned = pins.pin(block_ids[~is_tail], until, now)
        if is_tail.any() and until > now and pins.num_pinned < pins.max_pinned:
            tail = block_ids[is_tail]
            self._pool.keep_as_block(int(tail[0]), int(ends[is_tail][0]) // self.block_size)
            pinned = np.concatenate((pinned, pins.pin(tail, until, now)))
        missing = ends[~np.isin(block_ids, pinned)]
        hit_end = int(ends.max(initial=0))
        return hit_end if not len(missing) else int(ends[ends < missing.min()].max(initial=0))

    def unpin_prefix(self, sequence: TokenSequence) -> None:
        """End the pins of the cached blocks of `sequence`. Raises ConfigError as `pin_prefix` does."""
        self._checked_pins().unpin(self._found(sequence)[0])

    def expire_pins(self, now: float) -> None:
        """End pins that have expired; called once a step."""
        if self._pins is not None:
            self._pins.expire(now)

    def _found(self, sequence: TokenSequence) -> tuple[BlockIds, Int64Array]:
        """Cached blocks of a sequence in all groups, in the order of the ends of their tokens, and these ends."""
        tables = self._coordinator.find_longest_cache_hit(sequence).tables
        sizes = self._coordinator.block_sizes
        ends = [np.arange(1, len(table) + 1) * size for table, size in zip(tables, sizes, strict=True)]
        all_ids, all_ends = np.concatenate(tables), np.concatenate(ends)
        order = np.argsort(all_ends, kind="stable")
        order = order[all_ids[order] != NULL_BLOCK]
        block_ids, ends_of_blocks = all_ids[order], all_ends[order]
        partial = self._coordinator.partial_block(sequence)
        if partial is not None:
            block_ids = np.append(block_ids, np.int32(partial.block_id))
            ends_of_blocks = np.append(ends_of_blocks, len(tables[0]) * self.block_size + partial.num_tokens)
        return block_ids, ends_of_blocks

    def _checked_pins(self) -> PinnedPolicy:
        if self._pins is None:
            raise ConfigError("this cache has no pins; choose a max_pinned_share above 0 (a PinnedPolicy)")
        return self._pins
