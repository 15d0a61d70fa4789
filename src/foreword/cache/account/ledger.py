"""CacheLedger: what the cache holds and has held, by key, so that it can say why it missed.

Knows keys, block ids and extra keys; decides nothing. The coordinator reports what it indexes and
forgets; the ledger answers

- why a block was not found (`reason`),
- what twice the memory would have found (`ghost_hits`): forgotten keys live on as ghosts, as many of them as
  the pool has blocks, so that under the `lru` policy pool and ghosts together are a pool of twice the size,
- how often each block was reused (`num_reuses`) and how many were forgotten, by cause (`evictions`),
- what changed, if it is given an `EventLog`.

It costs a list's append on a hit, and O(1) for each stored, forgotten or missed block.
"""

from __future__ import annotations

import enum
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

import numpy as np
import numpy.typing as npt

from foreword.cache.account.events import AllBlocksCleared, BlockRemoved, BlockStored, EventLog
from foreword.cache.account.tails import TailAccount
from foreword.cache.blocks.block_pool import BlockIds
from foreword.cache.keys.hashing import NO_EXTRA_KEYS, BlockHash, ExtraKeys
from foreword.cache.keys.sequence import TokenSequence

MAX_UNCOUNTED_HITS = 64
"""Hits that may wait to be counted: most are counted when a block is forgotten, or when somebody asks."""


class MissReason(enum.StrEnum):
    """Why the part of a prompt after its hit had to be computed."""

    NEVER_SEEN = "never_seen"
    EVICTED = "evicted"
    PARTIAL_BLOCK = "partial_block"
    """What is left does not fill a block, and this index keeps full blocks only."""
    SALT_DIFFERS = "salt_differs"
    """The tokens are cached, but under another salt."""
    ADAPTER_DIFFERS = "adapter_differs"
    MEDIA_DIFFERS = "media_differs"
    """The tokens are cached, but their placeholders stood for other images, sounds or embeddings."""
    STATE_NOT_SAVED = "state_not_saved"
    """Keys and values are cached further, but no recurrent state was kept there."""
    LOOKUP_SKIPPED = "lookup_skipped"
    """The request asked for its whole prompt to be computed."""
    IN_FLIGHT = "in_flight"
    """Another request is computing it just now."""


class EvictionCause(enum.StrEnum):
    """Why a block was forgotten."""

    REUSED = "reused"
    """Its memory was given to other tokens: the pool was too small."""
    REQUESTED = "requested"
    """Somebody asked for it (`evict_blocks`)."""
    FAILED = "failed"
    """The step that was to fill it failed."""
    DUPLICATE = "duplicate"
    """Another block holds the same."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """When a key was forgotten, and under which pressure."""

    cause: EvictionCause
    time: float
    """By the ledger's clock, seconds."""
    step: int
    """Steps begun by then."""
    pool_usage: float
    """Share of the blocks that requests held at that moment, 0.0 to 1.0."""


class GroupLedger:
    """The account of one group, whose blocks each hold `width` blocks of a sequence.

    A group's block is keyed by the sequence's own block in which it ends.
    """

    def __init__(self, num_blocks: int, group_id: int, width: int, events: EventLog | None) -> None:
        self._group_id = group_id
        self._width = width
        self._events = events
        self._max_ghosts = num_blocks
        self._keys: npt.NDArray[np.object_] = np.full(num_blocks, None, object)
        """Key of each of the group's blocks that is findable, None for others."""
        self._num_copies: dict[BlockHash, int] = {}
        self._ghosts: OrderedDict[BlockHash, Eviction] = OrderedDict()
        self._variants: dict[BlockHash, Counter[ExtraKeys]] = {}
        """By what a key would be without extra keys: the extra keys under which it is findable."""
        self._variant_of: dict[BlockHash, tuple[BlockHash, ExtraKeys]] = {}
        self._num_salted: Counter[str | None] = Counter()
        """Findable keys by the salt they are under."""

    def stored(self, sequence: TokenSequence, numbers: range, block_ids: BlockIds) -> None:
        """The group's blocks with these numbers of the sequence were indexed as `block_ids`."""
        keys = self._of_numbers(sequence.block_hashes(), numbers)
        self._keys[block_ids] = keys
        copies = self._num_copies
        new: Sequence[int] = range(len(keys))
        once = dict.fromkeys(keys, 1)
        if len(once) == len(keys) and copies.keys().isdisjoint(keys):
            copies.update(once)
        else:  # duplicates; or keys of a weak hash function that collide
            new = []
            for at, key in enumerate(keys):
                if key not in copies:
                    new.append(at)
                copies[key] = copies.get(key, 0) + 1
        if self._ghosts:
            for at in new:
                self._ghosts.pop(keys[at], None)
            self.drop_oldest_ghosts()
        if sequence.extra_keys != NO_EXTRA_KEYS:
            plain = self._of_numbers(sequence.plain_block_hashes(), numbers)
            salted = sequence.extra_keys.salt
            for at in new:
                if keys[at] == plain[at]:  # the salt begins further on
                    continue
                self._variants.setdefault(plain[at], Counter())[sequence.extra_keys] += 1
                self._variant_of[keys[at]] = (plain[at], sequence.extra_keys)
                self._num_salted[salted] += 1
        if self._events is not None:
            self._report_stored(self._events, sequence, [numbers[at] for at in new])

    def removed(self, block_ids: BlockIds, eviction: Eviction) -> int:
        """These blocks were forgotten; those that are not in the account are ignored. Returns how many were."""
        gone: list[BlockHash] = []
        copies = self._num_copies
        num_removed = 0
        for key in self._keys[block_ids].tolist():
            if key is None:
                continue
            num_removed += 1
            copies[key] -= 1
            if not copies[key]:
                del copies[key]
                gone.append(key)
        self._keys[block_ids] = None
        for key in gone:
            self._ghosts[key] = eviction
            if key in self._variant_of:
                self._forget_variant(key)
        if gone and self._events is not None:
            self._events.append(BlockRemoved(tuple(gone), group_idx=self._group_id))
        return num_removed

    def drop_oldest_ghosts(self) -> None:
        """Keep as many as the pool has blocks.

        Not before a request that evicted some has taken back its own: in a pool of twice the size it would
        have evicted only for what is new.
        """
        while len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)

    def cleared(self) -> None:
        """Everything was forgotten on request; that leaves no ghosts."""
        self._keys.fill(None)
        for table in (self._num_copies, self._ghosts, self._variants, self._variant_of, self._num_salted):
            table.clear()

    def reason(self, sequence: TokenSequence, number: int) -> tuple[MissReason, Eviction | None] | None:
        """Why the sequence's block with this number is not found, and its eviction; None if it is findable."""
        if (number + 1) * self._width > sequence.num_full_blocks:
            return MissReason.PARTIAL_BLOCK, None
        numbers = range(number, number + 1)
        (key,) = self._of_numbers(sequence.block_hashes(), numbers)
        if key in self._num_copies:
            return None
        if key in self._ghosts:
            return MissReason.EVICTED, self._ghosts[key]
        (plain,) = self._of_numbers(sequence.plain_block_hashes(), numbers)
        return self._difference(plain, sequence.extra_keys), None

    def _difference(self, plain: BlockHash, own: ExtraKeys) -> MissReason:
        """In what a prompt differs from those with the same tokens that are findable, if there are any."""
        others = list(self._variants.get(plain, ()))
        if plain in self._num_copies:
            others.append(NO_EXTRA_KEYS)
        if not others:
            return MissReason.NEVER_SEEN
        others = [other for other in others if other.salt == own.salt]
        if not others:
            return MissReason.SALT_DIFFERS
        if all(other.adapter != own.adapter for other in others):
            return MissReason.ADAPTER_DIFFERS
        return MissReason.MEDIA_DIFFERS

    def num_ghost_hits(self, sequence: TokenSequence, first: int) -> int:
        """How many of the sequence's blocks, from number `first` on without a gap, twice the memory would hold."""
        if not self._ghosts:
            return 0
        numbers = range(first, sequence.num_full_blocks // self._width)
        ghosts = map(self._ghosts.get, self._of_numbers(sequence.block_hashes(), numbers))
        return sum(1 for _ in takewhile(lambda ghost: ghost and ghost.cause is EvictionCause.REUSED, ghosts))

    def num_under_salt(self, prefix: str) -> int:
        """Findable keys under salts that begin so."""
        return sum(count for salt, count in self._num_salted.items() if salt is not None and salt.startswith(prefix))

    def under_salt(self, prefix: str, block_ids: BlockIds) -> npt.NDArray[np.bool_]:
        """Which of these blocks are findable, and only under a salt that begins so."""
        variants = map(self._variant_of.get, self._keys[block_ids].tolist())
        return np.array([v is not None and (v[1].salt or "").startswith(prefix) for v in variants], np.bool_)

    def findable_block_ids(self) -> BlockIds:
        """The group's blocks in this account, in ascending order."""
        return np.array([block_id for block_id, key in enumerate(self._keys.tolist()) if key is not None], np.int32)

    def check_integrity(self) -> None:
        """Raise AssertionError if the account contradicts itself."""
        recorded = Counter(key for key in self._keys.tolist() if key is not None)
        assert recorded == self._num_copies, "the ledger miscounts a key"
        assert not self._ghosts.keys() & self._num_copies.keys(), "a findable key is among the ghosts"
        assert len(self._ghosts) <= 2 * self._max_ghosts, "ghosts are not dropped"
        assert self._variant_of.keys() <= self._num_copies.keys(), "a forgotten key still has a variant"
        counted: dict[BlockHash, Counter[ExtraKeys]] = {}
        for plain, extra_keys in self._variant_of.values():
            counted.setdefault(plain, Counter())[extra_keys] += 1
        assert counted == self._variants, "the ledger miscounts variants"
        salted = Counter(extra_keys.salt for _, extra_keys in self._variant_of.values())
        assert salted == self._num_salted, "the ledger miscounts a salt's keys"

    def _of_numbers(self, hashes: Sequence[BlockHash], numbers: range) -> Sequence[BlockHash]:
        """Keys of the group's blocks with these numbers."""
        width = self._width
        return hashes[(numbers.start + 1) * width - 1 : numbers.stop * width : width]

    def _forget_variant(self, key: BlockHash) -> None:
        plain, extra_keys = self._variant_of.pop(key)
        self._num_salted[extra_keys.salt] -= 1
        if not self._num_salted[extra_keys.salt]:
            del self._num_salted[extra_keys.salt]
        variants = self._variants[plain]
        variants[extra_keys] -= 1
        if not variants[extra_keys]:
            del variants[extra_keys]
        if not variants:
            del self._variants[plain]

    def _report_stored(self, events: EventLog, sequence: TokenSequence, new: Sequence[int]) -> None:
        """One event for each run of consecutive blocks."""
        hashes, width = sequence.block_hashes(), self._width
        size = width * sequence.block_size
        starts = [at for at, number in enumerate(new) if not at or number != new[at - 1] + 1]
        for start, end in pairwise([*starts, len(new)]):
            first, last = new[start], new[end - 1] + 1
            extra = sequence.extra_keys.of_blocks(first * size, size, last - first)
            events.append(
                BlockStored(
                    block_hashes=tuple(self._of_numbers(hashes, range(first, last))),
                    parent_block_hash=hashes[first * width - 1] if first else None,
                    token_ids=tuple(sequence.token_ids[first * size : last * size].tolist()),
                    block_size=size,
                    lora_name=sequence.extra_keys.adapter,
                    extra_keys=tuple(extra) if any(extra) else None,
                    group_idx=self._group_id,
                )
            )


class CacheLedger:
    """Keeps account of one pool of `num_blocks` blocks, group by group.

    `clock` dates evictions, in seconds.
    """

    def __init__(
        self, num_blocks: int, *, events: EventLog | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.events = events
        self.clock = clock
        self.groups: list[GroupLedger] = []
        self._num_reuses: npt.NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self._hits: list[BlockIds] = []
        """Hits that are not counted in `_num_reuses` yet."""
        self.evictions: Counter[EvictionCause] = Counter()
        """Findable blocks that were forgotten since the start."""
        self.tails: TailAccount[Eviction] = TailAccount(num_blocks)
        """Partly filled blocks; no event tells of them, and `evictions` does not count them."""
        self._num_blocks = num_blocks
        self._num_steps = 0

    def open_group(self, width: int = 1) -> GroupLedger:
        """The account of the next group."""
        self.groups.append(GroupLedger(self._num_blocks, len(self.groups), width, self.events))
        return self.groups[-1]

    def begin_step(self) -> None:
        """A step begins; evictions are dated by it."""
        self._num_steps += 1
        for group in self.groups:
            group.drop_oldest_ghosts()

    def removed(self, block_ids: BlockIds, cause: EvictionCause, pool_usage: float) -> None:
        """These blocks were forgotten; those that were not indexed are ignored."""
        eviction = Eviction(cause, self.clock(), self._num_steps, pool_usage)
        for group in self.groups:
            self.evictions[cause] += group.removed(block_ids, eviction)
        self.tails.removed(block_ids, None if cause is EvictionCause.DUPLICATE else eviction)
        self._count_hits()
        self._num_reuses[block_ids] = 0

    def note_hit(self, block_ids: BlockIds) -> None:
        """A request took these (distinct) blocks from the cache. The array is kept, not copied."""
        self._hits.append(block_ids)
        if len(self._hits) > MAX_UNCOUNTED_HITS:
            self._count_hits()

    def num_reuses(self) -> npt.NDArray[np.int64]:
        """How often each block was taken from the cache since it holds what it holds, [num_blocks] (a copy)."""
        self._count_hits()
        return self._num_reuses.copy()

    def _count_hits(self) -> None:
        for block_ids in self._hits:
            self._num_reuses[block_ids] += 1
        self._hits.clear()

    def num_under_salt(self, prefix: str) -> int:
        """Findable keys under salts that begin so: their blocks and tails, duplicates not counted."""
        return sum(group.num_under_salt(prefix) for group in self.groups) + self.tails.num_under_salt(prefix)

    def blocks_under_salt(self, prefix: str, block_ids: BlockIds) -> BlockIds:
        """Those of these blocks, in their order, that are findable only under a salt that begins so."""
        found = [group.under_salt(prefix, block_ids) for group in self.groups]
        return block_ids[np.logical_or.reduce([*found, self.tails.under_salt(prefix, block_ids)])]

    def cleared(self) -> None:
        """Everything was forgotten on request; that leaves no ghosts."""
        for group in self.groups:
            group.cleared()
        self.tails.cleared()
        self._hits.clear()
        self._num_reuses.fill(0)
        if self.events is not None:
            self.events.append(AllBlocksCleared())

    def check_integrity(self, num_indexed: int) -> None:
        """Raise AssertionError if accounts contradict themselves, or an index that holds `num_indexed` blocks."""
        for group in self.groups:
            group.check_integrity()
        self.tails.check_integrity()
        findable = np.concatenate([group.findable_block_ids() for group in self.groups])
        assert len(np.unique(findable)) == len(findable), "a block is in two groups' accounts"
        assert len(findable) == num_indexed, "ledger and index know different numbers of blocks"
