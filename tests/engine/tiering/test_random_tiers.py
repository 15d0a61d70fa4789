"""The random driver over a tier that is late, lies and fails, and over restarts.

Every answer is compared with the oracle's, every room is checked after every operation, blocks on their way included.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from doors import loading_in
from foreword.cache import KVCacheManager
from foreword.engine import TierDirector
from hash_runner import HashRunner
from lanes import more_seeds
from late_tier import HashMemory, LateTier
from random_driver import Driver

NAMESPACE = b"a namespace here"
HAPPENED: Counter[str] = Counter()


@dataclass
class TieredDriver(Driver):
    """A driver whose engines come and go above one tier."""

    tier: LateTier = field(default_factory=LateTier)

    def further_options(self) -> dict[str, Any]:
        def make(manager: KVCacheManager, runner: HashRunner) -> TierDirector:
            return TierDirector([self.tier], HashMemory(runner), manager, self.namespace + bytes([manager.block_size]))

        self.tier.lies = bool(self.rng.random() < 0.1)
        self.tier.is_far = bool(self.rng.random() < 0.3)
        return {"tiers": make}

    @property
    def namespace(self) -> bytes:
        return NAMESPACE[:15]

    def step(self) -> None:
        """Some requests that wait for a load leave: few loads last until the driver aborts at random."""
        waiting = {request.request_id for request in loading_in(self.parts.engine)}
        loading = [request_id for request_id in self.live if request_id in waiting]
        if loading and self.rng.random() < 0.1:
            self.parts.engine.abort_request(loading[0])
            self._settle(loading[0])
        self.tier.work(self.rng, 0.4)
        super().step()

    def submit(self) -> None:
        self.parts.engine.store_on()
        super().submit()

    def reset(self) -> None:
        if not self.parts.scheduler.num_running:
            self.parts.engine.reset_prefix_cache()
            HAPPENED["resets"] += 1

    def _check_nothing_is_left(self) -> None:
        while self.parts.engine.store_on():
            self.tier.finish()
        HAPPENED["preemptions"] += self.parts.scheduler.num_preemptions
        super()._check_nothing_is_left()
        report = self.parts.engine.report_tiers()
        HAPPENED.update(report.tiers[0].loads.blocks_by_outcome)
        HAPPENED["cancelled"] += report.tiers[0].loads.num_cancelled
        HAPPENED["loads"] += report.tiers[0].loads.num_loads
        HAPPENED["loaded tokens"] += report.tiers[0].loads.num_tokens
        HAPPENED["chunks"] += report.stores.num_chunks
        HAPPENED["operations"] += 1


def run(seed: int, num_starts: int, num_operations: int) -> None:
    driver = TieredDriver(seed)
    for _ in range(num_starts):
        driver.run(num_operations)
        driver.start()


@pytest.mark.parametrize("seed", range(6))
def test_answers_are_right_whatever_the_tier_does(seed: int) -> None:
    run(seed, 3, 150)


@pytest.mark.slow
@pytest.mark.parametrize("seed", more_seeds(1000, 14))
def test_many_more_operations_lose_no_block(seed: int) -> None:
    run(seed, 4, 250)


def test_what_is_rare_happened() -> None:
    if HAPPENED["operations"] < 18:
        pytest.skip("only meaningful after all seeds")
    for what in ("loads", "loaded tokens", "chunks", "done", "corrupt", "missing", "timeout", "cancelled", "resets"):
        assert HAPPENED[what] >= 1, f"{what} hardly ever happened: {HAPPENED}"
