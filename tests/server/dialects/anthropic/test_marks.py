"""Anthropic's cache_control through the official client: what is kept, how long, for whom, and how it is counted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from foreword.server.dialects.anthropic.fields import CreateMessageRequest
from foreword.server.dialects.anthropic.messages import chat_of
from foreword.server.options import ServerConfig
from live_server import FALCON, MODEL, ServerThread, document, embedded_llm, post

NUM_BLOCKS, BLOCK = 128, 16
QUESTION = FALCON[1:]
MARK = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
TOOL: dict[str, Any] = {
    "name": "lookup",
    "description": "Looks up a fact.",
    "input_schema": {"type": "object", "properties": {"fact": {"type": "string"}}, "required": ["fact"]},
}


class World(ServerThread):
    """A server with a small cache for two tenants, whose engine's time the tests move."""

    now = 1e9  # after the real clock, which the engine read before the tests set it

    def client(self, tenant: str = "alice") -> anthropic.Anthropic:
        return anthropic.Anthropic(base_url=self.url, api_key=tenant, max_retries=0, timeout=120)

    def ask(self, tenant: str = "alice", **body: Any) -> Any:
        """A call with temperature 0 and one token, unless it says otherwise; returns the message."""
        salt = {"cache_salt": body.pop("cache_salt")} if "cache_salt" in body else {}
        body = {"model": MODEL, "max_tokens": 1, "messages": QUESTION, **body}
        with self.client(tenant) as client:
            return client.messages.create(**body, extra_body={"temperature": 0, **salt})

    def usage(self, tenant: str = "alice", **body: Any) -> tuple[int, int, int]:
        """The tokens that a call read, created and did neither with."""
        usage = self.ask(tenant, **body).usage
        created = usage.cache_creation
        assert (
            created.ephemeral_5m_input_tokens + created.ephemeral_1h_input_tokens == usage.cache_creation_input_tokens
        )
        return usage.cache_read_input_tokens, usage.cache_creation_input_tokens, usage.input_tokens

    def flood(self, tenant: str = "alice") -> None:
        """Prompts that nobody repeats, enough to evict everything that is not kept."""
        self._number = getattr(self, "_number", 0)
        for _ in range(4):
            self._number += 1
            self.ask(tenant, messages=[{"role": "user", "content": document(f"flood {self._number}", 30)}])

    def entry_list(self) -> list[Any]:
        return super().ask(lambda engine: engine.entries.entries())


def text(content: str, control: Any = None) -> dict[str, Any]:
    return {"type": "text", "text": content, **({} if control is None else {"cache_control": control})}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[World]:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    keys.write_text('[alice]\nkeys = ["alice"]\n\n[bob]\nkeys = ["bob"]\n')
    with (
        embedded_llm(num_gpu_blocks_override=NUM_BLOCKS, eviction_policy="lru") as llm,
        World(llm, ServerConfig(keys_file=keys)) as server,
    ):
        llm.engine.clock = lambda: server.now
        yield server


@pytest.fixture(autouse=True)
def _a_new_day(request) -> Iterator[None]:
    yield
    if "world" in request.fixturenames:
        request.getfixturevalue("world").now += 86_400


def test_without_marks_nothing_is_created(world):
    system = document("without marks")
    assert world.usage(system=system)[1] == 0
    again, created, rest = world.usage(system=system)
    assert (created, again > 100, rest < 32) == (0, True, True)
    assert world.entry_list() == []


def test_a_marked_system_prompt_is_created_once_and_read_by_other_questions(world):
    system = [text(document("marked"), MARK)]
    read, created, rest = world.usage(system=system)
    assert (read < 32, created > 100, rest < 64) == (True, True, True)
    other = [{"role": "user", "content": "Something else entirely?"}]
    again, more, _ = world.usage(system=system, messages=other)
    assert (0 <= again - read - created < BLOCK, more) == (True, 0)
    (entry,) = world.entry_list()
    assert (entry.owner, entry.source, entry.num_kept_tokens) == ("alice", "breakpoint", read + created)


def test_a_conversation_reads_what_its_last_turn_read_and_created(world):
    messages: list[Any] = []
    before = None
    for turn in range(4):
        messages.append(user(text(document(f"turn {turn}", 3), MARK)))
        read, created, _ = world.usage(messages=messages)
        assert created > 30
        if before is not None:
            assert 0 <= read - before < BLOCK, "the last block holds what follows too"
        before = read + created
        messages[-1] = user(text(document(f"turn {turn}", 3)))
        messages.append({"role": "assistant", "content": "4821"})


def test_tokens_count_for_the_longest_time_they_are_kept_for(world):
    system, question = [text(document("an hour", 5), HOUR)], [user(text(document("five minutes", 5), MARK))]
    message = world.ask(system=system, messages=question)
    hour, minutes = (
        message.usage.cache_creation.ephemeral_1h_input_tokens,
        message.usage.cache_creation.ephemeral_5m_input_tokens,
    )
    assert hour > 60 < minutes
    read_before = message.usage.cache_read_input_tokens
    world.flood()
    world.now += 301
    world.flood()
    assert 0 <= world.usage(system=system, messages=question)[0] - read_before - hour < BLOCK
    # A hit that ends inside the hour's part: what is left of it, and all of the rest.
    longer = [text(document("an hour", 5)), text(document("more of the hour", 5), HOUR)]
    usage = world.ask(system=longer, messages=question).usage
    assert usage.cache_read_input_tokens >= hour - 1
    assert usage.cache_creation.ephemeral_1h_input_tokens > 60 < usage.cache_creation.ephemeral_5m_input_tokens


def test_a_prompt_below_one_block_is_no_error(world):
    read, created, rest = world.usage(messages=[user(text("a", MARK))])
    assert read + created < BLOCK
    assert rest > 0
    assert sum(entry.num_kept_tokens for entry in world.entry_list()) in (0, read + created)


def test_the_mark_of_the_whole_body_is_one_on_its_last_block(world):
    body = {"system": [text(document("automatic"))], "messages": [user(text(document("automatic question")))]}
    created = world.usage(**body, cache_control=MARK)[1]
    assert created > 200
    (entry,) = world.entry_list()
    explicit = [user(text(document("automatic question"), MARK))]
    world.usage(system=body["system"], messages=explicit)
    assert world.entry_list() == [entry], "both are the same entry"
    for last, status in ((MARK, 200), (HOUR, 400)):
        told = {**body, "messages": [user(text("one"), text("two", last))], "cache_control": MARK}
        answer = post(
            world.url, "/v1/messages", {"model": MODEL, "max_tokens": 1, **told}, headers={"x-api-key": "alice"}
        )
        assert answer.status_code == status, answer.text
    thoughts = {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""}]}
    world.ask(messages=[*QUESTION, thoughts, *QUESTION], cache_control=MARK)


FIVE = [text(str(number), MARK) for number in range(5)]
AFTER = (
    "a ttl='1h' cache_control block must not come after a ttl='5m' cache_control block. Note that blocks are processed"
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"messages": [user(*FIVE)]}, "A maximum of 4 blocks with cache_control may be provided. Found 5."),
        (
            {"tools": [{**TOOL, "cache_control": MARK}], "system": FIVE[:2], "messages": [user(*FIVE[:2])]},
            "A maximum of 4 blocks with cache_control may be provided. Found 5.",
        ),
        (
            {"messages": [user(*FIVE[:4], text("x"))], "cache_control": MARK},
            "A maximum of 4 blocks with cache_control may be provided. Found 5.",
        ),
        (
            {"messages": [user(text("a", MARK), text("b", HOUR))]},
            f"messages.0.content.1.cache_control.ttl: {AFTER}",
        ),
        (
            {"system": [text("a", MARK)], "messages": [user(text("b", HOUR))]},
            f"messages.0.content.0.cache_control.ttl: {AFTER}",
        ),
        ({"messages": [user(text("a", {**MARK, "ttl": "2h"}))]}, "messages.0.content.0.text.cache_control.ttl: "),
        ({"messages": [user(text("a", {"type": "persistent"}))]}, "messages.0.content.0.text.cache_control.type: "),
        ({"messages": [user(text("a", {**MARK, "x": 1}))]}, "messages.0.content.0.text.cache_control.x: Extra inputs"),
        ({"max_tokens": 0, "stream": True}, "max_tokens: 0 cannot be combined with stream"),
        (
            {"max_tokens": 0, "thinking": {"type": "enabled", "budget_tokens": 1024}},
            "max_tokens: 0 cannot be combined with thinking",
        ),
        (
            {"max_tokens": 0, "output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "max_tokens: 0 cannot be combined with output_config.format",
        ),
        (
            {"max_tokens": 0, "tools": [TOOL], "tool_choice": {"type": "any"}},
            "max_tokens: 0 cannot be combined with tool_choice",
        ),
        ({"max_tokens": -1}, "max_tokens: Input should be greater than or equal to 0"),
    ],
)
def test_wrong_marks_are_refused_in_anthropics_words(world, change, message):
    with pytest.raises(anthropic.BadRequestError) as caught, world.client() as client:
        client.messages.create(**{"model": MODEL, "max_tokens": 1, "messages": QUESTION, **change})
    assert caught.value.body["error"]["message"].startswith(message)


def test_marks_that_are_null_or_have_a_scope_are_taken(world):
    told = document("scope")
    assert world.usage(messages=[user({**text(told), "cache_control": None})])[1] == 0
    other = document("with scope")
    assert world.usage(messages=[user(text(other, {**MARK, "scope": "global"}))])[1] > 100
    hours_first = [user(text(document("hours first"), HOUR), text("b", MARK))]
    assert world.usage(messages=hours_first)[1] > 100


def test_tools_calls_and_results_can_be_marked(world):
    tool = {**TOOL, "description": document("a tool", 5), "cache_control": MARK}
    _, created, _ = world.usage(tools=[tool])
    assert created > 60
    other = [{"role": "user", "content": "Another?"}]
    assert world.usage(tools=[tool], messages=other)[0] >= created, "whatever the messages are"
    call = {
        "type": "tool_use",
        "id": "t1",
        "name": "lookup",
        "input": {"fact": document("a call", 5)},
        "cache_control": MARK,
    }
    turns = [*QUESTION, {"role": "assistant", "content": [call]}]
    result = {"type": "tool_result", "tool_use_id": "t1", "content": document("a result", 5), "cache_control": MARK}
    _, created, _ = world.usage(tools=[tool], messages=[*turns, user(result)])
    assert created > 150
    short = {"type": "tool_result", "tool_use_id": "t1", "content": [text("x")], "is_error": True}
    assert world.usage(tools=[tool], messages=[*turns, user(short)])[0] > 180
    nested = {"type": "tool_result", "tool_use_id": "t1", "content": [text(document("nested", 5), MARK), text("x")]}
    assert world.usage(tools=[tool], messages=[*turns, user(nested)])[1] > 60


def test_an_entry_is_kept_under_a_flood_for_its_time_from_its_last_use(world):
    body = {"system": [text(document("refreshed"), MARK)]}
    read, created, _ = world.usage(**body)
    everything = read + created
    unmarked = {"system": document("not marked")}
    world.usage(**unmarked)
    world.now += 240
    world.flood()
    assert world.usage(**unmarked)[0] < 32
    plain = {"system": document("refreshed"), "messages": [{"role": "user", "content": "Without a mark?"}]}
    assert world.usage(**plain)[0] >= everything, "a use without a mark refreshes too"
    world.now += 240
    world.flood()
    assert world.usage(**plain)[0] >= everything
    world.now += 301
    world.flood()
    read, again, _ = world.usage(**body)
    assert read < 32 < again, "its time was over: created again"


def test_what_the_budget_does_not_cover_is_not_counted_and_changes_no_answer(world):
    whole = [user(text(document("too long", 60), MARK))]
    message = world.ask(messages=whole, max_tokens=8)
    most = int(NUM_BLOCKS * 0.25) * 16
    usage = message.usage
    assert (
        usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        <= most
        < sum((usage.cache_read_input_tokens, usage.cache_creation_input_tokens, usage.input_tokens))
    )
    (entry,) = world.entry_list()
    assert entry.num_kept_tokens < entry.num_tokens
    world.flood()
    plain = world.ask(messages=[user(text(document("too long", 60)))], max_tokens=8, cache_salt="another")
    assert plain.content == message.content


def test_no_answer_only_the_prompt(world):
    body = {"messages": [user(text(document("prewarm"), MARK))]}
    message = world.ask(max_tokens=0, **body)
    assert (message.content, message.stop_reason, message.usage.output_tokens) == ([], "max_tokens", 0)
    assert message.usage.cache_creation_input_tokens > 100
    read, created, _ = world.usage(**body)
    assert (read > 100, created) == (True, 0)


def test_tenants_and_salts_are_apart_and_no_flood_reaches_anothers_entries(world):
    body = {"system": [text(document("apart"), MARK)]}
    read, created, _ = world.usage(**body)
    assert world.usage("bob", **body)[0] == 0
    assert world.usage(**body, cache_salt="x")[0] == 0
    for number in range(12):  # more marked tokens than both may keep
        world.ask("bob", messages=[user(text(document(f"bob {number}", 12), HOUR))])
    world.flood("bob")
    assert world.usage(**body)[0] >= read + created
    assert {entry.owner for entry in world.entry_list()} == {"alice", "bob"}


def test_of_two_entries_with_one_head_the_other_stays(world):
    head = document("one head")
    _, created, _ = world.usage(system=[text(head, HOUR)], messages=[user(text(document("its tail"), MARK))])
    world.now += 301
    world.flood()
    assert 100 < world.usage(system=head)[0] < created


def test_streams_have_the_same_counts_from_their_start(world):
    body = {"model": MODEL, "max_tokens": 4, "messages": [user(text(document("streamed"), MARK))]}
    with world.client() as client, client.messages.stream(**body) as stream:
        start = next(event for event in stream if event.type == "message_start")
        final = stream.get_final_message().usage
    assert start.message.usage.cache_creation_input_tokens == final.cache_creation_input_tokens > 100
    assert start.message.usage.input_tokens == final.input_tokens


def test_counting_tokens_keeps_nothing(world):
    with world.client() as client:
        told = [user(text(document("counted"), MARK))]
        assert client.messages.count_tokens(model=MODEL, messages=told).input_tokens > 100
    assert world.entry_list() == []


# ------------------------------------------------------------------ diagnostics


def test_diagnostics_name_the_earliest_part_that_changed(world):
    def told(previous: str | None, tenant: str = "alice", **change: Any) -> Any:
        body = {"tools": [TOOL], "system": document("diagnosed"), "messages": QUESTION, **change}
        return world.ask(tenant, **body, diagnostics={"previous_message_id": previous})

    first = told(None)
    assert first.diagnostics is None
    turns = [*QUESTION, {"role": "assistant", "content": "4821"}, *QUESTION]
    assert told(first.id, messages=turns).diagnostics is None
    changes = {
        "tools_changed": {"tools": [{**TOOL, "description": "Another."}]},
        "system_changed": {"system": document("diagnosed otherwise")},
        "messages_changed": {"messages": [{"role": "user", "content": "Another?"}, *turns[1:]]},
    }
    for kind, change in changes.items():
        reason = told(first.id, **change).diagnostics.cache_miss_reason
        assert (reason.type, reason.cache_missed_input_tokens > 0) == (kind, True)
    for previous, tenant in (("msg_unknown", "alice"), (first.id, "bob")):
        assert told(previous, tenant).diagnostics.cache_miss_reason.type == "previous_message_not_found"
    with (
        world.client() as client,
        client.messages.stream(
            model=MODEL,
            max_tokens=1,
            messages=[{"role": "user", "content": "Else?"}],
            tools=[TOOL],
            system=document("diagnosed"),
            diagnostics={"previous_message_id": first.id},
        ) as stream,
    ):
        start = next(event for event in stream if event.type == "message_start")
        assert start.message.diagnostics.cache_miss_reason.type == "messages_changed"


@pytest.mark.slow
@pytest.mark.alone
def test_the_time_for_many_blocks_is_in_proportion_to_their_number(world):
    def seconds(num_blocks: int) -> float:
        blocks = [{"type": "text", "text": "a"}] * num_blocks
        told = [{"role": role, "content": blocks} for role in ("user", "assistant", "user")]
        body = CreateMessageRequest.model_validate({"model": MODEL, "max_tokens": 1, "messages": told})
        started = time.thread_time()
        chat_of(world.service, body, 0)
        return time.thread_time() - started

    few = min(seconds(1000) for _ in range(3))
    assert seconds(16_000) < 64 * few
