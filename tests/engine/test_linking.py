"""Linked requests and those that compute their sources, in the queue and in a pool that is short of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from doors import preempt, running_in, waiting_in
from foreword.cache import NO_EXTRA_KEYS, ExtraKeys, KeyedSpan
from foreword.engine import Engine, Keep, Prompt
from foreword.engine.keeper import EntryFile
from foreword.errors import EngineError, InvalidRequestError
from foreword.request import LinkedRun, Links, SamplingParams
from hash_runner import HashEngine, expected_answer
from late_runner import LateRunner

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)
COMMON, RARE, OTHER = [1, 2, 3, 4, 5, 6, 7, 8], [11, 12, 13, 14, 15, 16, 17, 18], [21, 22]
"""Texts of four, four and one block."""


def engine_of(**options: Any) -> HashEngine:
    return HashEngine.build(**{"block_size": 2, "vocab_size": 100, "scheduling_policy": "prefix", **options})


def add_linked(
    parts: HashEngine,
    request_id: str,
    *text: Sequence[int] | LinkedRun,
    priority: int = 0,
    tenant: str | None = None,
    keys: ExtraKeys = NO_EXTRA_KEYS,
) -> None:
    """Queue a prompt of texts and runs; `begin` and `end` of a run are told from where it stands."""
    tokens: list[int] = []
    runs: list[LinkedRun] = []
    for part in text:
        if isinstance(part, LinkedRun):
            begin, length = len(tokens), part.end - part.begin
            tokens += part.source[part.first : part.source_end].tolist()
            runs.append(LinkedRun(begin, begin + length, part.source, part.first))
        else:
            tokens += part
    links = Links("first-k", tuple(runs), np.arange(len(tokens), dtype=np.int32))
    prompt = Prompt(np.array(tokens, np.int32), priority=priority, links=links, owner=tenant, extra_keys=keys)
    parts.engine.add_request(request_id, prompt, ONE_TOKEN)


def run_of(source: Sequence[int], first: int = 0) -> LinkedRun:
    """The source's tokens from `first` on."""
    return LinkedRun(0, len(source) - first, np.array(source, np.int32), first)


def compute(parts: HashEngine, *texts: Sequence[int]) -> None:
    for text in texts:
        parts.add("plain", text, ONE_TOKEN)
        parts.drain()


@pytest.mark.parametrize("policy", ["fcfs", "prefix", "priority"])
def test_a_source_that_was_evicted_is_computed_before_the_oldest_request_that_needs_it(policy: str) -> None:
    """All three begin alike, so the prefix queue asks for the oldest of them and passes over the others with it."""
    parts = engine_of(scheduling_policy=policy)
    compute(parts, COMMON)
    add_linked(parts, "older", COMMON[:2], run_of(COMMON), [9])
    parts.manager.reset_prefix_cache()
    add_linked(parts, "newer", COMMON[:2], run_of(COMMON), [9])
    assert list(parts.step()) == ["source 1 of newer"]
    parts.drain()


def test_a_source_moves_forward_for_an_urgent_request() -> None:
    parts = engine_of(scheduling_policy="priority", max_num_seqs=1)
    add_linked(parts, "patient", run_of(COMMON), [9], priority=2)
    parts.add("plain", RARE, ONE_TOKEN, priority=1)
    add_linked(parts, "urgent", OTHER, run_of(COMMON), [9], priority=0)
    steps = [next(iter(parts.step())) for _ in range(4)]
    assert steps == ["source 1 of patient", "urgent", "plain", "patient"]
    assert not parts.engine.has_unfinished_requests()


def test_a_moved_source_is_computed_in_the_turn_of_the_tenant_that_needs_it_first() -> None:
    parts = engine_of(max_num_seqs=1)
    compute(parts, COMMON)
    add_linked(parts, "older", run_of(COMMON), [9], tenant="ada")
    parts.manager.reset_prefix_cache()
    add_linked(parts, "newer", OTHER, run_of(COMMON), [9], tenant="bob")
    [source] = [request for request in waiting_in(parts.engine) if request.request_id.startswith("source")]
    assert source.tenant == "bob"
    parts.step()
    assert source.tenant == "ada"
    parts.drain()


def test_a_request_that_waits_for_one_source_gives_the_others_back_to_whom_they_stand_in_the_way() -> None:
    """The one that waits stands first in the queue, because more of it is cached than of the source that it lacks."""
    parts = engine_of(num_blocks=12, max_overtake_s=1000.0)
    compute(parts, COMMON, OTHER, [31, 32], [41, 42])
    add_linked(parts, "waits", [31, 32], run_of(COMMON, first=6), run_of(RARE, first=6), [9])
    add_linked(parts, "large", [41, 42], run_of(OTHER), [50, *range(60, 72)])
    assert list(parts.step()) == ["large"]
    parts.drain()


def test_a_source_that_is_preempted_waits_before_who_needs_it_by_then() -> None:
    """It is not the first linked request that needs it, so nothing else would move it."""
    parts = engine_of(scheduling_policy="priority", num_blocks=60, max_num_batched_tokens=8, max_num_seqs=2)
    long = list(range(30, 54))
    add_linked(parts, "patient", run_of(long), [9], priority=2)
    parts.step()
    add_linked(parts, "first", [71, 72], run_of(RARE), [9], priority=0)
    add_linked(parts, "urgent", OTHER, run_of(long), [9], priority=0)
    for number in range(2):
        answer = SamplingParams(max_tokens=40, temperature=0.0)
        parts.add(f"middle {number}", [81 + number, 90], answer, priority=1)
    preempt(parts.engine, next(iter(running_in(parts.engine))))
    order: list[str] = []
    while parts.engine.has_unfinished_requests():
        order += parts.step()
    assert order.index("source 1 of patient") < order.index("middle 0")


def test_a_tenant_s_evicted_source_is_computed_when_its_turn_comes() -> None:
    """Its request does not wait until those of other tenants have gone, whose sources are computed meanwhile."""
    parts = engine_of(max_num_seqs=1, num_blocks=200, max_overtake_s=1000.0, max_num_batched_tokens=16)
    compute(parts, COMMON)
    for number in range(8):
        add_linked(parts, f"ada {number}", [60 + number, 3], run_of([20 + number, 4, 5, 6]), [9], tenant="ada")
    add_linked(parts, "bob", OTHER, run_of(COMMON), [9], tenant="bob")
    parts.manager.reset_prefix_cache()
    order: list[str] = []
    while parts.engine.has_unfinished_requests():
        order += parts.step()
    assert order.index("bob") < order.index("ada 4") < order.index("ada 7")


def test_a_source_whose_step_failed_is_computed_again() -> None:
    """The linked request holds the source while it is computed; what it holds then is worth nothing."""
    world = engine_of(max_num_seqs=1)  # so that no step is planned on what the failed one computes
    runner = LateRunner(world.runner)
    engine = Engine(world.manager, world.scheduler.config, runner, world.engine.limits)
    runner.fail_at = 1
    links = Links("first-k", (LinkedRun(2, 10, np.array(COMMON, np.int32), 0),), np.arange(11, dtype=np.int32))
    prompt, params = [*OTHER, *COMMON, 5], SamplingParams(max_tokens=1, seed=3)
    output = engine.add_request("linked", Prompt(np.array(prompt, np.int32), links=links), params)
    engine.step()
    with pytest.raises(EngineError, match="source 1 of linked"):
        engine.step()
    while not output.finished:
        engine.step()
    whole = links.in_whole_blocks(2)
    wanted, _ = expected_answer(prompt, params, seed=3, vocab_size=100, max_model_len=512, links=whole)
    assert output.outputs[0].token_ids == wanted
    engine.check_integrity()


def test_a_picture_and_a_link_stand_in_one_prompt() -> None:
    """Whoever has another picture shares the link's source, and nothing of the prompt."""
    parts, computed = engine_of(), []
    for number, picture in enumerate(("cat", "cat", "dog")):
        before = parts.engine.num_computed_tokens
        keys = ExtraKeys(spans=(KeyedSpan("media", picture, 0, 2),))
        add_linked(parts, str(number), OTHER, run_of(COMMON), [9], keys=keys)
        parts.drain()
        computed.append(parts.engine.num_computed_tokens - before)
    assert computed == [len(COMMON) + 3, 1, 3]
    for offset, length in ((2, 1), (1, 2), (9, 2)):
        with pytest.raises(
            InvalidRequestError, match=rf"span at positions {offset} to {offset + length} .*a link copies"
        ):
            add_linked(
                parts,
                "x",
                OTHER,
                run_of(COMMON),
                [9],
                keys=ExtraKeys(spans=(KeyedSpan("media", "cat", offset, length),)),
            )


def test_a_linked_prompt_wakes_the_entry_of_an_earlier_process_that_it_begins_with(tmp_path: Path) -> None:
    for is_restarted in (False, True):
        parts = engine_of(max_pinned_share=0.5)
        parts.engine.entries.open(EntryFile(tmp_path / "entries"))
        if is_restarted:
            assert [entry.num_kept_tokens for entry in parts.engine.entries.entries()] == [0]
            add_linked(parts, "linked", COMMON, run_of(RARE), [9])
            parts.drain()
        else:
            compute(parts, [*COMMON, 9])
            parts.engine.entries.pin(Prompt(np.array(COMMON, np.int32)), Keep(60.0))
        assert [entry.num_kept_tokens for entry in parts.engine.entries.entries()] == [len(COMMON)]
        parts.engine.check_integrity()
        parts.engine.entries.save(at_once=True)
