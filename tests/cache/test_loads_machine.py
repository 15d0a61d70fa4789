"""Blocks from elsewhere, at random: stored, held, taken, filled in part and adopted, in every kind of group.

Between the beginning and the end of a load, everything goes on that `cache_world` does: steps, failures, pins,
evictions, sessions. Each lookup is checked against what the memory holds.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from cache_world import KINDS, Numbers, World, drive
from foreword.cache import NO_BLOCKS, BlockHash, BlockIds, TokenSequence, elsewhere, in_pool
from foreword.engine.tiering.block_memory import Part, take_blocks
from foreword.engine.tiering.stores import cached_parts
from foreword.replay.policies import POLICIES

HAPPENED: Counter[str] = Counter()


@dataclass
class WorldOverTier(World):
    """A world above a dictionary of blocks. Each look at the world may store or load."""

    rng: random.Random = field(default_factory=random.Random)
    tier: dict[tuple[int, BlockHash], Numbers] = field(default_factory=dict)
    loads: list[tuple[TokenSequence, list[Part], BlockIds]] = field(default_factory=list)

    def execute(self, bits: int) -> None:
        """After a step no step is planned, so that blocks may be stored, and loads may begin and end."""
        super().execute(bits)
        if all(request.end is None for request in self.running):
            self._store()
            self._begin_load()
            if self.loads and self.rng.random() < 0.5:
                self._end_load()

    def reset(self) -> None:
        while self.loads:
            self._release(self.loads.pop())
        super().reset()

    def drain(self) -> None:
        self.fail()
        self.reset()
        super().drain()

    def _store(self) -> None:
        for request in self.running[:1]:
            keys = self.manager.keys_by_group(request.sequence)
            for part in cached_parts(self.manager, request.sequence, len(request.sequence)):
                for number, block_id in zip(part.numbers.tolist(), part.block_ids.tolist(), strict=True):
                    self.tier[part.group_id, keys[part.group_id][number]] = self._memory[block_id].copy()

    def _begin_load(self) -> None:
        draw = self.rng.getrandbits
        sequence = self._new_sequence(draw(5), draw(5), draw(16), draw(6))
        sequence.most_hit_tokens = draw(5) if self.rng.random() < 0.2 else None
        keys, before = self.manager.keys_by_group(sequence), self.snapshot()
        stored = [{key for key in own if (group, key) in self.tier and draw(3)} for group, own in enumerate(keys)]
        tables = self.manager.find_hit_with(sequence, stored)
        assert self.snapshot() == before, "a lookup changed something"
        parts = [Part(group, elsewhere(table), NO_BLOCKS) for group, table in enumerate(tables)]
        num_blocks, held = sum(len(part.numbers) for part in parts), in_pool(tables)
        if 0 < num_blocks <= self.num_blocks // 2 - len(held):
            taken = take_blocks(self.manager, parts, held)
            if taken is not None:
                self.loads.append((sequence, taken, held))
                HAPPENED["loads"] += 1

    def _end_load(self) -> None:
        """Fill and adopt all blocks of a load, or some, or none."""
        load = sequence, parts, _ = self.loads.pop(self.rng.randrange(len(self.loads)))
        share, keys = self.rng.choice([0.0, 0.7, 1.0]), self.manager.keys_by_group(sequence)
        for part in parts:
            good = [at for at in range(len(part.numbers)) if self.rng.random() < share]
            for at in good:
                key = keys[part.group_id][part.numbers[at]]
                self._memory[part.block_ids[at]] = self.tier[part.group_id, key]
            HAPPENED["adopted"] += part.adopt(self.manager, sequence, np.array(good, np.intp))
        self._begin_step()
        self._release(load)

    def _release(self, load: tuple[TokenSequence, list[Part], BlockIds]) -> None:
        _, parts, held = load
        for part in parts:
            self.manager.release_blocks(part.block_ids)
        self.manager.release_blocks(held)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("off", "verified")])
def test_loaded_blocks_are_found_where_they_belong_and_none_is_lost(kind: str) -> None:
    """An index that verifies tokens has keys that collide here, and a tier knows only keys."""
    for seed in range(6):
        rng = random.Random(f"{kind} {seed}")
        world = WorldOverTier(
            kind=kind,
            policy_name=rng.choice(list(POLICIES)),
            num_blocks=rng.choice([14, 24, 40]),
            block_size=rng.choice([1, 2, 3, 4]),
            with_pins=rng.random() < 0.4,
            with_ledger=rng.random() < 0.4,
            with_sessions=rng.random() < 0.4,
            deduplicate=rng.random() < 0.4,
            rng=rng,
        )
        drive(world, rng, 150)


def test_what_is_rare_happened() -> None:
    if not HAPPENED:
        pytest.skip("only meaningful after the other test")
    assert min(HAPPENED["loads"], HAPPENED["adopted"]) > 20, HAPPENED
