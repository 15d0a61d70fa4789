"""Linked prompts over HTTP: only where the operator allows them, never counted as hits, and marked as approximate."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from foreword import LLM, SamplingParams
from foreword.cli import main
from foreword.engine import Prompt
from foreword.errors import ConfigError
from foreword.linking import MeasuredLinks, Rightness
from foreword.model.deviation import LinkDeviations
from foreword.pml.edits import compose_edit
from foreword.request import LinkReport
from foreword.server.access.links import ServedLinks, to_its_end
from foreword.server.options import ServerConfig
from live_server import ENDLESS, ServerProcess, ServerThread, embedded_llm, post, wait_until

pytestmark = pytest.mark.usefixtures("on_cpu")

BLOCK = 4
SCHEMA = """<schema name="notes"><system>You answer from the notes.</system>
  <module name="falcon"> The code of the amber falcon is 4821. </module>
  <module name="lisbon"> The home of the silver violin is Lisbon. </module></schema>"""
PATH = "/v1/pml/completions"


def documents(seed: int, lengths: tuple[int, ...] = (40, 50, 33), instructions: int = 7) -> dict[str, Any]:
    """A call with documents of token ids."""
    rng = np.random.default_rng(seed)
    ids = [rng.integers(10, 300, length).tolist() for length in (*lengths, 9, instructions)]
    return {"documents": ids[:-2], "question": ids[-2], "instructions": ids[-1], "max_tokens": 6, "temperature": 0}


def open_llm(**options: Any) -> Any:
    return embedded_llm(allow_links=True, block_size=BLOCK, max_model_len=2048, **options)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    with open_llm() as llm, ServerThread(llm, ServerConfig(link_gate=0.0)) as opened:
        yield opened


@pytest.fixture(autouse=True)
def sound(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test nothing runs, and no source is held."""
    yield
    if "server" in request.fixturenames:
        assert_nothing_is_held(request.getfixturevalue("server"))


def assert_nothing_is_held(server: ServerThread) -> None:
    wait_until(lambda: not server.ask(lambda engine: engine.has_unfinished_requests()))
    server.ask(lambda engine: engine.check_integrity())
    server.ask(lambda engine: engine.reset_prefix_cache())  # raises if a block is held


@pytest.fixture(scope="module")
def python() -> Iterator[LLM]:
    """The same model without a server."""
    with open_llm() as llm:
        yield llm


def ask(server: ServerThread, body: dict[str, Any], **more: Any) -> dict[str, Any]:
    answer = post(server.url, PATH, {**body, **more})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def counts(usage: dict[str, Any]) -> list[int]:
    """Tokens that were cached, linked, recomputed, computed: together the prompt's."""
    of_links = usage["foreword"]
    names = ("linked_tokens", "recomputed_tokens", "computed_tokens")
    found = [usage["prompt_tokens_details"]["cached_tokens"], *(of_links[name] for name in names)]
    assert sum(found) == usage["prompt_tokens"]
    return found


def metrics(server: ServerThread) -> dict[tuple[str, str], float]:
    """(name without prefix, method or "") -> value."""
    families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
    samples = [sample for family in families for sample in family.samples if "le" not in sample.labels]
    return {(one.name.removeprefix("foreword_"), one.labels.get("method", "")): one.value for one in samples}


def pieces(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def asked_of_both(server: ServerThread, python: LLM, body: Any, link: str) -> tuple[dict[str, Any], LinkReport]:
    """A server's approximate answer, which is Python's, and what Python reports."""
    prompt = {name: body[name] for name in ("documents", "question", "instructions")}
    [expected] = python.generate(prompt, SamplingParams(max_tokens=6, temperature=0.0), link=link)
    found = ask(server, body, link=link)
    assert found["approximate"] == link
    assert found["choices"][0]["text"] == expected.outputs[0].text
    assert expected.link is not None
    return found, expected.link


# ------------------------------------------------------------------- answers


def test_an_answer_is_that_of_python_and_says_that_it_is_approximate(server: ServerThread, python: LLM) -> None:
    body = documents(1)
    found, told = asked_of_both(server, python, body, "first-8")
    cached, linked, recomputed, computed = counts(found["usage"])
    assert (linked, recomputed) == (told.linked_tokens, told.recomputed_tokens)
    assert linked > 0
    assert cached + computed == told.cached_tokens + told.computed_tokens
    again = ask(server, body, link="first-8")
    assert again["choices"] == found["choices"]
    assert counts(again["usage"])[:2] == [7 + 40 + 8, linked]  # what stands before the first link


def test_a_stream_is_the_whole_answer_and_marked_in_each_piece(server: ServerThread) -> None:
    body = documents(2)
    whole = ask(server, body, link="none")
    streamed = pieces(post(server.url, PATH, {**body, "link": "none", "stream": True}).text)
    with_usage = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = pieces(post(server.url, PATH, {**body, "link": "none", **with_usage}).text)
    assert {one["approximate"] for one in streamed} == {"none"}
    assert "".join(one["choices"][0]["text"] for one in streamed) == whole["choices"][0]["text"]
    assert counts(last["usage"])[1:3] == counts(whole["usage"])[1:3]


def test_texts_are_documents_too(server: ServerThread, python: LLM) -> None:
    facts = ["The code of the amber falcon is 4821.", "The home of the silver violin is Lisbon."]
    prompt = {"documents": facts, "question": "What is the home of the silver violin?", "separator": "\n"}
    [expected] = python.generate(prompt, SamplingParams(max_tokens=6, temperature=0.0), link="none")
    found = ask(server, {**prompt, "max_tokens": 6, "temperature": 0}, link="none")
    assert found["choices"][0]["text"] == expected.outputs[0].text
    assert found["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)


def test_plain_answers_and_all_are_exact(server: ServerThread) -> None:
    body = documents(3)
    plain = ask(server, body)
    ids = [*body["instructions"], *(one for each in body["documents"] for one in each), *body["question"]]
    completion = post(server.url, "/v1/completions", {"prompt": ids, "max_tokens": 6, "temperature": 0}).json()
    exact = ask(server, body, link="all")
    assert plain["choices"] == completion["choices"] == exact["choices"]
    assert "approximate" not in plain
    assert "approximate" not in exact
    assert "foreword" not in plain["usage"]
    assert counts(exact["usage"])[1] == 0


def test_one_document_stands_first_and_is_exact(server: ServerThread) -> None:
    body = documents(4, (40,))
    assert "approximate" not in ask(server, body, link="none")


def test_a_schemas_modules_are_linked(server: ServerThread) -> None:
    assert post(server.url, "/v1/pml/schemas", {"schema": SCHEMA}).status_code == 200
    asked: dict[str, Any] = {"schema": "notes", "max_tokens": 12, "temperature": 0}
    question = "What is the home of the silver violin?"
    by_name = {**asked, "modules": {"falcon": {}, "lisbon": {}}, "messages": {"user": question}}
    found = ask(server, by_name, link="first-4")
    assert found["choices"][0]["text"] == "Lisbon"
    assert found["approximate"] == "first-4"
    assert counts(found["usage"])[1] > 0
    pml = f'<prompt schema="notes"><falcon/><lisbon/><user>{question}</user></prompt>'
    assert ask(server, {**asked, "prompt": pml}, link="first-4")["choices"] == found["choices"]


def test_a_prompt_with_gaps_is_approximate_even_if_all_is_computed(server: ServerThread, python: LLM) -> None:
    assert post(server.url, "/v1/pml/schemas", {"schema": SCHEMA}).status_code == 200
    asked: dict[str, Any] = {"schema": "notes", "modules": {"lisbon": {}}, "text": "What?", "max_tokens": 2}
    assert ask(server, asked, link="all")["approximate"] == "all"
    assert "approximate" not in ask(server, asked, link="all", positions="dense")
    schema = python.pml.load(SCHEMA)
    for positions, is_exact in (("schema", False), ("dense", True)):
        prompt = schema.prompt({"lisbon": {}}, text="What?", positions=positions)
        [output] = python.generate(prompt, SamplingParams(max_tokens=2, temperature=0.0), link="all")
        assert output.link is not None
        assert output.link.exact is is_exact


def test_several_choices_share_one_linked_prompt(server: ServerThread) -> None:
    body = documents(5)
    one = ask(server, body, link="none")
    four = ask(server, body, link="none", n=4)
    assert [choice["text"] for choice in four["choices"]] == [one["choices"][0]["text"]] * 4
    assert four["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert counts(four["usage"])[1] == counts(one["usage"])[1]


def test_an_uncached_call_links_all_the_same(server: ServerThread) -> None:
    body = documents(6)
    expected = ask(server, body, link="none")
    found = ask(server, body, link="none", prompt_cache_options={"mode": "explicit"})
    assert found["choices"] == expected["choices"]
    assert counts(found["usage"])[0] == 0


def test_tokens_that_deviate_are_chosen_before_the_engine_sees_the_prompt(server: ServerThread, python: LLM) -> None:
    body = documents(17)
    found, told = asked_of_both(server, python, body, "deviation-20")
    assert counts(found["usage"])[1] == told.linked_tokens > 0


def test_a_caller_that_is_cancelled_keeps_its_turn_until_its_choice_has_ended() -> None:
    """Or threads that nobody waits for would pile up."""
    links, began, go_on = ServedLinks(None, 1), threading.Event(), threading.Event()

    def choose() -> None:
        began.set()
        assert go_on.wait(60)

    async def call() -> None:
        async with links.choosing:
            await to_its_end(choose)

    async def cancelled() -> None:
        calling = asyncio.create_task(call())
        assert await asyncio.to_thread(began.wait, 60)
        for _ in range(3):
            calling.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
        assert links.choosing.locked()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await calling
        async with links.choosing:
            pass

    asyncio.run(cancelled())


def test_linked_prompts_are_composed_beside_the_event_loop(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = server.service.llm.link
    threads: list[threading.Thread] = []

    def noted(*given: Any) -> Any:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        threads.append(threading.current_thread())
        return link(*given)

    monkeypatch.setattr(server.service.llm, "link", noted)
    for method in ("first-8", "deviation-20"):
        ask(server, documents(20), link=method)
    assert len(threads) == 2


def test_other_endpoints_know_no_link(server: ServerThread) -> None:
    answer = post(server.url, "/v1/completions", {"prompt": "a", "link": "none"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "link")


# --------------------------------------------------------------------- edits


CHATS = "/v1/chat/completions"
NOTES = [" ".join(f"The {kind} of item {n} is {7 * n + at}." for n in range(9)) for at, kind in enumerate(("a", "b"))]
LONG = [
    {"role": "system", "content": "You answer from the notes."},
    {"role": "user", "content": NOTES[0]},
    {"role": "assistant", "content": NOTES[1]},
    {"role": "user", "content": "What is the code?"},
]
CUT = [LONG[0], {"role": "user", "content": NOTES[0][:30]}, *LONG[2:]]


def chat(server: ServerThread, messages: Any, **more: Any) -> httpx.Response:
    return post(server.url, CHATS, {"messages": messages, "max_tokens": 6, "temperature": 0, **more})


def test_an_edited_chat_is_linked_from_the_newest_prompt_of_its_session(server: ServerThread, python: LLM) -> None:
    params, own = SamplingParams(max_tokens=6, temperature=0.0), {"session_id": "edited", "link": "first-8"}
    [before] = python.chat(LONG, params)
    [expected] = python.chat(CUT, params, link="first-8", edited_from=list(before.prompt_token_ids))
    assert expected.link is not None
    first = chat(server, LONG, **own).json()  # a session that is new
    assert "approximate" not in first
    found = chat(server, CUT, **own).json()
    assert found["approximate"] == "first-8"
    assert found["choices"][0]["message"]["content"] == expected.outputs[0].text
    assert counts(found["usage"])[1] == expected.link.linked_tokens > 50
    streamed = pieces(chat(server, CUT, **own, stream=True).text)  # again from the prompt before, which is plain
    assert {piece["approximate"] for piece in streamed} == {"first-8"}
    for more, why in (
        ({"session_id": "another"}, "the session has no earlier plain prompt"),
        ({"cache_salt": "x"}, "the session has no earlier plain prompt"),
        ({"prompt_cache_options": {"mode": "explicit"}}, "the call turns caching off"),
        ({"link": "all"}, "it would save 0 of"),  # its answer is exact, and so is what it leaves
        ({}, "it would save 0 of"),
    ):
        exact = chat(server, CUT, **{**own, **more}).json()
        assert "approximate" not in exact
        assert exact["usage"]["foreword"]["not_linked"].startswith(why)
    assert "foreword" not in chat(server, CUT, session_id="edited").json()["usage"]


def test_a_title_asked_in_the_same_session_hides_no_earlier_prompt(server: ServerThread) -> None:
    own = {"session_id": "titled", "link": "none"}
    chat(server, LONG, **own)
    title = [{"role": "user", "content": "A title for this chat, in three words: " + NOTES[0][:60]}]
    for number in range(3):
        told = chat(server, [*title, {"role": "user", "content": str(number)}], **own).json()
        assert "approximate" not in told
    assert "not_linked" in told["usage"]["foreword"]
    assert chat(server, CUT, **own).json()["approximate"] == "none"


def test_a_method_that_needs_a_pass_of_the_model_makes_none_before_it_may_pay(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, passes = {"session_id": "chosen", "link": "deviation-20"}, []
    measure = LinkDeviations.measure

    def counted(*given: Any) -> Any:
        passes.append(given)
        return measure(*given)

    monkeypatch.setattr(LinkDeviations, "measure", counted)
    chat(server, LONG, **own)
    server.ask(lambda engine: engine.reset_prefix_cache())
    told = chat(server, CUT, **own).json()["usage"]["foreword"]["not_linked"]
    assert (told, passes) == ("the earlier prompt is not cached whole", [])
    server.ask(lambda engine: engine.reset_prefix_cache())
    chat(server, LONG)
    assert chat(server, CUT[:-1], **own).json()["approximate"] == "deviation-20"
    assert len(passes) == 1


def test_an_edit_that_does_not_fit_beside_its_source_is_answered_exactly(server: ServerThread) -> None:
    asked = [chat(server, messages).json() for messages in (LONG, CUT)]
    num_blocks = sum(-(-one["usage"]["prompt_tokens"] // BLOCK) for one in asked) + 4
    own = {"session_id": "full", "link": "none"}
    options = {"allow_links": True, "block_size": BLOCK, "num_gpu_blocks_override": num_blocks}
    with embedded_llm(**options) as llm, ServerThread(llm, ServerConfig(link_gate=0.0)) as small:
        chat(small, LONG, **own)
        answer = chat(small, CUT, **own, max_tokens=40)  # with one token it would fit
        assert answer.status_code == 200, answer.text
        assert "do not fit" in answer.json()["usage"]["foreword"]["not_linked"]
        assert "approximate" not in answer.json()
        plain = chat(small, CUT, max_tokens=40).json()["choices"]
        assert [one["message"] for one in plain] == [one["message"] for one in answer.json()["choices"]]
        too_long = [*CUT, {"role": "user", "content": "Why? " * 400}]
        errors = [chat(small, too_long, **more) for more in (own, {})]
        assert [one.status_code for one in errors] == [400, 400]
        assert errors[0].json() == errors[1].json(), "refused in the words of the plain prompt"
        assert_nothing_is_held(small)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"prompt_cache_options": {"ttl": "30m"}}, "prompt_cache_options"),
        ({"messages": [*CUT[:-1], {"role": "user", "content": [{"type": "text", "text": "What is the code?"}]}]}, None),
        ({"logprobs": True, "foreword": {"certificate": True}}, "foreword.certificate"),
    ],
)
def test_what_a_linked_chat_cannot_have_is_refused_whatever_is_cached(
    server: ServerThread, more: dict[str, Any], param: str | None
) -> None:
    if param is None:
        more["messages"][-1]["content"][0]["prompt_cache_breakpoint"] = {"mode": "explicit"}
    own = {"session_id": "refused", "link": "none"}
    answers = [post(server.url, CHATS, {"messages": CUT, "max_tokens": 6, **own, **more})]
    chat(server, LONG, **own)
    answers.append(post(server.url, CHATS, {"messages": CUT, "max_tokens": 6, **own, **more}))
    assert [one.status_code for one in answers] == [400, 400], answers
    errors = [one.json()["error"] for one in answers]
    assert errors[0] == errors[1]
    assert errors[0]["param"] == (param or "prompt_cache_options")


def test_an_edit_whose_source_is_not_cached_is_answered_exactly(server: ServerThread) -> None:
    own = {"session_id": "gone", "link": "none"}
    assert "approximate" not in chat(server, LONG, **own).json()
    server.ask(lambda engine: engine.reset_prefix_cache())
    exact = chat(server, CUT, **own).json()
    assert "approximate" not in exact
    assert exact["usage"]["foreword"]["not_linked"] == "the earlier prompt is not cached whole"
    assert exact["choices"][0]["message"] == chat(server, CUT).json()["choices"][0]["message"]


def test_if_the_nearest_source_is_not_cached_the_next_one_is_taken(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, older = {"session_id": "nearest", "link": "none"}, LONG[:-1]
    chat(server, older, **own)
    chat(server, LONG, **own)
    compared = []

    def counted(*given: Any) -> Any:
        compared.append(given)
        return compose_edit(*given)

    monkeypatch.setattr("foreword.server.chats.edits.compose_edit", counted)
    assert chat(server, CUT, **own, n=1000).status_code == 400
    assert not compared, "there will never be room"
    monkeypatch.setattr("foreword.server.chats.edits.LEAST_SAVING", 0.5)
    chat(server, CUT, **own)
    assert len(compared) == 1, "the newest shares enough"
    monkeypatch.undo()
    server.ask(lambda engine: engine.reset_prefix_cache())
    chat(server, older)
    assert chat(server, CUT, **own).json()["approximate"] == "none"


def test_links_of_chats_need_a_session_and_figures_of_edits(server: ServerThread, python: LLM, tmp_path: Path) -> None:
    answer = chat(server, CUT, link="none")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "link")
    assert "send session_id" in answer.json()["error"]["message"]
    file, good = tmp_path / "links.json", {"first-8": Rightness(200, 1, 0), "none": Rightness(200, 50, 0)}
    MeasuredLinks(python.cache_identity.model_id, {"first-16": Rightness(200, 1, 0)}, edits=good).write(file)
    with open_llm() as llm, ServerThread(llm, ServerConfig(link_measurements=file)) as gated:
        own = {"session_id": "gated"}
        assert chat(gated, LONG, **own).status_code == 200
        assert chat(gated, CUT, **own, link="first-8").json()["approximate"] == "first-8"
        for link, message in (
            (
                "first-16",
                "not measured for edits with this model; the operator can measure it with `foreword pml measure",
            ),
            ("none", "may lose 30.9% of edited prompts with this model"),
            ("first", "is no method"),
        ):
            answer = chat(gated, CUT, **own, link=link)
            assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True), answer.text


# -------------------------------------------------------------------- counts


def test_links_are_counted_apart_and_leave_the_hit_rate_alone(server: ServerThread) -> None:
    body = documents(7)
    before = metrics(server)
    usages = [ask(server, body, link=link)["usage"] for link in ("none", "first-8", "none", "first-8", "all")]
    usages += [ask(server, documents(8), link="first-8")["usage"], ask(server, body)["usage"]]
    wait_until(lambda: not server.service.records.running())
    after = metrics(server)

    def gained(name: str, method: str = "") -> float:
        return after[name, method] - before.get((name, method), 0)

    linked_usages, plain = usages[:-1], usages[-1]
    sums = np.array([counts(usage) for usage in linked_usages]).sum(axis=0)
    methods = ("none", "first-8", "all")
    assert sum(gained("linked_tokens_total", method) for method in methods) == sums[1] > 0
    assert sum(gained("link_recomputed_tokens_total", method) for method in methods) == sums[2]
    assert gained("linked_tokens_total", "all") == 0
    assert gained("prompt_tokens_total") == sums.sum() + plain["prompt_tokens"]
    assert gained("tenant_hit_tokens_total") == sums[0] + plain["prompt_tokens_details"]["cached_tokens"]


def test_an_equal_composition_is_no_hit_beyond_its_exact_beginning(server: ServerThread) -> None:
    body, exact = documents(9), 7 + 40
    ask(server, body, link="none")
    wait_until(lambda: not server.service.records.running())
    before = metrics(server)
    usage = ask(server, body, link="none", foreword={"cache": True})
    wait_until(lambda: not server.service.records.running())
    after = metrics(server)
    names = ("prefix_cache_queries", "prefix_cache_hits", "tenant_queried_tokens", "tenant_hit_tokens")
    gained = [after[f"{name}_total", ""] - before[f"{name}_total", ""] for name in names]
    assert gained == [exact] * 4, "the part that plain prompts could have found"
    report = usage["foreword"]["cache"]
    assert report["hit_tokens"] == exact
    assert report["linked_tokens"] == usage["usage"]["foreword"]["linked_tokens"]
    assert report["hit_tokens"] + report["linked_tokens"] + report["computed_tokens"] == report["prompt_tokens"]


def test_the_estimate_of_more_memory_takes_no_linked_block_for_a_plain_prompts(server: ServerThread) -> None:
    body, exact = documents(19), 7 + 40
    server.service.more_memory.reset()
    linked, plain = ask(server, body, link="none")["usage"], ask(server, body)["usage"]
    assert plain["prompt_tokens"] == linked["prompt_tokens"] == exact + 50 + 33 + 9
    wait_until(lambda: not server.service.records.running())
    found = server.service.more_memory.points()[0].hit_rate
    assert found == exact // BLOCK * BLOCK / (exact + plain["prompt_tokens"])


def test_the_estimate_of_more_memory_takes_no_token_after_a_gap_for_a_plain_prompts(server: ServerThread) -> None:
    assert post(server.url, "/v1/pml/schemas", {"schema": SCHEMA}).status_code == 200
    asked = {"schema": "notes", "modules": {"lisbon": {}}, "text": "What?", "max_tokens": 2}
    server.service.more_memory.reset()
    usages = [ask(server, asked, link="all")["usage"], ask(server, asked)["usage"]]
    wait_until(lambda: not server.service.records.running())
    gap, _ = server.service.records.recent(2)[1].jumps[0]
    found = server.service.more_memory.points()[0].hit_rate
    assert found == gap // BLOCK * BLOCK / sum(usage["prompt_tokens"] for usage in usages) > 0


def test_a_record_and_its_line_name_the_method(server: ServerThread, caplog: pytest.LogCaptureFixture) -> None:
    from foreword.server.observe.log import log_request

    ask(server, documents(10), link="none")
    [record] = server.service.records.recent(1)
    assert (record.link_method, record.approximate) == ("none", "none")
    with caplog.at_level("INFO", logger="foreword"):
        log_request(record)
    assert re.search(r"\d+ linked by none", caplog.text)


# ------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"link": "some"}, "link='some' is no method; use"),
        ({"link": "first-0"}, "link='first-0' is no method"),
        ({"link": 123}, "Invalid value for link"),
        ({"link": "x" * 33}, "Invalid value for link"),
        ({"link": "none", "echo": True, "logprobs": 1}, "takes no logprobs with echo"),
        ({"link": "none", "truncate_prompt_tokens": 5}, "takes no truncate_prompt_tokens"),
        ({"link": "none", "prompt_cache_options": {"mode": "implicit"}}, "takes no prompt_cache_options"),
        ({"documents": []}, "Invalid value for documents"),
        ({"documents": "one"}, "Invalid value for documents"),
        ({"documents": [5]}, "Invalid value for documents"),
        ({"documents": [[5, -1]]}, "Invalid value for documents"),
        ({"documents": [[5, 10**6]], "link": "none"}, "out of range"),
        ({"documents": ["a"] * 10_000}, "documents has 10000 entries; at most 1024"),
        ({"documents": [[5] * 600] * 4}, "documents has 2400 tokens"),
        ({"documents": ["x " * 40_000] * 4}, "documents has 320000 characters"),
        ({"question": None}, r"Missing required parameter: question \(of a prompt of documents\)"),
        ({"question": [5] * 3000}, "question has 3000 tokens"),
        ({"schema": "notes"}, "schema cannot stand in a prompt of documents"),
        ({"modules": {}}, "modules cannot stand in a prompt of documents"),
        ({"positions": "dense"}, "positions cannot stand in a prompt of documents"),
        ({"documents": None}, r"Missing required parameter: schema \(of a prompt of a schema\)"),
        ({"documents": None, "schema": "notes"}, "question cannot stand in a prompt of a schema"),
        ({"separator": "x" * 65}, "Invalid value for separator"),
        ({"documents": [[5, 6]] * 1000, "instructions": [7] * 900, "link": "none"}, "902000 tokens, and the cache"),
    ],
)
def test_what_is_wrong_is_said(server: ServerThread, more: dict[str, Any], message: str) -> None:
    answer = post(server.url, PATH, {**documents(11), **more})
    assert answer.status_code == 400
    assert re.search(message, answer.json()["error"]["message"])


def test_a_prompt_has_a_bounded_number_of_linked_parts(server: ServerThread) -> None:
    modules = "".join(f'<module name="m{number}">text {number}</module>' for number in range(1100))
    assert post(server.url, "/v1/pml/schemas", {"schema": f'<schema name="many">{modules}</schema>'}).status_code == 200
    prompt = f'<prompt schema="many">{"".join(f"<m{number}/>" for number in range(1100))}</prompt>'
    answer = post(server.url, PATH, {"schema": "many", "prompt": prompt, "link": "none"})
    assert answer.status_code == 400
    assert "the prompt has 1100 parts to link" in answer.json()["error"]["message"]


def test_an_answer_that_nobody_reads_on_holds_no_sources(server: ServerThread) -> None:
    body = {**documents(12, (40, 300, 300)), **ENDLESS, "max_tokens": 500, "link": "none", "stream": True}

    def leave(number: int) -> None:
        with httpx.stream("POST", f"{server.url}{PATH}", json={**body, "cache_salt": str(number)}, timeout=60) as one:
            for _ in zip(one.iter_lines(), range(number), strict=False):
                pass

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(leave, range(6)))
    assert_nothing_is_held(server)


def test_without_the_option_nothing_links(python: LLM) -> None:
    with embedded_llm() as llm, ServerThread(llm, ServerConfig()) as server:
        for link in ("first-16", "all", "some"):
            answer = post(server.url, PATH, {**documents(13), "link": link})
            assert answer.status_code == 400
            assert f"link={link!r} is refused" in answer.json()["error"]["message"]
            assert "--allow-links" in answer.json()["error"]["message"]
        plain = ask(server, documents(13))
        assert "approximate" not in plain
        assert not any(name == "linked_tokens_total" for name, _ in metrics(server))


def test_who_waits_for_a_choice_may_leave_and_does_not_wait_forever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_go, begun = threading.Event(), threading.Event()
    salts: list[str | None] = []
    with open_llm() as llm, ServerThread(llm, ServerConfig(link_gate=0.0, request_timeout_s=1.5)) as server:
        link = llm.link

        def slow(prompt: Prompt, *given: Any) -> Any:
            salts.append(prompt.extra_keys.salt)
            begun.set()
            assert may_go.wait(30)
            return link(prompt, *given)

        monkeypatch.setattr(llm, "link", slow)
        body = {**documents(21), "link": "deviation-20"}
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(post, server.url, PATH, body)
            assert begun.wait(30)
            late = post(server.url, PATH, body)
            assert (late.status_code, late.json()["error"]["code"]) == (408, "timeout")
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{server.url}{PATH}", json={**body, "cache_salt": "left"}, timeout=0.5)
            may_go.set()
            assert first.result().status_code == 408, "it took longer than the limit, too"
        ask(server, body)
    assert len(salts) == 2


def test_nothing_is_chosen_while_the_queue_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    may_go, looks, chosen = threading.Event(), [], []
    with (
        open_llm(max_num_seqs=1) as llm,
        ServerThread(llm, ServerConfig(link_gate=0.0, max_queued=0, max_choices=2)) as server,
        ThreadPoolExecutor(3) as pool,
    ):
        link, check_room = llm.link, server.service.check_room

        def slow(*given: Any) -> Any:
            chosen.append(given)
            assert may_go.wait(60)
            return link(*given)

        def noted(num_choices: int) -> None:
            looks.append(num_choices)
            check_room(num_choices)

        monkeypatch.setattr(llm, "link", slow)
        monkeypatch.setattr(server.service, "check_room", noted)
        body = {**documents(22), "link": "deviation-20"}
        assert post(server.url, PATH, {**body, "n": 3}).status_code == 400, "there will never be room"
        looks.clear()
        with server.held():
            first = pool.submit(post, server.url, PATH, body)
            wait_until(lambda: len(chosen) == 1)
            second = pool.submit(post, server.url, PATH, body)
            wait_until(lambda: len(looks) == 3)  # it waits for the first one's choice to end
            plain = pool.submit(post, server.url, PATH, documents(22))
            wait_until(lambda: server.service.thread.num_choices == 1)
            assert post(server.url, PATH, body).status_code == 429, "before it waits"
            may_go.set()
            assert first.result().status_code == 429, "the queue has filled while it chose"
            assert second.result().status_code == 429, "the queue has filled while it waited"
        assert plain.result().status_code == 200
        assert len(chosen) == 1
        ask(server, body)


# ------------------------------------------------------------------- the gate


def measured(folder: Path, model_id: str) -> Path:
    path = folder / "links.json"
    MeasuredLinks(model_id, {"none": Rightness(200, 50, 0), "first-16": Rightness(200, 1, 0)}).write(path)
    return path


def test_a_method_is_served_if_it_keeps_enough_right_answers(
    python: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = measured(tmp_path, python.cache_identity.model_id)
    caplog.set_level("INFO", logger="foreword")
    with open_llm() as llm, ServerThread(llm, ServerConfig(link_measurements=file)) as server:
        assert "served are all, first-16, of link_gate=0.95" in caplog.text
        assert ask(server, documents(14), link="first-16")["approximate"] == "first-16"
        assert "approximate" not in ask(server, documents(14), link="all")
        for link, message in (
            ("none", "may lose 30.9% with this model (50 lost and 0 gained of 200 prompts)"),
            ("first-8", "was not measured with this model"),
        ):
            answer = post(server.url, PATH, {**documents(14), "link": link})
            assert (answer.status_code, message in answer.json()["error"]["message"]) == (400, True)


def test_prompts_with_gaps_are_served_by_what_was_measured_with_gaps(
    python: LLM, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    agreed, passes = {"none": Rightness(200, 50, 0), "first-16": Rightness(200, 1, 0)}, Rightness(200, 0, 0)
    with_gaps = {"first-16": Rightness(200, 10, 0), "first-2": passes, "deviation-15": passes}
    MeasuredLinks(python.cache_identity.model_id, agreed, with_gaps).write(tmp_path / "links.json")
    gaps = {"schema": "notes", "modules": {"lisbon": {}}, "text": "What?", "max_tokens": 2}
    dense = {**gaps, "positions": "dense"}
    caplog.set_level("INFO", logger="foreword")
    with open_llm() as llm, ServerThread(llm, ServerConfig(link_measurements=tmp_path / "links.json")) as server:
        assert "served are all, first-16, of link_gate=0.95; with gaps between positions first-2, deviation-15" in (
            caplog.text
        )
        assert post(server.url, "/v1/pml/schemas", {"schema": SCHEMA}).status_code == 200
        assert "approximate" not in ask(server, gaps)
        for body, link, message in (
            (dense, "first-16", None),
            (dense, "all", None),
            (gaps, "first-2", None),
            (gaps, "deviation-15", None),
            (
                gaps,
                "first-16",
                r"link='first-16' .*10 lost and 0 gained of 200 .* with gaps .* 5\.0% .*\"positions\": \"dense\"",
            ),
            (
                gaps,
                "all",
                r"link='all' was not measured with gaps .* 5\.0% .*\"dense\".*`foreword pml measure --gaps`",
            ),
            (gaps, "none", "link='none' may lose 30.9% with this model .50 lost and 0 gained of 200 prompts"),
            (dense, "first-2", "link='first-2' was not measured with this model"),
            (dense, "deviation-15", "link='deviation-15' was not measured with this model"),
        ):
            answer = post(server.url, PATH, {**body, "link": link})
            assert answer.status_code == (200 if message is None else 400), answer.text
            assert message is None or re.search(message, answer.json()["error"]["message"])
        own = SCHEMA.replace('name="lisbon"', 'name="lisbon" recompute="none"')
        assert post(server.url, "/v1/pml/schemas", {"schema": own}).status_code == 200
        told = post(server.url, PATH, {**gaps, "link": "first-2"}).json()["error"]["message"]
        assert "recompute='none', which counts as a method: link='none' was not measured with gaps" in told


def test_a_schema_cannot_have_a_method_that_is_not_served(python: LLM, tmp_path: Path) -> None:
    file = measured(tmp_path, python.cache_identity.model_id)
    asked = {"schema": "notes", "modules": {"falcon": {}, "lisbon": {}}, "text": "What?", "max_tokens": 2}
    with open_llm() as llm, ServerThread(llm, ServerConfig(link_measurements=file)) as server:
        for module, recompute, link, message in (
            ("lisbon", "none", "first-16", "recompute='none', which counts as a method: link='none' may lose"),
            ("lisbon", "first-8", "first-16", "link='first-8' was not measured"),
            ("lisbon", "first-32", "first-16", None),
            ("lisbon", "all", "first-16", None),
            ("lisbon", "none", "all", None),
            ("falcon", "none", "first-16", None),  # it stands first and is exact
        ):
            schema = re.sub("<system>.*</system>", "", SCHEMA).replace(
                f'name="{module}"', f'name="{module}" recompute="{recompute}"'
            )
            assert post(server.url, "/v1/pml/schemas", {"schema": schema}).status_code == 200
            answer = post(server.url, PATH, {**asked, "link": link})
            assert answer.status_code == (200 if message is None else 400), answer.text
            assert message is None or message in answer.json()["error"]["message"]


def test_unmeasured_only_all_is_served(python: LLM, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="foreword")
    with open_llm() as llm, ServerThread(llm, ServerConfig()) as server:
        assert "served are all, of link_gate=0.95; without link_measurements" in caplog.text
        ask(server, documents(15), link="all")
        assert post(server.url, PATH, {**documents(15), "link": "first-16"}).status_code == 400


def test_a_long_prompt_is_refused_before_a_method_spends_time_on_it(python: LLM) -> None:
    config = ServerConfig(link_gate=0.0, max_prompt_tokens=100)
    with open_llm() as llm, ServerThread(llm, config) as server:
        answer = post(server.url, PATH, {**documents(18), "link": "deviation-20"})
        assert answer.status_code == 400
        assert "has 139 tokens, and this server takes 100" in answer.json()["error"]["message"]
        assert not server.ask(lambda engine: engine.num_computed_tokens)


def test_measurements_of_another_model_end_the_start(tmp_path: Path) -> None:
    file = measured(tmp_path, "beef")
    with open_llm() as llm, pytest.raises(ConfigError, match="another model"):
        ServerThread(llm, ServerConfig(link_measurements=file))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--allow-links", "--link-gate", "1.5"], "link_gate=1.5 is not a share; use 0 to 1"),
        (["--allow-links", "--link-gate", "nan"], "link_gate=nan is not a share"),
        (["--allow-links", "--link-measurements", "no-such-file"], "'no-such-file' cannot be read"),
        (["--link-gate", "0.9"], "link_gate=0.9 needs allow_links"),
        (["--link-measurements", "links.json"], "link_measurements=links.json needs allow_links"),
    ],
)
def test_wrong_options_are_told_before_a_model_is_loaded(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "no-such-model", "--port", "0", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_process_with_the_option_links_and_says_so(linking_server: tuple[ServerProcess, Path]) -> None:
    process, log = linking_server
    answer = post(process.url, PATH, {**documents(16), "link": "none"})
    assert answer.json()["approximate"] == "none"
    wait_until(lambda: "links: every method is served, measured or not" in log.read_text())  # a thread writes it
