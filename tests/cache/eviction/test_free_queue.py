"""Queues of free blocks: their order, and the memory that they need."""

import random
import tracemalloc

import numpy as np

from cache.eviction.policy_models import ids
from foreword.cache.eviction.free_queue import KeyedBlockQueue


def test_the_keyed_queue_behaves_like_a_sorted_list_over_many_random_operations():
    rng = random.Random(0)
    for size in (1, 2, 7, 64):
        queue, out, model, arrivals = KeyedBlockQueue(size), list(range(size)), {}, 0
        for _ in range(3000):
            kind = rng.choice("apr")
            if kind == "a" and out:
                rng.shuffle(out)
                count = rng.randint(1, len(out))
                back, out = out[:count], out[count:]
                keys = [rng.randint(-2, 3) for _ in back]
                queue.append(ids(*back), np.array(keys, np.int64))
                for block, key in zip(back, keys, strict=True):
                    arrivals += 1
                    model[block] = (key, arrivals)
            elif kind == "p":
                count = rng.randint(0, len(model))
                expected = sorted(model, key=model.get)[:count]
                assert queue.popleft(count).tolist() == expected
                out += expected
                for block in expected:
                    del model[block]
            elif kind == "r" and model:
                gone = rng.sample(sorted(model), rng.randint(1, len(model)))
                queue.remove(ids(*gone))
                out += gone
                for block in gone:
                    del model[block]
            assert queue.in_order().tolist() == sorted(model, key=model.get)
            assert len(queue) == len(model)
            queue.check_integrity()


def test_a_queue_whose_blocks_come_and_go_under_ever_new_keys_does_not_grow():
    """Each removal leaves a stale entry, and each key a lane."""
    queue = KeyedBlockQueue(50)
    queue.append(np.arange(50, dtype=np.int32), np.zeros(50, np.int64))
    tracemalloc.start()
    try:
        for turn in range(5000):
            some = ids(7, turn % 7)
            queue.remove(some)
            queue.append(some, np.array([turn, turn], np.int64))
        now, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert now < 100_000, "5,000 lanes take more than a megabyte"
    queue.check_integrity()
