"""The test kit: a memory that knows what each slot must hold, and a driver that reads the manager's hits through it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from foreword.cache import NULL_BLOCK, ExtraKeys, HashIndex, KVCacheManager, RadixIndex
from foreword.cache.testing import ShadowMemory, WrongSlotError, drive_manager

NUM_BLOCKS = 40


@pytest.mark.parametrize("size", [1, 3, 8])
@pytest.mark.parametrize("index", [RadixIndex, HashIndex])
def test_the_kits_own_driver_serves_a_manager(index, size):
    own = RadixIndex(NUM_BLOCKS, size) if index is RadixIndex else HashIndex(NUM_BLOCKS)
    manager = KVCacheManager(NUM_BLOCKS, block_size=size, index=own)
    assert drive_manager(manager, random.Random(size), 300) > 100


def test_the_kits_own_driver_notices_a_wrong_hit():
    index = RadixIndex(NUM_BLOCKS, 2)
    index._tokens = lambda sequence: sequence.token_ids
    with pytest.raises(WrongSlotError):
        drive_manager(KVCacheManager(NUM_BLOCKS, block_size=2, index=index), random.Random(1), 2000)


class Memory:
    """An engine's memory of 4 blocks of 2 slots, and its shadow."""

    def __init__(self) -> None:
        self.kv = np.zeros((4, 2), np.int64)
        self.shadow = ShadowMemory(2, contents=lambda block, slot: self.kv[block, slot].tobytes())

    def write(self, token_ids: list[int], table: list[int], start: int = 0, **keys: ExtraKeys) -> None:
        for position in range(start, len(token_ids)):
            self.kv[table[position // 2], position % 2] = sum(token_ids[: position + 1])
        self.shadow.write(token_ids, start, len(token_ids), table, **keys)


def test_the_kit_says_which_slot_holds_what_the_reader_must_not_read():
    memory = Memory()
    memory.write([1, 2, 3, 4], [0, 1], extra_keys=ExtraKeys(salt="alice", salt_offset=2))
    shadow = memory.shadow
    shadow.read([1, 2, 3, 4], 0, 4, [0, 1], extra_keys=ExtraKeys(salt="alice", salt_offset=2))
    shadow.read([1, 2], 0, 2, [0])
    shadow.read([1, 2, 9, 9], 0, 4, [0, NULL_BLOCK])
    with pytest.raises(WrongSlotError, match=r"token 2 .* slot 0 of block 1 under salt None, but .* salt 'alice'"):
        shadow.read([1, 2, 3], 0, 3, [0, 1])
    with pytest.raises(WrongSlotError, match=r"token 1 .* slot 1 of block 0 .* holds token 1 of another prefix"):
        shadow.read([1, 3], 0, 2, [0])
    with pytest.raises(WrongSlotError, match=r"token 0 .* slot 0 of block 3 .* nobody has written it"):
        shadow.read([1], 0, 1, [3])
    with pytest.raises(WrongSlotError, match="another prefix"):
        shadow.read([1], 0, 1, [0], extra_keys=ExtraKeys(adapter="sql"))


def test_the_kit_notices_bytes_that_changed_and_copies_that_were_only_announced():
    memory = Memory()
    memory.write([1, 2, 3, 4], [0, 1])
    memory.shadow.copy(1, 2)
    with pytest.raises(WrongSlotError, match=r"slot 0 of block 2 .* bytes are others"):
        memory.shadow.read([1, 2, 3, 4], 0, 4, [0, 2])
    memory.kv[2] = memory.kv[1]
    memory.shadow.read([1, 2, 3, 4], 0, 4, [0, 2])
    memory.kv[0, 1] = 7
    with pytest.raises(WrongSlotError, match=r"token 1 .* bytes are others"):
        memory.shadow.read([1, 2, 3, 4], 0, 4, [0, 2])
