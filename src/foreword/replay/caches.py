"""Simulated caches: each takes one request after the other, and returns the part of the prompt that it held.

Outputs are not cached, and each request ends before the next one comes. So only the order of arrival, the capacity and
the policy matter. A request with more blocks than the cache is refused, and all its blocks count as missed.

`ManagerCache` is the engine's own `KVCacheManager`. `LruCache` gives the answers of a `ManagerCache` under `lru`, but
faster. (`OnePass` in `foreword.replay.simulator` is faster still, as long as every request fits.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from foreword.cache import CacheLedger, EvictionPolicy, KVCacheManager, RadixIndex, TokenSequence
from foreword.errors import ConfigError
from foreword.replay.keys import NO_KEYS, PrefixKeys
from foreword.replay.policies import make_policy
from foreword.replay.trace import RecordedRequest

Key = TypeVar("Key", int, int | str)
PIECE_BITS = np.uint64(31)
"""The manager gets each prefix key as two token ids of this many bits, so that a block has two tokens."""
PIECES = 2


class Lru(Generic[Key]):
    """An LRU cache of keys with weights. Only `shrink` evicts, so a request does not evict its own keys."""

    def __init__(self, capacity: int | None, held: Iterable[Key] = ()) -> None:
        """`capacity` is the largest sum of weights; None: no limit. `held`: first keys, of weight 1, newest last."""
        self.capacity = capacity
        self._weights: OrderedDict[Key, int] = OrderedDict.fromkeys(held, 1)
        self._weight = len(self._weights)
        assert capacity is None or self._weight <= capacity

    def __contains__(self, key: Key) -> bool:
        return key in self._weights

    def use(self, key: Key, weight: int = 1) -> None:
        """Add a key, or make it the newest one."""
        self._weight += weight - self._weights.get(key, 0)
        self._weights[key] = weight
        self._weights.move_to_end(key)

    @property
    def is_full(self) -> bool:
        return self.capacity is not None and self._weight >= self.capacity

    def shrink(self) -> None:
        while self.capacity is not None and self._weight > self.capacity:
            self._weight -= self._weights.popitem(last=False)[1]


@dataclass(slots=True)
class HitCount:
    """Counts the blocks and the tokens that a cache found while it replayed a recording."""

    blocks: int = 0
    tokens: int = 0
    refused_blocks: int = 0
    """The number of blocks in refused requests. The cache refuses a request with more blocks than its capacity."""
    empty_blocks: int = 0
    """Blocks of the cache that were empty at the end: never filled, or emptied when the head of their prefix left."""

    def note(self, request: RecordedRequest, num_held: int, capacity: int) -> None:
        """Count a request whose first `num_held` blocks were in a cache of this capacity."""
        self.blocks += num_held
        self.tokens += request.tokens_of(num_held)
        if len(request.keys) > capacity:
            self.refused_blocks += len(request.keys)


class LruCache:
    """Evicts the least recently used blocks, the tail of a request before its head."""

    def __init__(self, capacity: int, held: PrefixKeys = NO_KEYS) -> None:
        """`held`: keys of the blocks that the cache begins with, at most `capacity`, the most recently used last."""
        _check_capacity(capacity)
        self.capacity = capacity
        self._blocks = Lru[int](capacity, held.tolist())

    def admit(self, request: RecordedRequest) -> int:
        keys, blocks = request.keys.tolist(), self._blocks
        if len(keys) > self.capacity:
            return 0
        held = bisect_left(keys, True, key=lambda key: key not in blocks)
        for key in reversed(keys):
            blocks.use(key)
        blocks.shrink()
        return held


class ManagerCache:
    """The engine's manager and radix index. The eviction policy is given as a name or as an object."""

    def __init__(self, capacity: int, eviction_policy: str | EvictionPolicy, ledger: CacheLedger | None = None) -> None:
        _check_capacity(capacity)
        self.capacity = capacity
        index = RadixIndex(capacity, PIECES)
        policy = make_policy(eviction_policy, capacity) if isinstance(eviction_policy, str) else eviction_policy
        self.policy = policy
        self.manager = KVCacheManager(capacity, block_size=PIECES, index=index, eviction_policy=policy, ledger=ledger)

    def admit(self, request: RecordedRequest) -> int:
        return self.admit_sequence(as_sequence(request))

    def admit_sequence(self, sequence: TokenSequence) -> int:
        num_tokens = PIECES * sequence.num_full_blocks
        if not 0 < num_tokens <= PIECES * self.capacity:
            return 0
        manager = self.manager
        manager.begin_step()
        hit = manager.get_computed_blocks(sequence)
        admitted = manager.allocate_slots(sequence, num_tokens, hit)
        assert admitted is not None, "a request that fits was not admitted"
        manager.take_copies()
        manager.free(sequence.request_id)
        return hit.num_shared_tokens // PIECES


def as_sequence(request: RecordedRequest) -> TokenSequence:
    """Returns a sequence whose tokens stand for the request's blocks: two token ids (`PIECES`) for each block."""
    return TokenSequence("request", as_token_ids(request), block_size=PIECES)


def as_token_ids(request: RecordedRequest) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Returns token ids that stand for the request's blocks, [2 * blocks + 1]: two per block, and an extra token.

    The engine always computes the last token of a prompt. Without the extra token, the last block could not be hit.
    """
    tokens = np.zeros(PIECES * len(request.keys) + 1, np.int32)
    mask = np.uint64((1 << int(PIECE_BITS)) - 1)
    tokens[0:-1:2] = (request.keys & mask).astype(np.int32)
    tokens[1::2] = ((request.keys >> PIECE_BITS) & mask).astype(np.int32)
    return tokens


def _check_capacity(capacity: int) -> None:
    if capacity < 1:
        raise ConfigError(f"capacity={capacity} blocks is too small; use at least 1")
