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
    monkeypatch.setattr(full_passes, "MOST_PASSES", 20)
    num_running = 1

    async def run() -> None:
        nonlocal num_running
        before, cycle = gc.get_threshold(), Cycle()
        lost = weakref.ref(cycle)
        passes = FullPasses(lambda: num_running)
        gc.collect()
        passes.start()
        gc.unfreeze()  # `cycle` is to be lost after the start
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
            more = [[number] for number in range(11_000 * full_passes.MOST_PASSES)]
            assert passes.look(), "calls that never end do not put it off for ever"
            del many, more
        await passes.stop()
        await passes.stop()
        assert gc.get_threshold() == before

    asyncio.run(run())


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
