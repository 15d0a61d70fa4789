"""The random driver against the engine: every public operation, in random order, checked after each."""

from __future__ import annotations

import pytest

from lanes import more_seeds, slow
from random_driver import COUNTERS, Driver

NUM_EPISODES = 10
NUM_OPERATIONS = 500
"""Per episode: 5,000 operations in all, as many again that are slow, and 100,000 in the slow test."""


@pytest.mark.parametrize("seed", [*range(NUM_EPISODES), *slow(*range(NUM_EPISODES, 2 * NUM_EPISODES))])
def test_every_answer_is_right_whatever_happens_around_it(seed: int) -> None:
    Driver(seed).run(NUM_OPERATIONS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", more_seeds(1000, 20))
def test_every_answer_is_right_in_many_more_episodes(seed: int) -> None:
    Driver(seed).run(2 * NUM_OPERATIONS)


def test_the_episodes_covered_what_is_rare() -> None:
    if COUNTERS.operations < NUM_EPISODES * NUM_OPERATIONS:
        pytest.skip("only meaningful after all episodes")
    rare = {name: count for name, count in vars(COUNTERS).items() if count < 15}
    assert not rare, "hardly ever happened"
