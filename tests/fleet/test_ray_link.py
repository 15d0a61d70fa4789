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
    """A handle of Serve whose calls wait for a replica for ever."""

    def __init__(self) -> None:
        self.generate = self.call = self
        self.num_cancelled = 0

    def options(self, **_: object) -> Unanswered:
        return self

    def remote(self, *_: object) -> Unanswered:
        return self

    def cancel(self) -> None:
        self.num_cancelled += 1

    def __await__(self) -> Any:
        return asyncio.Event().wait().__await__()

    async def __anext__(self) -> Any:
        await asyncio.Event().wait()


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


@pytest.mark.parametrize("is_stream", [True, False])
def test_nobody_waits_for_a_replica_that_leaves_before_it_answers(is_stream: bool) -> None:
    async def run() -> None:
        handle = Unanswered()
        link, _ = await linked(handle)
        await told(link, {"a": FACTS})
        answer = anext(link.generate("a", b"")) if is_stream else link.call("a", b"")
        waiting = asyncio.ensure_future(answer)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await told(link, {})
        with pytest.raises(ReplicaLostError, match="replica a left before it"):
            await asyncio.wait_for(waiting, 60)
        assert handle.num_cancelled == is_stream
        with pytest.raises(ReplicaLostError, match="replica a is gone"):
            await link.call("a", b"")
        await link.stop()

    asyncio.run(run())
