"""What somebody sees who looks at the cache: block states, the tree's top, reuse counts, evictions by cause."""

from __future__ import annotations

import numpy as np
import pytest

from foreword.cache import (
    BlockState,
    CacheLedger,
    EntryWish,
    EvictionCause,
    ExtraKeys,
    HashIndex,
    KVCacheManager,
    PinnedPolicy,
    RadixIndex,
    TokenSequence,
    make_policy,
)

SIZE = 4


def make_manager(num_blocks: int = 16, index: str = "radix") -> KVCacheManager:
    return KVCacheManager(
        num_blocks,
        block_size=SIZE,
        index=RadixIndex(num_blocks, SIZE) if index == "radix" else HashIndex(num_blocks),
        ledger=CacheLedger(num_blocks),
        eviction_policy=PinnedPolicy(make_policy("lru", num_blocks), num_blocks),
    )


def sequence(tokens, name: str = "r", **keys) -> TokenSequence:
    return TokenSequence(name, list(tokens), block_size=SIZE, extra_keys=ExtraKeys(**keys))


def run(manager: KVCacheManager, tokens, *, keep: bool = False, name: str = "r", **keys) -> None:
    manager.begin_step()
    made = sequence(tokens, name, **keys)
    hit = manager.get_computed_blocks(made)
    assert manager.allocate_slots(made, len(made), hit) is not None
    if not keep:
        manager.free(name)


@pytest.mark.parametrize("index", ["radix", "hash"])
def test_every_block_is_free_cached_in_use_or_pinned(index):
    manager = make_manager(index=index)
    run(manager, range(10))
    run(manager, range(100, 106), name="held", keep=True)
    run(manager, range(200, 204))
    manager.keep_prefix(sequence(range(200, 204)), EntryWish(10.0), now=0.0)
    tallies = np.bincount(manager.block_states(), minlength=len(BlockState)).tolist()
    num_tails = manager.get_num_tails()  # the radix index keeps the last two of ten tokens
    assert num_tails == (index == "radix")
    assert tallies == [16 - 2 - num_tails - 2 - 1, 2 + num_tails, 2, 1]
    manager.free("held")
    assert np.count_nonzero(manager.block_states() == BlockState.IN_USE) == 0


def test_the_tree_has_a_node_for_each_branch_with_its_reuses():
    manager = make_manager()
    run(manager, range(8))
    run(manager, [*range(4), 50, 51, 52, 53])
    for _ in range(3):
        run(manager, [*range(8), 9])
    shared, ours, other = manager.top_prefixes(10)
    assert (shared.parent_id, shared.token_ids, shared.num_reuses, shared.num_children) == (None, (0, 1, 2, 3), 4, 2)
    assert (ours.parent_id, ours.start, ours.token_ids, ours.num_reuses) == (shared.node_id, 4, (4, 5, 6, 7), 3)
    assert (other.parent_id, other.token_ids, other.num_reuses) == (shared.node_id, (50, 51, 52, 53), 0)
    assert manager.top_prefixes(1) == [shared]


def test_a_node_that_ends_no_block_counts_the_reuses_below_it():
    manager = make_manager()
    run(manager, [1, 2, 3, 4])
    run(manager, [1, 2, 7, 8])
    run(manager, [1, 2, 7, 8, 9])
    top = manager.top_prefixes(10)
    assert (top[0].token_ids, len(top[0].block_ids), top[0].num_reuses) == ((1, 2), 0, 1)
    assert [node.num_reuses for node in top[1:]] == [1, 0]


def test_a_block_that_gets_other_content_begins_to_count_anew():
    manager = make_manager(num_blocks=4)
    for _ in range(3):
        run(manager, [1, 2, 3, 4, 5])
    assert manager.top_prefixes(1)[0].num_reuses == 2
    run(manager, range(100, 116))
    (node,) = manager.top_prefixes(5)
    assert (node.token_ids[0], node.num_reuses) == (100, 0)


def test_a_salt_sees_its_own_nodes_only_also_behind_a_shared_prefix():
    manager = make_manager()
    public = list(range(8))
    run(manager, [*public, 20, 21, 22, 23], salt="a", salt_offset=8)
    run(manager, [*public, 30, 31, 32, 33], salt="b/x", salt_offset=8)
    run(manager, [40, 41, 42, 43], salt="b/y")
    assert {(node.salt, node.token_ids) for node in manager.top_prefixes(10)} == {
        (None, tuple(public)),
        ("a", (20, 21, 22, 23)),
        ("b/x", (30, 31, 32, 33)),
        ("b/y", (40, 41, 42, 43)),
    }
    assert {node.salt for node in manager.top_prefixes(10, "b")} == {"b/x", "b/y"}
    assert [node.token_ids for node in manager.top_prefixes(10, "a")] == [(20, 21, 22, 23)]
    assert manager.top_prefixes(10, "c") == []


def test_an_index_of_keys_has_no_tree():
    manager = make_manager(index="hash")
    run(manager, range(8))
    assert manager.top_prefixes(10) is None


def test_evictions_are_counted_by_cause():
    manager = make_manager(num_blocks=4)
    run(manager, range(12))
    run(manager, range(100, 112))
    assert manager.ledger.evictions == {EvictionCause.REUSED: manager.stats.evictions}
    manager.evict_blocks(np.arange(4, dtype=np.int32))
    assert manager.ledger.evictions[EvictionCause.REQUESTED] == 3 + (3 - manager.stats.evictions)
    manager.check_integrity()
