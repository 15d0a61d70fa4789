"""The `value` policy: what it learns, from what, and what that keeps."""

import hashlib

import numpy as np
import pytest

from cache.eviction.policy_models import ids
from foreword.cache import KVCacheManager, RadixIndex, TokenSequence
from foreword.cache.eviction.value import MIN_REMEMBERED, ValuePolicy


def run(manager, name, tokens, block_size=2):
    """One request from admission to its end; returns how many tokens it hit."""
    seq = TokenSequence(name, list(tokens), block_size=block_size)
    found = manager.get_computed_blocks(seq)
    assert manager.allocate_slots(seq, len(seq), found) is not None
    manager.free(name)
    return found.num_tokens


def test_value_keeps_a_conversation_through_a_think_time_that_lru_cannot_outlast():
    """Every request comes again once, after more new ones than the pool holds, if its second block is odd."""
    hits = {}
    for name in ("lru", "value"):
        manager = KVCacheManager(60, block_size=2, eviction_policy=name)
        hits[name] = 0
        for number in range(2000):
            for at in (number, number - 40):
                size = 2 if at % 4 else 12  # what comes again brings little
                if at == number or (at >= 0 and size == 2):
                    tokens = [3 * at, at]
                    tokens += [at * 100 + place for place in range(2 * size - len(tokens))] + [0]
                    hits[name] += run(manager, f"{at} {number}", tokens)
        manager.check_integrity()
    assert hits["lru"] == 0
    assert hits["value"] > 800


def use(policy, *numbers):
    """One request computes these blocks, which are known by their numbers alone, and ends; returns their ids."""
    blocks = policy.popleft(len(numbers))
    policy.note_cached(blocks, np.arange(len(numbers), dtype=np.int32))
    policy.note_keys(blocks, [hashlib.sha256(str(number).encode()).digest() for number in numbers])
    policy.append(blocks[::-1])
    return blocks.tolist()


def goes_before_a_new_one(policy, number, new):
    """Whether a block is evicted before one that was freed after it and never seen before."""
    [known], [fresh] = use(policy, number), use(policy, new)
    order = policy.in_order().tolist()
    return order.index(known) < order.index(fresh)


@pytest.mark.slow
def test_value_knows_evicted_blocks_again_by_key_and_forgets_the_oldest():
    """Two prompts return long after they were evicted. One that stays away for too long is as good as new."""
    policy, fresh = ValuePolicy(16), iter(range(1000, 10**9))

    def live(num_rounds, *returning):
        for _ in range(num_rounds):
            for number in returning:
                use(policy, number)
                use(policy, *(next(fresh) for _ in range(16)))  # evicts everything else

    live(200, 1, 2)
    assert not goes_before_a_new_one(policy, 1, next(fresh))
    assert not goes_before_a_new_one(policy, 2, next(fresh))
    live(MIN_REMEMBERED // 17 + 10, 1)
    policy.check_integrity()
    assert not goes_before_a_new_one(policy, 1, next(fresh)), "it came again and again"
    assert goes_before_a_new_one(policy, 2, next(fresh)), "its last use is forgotten"


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_value_learns_from_what_it_evicted_under_any_index(index):
    """Five prompts in turn, and room for two: what lru keeps is never what comes next."""
    hits = {}
    for name in ("lru", "value"):
        policy = "lru" if name == "lru" else ValuePolicy(20)
        manager = KVCacheManager(
            20, block_size=4, eviction_policy=policy, index=RadixIndex(20, 4) if index == "radix" else None
        )
        hits[name] = 0
        for number in range(400):
            tokens = range(100 * (number % 5), 100 * (number % 5) + 40)
            hits[name] += run(manager, str(number), tokens, 4)
        manager.check_integrity()
    assert hits["lru"] == 0
    assert hits["value"] > 1000


def test_value_counts_a_block_that_two_requests_hold_as_one_use_of_each():
    """Freed by one request and then, without a hit between, by another: the latter is its last use."""
    policy = ValuePolicy(3)
    first, second, third = (use(policy, number)[0] for number in (1, 2, 3))
    policy.remove(ids(first))
    policy.append(ids(first))
    assert policy.in_order().tolist() == [second, third, first]
