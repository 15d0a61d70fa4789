"""The bytes of the pool's blocks, as tiers read and write them.

Knows groups, block ids and bytes; knows nothing of keys and tiers. `foreword.model.block_bytes` has the model's.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from foreword.cache import BlockIds


class BlockMemory(Protocol):
    """The memory of the pool. A tier's threads call it while the engine computes with other blocks."""

    def payload_bytes(self, group_id: int) -> int:
        """Bytes of one block of a group."""

    def write(self, group_id: int, block_id: int, payload: memoryview) -> None:
        """Fill a block."""

    def read(self, group_id: int, block_id: int, out: memoryview) -> None:
        """Copy a block."""


class NoMemory:
    """The memory of a pool below which there is nothing; nobody calls it."""

    def payload_bytes(self, group_id: int) -> int:
        raise NotImplementedError

    def write(self, group_id: int, block_id: int, payload: memoryview) -> None:
        raise NotImplementedError

    def read(self, group_id: int, block_id: int, out: memoryview) -> None:
        raise NotImplementedError


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
