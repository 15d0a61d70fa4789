"""A cache that is broken on purpose, in one place at a time: `check_integrity` has to notice.

Each variant replaces one method of a manager's parts. Then `cache_world` does what engines do. What the world's
own checks or assertions inside the operations notice first does not count.
"""

import random
import traceback
from collections.abc import Callable

import numpy as np
import pytest

from cache_world import GROUPS, KINDS, World, drive
from doors import coordinator_of, free_queue_of, index_of, pool_of, ref_counts_of
from foreword.cache import NULL_BLOCK
from lanes import SLOW

PREFIX_KINDS = ("hash", "radix", "verified")
HASH_KINDS = ("hash", "verified")
GROUP_KINDS = tuple(GROUPS)
SEVERAL = tuple(kind for kind, specs in GROUPS.items() if len(specs) > 1)
VARIANTS: dict[str, tuple[tuple[str, ...], Callable]] = {}


def variant(*kinds):
    """Register a function that breaks a manager, for these kinds of world."""

    def register(breaks):
        VARIANTS[breaks.__name__] = (kinds, breaks)
        return breaks

    return register


# --------------------------------------------------------------------------------------- pool and queue


@variant(*KINDS)
def a_block_is_freed_twice(manager):
    free = pool_of(manager).free_blocks

    def free_blocks(block_ids):
        free(block_ids)
        shared = block_ids[ref_counts_of(pool_of(manager))[block_ids] > 0]
        if len(shared):
            free(shared[:1])
        elif len(block_ids):
            free_queue_of(pool_of(manager)).append(block_ids[:1])

    pool_of(manager).free_blocks = free_blocks


@variant(*KINDS)
def a_block_is_not_freed(manager):
    free = pool_of(manager).free_blocks
    pool_of(manager).free_blocks = lambda block_ids: free(block_ids[1:])


@variant(*PREFIX_KINDS, *SEVERAL)
def the_count_of_a_shared_block_is_not_lowered(manager):
    free = pool_of(manager).free_blocks
    pool_of(manager).free_blocks = lambda block_ids: free(block_ids[ref_counts_of(pool_of(manager))[block_ids] == 1])


@variant(*PREFIX_KINDS, *SEVERAL)
def a_hit_is_not_counted(manager):
    pool = pool_of(manager)
    pool.touch = lambda block_ids: free_queue_of(pool).remove(block_ids[ref_counts_of(pool)[block_ids] == 0])


@variant(*PREFIX_KINDS, *SEVERAL)
def a_hit_leaves_its_blocks_in_the_queue(manager):
    pool = pool_of(manager)

    def touch(block_ids):
        ref_counts_of(pool)[block_ids] += 1

    pool.touch = touch


@variant(*KINDS)
def a_taken_block_stays_in_the_queue(manager):
    queue = free_queue_of(pool_of(manager))
    take = queue.popleft

    def popleft(count):
        taken = take(count)
        queue.append(taken[:1])
        return taken

    queue.popleft = popleft


@variant(*KINDS)
def a_taken_block_is_not_counted(manager):
    pool, get = pool_of(manager), pool_of(manager).get_new_blocks

    def get_new_blocks(count):
        block_ids = get(count)
        ref_counts_of(pool)[block_ids[:1]] = 0
        return block_ids

    pool.get_new_blocks = get_new_blocks


@variant(*(kind for kind in KINDS if kind != "recurrent"))  # which takes one at a time
def one_block_is_given_to_two(manager):
    pool, get = pool_of(manager), pool_of(manager).get_new_blocks

    def get_new_blocks(count):
        block_ids = get(count)
        if count > 1:
            block_ids[1] = block_ids[0]
        return block_ids

    pool.get_new_blocks = get_new_blocks


@variant(*KINDS)
def the_queue_loses_its_last_block(manager):
    queue = free_queue_of(pool_of(manager))
    append = queue.append
    queue.append = lambda block_ids: append(block_ids[:-1])


# ------------------------------------------------------------------------------------------------- index


@variant(*PREFIX_KINDS, *GROUP_KINDS)
def the_index_keeps_a_block_that_is_given_away(manager):
    pool_of(manager)._on_reuse = lambda block_ids: None


@variant(*PREFIX_KINDS, *GROUP_KINDS)
def the_index_keeps_some_of_the_blocks_that_are_given_away(manager):
    forget = pool_of(manager)._on_reuse
    pool_of(manager)._on_reuse = lambda block_ids: forget(block_ids[1:])


@variant(*PREFIX_KINDS)
def blocks_are_indexed_in_the_wrong_order(manager):
    index = index_of(manager)
    insert = index.insert
    index.insert = lambda sequence, first, block_ids: insert(sequence, first, block_ids[::-1].copy())


@variant(*SEVERAL, "window", "chunks")
def blocks_of_a_group_are_indexed_in_the_wrong_order(manager):
    index = index_of(manager)
    insert = index.insert
    index.insert = lambda group, keys, block_ids: insert(group, keys, block_ids[::-1].copy())


@variant(*SEVERAL)
def a_block_is_indexed_in_another_group(manager):
    index = index_of(manager)
    insert = index.insert
    index.insert = lambda group, keys, block_ids: insert(0, keys, block_ids)


@variant(*PREFIX_KINDS)
def a_block_is_indexed_before_it_is_full(manager):
    coordinator = coordinator_of(manager)
    cache = coordinator.cache_blocks

    def cache_blocks(row, sequence, num_tokens):
        cache(row, sequence, num_tokens)
        table = coordinator.tables.groups[0].row(row)
        coordinator._manager.num_indexed[row] = len(table)

    coordinator.cache_blocks = cache_blocks


def maps_of(manager):
    index = index_of(manager)
    return getattr(index, "_blocks", index)._maps


@variant(*HASH_KINDS, "full and window", "all types")
def a_duplicate_takes_the_place_of_the_original(manager):
    for blocks in maps_of(manager):
        blocks.insert = blocks.block_of.__setitem__


@variant(*HASH_KINDS)
def a_duplicate_is_lost_with_its_original(manager):
    for blocks in maps_of(manager):

        def remove(key, block_id, blocks=blocks):
            del blocks.block_of[key]
            blocks.duplicates.pop(key, None)

        blocks.remove = remove


@variant("radix")
def a_duplicate_does_not_take_the_place_in_the_tree(manager):
    index = index_of(manager)

    def replace(node, at):
        index._duplicates.pop(int(node.block_ids[at]), None)
        return False

    index._replace = replace


@variant("radix")
def a_split_leaves_blocks_with_the_wrong_node(manager):
    index = index_of(manager)
    split = index._split

    def split_and_move_nothing(node, length):
        upper = split(node, length)
        index._node_id_of[upper.block_ids] = node.node_id
        return upper

    index._split = split_and_move_nothing


@variant("radix")
def a_cut_forgets_no_children(manager):
    index = index_of(manager)

    def cut(node, at):
        forgotten = index._drop(node.block_ids[at:])
        node.block_ids = node.block_ids[:at]
        index._trim(node)
        return forgotten

    index._cut = cut


@variant("radix")
def a_cut_leaves_a_leaf_inside_a_block(manager):
    index_of(manager)._trim = lambda node: None


@variant("radix")
def a_cut_keeps_the_tails_below(manager):
    index_of(manager)._drop_tail = lambda node: []


@variant("radix")
def a_tail_that_is_forgotten_stays_with_the_pool(manager):
    pool, forget = pool_of(manager), pool_of(manager).note_forgotten
    pool.note_forgotten = lambda block_ids: forget(block_ids[~pool.is_tail(block_ids)])


@variant("radix")
def a_block_is_a_tail_and_an_ordinary_free_block(manager):
    pool, note = pool_of(manager), pool_of(manager).note_tail

    def note_and_queue(block_id):
        note(block_id)
        pool._tails.free.append(np.array([block_id], np.int32))

    pool.note_tail = note_and_queue


@variant("radix")
def a_tail_is_indexed_while_somebody_holds_it(manager):
    index = index_of(manager)
    insert = index.insert

    def insert_and_more(sequence, first, block_ids):
        inserted = insert(sequence, first, block_ids)
        end = (first + len(block_ids)) * sequence.block_size
        if len(sequence) > end and sequence.block_size > 1:
            index.insert_tail(sequence, end + 1, int(manager.block_ids(sequence.request_id)[-1]))
        return inserted

    index.insert = insert_and_more


@variant("verified")
def a_prefix_is_never_let_go(manager):
    index_of(manager)._prefixes.release = lambda prefix: None


# ------------------------------------------------------------------------------------------------ tables


@variant(*KINDS)
def a_request_that_leaves_keeps_a_block(manager):
    coordinator = coordinator_of(manager)
    close = coordinator.close

    def close_all_but_the_last(row):
        coordinator.tables.groups[-1]._lengths[row] -= 1
        close(row)

    coordinator.close = close_all_but_the_last


@variant(*PREFIX_KINDS, "off")
def a_request_grows_by_a_block_too_few(manager):
    (group,) = coordinator_of(manager).managers
    needed = group.num_new_blocks
    group.num_new_blocks = lambda row, start, end: max(0, needed(row, start, end) - 1)
    coordinator_of(manager)._only_appends = False


@variant("window", "chunks", "full and window", "all types")
def a_block_that_left_the_window_stays_in_the_table(manager):
    for group in coordinator_of(manager).managers:
        group.release = lambda row, start: None
        group.release_each = lambda rows, starts, each=group.release_each: (
            each(rows, starts)[0],
            each(rows, starts)[1],
        )


@variant("window", "chunks", "full and window", "all types")
def a_block_that_is_still_needed_leaves_the_table(manager):
    coordinator = coordinator_of(manager)
    grow = coordinator.grow

    def grow_and_lose(row, start, end):
        new_ids = grow(row, start, end)
        if new_ids is not None:
            table = coordinator.tables.groups[-1].row(row)
            if len(table) > 1 and table[-1] != NULL_BLOCK:
                coordinator.pool.free_blocks(table[-1:].copy())
                table[-1] = NULL_BLOCK
        return new_ids

    coordinator.grow = grow_and_lose


@variant(*KINDS)
def a_row_is_given_to_two_requests(manager):
    for tables in coordinator_of(manager).tables.groups:
        open_row = tables.open_row

        def open_and_keep(tables=tables, open_row=open_row):
            row = open_row()
            tables._free_rows.append(row)
            return row

        tables.open_row = open_and_keep


@variant("sinks and window")
def the_sinks_are_given_back(manager):
    pool_of(manager).free_blocks(manager.sink_block_ids())


# ------------------------------------------------------------------------------------------------- tests


class CheckedFirst(World):
    """Asks the manager before it looks itself."""

    def _plan(self, request, end):
        self.manager.check_integrity()
        super()._plan(request, end)


def is_noticed(kind, breaks, seed):
    """Whether `check_integrity` is the first to raise."""
    rng = random.Random(seed)
    policy = rng.choice(["lru", "lfu", "slru", "fifo", "last_accessed", "priority"])
    num_blocks = 8 if kind == "recurrent" else 16  # one block is a whole state: six requests need few, and evict none
    world = CheckedFirst(
        kind, policy, num_blocks=num_blocks, block_size=rng.choice([1, 2, 3]), with_pins=seed % 2 == 1, change=breaks
    )
    try:
        drive(world, rng, 150)
    except Exception as error:
        return "check_integrity" in [frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)]
    return False


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(kinds[(number + more) % len(kinds)], name, marks=SLOW if more else ())
        for number, (name, (kinds, _)) in enumerate(VARIANTS.items())
        for more in range(len(kinds))
    ],
)
def test_the_integrity_check_notices_that(name, kind):
    breaks = VARIANTS[name][1]
    assert any(is_noticed(kind, breaks, seed) for seed in range(50))


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_that_is_not_broken_is_not_accused(kind):
    for seed in range(3):
        assert not is_noticed(kind, lambda manager: None, seed)
