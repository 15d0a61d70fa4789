"""Answers with and without drafts are equal, token by token and log probability by log probability.

The real runner runs tiny models of all families whose layers can go back; sampling options are drawn at random.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from drafters import Guess, draft_as_told
from foreword.engine import Engine
from foreword.model.loader import LoadedModel
from foreword.request import Request, RequestOutput, SamplingParams
from lanes import slow
from tiny_models import RECIPES, VOCAB_SIZE, TinyModels, add, build_engine, drain, greedy, in_codes, random_tokens

RECURRENT = {"mamba2", "qwen3_next", "falcon_h1", "granitemoehybrid", "bamba", "nemotron_h", "lfm2"}
FAMILIES = sorted(set(RECIPES) - RECURRENT)
BFLOAT16 = ["llama", "gpt_oss", "gemma2", "llama4_text", "odd_llama", "mqa_llama", "wide_deepseek"]
FEW = [("llama", "float32"), ("gemma2", "bfloat16"), ("llama4_text", "float32"), ("qwen2", "bfloat16", "int8")]
"""Full attention, windows, and chunks with experts; KV in codes."""
KINDS = ["bloom", "deepseek_v3", "gemma4_text", "qwen3_moe", *BFLOAT16]
"""Those of other attention, of other heads, and with experts; the others are slow."""
CASES = [(family, "bfloat16" if family in BFLOAT16 else "float32") for family in KINDS]
MORE_CASES = [(family, "float32") for family in [*sorted(set(FAMILIES) - set(KINDS)), "gemma2", "llama"]]


@pytest.fixture(scope="module", params=CASES + slow(*MORE_CASES), ids="-".join)
def model(request: pytest.FixtureRequest, tiny_models: TinyModels) -> LoadedModel:
    family, dtype = request.param
    return tiny_models.loaded(family, dtype)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    shared = random_tokens(rng, 30)
    return [random_tokens(rng, 5), shared, [*shared, *random_tokens(rng, 9)], random_tokens(rng, 17)]


def random_params(seed: int) -> SamplingParams:
    rng = np.random.default_rng(seed)

    def sometimes(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.5 else otherwise

    max_tokens = int(rng.integers(8, 28))
    return SamplingParams(
        seed=seed,
        n=int(rng.integers(1, 3)),
        max_tokens=max_tokens,
        min_tokens=int(rng.integers(0, 6)),
        temperature=float(rng.choice([0.0, 0.3, 1.0, 2.0])),
        top_k=sometimes(5, 0),
        top_p=sometimes(0.8, 1.0),
        min_p=sometimes(0.02, 0.0),
        repetition_penalty=sometimes(1.3, 1.0),
        presence_penalty=sometimes(0.5, 0.0),
        frequency_penalty=sometimes(0.3, 0.0),
        logit_bias=sometimes({int(rng.integers(3, VOCAB_SIZE)): 4.0, 7: -float("inf")}, {}),
        allowed_token_ids=sometimes(tuple(range(0, VOCAB_SIZE, 2)), None),
        stop_token_ids=sometimes(tuple(rng.integers(3, VOCAB_SIZE, 20).tolist()), ()),
        logprobs=sometimes(int(rng.integers(0, 4)), None),
    )


def run(engine: Engine, each: Sequence[SamplingParams]) -> list[RequestOutput]:
    outputs = [
        add(engine, str(at), prompt, params) for at, (prompt, params) in enumerate(zip(prompts(), each, strict=True))
    ]
    drain(engine)
    return outputs


def contents(outputs: Sequence[RequestOutput]) -> list[object]:
    return [
        (one.token_ids, one.logprobs, one.finish_reason, one.stop_reason)
        for output in outputs
        for one in output.outputs
    ]


def told_from(outputs: Sequence[RequestOutput], rng: np.random.Generator) -> Guess:
    """Drafts from the true answers: sometimes right to the end and beyond, sometimes with a wrong token somewhere."""
    answers = {
        output.request_id if len(output.outputs) == 1 else f"{output.request_id}#{one.index}": list(one.token_ids)
        for output in outputs
        for one in output.outputs
    }

    def guess(request: Request, most: int) -> list[int]:
        draft = answers[request.request_id][request.num_output_tokens :] + random_tokens(rng, 3)
        if rng.random() < 0.5:
            draft[int(rng.integers(min(4, len(draft))))] = 2 * int(rng.integers(VOCAB_SIZE // 2))
        return draft[: int(rng.integers(0, 9))]

    return guess


def test_answers_are_equal_whatever_is_drafted(model: LoadedModel) -> None:
    each = [random_params(number) for number in range(4)]
    plain = run(build_engine(model, num_blocks=128, block_size=4), each)
    engine = build_engine(model, num_blocks=128, block_size=4, max_num_batched_tokens=19)
    drafting = draft_as_told(engine, told_from(plain, np.random.default_rng(1)), 8)
    assert contents(run(engine, each)) == contents(plain)
    assert drafting.counts.num_accepted > 5
    assert drafting.counts.num_rejected > 0


@pytest.fixture(scope="module", params=FEW, ids="-".join)
def one_of_few(request: pytest.FixtureRequest, tiny_models: TinyModels) -> LoadedModel:
    family, dtype, *coded = request.param
    loaded = tiny_models.loaded(family, dtype)
    return in_codes(loaded) if coded and loaded.device.type == "cpu" else loaded


@pytest.mark.parametrize("seed", [40, 44, 48])
def test_answers_are_equal_with_many_options(one_of_few: LoadedModel, seed: int) -> None:
    each = [random_params(seed + number) for number in range(4)]
    plain = run(build_engine(one_of_few, num_blocks=128, block_size=4), each)
    engine = build_engine(one_of_few, num_blocks=128, block_size=4, enable_prefix_caching=seed != 44)
    draft_as_told(engine, told_from(plain, np.random.default_rng(seed)), 8)
    assert contents(run(engine, each)) == contents(plain)


def test_answers_are_equal_in_a_small_pool_with_preemption(one_of_few: LoadedModel) -> None:
    model = one_of_few
    each = [greedy(24, logprobs=1) for _ in range(4)]
    plain = run(build_engine(model, num_blocks=128, block_size=4), each)
    engine = build_engine(model, num_blocks=18, block_size=4)
    drafting = draft_as_told(engine, told_from(plain, np.random.default_rng(0)), 6)
    assert contents(run(engine, each)) == contents(plain)
    assert drafting.counts.num_accepted > 5
    assert engine.scheduler.num_preemptions > 0 or not engine.manager.has_one_full_group


def test_the_usual_sources_draft_and_change_nothing(one_of_few: LoadedModel) -> None:
    """The same requests twice, so that the cache and earlier answers know how they go on."""
    model, each = one_of_few, [random_params(number) for number in range(4)]
    answers = []
    for draft_tokens in (0, 6):
        engine = build_engine(model, num_blocks=128, block_size=4)
        engine.draft(draft_tokens)  # type: ignore[arg-type]
        answers.append([contents(run(engine, each)) for _ in range(2)])
        drafting = engine.scheduler.drafting
    assert drafting is not None
    assert drafting.counts.num_accepted > 10
    assert answers[1] == answers[0]


@pytest.mark.parametrize("family", sorted(RECURRENT))
def test_recurrent_layers_draft_nothing_and_say_so(
    tiny_models: TinyModels, family: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = build_engine(tiny_models.loaded(family))
    with caplog.at_level("INFO", "foreword"):
        engine.draft("auto")
    assert engine.scheduler.drafting is None
    assert "no tokens are drafted with this model: its recurrent layers" in caplog.text
