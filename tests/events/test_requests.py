"""Requests rebuilt from events: against a real engine that knows the truth, and case by case."""

import gzip
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from events.engine_with_events import EVERYTHING, EngineWithEvents, as_ints, hashes, reachable
from foreword.cache import AllBlocksCleared, BlockRemoved, BlockStored, MissReason
from foreword.cluster.follower import Event, EventBatch, Follower
from foreword.engine import Prompt
from foreword.events.mirror import Mirror
from foreword.events.requests import IDLE_S, Requests, SeenRequest, Why
from foreword.events.subscriber import Subscriber
from foreword.events.wire import decode_batch
from foreword.request import SamplingParams
from polling import poll_until


class Stream:
    """A mirror and its witness, fed with batches."""

    def __init__(self, num_blocks: int | None = None, *, all_report: bool = False) -> None:
        mirror = Mirror()
        self.follower = Follower(mirror, has_replay=False, has_snapshot=False)
        self.requests = self.follower.witness = Requests(mirror, num_blocks, all_report=all_report)
        self._seq = 0

    def send(self, time: float, *events: Event) -> None:
        self.follower.take(EventBatch(None, self._seq, events, time))
        self._seq += 1

    def shapes(self) -> list[tuple[int, int, int]]:
        """Found, prompt and answer blocks of all requests."""
        taken = self.requests.take(everything=True)
        return [(one.num_found_blocks, one.num_prompt_blocks, len(one.keys) - one.num_prompt_blocks) for one in taken]


def stored(parent: int | None, *keys: int, size: int = 16, **more: object) -> BlockStored:
    return BlockStored(keys, parent, tuple(range(size * len(keys))), size, **more)


def test_an_event_without_blocks_says_nothing() -> None:
    stream = Stream()
    for group in (0, 1):
        stream.send(1.0, BlockStored((), None, (), 16, group_idx=group))
    assert stream.shapes() == []


def test_a_request_has_found_the_blocks_before_its_first_new_one() -> None:
    stream = Stream()
    stream.send(1.0, stored(None, 1, 2, 3, 4))
    stream.send(30.0, stored(2, 5, 6))
    stream.send(60.0, stored(6, 7, 8, 9))
    stream.send(90.0, stored(None, 10))
    assert stream.shapes() == [(0, 4, 0), (2, 4, 0), (4, 7, 0), (0, 1, 0)]
    counts = stream.requests.counts
    assert (counts.requests, counts.prompt_tokens, counts.found_tokens) == (4, 16 * 16, 6 * 16)


def test_chunks_of_a_prompt_and_blocks_of_its_answer_belong_to_one_request() -> None:
    stream = Stream()
    stream.send(1.0, stored(None, 1, 2))
    stream.send(2.0, stored(2, 3, 4))
    for at in range(5, 9):
        stream.send(at * 2.0, stored(at - 1, at))
    stream.send(17.0, stored(8, 9, 10))  # an answer grows by single blocks: this is the next turn
    assert stream.shapes() == [(0, 4, 4), (8, 10, 0)]


def test_a_block_that_comes_late_is_another_request_s() -> None:
    stream = Stream()
    stream.send(1.0, stored(None, 1, 2))
    stream.send(1.0 + IDLE_S, stored(2, 3))
    stream.send(1.1 + 2 * IDLE_S, stored(3, 4))
    assert stream.shapes() == [(0, 2, 1), (3, 4, 0)]


def test_pages_that_are_reported_one_by_one_in_a_batch_are_one_prompt() -> None:
    """As SGLang does; two requests' pages may alternate only by batch."""
    stream = Stream()
    stream.send(1.0, *[stored(at or None, at + 1) for at in range(6)], stored(3, 20), stored(20, 21))
    assert stream.shapes() == [(0, 6, 0), (3, 5, 0)]


def test_blocks_that_are_reported_again_were_found() -> None:
    stream = Stream()
    stream.send(1.0, stored(None, 1, 2, 3))
    stream.send(30.0, stored(None, 1, 2, 3, 4, 5))
    stream.send(60.0, stored(None, 1, 2))
    assert stream.shapes() == [(0, 3, 0), (3, 5, 0), (2, 2, 0)]


def test_requests_are_taken_in_the_order_of_their_beginnings_once_all_before_them_have_ended() -> None:
    stream = Stream()
    stream.send(1.0, stored(None, 1, 2))
    stream.send(2.0, stored(None, 11, 12))
    stream.send(9.0, stored(2, 3))
    stream.send(13.0)
    assert not stream.requests.take(), "the first one may go on"
    stream.requests.pass_time(7.0)
    assert [one.time for one in stream.requests.take()] == [1.0, 2.0]
    assert stream.requests.counts.output_tokens == 16


def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreword.events.requests.MAX_WAITING_BLOCKS", 100)
    stream = Stream()
    stream.send(1.0, stored(None, *range(1, 101)))
    assert not stream.requests.take()
    stream.send(2.0, stored(None, -1, -2))
    (first,) = stream.requests.take()
    assert len(first.keys) == 100
    stream.send(3.0, stored(-2, -3))
    assert stream.shapes() == [(0, 2, 1)]
    assert stream.requests._num_waiting_blocks == 0


def test_what_twice_the_memory_would_have_kept() -> None:
    stream = Stream()
    stream.send(0.0, stored(None, 1, 2, 3, 4))
    assert stream.requests.num_blocks is None, "an engine that has never evicted does not show its size"
    stream.send(30.0, BlockRemoved((4, 3)), stored(None, 5, 6))
    assert stream.requests.num_blocks == 4
    stream.send(60.0, BlockRemoved((6,)), stored(2, 3))
    assert stream.requests.num_again_tokens == 16
    for at in range(7, 12):
        stream.send(30.0 * at, BlockRemoved((at - 2,) if at != 8 else (7,)), stored(None, at))
    before = stream.requests.num_again_tokens
    stream.send(900.0, stored(3, 4))
    assert stream.requests.num_again_tokens == before, "five others were evicted after it"
    stream.send(930.0, AllBlocksCleared())
    stream.send(960.0, stored(None, 10))
    assert stream.requests.num_again_tokens == before, "a reset is not for want of memory"


def test_other_media_groups_kinds_and_sizes_are_not_the_prefix() -> None:
    stream = Stream(num_blocks=10)
    window = {"group_kind": "sliding_window"}
    stream.send(0.0, stored(None, 1, group_idx=0, **window), stored(None, 1, 2, group_idx=1))
    stream.send(0.0, replace(stored(None, 7, 8), medium="CPU", group_idx=1), BlockRemoved((7,), "CPU", 1))
    stream.send(0.0, stored(None, 5, size=4, group_idx=1), stored(None, 6, group_idx=2))
    assert stream.shapes() == [(0, 2, 0)]
    counts = stream.requests.counts
    assert (counts.other_sizes, counts.unknown_beginnings, stream.requests.num_blocks) == (1, 0, 10)


def test_a_request_whose_beginning_is_not_known_is_counted_apart() -> None:
    stream = Stream()
    stream.send(0.0, stored(99, 1, 2))
    stream.send(30.0, stored(5, 5))  # its own parent
    stream.send(60.0, stored(5, 6))
    assert stream.shapes() == []
    assert (stream.requests.counts.unknown_beginnings, stream.requests.counts.requests) == (3, 0)


def test_times_that_are_no_times_change_nothing() -> None:
    stream = Stream()
    for time in (float("nan"), 5.0, float("-inf"), 2.0, float("inf")):
        stream.send(time)
    stream.send(1.0, stored(None, 1))
    assert [one.time for one in stream.requests.take(everything=True)] == [5.0]
    stream = Stream()
    stream.send(float("nan"), stored(None, 1))
    assert [one.time for one in stream.requests.take(everything=True)] == [0.0]  # JSON has no infinity


def test_no_events_crash_a_witness() -> None:
    rng = random.Random(5)
    stream = Stream()
    for time in range(3000):
        keys = tuple(rng.randrange(8) for _ in range(rng.randrange(4)))
        parent = rng.choice([None, *range(8)])
        event = rng.choice(
            [BlockStored(keys, parent, (), rng.choice([1, 1, 2])), BlockRemoved(keys), AllBlocksCleared()]
        )
        stream.send(time * rng.random(), event)
    stream.requests.take(everything=True)
    requests = stream.requests
    assert requests._num_waiting_blocks == 0
    assert len(requests._ghosts) <= (requests.num_blocks or 0)


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_the_requests_of_a_real_engine(index: str) -> None:
    """One at a time and far apart, each is seen with what the engine says it found, in whole blocks."""
    rng = random.Random(index)
    families = [[rng.randint(0, 1) for _ in range(24)] for _ in range(3)]
    with EngineWithEvents(EVERYTHING, seed=2, index=index) as engine:
        told = engine.publisher.addresses
        with Subscriber(reachable(told["kv_events"]), snapshot=told["kv_events_snapshot"]) as subscriber:
            requests = subscriber.follower.witness = Requests(subscriber.mirror)
            assert poll_until(subscriber, lambda one: one.is_exact)
            truth = []
            for number in range(60):
                own = [rng.randint(0, 1) for _ in range(rng.randrange(16))]
                tokens = np.array(rng.choice(families)[: rng.randrange(4, 25)] + own, np.int32)
                before = engine.held()
                engine.built.engine.add_request(f"q{number}", Prompt(tokens), SamplingParams(max_tokens=1))
                outputs = []
                while engine.built.engine.has_unfinished_requests():
                    outputs += engine.built.engine.step()
                if engine.held() - before:
                    truth.append((outputs[-1].num_cached_tokens // 4, len(tokens) // 4))
                assert poll_until(subscriber, lambda one: hashes(one.mirror) == as_ints(engine.held()))
                requests.pass_time(2 * IDLE_S)
            seen = requests.take(everything=True)
            assert [(one.num_found_blocks, one.num_prompt_blocks) for one in seen] == truth
            assert sum(found for found, _ in truth) > 60
            assert requests.num_again_tokens > 0
            assert requests.counts.unknown_beginnings == 0


def test_a_snapshot_is_no_traffic() -> None:
    mirror = Mirror()
    mirror.store(stored(None, 1, 2))
    requests = Requests(mirror)
    requests.note(1.0, stored(2, 3))
    mirror.store(stored(2, 3))
    requests.end_batch(1.0)
    why = Why(MissReason.NEVER_SEEN, 32, ours=tuple(range(8)))
    assert requests.take(everything=True) == [SeenRequest(1.0, [1, 2, 3], 16, 2, 3, why=why)]


# ------------------------------------------------------------------------- vLLM 0.33's own bytes (record_vllm.py)

VLLM: dict[str, dict[str, Any]] = json.loads(
    gzip.decompress((Path(__file__).parent / "vllm_streams.json.gz").read_bytes())
)
BLOCK = 16


def watched(batches: list[str], *, all_report: bool = False) -> Requests:
    mirror = Mirror()
    follower = Follower(mirror, has_replay=False, has_snapshot=False)
    requests = follower.witness = Requests(mirror, all_report=all_report)
    for number, batch in enumerate(batches):
        follower.take(decode_batch(bytes.fromhex(batch), number))
    return requests


@pytest.mark.parametrize("name", VLLM)
def test_vllm_s_requests_have_found_what_its_own_lookup_found(name: str) -> None:
    """Of two groups in either order, with tails of prompts, reports of reused blocks, and states that are missing."""
    requests = watched(VLLM[name]["batches"], all_report=True)
    seen = requests.take(everything=True)
    truth = iter(VLLM[name]["truth"])
    for one in seen:  # those that stored no whole block are not seen
        told = next(told for told in truth if (told["found"] // BLOCK * BLOCK, told["session"]) == shape_of(one))
        assert one.num_prompt_tokens + one.num_output_tokens >= told["prompt"] // BLOCK * BLOCK
    assert requests.block_tokens == BLOCK
    assert requests.counts.unknown_beginnings == 0
    assert requests.counts.is_exact == (not name.endswith("incremental"))
    assert (requests.num_blocks is None) == (name != "too small"), "a tail that becomes a block is no eviction"
    if requests.counts.is_exact:
        assert len(seen) == sum(told["prompt"] >= BLOCK for told in VLLM[name]["truth"])


def shape_of(one: SeenRequest) -> tuple[int, str | None]:
    return one.num_found_tokens, one.session_id


def orders() -> Iterator[tuple[BlockStored, ...]]:
    tail = stored(None, 90, size=32, group_kind="full_attention")
    next_tail = stored(90, 91, size=32, group_kind="full_attention")
    blocks = stored(None, 1, 2, size=784, group_kind="full_attention")
    states = stored(None, 1, size=1568, group_idx=1, group_kind="mamba")
    yield from itertools.permutations((tail, next_tail, blocks, states))


def test_a_tail_is_never_taken_for_a_block_in_whatever_order_it_comes() -> None:
    for order in orders():
        stream = Stream()
        stream.send(1.0, *order)
        stream.send(60.0, stored(2, 3, 4, size=784))
        assert stream.requests.block_tokens == 784, order
        assert stream.shapes()[-1] == (2, 4, 0), order
        assert stream.requests.counts.prompt_tokens == 784 * 6, order


def test_the_lowest_whole_group_is_followed_whichever_comes_first() -> None:
    for order in itertools.permutations((stored(None, 1, 2, group_idx=2), stored(None, 5, 6, size=8, group_idx=1))):
        stream = Stream()
        stream.send(1.0, *order)
        assert stream.requests.block_tokens == 8
        assert stream.shapes() == [(0, 2, 0)], order


def test_blocks_that_are_computed_again_were_not_found() -> None:
    stream = Stream()
    stream.send(1.0, stored(None, 1, 2, 3, 4))
    stream.send(30.0, stored(3, 4))  # of a prompt of whole blocks, an engine computes the last one again
    stream.send(60.0, stored(4, 5))
    stream.send(61.0, stored(5, 6))
    stream.send(90.0, stored(4, 5))  # the same answer once more, block by block
    stream.send(91.0, stored(5, 6))
    assert stream.shapes() == [(0, 4, 0), (3, 4, 0), (4, 5, 1), (4, 5, 1)]


def test_another_session_s_blocks_belong_to_another_request() -> None:
    stream = Stream()
    stream.send(1.0, stored(None, 1, 2, session_id="a"))
    stream.send(2.0, stored(2, 3, 4, session_id="b"), stored(4, 5, session_id="b"))
    assert stream.shapes() == [(0, 2, 0), (2, 5, 0)]


def test_a_request_s_reason_and_the_token_at_which_it_parts() -> None:
    """Of one engine's bytes: prompts that part, go on, repeat, are salted, use an adapter, come after a reset."""
    seen = watched(VLLM["one group, full"]["batches"]).take(everything=True)
    reasons = [(one.why.reason, one.why.num_tokens) for one in seen]
    assert reasons == [
        (MissReason.NEVER_SEEN, 0),
        (MissReason.NEVER_SEEN, 50),
        (None, 0),
        (MissReason.NEVER_SEEN, 64),
        (MissReason.PARTIAL_BLOCK, 48),
        (MissReason.SALT_DIFFERS, 0),
        (MissReason.ADAPTER_DIFFERS, 0),
        (MissReason.NEVER_SEEN, 20),
        (MissReason.EVICTED, 0),
    ]
    assert (seen[1].why.ours[:2], seen[1].why.theirs[:2]) == ((300, 301), (200, 201))
    assert seen[-1].why.was_reset
    states = watched(VLLM["states, attention, full"]["batches"]).take(everything=True)
    assert [(one.why.reason, one.why.num_tokens) for one in states][1] == (MissReason.STATE_NOT_SAVED, 48)
    assert states[1].num_found_tokens == 0, "the attention's blocks were there, the states were not"


def test_what_was_evicted_and_what_has_another_picture() -> None:
    stream = Stream()
    picture, other = ((("cat", 0),),), ((("dog", 0),),)
    stream.send(0.0, stored(None, 1, 2), stored(None, 7, extra_keys=picture), BlockRemoved((2,)))
    stream.send(40.0, stored(1, 2), stored(None, 8, extra_keys=other), BlockRemoved((8,)))
    seen = stream.requests.take(everything=True)
    assert [(one.why.reason, one.why.seconds_ago) for one in seen[2:]] == [
        (MissReason.EVICTED, 40.0),
        (MissReason.MEDIA_DIFFERS, None),
    ]


def test_a_report_that_an_eviction_parts_from_what_is_computed_next_is_one_request() -> None:
    stream = Stream()
    stream.send(0.0, stored(None, 1, 2), stored(None, 9))
    stream.send(60.0, stored(None, 1, 2), BlockRemoved((9,)), stored(2, 3))
    first, _, last = stream.requests.take(everything=True)
    assert (last.num_found_blocks, last.num_prompt_blocks, last.why.reason) == (2, 3, MissReason.NEVER_SEEN)
    assert first.why.reason is MissReason.NEVER_SEEN


def test_a_prompt_that_is_computed_again_is_no_report_unless_the_operator_says_that_all_report() -> None:
    for all_report in (False, True):
        stream = Stream(all_report=all_report)
        stream.send(1.0, stored(None, 1, 2, 3, 4))
        stream.send(30.0, stored(None, 1, 2, 3, 4))
        assert stream.shapes() == [(0, 4, 0), (4, 4, 0)]
        counts = stream.requests.counts
        assert (counts.is_exact, counts.is_bound) == (all_report, False)


def test_nothing_is_exact_after_one_of_two_copies_of_a_block_went() -> None:
    stream = Stream(all_report=True)
    stream.send(1.0, stored(None, 1, 2, 3))
    stream.send(30.0, stored(None, 1, 2, 3), BlockRemoved((1,)))
    stream.send(60.0, stored(None, 1, 2, 3, 7))  # a report of 1, whose copy is still there
    assert not stream.requests.counts.is_exact
    other = Stream(all_report=True)
    other.send(1.0, stored(None, 1, 2, 3))
    other.send(30.0, stored(None, 1, 2), stored(2, 3))  # the last block of a prompt is computed again
    assert other.requests.counts.is_exact
    other.send(60.0, BlockRemoved((3,)))
    assert not other.requests.counts.is_exact


def test_a_reset_in_the_middle_of_a_batch_ends_what_came_before_it() -> None:
    stream = Stream()
    stream.send(1.0, stored(None, 1, 2, 3, 4), AllBlocksCleared(), stored(None, 5))
    assert stream.shapes() == [(0, 4, 0), (0, 1, 0)]
    assert len(stream.requests._mirror.blocks) == 1


def test_an_eviction_after_a_reset_is_the_reason() -> None:
    stream = Stream()
    stream.send(0.0, stored(None, 1, 2))
    stream.send(1.0, AllBlocksCleared())
    stream.send(1000.0, stored(None, 1, 2))
    stream.send(2990.0, BlockRemoved((2, 1)))
    stream.send(3000.0, stored(None, 1, 2))
    seen = stream.requests.take(everything=True)
    assert [(one.why.was_reset, one.why.seconds_ago) for one in seen] == [(False, None), (True, 999.0), (False, 10.0)]


def test_requests_are_bounded_on_a_clock_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreword.events.requests.MAX_WAITING_BLOCKS", 10)
    stream = Stream()
    stream.send(1e18)
    for number in range(50):
        stream.send(1.0, stored(None, number))
        stream.requests.take()
    assert len(stream.requests._open) <= 10
