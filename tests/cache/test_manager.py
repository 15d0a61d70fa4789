"""KVCacheManager: the worked examples of vLLM's design, and what they leave open."""

import re
from pathlib import Path

import numpy as np
import pytest

from foreword.cache import (
    ExtraKeys,
    FreeKVCacheBlockQueue,
    FullAttentionSpec,
    HashIndex,
    KVCacheManager,
    RadixIndex,
    SlidingWindowSpec,
    TokenSequence,
)
from foreword.cache.eviction.policies import LruPolicy
from foreword.errors import AllocationError, CacheBusyError, ConfigError


def sequence(name, tokens, block_size=4, **extra):
    return TokenSequence(name, list(tokens), block_size=block_size, extra_keys=ExtraKeys(**extra))


def admit(manager, seq, num_tokens=None):
    """Look a sequence up and take its blocks; returns the hit."""
    hit = manager.get_computed_blocks(seq)
    assert manager.allocate_slots(seq, len(seq) if num_tokens is None else num_tokens, hit) is not None
    manager.check_integrity()
    return hit


def table(manager, name):
    return manager.block_ids(name).tolist()


def generate(manager, seq, *tokens):
    for token in tokens:
        seq.append(token)
        assert manager.allocate_slots(seq, len(seq)) is not None
    manager.check_integrity()


class AsFreed(LruPolicy):
    """The queue of vLLM until 2025: blocks that nobody can find join its tail, too."""

    def append(self, block_ids):
        FreeKVCacheBlockQueue.append(self, block_ids)


def test_the_page_tells_both_orders_of_the_worked_example():
    page = (Path(__file__).parents[2] / "docs/concepts/cache.md").read_text()
    ours, older = (order.split() for order in re.findall(r"`(0 1 2 [\d ]+)`", page))
    for policy, expected in ((LruPolicy(10), ours), (AsFreed(10), older)):
        manager = KVCacheManager(10, block_size=4, eviction_policy=policy)
        zero, one = sequence("0", range(15)), sequence("1", [*range(10), 50, 51, 52, 53])
        assert manager.allocate_slots(zero, 15, manager.get_computed_blocks(zero)) is not None
        for token in (100, 101):
            zero.append(token)
            assert manager.allocate_slots(zero, len(zero)) is not None
        assert manager.allocate_slots(one, 14, manager.get_computed_blocks(one)) is not None
        manager.free("0")
        manager.free("1")
        two = sequence("2", [*range(12), *range(200, 217)])
        hit = manager.get_computed_blocks(two)
        assert hit.num_tokens == 12
        assert manager.allocate_slots(two, 29, hit) is not None
        assert [str(block_id) for block_id in table(manager, "2")] == expected


@pytest.mark.parametrize("groups", [[FullAttentionSpec(4)], [FullAttentionSpec(4), SlidingWindowSpec(8, 4)]])
@pytest.mark.parametrize(("most", "blocks"), [(None, 4), (16, 4), (15, 3), (8, 2), (3, 0)])
def test_what_lies_elsewhere_counts_as_far_as_a_hit_may_reach(groups, most, blocks):
    manager = KVCacheManager(40, groups=groups)
    seq = sequence("a", range(17))
    seq.most_hit_tokens = most
    elsewhere = [set(keys) for keys in manager.keys_by_group(seq)]
    assert {len(table) for table in manager.find_hit_with(seq, elsewhere)} == {blocks}


def test_worked_example_of_three_requests_and_ten_blocks():
    manager = KVCacheManager(10, block_size=4)
    zero = sequence("0", range(15))
    admit(manager, zero)
    assert table(manager, "0") == [0, 1, 2, 3]
    assert manager.get_num_cached_blocks() == 3

    generate(manager, zero, 100)
    assert manager.get_num_cached_blocks() == 4  # block 3 is full
    generate(manager, zero, 101)
    assert table(manager, "0") == [0, 1, 2, 3, 4]

    one = sequence("1", [*range(10), 50, 51, 52, 53])
    hit = admit(manager, one)
    assert hit.block_ids.tolist() == [0, 1]
    assert hit.num_tokens == 8
    assert table(manager, "1") == [0, 1, 5, 6]

    manager.free("0")
    assert manager.free_block_ids().tolist() == [4, 7, 8, 9, 3, 2]  # block 4 is not full, so nobody can find it
    manager.free("1")
    assert manager.free_block_ids().tolist() == [6, 4, 7, 8, 9, 3, 2, 5, 1, 0]

    two = sequence("2", [*range(12), *range(200, 217)])
    hit = manager.get_computed_blocks(two)
    assert hit.block_ids.tolist() == [0, 1, 2]
    evictions = manager.stats.evictions
    assert manager.allocate_slots(two, 29, hit) is not None
    assert table(manager, "2") == [0, 1, 2, 6, 4, 7, 8, 9]
    assert manager.stats.evictions == evictions  # nothing that was cached is lost
    assert manager.free_block_ids().tolist() == [3, 5]
    manager.check_integrity()


def test_worked_example_of_a_duplicate_block():
    manager = KVCacheManager(10, block_size=4)
    prompt = [ord(letter) for letter in "ABCDEF"]
    answer = [ord(letter) for letter in "GHI"]
    one = sequence("1", prompt)
    admit(manager, one)
    generate(manager, one, *answer)
    assert table(manager, "1") == [0, 1, 2]

    again = sequence("2", prompt)
    assert admit(manager, again).block_ids.tolist() == [0]
    generate(manager, again, *answer[:2])
    assert table(manager, "2") == [0, 3]
    assert manager.get_num_cached_blocks() == 3  # 0, 1 and its duplicate 3

    # Whichever goes first, the other still answers.
    manager.evict_blocks(np.array([1], np.int32))
    assert manager.get_computed_blocks(sequence("3", prompt + answer)).block_ids.tolist() == [0, 3]
    manager.check_integrity()


def test_too_few_blocks_change_nothing():
    manager = KVCacheManager(4, block_size=4)
    admit(manager, sequence("a", range(9)))
    big = sequence("b", range(100, 112))
    before = manager.free_block_ids().tolist()
    assert manager.allocate_slots(big, 12, manager.get_computed_blocks(big)) is None
    assert manager.free_block_ids().tolist() == before
    assert manager.held_request_ids() == ["a"]
    manager.check_integrity()


def test_room_for_fewer_tokens_than_there_is_room_for_is_refused_and_changes_nothing():
    manager = KVCacheManager(10, block_size=4)
    admit(manager, sequence("a", range(12)))
    before = table(manager, "a")
    with pytest.raises(AllocationError, match="num_tokens=3 is less than the 12 tokens that request 'a' has room for"):
        manager.allocate_slots(sequence("a", range(12)), 3)
    assert table(manager, "a") == before
    manager.check_integrity()


@pytest.mark.parametrize("num_tokens", [-1, 0, 7])
def test_room_for_less_than_a_hit_and_a_token_is_refused(num_tokens):
    manager = KVCacheManager(10, block_size=4)
    admit(manager, sequence("a", range(12)))
    manager.begin_step()
    other = sequence("b", range(12))
    hit = manager.get_computed_blocks(other)
    with pytest.raises(AllocationError, match=f"num_tokens={num_tokens} is less than the 11 tokens"):
        manager.allocate_slots(other, num_tokens, hit)
    assert manager.held_request_ids() == ["a"]
    manager.check_integrity()


def test_admission_returns_the_row_by_which_a_request_grows():
    manager = KVCacheManager(4, block_size=4)
    a, b = sequence("a", range(12)), sequence("b", range(50, 58))
    row_of_a, row_of_b = manager.admit(a, 5), manager.admit(b, 4)
    assert row_of_a != row_of_b
    assert manager.handles(["a", "b"]).tolist() == [row_of_a, row_of_b]
    assert manager.grow(row_of_b, 8).tolist() == manager.block_ids("b")[1:].tolist()
    assert manager.grow(row_of_a, 12) is None, "blocks are short, and nothing has changed"
    assert len(manager.block_ids("a")) == 2
    assert manager.admit(sequence("c", range(5)), 5) is None
    assert manager.allocate_running_slots(np.array([row_of_b, row_of_a]), np.array([8, 8])) == 2
    manager.check_integrity()
    manager.free("b")
    assert manager.allocate_slots(a, 12) is not None, "the same request by its id"
    assert manager.admit(sequence("c", range(90, 94)), 4) == row_of_b, "rows are given again"
    with pytest.raises(AllocationError, match=r"'a' holds blocks already, in row"):
        manager.admit(a, 12)
    manager.check_integrity()


def test_running_requests_are_refused_room_for_fewer_tokens_too():
    manager = KVCacheManager(10, block_size=4)
    admit(manager, sequence("a", range(12)))
    with pytest.raises(AllocationError, match="num_tokens=11 is less than the 12 tokens that request 'a' has room for"):
        manager.allocate_running_slots(manager.handles(["a"]), np.array([11]))
    manager.check_integrity()


def test_blocks_whose_tokens_become_known_late_are_indexed_when_asked():
    manager = KVCacheManager(10, block_size=4)
    grown = sequence("a", range(6))
    admit(manager, grown, 6)
    manager.allocate_running_slots(manager.handles(["a"]), np.array([7]))
    manager.allocate_running_slots(manager.handles(["a"]), np.array([8]))  # of tokens that are not known yet
    assert manager.get_num_cached_blocks() == 1
    grown.append(6)
    grown.append(7)
    manager.cache_blocks(grown, 8)
    assert manager.get_num_cached_blocks() == 2
    manager.free(grown)
    assert manager.held_request_ids() == []


def test_blocks_to_evict_come_in_any_iterable():
    for form in (list, set, tuple, iter, np.array):
        manager = KVCacheManager(10, block_size=4)
        admit(manager, sequence("a", range(12)))
        manager.evict_blocks(form([0, 2]))
        assert manager.get_num_cached_blocks() == 1


def test_hit_blocks_that_are_free_are_not_counted_twice():
    manager = KVCacheManager(4, block_size=4)
    admit(manager, sequence("a", range(8)))
    manager.free("a")
    # Two of the four free blocks are the hit itself; 3 more would be needed, 2 remain.
    longer = sequence("b", [*range(8), *range(50, 62)])
    assert manager.allocate_slots(longer, 20, manager.get_computed_blocks(longer)) is None
    shorter = sequence("c", [*range(8), *range(50, 58)])
    assert manager.allocate_slots(shorter, 16, manager.get_computed_blocks(shorter)) is not None
    assert manager.get_num_free_blocks() == 0
    manager.check_integrity()


def test_a_prompt_that_is_cached_whole_keeps_all_its_blocks_and_computes_one_token():
    manager = KVCacheManager(8, block_size=4)
    admit(manager, sequence("a", range(8)))
    hit = admit(manager, sequence("b", range(8)))
    assert hit.num_tokens == 7
    assert table(manager, "b") == table(manager, "a")


def test_blocks_of_a_batch_member_are_hit_by_later_members_at_once():
    manager = KVCacheManager(8, block_size=4)
    admit(manager, sequence("a", range(10)))  # scheduled, not computed yet
    assert admit(manager, sequence("b", range(10))).num_tokens == 8


def test_a_block_is_indexed_no_earlier_than_its_tokens_are_scheduled():
    manager = KVCacheManager(8, block_size=4)
    prompt = sequence("a", range(16))
    admit(manager, prompt, num_tokens=7)
    assert manager.get_num_cached_blocks() == 1
    manager.allocate_slots(prompt, 12)
    assert manager.get_num_cached_blocks() == 3


def test_forgetting_a_failed_step_leaves_only_computed_blocks():
    manager = KVCacheManager(8, block_size=4)
    prompt = sequence("a", range(16))
    admit(manager, prompt, num_tokens=8)
    manager.allocate_slots(prompt, 16)
    manager.forget_uncomputed("a", 8)
    manager.free("a")
    assert manager.get_computed_blocks(sequence("b", range(16))).num_tokens == 8
    manager.check_integrity()


@pytest.mark.parametrize("kind", ["salt", "adapter", "embeddings_hash"])
def test_other_extra_keys_never_hit(kind):
    manager = KVCacheManager(16, block_size=4)
    admit(manager, sequence("a", range(12), **{kind: "x"}))
    assert admit(manager, sequence("b", range(12), **{kind: "y"})).num_tokens == 0
    assert admit(manager, sequence("c", range(12))).num_tokens == 0
    assert admit(manager, sequence("d", range(12), **{kind: "x"})).num_tokens == 11


def test_reset_is_refused_while_blocks_are_held_and_says_who_holds_them():
    manager = KVCacheManager(8, block_size=4)
    admit(manager, sequence("holder", range(8)))
    with pytest.raises(CacheBusyError, match="holder"):
        manager.reset_prefix_cache()
    manager.free("holder")
    manager.reset_prefix_cache()
    assert manager.get_num_cached_blocks() == 0
    assert manager.get_computed_blocks(sequence("b", range(8))).num_tokens == 0
    manager.check_integrity()


def test_caching_can_be_off():
    manager = KVCacheManager(8, block_size=4, enable_prefix_caching=False)
    admit(manager, sequence("a", range(8)))
    assert admit(manager, sequence("b", range(8))).num_tokens == 0
    assert manager.get_num_cached_blocks() == 0


def test_statistics_count_admissions_and_keep_resumed_requests_apart():
    manager = KVCacheManager(8, block_size=4)
    admit(manager, sequence("a", range(10)))
    admit(manager, sequence("b", range(10)))
    manager.free("b")
    again = sequence("b", range(10))
    manager.allocate_slots(again, 10, manager.get_computed_blocks(again, resumed=True))
    stats = manager.stats
    assert (stats.requests, stats.queries, stats.hits) == (2, 20, 8)
    assert (stats.preempted_requests, stats.preempted_queries, stats.preempted_hits) == (1, 10, 8)
    assert stats.hit_rate == manager.recent.hit_rate == 0.4


def test_the_second_answer_to_a_prompt_is_no_hit_of_traffic():
    manager = KVCacheManager(8, block_size=4)
    admit(manager, sequence("a#0", range(10)))
    second = sequence("a#1", range(10))
    manager.allocate_slots(second, 10, manager.get_computed_blocks(second, forked=True))
    stats = manager.stats
    assert (stats.requests, stats.queries, stats.hits) == (1, 10, 0)
    assert (stats.forked_requests, stats.forked_queries, stats.forked_hits) == (1, 10, 8)
    assert stats.hit_rate == manager.recent.hit_rate == 0.0
    assert (stats + stats).forked_hits == 16


def test_common_prefix_counts_blocks_that_are_physically_shared():
    manager = KVCacheManager(16, block_size=4)
    for name, tail in (("a", 50), ("b", 60), ("c", 70)):
        admit(manager, sequence(name, [*range(8), *range(tail, tail + 5)]))
    assert manager.get_num_common_prefix_blocks(["a", "b", "c"]) == 2
    assert manager.get_num_common_prefix_blocks(["a"]) == 4
    assert manager.get_num_common_prefix_blocks([]) == 0


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0)])
def test_impossible_sizes_are_refused(num_blocks, block_size):
    with pytest.raises(ConfigError, match="at least 1"):
        KVCacheManager(num_blocks, block_size=block_size)


@pytest.mark.parametrize("index", [RadixIndex(8, 4), HashIndex(8)], ids=["radix", "hash"])
def test_an_empty_sequence_hits_nothing(index):
    manager = KVCacheManager(8, block_size=4, index=index)
    assert manager.get_computed_blocks(TokenSequence("r", [], block_size=4)).num_tokens == 0


def test_a_sequence_with_blocks_of_another_size_is_refused_because_its_keys_would_find_other_tokens():
    manager = KVCacheManager(8, block_size=4)
    wrong = TokenSequence("a", range(9), block_size=2)
    for call in (lambda: manager.get_computed_blocks(wrong), lambda: manager.admit(wrong, 9)):
        with pytest.raises(AllocationError, match=r"'a' has blocks of 2 tokens, .* with block_size=4"):
            call()
    manager.check_integrity()
    assert manager.get_num_free_blocks() == 8
