"""What Serve says of its replicas, and calls to replicas that leave; without a Ray that runs."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

import pytest

from foreword.cluster import ReplicaSpec
from foreword.fleet.link import ReplicaLostError
from foreword.fleet.replica import ReplicaFacts

pytest.importorskip("ray", reason="needs foreword[cluster]")

from ray.exceptions import ActorDiedError, ActorUnavailableError

from foreword.fleet.ray_router import note_dead
from foreword.fleet.ray_serve import RayLink

FACTS: dict[str, Any] = {"spec": asdict(ReplicaSpec(10, 100.0)), "events": {}, "process_id": 1}


class Fleet:
    """Who is there."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def join(self, name: str, facts: ReplicaFacts) -> None:
        self.names.append(name)

    def leave(self, name: str) -> None:
        self.names.remove(name)


class Unanswered:
    """A handle of Serve whose calls wait for a replica for ever, or until they fail."""

    def __init__(self) -> None:
        self.generate = self.call = self.complaint = self
        self.num_cancelled = 0
        self.failed = asyncio.get_running_loop().create_future()

    def options(self, **_: object) -> Unanswered:
        return self

    def remote(self, *_: object) -> Unanswered:
        return self

    def cancel(self) -> None:
        self.num_cancelled += 1

    def __await__(self) -> Any:
        return asyncio.shield(self.failed).__await__()

    async def __anext__(self) -> Any:
        await self


async def linked(handle: Any = None) -> tuple[RayLink, Fleet]:
    link, members = RayLink("an app", handle or Unanswered()), Fleet()
    link.start(members)
    return link, members


async def told(link: RayLink, replicas: dict[str, dict[str, Any]]) -> None:
    link.note_replicas(replicas)
    await asyncio.sleep(0)


def test_a_replica_of_another_version_keeps_no_other_from_joining() -> None:
    async def run() -> None:
        link, members = await linked()
        other = {**FACTS, "spec": {**FACTS["spec"], "colour": "red"}}
        await told(link, {"next": other, "without": {"spec": FACTS["spec"]}, "starting": {}, "this": FACTS})
        assert members.names == ["this"]
        await told(link, {"next": FACTS})
        assert members.names == ["next"]
        await link.stop()

    asyncio.run(run())


@pytest.mark.parametrize("asks", ["generate", "call", "complaint"])
@pytest.mark.parametrize("leaves", ["found dead", "in order", "in order, and is found dead"])
def test_nobody_waits_for_a_replica_that_leaves_before_it_answers(
    asks: str, leaves: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was found dead has died with what it had, whether that had begun or not, and however Serve learns it."""
    monkeypatch.setattr("foreword.fleet.ray_serve.FAREWELL_S", 60.0 if "and" in leaves else 0.1)

    async def run() -> None:
        handle = Unanswered()
        link, _ = await linked(handle)
        await told(link, {"a": FACTS, "b": FACTS})
        stream = link.generate("a", b"")
        calls = {"generate": lambda: anext(stream), "call": lambda: link.call("a", b"")}
        waiting = asyncio.ensure_future(calls.get(asks, lambda: link.complaint("a"))())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        if leaves == "found dead":
            note_dead("an app", "a")
        else:
            await told(link, {"b": FACTS})
        if "and" in leaves:
            await asyncio.sleep(0.01)
            handle.failed.set_exception(ActorDiedError())
        with pytest.raises(ReplicaLostError, match=r"replica a (left before it|ended)") as lost:
            await asyncio.wait_for(waiting, 60)
        assert lost.value.died == ("dead" in leaves)
        assert handle.num_cancelled == 1
        with pytest.raises(ReplicaLostError, match="replica a is gone"):
            await link.call("a", b"")
        await link.stop()

    asyncio.run(run())


def test_a_replica_that_cannot_be_reached_for_a_moment_has_not_died() -> None:
    async def run() -> None:
        handle = Unanswered()
        link, _ = await linked(handle)
        await told(link, {"a": FACTS})
        handle.failed.set_exception(ActorUnavailableError("the network is slow", None))
        with pytest.raises(ReplicaLostError, match="a cannot be reached") as lost:
            await anext(link.generate("a", b""))
        assert not lost.value.died
        assert lost.value.may_be_healthy
        await link.stop()

    asyncio.run(run())
