"""The names that `foreword.cache` exports, vLLM's among them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import foreword.cache as cache
from doors import coordinator_of
from foreword.cache import (
    NONE_HASH,
    BlockHashToBlockMap,
    KVCacheBlocks,
    KVCacheManager,
    PrefixCachingBlockAllocator,
    SingleTypeKVCacheManager,
    TokenSequence,
    chain_root,
    hash_block_tokens,
    sha256,
)
from foreword.errors import AllocationError

SOURCE = Path(cache.__file__).read_text()


def test_all_is_what_is_imported_by_its_own_name() -> None:
    imported = set(re.findall(r"\b(\w+) as \1\b", SOURCE))
    assert len(imported) > 80
    assert set(cache.__all__) == imported
    namespace: dict[str, object] = {}
    exec("from foreword.cache import *", namespace)
    assert namespace.keys() - {"__builtins__"} == imported


def test_the_parent_of_first_blocks_has_vllms_name() -> None:
    assert chain_root() == NONE_HASH
    assert hash_block_tokens(sha256, NONE_HASH, [1, 2]) == hash_block_tokens(sha256, None, [1, 2])


def test_a_requests_blocks_come_as_objects() -> None:
    manager = KVCacheManager(10, block_size=4)
    held: list[KVCacheBlocks] = []
    for name, start in (("a", 0), ("b", 100)):
        sequence = TokenSequence(name, range(start, start + 9), block_size=4)
        assert manager.allocate_slots(sequence, 9, manager.get_computed_blocks(sequence)) is not None
        held.append(manager.get_blocks(name))
        assert held[-1].get_block_ids() == (manager.block_ids(name).tolist(),)
    assert [block.ref_cnt for block in held[0].blocks[0]] == [1, 1, 1]
    assert (held[0] + held[1]).get_block_ids() == ([0, 1, 2, 3, 4, 5],)
    manager.free("a")
    assert [block.ref_cnt for block in held[0].blocks[0]] == [0, 0, 0]
    assert isinstance(coordinator_of(manager).managers[0], SingleTypeKVCacheManager)


def test_blocks_of_a_chain_are_allocated_in_one_call_all_or_none() -> None:
    allocator = PrefixCachingBlockAllocator(num_blocks=4, block_size=2)
    chain = allocator.allocate_immutable_blocks(None, [[1, 2], [3, 4], [5, 6]])
    again = [allocator.allocate_immutable_block(None, [1, 2])]
    again += allocator.allocate_immutable_blocks(again[0], [[3, 4], [5, 6]])
    assert [one.block_id for one in again] == [one.block_id for one in chain]
    assert [one.content_hash for one in again] == [one.content_hash for one in chain]
    with pytest.raises(AllocationError):
        allocator.allocate_immutable_blocks(None, [[7, 8], [9, 9]])
    with pytest.raises(AllocationError):
        allocator.allocate_immutable_blocks(None, [[1, 2], [3]])
    assert allocator.get_num_free_blocks() == 1
    allocator.check_integrity([*chain, *again])


def test_the_first_block_of_a_key_represents_it() -> None:
    blocks, key = BlockHashToBlockMap(), hash_block_tokens(sha256, None, [1, 2])
    for block_id in (5, 3):
        blocks.insert(key, block_id)
    blocks.remove(key, 5)
    assert blocks.block_of[key] == 3
