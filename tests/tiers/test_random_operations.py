"""Random operations on a disk tier against a dict: what it gives is right, and its tables agree with each other."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from doors import state_of
from foreword.tiers.ticket import Outcome, Ticket
from foreword.tiers.tier import BlockKeys, BlockRun, Buffers
from tiers.block_world import BLOCK_BYTES, OPTIONS, WAIT_S, keys_of, opened, payloads_of, segment_files

NUM_KEYS = 240
UNDER_WAY = 12
"""Jobs at once."""


class World:
    """A tier, jobs under way, and which blocks may be in it."""

    def __init__(self, path, seed: int) -> None:
        self.path, self.rng = path, random.Random(seed)
        self.options = replace(
            OPTIONS, budget_bytes=1 << 20, segment_bytes=64 << 10, upkeep_s=0.02, rescan_s=0.05, snapshot_s=0.1
        )
        self.tier = opened(path, self.options)
        self.keys = keys_of(range(NUM_KEYS))
        self.payloads = payloads_of(self.keys)
        self.jobs: deque[tuple[Ticket, np.ndarray, np.ndarray | None]] = deque()
        self.cancelled: list[tuple[np.ndarray, np.ndarray]] = []
        """Memory of cancelled loads, and how it looked then."""
        self.ever_stored: set[int] = set()
        self.num_loaded = 0
        self.num_damaged = 0

    def some(self) -> np.ndarray:
        first = self.rng.randrange(NUM_KEYS)
        return (first + np.arange(self.rng.randint(1, 12))) % NUM_KEYS

    def chosen(self, numbers: np.ndarray) -> BlockKeys:
        return self.keys.select(numbers)

    def store(self) -> None:
        numbers = self.some()
        run = BlockRun.chain(
            self.chosen(numbers),
            BLOCK_BYTES,
            Buffers([self.payloads[number].data for number in numbers]),
            flags=self.rng.choice([1, 1, 1, 3]) if self.rng.random() < 0.05 else 1,
            ttl_s=self.rng.choice([None, None, 1.0]),
        )
        self.ever_stored.update(numbers.tolist())
        self.jobs.append((self.tier.store(run), numbers, None))

    def load(self) -> None:
        numbers = self.some()
        out = np.full((len(numbers), BLOCK_BYTES), 0xA5, np.uint8)
        sink = Buffers([row.data for row in out])
        lengths = np.full(len(numbers), BLOCK_BYTES)
        deadline_s = self.rng.choice([WAIT_S, WAIT_S, 0.001])
        self.jobs.append((self.tier.load(self.chosen(numbers), lengths, sink, deadline_s=deadline_s), numbers, out))

    def finish(self, job: tuple[Ticket, np.ndarray, np.ndarray | None]) -> None:
        ticket, numbers, out = job
        assert ticket.wait(WAIT_S), "a job hangs"
        if out is None:
            return
        done = ticket.report.outcomes == Outcome.DONE
        assert np.array_equal(out[done], self.payloads[numbers[done]]), "a wrong block"
        assert self.ever_stored.issuperset(numbers[done].tolist()), "a block that nobody stored"
        self.num_loaded += int(done.sum())

    def damage(self) -> None:
        files = segment_files(self.path)
        if not files:
            return
        path = self.rng.choice(files)
        try:
            with path.open("r+b") as file:
                size = file.seek(0, 2)
                file.seek(self.rng.randrange(max(1, size)))
                file.write(self.rng.randbytes(self.rng.choice([1, 100, 9000])))
                if self.rng.random() < 0.2:
                    file.truncate(self.rng.randrange(max(1, size)))
            if self.rng.random() < 0.2:
                path.unlink()
        except FileNotFoundError:  # evicted meanwhile
            return
        self.num_damaged += 1

    def restart(self) -> None:
        self.drain()
        self.tier.close(WAIT_S)
        if self.rng.random() < 0.3:
            for index in self.path.glob("v1/*/index"):
                index.unlink()
        self.tier = opened(self.path, self.options)

    def drain(self) -> None:
        while self.jobs:
            self.finish(self.jobs.popleft())
        assert all(np.array_equal(*pair) for pair in self.cancelled), "memory was written after a cancel"
        self.cancelled.clear()

    def step(self) -> None:
        match self.rng.choices(
            ["store", "load", "lookup", "forget", "cancel", "damage", "restart", "check"],
            [30, 40, 10, 4, 8, 0.5, 0.2, 2],
        )[0]:
            case "store":
                self.store()
            case "load":
                self.load()
            case "lookup":
                found = self.tier.lookup(self.keys)
                assert self.ever_stored.issuperset(np.flatnonzero(found).tolist())
            case "forget":
                self.tier.forget(self.chosen(self.some()))
            case "cancel" if self.jobs:
                ticket, _, out = self.rng.choice(self.jobs)
                ticket.cancel()
                if out is not None:
                    self.cancelled.append((out, out.copy()))
            case "damage":
                self.damage()
            case "restart":
                self.restart()
            case "check":
                self.drain()
                state_of(self.tier).index.check_integrity()
        while len(self.jobs) > UNDER_WAY:
            self.finish(self.jobs.popleft())


@pytest.mark.parametrize("num_steps", [1_000, pytest.param(30_000, marks=pytest.mark.slow)])
def test_random_operations_never_give_a_wrong_block_and_keep_the_tables_in_order(tmp_path, num_steps):
    world = World(tmp_path, seed=num_steps)
    for _ in range(num_steps):
        world.step()
    world.restart()
    world.tier.check_integrity()
    world.tier.close(WAIT_S)
    assert world.num_loaded > num_steps // 2
    assert world.num_damaged > num_steps // 1000
