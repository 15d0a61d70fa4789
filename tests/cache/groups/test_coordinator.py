"""Coordinators: hits on which all groups agree, against an oracle that tries every length, and calls for batches."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_world import GROUPS, longest_agreed, needed_blocks, num_findable
from foreword.cache import (
    NULL_BLOCK,
    ChunkedLocalSpec,
    FullAttentionSpec,
    HashIndex,
    HybridKVCacheCoordinator,
    KVCacheManager,
    MambaSpec,
    RadixIndex,
    SlidingWindowSpec,
    TokenSequence,
)
from foreword.cache.eviction.policies import make_policy
from foreword.cache.groups.choose import get_kv_cache_coordinator
from foreword.errors import ConfigError

sizes = st.sampled_from([1, 2, 3, 4, 6, 8])
any_spec = st.one_of(
    st.builds(FullAttentionSpec, sizes),
    st.builds(SlidingWindowSpec, st.integers(1, 20), sizes),
    st.builds(ChunkedLocalSpec, st.integers(1, 20), sizes),
    st.builds(MambaSpec, sizes),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(any_spec, min_size=1, max_size=4), st.integers(1, 80), st.data())
def test_the_fixed_point_is_the_longest_length_on_which_all_groups_agree(specs, num_tokens, data):
    key_size = math.gcd(*(spec.block_size for spec in specs))
    coordinator = HybridKVCacheCoordinator(specs, 512, make_policy("lru", 512), key_size)
    sequence = TokenSequence("r", range(num_tokens), block_size=key_size)
    cached, next_id = {}, 0
    for group, spec in enumerate(specs):
        share = data.draw(st.sampled_from([0.5, 0.9, 1.0]))
        rng = data.draw(st.randoms(use_true_random=False))
        for number in range(num_tokens // spec.block_size):
            if rng.random() < share:
                keys = coordinator._keys(group, sequence, number, number + 1)
                coordinator.index.insert(group, keys, np.array([next_id], np.int32))
                cached[group, number] = next_id
                next_id += 1

    hit = coordinator.find_longest_cache_hit(sequence)

    most = num_findable(specs, sequence)
    assert hit.num_tokens == longest_agreed(specs, min(num_tokens, most + 1), lambda *block: block in cached)
    for group, spec in enumerate(specs):
        needed = needed_blocks(spec, hit.num_tokens)
        expected = [
            cached[group, number] if number in needed else NULL_BLOCK
            for number in range(hit.num_tokens // spec.block_size)
        ]
        assert hit.tables[group].tolist() == expected


# -------------------------------------------------------------------------------------- small cases


def admitted(manager, name, tokens, end=None):
    sequence = TokenSequence(name, tokens, block_size=manager.block_size)
    manager.begin_step()
    hit = manager.get_computed_blocks(sequence)
    assert manager.allocate_slots(sequence, len(sequence) if end is None else end, hit) is not None
    manager.check_integrity()
    return sequence, hit


def test_a_window_hits_though_the_blocks_before_it_are_gone():
    manager = KVCacheManager(20, groups=[SlidingWindowSpec(5, 4)])
    admitted(manager, "a", range(16))
    table = manager.block_ids("a")
    manager.free("a")
    manager.evict_blocks(table[:2])
    _, hit = admitted(manager, "b", range(17))
    assert hit.num_tokens == 16
    assert hit.block_ids.tolist() == [NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, table[3]]


def test_full_attention_bounds_what_a_window_offers():
    manager = KVCacheManager(40, groups=[FullAttentionSpec(4), SlidingWindowSpec(5, 4)])
    admitted(manager, "a", range(24))
    full = manager.block_ids("a", 0)
    manager.free("a")
    manager.evict_blocks(full[4:5])
    _, hit = admitted(manager, "b", range(24))
    assert hit.num_tokens == 16
    assert [len(table) for table in hit.tables] == [4, 4]


def test_groups_of_different_block_sizes_agree_on_a_common_multiple():
    manager = KVCacheManager(60, groups=[FullAttentionSpec(4), FullAttentionSpec(6)])
    assert manager.block_size == 2
    admitted(manager, "a", range(40))
    _, hit = admitted(manager, "b", range(40))
    assert hit.num_tokens == 36
    assert [len(table) for table in hit.tables] == [9, 6]


def test_the_same_prefix_in_two_groups_never_shares_a_block():
    manager = KVCacheManager(60, groups=[FullAttentionSpec(4), FullAttentionSpec(4)])
    admitted(manager, "a", range(9))
    _, hit = admitted(manager, "b", range(9))
    assert not set(hit.tables[0].tolist()) & set(hit.tables[1].tolist())


def test_a_hybrid_hit_leaves_the_last_block_to_compute_when_it_ends_the_prompt():
    manager = KVCacheManager(60, groups=[FullAttentionSpec(4), MambaSpec(4)])
    admitted(manager, "a", range(8), end=4)
    manager.begin_step()
    assert manager.get_computed_blocks(TokenSequence("b", range(8), block_size=4)).num_tokens == 4
    manager.free("a")


def test_tails_of_all_groups_are_evicted_before_heads_of_any():
    manager = KVCacheManager(12, groups=[FullAttentionSpec(2), SlidingWindowSpec(99, 4)])
    admitted(manager, "a", range(8))
    two, four = manager.block_ids("a", 0).tolist(), manager.block_ids("a", 1).tolist()
    manager.free("a")
    queue = manager.free_block_ids().tolist()
    assert queue[6:] == [two[3], four[1], two[2], two[1], four[0], two[0]]


def test_only_hash_keys_serve_several_groups():
    with pytest.raises(ConfigError, match="RadixIndex finds whole prefixes"):
        KVCacheManager(9, groups=[FullAttentionSpec(4), SlidingWindowSpec(4, 4)], index=RadixIndex(9, 4))


def test_block_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="does not divide"):
        KVCacheManager(9, groups=[FullAttentionSpec(6)], block_size=4)


def test_caching_off_still_frees_what_leaves_the_window():
    manager = KVCacheManager(6, groups=[SlidingWindowSpec(4, 2)], enable_prefix_caching=False)
    sequence, _ = admitted(manager, "a", range(4))
    for token in range(40):
        sequence.append(token)
        assert manager.allocate_slots(sequence, len(sequence)) is not None
        manager.check_integrity()
    assert manager.get_num_free_blocks() >= 3
    assert manager.get_num_cached_blocks() == 0
    assert manager.get_computed_blocks(TokenSequence("b", range(4), block_size=2)).num_tokens == 0


def test_forgetting_a_failed_step_reaches_every_group():
    manager = KVCacheManager(40, groups=[FullAttentionSpec(2), SlidingWindowSpec(4, 4), MambaSpec(4)])
    sequence, _ = admitted(manager, "a", range(17), end=8)
    manager.begin_step()
    manager.allocate_slots(sequence, 16)
    manager.forget_uncomputed("a", 8)
    manager.free("a")
    _, hit = admitted(manager, "b", range(17))
    assert hit.num_tokens == 8


def test_blocks_of_a_batch_member_are_hit_at_once_but_its_states_one_step_later():
    for spec, length in ((SlidingWindowSpec(4, 4), 8), (MambaSpec(4), 0)):
        manager = KVCacheManager(40, groups=[FullAttentionSpec(4), spec])
        admitted(manager, "a", range(8))
        longer = TokenSequence("b", range(9), block_size=4)
        assert manager.get_computed_blocks(longer).num_tokens == length
        manager.begin_step()
        assert manager.get_computed_blocks(longer).num_tokens == 8
        assert manager.is_cached(longer, 1)
        assert not manager.is_cached(TokenSequence("c", range(1, 9), block_size=4), 1)


# ------------------------------------------------------------------------------------ decode batches


def batches(kind, num_blocks):
    match kind:
        case "hash":
            return KVCacheManager(num_blocks, block_size=4, index=HashIndex(num_blocks))
        case "radix":
            return KVCacheManager(num_blocks, block_size=4, index=RadixIndex(num_blocks, 4))
        case "off":
            return KVCacheManager(num_blocks, block_size=4, enable_prefix_caching=False)
        case _:
            return KVCacheManager(num_blocks, groups=GROUPS[kind])


def one_by_one(manager, sequences):
    """How many get their slots by single calls, up to the first that is short."""
    for number, sequence in enumerate(sequences):
        if manager.allocate_slots(sequence, len(sequence)) is None:
            return number
    return len(sequences)


@pytest.mark.parametrize("kind", ["hash", "radix", "off", "full and window", "full and narrow windows", "all types"])
def test_one_call_for_a_batch_does_what_single_calls_do(kind):
    for seed in range(2):
        rng = random.Random(seed)
        one, many = batches(kind, 70), batches(kind, 70)
        twins = {}
        for step in range(150):
            one.begin_step()
            many.begin_step()
            if rng.random() < 0.4:
                tokens = [rng.randint(0, 1) for _ in range(rng.randint(1, 14))]
                pair = [TokenSequence(str(step), tokens, block_size=one.block_size) for _ in range(2)]
                taken = [
                    m.allocate_slots(s, len(s), m.get_computed_blocks(s))
                    for m, s in zip((one, many), pair, strict=True)
                ]
                if taken[0] is not None:
                    twins[str(step)] = pair
            names = list(twins)
            counts = [rng.choice([1, 1, 1, 11]) for _ in names] if rng.random() < 0.5 else [1] * len(names)
            for name, count in zip(names, counts, strict=True):
                for token in [rng.randint(0, 1) for _ in range(count)]:
                    for sequence in twins[name]:
                        sequence.append(token)
            served = one_by_one(one, [twins[name][0] for name in names])
            ends = np.array([len(twins[name][1]) for name in names], np.int64)
            handles = many.handles(names)
            if set(counts) <= {1} and step % 2:
                assert many.allocate_decode_slots(handles) == served
            else:
                assert many.allocate_running_slots(handles, ends) == served
            assert many.free_block_ids().tolist() == one.free_block_ids().tolist()
            for (ids, lengths), (ids_one, lengths_one) in zip(
                many.group_block_tables(handles), one.group_block_tables(one.handles(names)), strict=True
            ):
                assert lengths.tolist() == lengths_one.tolist()
                for row, length in enumerate(lengths.tolist()):
                    assert ids[row, :length].tolist() == ids_one[row, :length].tolist()
            assert many.get_num_cached_blocks() == one.get_num_cached_blocks()
            assert many.stats == one.stats
            many.check_integrity()
            gone = names[served:] + [name for name in names[:served] if rng.random() < 0.1]
            for name in gone:
                one.free(name)
                many.free(name)
                del twins[name]


def test_a_batch_that_is_short_serves_the_front_and_leaves_the_rest_alone():
    manager = KVCacheManager(5, block_size=2)
    sequences = [admitted(manager, name, [ord(name), 0])[0] for name in "abcd"]
    for sequence in sequences:
        sequence.append(1)
    assert manager.allocate_decode_slots(manager.handles("abcd")) == 1
    assert [len(manager.block_ids(name)) for name in "abcd"] == [2, 1, 1, 1]
    manager.check_integrity()


def test_two_requests_of_a_batch_may_give_up_the_block_that_they_share():
    manager = KVCacheManager(8, groups=[SlidingWindowSpec(4, 4)])
    sequences = [admitted(manager, name, [*range(4), ord(name), 0, 0, 0])[0] for name in "ab"]
    assert manager.block_ids("a")[0] == manager.block_ids("b")[0]
    for sequence in sequences:
        sequence.append(1)
    assert manager.allocate_decode_slots(manager.handles("ab")) == 2
    manager.check_integrity()
    assert manager.get_num_free_blocks() == 4


@pytest.mark.parametrize("name", ["lru", "value"])
def test_the_policy_learns_what_the_index_forgot_with_no_manager_in_between(name):
    """The radix index forgets what lies below a block that is given away: three blocks for one."""
    policy, groups = make_policy(name, 4), (FullAttentionSpec(4),)
    coordinator = get_kv_cache_coordinator(groups, 4, policy, 4, enable_prefix_caching=True, index=RadixIndex(4, 4))
    row, block_ids = coordinator.admit(coordinator.nothing, 12)
    coordinator.cache_blocks(row, TokenSequence("a", range(12), block_size=4), 12)
    coordinator.tables.close_row(row)
    for block_id in block_ids:  # the head first, so that it goes first
        coordinator.pool.free_blocks(np.array([block_id], np.int32))
    assert (len(coordinator.index), policy.num_empty) == (3, 1)
    given = coordinator.pool.get_new_blocks(2)
    assert block_ids[0] in given
    assert (len(coordinator.index), policy.num_empty) == (0, 2), "the two below the head hold nothing now"
    assert set(coordinator.pool.get_new_blocks(2).tolist()) == set(block_ids[1:].tolist())
    assert coordinator.stats.evictions == 3
