"""The free queue and the reference counts."""

import random

import numpy as np
import pytest

from foreword.cache import BlockPool, FreeKVCacheBlockQueue


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
    pool._free.remove(ids(1))
    with pytest.raises(AssertionError, match="without holder"):
        pool.check_integrity(np.zeros(2, np.int32))
