"""OpenAI's explicit caching through the official client: what is kept, how long, how it is counted, what is refused."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from foreword.server.dialects.openai.caching import Breakpoints
from foreword.server.dialects.openai.fields import TextPart
from foreword.server.options import ServerConfig
from live_server import FALCON, MODEL, ServerThread, client, document, embedded_llm, post, wait_until

NUM_BLOCKS, BLOCK = 128, 16
QUESTION = FALCON[1:]
MARK = {"mode": "explicit"}
LONG = {"mode": "explicit", "ttl": "12h"}
EXPLICIT, IMPLICIT = {"mode": "explicit"}, {"mode": "implicit"}
HALF_HOUR, HALF_DAY = 1800.0, 43_200.0


class World(ServerThread):
    """A server with a small cache, whose engine's time the tests move."""

    now = 1e9  # after the real clock, which the engine read before the tests set it
    num_floods = 0

    def chat(self, messages: Any, options: Any = None, key: str = "alice", **body: Any) -> Any:
        """A greedy chat completion of few tokens."""
        body = {"max_tokens": 4, "temperature": 0, **body} | (
            {} if options is None else {"prompt_cache_options": options}
        )
        return client(self.url, key).chat.completions.create(model=MODEL, messages=messages, **body)

    def read_and_written(self, messages: Any, options: Any = None, **body: Any) -> tuple[int, int]:
        usage = self.chat(messages, options, **body).usage
        told = usage.prompt_tokens_details
        assert 0 <= told.cached_tokens + told.cache_write_tokens <= usage.prompt_tokens
        return told.cached_tokens, told.cache_write_tokens

    def respond(self, given: Any, options: Any = None, **body: Any) -> Any:
        """A greedy response of few tokens."""
        body = {"max_output_tokens": 4, "temperature": 0, **body}
        body |= {} if options is None else {"prompt_cache_options": options}
        return client(self.url, "alice").responses.create(model=MODEL, input=given, **body)

    def flood(self) -> None:
        """Prompts that nobody repeats, enough to evict everything that is not kept."""
        for _ in range(5):
            self.num_floods += 1
            self.chat([user(document(f"flood {self.num_floods}", 30))])

    def entries(self) -> list[Any]:
        return self.ask(lambda engine: engine.entries.entries())

    def forget(self) -> None:
        """Empty the cache, entries too."""
        wait_until(lambda: self.service.thread.num_choices == 0)
        self.ask(lambda engine: engine.reset_prefix_cache())


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def text(content: str, mark: Any = None, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": content, **({} if mark is None else {"prompt_cache_breakpoint": mark})}


def given(content: str, mark: Any = None) -> dict[str, Any]:
    """A part of a response's input."""
    return text(content, mark, "input_text")


def marked(name: str, mark: Any = MARK) -> list[dict[str, Any]]:
    """A document with a breakpoint at its end, and a question."""
    return [{"role": "system", "content": [text(document(name), mark)]}, *QUESTION]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text('[alice]\nkeys = ["alice"]\n\n[bob]\nkeys = ["bob"]\nmax_cached_blocks = 20\n')
    options = {"num_gpu_blocks_override": NUM_BLOCKS, "eviction_policy": "lru", "max_pinned_share_per_tenant": 0.5}
    with embedded_llm(**options) as llm, World(llm, ServerConfig(keys_file=keys)) as server:
        llm.engine.clock = lambda: server.now
        yield server


@pytest.fixture
def fresh(world) -> World:
    world.forget()
    assert world.entries() == []
    return world


# -------------------------------------------------------------------- what is kept


def test_a_breakpoint_is_written_once_then_read_and_survives_a_flood(fresh):
    read, written = fresh.read_and_written(marked("pewter"), EXPLICIT)
    (entry,) = fresh.entries()
    assert (entry.source, entry.owner, entry.until) == ("breakpoint", "alice", fresh.now + HALF_HOUR)
    assert read < BLOCK
    assert written == entry.num_kept_tokens - read > 5 * BLOCK
    fresh.chat([{"role": "system", "content": document("zinc")}, *QUESTION])
    fresh.flood()
    other = [*marked("pewter")[:1], user("And the home of the quiet lantern?")]
    assert fresh.read_and_written(other, EXPLICIT)[0] >= entry.num_kept_tokens
    assert fresh.read_and_written([{"role": "system", "content": document("zinc")}, *QUESTION])[0] < BLOCK
    fresh.now += HALF_HOUR
    fresh.flood()
    assert fresh.read_and_written(marked("pewter", None))[0] < BLOCK, "the time is over"


def test_a_breakpoint_inside_a_message_is_at_the_end_of_its_part(fresh):
    parts = [text(document("brass")), text(document("steel"), MARK), text(document("tin"))]
    assert fresh.read_and_written([user(parts)], EXPLICIT)[1] > 0
    (entry,) = fresh.entries()
    whole = fresh.chat([user(document("brass") + document("steel"))]).usage.prompt_tokens
    assert whole - BLOCK <= entry.num_tokens < whole
    fresh.flood()
    assert fresh.read_and_written([user([*parts[:2], text("Now?")])])[0] >= entry.num_tokens // BLOCK * BLOCK


@pytest.mark.parametrize("message", [0, 1, 2, 3], ids=["system", "user", "assistant", "tool"])
def test_messages_of_all_roles_can_have_breakpoints(fresh, message):
    call = {"id": "call_1", "type": "function", "function": {"name": "lookup", "arguments": "{}"}}
    told = [
        {"role": "developer", "content": document("iron")},
        user(document("gold")),
        {"role": "assistant", "content": document("lead"), "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": document("bronze")},
    ]
    told[message] = {**told[message], "content": [text(told[message]["content"], MARK)]}
    read, written = fresh.read_and_written(told, EXPLICIT)
    (entry,) = fresh.entries()
    assert written == entry.num_kept_tokens - read > 0
    assert (message + 1) * 90 < entry.num_tokens < (message + 1) * 160


def test_a_breakpoint_in_a_text_beside_a_call_is_at_the_texts_end(fresh):
    call = {"type": "function_call", "call_id": "c", "name": "lookup", "arguments": "{}"}
    told = [user(document("gold")), {"role": "assistant", "content": document("lead")}, call]
    told.append({"role": "assistant", "content": [given(document("copper"), MARK)]})
    for rest in ([], [{"type": "function_call_output", "call_id": "c", "output": document("zinc")}]):
        fresh.respond([*told, *rest], EXPLICIT)
        (entry,) = fresh.entries()
        assert 400 < entry.num_tokens < 480, "each of the three documents has about 140 tokens"


def test_the_latest_four_breakpoints_count_or_three_and_the_end(fresh):
    parts = [text(document(f"part {number}", 4), MARK) for number in range(6)]
    fresh.chat([user([*parts, text("What is it?")])], EXPLICIT)
    ends = sorted(entry.num_tokens for entry in fresh.entries())
    assert len(ends) == 4
    assert {later - end for end, later in pairwise(ends)} == {81}, "tokens of a part and of its line break"
    fresh.forget()
    usage = fresh.chat([user([*parts, text(document("the last"))])], IMPLICIT).usage
    again = sorted(entry.num_tokens for entry in fresh.entries())
    assert again[:3] == ends[1:]
    assert usage.prompt_tokens - 2 * BLOCK < again[3] <= usage.prompt_tokens
    assert usage.prompt_tokens_details.cache_write_tokens >= again[3] - 2 * BLOCK


def test_breakpoints_alone_are_in_the_implicit_mode(fresh):
    fresh.chat(marked("copper"))
    assert len(fresh.entries()) == 2


def test_the_explicit_mode_without_breakpoints_neither_reads_nor_leaves_anything(fresh):
    told = [user(document("nickel")), *QUESTION]
    fresh.chat(marked("nickel"))
    for _ in range(2):
        assert fresh.read_and_written(marked("nickel", None), EXPLICIT) == (0, 0)
        assert fresh.read_and_written(told, EXPLICIT) == (0, 0)
    assert fresh.read_and_written(told)[0] < BLOCK, "it left nothing to read"
    assert fresh.read_and_written(marked("nickel", None))[0] > 5 * BLOCK
    assert len(fresh.entries()) == 2


def test_what_ran_without_the_cache_is_no_part_of_a_comparison(fresh):
    first, off = fresh.respond(document("opal")), fresh.respond(document("opal"), EXPLICIT)
    told = {"type": "unavailable", "reason": "uncached"}
    for response, options in ((first, EXPLICIT), (off, IMPLICIT)):
        later = fresh.respond(document("opal"), {**options, "comparison_response_id": response.id})
        assert later.prompt_cache_diagnostics.model_dump() == told
    compared = fresh.respond(document("opal"), {"comparison_response_id": first.id})
    assert compared.prompt_cache_diagnostics.type == "cache_hit"


def test_a_quota_counts_what_runs_without_the_cache(fresh):
    for number in range(3):
        fresh.chat([user(document(f"bob {number}", 12))], EXPLICIT, key="bob")
    tenants = fresh.service.tenants
    bob = tenants.tenant_of("bob")
    wait_until(lambda: fresh.service.thread.num_choices == 0)
    left = fresh.ask(lambda engine: engine.manager.ledger.num_under_salt(tenants.namespace_of_all(bob)))
    assert 10 < left <= bob.max_cached_blocks


# ------------------------------------------------------------------------- counts


def test_without_wishes_nothing_is_promised_and_nothing_counted(fresh):
    for options in (None, {}, {"comparison_response_id": "resp_0"}):
        assert fresh.read_and_written(marked("agate", None), options)[1] == 0
    details = fresh.respond(document("agate")).usage.input_tokens_details
    assert (details.cache_write_tokens, details.cache_write_tokens_details.ttl_30m_tokens) == (0, 0)
    assert fresh.entries() == []


def test_what_was_cached_before_is_not_written(fresh):
    fresh.chat(marked("garnet", None))
    read, written = fresh.read_and_written(marked("garnet"), EXPLICIT)
    (entry,) = fresh.entries()
    assert read >= entry.num_kept_tokens > 5 * BLOCK
    assert written == 0


def test_times_are_inherited_and_counted_apart(fresh):
    parts = [given(document("ruby"), LONG), given(document("pearl"), MARK), given(document("coral"), LONG)]
    usage = fresh.respond([user([*parts, given("What is it?")])], EXPLICIT).usage.input_tokens_details
    assert usage.cache_write_tokens == usage.cache_write_tokens_details.ttl_12h_tokens > 20 * BLOCK
    fresh.forget()
    told = [user([given(document("ruby"), LONG), given(document("pearl"), MARK), given("?")])]
    usage = fresh.respond(told, {"mode": "explicit", "ttl": "30m"}).usage.input_tokens_details
    by_ttl = usage.cache_write_tokens_details
    assert usage.cache_write_tokens == by_ttl.ttl_12h_tokens + by_ttl.ttl_30m_tokens
    assert min(by_ttl.ttl_12h_tokens, by_ttl.ttl_30m_tokens) > 5 * BLOCK
    assert sorted(entry.until - fresh.now for entry in fresh.entries()) == [HALF_HOUR, HALF_DAY]
    fresh.forget()
    fresh.respond([user([given(document("ruby"), MARK)])], {"ttl": "12h"})
    assert {entry.until - fresh.now for entry in fresh.entries()} == {HALF_DAY}


def test_streams_count_alike(fresh):
    (*_, last) = fresh.chat(marked("topaz"), EXPLICIT, stream=True, stream_options={"include_usage": True})
    assert last.usage.prompt_tokens_details.cache_write_tokens == fresh.entries()[0].num_kept_tokens - (
        last.usage.prompt_tokens_details.cached_tokens
    )
    (*_, last) = fresh.respond([user([given(document("beryl"), LONG)])], stream=True)
    assert last.response.usage.input_tokens_details.cache_write_tokens_details.ttl_12h_tokens > 5 * BLOCK


def test_marks_change_no_answer(fresh):
    def answer(mark: Any, options: Any) -> Any:
        choice = fresh.chat(marked("onyx", mark), options, logprobs=True, top_logprobs=2).choices[0]
        return choice.message.content, choice.logprobs.model_dump()

    plain = answer(None, None)
    assert answer(MARK, None) == answer(MARK, EXPLICIT) == answer(None, EXPLICIT) == answer(None, IMPLICIT) == plain


# ---------------------------------------------------------------------- responses


def test_earlier_turns_keep_their_entries_and_mark_nothing_again(fresh):
    first = fresh.respond([user([given(document("amber"), MARK)])], EXPLICIT, instructions="Be brief.")
    (entry,) = fresh.entries()
    details = first.usage.input_tokens_details
    assert details.cache_write_tokens == entry.num_kept_tokens - details.cached_tokens > 5 * BLOCK
    call = [{"type": "function_call", "call_id": "c", "name": "lookup", "arguments": "{}"}]
    call += [{"type": "function_call_output", "call_id": "c", "output": [given(document("quartz"), MARK)]}]
    fresh.now += 60
    told = {"previous_response_id": first.id, "instructions": "Be brief."}
    second = fresh.respond([*call, user("Now?")], EXPLICIT, **told)
    details = second.usage.input_tokens_details
    assert details.cached_tokens >= entry.num_kept_tokens
    old, new = sorted(fresh.entries(), key=lambda one: one.num_tokens)
    assert (old.num_tokens, old.until) == (entry.num_tokens, fresh.now + HALF_HOUR), "use refreshes it"
    assert new.num_tokens > old.num_tokens + 80
    assert fresh.respond("Still?", EXPLICIT, **told).usage.input_tokens_details.cached_tokens == 0, "no own breakpoint"


@pytest.mark.parametrize("stream", [False, True])
def test_a_prewarmed_prompt_has_no_output_and_hits_later(fresh, stream):
    told, many = [user([given(document("ebony"), LONG)])], {"min_tokens": 3}
    answer = fresh.respond(told, {"prewarm": True}, stream=stream, extra_body=many)
    if stream:
        events = list(answer)
        assert [event.type.rpartition(".")[2] for event in events] == ["created", "in_progress", "completed"]
        answer = events[-1].response
    usage = answer.usage
    assert (answer.output, answer.status, answer.incomplete_details) == ([], "completed", None)
    assert (usage.output_tokens, usage.total_tokens) == (0, usage.input_tokens)
    written = usage.input_tokens_details.cache_write_tokens
    assert written > 5 * BLOCK
    fresh.flood()
    later = fresh.respond([user(document("ebony"))])
    assert later.usage.input_tokens_details.cached_tokens >= written // BLOCK * BLOCK
    on = fresh.respond("What is the code of the falcon?", previous_response_id=answer.id)
    assert on.output_text
    assert on.usage.input_tokens_details.cached_tokens > 5 * BLOCK
    assert client(fresh.url, "alice").responses.retrieve(answer.id).output == []


def test_the_answer_repeats_the_options_that_were_applied(fresh):
    plain = fresh.respond("hello")
    assert plain.prompt_cache_options is plain.prompt_cache_retention is plain.prompt_cache_key is None
    options = {"mode": "explicit", "ttl": "12h", "comparison_response_id": plain.id}
    told = fresh.respond("hello", options, prompt_cache_key="k", prompt_cache_retention="24h")
    assert told.prompt_cache_options.model_dump() == options
    assert (told.prompt_cache_key, told.prompt_cache_retention) == ("k", "24h")
    default = fresh.respond([user([given("hello", MARK)])]).prompt_cache_options
    assert default.model_dump() == {"mode": "implicit", "ttl": "30m", "comparison_response_id": None}


# --------------------------------------------------------------------- completions


def test_completions_mark_the_ends_of_their_prompts(fresh):
    def counts(options: Any) -> tuple[int, int]:
        usage = (
            client(fresh.url, "alice")
            .completions.create(
                model=MODEL,
                prompt=[document("cedar"), document("birch")],
                max_tokens=2,
                extra_body={"prompt_cache_options": options},
            )
            .usage
        )
        return usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens_details.cache_write_tokens

    assert counts(EXPLICIT) == (0, 0)
    read, written = counts({"ttl": "30m"})
    assert written == sum(entry.num_kept_tokens for entry in fresh.entries()) - read > 10 * BLOCK
    assert len(fresh.entries()) == 2
    fresh.flood()
    assert counts({})[0] >= written


# ------------------------------------------------------------------------ refusals


def part(breakpoint: Any, kind: str = "text") -> list[dict[str, Any]]:
    return [user([text("a", None, kind), {**text("b", None, kind), "prompt_cache_breakpoint": breakpoint}])]


AT = "prompt_cache_breakpoint"
FUNCTION = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, AT: MARK}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": part({"mode": "implicit"})}, f"messages[0].content[1].{AT}.mode"),
        ({"messages": part({})}, f"messages[0].content[1].{AT}.mode"),
        ({"messages": part({**MARK, "ttl": "1h"})}, f"messages[0].content[1].{AT}.ttl"),
        ({"messages": part({**MARK, "scope": "all"})}, f"messages[0].content[1].{AT}.scope"),
        ({"messages": part("explicit")}, f"messages[0].content[1].{AT}"),
        ({"messages": part(MARK, "output_text")}, f"messages[0].content[1].{AT}"),
        ({"messages": [{**user("hi"), AT: MARK}]}, f"messages[0].{AT}"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": [CALL]}]}, f"messages[0].tool_calls[0].{AT}"),
        ({"messages": QUESTION, "tools": [{**FUNCTION, AT: MARK}]}, f"tools[0].{AT}"),
        ({"messages": QUESTION, AT: MARK}, AT),
        ({"messages": QUESTION, "prompt_cache_options": {"mode": "x"}}, "prompt_cache_options.mode"),
        ({"messages": QUESTION, "prompt_cache_options": {"ttl": "12h"}}, "prompt_cache_options.ttl"),
        ({"messages": QUESTION, "prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        ({"messages": QUESTION, "prompt_cache_retention": "1h"}, "prompt_cache_retention"),
        ({"prompt": "a", "prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        ({"prompt": "a", "prompt_cache_options": {"ttl": "12h"}}, "prompt_cache_options.ttl"),
        ({"input": part({**MARK, "ttl": 5}, "input_text")}, f"input[0].content[1].{AT}.ttl"),
        ({"input": part(MARK, "output_text")}, f"input[0].content[1].{AT}"),
        ({"input": [{**user("hi"), AT: MARK}]}, f"input[0].{AT}"),
        ({"input": "a", "tools": [{"type": "function", "name": "f", AT: MARK}]}, f"tools[0].{AT}"),
        ({"input": "a", "prompt_cache_options": {"ttl": "1h"}}, "prompt_cache_options.ttl"),
        ({"input": "a", "prompt_cache_options": {"time": "1h"}}, "prompt_cache_options.time"),
        ({"input": "a", "prompt_cache_options": {"prewarm": "yes"}}, "prompt_cache_options.prewarm"),
        ({"input": "a", "prompt_cache_options": {"prewarm": True, **EXPLICIT}}, "prompt_cache_options.prewarm"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_what_cannot_be_is_refused_by_name(world, body, param):
    path = "chat/completions" if "messages" in body else "completions" if "prompt" in body else "responses"
    answer = post(world.url, f"/v1/{path}", body, headers={"Authorization": "Bearer alice"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), answer.text
    assert error["code"] in ("invalid_value", "unknown_parameter", "missing_required_parameter")
    assert param in error["message"]


def test_nothing_is_meant_by_null_and_tokenize_checks_breakpoints_without_keeping_anything(fresh):
    told = [{**user([text("a", None)]), AT: None}]
    told[0]["content"][0][AT] = None
    fresh.chat(told)
    headers = {"Authorization": "Bearer alice"}
    assert post(fresh.url, "/tokenize", {"messages": marked("pine")}, headers=headers).status_code == 200
    assert post(fresh.url, "/tokenize", {"messages": marked("pine", {})}, headers=headers).status_code == 400
    assert fresh.entries() == []


@pytest.mark.slow
@pytest.mark.alone
def test_the_time_for_many_breakpoints_is_in_proportion_to_their_number():
    def seconds(num_parts: int) -> float:
        parts = [TextPart(**text("a", MARK))] * num_parts
        started = time.thread_time()
        Breakpoints().text(parts, "content", 0, "user")
        return time.thread_time() - started

    few, many = (min(seconds(count) for _ in range(3)) for count in (1000, 16_000))
    assert many < 64 * few
