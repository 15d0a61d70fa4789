"""CacheLedger: the keys that the cache holds and has held, so that it can say why a lookup missed.

The coordinator reports what it indexes and forgets. The ledger answers:

- why a block was not found (`reason`),
- what a pool of twice the size would have found (`num_ghost_hits`): forgotten keys stay as ghosts, up to one for each
  block of the pool, so under the `lru` policy, pool and ghosts together behave like a pool of twice the size,
- how often each block was reused (`num_reuses`), and how many blocks were forgotten, by cause (`evictions`),
- what changed, if it has an `EventLog`.

Each hit, stored, forgotten or missed block costs O(1).
"""

from __future__ import annotations

import enum
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from foreword.cache.account.events import AllBlocksCleared, BlockRemoved, BlockStored, EventLog
from foreword.cache.block_ids import BlockIds, are_distinct
from foreword.cache.keys.hashing import NO_EXTRA_KEYS, BlockHash, ExtraKeys, KeyedSpan
from foreword.cache.keys.sequence import TokenSequence, common_length, keys_of_group

MAX_COMPARED = 64
"""A prompt is compared with at most this number of evicted tails that follow one prefix: with the latest ones."""


class MissReason(enum.StrEnum):
    """Why the part of a prompt after its hit had to be computed."""

    NEVER_SEEN = "never_seen"
    EVICTED = "evicted"
    PARTIAL_BLOCK = "partial_block"
    """The rest of the prompt does not fill a block, and this index keeps only full blocks."""
    SALT_DIFFERS = "salt_differs"
    """The tokens are cached, but under another salt."""
    ADAPTER_DIFFERS = "adapter_differs"
    MEDIA_DIFFERS = "media_differs"
    """The tokens are cached, but their placeholders stood for other images, sounds or embeddings."""
    STATE_NOT_SAVED = "state_not_saved"
    """Keys and values of more tokens are cached, but no recurrent state was saved after them."""
    LOOKUP_SKIPPED = "lookup_skipped"
    """The request asked that its whole prompt, or the rest of the prompt, be computed."""
    IN_FLIGHT = "in_flight"
    """Another request is computing the missed tokens right now."""
    LOADING = "loading"
    """The missed tokens are being loaded from a tier, or were being loaded when the request stopped waiting."""
    IN_TIER = "in_tier"
    """A tier has the missed tokens. A request loads them if loading is faster than computing."""
    DROPPED_BY_ADMISSION = "dropped_by_admission"
    """The missed tokens were computed, but no tier stored them, because of the admission rule, the daily limit or lack
    of space."""
    TIER_OTHER_ARITHMETIC = "tier_other_arithmetic"
    """A tier has the missed tokens, but computed by other kernels, by another version or on another processor."""
    TIER_OTHER_MODEL = "tier_other_model"
    """A tier has the missed tokens, but computed with other weights, or stored in another layout or number format."""


class EvictionCause(enum.StrEnum):
    """Why a block was forgotten."""

    REUSED = "reused"
    """The block's memory was given to other tokens: the pool was too small."""
    REQUESTED = "requested"
    """A caller asked to forget the block (`evict_blocks`)."""
    FAILED = "failed"
    """The step that was to fill the block failed."""
    DUPLICATE = "duplicate"
    """Another block holds the same content."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """When and why a key was forgotten."""

    cause: EvictionCause
    time: float
    """Seconds on the ledger's clock."""
    step: int
    """The number of steps that had begun when the key was forgotten."""
    pool_usage: float
    """The share of blocks that requests held when the key was forgotten, 0.0 to 1.0."""


class KeyWatcher(Protocol):
    """Follows which keys of a group are findable."""

    def stored(self, keys: Sequence[BlockHash]) -> None:
        """These keys were not findable, and are now."""

    def gone(self, keys: Sequence[BlockHash]) -> None:
        """These keys were findable, and are not any more."""

    def cleared(self) -> None:
        """No key is findable any more."""


class GroupLedger:
    """The account of one group.

    A block of the group covers `width` blocks of a sequence, and has the key of the last of these blocks.
    """

    def __init__(self, num_blocks: int, group_id: int, width: int, events: EventLog | None) -> None:
        self._group_id = group_id
        self.width = width
        self.watcher: KeyWatcher | None = None
        self._events = events
        self._max_ghosts = num_blocks
        self._keys: npt.NDArray[np.object_] = np.full(num_blocks, None, object)
        """The key of each findable block of the group; None for other blocks."""
        self._num_copies: dict[BlockHash, int] = {}
        self._ghosts: OrderedDict[BlockHash, Eviction] = OrderedDict()
        self._variants: dict[BlockHash, Counter[ExtraKeys]] = {}
        """Block key without extra keys -> the `ExtraKeys` under which the block's tokens are findable."""
        self._variant_of: dict[BlockHash, tuple[BlockHash, ExtraKeys]] = {}
        self._num_salted: Counter[str | None] = Counter()
        """The number of findable keys under each salt."""

    def __contains__(self, key: BlockHash) -> bool:
        """Whether a key is findable."""
        return key in self._num_copies

    def keys_of(self, sequence: TokenSequence) -> Sequence[BlockHash]:
        """The keys of the group's full blocks of a sequence; do not change them."""
        hashes = sequence.block_hashes()
        return hashes if self.width == 1 else keys_of_group(hashes, self.width, 0, len(hashes) // self.width)

    def stored(self, sequence: TokenSequence, numbers: range, block_ids: BlockIds) -> None:
        """Record that the sequence's blocks `numbers` of this group were indexed as `block_ids`."""
        keys = keys_of_group(sequence.block_hashes(), self.width, numbers.start, numbers.stop)
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
            plain = keys_of_group(sequence.plain_block_hashes(), self.width, numbers.start, numbers.stop)
            for at in new:
                if keys[at] == plain[at]:  # the salt begins later
                    continue
                extra_keys = sequence.extra_keys.of_prefix((numbers[at] + 1) * self.width * sequence.block_size)
                self._variants.setdefault(plain[at], Counter())[extra_keys] += 1
                self._variant_of[keys[at]] = (plain[at], extra_keys)
                self._num_salted[extra_keys.salt] += 1
        if self._events is not None:
            self._report_stored(self._events, sequence, [numbers[at] for at in new])
        if self.watcher is not None:
            self.watcher.stored([keys[at] for at in new])

    def removed(self, block_ids: BlockIds, eviction: Eviction) -> int:
        """Record that blocks were forgotten; ignores unknown blocks. Returns the number of known blocks."""
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
        if gone and self.watcher is not None:
            self.watcher.gone(gone)
        return num_removed

    def drop_oldest_ghosts(self) -> None:
        """Keep at most one ghost (the key of an evicted block) for each block of the pool.

        Call this only after a request that evicted blocks has stored its own blocks: storing a block removes the ghost
        with the block's key. In a pool of twice the size, that block would have been a hit, and would have evicted
        nothing.
        """
        while len(self._ghosts) > self._max_ghosts:
            self._ghosts.popitem(last=False)

    def cleared(self) -> None:
        """Record that everything was forgotten on request. No ghosts are left."""
        self._keys.fill(None)
        for table in (self._num_copies, self._ghosts, self._variants, self._variant_of, self._num_salted):
            table.clear()
        if self.watcher is not None:
            self.watcher.cleared()

    def reason(self, sequence: TokenSequence, number: int) -> tuple[MissReason, Eviction | None] | None:
        """Why lookups do not find the sequence's block `number`, and its eviction if any; None if they can find it."""
        if (number + 1) * self.width > sequence.num_full_blocks:
            return MissReason.PARTIAL_BLOCK, None
        numbers = range(number, number + 1)
        (key,) = keys_of_group(sequence.block_hashes(), self.width, numbers.start, numbers.stop)
        if key in self._num_copies:
            return None
        if key in self._ghosts:
            return MissReason.EVICTED, self._ghosts[key]
        (plain,) = keys_of_group(sequence.plain_block_hashes(), self.width, numbers.start, numbers.stop)
        end = numbers.stop * self.width * sequence.block_size
        return self._difference(plain, sequence.extra_keys.of_prefix(end), end), None

    def _difference(self, plain: BlockHash, extra_keys: ExtraKeys, end: int) -> MissReason:
        """How a prompt's extra keys differ from the extra keys under which the same first `end` tokens are findable."""
        others = list(self._variants.get(plain, ()))
        if plain in self._num_copies:
            others.append(NO_EXTRA_KEYS)
        moved = _moved(extra_keys, end)  # linked tokens have other KV than the same tokens of a plain prompt
        others = [other for other in others if _moved(other, end) == moved]
        if not others:
            return MissReason.NEVER_SEEN
        others = [other for other in others if other.salt == extra_keys.salt]
        if not others:
            return MissReason.SALT_DIFFERS
        if all(other.adapter != extra_keys.adapter for other in others):
            return MissReason.ADAPTER_DIFFERS
        return MissReason.MEDIA_DIFFERS

    def num_ghost_hits(self, sequence: TokenSequence, first: int) -> int:
        """The number of the sequence's consecutive blocks from `first` on that a pool of twice the size would hold.

        The count ends at the last ghost (evicted key): findable blocks after this ghost do not count.
        """
        if not self._ghosts:
            return 0
        numbers = range(first, sequence.num_full_blocks // self.width)
        keys = keys_of_group(sequence.block_hashes(), self.width, numbers.start, numbers.stop)
        num_held = 0
        for number, key in enumerate(keys, start=1):
            ghost = self._ghosts.get(key)
            if ghost is not None and ghost.cause is EvictionCause.REUSED:
                num_held = number
            elif key not in self._num_copies:
                break
        return num_held

    def num_under_salt(self, prefix: str) -> int:
        return sum(count for salt, count in self._num_salted.items() if salt is not None and salt.startswith(prefix))

    def under_salt(self, prefix: str, block_ids: BlockIds) -> npt.NDArray[np.bool_]:
        variants = map(self._variant_of.get, self._keys[block_ids].tolist())
        return np.array([v is not None and (v[1].salt or "").startswith(prefix) for v in variants], np.bool_)

    def findable_block_ids(self) -> BlockIds:
        """The group's findable blocks, in ascending order."""
        return np.array([block_id for block_id, key in enumerate(self._keys.tolist()) if key is not None], np.int32)

    def check_integrity(self) -> None:
        recorded = Counter(key for key in self._keys.tolist() if key is not None)
        assert recorded == self._num_copies, "the ledger miscounts a key"
        assert not self._ghosts.keys() & self._num_copies.keys(), "a findable key is among the ghosts"
        assert len(self._ghosts) <= 2 * self._max_ghosts, "ghosts are not dropped"
        assert self._variant_of.keys() <= self._num_copies.keys(), "a forgotten key still has a variant"
        counted: dict[BlockHash, dict[ExtraKeys, int]] = {}  # `Counter` compares in Python, which takes long
        for plain, extra_keys in self._variant_of.values():
            variants = counted.setdefault(plain, {})
            variants[extra_keys] = variants.get(extra_keys, 0) + 1
        assert counted == self._variants, "the ledger miscounts variants"
        salted = Counter(extra_keys.salt for _, extra_keys in self._variant_of.values())
        assert salted == self._num_salted, "the ledger miscounts a salt's keys"

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
        """Append an event for each run of consecutive blocks. Events of blocks before an aLoRA name no adapter."""
        hashes, width, adapter = sequence.block_hashes(), self.width, sequence.extra_keys.adapter
        size = width * sequence.block_size
        adapted = sequence.extra_keys.adapter_offset // size
        starts = [at for at, number in enumerate(new) if not at or number != new[at - 1] + 1 or number == adapted]
        for start, end in pairwise([*starts, len(new)]):
            first, last = new[start], new[end - 1] + 1
            extra = sequence.extra_keys.of_blocks(first * size, size, last - first)
            events.append(
                BlockStored(
                    block_hashes=tuple(keys_of_group(hashes, width, first, last)),
                    parent_block_hash=hashes[first * width - 1] if first else None,
                    token_ids=tuple(sequence.token_ids[first * size : last * size].tolist()),
                    block_size=size,
                    lora_name=adapter if first >= adapted else None,
                    extra_keys=tuple(extra) if any(extra) else None,
                    group_idx=self._group_id,
                )
            )


def _moved(extra_keys: ExtraKeys, end: int) -> list[KeyedSpan]:
    """The spans before position `end` that are linked, or whose positions jump."""
    return [span for span in extra_keys.spans if span.kind != "media" and span.offset < end]


Place = tuple[BlockHash, tuple[str, ...]]
"""The key of the block before a tail, and the extra keys of the tail's block."""


@dataclass(frozen=True, slots=True)
class Tail:
    """The content of a tail (a partly filled block), without the number of the block that holds it."""

    place: Place
    tokens: bytes
    """The tokens as int32."""
    salt: str | None
    """The salt under which lookups find the tail; None if they need no salt."""


class TailAccount:
    """The tails of one pool. Remembers the last `max_evicted` evictions of tails, so that a lookup can report them.

    A tail is a partly filled block: it has no key of its own. A tail is identified by the key of the block before it,
    the extra keys of its block, and its tokens.
    """

    def __init__(self, max_evicted: int) -> None:
        self._max_evicted = max_evicted
        self._held: dict[int, Tail] = {}
        self._evicted: OrderedDict[Tail, Eviction] = OrderedDict()
        self._evicted_at: dict[Place, dict[Tail, None]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def block_ids(self) -> set[int]:
        return set(self._held)

    def stored(self, sequence: TokenSequence, num_tokens: int, block_id: int) -> None:
        """Record that a block holds a tail: of the first `num_tokens` tokens, those after the last full block."""
        number, length = divmod(num_tokens, sequence.block_size)
        keys = sequence.extra_keys
        salt = keys.salt if keys.salt_offset < num_tokens else None
        tail = Tail(_place(sequence, number), sequence.token_ids[num_tokens - length : num_tokens].tobytes(), salt)
        self._held[block_id] = tail
        self._forget_eviction(tail)

    def removed(self, block_ids: BlockIds, eviction: Eviction | None) -> None:
        """Record that these blocks no longer hold tails; `eviction` is None if other blocks hold the same content."""
        if not self._held:
            return
        for block_id in block_ids.tolist():
            tail = self._held.pop(block_id, None)
            if tail is not None and eviction is not None:
                self._evicted[tail] = eviction
                self._evicted_at.setdefault(tail.place, {})[tail] = None
        while len(self._evicted) > self._max_evicted:
            self._forget_eviction(next(iter(self._evicted)))

    def eviction_after(self, sequence: TokenSequence, number: int, num_known: int) -> Eviction | None:
        """The eviction of the longest tail that held more than `num_known` tokens of the sequence's block `number`."""
        if not self._evicted:
            return None
        tails = self._evicted_at.get(_place(sequence, number), {})
        start = number * sequence.block_size
        ours = sequence.token_ids[start : start + sequence.block_size]
        longest, eviction = num_known, None
        for tail in islice(reversed(tails), MAX_COMPARED):
            length = common_length(ours, np.frombuffer(tail.tokens, np.int32))
            if length > longest:
                longest, eviction = length, self._evicted[tail]
        return eviction

    def num_under_salt(self, prefix: str) -> int:
        return sum(1 for tail in self._held.values() if tail.salt is not None and tail.salt.startswith(prefix))

    def under_salt(self, prefix: str, block_ids: BlockIds) -> npt.NDArray[np.bool_]:
        tails = map(self._held.get, block_ids.tolist())
        salts = [None if tail is None else tail.salt for tail in tails]
        return np.array([salt is not None and salt.startswith(prefix) for salt in salts], np.bool_)

    def cleared(self) -> None:
        self._held.clear()
        self._evicted.clear()
        self._evicted_at.clear()

    def check_integrity(self) -> None:
        listed = [tail for there in self._evicted_at.values() for tail in there]
        assert set(listed) == set(self._evicted), "an evicted tail is not listed at its place"
        assert all(self._evicted_at.values()), "a place without evicted tails was left behind"
        assert len(self._evicted) <= self._max_evicted, "evicted tails are not dropped"

    def _forget_eviction(self, tail: Tail) -> None:
        if self._evicted.pop(tail, None) is not None:
            tails = self._evicted_at[tail.place]
            del tails[tail]
            if not tails:
                del self._evicted_at[tail.place]


def _place(sequence: TokenSequence, number: int) -> Place:
    size = sequence.block_size
    before = sequence.block_hashes()[number - 1] if number else sequence.root
    return before, sequence.extra_keys.of_block(number * size, (number + 1) * size)


class CacheLedger:
    """The account of one pool of `num_blocks` blocks, group by group.

    `clock` gives the time of evictions, in seconds.
    """

    def __init__(
        self, num_blocks: int, *, events: EventLog | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.events = events
        self.clock = clock
        self.groups: list[GroupLedger] = []
        self._num_reuses: npt.NDArray[np.int64] = np.zeros(num_blocks, np.int64)
        self.evictions: Counter[EvictionCause] = Counter()
        """The number of findable blocks forgotten since the start, by cause."""
        self.tails = TailAccount(num_blocks)
        """Partly filled blocks; events do not report them, and `evictions` does not count them."""
        self._num_blocks = num_blocks
        self._num_steps = 0

    def open_group(self, width: int = 1) -> GroupLedger:
        """Open the account of the next group."""
        self.groups.append(GroupLedger(self._num_blocks, len(self.groups), width, self.events))
        return self.groups[-1]

    def begin_step(self) -> None:
        """Begin a step. Evictions from now on are recorded with the number of this step."""
        self._num_steps += 1
        for group in self.groups:
            group.drop_oldest_ghosts()

    def removed(self, block_ids: BlockIds, cause: EvictionCause, pool_usage: float) -> None:
        """Record that blocks were forgotten. Ignores blocks that were not indexed."""
        eviction = Eviction(cause, self.clock(), self._num_steps, pool_usage)
        for group in self.groups:
            self.evictions[cause] += group.removed(block_ids, eviction)
        self.tails.removed(block_ids, None if cause is EvictionCause.DUPLICATE else eviction)
        self._num_reuses[block_ids] = 0

    def note_hit(self, block_ids: BlockIds) -> None:
        """Record that a request reused these (distinct) blocks."""
        self._num_reuses[block_ids] += 1

    def num_reuses(self) -> npt.NDArray[np.int64]:
        """A new array of the number of reuses of each block since it got its current content, [num_blocks]."""
        return self._num_reuses.copy()

    def num_under_salt(self, prefix: str) -> int:
        """The number of findable keys and tails under salts that start with `prefix`, without duplicates."""
        return sum(group.num_under_salt(prefix) for group in self.groups) + self.tails.num_under_salt(prefix)

    def blocks_under_salt(self, prefix: str, block_ids: BlockIds) -> BlockIds:
        """The blocks, in the given order, that are findable only under a salt that starts with `prefix`."""
        masks = [group.under_salt(prefix, block_ids) for group in self.groups]
        return block_ids[np.logical_or.reduce([*masks, self.tails.under_salt(prefix, block_ids)])]

    def cleared(self) -> None:
        for group in self.groups:
            group.cleared()
        self.tails.cleared()
        self._num_reuses.fill(0)
        if self.events is not None:
            self.events.append(AllBlocksCleared())

    def check_integrity(self, num_indexed: int) -> None:
        """Raise AssertionError if an account contradicts itself, or if not `num_indexed` blocks are findable."""
        for group in self.groups:
            group.check_integrity()
        self.tails.check_integrity()
        findable = np.concatenate([group.findable_block_ids() for group in self.groups])
        assert are_distinct(findable), "a block is in two groups' accounts"
        assert len(findable) == num_indexed, "ledger and index know different numbers of blocks"
