"""Loads and stores between a pool and a tier: what waits, what goes on, what is counted, and the fences."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from doors import allowed_s, cost_of_steps, in_flight, rest_stores, tiers_of
from foreword.cache import (
    BlockIds,
    FullAttentionSpec,
    KVCacheManager,
    MissReason,
    SlidingWindowSpec,
    TokenSequence,
    make_index,
)
from foreword.engine import Engine, Prompt, TierDirector
from foreword.engine.tiering import director, stores
from foreword.engine.tiering.loads import StepCost
from foreword.engine.tiering.offers import DroppedKeys
from foreword.errors import CacheBusyError, ConfigError
from foreword.request import Request, RequestOutput, SamplingParams
from foreword.request.request import Loaded
from foreword.tiers.disk.disk_tier import DiskTier
from foreword.tiers.ticket import Outcome
from foreword.tiers.tier import Tier
from hash_runner import HashEngine, HashRunner, expected_answer
from late_runner import LateRunner
from late_tier import HashMemory, LateTier

NAMESPACE = b"an own namespace"
PROMPT = list(range(40))


def world_on(tier: Tier, **options: object) -> HashEngine:
    """A new engine above a tier that outlives it."""

    def make(manager: KVCacheManager, runner: HashRunner) -> TierDirector:
        return TierDirector([tier], HashMemory(runner), manager, NAMESPACE)

    return HashEngine.build(tiers=make, **options)  # type: ignore[arg-type]


def fill(tier: LateTier, prompt: list[int] = PROMPT, **options: object) -> None:
    """Let an engine that ends compute a prompt and store it."""
    world = world_on(tier, **options)
    world.add("first", prompt, SamplingParams(max_tokens=1, seed=1))
    while world.engine.has_unfinished_requests() or world.engine.store_on():
        world.engine.step()
        tier.finish()
    assert len(tier.content) >= len(prompt) // 4
    assert world.manager.get_num_free_blocks() == world.manager.num_blocks, "a block leaked"


def answer(prompt: list[int], seed: int, max_tokens: int) -> list[int]:
    params = SamplingParams(max_tokens=max_tokens, seed=seed)
    return expected_answer(prompt, params, seed=seed, vocab_size=50, max_model_len=512)[0]


def prompt_of(token_ids: list[int]) -> Prompt:
    return Prompt(np.array(token_ids, np.int32))


def output(
    world: HashEngine, request_id: str, prompt: list[int] = PROMPT, max_tokens: int = 5, seed: int = 1
) -> RequestOutput:
    params = SamplingParams(max_tokens=max_tokens, seed=seed)
    return world.engine.add_request(request_id, prompt_of(prompt), params)


def test_another_engine_hits_what_the_first_stored() -> None:
    tier = LateTier()
    fill(tier)
    world = world_on(tier)
    found = output(world, "second")
    while not found.finished:
        world.step()
        tier.finish()
    assert found.num_cached_tokens == 39, "all but the token whose logits are needed"
    assert found.outputs[0].token_ids == answer(PROMPT, 1, 5)
    counts = world.engine.report_tiers().tiers[0].loads
    assert (counts.num_loads, counts.num_tokens, counts.blocks_by_outcome) == (1, 40, {"done": 10})


def test_an_output_says_which_tier_its_cached_tokens_came_from() -> None:
    tier = LateTier()
    fill(tier)
    world = world_on(tier)
    head = output(world, "head", PROMPT[:16], max_tokens=1)
    while not head.finished:
        world.step()
        tier.finish()
    whole = output(world, "whole")
    while not whole.finished:
        world.step()
        tier.finish()
    again = output(world, "again")
    world.drain()
    assert head.cached_tokens_by_tier == {"late": 15}, "the last token is computed"
    assert whole.cached_tokens_by_tier == {"memory": 16, "late": 23}
    assert again.cached_tokens_by_tier == {"memory": 39}


def test_tokens_that_were_loaded_twice_count_once() -> None:
    loaded = Loaded(spans=[("disk", 16, 64), ("store", 32, 96)])
    assert loaded.tokens_by_tier(80) == {"memory": 16, "disk": 16, "store": 48}
    assert loaded.tokens_by_tier(24) == {"memory": 16, "disk": 8}
    assert loaded.tokens_by_tier(0) == Loaded().tokens_by_tier(0) == {}


def test_a_snapshot_of_tiers_does_not_change_with_later_loads() -> None:
    tier = LateTier()
    fill(tier)
    world = world_on(tier)
    found, before = output(world, "second"), world.engine.snapshot().tiers
    while not found.finished:
        world.step()
        tier.finish()
    [now] = world.engine.snapshot().tiers.tiers
    assert (before.tiers[0].loads.num_loads, now.loads.num_loads) == (0, 1)
    assert (before.tiers[0].loads.blocks_by_outcome, now.loads.blocks_by_outcome) == ({}, {"done": 10})


def test_a_load_holds_up_nobody_else() -> None:
    tier = LateTier()
    fill(tier)
    world = world_on(tier)
    late, other = output(world, "late"), output(world, "other", [7] * 20)
    while not other.finished:
        world.step()
    assert not late.finished
    assert late.outputs[0].token_ids == []
    assert other.outputs[0].token_ids == answer([7] * 20, 1, 5)
    tier.finish()
    world.drain()
    assert late.outputs[0].token_ids == answer(PROMPT, 1, 5)


def test_a_hundred_requests_load_their_prefix_once() -> None:
    tier = LateTier()
    fill(tier)
    world = world_on(tier, num_blocks=512)
    outputs = [output(world, str(number), [*PROMPT, number % 50, number // 50], seed=number) for number in range(100)]
    for _ in range(3):
        world.step()
    assert tier.num_loads == 1
    tier.finish()
    world.drain()
    assert tier.num_loads == 1
    for number, found in enumerate(outputs):
        assert found.outputs[0].token_ids == answer([*PROMPT, number % 50, number // 50], number, 5)
        assert found.num_cached_tokens == 40


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        (Outcome.CORRUPT, "tier corrupt"),
        (Outcome.MISSING, "never seen"),
        (Outcome.IO_ERROR, "tier error"),
        (Outcome.TIMEOUT, "tier slow"),
    ],
)
def test_what_does_not_come_is_computed_and_not_asked_for_again(outcome: Outcome, why: str) -> None:
    tier = LateTier()
    fill(tier)
    world = world_on(tier)
    found = output(world, "second")
    world.step()
    [(_, ticket, _, move)] = tier.jobs
    for index in range(4):
        move(index)
    ticket.finish(outcome)
    tier.jobs.clear()
    while not found.finished:
        world.step()
    assert found.num_cached_tokens == 16, "the head of the prefix that came"
    assert str(found.explanation) == f"16 of 40 tokens found, 16 of them from late; {why}"
    assert found.outputs[0].token_ids == answer(PROMPT, 1, 5)
    assert tier.num_loads == 1


@pytest.mark.parametrize("teaches", [False, True])
def test_a_load_may_take_as_long_as_computing_would(teaches: bool) -> None:
    """After a restart nothing is known of either, and the estimate of the tier was a guess."""
    tier = LateTier()
    fill(tier)
    world = world_on(tier)
    if teaches:
        computes = cost_of_steps(world.engine)
        computes.note_step(np.array([0]), np.array([100]), 1000.0)
    found = output(world, "second")
    world.step()
    [(_, ticket, _, _)] = tier.jobs
    allowed = allowed_s(ticket)
    assert 300 < allowed <= 400 if teaches else allowed == pytest.approx(5.0)
    tier.finish()
    world.drain()
    assert found.num_cached_tokens == 39


def test_an_idle_engine_has_memory_provided_for_what_is_used_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(director, "AHEAD_BYTES", 3 * 32)
    provided: list[list[int]] = []

    class Memory(HashMemory):
        def provide(self, block_ids: BlockIds) -> Iterator[None]:
            provided.append(block_ids.tolist())
            yield
            yield

    tier = LateTier()
    tier.is_eager = True

    def make(manager: KVCacheManager, runner: HashRunner) -> TierDirector:
        return TierDirector([tier], Memory(runner), manager, NAMESPACE)

    world = HashEngine.build(tiers=make)
    calls = [world.engine.store_on() for _ in range(4)]
    assert (calls, provided) == ([True, True, False, False], [[0, 1, 2]])
    output(world, "uses blocks", max_tokens=1)
    world.drain()
    while world.engine.store_on():
        pass
    taken = world.manager.take_blocks(3)
    assert taken is not None
    assert provided[-1] == taken.tolist()
    world.manager.release_blocks(taken)


@pytest.mark.slow
def test_a_tier_that_hangs_costs_a_stated_time() -> None:
    tier = LateTier()
    fill(tier)
    world = world_on(tier)
    found = output(world, "second")
    while not found.finished:  # nothing ever moves the load on: its deadline ends it
        world.step()
    assert found.num_cached_tokens == 0
    assert found.outputs[0].token_ids == answer(PROMPT, 1, 5)
    assert world.engine.report_tiers().tiers[0].loads.blocks_by_outcome == {"timeout": 10}
    assert world.engine.report_tiers().tiers[0].loads.seconds >= 0.25


def test_a_tier_that_does_not_say_what_it_has_is_named_in_the_explanation() -> None:
    tier = LateTier()
    tier.is_far = True
    world = world_on(tier)
    found = output(world, "first")
    while not found.finished:  # nothing ever answers the probe: its deadline ends it
        world.step()
    assert tier.num_loads == 0
    assert str(found.explanation) == "0 of 40 tokens found; tier slow"


def test_the_continuations_of_a_prompt_wait_for_one_answer() -> None:
    """So the first one starts first, and its hit is what was cached before, not what another one computed."""
    tier = LateTier()
    tier.is_far = True
    world = world_on(tier)
    params = SamplingParams(n=2, max_tokens=2, seed=1)
    found = world.engine.add_request("both", prompt_of(PROMPT), params)
    _, ticket, keys, look = tier.jobs[-1]
    for index in range(len(keys)):
        look(index)
    ticket.finish(Outcome.IO_ERROR)
    while not found.finished:
        world.step()
    assert found.num_cached_tokens == 0
    assert world.engine.snapshot().stats.hits == 0
    assert [one.token_ids for one in found.outputs] == [answer(PROMPT, seed, 2) for seed in (1, 2)]


def test_a_tier_that_lies_costs_one_load() -> None:
    tier = LateTier()
    tier.lies = True
    world = world_on(tier)
    found = output(world, "second")
    while not found.finished:
        world.step()
        tier.finish()
    assert tier.num_loads == 1
    assert found.outputs[0].token_ids == answer(PROMPT, 1, 5)


def test_an_aborted_request_gives_its_blocks_back_at_once() -> None:
    tier = LateTier()
    fill(tier)
    world = world_on(tier)
    output(world, "second")
    world.step()
    assert world.manager.get_num_free_blocks() == world.manager.num_blocks - 10
    world.engine.abort_request("second")
    world.engine.check_integrity()
    assert world.manager.get_num_free_blocks() == world.manager.num_blocks
    [(_, ticket, _, move)] = tier.jobs
    move(0)
    assert ticket.done


def test_loads_take_at_most_half_of_the_pool() -> None:
    tier = LateTier()
    fill(tier, list(range(48)) + list(range(48)), num_blocks=64)
    world = world_on(tier, num_blocks=32)
    found = output(world, "second", list(range(48)) + list(range(48)), max_tokens=2)
    world.step()
    assert world.manager.get_num_free_blocks() == 16
    tier.finish()
    while not found.finished:
        world.step()
        tier.finish()
    assert found.outputs[0].token_ids == answer(list(range(48)) + list(range(48)), 1, 2)


def test_running_requests_come_before_loads() -> None:
    """A running request that needs a block takes it from a load, not from another request."""
    tier = LateTier()
    fill(tier)
    world = world_on(tier, num_blocks=20)
    running = output(world, "running", [3] * 36, max_tokens=20)
    world.step()
    waiting = output(world, "waiting")
    world.step()
    assert tier.jobs, "the load has begun"
    while not running.finished:
        world.step()
    assert world.scheduler.num_preemptions == 0
    assert running.outputs[0].token_ids == answer([3] * 36, 1, 20)
    world.drain()
    assert waiting.outputs[0].token_ids == answer(PROMPT, 1, 5)


def test_a_prefix_that_computes_faster_than_it_loads_is_computed() -> None:
    tier = LateTier()
    fill(tier, PROMPT * 3)
    world = world_on(tier)
    tier.load_s = 1e9
    output(world, "teaches what a step costs", [9] * 80)
    world.drain()
    found = output(world, "second", PROMPT * 3)
    world.drain()
    assert (found.num_cached_tokens, tier.num_loads) == (0, 0)
    assert world.engine.report_tiers().tiers[0].loads.num_declined == 1
    assert str(found.explanation) == "0 of 120 tokens found; in tier"


def test_a_reset_forgets_what_is_under_way_and_the_tier_keeps_what_it_has() -> None:
    tier = LateTier()
    fill(tier)
    world = world_on(tier)
    output(world, "second")
    world.step()
    world.engine.reset_prefix_cache()
    world.engine.check_integrity()
    assert world.manager.get_num_free_blocks() == world.manager.num_blocks
    found = output(world, "third", PROMPT)
    while not found.finished:
        world.step()
        tier.finish()
    assert found.num_cached_tokens == 39


def test_a_reset_that_is_refused_cancels_no_load_and_forgets_no_store() -> None:
    tier = LateTier()
    fill(tier)
    world = world_on(tier)
    found, busy = output(world, "loads"), output(world, "busy", [7] * 20, max_tokens=3)
    world.step()
    before = world.engine.report_tiers()
    assert (before.num_loads, before.num_waiting_stores) == (1, 1)
    with pytest.raises(CacheBusyError):
        world.engine.reset_prefix_cache()
    assert world.engine.report_tiers() == before
    while not (found.finished and busy.finished):
        tier.finish()
        world.step()
    assert found.num_cached_tokens == 39


def test_blocks_larger_than_a_chunk_are_stored_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = LateTier()
    monkeypatch.setattr(stores, "CHUNK_BYTES", 31)
    manager = KVCacheManager(16, groups=(FullAttentionSpec(4), SlidingWindowSpec(4, 4)))
    made = TierDirector([tier], HashMemory(HashRunner(16, 4, 50)), manager, NAMESPACE)
    request = Request(TokenSequence("one", range(9), block_size=4), SamplingParams(max_tokens=1), max_tokens=1)
    manager.begin_step()
    assert manager.admit(request.sequence, 8) is not None
    made.offer(request, 8)
    num_calls = 0
    while made.go_on(is_busy=False):
        tier.finish()
        num_calls += 1
        assert num_calls < 20, "the store makes no progress"
    assert len(tier.content) == 4


def test_an_engine_without_the_memory_of_its_pool_says_what_to_give_it(tmp_path: Path) -> None:
    world = HashEngine.build()
    output(world, "first")
    world.drain()
    with pytest.raises(ConfigError, match="give Engine a TierDirector with the memory of its pool"):
        world.engine.export_prefix(prompt_of(PROMPT), tmp_path / "file", {})
    world.engine.check_integrity()
    assert world.manager.get_num_free_blocks() == world.manager.num_blocks, "a block leaked"
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------- fences


def test_no_load_takes_a_block_that_a_planned_step_may_still_write() -> None:
    """F1: a device computes late. A request leaves, its blocks are free, and the step that writes them still comes."""
    tier = LateTier()
    fill(tier)
    world = world_on(tier, num_blocks=24)
    runner = LateRunner(world.runner)
    engine = Engine(world.manager, world.scheduler.config, runner, world.engine.limits, tiers=tiers_of(world.engine))
    world = HashEngine(engine, world.runner)
    begun_in_flight: list[int] = []
    load = tier.load

    def watched(*args: object, **kwargs: object) -> object:
        begun_in_flight.append(runner.num_in_flight)
        return load(*args, **kwargs)  # type: ignore[arg-type]

    tier.load = watched  # type: ignore[assignment, method-assign]
    running = output(world, "running", [5] * 20, max_tokens=40)
    for _ in range(5):
        world.engine.step()
    assert runner.num_in_flight == 1
    found = output(world, "second")
    while not found.finished:
        world.engine.step()
        tier.finish()
    world.drain()
    assert begun_in_flight == [0], "a load began while a step was planned"
    assert found.num_cached_tokens == 39
    assert found.outputs[0].token_ids == answer(PROMPT, 1, 5)
    assert running.outputs[0].token_ids == answer([5] * 20, 1, 40)


def test_no_load_takes_a_block_that_the_next_step_copies() -> None:
    """A tier's thread may fill a taken block before that step begins."""
    manager = KVCacheManager(4, block_size=4, index=make_index("radix", 4, 4))
    first, second = TokenSequence("first", range(8), block_size=4), TokenSequence("second", [0, 1, 9, 9], block_size=4)
    assert manager.allocate_slots(first, 8) is not None
    manager.begin_step()
    manager.free(first)
    hit = manager.get_computed_blocks(second)
    assert hit.partial is not None
    assert manager.allocate_slots(second, 4, hit) is not None
    assert manager.get_num_free_blocks() == 3
    assert manager.take_blocks(3) is None
    taken = manager.take_blocks(2)
    assert taken is not None
    assert hit.partial.block_id not in taken
    [[source, _]] = manager.take_copies()
    assert manager.take_blocks(1) == [source], "after the step that copied it"


def test_what_a_cancelled_store_has_written_counts_for_the_day() -> None:
    tier = LateTier()
    world = world_on(tier)
    world.add("first", PROMPT, SamplingParams(max_tokens=1, seed=1))
    while not tier.jobs:
        world.engine.step()
        world.engine.store_on()
    [(_, _, _, move)] = tier.jobs
    for index in range(3):
        move(index)
    assert world.engine._tiers.yield_blocks()
    report = world.engine.report_tiers()
    assert report.stores.blocks_by_outcome == {"done": 3, "cancelled": 7}
    assert report.bytes_today == report.stores.num_bytes == sum(map(len, tier.content.values())) > 0


def test_no_block_is_stored_before_the_step_that_fills_it_is_settled() -> None:
    """F2: a prefix was offered and evicted, and a step that computes it again is in flight when its turn comes."""
    tier = LateTier()
    tier.is_eager = True
    world = world_on(tier, num_blocks=40)
    runner = LateRunner(world.runner)
    engine = Engine(world.manager, world.scheduler.config, runner, world.engine.limits, tiers=tiers_of(world.engine))
    world = HashEngine(engine, world.runner)
    rest_stores(engine, np.inf)
    output(world, "first", max_tokens=1)
    output(world, "goes on", [5] * 8, max_tokens=60)
    for _ in range(4):
        engine.step()
    world.manager.evict_blocks(range(40))
    for block_id in world.manager.free_block_ids().tolist():
        world.runner.slots[4 * block_id : 4 * block_id + 4] = 7
    assert world.engine.num_cached_tokens(prompt_of(PROMPT)) == 0
    again = output(world, "again", max_tokens=30)
    while not any(entry.request.request_id == "again" for batch in in_flight(engine) for entry in batch.entries):
        engine.step()
    rest_stores(engine, 0.0)
    while not again.finished:
        engine.step()
    later = world_on(tier)
    found = output(later, "later")
    while not found.finished:
        later.engine.step()
        tier.finish()
    assert found.num_cached_tokens == 39
    assert found.outputs[0].token_ids == answer(PROMPT, 1, 5)


def test_blocks_on_their_way_to_a_tier_are_not_given_away() -> None:
    tier = LateTier()
    world = world_on(tier, num_blocks=24)
    output(world, "first", max_tokens=1)
    world.drain()
    while not tier.jobs:
        world.engine.store_on()
    for number in range(4):  # enough to overwrite the whole pool
        output(world, f"other {number}", [10 + number] * 40, max_tokens=1)
        world.drain()
    tier.finish()
    while world.engine.store_on():
        tier.finish()
    later = world_on(tier)
    found = output(later, "second")
    while not found.finished:
        later.step()
        tier.finish()
    assert found.outputs[0].token_ids == answer(PROMPT, 1, 5)
    assert found.num_cached_tokens == 39


def test_the_head_of_a_prefix_is_not_given_away_for_its_tail() -> None:
    """Its blocks are the next that eviction would take."""
    tier = LateTier()
    fill(tier)
    tier.load_s = 60.0
    world = world_on(tier, num_blocks=20)
    for name, prompt in (("head", PROMPT[:16]), ("fills", [3] * 32), ("the pool", [4] * 32)):
        one = output(world, name, prompt, max_tokens=1)
        while not one.finished or world.engine.store_on():
            world.step()
            tier.finish()
    found = output(world, "second")
    world.step()
    assert [len(keys) for _, _, keys, _ in tier.jobs] == [6], "four blocks are in the pool"
    tier.finish()
    world.drain()
    assert found.num_cached_tokens == 39
    assert found.outputs[0].token_ids == answer(PROMPT, 1, 5)


def test_a_real_disk_serves_the_next_engine(tmp_path: Path) -> None:
    for start in range(2):
        with DiskTier(tmp_path / "cache") as tier:
            assert tier.wait_scanned(10.0)
            world = world_on(tier)
            found = output(world, "only")
            while not found.finished:
                world.step()
            assert found.outputs[0].token_ids == answer(PROMPT, 1, 5)
            assert found.num_cached_tokens == (39 if start else 0)
            world.engine.close()


def test_the_cost_of_a_step_is_found_from_steps() -> None:
    cost = StepCost()
    assert cost.seconds(0, 100) is None
    cost.note_step(np.array([0]), np.array([8]), 9.0)
    assert cost.seconds(0, 100) is None, "a small step says little"
    rng = np.random.default_rng(0)
    for _ in range(50):
        starts = rng.integers(0, 4000, 2)
        ends = starts + rng.integers(64, 512, 2)
        tokens = ends - starts
        cost.note_step(starts, ends, float((tokens * (2e-4 + 1e-8 * (starts + ends) / 2)).sum()))
    assert cost.seconds(1000, 3000) == pytest.approx(2000 * (2e-4 + 1e-8 * 2000))


def test_one_step_does_not_tell_what_context_costs() -> None:
    cost = StepCost()
    cost.note_step(np.array([0]), np.array([2000]), 1.0)
    assert cost.seconds(0, 100) == pytest.approx(0.05)


def test_a_prefix_that_is_being_loaded_says_so() -> None:
    tier = LateTier()
    fill(tier)
    tier.load_s = 60.0  # so its deadline is far away
    world = world_on(tier)
    assert world.engine.explain(prompt_of(PROMPT)).reason is MissReason.IN_TIER
    found = output(world, "second")
    world.step()
    assert world.engine.explain(prompt_of(PROMPT)).reason is MissReason.LOADING
    assert world.engine.explain(prompt_of([*PROMPT[:20], *PROMPT])).reason is MissReason.LOADING
    assert world.engine.explain(prompt_of(PROMPT[::-1])).reason is MissReason.NEVER_SEEN
    tier.finish()
    world.drain()
    assert found.explanation is not None
    assert found.explanation.reason is None


def test_a_request_that_stops_waiting_for_its_load_says_so() -> None:
    tier = LateTier()
    fill(tier)
    tier.load_s = 60.0
    world = world_on(tier, num_blocks=20)
    running = output(world, "running", [3] * 36, max_tokens=20)
    world.step()
    waiting = output(world, "waiting")
    while not running.finished:  # needs the blocks of the load
        world.step()
    world.drain()
    assert waiting.explanation is not None
    assert waiting.explanation.reason is MissReason.LOADING
    assert waiting.outputs[0].token_ids == answer(PROMPT, 1, 5)
    assert world.manager.stats.misses[MissReason.LOADING] == 1


def test_the_newest_dropped_keys_are_known() -> None:
    rng = np.random.default_rng(0)
    keys = [rng.bytes(32) for _ in range(30)]
    dropped = DroppedKeys(16)
    dropped.note([])
    for start in range(0, 30, 3):
        dropped.note(keys[start : start + 3])
    assert [key in dropped for key in keys] == [False] * 14 + [True] * 16
    dropped.note(keys)
    assert [key in dropped for key in keys] == [True] * 16 + [False] * 14, "the first of a long prompt"
