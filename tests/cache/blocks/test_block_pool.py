"""The free queue and the reference counts."""

import random

import numpy as np
import pytest

from doors import free_queue_of
from foreword.cache import (
    BlockPool,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    TokenSequence,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)
from foreword.errors import AllocationError, CacheBusyError, ConfigError


def ids(*block_ids):
    return np.array(block_ids, np.int32)


def test_the_queue_gives_blocks_in_the_order_in_which_they_came():
    queue = FreeKVCacheBlockQueue(5)
    assert queue.popleft(3).tolist() == [0, 1, 2]
    queue.append(ids(2, 0))
    assert queue.in_order().tolist() == [3, 4, 2, 0]


def test_blocks_leave_the_middle_of_the_queue():
    queue = FreeKVCacheBlockQueue(6)
    queue.remove(ids(1, 4))
    assert queue.in_order().tolist() == [0, 2, 3, 5]
    assert 4 not in queue
    queue.append(ids(4))
    assert queue.popleft(5).tolist() == [0, 2, 3, 5, 4]
    assert len(queue) == 0


def test_the_queue_behaves_like_a_list_over_many_random_operations():
    rng = random.Random(0)
    for size in (1, 2, 7, 64):
        queue, model, out = FreeKVCacheBlockQueue(size), list(range(size)), []
        for _ in range(3000):
            kind = rng.choice("apr")
            if kind == "a" and out:
                rng.shuffle(out)
                count = rng.randint(1, len(out))
                back, out = out[:count], out[count:]
                queue.append(ids(*back))
                model += back
            elif kind == "p":
                count = rng.randint(0, len(model))
                taken = queue.popleft(count).tolist()
                assert taken == model[:count]
                model = model[count:]
                out += taken
            elif kind == "r" and model:
                gone = rng.sample(model, rng.randint(1, len(model)))
                queue.remove(ids(*gone))
                model = [block for block in model if block not in gone]
                out += gone
            assert queue.in_order().tolist() == model
            assert len(queue) == len(model)


def test_a_block_is_free_when_its_last_holder_lets_go():
    pool = BlockPool(3, on_reuse=lambda _: None)
    held = pool.get_new_blocks(2)
    pool.touch(held)
    pool.free_blocks(held)
    assert pool.get_num_free_blocks() == 1
    pool.free_blocks(held[::-1])
    assert pool.free_block_ids().tolist() == [1, 0, 2]
    assert pool.get_usage() == 0.0


def test_the_observer_hears_of_every_block_before_it_is_given_away():
    heard = []
    pool = BlockPool(4, on_reuse=lambda block_ids: heard.extend(block_ids.tolist()))
    given = pool.get_new_blocks(3)
    assert heard == given.tolist()


def test_freeing_more_often_than_holding_is_caught():
    pool = BlockPool(2, on_reuse=lambda _: None)
    with pytest.raises(AssertionError, match="freed more often"):
        pool.free_blocks(ids(0))


def test_the_integrity_check_catches_a_leaked_block():
    pool = BlockPool(2, on_reuse=lambda _: None)
    pool.get_new_blocks(1)
    with pytest.raises(AssertionError, match="held"):
        pool.check_integrity(np.zeros(2, np.int32))


def test_the_integrity_check_catches_a_lost_queue_entry():
    pool = BlockPool(2, on_reuse=lambda _: None)
    free_queue_of(pool).remove(ids(1))
    with pytest.raises(AssertionError, match="without holder"):
        pool.check_integrity(np.zeros(2, np.int32))


# ------------------------------------------------------------------------------------- found by their keys


def filled_pool(num_groups=1):
    """A pool whose blocks 0 and 1 hold the two blocks of a sequence, in every group."""
    pool = BlockPool(8, num_groups=num_groups)
    sequence = TokenSequence("a", range(5), block_size=2)
    tables = [pool.get_new_blocks(3) for _ in range(num_groups)]
    for group_id, table in enumerate(tables):
        pool.cache_full_blocks(sequence, table, 0, 2, group_id)
    return pool, sequence.block_hashes(), tables


def test_full_blocks_are_found_by_their_keys():
    pool, keys, [table] = filled_pool()
    assert pool.get_cached_block(keys[1]) == [KVCacheBlock(pool, 1)]
    pool.free_blocks(table[::-1])
    assert pool.get_cached_block(keys[0]) == [pool.block(0)]
    pool.get_new_blocks(8)
    assert pool.get_cached_block(keys[0]) is None


def test_a_key_is_found_only_if_every_group_that_is_asked_has_it():
    pool, keys, tables = filled_pool(num_groups=2)
    assert pool.get_cached_block(keys[0], [0, 1]) == [pool.block(int(table[0])) for table in tables]
    pool.evict_blocks({int(tables[1][0])})
    assert pool.get_cached_block(keys[0], [0, 1]) is None
    assert pool.get_cached_block(keys[0], [0]) == [pool.block(0)]


def test_blocks_to_evict_come_in_any_iterable():
    for form in (list, set, tuple, iter, np.array):
        pool, keys, _ = filled_pool()
        pool.evict_blocks(form([0, 2]))
        assert pool.get_cached_block(keys[0]) is None
        assert pool.get_cached_block(keys[1]) is not None


def test_a_view_tells_what_the_pool_tells_now():
    pool, keys, [table] = filled_pool()
    block = pool.block(1)
    assert (block.block_id, block.ref_cnt, block.is_null) == (1, 1, False)
    assert block.block_hash == make_block_hash_with_group_id(keys[1], 0)
    pool.touch(table[:2])
    assert block.ref_cnt == 2
    pool.evict_blocks([1])
    assert block.block_hash is None
    assert pool.block(-1).is_null


def test_a_key_with_its_group_comes_apart_again():
    key = make_block_hash_with_group_id(b"some key", 7)
    assert (get_block_hash(key), get_group_id(key)) == (b"some key", 7)


def test_a_pool_whose_blocks_are_held_is_not_reset():
    pool, keys, [table] = filled_pool()
    with pytest.raises(CacheBusyError, match="3 blocks are held"):
        pool.reset_prefix_cache()
    pool.free_blocks(table)
    assert pool.reset_prefix_cache()
    assert pool.get_cached_block(keys[0]) is None


def test_more_blocks_than_are_free_are_refused():
    pool = BlockPool(2)
    with pytest.raises(AllocationError, match="3 new blocks are more than the 2 free ones"):
        pool.get_new_blocks(3)
    assert pool.get_num_free_blocks() == 2


def test_a_pool_with_an_observer_leaves_keys_to_it():
    with pytest.raises(ConfigError, match="on_reuse"):
        BlockPool(2, on_reuse=lambda _: None).get_cached_block(b"key")


def test_entries_that_stand_for_no_block_are_passed_over():
    """A window's table begins with several of them."""
    pool = BlockPool(8)
    sequence = TokenSequence("a", range(20), block_size=4)
    keys, held = sequence.block_hashes(), pool.get_new_blocks(3).tolist()
    pool.cache_full_blocks(sequence, [-1, -1, held[0], -1, held[1]], 2, 5)
    assert pool.get_cached_block(keys[2]) == [pool.block(held[0])]
    assert pool.get_cached_block(keys[3]) is None
    assert pool.get_cached_block(keys[4]) == [pool.block(held[1])]
    pool.free_blocks(ids(*held))
    pool.evict_blocks([-1, held[0], -1])
    assert pool.get_cached_block(keys[2]) is None
    pool.check_integrity(np.zeros(8, np.int32))
    with pytest.raises(AllocationError, match="block 8 is not in this pool; its 8 blocks are 0 to 7"):
        pool.evict_blocks([0, 8])
