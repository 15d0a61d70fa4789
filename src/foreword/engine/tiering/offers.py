"""Offers: sequences that wait to be stored, in the order in which they will be stored.

Pinned prefixes come first. Then come the heads of prompts, and conversations up to the end of their last message, which
later prompts repeat. Then comes the rest. Within each rank, the offer that saves the most seconds per byte comes first:

    chance that a later request uses it  *  (seconds to compute it - seconds to load it)  /  bytes

The eviction policy estimates the chance from earlier requests that added as many blocks as the offer has: it is the
share of their blocks that were used again. The rule of admission decides which blocks are offered at all. Keys of
blocks that are not stored are remembered for a while, so that misses can be explained.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from foreword.cache import KVCacheManager, TokenSequence
from foreword.engine.tiering.block_memory import BlockMemory
from foreword.engine.tiering.loads import StepCost
from foreword.tiers.admission import HEAD_TOKENS, Admission
from foreword.tiers.tier import Tier

MOST_OFFERS = 512
"""The most sequences that wait to be stored. If there are more, the last in order is dropped."""
FULL_SHARE = 0.9
"""A tier that uses this share of its budget counts as full, because eviction keeps a few segments of it free."""


@dataclass(slots=True)
class StoreCounts:
    """Totals of the stores so far."""

    num_chunks: int = 0
    num_bytes: int = 0
    num_dropped_offers: int = 0
    """Sequences that were not stored because the queue was full, or because the daily limit of bytes was reached."""
    num_not_admitted: int = 0
    """Computed blocks, and encoded tiles of pictures, that the rule of admission kept from being offered."""
    blocks_by_outcome: Counter[str] = field(default_factory=Counter)


class Rank(enum.IntEnum):
    """The rank of an offer; a higher rank is stored first."""

    REST = 0
    LIKELY = 1
    """The head of a prompt, or a conversation up to the end of its last message."""
    PINNED = 2


class Offer(NamedTuple):
    """A sequence whose first `num_tokens` tokens are computed, or are being computed by steps that are planned."""

    sequence: TokenSequence
    num_tokens: int
    rank: Rank
    worth: float
    """The expected number of seconds saved per stored byte."""
    admitted: npt.NDArray[np.bool_] | None
    """[blocks of the sequence]: whether to store each block; None: store all."""


class DroppedKeys:
    """The newest keys of blocks that were not stored: the first 8 bytes of each key, in a ring buffer."""

    def __init__(self, size: int = 1 << 16) -> None:
        self._ring: npt.NDArray[np.uint64] = np.zeros(size, np.uint64)
        self._next = 0

    def note(self, keys: Sequence[bytes]) -> None:
        """Remember these keys; if there are too many for the ring, only the first keys."""
        numbers = _numbers(keys[: len(self._ring)])
        self._ring[(self._next + np.arange(len(numbers))) % len(self._ring)] = numbers
        self._next += len(numbers)

    def forget(self, keys: Sequence[bytes]) -> None:
        """Forget keys of blocks that were stored later."""
        if self._next:
            self._ring[np.isin(self._ring, _numbers(keys))] = 0

    def __contains__(self, key: bytes) -> bool:
        return bool((self._ring == _numbers([key])[0]).any())


def _numbers(keys: Sequence[bytes]) -> npt.NDArray[np.uint64]:
    return np.frombuffer(b"".join(key[:8] for key in keys), np.uint64)


class Offers:
    """The queue of offers."""

    def __init__(
        self, tiers: Sequence[Tier], memory: BlockMemory, manager: KVCacheManager, cost: StepCost, admission: Admission
    ) -> None:
        self._tiers, self._memory, self._manager, self._cost, self._admission = tiers, memory, manager, cost, admission
        self._waiting: list[Offer] = []
        self.dropped = DroppedKeys()
        self.counts = StoreCounts()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: TokenSequence, start: int, end: int, likely_end: int) -> None:
        """Offer a sequence of which tokens `start` to `end` (exclusive) were computed.

        Later requests are likely to repeat the tokens before `likely_end`.
        """
        if end < self._manager.block_size:
            return
        admitted = None if self._admission.rule == "all" else self._admit(sequence, start, end)
        if admitted is not None and not admitted.any():
            return
        likely_end = min(end, max(likely_end, HEAD_TOKENS))
        self._put(Offer(sequence, likely_end, Rank.LIKELY, self._worth(start, likely_end), admitted))
        if likely_end < end:
            self._put(Offer(sequence, end, Rank.REST, self._worth(start, end), admitted))

    def add_pinned(self, sequence: TokenSequence, num_tokens: int) -> None:
        """Offer the first tokens of a sequence before all others, whatever the rule of admission says."""
        self._put(Offer(sequence, num_tokens, Rank.PINNED, 0.0, None))

    def admits_apart(self, key: bytes) -> bool:
        """Whether to store a payload that was just made and is no block. It counts as the head of a prompt."""
        if self._admission.rule == "all":
            return True
        is_admitted = self._admission.admits(0, int.from_bytes(key[:8], "little"), has_room=self._has_room())
        self.counts.num_not_admitted += not is_admitted
        return is_admitted

    def put_back(self, offer: Offer) -> None:
        """Return a taken offer to the queue, before offers of equal rank and worth."""
        self._waiting.insert(0, offer)

    def take(self) -> Offer | None:
        """Take the next offer; None if no offer waits."""
        if not self._waiting:
            return None
        return self._waiting.pop(max(range(len(self._waiting)), key=self._place))

    def drop(self, offer: Offer) -> None:
        self.counts.num_dropped_offers += 1
        self.dropped.note(offer.sequence.block_hashes()[: offer.num_tokens // self._manager.block_size])

    def clear(self) -> None:
        self._waiting.clear()

    def _put(self, offer: Offer) -> None:
        self._waiting.append(offer)
        if len(self._waiting) > MOST_OFFERS:
            self.drop(self._waiting.pop(min(range(len(self._waiting)), key=self._place)))

    def _place(self, number: int) -> tuple[Rank, float]:
        return self._waiting[number].rank, self._waiting[number].worth

    def _worth(self, start: int, end: int) -> float:
        """The expected number of seconds that storing tokens `start` to `end` (exclusive) saves, per stored byte."""
        sizes = [spec.block_size for spec in self._manager.groups]
        num_bytes = sum((end // size - start // size) * self._memory.payload_bytes(g) for g, size in enumerate(sizes))
        compute_s = self._cost.seconds(start, end)
        if num_bytes <= 0 or compute_s is None:
            return 0.0
        load_s = min((tier.estimate_load_s(num_bytes) for tier in self._tiers), default=0.0)
        chance = self._manager.chance_of_return((end - start) // self._manager.block_size)
        return chance * max(0.0, compute_s - load_s) / num_bytes

    def _admit(self, sequence: TokenSequence, start: int, end: int) -> npt.NDArray[np.bool_]:
        """For each block of a sequence, whether to store it, [blocks]. Tokens `start` to `end` (exclusive) were
        computed.
        """
        size, keys, has_room = self._manager.block_size, sequence.block_hashes(), self._has_room()
        admitted = np.zeros(len(keys), np.bool_)
        refused = []
        for number, key in enumerate(keys[start // size : end // size], start // size):
            admitted[number] = self._admission.admits(number, int.from_bytes(key[:8], "little"), has_room=has_room)
            if not admitted[number]:
                refused.append(key)
        self.dropped.note(refused)
        self.counts.num_not_admitted += len(refused)
        return admitted

    def _has_room(self) -> bool:
        stats = [tier.stats() for tier in self._tiers]
        return any(not each.budget_bytes or each.shared_bytes < FULL_SHARE * each.budget_bytes for each in stats)
