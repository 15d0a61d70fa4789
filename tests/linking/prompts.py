"""Prompts of random documents, and what an LLM answers to them, down to the bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from foreword import LLM, SamplingParams
from foreword.request import LinkReport, RequestOutput

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, logprobs=4, ignore_eos=True)
LENGTHS = (40, 50, 33, 64)


def documents(lengths: Sequence[int] = LENGTHS, *, seed: int = 0, head: int = 7, question: int = 9) -> dict[str, Any]:
    """A prompt of documents as token ids."""
    rng = np.random.default_rng(seed)
    ids = [rng.integers(3, 320, length).tolist() for length in (*lengths, question, head)]
    return {"documents": ids[:-2], "question": ids[-2], "instructions": ids[-1]}


@dataclass(frozen=True)
class Answer:
    """An answer and all its log probabilities; equal answers have equal bits."""

    token_ids: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, float], ...], ...]

    @classmethod
    def of(cls, output: RequestOutput) -> Answer:
        [completion] = output.outputs
        assert completion.logprobs is not None
        told = tuple(
            tuple(sorted((token, one.logprob) for token, one in place.items())) for place in completion.logprobs
        )
        return cls(tuple(completion.token_ids), told)


def ask(llm: LLM, prompt: Any, link: str | None = None, params: SamplingParams = GREEDY) -> Answer:
    """Answer one prompt, and check that nothing leaked."""
    [output] = llm.generate(prompt, params, link=link)
    llm.engine.check_integrity()
    return Answer.of(output)


def report(llm: LLM, prompt: Any, link: str) -> LinkReport:
    """What became of the tokens of one prompt."""
    [output] = llm.generate(prompt, GREEDY, link=link)
    assert output.link is not None
    told = output.link
    total = told.linked_tokens + told.recomputed_tokens + told.computed_tokens + told.cached_tokens
    assert total == len(output.prompt_token_ids)
    assert output.num_cached_tokens == told.cached_tokens
    return told
