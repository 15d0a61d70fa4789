"""A router's mirrors over real sockets: equal to the pool after everything that can happen to messages and replicas.

The engines, publishers and sockets are real; a proxy loses, repeats, reorders and damages messages.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from doors import leave_asleep, num_events
from events.engine_with_events import EVERYTHING, EngineWithEvents, reachable
from events.proxy import Proxy
from foreword.cluster import ReplicaSpec, RoutingCore, RoutingOptions, RoutingRequest, Standing
from foreword.events.core_feed import CoreFeed
from foreword.events.subscriber import Subscriber
from free_ports import free_port

WHOLE = replace(EVERYTHING, kv_events_hashes="bytes")
BLOCK = 4


@pytest.fixture(autouse=True)
def quick_heartbeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A follower learns from the next heartbeat what it has missed."""
    monkeypatch.setattr("foreword.events.publisher.HEARTBEAT_S", 0.25)


@asynccontextmanager
async def feeding(*names: str) -> AsyncIterator[tuple[RoutingCore, CoreFeed]]:
    core = RoutingCore(RoutingOptions(BLOCK))
    for name in names:
        core.join(name, ReplicaSpec(24, 1000.0))
    feed = CoreFeed(core)
    try:
        yield core, feed
    finally:
        await feed.close()


def follow(feed: CoreFeed, name: str, engine: EngineWithEvents, live: str | None = None) -> None:
    told = engine.publisher.addresses
    feed.follow(name, live or reachable(told["kv_events"]), told["kv_events_snapshot"])


async def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        await asyncio.sleep(0.01)


def is_equal(core: RoutingCore, name: str, engine: EngineWithEvents) -> bool:
    """Whether a mirror says that it is right, and is."""
    mirror = core.mirror(name)
    return mirror.is_synced and set(mirror.parents) == engine.held()


def credits_nothing(core: RoutingCore, name: str, engine: EngineWithEvents) -> bool:
    """Whether the router counts on none of the replica's blocks."""
    decision = core.choose(RoutingRequest("probe", list(engine.held())[:1], BLOCK + 1), 0.0)
    core.release(decision.reservation, 0.0)
    (one,) = (each for each in decision.candidates() if each.replica == name)
    return (one.standing, one.hit_tokens) == (Standing.UNKNOWN, 0)


@pytest.mark.parametrize("index", ["hash", "radix"])
def test_a_mirror_equals_the_pool_after_lost_repeated_reordered_and_damaged_messages(index: str) -> None:
    async def run() -> None:
        with (
            EngineWithEvents(WHOLE, seed=7, index=index) as engine,
            Proxy(reachable(engine.publisher.addresses["kv_events"]), seed=7) as proxy,
        ):
            async with feeding("r") as (core, feed):
                engine.work(5)
                follow(feed, "r", engine, proxy.address)
                counts = core.mirror("r").follower.counts

                def shows_enough() -> bool:
                    kinds = min(counts["bad"], counts["gaps"], counts["repeated"])
                    return proxy.num_troubled > 20 and kinds > 0 and counts["snapshots"] > 1

                for round_number in range(30):
                    if round_number >= 6 and shows_enough():  # which message meets which trouble is chance
                        break
                    proxy.trouble = 0.4
                    for _ in range(5):
                        engine.work(4)
                        await asyncio.sleep(0.01)
                    proxy.trouble = 0.0
                    engine.work(3)
                    await until(lambda: is_equal(core, "r", engine))
                    core.check_integrity(list(engine.held()))
                assert shows_enough(), (proxy.num_troubled, counts)

    asyncio.run(run())


def test_a_replica_that_restarts_at_the_same_address_is_credited_only_with_its_new_blocks() -> None:
    async def run() -> None:
        ports = [free_port() for _ in range(2)]
        config = replace(WHOLE, kv_events=f"tcp://*:{ports[0]}", kv_events_snapshot=f"tcp://127.0.0.1:{ports[1]}")
        async with feeding("r") as (core, feed):
            with EngineWithEvents(config, seed=1) as first:
                follow(feed, "r", first)
                first.work()
                await until(lambda: is_equal(core, "r", first))
            with EngineWithEvents(config, seed=2) as again:
                again.work()
                await until(lambda: is_equal(core, "r", again))
                assert first.held() - again.held()
                core.check_integrity(list(again.held() | first.held()))
            assert core.mirror("r").follower.counts["restarts"] == 1

    asyncio.run(run())


def test_what_a_publisher_drops_is_a_gap_and_a_snapshot_fills_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreword.events.publisher.MAX_WAITING_BLOCKS", 8)

    async def run() -> None:
        with EngineWithEvents(WHOLE, seed=3) as engine:
            async with feeding("r") as (core, feed):
                follow(feed, "r", engine)
                engine.work(5)
                await until(lambda: is_equal(core, "r", engine))
                counts = core.mirror("r").follower.counts
                before = counts["snapshots"]
                for _ in range(10):
                    leave_asleep(engine.publisher)  # nobody wakes the publisher until its next heartbeat
                    engine.work(10)
                await until(lambda: is_equal(core, "r", engine))
                assert counts["gaps"] > 0
                assert counts["snapshots"] > before

    asyncio.run(run())


def test_a_router_that_comes_late_or_stands_still_loses_nothing() -> None:
    """The loop stands still while the engine works: the engine does not wait, and the mirror is right afterwards."""

    async def run() -> None:
        with EngineWithEvents(WHOLE, seed=4) as engine:
            engine.work(40)
            async with feeding("r") as (core, feed):
                follow(feed, "r", engine)
                await until(lambda: is_equal(core, "r", engine))
                engine.work(200)  # in this thread, which is the loop's
                assert num_events(engine.publisher) > 200
                await until(lambda: is_equal(core, "r", engine))
                assert core.mirror("r").follower.counts["gaps"] == 0

    asyncio.run(run())


def test_a_mirror_that_waits_for_a_snapshot_credits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody answers at first; other replicas are followed all the same."""
    monkeypatch.setattr("foreword.events.subscriber.ANSWER_S", 0.2)

    async def run() -> None:
        with EngineWithEvents(WHOLE, seed=5) as lost, EngineWithEvents(WHOLE, seed=6) as well:
            lost.ask([0, 1, 0, 1, 1])
            async with feeding("lost", "well") as (core, feed):
                feed.follow("lost", reachable(lost.publisher.addresses["kv_events"]), f"tcp://127.0.0.1:{free_port()}")
                follow(feed, "well", well)
                for number in range(3):
                    lost.ask([number % 2] * (9 + 4 * number))  # no reset, which would make a mirror right
                    well.work(3)
                    await until(lambda: is_equal(core, "well", well))
                    assert core.unsynced() == ["lost"]
                    assert credits_nothing(core, "lost", lost)
                follow(feed, "lost", lost)
                await until(lambda: is_equal(core, "lost", lost))

    asyncio.run(run())


def test_a_replica_whose_events_stop_is_credited_with_nothing_until_they_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its publisher has ended, its engine goes on: what it holds changes, and nobody hears of it."""
    monkeypatch.setattr("foreword.events.core_feed.SILENCE_S", 1.5)
    monkeypatch.setattr("foreword.events.subscriber.ANSWER_S", 0.2)

    async def run() -> None:
        ports = [free_port() for _ in range(2)]
        config = replace(WHOLE, kv_events=f"tcp://*:{ports[0]}", kv_events_snapshot=f"tcp://127.0.0.1:{ports[1]}")
        async with feeding("r") as (core, feed):
            with EngineWithEvents(config, seed=1) as first:
                follow(feed, "r", first)
                first.ask([0, 1, 0, 1, 1])
                await until(lambda: is_equal(core, "r", first))
                claimed = core.choose(RoutingRequest("claims", [b"new"], BLOCK), 0.0)
                first.publisher.close()
                await until(lambda: core.unsynced() == ["r"])
                assert credits_nothing(core, "r", first)
                core.check_integrity([*first.held(), b"new"])
                core.release(claimed.reservation, 0.0)
            with EngineWithEvents(config, seed=2) as again:
                again.work(3)
                await until(lambda: is_equal(core, "r", again))

    asyncio.run(run())


def test_a_replica_that_leaves_is_followed_no_longer() -> None:
    async def run() -> None:
        with EngineWithEvents(WHOLE, seed=8) as engine:
            async with feeding("r") as (core, feed):
                follow(feed, "r", engine)
                engine.work(10)
                await until(lambda: is_equal(core, "r", engine))
                feed.leave("r")
                core.leave("r", 0.0)
                engine.work(10)
                await asyncio.sleep(0.2)
                assert core.replicas == []
                core.join("r", ReplicaSpec(24, 1000.0))
                follow(feed, "r", engine)
                await until(lambda: is_equal(core, "r", engine))

    asyncio.run(run())


def test_a_replica_whose_events_cannot_be_followed_is_credited_with_nothing_until_the_next_try(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("foreword.events.core_feed.SILENCE_S", 0.5)
    read_all, fails = Subscriber._read_all, False

    def failing(self: Subscriber, *args: Any) -> int:
        if fails:
            raise RuntimeError("a defect")
        return read_all(self, *args)

    monkeypatch.setattr(Subscriber, "_read_all", failing)

    async def run() -> None:
        nonlocal fails
        with EngineWithEvents(WHOLE, seed=9) as engine:
            async with feeding("r") as (core, feed):
                follow(feed, "r", engine)
                engine.ask([0, 1, 0, 1, 1])
                await until(lambda: is_equal(core, "r", engine))
                fails = True
                engine.work(1)
                await until(lambda: not core.mirror("r").is_synced)
                assert credits_nothing(core, "r", engine)
                assert "the events of replica r cannot be followed" in caplog.text
                fails = False
                await until(lambda: is_equal(core, "r", engine))

    asyncio.run(run())
