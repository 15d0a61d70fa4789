"""The index against a dict, and looks while another thread makes it grow."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import numpy as np
import pytest

from foreword.tiers.cipher import NO_CIPHER_ID
from foreword.tiers.disk.segment_index import SegmentIndex, worth_of
from foreword.tiers.disk.segments import ENTRY, PAGE, RunHeader, Segment, segment_number
from foreword.tiers.tier import PINNED, BlockKeys
from tiers.block_world import NAMESPACE, OTHER_NAMESPACE, keys_of

NOW = 1000


def random_keys(count: int, seed: int = 0) -> BlockKeys:
    rng = np.random.default_rng(seed)
    return BlockKeys(NAMESPACE, np.zeros(count, np.uint16), rng.integers(0, 256, (count, 32), np.uint8))


def segment_of(index: SegmentIndex, number: int) -> Segment:
    return index.add_segment(Path(f"{number:06d}-00000000.fwseg"), is_own=True)


def insert(
    index: SegmentIndex,
    keys: BlockKeys,
    *,
    segment: int = 0,
    first_page: int = 0,
    expires: int = 0,
    flags: int = 0,
    was_found: bool = False,
) -> int:
    """Insert blocks of a page each, in a run for each group; the number that is new."""
    num_new, pages = 0, np.arange(first_page, first_page + len(keys))
    for group_id in np.unique(keys.group_ids).tolist():
        own = keys.group_ids == group_id
        run = run_of(keys.select(own), pages[own], flags)
        num_new += index.insert(run, segment_of(index, segment), expires=expires, used=NOW, was_found=was_found)
    return num_new


def run_of(keys: BlockKeys, pages: np.ndarray, flags: int = 0) -> RunHeader:
    entries = np.zeros(len(keys), ENTRY)
    entries["key"], entries["group"], entries["page"] = keys.keys, keys.group_ids, pages
    entries["checksum"], entries["stored_bytes"] = np.arange(16), PAGE
    entries["flags"], entries["value"] = flags, 1.0
    return RunHeader(PAGE, PAGE, 0, keys.namespace, NO_CIPHER_ID, 0, 0, 0, entries)


def test_what_was_inserted_is_found_in_its_place_and_nothing_else_is():
    index, keys = SegmentIndex(), random_keys(500)
    assert insert(index, keys.select(slice(0, 300)), segment=7) == 300
    assert index.contains(keys, NOW).tolist() == [True] * 300 + [False] * 200
    places = index.locate(keys, NOW)
    assert (places["segment"][:300] == segment_of(index, 7).id).all()
    assert places["page"][:300].tolist() == list(range(300))
    assert (places["checksum"][:300] == np.arange(16)).all()
    assert (places["name"] != 0).tolist() == [True] * 300 + [False] * 200
    index.check_integrity()


@pytest.mark.parametrize(
    "other",
    [keys_of(range(5), group_id=1), keys_of(range(5), namespace=OTHER_NAMESPACE), keys_of(range(5, 10))],
    ids=["group", "namespace", "key"],
)
def test_another_name_is_another_block(other):
    index = SegmentIndex()
    insert(index, keys_of(range(5)))
    assert not index.contains(other, NOW).any()
    insert(index, other)
    assert len(index) == 10
    index.check_integrity()


def test_an_empty_index_and_an_empty_question_have_answers():
    index = SegmentIndex()
    assert index.contains(random_keys(3), NOW).tolist() == [False] * 3
    assert index.locate(random_keys(3), NOW)["name"].tolist() == [0] * 3
    assert len(index.contains(random_keys(0), NOW)) == 0
    assert index.forget(random_keys(0)) == 0
    assert index.mean_worth(NOW) == 0
    index.check_integrity()


def test_an_expired_block_is_not_found_and_leaves():
    index, keys = SegmentIndex(), random_keys(4)
    insert(index, keys, expires=NOW + 5)
    assert index.contains(keys, NOW + 4).all()
    assert not index.contains(keys, NOW + 5).any()
    assert index.forget_expired(NOW + 5) == 4
    assert len(index) == 0


def test_expiry_looks_at_blocks_only_when_one_may_have_expired(monkeypatch):
    index, keys = SegmentIndex(), random_keys(4)
    for number, expires in enumerate((0, NOW + 9, NOW + 5, NOW + 7)):
        insert(index, keys.select(slice(number, number + 1)), expires=expires)
    with monkeypatch.context() as patched:
        patched.setattr(index, "_alive", None)
        assert index.forget_expired(NOW + 4) == 0
    assert index.forget_expired(NOW + 7) == 2
    with monkeypatch.context() as patched:
        patched.setattr(index, "_alive", None)
        assert index.forget_expired(NOW + 8) == 0
    insert(index, keys.select(slice(2, 3)), expires=NOW + 8)
    assert [index.forget_expired(NOW + passed) for passed in (8, 9, 99)] == [1, 1, 0]
    assert index.contains(keys, NOW).tolist() == [True, False, False, False]


def test_only_blocks_that_lie_where_they_were_read_are_forgotten():
    index, keys = SegmentIndex(), random_keys(5)
    insert(index, keys.select(slice(0, 4)), segment=1)
    places = index.locate(keys, NOW)
    index.move(run_of(keys.select(slice(0, 1)), np.array([9])), segment_of(index, 1), segment_of(index, 2))
    index.insert(run_of(keys.select(slice(1, 2)), np.array([9])), segment_of(index, 1), expires=0, used=NOW)
    index.forget(keys.select(slice(2, 3)))
    insert(index, keys.select(slice(4, 5)), segment=0)  # as the zeros of a row that was not there
    assert index.forget(keys, places) == 1
    assert index.contains(keys, NOW).tolist() == [True, True, False, False, True]
    index.check_integrity()


def test_a_later_insert_moves_a_block_and_a_block_found_on_disk_does_not():
    index, keys = SegmentIndex(), random_keys(1)
    insert(index, keys, segment=1)
    assert insert(index, keys, segment=2, was_found=True) == 0
    assert index.locate(keys, NOW)["segment"] == segment_of(index, 1).id
    assert insert(index, keys, segment=3) == 0
    assert index.locate(keys, NOW)["segment"] == segment_of(index, 3).id
    index.check_integrity()


def test_a_block_found_on_disk_replaces_one_that_expires_sooner():
    index, keys = SegmentIndex(), random_keys(1)
    insert(index, keys, segment=1, expires=NOW + 5)
    insert(index, keys, segment=2, expires=NOW + 4, was_found=True)
    assert index.locate(keys, NOW)["segment"] == segment_of(index, 1).id
    insert(index, keys, segment=3, was_found=True)
    assert index.locate(keys, NOW + 10)["segment"] == segment_of(index, 3).id


def test_blocks_of_a_segment_that_is_gone_are_not_inserted():
    index, keys = SegmentIndex(), random_keys(3)
    gone = segment_of(index, 1)
    insert(index, keys, segment=1)
    assert index.remove_segment(gone) == 3
    assert index.insert(run_of(keys, np.arange(3)), gone, expires=0, used=NOW) == 0
    assert index.remove_segment(gone) == 0
    assert segment_of(index, 1).id != gone.id
    index.check_integrity()


def test_equal_names_in_one_insert_are_one_block():
    index, keys = SegmentIndex(), random_keys(2)
    insert(index, keys.select(np.array([0, 1, 0])))
    assert len(index) == 2
    assert index.locate(keys, NOW)["page"].tolist() == [2, 1]
    index.check_integrity()


def test_a_copied_block_moves_unless_it_is_elsewhere_meanwhile():
    index, keys = SegmentIndex(), random_keys(3)
    insert(index, keys, segment=1)
    index.touch(keys, NOW + 1)
    insert(index, keys.select(slice(0, 1)), segment=2)
    index.forget(keys.select(slice(1, 2)))
    copied = run_of(keys, np.array([50, 51, 52]))
    assert index.move(copied, segment_of(index, 1), segment_of(index, 9)) == 1
    now = index.locate(keys, NOW)
    assert now["name"][1] == 0
    assert now["segment"][[0, 2]].tolist() == [segment_of(index, 2).id, segment_of(index, 9).id]
    assert (now["page"][2], now["used"][2], now["hits"][2]) == (52, NOW + 1, 1)
    index.check_integrity()


def test_loads_and_time_decide_what_a_block_is_worth():
    index, keys = SegmentIndex(), random_keys(3)
    insert(index, keys, segment=0)
    index.touch(keys.select(slice(1, 2)), NOW)
    index.touch(keys.select(slice(1, 3)), NOW + 6 * 3600)
    assert worth_of(index.locate(keys, NOW), NOW + 6 * 3600).tolist() == [0.5, 3.0, 2.0]
    segment_of(index, 1)
    total, pinned = index.segment_worth(NOW + 6 * 3600)
    assert total.tolist() == [5.5, 0.0]
    assert pinned.tolist() == [0, 0]
    insert(index, keys.select(slice(0, 2)), segment=1, flags=PINNED)
    assert index.segment_worth(NOW)[1].tolist() == [0, 8192]


def test_hits_do_not_overflow():
    index, keys = SegmentIndex(), random_keys(1)
    insert(index, keys)
    for _ in range(300):
        index.touch(keys, NOW)
    assert worth_of(index.locate(keys, NOW), NOW).tolist() == [256.0]


def test_removing_and_inserting_again_and_again_does_not_grow_the_index():
    index, keys = SegmentIndex(), random_keys(2000)
    insert(index, keys)
    size = len(index._rows)
    for round_number in range(10):
        index.forget(keys.select(slice(0, 1000)))
        fresh = random_keys(1000, seed=round_number + 1)
        insert(index, fresh)
        index.check_integrity()
        index.forget(fresh)
        insert(index, keys.select(slice(0, 1000)))
    assert index.contains(keys, NOW).all()
    assert len(index._rows) == size


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
                insert(index, keys, segment=segment, first_page=step)
                known.update((number, (segment, step + at)) for at, number in enumerate(chosen))
            case 3:
                index.forget(keys)
                known = {number: place for number, place in known.items() if number not in chosen}
            case 4 if step % 5 == 0:
                index.remove_segment(segment_of(index, segment))
                known = {number: place for number, place in known.items() if place[0] != segment}
            case _:
                places = index.locate(keys, NOW)
                found = {
                    number: (segment_number(index.segment(int(places["segment"][at])).path.name), places["page"][at])
                    for at, number in enumerate(chosen)
                    if places["name"][at]
                }
                assert found == {number: known[number] for number in chosen if number in known}
        assert len(index) == len(known)
        if step % 50 == 0:
            index.check_integrity()
    index.check_integrity()


def test_looks_and_removals_while_the_table_grows_see_every_block_that_stays():
    index = SegmentIndex()
    staying, going = random_keys(3000, seed=1), random_keys(3000, seed=2)
    insert(index, staying)
    insert(index, going)
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
        insert(index, random_keys(1000, seed=seed))
    threads[1].join()
    stop.set()
    threads[0].join()
    assert not failures
    assert not index.contains(going, NOW).any()
    assert len(index) == 3000 + 57 * 1000
    index.check_integrity()
