"""Several engines behind one door: equal bits, hits where the prefix is, and answers that outlive a replica."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest

from doors import expected_in, num_usable, open_reservations, warmth_of
from fleet.local_fleet import Fleet, assert_nothing_is_left, fleet
from foreword.cache import BlockRemoved, BlockStored
from foreword.cluster import RoutingRequest
from foreword.engine import BREAKPOINT, Keep, Mark, Prompt
from foreword.fleet.answering import Acceptance
from foreword.llm import LLM
from foreword.request import SamplingParams
from foreword.server.answer_stream import AnswerStream, Job
from foreword.server.hints import RETAIN
from foreword.server.options import ServerConfig
from foreword.server.records import RequestRecord
from lanes import slow
from live_server import FALCON, MODEL, ServerThread, client, embedded_llm, post, wait_until


@pytest.fixture(scope="module")
def three() -> Iterator[Fleet]:
    with fleet(3, cache_events=True) as found:
        wait_until(lambda: not found.on_loop(found.door.core.unsynced))
        yield found


@pytest.fixture(scope="module")
def alone() -> Iterator[ServerThread]:
    with embedded_llm(num_gpu_blocks_override=256) as llm, ServerThread(llm, ServerConfig()) as server:
        yield server


def long_prompt(topic: int, question: int = 0) -> list[int]:
    return [3 + (topic * 31 + at) % 90 for at in range(160)] + [3 + (question * 7 + at) % 50 for at in range(20)]


def complete(url: str, prompt: Any, **fields: Any) -> Any:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
    answer = post(url, "/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(url: str, prompt: Any, **fields: Any) -> list[Any]:
    """The choices as a stream shows them, its deltas joined: text, log probabilities, how they end."""
    body = {"model": MODEL, "prompt": prompt, "stream": True, **fields}
    found: dict[int, dict[str, Any]] = {}
    with client(url).completions.create(**_for_sdk(body)) as stream:
        for chunk in stream:
            for choice in chunk.choices:
                one = found.setdefault(choice.index, {"text": "", "logprobs": []})
                one["text"] += choice.text
                one["logprobs"] += choice.logprobs.token_logprobs if choice.logprobs else []
                one["end"] = choice.finish_reason or one.get("end")
    return [found[index] for index in sorted(found)]


def _for_sdk(body: dict[str, Any]) -> dict[str, Any]:
    own = {name: body.pop(name) for name in ("guided_regex", "ignore_eos", "structured_outputs") if name in body}
    return {**body, "extra_body": own}


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 24, "ignore_eos": True},
    "seeded": {"temperature": 1.0, "seed": 5, "top_p": 0.9, "max_tokens": 24, "ignore_eos": True},
    "several": {"temperature": 1.0, "seed": 6, "n": 2, "logprobs": 2, "max_tokens": 20, "ignore_eos": True},
    "stop string": {"temperature": 1.0, "seed": 8, "stop": ["e"], "max_tokens": 40, "ignore_eos": True},
    "regex": {
        "temperature": 1.0,
        "seed": 9,
        "structured_outputs": {"regex": "[a-z]{3,20} [0-9]{2,9}"},
        "max_tokens": 40,
    },
    "end at once": {"temperature": 0, "max_tokens": 1},
    "two that end apart": {"temperature": 1.5, "seed": 12, "n": 3, "stop": ["a", "o"], "max_tokens": 30},
    "prompt too": {"temperature": 0, "echo": True, "logprobs": 3, "max_tokens": 12, "ignore_eos": True},
    "penalties": {
        "temperature": 0.8,
        "seed": 3,
        "presence_penalty": 1.0,
        "logit_bias": {"40": 3},
        "max_tokens": 24,
        "ignore_eos": True,
    },
}
QUICK = ("seeded", "regex", "two that end apart")
"""A plain draw, a state beside the tokens, and several answers of one request."""


def test_an_answer_tells_what_its_replica_drafted() -> None:
    asked = {"max_tokens": 40, "temperature": 1, "seed": 7, "ignore_eos": True, "foreword": {"cache": True}}
    with fleet(1, draft_tokens=8) as found:
        complete(found.url, long_prompt(1), **asked)
        again = complete(found.url, long_prompt(1), **asked)
        drafts, counted = again["foreword"]["drafts"], again["usage"]["completion_tokens_details"]
        assert drafts["accepted"]["cache"] > 10, "it repeats the first answer"
        assert sum(drafts["accepted"].values()) == counted["accepted_prediction_tokens"]
        assert sum(drafts["rejected"].values()) == counted["rejected_prediction_tokens"]
        pieces = post(found.url, "/v1/completions", {"prompt": long_prompt(1), **asked, "stream": True}).text
        assert '"drafts":{"accepted":{"cache":' in pieces


@pytest.mark.parametrize("name", SAMPLINGS)
def test_answers_are_those_of_one_engine(name: str, three: Fleet, alone: ServerThread) -> None:
    expected = complete(alone.url, long_prompt(1), **SAMPLINGS[name])["choices"]
    assert complete(three.url, long_prompt(1), **SAMPLINGS[name])["choices"] == expected
    assert [one["text"] for one in streamed(three.url, long_prompt(1), **SAMPLINGS[name])] == [
        one["text"] for one in expected
    ]


@pytest.mark.parametrize("name", [*QUICK, *slow(*(name for name in SAMPLINGS if name not in QUICK))])
def test_killed_in_the_middle_an_answer_goes_on_bit_for_bit(name: str, three: Fleet, alone: ServerThread) -> None:
    sampling, prompt = SAMPLINGS[name], long_prompt(2)
    expected = complete(alone.url, prompt, **sampling)["choices"]
    as_stream = streamed(alone.url, prompt, **sampling)
    before = three.door.counts.deaths
    kills = (0, 1, 4, 9)
    for kill_after in kills:
        three.link.deaths[:] = [kill_after]
        assert streamed(three.url, prompt, **sampling) == as_stream, kill_after
        three.link.deaths[:] = [kill_after]
        assert complete(three.url, prompt, **sampling)["choices"] == expected, kill_after
        three.link.deaths.clear()
    assert three.door.counts.deaths > before
    assert_nothing_is_left(three)


def test_a_conversation_that_thinks_and_calls_goes_on_too(three: Fleet, alone: ServerThread) -> None:
    body = {"model": MODEL, "messages": FALCON, "max_tokens": 30, "temperature": 0}
    expected = post(alone.url, "/v1/chat/completions", body).json()
    three.link.deaths[:] = [1]
    found = post(three.url, "/v1/chat/completions", body).json()
    assert found["choices"] == expected["choices"]
    assert "4821" in found["choices"][0]["message"]["content"]
    assert_nothing_is_left(three)


def test_what_was_cached_is_told_as_at_first(three: Fleet) -> None:
    """The second replica finds other tokens cached; the client was told of the first lookup already."""
    prompt = long_prompt(3)
    complete(three.url, prompt)
    three.link.deaths[:] = [2]
    usage = complete(three.url, prompt, max_tokens=12, ignore_eos=True)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 160
    assert usage["completion_tokens"] == 12


def test_a_request_that_killed_two_replicas_is_not_tried_on_a_third(three: Fleet) -> None:
    three.link.deaths[:] = [1, 1]
    requests = three.link.requests.total()
    body = {"model": MODEL, "prompt": long_prompt(4), "max_tokens": 12, "ignore_eos": True}
    answer = post(three.url, "/v1/completions", body)
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "replicas_died"
    assert three.link.requests.total() == requests + 2
    assert_nothing_is_left(three)


def test_replicas_that_were_dead_before_a_request_was_sent_are_not_blamed_on_it(
    three: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaths, given_up = three.door.counts.deaths, three.door.counts.given_up
    three.link.deaths[:] = [0, 0]
    assert complete(three.url, long_prompt(90), ignore_eos=True)["usage"]["completion_tokens"] == 4
    assert three.door.counts.deaths == deaths + 2
    assert three.door.counts.given_up == given_up
    monkeypatch.setattr("foreword.fleet.routed.MAX_SENT_DEATHS", 2)
    three.link.deaths[:] = [0, 0]
    answer = post(three.url, "/v1/completions", {"model": MODEL, "prompt": long_prompt(91)})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "replicas_died")
    assert_nothing_is_left(three)


def test_the_only_replica_is_tried_again_after_the_network_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreword.fleet.routed.AVOIDED_S", 0.05)
    monkeypatch.setattr("foreword.fleet.routed.READY_S", 20.0)
    with fleet(1) as one:
        one.link.unreachable["a"] = 3
        assert complete(one.url, long_prompt(1), ignore_eos=True)["usage"]["completion_tokens"] == 4
        assert one.link.requests["a"] == 4
        assert one.door.counts.deaths == 0
        assert_nothing_is_left(one)


def test_a_request_that_tries_again_after_all_were_accepted_waits_for_nobody() -> None:
    async def run() -> None:
        accepted = Acceptance(2)
        first = asyncio.create_task(accepted.wait())
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        again = asyncio.create_task(accepted.wait())  # it counts once
        await asyncio.sleep(0)
        assert not again.done()
        assert await accepted.wait()
        again.cancel()  # its replica is lost just now
        with pytest.raises(asyncio.CancelledError):
            await again
        assert not await asyncio.wait_for(accepted.wait(), 60)

    asyncio.run(run())


def test_a_request_goes_to_the_replica_that_has_its_prefix(three: Fleet) -> None:
    complete(three.url, long_prompt(5))
    wait_until(lambda: three.on_loop(lambda: not expected_in(three.door.core)))
    before = three.link.requests.copy()
    for question in range(1, 6):
        answer = post(three.url, "/v1/completions", {"model": MODEL, "prompt": long_prompt(5, question)})
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 160
        route = dict(part.split("=", 1) for part in answer.headers["x-foreword-route"].split())
        assert route["reason"] == "hit"
        assert route["hit"].startswith("160/")
    used = three.link.requests - before
    assert sorted(used.values()) == [5], "all went where the prefix was"
    assert_nothing_is_left(three)


def test_hits_are_those_of_one_pool_and_work_is_spread_evenly(alone: ServerThread) -> None:
    """One request after the other: nobody has a backlog, so the caches alone decide."""
    found: dict[str, int] = {}
    httpx.post(f"{alone.url}/reset_prefix_cache")
    with fleet(3) as three:
        wait_until(lambda: not three.on_loop(three.door.core.unsynced))
        for url in (alone.url, three.url):
            found[url] = sum(
                complete(url, long_prompt(topic, question))["usage"]["prompt_tokens_details"]["cached_tokens"]
                for question in range(2)
                for topic in range(12)
            )
        assert found[three.url] >= 0.95 * found[alone.url]
        assert max(three.link.requests.values()) <= 1.25 * 24 / 3, three.link.requests


@pytest.mark.slow
def test_a_flood_of_one_system_prompt_is_spread_and_everybody_holds_it() -> None:
    """Replicas of its own: one rate was measured, which the others are taken to have."""
    prompts = [long_prompt(6, question) for question in range(1, 97)]
    with fleet(3) as found:
        wait_until(lambda: not found.on_loop(found.door.core.unsynced))
        complete(found.url, long_prompt(6))
        wait_until(lambda: found.link.running == 0)
        before = found.link.requests.copy()
        found.link.hold()  # until all are routed: what counts is the reservations, not how fast this machine is
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = [pool.submit(complete, found.url, prompt, max_tokens=4, ignore_eos=True) for prompt in prompts]
            wait_until(lambda: (found.link.requests - before).total() == len(prompts))
            found.on_loop(found.link.go_on)
            assert all(one.result()["usage"]["completion_tokens"] == 4 for one in answers)
        used = found.link.requests - before
        assert max(used.values()) <= 1.25 * len(prompts) / 3, used
        assert_nothing_is_left(found)
        for llm in found.link.llms.values():
            assert llm.explain({"prompt_token_ids": long_prompt(6)}).num_hit_tokens >= 160


def held_by(llm: LLM) -> set[bytes]:
    """The keys of all findable blocks, from the engine's own log of everything that ever happened."""
    held: set[bytes] = set()
    for number, numbered in enumerate(llm.take_cache_events()):
        assert numbered.number == number, "the log has forgotten something"
        match numbered.event:
            case BlockStored(block_hashes=keys):
                held.update(keys)
            case BlockRemoved(block_hashes=keys):
                held.difference_update(keys)
            case _:
                held.clear()
    return held


def test_mirrors_are_the_pools(three: Fleet) -> None:
    for question in range(10):
        complete(three.url, long_prompt(question, question))
    assert_nothing_is_left(three)
    for name in three.link.llms:
        held = held_by(three.link.llms[name])
        wait_until(
            lambda name=name, held=held: three.on_loop(lambda: three.door.core.mirror(name).parents.keys() == held)
        )


def test_clients_that_leave_leave_nothing(three: Fleet) -> None:
    rng = random.Random(3)

    async def leave_early(number: int) -> None:
        body = {"model": MODEL, "prompt": long_prompt(number), "max_tokens": 60, "ignore_eos": True, "stream": True}
        async with httpx.AsyncClient(timeout=60) as session:
            try:
                async with asyncio.timeout(rng.random() * 0.3):
                    async with session.stream("POST", f"{three.url}/v1/completions", json=body) as answer:
                        async for _ in answer.aiter_bytes():
                            pass
            except TimeoutError:
                pass

    async def all_of_them() -> None:
        await asyncio.gather(*(leave_early(number) for number in range(40)))

    asyncio.run(all_of_them())
    assert_nothing_is_left(three)


def test_a_request_that_cannot_be_sent_reserves_nothing(three: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> bytes:
        raise RuntimeError("a defect")

    monkeypatch.setattr(three.door._codec, "encode", fail)
    body = {"model": MODEL, "prompt": long_prompt(3), "max_tokens": 2}
    assert httpx.post(f"{three.url}/v1/completions", json=body, timeout=60).status_code == 500
    assert_nothing_is_left(three)


def test_wrong_requests_reach_no_replica(three: Fleet) -> None:
    before = three.link.requests.total()
    for wrong, told in (
        ({"prompt": [10**9]}, "out of range"),
        ({"prompt": [1] * 9000}, "tokens"),
        ({"prompt": [5], "structured_outputs": {"regex": "("}}, "regex"),
    ):
        answer = post(three.url, "/v1/completions", {"model": MODEL, **wrong})
        assert answer.status_code == 400, wrong
        assert told in answer.json()["error"]["message"]
    assert three.link.requests.total() == before
    assert_nothing_is_left(three)


def test_several_prompts_of_one_call_may_go_to_several_replicas(three: Fleet, alone: ServerThread) -> None:
    prompts = [long_prompt(topic) for topic in range(20, 26)]
    fields = {"temperature": 1.0, "seed": 4, "n": 2, "max_tokens": 6}
    expected = complete(alone.url, prompts, **fields)["choices"]
    three.link.deaths[:] = [2]
    assert complete(three.url, prompts, **fields)["choices"] == expected
    assert_nothing_is_left(three)


def test_several_prompts_of_one_stream_are_accepted_before_their_first_tokens(
    three: Fleet, alone: ServerThread
) -> None:
    """A replica tells at once that it has queued a prompt and what its first token is."""
    prompts = [long_prompt(topic) for topic in range(60, 64)]
    assert streamed(three.url, prompts, **SAMPLINGS["seeded"]) == streamed(alone.url, prompts, **SAMPLINGS["seeded"])
    assert_nothing_is_left(three)


def test_operators_see_replicas_decisions_and_metrics(three: Fleet, alone: ServerThread) -> None:
    answer = complete(three.url, long_prompt(7))
    [decision] = httpx.get(f"{three.url}/v1/cluster/explain?request_id={answer['id']}").json()["data"]
    assert decision["prompt_tokens"] == 180
    assert decision["delivered_tokens"] == answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert {one["replica"] for one in decision["candidates"]} == {"a", "b", "c"}
    cluster = httpx.get(f"{three.url}/v1/cluster").json()
    assert [one["name"] for one in cluster["replicas"]] == ["a", "b", "c"]
    assert all(one["is_synced"] for one in cluster["replicas"])
    text = httpx.get(f"{three.url}/metrics").text
    assert 'foreword_replica_synced{model_name="foreword-demo",replica="a"} 1.0' in text
    assert "foreword_routing_tokens_total" in text
    assert httpx.get(f"{three.url}/v1/cluster/explain?request_id=cmpl-nosuch").status_code == 404
    assert httpx.get(f"{three.url}/v1/cluster/explain?limit=0").status_code == 400
    assert httpx.get(f"{alone.url}/v1/cluster").json()["error"]["code"] == "no_cluster"


def test_the_cache_api_asks_all_replicas(three: Fleet) -> None:
    for topic in range(30, 33):
        complete(three.url, long_prompt(topic))
    wait_until(lambda: three.link.running == 0)
    found = post(three.url, "/v1/cache/explain", {"prompt": long_prompt(31)}).json()
    assert found["hit_tokens"] >= 160
    cache = httpx.get(f"{three.url}/v1/cache").json()
    assert cache["statistics"]["blocks"]["total"] == 3 * 256
    assert cache["tree"]
    pin = post(three.url, "/v1/cache/entries", {"prompt": long_prompt(31), "ttl_s": 60}).json()
    listed = httpx.get(f"{three.url}/v1/cache/entries").json()["data"]
    assert [one["id"] for one in listed] == [pin["id"]]
    assert listed[0]["kept_tokens"] == pin["kept_tokens"] > 0
    assert httpx.delete(f"{three.url}/v1/cache/entries/{pin['id']}").json()["deleted"]
    assert httpx.get(f"{three.url}/v1/cache/entries").json()["data"] == []


def test_sessions_are_closed_and_hints_are_carried_out_where_their_blocks_are(three: Fleet) -> None:
    for topic in (81, 82):  # which no other test here asks about
        complete(three.url, long_prompt(topic), session_id="over replicas")
    action = {"action_id": "a", "action_version": "1.0", "payload": {"session_id": "over replicas", "ttl_seconds": 9}}
    envelope = {"protocol_version": "0.1", "message_id": "m", "actions": [{**action, "action_type": "kv.retain"}]}
    [told] = post(three.url, "/v1/cache/hints", {"kv_hints": envelope}).json()["actions"]
    assert (told["outcome"], told["kept_tokens"] >= 160) == ("accepted", True)
    assert httpx.delete(f"{three.url}/v1/cache/entries/{told['entry']}").status_code == 200
    closed = httpx.delete(f"{three.url}/v1/cache/sessions/over%20replicas").json()
    assert closed["blocks_given_up"] >= 2 * 10, "both prompts' blocks"
    assert httpx.delete(f"{three.url}/v1/cache/sessions/over%20replicas").status_code == 404
    of_request = {**action, "action_type": "kv.demote", "payload": {"session_id": "over"}}
    demote = {**envelope, "actions": [of_request]}
    for topic in (83, 84, 85):
        complete(three.url, long_prompt(topic), session_id="over", **({"kv_hints": demote} if topic == 85 else {}))
    session = f"{three.url}/v1/cache/sessions/over"
    wait_until(lambda: httpx.get(session).status_code == 404)
    assert httpx.delete(session).status_code == 404, "the hint closed it in every replica"


def test_marks_of_hints_do_not_say_where_a_prompt_is_stable(three: Fleet) -> None:
    token_ids = np.arange(5, 105, dtype=np.int32) % 50
    marks = (Mark(32, Keep(9.0, BREAKPOINT)), Mark(96, Keep(9.0, RETAIN)))
    job = Job(
        RequestRecord("r", "r", "t", "x", token_ids), Prompt(token_ids, marks=marks), SamplingParams(max_tokens=1)
    )
    [request] = three.on_loop(lambda: three.door._checked(AnswerStream(three.door, [job], whole=True)))
    assert request.routing.stable_blocks == 32 // 16


def test_without_replicas_requests_are_refused_and_health_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreword.fleet.routed.READY_S", 0.2)
    with fleet(2) as two:
        for name in ("a", "b"):
            two.on_loop(lambda name=name: two.door.leave(name))
        answer = post(two.url, "/v1/completions", {"model": MODEL, "prompt": [5, 6]})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
        health = httpx.get(f"{two.url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "waiting")


def test_a_request_that_comes_while_there_is_no_replica_waits_for_one() -> None:
    with fleet(2) as two, ThreadPoolExecutor() as pool:
        facts = two.on_loop(lambda: two.link.replicas["b"].facts("127.0.0.1"))
        for name in ("a", "b"):
            two.on_loop(lambda name=name: two.door.leave(name))
        answer = pool.submit(complete, two.url, long_prompt(1), ignore_eos=True)
        wait_until(lambda: two.on_loop(lambda: two.door.num_choices) == 1)
        two.on_loop(lambda: two.door.join("b", facts))
        assert answer.result(60)["usage"]["completion_tokens"] == 4
        assert two.on_loop(lambda: open_reservations(two.door.core)) == []


def test_an_answer_waits_for_a_replica_that_joins() -> None:
    with fleet(2) as two:
        expected = complete(two.url, long_prompt(1), max_tokens=10, ignore_eos=True)["choices"]
        facts = two.on_loop(lambda: two.link.replicas["b"].facts("127.0.0.1"))
        two.on_loop(lambda: two.door.leave("b"))
        two.link.deaths[:] = [0]
        found: list[Any] = []
        asking = threading.Thread(
            target=lambda: found.append(complete(two.url, long_prompt(1), max_tokens=10, ignore_eos=True))
        )
        asking.start()
        wait_until(lambda: two.door.counts.deaths == 1)
        assert not found, "the only replica that is left was lost"
        two.on_loop(lambda: two.door.join("b", facts))
        asking.join(60)
        assert found[0]["choices"] == expected
        assert_nothing_is_left(two)


def test_a_new_replica_starts_warm_and_one_that_leaves_hands_its_prefixes_on() -> None:
    with fleet(3) as found:
        facts = found.on_loop(lambda: found.link.replicas["c"].facts("127.0.0.1"))
        found.on_loop(lambda: found.door.leave("c"))
        for topic in range(3):
            for question in range(4):
                complete(found.url, long_prompt(topic, question))
        found.on_loop(lambda: found.door.join("c", facts))
        core = found.door.core
        wait_until(lambda: found.on_loop(lambda: num_usable(core)) == 3)
        wait_until(lambda: found.on_loop(lambda: len(core.mirror("c").parents)) >= 30)  # three topics of 160 tokens
        for name in ("c", "b"):
            found.on_loop(lambda name=name: found.door.leave(name))
        wait_until(lambda: found.on_loop(lambda: len(core.mirror("a").parents)) >= 30)
        before = found.link.requests["a"]
        for topic in range(3):
            usage = complete(found.url, long_prompt(topic, 9))["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] >= 160
        assert found.link.requests["a"] == before + 3
        counts = found.on_loop(core.total_counts)
        assert counts.decisions == counts.delivered == 15, "what replicas hand over is no client's request"
        assert_nothing_is_left(found)


def test_a_replica_that_warms_up_takes_requests_when_no_other_can() -> None:
    with fleet(2) as two:
        facts = two.on_loop(lambda: two.link.replicas["b"].facts("127.0.0.1"))
        two.on_loop(lambda: two.door.leave("b"))
        for question in range(3):
            complete(two.url, long_prompt(1, question))
        two.link.holds_warm_ups = True
        two.on_loop(lambda: two.door.join("b", facts))
        assert two.on_loop(lambda: num_usable(two.door.core)) == 1
        two.on_loop(lambda: two.door.leave("a"))
        wait_until(lambda: two.on_loop(lambda: two.door.core.is_any_usable))
        assert complete(two.url, long_prompt(1))["usage"]["completion_tokens"]
        two.link.holds_warm_ups = False
        assert_nothing_is_left(two)


@pytest.mark.slow
def test_a_replica_whose_warm_up_ends_before_it_begins_takes_requests() -> None:
    with fleet(2) as two:
        facts = two.on_loop(lambda: two.link.replicas["b"].facts("127.0.0.1"))
        two.on_loop(lambda: two.door.leave("b"))
        for question in range(3):
            complete(two.url, long_prompt(1, question))
        two.link.holds_warm_ups = True
        two.on_loop(lambda: (two.door.join("b", facts), two.door.leave("a")))
        wait_until(lambda: two.on_loop(lambda: two.door.core.is_any_usable))
        assert not warmth_of(two.door).is_warming("b")


def test_a_request_waits_for_its_front_s_turn_and_reserves_nothing_meanwhile(
    three: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, asked = three.door.core, list[str]()

    def wait_s(routing: RoutingRequest, clock_s: float) -> float:
        asked.append(routing.request_id)
        return 1.0

    monkeypatch.setattr(core, "wait_s", wait_s)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(complete, three.url, long_prompt(77))
        wait_until(lambda: asked)
        assert not three.on_loop(lambda: open_reservations(core))
        assert answer.result()["choices"]
    assert len(asked) == 1
    assert_nothing_is_left(three)
