"""Many prompts at once: the order that reuses most, and answers that do not depend on it."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword import LLM, SamplingParams
from foreword.cache import ExtraKeys
from foreword.engine import Prompt, depth_first, run_all
from hash_runner import HashEngine
from lanes import slow
from live_server import embedded_llm

BLOCK = 4
ONE = SamplingParams(max_tokens=1, seed=0)


def prompt_of(tokens: list[int], **more: Any) -> Prompt:
    return Prompt(np.array(tokens, np.int32), **more)


def order(prompts: list[Prompt], cached: Any = lambda prompt: 0) -> list[int]:
    return depth_first(prompts, BLOCK, cached)


TOKENS = st.lists(st.integers(0, 1), max_size=16).map(lambda bits: [*bits, 1])


@settings(max_examples=80, deadline=None)
@given(st.lists(TOKENS, max_size=12))
def test_prompts_that_share_a_block_stand_together_and_none_is_lost(tokens) -> None:
    numbers = order([prompt_of(one) for one in tokens])
    assert sorted(numbers) == list(range(len(tokens)))
    for length in (BLOCK, 2 * BLOCK, 3 * BLOCK):
        keys = [tuple(tokens[number][:length]) for number in numbers if len(tokens[number]) >= length]
        runs = [key for key, _ in itertools.groupby(keys)]
        assert len(runs) == len(set(runs)), "a shared beginning is left and taken up again"


def test_subtrees_that_are_cached_come_first_and_then_the_order_of_arrival() -> None:
    shared = [[family] * 8 for family in range(3)]
    prompts = [prompt_of([*shared[number % 3], number]) for number in range(9)]
    assert order(prompts) == [0, 3, 6, 1, 4, 7, 2, 5, 8]
    cached = order(prompts, lambda prompt: 8 if prompt.token_ids[0] == 2 else 0)
    assert cached == [2, 5, 8, 0, 3, 6, 1, 4, 7]


def test_other_salts_and_priorities_share_nothing() -> None:
    tokens = [1] * 9
    prompts = [
        prompt_of(tokens, extra_keys=ExtraKeys(salt=salt), priority=priority)
        for salt, priority in (("a", 0), ("b", 0), ("a", 1), ("a", 0))
    ]
    assert order(prompts) == [0, 3, 1, 2]


def computed(numbers: list[int], prompts: list[Prompt], num_blocks: int) -> int:
    """Tokens computed one after the other in this order, in a pool of that size."""
    parts = HashEngine.build(num_blocks=num_blocks, vocab_size=50, eviction_policy="lru", max_num_seqs=1)
    for number in numbers:
        parts.engine.add_request(f"r{number}", prompts[number], ONE)
        parts.drain()
    return parts.engine.num_computed_tokens


@pytest.mark.parametrize("seed", [*range(4), *slow(*range(4, 8))])
def test_no_other_order_computes_less_where_the_pool_holds_the_longest_path(seed) -> None:
    rng = random.Random(seed)
    tokens = [[rng.randrange(2) * 7 for _ in range(BLOCK * 3)] for _ in range(5)]
    for one in tokens:  # few beginnings, so that they are shared
        for at in range(0, len(one), BLOCK):
            one[at : at + BLOCK] = [one[at]] * BLOCK
    prompts = [prompt_of([*one, number + 1]) for number, one in enumerate(tokens)]
    most = max(len(one) for one in tokens) // BLOCK + 2
    ours = computed(order(prompts), prompts, most)
    best = min(computed(list(numbers), prompts, most) for numbers in itertools.permutations(range(5)))
    assert ours == best


@pytest.fixture(scope="module")
def llm() -> Any:
    with embedded_llm(num_gpu_blocks_override=64, eviction_policy="lru", max_num_seqs=4) as one:
        yield one


def documents(num: int, questions: int) -> list[dict[str, Any]]:
    """Shuffled questions about documents of 160 tokens."""
    rng = np.random.default_rng(5)
    texts = [rng.integers(20, 200, 160).tolist() for _ in range(num)]
    asked = [[*text, *rng.integers(20, 200, 8).tolist()] for text in texts for _ in range(questions)]
    rng.shuffle(asked)
    return [{"prompt_token_ids": one} for one in asked]


def test_shuffled_questions_find_their_documents_and_answers_come_in_the_callers_order(llm: LLM) -> None:
    prompts = documents(8, 5)
    params = SamplingParams(max_tokens=3, temperature=1.0, ignore_eos=True)
    llm.reset_prefix_cache()
    before = llm.engine.next_seeds(1)[0]
    outputs = llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == [one["prompt_token_ids"] for one in prompts]
    found = sum(output.num_cached_tokens for output in outputs)
    in_waves = 8 * (5 - 4) * 160  # four run at once; they compute a new document before any has it
    assert found >= in_waves
    llm.reset_prefix_cache()
    arrival = [
        llm.engine.add_request(f"a{number}", llm.read_prompt(one), SamplingParams(**{**PLAIN, "seed": seed}))
        for number, (one, seed) in enumerate(zip(prompts, seeds_from(before, len(prompts)), strict=True))
    ]
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    assert [one.outputs[0].token_ids for one in arrival] == [one.outputs[0].token_ids for one in outputs]
    assert found > sum(output.num_cached_tokens for output in arrival)


PLAIN: dict[str, Any] = {"max_tokens": 3, "temperature": 1.0, "ignore_eos": True}


def seeds_from(first: int, count: int) -> list[int]:
    return [first + 0x9E3779B9 * number for number in range(count)]


def test_if_one_is_refused_nothing_goes_on(llm: LLM) -> None:
    prompts = [llm.read_prompt({"prompt_token_ids": tokens}) for tokens in ([1, 2], [3] * 100_000)]
    with pytest.raises(Exception, match="100000"):
        run_all(llm.engine, prompts, [ONE, ONE], BLOCK, iter("ab").__next__)
    assert not llm.engine.has_unfinished_requests()
