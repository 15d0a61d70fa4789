"""Decoding steps that were recorded: which are replayed, and that nobody sees it in the answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from drafters import draft_as_told
from fake_device import FakeDevice
from foreword.model.gpu.decode_graphs import DECODE_SIZES, padded_size
from foreword.model.gpu.runner import DeviceRunner, RunnerLimits
from foreword.model.layout import LayoutOptions
from foreword.model.loader import LoadedModel
from foreword.model.storage import KVStorage
from foreword.request import Request, SamplingParams
from model.gpu.device_case import MAX_TOKENS, Setup, answers, random_work
from tiny_models import add, build_engine, random_tokens

FAMILIES = ["llama", "mistral", "gemma2", "gemma4_text", "odd_llama", "mqa_llama"]
"""Full layers and windows, softcap, sizes that no vector divides, gaps between blocks, one KV head."""


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_have_the_same_bits_with_graphs_without_and_on_the_plain_runner(
    plain_model: Callable[[str], LoadedModel], family: str
) -> None:
    model, work = plain_model(family), random_work(1, 14)
    with_graphs, without = Setup(model), Setup(model, sizes=())
    expected = answers(build_engine(model, block_size=4, num_blocks=256), work)
    assert answers(with_graphs.engine, work) == expected
    assert answers(without.engine, work) == expected
    assert with_graphs.num_replays > 5
    assert without.num_replays == 0


def test_decoding_is_replayed_for_batches_of_every_size(plain_model: Callable[[str], LoadedModel]) -> None:
    """Requests end one by one, so that steps of 20 to 1 requests use both graphs."""
    model = plain_model("llama")
    rng = np.random.default_rng(2)
    params = [SamplingParams(temperature=0.0, max_tokens=2 + number, ignore_eos=True) for number in range(20)]
    work = [(random_tokens(rng, int(rng.integers(1, 60))), own) for own in params]
    setup = Setup(model)
    assert answers(setup.engine, work) == answers(build_engine(model, block_size=4, num_blocks=256), work)
    assert setup.num_replays == 20, "every step but the first, which computes the prompts"


@pytest.mark.parametrize(
    ("num_rows", "expected"), [(1, 1), (3, 4), (4, 4), (5, 8), (17, 24), (249, 256), (256, 256), (257, None)]
)
def test_batches_are_rounded_up_to_the_next_size(num_rows: int, expected: int | None) -> None:
    assert padded_size(num_rows, DECODE_SIZES) == expected


def test_sizes_are_recorded_up_to_the_first_that_holds_all_requests() -> None:
    assert RunnerLimits(64, 10).sizes == [1, 2, 4, 8, 16]
    assert RunnerLimits(64, 8).sizes == [1, 2, 4, 8]
    assert RunnerLimits(64, 300).sizes == list(DECODE_SIZES)
    assert RunnerLimits(64, 300, ()).sizes == []
    assert RunnerLimits(64, 2, draft_tokens=3).sizes == [1, 2, 4, 8]


@pytest.mark.parametrize("family", FAMILIES)
def test_steps_with_drafts_are_replayed_and_have_the_same_bits(
    plain_model: Callable[[str], LoadedModel], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the drafts are right; a step has up to 4 rows of each request, and all of them fit into a graph."""
    model = plain_model(family)
    work = [
        (prompt, replace(params, prompt_logprobs=None, min_tokens=4, stop_token_ids=()))
        for prompt, params in random_work(4, 7)
    ]
    expected = answers(build_engine(model, block_size=4, num_blocks=256), work)
    known = {tuple(prompt): tokens for (prompt, _), (tokens, *_) in zip(work, expected, strict=True)}

    def half_right(request: Request, most: int) -> list[int]:
        prompt = tuple(request.sequence.token_ids[: request.num_prompt_tokens].tolist())
        guess = known[prompt][request.num_output_tokens :][:most]
        return [token + (at == 2) for at, token in enumerate(guess)]

    setup = Setup(model)
    drafting = draft_as_told(setup.engine, half_right, 3)
    computed_without = []
    plan = setup.runner._plan
    monkeypatch.setattr(setup.runner, "_plan", lambda *step: computed_without.append(step) or plan(*step))
    assert answers(setup.engine, work) == expected
    assert min(drafting.counts.num_accepted, drafting.counts.num_rejected) > 5
    assert setup.num_replays > 3
    assert len(computed_without) == 1, "the step that computes the prompts"


def test_more_requests_than_the_largest_graph_holds_are_computed_without_one(
    plain_model: Callable[[str], LoadedModel],
) -> None:
    model = plain_model("llama")
    rng = np.random.default_rng(3)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    work = [(random_tokens(rng, 5), params) for _ in range(17)]
    setup = Setup(model, sizes=(16,))
    assert answers(setup.engine, work) == answers(build_engine(model, block_size=4, num_blocks=256), work)
    assert setup.num_replays == 0


def test_sequences_longer_than_the_graphs_were_made_for_are_computed_without_one(
    plain_model: Callable[[str], LoadedModel],
) -> None:
    model = plain_model("llama")
    work = [(random_tokens(np.random.default_rng(4), MAX_TOKENS - 3), SamplingParams(temperature=0.0, max_tokens=10))]
    setup = Setup(model)
    assert answers(setup.engine, work) == answers(build_engine(model, block_size=4, num_blocks=256), work)
    assert setup.num_replays == 3


def test_padding_writes_to_the_scrap_block_alone(plain_model: Callable[[str], LoadedModel]) -> None:
    """One request decodes in a graph of 16 rows: in the whole pool, one slot of each layer changes."""
    setup = Setup(plain_model("llama"))
    storage = setup.storage
    params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    add(setup.engine, "one", random_tokens(np.random.default_rng(5), 6), params)
    setup.engine.step()
    setup.engine.step()
    tensors = [own for blocks in storage.blocks.values() for own in (blocks.keys, blocks.values)]
    for tensor in tensors:  # what earlier steps wrote would hide what this one writes
        tensor.fill_(7.0)
    num_replays = setup.num_replays
    setup.engine.step()
    assert setup.num_replays == num_replays + 1
    for tensor in tensors:
        written = (tensor != 7.0).flatten(2).any(-1)
        assert int(written[: storage.scrap_block].sum()) == 1
        assert int(written[storage.scrap_block].sum()) == 1


@pytest.mark.parametrize("family", ["gpt_oss", "lfm2"])
def test_models_that_cannot_be_recorded_run_without_graphs(
    plain_model: Callable[[str], LoadedModel], family: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, work = plain_model(family), random_work(7, 6)
    setup = Setup(model)
    assert setup.runner.graphs is None
    assert "not recorded" in caplog.text
    assert answers(setup.engine, work) == answers(build_engine(model, block_size=4, num_blocks=256), work)


def test_a_device_that_refuses_to_record_is_used_without_graphs(
    plain_model: Callable[[str], LoadedModel], caplog: pytest.LogCaptureFixture
) -> None:
    model = plain_model("llama")
    storage = KVStorage(model.plan_layout(LayoutOptions(4)), 8, model.device)
    device = FakeDevice(cannot_capture="out of memory")
    runner = DeviceRunner(model, storage, device, RunnerLimits(64, 16))
    assert runner.graphs is None
    assert "RuntimeError: out of memory" in caplog.text
