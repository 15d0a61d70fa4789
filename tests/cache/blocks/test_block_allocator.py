"""vLLM v0's allocator: blocks that are found by their content."""

import random

import numpy as np
import pytest

from foreword.cache import PrefixCachingBlockAllocator
from foreword.errors import AllocationError, CacheBusyError


def chain(allocator, *texts):
    """Immutable blocks of these tokens, one after the other."""
    blocks = []
    for text in texts:
        blocks.append(allocator.allocate_immutable_block(blocks[-1] if blocks else None, text))
    return blocks


def free(allocator, blocks):
    for block in blocks:
        allocator.free(block)


def ids(blocks):
    return [block.block_id for block in blocks]


def test_a_block_of_equal_content_is_found():
    allocator = PrefixCachingBlockAllocator(8, 2)
    first, second = chain(allocator, [1, 2], [3, 4]), chain(allocator, [1, 2], [3, 5])
    assert second[0].block_id == first[0].block_id
    assert second[1].block_id != first[1].block_id
    assert allocator.get_num_free_blocks() == 5
    assert allocator.get_prefix_cache_hit_rate() == 0.25


def test_equal_tokens_after_another_prefix_are_other_content():
    allocator = PrefixCachingBlockAllocator(8, 2)
    assert ids(chain(allocator, [1, 2], [9, 9]))[1] != ids(chain(allocator, [3, 4], [9, 9]))[1]


def test_a_freed_block_is_found_until_its_memory_is_needed():
    allocator = PrefixCachingBlockAllocator(3, 2)
    blocks = chain(allocator, [1, 2])
    [kept] = ids(blocks)
    free(allocator, blocks)
    assert not allocator.is_active(kept)
    again = chain(allocator, [1, 2])
    assert ids(again) == [kept]
    free(allocator, again)
    chain(allocator, [5, 5], [6, 6], [7, 7])
    with pytest.raises(AllocationError, match="1 new blocks are more than the 0 free ones"):
        chain(allocator, [1, 2])


def test_a_mutable_block_that_fills_with_known_content_is_swapped_and_freed():
    allocator = PrefixCachingBlockAllocator(4, 3)
    [known] = chain(allocator, [1, 2, 3])
    block = allocator.allocate_mutable_block(None)
    own = block.block_id
    allocator.append_token_ids(block, [1, 2])
    assert block.block_id == own != known.block_id
    allocator.append_token_ids(block, [3])
    assert block.block_id == known.block_id
    assert not allocator.is_active(own)
    assert allocator.get_num_free_blocks() == 3


def test_the_least_recently_accessed_goes_first_and_of_those_the_longest_prefix():
    allocator = PrefixCachingBlockAllocator(4, 1)
    old, new = chain(allocator, [1], [2]), chain(allocator, [3], [4])
    old_ids, new_ids = ids(old), ids(new)
    allocator.mark_blocks_as_accessed(old_ids, 1.0)
    allocator.mark_blocks_as_accessed(new_ids, 2.0)
    free(allocator, new)
    free(allocator, old)  # heads first, and later: neither matters
    taken = [allocator.allocate_mutable_block(None).block_id for _ in range(4)]
    assert taken == [old_ids[1], old_ids[0], new_ids[1], new_ids[0]]


def test_a_block_that_is_accessed_while_it_is_free_stays_longer():
    allocator = PrefixCachingBlockAllocator(2, 1)
    blocks = [*chain(allocator, [1]), *chain(allocator, [2])]
    first, second = ids(blocks)
    free(allocator, blocks)
    allocator.mark_blocks_as_accessed([first], 5.0)
    assert allocator.last_accessed(first) == 5.0
    assert allocator.allocate_mutable_block(None).block_id == second


def test_a_block_is_computed_until_it_holds_something_else():
    allocator = PrefixCachingBlockAllocator(1, 1)
    [block] = chain(allocator, [1])
    assert not allocator.is_computed(0)
    allocator.mark_blocks_as_computed([0])
    allocator.free(block)
    assert allocator.is_computed(0)
    chain(allocator, [2])
    assert not allocator.is_computed(0)


def test_a_fork_holds_the_same_blocks():
    allocator = PrefixCachingBlockAllocator(4, 2)
    blocks = chain(allocator, [1, 2], [3, 4])
    fork = allocator.fork(blocks[-1])
    assert ids(fork) == ids(blocks)
    allocator.check_integrity([*blocks, *fork])
    free(allocator, blocks)
    assert all(allocator.is_active(block_id) for block_id in ids(fork))


def test_a_forked_block_that_is_not_full_is_copied_before_one_writes_into_it():
    allocator = PrefixCachingBlockAllocator(4, 4)
    one = allocator.allocate_mutable_block(None)
    allocator.append_token_ids(one, [1, 2])
    [other] = allocator.fork(one)
    shared = other.block_id
    allocator.append_token_ids(one, [3, 4])
    assert one.block_id != other.block_id == shared
    assert allocator.clear_copy_on_writes() == [(shared, one.block_id)]
    allocator.append_token_ids(other, [5, 6])  # it is alone by now
    assert other.block_id == shared
    assert allocator.clear_copy_on_writes() == []
    allocator.check_integrity([one, other])
    assert allocator.allocate_immutable_block(None, [1, 2, 3, 4]).block_id == one.block_id
    assert allocator.allocate_immutable_block(None, [1, 2, 5, 6]).block_id == shared


def test_a_copy_that_finds_no_block_changes_nothing():
    allocator = PrefixCachingBlockAllocator(1, 4)
    one = allocator.allocate_mutable_block(None)
    allocator.append_token_ids(one, [1])
    [other] = allocator.fork(one)
    with pytest.raises(AllocationError, match="more than the 0 free ones"):
        allocator.append_token_ids(one, [2])
    assert one.token_ids == other.token_ids == [1]
    allocator.check_integrity([one, other])


def test_what_cannot_be_done_is_refused():
    allocator = PrefixCachingBlockAllocator(2, 2)
    with pytest.raises(AllocationError, match="has 2 tokens, not 1"):
        allocator.allocate_immutable_block(None, [1])
    block = allocator.allocate_mutable_block(None)
    with pytest.raises(AllocationError, match="3 tokens do not fit into a block with room for 2"):
        allocator.append_token_ids(block, [1, 2, 3])
    with pytest.raises(CacheBusyError, match="1 blocks are held"):
        allocator.reset_prefix_cache()
    allocator.free(block)
    with pytest.raises(AllocationError, match="freed already"):
        allocator.free(block)
    assert allocator.reset_prefix_cache()
    assert allocator.get_prefix_cache_hit_rate() == -1.0


def test_random_chains_find_only_what_was_written_and_lose_nothing():
    """Beside a model that knows what each block holds, when it was accessed and where it stands."""
    rng = random.Random(0)
    for seed in range(20):
        size = rng.choice([1, 2, 3])
        allocator = PrefixCachingBlockAllocator(rng.choice([4, 9, 20]), size)
        held, content, accessed, hits = [], {}, {}, 0
        for now in range(200):
            if rng.random() < 0.6:
                text, chained = [rng.randint(0, 1) for _ in range(size * rng.randint(1, 4))], []
                for start in range(0, len(text), size):
                    prefix = tuple(text[: start + size])
                    cached = {tokens: block_id for block_id, tokens in content.items()}
                    free_ids = [b for b in range(allocator.get_num_total_blocks()) if not allocator.is_active(b)]
                    if prefix not in cached and not free_ids:
                        break
                    block = allocator.allocate_immutable_block(chained[-1] if chained else None, prefix[start:])
                    if prefix in cached:
                        assert block.block_id == cached[prefix]
                        hits += 1
                    else:
                        order = sorted(
                            (b for b in free_ids if b in content), key=lambda b: (accessed[b], -len(content[b]))
                        )
                        if not any(b not in content for b in free_ids):
                            first = order[0]
                            assert (accessed[block.block_id], len(content[block.block_id])) == (
                                accessed[first],
                                len(content[first]),
                            )
                        content[block.block_id] = prefix
                    chained.append(block)
                    allocator.mark_blocks_as_accessed([block.block_id], float(now))
                    accessed[block.block_id] = now
                held += [chained] if chained else []
            elif held:
                blocks = held.pop(rng.randrange(len(held)))
                rng.shuffle(blocks)
                free(allocator, blocks)
            allocator.check_integrity([block for blocks in held for block in blocks])
        assert hits, f"seed {seed}: nothing was found"


def test_views_and_iterables_of_blocks_come_in_any_form():
    allocator = PrefixCachingBlockAllocator(3, 1)
    [block] = chain(allocator, [1])
    allocator.mark_blocks_as_accessed(np.array([block.block_id]), 1.0)
    allocator.mark_blocks_as_computed({block.block_id})
    assert allocator.is_computed(block.block_id)
