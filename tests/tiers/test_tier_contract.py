"""What every tier promises, whatever it is made of."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from doors import is_ending
from foreword.tiers.host.host_tier import HostTier
from foreword.tiers.ticket import Outcome
from foreword.tiers.tier import BlockKeys, BlockRun, Buffers, Tier, joined_keys
from tiers.block_world import (
    BLOCK_BYTES,
    OTHER_NAMESPACE,
    WAIT_S,
    keys_of,
    load,
    opened,
    payloads_of,
    probe,
    run_of,
    store,
)
from tiers.store_world import opened_store


def opened_host(_: Path) -> HostTier:
    return HostTier(np.zeros(256 * BLOCK_BYTES, np.uint8), BLOCK_BYTES)


TIERS: dict[str, Callable[[Path], Tier]] = {"disk": opened, "host": opened_host, "store": opened_store}


@pytest.fixture(params=sorted(TIERS))
def tier(request, tmp_path) -> Iterator[Tier]:
    made = TIERS[request.param](tmp_path)
    yield made
    made.check_integrity()
    made.close(WAIT_S)
    made.close(WAIT_S)


def test_what_was_stored_is_found_and_loaded_bit_for_bit(tier):
    keys = keys_of(range(30))
    assert not tier.lookup(keys).any()
    assert store(tier, keys).by_reason() == {"done": 30}
    assert tier.lookup(keys).all()
    report = load(tier, keys)
    assert report.by_reason() == {"done": 30}
    assert report.num_leading == 30


def test_blocks_come_in_any_order_and_more_than_once(tier):
    store(tier, keys_of(range(20)))
    assert load(tier, keys_of([19, 3, 3, 0, 11, 10, 9])).num_done == 7


def test_a_block_that_is_here_is_not_stored_again(tier):
    store(tier, keys_of(range(5)))
    assert store(tier, keys_of(range(8))).by_reason() == {"present": 5, "done": 3}
    assert store(tier, keys_of([9, 9])).by_reason() == {"present": 1, "done": 1}


def test_a_block_that_is_not_here_is_missing_and_those_around_it_are_loaded(tier):
    store(tier, keys_of([0, 1, 3]))
    report = load(tier, keys_of(range(4)))
    assert report.outcomes.tolist() == [Outcome.DONE, Outcome.DONE, Outcome.MISSING, Outcome.DONE]
    assert report.num_leading == 2


@pytest.mark.parametrize("other", [{"group_id": 1}, {"namespace": OTHER_NAMESPACE}])
def test_the_same_key_in_another_group_or_namespace_is_another_block(tier, other):
    store(tier, keys_of(range(4)))
    others = keys_of(range(4), **other)
    assert not tier.lookup(others).any()
    assert load(tier, others).by_reason() == {"missing": 4}
    store(tier, others)
    assert load(tier, others).num_done == 4
    assert load(tier, keys_of(range(4))).num_done == 4


def test_blocks_of_several_groups_travel_together(tier):
    keys = joined_keys([keys_of(range(4)), keys_of(range(3), group_id=2)])
    lengths = np.array([BLOCK_BYTES] * 4 + [100] * 3)
    payloads = [payloads_of(keys.select(np.array([at])), length)[0] for at, length in enumerate(lengths.tolist())]
    parents = np.array([-1, 0, 1, 2, -1, 4, 5], np.int32)
    run = BlockRun(
        keys,
        lengths,
        Buffers([payload.data for payload in payloads]),
        parents,
        np.ones(7, np.uint16),
        np.ones(7, np.float32),
    )
    assert tier.store(run).wait(WAIT_S)
    out = [np.zeros(length, np.uint8) for length in lengths.tolist()]
    ticket = tier.load(keys, lengths, Buffers([row.data for row in out]), deadline_s=WAIT_S)
    assert ticket.wait(WAIT_S)
    assert ticket.report.num_done == 7
    assert all(np.array_equal(*pair) for pair in zip(out, payloads, strict=True))


def test_a_block_of_another_length_is_missing(tier):
    store(tier, keys_of(range(3)))
    assert load(tier, keys_of(range(3)), BLOCK_BYTES - 1).by_reason() == {"missing": 3}
    assert not tier.lookup(keys_of(range(3))).any()


def test_a_forgotten_block_is_not_found_and_can_be_stored_again(tier):
    keys = keys_of(range(6))
    store(tier, keys)
    tier.forget(keys.select(slice(0, 2)))
    tier.forget(keys_of([99]))
    assert tier.lookup(keys).tolist() == [False] * 2 + [True] * 4
    assert store(tier, keys).by_reason() == {"done": 2, "present": 4}
    assert load(tier, keys).num_done == 6


def test_keys_may_be_shorter_than_32_bytes(tier):
    keys = BlockKeys.of_group(b"n" * 16, 0, [bytes([number]) * 16 for number in range(3)])
    store(tier, keys)
    assert load(tier, keys).num_done == 3


def test_nothing_is_a_job_too(tier):
    none = keys_of([])
    assert tier.lookup(none).tolist() == []
    assert store(tier, none).by_reason() == {}
    assert load(tier, none).by_reason() == {}


def test_who_waits_is_called_once_when_the_job_has_ended(tier):
    ended: list[bool] = []
    done = threading.Event()

    def on_done(ticket: object) -> None:
        ended.append(ticket.done)
        done.set()

    tier.store(run_of(keys_of(range(3))), on_done=on_done)
    assert done.wait(WAIT_S)
    done.clear()
    out = np.zeros((3, BLOCK_BYTES), np.uint8)
    sink = Buffers([row.data for row in out])
    tier.load(keys_of(range(3)), np.full(3, BLOCK_BYTES), sink, deadline_s=WAIT_S, on_done=on_done)
    assert done.wait(WAIT_S)
    assert ended == [True, True]


class StuckSink:
    """Memory whose first copy takes until the test lets it go on."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.num_puts = 0

    def put(self, index: int, payload: memoryview) -> None:
        self.num_puts += 1
        self.reached.set()
        assert self.go_on.wait(WAIT_S)


def test_after_a_cancel_nobody_touches_the_memory(tier):
    store(tier, keys_of(range(40)))
    sink = StuckSink()
    ticket = tier.load(keys_of(range(40)), np.full(40, BLOCK_BYTES), sink, deadline_s=WAIT_S)
    assert sink.reached.wait(WAIT_S)
    canceller = threading.Thread(target=ticket.cancel)
    canceller.start()
    sink.go_on.set()
    canceller.join(WAIT_S)
    touched = sink.num_puts
    assert load(tier, keys_of(range(40))).num_done == 40  # the first load is through
    assert sink.num_puts == touched
    assert ticket.report.by_reason().get("cancelled", 0) + ticket.report.num_done == 40
    assert tier.lookup(keys_of(range(40))).all()  # a cancelled block is still there


def test_a_load_that_waits_for_others_ends_at_its_deadline_and_its_blocks_are_forgotten(tier):
    store(tier, keys_of(range(10)))
    sink = StuckSink()
    stuck = tier.load(keys_of([0]), np.full(1, BLOCK_BYTES), sink, deadline_s=WAIT_S)
    assert sink.reached.wait(WAIT_S)
    waiting = StuckSink()
    ticket = tier.load(keys_of([1, 2]), np.full(2, BLOCK_BYTES), waiting, deadline_s=0.05)
    assert ticket.wait(WAIT_S)
    assert ticket.report.by_reason() == {"timeout": 2}
    assert tier.lookup(keys_of([0, 1, 2, 3])).tolist() == [True, False, False, True]
    sink.go_on.set()
    assert stuck.wait(WAIT_S)
    assert load(tier, keys_of([3])).num_done == 1
    assert waiting.num_puts == 0


class FailingMemory:
    """Memory that one block cannot be copied to or from."""

    def __init__(self, index: int) -> None:
        self.index = index

    def put(self, index: int, payload: memoryview) -> None:
        if index == self.index:
            raise RuntimeError("the device is gone")

    def take(self, index: int, out: memoryview) -> None:
        if index == self.index:
            raise RuntimeError("the device is gone")
        out[:] = payloads_of(keys_of([index]))[0].data


def test_memory_that_fails_costs_its_own_block_alone(tier, caplog):
    ticket = tier.store(BlockRun.chain(keys_of(range(5)), BLOCK_BYTES, FailingMemory(2)))
    assert ticket.wait(WAIT_S)
    assert ticket.report.by_reason() == {"done": 4, "io_error": 1}
    assert tier.lookup(keys_of(range(5))).tolist() == [True, True, False, True, True]
    assert load(tier, keys_of([0, 1, 3, 4])).num_done == 4
    ticket = tier.load(keys_of([0, 1, 3]), np.full(3, BLOCK_BYTES), FailingMemory(0), deadline_s=WAIT_S)
    assert ticket.wait(WAIT_S)
    assert ticket.report.by_reason() == {"io_error": 1, "done": 2}
    assert "the device is gone" in caplog.text


def test_what_is_asked_after_the_close_ends_at_once(tier):
    store(tier, keys_of(range(3)))
    tier.close(WAIT_S)
    assert not tier.lookup(keys_of(range(3))).any()
    assert probe(tier, keys_of(range(3))).by_reason() == {"cancelled": 3}
    assert store(tier, keys_of(range(9))).by_reason() == {"cancelled": 9}
    assert load(tier, keys_of(range(3))).by_reason() == {"cancelled": 3}


def test_a_probe_tells_what_is_here_and_the_next_look_finds_it(tier):
    store(tier, keys_of([0, 1, 3]))
    assert probe(tier, keys_of([0, 1, 2, 3])).by_reason() == {"present": 3, "missing": 1}
    assert tier.lookup(keys_of([0, 1, 2, 3])).tolist() == [True, True, False, True]
    tier.forget(keys_of([1]))
    assert probe(tier, keys_of([0, 1, 2, 3])).by_reason() == {"present": 2, "missing": 2}
    assert probe(tier, keys_of([])).by_reason() == {}


def test_statistics_count_what_happened(tier):
    store(tier, keys_of(range(4)))
    tier.lookup(keys_of(range(6)))
    load(tier, keys_of(range(6)))
    stats = tier.stats()
    assert stats.num_blocks == 4
    assert stats.num_written == 4
    assert stats.num_loaded == 4
    assert stats.loaded_bytes == 4 * BLOCK_BYTES
    assert stats.not_loaded == {"missing": 2}
    assert (stats.num_looked_up, stats.num_found) == (8, 4)  # `load` of these tests looks for the two that failed
    assert 0 < stats.stored_bytes <= stats.shared_bytes <= stats.budget_bytes
    assert tier.estimate_load_s(1 << 20) > 0


def test_many_threads_may_use_a_tier_at_once(tier):
    failures: list[BaseException] = []

    def work(worker: int) -> None:
        try:
            for round_number in range(6):
                numbers = range(10 * worker, 10 * worker + 10 + round_number)
                store(tier, keys_of(numbers))
                load(tier, keys_of(numbers))
                tier.forget(keys_of([10 * worker + round_number]))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not [error for error in failures if "still found" not in str(error)]


def test_a_store_that_is_cancelled_leaves_its_source_alone(tier):
    class StuckSource(StuckSink):
        def take(self, index: int, out: memoryview) -> None:
            self.put(index, out)

    source = StuckSource()
    ticket = tier.store(BlockRun.chain(keys_of(range(8)), BLOCK_BYTES, source))
    assert source.reached.wait(WAIT_S)
    canceller = threading.Thread(target=ticket.cancel)
    canceller.start()
    while not is_ending(ticket):
        time.sleep(0.001)
    source.go_on.set()
    canceller.join(WAIT_S)
    store(tier, keys_of(range(20, 22)))
    assert source.num_puts == 1
    assert ticket.report.num_done <= 1  # the first block was copied when the cancel came
