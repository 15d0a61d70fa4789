"""The order in which prefixes are stored, and what is not stored at all."""

from __future__ import annotations

import numpy as np
import pytest

from engine.tiering.test_director import PROMPT, output, prompt_of, world_on
from foreword.cache import KVCacheManager, MissReason, TokenSequence
from foreword.engine import Keep, TierDirector
from foreword.engine.tiering import offers as module
from foreword.engine.tiering.loads import StepCost
from foreword.engine.tiering.offers import Offers, Rank
from foreword.tiers.admission import Admission
from foreword.tiers.tier import TierStats
from hash_runner import HashEngine, HashRunner
from late_tier import HashMemory, LateTier

SIZE = 4


class SmallTier(LateTier):
    """It says that it is full from some number of blocks on."""

    most = 1 << 30

    def stats(self) -> TierStats:
        return TierStats(shared_bytes=len(self.content), budget_bytes=self.most)


def queue_on(tier: LateTier, *, context_costs: bool = True, manager: KVCacheManager | None = None) -> Offers:
    manager, cost = manager or KVCacheManager(64, block_size=SIZE), StepCost()
    for start in (0, 1000, 5000):
        seconds = 1e-3 * 100 * (1 + start / 1000 * context_costs)
        cost.note_step(np.array([start]), np.array([start + 100]), seconds)
    return Offers([tier], HashMemory(HashRunner(64, SIZE, 50)), manager, cost, Admission("all", SIZE))


def sequence(name: str, num_tokens: int) -> TokenSequence:
    return TokenSequence(name, [ord(name[0])] * num_tokens, block_size=SIZE)


def taken(offers: Offers) -> list[tuple[str, int, Rank]]:
    found = []
    while (offer := offers.take()) is not None:
        found.append((offer.sequence.request_id, offer.num_tokens, offer.rank))
    return found


def test_pins_come_first_then_heads_and_message_ends_then_the_rest() -> None:
    offers = queue_on(LateTier(), context_costs=False)
    offers.add(sequence("document", 9000), 0, 9000, 0)
    offers.add(sequence("chat", 8000), 0, 8000, 7000)
    offers.add(sequence("too short", 3), 0, 3, 0)
    offers.add_pinned(sequence("pinned", 6000), 6000)
    found = taken(offers)
    assert [rank for _, _, rank in found] == [Rank.PINNED, Rank.LIKELY, Rank.LIKELY, Rank.REST, Rank.REST]
    assert found[0] == ("pinned", 6000, Rank.PINNED)
    # Equals differ in the last bits of a fitted cost, which depend on the processor.
    assert set(found[1:3]) == {("document", 4096, Rank.LIKELY), ("chat", 7000, Rank.LIKELY)}
    assert set(found[3:]) == {("document", 9000, Rank.REST), ("chat", 8000, Rank.REST)}


def test_within_a_rank_the_most_seconds_a_byte_come_first_and_equals_in_order_of_arrival() -> None:
    offers = queue_on(LateTier())
    for name, num_tokens in (("short", 40), ("long", 4000), ("middle", 400), ("another", 400)):
        offers.add(sequence(name, num_tokens), 0, num_tokens, 0)
    found = [name for name, *_ in taken(offers)]
    assert found == ["long", "middle", "another", "short"], "a token after a long context costs more to compute"
    tier = LateTier()
    tier.load_s = 1e9
    slow = queue_on(tier)
    for name, num_tokens in (("short", 40), ("long", 4000)):
        slow.add(sequence(name, num_tokens), 0, num_tokens, 0)
    assert [name for name, *_ in taken(slow)] == ["short", "long"], "loading either saves nothing"


def test_traffic_that_returns_is_stored_before_traffic_that_does_not() -> None:
    """The value policy has learned that requests which add two blocks return, and those which add eight do not."""
    rng = np.random.default_rng(0)
    manager = KVCacheManager(64, block_size=SIZE, eviction_policy="value")
    for number in range(3000):
        for size, own in ((2, number % 7), (8, number)):
            tokens = [size, own % 50, own // 50, 0, *rng.integers(0, 50, SIZE * size - 4 if size == 8 else 0)]
            one = TokenSequence("one", [*tokens, *([1] * (SIZE * size - len(tokens)))], block_size=SIZE)
            manager.begin_step()
            assert manager.admit(one, len(one), manager.get_computed_blocks(one)) is not None
            manager.free("one")
    assert manager.chance_of_return(2) > 2 * manager.chance_of_return(8)
    assert KVCacheManager(64, eviction_policy="lru").chance_of_return(2) == 1.0
    offers = queue_on(LateTier(), context_costs=False, manager=manager)
    offers.add(sequence("large", 32), 0, 32, 0)
    offers.add(sequence("small", 8), 0, 8, 0)
    assert [name for name, *_ in taken(offers)] == ["small", "large"]


def test_a_full_queue_drops_the_least_worth_and_remembers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_OFFERS", 2)
    offers = queue_on(LateTier())
    given = [sequence(name, num_tokens) for name, num_tokens in (("a", 400), ("b", 40), ("c", 4000))]
    for one in given:
        offers.add(one, 0, len(one), 0)
    assert [all(key in offers.dropped for key in one.block_hashes()) for one in given] == [False, True, False]
    assert offers.counts.num_dropped_offers == 1
    assert [name for name, *_ in taken(offers)] == ["c", "a"]


def with_rule(tier: LateTier, rule: str, **options: object) -> HashEngine:
    def make(manager: KVCacheManager, runner: HashRunner) -> TierDirector:
        admission = Admission(rule, SIZE)  # type: ignore[arg-type]
        return TierDirector([tier], HashMemory(runner), manager, b"an own namespace", admission=admission)

    return HashEngine.build(tiers=make, **options)  # type: ignore[arg-type]


def ask(world: HashEngine, tier: LateTier, prompt: list[int], *, evict: bool = True) -> int:
    """Serve a prompt and store what is to be stored; the number of blocks that were written."""
    before = len(tier.content)
    found = output(world, "one", prompt, max_tokens=1)
    while not found.finished or world.engine.store_on():
        world.engine.step()
        tier.finish()
    if evict:
        world.manager.evict_blocks(range(world.manager.num_blocks))
    return len(tier.content) - before


def test_twice_stores_what_is_computed_again_and_not_what_is_found_again() -> None:
    tier = LateTier()
    world = with_rule(tier, "twice")
    assert ask(world, tier, PROMPT, evict=False) == 0
    assert ask(world, tier, PROMPT, evict=False) == 0, "nothing was computed"
    assert ask(world, tier, [*PROMPT, *range(8)]) == 0, "two blocks were computed, for the first time"
    assert ask(world, tier, PROMPT[:20]) == 5
    assert ask(world, tier, [*PROMPT, *range(8)]) == 7, "five were loaded, and seven computed again"


def test_what_was_stored_in_the_end_is_not_said_to_be_dropped() -> None:
    tier = LateTier()
    world = with_rule(tier, "twice")
    assert ask(world, tier, PROMPT) == 0
    assert world.engine.explain(prompt_of(PROMPT)).reason is MissReason.DROPPED_BY_ADMISSION
    assert ask(world, tier, PROMPT) == 10
    assert world.engine.explain(prompt_of(PROMPT)).reason is MissReason.IN_TIER
    tier.content.clear()  # as when a server is emptied, or a budget is used up
    assert world.engine.explain(prompt_of(PROMPT)).reason is MissReason.EVICTED


def test_room_stores_everything_until_the_tier_is_full() -> None:
    tier = SmallTier()
    tier.most = 12
    world = with_rule(tier, "room")
    assert ask(world, tier, PROMPT) == 10
    assert ask(world, tier, [7] * 20) == 5
    assert ask(world, tier, [8] * 20) == 0, "more than nine tenths of its budget are taken"
    assert ask(world, tier, [8] * 20) == 5


def test_a_pinned_prefix_is_stored_before_what_waits_and_whatever_the_rule_says() -> None:
    tier = LateTier()
    world = with_rule(tier, "twice", max_pinned_share=0.5)
    output(world, "one", PROMPT, max_tokens=1)
    output(world, "other", [7] * 40, max_tokens=1)
    world.drain()
    assert world.engine.entries.pin(prompt_of(PROMPT), Keep(60.0)).num_kept_tokens == 40
    while world.engine.store_on():
        tier.finish()
    again = world_on(tier)
    assert len(tier.content) == 10
    found = output(again, "again")
    while not found.finished:
        again.step()
        tier.finish()
    assert found.num_cached_tokens == 39
