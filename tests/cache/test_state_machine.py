"""A whole KVCacheManager lives at random in `cache_world.World`, which checks everything after each step."""

import random

import pytest

from cache_world import KINDS, Happened, drive, random_world
from foreword.replay.policies import POLICIES


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_an_engine_does_no_block_is_lost_or_wrong(kind):
    happened = Happened()
    for policy in POLICIES:
        rng = random.Random(f"{kind} {policy}")
        world = random_world(rng, kind=kind, policy_name=policy)
        drive(world, rng, 80)
        happened.add(world.happened)
    assert happened.executed > 100
    assert bool(happened.hits) == (kind != "off")


@pytest.mark.slow
def test_fifteen_thousand_steps_lose_no_block_and_hit_no_wrong_one():
    for seed in range(75):
        rng = random.Random(1000 + seed)
        drive(random_world(rng), rng, 200)


def test_random_steps_cover_what_is_rare():
    happened = Happened()
    for seed in range(24):
        rng = random.Random(seed)
        world = random_world(rng)
        drive(world, rng, 200)
        happened.add(world.happened)
    assert min(vars(happened).values()) >= 1, f"never ever happened: {happened}"
