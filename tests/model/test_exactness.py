"""Logits have the same bits whether a prefix was hit or missed, however prefill was cut, whoever shares the batch.

The real runner runs; a subclass only writes down what `forward` returned, by request and position.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from doors import runner_of
from foreword.batch import Batch
from foreword.config import ModelConfig
from foreword.engine import Engine
from foreword.kernels import reference
from foreword.kernels.select import ReferenceAttention, make_kernel
from foreword.model.loader import LoadedModel, load_model
from foreword.model.passes import RowPadding
from foreword.model.runner import ModelRunner
from foreword.model.self_check import find_inexactness
from lanes import slow, slow_half
from tiny_models import (
    Recipe,
    TinyModels,
    add,
    build_engine,
    complete,
    drain,
    greedy,
    in_codes,
    random_tokens,
    save_model,
)

FAMILIES = ["llama", "qwen2", "qwen3_moe", "gpt_oss", "gemma2", "llama4_text", "phi3", "odd_llama", "mqa_llama"]
FAMILIES += ["deepseek_v3", "wide_deepseek"]
"""With tied embeddings, experts, sinks, softcap, chunks, heads of 16 and 20, an intermediate size of 100, latent KV."""
RECURRENT = ["mamba2", "qwen3_next", "falcon_h1", "granitemoehybrid", "bamba", "lfm2"]
NUM_TOKENS = 4
BLOCK_SIZE = 4
Logits = dict[int, Tensor]
"""Position -> logits [vocab] of the token that follows it."""


class RecordingRunner(ModelRunner):
    """Remembers the logits of every position that was computed to its logits."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.logits: dict[str, Logits] = {}

    def forward(self, batch: Batch, logit_rows: np.ndarray, columns: np.ndarray | None = None) -> Tensor:
        logits = super().forward(batch, logit_rows, columns)
        owners = np.searchsorted(batch.query_starts, logit_rows, side="right") - 1
        for owner, row, values in zip(owners.tolist(), logit_rows.tolist(), logits, strict=True):
            own = self.logits.setdefault(batch.entries[owner].request.request_id, {})
            own[int(batch.positions[row])] = values.clone()
        return logits


class Recorded:
    """An engine, and the logits of every request that it ran."""

    def __init__(self, model: LoadedModel, **options: Any) -> None:
        options = {"num_blocks": 256, "block_size": BLOCK_SIZE, **options}
        self.engine: Engine = build_engine(model, runner_class=RecordingRunner, **options)
        self.logits = runner_of(self.engine).logits

    def run(self, name: str, prompt: list[int], num_tokens: int = NUM_TOKENS) -> list[int]:
        """Run one prompt alone; its answer."""
        [output] = complete(self.engine, [prompt], greedy(num_tokens), name=name)
        return output.outputs[0].token_ids


def assert_same_bits(ours: Logits, theirs: Logits, first: int | None = None, count: int = NUM_TOKENS) -> None:
    """Of `count` positions from `first` on: no others were computed to their logits here; there, there may be more.

    Without `first`: both have the same positions.
    """
    assert ours
    assert sorted(ours) == (sorted(theirs) if first is None else list(range(first, first + count)))
    for position, logits in ours.items():
        assert torch.equal(logits, theirs[position]), f"logits after position {position} differ"


CASES = [
    *itertools.product(FAMILIES, ["float32", "bfloat16"], ["cpu"]),
    *itertools.product(["gpt_oss", "mqa_llama", "bloom", "mpt"], ["float32", "bfloat16"], ["reference"]),
    *itertools.product(["gpt_oss", "odd_llama", "qwen3_moe"], ["float16"], ["reference"]),
    *itertools.product(["qwen2", "gemma2", "odd_llama", "llama4_text"], ["float32", "bfloat16"], ["cpu"], ["int8"]),
    *itertools.product(["qwen2"], ["float32", "bfloat16"], ["reference"], ["int8"]),
]
"""In pairs of types, for `slow_half`: `make test` runs each family in one of them."""
IN_BOTH_TYPES = pytest.mark.parametrize("model", slow_half(CASES), ids="-".join, indirect=True, scope="module")


@pytest.fixture(scope="module", params=[case for n, case in enumerate(CASES) if n % 4 in (0, 3)], ids="-".join)
def model(request: pytest.FixtureRequest, tiny_models: TinyModels) -> LoadedModel:
    family, dtype, kernel, *coded = request.param
    loaded = tiny_models.loaded(family, dtype)
    if coded:
        if loaded.device.type != "cpu":
            pytest.skip("a GPU has no KV in codes")
        loaded = in_codes(loaded)
    name = kernel if loaded.device.type == "cpu" else "auto"  # plain torch promises no bits on a GPU
    return replace(loaded, kernel=make_kernel(name, loaded.device))


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    """Longer than one chunk of KV and than two tiles of queries."""
    return random_tokens(np.random.default_rng(11), 301)


@pytest.fixture(scope="module")
def alone(model: LoadedModel, prompt: list[int]) -> Logits:
    """What every other way of computing has to reproduce: one request, one chunk, no cache.

    It has the logits of all positions: asking for them, which nothing else here does, may not show either.
    """
    recorded = Recorded(model, enable_prefix_caching=False)
    complete(recorded.engine, [prompt], greedy(NUM_TOKENS, prompt_logprobs=1), name="alone")
    assert len(recorded.logits["alone-0"]) == 300 + NUM_TOKENS
    return recorded.logits["alone-0"]


@pytest.fixture(scope="module")
def cold(model: LoadedModel) -> Recorded:
    """Finds nothing of what it ran before."""
    return Recorded(model, enable_prefix_caching=False)


@IN_BOTH_TYPES
def test_a_hit_of_every_length_and_block_size_gives_the_bits_of_a_miss(
    model: LoadedModel, prompt: list[int], alone: Logits
) -> None:
    """Inside, at and beyond a chunk of KV, and of all but the last token."""
    for num_shared, block_size in ((60, 4), (256, 32), (260, 1), (301, 4)):
        recorded = Recorded(model, block_size=block_size, num_blocks=1024 // block_size)
        recorded.run("miss", prompt[:num_shared], 1)
        recorded.run("hit", prompt)
        assert recorded.engine.manager.stats.hits == min(num_shared // block_size * block_size, 300)
        assert_same_bits(recorded.logits["miss-0"], alone, num_shared - 1, 1)
        assert_same_bits(recorded.logits["hit-0"], alone, 300)


@IN_BOTH_TYPES
@pytest.mark.parametrize(("budget", "num_tokens"), [(7, 40), (130, 301)])
def test_chunks_do_not_show(model: LoadedModel, prompt: list[int], alone: Logits, budget: int, num_tokens: int) -> None:
    recorded = Recorded(model, max_num_batched_tokens=budget)
    recorded.run("chunked", prompt[:num_tokens], 1)
    assert_same_bits(recorded.logits["chunked-0"], alone, num_tokens - 1, 1)


@IN_BOTH_TYPES
def test_the_other_requests_of_a_batch_do_not_show(model: LoadedModel, prompt: list[int], alone: Logits) -> None:
    """Before, beside and after it: prompts, decodes, and a request that shares its prefix in the same batch."""
    rng = np.random.default_rng(12)
    recorded = Recorded(model, max_num_batched_tokens=350)
    for number, length in enumerate((1, 70, 9)):
        add(recorded.engine, f"early-{number}", random_tokens(rng, length), greedy(8))
    recorded.engine.step()
    add(recorded.engine, "in company", prompt, greedy(NUM_TOKENS))
    add(recorded.engine, "same prompt", prompt, greedy(NUM_TOKENS))
    add(recorded.engine, "same beginning", prompt[:130] + random_tokens(rng, 33), greedy(NUM_TOKENS))
    drain(recorded.engine)
    assert recorded.engine.manager.stats.hits == 300 + 128
    assert_same_bits(recorded.logits["in company"], alone, 300)
    assert_same_bits(recorded.logits["same prompt"], alone, 300)


@IN_BOTH_TYPES
def test_kv_written_while_decoding_gives_the_bits_of_prefill(
    model: LoadedModel, prompt: list[int], cold: Recorded
) -> None:
    """Turn 2 reads turn 1's answer from the cache, which was decoded alone or beside that of another conversation."""
    rng = np.random.default_rng(13)
    warm = Recorded(model)
    firsts = [prompt[:101], prompt[20:43], prompt[40:63]]
    answers = complete(warm.engine, firsts[:1], greedy(12), name="alone")
    answers += complete(warm.engine, firsts[1:], greedy(12), name="in company")
    for number, (first, answer) in enumerate(zip(firsts, answers, strict=True)):
        second = first + answer.outputs[0].token_ids + random_tokens(rng, 5)
        warm.run(f"turn 2 of {number}", second)
        cold.run(f"turn 2 of {number}", second)
        name = f"turn 2 of {number}-0"
        assert_same_bits(warm.logits[name], cold.logits[name], len(second) - 1)
    assert warm.engine.manager.stats.hits == 112 + 2 * 32, "the answers' blocks were not hit"


def test_preemption_does_not_show(model: LoadedModel, prompt: list[int], cold: Recorded) -> None:
    prompts = [prompt[start : start + 18] for start in (0, 50, 100)]
    small = Recorded(model, num_blocks=14, max_num_batched_tokens=25)
    complete(small.engine, prompts, greedy(20), name="tight")
    assert small.engine.scheduler.num_preemptions > 0
    if small.engine.manager.has_one_full_group:  # else who comes back finds its blocks taken by the others' windows
        assert small.engine.manager.stats.preempted_hits > 0
    for number, own in enumerate(prompts):
        cold.run(f"own {number}", own, 20)
        assert_same_bits(small.logits[f"tight-{number}"], cold.logits[f"own {number}-0"], 17, 20)


# ----------------------------------------------------------------------------------- recurrent layers


@pytest.fixture(
    params=[
        ("mamba2", "float32"),
        ("qwen3_next", "bfloat16"),
        ("falcon_h1", "float32", "int8"),
        ("lfm2", "bfloat16"),
        *slow(
            *zip(RECURRENT, itertools.cycle(("bfloat16", "float32"))),
            ("bamba", "bfloat16"),
            ("granitemoehybrid", "bfloat16"),
            ("mamba2", "float16"),
            ("falcon_h1", "float16"),
            ("qwen3_next", "bfloat16", "int8"),
        ),
    ],
    ids="-".join,
)
def recurrent(request: pytest.FixtureRequest, tiny_models: TinyModels) -> LoadedModel:
    family, dtype, *coded = request.param
    loaded = tiny_models.loaded(family, dtype)
    if coded and loaded.device.type != "cpu":
        pytest.skip("a GPU has no KV in codes")
    return in_codes(loaded) if coded else loaded


def test_cells_give_equal_bits_whatever_was_hit_and_however_steps_were_cut(
    recurrent: LoadedModel, prompt: list[int]
) -> None:
    """Of prefill: a state behind generated tokens comes from another path (docs/decisions/0007)."""
    options = {"block_size": 4, "state_block_size": 12, "state_interval": 24}
    cold = Recorded(recurrent, enable_prefix_caching=False, **options)
    prompt = prompt[:200]
    cold.run("alone", prompt)
    expected = cold.logits["alone-0"]
    for num_shared in (24, 199):
        warm = Recorded(recurrent, **options)
        warm.run("other", prompt[:num_shared], 1)
        warm.run("hit", prompt)
        assert warm.engine.manager.stats.hits == num_shared // 12 * 12
        assert_same_bits(warm.logits["hit-0"], expected, 199)
    cut = Recorded(recurrent, max_num_batched_tokens=13, **options)
    add(cut.engine, "beside", prompt[5:40], greedy(20))
    cut.engine.step()
    cut.run("cut", prompt)
    assert_same_bits(cut.logits["cut-0"], expected, 199)


# ------------------------------------------------------------------------------------------- threads


@pytest.mark.slow
@pytest.mark.usefixtures("num_threads")
def test_several_threads_keep_the_bits(model: LoadedModel, prompt: list[int], alone: Logits) -> None:
    torch.set_num_threads(3)
    warm = Recorded(model, max_num_batched_tokens=37)
    warm.run("miss", prompt)
    outputs = complete(warm.engine, [prompt, prompt[:100], prompt[:77]], greedy(NUM_TOKENS), name="hit")
    assert outputs[0].num_cached_tokens == 300
    assert_same_bits(warm.logits["miss-0"], alone, 300)
    assert_same_bits(warm.logits["hit-0"], alone, 300)
    assert find_inexactness(model) is None


# ---------------------------------------------------------------------------------------- self-check


@IN_BOTH_TYPES
def test_the_self_check_finds_nothing(model: LoadedModel) -> None:
    assert find_inexactness(model) is None


@pytest.mark.usefixtures("on_cpu")
def test_the_self_check_notices_matrix_products_of_too_few_rows(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_models.loaded("gpt2")  # its matrices are no nn.Linear, hence not packed
    monkeypatch.setattr(RowPadding, "for_model", classmethod(lambda cls, *_, **__: cls(1, 1)))
    assert find_inexactness(model) is not None


def test_the_self_check_notices_chunks_of_kv_that_are_not_at_fixed_positions(
    tiny_models: TinyModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    class MovingChunks(ReferenceAttention):
        def attend(self, *args: Any) -> Tensor:
            tiles: list[reference.Tile] = args[2]
            monkeypatch.setattr(reference, "CHUNK_TOKENS", 8 if tiles[0].shape.first_position == 0 else 12)
            return super().attend(*args)

    model = replace(tiny_models.loaded("llama"), kernel=MovingChunks())
    assert find_inexactness(model) == "logits depend on how prefill is chunked"


def test_the_self_check_notices_that_neighbours_matter(tiny_models: TinyModels) -> None:
    """KV that is off by little for every request but the first of a batch, as a wrong slot would be."""

    class Nearsighted(ReferenceAttention):
        def plan(self, batch: Batch, *args: Any) -> list[reference.Tile]:
            tiles = super().plan(batch, *args)
            if len(batch.query_starts) > 2:
                tiles[0].seen_to[:, -1] -= 1  # the last query does not see itself
            return tiles

    reason = find_inexactness(replace(tiny_models.loaded("llama"), kernel=Nearsighted()))
    assert reason == "logits depend on cache hits or on the other requests of a batch"


def test_the_self_check_serves_models_with_few_positions(tmp_path: Path) -> None:
    for positions in (2, 16, 17):
        folder = save_model(tmp_path / f"{positions}", Recipe("llama", {"max_position_embeddings": positions}))
        assert find_inexactness(load_model(ModelConfig(str(folder)))) is None


@pytest.mark.parametrize(("inner", "num_threads"), [(896, 1), (2048, 1), (2048, 2), (8192, 1), (4864, 2)])
def test_a_lone_row_is_padded_to_as_many_as_its_bits_need(num_threads: int, inner: int) -> None:
    """oneDNN's bfloat16 product of one row, 2,048 or more long, rounds differently from that of several."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(896, inner, generator=generator).mul_(0.02).bfloat16()
        rows = torch.randn(128, inner, generator=generator).bfloat16()
        together = torch.nn.functional.linear(rows, weight)
        num_rows = RowPadding.for_model([inner, 896], torch.bfloat16, num_threads)(1)
        for start in range(64):
            alone = torch.nn.functional.linear(rows[start : start + num_rows], weight)
            assert torch.equal(alone, together[start : start + num_rows])
    finally:
        torch.set_num_threads(threads_before)
