"""Requests of models with recurrent layers have the bits that they have alone and without a cache.

A recurrent module rounds otherwise for another number of tokens, so what one request computed serves another only if
both compute it in the same cell (docs/decisions/0007).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import cycle

import numpy as np
import pytest

from doors import let_all_be_found, preempt, running_in
from foreword.config import Dtype
from foreword.engine import Engine, Prompt
from foreword.model.loader import LoadedModel
from foreword.model.self_check import find_inexactness
from foreword.model.step import StateRun
from foreword.request import RequestOutput, SamplingParams
from tiny_models import TinyModels, add, build_engine, complete, drain, greedy, random_tokens

FAMILIES = ["mamba2", "qwen3_next", "falcon_h1", "granitemoehybrid", "bamba", "nemotron_h", "lfm2"]
CELL = {"block_size": 4, "state_block_size": 12, "state_interval": 24}
Bits = list[list[dict[int, float]]]
"""Of each continuation and token, the log probabilities that were asked for."""


def bits_of(output: RequestOutput) -> Bits:
    return [
        [{token_id: entry.logprob for token_id, entry in one.items()} for one in completion.logprobs or []]
        for completion in output.outputs
    ]


def bits_alone(model: LoadedModel, prompt: list[int], params: SamplingParams) -> Bits:
    """What a request has to give: nothing cached, nobody beside it, enough memory."""
    engine = build_engine(model, num_blocks=256, enable_prefix_caching=False, **CELL)
    [output] = complete(engine, [prompt], params, name="alone")
    return bits_of(output)


def preempt_last(engine: Engine) -> None:
    """As when blocks run short."""
    preempt(engine, running_in(engine).last())


@pytest.fixture
def falcon(tiny_models: TinyModels) -> LoadedModel:
    """Attention beside recurrent layers; its float32 bits tell a cell of one length from one of another."""
    return tiny_models.loaded("falcon_h1", "float32")


def test_a_cell_that_a_shorter_prompt_did_not_fill_is_not_found(tiny_models: TinyModels) -> None:
    """The shorter one leaves KV of that cell's beginning, a longer one the state after the whole cell."""
    model = tiny_models.loaded("qwen3_next", "float32")
    text = random_tokens(np.random.default_rng(0), 90)
    engine = build_engine(model, num_blocks=256, **CELL)
    for name, end in (("short", 29), ("longer", 70)):
        complete(engine, [text[:end]], greedy(1), name=name)
    [output] = complete(engine, [text], greedy(4, logprobs=2), name="longest")
    assert output.num_cached_tokens == 60
    assert bits_of(output) == bits_alone(model, text, greedy(4, logprobs=2))


@pytest.mark.parametrize("num_steps", [4, 11])
def test_a_request_that_is_preempted_while_decoding_goes_on_with_the_same_bits(
    falcon: LoadedModel, num_steps: int
) -> None:
    """And so does one that begins with its text."""
    text, params = random_tokens(np.random.default_rng(5), 30), greedy(16, logprobs=2)
    engine = build_engine(falcon, num_blocks=256, **CELL)
    output = add(engine, "preempted", text, params)
    for _ in range(num_steps):
        engine.step()
    preempt_last(engine)
    drain(engine)
    assert bits_of(output) == bits_alone(falcon, text, params)
    later = text + output.outputs[0].token_ids + [7, 8, 9]
    [output] = complete(engine, [later], params, name="later")
    assert output.num_cached_tokens == 24
    assert bits_of(output) == bits_alone(falcon, later, params)


def test_a_request_that_resumes_finds_no_generated_text_that_another_sent_as_its_prompt(falcon: LoadedModel) -> None:
    text, params = random_tokens(np.random.default_rng(6), 30), greedy(40, logprobs=2)
    engine = build_engine(falcon, num_blocks=256, **CELL)
    output = add(engine, "preempted", text, params)
    for _ in range(30):
        engine.step()
    complete_text = text + output.outputs[0].token_ids
    add(engine, "other", complete_text, greedy(1))
    engine.step()
    engine.abort_request("other")
    preempt_last(engine)
    drain(engine)
    assert bits_of(output) == bits_alone(falcon, text, params)


def test_a_prompt_that_is_cut_off_while_it_is_computed_leaves_whole_cells(falcon: LoadedModel) -> None:
    text, params = random_tokens(np.random.default_rng(7), 80), greedy(4, logprobs=2)
    engine = build_engine(falcon, num_blocks=256, max_num_batched_tokens=20, **CELL)
    add(engine, "aborted", text[:50], greedy(1))
    for _ in range(3):
        engine.step()
    engine.abort_request("aborted")
    [output] = complete(engine, [text], params)
    assert output.num_cached_tokens > 0
    assert bits_of(output) == bits_alone(falcon, text, params)


@dataclass
class Traffic:
    """Requests that begin alike, arrive, wait for each other, are preempted and aborted; all from one seed."""

    model: LoadedModel
    seed: int
    num_requests: int
    happened: dict[str, int] = field(default_factory=lambda: {"hits": 0, "preemptions": 0, "aborts": 0})

    def run(self) -> None:
        rng = np.random.default_rng(self.seed)
        grid = int(rng.choice([4, 8, 12, 20]))
        engine = build_engine(
            self.model,
            holds_tokens=int(rng.integers(130, 200)),
            block_size=4,
            state_block_size=grid,
            state_interval=2 * grid,
            max_num_batched_tokens=int(rng.integers(grid, 90)),
            max_num_seqs=5,
            long_prefill_token_threshold=16 if rng.random() < 0.5 else None,
        )
        texts = [random_tokens(rng, 100) for _ in range(2)]
        sent: dict[str, tuple[list[int], SamplingParams, RequestOutput]] = {}
        for number in range(self.num_requests):
            prompt = texts[rng.integers(len(texts))][: rng.integers(1, 81)]
            if rng.random() < 0.5:
                prompt = prompt + random_tokens(rng, int(rng.integers(1, 20)))
            params = self._params(rng)
            name = f"request-{number}"
            output = engine.add_request(name, Prompt(np.array(prompt, np.int32)), params)
            sent[name] = prompt, params, output
            for _ in range(rng.integers(0, 6)):
                engine.step()
                engine.check_integrity()
            if rng.random() < 0.1:
                self.happened["aborts"] += engine.abort_request(name) is not None
            if rng.random() < 0.15 and engine.scheduler.num_running:
                preempt_last(engine)
            if rng.random() < 0.3:  # a next turn
                answered, _, output = sent[f"request-{rng.integers(number + 1)}"]
                texts.append((answered + output.outputs[0].token_ids + random_tokens(rng, 30))[:100])
        drain(engine)
        self.happened["hits"] += engine.manager.stats.hits
        self.happened["preemptions"] += engine.scheduler.num_preemptions
        for name, (prompt, params, output) in sent.items():
            expected = bits_alone_on_grid(self.model, grid, prompt, params)
            for ours, theirs in zip(bits_of(output), expected, strict=True):
                assert ours == theirs[: len(ours)], f"seed {self.seed}, {name}: other bits than alone"

    def _params(self, rng: np.random.Generator) -> SamplingParams:
        options = {"logprobs": 2, "ignore_eos": True, "max_tokens": int(rng.integers(1, 30))}
        match rng.integers(4):
            case 0:
                return SamplingParams(temperature=0.9, seed=int(rng.integers(99)), n=int(rng.integers(2, 4)), **options)
            case 1:
                return SamplingParams(temperature=0.0, repetition_penalty=1.3, **options)
        return SamplingParams(temperature=0.0, **options)


def bits_alone_on_grid(model: LoadedModel, grid: int, prompt: list[int], params: SamplingParams) -> Bits:
    engine = build_engine(
        model, num_blocks=256, block_size=4, state_block_size=grid, state_interval=2 * grid, enable_prefix_caching=False
    )
    [output] = complete(engine, [prompt], params, name="alone")
    return bits_of(output)


def test_whatever_happens_to_requests_their_bits_are_those_alone(falcon: LoadedModel) -> None:
    traffic = Traffic(falcon, seed=1, num_requests=9)
    traffic.run()
    assert all(traffic.happened.values()), traffic.happened


@pytest.mark.slow
@pytest.mark.parametrize(("family", "dtype"), [*zip(FAMILIES, cycle(("bfloat16", "float32")))])
def test_whatever_happens_in_much_traffic_their_bits_are_those_alone(
    tiny_models: TinyModels, family: str, dtype: Dtype
) -> None:
    happened = {"hits": 0, "preemptions": 0, "aborts": 0}
    for seed in range(3):
        traffic = Traffic(tiny_models.loaded(family, dtype), seed, num_requests=25, happened=happened)
        traffic.run()
    assert happened["preemptions"] > 10
    assert all(happened.values())


# ---------------------------------------------------------------------------------------- self-check


@pytest.mark.parametrize(("family", "dtype"), [*zip(FAMILIES, cycle(("float32", "bfloat16")))])
def test_the_self_check_finds_nothing_in_recurrent_layers(tiny_models: TinyModels, family: str, dtype: Dtype) -> None:
    assert find_inexactness(tiny_models.loaded(family, dtype)) is None


def test_the_self_check_notices_blocks_of_a_cell_that_was_not_computed_whole(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_all_be_found(monkeypatch)
    reason = find_inexactness(tiny_models.loaded("qwen3_next", "float32"))
    assert reason == "logits depend on what other requests left in the cache"


def test_the_self_check_notices_generated_tokens_that_are_computed_again_as_a_cell(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = StateRun.cells

    def on_the_grid_alone(run: StateRun, grid: int) -> list[tuple[int, int]]:
        return cells(replace(run, prompt_end=run.end), grid)

    monkeypatch.setattr(StateRun, "cells", on_the_grid_alone)
    reason = find_inexactness(tiny_models.loaded("falcon_h1", "float32"))
    assert reason == "logits of a request depend on whether it was preempted"
