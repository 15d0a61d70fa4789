"""Scores of continuations: log probabilities of prompt tokens from a position on, after what the cache has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foreword.engine import Engine
from foreword.errors import InvalidRequestError
from foreword.request import SamplingParams, TokenLogprobs
from tiny_models import TinyModels, add, build_engine, complete, drain, random_tokens

HEAD, TAIL = 83, 21
PROMPT = random_tokens(np.random.default_rng(70), HEAD + TAIL)

# name of a model, options of its engine
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "radix": ("llama", {"prefix_index": "radix", "with_ledger": True}),
    "hash": ("llama", {"prefix_index": "hash", "block_size": 8}),
    "small blocks": ("llama", {"block_size": 4, "max_num_batched_tokens": 9}),
    "one copy": ("llama", {"deduplicate": True}),
    "windows": ("gemma3_text", {}),
    "states": ("qwen3_next", {}),
}


def scores(engine: Engine, prompt: Sequence[int], at: int, name: str, **more: object) -> list[TokenLogprobs | None]:
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2, score_from=at, **more)
    [output] = complete(engine, [list(prompt)], params, name=name)
    assert output.prompt_logprobs is not None
    return output.prompt_logprobs


def engine_of(tiny_models: TinyModels, case: str, **more: object) -> Engine:
    name, options = CASES[case]
    return build_engine(tiny_models.loaded(name), **{**options, **more})


@pytest.mark.parametrize("case", CASES)
def test_a_score_is_that_of_a_cold_prompt_bit_for_bit_and_computes_the_rest_alone(
    tiny_models: TinyModels, case: str
) -> None:
    cold = scores(engine_of(tiny_models, case), PROMPT, 0, "cold")
    engine = engine_of(tiny_models, case)
    complete(engine, [PROMPT[:HEAD]], SamplingParams(max_tokens=1), name="head")
    for number, at in enumerate((HEAD, HEAD, 40, 64, 65, len(PROMPT) - 1, 1, 2)):
        computed = engine.num_computed_tokens
        warm = scores(engine, PROMPT, at, f"warm-{number}")
        assert warm == [None] * max(1, at) + cold[max(1, at) :]
        engine.check_integrity()
        if number == 1 and case != "states":  # the whole prompt is cached
            assert engine.num_computed_tokens - computed <= TAIL + 16
    if case == "radix":  # the copy of a block gives it the tokens before the first score
        assert engine.num_computed_tokens - computed == len(PROMPT) - 1


@pytest.fixture(scope="module")
def engines(tiny_models: TinyModels) -> dict[str, Engine]:
    """One small pool for each case, in which candidates evict each other."""
    return {case: engine_of(tiny_models, case, num_blocks=60) for case in CASES}


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_scores_are_equal_alone_in_batches_after_eviction_and_with_others_prefixes(
    tiny_models: TinyModels, engines: dict[str, Engine], data: st.DataObject
) -> None:
    case = data.draw(st.sampled_from(sorted(CASES)))
    engine, number = engines[case], engines[case].num_computed_tokens
    heads = [random_tokens(np.random.default_rng(seed), 50) for seed in range(3)]
    asked = data.draw(
        st.lists(
            st.tuples(st.sampled_from(heads), st.integers(0, 2), st.integers(1, 20), st.integers(0, 4)),
            min_size=1,
            max_size=6,
        )
    )
    prompts = [head + random_tokens(np.random.default_rng(90 + tail), size) for head, tail, size, _ in asked]
    froms = [max(0, len(head) - back * 7) for head, _, _, back in asked]
    params = [SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1, score_from=at) for at in froms]
    outputs = [
        add(engine, f"batch-{number}-{at}", prompt, one)
        for at, (prompt, one) in enumerate(zip(prompts, params, strict=True))
    ]
    drain(engine)
    alone = engine_of(tiny_models, case)
    for at, (prompt, start, output) in enumerate(zip(prompts, froms, outputs, strict=True)):
        [cold] = complete(
            alone, [prompt], SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1), name=f"alone-{at}"
        )
        assert output.prompt_logprobs[max(1, start) :] == cold.prompt_logprobs[max(1, start) :]
        assert output.prompt_logprobs[: max(1, start)] == [None] * max(1, start)


def test_scores_survive_preemption(tiny_models: TinyModels) -> None:
    prompts = [random_tokens(np.random.default_rng(80 + number), 15) for number in range(3)]
    tight = build_engine(tiny_models.loaded("llama"), num_blocks=12, block_size=4, max_num_batched_tokens=9)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, prompt_logprobs=1, score_from=6)
    outputs = complete(tight, prompts, params)
    assert tight.scheduler.num_preemptions > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        cold = scores(build_engine(tiny_models.loaded("llama"), block_size=4), prompt, 0, "cold")
        assert output.prompt_logprobs[:6] == [None] * 6
        assert [one[token] for token, one in zip(prompt[6:], output.prompt_logprobs[6:], strict=True)] == [
            one[token] for token, one in zip(prompt[6:], cold[6:], strict=True)
        ]


def test_candidates_after_one_prompt_are_scored_without_computing_it_again(tiny_models: TinyModels) -> None:
    engine = engine_of(tiny_models, "radix")
    complete(engine, [PROMPT[:HEAD]], SamplingParams(max_tokens=1), name="head")
    computed = engine.num_computed_tokens
    prompts = [PROMPT[:HEAD] + random_tokens(np.random.default_rng(number), 5) for number in range(8)]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, score_from=HEAD)
    outputs = complete(engine, prompts, params)
    assert engine.num_computed_tokens - computed == 8 * 6, "the last token before the candidate, and the candidate"
    assert [output.num_cached_tokens for output in outputs] == [HEAD - 1] * 8
    assert "lookup skipped" in str(outputs[0].explanation)


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"score_from": 3}, "only allowed with prompt_logprobs"),
        ({"score_from": -1, "prompt_logprobs": 0}, "out of range"),
        ({"score_from": 1.5, "prompt_logprobs": 0}, "not an integer"),
        ({"score_from": 1, "prompt_logprobs": 0, "truncate_prompt_tokens": 4}, "without truncate_prompt_tokens"),
        ({"score_from": 104, "prompt_logprobs": 0}, "positions 0 to 103"),
    ],
)
def test_a_place_that_makes_no_sense_is_refused(
    tiny_models: TinyModels, more: dict[str, object], complaint: str
) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        complete(build_engine(tiny_models.loaded("llama")), [PROMPT], SamplingParams(**more))
