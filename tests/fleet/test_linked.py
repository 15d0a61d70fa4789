"""Linked prompts reach replicas with their sources, and outlive one that is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from doors import num_usable
from fleet.local_fleet import Fleet, assert_nothing_is_left, fleet
from foreword.cluster import RoutingRequest
from foreword.server.options import ServerConfig
from linking.prompts import documents
from live_server import ServerThread, embedded_llm, post, wait_until

pytestmark = pytest.mark.usefixtures("on_cpu")

PATH = "/v1/pml/completions"
OPTIONS: dict[str, Any] = {"allow_links": True, "block_size": 4, "num_gpu_blocks_override": 512}
CONFIG = ServerConfig(link_gate=0.0)


@pytest.fixture(scope="module")
def two() -> Iterator[Fleet]:
    with fleet(2, CONFIG, **OPTIONS) as found:
        yield found


@pytest.fixture(scope="module")
def alone() -> Iterator[ServerThread]:
    with embedded_llm(**OPTIONS) as llm, ServerThread(llm, CONFIG) as server:
        yield server


def body(number: int, **more: Any) -> dict[str, Any]:
    asked = {**documents(seed=number), "link": "first-8", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return {**asked, **more}


def ask(url: str, number: int, **more: Any) -> dict[str, Any]:
    answer = post(url, PATH, body(number, **more))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def streamed(url: str, number: int, **more: Any) -> tuple[str, list[float]]:
    """The text of a stream, and the log probabilities of its tokens. Each piece says that it is approximate."""
    text, logprobs = "", []
    for line in post(url, PATH, body(number, stream=True, logprobs=0, **more)).text.splitlines():
        if line.startswith("data: {"):
            piece = json.loads(line[6:])
            assert piece["approximate"] == "first-8"
            for choice in piece["choices"]:
                text += choice["text"]
                logprobs += choice["logprobs"]["token_logprobs"]
    return text, logprobs


@pytest.mark.parametrize("more", [{}, {"n": 3, "temperature": 1.0, "seed": 5}], ids=["greedy", "several"])
def test_an_answer_is_that_of_one_engine(two: Fleet, alone: ServerThread, more: dict[str, Any]) -> None:
    expected, found = ask(alone.url, 1, **more), ask(two.url, 1, **more)
    assert found["choices"] == expected["choices"]
    assert found["approximate"] == "first-8"
    of_links = found["usage"]["foreword"]
    assert of_links["linked_tokens"] == expected["usage"]["foreword"]["linked_tokens"] > 0
    cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached + sum(of_links.values()) == found["usage"]["prompt_tokens"]
    assert_nothing_is_left(two)


def test_killed_in_the_middle_it_goes_on_bit_for_bit(two: Fleet, alone: ServerThread) -> None:
    expected = streamed(alone.url, 2)
    assert len(expected[1]) == 24
    deaths = two.door.counts.deaths
    for kill_after in (0, 1, 4):
        two.link.deaths[:] = [kill_after]
        assert streamed(two.url, 2) == expected, kill_after
    assert two.door.counts.deaths == deaths + 3
    assert_nothing_is_left(two)


def routed(found: Fleet, **more: Any) -> tuple[str, dict[str, Any], int]:
    """The header that says where a prompt went, the usage, and the number of tokens that all replicas computed."""

    def num_computed() -> int:
        return sum(llm.engine.num_computed_tokens for llm in found.link.llms.values())

    before = num_computed()
    answer = post(found.url, PATH, body(0, instructions=[], **more))
    assert answer.status_code == 200, answer.text
    assert_nothing_is_left(found)
    cached = {name: llm.engine.snapshot().num_cached_blocks for name, llm in found.link.llms.items()}
    wait_until(lambda: {name: len(found.door.core.mirror(name).parents) for name in cached} == cached)
    return answer.headers["x-foreword-route"], answer.json()["usage"], num_computed() - before


@pytest.mark.parametrize("counts", [True, False], ids=["sources count", "they are ignored"])
def test_documents_draw_a_prompt_that_has_them_in_another_order(counts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One replica has two of its documents, the other one has its beginning, which is shorter."""
    if not counts:
        whole = RoutingRequest.of_sequence
        monkeypatch.setattr(RoutingRequest, "of_sequence", lambda *given: whole(*given[:3]))
    first, second, third, other = documents((40, 60, 60, 20), seed=4)["documents"]
    with fleet(2, CONFIG, draft_tokens=0, **OPTIONS) as found:
        holder, _, _ = routed(found, documents=[first, second, third], link="none")
        beginner, _, _ = routed(found, documents=[other], link="none")
        assert {holder.split()[0], beginner.split()[0]} == {"replica=a", "replica=b"}
        drawn, usage, num_computed = routed(found, documents=[other, third, second], link="none")
        in_prompt = usage["prompt_tokens"] - usage["foreword"]["linked_tokens"] + usage["completion_tokens"] - 1
        in_prompt -= usage["prompt_tokens_details"]["cached_tokens"]
        if counts:
            assert drawn.split()[:4] == [holder.split()[0], "reason=hit", "hit=0/149", "sources=120/120"]
            assert num_computed == in_prompt, "no document was computed again"
        else:
            assert drawn.split()[:3] == [beginner.split()[0], "reason=hit", "hit=20/149"]
            assert num_computed == in_prompt + 120


@pytest.mark.slow
def test_a_new_replica_is_warmed_with_nothing_that_stands_after_a_gap() -> None:
    schema = """<schema name="notes"><system>You answer from the notes.</system>
      <module name="falcon"> The code of the amber falcon is 4821. </module>
      <module name="lisbon"> The home of the silver violin is Lisbon. </module></schema>"""
    asked = {"schema": "notes", "modules": {"lisbon": {}}, "text": "Where?", "link": "all", "max_tokens": 2}
    with fleet(2, CONFIG, **OPTIONS) as found:
        facts = found.on_loop(lambda: found.link.replicas["b"].facts("127.0.0.1"))
        found.on_loop(lambda: found.door.leave("b"))
        assert post(found.url, "/v1/pml/schemas", {"schema": schema}).status_code == 200
        for _ in range(3):
            answer = post(found.url, PATH, asked)
            assert answer.status_code == 200, answer.text
        record = found.server.service.records.recent(1)[0]
        gap, _ = record.jumps[0]
        assert record.num_cached_tokens > gap > OPTIONS["block_size"]
        found.on_loop(lambda: found.door.join("b", facts))
        core = found.door.core
        wait_until(lambda: found.on_loop(lambda: num_usable(core)) == 2)
        assert found.link.llms["b"].engine.num_computed_tokens == gap // OPTIONS["block_size"] * OPTIONS["block_size"]
        assert_nothing_is_left(found)


def test_an_explanation_is_that_of_the_replica_that_lacks_least(two: Fleet) -> None:
    asked = {**documents(seed=5), "link": "none"}
    assert post(two.url, "/v1/pml/explain", asked).json()["missing"] == ["1", "2", "3"]
    ask(two.url, 5, link="none")
    requests = two.link.requests.total()
    found = post(two.url, "/v1/pml/explain", asked).json()
    assert (found["missing"], found["linked_tokens"] > 0) == ([], True)
    assert two.link.requests.total() == requests
    assert_nothing_is_left(two)


def test_an_edited_chat_is_linked_where_its_earlier_prompt_lies(two: Fleet) -> None:
    notes = [" ".join(f"The {kind} of item {n} is {7 * n}." for n in range(9)) for kind in ("code", "home")]
    own = {"session_id": "edited", "link": "first-8", "max_tokens": 6, "temperature": 0}

    def chat(*texts: str) -> dict[str, Any]:
        answer = post(
            two.url, "/v1/chat/completions", {"messages": [{"role": "user", "content": t} for t in texts], **own}
        )
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    assert chat(*notes)["usage"]["foreword"]["not_linked"] == "the session has no earlier plain prompt"
    found = chat(notes[0][:30], notes[1])
    assert found["approximate"] == "first-8"
    assert found["usage"]["foreword"]["linked_tokens"] > 40
    assert_nothing_is_left(two)


def test_the_front_refuses_what_is_not_served() -> None:
    with fleet(1) as plain:
        answer = post(plain.url, PATH, {**documents(seed=3), "link": "none"})
        assert (answer.status_code, "--allow-links" in answer.json()["error"]["message"]) == (400, True)
        assert post(plain.url, "/v1/pml/explain", {**documents(seed=3), "link": "none"}).json() == answer.json()
        assert not plain.link.requests
    with fleet(1, CONFIG, **OPTIONS) as free:
        answer = post(free.url, PATH, body(3, link="deviation-20"))
        assert (answer.status_code, "needs the first layers" in answer.json()["error"]["message"]) == (400, True)
        asked = {"messages": [{"role": "user", "content": "Hello."}], "session_id": "s", "link": "deviation-20"}
        chat = post(free.url, "/v1/chat/completions", asked)
        assert (chat.status_code, chat.json()) == (400, answer.json()), "though it is a new session"
    with fleet(1, **OPTIONS) as gated:
        answer = post(gated.url, PATH, {**documents(seed=3), "link": "none"})
        assert (answer.status_code, "was not measured" in answer.json()["error"]["message"]) == (400, True)
        assert not gated.link.requests
