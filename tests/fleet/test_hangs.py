"""Replicas that hang, fail or come again: nobody waits for them without a limit, and no request is blamed for them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from doors import (
    begin_stillness,
    end_stillness,
    fail_engine,
    make_ready,
    missed_by,
    num_usable,
    open_reservations,
    thread_of,
    warmth_of,
)
from fleet.local_fleet import Fleet, assert_nothing_is_left, fleet
from fleet.test_routed import SAMPLINGS, complete, long_prompt, streamed
from foreword.engine import Prompt
from foreword.fleet.pulse import Pulse
from live_server import post, wait_until


@pytest.fixture(scope="module")
def three() -> Iterator[Fleet]:
    with fleet(3) as found:
        yield found


@pytest.mark.slow
def test_a_prefix_that_nobody_computes_is_handed_over_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreword.fleet.warmth.WARM_S", 0.2)
    with fleet(2) as two:
        two.on_loop(lambda: two.door.leave("b"))
        for question in range(4):
            complete(two.url, long_prompt(1, question))
        facts = two.on_loop(lambda: two.link.replicas["b"].facts("127.0.0.1"))
        two.link.holds_warm_ups = True
        two.on_loop(lambda: two.door.join("b", facts))
        wait_until(lambda: two.on_loop(lambda: num_usable(two.door.core)) == 2)  # without its prefixes
        before = two.link.requests["b"]
        two.on_loop(lambda: two.door.leave("a"))
        wait_until(lambda: two.link.requests["b"] > before)
        wait_until(lambda: two.on_loop(lambda: not open_reservations(two.door.core)))


def test_a_replica_that_comes_again_while_it_warms_up_has_one_life_at_a_time(caplog: pytest.LogCaptureFixture) -> None:
    with fleet(2) as two:
        facts = two.on_loop(lambda: two.link.replicas["b"].facts("127.0.0.1"))
        two.on_loop(lambda: two.door.leave("b"))
        for question in range(3):
            complete(two.url, long_prompt(1, question))
        two.link.holds_warm_ups = True
        warmth = warmth_of(two.door)
        for _ in range(2):
            two.on_loop(lambda: two.door.join("b", facts))
            two.on_loop(lambda: two.door.leave("b"))
            wait_until(lambda: two.on_loop(lambda: not warmth._warming and not warmth._tasks))
        two.on_loop(lambda: two.door.join("b", facts))
        assert two.on_loop(lambda: num_usable(two.door.core)) == 1, "its earlier lives made nothing ready"
        two.on_loop(lambda: two.door.leave("a"))
        wait_until(lambda: two.on_loop(lambda: two.door.core.is_any_usable))
    assert "exception" not in caplog.text


def test_replicas_whose_engine_has_failed_are_passed_over_and_no_request_is_blamed() -> None:
    """Serve takes a while to replace them; to each of them, requests look like its cause, which they cannot be."""
    with fleet(3) as found:
        for name in ("a", "b"):
            thread = thread_of(found.link.replicas[name])
            found.on_loop(lambda thread=thread: fail_engine(thread, "the device is on fire"))
            wait_until(lambda thread=thread: thread.failure is not None)
            assert "on fire" in str(found.link.replicas[name].complaint())
        assert found.link.replicas["c"].complaint() is None
        for topic in range(4):
            assert complete(found.url, long_prompt(topic), ignore_eos=True)["usage"]["completion_tokens"] == 4
        assert found.door.counts.deaths == 0
        cache = httpx.get(f"{found.url}/v1/cache", timeout=60)
        assert cache.json()["statistics"]["blocks"]["total"] == 256, "only the third one's count"
        assert found.on_loop(lambda: open_reservations(found.door.core)) == []


@pytest.mark.slow
def test_a_replica_that_never_answers_a_call_keeps_nobody_waiting(
    monkeypatch: pytest.MonkeyPatch, three: Fleet
) -> None:
    monkeypatch.setattr("foreword.fleet.calls.CALL_S", 0.5)
    complete(three.url, long_prompt(40))
    three.link.mute = {"a"}
    answer = post(three.url, "/v1/cache/explain", {"prompt": long_prompt(40)})
    assert answer.status_code == 200
    three.link.mute = {"a", "b", "c"}
    answer = post(three.url, "/v1/cache/explain", {"prompt": long_prompt(40)})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")
    three.link.mute = set()


@pytest.mark.parametrize("how", ["it stands still", "it does not answer", "it is busy when it goes on"])
def test_a_replica_makes_up_for_a_reset_that_it_missed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if how == "it does not answer":
        monkeypatch.setattr("foreword.fleet.calls.CALL_S", 0.5)
    with fleet(2) as two:
        complete(two.url, long_prompt(1))
        assert_nothing_is_left(two)
        [name] = two.link.requests
        prompt = Prompt(np.array(long_prompt(1), np.int32))

        def has_prefix() -> bool:
            """Asked of the engine's thread, which may be making the change."""
            look = thread_of(two.link.replicas[name]).call(lambda engine: engine.explain(prompt).num_hit_tokens)
            return two.server.start(look).result(60) > 0

        assert has_prefix()
        if how == "it does not answer":
            two.link.mute = {name}
        else:
            two.on_loop(lambda: begin_stillness(two.door, name))
        assert httpx.post(f"{two.url}/reset_prefix_cache", timeout=60).status_code == 200
        assert has_prefix()
        if how == "it is busy when it goes on":
            two.link.num_refusals = 2
        two.link.mute = set()
        usable = two.on_loop(lambda: (end_stillness(two.door, name), num_usable(two.door.core))[-1])
        if how != "it does not answer":
            assert usable == 1, "it has something to do first"
        wait_until(lambda: not has_prefix())
        wait_until(lambda: two.on_loop(lambda: num_usable(two.door.core)) == 2)
        assert not missed_by(two.door)
        assert_nothing_is_left(two)


def test_an_engine_that_stands_still_is_complained_of_until_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, three: Fleet
) -> None:
    """Its process lives and answers; only its engine makes no step."""
    replica = three.link.replicas["a"]
    three.on_loop(lambda: [three.door.core.retire(name) for name in "bc"])
    complete(three.url, long_prompt(50))  # an engine without a step may be compiling
    three.on_loop(lambda: [make_ready(three.door, name) for name in "bc"])
    assert_nothing_is_left(three)
    monkeypatch.setattr("foreword.fleet.replica.LEAST_STILL_S", 0.5)  # the others have nothing to do
    monkeypatch.setattr("foreword.fleet.replica.STEPS_STILL", 0.0)
    time.sleep(1.0)
    assert replica.complaint() is None, "it has nothing to do"
    reached, go_on = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        reached.set()
        assert go_on.wait(60)

    three.server.start(thread_of(replica).call(hold))
    assert reached.wait(60)
    waiting = three.server.start(thread_of(replica).call(lambda _: 5))
    wait_until(lambda: replica.complaint() is not None)
    assert "has made no step for" in str(replica.complaint())
    go_on.set()
    assert waiting.result(60) == 5
    wait_until(lambda: replica.complaint() is None)


@pytest.mark.parametrize("what", ["process", "engine"])
def test_streams_of_a_replica_that_stands_still_go_on_elsewhere_and_it_is_taken_back(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is stopped, or its engine makes no step; later it goes on where it was, and nobody hears of that."""
    monkeypatch.setattr("foreword.fleet.pulse.LOOK_S", 0.05)
    monkeypatch.setattr("foreword.fleet.pulse.ANSWER_S", 0.5)
    sampling = {**SAMPLINGS["seeded"], "max_tokens": 60}
    with fleet(2) as two, ThreadPoolExecutor(6) as pool:
        for name in "ab":  # an engine without a step may be compiling
            two.on_loop(lambda name=name: two.door.core.retire(name))
            expected = streamed(two.url, long_prompt(1), **sampling)
            two.on_loop(lambda name=name: make_ready(two.door, name))
        if what == "process":
            two.link.stops_after = 5
            running = [pool.submit(streamed, two.url, long_prompt(1), **sampling) for _ in range(6)]
            wait_until(lambda: two.link.stopped)
            [still] = two.link.stopped
            go_on = two.link.stopped.clear
        else:
            still, holding = "a", threading.Event()
            thread = thread_of(two.link.replicas[still])
            # The other one keeps its patience: on a busy machine a step of its may take longer than this.
            monkeypatch.setattr(
                two.link.replicas[still], "complaint", lambda: "no step" if thread.still_s() > 0.5 else None
            )
            held = thread.call(lambda _: holding.wait(60))
            two.server.start(held)
            two.on_loop(lambda: two.door.core.retire("b"))  # so that all begin at the one that is held
            running = [pool.submit(streamed, two.url, long_prompt(1), **sampling) for _ in range(6)]
            wait_until(lambda: two.link.requests[still] >= 6)
            two.on_loop(lambda: make_ready(two.door, "b"))
            go_on = holding.set
        assert all(one.result(60) == expected for one in running)
        [told] = [one for one in httpx.get(f"{two.url}/v1/cluster").json()["replicas"] if one["complaint"]]
        assert told["name"] == still
        assert f'foreword_replica_still{{model_name="foreword-demo",replica="{still}"}} 1.0' in metrics(two.url)
        before = two.link.requests[still]
        complete(two.url, long_prompt(2))
        assert two.link.requests[still] == before
        go_on()
        wait_until(lambda: two.on_loop(lambda: num_usable(two.door.core)) == 2)
        assert two.door.counts.deaths == 0
        assert_nothing_is_left(two)


def metrics(url: str) -> str:
    return httpx.get(f"{url}/metrics", timeout=60).text


@pytest.mark.slow
def test_the_only_replica_that_was_stopped_goes_on_with_its_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where several prompts of one call wait for each other, and one is asked only while it keeps some waiting."""
    monkeypatch.setattr("foreword.fleet.pulse.LOOK_S", 0.05)
    monkeypatch.setattr("foreword.fleet.pulse.ANSWER_S", 0.3)
    prompts, sampling = [long_prompt(topic) for topic in range(4)], {**SAMPLINGS["several"], "max_tokens": 40}
    with fleet(1) as one, ThreadPoolExecutor(2) as pool:
        expected = streamed(one.url, prompts, **sampling)
        wait_until(lambda: not one.on_loop(lambda: one.door.pulse._waiting))
        asked = one.link.questions["a"]
        time.sleep(0.5)
        assert one.link.questions["a"] <= asked + 1
        for stops_after in (0, 3):
            one.link.stops_after = stops_after
            running = pool.submit(streamed, one.url, prompts, **sampling)
            wait_until(lambda: one.on_loop(lambda: bool(one.door.pulse.still)))
            new = pool.submit(complete, one.url, long_prompt(9))
            one.link.stopped.clear()
            assert running.result(60) == expected
            assert new.result(60)["choices"]
        assert_nothing_is_left(one)


class HeldUp:
    """A link on an event loop that is held up while the first question is under way, so that its time is over."""

    def __init__(self) -> None:
        self.num_questions = 0

    async def complaint(self, replica: str) -> str | None:
        self.num_questions += 1
        if self.num_questions == 1:
            time.sleep(0.6)
            await asyncio.Event().wait()
        return None


def test_a_front_that_was_held_up_itself_says_nothing_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreword.fleet.pulse.LOOK_S", 0.01)
    monkeypatch.setattr("foreword.fleet.pulse.ANSWER_S", 0.1)
    monkeypatch.setattr("foreword.fleet.pulse.LATE_S", 0.2)
    link, told = HeldUp(), list[str]()

    async def run() -> None:
        pulse = Pulse(link, told.append, told.append)  # type: ignore[arg-type]
        pulse.follow("a")
        async with pulse.wait_for("a"):
            while link.num_questions < 3:
                await asyncio.sleep(0.01)
        pulse.stop()

    asyncio.run(run())
    assert not told
