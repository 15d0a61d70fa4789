"""One contract for all eviction policies, alone, in a pool and in a manager; broken ones are noticed."""

import random
import tracemalloc
from typing import get_args

import numpy as np
import pytest

from cache.eviction.policy_models import ids
from foreword.cache import (
    BlockPool,
    KVCacheManager,
    PriorityPolicy,
    RadixIndex,
    TokenSequence,
)
from foreword.cache.eviction import policies
from foreword.cache.eviction.policies import LruPolicy
from foreword.config import CacheConfig, EvictionName
from foreword.errors import ConfigError
from foreword.replay.policies import (
    POLICIES,
    FifoPolicy,
    LastAccessedPolicy,
    LfuPolicy,
    SlruPolicy,
    make_policy,
)

NAMES = list(POLICIES)


# --------------------------------------------------------------------------------------- the contract


@pytest.mark.parametrize("name", NAMES)
def test_a_fresh_policy_gives_blocks_by_number(name):
    assert make_policy(name, 4).popleft(3).tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", NAMES)
def test_blocks_that_hold_nothing_go_first_and_of_these_the_last_freed(name):
    policy = make_policy(name, 6)
    policy.note_cached(policy.popleft(2), ids(0, 1))
    policy.append(ids(1, 0))
    policy.append(policy.popleft(1))
    assert policy.in_order().tolist() == [2, 3, 4, 5, 1, 0]
    taken = policy.popleft(3)
    policy.append(taken[:1])
    policy.append(taken[1:])
    assert policy.in_order().tolist() == [3, 4, 2, 5, 1, 0]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "fifo"])
def test_the_tail_of_a_prefix_goes_before_its_head(name):
    policy = make_policy(name, 6)
    policy.note_cached(policy.popleft(2), ids(0, 1))  # computed in two chunks
    policy.note_cached(policy.popleft(2), ids(2, 3))
    policy.append(ids(3, 2, 1, 0))
    for hit in (ids(0, 1), ids(0, 1, 2, 3), ids(0)):
        policy.remove(hit)
        policy.note_hit(hit)
        policy.append(hit[::-1])
    order = policy.in_order().tolist()
    assert [block for block in order if block < 4] == [3, 2, 1, 0]


@pytest.mark.parametrize("name", NAMES)
def test_a_forgotten_block_is_as_good_as_new(name):
    policy = make_policy(name, 3)
    blocks = policy.popleft(3)
    policy.note_cached(blocks, ids(0, 1, 2))
    policy.note_hit(blocks)
    policy.note_forgotten(ids(0, 2))
    policy.note_forgotten(ids(0, 2))
    policy.check_integrity()
    policy.note_cached(ids(0), ids(0))
    policy.append(ids(1, 0, 2))
    policy.check_integrity()
    assert policy.in_order().tolist()[0] == 2


@pytest.mark.parametrize("name", NAMES)
def test_a_million_blocks_cost_less_than_100_bytes_each(name):
    tracemalloc.start()
    try:
        pool = BlockPool(10**6, on_reuse=lambda _: None, policy=make_policy(name, 10**6))
        blocks = pool.get_new_blocks(10**6)
        pool.note_cached(blocks, np.zeros(10**6, np.int32))
        pool.free_blocks(blocks)
        now, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    now -= blocks.nbytes
    assert now / 10**6 < 100
    assert len(pool.free_block_ids()) == 10**6


def test_an_unknown_name_is_refused_with_the_choices():
    with pytest.raises(
        ConfigError, match=r"'lrru'.*lru, value, priority, lfu, slru, fifo, tlru, tinylfu, last_accessed"
    ):
        make_policy("lrru", 4)
    with pytest.raises(ConfigError, match=r"'slru'.*lru, value, priority"):
        policies.make_policy("slru", 4)
    with pytest.raises(ConfigError, match="eviction_policy"):
        KVCacheManager(4, eviction_policy="random")
    with pytest.raises(ConfigError, match="eviction_policy"):
        CacheConfig(eviction_policy="random")


def test_options_offer_the_policies_that_there_are():
    assert [*get_args(EvictionName), "priority"] == list(policies.POLICIES), "priority needs a caller that sets numbers"


# -------------------------------------------------------------------------------- through the manager


def sequence(name, tokens, block_size=4):
    return TokenSequence(name, list(tokens), block_size=block_size)


def run(manager, name, tokens):
    """One request from admission to its end; returns how many tokens it hit."""
    seq = sequence(name, tokens)
    found = manager.get_computed_blocks(seq)
    assert manager.allocate_slots(seq, len(seq), found) is not None
    manager.check_integrity()
    manager.free(name)
    manager.check_integrity()
    return found.num_tokens


def test_what_a_radix_index_forgets_along_with_a_head_goes_first():
    manager = KVCacheManager(6, block_size=4, eviction_policy=FifoPolicy(6), index=RadixIndex(6, 4))
    run(manager, "a", range(12))  # blocks 0 1 2
    run(manager, "b", range(100, 112))  # blocks 3 4 5
    manager.evict_blocks(ids(3))
    assert manager.free_block_ids().tolist() == [3, 4, 5, 2, 1, 0]


def test_a_popular_prompt_survives_a_flood_under_slru_and_lfu_but_not_under_lru():
    survived = {}
    for name in ("lru", "slru", "lfu"):
        manager = KVCacheManager(12, block_size=4, eviction_policy=make_policy(name, 12))
        for number in range(2):
            run(manager, f"popular {number}", range(17))
        for number in range(8):
            run(manager, f"flood {number}", range(100 * number + 100, 100 * number + 112))
        survived[name] = run(manager, "again", range(17))
    assert survived == {"lru": 0, "slru": 16, "lfu": 16}


def test_the_manager_takes_a_policy_that_was_made_elsewhere():
    policy = PriorityPolicy(4)
    manager = KVCacheManager(4, block_size=4, eviction_policy=policy)
    run(manager, "a", range(8))
    policy.set_priority(ids(0, 1), 1)
    run(manager, "b", range(50, 58))
    run(manager, "c", range(60, 68))
    assert run(manager, "d", range(8)) == 7


# ------------------------------------------------------------------------------------ broken variants


class LruLosesAppended(LruPolicy):
    def append(self, block_ids):
        super().append(block_ids[1:])


class LruMiscountsRemoved(LruPolicy):
    def remove(self, block_ids):
        self._place[block_ids] = -1


class LruGivesTwice(LruPolicy):
    def popleft(self, count):
        return self._buffer[self._head : self._head + count].copy()


class LruKeepsPlaces(LruPolicy):
    def _compact(self):
        alive = self.in_order()
        self._head, self._tail = self._num_blocks, self._num_blocks + len(alive)
        self._buffer[self._head : self._tail] = alive


class LfuCountsFreeBlocksToo(LfuPolicy):
    def note_hit(self, block_ids):
        self._rank[:] += np.arange(len(self._rank))[::-1]


class SlruNeverDemotes(SlruPolicy):
    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self._max_protected = 2

    def _add(self, block_ids):
        protected = self._is_protected[block_ids]
        self._probation.append(block_ids[~protected])
        self._protected.append(block_ids[protected])


class FifoLosesOverdue(FifoPolicy):
    def _add(self, block_ids):
        pass


class FifoForgetsNothing(FifoPolicy):
    def _unlearn(self, block_ids):
        pass


class LastAccessedKeepsHits(LastAccessedPolicy):
    def _discard(self, block_ids):
        pass


class PriorityOutlivesContent(PriorityPolicy):
    def note_forgotten(self, block_ids):
        self._is_cached[block_ids] = False


BROKEN = [
    LruLosesAppended,
    LruMiscountsRemoved,
    LruGivesTwice,
    LruKeepsPlaces,
    LfuCountsFreeBlocksToo,
    SlruNeverDemotes,
    FifoLosesOverdue,
    FifoForgetsNothing,
    LastAccessedKeepsHits,
    PriorityOutlivesContent,
]


@pytest.mark.parametrize("broken", BROKEN)
def test_the_integrity_check_catches_a_broken_policy(broken):
    num_blocks = 10
    rng = random.Random(1)
    policy = broken(num_blocks)
    pool = BlockPool(num_blocks, on_reuse=lambda _: None, policy=policy)
    counts, cached = np.zeros(num_blocks, np.int32), set()

    def live():
        for _ in range(2000):
            kind = rng.random()
            if kind < 0.25 and pool.get_num_free_blocks():
                taken = pool.get_new_blocks(rng.randint(1, min(2, pool.get_num_free_blocks())))
                counts[taken] += 1
                pool.note_cached(taken, np.arange(len(taken), dtype=np.int32))
                cached.update(taken.tolist())
            elif kind < 0.45 and cached:
                found = ids(*rng.sample(sorted(cached), min(2, len(cached))))
                pool.touch(found)
                counts[found] += 1
            elif kind < 0.5:
                gone = rng.sample(range(num_blocks), 2)
                pool.note_forgotten(ids(*gone))
                cached.difference_update(gone)
            elif (held := np.flatnonzero(counts)).size:
                released = ids(*rng.sample(held.tolist(), min(4, len(held))))
                pool.free_blocks(released)
                counts[released] -= 1
            pool.check_integrity(counts)

    with pytest.raises(AssertionError) as caught:
        live()
    assert caught.traceback[-1].name in ("check_integrity", "_check_kept"), "something else noticed first"


class PoolForgetsQueue(BlockPool):
    def touch(self, block_ids):
        self._ref_counts[block_ids] += 1


class PoolFreesEarly(BlockPool):
    def free_blocks(self, block_ids):
        self._ref_counts[block_ids] -= 1
        self._free.append(block_ids)


class PoolCountsOnce(BlockPool):
    def touch(self, block_ids):
        self._free.remove(block_ids[self._ref_counts[block_ids] == 0])
        self._ref_counts[block_ids] = 1


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("broken", [PoolForgetsQueue, PoolFreesEarly, PoolCountsOnce])
def test_the_integrity_check_catches_a_broken_pool(broken, name):
    pool = broken(6, on_reuse=lambda _: None, policy=make_policy(name, 6))
    held = pool.get_new_blocks(2)
    pool.touch(held)
    pool.touch(ids(4))
    pool.free_blocks(held)
    with pytest.raises(AssertionError):
        pool.check_integrity(np.array([1, 1, 0, 0, 1, 0], np.int32))
