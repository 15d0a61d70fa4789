"""The bytes of the pool's blocks, as tiers read and write them.

`foreword.model.storage` has the model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from foreword.cache import BlockIds
from foreword.errors import ConfigError


class BlockMemory(Protocol):
    """The memory of the pool. A tier's threads call it while the engine computes with other blocks."""

    def payload_bytes(self, group_id: int) -> int:
        """Bytes of one block of a group."""

    def write(self, group_id: int, block_id: int, payload: memoryview) -> None:
        """Fill a block."""

    def read(self, group_id: int, block_id: int, out: memoryview) -> None:
        """Copy a block."""

    def provide(self, block_ids: BlockIds) -> Iterator[None]:
        """Let the system provide the memory of blocks before they are used, a few megabytes before each pause.

        The blocks keep their contents.
        """


class UnknownMemory:
    """The memory of an engine that was not told where its blocks' bytes are. Raises ConfigError when it is asked."""

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
    """Blocks of one group: their numbers in the sequence, ascending, and their places in the pool."""

    group_id: int
    numbers: BlockIds
    block_ids: BlockIds


class BlocksOfParts:
    """The blocks of several parts, one part after the other, as a tier's sink and source."""

    def __init__(self, memory: BlockMemory, parts: list[Part]) -> None:
        self._memory = memory
        self._places = [(part.group_id, block_id) for part in parts for block_id in part.block_ids.tolist()]
        self.payload_bytes = np.array([memory.payload_bytes(group_id) for group_id, _ in self._places], np.int64)
        """[blocks]"""

    def put(self, index: int, payload: memoryview) -> None:
        self._memory.write(*self._places[index], payload)

    def take(self, index: int, out: memoryview) -> None:
        self._memory.read(*self._places[index], out)
