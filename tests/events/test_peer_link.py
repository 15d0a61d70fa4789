"""Reservations that are published at once when other routers decide next, and messages that nobody understands."""

import asyncio
import time
from collections.abc import Callable

import msgpack
import pytest
import zmq.asyncio

from doors import num_peers, open_reservations
from foreword.cluster import EventBatch, ReplicaSpec, RoutingCore, RoutingOptions, RoutingRequest
from foreword.events.peer_link import PeerLink


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.002)


def test_a_flush_does_not_wait_for_the_next_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks are an hour apart here, so that only flushes bring anything."""

    async def run() -> None:
        cores = [RoutingCore(RoutingOptions(4, share_load=True), router=name) for name in ("a", "b")]
        for core in cores:
            core.join("r", ReplicaSpec(50, 1000.0))
            core.install_snapshot("r", EventBatch(b"life", -1), 0.0)
        addresses: list[str] = []

        async def find(address: str) -> list[str]:
            addresses.append(address)
            return addresses

        links = [PeerLink(core, "127.0.0.1", find) for core in cores]
        for link in links:
            link.start()
        await until(lambda: all(num_peers(core) == 1 for core in cores))  # the whole state makes them known
        monkeypatch.setattr("foreword.events.peer_link.FLUSH_S", 3600.0)
        await asyncio.sleep(0.1)
        for number in range(3):
            cores[0].choose(RoutingRequest(f"q{number}", [], 100), time.monotonic())
            links[0].flush()
            await until(lambda number=number: len(open_reservations(cores[1])) > number)
        for link in links:
            await link.close()

    asyncio.run(run())


UPDATE = ["x", "life", 0, "reserved", ["x", "q", 1, "r"], 5, 5]


@pytest.mark.parametrize(
    "bad",
    [
        b"\xc1",
        msgpack.packb(7),
        msgpack.packb([[], []]),
        msgpack.packb([None, [UPDATE[:3]]]),
        msgpack.packb([None, [[*UPDATE[:4], ["x", [], 1, "r"], 5, 5]]]),
        msgpack.packb([None, [[*UPDATE[:5], "many", 5]]]),
        msgpack.packb([["x", "life", None], []]),
    ],
)
def test_a_message_of_another_version_is_counted_and_the_next_one_is_heard(bad: bytes) -> None:
    good = msgpack.packb([["y", "life", 0], [["y", "life", -1, "reserved", ["y", "q", 1, "r"], 5, 5]]])
    core = RoutingCore(RoutingOptions(4, share_load=True), router="a")
    core.join("r", ReplicaSpec(50, 1000.0))

    async def run() -> None:
        context = zmq.asyncio.Context()
        other = context.socket(zmq.PUB)
        port = other.bind_to_random_port("tcp://127.0.0.1")

        async def find(address: str) -> list[str]:
            return [address, f"tcp://127.0.0.1:{port}"]

        async def say(message: bytes, is_heard: Callable[[], object]) -> None:
            async with asyncio.timeout(60):
                while not is_heard():
                    await other.send(message)
                    await asyncio.sleep(0.01)

        link = PeerLink(core, "127.0.0.1", find)
        link.start()
        try:
            await say(bad, lambda: link.num_bad)
            await say(good, lambda: core.loads()["r"].num_open)
        finally:
            await link.close()
            context.destroy(linger=0)

    asyncio.run(run())
    core.check_integrity([])


def test_fronts_are_found_after_any_failure_to_ask_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreword.events.peer_link.WHOLE_S", 0.01)
    monkeypatch.setattr("foreword.events.peer_link.MEET_S", 0.05)
    num_asked = 0

    async def find(address: str) -> list[str]:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            raise RuntimeError("the name of the actor is taken")
        if num_asked == 2:
            await asyncio.Event().wait()  # it never answers
        return [address, "tcp://127.0.0.1:9"] if num_asked == 3 else [address]

    async def run() -> None:
        link = PeerLink(RoutingCore(RoutingOptions(4, share_load=True), router="a"), "127.0.0.1", find)
        link.start()
        try:
            await until(lambda: num_asked > 3)
            await until(lambda: link._fronts == {link.address})  # nobody calls one that has ended for ever
        finally:
            await link.close()

    asyncio.run(run())
