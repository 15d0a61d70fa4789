"""Scores of continuations: log probabilities of prompt tokens from a position on, after what the cache has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from doors import runner_of, storage_of
from foreword.batch import Batch
from foreword.engine import Engine
from foreword.errors import InvalidRequestError
from foreword.request import RequestOutput, SamplingParams, TokenLogprobs
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
    "panels": ("llama", {"block_size": 16}),  # in bfloat16, whose head is packed: labels alone are panels of it
}


def scores(engine: Engine, prompt: Sequence[int], at: int, name: str, **more: object) -> list[TokenLogprobs | None]:
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2, score_from=at, **more)
    [output] = complete(engine, [list(prompt)], params, name=name)
    assert output.prompt_logprobs is not None
    return output.prompt_logprobs


def engine_of(tiny_models: TinyModels, case: str, **more: object) -> Engine:
    name, options = CASES[case]
    model = tiny_models.loaded(name, "bfloat16" if case == "panels" else "float32")
    return build_engine(model, **{**options, **more})


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


def read(output: RequestOutput) -> list[tuple[TokenLogprobs, bytes | None] | None]:
    """All that an output reports, with digests of the logits that it is from."""
    reports = [*(output.prompt_logprobs or ()), *(output.outputs[0].logprobs or ())]
    return [None if one is None else (one, one.logits_digest) for one in reports]


KINDS: dict[str, Callable[[int], SamplingParams]] = {
    "continuation": lambda at: SamplingParams(
        max_tokens=1, temperature=0, prompt_logprobs=1, score_from=at, certify=True
    ),
    "labels": lambda at: SamplingParams(max_tokens=1, label_token_ids=(7, 3, 200 + at), certify=True),
    "label logprobs": lambda at: SamplingParams(max_tokens=1, logprob_token_ids=(7, 3), temperature=0, certify=True),
    "answer": lambda at: SamplingParams(max_tokens=4, temperature=0, logprobs=2, certify=True),
}


@settings(max_examples=16, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_scores_are_equal_alone_in_batches_after_eviction_and_with_others_prefixes(
    tiny_models: TinyModels, engines: dict[str, Engine], data: st.DataObject
) -> None:
    case = data.draw(st.sampled_from(sorted(CASES)))
    engine, number = engines[case], engines[case].num_computed_tokens
    heads = [random_tokens(np.random.default_rng(seed), 50) for seed in range(3)]
    kinds = data.draw(st.sets(st.sampled_from(sorted(KINDS)), min_size=1))
    asked = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from(heads),
                st.integers(0, 2),
                st.integers(1, 20),
                st.integers(0, 4),
                st.sampled_from(sorted(kinds)),
            ),
            min_size=1,
            max_size=6,
        )
    )
    prompts = [head + random_tokens(np.random.default_rng(90 + tail), size) for head, tail, size, *_ in asked]
    froms = [max(0, len(head) - back * 7) for head, _, _, back, _ in asked]
    params = [KINDS[kind](at) for at, (*_, kind) in zip(froms, asked, strict=True)]
    outputs = [
        add(engine, f"batch-{number}-{at}", prompt, one)
        for at, (prompt, one) in enumerate(zip(prompts, params, strict=True))
    ]
    drain(engine)
    alone = engine_of(tiny_models, case)
    for at, (prompt, one, output) in enumerate(zip(prompts, params, outputs, strict=True)):
        [cold] = complete(alone, [prompt], replace(one, skip_reading_prefix_cache=True), name=f"alone-{at}")
        assert cold.num_cached_tokens == 0
        assert read(output) == read(cold)
        assert output.logits_digest() == cold.logits_digest()


@pytest.mark.parametrize("case", CASES)
def test_labels_have_the_logits_of_the_whole_head_whoever_else_is_in_the_step(
    tiny_models: TinyModels, case: str
) -> None:
    labels = (17, 4, 250)
    prompts = [PROMPT[: HEAD - 10 * number] for number in range(3)]
    params = SamplingParams(max_tokens=1, label_token_ids=labels, certify=True)
    engine = engine_of(tiny_models, case)
    alone = complete(engine, prompts, params, name="alone")
    mixed = [add(engine, f"mixed-{at}", prompt, params) for at, prompt in enumerate(prompts)]
    add(engine, "beside", PROMPT, SamplingParams(max_tokens=2, temperature=0.7, logit_bias={5: 1.0}))
    drain(engine)
    whole = complete(engine, prompts, SamplingParams(max_tokens=1, logprob_token_ids=labels, temperature=0), name="all")
    for one, other, reference in zip(alone, mixed, whole, strict=True):
        assert read(one) == read(other)
        [own], [of_all] = one.outputs[0].logprobs, reference.outputs[0].logprobs
        assert set(own) == set(labels)
        logprobs = np.array([own[token].logprob for token in labels])
        assert np.exp(logprobs).sum() == pytest.approx(1)
        among = np.array([of_all[token].logprob for token in labels])
        assert logprobs == pytest.approx(among - np.log(np.exp(among).sum()), abs=1e-5)
        best = labels[int(logprobs.argmax())]
        assert one.outputs[0].token_ids == [best]
        assert [token for token in labels if own[token].rank == 1] == [best]


def test_a_digest_is_that_of_the_logits_as_numbers(tiny_models: TinyModels) -> None:
    engine, model = engine_of(tiny_models, "radix"), tiny_models.loaded("llama")
    row = model_logits(engine, PROMPT)[-1]
    labels = [9, 4]
    for params, expected in (
        (SamplingParams(max_tokens=1, logprobs=0), row.tobytes()),
        (
            SamplingParams(max_tokens=1, label_token_ids=tuple(labels)),
            np.array(labels, "<i8").tobytes() + row[labels].tobytes(),
        ),
    ):
        [output] = complete(engine, [PROMPT], replace(params, certify=True), name=f"of {len(expected)}")
        assert output.logits_digest() == sha256(sha256(expected).digest()).hexdigest()
    assert model.dtype == torch.float32


def model_logits(engine: Engine, tokens: list[int]) -> npt.NDArray[np.float32]:
    """Logits [tokens, vocab] of a prompt, computed at once."""
    runner = runner_of(engine)
    blocks = np.arange(1, 2 + len(tokens) // storage_of(engine).block_sizes[0], dtype=np.int32)
    batch = Batch.bare(
        np.array(tokens, np.int32),
        np.arange(len(tokens), dtype=np.int32),
        np.array([0, len(tokens)], np.int32),
        (blocks[None],),
    )
    logits: npt.NDArray[np.float32] = runner.forward(batch, np.arange(len(tokens))).float().numpy()
    return logits


def test_another_dtype_and_other_weights_give_other_digests(tiny_models: TinyModels) -> None:
    found = set()
    for name, dtype in (("llama", "float32"), ("llama", "bfloat16"), ("qwen3", "float32")):
        engine = build_engine(tiny_models.loaded(name, dtype))
        for params in (SamplingParams(max_tokens=1, label_token_ids=(3, 4)), SamplingParams(max_tokens=1, logprobs=0)):
            digests = {
                output.logits_digest()
                for number in range(3)
                for output in complete(
                    engine, [PROMPT] * 2, replace(params, certify=True), name=f"{params.logprobs}{number}"
                )
            }
            assert len(digests) == 1, "cold, warm and together"
            found |= digests
    assert len(found) == 6


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({"max_tokens": 2}, "max_tokens=2 with label_token_ids; use 1"),
        ({"label_token_ids": (3, 3)}, "name each once"),
        ({"label_token_ids": (3, 10**6)}, "out of range"),
        ({"label_token_ids": (3.5,)}, "not an integer"),
        ({"logprobs": 1}, "logprobs cannot be combined"),
        ({"prompt_logprobs": 1}, "prompt_logprobs cannot be combined"),
        ({"logit_bias": {3: 1.0}}, "logit_bias cannot be combined"),
        ({"label_token_ids": (), "certify": True}, "certify=True is only allowed with"),
    ],
)
def test_labels_and_certificates_that_make_no_sense_are_refused(
    tiny_models: TinyModels, more: dict[str, object], complaint: str
) -> None:
    with pytest.raises(InvalidRequestError, match=complaint):
        complete(
            build_engine(tiny_models.loaded("llama")),
            [PROMPT],
            SamplingParams(**{"max_tokens": 1, "label_token_ids": (3, 4), **more}),
        )


def test_an_output_without_digests_says_so(tiny_models: TinyModels) -> None:
    [output] = complete(build_engine(tiny_models.loaded("llama")), [PROMPT], SamplingParams(max_tokens=1, logprobs=0))
    with pytest.raises(InvalidRequestError, match="certify=True"):
        output.logits_digest()


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
