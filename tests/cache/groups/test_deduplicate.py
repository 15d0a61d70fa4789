"""deduplicate=True: a request gives up its copy of a block that is cached already, as vLLM v0 did."""

import pytest

from foreword.cache import FullAttentionSpec, KVCacheManager, SlidingWindowSpec, TokenSequence, make_index
from foreword.errors import ConfigError

both_indexes = pytest.mark.parametrize("index", ["hash", "radix"])


def sequence(name, tokens):
    return TokenSequence(name, list(tokens), block_size=4)


def two_equal_requests(index, **options):
    """Two requests that fill their second block with the same tokens in the same step."""
    manager = KVCacheManager(10, block_size=4, index=make_index(index, 10, 4), **options)
    requests = [sequence(name, range(6)) for name in "ab"]
    for seq in requests:
        manager.allocate_slots(seq, 6, manager.get_computed_blocks(seq))
    manager.begin_step()
    for seq in requests:
        for token in (6, 7):
            seq.append(token)
        manager.allocate_slots(seq, 8)
    return manager


@both_indexes
def test_equal_blocks_become_one_before_the_next_step(index):
    manager = two_equal_requests(index, deduplicate=True)
    assert manager.block_ids("a").tolist() == [0, 1]
    assert manager.block_ids("b").tolist() == [0, 2]  # the step that fills block 2 has yet to run
    manager.begin_step()
    manager.check_integrity()
    assert manager.block_ids("b").tolist() == [0, 1]
    assert manager.get_num_free_blocks() == 8
    assert manager.get_num_cached_blocks() == 2
    manager.free("a")
    manager.check_integrity()
    manager.free("b")
    manager.check_integrity()
    assert manager.get_num_free_blocks() == 10


@both_indexes
def test_without_it_both_stay(index):
    manager = two_equal_requests(index)
    manager.begin_step()
    assert manager.block_ids("b").tolist() == [0, 2]
    assert manager.get_num_cached_blocks() == 3


@both_indexes
def test_a_copy_whose_original_was_evicted_stays(index):
    manager = two_equal_requests(index, deduplicate=True)
    manager.evict_blocks(manager.block_ids("a")[1:])
    manager.begin_step()
    manager.check_integrity()
    assert manager.block_ids("b").tolist() == [0, 2]
    assert manager.get_computed_blocks(sequence("c", range(9))).block_ids.tolist() == [0, 2]


@both_indexes
def test_a_request_that_left_meanwhile_is_left_alone(index):
    manager = two_equal_requests(index, deduplicate=True)
    manager.free("b")
    manager.begin_step()
    manager.check_integrity()
    assert manager.get_num_free_blocks() == 8


@both_indexes
def test_a_failed_step_deduplicates_nothing(index):
    manager = two_equal_requests(index, deduplicate=True)
    for name in "ab":
        manager.forget_uncomputed(name, 6)
    manager.begin_step()
    manager.check_integrity()
    assert manager.block_ids("b").tolist() == [0, 2]
    assert manager.get_num_cached_blocks() == 1


def test_several_groups_are_refused():
    with pytest.raises(ConfigError, match="deduplicate=True needs one group of full attention"):
        KVCacheManager(10, groups=[FullAttentionSpec(4), SlidingWindowSpec(8, 4)], deduplicate=True)
