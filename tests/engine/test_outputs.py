"""Outputs belong to callers: they may change them, and the engine goes on as if they had not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest

from foreword.engine import Prompt
from foreword.request import RequestOutput, SamplingParams
from hash_runner import HashEngine, expected_answer

PROMPT = list(range(9))
NUM_GENERATED = 30


def submit(parts: HashEngine, name: str, prompt: list[int], max_tokens: int) -> RequestOutput:
    params = SamplingParams(max_tokens=max_tokens, seed=3)
    return parts.engine.add_request(name, Prompt(np.array(prompt, np.int32)), params)


def answer_to(prompt: list[int], max_tokens: int) -> list[int]:
    params = SamplingParams(max_tokens=max_tokens, seed=3)
    return expected_answer(prompt, params, seed=3, vocab_size=50, max_model_len=512)[0]


def overwrite(token_ids: list[int]) -> None:
    token_ids[:] = [7] * len(token_ids)


def take_the_last(token_ids: list[int]) -> None:
    del token_ids[-1:]


EDITS: list[Callable[[list[int]], None]] = [overwrite, take_the_last, list.clear, lambda tokens: tokens.append(1)]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("prefix_index", ["radix", "hash"])
def test_who_edits_the_tokens_of_a_running_answer_changes_neither_outputs_nor_later_hits(
    edit: Callable[[list[int]], None], prefix_index: Literal["radix", "hash"]
) -> None:
    parts = HashEngine.build(prefix_index=prefix_index)
    edited, beside = submit(parts, "edited", PROMPT, NUM_GENERATED), submit(parts, "beside", PROMPT[::-1], 20)
    while parts.engine.has_unfinished_requests():
        parts.step()
        if not edited.finished:
            edit(edited.outputs[0].token_ids)
    answer = answer_to(PROMPT, NUM_GENERATED)
    assert edited.outputs[0].token_ids == answer
    assert beside.outputs[0].token_ids == answer_to(PROMPT[::-1], 20)

    conversation = [*PROMPT, *answer]
    later = submit(parts, "later", [*conversation, 5, 6, 7], 4)
    parts.drain()
    assert later.num_cached_tokens >= (len(conversation) - 1) // 4 * 4, "every full block of the first one is found"
    assert later.outputs[0].token_ids == answer_to([*conversation, 5, 6, 7], 4)


def test_a_list_that_is_read_at_each_step_is_one_list_that_grows() -> None:
    parts = HashEngine.build()
    output = submit(parts, "a", PROMPT, 6)
    held, seen = output.outputs[0].token_ids, []
    while parts.engine.has_unfinished_requests():
        parts.step()
        assert output.outputs[0].token_ids is held
        seen.append(list(held))
    answer = answer_to(PROMPT, 6)
    assert seen == [answer[:length] for length in range(1, 7)]


def test_a_list_that_nobody_reads_while_the_request_runs_is_complete_in_the_end() -> None:
    parts = HashEngine.build()
    held = submit(parts, "a", PROMPT, 6).outputs[0].token_ids
    aborted = submit(parts, "b", PROMPT[:5], 20).outputs[0].token_ids
    for _ in range(4):
        parts.step()
    parts.engine.abort_request("b")
    parts.drain()
    assert held == answer_to(PROMPT, 6)
    assert aborted == answer_to(PROMPT[:5], 20)[:4]
