"""Crews: callers take turns, kinds of work do not wait for each other, and too much of it is refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from foreword.server.api_errors import APIError
from foreword.server.crews import CALLER, MOST_OF_ALL, Crew


@contextmanager
def held(crew: Crew) -> Iterator[Callable[[], Coroutine[Any, Any, None]]]:
    """Fills the only thread of a crew until the end; gives a coroutine function that begins it."""
    begun, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert go_on.wait(60)

    async def begin() -> None:
        holding = asyncio.ensure_future(crew.run(hold))
        holding.add_done_callback(lambda _: None)
        await asyncio.to_thread(begun.wait, 60)

    try:
        yield begin
    finally:
        go_on.set()


def as_caller(name: str, crew: Crew, work: Callable[[], Any]) -> asyncio.Task[Any]:
    async def run() -> Any:
        CALLER.set(name)
        return await crew.run(work)

    return asyncio.create_task(run())


def test_callers_take_turns_however_much_one_of_them_asks_for() -> None:
    crew, done = Crew("a", 1, 100), []

    async def run() -> None:
        with held(crew) as begin:
            await begin()
            many = [as_caller("many", crew, lambda n=number: done.append(f"many {n}")) for number in range(50)]
            await asyncio.sleep(0)
            one = as_caller("one", crew, lambda: done.append("one"))
            await asyncio.sleep(0)
        await asyncio.gather(*many, one)
        crew.close()

    asyncio.run(run())
    assert done[:3] == ["many 0", "one", "many 1"]
    assert len(done) == 51


def test_what_one_caller_has_waiting_is_bounded_and_so_is_what_all_have() -> None:
    crew = Crew("a", 1, 2)

    async def refused(name: str) -> bool:
        task = as_caller(name, crew, lambda: None)
        await asyncio.sleep(0)
        if not task.done():
            waiting.append(task)
            return False
        with pytest.raises(APIError) as error:
            await task
        assert error.value.status == 429
        assert int((error.value.headers or {})["Retry-After"]) >= 1
        return True

    waiting: list[asyncio.Task[Any]] = []

    async def run() -> None:
        with held(crew) as begin:
            await begin()
            for caller in range(MOST_OF_ALL):
                assert [await refused(f"{caller}") for _ in range(3)] == [False, False, True]
            assert await refused("another"), "all together have as much as all may have"
            assert (crew.num_running, crew.num_waiting) == (1, 2 * MOST_OF_ALL)
        await asyncio.gather(*waiting)
        crew.close()

    asyncio.run(run())
    assert crew.num_refused == MOST_OF_ALL + 1


def test_work_of_a_caller_that_left_is_not_begun_and_its_place_is_free() -> None:
    crew, done = Crew("a", 1, 4), []

    async def run() -> None:
        with held(crew) as begin:
            await begin()
            tasks = [as_caller("a", crew, lambda n=number: done.append(n)) for number in range(4)]
            await asyncio.sleep(0)
            tasks[1].cancel()
            await asyncio.gather(tasks[1], return_exceptions=True)
            assert crew.num_waiting == 3
        await asyncio.gather(tasks[0], *tasks[2:])
        crew.close()

    asyncio.run(run())
    assert done == [0, 2, 3]


def test_an_error_is_the_callers_and_the_thread_goes_on() -> None:
    def fail() -> None:
        raise SystemExit("no")

    async def run() -> int:
        crew = Crew("a", 1, 4)
        with pytest.raises(RuntimeError, match="SystemExit"):
            await crew.run(fail)
        return await crew.run(lambda: 7)

    assert asyncio.run(run()) == 7
