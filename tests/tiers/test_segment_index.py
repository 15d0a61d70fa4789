"""The index against a dict, its memory, and looks while another thread makes it grow."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from foreword.tiers.disk.segment_index import SegmentIndex
from foreword.tiers.disk.segments import NewBlocks
from foreword.tiers.tier import PINNED, BlockKeys
from tiers.block_world import NAMESPACE, OTHER_NAMESPACE, keys_of

NOW = 1000


def random_keys(count: int, seed: int = 0) -> BlockKeys:
    rng = np.random.default_rng(seed)
    return BlockKeys(NAMESPACE, np.zeros(count, np.uint16), rng.integers(0, 256, (count, 32), np.uint8))


def blocks(keys: BlockKeys, *, segment: int = 0, first_page: int = 0, expires: int = 0, flags: int = 0) -> NewBlocks:
    count = len(keys)
    return NewBlocks(
        keys,
        np.full(count, segment, np.uint32),
        np.arange(first_page, first_page + count, dtype=np.uint32),
        np.full(count, 4096, np.uint32),
        np.tile(np.arange(16, dtype=np.uint8), (count, 1)),
        np.full(count, expires, np.uint32),
        np.full(count, NOW, np.uint32),
        np.ones(count, np.float32),
        np.full(count, flags, np.uint8),
        np.zeros(count, np.uint8),
    )


def test_what_was_inserted_is_found_in_its_place_and_nothing_else_is():
    index, keys = SegmentIndex(), random_keys(500)
    assert index.insert(blocks(keys.select(slice(0, 300)), segment=7)) == 300
    assert index.contains(keys, NOW).tolist() == [True] * 300 + [False] * 200
    places = index.locate(keys, NOW)
    assert (places.segments[:300] == 7).all()
    assert places.pages[:300].tolist() == list(range(300))
    assert (places.checksums[:300] == np.arange(16)).all()
    assert (places.rows[300:] == -1).all()
    index.check_integrity()


@pytest.mark.parametrize(
    "other",
    [keys_of(range(5), group_id=1), keys_of(range(5), namespace=OTHER_NAMESPACE), keys_of(range(5, 10))],
    ids=["group", "namespace", "key"],
)
def test_another_name_is_another_block(other):
    index = SegmentIndex()
    index.insert(blocks(keys_of(range(5))))
    assert not index.contains(other, NOW).any()
    index.insert(blocks(other))
    assert len(index) == 10
    index.check_integrity()


def test_an_empty_index_and_an_empty_question_have_answers():
    index = SegmentIndex()
    assert index.contains(random_keys(3), NOW).tolist() == [False] * 3
    assert index.locate(random_keys(3), NOW).rows.tolist() == [-1] * 3
    assert len(index.contains(random_keys(0), NOW)) == 0
    assert index.insert(blocks(random_keys(0))) == 0
    assert index.mean_worth(NOW) == 0
    index.check_integrity()


def test_an_expired_block_is_not_found_and_leaves():
    index, keys = SegmentIndex(), random_keys(4)
    index.insert(blocks(keys, expires=NOW + 5))
    assert index.contains(keys, NOW + 4).all()
    assert not index.contains(keys, NOW + 5).any()
    assert index.forget_expired(NOW + 5) == 4
    assert len(index) == 0


def test_a_later_insert_moves_a_block_and_a_block_found_on_disk_does_not():
    index, keys = SegmentIndex(), random_keys(1)
    index.insert(blocks(keys, segment=1))
    assert index.insert_found(blocks(keys, segment=2)) == 0
    assert index.locate(keys, NOW).segments.tolist() == [1]
    assert index.insert(blocks(keys, segment=3)) == 0
    assert index.locate(keys, NOW).segments.tolist() == [3]
    index.check_integrity()


def test_a_block_found_on_disk_replaces_one_that_expires_sooner():
    index, keys = SegmentIndex(), random_keys(1)
    index.insert(blocks(keys, segment=1, expires=NOW + 5))
    index.insert_found(blocks(keys, segment=2, expires=NOW + 4))
    assert index.locate(keys, NOW).segments.tolist() == [1]
    index.insert_found(blocks(keys, segment=3))
    assert index.locate(keys, NOW + 10).segments.tolist() == [3]


def test_equal_names_in_one_insert_are_one_block():
    index, keys = SegmentIndex(), random_keys(2)
    index.insert(blocks(keys.select(np.array([0, 1, 0]))))
    assert len(index) == 2
    assert index.locate(keys, NOW).pages.tolist() == [2, 1]
    index.check_integrity()


def test_places_that_have_changed_since_are_neither_forgotten_nor_moved_nor_touched():
    index, keys = SegmentIndex(), random_keys(3)
    index.insert(blocks(keys, segment=1))
    old = index.locate(keys, NOW)
    index.insert(blocks(keys.select(slice(0, 1)), segment=2))
    index.forget(keys.select(slice(1, 2)))
    assert index.move(old, 9, np.array([50, 51, 52], np.uint32)) == 1
    now = index.locate(keys, NOW)
    assert now.rows[1] == -1
    assert now.segments[[0, 2]].tolist() == [2, 9]
    assert now.pages[2] == 52
    assert index.forget_places(old) == 0
    index.check_integrity()


def test_loads_and_time_decide_what_a_block_is_worth():
    index, keys = SegmentIndex(), random_keys(3)
    index.insert(blocks(keys))
    places = index.locate(keys, NOW)
    index.touch(places.select(np.array([1])), NOW)
    index.touch(places.select(np.array([1, 2])), NOW + 6 * 3600)
    worth = index.worth_of(places.rows, NOW + 6 * 3600)
    assert worth.tolist() == [0.5, 3.0, 2.0]
    total, pinned = index.segment_worth(NOW + 6 * 3600, 2)
    assert total.tolist() == [5.5, 0.0]
    assert pinned.tolist() == [0, 0]
    index.insert(blocks(keys.select(slice(0, 2)), segment=1, flags=PINNED))
    assert index.segment_worth(NOW, 2)[1].tolist() == [0, 8192]


def test_hits_do_not_overflow():
    index, keys = SegmentIndex(), random_keys(1)
    index.insert(blocks(keys))
    places = index.locate(keys, NOW)
    for _ in range(300):
        index.touch(places, NOW)
    assert index.worth_of(places.rows, NOW).tolist() == [256.0]


@pytest.mark.parametrize("count", [20_000, 24_577, 49_200, 98_400])
def test_a_block_costs_at_most_80_bytes_also_just_after_the_table_has_grown(count):
    index, keys = SegmentIndex(), random_keys(count)
    for begin in range(0, count, 512):
        index.insert(blocks(keys.select(slice(begin, begin + 512))))
        if len(index) >= 20_000:
            assert index.num_bytes <= 80 * len(index)
    assert index.contains(keys, NOW).all()
    index.check_integrity()


def test_removing_and_inserting_again_and_again_neither_grows_nor_fills_the_table():
    index, keys = SegmentIndex(), random_keys(2000)
    index.insert(blocks(keys))
    size = index.num_bytes
    for round_number in range(40):
        index.forget(keys.select(slice(0, 1000)))
        fresh = random_keys(1000, seed=round_number + 1)
        index.insert(blocks(fresh))
        index.check_integrity()
        index.forget(fresh)
        index.insert(blocks(keys.select(slice(0, 1000))))
    assert index.contains(keys, NOW).all()
    assert index.num_bytes <= 2 * size


def test_random_operations_agree_with_a_dict():
    rng, index = random.Random(0), SegmentIndex()
    everything = keys_of(range(400))
    known: dict[int, tuple[int, int]] = {}
    for step in range(3000):
        chosen = sorted(rng.sample(range(400), rng.randint(1, 40)))
        keys = everything.select(np.array(chosen))
        segment = rng.randrange(6)
        match rng.randrange(6):
            case 0 | 1 | 2:
                index.insert(blocks(keys, segment=segment, first_page=step))
                known.update((number, (segment, step + at)) for at, number in enumerate(chosen))
            case 3:
                index.forget(keys)
                known = {number: place for number, place in known.items() if number not in chosen}
            case 4 if step % 5 == 0:
                index.forget_segment(segment)
                known = {number: place for number, place in known.items() if place[0] != segment}
            case _:
                places = index.locate(keys, NOW)
                found = {
                    number: (int(places.segments[at]), int(places.pages[at]))
                    for at, number in enumerate(chosen)
                    if places.rows[at] >= 0
                }
                assert found == {number: known[number] for number in chosen if number in known}
        assert len(index) == len(known)
        if step % 50 == 0:
            index.check_integrity()
    index.check_integrity()


def test_looks_and_removals_while_the_table_grows_see_every_block_that_stays():
    index = SegmentIndex()
    staying, going = random_keys(3000, seed=1), random_keys(3000, seed=2)
    index.insert(blocks(staying))
    index.insert(blocks(going))
    stop, failures = threading.Event(), []

    def look() -> None:
        while not stop.is_set():
            if not index.contains(staying, NOW).all():
                failures.append("a block was not found")

    def remove() -> None:
        for begin in range(0, 3000, 10):
            index.forget(going.select(slice(begin, begin + 10)))

    threads = [threading.Thread(target=look), threading.Thread(target=remove)]
    for thread in threads:
        thread.start()
    for seed in range(3, 60):
        index.insert(blocks(random_keys(1000, seed=seed)))
    threads[1].join()
    stop.set()
    threads[0].join()
    assert not failures
    assert not index.contains(going, NOW).any()
    assert len(index) == 3000 + 57 * 1000
    index.check_integrity()


def test_chosen_keys_do_not_share_a_slot_in_every_process():
    # Keys that differ in their last bits alone would all meet if slots were these bits.
    keys = np.zeros((200, 32), np.uint8)
    keys[:, 15] = np.arange(200)
    keys[:, 7] = 1
    first = []
    for _ in range(2):
        index = SegmentIndex()
        heads = np.ascontiguousarray(keys[:, :16]).view("<u8")
        slots, _ = index._probe(1024, np.ones(200, np.uint16), heads[:, 1], heads[:, 0])
        assert len(np.unique(slots)) > 100
        first.append(slots.tolist())
    assert first[0] != first[1]
