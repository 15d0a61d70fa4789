"""Everything at once, at random: steps planned ahead, links, drafts, tiers, entries, tenants' limits and evictions.

The other random tests drive one of these beside plain requests. Here each meets each other. Every answer is compared
with the oracle's, and every room is checked after every operation.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from doors import in_flight, tiers_of
from engine.test_linking_random import LinkingDriver
from engine.tiering.test_random_tiers import TieredDriver
from foreword.batch import Batch
from foreword.cache import ExtraKeys
from foreword.engine import Engine, Keep, Prompt
from foreword.errors import CacheBusyError, PromptTooLongError, RequestTooLargeError
from hash_runner import HashEngine
from lanes import more_seeds
from late_runner import LateRunner

HAPPENED: Counter[str] = Counter()


@dataclass
class PairsDriver(TieredDriver, LinkingDriver):
    """Three of four seeds have a runner that launches, so that steps are planned before tokens are known."""

    def further_options(self) -> dict[str, Any]:
        return {**super().further_options(), "max_pinned_share": float(self.rng.choice([0.0, 0.5]))}

    def start(self) -> None:
        super().start()
        self.late, self.hands = LateRunner(self.parts.runner), np.random.default_rng(self.seed)
        if self.seed % 4:
            plain = self.parts.engine
            engine = Engine(plain.manager, plain.scheduler.config, self.late, plain.limits, tiers=tiers_of(plain))
            engine.clock, engine.scheduler.drafting = self.clock, plain.scheduler.drafting
            self.parts = HashEngine(engine, self.parts.runner)

    def _maybe_fail(self, batch: Batch) -> None:
        self.tier.work(self.hands, 0.4)  # a tier's thread may do so between plan and computation
        if self.next_step_fails:
            self.next_step_fails = False
            raise FloatingPointError("the model broke")

    def submit(self) -> Any:
        engine, manager, rng = self.parts.engine, self.parts.manager, self.rng
        if rng.random() < 0.15:
            engine.shrink_namespace(str(rng.choice(["red", "blue"])), int(rng.integers(6)))
            HAPPENED["limits"] += 1
        if self.known_texts and rng.random() < 0.2:
            text = self.known_texts[int(rng.integers(len(self.known_texts)))]
            salt = str(rng.choice(["red", "blue"])) if rng.random() < 0.2 else None
            tokens = np.array(text[: int(rng.integers(1, len(text) + 1))], np.int32)
            prompt = Prompt(tokens, None, ExtraKeys(salt=salt), owner=str(rng.choice(["ada", "bob"])))
            with suppress(PromptTooLongError, RequestTooLargeError):
                engine.explain(prompt)
                if manager.keeps_prefixes:
                    HAPPENED["kept"] += engine.entries.pin(prompt, Keep(rng.choice([0.01, 0.1, 5.0]))).num_kept_tokens
        if rng.random() < 0.05:
            manager.evict_blocks(rng.integers(0, manager.num_blocks, 3))
        return super().submit()

    def reset(self) -> None:
        try:
            self.parts.engine.reset_prefix_cache()
        except CacheBusyError:
            HAPPENED["refused resets"] += 1

    def _check_nothing_is_left(self) -> None:
        engine = self.parts.engine
        while in_flight(engine):
            engine.step()
        for entry in engine.entries.entries():
            engine.entries.drop(entry.name)
        HAPPENED["planned ahead"] += self.late.num_behind
        super()._check_nothing_is_left()


@pytest.mark.parametrize("seed", range(8))
def test_answers_are_right_whatever_happens_together(seed: int) -> None:
    PairsDriver(seed).run(200)


@pytest.mark.slow
@pytest.mark.parametrize("seed", more_seeds(3000, 12))
def test_answers_are_right_in_many_more_episodes(seed: int) -> None:
    PairsDriver(seed).run(500)


def test_the_episodes_covered_each_of_the_pairs() -> None:
    if HAPPENED["planned ahead"] < 100:
        pytest.skip("only meaningful after all episodes")
    assert min(HAPPENED["limits"], HAPPENED["kept"], HAPPENED["refused resets"]) > 10, HAPPENED
