"""Verbs travel as data: each does through bytes what it does in the process. Replicas may be of other versions."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest

from doors import begin_stillness, end_stillness, make_ready, missed_by, num_usable
from fleet.local_fleet import Fleet, assert_nothing_is_left, fleet
from fleet.test_routed import complete, long_prompt
from foreword import LLM, SamplingParams, __version__
from foreword.engine import Keep, Prompt
from foreword.fleet.messages import UNKNOWN_VERB, asked_for, asking
from foreword.linking import Method
from foreword.pml.documents import compose_documents
from foreword.server import verbs
from foreword.server.api_errors import APIError
from linking.prompts import documents
from live_server import embedded_llm, post, wait_until

pytestmark = pytest.mark.usefixtures("on_cpu")
LATER = "9.9.9"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with embedded_llm(allow_links=True, cache_events=True) as found:
        yield found


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setattr("foreword.fleet.calls.MAKE_UP_S", 1e9)  # what is tried again is tried for ever
    with fleet(3, cache_events=True) as found:
        yield found


def test_every_verb_does_the_same_through_bytes(llm: LLM) -> None:
    engine, asked = llm.engine, set()

    def far(verb: verbs.Verb[Any, *tuple[Any, ...]], *arguments: Any) -> Any:
        asked.add(verb.name)
        data = asking(verb, arguments)
        return pickle.loads(pickle.dumps(asked_for(data)(engine)))

    def both(verb: verbs.Verb[Any, *tuple[Any, ...]], *arguments: Any) -> Any:
        """For verbs that change nothing."""
        found = far(verb, *arguments)
        assert repr(found) == repr(verb.run(engine, *arguments))
        return found

    text = documents()
    composition, method = compose_documents(text, None), Method.parse("none")
    whole = np.concatenate([np.array(part.token_ids, np.int32) for part in composition.parts])
    plain = Prompt(whole, owner="me", session="talk")
    linked = llm.link(plain, composition, method)
    engine.add_request("one", plain, SamplingParams(max_tokens=2, temperature=0.0))
    while engine.has_unfinished_requests():
        engine.step()

    num_cached, num_of_other = both(verbs.COUNT_CACHED, [plain, Prompt(whole[::-1].copy())])
    assert num_cached >= len(whole) - 2 * llm.layout.block_size
    assert num_of_other == 0
    assert both(verbs.EXPLAIN, plain).num_hit_tokens >= num_cached
    assert both(verbs.COUNT_LINKED, plain, linked, 2) == [num_cached, verbs.NOT_CACHED]
    assert both(verbs.EXPLAIN_LINKS, linked, composition, method, llm.layout.block_size).missing
    assert both(verbs.TOP_PREFIXES, 5, "")
    assert far(verbs.SNAPSHOT).num_computed_tokens == engine.num_computed_tokens

    pinned = far(verbs.PIN, plain, Keep(60.0))
    [listed] = far(verbs.LIST_ENTRIES, "me", False)
    assert (listed["id"], listed["kept_tokens"]) == (pinned.name, pinned.num_kept_tokens)
    assert far(verbs.LIST_ENTRIES, "you", False) == far(verbs.LIST_ENTRIES, None, False) == []
    assert far(verbs.CHANGE_ENTRY, pinned.name, 9.0, "you", False) == {}
    assert far(verbs.CHANGE_ENTRY, pinned.name, 9.0, None, True)["expires_in_s"] == 9.0
    assert far(verbs.END_ENTRY, pinned.name, 7.0) is None
    assert 0 < far(verbs.LIST_ENTRIES, None, True)[0]["expires_in_s"] <= 7.0
    assert far(verbs.UNPIN, plain) is None
    assert far(verbs.LIST_ENTRIES, None, True) == []
    assert far(verbs.CLOSE_SESSION, "me", "talk") > 0
    assert far(verbs.CLOSE_SESSION, "me", "talk") is None
    assert far(verbs.SHRINK, "nobody's", 0) is None
    far(verbs.RESET)
    assert far(verbs.COUNT_CACHED, [plain]) == [0]
    assert asked == set(verbs.VERBS), "a verb that no test asks"
    engine.check_integrity()


def test_no_function_travels() -> None:
    prompt = Prompt(np.arange(3, 9, dtype=np.int32))
    with pytest.raises(TypeError, match="'explain' got a function"):
        asking(verbs.EXPLAIN, (prompt.begun,))  # type: ignore[arg-type]
    with pytest.raises((AttributeError, TypeError, pickle.PicklingError)):
        asking(verbs.EXPLAIN, (replace(prompt, owner=lambda: "me"),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps((LATER, "explain", pickle.dumps((Prompt(np.arange(3, 9, dtype=np.int32)),)))),  # shifted fields?
        pickle.dumps((__version__, "explain", pickle.dumps(()))),  # with other arguments
        pickle.dumps((LATER, "explain", b"cforeword.engine\nPromptOfLater\n.")),
        pickle.dumps((LATER, "nosuch", pickle.dumps(()))),
        pickle.dumps((LATER, "nosuch", b"", "more")),
        b"cforeword.engine\nVerbOfLater\n.",
    ],
)
def test_what_another_version_asks_is_refused_by_name(data: bytes) -> None:
    names = rf"'(explain|nosuch|\(unknown\))' of foreword ({LATER}|{__version__}|\(unknown\))"
    with pytest.raises(APIError, match=rf"foreword {__version__}, .* {names}; upgrade") as error:
        asked_for(data)
    assert (error.value.status, error.value.code) == (501, UNKNOWN_VERB)


def ask_as_later(found: Fleet, monkeypatch: pytest.MonkeyPatch, verb: verbs.Verb[Any, *tuple[Any, ...]]) -> set[str]:
    """The replicas of the returned set get a verb under a name that their table lacks, as from a later version."""
    older: set[str] = set()
    call = found.link.call

    async def renamed(replica: str, data: bytes) -> bytes:
        _, name, packed = pickle.loads(data)
        if replica in older and name == verb.name:
            data = pickle.dumps((LATER, f"{name}_2", packed))
        return await call(replica, data)

    monkeypatch.setattr(found.link, "call", renamed)
    return older


def test_answers_of_replicas_that_know_a_verb_are_merged(three: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    older = ask_as_later(three, monkeypatch, verbs.EXPLAIN)
    complete(three.url, long_prompt(1))
    assert_nothing_is_left(three)
    [holder] = three.link.requests

    def hit_tokens() -> int:
        answer = post(three.url, "/v1/cache/explain", {"prompt": long_prompt(1)})
        assert answer.status_code == 200, answer.text
        return int(answer.json()["hit_tokens"])

    before = hit_tokens()
    older |= set("abc") - {holder}
    assert hit_tokens() == before >= 160
    older ^= set("abc")
    assert hit_tokens() == 0, "the one that has it is not asked in words that it knows"
    older |= set("abc")
    answer = post(three.url, "/v1/cache/explain", {"prompt": long_prompt(1)})
    assert (answer.status_code, answer.json()["error"]["code"]) == (501, "unknown_verb")
    for part in ("'explain_2'", f"foreword {__version__}", f"foreword {LATER}", "upgrade the older one"):
        assert part in answer.json()["error"]["message"]
    assert complete(three.url, long_prompt(1))["choices"], "requests are answered all the same"

    async def unreadable(replica: str, data: bytes) -> bytes:
        return b"cforeword.engine\nPlanOfLater\n."

    monkeypatch.setattr(three.link, "call", unreadable)
    answer = post(three.url, "/v1/cache/explain", {"prompt": long_prompt(1)})
    assert (answer.status_code, answer.json()["error"]["code"]) == (501, "unknown_verb")
    assert "cannot be read" in answer.json()["error"]["message"]


def test_a_change_that_a_replica_does_not_know_keeps_nobody_waiting(
    three: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = ask_as_later(three, monkeypatch, verbs.RESET)
    for name in "abc":  # each computes the prompt
        three.on_loop(lambda name=name: [three.door.core.retire(other) for other in "abc" if other != name])
        complete(three.url, long_prompt(1))
        three.on_loop(lambda name=name: [make_ready(three.door, other) for other in "abc" if other != name])
    assert_nothing_is_left(three)
    older |= {"a", "b"}
    three.on_loop(lambda: begin_stillness(three.door, "b"))
    answer = httpx.post(f"{three.url}/reset_prefix_cache", timeout=60)
    assert answer.status_code == 501, "a replica that goes on does not know it"
    assert "Other replicas have made the change" in answer.json()["error"]["message"]
    hits = {
        name: one.explain({"prompt_token_ids": long_prompt(1)}).num_hit_tokens for name, one in three.link.llms.items()
    }
    assert hits["a"] == hits["b"] > hits["c"] == 0
    assert missed_by(three.door) == {"b"}, "the one that answered has missed nothing"
    three.on_loop(lambda: end_stillness(three.door, "b"))
    wait_until(lambda: three.on_loop(lambda: num_usable(three.door.core)) == 3)
    assert not missed_by(three.door)
