"""Greedy tokens equal transformers' own generation without any cache, in float32, for every family.

Whatever the engine does in between - hits, chunks, shared batches, preemption - may not change a token.
"""

from __future__ import annotations

import numpy as np
import pytest

from foreword.engine import Engine
from foreword.model.loader import LoadedModel
from foreword.request import RequestOutput
from lanes import SLOW
from tiny_models import RECIPES, TinyModels, add, build_engine, complete, drain, greedy, longest_hit, random_tokens

FAMILIES = sorted(RECIPES)
DIFFERENT_FAMILIES = ["llama", "gemma2", "gpt_oss", "qwen3_moe", "smollm3"]
"""One of each kind: plain, softcap, sinks, experts, layers without rotary embeddings; three have windows."""
KINDS = [*DIFFERENT_FAMILIES, "llama4_text", "deepseek_v3", "mamba2", "qwen3_next", "falcon_h1", "lfm2"]
"""Those, chunks, latent KV, and the kinds of recurrent layers."""
NUM_TOKENS = 8
SHAPES = [(1, 37), (4, 7), (16, 5), (16, 2048)]
"""Block sizes, and budgets of a step: chunks of 5, 7 and 37 tokens split blocks unevenly."""


def conversation_starts(seed: int = 1) -> list[list[int]]:
    """Prompts of one token, one block, several blocks and uneven lengths; the last three share a beginning."""
    rng = np.random.default_rng(seed)
    shared = random_tokens(rng, 50)
    return [random_tokens(rng, length) for length in (1, 16, 33)] + [shared, shared, shared[:40]]


def assert_oracle_agrees(tiny_models: TinyModels, family: str, outputs: list[RequestOutput]) -> None:
    for output in outputs:
        answer = output.outputs[0].token_ids
        assert answer == tiny_models.oracle(family).likeliest(output.prompt_token_ids, answer)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def model(tiny_models: TinyModels, family: str) -> LoadedModel:
    return tiny_models.loaded(family)


@pytest.mark.parametrize("family", ["gpt_oss", "llama"])
def test_one_pass_of_the_oracle_says_what_generating_says(tiny_models: TinyModels, family: str) -> None:
    oracle = tiny_models.oracle(family)
    for prompt in conversation_starts():
        answer = oracle.greedy(prompt, NUM_TOKENS)
        assert oracle.likeliest(prompt, answer) == answer


@pytest.mark.parametrize(("family", "shape"), [(name, SHAPES[n % 4]) for n, name in enumerate(FAMILIES)])
def test_a_mixed_batch_cold_and_warm(
    tiny_models: TinyModels, family: str, model: LoadedModel, shape: tuple[int, int]
) -> None:
    """Each family has one shape; `test_chunk_sizes_with_block_sizes` tries more of them.

    Answers differ: a model that always said the same would let every other test here pass.
    """
    block_size, budget = shape
    engine = build_engine(model, num_blocks=1024 // block_size, block_size=block_size, max_num_batched_tokens=budget)
    prompts = conversation_starts()
    cold = complete(engine, prompts, greedy(NUM_TOKENS), name="cold")
    computed_cold = engine.num_computed_tokens
    warm = complete(engine, prompts, greedy(NUM_TOKENS), name="warm")
    assert_oracle_agrees(tiny_models, family, cold + warm)
    answers = [tuple(output.outputs[0].token_ids) for output in cold]
    assert len(set(answers)) == 5
    assert sum(len(set(answer)) for answer in answers) > 2 * len(answers)
    assert engine.num_computed_tokens - computed_cold < computed_cold
    for output in warm:
        length = len(output.prompt_token_ids)
        assert output.num_cached_tokens == longest_hit(engine, length, length)


@pytest.mark.parametrize(
    ("family", "enable_prefix_caching"),
    [
        *((family, True) for family in ("llama", "gemma2", "llama4_text", "deepseek_v3", "qwen3_next")),
        *((family, False) for family in ("falcon_h1", "llama")),
        *(pytest.param(family, True, marks=SLOW) for family in ("bloom", "gemma4_text", "gpt_oss", "qwen3_moe")),
        *(pytest.param(family, True, marks=SLOW) for family in ("falcon_h1", "mamba2", "lfm2", "smollm3")),
        *(pytest.param(family, False, marks=SLOW) for family in ("gpt_oss", "gemma2", "qwen3_moe", "smollm3")),
    ],
)
def test_a_pool_so_small_that_requests_are_preempted(
    tiny_models: TinyModels, family: str, model: LoadedModel, enable_prefix_caching: bool
) -> None:
    rng = np.random.default_rng(2)
    prompts = [random_tokens(rng, length) for length in (9, 13, 20, 17)]
    engine = build_engine(
        model,
        holds_tokens=44,
        block_size=4,
        max_num_batched_tokens=11,
        enable_prefix_caching=enable_prefix_caching,
    )
    outputs = complete(engine, prompts, greedy(24))
    assert_oracle_agrees(tiny_models, family, outputs)
    assert enable_prefix_caching or all(output.num_cached_tokens == 0 for output in outputs)
    if not model.layers and not enable_prefix_caching:
        return  # a recurrent request never grows, so it is never preempted
    assert engine.scheduler.num_preemptions > 0
    assert engine.manager.stats.preempted_requests > 0
    if enable_prefix_caching and model.layers:  # the pool holds no state but those that are in use
        assert engine.manager.stats.preempted_hits > 0, "a preempted request did not find its own blocks again"


@pytest.mark.parametrize(
    ("family", "num_blocks_of_prompt"), [*((family, 3) for family in KINDS), ("llama", 1), ("falcon_h1", 1)]
)
def test_a_prompt_of_whole_blocks_that_is_all_cached_computes_one_token(
    tiny_models: TinyModels, family: str, model: LoadedModel, num_blocks_of_prompt: int
) -> None:
    engine = build_engine(model, block_size=8)
    prompt = random_tokens(np.random.default_rng(3), 8 * num_blocks_of_prompt)
    cold = complete(engine, [prompt], greedy(1), name="cold")
    assert engine.num_computed_tokens == len(prompt)
    warm = complete(engine, [prompt], greedy(1), name="warm")
    hit = longest_hit(engine, len(prompt), len(prompt))
    assert hit == len(prompt) - 1 or not engine.manager.has_one_full_group
    assert engine.num_computed_tokens == 2 * len(prompt) - hit
    assert warm[0].num_cached_tokens == hit
    longer = complete(engine, [prompt], greedy(3), name="longer")
    assert_oracle_agrees(tiny_models, family, cold + warm + longer)


@pytest.mark.parametrize("family", KINDS)
def test_a_second_turn_reads_the_kv_of_the_first_answer(
    tiny_models: TinyModels, family: str, model: LoadedModel
) -> None:
    rng = np.random.default_rng(4)
    engine = build_engine(model, block_size=4)
    history = random_tokens(rng, 21)
    outputs = []
    num_computed = 0
    for turn in range(2):
        [output] = complete(engine, [history], greedy(NUM_TOKENS), name=f"turn-{turn}")
        outputs.append(output)
        assert output.num_cached_tokens == longest_hit(engine, num_computed, len(history))
        # Nothing needed the KV of the last token. Recurrent layers are hit in cells of prompts, not of answers.
        num_computed = len(history) + (NUM_TOKENS - 1 if engine.scheduler.states is None else 0)
        history = history + output.outputs[0].token_ids + random_tokens(rng, 7)
    assert_oracle_agrees(tiny_models, family, outputs)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3_moe"])
def test_requests_that_join_while_others_decode(tiny_models: TinyModels, family: str, model: LoadedModel) -> None:
    engine = build_engine(model, block_size=4, num_blocks=128, max_num_batched_tokens=7)
    outputs = []
    for number, prompt in enumerate(conversation_starts(seed=5)):
        outputs.append(add(engine, f"request-{number}", prompt, greedy(NUM_TOKENS)))
        for _ in range(3):
            engine.step()
            engine.check_integrity()
    drain(engine)
    assert_oracle_agrees(tiny_models, family, outputs)


@pytest.mark.parametrize("family", ["llama", "smollm3"])
def test_evicted_prefixes_are_computed_again(tiny_models: TinyModels, family: str, model: LoadedModel) -> None:
    rng = np.random.default_rng(6)
    engine = build_engine(model, num_blocks=12, block_size=4)
    prompts = [random_tokens(rng, 24) for _ in range(3)]
    for repeat in range(2):
        for number, prompt in enumerate(prompts):
            outputs = complete(engine, [prompt], greedy(NUM_TOKENS), name=f"{repeat}-{number}")
            assert_oracle_agrees(tiny_models, family, outputs)
    assert engine.manager.stats.evictions > 0


@pytest.mark.parametrize(
    ("block_size", "budget"),
    [(1, 5), (3, 7), (4, 37), (16, 1), (48, 129)],
)
def test_chunk_sizes_with_block_sizes(tiny_models: TinyModels, block_size: int, budget: int) -> None:
    engine = build_engine(
        tiny_models.loaded("llama"),
        num_blocks=1 + 1024 // block_size,
        block_size=block_size,
        max_num_batched_tokens=budget,
    )
    prompts = conversation_starts()
    outputs = complete(engine, prompts, greedy(6), name="cold") + complete(engine, prompts, greedy(6), name="warm")
    assert_oracle_agrees(tiny_models, "llama", outputs)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "qwen3_moe"])
def test_prompts_longer_than_a_chunk_and_a_tile_of_attention(
    tiny_models: TinyModels, family: str, model: LoadedModel
) -> None:
    rng = np.random.default_rng(7)
    shared = random_tokens(rng, 530)
    prompts = [shared + random_tokens(rng, 60), shared[:256], shared[:300] + random_tokens(rng, 9)]
    engine = build_engine(model, num_blocks=160, max_num_batched_tokens=150)
    outputs = complete(engine, prompts, greedy(4), name="cold") + complete(engine, prompts, greedy(4), name="warm")
    assert_oracle_agrees(tiny_models, family, outputs)
    assert [output.num_cached_tokens for output in outputs[3:]] == [
        longest_hit(engine, length, length) for length in (590, 256, 309)
    ]


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_aborting_one_request_does_not_disturb_the_others(
    tiny_models: TinyModels, family: str, model: LoadedModel
) -> None:
    engine: Engine = build_engine(model, block_size=4, num_blocks=128, max_num_batched_tokens=37)
    outputs = [
        add(engine, f"request-{number}", prompt, greedy(NUM_TOKENS))
        for number, prompt in enumerate(conversation_starts())
    ]
    for number in (0, 3):
        for _ in range(2):
            engine.step()
        engine.abort_request(f"request-{number}")
        engine.check_integrity()
    drain(engine)
    assert_oracle_agrees(tiny_models, family, [o for o in outputs if o.outputs[0].token_ids])
    assert [o.outputs[0].finish_reason for o in outputs].count("abort") == 2
