"""What explanations say of blocks that are being loaded, could be loaded, or were not stored."""

from __future__ import annotations

import numpy as np

from engine.tiering.test_director import PROMPT, answer, fill, output, prompt_of, world_on
from foreword.cache import MissReason
from foreword.engine.tiering.offers import DroppedKeys
from late_tier import LateTier


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
