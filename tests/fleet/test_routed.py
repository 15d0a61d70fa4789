"""Several engines behind one door: equal bits, hits where the prefix is, and answers that outlive a replica."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs foreword[cluster]")

from fleet.local_fleet import Fleet, fleet
from foreword.cluster import RoutingCore
from foreword.llm import LLM
from live_server import MODEL, embedded_llm, post, wait_until


@pytest.fixture(scope="module")
def three() -> Iterator[Fleet]:
    with fleet(3) as found:
        wait_until(lambda: not found.on_loop(found.door.core.unsynced))
        yield found


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    with embedded_llm(num_gpu_blocks_override=256) as llm:
        yield llm


def assert_nothing_is_left(found: Fleet) -> None:
    core: RoutingCore = found.door.core
    wait_until(lambda: found.link.running == 0 and found.door.num_choices == 0)
    assert not found.on_loop(lambda: list(core._loads.open)), "a reservation leaked"
    for llm in found.link.llms.values():
        assert not llm.engine.has_unfinished_requests()
        llm.engine.check_integrity()


def long_prompt(topic: int, question: int = 0) -> list[int]:
    return [3 + (topic * 31 + at) % 90 for at in range(160)] + [3 + (question * 7 + at) % 50 for at in range(20)]


def complete(found: Fleet, prompt: list[int], **fields: Any) -> Any:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
    answer = post(found.url, "/v1/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_request_goes_to_the_replica_that_has_its_prefix(three: Fleet) -> None:
    before = dict(three.link.requests)
    complete(three, long_prompt(1))
    wait_until(lambda: three.on_loop(lambda: three.door.core.counts.prompt_tokens))
    for question in range(1, 6):
        usage = complete(three, long_prompt(1, question))["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 160
    used = {name: count - before.get(name, 0) for name, count in three.link.requests.items()}
    assert sorted(used.values(), reverse=True)[0] == 6, "all went where the prefix was"
    assert_nothing_is_left(three)


SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 5, "top_p": 0.9},
    "several": {"temperature": 1.0, "seed": 6, "n": 2, "logprobs": 2},
    "stop": {"temperature": 1.0, "seed": 8, "stop": ["e"]},
    "regex": {"temperature": 1.0, "seed": 9, "guided_regex": "[a-z]{3,20} [0-9]{2,9}"},
    "penalties": {"temperature": 0.8, "seed": 3, "presence_penalty": 1.0, "logit_bias": {"40": 3}},
}


def test_killed_in_mid_stream_the_answer_goes_on_bit_for_bit(three: Fleet) -> None:
    body = {"model": MODEL, "prompt": long_prompt(4), "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    whole = (
        complete(three, **{**body, "prompt": long_prompt(4)} | {})
        if False
        else post(three.url, "/v1/completions", body).json()
    )
    for kill_after in (0, 1, 5):
        three.link.deaths[:] = [kill_after]
        again = post(three.url, "/v1/completions", body).json()
        assert again["choices"] == whole["choices"], kill_after
        assert not three.link.deaths
    assert_nothing_is_left(three)
