"""Replicas in this process behind one server: real engines, real events over ZeroMQ, and no Ray.

A link that the tests control stands for Ray: it can lose a replica in the middle of an answer.
"""

from __future__ import annotations

import asyncio
import pickle
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from pathlib import Path
from typing import Any

from doors import open_reservations
from foreword.cluster import DecisionLog, RoutingCore, RoutingOptions
from foreword.demo.run import embedded_model
from foreword.fleet.front import EngineFacts, open_front
from foreword.fleet.link import Members, ReplicaLostError
from foreword.fleet.messages import Complete, Delta, Refused, Told
from foreword.fleet.replica import Replica
from foreword.fleet.routed import RoutedEngines
from foreword.llm import LLM
from foreword.server.options import ServerConfig
from live_server import ServerThread, wait_until

EVENTS = {
    "kv_events": "tcp://127.0.0.1:0",
    "kv_events_snapshot": "tcp://127.0.0.1:0",
    "kv_events_hashes": "bytes",
}


class LocalLink:
    """Leads to replicas on the server's own event loop."""

    def __init__(self, llms: dict[str, LLM]) -> None:
        self.llms = llms
        self.replicas: dict[str, Replica] = {}
        self.members: Members | None = None
        self.requests: Counter[str] = Counter()
        """Submissions by replica."""
        self.questions: Counter[str] = Counter()
        """Whether each goes on."""
        self.deaths: list[int] = []
        """After each of these numbers of pieces with tokens, the replica that answers is lost; at the latest before it
        tells the end, because a busy event loop joins pieces."""
        self.running = 0
        self._gate = asyncio.Event()
        self._gate.set()
        self.holds_warm_ups = False
        """Whether requests that are not a client's never begin."""
        self.mute: set[str] = set()
        """Replicas that never answer a call."""
        self.unreachable: Counter[str] = Counter()
        """Submissions that are to fail for each replica, although it lives."""
        self.num_refusals = 0
        """Calls that are to be refused because the cache is busy."""
        self.stopped: set[str] = set()
        """Replicas of which nothing comes, as if their processes were stopped."""
        self.stops_after: int | None = None
        """After this number of pieces with tokens, the replica that answers is stopped; once. At the latest, like
        `deaths`, before it tells the end."""

    def hold(self) -> None:
        """Let submissions wait before they reach a replica."""
        self._gate.clear()

    def go_on(self) -> None:
        """Let them go on; call it on the event loop."""
        self._gate.set()

    def start(self, members: Members) -> None:
        self.members = members
        for name, llm in self.llms.items():
            replica = self.replicas[name] = Replica(llm)
            replica.start()
            members.join(name, replica.facts("127.0.0.1"))

    async def stop(self) -> None:
        for replica in self.replicas.values():
            await replica.stop()

    async def generate(self, replica: str, data: bytes) -> AsyncGenerator[list[Told]]:
        self.requests[replica] += 1
        dies_after = self.deaths.pop(0) if self.deaths else None
        num_pieces = 0
        if self.unreachable[replica]:
            self.unreachable[replica] -= 1
            raise ReplicaLostError(f"{replica} cannot be reached", died=False, may_be_healthy=True)
        if self.holds_warm_ups and b"warm-" in data:
            await asyncio.Event().wait()
        await self._gate.wait()
        self.running += 1
        try:
            async with aclosing(self.replicas[replica].generate(data)) as told:
                async for messages in told:
                    is_end = isinstance(messages[-1], Complete)
                    if dies_after is not None and (num_pieces == dies_after or is_end):
                        raise ReplicaLostError(f"{replica} was killed", died=True)
                    if self.stops_after is not None and (num_pieces == self.stops_after or is_end):
                        self.stops_after = None
                        self.stopped.add(replica)
                    await self._while_stopped(replica)
                    num_pieces += any(isinstance(one, Delta) for one in messages)
                    yield messages
        finally:
            self.running -= 1

    async def call(self, replica: str, data: bytes) -> bytes:
        if replica in self.mute:
            await asyncio.Event().wait()
        await self._while_stopped(replica)
        if self.num_refusals:
            self.num_refusals -= 1
            return pickle.dumps(Refused(409, "the cache is busy", "conflict", None, "cache_busy"))
        return await self.replicas[replica].call(data)

    async def complaint(self, replica: str) -> str | None:
        self.questions[replica] += 1
        await self._while_stopped(replica)
        return self.replicas[replica].complaint()

    async def _while_stopped(self, replica: str) -> None:
        while replica in self.stopped:
            await asyncio.sleep(0.01)


class Fleet:
    """A server, its link and its door."""

    def __init__(self, server: ServerThread, link: LocalLink, door: RoutedEngines) -> None:
        self.server, self.link, self.door = server, link, door
        self.url = server.url

    def on_loop(self, function: Any) -> Any:
        """What a function without arguments returns on the server's event loop."""

        async def run() -> Any:
            return function()

        return self.server.start(run()).result(60)


@contextmanager
def fleet(
    num_replicas: int, config: ServerConfig | None = None, model: Path | None = None, **options: Any
) -> Iterator[Fleet]:
    """A server of a model, by default the embedded one, with replicas named a, b, c ..."""
    options = {"num_gpu_blocks_override": 256, "self_check": False, **options}
    names: Sequence[str] = "abcdefgh"[:num_replicas]
    with ExitStack() as stack:
        folder = str(model or stack.enter_context(embedded_model()))
        llms = {name: stack.enter_context(LLM(folder, **options, **EVENTS)) for name in names}
        one = llms["a"]
        doors: list[RoutedEngines] = []
        link = LocalLink(llms)

        def open_door(llm: LLM, records: Any, after_step: Any) -> RoutedEngines:
            core = RoutingCore(RoutingOptions(block_tokens=llm.layout.block_size), log=(log := DecisionLog(300)))
            doors.append(RoutedEngines(llm, records, after_step, core, link, seed=7))
            assert doors[0].log is core.log is log, "a router's own log is used"
            return doors[0]

        front = open_front(one.config, pickle.loads(pickle.dumps(EngineFacts.of(one))))
        server = stack.enter_context(ServerThread(front, config or ServerConfig(), open_door))
        yield Fleet(server, link, doors[0])


def assert_nothing_is_left(found: Fleet) -> None:
    """No request runs, none is reserved, and every pool is sound."""
    core = found.door.core
    wait_until(lambda: found.link.running == 0 and found.door.num_choices == 0)
    assert not found.on_loop(lambda: open_reservations(core)), "a reservation leaked"
    found.on_loop(lambda: core.check_integrity([]))
    for llm in found.link.llms.values():
        wait_until(lambda llm=llm: not llm.engine.has_unfinished_requests())
        llm.engine.check_integrity()
