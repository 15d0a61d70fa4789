"""Drafts where text and grammars are: stop strings, structured answers, and what an LLM and its options say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from drafters import draft_as_told
from foreword import LLM, SamplingParams
from foreword.errors import ConfigError
from foreword.request import Request, RequestOutput, StructuredOutputsParams
from tiny_models import random_tokens

SCHEMA = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 6}},
    "required": ["names"],
    "additionalProperties": False,
}
FORMS = [{"regex": "[0-9]{3}(-[a-c]+)*"}, {"json": SCHEMA}, {"choice": ("a falcon", "a falcon's eye")}]


@pytest.fixture(scope="module")
def llm(chat_model: Path) -> Iterator[LLM]:
    with LLM(str(chat_model), kv_cache_memory_bytes=2**23, block_size=4, draft_tokens=0) as llm:
        yield llm


def run(llm: LLM, params: SamplingParams) -> list[RequestOutput]:
    llm.reset_prefix_cache()
    return llm.generate(["The answer of the second request", "is"], params)


def contents(outputs: list[RequestOutput]) -> list[Any]:
    each = (one for output in outputs for one in output.outputs)
    return [(one.text, one.token_ids, one.logprobs, one.finish_reason, one.stop_reason) for one in each]


def check_with_drafts(llm: LLM, params: SamplingParams) -> None:
    """Answers are equal with drafts that are right and go on beyond the end, and with those that are half wrong."""
    plain = run(llm, params)
    rng = np.random.default_rng(0)
    answers = {tuple(output.prompt_token_ids): output.outputs[0].token_ids for output in plain}

    def right(request: Request, most: int) -> list[int]:
        prompt = request.sequence.token_ids[: request.num_prompt_tokens].tolist()
        return (answers[tuple(prompt)] + random_tokens(rng, 40))[request.num_output_tokens :][:most]

    def half_right(request: Request, most: int) -> list[int]:
        return right(request, int(rng.integers(0, 4))) + random_tokens(rng, 3)

    for guess, draft_tokens in ((right, 1), (right, 9), (half_right, 3), (half_right, 9)):
        drafting = draft_as_told(llm.engine, guess, draft_tokens)
        assert contents(run(llm, params)) == contents(plain)
        llm.engine.check_integrity()
        assert drafting.counts.num_accepted
    llm.engine.draft(6)
    assert contents(run(llm, params)) == contents(plain)
    llm.engine.draft(0)


@pytest.mark.parametrize(("form", "temperature"), [*zip(FORMS, cycle((0.0, 2.0)))], ids=str)
def test_structured_answers_are_equal(llm: LLM, form: dict[str, Any], temperature: float) -> None:
    wanted = StructuredOutputsParams(**form)
    for seed in range(2):
        params = SamplingParams(max_tokens=40, temperature=temperature, seed=seed, structured_outputs=wanted)
        check_with_drafts(llm, params)


def test_a_draft_is_cut_where_the_grammar_ends_it(llm: LLM) -> None:
    """Wrong drafts that the grammar forbids are not even computed."""
    wanted = StructuredOutputsParams(regex="[0-9]{30}")
    params = SamplingParams(max_tokens=30, temperature=2.0, structured_outputs=wanted)
    assert llm.tokenizer is not None
    [letter] = llm.tokenizer.encode_part("x")
    [digit] = llm.tokenizer.encode_part("7")
    drafting = draft_as_told(llm.engine, lambda request, most: [digit, letter, letter, letter], 4)
    llm.generate(["The"], params)
    counts = drafting.counts
    assert 0 < counts.num_accepted + counts.num_rejected < 30
    llm.engine.draft(0)


def test_an_answer_that_runs_dry_ends_in_the_same_place(llm: LLM) -> None:
    assert llm.tokenizer is not None
    digits = [token_id for text in "0123456789" for token_id in llm.tokenizer.encode_part(text)]
    wanted = StructuredOutputsParams(regex="[0-9]{4}x[0-9]+")
    for seed in range(3):
        params = SamplingParams(
            max_tokens=20, temperature=1.0, seed=seed, structured_outputs=wanted, allowed_token_ids=tuple(digits)
        )
        [plain, _] = run(llm, params)
        assert plain.outputs[0].finish_reason == "content_filter"
        check_with_drafts(llm, params)


def test_stop_strings_end_answers_in_the_middle_of_a_draft(llm: LLM) -> None:
    wanted = SamplingParams(max_tokens=40, temperature=1.0, seed=0, ignore_eos=True)
    for number, output in enumerate(run(llm, wanted)):
        text = output.outputs[0].text
        stops = [text[at : at + 3] for at in (5, len(text) // 2) if len(text[at : at + 3]) == 3]
        check_with_drafts(
            llm,
            replace(wanted, stop=tuple(stops), min_tokens=2, logprobs=1, include_stop_str_in_output=bool(number % 2)),
        )


def test_a_prediction_is_drafted_and_counted(llm: LLM) -> None:
    [plain] = llm.generate(["The"], SamplingParams(max_tokens=30, temperature=0.7, seed=3, ignore_eos=True))
    expected = tuple(plain.outputs[0].token_ids)
    llm.engine.draft(8)
    llm.reset_prefix_cache()
    params = SamplingParams(max_tokens=30, temperature=0.7, seed=3, ignore_eos=True, prediction_token_ids=expected)
    [output] = llm.generate(["The"], params)
    llm.engine.draft(0)
    assert tuple(output.outputs[0].token_ids) == expected
    assert output.outputs[0].drafts.accepted["prediction"] > 15
    assert llm.engine.snapshot().drafts.num_accepted == 0  # of the drafting that is in use: none


@pytest.mark.parametrize(
    ("value", "message"),
    [(-1, "draft_tokens=-1 is too small"), ("many", "is not an integer or auto"), (1.5, "an integer or 'auto'")],
)
def test_options_that_are_no_number_are_refused(chat_model: Path, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(chat_model), draft_tokens=value)


def test_an_llm_drafts_unless_it_is_told_not_to(chat_model: Path) -> None:
    for value, drafts in ((0, False), ("0", False), ("auto", True), ("AUTO", True), (3, True)):
        with LLM(str(chat_model), kv_cache_memory_bytes=2**22, draft_tokens=value, self_check=False) as llm:
            assert (llm.engine.scheduler.drafting is not None) == drafts


def test_the_next_process_begins_with_what_steps_took(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for expects_more in (False, True):
        with LLM(str(chat_model), kv_cache_memory_bytes=2**23) as llm:
            assert llm.engine.step_times is not None
            assert bool(llm.engine.step_times.learnt()) == expects_more
            llm.generate(["The answer"], SamplingParams(max_tokens=12, ignore_eos=True))
            assert llm.engine.step_times.learnt()
    with LLM(str(chat_model), kv_cache_memory_bytes=2**23, draft_tokens=0) as llm:
        assert llm.engine.step_times is None
