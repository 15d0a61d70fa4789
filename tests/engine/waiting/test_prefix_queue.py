"""The policy "prefix": what is cached goes first, within a bound on delay; tenants by turns.

The clock counts computed tokens: each takes a second. Answers have one token, so estimates are exact.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doors import num_remembered, waiting_in
from foreword.batch import Batch
from foreword.cache import KVCacheManager
from foreword.engine import Prompt, run_all
from foreword.errors import ConfigError
from foreword.request import SamplingParams
from hash_runner import HashEngine, expected_answer
from lanes import slow

BLOCK = 4
ONE = SamplingParams(max_tokens=1, seed=0)
FOREVER = 1e8


@dataclass
class World:
    """An engine whose clock goes on by a second for each token that it computes."""

    parts: HashEngine = field(init=False)
    now: float = 0.0
    prompts: list[list[int]] = field(default_factory=list)
    order: list[int] = field(default_factory=list)
    """Requests in the order in which they started."""
    started: dict[int, float] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)
    """Tokens computed of each."""
    had_room: set[int] = field(default_factory=set)
    """Those that started beside a prompt which one step could not end."""
    outputs: list[Any] = field(default_factory=list)

    @classmethod
    def build(cls, **options: Any) -> World:
        world = cls()
        options = {"scheduling_policy": "prefix", "max_num_seqs": 1, "block_size": BLOCK, **options}
        world.parts = HashEngine.build(clock=lambda: world.now, **options)
        world.parts.runner.on_execute = world.note
        return world

    def note(self, batch: Batch) -> None:
        entries = [(int(entry.request.request_id), entry) for entry in batch.entries]
        is_cut = any(n in self.started and e.end < e.request.num_prompt_tokens for n, e in entries)
        self.had_room |= {n for n, _ in entries if is_cut and n not in self.started}
        for number, entry in entries:
            if number not in self.started:
                self.started[number] = self.now
                self.order.append(number)
            self.computed[number] = self.computed.get(number, 0) + entry.end - entry.start
        self.now += batch.num_tokens

    def add(self, tokens: list[int], **more: Any) -> None:
        prompt = Prompt(np.array(tokens, np.int32), **more)
        self.outputs.append(self.parts.engine.add_request(f"{len(self.prompts)}", prompt, ONE))
        self.prompts.append(tokens)

    def run(self, arrivals: list[tuple[float, list[int]]]) -> None:
        """Add requests as the clock reaches their arrivals, and step until all are answered."""
        left = sorted(arrivals, key=lambda one: one[0])
        while left or self.parts.engine.has_unfinished_requests():
            if not self.parts.engine.has_unfinished_requests():
                self.now = max(self.now, left[0][0])
            while left and left[0][0] <= self.now:
                self.add(left.pop(0)[1])
            self.parts.step()
        self.check_answers()

    def check_answers(self) -> None:
        for output, tokens in zip(self.outputs, self.prompts, strict=True):
            answer, _ = expected_answer(tokens, ONE, seed=0, vocab_size=50, max_model_len=512)
            assert output.outputs[0].token_ids == answer

    def warm_up(self) -> None:
        """One request alone, so that the pace is known."""
        self.run([(self.now, [49])])


def document(number: int, num_blocks: int = 3) -> list[int]:
    return [number] * (num_blocks * BLOCK)


# ------------------------------------------------------------------------------------------------------- order


def test_requests_that_share_a_document_run_together_and_the_document_is_computed_once() -> None:
    world = World.build(num_blocks=6, max_overtake_s=FOREVER)
    world.warm_up()
    world.run([(world.now, [*document(number % 3), 40, number]) for number in range(12)])
    assert world.order == [0, 1, 4, 7, 10, 2, 5, 8, 11, 3, 6, 9, 12]
    assert sum(world.computed.values()) == 1 + 3 * 12 + 12 * 2


@pytest.mark.parametrize("seats", [1, 4])
def test_sorted_prompts_compute_each_document_once_however_many_run_together(seats) -> None:
    parts = HashEngine.build(num_blocks=64, block_size=16, max_num_seqs=seats, prefix_index="radix")
    rng = np.random.default_rng(5)
    asked = [[*[number] * 160, *rng.integers(0, 50, 8).tolist()] for number in range(8) for _ in range(5)]
    rng.shuffle(asked)
    ids = (f"{number}" for number in itertools.count())
    prompts = [Prompt(np.array(one, np.int32)) for one in asked]
    run_all(parts.engine, prompts, [ONE] * len(prompts), 16, lambda: next(ids))
    assert parts.engine.num_computed_tokens <= 8 * 160 + 40 * 8


def test_without_a_bound_to_spend_the_order_is_that_of_arrival() -> None:
    world = World.build(num_blocks=6, max_overtake_s=0.0)
    world.warm_up()
    world.run([(world.now, [*document(number % 3), 40, number]) for number in range(12)])
    assert world.order == list(range(13))


def test_before_a_step_was_measured_nobody_overtakes() -> None:
    world = World.build(num_blocks=32, max_num_batched_tokens=20, max_overtake_s=FOREVER)
    queue = waiting_in(world.parts.engine)
    for number in range(4):
        world.add([*document(number % 2), 40, number])
    assert next(queue.candidates()).request_id == "0"
    world.parts.step()
    assert next(queue.candidates()).request_id == "2"


def test_a_longer_match_goes_before_a_shorter_one_and_eviction_turns_that_round() -> None:
    world = World.build(num_blocks=64, max_overtake_s=FOREVER)
    world.run([(0.0, document(1)), (0.0, document(2, 6))])
    queue = waiting_in(world.parts.engine)
    world.add([9, 9])
    world.add([*document(1), 40])
    world.add([*document(2, 6), 40])
    assert next(queue.candidates()).request_id == "4"
    manager = world.parts.manager
    probe, _ = world.parts.engine.check(
        "probe", Prompt(np.array([*document(2, 6), 40], np.int32)), SamplingParams(max_tokens=1)
    )
    manager.evict_blocks(manager.get_computed_blocks(probe).block_ids[1:].tolist())
    world.parts.engine.check_integrity()
    assert next(queue.candidates()).request_id == "3"
    manager.reset_prefix_cache()
    world.parts.engine.check_integrity()
    assert next(queue.candidates()).request_id == "2"
    world.run([])


def test_priorities_go_before_what_is_cached() -> None:
    world = World.build(num_blocks=64, max_overtake_s=FOREVER)
    world.run([(0.0, document(1))])
    world.add([*document(1), 40], priority=1)
    world.add(document(2), priority=0)
    world.add(document(3), priority=-1)
    world.run([])
    assert world.order == [0, 3, 2, 1]


def test_one_that_finds_no_blocks_lets_the_oldest_try_and_blocks_no_one_older() -> None:
    world = World.build(num_blocks=8, max_num_seqs=4, max_overtake_s=FOREVER)
    world.run([(0.0, document(1, 2))])
    world.parts.engine.add_request("100", Prompt(np.array(document(5, 4), np.int32)), SamplingParams(max_tokens=9))
    world.parts.step()
    world.add([7, 7])
    world.add([*document(1, 2), *document(6, 3)])
    world.parts.step()
    assert 1 in world.started, "the oldest did not start beside the running one"
    assert 2 not in world.started
    world.run([])


# ------------------------------------------------------------------------------------------------------- bound


def arrivals_of(num_blocks: int) -> st.SearchStrategy[list[tuple[float, list[int]]]]:
    """Questions about documents of at most that many blocks, and the seconds at which they come."""
    parts = st.tuples(st.integers(0, 3), st.integers(0, num_blocks), st.integers(1, 9))
    prompts = parts.map(lambda one: [*document(one[0], one[1]), *range(10, 10 + one[2])])
    return st.lists(st.tuples(st.integers(0, 60).map(float), prompts), min_size=2, max_size=25)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(arrivals_of(3), st.sampled_from([0.0, 3.0, 20.0, 100.0]), st.sampled_from([6, 9, 40]))
def test_no_request_waits_longer_than_in_order_of_arrival_and_the_bound(arrivals, bound, num_blocks) -> None:
    """Alone in the engine, each request starts no later than if all before it were computed whole, and the bound."""
    world = World.build(num_blocks=num_blocks, max_overtake_s=bound)
    world.run(arrivals)
    free_at = 0.0
    for number, (arrival, tokens) in enumerate(sorted(arrivals, key=lambda one: one[0])):
        start = max(free_at, arrival)
        assert world.started[number] <= start + bound
        free_at = start + len(tokens)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    arrivals_of(12),
    st.sampled_from([0.0, 5.0, 30.0]),
    st.integers(1, 4),
    st.sampled_from([12, 64]),
    st.sampled_from([15, 60]),
)
def test_later_requests_take_no_more_from_one_than_the_bound(arrivals, bound, seats, budget, num_blocks) -> None:
    """With any budget and number of seats: what those that came later compute of their prompts before it starts.

    Room beside a long prompt is given in order of arrival too, and is not counted.
    """
    world = World.build(
        num_blocks=num_blocks,
        max_overtake_s=bound,
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        coalesce_in_flight=False,
    )
    world.run(arrivals)
    assert len(world.order) == len(arrivals)
    place = {number: at for at, number in enumerate(world.order)}
    for number in place:
        later = [one for one in place if one > number and place[one] < place[number] and one not in world.had_room]
        assert sum(world.computed[one] for one in later) <= bound


@pytest.mark.parametrize("bound", [0.0, 10.0, 50.0])
def test_a_stream_of_cached_requests_does_not_starve_a_new_document(bound) -> None:
    world = World.build(num_blocks=64, max_overtake_s=bound)
    world.run([(0.0, document(1))])
    cold = len(world.prompts) + 3
    world.run(
        [(world.now, [*document(2 if number == 3 else 1), 40, number % 50, number // 50]) for number in range(200)]
    )
    overtook = [one for one in world.order[: world.order.index(cold)] if one > cold]
    assert sum(world.computed[one] for one in overtook) <= bound
    assert (len(overtook) > 0) == (bound > 0), "the bound was not used"


@pytest.mark.parametrize("seed", [*range(3), *slow(*range(3, 6))])
def test_all_at_once_no_order_computes_less_where_the_pool_holds_the_longest_path(seed) -> None:
    rng = random.Random(seed)
    prompts = [[*(token for _ in range(3) for token in [rng.randrange(2)] * BLOCK), 20 + n] for n in range(5)]
    most = len(prompts[0]) // BLOCK + 2

    def num_computed(numbers: tuple[int, ...], policy: str) -> int:
        world = World.build(
            num_blocks=most, scheduling_policy=policy, max_overtake_s=FOREVER, eviction_policy="lru", vocab_size=50
        )
        world.warm_up()
        world.run([(world.now, prompts[number]) for number in numbers])
        return sum(world.computed.values())

    best = min(num_computed(numbers, "fcfs") for numbers in itertools.permutations(range(5)))
    assert num_computed(tuple(range(5)), "prefix") == best


# ----------------------------------------------------------------------------------------------------- tenants


def test_a_tenant_that_floods_gets_no_more_tokens_than_the_others() -> None:
    world = World.build(num_blocks=400, max_overtake_s=FOREVER, max_num_batched_tokens=64)
    world.warm_up()
    rng = np.random.default_rng(0)
    owners = ["warm-up"]
    sizes = {"flood": (100, 40), "many": (150, 20), "few": (40, 60)}
    for owner, (num, length) in sizes.items():
        for _ in range(num):
            world.add(rng.integers(0, 50, length).tolist(), owner=owner)
            owners.append(owner)
    while all(any(owners[n] == one and n not in world.started for n in range(len(owners))) for one in sizes):
        world.parts.step()
    shares = {one: sum(count for n, count in world.computed.items() if owners[n] == one) for one in sizes}
    assert min(shares.values()) >= 0.9 * max(shares.values())
    world.run([])


# -------------------------------------------------------------------------------------------------------- cost


def test_a_step_looks_up_only_what_it_starts_however_many_wait(monkeypatch) -> None:
    looked_up: list[str] = []
    plain = KVCacheManager.get_computed_blocks

    def counted(self: KVCacheManager, sequence: Any, **more: Any) -> Any:
        looked_up.append(sequence.request_id)
        return plain(self, sequence, **more)

    monkeypatch.setattr(KVCacheManager, "get_computed_blocks", counted)
    world = World.build(num_blocks=64, max_num_seqs=2, max_overtake_s=FOREVER, max_num_batched_tokens=32)
    world.run([(0.0, document(number)) for number in range(4)])
    for number in range(1000):
        world.add([*document(number % 4), 40, number % 50, number // 50])
    looked_up.clear()
    for _ in range(100):
        world.parts.step()
    assert len(world.started) > 150
    assert len(looked_up) <= len(world.started) + 100, "requests that did not start were looked up"
    for request_id in [request.request_id for request in waiting_in(world.parts.engine)]:
        world.parts.engine.abort_request(request_id)
    world.parts.engine.check_integrity()


def test_the_queue_of_a_long_life_does_not_grow() -> None:
    world = World.build(num_blocks=12, max_overtake_s=20.0)
    first = [(0.0, [*document(number), 40]) for number in range(4)]
    world.run(first + [(2.0 * number, [*document(number % 4), 41, number % 50]) for number in range(600)])
    queue = waiting_in(world.parts.engine)
    queue.check_integrity()
    assert num_remembered(queue) == 0


@pytest.mark.parametrize("policy", ["fcfs", "priority", "prefix"])
def test_answers_do_not_depend_on_the_policy(policy) -> None:
    rng = np.random.default_rng(3)
    world = World.build(num_blocks=20, scheduling_policy=policy, max_num_seqs=3, max_overtake_s=30.0)
    world.run([(float(rng.integers(90)), [*document(int(rng.integers(4))), int(n)]) for n in range(50)])
    assert len(world.order) == 50


@pytest.mark.parametrize("policy", ["priority", "prefix"])
def test_urgent_requests_of_one_tenant_take_no_more_from_another_than_any_others(policy) -> None:
    def tokens_before(priority: int) -> float:
        world = World.build(num_blocks=64, scheduling_policy=policy, max_num_batched_tokens=16)
        world.warm_up()
        for number in range(20):
            world.add([*document(number), number], owner="flood", priority=priority)
        world.add([*document(30), 40], owner="other")
        while world.parts.engine.has_unfinished_requests():
            world.parts.step()
        world.check_answers()
        return world.started[21]

    assert tokens_before(-5) == tokens_before(0) == tokens_before(5)


@pytest.mark.parametrize("policy", ["priority", "prefix"])
def test_priorities_order_the_requests_of_a_tenant(policy) -> None:
    world = World.build(num_blocks=64, scheduling_policy=policy)
    world.warm_up()
    for owner in ("a", "b"):
        for priority in (3, -2, 0):
            world.add([*document(len(world.prompts)), 40], owner=owner, priority=priority)
    while world.parts.engine.has_unfinished_requests():
        world.parts.step()
    assert [number for number in world.order if 1 <= number <= 3] == [2, 3, 1]
    assert [number for number in world.order if number >= 4] == [5, 6, 4]


def test_who_is_preempted_does_not_depend_on_another_tenants_priority() -> None:
    def preempted(owners: tuple[str | None, str | None]) -> list[str]:
        parts = HashEngine.build(num_blocks=8, scheduling_policy="priority")
        for name, owner, priority, seed in (("first", owners[0], 0, 1), ("urgent", owners[1], -5, 2)):
            prompt = Prompt(np.random.default_rng(seed).integers(0, 50, 11, np.int32), owner=owner, priority=priority)
            parts.engine.add_request(name, prompt, SamplingParams(max_tokens=9, temperature=0))
        while parts.scheduler.num_preemptions == 0:
            spans = parts.step()
        return list(spans)

    assert preempted((None, None)) == ["urgent"]
    assert preempted(("a", "b")) == ["first"]


def test_a_cache_that_does_not_tell_what_it_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="scheduling_policy='prefix' needs a cache that keeps a ledger"):
        World.build(enable_prefix_caching=False)
