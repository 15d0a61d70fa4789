"""The collector's passes over all objects wait until no call runs."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from foreword.server import full_passes
from foreword.server.full_passes import FullPasses
from foreword.server.options import ServerConfig
from live_server import ServerThread, embedded_llm, post, wait_until


class Cycle:
    def __init__(self) -> None:
        self.own = self


@contextmanager
def noted_passes() -> Iterator[list[int]]:
    """The generations that are collected meanwhile."""
    found: list[int] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            found.append(info["generation"])

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


def test_a_call_with_many_objects_is_not_held_up_and_cycles_are_found_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_passes, "MOST_OBJECTS", 140_000)
    num_running, now = 1, 0.0

    async def run() -> None:
        nonlocal num_running, now
        before, cycle, garbage = gc.get_threshold(), Cycle(), Cycle()
        lost, of_old = weakref.ref(cycle), weakref.ref(garbage)
        passes = FullPasses(lambda: num_running, lambda: now)
        gc.collect()
        del garbage
        passes.start()
        assert of_old() is None, "garbage does not stay for good"
        del cycle
        with noted_passes() as found:
            many = [[number] for number in range(100_000)]
            assert {0, 1} <= {*found}
            assert 2 not in found
            assert not passes.look()
            assert lost() is not None
            num_running = 0
            assert passes.look()
            assert found[-1] == 2
            assert lost() is None
            assert not passes.look(), "once is enough"
            num_running = 1
            more = [[number] for number in range(2 * full_passes.MOST_OBJECTS)]
            assert passes.look(), "calls that never end do not put it off for ever"
            del more
            more = [[number] for number in range(100_000)]
            assert not passes.look()
            now += full_passes.MOST_S
            assert passes.look(), "nor do those that make few objects"
            now += full_passes.MOST_S
            assert not passes.look(), "there is nothing to find"
            del many, more
        await passes.stop()
        await passes.stop()
        assert gc.get_threshold() == before

    asyncio.run(run())


@pytest.mark.parametrize("own", [False, True])
def test_what_lives_is_frozen_until_the_end_unless_the_process_froze_its_own(own: bool) -> None:
    """Whoever froze objects before a server started, as these tests do, finds them frozen after it."""

    async def run() -> list[int]:
        passes, counts = FullPasses(lambda: 0), []
        for change in (None, passes.start, passes.stop):
            if change is not None and (waits := change()):
                await waits
            counts.append(gc.get_freeze_count())
        return counts

    if not own:
        gc.unfreeze()
    try:
        before, during, after = asyncio.run(run())
    finally:
        if not own:
            gc.freeze()
    assert during > 10_000
    assert (before, after) == ((during, during) if own else (0, 0))


@pytest.mark.parametrize("thresholds", [(700, 10, 10), (2_000, 10, 0), (10_000, 5, 10)])
def test_limits_count_objects_whatever_python_s_thresholds_are(thresholds: tuple[int, int, int]) -> None:
    before = gc.get_threshold()
    gc.set_threshold(*thresholds)

    async def run() -> None:
        passes = FullPasses(lambda: 0)
        passes.start()
        few = [[number] for number in range(full_passes.OBJECTS // 2)]
        assert not passes.look()
        many = [[number] for number in range(2 * full_passes.OBJECTS)]
        assert passes.look()
        del few, many
        await passes.stop()

    try:
        asyncio.run(run())
    finally:
        gc.set_threshold(*before)


def test_a_call_counts_until_its_answer() -> None:
    with embedded_llm() as llm, ServerThread(llm, ServerConfig()) as server, ThreadPoolExecutor(1) as pool:
        calls = server.service.http_requests
        for body, status in (({"prompt": "x", "max_tokens": 2}, 200), ({}, 400)):
            with server.held():
                answer = pool.submit(post, server.url, "/v1/completions", body)
                if status == 200:
                    wait_until(lambda: calls.num_running == 1)
            assert answer.result().status_code == status
            wait_until(lambda: not calls.num_running)
        assert calls.counts["/v1/completions", "200"] == 1
