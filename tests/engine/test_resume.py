"""An answer that one engine began goes on in another, with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from doors import constrained
from foreword import LLM, SamplingParams
from foreword.engine import Prompt
from foreword.engine.waiting.queue import Turns
from foreword.errors import InvalidRequestError
from foreword.request import RequestOutput, StructuredOutputsParams
from live_server import embedded_llm

TEXT = "The code of the amber falcon is 4821. The code of the amber falcon is"
SCHEMA = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 7},
    "narrowed": {"temperature": 1.3, "seed": 8, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalised": {"temperature": 0.9, "seed": 9, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    "stop string": {"temperature": 1.0, "seed": 3},  # a piece of its own text
    "grammar": {"temperature": 1.0, "seed": 5, "structured_outputs": StructuredOutputsParams(json=SCHEMA)},
    "least length": {"temperature": 1.0, "seed": 6, "min_tokens": 12, "ignore_eos": False},
    "bad words": {"temperature": 1.0, "seed": 11, "bad_words": ["falcon", "the"]},
    "several": {"temperature": 1.0, "seed": 12, "n": 3},
    "log probabilities": {"temperature": 1.0, "seed": 13, "logprobs": 3},
}


@pytest.fixture(scope="module")
def llms() -> Iterator[tuple[LLM, LLM]]:
    with embedded_llm() as one, embedded_llm(block_size=8, max_num_batched_tokens=32) as other:
        yield one, other


def run(llm: LLM, name: str, params: SamplingParams, answered: Any = ()) -> RequestOutput:
    prompt = Prompt(np.array(llm.get_tokenizer().encode(TEXT), np.int32))
    output = llm.engine.add_request(name, prompt, constrained(llm, params), answered)
    while not output.finished:
        llm.engine.step()
    llm.engine.check_integrity()
    return output


@pytest.mark.parametrize("kind", PARAMS)
def test_an_answer_cut_anywhere_goes_on_with_the_same_bits(llms, kind):
    one, other = llms
    params = SamplingParams(**{"max_tokens": 24, "ignore_eos": kind != "grammar", **PARAMS[kind]})
    if kind == "stop string":
        text = run(one, "unstopped", params).outputs[0].text
        params = replace(params, stop=[text[len(text) // 2 :][:3]])
    whole = run(one, "whole", params)
    lengths = [len(answer.token_ids) for answer in whole.outputs]
    assert max(lengths) > 4
    for cut in {0, 1, 2, 7, max(lengths) - 1, max(lengths)}:
        answered = [answer.token_ids[:cut] for answer in whole.outputs]
        other.reset_prefix_cache()
        again = run(other, f"{kind} {cut}", params, answered)
        for ours, theirs in zip(again.outputs, whole.outputs, strict=True):
            assert (ours.token_ids, ours.text) == (theirs.token_ids, theirs.text), cut
            assert (ours.finish_reason, ours.stop_reason) == (theirs.finish_reason, theirs.stop_reason), cut
            if theirs.logprobs is not None:
                assert ours.logprobs == theirs.logprobs[cut:]


@pytest.mark.parametrize("policy", ["fcfs", "priority", "prefix"])
def test_tokens_that_another_engine_generated_are_charged_once(monkeypatch, policy):
    charges: list[int] = []
    monkeypatch.setattr(Turns, "charge", lambda self, tenant, num_tokens: charges.append(num_tokens))
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    with embedded_llm(scheduling_policy=policy) as llm:
        whole = run(llm, "whole", params)
        charged_whole = sum(charges)
        llm.reset_prefix_cache()
        charges.clear()
        run(llm, "again", params, [whole.outputs[0].token_ids[:20]])
    assert sum(charges) == charged_whole == len(whole.prompt_token_ids) + 24


def test_the_cached_prompt_is_found_and_counted_once(llms):
    _, other = llms
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    other.reset_prefix_cache()
    whole = run(other, "whole", params)
    again = run(other, "again", params, [whole.outputs[0].token_ids[:20]])
    length = len(whole.prompt_token_ids)
    assert length - 8 < again.num_cached_tokens <= length, "tokens of the answer are no hit of the prompt"


def test_what_cannot_be_resumed_is_refused_and_nothing_is_queued(llms):
    one, _ = llms
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=1)
    for wrong, told in (
        (replace(params, seed=None), "seed"),
        (replace(params, n=2), "for n=2"),
        (replace(params, max_tokens=1), "at most 1 tokens"),
    ):
        with pytest.raises(InvalidRequestError, match=told):
            run(one, "wrong", wrong, [[1, 2]])
    with pytest.raises(InvalidRequestError, match="token id -1"):
        run(one, "wrong", params, [[-1]])
    assert not one.engine.has_unfinished_requests()
