"""Hypothesis drives a whole KVCacheManager through `cache_world.World`, which checks everything after each step."""

import random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cache_world import KINDS, Happened, World, drive, random_world
from foreword.replay.policies import POLICIES

small, bits = st.integers(0, 63), st.integers(0, 0xFFFF)
when_running = precondition(lambda self: self.world.running)
when_preempted = precondition(lambda self: self.world.preempted)


class CacheMachine(RuleBasedStateMachine):
    """Rules that leave what they do to the world. Subclasses say over which kinds, and count what happens."""

    kinds = KINDS
    happened = Happened()

    @initialize(
        kind=small,
        policy_name=st.sampled_from(list(POLICIES)),
        num_blocks=st.sampled_from([12, 16, 24, 48]),
        block_size=st.integers(1, 4),
        with_pins=st.booleans(),
        with_ledger=st.booleans(),
        with_sessions=st.booleans(),
        deduplicate=st.booleans(),
    )
    def begin(self, kind, **options):
        self.world = World(kind=self.kinds[kind % len(self.kinds)], **options)

    @rule(cut=small, length=small, bits=bits, identity=small, chunk=small)
    def admit(self, **numbers):
        self.world.admit(**numbers)

    @rule(cut=small, length=small, bits=bits, identity=small)
    def admit_and_execute(self, cut, length, bits, identity):
        self.world.admit(cut, length, bits, identity, chunk=1)
        self.world.execute(bits)

    @when_preempted
    @rule(which=small, chunk=small)
    def resume(self, which, chunk):
        self.world.resume(which, chunk)

    @rule(cut=small, length=small, bits=bits, identity=small)
    def look_up(self, **numbers):
        self.world.look_up(**numbers)

    @when_running
    @rule(which=small, chunk=small)
    def grow(self, which, chunk):
        self.world.grow(which, chunk)

    @when_running
    @rule(chunk=small)
    def grow_all(self, chunk):
        self.world.grow_all(chunk)

    @when_running
    @rule(which=small)
    def preempt(self, which):
        self.world.preempt(which)

    @when_running
    @rule(which=small)
    def finish(self, which):
        self.world.finish(which)

    @rule(bits=bits)
    def execute(self, bits):
        self.world.execute(bits)

    @when_running
    @rule(count=st.integers(1, 8), bits=bits)
    def generate(self, count, bits):
        for number in range(count):
            self.world.grow_all(chunk=1)
            self.world.execute(bits >> number)
            self.world.check()

    @when_running
    @rule()
    def fail(self):
        self.world.fail()

    @rule(first=small, count=small)
    def evict(self, first, count):
        self.world.evict(first, count)

    @rule(chance=small)
    def reset(self, chance):
        if chance > 48:
            self.world.reset()

    @rule(first=small, count=small, duration=st.integers(0, 7))
    def pin(self, first, count, duration):
        self.world.pin(first, count, duration)

    @rule(which=small)
    def close_session(self, which):
        self.world.close_session(which)

    @invariant()
    def nothing_contradicts(self):
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self):
        if hasattr(self, "world"):
            self.world.drain()
            self.happened.add(self.world.happened)


def run_machine(kinds, num_examples, num_steps):
    """Run that many examples of so many steps; returns what happened."""

    class Machine(CacheMachine):
        pass

    Machine.kinds, Machine.happened = kinds, Happened()
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_steps,
            deadline=None,
            database=None,
            derandomize=False,  # Hypothesis would repeat the same examples on every call where the variable CI is set
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
        ),
    )
    return Machine.happened


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_an_engine_does_no_block_is_lost_or_wrong(kind):
    assert run_machine([kind], 5, 50).steps > 100


@pytest.mark.slow
def test_fifteen_thousand_steps_lose_no_block_and_hit_no_wrong_one():
    steps = 0
    while steps < 15_000:
        steps += run_machine(KINDS, 80, 200).steps


def test_random_steps_cover_what_is_rare():
    happened = Happened()
    for seed in range(24):
        rng = random.Random(seed)
        world = random_world(rng)
        drive(world, rng, 200)
        happened.add(world.happened)
    assert min(vars(happened).values()) >= 1, f"never ever happened: {happened}"
