"""Random lives of cache entries, beside a plain model of what must be kept: also through restarts and floods."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.tiering.test_director import world_on
from foreword.engine import BREAKPOINT, Keep, Mark, Prompt
from foreword.engine.keeper import EntryFile
from foreword.request import SamplingParams
from late_tier import LateTier

BLOCK, MOST_BLOCKS = 4, 8
ONE_TOKEN = SamplingParams(max_tokens=1, seed=1)


def tokens_of(family: int, num_blocks: int) -> list[int]:
    """The same head for all lengths of a family."""
    return [10 * family + at % 7 for at in range(BLOCK * num_blocks)]


class Entries(RuleBasedStateMachine):
    """A pool of 64 blocks, half of which entries may keep; three families of prefixes need 24 at most."""

    @initialize()
    def start(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.tier, self.now, self.number = LateTier(), 1e9, 0
        self.plain: dict[str, tuple[int, int, float, bool]] = {}
        """Family, blocks, end and whether uses refresh it, by name."""
        self.awake: set[str] = set()
        self.open(offset=1e9)

    def open(self, offset: float) -> None:
        """A new process, whose clock differs from the wall's by `offset`."""
        self.offset = offset
        self.world = world_on(self.tier, num_blocks=64, max_pinned_share=0.5, eviction_policy="lru")
        self.engine = self.world.engine
        self.engine.clock = lambda: self.now - self.offset
        self.engine.entries.wall_clock = lambda: self.now
        self.engine.entries.open(EntryFile(Path(self.folder.name) / "x.entries"))

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.engine.check_integrity()
            self.folder.cleanup()

    def run_prompt(self, token_ids: list[int], *marks: Mark) -> tuple[int, list[str]]:
        """The tokens found, and the names of the entries that the marks made."""
        self.number += 1
        prompt = Prompt(np.array(token_ids, np.int32), marks=marks)
        found = self.engine.add_request(f"r{self.number}", prompt, ONE_TOKEN)
        while not found.finished:
            self.engine.step()
            self.tier.finish()
        self.store()
        return found.num_cached_tokens, [entry.name for entry in found.kept[: len(marks)]]

    def store(self) -> None:
        while self.engine.store_on():
            self.tier.finish()

    def note_use(self, family: int, num_blocks: int) -> None:
        for name, (other, blocks, until, refreshes) in self.plain.items():
            if other == family and blocks <= num_blocks:
                self.awake.add(name)
                if refreshes:
                    self.plain[name] = (other, blocks, max(until, self.now + self.ttl_of(name)), True)

    def ttl_of(self, name: str) -> float:
        return self.ttls[name]

    ttls: dict[str, float]

    def expire(self) -> None:
        self.plain = {name: entry for name, entry in self.plain.items() if entry[2] > self.now}

    @rule(family=st.integers(0, 2), num_blocks=st.integers(1, MOST_BLOCKS), ttl=st.sampled_from((50.0, 500.0)))
    def mark(self, family: int, num_blocks: int, ttl: float) -> None:
        tokens = tokens_of(family, num_blocks)
        _, (name,) = self.run_prompt([*tokens, 5], Mark(len(tokens), Keep(ttl, BREAKPOINT)))
        self.note_use(family, num_blocks)
        known = self.plain.get(name)
        self.ttls[name] = ttl if known is None else max(ttl, self.ttls[name])  # the longest counts
        self.plain[name] = (family, num_blocks, max(self.now + ttl, known[2] if known else 0.0), True)
        self.awake.add(name)

    @rule(family=st.integers(0, 2), num_blocks=st.integers(1, MOST_BLOCKS), left=st.sampled_from((30.0, 300.0)))
    def make_with_a_fixed_end(self, family: int, num_blocks: int, left: float) -> None:
        name, tokens = f"resource {family} {num_blocks}", tokens_of(family, num_blocks)
        keep = Keep(left, "resource", name, until=self.now + left - self.offset)
        self.run_prompt([*tokens, 5], Mark(len(tokens), keep))
        self.note_use(family, num_blocks)
        known = self.plain.get(name)
        self.plain[name] = (family, num_blocks, max(self.now + left, known[2] if known else 0.0), False)
        self.awake.add(name)

    @precondition(lambda self: self.plain)
    @rule(data=st.data())
    def use(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.plain)))
        family, num_blocks, _, _ = self.plain[name]
        found, _ = self.run_prompt([*tokens_of(family, num_blocks), 6, 6])
        assert found >= BLOCK * num_blocks, "an entry's tokens were lost before its time"
        self.note_use(family, num_blocks)

    @rule()
    def flood(self) -> None:
        for _ in range(6):
            self.number += 1
            self.run_prompt([30 + (self.number * 7 + at * self.number) % 19 for at in range(40)])

    @precondition(lambda self: self.plain)
    @rule(data=st.data(), left=st.sampled_from((0.0, 5.0, 100.0)))
    def set_end(self, data: st.DataObject, left: float) -> None:
        name = data.draw(st.sampled_from(sorted(self.plain)))
        self.engine.entries.set_end(name, self.now + left - self.offset)
        family, num_blocks, _, refreshes = self.plain[name]
        self.plain[name] = (family, num_blocks, self.now + left, refreshes)
        self.expire()

    @precondition(lambda self: self.plain)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.plain)))
        self.engine.entries.drop(name)
        del self.plain[name]

    @rule(seconds=st.sampled_from((1.0, 20.0, 60.0, 400.0)))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.expire()

    @rule(seconds=st.sampled_from((0.0, 40.0)), offset=st.sampled_from((0.0, 7e8)))
    def restart(self, seconds: float, offset: float) -> None:
        self.store()
        self.engine.entries.save(at_once=True)
        self.now += seconds
        self.expire()
        self.awake = set()
        self.open(offset)

    @invariant()
    def lists_what_the_model_has(self) -> None:
        if not hasattr(self, "engine"):
            return
        clock = self.now - self.offset
        listed = {one.name: one for one in self.engine.entries.entries()}
        assert set(listed) == set(self.plain)
        for name, (_, num_blocks, until, _) in self.plain.items():
            assert abs(listed[name].until - clock - (until - self.now)) < 1e-3
            assert listed[name].num_kept_tokens == (BLOCK * num_blocks if name in self.awake else 0)


Entries.ttls = {}


class TestEntries(Entries.TestCase):
    settings = settings(max_examples=8, stateful_step_count=30, deadline=None)


@pytest.mark.slow
class TestManyMoreEntries(Entries.TestCase):
    settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
