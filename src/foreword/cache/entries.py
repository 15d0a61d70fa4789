"""Cache entries: prefixes that their owners asked to keep for a time.

An entry is soft: its blocks, as far as the budget covers them, are evicted after all other blocks. They are evicted
when running requests need every block.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from foreword.cache.block_ids import NULL_BLOCK, BlockIds, Int64Array
from foreword.cache.eviction.pins import PinnedPolicy
from foreword.cache.eviction.policy import EvictionPolicy
from foreword.cache.groups.coordinator import KVCacheCoordinator
from foreword.cache.keys.hashing import BlockHash
from foreword.cache.keys.sequence import TokenSequence
from foreword.errors import ConfigError

PIN = "pin"


@dataclass(frozen=True, slots=True)
class EntryWish:
    """How an owner wants a prefix to be kept: how long, on which budget, and under which name."""

    until: float
    owner: str | None = None
    """The owner whose budget the entry uses. None: the entry uses only the budget that all owners share."""
    source: str = PIN
    """What asked for the entry, such as "breakpoint" or "resource". Entries of different sources are independent."""
    name: str | None = None
    """The entry's name. None: wishes with the same prefix, owner and source share one entry."""
    refresh_s: float | None = None
    """Seconds for which the entry stays after a hit of its last whole block; None: no request prolongs it."""


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """An entry, as it is now."""

    name: str
    owner: str | None
    source: str
    num_tokens: int
    """The number of tokens in the prefix that the owner asked to keep."""
    num_whole_tokens: int
    """The number of tokens in whole blocks, among the `num_tokens` tokens."""
    num_kept_tokens: int
    """The number of leading tokens that are kept; it is lower if the budget was too small or blocks were evicted."""
    until: float
    refresh_s: float | None = None
    """Seconds for which the entry stays after each use; None: a use does not prolong it."""
    last_key: BlockHash | None = None
    """The key of the entry's last whole block; None if the entry has no whole block."""
    lacks_budget: bool = False
    """True if a budget, or the allowed number of entries, is used up, so that no block is kept."""

    @property
    def is_whole(self) -> bool:
        """Whether all whole blocks of the entry are kept; a partial block at its end does not count."""
        return self.num_kept_tokens >= self.num_whole_tokens


@dataclass(slots=True)
class _Entry:
    owner: str | None
    source: str
    refresh_s: float | None
    sequence: TokenSequence
    ends: dict[int, int]
    """Block id -> the position after its last token, for each block of the entry."""


MAX_ENTRIES, MAX_ENTRIES_BY_OWNER = 16_384, 4_096
"""The most entries in total, and the most of one owner. Budgets do not limit them: entries may keep the same blocks."""


class EntryKeeper:
    """The part of KVCacheManager that keeps prefixes, if its eviction policy is a PinnedPolicy."""

    def __init__(self, coordinator: KVCacheCoordinator, policy: EvictionPolicy, block_size: int) -> None:
        self.block_size = block_size
        """The number of tokens in a block of a `TokenSequence`."""
        self._coordinator, self._pool = coordinator, coordinator.pool
        self._pins = policy if isinstance(policy, PinnedPolicy) else None
        self._policy = policy.inner if isinstance(policy, PinnedPolicy) else policy
        """The policy that orders the blocks without pins."""
        self._entries: dict[str, _Entry] = {}

    @property
    def keeps_prefixes(self) -> bool:
        return self._pins is not None

    @property
    def num_broken_pins(self) -> int:
        """The number of entries' blocks that were evicted early, because no other block was free."""
        return 0 if self._pins is None else self._pins.num_broken

    def keep_prefix(self, sequence: TokenSequence, wish: EntryWish, now: float) -> CacheEntry:
        """Make an entry of a sequence's cached blocks, or add the blocks to the entry that the wish names.

        A wish never shortens the time of an entry. Of several wishes for one entry, the longest `refresh_s` counts. If
        the budget covers fewer tokens than are cached, the head of the prefix is kept first. A tail is kept too; the
        policy treats a kept tail like a full block. Raises ConfigError without a PinnedPolicy.
        """
        pins = self._checked_pins()
        self.expire_pins(now)
        name = wish.name if wish.name is not None else entry_name(sequence, wish.owner, wish.source)
        earlier = self._entries.get(name)
        nothing = CacheEntry(name, wish.owner, wish.source, len(sequence), self._whole(sequence), 0, now)
        if earlier is None and not self._takes_another(wish.owner):
            return replace(nothing, lacks_budget=True)
        block_ids, ends = self._cached_blocks(sequence)
        is_partial = ends % self.block_size > 0
        whole, partial = block_ids[~is_partial], block_ids[is_partial]

        def pin(chosen: BlockIds) -> BlockIds:
            return pins.pin(name, chosen, wish.until, now, owner=wish.owner, refresh_s=wish.refresh_s)

        pinned = pin(whole)
        if len(partial) and len(pinned) == len(whole) and wish.until > now:
            if self._pool.is_tail(partial)[0] and pins.has_room(wish.owner):
                self._pool.keep_as_block(int(partial[0]), len(whole))
            pinned = pin(np.concatenate((partial, whole)))  # a longer hit does not use the partial block
        self._pool.take_back(pinned)
        if not len(pinned) and earlier is None:
            pins.unpin(name)
            return replace(nothing, lacks_budget=bool(len(block_ids)))
        ends_of_blocks = dict(zip(block_ids.tolist(), ends.tolist(), strict=True))
        if earlier is not None:  # lost blocks count as missing, until other blocks hold their tokens
            present_ends, has_now = set(ends_of_blocks.values()), set(pins.blocks_of(name).tolist())
            old = {block: end for block, end in earlier.ends.items() if block in has_now or end not in present_ends}
            ends_of_blocks = {**old, **ends_of_blocks}
        refresh_s = wish.refresh_s
        if earlier is not None and earlier.refresh_s is not None:
            refresh_s = max(earlier.refresh_s, refresh_s or 0.0)
        self._entries[name] = _Entry(wish.owner, wish.source, refresh_s, sequence, ends_of_blocks)
        return self._entry(name, self._entries[name])

    def _takes_another(self, owner: str | None) -> bool:
        if len(self._entries) >= MAX_ENTRIES:
            return False
        num_entries = sum(entry.owner == owner for entry in self._entries.values()) if owner is not None else 0
        return num_entries < MAX_ENTRIES_BY_OWNER

    def set_entry_end(self, name: str, until: float, now: float) -> None:
        """Set the time at which an entry ends, earlier or later than before. Does nothing if no entry has this name."""
        if self._pins is not None:
            self._pins.set_end(name, until, now)
        if until <= now:
            self._entries.pop(name, None)

    def drop_entry(self, name: str) -> None:
        """End an entry now, if it exists. Blocks that another entry also keeps are not released."""
        if self._pins is not None:
            self._pins.unpin(name)
        self._entries.pop(name, None)

    def entry(self, name: str) -> CacheEntry | None:
        """An entry by its name; None if no entry has this name, or if its time is over."""
        entry = self._entries.get(name)
        return None if entry is None else self._entry(name, entry)

    def entries(self, *, count_kept: bool = True) -> list[CacheEntry]:
        """All entries, the oldest first, including those that lost their blocks.

        Counting the kept tokens reads the ids of all kept blocks. Without `count_kept`, `num_kept_tokens` is 0.
        """
        return [self._entry(name, entry, count_kept=count_kept) for name, entry in self._entries.items()]

    def _drop_empty_entries(self) -> None:
        """End the entries that have lost all their blocks. Called after a reset."""
        if self._pins is not None:
            for name in [name for name in self._entries if not len(self._pins.blocks_of(name))]:
                self.drop_entry(name)

    def _entry(self, name: str, entry: _Entry, *, count_kept: bool = True) -> CacheEntry:
        pins = self._checked_pins()
        num_kept = _num_kept(entry, set(pins.blocks_of(name).tolist())) if count_kept else 0
        until = pins.end_of(name)
        assert until is not None
        keys = entry.sequence.block_hashes()
        return CacheEntry(
            name,
            entry.owner,
            entry.source,
            len(entry.sequence),
            self._whole(entry.sequence),
            num_kept,
            until,
            entry.refresh_s,
            keys[-1] if keys else None,
        )

    def _whole(self, sequence: TokenSequence) -> int:
        return len(sequence) // self.block_size * self.block_size

    def expire_pins(self, now: float) -> None:
        """End entries whose time is over; called once a step."""
        if self._pins is not None:
            for name in self._pins.expire(now):
                self._entries.pop(str(name), None)

    def _cached_blocks(self, sequence: TokenSequence) -> tuple[BlockIds, Int64Array]:
        """A sequence's cached blocks in all groups, ordered by the positions where they end, and these positions.

        A hit of a pin's last block refreshes the pin. So among blocks that end at the same position, blocks of full
        attention come last: every longer hit uses them.
        """
        tables, managers = self._coordinator.find_longest_cache_hit(sequence).tables, self._coordinator.managers
        in_order = sorted(zip(managers, tables, strict=True), key=lambda group: group[0].hits_every_prefix)
        ends = [np.arange(1, len(table) + 1) * manager.block_size for manager, table in in_order]
        all_ids, all_ends = np.concatenate([table for _, table in in_order]), np.concatenate(ends)
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


def _num_kept(entry: _Entry, pinned: set[int]) -> int:
    missing = min((end for block_id, end in entry.ends.items() if block_id not in pinned), default=np.inf)
    return max((end for block_id, end in entry.ends.items() if block_id in pinned and end < missing), default=0)


def entry_name(sequence: TokenSequence, owner: str | None = None, source: str = PIN) -> str:
    """The name of an owner's entry for a prefix: equal for equal tokens and extra keys."""
    digest = hashlib.blake2b(sequence.token_ids.tobytes(), digest_size=16)
    digest.update(repr((sequence.extra_keys, owner, source)).encode())
    return digest.hexdigest()
