"""Replicas that hang, fail or come again: nobody waits for them without a limit, and no request is blamed for them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from fleet.local_fleet import Fleet, assert_nothing_is_left, fleet
from fleet.test_routed import complete, long_prompt
from live_server import post, wait_until


@pytest.fixture(scope="module")
def three() -> Iterator[Fleet]:
    with fleet(3) as found:
        yield found


def test_a_prefix_that_nobody_computes_is_handed_over_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreword.fleet.warmth.WARM_S", 0.2)
    with fleet(2) as two:
        two.on_loop(lambda: two.door.leave("b"))
        for question in range(4):
            complete(two.url, long_prompt(1, question))
        facts = two.on_loop(lambda: two.link.replicas["b"].facts("127.0.0.1"))
        two.link.holds_warm_ups = True
        two.on_loop(lambda: two.door.join("b", facts))
        wait_until(lambda: two.on_loop(lambda: two.door.core._usable.bit_count()) == 2)  # without its prefixes
        before = two.link.requests["b"]
        two.on_loop(lambda: two.door.leave("a"))
        wait_until(lambda: two.link.requests["b"] > before)
        wait_until(lambda: two.on_loop(lambda: not two.door.core._loads.open))


def test_a_replica_that_comes_again_while_it_warms_up_has_one_life_at_a_time(caplog: pytest.LogCaptureFixture) -> None:
    with fleet(2) as two:
        facts = two.on_loop(lambda: two.link.replicas["b"].facts("127.0.0.1"))
        two.on_loop(lambda: two.door.leave("b"))
        for question in range(3):
            complete(two.url, long_prompt(1, question))
        two.link.holds_warm_ups = True
        warmth = two.door._warmth
        for _ in range(2):
            two.on_loop(lambda: two.door.join("b", facts))
            two.on_loop(lambda: two.door.leave("b"))
            wait_until(lambda: two.on_loop(lambda: not warmth._warming and not warmth._tasks))
        two.on_loop(lambda: two.door.join("b", facts))
        assert two.on_loop(lambda: two.door.core._usable.bit_count()) == 1, "its earlier lives made nothing ready"
        two.on_loop(lambda: two.door.leave("a"))
        wait_until(lambda: two.on_loop(lambda: two.door.core.is_any_usable))
    assert "exception" not in caplog.text


def test_replicas_whose_engine_has_failed_are_passed_over_and_no_request_is_blamed() -> None:
    """Serve takes a while to replace them; to each of them, requests look like its cause, which they cannot be."""
    with fleet(3) as found:
        for name in ("a", "b"):
            thread = found.link.replicas[name]._thread
            found.on_loop(lambda thread=thread: thread._commands.put(lambda: thread._fail("the device is on fire")))
            wait_until(lambda thread=thread: thread.failure is not None)
            assert "on fire" in str(found.link.replicas[name].complaint())
        assert found.link.replicas["c"].complaint() is None
        for topic in range(4):
            assert complete(found.url, long_prompt(topic), ignore_eos=True)["usage"]["completion_tokens"] == 4
        assert found.door.counts.deaths == 0
        cache = httpx.get(f"{found.url}/v1/cache", timeout=60)
        assert cache.json()["statistics"]["blocks"]["total"] == 256, "only the third one's count"
        assert found.on_loop(lambda: list(found.door.core._loads.open)) == []


def test_a_replica_that_never_answers_a_call_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, three: Fleet
) -> None:
    monkeypatch.setattr("foreword.fleet.routed.CALL_S", 0.5)
    complete(three.url, long_prompt(40))
    three.link.mute = {"a"}
    answer = post(three.url, "/v1/cache/explain", {"prompt": long_prompt(40)})
    assert answer.status_code == 200
    three.link.mute = {"a", "b", "c"}
    answer = post(three.url, "/v1/cache/explain", {"prompt": long_prompt(40)})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
    three.link.mute = set()


def test_an_engine_that_stands_still_is_complained_of_until_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, three: Fleet
) -> None:
    """Its process lives and answers; only its engine makes no step."""
    monkeypatch.setattr("foreword.fleet.replica.LEAST_STILL_S", 0.5)
    monkeypatch.setattr("foreword.fleet.replica.STEPS_STILL", 0.0)
    replica = three.link.replicas["a"]
    complete(three.url, [long_prompt(50), long_prompt(51), long_prompt(52)])
    assert_nothing_is_left(three)
    time.sleep(1.0)
    assert replica.complaint() is None, "it has nothing to do"
    reached, go_on = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        reached.set()
        assert go_on.wait(60)

    loop = three.server._loop
    assert loop is not None
    asyncio.run_coroutine_threadsafe(replica._thread.call(hold), loop)
    assert reached.wait(60)
    waiting = asyncio.run_coroutine_threadsafe(replica._thread.call(lambda _: 5), loop)
    wait_until(lambda: replica.complaint() is not None)
    assert "has made no step for" in str(replica.complaint())
    go_on.set()
    assert waiting.result(60) == 5
    wait_until(lambda: replica.complaint() is None)
