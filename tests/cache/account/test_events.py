"""Cache events: their fields, their order, and that replaying them rebuilds the index."""

import random
from dataclasses import replace

import numpy as np
import pytest

from doors import index_of
from foreword.cache import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    CacheLedger,
    EventLog,
    ExtraKeys,
    FullAttentionSpec,
    HashIndex,
    KVCacheManager,
    NumberedEvent,
    PrefixMirror,
    SlidingWindowSpec,
    TokenSequence,
    make_index,
)
from foreword.errors import EventsLostError
from foreword.events.publisher import Feed, chains

BLOCK_SIZE = 4


def sequence(name, tokens, **extra):
    return TokenSequence(name, list(tokens), block_size=BLOCK_SIZE, extra_keys=ExtraKeys(**extra))


def manager_with_events(index="hash", num_blocks=10, **options):
    return KVCacheManager(
        num_blocks,
        block_size=BLOCK_SIZE,
        index=make_index(index, num_blocks, BLOCK_SIZE) if index else None,
        ledger=CacheLedger(num_blocks, events=EventLog()),
        **options,
    )


def run(manager, seq):
    manager.begin_step()
    assert manager.allocate_slots(seq, len(seq), manager.get_computed_blocks(seq)) is not None
    manager.free(seq.request_id)


def taken(manager):
    return [numbered.event for numbered in manager.ledger.events.take()]


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_stored_blocks_carry_keys_parent_and_tokens(index):
    manager = manager_with_events(index)
    first = sequence("a", range(10))
    run(manager, first)
    a, b = first.block_hashes()
    assert taken(manager) == [BlockStored((a, b), None, tuple(range(8)), BLOCK_SIZE)]
    second = sequence("b", [*range(8), 50, 51, 52, 53])
    run(manager, second)
    assert taken(manager) == [BlockStored((second.block_hashes()[2],), b, (50, 51, 52, 53), BLOCK_SIZE)]


def test_extra_keys_and_adapter_are_told_block_by_block():
    manager = manager_with_events()
    run(manager, sequence("a", range(8), adapter="sql", salt="red"))
    (stored,) = taken(manager)
    assert stored.lora_name == "sql"
    assert stored.extra_keys == (("adapter=sql", "salt=red"), ("adapter=sql",))


@pytest.mark.parametrize(("begin", "own"), [(0, 0), (8, 2), (9, 2), (11, 2), (16, None)])
def test_blocks_before_an_adapter_begins_are_the_models_own(begin, own):
    manager = manager_with_events()
    seq = sequence("a", range(16), adapter="sql", adapter_offset=begin)
    run(manager, seq)
    stored = taken(manager)
    assert [key for event in stored for key in event.block_hashes] == seq.block_hashes()
    names = [event.lora_name for event in stored for _ in event.block_hashes]
    assert names == [None if own is None or number < own else "sql" for number in range(4)]
    feed = Feed(100, keeps_blocks=True)
    for event in stored:
        feed.note(event)
    _, groups = feed.read()
    feed.close()
    assert list(chains(groups[0], 0)) == [
        replace(event, extra_keys=event.extra_keys or ((),) * len(event.block_hashes)) for event in stored
    ]


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_a_duplicate_is_not_stored_again_and_is_removed_with_the_last_copy(index):
    manager = manager_with_events(index)
    first, second = sequence("a", range(8)), sequence("b", range(8))
    nothing = manager.get_computed_blocks(second)
    manager.allocate_slots(first, 8)
    manager.allocate_slots(second, 8, nothing)  # looked up before the first was there
    assert len(taken(manager)) == 1
    originals, copies = manager.block_ids("a"), manager.block_ids("b")
    manager.evict_blocks(originals)
    if index == "hash":
        assert taken(manager) == []
    else:
        taken(manager)
    manager.evict_blocks(copies)
    manager.check_integrity()
    assert manager.get_num_cached_blocks() == 0


def test_a_reset_is_told():
    manager = manager_with_events()
    run(manager, sequence("a", range(8)))
    manager.reset_prefix_cache()
    assert taken(manager)[-1] == AllBlocksCleared()


def test_groups_report_under_their_own_number():
    manager = manager_with_events(None, groups=[FullAttentionSpec(4), SlidingWindowSpec(8, 4)])
    run(manager, sequence("a", range(8)))
    assert [event.group_idx for event in taken(manager)] == [0, 1]
    manager.evict_blocks(np.arange(10, dtype=np.int32))
    assert [(type(event), event.group_idx) for event in taken(manager)] == [(BlockRemoved, 0), (BlockRemoved, 1)]


@pytest.mark.parametrize(("index", "seed"), [("hash", 0), ("radix", 1), ("radix", 2)])
def test_replaying_all_events_rebuilds_the_index(index, seed):
    """After every operation: the same keys, the same tokens behind them, and the same hits."""
    rng = random.Random(seed)
    manager, mirror = manager_with_events(index, num_blocks=16, deduplicate=bool(seed % 2)), PrefixMirror()
    known, live = {}, {}
    for number in range(400):
        action = rng.random()
        if action < 0.5 and len(live) < 4:
            salt = rng.choice([None, None, "red"])
            seq = sequence(f"r{number}", [rng.randint(0, 1) for _ in range(rng.randint(1, 20))], salt=salt)
            manager.begin_step()
            if manager.allocate_slots(seq, len(seq), manager.get_computed_blocks(seq)) is not None:
                live[seq.request_id] = seq
        elif action < 0.75 and live:
            seq = rng.choice(list(live.values()))
            seq.append(rng.randint(0, 1))
            manager.begin_step()
            if manager.allocate_slots(seq, len(seq)) is None:
                manager.free(live.pop(seq.request_id).request_id)
        elif action < 0.95 and live:
            manager.free(live.pop(rng.choice(list(live))).request_id)
        elif action < 0.97:
            manager.evict_blocks(np.array(rng.sample(range(16), 3), np.int32))
        elif not live:
            manager.reset_prefix_cache()
        for seq in live.values():
            for at, key in enumerate(seq.block_hashes()):
                known[key] = tuple(seq.token_ids[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE].tolist())
        mirror.apply(manager.ledger.events.take())
        manager.check_integrity()
        assert {key: mirror.tokens_of(key) for key in mirror.held_keys()} == {
            key: known[key] for key in findable(manager)
        }
        for seq in live.values():
            hit = manager.get_computed_blocks(seq)
            assert mirror.num_hit_blocks(seq.block_hashes()) == len(hit.block_ids)


def findable(manager):
    """Keys of the index itself, computed from what it holds."""
    index = index_of(manager)
    if isinstance(index, HashIndex):
        return set(map(index.key_of, index.block_ids().tolist()))
    keys = set()
    for (adapter, salt, _), root in index._roots.items():
        stack = [(root, [])]
        while stack:
            node, before = stack.pop()
            tokens = before + node.tokens.tolist()
            path = TokenSequence("", tokens, block_size=BLOCK_SIZE, extra_keys=ExtraKeys(adapter=adapter, salt=salt))
            first = node.start // BLOCK_SIZE
            keys.update(path.block_hashes()[first : first + len(node.block_ids)])
            stack += [(child, tokens) for child in node.children.values()]
    return keys


def test_numbers_have_no_gaps_and_a_gap_is_refused():
    log = EventLog(capacity=3)
    for _ in range(5):
        log.append(AllBlocksCleared())
    kept = log.take()
    assert [numbered.number for numbered in kept] == [2, 3, 4]
    log.append(AllBlocksCleared())
    assert log.take() == [NumberedEvent(5, AllBlocksCleared())]


def test_a_gap_is_refused_until_the_cache_is_reset():
    """What was lost before a reset does not matter after it: the same mirror, or an empty one, goes on."""
    log = EventLog(capacity=4)
    manager = KVCacheManager(10, block_size=BLOCK_SIZE, ledger=CacheLedger(10, events=log))
    for number in range(9):
        run(manager, sequence(f"r{number}", range(100 * number, 100 * number + 8)))
    kept, old, new = log.take(), PrefixMirror(), PrefixMirror()
    assert kept[0].number > 0
    for mirror in (old, new):
        with pytest.raises(EventsLostError, match=f"event 0 is missing: {kept[0].number} came"):
            mirror.apply(kept)
    manager.reset_prefix_cache()
    last = sequence("last", range(8))
    run(manager, last)
    events = log.take()
    for mirror in (old, new, PrefixMirror()):
        mirror.apply(events)
        assert mirror.held_keys() == set(last.block_hashes())
    with pytest.raises(EventsLostError):
        old.apply(events)  # twice


def test_events_that_nobody_takes_are_bounded_by_what_they_tell_of():
    log = EventLog(capacity=10)
    manager = KVCacheManager(8, block_size=BLOCK_SIZE, ledger=CacheLedger(8, events=log))
    for number in range(20):
        run(manager, sequence(f"r{number}", range(100 * number, 100 * number + 24)))
    kept = log.take()
    assert 0 < sum(len(numbered.event.block_hashes) for numbered in kept) <= 10
    numbers = [numbered.number for numbered in kept]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
