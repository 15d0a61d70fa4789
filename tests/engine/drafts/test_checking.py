"""Drafts are checked by the step that computes them. The model is `HashRunner`: a wrong block is a wrong answer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import numpy as np
import pytest

from drafters import draft_as_told, random_guess
from foreword.cache import TokenSequence
from foreword.engine import Prompt
from foreword.request import Request, RequestOutput, SamplingParams
from hash_runner import HashEngine, continuation, expected_answer
from lanes import more_seeds
from random_driver import VOCAB_SIZE as TWO_TOKENS
from random_driver import Driver

VOCAB_SIZE = 50
PROMPT = list(range(10, 20))


def answer_to(prompt: Sequence[int], num_tokens: int) -> list[int]:
    return list(islice(continuation(prompt, seed=0, vocab_size=VOCAB_SIZE), num_tokens))


def right(request: Request, most: int) -> list[int]:
    """The tokens that will come, and then some more."""
    prompt = request.sequence.token_ids[: request.num_prompt_tokens].tolist()
    return answer_to(prompt, request.num_output_tokens + most)[request.num_output_tokens :]


def wrong(request: Request, most: int) -> list[int]:
    return [(token_id + 1) % VOCAB_SIZE for token_id in right(request, most)]


def half_right(request: Request, most: int) -> list[int]:
    """Two right tokens, then wrong ones."""
    return right(request, most)[:2] + wrong(request, most)[2:]


def submit(parts: HashEngine, name: str, prompt: Sequence[int], **options: object) -> RequestOutput:
    params = SamplingParams(seed=0, **options)  # type: ignore[arg-type]
    return parts.engine.add_request(name, Prompt(np.array(prompt, np.int32)), params)


def test_right_drafts_bring_several_tokens_a_step() -> None:
    parts = HashEngine.build()
    drafting = draft_as_told(parts.engine, right, 5)
    output = submit(parts, "a", PROMPT, max_tokens=14)
    assert parts.step() == {"a": (0, 10)}
    assert parts.step() == {"a": (10, 16)}
    assert len(output.outputs[0].token_ids) == 1 + 6
    assert parts.step() == {"a": (16, 22)}
    assert parts.step() == {"a": (22, 23)}, "one token is left, so there is nothing to draft"
    assert output.outputs[0].token_ids == answer_to(PROMPT, 14)
    assert output.outputs[0].drafts.accepted == drafting.counts.accepted == {"told": 10}
    assert not output.outputs[0].drafts.rejected


def test_wrong_drafts_change_nothing() -> None:
    parts = HashEngine.build()
    draft_as_told(parts.engine, wrong, 3)
    output = submit(parts, "a", PROMPT, max_tokens=5)
    parts.step()
    assert [parts.step()["a"] for _ in range(4)] == [(10, 14), (11, 14), (12, 14), (13, 14)]
    assert output.outputs[0].token_ids == answer_to(PROMPT, 5)
    assert output.outputs[0].drafts.rejected == {"told": 3 + 2 + 1}


@pytest.mark.parametrize("index", ["radix", "hash"])
@pytest.mark.parametrize("guess", [right, wrong, half_right])
def test_the_next_turn_hits_what_was_accepted_and_nothing_that_was_rejected(index: str, guess: object) -> None:
    """As many tokens as without drafts, or one more: the last one, which a right draft computed too."""
    hits = {}
    for drafts in (False, True):
        parts = HashEngine.build(prefix_index=index)  # type: ignore[arg-type]
        if drafts:
            draft_as_told(parts.engine, guess, 6)  # type: ignore[arg-type]
        for number, num_tokens in enumerate((7, 8, 9, 13)):
            prompt = [number, *PROMPT]
            output = submit(parts, f"{number}", prompt, max_tokens=num_tokens)
            parts.drain()
            text = [*prompt, *output.outputs[0].token_ids]
            for tail in (text, text[:-1], [*text[:-1], VOCAB_SIZE - 1, 3, 3, 3, 3, 3, 3, 3, 3]):
                probe = TokenSequence("probe", [*tail, 1], block_size=4)
                hits.setdefault(drafts, []).append(parts.manager.get_computed_blocks(probe).num_tokens)
            again = submit(parts, f"again {number}", [*text, 7], max_tokens=6)
            parts.drain()
            assert again.outputs[0].token_ids == answer_to([*text, 7], 6)
    for with_drafts, without in zip(hits[True], hits[False], strict=True):
        assert with_drafts - without in (0, 1)


def test_drafts_go_over_a_stop_token_and_past_the_end() -> None:
    answer = answer_to(PROMPT, 40)
    stop = answer[9]
    first = answer.index(stop)
    for draft_tokens in (1, 4, 12):
        parts = HashEngine.build()
        draft_as_told(parts.engine, right, draft_tokens)
        output = submit(parts, "a", PROMPT, max_tokens=40, stop_token_ids=(stop,), min_tokens=3)
        other = submit(parts, "b", PROMPT, max_tokens=7)
        parts.drain()
        assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == (answer[: first + 1], "stop")
        assert (other.outputs[0].token_ids, other.outputs[0].finish_reason) == (answer[:7], "length")


def test_drafts_take_no_block_from_a_request_and_no_room_beyond_the_budget() -> None:
    parts = HashEngine.build(num_blocks=7, block_size=4, max_num_batched_tokens=12)
    draft_as_told(parts.engine, right, 8)
    outputs = [submit(parts, name, PROMPT[:6], max_tokens=7) for name in "ab"]
    while parts.engine.has_unfinished_requests():
        spans = parts.step()
        assert sum(end - start for start, end in spans.values()) <= 12
    assert parts.scheduler.num_preemptions == 0
    assert all(output.outputs[0].token_ids == answer_to(PROMPT[:6], 7) for output in outputs)


def test_a_drafting_request_can_be_aborted_and_a_failed_step_leaves_nothing() -> None:
    parts = HashEngine.build()
    drafting = draft_as_told(parts.engine, half_right, 6)
    output = submit(parts, "a", PROMPT, max_tokens=30)
    for _ in range(3):
        parts.step()
    parts.engine.abort_request("a")
    parts.engine.check_integrity()
    num_tokens = len(output.outputs[0].token_ids)
    assert output.outputs[0].token_ids == answer_to(PROMPT, num_tokens)
    assert num_tokens == 1 + 3 + 3

    def fail(batch: object) -> None:
        raise FloatingPointError("the model broke")

    submit(parts, "b", PROMPT, max_tokens=30)
    parts.step()
    parts.runner.on_execute = fail
    with pytest.raises(Exception, match="the model broke"):
        parts.step()
    parts.engine.check_integrity()
    assert parts.manager.get_num_free_blocks() == parts.manager.num_blocks
    parts.runner.on_execute = lambda batch: None
    again = submit(parts, "c", PROMPT, max_tokens=30)
    parts.drain()
    assert again.outputs[0].token_ids == answer_to(PROMPT, 30)
    assert drafting.counts.num_accepted > 10


def test_answers_of_one_prompt_draft_each_for_itself() -> None:
    parts = HashEngine.build()
    draft_as_told(parts.engine, random_guess(np.random.default_rng(0), VOCAB_SIZE), 4)
    output = submit(parts, "a", PROMPT, max_tokens=20, n=3)
    parts.drain()
    for completion in output.outputs:
        params = SamplingParams(seed=0, max_tokens=20)
        expected = expected_answer(PROMPT, params, seed=completion.index, vocab_size=VOCAB_SIZE, max_model_len=512)
        assert (completion.token_ids, completion.finish_reason) == expected


class DraftingDriver(Driver):
    """The random driver, with drafts at random: over two tokens, half of them are right."""

    def start(self) -> None:
        super().start()
        guess = random_guess(self.rng, TWO_TOKENS)
        self.drafting = draft_as_told(self.parts.engine, guess, int(self.rng.integers(1, 9)))


@pytest.mark.parametrize("seed", range(5))
def test_every_answer_is_right_whatever_is_drafted_and_whatever_happens_around_it(seed: int) -> None:
    driver = DraftingDriver(seed)
    driver.run(300)
    if driver.parts.scheduler.config.max_num_batched_tokens > 3:
        assert driver.drafting.counts.num_accepted
        assert driver.drafting.counts.num_rejected


@pytest.mark.slow
@pytest.mark.parametrize("seed", more_seeds(2000, 10))
def test_every_answer_is_right_in_many_more_episodes_with_drafts(seed: int) -> None:
    DraftingDriver(seed).run(1000)
