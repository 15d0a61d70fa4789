"""The bytes of the pool's blocks, as tiers read and write them.

`foreword.model.storage` implements `BlockMemory` for a model's pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from foreword.cache import BlockIds, KVCacheManager, TokenSequence
from foreword.errors import ConfigError
from foreword.tiers.tier import BlockKeys, joined_keys


class BlockMemory(Protocol):
    """The memory of the pool. A tier's threads call it while the engine computes with other blocks."""

    def payload_bytes(self, group_id: int) -> int:
        """Bytes of one block of a group."""

    def write(self, group_id: int, block_id: int, payload: memoryview) -> None:
        """Fill a block."""

    def read(self, group_id: int, block_id: int, out: memoryview) -> None:
        """Copy a block."""

    def provide(self, block_ids: BlockIds) -> Iterator[None]:
        """Let the operating system provide the memory of blocks before they are used. The blocks keep their contents.

        Each item of the iterator provides a few megabytes.
        """


class UnknownMemory:
    """The memory of an engine that does not know where its blocks' bytes are. Reads and writes raise ConfigError."""

    def payload_bytes(self, group_id: int) -> int:
        raise ConfigError(
            f"this engine does not know the bytes of group {group_id}'s blocks, so it exports, imports and loads none; "
            "give Engine a TierDirector with the memory of its pool"
        )

    def write(self, group_id: int, block_id: int, payload: memoryview) -> None:
        self.payload_bytes(group_id)

    def read(self, group_id: int, block_id: int, out: memoryview) -> None:
        self.payload_bytes(group_id)

    def provide(self, block_ids: BlockIds) -> Iterator[None]:
        return iter(())


class Part(NamedTuple):
    """Blocks of one group: their numbers in the sequence, ascending, and their ids in the pool."""

    group_id: int
    numbers: BlockIds
    block_ids: BlockIds

    def adopt(self, manager: KVCacheManager, sequence: TokenSequence, chosen: npt.NDArray[np.intp]) -> int:
        """Index the part's blocks at the indices `chosen`, which must be filled; returns the number indexed."""
        num_adopted = 0
        for run in np.split(chosen, np.flatnonzero(np.diff(self.numbers[chosen]) != 1) + 1) if len(chosen) else ():
            if manager.adopt(self.group_id, sequence, int(self.numbers[run[0]]), self.block_ids[run]):
                num_adopted += len(run)
        return num_adopted


def take_blocks(manager: KVCacheManager, parts: Sequence[Part], held: BlockIds) -> list[Part] | None:
    """Hold the blocks `held`, and take a free block for each block of `parts`.

    Returns the parts with the ids of the taken blocks. If too few blocks are free, returns None and holds nothing.
    """
    counts = [len(part.numbers) for part in parts]
    manager.hold_blocks(held)  # otherwise taking blocks could evict them
    block_ids = manager.take_blocks(sum(counts))
    if block_ids is None:
        manager.release_blocks(held)
        return None
    pieces = np.split(block_ids, np.cumsum(counts)[:-1])
    return [Part(part.group_id, part.numbers, piece) for part, piece in zip(parts, pieces, strict=True)]


def names_of(manager: KVCacheManager, namespace: bytes, sequence: TokenSequence, parts: Sequence[Part]) -> BlockKeys:
    """The names that tiers have for a sequence's blocks in `parts`; there must be at least one block."""
    keys = manager.keys_by_group(sequence)
    return joined_keys(
        BlockKeys.of_group(namespace, part.group_id, [keys[part.group_id][n] for n in part.numbers.tolist()])
        for part in parts
    )


class BlocksOfParts:
    """The blocks of several parts, one part after the other. A tier writes to them when it loads, and reads them when
    it stores.
    """

    def __init__(self, memory: BlockMemory, parts: list[Part]) -> None:
        self._memory = memory
        self._places = [(part.group_id, block_id) for part in parts for block_id in part.block_ids.tolist()]
        self.payload_bytes = np.array([memory.payload_bytes(group_id) for group_id, _ in self._places], np.int64)
        """[blocks]"""

    def put(self, index: int, payload: memoryview) -> None:
        self._memory.write(*self._places[index], payload)

    def take(self, index: int, out: memoryview) -> None:
        self._memory.read(*self._places[index], out)
