"""Several fronts on real sockets: each knows what the others have reserved, and forgets those that are gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from doors import open_reservations
from foreword.cluster import ReplicaSpec, RouterLoad, RoutingCore, RoutingOptions, RoutingRequest
from foreword.events.peer_link import PeerLink, decode, encode

SILENCE_S = 100.0


def core(name: str) -> RoutingCore:
    made = RoutingCore(RoutingOptions(share_load=True, peer_silence_s=SILENCE_S), router=name, life=f"{name}-1")
    for replica in ("a", "b"):
        made.join(replica, ReplicaSpec(100, 1000.0))
    return made


def request(name: str) -> RoutingRequest:
    return RoutingRequest(name, [name], 500)


async def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(0.01)


def num_open(one: RoutingCore) -> int:
    return sum(load.num_open for load in one.loads().values())


def test_messages_survive_their_bytes() -> None:
    one = core("one")
    decision = one.choose(request("r"), 0.0)
    one.note_first_token(decision.reservation, 1.0, 0)
    one.beat()
    updates = one.take_updates()
    assert len(updates) == 3
    assert decode(encode(updates)) == updates
    whole = one.export_load()
    assert isinstance(decode(encode(whole)), RouterLoad)
    assert decode(encode(whole)) == whole
    with pytest.raises((ValueError, TypeError)):
        decode(b"\x93\x01\x02\x03")


def test_three_fronts_know_each_other_and_forget_the_one_that_ends() -> None:
    addresses: list[str] = []

    async def find(address: str) -> list[str]:
        addresses.append(address)
        return addresses

    async def run() -> None:
        cores = [core(name) for name in ("one", "two", "three")]
        early = cores[0].choose(request("early"), time.monotonic())
        links = [PeerLink(each, "127.0.0.1", find) for each in cores]
        for link in links:
            link.start()
        try:
            await until(lambda: all(num_open(each) == 1 for each in cores))  # by the whole state: the update came early
            late = [each.choose(request(each.router), time.monotonic()) for each in cores]
            await until(lambda: all(num_open(each) == 4 for each in cores))
            assert {each.replica for each in late} == {"a", "b"}, "no front sends to what another has filled"
            cores[0].release(early.reservation, time.monotonic())
            await until(lambda: all(num_open(each) == 3 for each in cores))
            await links[0].close()
            for each in cores[1:]:  # all have been silent for long by then; those that live speak again
                each.choose(request(f"next of {each.router}"), time.monotonic() + 2 * SILENCE_S)
            await until(lambda: all(num_open(each) == 4 for each in cores[1:]))
            assert all("one" not in {r.router for r in open_reservations(each)} for each in cores[1:])
            for each in cores[1:]:
                each.check_integrity([])
        finally:
            for link in links[1:]:
                await link.close()

    asyncio.run(run())
