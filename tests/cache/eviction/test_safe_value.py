"""`value` made safe: it does as the better of two shadow pools does, and these are what they claim to be."""

import random

import numpy as np
import pytest

from foreword.cache import FullAttentionSpec, KVCacheManager, RadixIndex, SlidingWindowSpec, TokenSequence
from foreword.cache.eviction.policies import LruPolicy
from foreword.cache.eviction.safe_value import SafeValuePolicy
from foreword.cache.eviction.shadow_pool import ShadowPool
from foreword.cache.eviction.value import ValuePolicy
from foreword.replay.caches import ManagerCache
from replay.workloads import agents, chat, documents, requests


def run(manager, name, tokens, block_size=2):
    seq = TokenSequence(name, list(tokens), block_size=block_size)
    found = manager.get_computed_blocks(seq)
    assert manager.allocate_slots(seq, len(seq), found) is not None
    manager.free(name)
    return found.num_tokens


def prompt(kind, number, size):
    """A prompt of `size` blocks of two tokens that is like no other."""
    return [kind, number, *(number * 100 + place for place in range(2 * size - 2)), 0]


def size_of(number):
    return 2 if number % 4 else 12


def change_of_habits(num_before, num_after):
    """At first a few short prompts come back, late, and no long ones; then no short ones, and each long one soon."""
    for number in range(num_before):
        yield prompt(1, number, size_of(number))
        if number >= 41 and not (number - 41) % 8:
            yield prompt(1, number - 40, size_of(number - 40))
    for number in range(num_after):
        yield prompt(2, number, size_of(number))
        if number >= 6 and not (number - 6) % 4:
            yield prompt(2, number - 6, 12)


def test_it_changes_to_lru_when_what_was_learnt_misleads():
    found = {}
    safe = SafeValuePolicy(60)
    for name, policy in (("lru", "lru"), ("value alone", ValuePolicy(60)), ("safe", safe)):
        manager = KVCacheManager(60, block_size=2, eviction_policy=policy)
        prompts = enumerate(change_of_habits(2000, 500))
        found[name] = sum(run(manager, str(at), tokens) for at, tokens in prompts)
        manager.check_integrity()
    assert found["value alone"] < found["lru"] - 300, "the stream does not mislead"
    assert (safe.num_switches, safe.follows_value) == (1, False)
    assert found["safe"] > found["lru"] - 200
    assert found["safe"] > found["value alone"] + 100


@pytest.mark.parametrize("kind", [chat, agents, documents])
def test_the_shadows_hit_what_pools_of_their_own_would(kind):
    trace = requests(kind, 400)
    safe = SafeValuePolicy(400)
    policies = {"safe": safe, "lru": "lru", "value": ValuePolicy(400)}
    hits = {}
    for name, policy in policies.items():
        cache = ManagerCache(400, policy)
        hits[name] = sum(cache.admit(each) for each in trace)
    assert safe._lru.num_hits == pytest.approx(hits["lru"], rel=0.001)
    assert safe._value.num_hits == pytest.approx(hits["value"], rel=0.01)
    assert safe._lru.num_hits != safe._value.num_hits, "the two do not differ"
    if not safe.num_switches:
        assert hits["safe"] == hits["value"] == safe._value.num_hits


def force_switch(policy):
    other = policy._lru if policy.follows_value else policy._value
    other.num_hits = policy._followed.num_hits + 10**6
    policy._follow(other)


def test_the_pool_comes_to_hold_what_the_followed_shadow_holds():
    trace = requests(chat, 600)
    policy = SafeValuePolicy(300)
    cache = ManagerCache(300, policy)
    for number, each in enumerate(trace):
        if number == 400:
            force_switch(policy)
        cache.admit(each)
        if number == 400:
            assert not policy.follows_value
            given_up = len(policy._given_up)
        if not number % 10:
            policy.check_integrity()
    assert given_up > 0, "the two shadows held the same"
    assert len(policy._given_up) == 0
    assert policy.in_order().tolist() == policy._lru.in_order().tolist()


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_duplicates_forgotten_blocks_and_changes_of_mind_keep_all_in_step(index):
    """Requests side by side fill equal blocks; some are forgotten, some fail; the leader changes now and then."""
    rng = random.Random(4)
    policy = SafeValuePolicy(24)
    manager = KVCacheManager(
        24, block_size=2, eviction_policy=policy, index=RadixIndex(24, 2) if index == "radix" else None
    )
    live = {}
    for number in range(600):
        kind = rng.random()
        if kind < 0.5:
            seq = TokenSequence(str(number), [rng.randint(0, 1) for _ in range(rng.randint(1, 12))], block_size=2)
            if manager.allocate_slots(seq, len(seq), manager.get_computed_blocks(seq)) is not None:
                live[seq.request_id] = seq
        elif kind < 0.7 and live:
            seq = rng.choice(list(live.values()))
            seq.append(rng.randint(0, 1))
            if manager.allocate_slots(seq, len(seq)) is None:
                manager.free(live.pop(seq.request_id).request_id)
        elif kind < 0.94 and live:
            manager.free(live.pop(rng.choice(list(live))).request_id)
        elif kind < 0.97:
            manager.evict_blocks(np.array(rng.sample(range(24), 2), np.int32))
        elif kind < 0.99:
            force_switch(policy)
        elif not live:
            manager.reset_prefix_cache()
        manager.check_integrity()
    assert policy.num_switches > 3


def test_equal_keys_of_two_groups_are_different_blocks():
    policy = SafeValuePolicy(64)
    manager = KVCacheManager(64, groups=(FullAttentionSpec(2), SlidingWindowSpec(8, 2)), eviction_policy=policy)
    run(manager, "new", prompt(1, 1, 8))
    assert policy.num_hits_alone == 0, "the one group's blocks were taken for the other's"
    run(manager, "again", prompt(1, 1, 8))
    assert policy.num_hits_alone > 0
    manager.check_integrity()


def test_two_equal_blocks_that_are_held_at_once_take_the_slot_from_a_third_one_once() -> None:
    shadow = ShadowPool(LruPolicy(4), 4)
    first, equal = np.array([0], np.int32), np.array([1, 2], np.int32)
    depths = np.zeros(2, np.int32)
    shadow.fill(first, np.array([7], np.uint64), depths[:1])
    shadow.release(first)
    assert shadow.fill(equal, np.array([7, 7], np.uint64), depths).tolist() == [0]
    shadow.check_integrity()
