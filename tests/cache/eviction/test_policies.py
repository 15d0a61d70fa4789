"""Eviction policies: each against a plain model of its order, then one by one in words."""

import random

import numpy as np
import pytest

from cache.eviction.policy_models import ids, lives
from foreword.cache import PriorityPolicy
from foreword.replay.policies import POLICIES, make_policy


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_gives_blocks_in_the_order_of_its_model(name):
    for life in lives(name, 600, 1, 2, 5, 12, 17, 40, 63):
        order = life.policy.in_order().tolist()
        assert order == life.model.in_order()
        assert sorted(order + sorted(set(life.held))) == list(range(life.num_blocks)), "a block is lost, or there twice"
        life.policy.check_integrity()
    foretold, given, portions = life.policy.in_order().tolist(), [], random.Random(6)
    assert len(foretold) > 1
    while len(life.policy):
        given += life.policy.popleft(portions.randint(0, min(4, len(life.policy)))).tolist()
    assert given == foretold


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


def test_tlru_gives_away_the_ends_of_all_prompts_before_any_head():
    policy = make_policy("tlru", 12)
    first, second = cached_chain(policy, 6), cached_chain(policy, 6)
    ends = [*first[:1:-1], *second[:1:-1]]
    assert policy.in_order().tolist() == [*ends, *first[1::-1], *second[1::-1]]


def test_tinylfu_remembers_the_uses_of_a_key_that_was_evicted_until_they_are_old():
    policy, key_of = make_policy("tinylfu", 2), {}

    def cache(*keys):
        for key in keys:
            block = policy.popleft(1)
            key_of[int(block[0])] = key
            policy.note_cached(block, ids(0))
            policy.note_keys(block, [key])
            policy.append(block)
        return set(key_of.values())

    kept = cache(b"famous", b"famous", b"famous", b"a", b"b", b"famous", b"c")
    assert kept == {b"famous", b"c"}, "it came back after an eviction, with its uses"
    cache(*(bytes([number]) for number in range(40)))
    kept = cache(b"new", b"new", b"new", b"famous", b"d")
    assert kept == {b"new", b"d"}, "three new uses are more than the old ones"
    policy.check_integrity()


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
