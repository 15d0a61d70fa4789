"""Hypothesis drives a whole KVCacheManager through `cache_world.World`, which checks everything after each step."""

import random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from cache_world import KINDS, Happened, World, drive, random_world
from foreword.cache.eviction import POLICIES

small, bits = st.integers(0, 63), st.integers(0, 0xFFFF)


def machine_for(kinds, happened):
    """A state machine class over these kinds; `happened` counts what its runs did."""

    class CacheMachine(RuleBasedStateMachine):
        @initialize(
            kind=st.sampled_from(kinds),
            policy_name=st.sampled_from(list(POLICIES)),
            num_blocks=st.sampled_from([14, 24, 40, 80]),
            block_size=st.integers(1, 4),
            with_pins=st.booleans(),
        )
        def begin(self, **options):
            self.world = World(**options)

        @rule(cut=small, length=small, bits=bits, identity=small, chunk=small)
        def admit(self, **numbers):
            self.world.admit(**numbers)

        @rule(which=small, chunk=small)
        def resume(self, which, chunk):
            self.world.resume(which, chunk)

        @rule(cut=small, length=small, bits=bits, identity=small)
        def look_up(self, **numbers):
            self.world.look_up(**numbers)

        @rule(which=small, chunk=small)
        def grow(self, which, chunk):
            self.world.grow(which, chunk)

        @rule(chunk=small)
        def grow_all(self, chunk):
            self.world.grow_all(chunk)

        @rule(which=small)
        def preempt(self, which):
            self.world.preempt(which)

        @rule(which=small)
        def finish(self, which):
            self.world.finish(which)

        @rule(bits=bits)
        def execute(self, bits):
            self.world.execute(bits)

        @rule(bits=bits)
        def grow_all_and_execute(self, bits):
            self.world.grow_all(1)
            self.world.execute(bits)

        @rule()
        def fail(self):
            self.world.fail()

        @rule(first=small, count=small)
        def evict(self, first, count):
            self.world.evict(first, count)

        @rule()
        def reset(self):
            self.world.reset()

        @rule(first=small, count=small, duration=st.integers(0, 7))
        def pin(self, first, count, duration):
            self.world.pin(first, count, duration)

        @invariant()
        def nothing_contradicts(self):
            if hasattr(self, "world"):
                self.world.check()

        def teardown(self):
            if hasattr(self, "world"):
                self.world.drain()
                happened.add(self.world.happened)

    return CacheMachine


def run_machine(kinds, num_examples, num_steps):
    """Run that many examples of so many steps; returns what happened."""
    happened = Happened()
    run_state_machine_as_test(
        machine_for(kinds, happened),
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_steps,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )
    return happened


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_an_engine_does_no_block_is_lost_or_wrong(kind):
    assert run_machine([kind], 5, 50).steps > 100


@pytest.mark.slow
def test_a_hundred_thousand_steps_lose_no_block_and_hit_no_wrong_one():
    happened = Happened()
    while happened.steps < 100_000:
        happened.add(run_machine(KINDS, 500, 100))
    assert min(vars(happened).values()) >= 20, f"hardly ever happened: {happened}"


def test_random_steps_cover_what_is_rare():
    happened = Happened()
    for seed in range(60):
        rng = random.Random(seed)
        world = random_world(rng)
        drive(world, rng, 200)
        happened.add(world.happened)
    assert min(vars(happened).values()) >= 5, f"hardly ever happened: {happened}"
