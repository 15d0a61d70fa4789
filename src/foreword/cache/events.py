"""What the cache tells the outside: which prefixes it began and ceased to hold.

Knows keys, token ids and sequence numbers; knows nothing of who listens. Fields are those that vLLM
publishes, so that routers and dashboards for it can read them.
"""

from __future__ import annotations

from dataclasses import dataclass

from foreword.cache.hashing import BlockHash


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive blocks became findable. A key that was findable already is not reported again."""

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    """Key of the block before the first of them; None at the beginning of a sequence."""
    token_ids: tuple[int, ...]
    """Tokens of all these blocks."""
    block_size: int
    adapter: str | None = None
    medium: str = "device"
    group: int = 0


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """The last block with each of these keys is no longer findable."""

    block_hashes: tuple[BlockHash, ...]
    medium: str = "device"
    group: int = 0


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The cache was reset."""


KVCacheEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class NumberedEvent:
    """An event and its place in the stream; numbers have no gaps, so a listener sees what it missed."""

    number: int
    event: KVCacheEvent


class EventLog:
    """Events since they were last taken, at most `capacity` of them: the oldest are dropped, numbers go on."""

    def __init__(self, capacity: int = 100_000) -> None:
        self._capacity = capacity
        self._events: list[NumberedEvent] = []
        self._next_number = 0

    def append(self, event: KVCacheEvent) -> None:
        self._events.append(NumberedEvent(self._next_number, event))
        self._next_number += 1
        if len(self._events) > 2 * self._capacity:
            del self._events[: -self._capacity]

    def take(self) -> list[NumberedEvent]:
        """All events since the last call, in order."""
        taken, self._events = self._events[-self._capacity :], []
        return taken
