"""Events of the cache: which prefixes become findable, and which are forgotten.

The events and their fields are those that vLLM publishes. Keys are bytes, and `medium` is "device", not vLLM's "GPU".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from foreword.cache.keys.hashing import BlockHash
from foreword.errors import EventsLostError


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks of one prefix became findable. Duplicates of findable blocks are not reported."""

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    """The key of the block before the first one; None at the beginning of a sequence."""
    token_ids: tuple[int, ...]
    """The tokens of all the blocks, [len(block_hashes) * block_size]."""
    block_size: int
    lora_name: str | None = None
    extra_keys: tuple[tuple[str, ...], ...] | None = None
    """The extra keys of each block; None if no block has any."""
    medium: str = "device"
    group_idx: int = 0
    group_kind: str | None = None
    """The attention type of the group, such as "sliding_window", in other engines' events; None: the event has none."""
    session_id: str | None = None
    """The session of the request that stored or reused the blocks, in vLLM's events; None: the event has none."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks with these keys are no longer findable."""

    block_hashes: tuple[BlockHash, ...]
    medium: str = "device"
    group_idx: int = 0


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The cache was reset."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class NumberedEvent:
    """An event and its number in the stream. Numbers have no gaps, so a listener notices missed events."""

    number: int
    event: KVCacheEvent


class EventLog:
    """The newest events, in order, with up to `capacity` blocks in total. The log drops the oldest events first.

    An event without blocks counts as one block. `listener` gets each event as soon as it is appended.
    """

    def __init__(self, capacity: int = 100_000, *, listener: Callable[[KVCacheEvent], None] | None = None) -> None:
        self.capacity = capacity
        self._listener = listener
        self._events: deque[NumberedEvent] = deque()
        self._num_blocks = 0
        self._next_number = 0

    def append(self, event: KVCacheEvent) -> None:
        """Give the event the next number and keep it."""
        if self._listener is not None:
            self._listener(event)
        self._events.append(NumberedEvent(self._next_number, event))
        self._next_number += 1
        self._num_blocks += _num_blocks(event)
        while self._num_blocks > self.capacity:
            self._num_blocks -= _num_blocks(self._events.popleft().event)

    def take(self) -> list[NumberedEvent]:
        """Return the events since the last call, except dropped events, and forget them."""
        events = list(self._events)
        self._events.clear()
        self._num_blocks = 0
        return events


def _num_blocks(event: KVCacheEvent) -> int:
    return 1 if isinstance(event, AllBlocksCleared) else len(event.block_hashes)


class HeldBlock(NamedTuple):
    """A findable block, as events report it."""

    parent: BlockHash | None
    tokens: bytes
    """The tokens as int32."""
    lora_name: str | None
    extra_keys: tuple[str, ...]
    block_size: int


HeldBlocks = dict[BlockHash, HeldBlock]


def apply_event(groups: dict[int, HeldBlocks], event: KVCacheEvent) -> None:
    """Apply an event to the findable blocks of each group. Raises KeyError if the event removes an unknown block."""
    match event:
        case BlockStored():
            held = groups.setdefault(event.group_idx, {})
            tokens, parent = np.array(event.token_ids, np.int32).tobytes(), event.parent_block_hash
            size, width = event.block_size, 4 * event.block_size
            for at, key in enumerate(event.block_hashes):
                extra = event.extra_keys[at] if event.extra_keys else ()
                held[key] = HeldBlock(parent, tokens[at * width : (at + 1) * width], event.lora_name, extra, size)
                parent = key
        case BlockRemoved():
            for key in event.block_hashes:
                del groups[event.group_idx][key]
        case AllBlocksCleared():
            groups.clear()


class PrefixMirror:
    """The findable prefixes of a remote cache, rebuilt from its events.

    Knows keys and tokens, but no block ids: a router needs only keys to know which part of a prompt a replica holds.
    """

    def __init__(self) -> None:
        self._held: dict[int, HeldBlocks] = {}
        self._next_number = 0

    def apply(self, events: Iterable[NumberedEvent]) -> None:
        """Apply the next events, in order.

        At a gap in the numbers, raises EventsLostError and applies no more events. If `AllBlocksCleared` follows the
        gap, there is no error: the missed events no longer matter.
        """
        for numbered in events:
            ends_gap = isinstance(numbered.event, AllBlocksCleared) and numbered.number > self._next_number
            if numbered.number != self._next_number and not ends_gap:
                raise EventsLostError(
                    f"event {self._next_number} is missing: {numbered.number} came instead; reset the cache, continue "
                    "with the event of that reset, and take events more often"
                )
            self._next_number = numbered.number + 1
            apply_event(self._held, numbered.event)

    def held_keys(self, group: int = 0) -> set[BlockHash]:
        """A new set of the findable keys of one group."""
        return set(self._held.get(group, ()))

    def tokens_of(self, key: BlockHash, group: int = 0) -> tuple[int, ...]:
        """The tokens of the block with this key. Raises KeyError if it is not findable."""
        return tuple(np.frombuffer(self._held[group][key].tokens, np.int32).tolist())

    def num_hit_blocks(self, block_hashes: Sequence[BlockHash], group: int = 0) -> int:
        """The number of leading blocks of a sequence that are findable in the remote cache."""
        held = self._held.get(group, {})
        return sum(1 for _ in takewhile(held.__contains__, block_hashes))
