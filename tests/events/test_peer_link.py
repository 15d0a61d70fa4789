"""Reservations that are published at once when other routers decide next."""

import asyncio
import time

import pytest

from foreword.cluster import EventBatch, ReplicaSpec, RoutingCore, RoutingOptions, RoutingRequest
from foreword.events.peer_link import PeerLink


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
        deadline = time.monotonic() + 30
        while not all(len(core._peers) == 1 for core in cores):  # the whole state each second makes them known
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        monkeypatch.setattr("foreword.events.peer_link.FLUSH_S", 3600.0)
        await asyncio.sleep(0.1)
        for number in range(3):
            cores[0].choose(RoutingRequest(f"q{number}", [], 100), time.monotonic())
            links[0].flush()
            while len(cores[1]._loads.open) <= number:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.001)
        for link in links:
            await link.close()

    asyncio.run(run())
