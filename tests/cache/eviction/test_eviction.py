"""Eviction policies: each against a plain model of its order, all against one contract."""

import random
import tracemalloc
from typing import get_args

import numpy as np
import pytest

from foreword.cache import (
    BlockPool,
    FreeKVCacheBlockQueue,
    KVCacheManager,
    PriorityPolicy,
    RadixIndex,
    TokenSequence,
    make_policy,
)
from foreword.cache.eviction.choose import POLICIES
from foreword.cache.eviction.free_queue import KeyedBlockQueue
from foreword.cache.eviction.policies import FifoPolicy, LastAccessedPolicy, LfuPolicy, LruPolicy, SlruPolicy
from foreword.cache.eviction.value import ValuePolicy
from foreword.config import CacheConfig, EvictionName
from foreword.errors import ConfigError

NAMES = list(POLICIES)


def ids(*block_ids):
    return np.array(block_ids, np.int32)


# ---------------------------------------------------------------------------------------- the models


class Model:
    """What a policy should do, block by block, with the order found by sorting all free blocks."""

    def __init__(self, num_blocks):
        self.time = 0
        self.free = dict.fromkeys(range(num_blocks), 0)  # block -> what it is sorted by among its equals
        self.cached = {}  # block -> what is known of its content
        for block in self.free:
            self.free[block] = self.tick()

    def tick(self):
        self.time += 1
        return self.time

    def append(self, blocks):
        self.put_first([block for block in blocks if block not in self.cached])
        for block in blocks:
            if block in self.cached:
                self.free[block] = self.tick()

    def put_first(self, blocks):
        for block in reversed(blocks):
            self.free[block] = -self.tick()

    def remove(self, blocks):
        for block in blocks:
            del self.free[block]

    def popleft(self, count):
        blocks = self.in_order()[:count]
        for block in blocks:
            del self.free[block]
            self.cached.pop(block, None)
        return blocks

    def note_cached(self, blocks, depths):
        for depth, block in sorted(zip(depths, blocks, strict=True), key=lambda pair: -pair[0]):
            self.cached[block] = {"hits": 0, "depth": depth, "cached_at": self.tick(), "priority": 0}

    def note_hit(self, blocks):
        for block in blocks:
            if block in self.cached:
                self.cached[block]["hits"] += 1

    def note_forgotten(self, blocks):
        self.put_first([b for b in blocks if self.cached.pop(b, None) is not None and b in self.free])

    def set_priority(self, blocks, priority):
        for block in blocks:
            if block in self.cached:
                self.cached[block]["priority"] = priority
                if block in self.free:
                    self.free[block] = self.tick()

    def in_order(self):
        return sorted(self.free, key=self.key)

    def key(self, block):
        if block not in self.cached:
            return (0, self.free[block])
        return (1, *self.cached_key(block, self.cached[block]))


class LruModel(Model):
    def cached_key(self, block, content):
        return (self.free[block],)


class LfuModel(Model):
    def cached_key(self, block, content):
        return (content["hits"], self.free[block])


class SlruModel(Model):
    """A block is protected by a hit, until the protected ones that are free grow too many."""

    def __init__(self, num_blocks):
        super().__init__(num_blocks)
        self.limit = int(0.8 * num_blocks)

    def append(self, blocks):
        super().append(blocks)
        protected = [b for b in self.in_order() if b in self.cached and self.cached[b]["hits"]]
        for block in protected[: max(0, len(protected) - self.limit)]:
            self.cached[block]["hits"] = 0
            self.free[block] = self.tick()

    def cached_key(self, block, content):
        return (content["hits"] > 0, self.free[block])


class FifoModel(Model):
    def cached_key(self, block, content):
        return (content["cached_at"],)


class LastAccessedModel(Model):
    def append(self, blocks):
        super().append(blocks)
        now = self.tick()
        for at, block in enumerate(blocks):
            if block in self.cached:
                self.free[block] = (now, -self.cached[block]["depth"], at)

    def cached_key(self, block, content):
        return (self.free[block],)


class PriorityModel(Model):
    def cached_key(self, block, content):
        return (content["priority"], self.free[block])


class ValueModel(Model):
    """The policy's own estimates, put in order block by block: a head is worth as much as what follows it."""

    policy = None

    def cached_key(self, block, content):
        return (self.worth(block), self.policy._entry[block])

    def worth(self, block):
        policy = self.policy
        age = policy._history.num_uses - policy._entry[block]
        edges = policy._hazards.edges
        own = policy._hazards.value[policy._class[block], max(n for n, edge in enumerate(edges) if edge <= age)]
        following = [
            other
            for other in self.free
            if other in self.cached
            and policy._parent[other] == block
            and self.cached[other]["depth"] == self.cached[block]["depth"] + 1
        ]
        return max([own, *map(self.worth, following)])


class ForetoldModel(Model):
    """Whatever the policy foretold when it was last asked."""

    policy = None

    def __init__(self, num_blocks):
        self.order = list(range(num_blocks))

    def look(self, *_):
        self.order = self.policy.in_order().tolist()

    append = remove = note_cached = note_hit = note_forgotten = look

    def popleft(self, count):
        given = self.order[:count]
        self.look()
        return given

    def in_order(self):
        return self.order


MODELS = {
    "lru": LruModel,
    "lfu": LfuModel,
    "slru": SlruModel,
    "fifo": FifoModel,
    "last_accessed": LastAccessedModel,
    "priority": PriorityModel,
    "value": ForetoldModel,
    "value alone": ValueModel,
}
MAKERS = {**POLICIES, "value alone": ValuePolicy}


class RandomLife:
    """Random operations, done to a policy and to a model alike.

    Prefixes are short chains: blocks are taken, some are cached, cached ones are hit, freed, forgotten.
    """

    def __init__(self, rng, num_blocks, policy, model):
        self.rng, self.num_blocks, self.policy, self.model = rng, num_blocks, policy, model
        model.policy = policy
        self.held = []  # one entry per block and holder
        self.cached = set()

    def tell(self, name, blocks, *depths):
        getattr(self.policy, name)(ids(*blocks), *(ids(*each) for each in depths))
        getattr(self.model, name)(blocks, *depths)

    def some(self, blocks, most=None):
        blocks = sorted(set(blocks))
        return self.rng.sample(blocks, self.rng.randint(0, min(len(blocks), most or len(blocks))))

    def take(self):
        count = self.rng.randint(0, len(self.policy))
        taken = self.policy.popleft(count).tolist()
        assert taken == self.model.popleft(count)
        self.held += taken
        self.cached.difference_update(taken)
        fresh, depth = taken[: self.rng.randint(0, count)], self.rng.randint(0, 3)
        self.tell("note_cached", fresh, list(range(depth, depth + len(fresh))))
        self.cached.update(fresh)

    def hit(self):
        found = self.some(self.cached, 6)
        self.tell("remove", [block for block in found if block not in self.held])
        self.tell("note_hit", found)
        self.held += found

    def release(self):
        released = self.some(self.held)
        for block in released:
            self.held.remove(block)
        self.tell("append", [block for block in released if block not in self.held])

    def forget(self):
        gone = self.some(range(self.num_blocks), 4)
        self.tell("note_forgotten", gone)
        self.cached.difference_update(gone)

    def set_priority(self):
        if isinstance(self.policy, PriorityPolicy):
            chosen, priority = self.some(range(self.num_blocks), 3), self.rng.randint(-1, 2)
            self.policy.set_priority(ids(*chosen), priority)
            self.model.set_priority(chosen, priority)

    def step(self):
        steps = (self.take, self.hit, self.release, self.forget, self.set_priority)
        self.rng.choices(steps, (35, 25, 30, 5, 5))[0]()


def lives(name, num_steps, *sizes):
    """Yield after each step of one random life per pool size."""
    for num_blocks in sizes:
        life = RandomLife(random.Random(num_blocks), num_blocks, MAKERS[name](num_blocks), MODELS[name](num_blocks))
        for _ in range(num_steps):
            life.step()
            yield life


@pytest.mark.parametrize("name", MAKERS)
def test_a_policy_gives_blocks_in_the_order_of_its_model(name):
    for life in lives(name, 600, 1, 2, 5, 12, 40):
        assert life.policy.in_order().tolist() == life.model.in_order()


# --------------------------------------------------------------------------------------- the contract


@pytest.mark.parametrize("name", MAKERS)
def test_no_block_is_lost_and_none_is_given_twice(name):
    for life in lives(name, 600, 1, 3, 17):
        policy, held = life.policy, set(life.held)
        free = policy.in_order().tolist()
        assert len(free) == len(set(free)) == len(policy)
        assert set(free) == set(range(life.num_blocks)) - held
        assert all((block in policy) == (block not in held) for block in range(life.num_blocks))
        policy.check_integrity()


@pytest.mark.parametrize("name", MAKERS)
def test_blocks_are_given_as_foretold_in_any_portions(name):
    *_, life = lives(name, 400, 30)
    foretold = life.policy.in_order().tolist()
    given, portions = [], random.Random(6)
    while len(life.policy):
        given += life.policy.popleft(portions.randint(0, min(4, len(life.policy)))).tolist()
    assert given == foretold
    assert life.policy.popleft(0).tolist() == []


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


def test_an_unknown_name_is_refused_with_the_choices():
    with pytest.raises(ConfigError, match=r"'lrru'.*lru, lfu, slru, fifo, last_accessed, priority, value"):
        make_policy("lrru", 4)
    with pytest.raises(ConfigError, match="eviction_policy"):
        KVCacheManager(4, eviction_policy="random")
    with pytest.raises(ConfigError, match="eviction_policy"):
        CacheConfig(eviction_policy="random")


def test_options_offer_the_policies_that_there_are():
    assert list(get_args(EvictionName)) == NAMES


# ---------------------------------------------------------------------------------- one by one, in words


def cached_chain(policy, count):
    """Take and cache blocks in one call, and free them last block first."""
    blocks = policy.popleft(count)
    policy.note_cached(blocks, np.arange(count, dtype=np.int32))
    policy.append(blocks[::-1])
    return blocks


def hit(policy, block_ids):
    policy.remove(block_ids)
    policy.note_hit(block_ids)
    policy.append(block_ids[::-1])


def test_lfu_keeps_what_is_hit_most():
    policy = make_policy("lfu", 4)
    popular, once, newest = cached_chain(policy, 1), cached_chain(policy, 1), cached_chain(policy, 1)
    hit(policy, popular)
    hit(policy, popular)
    hit(policy, once)
    assert policy.in_order().tolist() == [3, *newest, *once, *popular]


def test_slru_lets_a_flood_of_new_prompts_pass_by_what_was_reused():
    policy = make_policy("slru", 10)
    reused = cached_chain(policy, 3)
    hit(policy, reused)
    for _ in range(30):
        flood = policy.popleft(1)
        assert flood[0] not in reused
        policy.note_cached(flood, ids(0))
        policy.append(flood)
    assert policy.in_order().tolist()[-3:] == reused[::-1].tolist()


def test_slru_demotes_the_longest_unused_when_too_many_are_protected():
    policy = make_policy("slru", 5)  # at most 4 protected
    chains = [cached_chain(policy, 1) for _ in range(5)]
    for chain in chains:
        hit(policy, chain)
    assert policy.in_order().tolist() == [0, 1, 2, 3, 4]
    hit(policy, ids(0))  # protected anew: now 1 is the one too many
    assert policy.in_order().tolist() == [1, 2, 3, 4, 0]


def test_fifo_ignores_hits_and_serves_blocks_that_were_held_when_their_turn_came():
    policy = make_policy("fifo", 4)
    first, second, third = cached_chain(policy, 1), cached_chain(policy, 1), cached_chain(policy, 1)
    policy.remove(first)
    assert policy.popleft(2).tolist() == [3, *second]
    hit(policy, third)
    policy.append(first)
    assert policy.in_order().tolist() == [*first, *third]


def test_last_accessed_breaks_ties_toward_the_longer_prefix_in_whatever_order_blocks_are_freed():
    policy = make_policy("last_accessed", 4)
    blocks = policy.popleft(4)
    policy.note_cached(blocks, ids(0, 1, 2, 3))
    policy.append(ids(2, 0, 3, 1))
    assert policy.in_order().tolist() == [3, 2, 1, 0]


def test_priority_keeps_the_higher_number_and_forgets_it_with_the_content():
    policy = PriorityPolicy(4)
    system, question, answer = (cached_chain(policy, 1) for _ in range(3))
    policy.set_priority(system, 10)
    policy.set_priority(answer, -1)
    assert policy.in_order().tolist() == [3, *answer, *question, *system]
    policy.note_forgotten(system)
    assert policy.in_order().tolist() == [*system, 3, *answer, *question]
    blocks = policy.popleft(4)
    policy.note_cached(blocks, ids(0, 1, 2, 3))
    policy.append(blocks)
    assert policy.in_order().tolist() == blocks.tolist()


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


@pytest.mark.parametrize("index", ["hash", "radix"])
@pytest.mark.parametrize("name", NAMES)
def test_random_requests_keep_every_policy_and_index_in_step(name, index):
    rng = random.Random(3)
    policy = make_policy(name, 20)
    manager = KVCacheManager(
        20, block_size=2, eviction_policy=policy, index=RadixIndex(20, 2) if index == "radix" else None
    )
    live = {}
    for number in range(1200):
        kind = rng.random()
        if kind < 0.4:
            seq = sequence(str(number), [rng.randint(0, 1) for _ in range(rng.randint(1, 14))], 2)
            if manager.allocate_slots(seq, len(seq), manager.get_computed_blocks(seq)) is not None:
                live[seq.request_id] = seq
        elif kind < 0.7 and live:
            seq = rng.choice(list(live.values()))
            seq.append(rng.randint(0, 1))
            if manager.allocate_slots(seq, len(seq)) is None:
                manager.free(live.pop(seq.request_id).request_id)
        elif kind < 0.95 and live:
            manager.free(live.pop(rng.choice(list(live))).request_id)
        elif kind < 0.98:
            manager.evict_blocks(ids(*rng.sample(range(20), 2)))
        elif not live:
            manager.reset_prefix_cache()
        manager.check_integrity()
        known = int(policy._is_cached.sum())
        # A radix index takes no block behind one that was evicted from under a running request.
        assert known == manager.get_num_cached_blocks() or (
            index == "radix" and known > manager.get_num_cached_blocks()
        )


def test_what_a_radix_index_forgets_along_with_a_head_goes_first():
    manager = KVCacheManager(6, block_size=4, eviction_policy="fifo", index=RadixIndex(6, 4))
    run(manager, "a", range(12))  # blocks 0 1 2
    run(manager, "b", range(100, 112))  # blocks 3 4 5
    manager.evict_blocks(ids(3))
    assert manager.free_block_ids().tolist() == [3, 4, 5, 2, 1, 0]


def test_a_popular_prompt_survives_a_flood_under_slru_and_lfu_but_not_under_lru():
    survived = {}
    for name in ("lru", "slru", "lfu"):
        manager = KVCacheManager(12, block_size=4, eviction_policy=name)
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


class LosesAppended(FreeKVCacheBlockQueue):
    def append(self, block_ids):
        super().append(block_ids[1:])


class MiscountsRemoved(FreeKVCacheBlockQueue):
    def remove(self, block_ids):
        self._place[block_ids] = -1


class GivesTwice(FreeKVCacheBlockQueue):
    def popleft(self, count):
        return self._buffer[self._head : self._head + count].copy()


class KeepsPlaces(FreeKVCacheBlockQueue):
    def _compact(self):
        alive = self.in_order()
        self._head, self._tail = self._num_blocks, self._num_blocks + len(alive)
        self._buffer[self._head : self._tail] = alive


class LruLosesAppended(LosesAppended, LruPolicy):
    pass


class LruMiscountsRemoved(MiscountsRemoved, LruPolicy):
    pass


class LruGivesTwice(GivesTwice, LruPolicy):
    pass


class LruKeepsPlaces(KeepsPlaces, LruPolicy):
    pass


class LfuCountsFreeBlocksToo(LfuPolicy):
    def note_hit(self, block_ids):
        self._num_hits[:] += np.arange(len(self._num_hits))[::-1]


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


# -------------------------------------------------------------------------------------------- queues


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


def test_stale_entries_never_outgrow_the_pool():
    queue = KeyedBlockQueue(50)
    queue.append(np.arange(50, dtype=np.int32), np.zeros(50, np.int64))
    for turn in range(500):
        some = ids(7, turn % 7)
        queue.remove(some)
        queue.append(some, np.array([turn, turn], np.int64))
        assert queue._num_entries <= 100
        assert len(queue._lanes) <= 100


@pytest.mark.parametrize("name", NAMES)
def test_a_million_blocks_cost_less_than_100_bytes_each_and_200_with_two_shadows(name):
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
    assert now / 10**6 < (200 if name == "value" else 100)
    assert len(pool.free_block_ids()) == 10**6


# --------------------------------------------------------------------------------------------- value


def test_value_keeps_a_conversation_through_a_think_time_that_lru_cannot_outlast():
    """Every request comes again once, after more new ones than the pool holds, if its second block is odd."""
    hits = {}
    for name in ("lru", "value"):
        manager = KVCacheManager(60, block_size=2, eviction_policy=name)
        hits[name] = 0
        for number in range(4000):
            for at in (number, number - 40):
                size = 2 if at % 4 else 12  # what comes again brings little
                if at == number or (at >= 0 and size == 2):
                    tokens = [3 * at, at]
                    tokens += [at * 100 + place for place in range(2 * size - len(tokens))] + [0]
                    hits[name] += run_unchecked(manager, f"{at} {number}", tokens)
        manager.check_integrity()
    assert hits["lru"] == 0
    assert hits["value"] > 2000


def run_unchecked(manager, name, tokens):
    seq = sequence(name, tokens, 2)
    found = manager.get_computed_blocks(seq)
    assert manager.allocate_slots(seq, len(seq), found) is not None
    manager.free(name)
    return found.num_tokens


def test_value_remembers_evicted_blocks_by_key_and_forgets_the_oldest():
    policy = ValuePolicy(4)
    policy._history.max_uses = 2048
    keys = [number.to_bytes(8, "little") * 4 for number in range(2, 6002, 2)]
    for key in keys:
        block = policy.popleft(1)
        policy.note_cached(block, ids(0))
        policy.note_keys(block, [key])
        policy.append(block)
    policy.check_integrity()
    again = policy.popleft(1)
    policy.note_cached(again, ids(0))
    policy.note_keys(again, [keys[-100]])
    assert policy._times[again].tolist() == [1]
    other = policy.popleft(1)
    policy.note_cached(other, ids(0))
    policy.note_keys(other, [keys[0]])
    assert policy._times[other].tolist() == [0]
    assert policy._hazards.hit.sum() == 1


def test_value_learns_from_what_it_evicted_under_any_index_and_group():
    for index in (None, RadixIndex(20, 4)):
        policy = ValuePolicy(20)
        manager = KVCacheManager(20, block_size=4, eviction_policy=policy, index=index)
        for number in range(30):
            run(manager, str(number), range(100 * (number % 5), 100 * (number % 5) + 40))
        assert policy._hazards.hit.sum() > 100
