"""A tier that works when it is told to: late, in part, wrongly or never. No real one can be made to do that."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from foreword.cache import BlockIds
from foreword.tiers.ticket import FORGOTTEN, Outcome, Ticket
from foreword.tiers.tier import BlockKeys, BlockRun, BlockSink, BoolArray, DoneCallback, TierStats
from hash_runner import HashRunner

Name = tuple[bytes, int, bytes]
Job = tuple[str, Ticket, BlockKeys, Callable[[int], None]]


class HashMemory:
    """The slots of a HashRunner as a pool's memory."""

    def __init__(self, runner: HashRunner) -> None:
        self._slots = runner.slots[:-1].reshape(-1, runner.block_size)

    def payload_bytes(self, group_id: int) -> int:
        return self._slots.shape[1] * 8

    def write(self, group_id: int, block_id: int, payload: memoryview) -> None:
        self._slots[block_id] = np.frombuffer(payload, np.uint64)

    def read(self, group_id: int, block_id: int, out: memoryview) -> None:
        np.frombuffer(out, np.uint64)[:] = self._slots[block_id]

    def provide(self, block_ids: BlockIds) -> Iterator[None]:
        return iter(())


class LateTier:
    """Blocks in a dictionary. Loads and stores move on, block by block, when `work` is called."""

    name = "late"

    def __init__(self) -> None:
        self.content: dict[Name, bytes] = {}
        self.jobs: list[Job] = []
        self.num_loads = 0
        self.load_s = 0.0
        """What it estimates."""
        self.lies = False
        """It claims to have everything."""
        self.is_eager = False
        """It stores at once."""
        self.is_far = False
        """It says only when it works what it has."""

    def lookup(self, keys: BlockKeys) -> BoolArray:
        return np.array([self.lies or name in self.content for name in names(keys)], bool)

    def probe(self, keys: BlockKeys, *, deadline_s: float = 0.05, on_done: DoneCallback | None = None) -> Ticket:
        ticket, listed = Ticket(len(keys), deadline_s=deadline_s, on_done=on_done), names(keys)

        def look(index: int) -> None:
            ticket.settle(index, Outcome.PRESENT if listed[index] in self.content else Outcome.MISSING)

        if self.is_far:
            self.jobs.append(("probe", ticket, keys, look))
        else:
            ticket.finish(Outcome.PRESENT)
        return ticket

    def load(
        self,
        keys: BlockKeys,
        payload_bytes: npt.NDArray[np.int64],
        sink: BlockSink,
        *,
        deadline_s: float,
        on_done: DoneCallback | None = None,
    ) -> Ticket:
        listed = names(keys)

        def forget_failed(outcomes: npt.NDArray[np.uint8]) -> None:
            for name, outcome in zip(listed, outcomes.tolist(), strict=True):
                if outcome in FORGOTTEN:
                    self.content.pop(name, None)

        ticket = Ticket(len(keys), deadline_s=deadline_s, before_done=forget_failed, on_done=on_done)

        def move(index: int) -> None:
            payload = self.content.get(listed[index])
            if payload is None:
                ticket.settle(index, Outcome.MISSING)
            elif ticket.transfer(index, lambda: sink.put(index, memoryview(payload))):
                ticket.settle(index, Outcome.DONE)

        self.num_loads += 1
        self.jobs.append(("load", ticket, keys, move))
        return ticket

    def store(self, run: BlockRun, *, on_done: DoneCallback | None = None) -> Ticket:
        ticket, listed = Ticket(len(run.keys), on_done=on_done), names(run.keys)

        def move(index: int) -> None:
            out = bytearray(int(run.payload_bytes[index]))
            if ticket.transfer(index, lambda: run.source.take(index, memoryview(out))):
                self.content[listed[index]] = bytes(out)
                ticket.settle(index, Outcome.DONE)

        self.jobs.append(("store", ticket, run.keys, move))
        if self.is_eager:
            self.finish()
        return ticket

    def work(self, rng: np.random.Generator, share: float = 1.0) -> None:
        """Move about that share of all jobs on; some end early, with an error of any kind."""
        for job in self.jobs.copy():
            what, ticket, keys, move = job
            if rng.random() > share:
                continue
            if not ticket.done:
                fails = rng.random()
                for index in range(len(keys) if fails < 0.9 else len(keys) // 2):
                    if fails < 0.1 and rng.random() < 0.5:
                        ticket.settle(index, Outcome.CORRUPT if what == "load" else Outcome.NO_ROOM)
                    else:
                        move(index)
                if fails >= 0.9:  # it hangs: the deadline ends it
                    ticket.finish(Outcome.TIMEOUT)
                ticket.finish(Outcome.IO_ERROR)
            self.jobs.remove(job)

    def finish(self) -> None:
        """Do all that was asked."""
        for _, ticket, keys, move in self.jobs:
            for index in range(len(keys)):
                move(index)
            ticket.finish(Outcome.IO_ERROR)
        self.jobs.clear()

    def estimate_load_s(self, num_bytes: int) -> float:
        return self.load_s

    def forget(self, keys: BlockKeys) -> None:
        for name in names(keys):
            self.content.pop(name, None)

    def close(self, flush_s: float) -> None:
        for _, ticket, _, _ in self.jobs:
            ticket.cancel()
        self.jobs.clear()

    def stats(self) -> TierStats:
        return TierStats(num_blocks=len(self.content))

    def check_integrity(self) -> None:
        return


def names(keys: BlockKeys) -> list[Name]:
    """Namespace, group and key of each block."""
    return [
        (keys.namespace, int(group_id), key.tobytes()) for group_id, key in zip(keys.group_ids, keys.keys, strict=True)
    ]
